/* AVX-512's intrinsics made of AVX2's, by SIMDe: to run the AVX-512 kernels on a machine without it. Below: those that
 * the kernels use and that a SIMDe may lack. */
#ifndef WE_SIMDE_AVX512_H
#define WE_SIMDE_AVX512_H
#include <math.h>
#include <string.h>
#include <immintrin.h>
#include <simde/x86/avx512.h>

/* Elements whose bit is set; the others are zeros, or stay as they are. */
static inline void some_elements(void *to, const void *from, unsigned long long mask, size_t n, size_t bytes)
{
    for (size_t i = 0; i < n; i++)
        if (mask >> i & 1) memcpy((char *)to + i * bytes, (const char *)from + i * bytes, bytes);
}

#define LOADER(name, type, element_bytes)                                                           \
    static inline type name(unsigned long long mask, const void *p)                                 \
    {                                                                                               \
        type x;                                                                                     \
        memset(&x, 0, sizeof x);                                                                    \
        some_elements(&x, p, mask, sizeof x / (element_bytes), element_bytes);                      \
        return x;                                                                                   \
    }
LOADER(load_some_8_128, __m128i, 1)
LOADER(load_some_16_128, __m128i, 2)
LOADER(load_some_16_256, __m256i, 2)
LOADER(load_some_ps_256, __m256, 4)
LOADER(load_some_8_512, __m512i, 1)
LOADER(load_some_ps_512, __m512, 4)

static inline void store_whole_ps(void *p, __m512 x) { memcpy(__builtin_assume_aligned(p, 64), &x, 64); }
static inline void store_some_ps(void *p, unsigned long long mask, __m512 x) { some_elements(p, &x, mask, 16, 4); }

#define HALVES(name, to, from, part, convert)                                                       \
    static inline to name(from x)                                                                   \
    {                                                                                               \
        part half[2];                                                                               \
        to y;                                                                                       \
        memcpy(half, &x, sizeof half);                                                              \
        for (size_t i = 0; i < 2; i++) {                                                            \
            const __m256i z = convert;                                                              \
            memcpy((char *)&y + 32 * i, &z, 32);                                                    \
        }                                                                                           \
        return y;                                                                                   \
    }
HALVES(convert_epi32_ps, __m512, __m512i, __m256i, _mm256_castps_si256(_mm256_cvtepi32_ps(half[i])))
HALVES(convert_epu8_epi16, __m512i, __m256i, __m128i, _mm256_cvtepu8_epi16(half[i]))
HALVES(convert_ph_ps, __m512, __m256i, __m128i, _mm256_castps_si256(_mm256_cvtph_ps(half[i])))

#define SIXTEEN_BYTES(name, convert)                                                                \
    static inline __m512i name(__m128i x)                                                           \
    {                                                                                               \
        const __m256i half[2] = {convert(x), convert(_mm_srli_si128(x, 8))};                        \
        __m512i y;                                                                                  \
        return *(__m512i *)memcpy(&y, half, sizeof y);                                              \
    }
SIXTEEN_BYTES(convert_epu8_epi32, _mm256_cvtepu8_epi32)
SIXTEEN_BYTES(convert_epi8_epi32, _mm256_cvtepi8_epi32)

/* SIMDe's own makes 2^n first, which overflows for n = 128. */
static inline __m512 scale_by_powers(__m512 x, __m512 n)
{
    float y[16], power[16];
    memcpy(y, &x, sizeof y);
    memcpy(power, &n, sizeof power);
    for (size_t i = 0; i < 16; i++) y[i] = y[i] == y[i] ? ldexpf(y[i], (int)power[i]) : y[i];
    memcpy(&x, y, sizeof x);
    return x;
}

#undef _mm512_scalef_ps
#define _mm512_scalef_ps scale_by_powers
#define _mm_maskz_loadu_epi8 load_some_8_128
#define _mm_maskz_loadu_epi16 load_some_16_128
#define _mm256_maskz_loadu_ps load_some_ps_256
#define _mm256_maskz_loadu_epi16 load_some_16_256
#define _mm512_maskz_loadu_epi8 load_some_8_512
#define _mm512_maskz_loadu_ps load_some_ps_512
#define _mm512_mask_storeu_ps store_some_ps
#undef _mm512_stream_ps
#define _mm512_stream_ps store_whole_ps
#define _mm512_cvtepi32_ps convert_epi32_ps
#define _mm512_cvtepu8_epi16 convert_epu8_epi16
#define _mm512_cvtepu8_epi32 convert_epu8_epi32
#define _mm512_cvtepi8_epi32 convert_epi8_epi32
#define _mm512_cvtph_ps convert_ph_ps
#define _mm512_cvtss_f32(x) _mm_cvtss_f32(_mm512_castps512_ps128(x))
#define _mm512_shuffle_f32x4(a, b, select) \
    _mm512_castsi512_ps(_mm512_shuffle_i32x4(_mm512_castps_si512(a), _mm512_castps_si512(b), select))
#undef _mm512_madd_epi16                /* one release has it with the arguments of the masked form */
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#endif
