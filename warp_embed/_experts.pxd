"""The expert cache as the engine sees it. Meaning: include/warp_embed/cache.h."""
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

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
    ctypedef struct we_want:
        uint32_t expert
        uint32_t slot
        const void *record
    ctypedef struct we_cache_stats:
        uint64_t hits
        uint64_t misses
        uint64_t prefetched
        uint64_t wasted
        uint64_t guessed
        uint64_t guesses_used
        uint64_t dropped
        uint64_t reads
        uint64_t retries
        uint64_t broken
        uint64_t failed
        uint64_t evictions
        uint64_t bytes_read
        double read_s
        double wait_s


# The functions: called in _experts.pyx alone, for no other extension links them.
cdef extern from "warp_embed/cache.h" nogil:
    we_status we_cache_create(we_cache **cache, const we_record_layout *layout, const we_bank *banks,
                              uint32_t n_layers, uint32_t slots, int check_crc, unsigned io_threads, we_fault *fault)
    we_status we_cache_demand(we_cache *cache, uint32_t layer, we_want *wants, uint32_t n, uint32_t *pinned,
                              we_fault *fault)
    we_status we_cache_wait(we_cache *cache, we_want *wants, uint32_t n, double until_s, uint32_t *ready,
                            we_fault *fault)
    void we_cache_release(we_cache *cache, we_want *wants, uint32_t n, int come_back)
    uint32_t we_cache_guess(we_cache *cache, uint32_t layer, const uint32_t *experts, uint32_t n)
    void we_cache_missing(we_cache *cache, uint32_t layer, const uint32_t *experts, uint32_t n, uint8_t *missing)
    uint32_t we_cache_hint(we_cache *cache, uint32_t layer, const uint32_t *experts, uint32_t n)
    void we_cache_uses(we_cache *cache, uint16_t *uses)
    void we_cache_recall(we_cache *cache, const uint16_t *uses)
    uint32_t we_cache_slots(we_cache *cache)
    uint32_t we_cache_held(we_cache *cache)
    we_status we_cache_resize(we_cache *cache, uint32_t slots, we_fault *fault)
    we_cache_stats we_cache_get_stats(we_cache *cache)
    size_t we_cache_bytes(const we_record_layout *layout, uint32_t n_layers, uint32_t n_experts, uint32_t slots)
    void we_cache_destroy(we_cache *cache)


cdef struct we_store_api:           # the cache as other extensions call it: they do not link it
    we_status (*demand)(we_cache *cache, uint32_t layer, we_want *wants, uint32_t n, uint32_t *pinned,
                        we_fault *fault) noexcept nogil
    we_status (*wait)(we_cache *cache, we_want *wants, uint32_t n, double until_s, uint32_t *ready,
                      we_fault *fault) noexcept nogil
    void (*release)(we_cache *cache, we_want *wants, uint32_t n, int come_back) noexcept nogil
    uint32_t (*guess)(we_cache *cache, uint32_t layer, const uint32_t *experts, uint32_t n) noexcept nogil
    void (*missing)(we_cache *cache, uint32_t layer, const uint32_t *experts, uint32_t n,
                    uint8_t *missing) noexcept nogil
    we_cache_stats (*stats)(we_cache *cache) noexcept nogil
    uint32_t (*slots)(we_cache *cache) noexcept nogil
    uint32_t (*held)(we_cache *cache) noexcept nogil
    we_status (*resize)(we_cache *cache, uint32_t slots, we_fault *fault) noexcept nogil
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
    cdef we_bank *banks             # [n_layers]; the files are the cache's once there is one
    cdef Pages book_pages
    cdef dict paths                 # layer -> bank file
    cdef bint check_crc
    cdef bint direct                # every bank is read past the page cache
    cdef object lock                # of users and closing
    cdef int users                  # Python methods that use the cache; the engine's callers hold the model's lock
    cdef bint closing
    cdef readonly bint can_read_ahead   # it has threads of its own
    cdef object pid                 # of the process that opened it
    cdef int close_files(self) except -1
    cdef int open_banks(self, dict banks, bint direct) except -1
    cdef int lay_books(self, const float[:, :, ::1] books) except -1
    cdef int pin(self, int layer, int expert, bint crc, we_want *want) except -1
    cdef const float *books_of(self, int layer, int matrix) noexcept nogil
    cdef uint32_t counters(self, we_cache_stats *s) except? 0
    cdef int enter(self) except -1
    cdef int leave(self) except -1
