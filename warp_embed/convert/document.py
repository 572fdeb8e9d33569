"""manifest.json of what a plan writes (docs/format.md)."""
from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from warp_embed.convert.codebooks import pack_books
from warp_embed.convert.encode import INDEX_BLOCK
from warp_embed.convert.plan import Plan, trunk_bytes
from warp_embed.convert.source import Source, is_kimi_k3
from warp_embed.runtime.manifest import ExpertFormat, TrunkEntry


def manifest(source: Source, plan: Plan, trunk_sums: Mapping[str, Sequence[int]],
             books: Mapping[int, np.ndarray]) -> dict[str, Any]:
    """The document; without checksums for tensors and layers of which there are none yet."""
    config = source.config
    architectures = config.get("architectures")
    arch = architectures[0] if isinstance(architectures, list) and architectures else "unknown"
    if config.get("model_type") == "kimi_linear":           # of the text model, also of K3's
        arch = "kimi-k3" if is_kimi_k3(config) else "kimi-linear"
    document: dict[str, Any] = {"format_version": plan.format_version, "arch": arch, "tensor_prefix": source.prefix,
                                "config": config}
    if plan.form is not None:
        document["expert_quant"] = expert_manifest(plan.form)
        document["layers"] = {str(layer): _layer(plan, layer, books.get(layer)) for layer in plan.moe_layers}
    document["trunk"] = [_tensor(entry, *trunk_sums.get(entry.name, ())) for entry in plan.trunk]
    return document


def _tensor(entry: TrunkEntry, crc: int | None = None, scale_crc: int | None = None) -> dict[str, Any]:
    """An element of the trunk array; the checksums are ours, other readers ignore them."""
    out: dict[str, Any] = {"name": entry.name, "fmt": int(entry.encoding), "off": entry.offset,
                           "shape": list(entry.shape)}
    if entry.groups:
        out |= {"group": entry.group, "scale_off": entry.scale_offset}
    out["bytes"] = trunk_bytes(entry)
    if crc is None:
        return out
    out["crc32"] = crc
    return out | {"scale_crc32": scale_crc} if entry.groups else out


def expert_manifest(form: ExpertFormat) -> dict[str, Any]:
    if not form.encoding.is_vq:
        return {"fmt": form.encoding.name, "group": form.group}
    return {"fmt": form.encoding.name, "stages": form.stages, "vec_dim": form.vec_dim, "entries": form.entries,
            "index_block": INDEX_BLOCK, "index_bits": form.index_bits,
            "bits_per_weight": form.stages * form.index_bits / form.vec_dim}


def _layer(plan: Plan, layer: int, books: np.ndarray | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"file": f"experts-L{layer}.bin", "experts": plan.n_experts, "bytes": plan.bank_bytes,
                             "codebook_base": plan.base(layer)}
    if books is not None:
        entry["codebooks_crc32"] = zlib.crc32(pack_books(books, plan.base(layer)))
    return entry
