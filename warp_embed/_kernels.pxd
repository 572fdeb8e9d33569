"""What the C kernels, the thread pool and the CPU table look like from Cython. Meaning: include/warp_embed/*.h."""
from libc.stdint cimport int8_t, int16_t, int32_t, uint8_t, uint16_t, uint32_t


cdef extern from "warp_embed/status.h" nogil:
    ctypedef enum we_status:
        WE_OK
        WE_E_MEMORY
        WE_E_IO
        WE_E_SHORT_READ
        WE_E_RECORD
        WE_E_CANCELLED
        WE_E_INTERRUPTED
        WE_E_PAUSED
        WE_E_NUMERIC
    ctypedef struct we_fault:
        we_status status
        int32_t layer
        int32_t expert
        int32_t os_error
        long long offset
        const char *what


cdef extern from "warp_embed/kernels.h" nogil:
    ctypedef enum we_encoding:
        WE_F32
        WE_BF16
        WE_Q8G
        WE_Q4G
        WE_VQ3R
        WE_VQ2R
        WE_Q3G
        WE_VQ4P
        WE_MXFP4

    ctypedef struct we_matrix:
        int32_t encoding
        uint32_t rows
        uint32_t cols
        uint32_t group
        size_t row_bytes
        const void *payload
        const uint16_t *scales
        const float *books
        uint32_t vec_dim
        uint32_t stages

    ctypedef struct we_acts:
        const float *x
        int16_t *q
        int16_t *q_halves
        float *scale
        int32_t *bias
        size_t x_stride
        size_t q_stride
        size_t scale_stride
        uint32_t group

    uint32_t we_integer_group(const we_matrix *w)

    ctypedef struct we_kda_args:
        const float *S_in
        float *S_out
        const float *q
        const float *k
        const float *v
        const float *decay
        const float *beta
        float *o
        size_t n
        size_t dk
        size_t dv
        size_t qk_stride
        size_t v_stride
        size_t beta_stride
        int stream

    ctypedef enum we_kv:
        WE_KV_F32
        WE_KV_F16
        WE_KV_Q8

    enum:
        WE_LATENT_TILE

    ctypedef struct we_mla_args:
        const float *q
        const void **blocks
        float *o
        float *softmax
        float *work
        size_t n
        size_t position
        size_t begin
        size_t end
        size_t heads
        size_t q_stride
        size_t o_stride
        size_t r
        size_t rope
        float scale
        we_kv kv

    size_t we_mla_work(size_t r, size_t rope)
    size_t we_latent_bytes(size_t r, size_t rope, we_kv kv)

    ctypedef struct we_router:
        const float *bias
        uint32_t experts
        uint32_t top_k
        uint32_t groups
        uint32_t top_groups
        int renormalize
        float scaling

    ctypedef struct we_kernels:
        const char *isa
        void (*f16_to_f32)(float *y, const uint16_t *x, size_t n) noexcept nogil
        void (*f32_to_f16)(uint16_t *y, const float *x, size_t n) noexcept nogil
        void (*bf16_to_f32)(float *y, const uint16_t *x, size_t n) noexcept nogil
        void (*f32_to_bf16)(uint16_t *y, const float *x, size_t n) noexcept nogil
        void (*exp)(float *y, const float *x, size_t n) noexcept nogil
        void (*sigmoid)(float *y, const float *x, size_t n) noexcept nogil
        void (*decode_rows)(const we_matrix *w, size_t row0, size_t row1, float *y, size_t y_stride) noexcept nogil
        void (*encode_q8g)(int8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols,
                           size_t group) noexcept nogil
        void (*encode_q4g)(uint8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols,
                           size_t group) noexcept nogil
        void (*vq_encode)(uint8_t *index, float *residual, const float *x, const float *books, size_t n,
                          unsigned stages, unsigned entries) noexcept nogil
        void (*quantize)(const we_acts *a, size_t t0, size_t t1, size_t cols) noexcept nogil
        void (*matmul)(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                       size_t y_stride) noexcept nogil
        void (*matmul_t)(const we_matrix *w, size_t row0, size_t row1, const float *x, size_t x_stride, size_t n,
                         float *y, size_t y_stride, float *row) noexcept nogil
        void (*add)(float *y, const float *x, size_t n) noexcept nogil
        void (*add_scaled)(float *y, float a, const float *x, size_t n) noexcept nogil
        void (*divide)(float *y, const float *x, float a, size_t n) noexcept nogil
        void (*silu_mul)(float *y, const float *gate, const float *up, size_t n) noexcept nogil
        void (*situ_mul)(float *y, const float *gate, const float *up, float beta, float linear,
                         size_t n) noexcept nogil
        void (*mul_sigmoid)(float *y, const float *gate, size_t n) noexcept nogil
        void (*rms_norm)(float *y, const float *x, const float *w, float eps, size_t n) noexcept nogil
        void (*rms_norm_gated)(float *y, const float *x, const float *w, const float *gate, float eps,
                               size_t n) noexcept nogil
        void (*l2_norm)(float *x, float scale, size_t n) noexcept nogil
        void (*mix_rows)(float *y, float *alpha, const float *v, size_t stride, size_t n_rows, const float *w,
                         const float *proj, float eps, size_t n) noexcept nogil
        void (*short_conv)(float *y, size_t y_stride, float *tail_out, const float *u, size_t u_stride,
                           const float *tail_in, size_t tail_stride, const float *taps, size_t taps_stride, size_t K,
                           size_t n, size_t c0, size_t c1) noexcept nogil
        void (*decay_softplus)(float *decay, const float *f, const float *dt_bias, float rate, size_t n) noexcept nogil
        void (*decay_bounded)(float *decay, const float *f, const float *dt_bias, float rate, float lower,
                              size_t n) noexcept nogil
        void (*kda)(const we_kda_args *a) noexcept nogil
        void (*latent_store)(void *latent, const float *c, const float *key, size_t r, size_t rope,
                             we_kv kv) noexcept nogil
        void (*latent_load)(float *y, const void *latent, size_t r, size_t rope, we_kv kv) noexcept nogil
        void (*mla)(const we_mla_args *a) noexcept nogil
        void (*mla_fold)(float *o, float *softmax, const float *part, const float *part_softmax,
                         size_t r) noexcept nogil
        void (*route)(const we_router *r, const float *logits, int32_t *idx, float *weight, float *work) noexcept nogil
        size_t (*argmax)(const float *x, size_t n) noexcept nogil
        double (*log_sum_exp)(const float *x, size_t n) noexcept nogil


cdef extern from "warp_embed/pool.h" nogil:
    ctypedef struct we_pool:
        pass
    ctypedef void we_task(void *arg, size_t begin, size_t end, unsigned worker) noexcept nogil


cdef struct we_pool_api:            # the pool as other extensions call it: they do not link it
    we_status (*create)(we_pool **pool, unsigned threads) noexcept nogil
    void (*run)(we_pool *pool, we_task *task, void *arg, size_t n_items, size_t grain) noexcept nogil
    we_status (*bind)(we_pool *pool, const int *cpus) noexcept nogil
    unsigned (*threads)(const we_pool *pool) noexcept nogil
    void (*destroy)(we_pool *pool) noexcept nogil
    double (*now_s)() noexcept nogil


cdef const we_kernels *kernels() noexcept nogil
cdef const we_pool_api *pool_api() noexcept nogil
