"""The experts of a container: their banks and codebooks, and the cache in front of them."""
import os
import threading
import time

import numpy as np

from warp_embed.errors import ForkedError, FormatError

from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from warp_embed._kernels cimport WE_E_PAUSED, WE_OK, WE_VQ2R, WE_VQ3R, WE_VQ4P, pool_api, we_fault, we_matrix, we_status
from warp_embed._store cimport (
    Pages, RecordLayout, decode_into, file_size, open_file, raise_fault, we_file_close, we_record_check,
    we_record_views)

IO_THREADS = 4                      # a disk wants several reads at a time, and no more than a few
_MATRICES = ("gate", "up", "down")
cdef double LOOK_PERIOD_S = 0.02    # while a read is waited for, signals are looked at so often

cdef we_store_api STORE
STORE.demand, STORE.wait, STORE.release = we_cache_demand, we_cache_wait, we_cache_release
STORE.guess, STORE.missing = we_cache_guess, we_cache_missing
STORE.slots, STORE.held, STORE.resize = we_cache_slots, we_cache_held, we_cache_resize
STORE.stats, STORE.views = we_cache_get_stats, we_record_views

cdef const we_store_api *store_api() noexcept nogil:
    return &STORE


cdef class ExpertStore:
    def __init__(self, RecordLayout layout not None, int n_layers, dict banks not None, books, slots,
                 bint check_crc=False, bint direct=True, unsigned io_threads=IO_THREADS):
        """Open the banks {layer: (path, n_experts, codebook_base)} and reserve `slots` records of memory.

        Parameters
        ----------
        books : float32 [n][entries padded to 256 or 64][vec_dim], or None without VQ
        check_crc : check every record that is read, not only its header
        direct : read past the page cache where the file system allows it; stats() says whether it did
        io_threads : that read, 0 to 8; with 0 whoever waits for a record reads it, and nothing is read ahead

        Any method may be called from any thread, also while the engine runs, but for close.
        """
        cdef we_fault fault
        if self.banks != NULL:
            raise ValueError("a store is opened once")
        if not 1 <= n_layers <= 128 or not all(0 <= layer < n_layers for layer in banks):
            raise ValueError(f"{n_layers} layers, banks of {sorted(banks)}")
        self.lock = threading.Lock()
        self.pid = os.getpid()
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
                               check_crc, io_threads, &fault) != WE_OK:
                raise_fault(&fault, "expert cache")
        except BaseException:
            self.close_files()
            self.close()
            raise
        self.can_read_ahead = io_threads > 0
        self.direct = all(self.banks[<int>layer].file.direct for layer in self.paths)

    def __dealloc__(self):
        with nogil:
            we_cache_destroy(self.cache)
        free(self.banks)

    cdef int close_files(self) except -1:
        """The banks of a store that got no cache."""
        cdef int layer
        if self.banks != NULL and self.cache == NULL:
            for layer in range(self.n_layers):
                we_file_close(&self.banks[layer].file)
        return 0

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

    # ---- one method at a time may close it, and none may use it then ----

    cdef int enter(self) except -1:
        if self.pid != os.getpid():
            raise ForkedError("this store was opened before fork(); open it again in the child process")
        with self.lock:
            if self.cache == NULL or self.closing:
                raise ValueError("the expert store is closed")
            self.users += 1
        return 0

    cdef int leave(self) except -1:
        with self.lock:
            self.users -= 1
        return 0

    # ---- records ----

    cdef int pin(self, int layer, int expert, bint crc, we_want *want) except -1:
        """Have one record; the caller releases it."""
        cdef we_fault fault
        cdef we_status status
        cdef uint32_t n = 0, ready = 0
        if layer not in self.paths or not 0 <= expert < <int>self.banks[layer].n_experts:
            raise IndexError(f"there is no expert {expert} in layer {layer}")
        want.expert = expert
        try:
            while ready == 0:
                with nogil:
                    status = WE_OK if n > 0 else we_cache_demand(self.cache, layer, want, 1, &n, &fault)
                    if status == WE_OK:
                        status = we_cache_wait(self.cache, want, n, pool_api().now_s() + LOOK_PERIOD_S, &ready, &fault)
                if status != WE_OK and status != WE_E_PAUSED:
                    raise_fault(&fault, self.paths)
                PyErr_CheckSignals()
                if self.closing:
                    raise ValueError("the expert store is closed")
            if crc and not self.check_crc:
                with nogil:
                    status = we_record_check(&self.layout, want.record, layer, expert, self.banks[layer].codebook, 1,
                                             &fault)
                if status != WE_OK:
                    raise_fault(&fault, self.paths)
        except BaseException:
            we_cache_release(self.cache, want, n, False)
            raise
        return 0

    def record(self, int layer, int expert):
        """The bytes of an expert's record, through the cache."""
        cdef we_want want
        self.enter()
        try:
            self.pin(layer, expert, False, &want)
            try:
                return (<const char *>want.record)[:self.layout.record_bytes]
            finally:
                we_cache_release(self.cache, &want, 1, False)
        finally:
            self.leave()

    def expert(self, int layer, int expert, bint crc=True):
        """An expert's weights as float32: {"gate": (inter, width), "up": (inter, width), "down": (width, inter)}."""
        cdef we_want want
        cdef we_matrix views[3]
        cdef const float *books[3]
        cdef int m
        out = {}
        self.enter()
        try:
            self.pin(layer, expert, crc, &want)
            try:
                for m in range(3):
                    books[m] = self.books_of(layer, m)
                we_record_views(&self.layout, want.record, books, views)
                for m, name in enumerate(_MATRICES):
                    out[name] = np.empty((views[m].rows, views[m].cols), np.float32)
                    decode_into(&views[m], out[name])
            finally:
                we_cache_release(self.cache, &want, 1, False)
        finally:
            self.leave()
        return out

    # ---- the cache ----

    def hint(self, int layer, experts):
        """Let records be read in the background when the disk has nothing else to do, in this order.

        They only fill slots that are empty: what is in use, or was used, stays. A hint never counts as a demand, and is
        forgotten when there is no room. Experts that do not exist are ignored. Returns how many will be read.
        """
        cdef uint32_t[::1] ids = np.ascontiguousarray(experts, np.uint32)
        cdef uint32_t taken = 0, n = ids.shape[0]
        self.enter()
        try:
            if n and layer >= 0:
                with nogil:
                    taken = we_cache_hint(self.cache, layer, &ids[0], n)
        finally:
            self.leave()
        return taken

    def preload(self):
        """hint everything, in the order of the files; returns how many records will be read."""
        return sum(self.hint(layer, range(self.banks[<int>layer].n_experts)) for layer in sorted(self.paths))

    def uses(self):
        """How often each record was demanded, fading with time: {layer: uint16 array (n_experts,)}."""
        cdef size_t n = sum(self.banks[<int>layer].n_experts for layer in self.paths)
        cdef uint16_t[::1] counts
        every = np.zeros(n, np.uint16)
        counts = every
        self.enter()
        try:
            with nogil:
                we_cache_uses(self.cache, &counts[0])
        finally:
            self.leave()
        layers = sorted(self.paths)
        begins = np.cumsum([0] + [self.banks[<int>layer].n_experts for layer in layers])
        return {layer: every[begins[i]:begins[i + 1]] for i, layer in enumerate(layers)}

    def recall(self, dict uses):
        """Count uses of an earlier time, in the form of uses(): who stays in the cache depends on them."""
        cdef const uint16_t[::1] counts = np.ascontiguousarray(
            np.concatenate([uses[layer] for layer in sorted(self.paths)]), np.uint16)
        if <size_t>counts.shape[0] != sum(self.banks[<int>layer].n_experts for layer in self.paths):
            raise ValueError(f"{counts.shape[0]} counts")
        self.enter()
        try:
            with nogil:
                we_cache_recall(self.cache, &counts[0])
        finally:
            self.leave()

    cdef uint32_t counters(self, we_cache_stats *s) except? 0:
        """All counters, and how many slots there are; zeros when closed."""
        cdef uint32_t slots
        memset(s, 0, sizeof(we_cache_stats))
        try:
            self.enter()
        except ValueError:
            return 0
        s[0], slots = we_cache_get_stats(self.cache), we_cache_slots(self.cache)
        self.leave()
        return slots

    @property
    def slots(self):
        """Records that the cache has room for; 0 when closed."""
        cdef we_cache_stats s
        return self.counters(&s)

    def stats(self):
        """Counters since the store was opened, and whether every bank is read past the page cache.

        hits, misses : demanded records that were in the cache, or on their way by a guess; and that were not
        prefetched, wasted : read ahead; of these, gone before they were used
        evictions : records that made room for others
        reads, bytes_read, retries, failed : reads tried; of whole records; second tries; records that failed twice
        read_s, wait_s : seconds in which at least one read was running; in which a caller waited for one
        """
        cdef we_cache_stats s
        slots = self.counters(&s)
        return {"hits": s.hits, "misses": s.misses, "evictions": s.evictions, "bytes_read": s.bytes_read,
                "read_s": s.read_s, "wait_s": s.wait_s, "prefetched": s.prefetched, "wasted": s.wasted,
                "dropped": s.dropped, "reads": s.reads, "retries": s.retries, "broken": s.broken, "failed": s.failed,
                "slots": slots, "direct": self.direct}

    def resize(self, slots):
        """Change the cache's size; with fewer slots the least used records go and their memory goes back.

        What the engine is using at this moment goes back when it is done with it.
        """
        cdef we_fault fault
        cdef we_status status
        cdef uint32_t n = max(1, min(slots, 0x7fffffff))
        self.enter()
        try:
            with nogil:
                status = we_cache_resize(self.cache, n, &fault)
        finally:
            self.leave()
        if status != WE_OK:
            raise_fault(&fault, "expert cache")

    def close(self):
        """Stop the reading threads, close the banks and free the cache. May be called again; the engine must not run.

        A read that hangs is not waited for.
        """
        cdef we_cache *cache
        self.closing = True
        if self.pid == os.getpid():             # else the lock may be held by a thread that is not here
            while self.users > 0:
                time.sleep(0.001)
        cache, self.cache, self.books = self.cache, NULL, NULL
        with nogil:
            we_cache_destroy(cache)
        self.book_pages = None

    @staticmethod
    def cache_bytes(RecordLayout layout not None, uint32_t n_layers, uint32_t n_experts, slots):
        """Bytes that a cache of that many slots takes in all."""
        return we_cache_bytes(&layout.c, n_layers, n_experts, max(0, min(slots, 0x7fffffff)))
