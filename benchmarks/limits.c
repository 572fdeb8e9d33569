/* What this machine can do at most: bytes read, bytes copied, multiply-adds in registers.
 *
 * Each function does a fixed amount of work; the caller takes the time. Sums are returned, so that nothing is
 * optimised away. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "warp_embed/target.h"
#ifdef WE_X86
#include <immintrin.h>
#elif defined(WE_ARM64)
#include <arm_neon.h>
#endif

/* Read n bytes (a multiple of 512) once, as `streams` sequences side by side: cores differ in what suits them. */
uint64_t limit_read(const void *data, size_t n, size_t streams)
{
    const size_t length = n / streams / 512 * 512 / 8;
    uint64_t sums[16] = {0};
    for (size_t i = 0; i < length; i += 16)
        for (size_t s = 0; s < streams; s++) {
            const uint64_t *p = (const uint64_t *)data + s * length + i;
            for (size_t j = 0; j < 16; j++) sums[j] += p[j];
        }
    uint64_t sum = 0;
    for (size_t j = 0; j < 16; j++) sum += sums[j];
    return sum;
}

/* Read n bytes and write n bytes elsewhere: through the caches, or past them where the machine can. */
void limit_copy(float *to, const float *from, size_t n_floats)
{
    for (size_t i = 0; i < n_floats; i++) to[i] = from[i] * 0.5f;
}

#ifdef WE_X86
void limit_copy_stream(float *to, const float *from, size_t n_floats)       /* 64-byte aligned, multiple of 16 */
{
    const __m128 half = _mm_set1_ps(0.5f);
    for (size_t i = 0; i < n_floats; i += 16) {
        _mm_prefetch((const char *)(from + i) + 1024, _MM_HINT_T0);
        for (size_t j = i; j < i + 16; j += 4) _mm_stream_ps(to + j, _mm_mul_ps(_mm_load_ps(from + j), half));
    }
    _mm_sfence();
}
#else
void limit_copy_stream(float *to, const float *from, size_t n_floats) { limit_copy(to, from, n_floats); }
#endif

/* Multiply-adds between registers: twelve chains, enough for two units of any latency up to six. Each returns the
 * multiply-adds of one round; 0: the compiler has no such instruction. Whether the CPU has it, the caller knows. */
#define CHAINS 12

#ifdef WE_X86
WE_TARGET_PUSH("avx2,fma")
size_t limit_fma_256(size_t rounds, float *out)
{
    __m256 sum[CHAINS], a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
    for (int i = 0; i < CHAINS; i++) sum[i] = _mm256_set1_ps((float)i);
    for (size_t r = 0; r < rounds; r++)
        for (int i = 0; i < CHAINS; i++) sum[i] = _mm256_fmadd_ps(sum[i], a, b);
    for (int i = 1; i < CHAINS; i++) sum[0] = _mm256_add_ps(sum[0], sum[i]);
    _mm256_storeu_ps(out, sum[0]);
    return 8 * CHAINS;
}

/* The empty asm stands for a new value: products of the same would be computed once, and integer sums be taken in
 * another order, with products that wait in memory. Six sums of latency one have names: GCC keeps an array of them
 * in memory. */
#define OPAQUE(x) __asm__ volatile("" : "+v"(x))
#define MADD(sum, bits) OPAQUE(a); sum = _mm##bits##_add_epi32(sum, _mm##bits##_madd_epi16(a, b)); OPAQUE(sum)

#define MADD_LIMIT(bits)                                                                                        \
    size_t limit_madd_##bits(size_t rounds, float *out)                                                         \
    {                                                                                                           \
        __m##bits##i a = _mm##bits##_set1_epi16(3), b = _mm##bits##_set1_epi16(5);                              \
        __m##bits##i sum0 = _mm##bits##_set1_epi32(0), sum1 = sum0, sum2 = sum0;                                \
        __m##bits##i sum3 = sum0, sum4 = sum0, sum5 = sum0;                                                     \
        for (size_t r = 0; r < rounds; r++)                                                                     \
            for (int turn = 0; turn < 4; turn++) {                                                              \
                MADD(sum0, bits);                                                                               \
                MADD(sum1, bits);                                                                               \
                MADD(sum2, bits);                                                                               \
                MADD(sum3, bits);                                                                               \
                MADD(sum4, bits);                                                                               \
                MADD(sum5, bits);                                                                               \
            }                                                                                                   \
        sum0 = _mm##bits##_add_epi32(_mm##bits##_add_epi32(sum0, sum1), _mm##bits##_add_epi32(sum2, sum3));     \
        sum0 = _mm##bits##_add_epi32(sum0, _mm##bits##_add_epi32(sum4, sum5));                                  \
        _mm##bits##_storeu_ps(out, _mm##bits##_castsi##bits##_ps(sum0));                                        \
        return 4 * 6 * bits / 16;                                                                               \
    }

MADD_LIMIT(256)
WE_TARGET_POP

WE_TARGET_PUSH("avx512f,avx512bw")
size_t limit_fma_512(size_t rounds, float *out)
{
    __m512 sum[CHAINS], a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
    for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_set1_ps((float)i);
    for (size_t r = 0; r < rounds; r++)
        for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_fmadd_ps(sum[i], a, b);
    for (int i = 1; i < CHAINS; i++) sum[0] = _mm512_add_ps(sum[0], sum[i]);
    _mm512_storeu_ps(out, sum[0]);
    return 16 * CHAINS;
}

MADD_LIMIT(512)
WE_TARGET_POP

WE_TARGET_PUSH("avx512f,avx512bw,avx512vnni")
size_t limit_dpwssd_512(size_t rounds, float *out)
{
    __m512i sum[CHAINS], a = _mm512_set1_epi16(3), b = _mm512_set1_epi16(5);
    for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_set1_epi32(i);
    for (size_t r = 0; r < rounds; r++) {
        OPAQUE(a);
        for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_dpwssd_epi32(sum[i], a, b);
    }
    for (int i = 1; i < CHAINS; i++) sum[0] = _mm512_add_epi32(sum[0], sum[i]);
    _mm512_storeu_ps(out, _mm512_castsi512_ps(sum[0]));
    return 32 * CHAINS;
}
WE_TARGET_POP
size_t limit_fma_128(size_t rounds, float *out) { (void)rounds; (void)out; return 0; }
size_t limit_mlal_128(size_t rounds, float *out) { (void)rounds; (void)out; return 0; }

#else
size_t limit_fma_256(size_t rounds, float *out) { (void)rounds; (void)out; return 0; }
size_t limit_madd_256(size_t rounds, float *out) { (void)rounds; (void)out; return 0; }
size_t limit_fma_512(size_t rounds, float *out) { (void)rounds; (void)out; return 0; }
size_t limit_madd_512(size_t rounds, float *out) { (void)rounds; (void)out; return 0; }
size_t limit_dpwssd_512(size_t rounds, float *out) { (void)rounds; (void)out; return 0; }

#ifdef WE_ARM64
size_t limit_fma_128(size_t rounds, float *out)
{
    float32x4_t sum[CHAINS], a = vdupq_n_f32(0.999f), b = vdupq_n_f32(0.001f);
    for (int i = 0; i < CHAINS; i++) sum[i] = vdupq_n_f32((float)i);
    for (size_t r = 0; r < rounds; r++) {
        __asm__ volatile("" : "+w"(a));
        for (int i = 0; i < CHAINS; i++) sum[i] = vfmaq_f32(sum[i], a, b);
    }
    for (int i = 1; i < CHAINS; i++) sum[0] = vaddq_f32(sum[0], sum[i]);
    vst1q_f32(out, sum[0]);
    return 4 * CHAINS;
}

size_t limit_mlal_128(size_t rounds, float *out)
{
    int32x4_t sum[CHAINS];
    int16x4_t a = vdup_n_s16(3), b = vdup_n_s16(5);
    for (int i = 0; i < CHAINS; i++) sum[i] = vdupq_n_s32(i);
    for (size_t r = 0; r < rounds; r++) {
        __asm__ volatile("" : "+w"(a));
        for (int i = 0; i < CHAINS; i++) sum[i] = vmlal_s16(sum[i], a, b);
    }
    for (int i = 1; i < CHAINS; i++) sum[0] = vaddq_s32(sum[0], sum[i]);
    vst1q_f32(out, vreinterpretq_f32_s32(sum[0]));
    return 4 * CHAINS;
}
#else
size_t limit_fma_128(size_t rounds, float *out) { (void)rounds; (void)out; return 0; }
size_t limit_mlal_128(size_t rounds, float *out) { (void)rounds; (void)out; return 0; }
#endif
#endif
