/* What the AVX-512 files share: masked ends of vectors, sums in a fixed order, exp and its kin on sixteen lanes. */
#ifndef WE_X86_AVX512_H
#define WE_X86_AVX512_H
#include "kernels_internal.h"

#ifdef WE_X86_AVX512
#ifdef WE_SIMDE                     /* a test: these files on a machine without AVX-512 */
#include "simde_avx512.h"
#define WE_AVX512 "avx2,fma,f16c"
#define WE_AVX512VNNI WE_AVX512
#else
#include <immintrin.h>
#define WE_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define WE_AVX512VNNI WE_AVX512 ",avx512vnni"
#endif

void we_avx512_kda(const we_kda_args *a);
void we_avx512_latent_load(float *y, const void *latent, size_t r, size_t rope, we_kv kv);
void we_avx512_mla(const we_mla_args *a);
void we_avx512_vq_encode(uint8_t *index, float *residual, const float *x, const float *books, size_t n, unsigned stages,
                         unsigned entries);
void we_avx512_matmul_float(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                            size_t y_stride);
void we_avx512_matmul_t(const we_matrix *w, size_t row0, size_t row1, const float *x, size_t x_stride, size_t n,
                        float *y, size_t y_stride, float *row);
void we_avx512_matmul_integer(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                              size_t y_stride);

#ifdef _MSC_VER
#define EXPANDED static __forceinline
#else
#define EXPANDED static inline __attribute__((always_inline))
#endif

/* x is to be a value in a register here, whatever GCC would rather do. */
#if defined(__GNUC__) && !defined(WE_SIMDE)
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define IN_REGISTER(x)
#endif

WE_TARGET_PUSH(WE_AVX512)

EXPANDED __mmask16 lanes_below(size_t n) { return (__mmask16)((1u << n) - 1); }

/* n elements, zeros behind them. */
EXPANDED __m512 load_some(const float *x, size_t n)
{
    return n >= 16 ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps(lanes_below(n), x);
}

EXPANDED void store_some(float *y, __m512 v, size_t n)
{
    if (n >= 16) _mm512_storeu_ps(y, v);
    else _mm512_mask_storeu_ps(y, lanes_below(n), v);
}

/* Lane i: the sum of x[i]; the same order for every i. */
EXPANDED __m512 sums_of_x16(const __m512 x[16])
{
    __m512 y[8], z[4];
    WE_UNROLL
    for (size_t i = 0; i < 8; i++)
        y[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    WE_UNROLL
    for (size_t i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(y[2 * i]), b = _mm512_castps_pd(y[2 * i + 1]);
        z[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(z[0], z[1], 0x88), _mm512_shuffle_f32x4(z[0], z[1], 0xdd));
    const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(z[2], z[3], 0x88), _mm512_shuffle_f32x4(z[2], z[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* Halves, then as AVX2's sum_lanes: ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)). */
EXPANDED float sum_lanes(__m512 v)
{
    const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), upper);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

EXPANDED float largest_lane(__m512 v)
{
    const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(v), upper);
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

/* e^x as in x86_avx2.h; scalef rounds once where the result is subnormal. */
EXPANDED __m512 exp_x16(__m512 x)
{
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), _mm512_min_ps(_mm512_set1_ps(89.0f), x));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(0x1.715476p+0f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.62e4p-1f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.7f7d1cp-20f), r);
    __m512 p = _mm512_set1_ps(1.3814598475e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3687170168e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1668388058e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666520630e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.9999993448e-1f));
    p = _mm512_add_ps(_mm512_set1_ps(1), _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r));
    return _mm512_scalef_ps(p, n);
}

/* As in x86_avx2.h. */
EXPANDED __m512 sigmoid_x16(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1), minus = _mm512_set1_ps(-0.0f), e = exp_x16(_mm512_or_ps(x, minus));
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
    const __m512 above = _mm512_mask_blend_ps(negative, one, e), below = _mm512_add_ps(one, e);
    const __m512 lost = _mm512_sub_ps(e, _mm512_sub_ps(below, one));
    const __m512 inverse = _mm512_div_ps(one, below), y = _mm512_mul_ps(above, inverse);
    const __m512 remainder = _mm512_fnmadd_ps(y, lost, _mm512_fnmadd_ps(y, below, above));
    return _mm512_fmadd_ps(remainder, inverse, y);
}

EXPANDED __m512 softplus_x16(__m512 x)
{
    const __m512 e = exp_x16(_mm512_or_ps(x, _mm512_set1_ps(-0.0f)));
    const __m512 s = _mm512_div_ps(e, _mm512_add_ps(e, _mm512_set1_ps(2))), s2 = _mm512_mul_ps(s, s);
    __m512 p = _mm512_set1_ps(2.4301679029e-1f);
    p = _mm512_fmadd_ps(p, s2, _mm512_set1_ps(2.1427476108e-1f));
    p = _mm512_fmadd_ps(p, s2, _mm512_set1_ps(2.8616899905e-1f));
    p = _mm512_fmadd_ps(p, s2, _mm512_set1_ps(3.9998877256e-1f));
    p = _mm512_fmadd_ps(p, s2, _mm512_set1_ps(6.6666675626e-1f));
    const __m512 log1p = _mm512_fmadd_ps(_mm512_mul_ps(s2, s), p, _mm512_add_ps(s, s));
    return _mm512_add_ps(_mm512_max_ps(_mm512_setzero_ps(), x), log1p);
}

WE_TARGET_POP

#endif
#endif
