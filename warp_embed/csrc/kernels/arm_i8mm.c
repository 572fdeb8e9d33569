/* ARM64 with products of matrices of bytes (smmla): int16 activations by int8 and four-bit weights, several tokens.
 *
 * An instruction multiplies two rows of weights by the high and by the low bytes of one token's activations, eight
 * products each, twice what sdot does. So activations lie as [8 high][8 low] and rows in pairs, [8 of one][8 of the
 * other]. One token is better served by sdot, which needs no such order of the weights. The rest: arm_integer.h. */
#include "arm_integer.h"
#ifdef WE_I8MM
WE_TARGET_PUSH("arch=armv8.2-a+dotprod+i8mm")

enum { ROWS = 4, TOKENS = 32, PIECE = 512, BLOCK = 64 };        /* BLOCK: rows that tokens' bytes serve */

/* n activations, a multiple of 8, as [n / 8][8 high, 8 low]; high = (q + 128) >> 8. */
static void split(const int16_t *q, size_t n, int8_t *bytes)
{
    for (size_t i = 0; i < n; i += 8) {
        const int16x8_t v = vld1q_s16(q + i);
        vst1q_s8(bytes + 2 * i, vcombine_s8(vrshrn_n_s16(v, 8), vmovn_s16(v)));
    }
}

/* One group of two rows as [group / 8][8 of the first, 8 of the second]. */
static inline void pair_rows(const int8_t *first, const int8_t *second, size_t group, int8_t *out)
{
    for (size_t i = 0; i < group; i += 16) {
        const int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(first + i)), b = vreinterpretq_s64_s8(vld1q_s8(second + i));
        vst1q_s8(out + 2 * i, vreinterpretq_s8_s64(vzip1q_s64(a, b)));
        vst1q_s8(out + 2 * i + 16, vreinterpretq_s8_s64(vzip2q_s64(a, b)));
    }
}

typedef struct group_args {         /* one group of ROWS rows and some tokens */
    const int8_t  *w;               /* [ROWS / 2][group / 8][2][8]            */
    const int8_t  *q;               /* [n][PIECE / 8][2][8]                   */
    const float   *scale;           /* [n][scale_stride]                      */
    const int32_t *bias;            /* [n][scale_stride], or NULL: zeros      */
    float32x4_t    weight;
    size_t         group, scale_stride, y_stride;
} group_args;

/* y[t][0 .. ROWS) += this group, for tokens [t, t + n_tokens); n_tokens is a constant. */
static inline void group_tokens(const group_args *g, size_t t, const size_t n_tokens, float *y)
{
    static const int32_t shifts[4] = {8, 0, 8, 0};
    int32x4_t dot[4][2];            /* [token][pair]: row 0 by high, by low, row 1 by high, by low */
    for (size_t u = 0; u < n_tokens; u++) dot[u][0] = dot[u][1] = vdupq_n_s32(0);
    for (size_t k = 0; k < 2 * g->group; k += 16) {
        const int8x16_t first = vld1q_s8(g->w + k), second = vld1q_s8(g->w + 2 * g->group + k);
        WE_UNROLL for (size_t u = 0; u < n_tokens; u++) {
            const int8x16_t q = vld1q_s8(g->q + (t + u) * 2 * PIECE + k);
            dot[u][0] = vmmlaq_s32(dot[u][0], first, q);
            dot[u][1] = vmmlaq_s32(dot[u][1], second, q);
        }
    }
    const int32x4_t shift = vld1q_s32(shifts);
    for (size_t u = 0; u < n_tokens; u++) {
        const size_t at = (t + u) * g->scale_stride;
        float *sums = y + (t + u) * g->y_stride;
        int32x4_t total = vpaddq_s32(vshlq_s32(dot[u][0], shift), vshlq_s32(dot[u][1], shift));
        total = vaddq_s32(total, vdupq_n_s32(g->bias ? g->bias[at] : 0));
        vst1q_f32(sums, add_group(vld1q_f32(sums), total, g->scale[at], g->weight));
    }
}

/* One group of ROWS rows in pairs. */
static inline void pair_group(const we_matrix *w, size_t row, size_t g, int8_t *out)
{
    const int kind = w->encoding;
    const size_t group = w->group;
    const uint8_t *codes = (const uint8_t *)w->payload + row * w->row_bytes + g * group_bytes_of(kind, group);
    int8_t nibbles[2 * 128];
    for (size_t i = 0; i < ROWS; i += 2, codes += 2 * w->row_bytes, out += 2 * group) {
        if (kind != WE_Q8G) {
            unpack_nibbles(codes, group, kind, nibbles);
            unpack_nibbles(codes + w->row_bytes, group, kind, nibbles + group);
            pair_rows(nibbles, nibbles + group, group, out);
        } else {
            pair_rows((const int8_t *)codes, (const int8_t *)codes + w->row_bytes, group, out);
        }
    }
}

/* y[t][0 .. ROWS) += groups [g0, g0 + n_groups) of n tokens whose bytes are given. */
static void tokens_rows(const we_matrix *w, size_t row, const we_acts *a, size_t t0, size_t n, size_t g0,
                        size_t n_groups, const int8_t *bytes, float *y, size_t y_stride)
{
    const size_t in_row = we_n_groups(w);
    int8_t pairs[ROWS * 128];
    group_args args = {.w = pairs, .group = w->group, .scale_stride = a->scale_stride, .y_stride = y_stride};
    for (size_t g = 0; g < n_groups; g++) {
        const size_t at = t0 * a->scale_stride + g0 + g;
        size_t t = 0;
        pair_group(w, row, g0 + g, pairs);
        args.q = bytes + 2 * g * w->group;
        args.weight = scales_x4(w, row * in_row + g0 + g, in_row, ROWS);
        args.scale = a->scale + at;
        args.bias = w->encoding == WE_Q4G ? a->bias + at : NULL;
        for (; t + 4 <= n; t += 4) group_tokens(&args, t, 4, y);
        for (; t < n; t++) group_tokens(&args, t, 1, y);
    }
}

/* Whole sets of ROWS rows by n <= TOKENS tokens. */
static void tile(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t t0, size_t n, float *y,
                 size_t y_stride)
{
    const size_t group = w->group, n_groups = we_n_groups(w), step = PIECE / group;
    const int16_t *q = (w->encoding == WE_Q8G ? a->q : a->q_halves) + t0 * a->q_stride;
    int8_t bytes[TOKENS * 2 * PIECE];
    for (size_t t = 0; t < n; t++) memset(y + t * y_stride, 0, (row1 - row0) * sizeof *y);
    for (size_t g = 0; g < n_groups; g += step) {
        const size_t here = we_min(step, n_groups - g);
        for (size_t t = 0; t < n; t++) split(q + t * a->q_stride + g * group, here * group, bytes + t * 2 * PIECE);
        for (size_t r = row0; r < row1; r += ROWS)
            tokens_rows(w, r, a, t0, n, g, here, bytes, y + (r - row0), y_stride);
    }
}

static void matmul(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y, size_t y_stride)
{
    const int many = n > 1 && we_takes_integers(w, a);
    const size_t whole = many ? row0 + (row1 - row0) / ROWS * ROWS : row0;      /* rows done for many tokens at once */
    for (size_t r = row0; r < whole; r += BLOCK)
        for (size_t t = 0; t < n; t += TOKENS)
            tile(w, r, we_min(r + BLOCK, whole), a, t, we_min(TOKENS, n - t), y + t * y_stride + (r - row0), y_stride);
    if (whole < row1) we_dotprod_matmul(w, whole, row1, a, n, y + (whole - row0), y_stride);
}

WE_TARGET_POP

const we_kernels we_i8mm = {.isa = "i8mm", .matmul = matmul};
#else
typedef int we_no_i8mm;     /* ISO C wants a declaration in every file */
#endif
