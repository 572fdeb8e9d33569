"""The expert cache as the engine sees it. Meaning: include/warp_embed/cache.h."""
from libc.stdint cimport uint32_t, uint64_t

from warp_embed._kernels cimport we_fault, we_matrix, we_status
from warp_embed._store cimport Pages, we_file, we_record_layout


cdef extern from "warp_embed/cache.h" nogil:
    ctypedef struct we_cache:
        pass
    ctypedef struct we_bank:
        we_file file
        int layer
        uint32_t n_experts
        uint32_t codebook
    ctypedef struct we_cache_stats:
        uint64_t hits
        uint64_t misses
        uint64_t evictions
        uint64_t bytes_read
        double read_s


# The functions: called in _experts.pyx alone, for no other extension links them.
cdef extern from "warp_embed/cache.h" nogil:
    we_status we_cache_create(we_cache **cache, const we_record_layout *layout, const we_bank *banks,
                              uint32_t n_layers, uint32_t slots, int check_crc, we_fault *fault)
    we_status we_cache_get(we_cache *cache, uint32_t layer, uint32_t expert, const void **record, we_fault *fault)
    void we_cache_unpin_all(we_cache *cache)
    uint32_t we_cache_slots(const we_cache *cache)
    we_status we_cache_resize(we_cache *cache, uint32_t slots, we_fault *fault)
    we_cache_stats we_cache_get_stats(const we_cache *cache)
    size_t we_cache_bytes(const we_record_layout *layout, uint32_t n_layers, uint32_t n_experts, uint32_t slots)
    void we_cache_destroy(we_cache *cache)


cdef struct we_store_api:           # the store as the engine calls it: it does not link it
    we_status (*get)(we_cache *cache, uint32_t layer, uint32_t expert, const void **record,
                     we_fault *fault) noexcept nogil
    void (*unpin_all)(we_cache *cache) noexcept nogil
    we_cache_stats (*stats)(const we_cache *cache) noexcept nogil
    void (*views)(const we_record_layout *layout, const void *record, const float *const *books,
                  we_matrix *out) noexcept nogil


cdef const we_store_api *store_api() noexcept nogil


cdef class ExpertStore:
    """The banks, codebooks and cache of one container."""
    cdef we_record_layout layout
    cdef we_cache *cache            # NULL: no expert layers, or closed
    cdef float *books               # [n_layers][WE_MATRICES][stages][entries][vec_dim] f32; NULL without VQ
    cdef size_t book_stride         # floats of one matrix's books
    cdef readonly int n_layers
    cdef we_bank *banks             # [n_layers]
    cdef Pages book_pages
    cdef dict paths                 # layer -> bank file
    cdef bint check_crc
    cdef object lock                # held by the Python methods; the engine's callers hold the model's lock
    cdef int open_banks(self, dict banks, bint direct) except -1
    cdef int lay_books(self, const float[:, :, ::1] books) except -1
    cdef const void *pin(self, int layer, int expert, bint crc) except NULL
    cdef const float *books_of(self, int layer, int matrix) noexcept nogil
