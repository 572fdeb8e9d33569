/* AVX-512 (F, BW, DQ, VL): what sixteen lanes make faster than AVX2's eight; the rest comes from the level below. */
#include "x86_avx512.h"
#ifdef WE_X86_AVX512
WE_TARGET_PUSH(WE_AVX512)

static void exp_f32(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += 16) store_some(y + i, exp_x16(load_some(x + i, n - i)), n - i);
}

static void sigmoid(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += 16) store_some(y + i, sigmoid_x16(load_some(x + i, n - i)), n - i);
}

static void silu_mul(float *y, const float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        const __m512 g = load_some(gate + i, n - i), silu = _mm512_mul_ps(g, sigmoid_x16(g));
        store_some(y + i, _mm512_mul_ps(silu, load_some(up + i, n - i)), n - i);
    }
}

static void short_conv(float *y, size_t y_stride, float *tail_out, const float *u, size_t u_stride,
                       const float *tail_in, size_t tail_stride, const float *taps, size_t taps_stride, size_t K,
                       size_t n, size_t c0, size_t c1)
{
    for (size_t t = 0; t < n; t++) {
        for (size_t c = c0; c < c1; c += 16) {
            __m512 sum = _mm512_setzero_ps();
            for (size_t j = 0; j < K; j++) {
                const float *from = t + j >= K - 1 ? u + (t + j - (K - 1)) * u_stride : tail_in + (t + j) * tail_stride;
                const __m512 tap = load_some(taps + j * taps_stride + c, c1 - c);
                sum = _mm512_fmadd_ps(tap, load_some(from + c, c1 - c), sum);
            }
            store_some(y + t * y_stride + c, _mm512_mul_ps(sum, sigmoid_x16(sum)), c1 - c);
        }
    }
    we_conv_tail(tail_out, u, u_stride, tail_in, tail_stride, K, n, c0, c1);
}

static void decay_softplus(float *decay, const float *f, const float *dt_bias, float rate, size_t n)
{
    const __m512 minus_rate = _mm512_set1_ps(-rate);
    for (size_t i = 0; i < n; i += 16) {
        const __m512 z = _mm512_add_ps(load_some(f + i, n - i), load_some(dt_bias + i, n - i));
        store_some(decay + i, exp_x16(_mm512_mul_ps(minus_rate, softplus_x16(z))), n - i);
    }
}

static void decay_bounded(float *decay, const float *f, const float *dt_bias, float rate, float lower, size_t n)
{
    const __m512 rate_x16 = _mm512_set1_ps(rate), lower_x16 = _mm512_set1_ps(lower);
    for (size_t i = 0; i < n; i += 16) {
        const __m512 z = _mm512_add_ps(load_some(f + i, n - i), load_some(dt_bias + i, n - i));
        store_some(decay + i, exp_x16(_mm512_mul_ps(lower_x16, sigmoid_x16(_mm512_mul_ps(rate_x16, z)))), n - i);
    }
}

static void route(const we_router *r, const float *logits, int32_t *idx, float *weight, float *work)
{
    we_route_by(sigmoid, r, logits, idx, weight, work);
}

static void matmul(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y, size_t y_stride)
{
    const int has_tiles = w->encoding == WE_F32 || w->encoding == WE_BF16 || (we_is_vq(w) && w->vec_dim == 8);
    if (we_takes_integers(w, a)) we_avx512_matmul_integer(w, row0, row1, a, n, y, y_stride);
    else if (n > 1 && has_tiles) we_avx512_matmul_float(w, row0, row1, a, n, y, y_stride);
    else we_avx2.matmul(w, row0, row1, a, n, y, y_stride);
}

WE_TARGET_POP

const we_kernels we_avx512 = {
    .isa = "avx512",
    .exp = exp_f32, .sigmoid = sigmoid, .vq_encode = we_avx512_vq_encode,
    .matmul = matmul, .matmul_t = we_avx512_matmul_t, .silu_mul = silu_mul,
    .short_conv = short_conv, .decay_softplus = decay_softplus, .decay_bounded = decay_bounded,
    .kda = we_avx512_kda, .latent_load = we_avx512_latent_load, .mla = we_avx512_mla, .route = route,
};
#else
typedef int we_no_avx512;           /* ISO C wants a declaration in every file */
#endif
