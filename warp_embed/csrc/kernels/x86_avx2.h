/* What the AVX2 files share: masked ends of vectors, sums in a fixed order, exp and its kin on eight lanes. */
#ifndef WE_X86_AVX2_H
#define WE_X86_AVX2_H
#include "kernels_internal.h"

#ifdef WE_X86
#include <immintrin.h>

void we_avx2_decode_rows(const we_matrix *w, size_t row0, size_t row1, float *y, size_t y_stride);
void we_avx2_encode_q8g(int8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols, size_t group);
void we_avx2_encode_q4g(uint8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols, size_t group);
void we_avx2_vq_encode(uint8_t *index, float *residual, const float *x, const float *books, size_t n, unsigned stages,
                       unsigned entries);
void we_avx2_quantize(const we_acts *a, size_t t0, size_t t1, size_t cols);
void we_avx2_matmul(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                    size_t y_stride);
void we_avx2_matmul_t(const we_matrix *w, size_t row0, size_t row1, const float *x, size_t x_stride, size_t n, float *y,
                      size_t y_stride, float *row);
void we_avx2_kda(const we_kda_args *a);
void we_avx2_latent_load(float *y, const void *latent, size_t r, size_t rope, we_kv kv);
void we_avx2_mla(const we_mla_args *a);

/* Parts of matmul and decode_rows, in files of their own. */
void we_avx2_matmul_integer(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                            size_t y_stride);
void we_avx2_vq_token(const we_matrix *w, size_t row0, size_t row1, const float *x, float *y);

/* A function whose size_t and int constants must be constants inside too: small loops over them are unrolled, and
 * load_some(x, 8) is a plain load. */
#ifdef _MSC_VER
#define EXPANDED static __forceinline
#else
#define EXPANDED static inline __attribute__((always_inline))
#endif

WE_TARGET_PUSH("avx2,fma,f16c")

/* The first n of eight lanes, n <= 8. */
EXPANDED __m256i lanes_below(size_t n)
{
    static const int32_t ones_zeros[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256((const __m256i *)(const void *)(ones_zeros + 8 - n));
}

/* n elements, zeros behind them. */
EXPANDED __m256 load_some(const float *x, size_t n)
{
    return n >= 8 ? _mm256_loadu_ps(x) : _mm256_maskload_ps(x, lanes_below(n));
}

EXPANDED void store_some(float *y, __m256 v, size_t n)
{
    if (n >= 8) _mm256_storeu_ps(y, v);
    else _mm256_maskstore_ps(y, lanes_below(n), v);
}

/* ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)) */
EXPANDED float sum_lanes(__m256 v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

EXPANDED float largest_lane(__m256 v)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

EXPANDED __m256 magnitude_x8(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

/* e^x within 1 ulp: x = n ln 2 + r, e^r = 1 + (r + r^2 P(r)), times 2^n in two steps so that subnormal results are
 * rounded once. x is clamped to where the result is 0 or inf already; the operand order keeps NaN. */
EXPANDED __m256 exp_x8(__m256 x)
{
    x = _mm256_max_ps(_mm256_set1_ps(-104.0f), _mm256_min_ps(_mm256_set1_ps(89.0f), x));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(0x1.715476p+0f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.62e4p-1f), x);            /* 17 bits of ln 2: exact; the rest */
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.7f7d1cp-20f), r);
    __m256 p = _mm256_set1_ps(1.3814598475e-3f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3687170168e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1668388058e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666520630e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.9999993448e-1f));
    p = _mm256_add_ps(_mm256_set1_ps(1), _mm256_fmadd_ps(_mm256_mul_ps(r, r), p, r));
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
    const __m256i rest = _mm256_sub_epi32(whole, half);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}

/* With e = e^-|x|, which never overflows, 1 / (1 + e) or, left of 0, e / (1 + e), which keeps its relative accuracy.
 * The quotient is corrected by its remainder, what 1 + e lost in rounding included; within 2 ulp as e is within 1. */
EXPANDED __m256 sigmoid_x8(__m256 x)
{
    const __m256 one = _mm256_set1_ps(1), e = exp_x8(_mm256_or_ps(x, _mm256_set1_ps(-0.0f)));
    const __m256 above = _mm256_blendv_ps(one, e, x), below = _mm256_add_ps(one, e);
    const __m256 lost = _mm256_sub_ps(e, _mm256_sub_ps(below, one));
    const __m256 inverse = _mm256_div_ps(one, below), y = _mm256_mul_ps(above, inverse);
    const __m256 remainder = _mm256_fnmadd_ps(y, lost, _mm256_fnmadd_ps(y, below, above));
    return _mm256_fmadd_ps(remainder, inverse, y);
}

EXPANDED __m256 silu_x8(__m256 x) { return _mm256_mul_ps(x, sigmoid_x8(x)); }

/* Below 0.625 x + x^3 P(x^2), which keeps the relative accuracy; above (1 - e) / (1 + e), e = e^-2|x|. Within 3 ulp. */
EXPANDED __m256 tanh_x8(__m256 x)
{
    const __m256 minus = _mm256_set1_ps(-0.0f), size = magnitude_x8(x), x2 = _mm256_mul_ps(x, x);
    __m256 p = _mm256_set1_ps(-5.7049869552e-3f);
    p = _mm256_fmadd_ps(p, x2, _mm256_set1_ps(2.0639087186e-2f));
    p = _mm256_fmadd_ps(p, x2, _mm256_set1_ps(-5.3739715058e-2f));
    p = _mm256_fmadd_ps(p, x2, _mm256_set1_ps(1.3331442198e-1f));
    p = _mm256_fmadd_ps(p, x2, _mm256_set1_ps(-3.3333281942e-1f));
    p = _mm256_fmadd_ps(_mm256_mul_ps(x2, x), p, x);
    const __m256 one = _mm256_set1_ps(1), e = exp_x8(_mm256_mul_ps(size, _mm256_set1_ps(-2)));
    const __m256 outer = _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
    const __m256 inside = _mm256_cmp_ps(size, _mm256_set1_ps(0.625f), _CMP_LT_OQ);
    return _mm256_blendv_ps(_mm256_or_ps(outer, _mm256_and_ps(x, minus)), p, inside);
}

/* log(1 + e^x) = max(x, 0) + 2 atanh(s), s = e^-|x| / (2 + e^-|x|) <= 1/3. */
EXPANDED __m256 softplus_x8(__m256 x)
{
    const __m256 e = exp_x8(_mm256_or_ps(x, _mm256_set1_ps(-0.0f)));
    const __m256 s = _mm256_div_ps(e, _mm256_add_ps(e, _mm256_set1_ps(2))), s2 = _mm256_mul_ps(s, s);
    __m256 p = _mm256_set1_ps(2.4301679029e-1f);
    p = _mm256_fmadd_ps(p, s2, _mm256_set1_ps(2.1427476108e-1f));
    p = _mm256_fmadd_ps(p, s2, _mm256_set1_ps(2.8616899905e-1f));
    p = _mm256_fmadd_ps(p, s2, _mm256_set1_ps(3.9998877256e-1f));
    p = _mm256_fmadd_ps(p, s2, _mm256_set1_ps(6.6666675626e-1f));
    const __m256 log1p = _mm256_fmadd_ps(_mm256_mul_ps(s2, s), p, _mm256_add_ps(s, s));
    return _mm256_add_ps(_mm256_max_ps(_mm256_setzero_ps(), x), log1p);
}

WE_TARGET_POP
#endif
#endif
