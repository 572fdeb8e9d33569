/* How others do it: forms that the kernels are compared with. Correct, and as fast as that form allows. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "warp_embed/kernels.h"
#include "warp_embed/target.h"
#ifdef WE_X86
#include <immintrin.h>
#endif

static float f16_value(uint16_t h)
{
    const float sign = h >> 15 ? -1.0f : 1.0f;
    const int e = h >> 10 & 31;
    const float m = (float)(h & 1023);
    return sign * (e ? ldexpf(1024.0f + m, e - 25) : ldexpf(m, -24));
}

/* Q4G rows by one token, f32: nibbles are converted to floats, an FMA an element, the scale once a group. */
#ifdef WE_X86
WE_TARGET_PUSH("avx2,fma,f16c")
static float q4_row(const uint8_t *codes, const uint16_t *scales, const float *x, size_t cols, size_t group)
{
    __m256 sum = _mm256_setzero_ps();
    for (size_t g = 0; g * group < cols; g++) {
        __m256 part[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (size_t i = 0; i < group; i += 16) {        /* eight bytes hold sixteen codes, in order once interleaved */
            const __m128i pairs = _mm_loadl_epi64((const __m128i *)(const void *)(codes + (g * group + i) / 2));
            const __m128i low = _mm_and_si128(pairs, _mm_set1_epi8(15));
            const __m128i high = _mm_and_si128(_mm_srli_epi16(pairs, 4), _mm_set1_epi8(15));
            const __m128i code = _mm_sub_epi8(_mm_unpacklo_epi8(low, high), _mm_set1_epi8(8));
            const float *at = x + g * group + i;
            part[0] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(code)), _mm256_loadu_ps(at), part[0]);
            part[1] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(code, 8))),
                                      _mm256_loadu_ps(at + 8), part[1]);
        }
        sum = _mm256_fmadd_ps(_mm256_add_ps(part[0], part[1]), _mm256_set1_ps(_cvtsh_ss(scales[g])), sum);
    }
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
WE_TARGET_POP
#else
static float q4_row(const uint8_t *codes, const uint16_t *scales, const float *x, size_t cols, size_t group)
{
    float sum = 0;
    for (size_t g = 0; g * group < cols; g++) {
        float part = 0;
        for (size_t i = 0; i < group; i += 2) {
            const uint8_t pair = codes[(g * group + i) / 2];
            part += (float)((pair & 15) - 8) * x[g * group + i] + (float)((pair >> 4) - 8) * x[g * group + i + 1];
        }
        sum += part * f16_value(scales[g]);
    }
    return sum;
}
#endif

/* y[r] of rows [row0, row1). cols is a multiple of group, group of 16. */
void baseline_q4_float(const we_matrix *w, size_t row0, size_t row1, const float *x, float *y)
{
    const size_t n_groups = w->cols / w->group;
    for (size_t r = row0; r < row1; r++)
        y[r - row0] = q4_row((const uint8_t *)w->payload + r * w->row_bytes, w->scales + r * n_groups, x, w->cols,
                             w->group);
}

/* VQ rows by one token, with tables: table[v][s][e] = book[s][e] . x[v], built for a token, then a lookup a stage.
 * A tile of vectors at a time, so that its tables stay in the cache while all rows pass. work: 16 * stages * 256. */
enum { TILE = 16 };

#ifdef WE_X86
WE_TARGET_PUSH("avx2,fma")
static void fill_table(float *table, const float *book, const float *x)     /* 256 entries of 8 */
{
    const __m256 x_x8 = _mm256_loadu_ps(x);
    for (size_t e = 0; e < 256; e += 8) {
        __m256 p[8];
        for (size_t i = 0; i < 8; i++) p[i] = _mm256_mul_ps(_mm256_loadu_ps(book + 8 * (e + i)), x_x8);
        for (size_t i = 0; i < 4; i++) p[i] = _mm256_hadd_ps(p[2 * i], p[2 * i + 1]);
        for (size_t i = 0; i < 2; i++) p[i] = _mm256_hadd_ps(p[2 * i], p[2 * i + 1]);
        const __m128 low = _mm_add_ps(_mm256_castps256_ps128(p[0]), _mm256_extractf128_ps(p[0], 1));
        const __m128 high = _mm_add_ps(_mm256_castps256_ps128(p[1]), _mm256_extractf128_ps(p[1], 1));
        _mm_storeu_ps(table + e, low);
        _mm_storeu_ps(table + e + 4, high);
    }
}
WE_TARGET_POP
#else
static void fill_table(float *table, const float *book, const float *x)
{
    for (size_t e = 0; e < 256; e++) {
        float sum = 0;
        for (size_t d = 0; d < 8; d++) sum += book[8 * e + d] * x[d];
        table[e] = sum;
    }
}
#endif

void baseline_vq_tables(const we_matrix *w, size_t row0, size_t row1, const float *x, float *y, float *work)
{
    const size_t n_vecs = w->cols / 8, stages = w->stages;
    memset(y, 0, (row1 - row0) * sizeof *y);
    for (size_t v0 = 0; v0 < n_vecs; v0 += TILE) {
        const size_t n = n_vecs - v0 < TILE ? n_vecs - v0 : TILE;
        for (size_t v = 0; v < n; v++)
            for (size_t s = 0; s < stages; s++)
                fill_table(work + (v * stages + s) * 256, w->books + s * 256 * 8, x + 8 * (v0 + v));
        for (size_t r = row0; r < row1; r++) {
            const uint8_t *units = (const uint8_t *)w->payload
                                   + ((r / 64 * n_vecs + v0) * 64 + r % 64) * stages;
            float sum = 0;
            for (size_t v = 0; v < n; v++, units += 64 * stages) {
                const float *table = work + v * stages * 256;
                for (size_t s = 0; s < stages; s++) sum += table[s * 256 + units[s]];
            }
            y[r - row0] += sum;
        }
    }
    for (size_t r = row0; r < row1; r++) y[r - row0] *= f16_value(w->scales[r]);
}
