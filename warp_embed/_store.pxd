"""Records, banks and the expert cache as the engine sees them. Meaning: include/warp_embed/record.h, cache.h."""
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from warp_embed._kernels cimport we_fault, we_matrix, we_status


cdef extern from "warp_embed/record.h" nogil:
    enum:
        WE_GATE
        WE_UP
        WE_DOWN
        WE_MATRICES
    ctypedef struct we_record_layout:
        uint8_t encoding
        uint8_t alt_encoding
        uint32_t rows[3]
        uint32_t cols[3]
        uint32_t group
        uint32_t vec_dim
        uint32_t stages
        uint32_t entries
        uint32_t index_bits
        uint32_t payload_off[3]
        uint32_t scales_off[3]
        size_t row_bytes[3]
        uint32_t first_scales_off
        uint32_t end
        size_t record_bytes


cdef extern from "warp_embed/cache.h" nogil:
    ctypedef struct we_cache:
        pass
    ctypedef struct we_cache_stats:
        uint64_t hits
        uint64_t misses
        uint64_t evictions
        uint64_t bytes_read
        double read_s


cdef struct we_store_api:           # the store as the engine calls it: it does not link it
    we_status (*get)(we_cache *cache, uint32_t layer, uint32_t expert, const void **record,
                     we_fault *fault) noexcept nogil
    void (*unpin_all)(we_cache *cache) noexcept nogil
    we_cache_stats (*stats)(const we_cache *cache) noexcept nogil
    void (*views)(const we_record_layout *layout, const void *record, const float *const *books,
                  we_matrix *out) noexcept nogil


cdef const we_store_api *store_api() noexcept nogil


cdef class Pages:
    """Page-aligned, zeroed memory outside Python's heap, given back when the object dies."""
    cdef readonly size_t nbytes
    cdef unsigned char *data


cdef class ExpertStore:
    """The banks, codebooks and cache of one container."""
    cdef we_record_layout layout
    cdef we_cache *cache            # NULL: no expert layers, or closed
    cdef float *books               # [n_layers][WE_MATRICES][stages][entries][vec_dim] f32; NULL without VQ
    cdef size_t book_stride         # floats of one matrix's books
    cdef readonly int n_layers
    cdef const float *books_of(self, int layer, int matrix) noexcept nogil


cdef int raise_fault(const we_fault *fault, object where) except -1


cdef class Trunk:
    """Resident tensors of a container, by name."""
    cdef we_matrix *matrices
    cdef dict index                 # name -> position in matrices
    cdef Pages pages
    cdef const we_matrix *matrix(self, str name) except NULL
