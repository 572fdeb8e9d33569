/* NEON: vector-quantised weights with vec_dim 8. A vector of weights is ((book 0 + book 1) + book 2) + ..., in eight
 * lanes, two registers; a row's scale is applied once, to its sum. */
#include <math.h>
#include "arm_neon.h"
#ifdef WE_ARM64

enum { ROWS = 8, GENERIC = 0, SIX_BITS = 100 };     /* kinds: a number of stages with whole bytes, or these */

/* kind is a constant where this is expanded. */
static inline float32x4x2_t vector_of(const float *books, const uint8_t *unit, size_t stages, const int kind)
{
    const unsigned bits = kind == SIX_BITS ? (unsigned)unit[0] | (unsigned)unit[1] << 8 | (unsigned)unit[2] << 16 : 0;
    const size_t n = kind == SIX_BITS ? 4 : kind != GENERIC ? (size_t)kind : stages;
    float32x4x2_t sum;
    for (size_t s = 0; s < n; s++) {
        const size_t index = kind == SIX_BITS ? 64 * s + (bits >> (6 * s) & 63) : 256 * s + unit[s];
        const float32x4_t low = vld1q_f32(books + 8 * index), high = vld1q_f32(books + 8 * index + 4);
        sum.val[0] = s ? vaddq_f32(sum.val[0], low) : low;
        sum.val[1] = s ? vaddq_f32(sum.val[1], high) : high;
    }
    return sum;
}

static int kind_of(const we_matrix *w)
{
    if (w->encoding == WE_VQ4P) return SIX_BITS;
    return w->stages == 2 || w->stages == 3 ? (int)w->stages : GENERIC;
}

/* -------------------------------------------------------------- one token ---- */

/* Rows [row, row + n_rows) of one block of units by one token; n_rows and kind are constants. */
static inline void token_rows(const we_matrix *w, size_t row, const float *x, float *y, const size_t n_rows,
                              const int kind)
{
    const size_t unit = we_vq_unit(w), step = WE_VQ_ROWS * unit, n_vecs = w->cols / 8;
    const uint8_t *units = we_vq_row(w, row);
    float32x4_t low[ROWS], high[ROWS];
    for (size_t i = 0; i < n_rows; i++) low[i] = high[i] = vdupq_n_f32(0);
    for (size_t v = 0; v < n_vecs; v++, units += step) {
        const float32x4_t x_low = vld1q_f32(x + 8 * v), x_high = vld1q_f32(x + 8 * v + 4);
        for (size_t i = 0; i < n_rows; i++) {
            const float32x4x2_t word = vector_of(w->books, units + i * unit, w->stages, kind);
            low[i] = vfmaq_f32(low[i], word.val[0], x_low);
            high[i] = vfmaq_f32(high[i], word.val[1], x_high);
        }
    }
    for (size_t i = 0; i < n_rows; i++) y[i] = we_f16_value(w->scales[row + i]) * sum_lanes(vaddq_f32(low[i], high[i]));
}

static inline void token_of_kind(const we_matrix *w, size_t row0, size_t row1, const float *x, float *y, const int kind)
{
    for (size_t r = row0, n; r < row1; r += n) {
        n = r % ROWS == 0 && row1 - r >= ROWS ? ROWS : 1;           /* eight rows never straddle two blocks */
        if (n == ROWS) token_rows(w, r, x, y + (r - row0), ROWS, kind);
        else token_rows(w, r, x, y + (r - row0), 1, kind);
    }
}

void we_neon_vq_token(const we_matrix *w, size_t row0, size_t row1, const float *x, float *y)
{
    switch (kind_of(w)) {
    case 2:        token_of_kind(w, row0, row1, x, y, 2); break;
    case 3:        token_of_kind(w, row0, row1, x, y, 3); break;
    case SIX_BITS: token_of_kind(w, row0, row1, x, y, SIX_BITS); break;
    default:       token_of_kind(w, row0, row1, x, y, GENERIC); break;
    }
}

/* -------------------------------------------------------------- many rows ---- */

static inline void tile_of_kind(const we_matrix *w, size_t row, size_t n_rows, size_t c0, size_t c1, float *tile,
                                size_t stride, const int kind)
{
    const size_t unit = we_vq_unit(w), step = WE_VQ_ROWS * unit;
    for (size_t i = 0; i < n_rows; i++) {
        const uint8_t *units = we_vq_row(w, row + i) + c0 / 8 * step;
        for (size_t c = c0; c < c1; c += 8, units += step) {
            const float32x4x2_t word = vector_of(w->books, units, w->stages, kind);
            vst1q_f32(tile + i * stride + (c - c0), word.val[0]);
            vst1q_f32(tile + i * stride + (c - c0) + 4, word.val[1]);
        }
    }
}

/* Columns [c0, c1), multiples of 8, of some rows without their scales. */
void we_neon_vq_tile(const we_matrix *w, size_t row, size_t n_rows, size_t c0, size_t c1, float *tile, size_t stride)
{
    switch (kind_of(w)) {
    case 2:        tile_of_kind(w, row, n_rows, c0, c1, tile, stride, 2); break;
    case 3:        tile_of_kind(w, row, n_rows, c0, c1, tile, stride, 3); break;
    case SIX_BITS: tile_of_kind(w, row, n_rows, c0, c1, tile, stride, SIX_BITS); break;
    default:       tile_of_kind(w, row, n_rows, c0, c1, tile, stride, GENERIC); break;
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
    for (unsigned e = 0; e < (entries + 3) / 4 * 4; e++) {
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
    static const uint32_t first[4] = {0, 1, 2, 3};
    float32x4_t x_x4[8], least = vdupq_n_f32(INFINITY);
    uint32x4_t at = vdupq_n_u32(0), id = vld1q_u32(first);
    for (size_t d = 0; d < 8; d++) x_x4[d] = vdupq_n_f32(x[d]);
    for (unsigned e = 0; e < entries; e += 4) {
        float32x4_t score = vld1q_f32(book->half_norm + e);
        for (size_t d = 0; d < 8; d++) score = vfmsq_f32(score, x_x4[d], vld1q_f32(book->coordinate[d] + e));
        const uint32x4_t less = vcltq_f32(score, least);
        least = vbslq_f32(less, score, least);
        at = vbslq_u32(less, id, at);
        id = vaddq_u32(id, vdupq_n_u32(4));
    }
    float score[4];
    uint32_t entry[4];
    vst1q_f32(score, least);
    vst1q_u32(entry, at);
    unsigned best = 0;
    for (unsigned l = 1; l < 4; l++)
        if (score[l] < score[best] || (score[l] == score[best] && entry[l] < entry[best])) best = l;
    return entry[best];
}

void we_neon_vq_encode(uint8_t *index, float *residual, const float *x, const float *books, size_t n, unsigned stages,
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
                for (size_t d = 0; d < 8; d++) left[i][d] -= entry[8 * best + d];
            }
        }
        if (residual) memcpy(residual + 8 * i0, left, n_here * sizeof left[0]);
    }
}

#else
typedef int we_no_neon_vq;      /* ISO C wants a declaration in every file */
#endif
