"""A conversion: plan, encode, publish; resumable after a kill at any moment."""
from __future__ import annotations

import errno
import os
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from warp_embed.convert import codebooks, document, tokenizer_files
from warp_embed.convert.checkpoint import Checkpoint
from warp_embed.convert.container import Container
from warp_embed.convert.encode import BLOCK_ELEMENTS, HEADER_BYTES, VEC_DIM, encode_expert, encode_rows, row_blocks
from warp_embed.convert.estimate import Estimate, estimate, measure
from warp_embed.convert.plan import Plan, make_plan
from warp_embed.convert.reclaim import Ledger, Reclaimer, check_bank, check_trunk
from warp_embed.convert.source import TRUNK, Source, is_kimi_k3, open_source
from warp_embed.convert.threads import in_flight, in_order, usable_cores
from warp_embed.convert.writer import AtomicFile, WorkingDirectory, json_bytes, write_file
from warp_embed.errors import FormatError
from warp_embed.runtime.arguments import integer
from warp_embed.runtime.manifest import Manifest, TrunkEntry

JOB_VERSION = 1                         # raised when the same options would give other bytes
MEASURED_BYTES = 256 << 20              # a conversion of less is over before it is measured
FIT_WORKERS = 8                         # each holds a sample of codebook vectors, some 100 MB with its products

Progress = Callable[[str, int, int], None]
OnStart = Callable[[Estimate], None]


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did. ``*_reason`` says why an encoding was chosen; ``kept_bytes`` came from an earlier run,
    ``reclaimed_bytes`` of the source were deleted."""
    path: str
    trunk: str
    experts: str
    trunk_reason: str
    experts_reason: str
    format_version: int
    n_tensors: int
    n_records: int
    trunk_bytes: int
    expert_bytes: int
    total_bytes: int
    kept_bytes: int
    reclaimed_bytes: int
    seconds: float
    warnings: list[str] = field(default_factory=list)


class Job:
    def __init__(self, source: Source, plan: Plan, work: WorkingDirectory, threads: int,
                 on_progress: Progress | None, reclaimer: Reclaimer | None) -> None:
        self.source, self.plan, self.work, self.threads = source, plan, work, threads
        self.reclaimer = reclaimer
        self._on_progress = on_progress
        self.trunk_sums: dict[str, list[int]] = {}         # of payload and of scales
        self.done_bytes = 0
        self.kept_bytes = 0
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="warp-embed-convert")

    def _advance(self, phase: str, nbytes: int) -> None:
        self.done_bytes += nbytes
        if self._on_progress is not None:
            self._on_progress(phase, self.done_bytes, self.plan.total_bytes)

    # -- what an earlier run left ---------------------------------------------

    def look_for_finished_parts(self, resumed: bool) -> None:
        """Fill books and finished banks; anything that is not whole is done again."""
        self.books: dict[int, np.ndarray] = {}
        self.finished: set[int] = set()
        self.trunk_finished = False
        if not resumed:
            return
        trunk = self.work / "trunk.bin"
        self.trunk_finished = trunk.is_file() and trunk.stat().st_size == self.plan.trunk_bytes
        self.kept_bytes = self.plan.trunk_bytes if self.trunk_finished else 0
        for layer in self.plan.moe_layers:
            if self.plan.books_per_layer:
                books = self._finished_books(layer)
                if books is None:
                    continue            # a bank means nothing without its books
                self.books[layer] = books
                self.kept_bytes += books.shape[0] * books.shape[1] * self.plan.book_bytes
            if self._bank_is_finished(layer):
                self.finished.add(layer)
                self.kept_bytes += self.plan.bank_bytes

    def _finished_books(self, layer: int) -> np.ndarray | None:
        assert self.plan.form is not None
        n, base, form = self.plan.books_per_layer, self.plan.base(layer), self.plan.form
        size, total = n * self.plan.book_bytes, len(self.plan.moe_layers) * n * self.plan.book_bytes
        for name, offset, whole in ((f"codebooks-L{layer}.bin", 0, size),
                                    ("codebooks.bin", base * self.plan.book_bytes, total)):
            path = self.work / name
            if not path.is_file() or path.stat().st_size != whole:
                continue
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(size)
            try:
                books = codebooks.unpack_books(data, base, n, form.entries)
            except FormatError:
                continue
            return books.reshape(3, form.stages, form.entries, VEC_DIM)
        return None

    def _bank_is_finished(self, layer: int) -> bool:
        """Right size, and every header is the one we would write."""
        assert self.plan.layout is not None
        path, layout, base = self.work / f"experts-L{layer}.bin", self.plan.layout, self.plan.base(layer)
        if not path.is_file() or path.stat().st_size != self.plan.bank_bytes:
            return False
        with open(path, "rb", buffering=0) as file:
            for number in range(self.plan.n_experts):
                file.seek(number * layout.record_bytes)
                header = file.read(HEADER_BYTES)
                if header != bytes(layout.header(layer, number, base, int.from_bytes(header[36:40], "little"))):
                    return False
        return True

    @property
    def done(self) -> set[int]:
        """The parts of the plan that are whole."""
        return self.finished | ({TRUNK} if self.trunk_finished else set())

    def check_sources(self) -> None:
        """Refuse when a shard that was deleted is needed again."""
        for shard in self.source.shards():
            lost = shard.parts - self.done if shard.gone else None
            if lost:
                what = "trunk.bin" if TRUNK in lost else f"experts-L{min(lost)}.bin"
                raise FormatError(f"{self.work / what} is not whole any more, and {shard.path.name}, which it was made "
                                  "from, was deleted (--reclaim); download that file once more", file=str(shard.path))

    def check_disk(self, seconds: float | None) -> Estimate:
        found = estimate(self.source, self.plan, self.done, self.kept_bytes, self.work.path, self.threads, seconds)
        least = found.needed_bytes if self.reclaimer is None else found.reclaim_needed_bytes
        if found.free_bytes < least:
            hint = ""
            if self.reclaimer is None and found.free_bytes >= found.reclaim_needed_bytes < least:
                hint = "; with --reclaim, which deletes the source as it goes, that is enough"
            raise OSError(errno.ENOSPC, f"the conversion needs {least / 1e9:.2f} GB more and "
                          f"{found.free_bytes / 1e9:.2f} GB are free{hint}", str(self.work.path))
        return found

    def reclaim(self) -> None:
        """Delete the shards that only finished parts needed, after those were read back."""
        if self.reclaimer is not None:
            self.reclaimer.done(self.done, self._verify)

    def _verify(self, part: int) -> None:
        plan = self.plan
        if part == TRUNK:
            check_trunk(self.work / "trunk.bin", plan.trunk, self.trunk_sums)
        else:
            assert plan.layout is not None
            check_bank(self.work / f"experts-L{part}.bin", plan.layout, part, plan.n_experts, plan.base(part))

    # -- trunk ------------------------------------------------------------------

    def write_trunk(self) -> None:
        def blocks() -> Iterator[tuple[TrunkEntry, int, int]]:
            for entry in self.plan.trunk:
                for row0, row1 in row_blocks(entry.rows, entry.cols):
                    yield entry, row0, row1

        def encode(block: tuple[TrunkEntry, int, int]) -> tuple[np.ndarray, np.ndarray | None]:
            entry, row0, row1 = block
            return encode_rows(self.source.rows(entry.name, row0, row1), entry.encoding, entry.name)

        with AtomicFile(self.work / "trunk.bin") as file:
            for (entry, row0, _), (payload, scales) in in_order(self.pool, encode, blocks(), self.threads + 2):
                file.write(payload, entry.offset + row0 * entry.row_bytes)
                sums = self.trunk_sums.setdefault(entry.name, [0, 0])
                sums[0] = zlib.crc32(payload.data, sums[0])
                n = payload.nbytes
                if scales is not None:
                    file.write(scales, entry.scale_offset + row0 * entry.groups * 2)
                    sums[1] = zlib.crc32(scales.data, sums[1])
                    n += scales.nbytes
                self._advance("trunk", n)
            file.publish()
        self.trunk_finished = True

    def read_trunk_sums(self) -> None:
        """Checksums of a trunk that an earlier run has finished."""
        with open(self.work / "trunk.bin", "rb") as file:
            for entry in self.plan.trunk:
                sums = [0, 0]
                for i, nbytes in enumerate((entry.payload_bytes, entry.scale_bytes)):
                    while nbytes > 0:
                        data = file.read(min(nbytes, 4 << 20))
                        nbytes -= len(data)
                        sums[i] = zlib.crc32(data, sums[i])
                self.trunk_sums[entry.name] = sums

    # -- experts ------------------------------------------------------------------

    def fit_codebooks(self) -> None:
        """One part per layer; parts are merged when all banks are there."""
        form = self.plan.form
        assert form is not None
        missing = [layer for layer in self.plan.moe_layers if layer not in self.books]
        tasks = [(layer, m) for layer in missing for m in range(3)]
        fitted: list[np.ndarray] = []
        most = min(self.threads, FIT_WORKERS)
        for (layer, m), books in in_order(self.pool, lambda t: codebooks.fit(self.source, form, *t), tasks, most):
            fitted = [books] if m == 0 else [*fitted, books]
            if m == 2:
                self.books[layer] = np.stack(fitted)
                data = codebooks.pack_books(self.books[layer], self.plan.base(layer))
                write_file(self.work / f"codebooks-L{layer}.bin", data)
                self._advance("codebooks", len(data))

    def write_bank(self, layer: int) -> None:
        plan = self.plan
        assert plan.form is not None and plan.layout is not None
        form, layout, books = plan.form, plan.layout, self.books.get(layer)

        def encode(number: int) -> bytearray:
            expert = self.source.expert(layer, number)
            return encode_expert(expert, form, layout, layer, number, plan.base(layer), books)

        # A worker holds a record, perhaps the record it is made from, and some blocks of f32 rows.
        each = 2 * layout.record_bytes + 8 * 4 * BLOCK_ELEMENTS
        if isinstance(self.source, Container) and self.source.layout is not None:
            each += self.source.layout.record_bytes
        with AtomicFile(self.work / f"experts-L{layer}.bin") as file:
            for _, record in in_order(self.pool, encode, range(plan.n_experts), in_flight(self.threads, each)):
                file.write(record)
                self._advance("experts", len(record))
            file.publish()
        self.finished.add(layer)

    def merge_codebooks(self) -> None:
        plan = self.plan
        with AtomicFile(self.work / "codebooks.bin") as file:
            for layer in plan.moe_layers:
                file.write(codebooks.pack_books(self.books[layer], plan.base(layer)))
            file.publish()
        for layer in plan.moe_layers:
            (self.work / f"codebooks-L{layer}.bin").unlink(missing_ok=True)

    # -- the rest -----------------------------------------------------------------

    def run(self, tokenizer: tokenizer_files.TokenizerFiles, resumed: bool, on_start: OnStart | None) -> None:
        self.look_for_finished_parts(resumed)
        self.check_sources()
        self.check_disk(None)
        if on_start is not None:
            worth_it = self.plan.total_bytes - self.kept_bytes > MEASURED_BYTES
            on_start(self.check_disk(measure(self.source, self.plan, self.done, self.pool, self.threads)
                                     if worth_it else None))
        if self.reclaimer is not None:
            self.reclaimer.begin(self.work.path)
        self._advance("start", self.kept_bytes)
        if self.trunk_finished:
            self.read_trunk_sums()
        else:
            self.write_trunk()
        self.reclaim()
        if self.plan.books_per_layer:
            self.fit_codebooks()
        for layer in self.plan.moe_layers:
            if layer not in self.finished:
                self.write_bank(layer)
                self.reclaim()
        if self.plan.format_version == 0:
            self.merge_codebooks()
        for name, data in tokenizer.files.items():
            if not (self.work / name).exists():
                write_file(self.work / name, data)
        write_file(self.work / "manifest.json",
                   json_bytes(document.manifest(self.source, self.plan, self.trunk_sums, self.books)))
        Manifest.read(self.work.path)           # what we publish must open
        self.work.publish()


def convert(src: str | os.PathLike[str], dst: str | os.PathLike[str], *, trunk: str = "auto", experts: str = "auto",
            threads: int | None = None, reclaim: bool = False, on_start: OnStart | None = None,
            on_progress: Progress | None = None) -> ConvertReport:
    """Write the container `dst` from a checkpoint or another container.

    Works in ``dst.partial``, which a later call with the same source and options continues, and renames it when
    everything is in it.

    Parameters
    ----------
    src : path
        A directory with config.json and safetensors, or a container.
    dst : path
        Must not exist.
    trunk : {"auto", "f32", "q8", "q4"}
    experts : {"auto", "f32", "bf16", "q8", "q4", "mxfp4", "vq3", "vq2", "vq4p"}
        "auto" chooses by size; the report says what and why. "mxfp4" keeps the experts of a release that has them so.
    threads : int, optional
        Default: the cores this process may use.
    reclaim : bool
        Delete each shard of the checkpoint as soon as everything in it is safe in ``dst.partial``: flushed, renamed,
        and read back. Tensors that the container leaves out (vision) go with their shards; config and tokenizer stay.
        ``reclaim.json`` there lists what was deleted; a later call continues without it.
    on_start : callable(Estimate), optional
        Called once before anything is written, with the disk it takes and the time, which is measured for this.
    on_progress : callable(phase, done_bytes, total_bytes), optional
        Called in this thread between blocks; bytes are those of the container.

    Raises
    ------
    FormatError         the source is malformed, or a weight is missing, unknown, misshaped, NaN or infinite.
    UnsupportedModel    a well-formed source that this version cannot convert.
    FileExistsError     `dst` exists, another conversion is writing it, or ``dst.partial`` is all that is left of shards
                        that a conversion with other options deleted.
    ValueError, PermissionError
                        an option; with reclaim, shards that cannot be deleted safely. Nothing was deleted.
    OSError             ENOSPC before any work if the disk is too small; or a read or write failed.
    """
    started = time.monotonic()
    if threads is not None:
        threads = integer("threads", threads, 1)
    dst = Path(os.path.abspath(dst))
    work = WorkingDirectory(dst)
    work.refuse_existing()
    ledger = Ledger.read(work.path)
    with open_source(Path(src), ledger) as source:
        plan = make_plan(source, trunk, experts)
        reclaimer = None
        if reclaim:
            if not isinstance(source, Checkpoint):
                raise ValueError(f"reclaim deletes the shards of a checkpoint, and {src} is a container")
            reclaimer = Reclaimer(source, ledger)
        tokenizer = _tokenizer(source)
        job = {"version": JOB_VERSION, "source": source.fingerprint, "trunk": plan.trunk_option,
               "experts": plan.experts_option}
        run = None
        try:
            resumed, warning = work.open(job, ledger.deleted)
            run = Job(source, plan, work, threads or usable_cores(), on_progress, reclaimer)
            run.run(tokenizer, resumed, on_start)
        finally:
            if run is not None:
                run.pool.shutdown(cancel_futures=True)
            work.close()
        warnings = [*source.warnings, *tokenizer.warnings, *([warning] if warning else [])]
    return ConvertReport(str(dst), plan.trunk_option, plan.experts_option, plan.trunk_reason, plan.experts_reason,
                         plan.format_version, len(plan.trunk), len(plan.moe_layers) * plan.n_experts, plan.trunk_bytes,
                         plan.expert_bytes, plan.total_bytes, run.kept_bytes, reclaimer.freed_bytes if reclaimer else 0,
                         time.monotonic() - started, warnings)


def _tokenizer(source: Source) -> tokenizer_files.TokenizerFiles:
    if isinstance(source, Container):
        return tokenizer_files.copy_from_container(source.directory)
    chat = None
    if source.config.get("model_type") == "kimi_linear":        # of the text model, also of K3's
        chat = tokenizer_files.KIMI_K3_CHAT if is_kimi_k3(source.config) else tokenizer_files.KIMI_LINEAR_CHAT
    return tokenizer_files.make_from_checkpoint(source.directory, chat)
