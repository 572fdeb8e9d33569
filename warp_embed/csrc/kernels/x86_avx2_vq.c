/* AVX2: vector-quantised weights with vec_dim 8. A vector of weights is ((book 0 + book 1) + book 2) + ..., in eight
 * lanes; a row's scale is applied once, to its sum. */
#include <math.h>
#include "x86_avx2.h"
#ifdef WE_X86
WE_TARGET_PUSH("avx2,fma,f16c")

enum { ROWS = 8, GENERIC = 0, SIX_BITS = 100 };     /* kinds: a number of stages with whole bytes, or these */

EXPANDED __m256 codeword(const float *books, size_t index) { return _mm256_loadu_ps(books + 8 * index); }

/* kind is a constant where this is expanded. */
EXPANDED __m256 vector_of(const float *books, const uint8_t *unit, size_t stages, const int kind)
{
    if (kind == SIX_BITS) {
        const unsigned bits = (unsigned)unit[0] | (unsigned)unit[1] << 8 | (unsigned)unit[2] << 16;
        __m256 sum = _mm256_add_ps(codeword(books, bits & 63), codeword(books, 64 + (bits >> 6 & 63)));
        sum = _mm256_add_ps(sum, codeword(books, 128 + (bits >> 12 & 63)));
        return _mm256_add_ps(sum, codeword(books, 192 + (bits >> 18)));
    }
    if (kind != GENERIC) stages = (size_t)kind;
    __m256 sum = codeword(books, unit[0]);
    for (size_t s = 1; s < stages; s++) sum = _mm256_add_ps(sum, codeword(books, 256 * s + unit[s]));
    return sum;
}

static int kind_of(const we_matrix *w)
{
    if (w->encoding == WE_VQ4P) return SIX_BITS;
    return w->stages == 2 || w->stages == 3 ? (int)w->stages : GENERIC;
}

/* Whether some rows' units are the first of their line of 64 bytes: then the same place in the next block is fetched.
 * The units of one row lie so far apart that processors do not foresee them. */
static int begins_line(const uint8_t *units, size_t n_bytes) { return (uintptr_t)units % 64 < n_bytes; }

/* -------------------------------------------------------------- one token ---- */

/* Rows [row, row + n_rows) of one block of units by one token; n_rows and kind are constants. */
EXPANDED void token_rows(const we_matrix *w, size_t row, const float *x, float *y, const size_t n_rows,
                              const int kind)
{
    const size_t unit = we_vq_unit(w), step = WE_VQ_ROWS * unit, n_vecs = w->cols / 8;
    const uint8_t *units = we_vq_row(w, row);
    const int fetch = begins_line(units, n_rows * unit);
    __m256 sums[ROWS];
    for (size_t i = 0; i < n_rows; i++) sums[i] = _mm256_setzero_ps();
    for (size_t v = 0; v < n_vecs; v++, units += step) {
        const __m256 x_x8 = _mm256_loadu_ps(x + 8 * v);
        if (fetch) _mm_prefetch((const char *)units + n_vecs * step, _MM_HINT_T1);
        for (size_t i = 0; i < n_rows; i++)
            sums[i] = _mm256_fmadd_ps(vector_of(w->books, units + i * unit, w->stages, kind), x_x8, sums[i]);
    }
    for (size_t i = 0; i < n_rows; i++) y[i] = we_f16_value(w->scales[row + i]) * sum_lanes(sums[i]);
}

EXPANDED void token_of_kind(const we_matrix *w, size_t row0, size_t row1, const float *x, float *y, const int kind)
{
    for (size_t r = row0, n; r < row1; r += n) {
        n = r % ROWS == 0 && row1 - r >= ROWS ? ROWS : 1;           /* eight rows never straddle two blocks */
        if (n == ROWS) token_rows(w, r, x, y + (r - row0), ROWS, kind);
        else token_rows(w, r, x, y + (r - row0), 1, kind);
    }
}

void we_avx2_vq_token(const we_matrix *w, size_t row0, size_t row1, const float *x, float *y)
{
    switch (kind_of(w)) {
    case 2:        token_of_kind(w, row0, row1, x, y, 2); break;
    case 3:        token_of_kind(w, row0, row1, x, y, 3); break;
    case SIX_BITS: token_of_kind(w, row0, row1, x, y, SIX_BITS); break;
    default:       token_of_kind(w, row0, row1, x, y, GENERIC); break;
    }
}

/* -------------------------------------------------------------- many rows ---- */

typedef struct tile_args { float *tile; size_t row_stride, vector_stride; } tile_args;

/* Rows of one block of units; n_rows and kind are constants. */
EXPANDED void tile_rows(const we_matrix *w, size_t row, size_t c0, size_t c1, const tile_args *to, size_t i0,
                        const size_t n_rows, const int kind)
{
    const size_t unit = we_vq_unit(w), step = WE_VQ_ROWS * unit, row_stride = to->row_stride;
    const size_t vector_stride = to->vector_stride, stages = w->stages, block_bytes = w->cols / 8 * step;
    const uint8_t *units = we_vq_row(w, row + i0) + c0 / 8 * step;
    const int fetch = begins_line(units, n_rows * unit);
    const float *books = w->books;
    float *tile = to->tile + i0 * row_stride;
    for (size_t c = c0; c < c1; c += 8, units += step, tile += vector_stride) {
        if (fetch) _mm_prefetch((const char *)units + block_bytes, _MM_HINT_T1);
        for (size_t i = 0; i < n_rows; i++)
            _mm256_storeu_ps(tile + i * row_stride, vector_of(books, units + i * unit, stages, kind));
    }
}

EXPANDED void tile_of_kind(const we_matrix *w, size_t row, size_t n_rows, size_t c0, size_t c1, const tile_args *to,
                           const int kind)
{
    for (size_t i = 0, n; i < n_rows; i += n) {
        n = n_rows - i >= 4 && (row + i) % WE_VQ_ROWS <= WE_VQ_ROWS - 4 ? 4 : 1;
        if (n == 4) tile_rows(w, row, c0, c1, to, i, 4, kind);
        else tile_rows(w, row, c0, c1, to, i, 1, kind);
    }
}

void we_avx2_vq_tile(const we_matrix *w, size_t row, size_t n_rows, size_t c0, size_t c1, float *tile,
                     size_t row_stride, size_t vector_stride)
{
    const tile_args to = {tile, row_stride, vector_stride};
    switch (kind_of(w)) {
    case 2:        tile_of_kind(w, row, n_rows, c0, c1, &to, 2); break;
    case 3:        tile_of_kind(w, row, n_rows, c0, c1, &to, 3); break;
    case SIX_BITS: tile_of_kind(w, row, n_rows, c0, c1, &to, SIX_BITS); break;
    default:       tile_of_kind(w, row, n_rows, c0, c1, &to, GENERIC); break;
    }
}

/* --------------------------------------------------------------- encoding ---- */

enum { VECTORS = 128 };         /* vectors that one transposed codebook serves */

typedef struct transposed {     /* one stage: entries in lanes, padded to whole vectors */
    float coordinate[8][256];
    float half_norm[256];       /* |c|^2 / 2; inf for padding                            */
} transposed;

static void transpose(transposed *out, const float *book, unsigned entries)
{
    for (unsigned e = 0; e < (entries + 7) / 8 * 8; e++) {
        float norm = e < entries ? 0 : INFINITY;
        for (unsigned d = 0; d < 8; d++) {
            const float c = e < entries ? book[8 * e + d] : 0;
            out->coordinate[d][e] = c;
            norm += c * c;
        }
        out->half_norm[e] = norm / 2;
    }
}

/* argmin over entries of |c|^2 / 2 - x . c, which orders as |x - c|^2 does; the lowest of equals. */
static unsigned nearest(const transposed *book, unsigned entries, const float *x)
{
    __m256 x_x8[8], least = _mm256_set1_ps(INFINITY);
    __m256i at = _mm256_setzero_si256(), id = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (size_t d = 0; d < 8; d++) x_x8[d] = _mm256_set1_ps(x[d]);
    for (unsigned e = 0; e < entries; e += 8) {
        __m256 score = _mm256_loadu_ps(book->half_norm + e);
        for (size_t d = 0; d < 8; d++)
            score = _mm256_fnmadd_ps(x_x8[d], _mm256_loadu_ps(book->coordinate[d] + e), score);
        const __m256 less = _mm256_cmp_ps(score, least, _CMP_LT_OQ);
        least = _mm256_blendv_ps(least, score, less);
        at = _mm256_blendv_epi8(at, id, _mm256_castps_si256(less));
        id = _mm256_add_epi32(id, _mm256_set1_epi32(8));
    }
    float score[8];
    uint32_t entry[8];
    _mm256_storeu_ps(score, least);
    _mm256_storeu_si256((__m256i *)(void *)entry, at);
    unsigned best = 0;
    for (unsigned l = 1; l < 8; l++)
        if (score[l] < score[best] || (score[l] == score[best] && entry[l] < entry[best])) best = l;
    return entry[best];
}

void we_avx2_vq_encode(uint8_t *index, float *residual, const float *x, const float *books, size_t n, unsigned stages,
                       unsigned entries)
{
    transposed book;
    float left[VECTORS][8];
    for (size_t i0 = 0; i0 < n; i0 += VECTORS) {
        const size_t n_here = we_min(VECTORS, n - i0);
        memcpy(left, x + 8 * i0, n_here * sizeof left[0]);
        for (unsigned s = 0; s < stages; s++) {
            const float *entry = books + (size_t)s * entries * 8;
            transpose(&book, entry, entries);
            for (size_t i = 0; i < n_here; i++) {
                const unsigned best = nearest(&book, entries, left[i]);
                index[(i0 + i) * stages + s] = (uint8_t)best;
                _mm256_storeu_ps(left[i], _mm256_sub_ps(_mm256_loadu_ps(left[i]), codeword(entry, best)));
            }
        }
        if (residual) memcpy(residual + 8 * i0, left, n_here * sizeof left[0]);
    }
}

WE_TARGET_POP
#else
typedef int we_no_avx2_vq;      /* ISO C wants a declaration in every file */
#endif
