"""Products of weight matrices with the activations of a pass, spread over the pool."""
from warp_embed._kernels cimport we_acts, we_matrix, we_pool, we_task
from warp_embed.engine.structs cimport Linear


cdef we_pool *start_pool(unsigned threads, cpus) except NULL
cdef unsigned input_group(const we_matrix *w) noexcept nogil
cdef void set_acts(we_acts *a, const float *x, size_t x_stride) noexcept nogil
cdef void add_product(Linear *L, const we_matrix *w, we_acts *a, size_t n, float *y, size_t y_stride) noexcept nogil
cdef void add_exact_product(Linear *L, const we_matrix *w, const we_acts *a, size_t n, float *y,
                            size_t y_stride) noexcept nogil
cdef void run_products(Linear *L) noexcept nogil
cdef void product(Linear *L, const we_matrix *w, we_acts *a, size_t n, float *y, size_t y_stride) noexcept nogil
cdef void for_each(Linear *L, we_task *task, void *arg, size_t n_items, size_t work) noexcept nogil
