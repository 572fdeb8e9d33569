/* ARM64 with the dot products of bytes (sdot): int16 activations by int8 and four-bit weights.
 *
 * An activation is 256 high + low, both signed bytes, so a group's total is 256 (w . high) + (w . low): two
 * instructions for 16 products where NEON needs six. Bytes are made from a piece of the activations at a time, for all
 * rows that a call has; sums of rows wait in y meanwhile. The rest of the arithmetic: arm_integer.h. */
#include "arm_integer.h"
#ifdef WE_DOTPROD
WE_TARGET_PUSH("arch=armv8.2-a+dotprod")

enum { ROWS = 4, TOKENS = 16, BLOCK = 64 };     /* BLOCK: rows that the bytes of TOKENS tokens serve */
enum { PIECE = 512, PIECE_OF_ONE = 4096 };      /* activations of a token that become bytes at a time */

/* n activations, a multiple of 16, as bytes. */
static void split(const int16_t *q, size_t n, int8_t *high, int8_t *low)
{
    for (size_t i = 0; i < n; i += 16) {
        const int16x8_t a = vld1q_s16(q + i), b = vld1q_s16(q + i + 8);
        vst1q_s8(high + i, vrshrn_high_n_s16(vrshrn_n_s16(a, 8), b, 8));        /* (q + 128) >> 8 */
        vst1q_s8(low + i, vuzp1q_s8(vreinterpretq_s8_s16(a), vreinterpretq_s8_s16(b)));
    }
}

/* 256 high + low of four rows, each summed over its lanes. */
static inline int32x4_t join(const int32x4_t high[ROWS], const int32x4_t low[ROWS])
{
    return vaddq_s32(vshlq_n_s32(totals_x4(high), 8), totals_x4(low));
}

/* -------------------------------------------------------------- one token ---- */

typedef struct piece {              /* some groups of one token                                 */
    const int8_t  *high, *low;      /* [groups][group]                                          */
    const float   *scale;           /* [groups]                                                 */
    const int32_t *bias;            /* [groups]                                                 */
    size_t         g0, n_groups;    /* where they stand in a row, and how many there are        */
} piece;

/* y[0 .. n_rows) += the piece; kind and n_rows are constants where this is expanded, mostly the group too. */
static inline void piece_rows(const we_matrix *w, size_t row, const piece *p, float *y, const int kind,
                              const size_t group, const size_t n_rows)
{
    const size_t n_groups = we_n_groups(w), group_bytes = group_bytes_of(kind, group);
    const uint8_t *codes = (const uint8_t *)w->payload + row * w->row_bytes + p->g0 * group_bytes;
    const size_t first = row * n_groups + p->g0;
    const int8_t *q_high = p->high, *q_low = p->low;
    float32x4_t sum = load_sums(y, n_rows);
    for (size_t g = 0; g < p->n_groups; g++, codes += group_bytes, q_high += group, q_low += group) {
        int32x4_t high[ROWS], low[ROWS];
        WE_UNROLL for (size_t i = 0; i < ROWS; i++) high[i] = low[i] = vdupq_n_s32(0);
        for (size_t k = 0; k < group_bytes; k += 16) {
            WE_UNROLL for (size_t i = 0; i < n_rows; i++) {
                const uint8x16_t bytes = vld1q_u8(codes + i * w->row_bytes + k);
                const int8x16_t evens = even_codes(bytes, kind);
                high[i] = vdotq_s32(high[i], evens, vld1q_s8(q_high + k));
                low[i] = vdotq_s32(low[i], evens, vld1q_s8(q_low + k));
                if (kind == WE_Q8G) continue;
                const int8x16_t odds = odd_codes(bytes, kind);
                high[i] = vdotq_s32(high[i], odds, vld1q_s8(q_high + group / 2 + k));
                low[i] = vdotq_s32(low[i], odds, vld1q_s8(q_low + group / 2 + k));
            }
        }
        const int32x4_t total = vaddq_s32(join(high, low), vdupq_n_s32(kind == WE_Q4G ? p->bias[g] : 0));
        sum = add_group(sum, total, p->scale[g], scales_x4(w, first + g, n_groups, n_rows));
    }
    store_sums(y, sum, n_rows);
}

static inline void piece_of_kind(const we_matrix *w, size_t row0, size_t row1, const piece *p, float *y, const int kind,
                                 const size_t group)
{
    size_t r = row0;
    for (; r + ROWS <= row1; r += ROWS) piece_rows(w, r, p, y + (r - row0), kind, group, ROWS);
    for (; r < row1; r++) piece_rows(w, r, p, y + (r - row0), kind, group, 1);
}

static void one_token(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t t, float *y)
{
    const int kind = w->encoding, most = w->group == 128;
    const size_t group = w->group, n_groups = we_n_groups(w), step = PIECE_OF_ONE / group;
    const int16_t *q = (kind == WE_Q8G ? a->q : a->q_halves) + t * a->q_stride;
    int8_t high[PIECE_OF_ONE], low[PIECE_OF_ONE];
    memset(y, 0, (row1 - row0) * sizeof *y);
    for (size_t g = 0; g < n_groups && row0 < row1; g += step) {
        const size_t at = t * a->scale_stride + g, n = we_min(step, n_groups - g);
        const piece p = {high, low, a->scale + at, a->bias + at, g, n};
        split(q + g * group, n * group, high, low);
        if (kind == WE_MXFP4)             piece_of_kind(w, row0, row1, &p, y, WE_MXFP4, 32);
        else if (kind == WE_Q4G && most)  piece_of_kind(w, row0, row1, &p, y, WE_Q4G, 128);
        else if (kind == WE_Q4G)          piece_of_kind(w, row0, row1, &p, y, WE_Q4G, group);
        else if (most)                    piece_of_kind(w, row0, row1, &p, y, WE_Q8G, 128);
        else                              piece_of_kind(w, row0, row1, &p, y, WE_Q8G, group);
    }
}

/* ------------------------------------------------------------ many tokens ---- */

typedef struct group_args {         /* one group of ROWS rows and some tokens */
    const int8_t  *w;               /* [ROWS][w_stride]                       */
    const int8_t  *high, *low;      /* [n][PIECE]                             */
    const float   *scale;           /* [n][scale_stride]                      */
    const int32_t *bias;            /* [n][scale_stride], or NULL: zeros      */
    float32x4_t    weight;
    size_t         group, w_stride, scale_stride, y_stride;
} group_args;

/* y[t][0 .. ROWS) += this group, for tokens [t, t + n_tokens); n_tokens is a constant. */
static inline void group_tokens(const group_args *g, size_t t, const size_t n_tokens, float *y)
{
    int32x4_t high[2][ROWS], low[2][ROWS];
    for (size_t u = 0; u < n_tokens; u++)
        for (size_t i = 0; i < ROWS; i++) high[u][i] = low[u][i] = vdupq_n_s32(0);
    for (size_t k = 0; k < g->group; k += 16) {
        int8x16_t w[ROWS];
        for (size_t i = 0; i < ROWS; i++) w[i] = vld1q_s8(g->w + i * g->w_stride + k);
        for (size_t u = 0; u < n_tokens; u++) {
            const size_t at = (t + u) * PIECE + k;
            const int8x16_t q_high = vld1q_s8(g->high + at), q_low = vld1q_s8(g->low + at);
            WE_UNROLL for (size_t i = 0; i < ROWS; i++) {
                high[u][i] = vdotq_s32(high[u][i], w[i], q_high);
                low[u][i] = vdotq_s32(low[u][i], w[i], q_low);
            }
        }
    }
    for (size_t u = 0; u < n_tokens; u++) {
        const size_t at = (t + u) * g->scale_stride;
        float *sums = y + (t + u) * g->y_stride;
        const int32x4_t total = vaddq_s32(join(high[u], low[u]), vdupq_n_s32(g->bias ? g->bias[at] : 0));
        vst1q_f32(sums, add_group(vld1q_f32(sums), total, g->scale[at], g->weight));
    }
}

/* y[t][0 .. ROWS) += groups [g0, g0 + n_groups) of n tokens whose bytes are in high and low. */
static void tokens_rows(const we_matrix *w, size_t row, const we_acts *a, size_t t0, size_t n, size_t g0,
                        size_t n_groups, const int8_t *high, const int8_t *low, float *y, size_t y_stride)
{
    const int kind = w->encoding, unpacked = kind != WE_Q8G;
    const size_t group = w->group, group_bytes = group_bytes_of(kind, group), in_row = we_n_groups(w);
    int8_t nibbles[ROWS * 128];
    group_args args = {.group = group, .w_stride = unpacked ? group : w->row_bytes, .scale_stride = a->scale_stride,
                       .y_stride = y_stride};
    for (size_t g = 0; g < n_groups; g++) {
        const uint8_t *codes = (const uint8_t *)w->payload + row * w->row_bytes + (g0 + g) * group_bytes;
        for (size_t i = 0; unpacked && i < ROWS; i++)
            unpack_nibbles(codes + i * w->row_bytes, group, kind, nibbles + i * group);
        args.w = unpacked ? nibbles : (const int8_t *)codes;
        args.high = high + g * group;
        args.low = low + g * group;
        args.weight = scales_x4(w, row * in_row + g0 + g, in_row, ROWS);
        args.scale = a->scale + t0 * a->scale_stride + g0 + g;
        args.bias = kind == WE_Q4G ? a->bias + t0 * a->scale_stride + g0 + g : NULL;
        size_t t = 0;
        for (; t + 2 <= n; t += 2) group_tokens(&args, t, 2, y);
        if (t < n) group_tokens(&args, t, 1, y);
    }
}

/* Whole sets of ROWS rows by n <= TOKENS tokens. */
static void tile(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t t0, size_t n, float *y,
                 size_t y_stride)
{
    const size_t group = w->group, n_groups = we_n_groups(w), step = PIECE / group;
    const int16_t *q = (w->encoding == WE_Q8G ? a->q : a->q_halves) + t0 * a->q_stride;
    int8_t high[TOKENS * PIECE], low[TOKENS * PIECE];
    for (size_t t = 0; t < n; t++) memset(y + t * y_stride, 0, (row1 - row0) * sizeof *y);
    for (size_t g = 0; g < n_groups; g += step) {
        const size_t here = we_min(step, n_groups - g);
        for (size_t t = 0; t < n; t++)
            split(q + t * a->q_stride + g * group, here * group, high + t * PIECE, low + t * PIECE);
        for (size_t r = row0; r < row1; r += ROWS)
            tokens_rows(w, r, a, t0, n, g, here, high, low, y + (r - row0), y_stride);
    }
}

void we_dotprod_matmul(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                       size_t y_stride)
{
    if (!we_takes_integers(w, a)) {
        we_neon_matmul(w, row0, row1, a, n, y, y_stride);
        return;
    }
    const size_t whole = n > 1 ? row0 + (row1 - row0) / ROWS * ROWS : row0;     /* rows done for many tokens at once */
    for (size_t r = row0; r < whole; r += BLOCK)
        for (size_t t = 0; t < n; t += TOKENS)
            tile(w, r, we_min(r + BLOCK, whole), a, t, we_min(TOKENS, n - t), y + t * y_stride + (r - row0), y_stride);
    for (size_t t = 0; t < n; t++) one_token(w, whole, row1, a, t, y + t * y_stride + (whole - row0));
}

WE_TARGET_POP

const we_kernels we_dotprod = {.isa = "dotprod", .matmul = we_dotprod_matmul};
#else
typedef int we_no_dotprod;      /* ISO C wants a declaration in every file */
#endif
