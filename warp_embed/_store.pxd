"""Records, banks and the expert cache as the engine sees them. Meaning: include/warp_embed/record.h, cache.h."""
from libc.stdint cimport intptr_t, uint8_t, uint32_t, uint64_t

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


cdef extern from "warp_embed/platform.h" nogil:
    enum:
        WE_PAGE
    ctypedef struct we_file:
        intptr_t handle
        int direct


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


# The functions: called in _store.pyx alone, for no other extension links them.
cdef extern from "warp_embed/platform.h" nogil:
    we_status we_file_open(we_file *file, const char *path, int want_direct, we_fault *fault)
    we_status we_file_size(const we_file *file, uint64_t *bytes, we_fault *fault)
    we_status we_file_read(const we_file *file, void *dst, size_t n, uint64_t offset, we_fault *fault)
    void we_file_close(we_file *file)
    void *we_pages_reserve(size_t bytes)
    void we_pages_give_back(void *p, size_t bytes)
    void we_pages_release(void *p, size_t bytes)
    void we_pages_prefer_large(void *p, size_t bytes)

cdef extern from "warp_embed/record.h" nogil:
    we_status we_record_layout_init(we_record_layout *layout, uint32_t width, uint32_t inter, we_fault *fault)
    we_status we_record_check(const we_record_layout *layout, const void *record, int layer, int expert,
                              uint32_t codebook, int check_crc, we_fault *fault)
    void we_record_views(const we_record_layout *layout, const void *record, const float *const *books,
                         we_matrix *out)
    int we_matrix_is_finite(const we_matrix *matrix)
    uint32_t we_crc32(uint32_t crc, const void *data, size_t n)

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
    cdef we_bank *banks             # [n_layers]
    cdef Pages book_pages
    cdef dict paths                 # layer -> bank file
    cdef bint check_crc
    cdef object lock                # held by the Python methods; the engine's callers hold the model's lock
    cdef int open_banks(self, dict banks, bint direct) except -1
    cdef int lay_books(self, const float[:, :, ::1] books) except -1
    cdef const void *pin(self, int layer, int expert, bint crc) except NULL
    cdef const float *books_of(self, int layer, int matrix) noexcept nogil


cdef int raise_fault(const we_fault *fault, object where) except -1    # where: a path, or an ExpertStore


cdef class Trunk:
    """Resident tensors of a container, by name."""
    cdef we_matrix *matrices
    cdef dict index                 # name -> position in matrices
    cdef Pages pages
    cdef list entries               # TrunkEntry of each matrix
    cdef readonly str path
    cdef readonly size_t nbytes
    cdef size_t read_tensor(self, const we_file *file, int i, entry, size_t at) except? 0
    cdef const we_matrix *matrix(self, str name) except NULL
