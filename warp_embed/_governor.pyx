"""The thread that gives memory of an expert cache back when the machine runs short of it."""
import os
import threading

from cpython.ref cimport Py_XDECREF, Py_XINCREF, PyObject
from libc.stdint cimport UINT64_MAX, uint32_t, uint64_t
from libc.string cimport memset

from warp_embed._experts cimport ExpertStore, store_api, we_cache, we_store_api
from warp_embed._kernels cimport WE_OK, we_fault


cdef struct Governed:                   # the cache as governor.h sees it: in bytes of records
    we_cache *cache
    const we_store_api *api
    uint64_t record_bytes

cdef void sizes(void *governed, uint64_t *granted, uint64_t *holds) noexcept nogil:
    cdef const Governed *g = <const Governed *>governed
    granted[0] = g.api.slots(g.cache) * g.record_bytes
    holds[0] = g.api.held(g.cache) * g.record_bytes

cdef void resize(void *governed, uint64_t nbytes) noexcept nogil:
    cdef const Governed *g = <const Governed *>governed
    cdef we_fault fault
    g.api.resize(g.cache, <uint32_t>(nbytes // g.record_bytes), &fault)     # refused: it stays as it is

cdef void report(void *listener, const we_pressure *pressure) noexcept with gil:
    tell = <object>listener             # a reference of this call: the listener may stop the governor
    tell(pressure.available, pressure.before, pressure.after)


cdef bytes path_or_none(path):
    return None if path is None else os.fsencode(path)

cdef const char *text_of(bytes path) noexcept:
    if path is None:
        return NULL
    return path


cdef class Watch:
    """How much memory is left: `meminfo`, bounded by control groups (limit files, usage, stat, ceiling or None)."""
    cdef we_watch *watch

    def __init__(self, meminfo, groups=(), pressure=None):
        cdef we_group_files files[WE_WATCH_GROUPS]
        cdef we_fault fault
        cdef size_t n = 0, i
        cdef bytes name = path_or_none(meminfo), signal = path_or_none(pressure)
        if self.watch != NULL:
            raise ValueError("a watch is opened once")
        memset(files, 0, sizeof(files))
        keep = []
        for limits, usage, stat, ceiling in list(groups)[:WE_WATCH_GROUPS]:
            paths = [path_or_none(path) for path in (*limits, None, None)[:2]] + [path_or_none(usage),
                                                                                  path_or_none(stat)]
            keep.append(paths)
            for i in range(2):
                files[n].limits[i] = text_of(paths[i])
            files[n].usage, files[n].stat = text_of(paths[2]), text_of(paths[3])
            files[n].ceiling = UINT64_MAX if ceiling is None else ceiling
            n += 1
        if we_watch_open(&self.watch, text_of(name), text_of(signal), files, n, &fault) != WE_OK:
            raise OSError(fault.os_error, f"{os.strerror(fault.os_error)} ({fault.what.decode()})")

    def __dealloc__(self):
        we_watch_close(self.watch)

    @property
    def available(self):
        """Bytes; None when nothing can be read."""
        cdef uint64_t nbytes = we_watch_available(self.watch) if self.watch != NULL else UINT64_MAX
        return None if nbytes == UINT64_MAX else nbytes

    @property
    def has_signal(self):
        """Whether the kernel says when somebody waits for memory."""
        return self.watch != NULL and we_watch_has_signal(self.watch)


cdef class Governor:
    """Starts the thread. Sizes are numbers of records; `reserve` is in bytes. Stop it before the store is closed.

    tell : callable(available, before, after), in bytes, or None
        Called in the governor's thread when memory is short. It may not raise.
    """
    cdef we_governor *governor
    cdef Governed governed
    cdef object store, lock
    cdef PyObject *tell                 # a reference of the thread's own; NULL: none
    cdef int pid

    def __init__(self, ExpertStore store not None, Watch watch not None, *, least, most, uint64_t reserve, tell=None):
        cdef we_governor_rule rule
        cdef we_governed on
        cdef we_fault fault
        cdef we_watch *taken
        if self.governor != NULL or store.cache == NULL or watch.watch == NULL:
            raise ValueError("a governor is started once, on a store that is open, with a watch of its own")
        self.store, self.lock, self.pid = store, threading.Lock(), os.getpid()
        self.governed.cache, self.governed.api = store.cache, store_api()
        self.governed.record_bytes = store.layout.record_bytes
        rule.least, rule.most = least * self.governed.record_bytes, most * self.governed.record_bytes
        rule.reserve, rule.grain, rule.calm_s = reserve, self.governed.record_bytes, 0
        on.cache, on.sizes, on.resize = &self.governed, sizes, resize
        on.report, on.listener = NULL, NULL
        if tell is not None:
            on.report, on.listener = <void (*)(void *, const we_pressure *) noexcept nogil>report, <void *>tell
        taken, watch.watch = watch.watch, NULL
        if we_governor_start(&self.governor, &rule, &on, taken, &fault) != WE_OK:
            raise OSError(fault.os_error, f"{os.strerror(fault.os_error)} ({fault.what.decode()})")
        self.tell = <PyObject *>tell if tell is not None else NULL
        Py_XINCREF(self.tell)

    def __dealloc__(self):
        if self.governor != NULL and self.pid == os.getpid():
            self.end(self.governor)

    cdef void end(self, we_governor *governor):
        with nogil:
            we_governor_stop(governor)
        Py_XDECREF(self.tell)                   # in tell() itself the call still has one

    def set(self, most, size):
        """Have `size` records now, and at most `most` from now on; how many it has then. May wait for a tick."""
        cdef uint64_t record = self.governed.record_bytes, have = 0
        cdef uint64_t top = most * record, now = size * record
        with self.lock:
            if self.governor == NULL or self.pid != os.getpid():
                raise ValueError("the governor was stopped")
            with nogil:
                have = we_governor_set(self.governor, top, now)
        return have // record

    @property
    def most(self):
        """Records that the cache may grow to."""
        with self.lock:
            if self.governor == NULL or self.pid != os.getpid():
                raise ValueError("the governor was stopped")
            return we_governor_most(self.governor) // self.governed.record_bytes

    def stop(self):
        """End the thread; again: nothing. Called by `tell`, the thread ends when that returns. In a child after fork():
        nothing, there is no thread."""
        cdef we_governor *governor
        if self.pid != os.getpid():             # also: the lock may be held by a thread that is not here
            return
        with self.lock:
            governor, self.governor = self.governor, NULL
        if governor != NULL:
            self.end(governor)
