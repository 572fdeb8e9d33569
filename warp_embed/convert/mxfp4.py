"""Experts as Kimi-K3 releases them: E2M1 codes, two in a byte, and an E8M0 scale for each 32 inputs."""
from __future__ import annotations

import numpy as np

from warp_embed._kernels import Matrix
from warp_embed.errors import FormatError
from warp_embed.runtime.manifest import MXFP4_GROUP, Encoding

NAN_SCALE = 255
FIRST_OVERFLOW = 253            # the smallest scale under which a code is beyond f32
SCALE_DTYPES = ("U8", "F8_E8M0")


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """f32 [rows, cols] of codes uint8 [rows, cols / 2] and scales uint8 [rows, cols / 32]."""
    rows, half = codes.shape
    values: np.ndarray = Matrix(Encoding.MXFP4, rows, 2 * half, codes, scales, MXFP4_GROUP).decode()
    return values


def check_values(codes: np.ndarray, scales: np.ndarray, layer: int, expert: int, matrix: str,
                 row0: int = 0) -> None:
    """FormatError with layer and expert for the scale that is NaN and for a code whose value is beyond f32."""
    if scales.max(initial=0) < FIRST_OVERFLOW:
        return
    wide = scales.repeat(MXFP4_GROUP // 2, axis=1)                    # the scale of every byte
    magnitude = np.maximum(codes & 7, codes >> 4 & 7)           # 6 and 7 stand for 4 and 6, 4 and 5 for 2 and 3
    bad = (wide == NAN_SCALE) | (wide == 254) & (magnitude >= 4) | (wide == FIRST_OVERFLOW) & (magnitude >= 6)
    if not bad.any():
        return
    row, byte = np.argwhere(bad)[0]
    scale = int(wide[row, byte])
    why = "is NaN" if scale == NAN_SCALE else f"takes the codes in byte {byte} beyond f32"
    raise FormatError(f"layer {layer} expert {expert} {matrix}: row {row0 + row}: the scale {scale} {why}", layer=layer,
                      expert=expert, field=matrix)
