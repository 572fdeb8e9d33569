"""Which experts were used most, remembered between two openings of a model: a hint, which never changes a result.

A file for each model, in the user's cache folder: magic, version, layers with experts, experts of a layer, CRC-32 of
what follows, all u32 but the magic; then 32 bytes of the model's fingerprint, and a u16 for every expert: how often it
was used, fading. Whatever is wrong with such a file, it is as if there were none.
"""
from __future__ import annotations

import logging
import os
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from warp_embed.runtime.paths import cache_dir
from warp_embed.runtime.statefile import replacing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warp_embed._experts import ExpertStore
    from warp_embed.runtime.manifest import Manifest

Uses = NDArray[np.uint16]           # [layers with experts][experts]

START = struct.Struct("<8sIIII")
MAGIC, VERSION = b"WEHOT\0\0\0", 1
STEPS = 16                          # the hottest sixteenth of what fits is read first, of all layers
CONTAINER_FILE = "usage.waste"      # what WARP leaves in a container
CONTAINER_START, CONTAINER_MAGIC = struct.Struct("<IIQ"), int.from_bytes(b"WUSG", "little")
CONTAINER_ENTRY = np.dtype([("layer", "<u2"), ("expert", "<u2"), ("hits", "<u4"), ("seen", "<u4"), ("next", "<u4")])

log = logging.getLogger("warp_embed")


def path_of(fingerprint: str) -> Path:
    return cache_dir() / "hot" / f"{fingerprint}.hot"


def read(fingerprint: str, layers: Sequence[int], n_experts: int, container: str) -> Uses | None:
    """What was remembered of this model, else what its container brings along; None: nothing that can be used."""
    try:
        return _read_own(fingerprint, len(layers), n_experts)
    except (OSError, ValueError):
        pass
    try:
        return _read_container(os.path.join(container, CONTAINER_FILE), layers, n_experts)
    except (OSError, ValueError):
        return None


def remembered(manifest: Manifest) -> Uses | None:
    """`read` for a model that is not open; None also when its weights are not there."""
    from warp_embed._store import Trunk
    from warp_embed.runtime.fingerprint import fingerprint

    small = [entry for entry in manifest.text_entries() if entry.rows == 1]
    try:
        digest = fingerprint(manifest, Trunk(os.path.join(str(manifest.directory), "trunk.bin"), small))
    except (OSError, ValueError):
        return None
    return read(digest, manifest.config.moe_layers, manifest.config.n_experts, str(manifest.directory))


def write(fingerprint: str, uses: Uses) -> None:
    """Remember; what cannot be written is not remembered."""
    body = bytes.fromhex(fingerprint) + uses.astype("<u2").tobytes()
    try:
        path = path_of(fingerprint)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(path) as file:
            file.write(START.pack(MAGIC, VERSION, *uses.shape, zlib.crc32(body)) + body)
    except Exception as error:      # not OSError alone: at the end of an interpreter anything may be gone
        log.info("which experts were used most is not remembered: %s", error)


def preload(store: ExpertStore, layers: Sequence[int], uses: Uses) -> int:
    """Have the cache count these uses as its own, half as much, and read what was used most in the background, as far
    as there is room. How many records that are."""
    store.recall(dict(zip(layers, uses >> 1, strict=True)))
    flat = uses.reshape(-1)
    order = np.argsort(flat, kind="stable")[::-1][:store.slots]
    order = order[flat[order] > 0]
    taken = 0
    for step in np.array_split(order, STEPS):
        for row in np.unique(step // uses.shape[1]):
            taken += store.hint(layers[row], step[step // uses.shape[1] == row] % uses.shape[1])
    return taken


def _read_own(fingerprint: str, n_layers: int, n_experts: int) -> Uses:
    digest = bytes.fromhex(fingerprint)
    nbytes = START.size + len(digest) + 2 * n_layers * n_experts
    raw = _read_most(path_of(fingerprint), nbytes + 1)
    body = raw[START.size:]
    if (len(raw) != nbytes or not body.startswith(digest)
            or START.unpack_from(raw) != (MAGIC, VERSION, n_layers, n_experts, zlib.crc32(body))):
        raise ValueError("of another model, or damaged")
    return np.frombuffer(body, "<u2", offset=len(digest)).astype(np.uint16).reshape(n_layers, n_experts)


def _read_container(path: str, layers: Sequence[int], n_experts: int) -> Uses:
    """Entries for experts that do not exist are left out; the file is as untrusted as the rest of a container."""
    raw = _read_most(path, CONTAINER_START.size + CONTAINER_ENTRY.itemsize * len(layers) * n_experts)
    if len(raw) < CONTAINER_START.size or CONTAINER_START.unpack_from(raw)[:2] != (CONTAINER_MAGIC, 1):
        raise ValueError("not a usage file")
    entries = np.frombuffer(raw[CONTAINER_START.size:][:(len(raw) - CONTAINER_START.size) // CONTAINER_ENTRY.itemsize
                                                       * CONTAINER_ENTRY.itemsize], CONTAINER_ENTRY)
    row = np.searchsorted(layers, entries["layer"])
    real = (row < len(layers)) & (entries["expert"] < n_experts)
    real[real] = np.asarray(layers)[row[real]] == entries["layer"][real]
    uses = np.zeros((len(layers), n_experts), np.uint16)
    uses[row[real], entries["expert"][real]] = np.minimum(entries["hits"][real], np.iinfo(np.uint16).max)
    return uses


def _read_most(path: str | Path, nbytes: int) -> bytes:
    """At most so many bytes of a regular file."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
                         | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        return file.read(nbytes) or b""
