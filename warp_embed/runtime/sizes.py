"""Sizes of a container's parts, from its manifest."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warp_embed.runtime.manifest import Manifest

CHUNK_MIN = 16
FLOOR_THREADS = 8               # the floor is enough for so many threads


@dataclass(frozen=True)
class Sizes:
    """Sizes of one container's parts, some of them as functions of what is still open; all in bytes."""

    path: str
    trunk: int
    trunk_read: int                             # what a token reads of it: one row of the embedding, all the rest
    codebooks: int
    record: int
    n_records: int
    n_experts: int                              # of a layer
    top_k: int                                  # experts of a token and layer
    token_records: int                          # experts of a token, all layers
    state: Callable[[int, str], int]            # (context, kv)
    checkpoint: int
    scratch: Callable[[int, int, int], int]     # (context, chunk, threads)
    cache: Callable[[int], int]                 # (slots)

    def fixed(self, context: int, kv: str, chunk: int, threads: int) -> int:
        """All but the cache."""
        return self.trunk + self.codebooks + self.state(context, kv) + self.scratch(context, chunk, threads)

    @property
    def min_slots(self) -> int:
        """A token's experts of one layer are in use together."""
        return min(self.top_k, self.n_records)

    def floor(self, context: int, kv: str, threads: int = 1) -> int:
        chunk = min(CHUNK_MIN, context)
        return self.fixed(context, kv, chunk, max(threads, FLOOR_THREADS)) + self.cache(self.min_slots)


def measure(manifest: Manifest) -> Sizes:
    """The sizes of a container; none of its weights need be there."""
    from warp_embed._experts import ExpertStore
    from warp_embed._store import Trunk
    from warp_embed.engine.forward import checkpoint_bytes, scratch_bytes, state_bytes

    config = manifest.config
    layers = len(config.moe_layers)
    experts = manifest.experts
    layout = None if experts is None else experts.layout(config)
    codebooks = 0
    if experts is not None:         # a place for every layer, as f32
        codebooks = config.n_layers * experts.books_per_layer * experts.entries_padded * experts.vec_dim * 4

    def cache(slots: int) -> int:
        if layout is None:
            return 0
        return int(ExpertStore.cache_bytes(layout, config.n_layers, config.n_experts, slots))

    entries = manifest.text_entries()
    unread = sum((entry.payload_bytes + entry.scale_bytes) * (entry.rows - 1) // entry.rows for entry in entries
                 if entry.name.endswith("embed_tokens.weight"))
    trunk = int(Trunk.bytes_needed(entries))
    return Sizes(
        path=str(manifest.directory), trunk=trunk, trunk_read=trunk - unread, codebooks=codebooks,
        record=int(layout.record_bytes) if layout is not None else 0, n_records=layers * config.n_experts,
        n_experts=config.n_experts, top_k=config.top_k, token_records=layers * config.top_k, cache=cache,
        state=lambda context, kv: int(state_bytes(config, context, kv)), checkpoint=int(checkpoint_bytes(config)),
        scratch=lambda context, chunk, threads: int(scratch_bytes(config, context, chunk, threads)))
