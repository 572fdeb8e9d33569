"""Reading containers: files, page-aligned memory, record layouts, the resident trunk."""
import os
import signal
import struct
import threading

import numpy as np

from warp_embed.errors import FormatError, RecordError

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from libc.stdlib cimport calloc, free
from libc.stdint cimport uint16_t, uintptr_t
from libc.string cimport memcpy, memset

from warp_embed._kernels cimport (
    WE_BF16, WE_E_IO, WE_E_MEMORY, WE_E_NUMERIC, WE_E_RECORD, WE_E_SHORT_READ, WE_F32, WE_OK, WE_Q3G, WE_Q4G, WE_Q8G,
    WE_VQ2R, WE_VQ3R, WE_VQ4P, kernels)

cdef size_t PLACE = 64                      # alignment of a tensor in memory
_HEADER = struct.Struct("<4sHHBBHHHIIIIIIII")
_MASK = getattr(signal, "pthread_sigmask", None)
LOAD_THREADS = 4
LOAD_LOOK_S = 0.05                          # how often a load calls on_progress


# ----------------------------------------------------------------- faults ----

cdef int raise_fault(const we_fault *fault, object where) except -1:
    """Raise the exception that a fault stands for."""
    cdef str what = fault.what.decode() if fault.what != NULL else "failed"
    layer = fault.layer if fault.layer >= 0 else None
    expert = fault.expert if fault.expert >= 0 else None
    path = where.get(layer) if isinstance(where, dict) else where
    place = f"{path}" if layer is None else f"{path}: expert {expert} of layer {layer}"
    fields = {"file": path, "layer": layer, "expert": expert, "offset": fault.offset, "field": what}
    kind = FormatError if layer is None else RecordError
    if fault.status == WE_E_MEMORY:
        raise MemoryError(f"{place}: {what}: not enough memory")
    if fault.status == WE_E_IO:
        raise OSError(fault.os_error, f"{os.strerror(fault.os_error)} ({what})", path)
    if fault.status == WE_E_SHORT_READ:
        raise kind(f"{place}: the file ends at byte {fault.offset}, inside what should be read; it is incomplete",
                   **fields)
    if fault.status == WE_E_RECORD:
        raise kind(f"{place}: the record at byte {fault.offset} is damaged: wrong {what}. "
                   "'warp-embed verify' lists all damaged records; copy or convert this file again", **fields)
    raise RuntimeError(f"{place}: {what} (status {<int>fault.status})")

cdef int open_file(we_file *file, str path, bint direct) except -1:
    cdef we_fault fault
    cdef we_status status
    cdef bytes raw = os.fsencode(path)
    cdef const char *name = raw
    if b"\0" in raw:
        raise ValueError("a file name holds a null character")
    with nogil:
        status = we_file_open(file, name, direct, &fault)
    if status != WE_OK:
        raise_fault(&fault, path)
    return 0

cdef uint64_t file_size(const we_file *file, str path) except? 0:
    cdef we_fault fault
    cdef uint64_t size = 0
    if we_file_size(file, &size, &fault) != WE_OK:
        raise_fault(&fault, path)
    return size

def crc32(data, unsigned int crc=0):
    """CRC-32 of a buffer, as zlib.crc32; crc continues an earlier one."""
    cdef const unsigned char[::1] view = memoryview(data).cast("B")
    if view.shape[0]:
        with nogil:
            crc = we_crc32(crc, &view[0], view.shape[0])
    return crc


# ------------------------------------------------------- files and memory ----

cdef class Pages:
    def __cinit__(self, size_t nbytes, bint large=False):
        self.nbytes = nbytes
        self.data = <unsigned char *>we_pages_reserve(nbytes)
        if self.data == NULL:
            raise MemoryError(f"{nbytes} bytes of memory were refused")
        if large:
            we_pages_prefer_large(self.data, nbytes, 1)

    def __dealloc__(self):
        with nogil:                             # to give back gigabytes takes a while
            we_pages_release(self.data, self.nbytes)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.data, <Py_ssize_t>self.nbytes, 0, flags)

    def give_back(self):
        """Let the system have the memory; the contents are lost."""
        with nogil:
            we_pages_give_back(self.data, self.nbytes)

cdef class File:
    """A file for positional reads; with direct=True past the page cache, where the file system allows it."""
    cdef we_file file
    cdef readonly str path
    cdef readonly bint direct

    def __cinit__(self):
        self.file.handle = -1

    def __init__(self, path, bint direct=False):
        we_file_close(&self.file)
        self.path = os.fsdecode(path)
        open_file(&self.file, self.path, direct)
        self.direct = self.file.direct

    def __dealloc__(self):
        we_file_close(&self.file)

    @property
    def size(self):
        return file_size(&self.file, self.path)

    def read_into(self, buffer, offset):
        """Fill a writable buffer from `offset` on; FormatError when the file ends before."""
        cdef Py_buffer view
        cdef we_fault fault
        cdef we_status status
        cdef uint64_t at
        if not 0 <= offset < 1 << 63:
            raise ValueError(f"offset {offset} is outside 0 to 2^63 - 1")
        at = offset
        PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)
        try:
            if self.file.direct and (at | <uint64_t>view.len | <uint64_t><uintptr_t>view.buf) % WE_PAGE:
                raise ValueError(f"offset, size and address of a direct read must be multiples of {WE_PAGE}")
            with nogil:
                status = we_file_read(&self.file, view.buf, <size_t>view.len, at, &fault)
        finally:
            PyBuffer_Release(&view)
        if status != WE_OK:
            raise_fault(&fault, self.path)

    def close(self):
        we_file_close(&self.file)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.close()


# ----------------------------------------------------------------- records ----

cdef class RecordLayout:
    """Where header, payloads and scales of an expert record lie; ValueError for dimensions that have no record.

    width, inter: an expert's input and inner width; group: inputs that share a scale (Q8G, Q4G); the rest: VQ geometry,
    by default what the encoding's name says.
    """
    def __init__(self, int encoding, width, inter, group=128, vec_dim=8, stages=None, entries=None, index_bits=None):
        cdef we_fault fault
        cdef we_status status
        cdef bint packed = encoding == WE_VQ4P
        if stages is None:
            stages = 4 if packed else 2 if encoding == WE_VQ2R else 3
        entries = (64 if packed else 256) if entries is None else entries
        index_bits = (6 if packed else 8) if index_bits is None else index_bits
        memset(&self.c, 0, sizeof(self.c))
        try:
            self.c.encoding, self.c.group, self.c.vec_dim = encoding, group, vec_dim
            self.c.stages, self.c.entries, self.c.index_bits = stages, entries, index_bits
            status = we_record_layout_init(&self.c, width, inter, &fault)
        except OverflowError:
            raise ValueError("a dimension of the experts is negative or has more than 32 bits") from None
        if status != WE_OK:
            raise ValueError(fault.what.decode())
        self.encoding, self.record_bytes, self.end = encoding, self.c.record_bytes, self.c.end
        self.rows, self.cols = tuple(<list>self.c.rows), tuple(<list>self.c.cols)
        self.row_bytes = tuple(<list>self.c.row_bytes)
        self.payload_off, self.scales_off = tuple(<list>self.c.payload_off), tuple(<list>self.c.scales_off)

    def span(self, m):
        """Payload bytes of matrix m (0 gate, 1 up, 2 down)."""
        if self.row_bytes[m]:
            return self.rows[m] * self.row_bytes[m]
        return (self.payload_off[1:] + self.scales_off[:1])[m] - self.payload_off[m]

    def check(self, const unsigned char[::1] record, int layer, int expert, unsigned codebook, bint crc=True):
        """Check a record's header, indices and checksum; RecordError names the first field that is wrong."""
        cdef we_fault fault
        cdef we_status status
        if <size_t>record.shape[0] != self.c.record_bytes:
            raise RecordError(f"expert {expert} of layer {layer}: {record.shape[0]} bytes, not {self.c.record_bytes}",
                              layer=layer, expert=expert, field="pages")
        with nogil:
            status = we_record_check(&self.c, &record[0], layer, expert, codebook, crc, &fault)
        if status != WE_OK:
            raise_fault(&fault, "record")

    def header(self, int layer, int expert, int codebook, unsigned int crc):
        """The 48 bytes in front of a record."""
        # Released writers give every 8-bit record the code of VQ3R, whatever its stages.
        encoding = WE_VQ3R if self.c.encoding == WE_VQ2R else self.c.encoding
        return _HEADER.pack(b"WEXP", layer, expert, encoding, 0, codebook, 0, 0, self.c.record_bytes // WE_PAGE,
                           *self.payload_off, self.c.first_scales_off, crc, 0, 0)


# ------------------------------------------------------------------- trunk ----

cdef size_t trunk_row_bytes(int encoding, size_t cols, size_t group) except? 0:
    cdef size_t padded = (cols + group - 1) // group * group if group else 0
    if encoding == WE_F32:
        return 4 * cols
    if encoding == WE_BF16:
        return 2 * cols
    if encoding == WE_Q8G:
        return padded
    if encoding == WE_Q4G:
        return padded // 2
    if encoding == WE_Q3G:
        return (3 * padded + 7) // 8 + 1
    raise ValueError(f"{encoding} is not an encoding of a trunk")

cdef size_t place(size_t nbytes) noexcept nogil:
    return (nbytes + PLACE - 1) // PLACE * PLACE

@cython.final
cdef class Load:
    """A load under way, with all that it writes to: a thread whose read does not come back keeps it alive."""
    cdef we_load *load
    cdef we_piece *pieces
    cdef size_t n
    cdef Pages pages

    def __init__(self, str path, Pages pages, list spans):
        """spans: (address, offset, nbytes, tensor, encoding, scales) of what is read from path into pages."""
        cdef we_fault fault
        cdef we_status status
        cdef we_piece *piece
        cdef size_t n = sum((span[2] + WE_LOAD_PIECE - 1) // WE_LOAD_PIECE for span in spans)
        cdef size_t at, nbytes
        cdef bytes raw = os.fsencode(path)
        cdef const char *name = raw
        if b"\0" in raw:
            raise ValueError("a file name holds a null character")
        self.pages = pages
        self.pieces = <we_piece *>calloc(n + 1, sizeof(we_piece))
        if self.pieces == NULL:
            raise MemoryError()
        for address, offset, size, tensor, encoding, scales in spans:
            at, nbytes = 0, size
            while at < nbytes:
                piece = &self.pieces[self.n]
                piece.offset, piece.to = offset + at, <unsigned char *><uintptr_t>address + at
                piece.bytes = <unsigned>min(WE_LOAD_PIECE, nbytes - at)
                piece.owner, piece.encoding, piece.scales = tensor, encoding, scales
                at += piece.bytes
                self.n += 1
        with nogil:
            status = we_load_create(&self.load, name, self.pieces, self.n, &fault)
        if status != WE_OK:
            raise_fault(&fault, path)

    def __dealloc__(self):
        we_load_destroy(self.load)
        free(self.pieces)

    def work(self):
        if _MASK is not None:
            _MASK(signal.SIG_BLOCK, signal.valid_signals())     # the host's handlers run in the host's threads
        with nogil:
            we_load_work(self.load)

    def run(self, on_progress, size_t total):
        """Read everything; on_progress(done, total) is called in this thread meanwhile. Ends with an exception at once,
        even when a read hangs: then its thread stays until the system lets it go."""
        threads = [threading.Thread(target=self.work, name="warp_embed load", daemon=True)
                   for _ in range(min(LOAD_THREADS, self.n))]
        started = []
        try:
            for thread in threads:
                try:
                    thread.start()
                except RuntimeError:                            # the system has no more threads for us
                    break
                started.append(thread)
            if not started:
                with nogil:
                    we_load_work(self.load)
            for thread in started:
                thread.join(LOAD_LOOK_S)
                while thread.is_alive():
                    if on_progress is not None:
                        on_progress(we_load_done(self.load), total)
                    thread.join(LOAD_LOOK_S)
        except BaseException:
            we_load_stop(self.load)
            for thread in started:
                thread.join(LOAD_LOOK_S / LOAD_THREADS)
            raise

    cdef we_status result(self, size_t *tensor, we_fault *fault) noexcept:
        cdef size_t piece = 0
        cdef we_status status = we_load_result(self.load, &piece, fault)
        tensor[0] = self.pieces[piece].owner if piece < self.n else 0
        return status

cdef class Trunk:
    def __init__(self, path, entries, on_progress=None):
        """Read tensors (TrunkEntry, checked by Manifest) into memory; on_progress(done, total) several times a second."""
        cdef size_t at = 0
        cdef int i
        if self.matrices != NULL:
            raise ValueError("a trunk is read once")
        self.path = os.fsdecode(path)
        self.entries = list(entries)
        self.index = {entry.name: i for i, entry in enumerate(self.entries)}
        self.nbytes = Trunk.bytes_needed(self.entries)
        self.pages = Pages(self.nbytes, large=True)
        self.matrices = <we_matrix *>calloc(max(1, len(self.entries)), sizeof(we_matrix))
        if self.matrices == NULL:
            raise MemoryError()
        spans = []
        for i, entry in enumerate(self.entries):
            at = self.place_tensor(i, entry, at, spans)
        self.read(spans, on_progress)
        if on_progress is not None:
            on_progress(self.nbytes, self.nbytes)

    def __dealloc__(self):
        free(self.matrices)

    cdef size_t place_tensor(self, int i, entry, size_t at, list spans) except? 0:
        """Give tensor i its place, from byte `at` of the pages on; returns where the next begins."""
        cdef we_matrix *m = &self.matrices[i]
        cdef size_t payload = entry.payload_bytes, scales = entry.scale_bytes
        cdef uintptr_t to = <uintptr_t>(self.pages.data + at)
        m.encoding, m.rows, m.cols = entry.encoding, entry.rows, entry.cols
        m.group = entry.group if scales else 0
        m.row_bytes = trunk_row_bytes(m.encoding, m.cols, entry.group)
        if m.row_bytes * m.rows != payload or at + place(payload) + place(scales) > self.nbytes:
            raise ValueError(f"{entry.name}: the sizes of this entry contradict each other")
        m.payload = <void *>to
        m.scales = <const uint16_t *>(to + place(payload)) if scales else NULL
        spans.append((to, entry.offset, payload, i, m.encoding, False))
        if scales:
            spans.append((to + place(payload), entry.scale_offset, scales, i, m.encoding, True))
        return at + place(payload) + place(scales)

    cdef int read(self, list spans, on_progress) except -1:
        cdef Load load = Load(self.path, self.pages, spans)
        cdef we_fault fault
        cdef size_t tensor = 0
        load.run(on_progress, self.nbytes)
        cdef we_status status = load.result(&tensor, &fault)
        if status == WE_OK:
            return 0
        name = self.entries[tensor].name
        if status == WE_E_NUMERIC:
            raise FormatError(f"{self.path}: {name} holds NaN or infinity", file=self.path, field=name)
        try:
            raise_fault(&fault, self.path)
        except FormatError as error:
            raise FormatError(f"{error} ({name})", file=self.path, field=name, offset=error.offset) from None

    @staticmethod
    def bytes_needed(entries):
        """Memory that these tensors take."""
        return sum(place(entry.payload_bytes) + place(entry.scale_bytes) for entry in entries)

    cdef const we_matrix *matrix(self, str name) except NULL:
        return &self.matrices[<int>self.index[name]]

    def decode(self, str name):
        """A tensor's values, float32, in its own shape."""
        cdef const we_matrix *m = self.matrix(name)
        out = np.empty((m.rows, m.cols), np.float32)
        decode_into(m, out)
        return out.reshape(self.entries[self.index[name]].shape)

cdef int decode_into(const we_matrix *m, float[:, ::1] out) except -1:
    with nogil:
        if m.rows and m.cols:
            kernels().decode_rows(m, 0, m.rows, &out[0, 0], m.cols)
    return 0
