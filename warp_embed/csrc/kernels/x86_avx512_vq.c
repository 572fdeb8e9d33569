/* AVX-512: residual vector quantisation. Lanes are vectors: every entry of a codebook is compared with 32 of them, so
 * that nothing is transposed but the vectors, and the lowest of equal entries is the first that is met. */
#include <math.h>
#include "x86_avx512.h"
#ifdef WE_X86_AVX512
WE_TARGET_PUSH(WE_AVX512)

enum { VECTORS = 32, HALVES = VECTORS / 16, MOST_ENTRIES = 256 };

/* |c|^2 / 2, which less x . c orders as |x - c|^2 does; summed as AVX2 does. */
static void half_norms(float *out, const float *book, unsigned entries)
{
    for (unsigned e = 0; e < entries; e++) {
        float norm = 0;
        for (size_t d = 0; d < 8; d++) norm += book[8 * e + d] * book[8 * e + d];
        out[e] = norm / 2;
    }
}

/* best[v]: the entry nearest to vector v, left[0 .. 8)[v]. */
static void nearest(const float *book, const float *half_norm, unsigned entries, float left[8][VECTORS],
                    uint32_t best[VECTORS])
{
    __m512 x[HALVES][8], least[HALVES];
    __m512i at[HALVES];
    WE_UNROLL
    for (size_t h = 0; h < HALVES; h++) {
        least[h] = _mm512_set1_ps(INFINITY);
        at[h] = _mm512_setzero_si512();
        WE_UNROLL
        for (size_t d = 0; d < 8; d++) x[h][d] = _mm512_loadu_ps(left[d] + 16 * h);
    }
    for (unsigned e = 0; e < entries; e++, book += 8) {
        __m512 score[HALVES];
        WE_UNROLL
        for (size_t h = 0; h < HALVES; h++) score[h] = _mm512_set1_ps(half_norm[e]);
        WE_UNROLL
        for (size_t d = 0; d < 8; d++) {
            const __m512 c = _mm512_set1_ps(book[d]);
            WE_UNROLL
            for (size_t h = 0; h < HALVES; h++) score[h] = _mm512_fnmadd_ps(x[h][d], c, score[h]);
        }
        WE_UNROLL
        for (size_t h = 0; h < HALVES; h++) {
            const __mmask16 less = _mm512_cmp_ps_mask(score[h], least[h], _CMP_LT_OQ);
            least[h] = _mm512_mask_blend_ps(less, least[h], score[h]);
            at[h] = _mm512_mask_blend_epi32(less, at[h], _mm512_set1_epi32((int)e));
        }
    }
    for (size_t h = 0; h < HALVES; h++) _mm512_storeu_si512(best + 16 * h, at[h]);
}

void we_avx512_vq_encode(uint8_t *index, float *residual, const float *x, const float *books, size_t n, unsigned stages,
                         unsigned entries)
{
    float left[8][VECTORS] = {{0}}, half_norm[8][MOST_ENTRIES];
    uint32_t best[VECTORS];
    for (unsigned s = 0; s < stages; s++) half_norms(half_norm[s], books + (size_t)s * entries * 8, entries);
    for (size_t i0 = 0; i0 < n; i0 += VECTORS) {
        const size_t n_here = we_min(VECTORS, n - i0);
        for (size_t i = 0; i < n_here; i++)
            for (size_t d = 0; d < 8; d++) left[d][i] = x[8 * (i0 + i) + d];
        for (unsigned s = 0; s < stages; s++) {
            const float *book = books + (size_t)s * entries * 8;
            nearest(book, half_norm[s], entries, left, best);
            for (size_t i = 0; i < n_here; i++) {
                index[(i0 + i) * stages + s] = (uint8_t)best[i];
                for (size_t d = 0; d < 8; d++) left[d][i] -= book[8 * best[i] + d];
            }
        }
        for (size_t i = 0; i < n_here && residual; i++)
            for (size_t d = 0; d < 8; d++) residual[8 * (i0 + i) + d] = left[d][i];
    }
}

WE_TARGET_POP
#else
typedef int we_no_avx512_vq;        /* ISO C wants a declaration in every file */
#endif
