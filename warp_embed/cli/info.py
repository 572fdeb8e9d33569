"""Describe a container: dimensions, encodings, sizes."""
from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

from warp_embed.cli.common import add_json, add_model, print_json
from warp_embed.errors import WarpError

if TYPE_CHECKING:
    from pathlib import Path

    from warp_embed.runtime.manifest import Manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from warp_embed.runtime.manifest import Manifest
    from warp_embed.runtime.paths import find_model
    facts = describe(Manifest.read(find_model(args.model), weights=False))
    if args.json:
        print_json(facts)
    else:
        print("\n".join(lines(facts)))
    return 0


def describe(manifest: Manifest) -> dict[str, Any]:
    """The facts about a container, as plain values."""
    from pathlib import Path

    from warp_embed.runtime.tokenizer import RANK_FILES
    config, experts, folder = manifest.config, manifest.experts, Path(manifest.directory)
    trunk, counts = Counter[str](), Counter[str]()
    for entry in manifest.text_entries():
        trunk[entry.encoding.name] += entry.payload_bytes + entry.scale_bytes
        counts[entry.encoding.name] += 1
    n_moe = len(config.moe_layers)
    expert_weights = 3 * config.moe_inter * config.expert_width
    trunk_weights = sum(entry.elements for entry in manifest.text_entries())
    facts: dict[str, Any] = {
        "path": str(folder), "arch": manifest.arch, "format_version": manifest.version,
        "parameters": trunk_weights + n_moe * config.n_experts * expert_weights,
        "active_parameters": trunk_weights + n_moe * config.top_k * expert_weights,
        "layers": config.n_layers, "kda_layers": len(config.kda_layers), "moe_layers": n_moe,
        "hidden": config.hidden, "vocab": config.vocab, "experts": config.n_experts, "top_k": config.top_k,
        "shared_experts": config.n_shared, "context_max": config.context_max,
        "trunk": {name: {"tensors": counts[name], "bytes": trunk[name]} for name in sorted(trunk)},
        "expert_encoding": experts.encoding.name if experts else None,
        "expert_bytes": sum(bank.nbytes for bank in manifest.banks.values()),
        "text": any((folder / name).is_file() for name in RANK_FILES), "chat": has_chat(folder, config.vocab),
    }
    return facts


def has_chat(folder: Path, vocab: int) -> bool:
    """Whether a chat format is known for the container."""
    from warp_embed.runtime.chatformat import format_of
    from warp_embed.runtime.tokenizer import Tokenizer
    try:
        return format_of(folder, Tokenizer(folder, vocab)) is not None
    except (WarpError, OSError):
        return False


def lines(facts: dict[str, Any]) -> list[str]:
    from warp_embed.units import format_bytes
    trunk = ", ".join(f"{name} {format_bytes(part['bytes'])} in {part['tensors']}" for name, part in
                      facts["trunk"].items())
    n_records = facts["moe_layers"] * facts["experts"]
    experts = "none" if not n_records else (
        f"{facts['experts']} in each of {facts['moe_layers']} layers, {facts['top_k']} used per token and "
        f"{facts['shared_experts']} shared; {facts['expert_encoding']}, {format_bytes(facts['expert_bytes'])}, "
        f"{format_bytes(facts['expert_bytes'] // n_records)} each")
    rows = {
        "path": facts["path"],
        "model": f"{facts['arch'] or 'unnamed'}, {_count(facts['parameters'])} parameters, "
                 f"{_count(facts['active_parameters'])} used per token",
        "layers": f"{facts['layers']}: {facts['kda_layers']} KDA, {facts['layers'] - facts['kda_layers']} MLA; "
                  f"width {facts['hidden']}, vocabulary {facts['vocab']}",
        "experts": experts,
        "trunk": trunk,
        "format": f"version {facts['format_version']}",
        "text": ("tokenizer" if facts["text"] else "no tokenizer: runs on ids")
                + (", chat format" if facts["chat"] else ""),
    }
    return [f"{name:<8} {value}" for name, value in rows.items()]


def _count(n: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return str(n)
