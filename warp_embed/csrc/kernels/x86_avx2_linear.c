/* AVX2: decoding, encoding by groups, activations as integers, products in f32.
 *
 * In a product in f32 a (row, token) has eight sums, one per lane; columns 8 j + l go to lane l, in order, by FMA; the
 * end of a row is filled with zeros. Many tokens share decoded pieces of rows, whose sums wait in memory. */
#include "x86_avx2.h"
#ifdef WE_X86
WE_TARGET_PUSH("avx2,fma,f16c")

enum {
    ROWS = 8, COLS = 256,               /* of a piece that is decoded at a time     */
    TILE_ROWS = 4, TILE_TOKENS = 3,     /* whose sums are in registers              */
    TOKENS = 96                         /* that share a piece: sums wait in memory  */
};
typedef float lanes[8];

/* --------------------------------------------------------------- decoding ---- */

static void decode_bf16(const uint16_t *x, size_t n, float *y)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(x + i)));
        _mm256_storeu_ps(y + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
    }
    we_ref_bf16_to_f32(y + i, x + i, n - i);
}

/* Sixteen codes in order, as int8. */
EXPANDED __m128i codes_x16(const uint8_t *codes, size_t c, const int kind)
{
    if (kind == WE_Q8G) return _mm_loadu_si128((const __m128i *)(const void *)(codes + c));
    const __m128i pairs = _mm_loadl_epi64((const __m128i *)(const void *)(codes + c / 2)), low = _mm_set1_epi8(15);
    const __m128i evens = _mm_and_si128(pairs, low), odds = _mm_and_si128(_mm_srli_epi16(pairs, 4), low);
    const __m128i nibbles = _mm_unpacklo_epi8(evens, odds);
    if (kind == WE_Q4G) return _mm_sub_epi8(nibbles, _mm_set1_epi8(8));
    return _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)we_e2m1_doubled), nibbles);
}

/* y[0 .. n) from column c, n <= 16. */
EXPANDED void decode_x16(const uint8_t *codes, size_t c, size_t n, __m256 scale, const int kind, float *y)
{
    const __m128i code = codes_x16(codes, c, kind);
    const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(code));
    const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(code, 8)));
    store_some(y, _mm256_mul_ps(scale, low), n);
    if (n > 8) store_some(y + 8, _mm256_mul_ps(scale, high), n - 8);
}

static int has_groups_of_16(const we_matrix *w)
{
    return (w->encoding == WE_Q8G || w->encoding == WE_Q4G || w->encoding == WE_MXFP4) && w->group % 16 == 0;
}

/* Columns [c0, c1) of a row; c0 is a multiple of 16, and so is the group; rows are padded to whole groups. */
EXPANDED void decode_kind(const we_matrix *w, size_t row, size_t c0, size_t c1, float *y, const int kind)
{
    const uint8_t *codes = (const uint8_t *)w->payload + row * w->row_bytes;
    const size_t first = row * we_n_groups(w);
    for (size_t g = c0 / w->group, c = c0; c < c1; g++) {
        const size_t end = we_min((g + 1) * w->group, c1);
        const float value = kind == WE_MXFP4 ? we_e8m0_halved(we_e8m0_scales(w)[first + g])
                                             : _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(w->scales[first + g])));
        const __m256 scale = _mm256_set1_ps(value);
        for (; c + 16 <= end; c += 16, y += 16) decode_x16(codes, c, 16, scale, kind, y);
        if (c < end) decode_x16(codes, c, end - c, scale, kind, y);
        c = end;
    }
}

static void decode_groups(const we_matrix *w, size_t row, size_t c0, size_t c1, float *y)
{
    switch (w->encoding) {
    case WE_Q8G: decode_kind(w, row, c0, c1, y, WE_Q8G); break;
    case WE_Q4G: decode_kind(w, row, c0, c1, y, WE_Q4G); break;
    default:     decode_kind(w, row, c0, c1, y, WE_MXFP4); break;
    }
}

static void scale_row(float *y, float scale, size_t n)
{
    for (size_t i = 0; i < n; i += 8)
        store_some(y + i, _mm256_mul_ps(load_some(y + i, n - i), _mm256_set1_ps(scale)), n - i);
}

static int is_vq8(const we_matrix *w) { return we_is_vq(w) && w->vec_dim == 8; }

void we_avx2_decode_rows(const we_matrix *w, size_t row0, size_t row1, float *y, size_t y_stride)
{
    for (size_t r = row0; r < row1; r++, y += y_stride) {
        if (w->encoding == WE_BF16) {
            decode_bf16((const uint16_t *)w->payload + r * w->cols, w->cols, y);
        } else if (has_groups_of_16(w)) {
            decode_groups(w, r, 0, w->cols, y);
        } else if (is_vq8(w)) {
            we_avx2_vq_tile(w, r, 1, 0, w->cols, y, 0, 8);
            scale_row(y, we_f16_value(w->scales[r]), w->cols);
        } else {
            we_ref_decode_rows(w, r, r + 1, y, y_stride);
        }
    }
}

/* --------------------------------------------------------------- encoding ---- */

/* As in the reference: NaN does not count. */
static float group_scale(const float *x, size_t n, float q_max)
{
    __m256 largest = _mm256_set1_ps(1e-8f);
    for (size_t i = 0; i < n; i += 8) largest = _mm256_max_ps(magnitude_x8(load_some(x + i, n - i)), largest);
    return largest_lane(largest) / q_max;
}

/* Sixteen codes of x[0 .. n), zeros behind; NaN gives lo by the operand order of max. */
EXPANDED __m128i encode_x16(const float *x, size_t n, __m256 scale, float lo, float hi)
{
    __m256i code[2];
    for (size_t k = 0; k < 2; k++) {
        const __m256 v = n > 8 * k ? load_some(x + 8 * k, n - 8 * k) : _mm256_setzero_ps();
        const __m256 above = _mm256_max_ps(_mm256_div_ps(v, scale), _mm256_set1_ps(lo));
        code[k] = _mm256_cvtps_epi32(_mm256_min_ps(above, _mm256_set1_ps(hi)));
    }
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(code[0], code[1]), 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

void we_avx2_encode_q8g(int8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols, size_t group)
{
    if (group % 16) {
        we_ref_encode_q8g(payload, scales, x, rows, cols, group);
        return;
    }
    for (size_t r = 0; r < rows; r++, x += cols) {
        for (size_t c0 = 0; c0 < cols; c0 += group, payload += group) {
            const size_t n = we_min(group, cols - c0);
            const float scale = group_scale(x + c0, n, 127);
            for (size_t i = 0; i < group; i += 16) {
                const size_t at = we_min(i, n);
                const __m128i codes = encode_x16(x + c0 + at, n - at, _mm256_set1_ps(scale), -127, 127);
                _mm_storeu_si128((__m128i *)(void *)(payload + i), codes);
            }
            *scales++ = we_f16_bits(scale);
        }
    }
}

void we_avx2_encode_q4g(uint8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols, size_t group)
{
    if (group % 16) {
        we_ref_encode_q4g(payload, scales, x, rows, cols, group);
        return;
    }
    for (size_t r = 0; r < rows; r++, x += cols) {
        for (size_t c0 = 0; c0 < cols; c0 += group, payload += group / 2) {
            const size_t n = we_min(group, cols - c0);
            const float scale = group_scale(x + c0, n, 7);
            for (size_t i = 0; i < group; i += 16) {
                const size_t at = we_min(i, n);
                const __m128i codes = encode_x16(x + c0 + at, n - at, _mm256_set1_ps(scale), -8, 7);
                const __m128i nibbles = _mm_add_epi8(codes, _mm_set1_epi8(8));
                const __m128i pairs = _mm_maddubs_epi16(nibbles, _mm_set1_epi16(0x1001));   /* even + 16 odd */
                _mm_storel_epi64((__m128i *)(void *)(payload + i / 2), _mm_packus_epi16(pairs, pairs));
            }
            *scales++ = we_f16_bits(scale);
        }
    }
}

/* ------------------------------------------------- activations as integers ---- */

static float largest_magnitude(const float *x, size_t n)    /* as bits, so that NaN is not lost */
{
    __m256i largest = _mm256_setzero_si256();
    for (size_t i = 0; i < n; i += 8)
        largest = _mm256_max_epi32(largest, _mm256_castps_si256(magnitude_x8(load_some(x + i, n - i))));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    m = _mm_max_epi32(m, _mm_unpackhi_epi64(m, m));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 1));
    return we_bits_float((uint32_t)_mm_cvtsi128_si32(m));
}

/* x[0 .. n) / scale to nearest even, zeros behind. */
EXPANDED __m256i quantize_x8(const float *x, size_t n, __m256 scale)
{
    const __m256 ratio = _mm256_div_ps(load_some(x, n), scale), most = _mm256_set1_ps(WE_Q_MAX);
    return _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(ratio, most), _mm256_sub_ps(_mm256_setzero_ps(), most)));
}

static void quantize_group(const float *x, size_t n, size_t group, int16_t *q, int16_t *halves, float *scale,
                           int32_t *bias)
{
    const __m256i by_parity = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
                                               0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const float s = largest_magnitude(x, n) / WE_Q_MAX;
    const __m256 scale_x8 = _mm256_set1_ps(s);
    const int usable = s > 0 && s < we_bits_float(0x7f800000);
    __m256i sums = _mm256_setzero_si256();
    for (size_t i = 0; i < group; i += 16) {
        __m256i words = _mm256_setzero_si256();
        if (usable && i < n) {
            const __m256i low = quantize_x8(x + i, n - i, scale_x8);
            const __m256i high = n - i > 8 ? quantize_x8(x + i + 8, n - i - 8, scale_x8) : words;
            words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        }
        const __m256i split = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(words, by_parity), 0xd8);
        _mm256_storeu_si256((__m256i *)(void *)(q + i), words);
        _mm_storeu_si128((__m128i *)(void *)(halves + i / 2), _mm256_castsi256_si128(split));
        _mm_storeu_si128((__m128i *)(void *)(halves + group / 2 + i / 2), _mm256_extracti128_si256(split, 1));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
    }
    int32_t lane[8], sum = 0;
    _mm256_storeu_si256((__m256i *)(void *)lane, sums);
    for (size_t l = 0; l < 8; l++) sum += lane[l];
    *scale = s;
    *bias = -8 * sum;
}

void we_avx2_quantize(const we_acts *a, size_t t0, size_t t1, size_t cols)
{
    const size_t group = a->group;
    for (size_t t = t0; t < t1; t++) {
        for (size_t c = 0, g = 0; c < cols; c += group, g++) {
            const size_t at = t * a->scale_stride + g;
            quantize_group(a->x + t * a->x_stride + c, we_min(group, cols - c), group, a->q + t * a->q_stride + c,
                           a->q_halves + t * a->q_stride + c, a->scale + at, a->bias + at);
        }
    }
}

/* --------------------------------------------------------- products in f32 ---- */

/* Columns [c, c + n), n <= 8. */
EXPANDED void product_step(const float *tile, size_t stride, const float *x, size_t x_stride, size_t c, size_t n,
                           __m256 sum[][TILE_TOKENS], const size_t n_rows, const size_t n_tokens)
{
    __m256 x_x8[TILE_TOKENS];
    for (size_t u = 0; u < n_tokens; u++) {
        if (n_tokens > 1 && n == 8)                 /* the next tokens */
            _mm_prefetch((const char *)(x + (u + n_tokens) * x_stride + c), _MM_HINT_T0);
        x_x8[u] = load_some(x + u * x_stride + c, n);
    }
    for (size_t i = 0; i < n_rows; i++) {
        const __m256 w = load_some(tile + i * stride + c, n);
        for (size_t u = 0; u < n_tokens; u++) sum[i][u] = _mm256_fmadd_ps(w, x_x8[u], sum[i][u]);
    }
}

/* sums[t][i] += tile row i by token t; n_rows and n_tokens are constants. */
EXPANDED void product(lanes sums[][ROWS], const float *tile, size_t stride, const float *x, size_t x_stride,
                           size_t n_cols, const size_t n_rows, const size_t n_tokens)
{
    __m256 sum[TILE_ROWS][TILE_TOKENS];
    for (size_t i = 0; i < n_rows; i++)
        for (size_t u = 0; u < n_tokens; u++) sum[i][u] = _mm256_loadu_ps(sums[u][i]);
    size_t c = 0;
    for (; c + 8 <= n_cols; c += 8) product_step(tile, stride, x, x_stride, c, 8, sum, n_rows, n_tokens);
    if (c < n_cols) product_step(tile, stride, x, x_stride, c, n_cols - c, sum, n_rows, n_tokens);
    for (size_t i = 0; i < n_rows; i++)
        for (size_t u = 0; u < n_tokens; u++) _mm256_storeu_ps(sums[u][i], sum[i][u]);
}

static void tile_product(lanes sums[][ROWS], const float *tile, size_t stride, size_t n_rows, const float *x,
                         size_t x_stride, size_t n, size_t n_cols)
{
    for (size_t t = 0, step; t < n; t += step) {
        const float *x_t = x + t * x_stride;
        step = n - t >= TILE_TOKENS ? TILE_TOKENS : 1;
        for (size_t i = 0, rows; i < n_rows; i += rows) {
            lanes (*to)[ROWS] = (lanes (*)[ROWS])(void *)&sums[t][i];       /* row i as if it were the first */
            const float *from = tile + i * stride;
            rows = n_rows - i >= TILE_ROWS ? TILE_ROWS : 1;
            if (rows == 1 && step == 1) product(to, from, stride, x_t, x_stride, n_cols, 1, 1);
            else if (rows == 1)         product(to, from, stride, x_t, x_stride, n_cols, 1, TILE_TOKENS);
            else if (step == 1)         product(to, from, stride, x_t, x_stride, n_cols, TILE_ROWS, 1);
            else                        product(to, from, stride, x_t, x_stride, n_cols, TILE_ROWS, TILE_TOKENS);
        }
    }
}

/* Columns [c0, c1) of some rows: in place for F32, else decoded to piece; *stride is set. */
static const float *rows_piece(const we_matrix *w, size_t row, size_t n_rows, size_t c0, size_t c1, float *piece,
                               size_t *stride)
{
    *stride = w->encoding == WE_F32 ? w->cols : COLS;
    if (w->encoding == WE_F32) return (const float *)w->payload + row * w->cols + c0;
    if (is_vq8(w)) we_avx2_vq_tile(w, row, n_rows, c0, c1, piece, COLS, 8);
    for (size_t i = 0; i < n_rows && !is_vq8(w); i++) {
        if (w->encoding != WE_BF16) decode_groups(w, row + i, c0, c1, piece + i * COLS);
        else decode_bf16((const uint16_t *)w->payload + (row + i) * w->cols + c0, c1 - c0, piece + i * COLS);
    }
    return piece;
}

/* Rows [row, row + n_rows) by n <= TOKENS tokens; n_rows <= ROWS. */
static void float_rows(const we_matrix *w, size_t row, size_t n_rows, const float *x, size_t x_stride, size_t n,
                       float *y, size_t y_stride)
{
    float piece[ROWS * COLS];
    lanes sums[TOKENS][ROWS];
    memset(sums, 0, n * sizeof sums[0]);
    for (size_t c0 = 0; c0 < w->cols; c0 += COLS) {
        const size_t c1 = we_min(c0 + COLS, w->cols);
        size_t stride;
        const float *tile = rows_piece(w, row, n_rows, c0, c1, piece, &stride);
        tile_product(sums, tile, stride, n_rows, x + c0, x_stride, n, c1 - c0);
    }
    for (size_t i = 0; i < n_rows; i++) {
        const float scale = is_vq8(w) ? we_f16_value(w->scales[row + i]) : 1;
        for (size_t t = 0; t < n; t++) y[t * y_stride + i] = scale * sum_lanes(_mm256_loadu_ps(sums[t][i]));
    }
}

/* Columns [c, c + n) of a row of F32 or BF16, n <= 8; kind is a constant. */
EXPANDED __m256 plain_x8(const we_matrix *w, size_t row, size_t c, size_t n, const int kind)
{
    const size_t at = row * w->cols + c;
    if (kind == WE_F32) return load_some((const float *)w->payload + at, n);
    uint16_t some[8] = {0};
    const uint16_t *x = (const uint16_t *)w->payload + at;
    if (n < 8) x = memcpy(some, x, n * sizeof *x);
    const __m128i half = _mm_loadu_si128((const __m128i *)(const void *)x);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* Rows by one token, straight from memory, in the order of float_rows; n_rows <= TILE_ROWS and kind are constants. */
EXPANDED void plain_rows(const we_matrix *w, size_t row, const float *x, float *y, const size_t n_rows, const int kind)
{
    const char *payload = (const char *)w->payload + row * w->row_bytes;
    const size_t cols = w->cols, whole = cols / 8 * 8, row_bytes = w->row_bytes, element = kind == WE_F32 ? 4 : 2;
    __m256 sum[TILE_ROWS];
    for (size_t i = 0; i < n_rows; i++) sum[i] = _mm256_setzero_ps();
    for (size_t c = 0; c < whole; c += 8) {
        const __m256 x_x8 = _mm256_loadu_ps(x + c);
        for (size_t i = 0; i < n_rows; i++) {
            _mm_prefetch(payload + (TILE_ROWS + i) * row_bytes + c * element, _MM_HINT_T0);      /* the next rows */
            sum[i] = _mm256_fmadd_ps(plain_x8(w, row + i, c, 8, kind), x_x8, sum[i]);
        }
    }
    for (size_t i = 0; i < n_rows; i++) {
        const size_t n = cols - whole;
        if (n) sum[i] = _mm256_fmadd_ps(plain_x8(w, row + i, whole, n, kind), load_some(x + whole, n), sum[i]);
        y[i] = sum_lanes(sum[i]);
    }
}

EXPANDED void plain_token(const we_matrix *w, size_t row0, size_t row1, const float *x, float *y, const int kind)
{
    size_t r = row0;
    for (; r + TILE_ROWS <= row1; r += TILE_ROWS) plain_rows(w, r, x, y + (r - row0), TILE_ROWS, kind);
    for (; r < row1; r++) plain_rows(w, r, x, y + (r - row0), 1, kind);
}

void we_avx2_matmul(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y, size_t y_stride)
{
    if (we_takes_integers(w, a)) {
        we_avx2_matmul_integer(w, row0, row1, a, n, y, y_stride);
    } else if (is_vq8(w) && n == 1) {
        we_avx2_vq_token(w, row0, row1, a->x, y);
    } else if (w->encoding == WE_F32 && n == 1) {
        plain_token(w, row0, row1, a->x, y, WE_F32);
    } else if (w->encoding == WE_BF16 && n == 1) {
        plain_token(w, row0, row1, a->x, y, WE_BF16);
    } else if (is_vq8(w) || has_groups_of_16(w) || w->encoding == WE_F32 || w->encoding == WE_BF16) {
        for (size_t r = row0; r < row1; r += ROWS)
            for (size_t t = 0; t < n; t += TOKENS)
                float_rows(w, r, we_min(ROWS, row1 - r), a->x + t * a->x_stride, a->x_stride, we_min(TOKENS, n - t),
                           y + t * y_stride + (r - row0), y_stride);
    } else {
        we_ref_matmul(w, row0, row1, a, n, y, y_stride);
    }
}

/* y[u][0 .. n) += x[u][i] tile[i][0 .. n), row after row; n_tokens and n_vectors are constants, n fills the vectors but
 * for the last lanes of a single one. */
EXPANDED void add_rows(float *y, size_t y_stride, const float *x, size_t x_stride, const float *tile, size_t stride,
                       size_t n_rows, size_t n, const size_t n_tokens, const size_t n_vectors)
{
    const size_t lanes_used = n_vectors == 1 ? n : 8;
    __m256 sum[TILE_TOKENS][4];
    for (size_t u = 0; u < n_tokens; u++)
        for (size_t v = 0; v < n_vectors; v++) sum[u][v] = load_some(y + u * y_stride + 8 * v, lanes_used);
    for (size_t i = 0; i < n_rows; i++) {
        __m256 factor[TILE_TOKENS];
        for (size_t u = 0; u < n_tokens; u++) factor[u] = _mm256_broadcast_ss(x + u * x_stride + i);
        for (size_t v = 0; v < n_vectors; v++) {
            const __m256 w = load_some(tile + i * stride + 8 * v, lanes_used);
            for (size_t u = 0; u < n_tokens; u++) sum[u][v] = _mm256_fmadd_ps(factor[u], w, sum[u][v]);
        }
    }
    for (size_t u = 0; u < n_tokens; u++)
        for (size_t v = 0; v < n_vectors; v++) store_some(y + u * y_stride + 8 * v, sum[u][v], lanes_used);
}

/* The same for any n and n_cols. */
static void add_tile(float *y, size_t y_stride, const float *x, size_t x_stride, size_t n, const float *tile,
                     size_t stride, size_t n_rows, size_t n_cols)
{
    for (size_t c = 0, some; c < n_cols; c += some, y += some, tile += some) {
        some = n_cols - c >= 32 ? 32 : we_min(8, n_cols - c);
        size_t t = 0;
        for (; some == 32 && t + TILE_TOKENS <= n; t += TILE_TOKENS)
            add_rows(y + t * y_stride, y_stride, x + t * x_stride, x_stride, tile, stride, n_rows, 32, TILE_TOKENS, 4);
        for (; t < n; t++) {
            float *y_t = y + t * y_stride;
            if (some == 32) add_rows(y_t, 0, x + t * x_stride, 0, tile, stride, n_rows, 32, 1, 4);
            else            add_rows(y_t, 0, x + t * x_stride, 0, tile, stride, n_rows, some, 1, 1);
        }
    }
}

void we_avx2_matmul_t(const we_matrix *w, size_t row0, size_t row1, const float *x, size_t x_stride, size_t n, float *y,
                      size_t y_stride, float *row)
{
    const int in_pieces = has_groups_of_16(w) || w->encoding == WE_F32 || w->encoding == WE_BF16;
    float piece[ROWS * COLS];
    for (size_t t = 0; t < n; t++) memset(y + t * y_stride, 0, w->cols * sizeof *y);
    for (size_t r = row0, rows; r < row1; r += rows, x += rows) {
        rows = in_pieces ? we_min(ROWS, row1 - r) : 1;
        if (!in_pieces) we_avx2_decode_rows(w, r, r + 1, row, w->cols);
        const char *next = (const char *)w->payload + (r + rows) * w->row_bytes;
        for (size_t b = 0; b < rows * w->row_bytes; b += 64) _mm_prefetch(next + b, _MM_HINT_T0);
        for (size_t c = 0, cols; c < w->cols; c += cols) {
            const float *tile = row + c;
            size_t stride = 0;
            cols = we_min(COLS, w->cols - c);
            if (in_pieces) tile = rows_piece(w, r, rows, c, c + cols, piece, &stride);
            add_tile(y + c, y_stride, x, x_stride, n, tile, stride, rows, cols);
        }
    }
}

WE_TARGET_POP
#else
typedef int we_no_avx2_linear;      /* ISO C wants a declaration in every file */
#endif
