"""Reading containers: files, page-aligned memory, record layouts, the resident trunk, the expert cache."""
import os
import struct
import threading

import numpy as np

from warp_embed.errors import FormatError, RecordError

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport calloc, free
from libc.stdint cimport uint16_t, uintptr_t
from libc.string cimport memcpy, memset

from warp_embed._kernels cimport (
    WE_BF16, WE_E_IO, WE_E_MEMORY, WE_E_RECORD, WE_E_SHORT_READ, WE_F32, WE_OK, WE_Q3G, WE_Q4G, WE_Q8G, WE_VQ2R,
    WE_VQ3R, WE_VQ4P, kernels)

cdef size_t PLACE = 64                      # alignment of a tensor in memory
_HEADER = struct.Struct("<4sHHBBHHHIIIIIIII")
_MATRICES = ("gate", "up", "down")

cdef we_store_api STORE
STORE.get, STORE.unpin_all = we_cache_get, we_cache_unpin_all
STORE.stats, STORE.views = we_cache_get_stats, we_record_views

cdef const we_store_api *store_api() noexcept nogil:
    return &STORE


# ----------------------------------------------------------------- faults ----

cdef int raise_fault(const we_fault *fault, object where) except -1:
    """Raise the exception that a fault stands for."""
    cdef str what = fault.what.decode() if fault.what != NULL else "failed"
    layer = fault.layer if fault.layer >= 0 else None
    expert = fault.expert if fault.expert >= 0 else None
    path = (<ExpertStore>where).paths.get(layer) if isinstance(where, ExpertStore) else where
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
    def __cinit__(self, size_t nbytes):
        self.nbytes = nbytes
        self.data = <unsigned char *>we_pages_reserve(nbytes)
        if self.data == NULL:
            raise MemoryError(f"{nbytes} bytes of memory were refused")

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
    cdef we_record_layout c
    cdef readonly int encoding
    cdef readonly size_t record_bytes, end      # end of the scales: the CRC covers [48, end)
    cdef readonly tuple rows, cols, row_bytes, payload_off, scales_off      # of gate, up, down

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

cdef class Trunk:
    def __init__(self, path, entries, on_progress=None):
        """Read tensors (TrunkEntry, checked by Manifest) into memory; on_progress(done, total) after each of them."""
        cdef we_file file
        cdef size_t at = 0
        cdef int i
        if self.matrices != NULL:
            raise ValueError("a trunk is read once")
        self.path = os.fsdecode(path)
        self.entries = list(entries)
        self.index = {entry.name: i for i, entry in enumerate(self.entries)}
        self.nbytes = Trunk.bytes_needed(self.entries)
        self.pages = Pages(self.nbytes)
        we_pages_prefer_large(self.pages.data, self.nbytes)
        self.matrices = <we_matrix *>calloc(max(1, len(self.entries)), sizeof(we_matrix))
        if self.matrices == NULL:
            raise MemoryError()
        open_file(&file, self.path, False)
        try:
            for i, entry in enumerate(self.entries):
                at = self.read_tensor(&file, i, entry, at)
                PyErr_CheckSignals()                # Ctrl-C ends a load of many gigabytes
                if on_progress is not None:
                    on_progress(at, self.nbytes)
        finally:
            we_file_close(&file)

    def __dealloc__(self):
        free(self.matrices)

    cdef size_t read_tensor(self, const we_file *file, int i, entry, size_t at) except? 0:
        """Read tensor i to byte `at` of the pages; returns where the next begins."""
        cdef we_matrix *m = &self.matrices[i]
        cdef size_t payload = entry.payload_bytes, scales = entry.scale_bytes
        cdef uint64_t offset = entry.offset, scale_offset = entry.scale_offset
        cdef unsigned char *to = self.pages.data + at
        cdef we_fault fault
        cdef we_status status
        cdef bint finite
        m.encoding, m.rows, m.cols = entry.encoding, entry.rows, entry.cols
        m.group = entry.group if scales else 0
        m.row_bytes = trunk_row_bytes(m.encoding, m.cols, entry.group)
        if m.row_bytes * m.rows != payload or at + place(payload) + place(scales) > self.nbytes:
            raise ValueError(f"{entry.name}: the sizes of this entry contradict each other")
        m.payload = to
        m.scales = <const uint16_t *>(to + place(payload)) if scales else NULL
        with nogil:
            status = we_file_read(file, to, payload, offset, &fault)
            if status == WE_OK and scales:
                status = we_file_read(file, to + place(payload), scales, scale_offset, &fault)
            finite = status != WE_OK or we_matrix_is_finite(m)
        if not finite:
            raise FormatError(f"{self.path}: {entry.name} holds NaN or infinity", file=self.path, field=entry.name)
        if status != WE_OK:
            try:
                raise_fault(&fault, self.path)
            except FormatError as error:
                raise FormatError(f"{error} ({entry.name})", file=self.path, field=entry.name,
                                  offset=error.offset) from None
        return at + place(payload) + place(scales)

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


# ----------------------------------------------------------------- experts ----

cdef class ExpertStore:
    def __init__(self, RecordLayout layout not None, int n_layers, dict banks not None, books, slots,
                 bint check_crc=False, bint direct=True):
        """Open the banks {layer: (path, n_experts, codebook_base)} and reserve `slots` records of memory.

        Parameters
        ----------
        books : float32 [n][entries padded to 256 or 64][vec_dim], or None without VQ
        check_crc : check every record that is read, not only its header
        direct : read past the page cache where the file system allows it; stats() says whether it did

        The Python methods lock each other out, not the engine: call them while no pass runs.
        """
        cdef we_fault fault
        if self.banks != NULL:
            raise ValueError("a store is opened once")
        if not 1 <= n_layers <= 128 or not all(0 <= layer < n_layers for layer in banks):
            raise ValueError(f"{n_layers} layers, banks of {sorted(banks)}")
        self.lock = threading.Lock()
        self.paths = {layer: os.fsdecode(bank[0]) for layer, bank in banks.items()}
        self.layout = layout.c
        self.n_layers = n_layers
        self.check_crc = check_crc
        self.banks = <we_bank *>calloc(n_layers, sizeof(we_bank))
        if self.banks == NULL:
            raise MemoryError()
        for layer in range(n_layers):
            self.banks[layer].file.handle = -1
        try:
            self.open_banks(banks, direct)
            if layout.c.encoding in (WE_VQ3R, WE_VQ2R, WE_VQ4P):
                self.lay_books(books)
            if we_cache_create(&self.cache, &self.layout, self.banks, n_layers, max(1, min(slots, 0x7fffffff)),
                               check_crc, &fault) != WE_OK:
                raise_fault(&fault, "expert cache")
        except BaseException:
            self.close()
            raise

    def __dealloc__(self):
        cdef int layer
        we_cache_destroy(self.cache)
        if self.banks != NULL:
            for layer in range(self.n_layers):
                we_file_close(&self.banks[layer].file)
        free(self.banks)

    cdef int open_banks(self, dict banks, bint direct) except -1:
        cdef we_bank *bank
        cdef uint64_t size
        for layer, (path, n_experts, codebook) in sorted(banks.items()):
            if not 1 <= n_experts <= 1 << 16 or not 0 <= codebook < 1 << 16:
                raise ValueError(f"layer {layer}: {n_experts} experts, codebooks from {codebook}")
            bank = &self.banks[<int>layer]
            path = self.paths[layer]
            open_file(&bank.file, path, direct)
            size = file_size(&bank.file, path)
            if size != n_experts * self.layout.record_bytes:
                raise FormatError(f"{path}: {size} bytes are not {n_experts} records of {self.layout.record_bytes}",
                                  file=path, layer=layer, field="bytes")
            bank.layer, bank.n_experts, bank.codebook = layer, n_experts, codebook
        return 0

    cdef int lay_books(self, const float[:, :, ::1] books) except -1:
        """Copy the codebooks of each layer to where an index needs no bound check: 256 (64) entries a stage."""
        cdef size_t entries = 1 << self.layout.index_bits, width = self.layout.vec_dim
        cdef size_t stages = self.layout.stages, first, i
        cdef float *to
        if books is None or <size_t>books.shape[1] > entries or <size_t>books.shape[2] != width:
            raise ValueError(f"codebooks must be [n][{entries}][{width}]")
        self.book_stride = stages * entries * width
        self.book_pages = Pages(self.n_layers * 3 * self.book_stride * sizeof(float))
        self.books = <float *>self.book_pages.data
        for layer in self.paths:
            first = self.banks[<int>layer].codebook
            if first + 3 * stages > <size_t>books.shape[0]:
                raise FormatError(f"layer {layer} needs codebooks {first} to {first + 3 * stages - 1} of "
                                  f"{books.shape[0]}", file=self.paths[layer], layer=layer, field="codebook_base")
            to = self.books + <size_t>layer * 3 * self.book_stride
            for i in range(3 * stages):
                memcpy(to + i * entries * width, &books[first + i, 0, 0], books.shape[1] * width * sizeof(float))
        return 0

    cdef const float *books_of(self, int layer, int matrix) noexcept nogil:
        if self.books == NULL:
            return NULL
        return self.books + (<size_t>layer * 3 + matrix) * self.book_stride

    cdef const void *pin(self, int layer, int expert, bint crc) except NULL:
        cdef const void *record = NULL
        cdef we_fault fault
        cdef we_status status
        if self.cache == NULL:
            raise ValueError("the expert store is closed")
        if layer not in self.paths or not 0 <= expert < <int>self.banks[layer].n_experts:
            raise IndexError(f"there is no expert {expert} in layer {layer}")
        with nogil:
            status = we_cache_get(self.cache, layer, expert, &record, &fault)
            if status == WE_OK and crc and not self.check_crc:
                status = we_record_check(&self.layout, record, layer, expert, self.banks[layer].codebook, 1, &fault)
        if status != WE_OK:
            we_cache_unpin_all(self.cache)
            raise_fault(&fault, self)
        return record

    def record(self, int layer, int expert):
        """The bytes of an expert's record, through the cache."""
        with self.lock:
            data = self.pin(layer, expert, False)
            try:
                return (<const char *>data)[:self.layout.record_bytes]
            finally:
                we_cache_unpin_all(self.cache)

    def expert(self, int layer, int expert, bint crc=True):
        """An expert's weights as float32: {"gate": (inter, width), "up": (inter, width), "down": (width, inter)}."""
        cdef we_matrix views[3]
        cdef const float *books[3]
        cdef int m
        out = {}
        with self.lock:
            data = self.pin(layer, expert, crc)
            try:
                for m in range(3):
                    books[m] = self.books_of(layer, m)
                we_record_views(&self.layout, data, books, views)
                for m, name in enumerate(_MATRICES):
                    out[name] = np.empty((views[m].rows, views[m].cols), np.float32)
                    decode_into(&views[m], out[name])
            finally:
                we_cache_unpin_all(self.cache)
        return out

    @property
    def slots(self):
        """Records that the cache has room for; 0 when closed."""
        return 0 if self.cache == NULL else we_cache_slots(self.cache)

    def stats(self):
        """Counters since the store was opened, and whether every bank is read past the page cache."""
        cdef we_cache_stats s
        memset(&s, 0, sizeof(s))
        if self.cache != NULL:
            s = we_cache_get_stats(self.cache)
        return {"hits": s.hits, "misses": s.misses, "evictions": s.evictions, "bytes_read": s.bytes_read,
                "read_s": s.read_s, "slots": self.slots,
                "direct": self.banks != NULL and all(self.banks[<int>layer].file.direct for layer in self.paths)}

    def resize(self, slots):
        """Change the cache's size; with fewer slots the least used records go and their memory goes back."""
        cdef we_fault fault
        cdef we_status status
        cdef uint32_t n = max(1, min(slots, 0x7fffffff))
        with self.lock:
            if self.cache == NULL:
                raise ValueError("the expert store is closed")
            with nogil:
                status = we_cache_resize(self.cache, n, &fault)
            if status != WE_OK:
                raise_fault(&fault, "expert cache")

    def close(self):
        """Close the banks and free the cache. May be called again; the engine must not run."""
        cdef int layer
        cdef we_cache *cache
        with self.lock:
            cache, self.cache, self.books = self.cache, NULL, NULL
            with nogil:
                we_cache_destroy(cache)
            self.book_pages = None
            if self.banks != NULL:
                for layer in range(self.n_layers):
                    we_file_close(&self.banks[layer].file)

    @staticmethod
    def cache_bytes(RecordLayout layout not None, uint32_t n_layers, uint32_t n_experts, slots):
        """Bytes that a cache of that many slots takes in all."""
        return we_cache_bytes(&layout.c, n_layers, n_experts, max(0, min(slots, 0x7fffffff)))
