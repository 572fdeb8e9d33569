"""Files, memory, records and the trunk as the layers above see them. Meaning: include/warp_embed/record.h, platform.h."""
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


# The functions: called in _store.pyx and _experts.pyx alone, for no other extension links them.
cdef extern from "warp_embed/platform.h" nogil:
    we_status we_file_open(we_file *file, const char *path, int want_direct, we_fault *fault)
    we_status we_file_size(const we_file *file, uint64_t *bytes, we_fault *fault)
    we_status we_file_read(const we_file *file, void *dst, size_t n, uint64_t offset, we_fault *fault)
    void we_file_close(we_file *file)
    void *we_pages_reserve(size_t bytes)
    void we_pages_give_back(void *p, size_t bytes)
    void we_pages_release(void *p, size_t bytes)
    void we_pages_prefer_large(void *p, size_t bytes, int yes)

cdef extern from "warp_embed/record.h" nogil:
    we_status we_record_layout_init(we_record_layout *layout, uint32_t width, uint32_t inter, we_fault *fault)
    we_status we_record_check(const we_record_layout *layout, const void *record, int layer, int expert,
                              uint32_t codebook, int check_crc, we_fault *fault)
    void we_record_views(const we_record_layout *layout, const void *record, const float *const *books,
                         we_matrix *out)
    uint32_t we_crc32(uint32_t crc, const void *data, size_t n)

cdef extern from "warp_embed/load.h" nogil:
    const size_t WE_LOAD_PIECE
    ctypedef struct we_piece:
        uint64_t offset
        uint8_t *to
        uint32_t bytes
        uint32_t owner
        uint8_t encoding
        uint8_t scales
    ctypedef struct we_load:
        pass
    we_status we_load_create(we_load **load, const char *path, const we_piece *pieces, size_t n, we_fault *fault)
    void we_load_work(we_load *load)
    void we_load_stop(we_load *load)
    uint64_t we_load_done(const we_load *load)
    we_status we_load_result(const we_load *load, size_t *piece, we_fault *fault)
    void we_load_destroy(we_load *load)


cdef class Pages:
    """Page-aligned, zeroed memory outside Python's heap, given back when the object dies. large: in huge pages, where the
    system has them; for what is filled whole and kept."""
    cdef readonly size_t nbytes
    cdef unsigned char *data


cdef class RecordLayout:
    """Where header, payloads and scales of an expert record lie."""
    cdef we_record_layout c
    cdef readonly int encoding
    cdef readonly size_t record_bytes, end      # end of the scales: the CRC covers [48, end)
    cdef readonly tuple rows, cols, row_bytes, payload_off, scales_off      # of gate, up, down


cdef int raise_fault(const we_fault *fault, object where) except -1    # where: a path, or {layer: path}
cdef int open_file(we_file *file, str path, bint direct) except -1
cdef uint64_t file_size(const we_file *file, str path) except? 0
cdef int decode_into(const we_matrix *m, float[:, ::1] out) except -1


cdef class Trunk:
    """Resident tensors of a container, by name."""
    cdef we_matrix *matrices
    cdef dict index                 # name -> position in matrices
    cdef Pages pages
    cdef list entries               # TrunkEntry of each matrix
    cdef readonly str path
    cdef readonly size_t nbytes
    cdef size_t place_tensor(self, int i, entry, size_t at, list spans) except? 0
    cdef int read(self, list spans, on_progress) except -1
    cdef const we_matrix *matrix(self, str name) except NULL
