"""The token ids of a conversation. A list of them would hold the GIL for milliseconds whenever it is copied."""
cimport cython
from libc.stdint cimport int32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

import numpy as np


@cython.final
cdef class Ids:
    """Room for `capacity` ids, of which the first len() count. Its memory is committed as it fills."""

    def __cinit__(self, size_t capacity):
        self.data = <int32_t *>calloc(capacity or 1, sizeof(int32_t))
        if self.data == NULL:
            raise MemoryError(f"no room for {capacity} token ids")
        self.capacity = capacity

    def __dealloc__(self):
        free(self.data)

    def __len__(self):
        return self.n

    def array(self, size_t begin=0, end=None):
        """int32 copy of ids [begin, end); end: all of them by default."""
        cdef size_t stop = self.n if end is None else min(self.n, <size_t>end)
        if begin >= stop:
            return np.empty(0, np.int32)
        return np.array(<int32_t[:stop - begin]>(self.data + begin))

    cdef void append(self, const int32_t *ids, size_t n) noexcept nogil:
        """The caller has seen that they fit."""
        memcpy(self.data + self.n, ids, n * sizeof(int32_t))
        self.n += n

    cdef void cut(self, size_t n) noexcept nogil:
        """Keep the first n."""
        self.n = n
