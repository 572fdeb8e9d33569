/* AVX2, FMA, F16C: numbers, elementwise kernels, norms, convolution, logits; and the level's table. */
#include <math.h>
#include "x86_avx2.h"
#ifdef WE_X86
WE_TARGET_PUSH("avx2,fma,f16c")

/* ---------------------------------------------------------------- numbers ---- */

static void f16_to_f32(float *y, const uint16_t *x, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(x + i))));
    we_ref_f16_to_f32(y + i, x + i, n - i);
}

static void f32_to_f16(uint16_t *y, const float *x, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(void *)(y + i), half);
    }
    we_ref_f32_to_f16(y + i, x + i, n - i);
}

static void exp_f32(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += 8) store_some(y + i, exp_x8(load_some(x + i, n - i)), n - i);
}

static void sigmoid(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += 8) store_some(y + i, sigmoid_x8(load_some(x + i, n - i)), n - i);
}

/* ------------------------------------------------- elementwise and norms ---- */

static void add(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += 8)
        store_some(y + i, _mm256_add_ps(load_some(y + i, n - i), load_some(x + i, n - i)), n - i);
}

static void add_scaled(float *y, float a, const float *x, size_t n)
{
    const __m256 a_x8 = _mm256_set1_ps(a);
    for (size_t i = 0; i < n; i += 8)
        store_some(y + i, _mm256_fmadd_ps(a_x8, load_some(x + i, n - i), load_some(y + i, n - i)), n - i);
}

static void silu_mul(float *y, const float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i += 8)
        store_some(y + i, _mm256_mul_ps(silu_x8(load_some(gate + i, n - i)), load_some(up + i, n - i)), n - i);
}

static void situ_mul(float *y, const float *gate, const float *up, float beta, float linear, size_t n)
{
    const __m256 beta_x8 = _mm256_set1_ps(beta), linear_x8 = _mm256_set1_ps(linear);
    for (size_t i = 0; i < n; i += 8) {
        const __m256 g = load_some(gate + i, n - i);
        __m256 u = load_some(up + i, n - i);
        if (linear > 0) u = _mm256_mul_ps(linear_x8, tanh_x8(_mm256_div_ps(u, linear_x8)));
        const __m256 bounded = _mm256_mul_ps(beta_x8, tanh_x8(_mm256_div_ps(g, beta_x8)));
        store_some(y + i, _mm256_mul_ps(_mm256_mul_ps(bounded, sigmoid_x8(g)), u), n - i);
    }
}

static void mul_sigmoid(float *y, const float *gate, size_t n)
{
    for (size_t i = 0; i < n; i += 8) {
        const __m256 open = sigmoid_x8(load_some(gate + i, n - i));
        store_some(y + i, _mm256_mul_ps(load_some(y + i, n - i), open), n - i);
    }
}

/* sum += x y, in f64: eight sums over columns. */
EXPANDED void add_products(__m256d sum[2], __m256 x, __m256 y)
{
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    sum[0] = _mm256_fmadd_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(y)), sum[0]);
    sum[1] = _mm256_fmadd_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(y, 1)), sum[1]);
}

/* Pairwise. */
EXPANDED double total(const __m256d sum[2])
{
    const __m256d four = _mm256_add_pd(sum[0], sum[1]);
    const __m128d pair = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(pair) + _mm_cvtsd_f64(_mm_unpackhi_pd(pair, pair));
}

static double sum_of_squares(const float *x, size_t n)
{
    __m256d sum[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()};
    for (size_t i = 0; i < n; i += 8) {
        const __m256 v = load_some(x + i, n - i);
        add_products(sum, v, v);
    }
    return total(sum);
}

static double depth_score(const float *x, const float *w, const float *proj, float eps, size_t n)
{
    __m256d squares[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()}, dots[2] = {squares[0], squares[0]};
    for (size_t i = 0; i < n; i += 8) {
        const __m256 v = load_some(x + i, n - i);
        add_products(squares, v, v);
        add_products(dots, v, _mm256_mul_ps(load_some(w + i, n - i), load_some(proj + i, n - i)));
    }
    return total(dots) / sqrt(total(squares) / (double)n + eps);
}

static void mix_rows(float *y, float *alpha, const float *v, size_t stride, size_t n_rows, const float *w,
                     const float *proj, float eps, size_t n)
{
    we_mix_by(depth_score, add_scaled, y, alpha, v, stride, n_rows, w, proj, eps, n);
}

static void rms_norm(float *y, const float *x, const float *w, float eps, size_t n)
{
    const __m256 inverse = _mm256_set1_ps((float)(1 / sqrt(sum_of_squares(x, n) / (double)n + eps)));
    for (size_t i = 0; i < n; i += 8) {
        const __m256 unit = _mm256_mul_ps(load_some(x + i, n - i), inverse);
        store_some(y + i, _mm256_mul_ps(unit, load_some(w + i, n - i)), n - i);
    }
}

static void rms_norm_gated(float *y, const float *x, const float *w, const float *gate, float eps, size_t n)
{
    const __m256 inverse = _mm256_set1_ps((float)(1 / sqrt(sum_of_squares(x, n) / (double)n + eps)));
    for (size_t i = 0; i < n; i += 8) {
        const __m256 unit = _mm256_mul_ps(load_some(x + i, n - i), inverse);
        const __m256 open = sigmoid_x8(load_some(gate + i, n - i));
        store_some(y + i, _mm256_mul_ps(_mm256_mul_ps(unit, load_some(w + i, n - i)), open), n - i);
    }
}

static void l2_norm(float *x, float scale, size_t n)
{
    const __m256 factor = _mm256_set1_ps((float)(scale / sqrt(sum_of_squares(x, n) + 1e-6)));
    for (size_t i = 0; i < n; i += 8) store_some(x + i, _mm256_mul_ps(load_some(x + i, n - i), factor), n - i);
}

/* -------------------------------------------------- convolution and decay ---- */

static void short_conv(float *y, size_t y_stride, float *tail_out, const float *u, size_t u_stride,
                       const float *tail_in, size_t tail_stride, const float *taps, size_t taps_stride, size_t K,
                       size_t n, size_t c0, size_t c1)
{
    for (size_t t = 0; t < n; t++) {
        for (size_t c = c0; c < c1; c += 8) {
            __m256 sum = _mm256_setzero_ps();
            for (size_t j = 0; j < K; j++) {
                const float *from = t + j >= K - 1 ? u + (t + j - (K - 1)) * u_stride : tail_in + (t + j) * tail_stride;
                const __m256 tap = load_some(taps + j * taps_stride + c, c1 - c);
                sum = _mm256_fmadd_ps(tap, load_some(from + c, c1 - c), sum);
            }
            store_some(y + t * y_stride + c, silu_x8(sum), c1 - c);
        }
    }
    we_conv_tail(tail_out, u, u_stride, tail_in, tail_stride, K, n, c0, c1);
}

static void decay_softplus(float *decay, const float *f, const float *dt_bias, float rate, size_t n)
{
    const __m256 minus_rate = _mm256_set1_ps(-rate);
    for (size_t i = 0; i < n; i += 8) {
        const __m256 z = _mm256_add_ps(load_some(f + i, n - i), load_some(dt_bias + i, n - i));
        store_some(decay + i, exp_x8(_mm256_mul_ps(minus_rate, softplus_x8(z))), n - i);
    }
}

static void decay_bounded(float *decay, const float *f, const float *dt_bias, float rate, float lower, size_t n)
{
    const __m256 rate_x8 = _mm256_set1_ps(rate), lower_x8 = _mm256_set1_ps(lower);
    for (size_t i = 0; i < n; i += 8) {
        const __m256 z = _mm256_add_ps(load_some(f + i, n - i), load_some(dt_bias + i, n - i));
        store_some(decay + i, exp_x8(_mm256_mul_ps(lower_x8, sigmoid_x8(_mm256_mul_ps(rate_x8, z)))), n - i);
    }
}

/* ------------------------------------------------------ router and logits ---- */

static void route(const we_router *r, const float *logits, int32_t *idx, float *weight, float *work)
{
    we_route_by(sigmoid, r, logits, idx, weight, work);
}

/* The largest of x, -inf if there is no number in it. */
static float largest_of(const float *x, size_t n)
{
    __m256 best = _mm256_set1_ps(-INFINITY);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) best = _mm256_max_ps(_mm256_loadu_ps(x + i), best);     /* NaN in x: best stays */
    float lane[8], result = -INFINITY;
    _mm256_storeu_ps(lane, best);
    for (size_t l = 0; l < 8; l++) result = lane[l] > result ? lane[l] : result;
    for (; i < n; i++) result = x[i] > result ? x[i] : result;
    return result;
}

static size_t argmax(const float *x, size_t n)
{
    const float best = largest_of(x, n);
    const __m256 best_x8 = _mm256_set1_ps(best);
    size_t i = 0;
    while (i + 8 <= n && !_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), best_x8, _CMP_EQ_OQ))) i += 8;
    while (i < n && x[i] != best) i++;
    return i < n ? i : 0;
}

static double log_sum_exp(const float *x, size_t n)
{
    const float largest = largest_of(x, n);
    if (isinf(largest)) return we_reference.log_sum_exp(x, n);
    const __m256 shift = _mm256_set1_ps(largest);
    __m256d low = _mm256_setzero_pd(), high = low;
    for (size_t i = 0; i < n; i += 8) {
        __m256 e = exp_x8(_mm256_sub_ps(load_some(x + i, n - i), shift));
        if (n - i < 8) e = _mm256_and_ps(e, _mm256_castsi256_ps(lanes_below(n - i)));
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(e)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(e, 1)));
    }
    double lane[4], sum = 0;
    _mm256_storeu_pd(lane, _mm256_add_pd(low, high));
    for (size_t l = 0; l < 4; l++) sum += lane[l];
    return largest + log(sum);
}

WE_TARGET_POP

const we_kernels we_avx2 = {
    .isa = "avx2",
    .f16_to_f32 = f16_to_f32, .f32_to_f16 = f32_to_f16,
    .bf16_to_f32 = we_ref_bf16_to_f32, .f32_to_bf16 = we_ref_f32_to_bf16,
    .exp = exp_f32, .sigmoid = sigmoid,
    .decode_rows = we_avx2_decode_rows, .encode_q8g = we_avx2_encode_q8g, .encode_q4g = we_avx2_encode_q4g,
    .vq_encode = we_avx2_vq_encode,
    .quantize = we_avx2_quantize, .matmul = we_avx2_matmul, .matmul_t = we_avx2_matmul_t,
    .add = add, .add_scaled = add_scaled, .silu_mul = silu_mul, .situ_mul = situ_mul, .mul_sigmoid = mul_sigmoid,
    .rms_norm = rms_norm, .rms_norm_gated = rms_norm_gated, .l2_norm = l2_norm, .mix_rows = mix_rows,
    .short_conv = short_conv, .decay_softplus = decay_softplus, .decay_bounded = decay_bounded,
    .kda = we_avx2_kda,
    .latent_store = we_ref_latent_store, .latent_load = we_avx2_latent_load, .mla = we_avx2_mla,
    .route = route, .argmax = argmax, .log_sum_exp = log_sum_exp,
};
#else
typedef int we_no_avx2;     /* ISO C wants a declaration in every file */
#endif
