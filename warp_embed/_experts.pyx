"""The experts of a container: their banks and codebooks, and the cache in front of them."""
import os
import threading

import numpy as np

from warp_embed.errors import FormatError

from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from warp_embed._kernels cimport WE_OK, WE_VQ2R, WE_VQ3R, WE_VQ4P, we_fault, we_matrix, we_status
from warp_embed._store cimport (
    Pages, RecordLayout, decode_into, file_size, open_file, raise_fault, we_file_close, we_record_check,
    we_record_views)

_MATRICES = ("gate", "up", "down")

cdef we_store_api STORE
STORE.get, STORE.unpin_all = we_cache_get, we_cache_unpin_all
STORE.stats, STORE.views = we_cache_get_stats, we_record_views

cdef const we_store_api *store_api() noexcept nogil:
    return &STORE


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
            raise_fault(&fault, self.paths)
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
