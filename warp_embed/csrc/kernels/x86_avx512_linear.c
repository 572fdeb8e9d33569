/* AVX-512: products in f32 of F32, BF16 and vector-quantised weights with many tokens, and the transposed product of
 * Q8G and Q4G with one.
 *
 * A (row, token) has the eight sums of AVX2, in the same order, so that one token, which AVX2 serves, gives the same
 * bits. A vector holds the sums of two rows, and eight inputs go to both halves. A tile of rows is decoded once for
 * all tokens whose sums wait in memory. */
#include "x86_avx512.h"
#ifdef WE_X86_AVX512
WE_TARGET_PUSH(WE_AVX512)

enum {
    ROWS = 16, PAIRS = ROWS / 2, COLS = 256,    /* of a tile that is decoded at a time             */
    TILE_PAIRS = 4, TILE_TOKENS = 6,            /* whose sums are in registers                     */
    TOKENS = 16 * TILE_TOKENS,                  /* whose sums wait in memory                       */
    AHEAD_ROWS = 16                             /* that the transposed product prefetches          */
};

EXPANDED __m256 load_x8(const float *x, size_t n)
{
    return n >= 8 ? _mm256_loadu_ps(x) : _mm256_maskz_loadu_ps((__mmask8)lanes_below(n), x);
}

EXPANDED __m256 load_bf16_x8(const uint16_t *x, size_t n)
{
    const __m128i half = n >= 8 ? _mm_loadu_si128((const __m128i *)(const void *)x)
                                : _mm_maskz_loadu_epi16((__mmask8)lanes_below(n), x);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* out[c / 8][i]: columns c .. c + 7 of row i, for columns [c0, c1), zeros behind; without the scales of VQ. */
static void decode_tile(const we_matrix *w, size_t row, size_t n_rows, size_t c0, size_t c1, float (*out)[ROWS][8])
{
    if (we_is_vq(w)) {
        we_avx2_vq_tile(w, row, n_rows, c0, c1, out[0][0], 8, 8 * ROWS);
        return;
    }
    const int is_f32 = w->encoding == WE_F32;
    const size_t next = ROWS * (size_t)w->cols;
    for (size_t i = 0; i < n_rows; i++) {
        const size_t at = (row + i) * w->cols + c0;
        const float *x = (const float *)w->payload + at;
        const uint16_t *half = (const uint16_t *)w->payload + at;
        for (size_t c = 0; c < c1 - c0; c += 8) {
            _mm_prefetch(is_f32 ? (const char *)(x + c + next) : (const char *)(half + c + next), _MM_HINT_T1);
            _mm256_storeu_ps(out[c / 8][i], is_f32 ? load_x8(x + c, c1 - c0 - c) : load_bf16_x8(half + c, c1 - c0 - c));
        }
    }
}

/* Eight columns, or n; n_tokens is a constant. */
EXPANDED void product_step(const __m512 *tile, const float *x, size_t x_stride, size_t n,
                           __m512 sum[][TILE_PAIRS], const size_t n_tokens)
{
    __m512 pair[TILE_PAIRS];
    WE_UNROLL
    for (size_t p = 0; p < TILE_PAIRS; p++) pair[p] = tile[p];
    WE_UNROLL
    for (size_t u = 0; u < n_tokens; u++) {
        const __m512 x_x8 = _mm512_broadcast_f32x8(load_x8(x + u * x_stride, n));
        WE_UNROLL
        for (size_t p = 0; p < TILE_PAIRS; p++) sum[u][p] = _mm512_fmadd_ps(pair[p], x_x8, sum[u][p]);
    }
}

/* sums[t][p] += pair p of the tile by token t, for some tokens and TILE_PAIRS pairs. */
EXPANDED void product(__m512 sums[][PAIRS], const __m512 *tile, const float *x, size_t x_stride, size_t n_cols,
                      const size_t n_tokens)
{
    __m512 sum[TILE_TOKENS][TILE_PAIRS];
    WE_UNROLL
    for (size_t u = 0; u < n_tokens; u++)
        for (size_t p = 0; p < TILE_PAIRS; p++) sum[u][p] = sums[u][p];
    size_t c = 0;
    for (; c + 8 <= n_cols; c += 8, tile += PAIRS) product_step(tile, x + c, x_stride, 8, sum, n_tokens);
    if (c < n_cols) product_step(tile, x + c, x_stride, n_cols - c, sum, n_tokens);
    WE_UNROLL
    for (size_t u = 0; u < n_tokens; u++)
        for (size_t p = 0; p < TILE_PAIRS; p++) sums[u][p] = sum[u][p];
}

static void tile_product(__m512 sums[][PAIRS], const __m512 *tile, size_t n_rows, const float *x, size_t x_stride,
                         size_t n, size_t n_cols)
{
    for (size_t t = 0, step; t < n; t += step) {
        const float *x_t = x + t * x_stride;
        step = n - t >= TILE_TOKENS ? TILE_TOKENS : n - t >= 4 ? 4 : n - t >= 2 ? 2 : 1;
        for (size_t p = 0; 2 * p < n_rows; p += TILE_PAIRS) {
            __m512 (*to)[PAIRS] = (__m512 (*)[PAIRS])(void *)&sums[t][p];
            if (step == TILE_TOKENS) product(to, tile + p, x_t, x_stride, n_cols, TILE_TOKENS);
            else if (step == 4)      product(to, tile + p, x_t, x_stride, n_cols, 4);
            else if (step == 2)      product(to, tile + p, x_t, x_stride, n_cols, 2);
            else                     product(to, tile + p, x_t, x_stride, n_cols, 1);
        }
    }
}

/* Lane i: the total of row i; as AVX2's sum_lanes, ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)). */
EXPANDED __m512 totals(const __m512 sums[PAIRS])
{
    __m512 four[4], two[2];
    WE_UNROLL
    for (size_t i = 0; i < 4; i++)                  /* 0 + 4 ... 3 + 7 of rows 4 i .. 4 i + 3 */
        four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(sums[2 * i], sums[2 * i + 1], 0x88),
                                _mm512_shuffle_f32x4(sums[2 * i], sums[2 * i + 1], 0xdd));
    WE_UNROLL
    for (size_t i = 0; i < 2; i++) {
        const __m512d a = _mm512_castps_pd(four[2 * i]), b = _mm512_castps_pd(four[2 * i + 1]);
        two[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 sum = _mm512_add_ps(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xdd));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_ps(order, sum);       /* from row 4 a + b at 4 b + a */
}

/* Rows [row, row + n_rows) by n <= TOKENS tokens; n_rows <= ROWS. */
static void float_rows(const we_matrix *w, size_t row, size_t n_rows, const float *x, size_t x_stride, size_t n,
                       float *y, size_t y_stride)
{
    const __mmask16 some = (__mmask16)((1u << n_rows) - 1);
    __m512 tile[COLS / 8][PAIRS], sums[TOKENS][PAIRS], scale = _mm512_set1_ps(1);
    if (n_rows < ROWS) memset(tile, 0, sizeof tile);
    memset(sums, 0, n * sizeof sums[0]);
    for (size_t c0 = 0; c0 < w->cols; c0 += COLS) {
        const size_t c1 = we_min(c0 + COLS, w->cols);
        decode_tile(w, row, n_rows, c0, c1, (float (*)[ROWS][8])(void *)tile);
        tile_product(sums, tile[0], n_rows, x + c0, x_stride, n, c1 - c0);
    }
    if (we_is_vq(w)) scale = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, w->scales + row));
    for (size_t t = 0; t < n; t++) _mm512_mask_storeu_ps(y + t * y_stride, some, _mm512_mul_ps(scale, totals(sums[t])));
}

void we_avx512_matmul_float(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                            size_t y_stride)
{
    for (size_t r = row0; r < row1; r += ROWS)
        for (size_t t = 0; t < n; t += TOKENS)
            float_rows(w, r, we_min(ROWS, row1 - r), a->x + t * a->x_stride, a->x_stride, we_min(TOKENS, n - t),
                       y + t * y_stride + (r - row0), y_stride);
}

/* ------------------------------------------------- the transposed product ---- */

/* y[0 .. 128) = sum over rows [row0, row1) of x[r - row0] times group g, row after row; kind is a constant. */
EXPANDED void group_t(const we_matrix *w, size_t row0, size_t row1, size_t g, const float *x, float *y, const int kind)
{
    const size_t n_groups = we_n_groups(w), step = w->row_bytes, group_bytes = kind == WE_Q8G ? 128 : 64;
    const uint8_t *codes = (const uint8_t *)w->payload + row0 * step + g * group_bytes;
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    __m512 sum[8];
    WE_UNROLL
    for (size_t i = 0; i < 8; i++) sum[i] = _mm512_setzero_ps();
    for (size_t r = row0; r < row1; r++, codes += step) {
        const __m512 scale = _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(w->scales[r * n_groups + g])));
        const __m512 x_r = _mm512_set1_ps(x[r - row0]), table = _mm512_mul_ps(scale, values);
        for (size_t b = 0; b < group_bytes; b += 64)
            _mm_prefetch((const char *)codes + AHEAD_ROWS * step + b, _MM_HINT_T0);
        WE_UNROLL
        for (size_t i = 0; i < 8; i++) {
            const size_t at = kind == WE_Q8G ? 16 * i : i / 2 * 16;
            const __m128i some = _mm_loadu_si128((const __m128i *)(const void *)(codes + at));
            __m512 weights;
            if (kind == WE_Q8G) weights = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(some)));
            else {                      /* even elements in sum[2 j], odd ones in sum[2 j + 1] */
                const __m512i pairs = _mm512_cvtepu8_epi32(some);
                weights = _mm512_permutexvar_ps(i % 2 ? _mm512_srli_epi32(pairs, 4) : pairs, table);
            }
            sum[i] = _mm512_fmadd_ps(x_r, weights, sum[i]);
        }
    }
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (size_t i = 0; i < 8; i += 2) {
        const __m512 a = sum[i], b = sum[i + 1];
        _mm512_storeu_ps(y + 16 * i, kind == WE_Q8G ? a : _mm512_permutex2var_ps(a, low, b));
        _mm512_storeu_ps(y + 16 * i + 16, kind == WE_Q8G ? b : _mm512_permutex2var_ps(a, high, b));
    }
}

void we_avx512_matmul_t(const we_matrix *w, size_t row0, size_t row1, const float *x, size_t x_stride, size_t n,
                        float *y, size_t y_stride, float *row)
{
    const int in_groups = (w->encoding == WE_Q8G || w->encoding == WE_Q4G) && w->group == 128 && w->cols % 128 == 0;
    if (n != 1 || !in_groups) {
        we_avx2.matmul_t(w, row0, row1, x, x_stride, n, y, y_stride, row);
        return;
    }
    for (size_t g = 0; g < w->cols / 128; g++) {
        if (w->encoding == WE_Q8G) group_t(w, row0, row1, g, x, y + 128 * g, WE_Q8G);
        else                       group_t(w, row0, row1, g, x, y + 128 * g, WE_Q4G);
    }
}

WE_TARGET_POP
#else
typedef int we_no_avx512_linear;    /* ISO C wants a declaration in every file */
#endif
