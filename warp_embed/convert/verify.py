"""Check of a container: every checksum in it, and against its source the error of every kind of tensor."""
from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from warp_embed.convert.container import Container
from warp_embed.convert.encode import BLOCK_ELEMENTS, row_blocks
from warp_embed.convert.source import MATRICES, Source, open_source, rows_and_cols
from warp_embed.convert.threads import in_flight, in_order, usable_cores
from warp_embed.errors import FormatError
from warp_embed.runtime.arguments import integer
from warp_embed.runtime.manifest import TrunkEntry

CHUNK_BYTES = 4 << 20
PROBLEMS_MAX = 100                      # named; more are counted

Progress = Callable[[str, int, int], None]


@dataclass
class KindReport:
    """Tensors that share a role, in all layers together. Errors are None without a source to compare with."""
    kind: str
    encoding: str
    count: int = 0
    relative_rms: float | None = None   # sqrt(sum of squared differences / sum of squares of the source)
    max_error: float | None = None      # largest difference of one weight


@dataclass
class VerifyReport:
    path: str
    against: str | None
    kinds: list[KindReport] = field(default_factory=list)
    n_tensors: int = 0
    n_records: int = 0
    problems: list[str] = field(default_factory=list)
    n_problems: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.n_problems == 0

    def add_problem(self, what: str) -> None:
        self.n_problems += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(what)


@dataclass
class Difference:
    """Sums over some weights, from which errors are made."""
    error: float = 0.0
    reference: float = 0.0
    largest: float = 0.0

    def add(self, found: np.ndarray, wanted: np.ndarray) -> None:
        difference = found - wanted
        self.error += float(np.square(difference, dtype=np.float64).sum())
        self.reference += float(np.square(wanted, dtype=np.float64).sum())
        self.largest = max(self.largest, float(np.abs(difference).max(initial=0.0)))

    def merge(self, other: Difference) -> None:
        self.error += other.error
        self.reference += other.reference
        self.largest = max(self.largest, other.largest)

    @property
    def relative_rms(self) -> float:
        if self.error == 0.0:
            return 0.0
        return (self.error / self.reference) ** 0.5 if self.reference else float("inf")


def kind_of(name: str, prefix: str) -> str:
    """"self_attn.q_proj" of "model.layers.3.self_attn.q_proj.weight"."""
    name = re.sub(r"^model\.(layers\.\d+\.)?", "", name.removeprefix(prefix))
    return name.removesuffix(".weight")


class Check:
    def __init__(self, container: Container, source: Source | None, report: VerifyReport, threads: int,
                 on_progress: Progress | None) -> None:
        self.container, self.source, self.report = container, source, report
        self._threads, self._on_progress = threads, on_progress
        self._kinds: dict[str, tuple[KindReport, Difference]] = {}
        manifest, layout = container.manifest, container.layout
        self._entries = manifest.text_entries()
        self._done = 0
        self._total = sum(e.payload_bytes + e.scale_bytes for e in self._entries)
        if layout is not None:
            self._total += sum(bank.nbytes for bank in manifest.banks.values())
        self._sums = {raw.get("name"): raw for raw in manifest.raw.get("trunk", [])}

    def _advance(self, phase: str, nbytes: int) -> None:
        self._done += nbytes
        if self._on_progress is not None:
            self._on_progress(phase, self._done, self._total)

    def _count(self, kind: str, encoding: str, difference: Difference | None) -> None:
        report, total = self._kinds.setdefault(kind, (KindReport(kind, encoding), Difference()))
        report.count += 1
        if report.encoding != encoding:
            report.encoding = "mixed"
        if difference is not None:
            total.merge(difference)
            report.relative_rms, report.max_error = total.relative_rms, total.largest

    # -- trunk ------------------------------------------------------------------

    def _checksum(self, offset: int, nbytes: int) -> int:
        crc = 0
        for start in range(0, nbytes, CHUNK_BYTES):
            crc = zlib.crc32(self.container.trunk_bytes(offset + start, min(CHUNK_BYTES, nbytes - start)), crc)
        return crc

    def _trunk_tensor(self, entry: TrunkEntry) -> tuple[list[str], Difference | None]:
        """Problems of one tensor, and its error against the source."""
        problems = []
        sums: dict[str, Any] = self._sums[entry.name]
        for key, offset, nbytes in (("crc32", entry.offset, entry.payload_bytes),
                                    ("scale_crc32", entry.scale_offset, entry.scale_bytes)):
            if nbytes and sums.get(key) is not None and sums[key] != self._checksum(offset, nbytes):
                problems.append(f"trunk.bin: tensor {entry.name}: {key} differs")
        compare = self.source is not None and self.source.trunk.get(entry.name) == entry.shape
        difference = Difference() if compare else None
        try:
            for row0, row1 in row_blocks(*rows_and_cols(entry.shape)):
                found = self.container.rows(entry.name, row0, row1)
                if difference is not None and self.source is not None:
                    difference.add(found, self.source.rows(entry.name, row0, row1))
        except FormatError as error:
            problems.append(str(error))
        return problems, difference

    def check_trunk(self, pool: ThreadPoolExecutor) -> None:
        if self.source is not None:
            for name in sorted(self.container.trunk.keys() ^ self.source.trunk.keys()):
                where = "the container" if name in self.source.trunk else "the source"
                self.report.add_problem(f"tensor {name} is missing in {where}")
            for name, shape in self.container.trunk.items():
                if self.source.trunk.get(name, shape) != shape:
                    self.report.add_problem(f"tensor {name} has shape {list(shape)}; the source has "
                                            f"{list(self.source.trunk[name])}")
        for entry, (problems, difference) in in_order(pool, self._trunk_tensor, self._entries, self._threads + 2):
            for problem in problems:
                self.report.add_problem(problem)
            self.report.n_tensors += 1
            self._count(kind_of(entry.name, self.container.prefix), entry.encoding.name, difference)
            self._advance("trunk", entry.payload_bytes + entry.scale_bytes)

    # -- experts ----------------------------------------------------------------

    def _record(self, which: tuple[int, int]) -> tuple[str | None, list[Difference] | None]:
        layer, number = which
        container = self.container
        try:
            expert = container.expert(layer, number)
            expert.check_values()
            if self.source is None:
                return None, None
            source, differences = self.source.expert(layer, number), []
            for m, (rows, cols) in enumerate(container.expert_shapes()):
                difference = Difference()
                for row0, row1 in row_blocks(rows, cols):
                    difference.add(expert.rows(m, row0, row1), source.rows(m, row0, row1))
                differences.append(difference)
            return None, differences
        except FormatError as error:
            return str(error), None

    def _same_experts(self, source: Source) -> bool:
        mine, other = self.container.model, source.model
        return (self.container.expert_shapes() == source.expert_shapes() and mine.n_experts == other.n_experts
                and mine.moe_layers == other.moe_layers)

    def _check_codebooks(self) -> None:
        manifest = self.container.manifest
        if manifest.experts is None or not manifest.experts.encoding.is_vq:
            return
        stride = 16 + 2 * manifest.experts.entries * manifest.experts.vec_dim
        size = manifest.experts.books_per_layer * stride
        with open(self.container.directory / "codebooks.bin", "rb") as file:
            for layer, bank in manifest.banks.items():
                wanted = manifest.raw["layers"][str(layer)].get("codebooks_crc32")
                file.seek(bank.codebook_base * stride)
                if wanted is not None and zlib.crc32(file.read(size)) != wanted:
                    self.report.add_problem(f"codebooks.bin: layer {layer}: checksum differs")

    def check_experts(self, pool: ThreadPoolExecutor) -> None:
        container, form = self.container, self.container.manifest.experts
        if form is None or container.layout is None:
            return
        if self.source is not None and not self._same_experts(self.source):
            self.report.add_problem("the source's experts have other shapes, or are others")
            self.source = None

        def records() -> Iterator[tuple[int, int]]:
            for layer, bank in container.manifest.banks.items():
                for number in range(bank.n_experts):
                    yield layer, number

        self._check_codebooks()
        most = in_flight(self._threads, 3 * container.layout.record_bytes + 8 * 4 * BLOCK_ELEMENTS)
        for _, (problem, differences) in in_order(pool, self._record, records(), most):
            if problem is not None:
                self.report.add_problem(problem)
            self.report.n_records += 1
            for m, matrix in enumerate(MATRICES):
                self._count(f"block_sparse_moe.experts.{matrix}", form.encoding.name,
                            differences[m] if differences else None)
            self._advance("experts", container.layout.record_bytes)

    def finish(self) -> None:
        self.report.kinds = [report for report, _ in self._kinds.values()]


def verify(path: str | os.PathLike[str], against: str | os.PathLike[str] | None = None, *, threads: int | None = None,
           on_progress: Progress | None = None) -> VerifyReport:
    """Check every record's header and checksum, the trunk's checksums where there are any, and that all is finite.

    Parameters
    ----------
    path : path
        A container.
    against : path, optional
        The checkpoint or container it was made from: adds the error of every kind of tensor.
    threads : int, optional
        Default: the cores this process may use.
    on_progress : callable(phase, done_bytes, total_bytes), optional

    Returns
    -------
    VerifyReport
        Damage of the container is in ``problems``, never raised.

    Raises
    ------
    FormatError, UnsupportedModel   `against` cannot be read.
    OSError                         a file is missing or cannot be read.
    ValueError, TypeError           `threads`.
    """
    started = time.monotonic()
    workers = usable_cores() if threads is None else integer("threads", threads, 1)
    report = VerifyReport(os.fspath(path), None if against is None else os.fspath(against))
    source = None if against is None else open_source(Path(against))
    try:
        try:
            container = Container(Path(path))
        except FormatError as error:
            report.add_problem(str(error))
            return report
        with container, ThreadPoolExecutor(workers, thread_name_prefix="warp-embed-verify") as pool:
            check = Check(container, source, report, workers, on_progress)
            check.check_trunk(pool)
            check.check_experts(pool)
            check.finish()
    finally:
        if source is not None:
            source.close()
        report.seconds = time.monotonic() - started
    return report
