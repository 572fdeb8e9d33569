"""What a conversion will write: encodings, sizes and offsets, all known before the first byte."""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from warp_embed._store import RecordLayout
from warp_embed.convert.encode import (
    EXPERT_FORMATS,
    GROUP,
    TRUNK_OPTIONS,
    VEC_DIM,
    check_vq_columns,
    trunk_encoding,
)
from warp_embed.convert.source import TRUNK, Source
from warp_embed.errors import UnsupportedModel
from warp_embed.runtime.manifest import ExpertFormat, TrunkEntry

BOOKS = -2                      # the part that codebooks are, beside TRUNK and the layers' numbers
TINY_BYTES = 64 << 20           # a model below this in 8 bits gains nothing from fewer
RESIDENT_BYTES = 48 << 30       # experts that fit the memory of a large laptop


def trunk_bytes(entry: TrunkEntry) -> int:
    return entry.payload_bytes + entry.scale_bytes


def plan_trunk(source: Source, option: str) -> list[TrunkEntry]:
    """Tensors in the order of their names, payload and scales one after the other without gaps."""
    must_be_f32 = {spec.name for spec in source.model.tensors(source.prefix) if spec.f32}
    entries, offset = [], 0
    for name, shape in sorted(source.trunk.items()):
        encoding = trunk_encoding(name, shape, option, name in must_be_f32)
        entry = TrunkEntry(name, encoding, shape, GROUP, offset, 0)
        entry = replace(entry, scale_offset=offset + entry.payload_bytes)
        entries.append(entry)
        offset += trunk_bytes(entry)
    return entries


@dataclass(frozen=True)
class Plan:
    trunk_option: str
    experts_option: str         # "none" for a model without experts
    trunk_reason: str
    experts_reason: str
    trunk: list[TrunkEntry]
    form: ExpertFormat | None
    layout: RecordLayout | None
    moe_layers: list[int]
    n_experts: int

    @property
    def trunk_bytes(self) -> int:
        return sum(trunk_bytes(entry) for entry in self.trunk)

    @property
    def bank_bytes(self) -> int:
        return self.layout.record_bytes * self.n_experts if self.layout else 0

    @property
    def books_per_layer(self) -> int:
        return self.form.books_per_layer if self.form else 0

    @property
    def book_bytes(self) -> int:
        return 16 + 2 * VEC_DIM * self.form.entries if self.form else 0

    @property
    def expert_bytes(self) -> int:
        return len(self.moe_layers) * (self.bank_bytes + self.books_per_layer * self.book_bytes)

    @property
    def total_bytes(self) -> int:
        return self.trunk_bytes + self.expert_bytes

    @property
    def format_version(self) -> int:
        """0 is the format that other readers know; 1 adds our encodings of records."""
        return 0 if self.form is None or self.form.encoding.is_vq else 1

    def parts(self) -> Iterator[tuple[int, int]]:
        """(part, bytes) in the order in which they are written: TRUNK, BOOKS, layers' numbers."""
        yield TRUNK, self.trunk_bytes
        books = len(self.moe_layers) * self.books_per_layer * self.book_bytes
        yield BOOKS, 2 * books          # a part for every layer, and all of them merged
        for layer in self.moe_layers:
            yield layer, self.bank_bytes

    def base(self, layer: int) -> int:
        """Number of the layer's first codebook: fixed by its place, so a resumed conversion cannot renumber."""
        return self.moe_layers.index(layer) * self.books_per_layer


def expert_layout(source: Source, form: ExpertFormat) -> RecordLayout:
    if form.encoding.is_vq:
        check_vq_columns(source.expert_shapes())
    try:
        return form.layout(source.model)
    except ValueError as error:
        raise UnsupportedModel(f"experts of this size do not fit a record: {error}", field="experts") from None


def make_plan(source: Source, trunk: str, experts: str) -> Plan:
    """ValueError for an unknown option."""
    if trunk not in ("auto", *TRUNK_OPTIONS):
        raise ValueError(f"trunk={trunk!r}; choose auto, {', '.join(TRUNK_OPTIONS)}")
    if experts not in ("auto", *EXPERT_FORMATS):
        raise ValueError(f"experts={experts!r}; choose auto, {', '.join(EXPERT_FORMATS)}")
    if experts == "mxfp4" and not source.has_mxfp4:
        raise UnsupportedModel('experts="mxfp4" keeps the MXFP4 experts that a release has; those of this source are '
                               'in another encoding', field="experts")
    layers = sorted(source.model.moe_layers)
    count = len(layers) * source.model.n_experts

    def experts_in(option: str) -> int:
        return expert_layout(source, EXPERT_FORMATS[option]).record_bytes * count if count else 0

    weights = sum(math.prod(shape) for shape in source.trunk.values())
    weights += count * sum(rows * cols for rows, cols in source.expert_shapes())
    tiny = weights < TINY_BYTES
    trunk_reason = experts_reason = "asked for"
    if trunk == "auto":
        trunk = "q8" if tiny else "q4"
        trunk_reason = (f"{weights / 1e6:.1f} million weights are few enough for 8 bits" if tiny
                        else "4 bits halve the memory that is always taken")
    if not count:
        experts, experts_reason = "none", "the model has no experts"
    elif experts == "auto":
        experts, experts_reason = _choose_experts(source, experts_in("q4"), tiny)
    form = EXPERT_FORMATS.get(experts)      # None for "none"
    return Plan(trunk, experts, trunk_reason, experts_reason, plan_trunk(source, trunk), form,
                expert_layout(source, form) if form else None, layers, source.model.n_experts)


def _choose_experts(source: Source, q4_bytes: int, tiny: bool) -> tuple[str, str]:
    size = f"{q4_bytes / 1e9:.1f} GB"
    if tiny:
        return "q8", "the whole model is small in 8 bits"
    if q4_bytes <= RESIDENT_BYTES:
        return "q4", f"{size} in 4 bits fit the memory of a large laptop, and q4 is several times faster than vq3"
    if any(cols % VEC_DIM for _, cols in source.expert_shapes()):
        return "q4", f"a matrix's columns are no multiple of {VEC_DIM}, which vq3 needs"
    lossless = "; mxfp4 would keep the release's experts unchanged, for a fast disk" if source.has_mxfp4 else ""
    return "vq3", f"{size} in 4 bits would be read from disk for every token; vq3 reads a quarter less{lossless}"
