"""A release of which only config.json is here: what converting it would take, before it is downloaded."""
from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from warp_embed.convert.checkpoint import INDEX
from warp_embed.convert.document import manifest
from warp_embed.convert.estimate import Estimate, estimate, measure
from warp_embed.convert.mxfp4 import decode
from warp_embed.convert.plan import Plan, make_plan
from warp_embed.convert.source import (
    TRUNK,
    Expert,
    Shard,
    Source,
    container_config,
    fingerprint_of,
    is_mxfp4_release,
    open_source,
    refuse_unsupported,
    text_model,
)
from warp_embed.convert.threads import usable_cores
from warp_embed.convert.writer import json_bytes, write_file
from warp_embed.errors import FormatError
from warp_embed.runtime.config import ModelConfig, TensorSpec
from warp_embed.runtime.fields import load_object
from warp_embed.runtime.manifest import MXFP4_GROUP, Manifest

JSON_CAP = 100_000_000


def outline(src: str | os.PathLike[str], dst: str | os.PathLike[str], *, trunk: str = "auto", experts: str = "auto",
            threads: int | None = None) -> tuple[Plan, Estimate]:
    """Write a container without weights, for `plan`; its conversion's plan and what that would take.

    Parameters
    ----------
    src : path
        A checkpoint, of which config.json is enough, or a container.
    dst : path
        Must not exist; gets manifest.json and nothing else.
    trunk, experts, threads
        As for `convert`. The time is measured on random weights where the source's are not there.

    Raises
    ------
    FormatError, UnsupportedModel, FileExistsError, OSError
                        as `convert`.
    """
    src, dst = Path(src), Path(os.path.abspath(dst))
    if os.path.lexists(dst):
        raise FileExistsError(f"{dst} exists; remove it or choose another name")
    only_config = (src / "config.json").is_file() and not any(
        (src / name).exists() for name in ("manifest.json", INDEX)) and not any(src.glob("*.safetensors"))
    threads = threads or usable_cores()
    with Outline(src) if only_config else open_source(src) as source:
        plan = make_plan(source, trunk, experts)
        with ThreadPoolExecutor(threads, thread_name_prefix="warp-embed-convert") as pool:
            seconds = measure(source, plan, set(), pool, threads)
        found = estimate(source, plan, set(), 0, dst, threads, seconds)
        dst.mkdir(parents=True)
        write_file(dst / "manifest.json", json_bytes(manifest(source, plan, {}, {})))
    Manifest.read(dst, weights=False)
    return plan, found


class Outline(Source):
    """Shapes that follow from a config. Weights are random numbers: good for measuring how long they take."""

    in_shards = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.warnings: list[str] = []
        raw, blob = load_object(str(directory / "config.json"), JSON_CAP)
        refuse_unsupported(raw)
        text, self.prefix = text_model(raw)
        self.config = container_config(text, self.warnings)
        self.model = ModelConfig.parse(raw, str(directory / "config.json"))
        self.has_mxfp4 = is_mxfp4_release(raw) and self.model.n_experts > 0
        if self.has_mxfp4 and any(cols % MXFP4_GROUP for _, cols in self.expert_shapes()):
            raise FormatError(f"experts of this size have no MXFP4: their columns are no multiple of {MXFP4_GROUP}",
                              field="quantization_config", file=str(directory / "config.json"))
        self.trunk = {spec.name: self._shape(spec) for spec in self.model.tensors(self.prefix)}
        self.fingerprint = fingerprint_of([blob], [])
        rng = np.random.default_rng(0)
        self._numbers = rng.standard_normal(1 << 16, np.float32)
        self._codes = rng.integers(0, 256, 1 << 16, np.uint8)
        self._scales = rng.integers(118, 124, 1 << 16, np.uint8)

    def _shape(self, spec: TensorSpec) -> tuple[int, ...]:
        model = self.model
        if spec.shape is not None:
            return spec.shape
        if spec.name.endswith("_conv1d.weight"):
            return spec.min_elements // model.conv, 1, model.conv
        if spec.name.endswith("A_log") and model.full_rank_gate:    # K3 pads it
            return (max(spec.min_elements, model.kda_dim),)
        return (1, spec.min_elements) if spec.name.endswith("_proj.weight") else (spec.min_elements,)

    def shards(self) -> list[Shard]:
        """As if each layer were in a file of its own."""
        trunk = sum(2 * math.prod(shape) for shape in self.trunk.values())
        layers = self.model.moe_layers
        weights = self.model.n_experts * sum(rows * cols for rows, cols in self.expert_shapes())
        experts = weights // 2 + weights // MXFP4_GROUP if self.has_mxfp4 else 2 * weights
        share = trunk // (len(layers) + 1)
        return [Shard(self.directory / "rest", trunk - len(layers) * share, frozenset({TRUNK}), False),
                *(Shard(self.directory / str(layer), experts + share, frozenset({TRUNK, layer}), False)
                  for layer in layers)]

    def _rows(self, name: str, row0: int, row1: int) -> np.ndarray:
        return np.resize(self._numbers, (row1 - row0, self.trunk[name][-1]))

    def expert_rows(self, matrix: int, row0: int, row1: int) -> np.ndarray:
        cols = self.expert_shapes()[matrix][1]
        if self.has_mxfp4:
            return decode(*self.expert_codes(row1 - row0, cols))
        return np.resize(self._numbers, (row1 - row0, cols))

    def expert_codes(self, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
        return np.resize(self._codes, (rows, cols // 2)), np.resize(self._scales, (rows, cols // MXFP4_GROUP))

    def expert(self, layer: int, expert: int) -> Expert:
        return _RandomExpert(self)

    def close(self) -> None:
        pass


class _RandomExpert(Expert):
    def __init__(self, source: Outline) -> None:
        self._source = source

    def rows(self, matrix: int, row0: int, row1: int) -> np.ndarray:
        return self._source.expert_rows(matrix, row0, row1)

    def packed(self, matrix: int) -> tuple[np.ndarray, np.ndarray]:
        return self._source.expert_codes(*self._source.expert_shapes()[matrix])
