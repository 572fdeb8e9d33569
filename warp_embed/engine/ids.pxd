from libc.stdint cimport int32_t


cdef class Ids:
    cdef int32_t *data
    cdef readonly size_t n              # how many count
    cdef size_t capacity
    cdef void append(self, const int32_t *ids, size_t n) noexcept nogil
    cdef void cut(self, size_t n) noexcept nogil
