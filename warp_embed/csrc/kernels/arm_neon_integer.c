/* NEON: int16 activations by int8 and four-bit weights; see arm_integer.h. */
#include "arm_integer.h"
#ifdef WE_ARM64

enum { ROWS = 4, TOKENS = 16 };

/* dot + eight products */
static inline int32x4_t multiply_x8(int32x4_t dot, int16x8_t w, const int16_t *q)
{
    const int16x8_t q_x8 = vld1q_s16(q);
    return vmlal_high_s16(vmlal_s16(dot, vget_low_s16(w), vget_low_s16(q_x8)), w, q_x8);
}

static inline int32x4_t multiply_x16(int32x4_t dot, int8x16_t w, const int16_t *q)
{
    return multiply_x8(multiply_x8(dot, vmovl_s8(vget_low_s8(w)), q), vmovl_high_s8(w), q + 8);
}

/* -------------------------------------------------------------- one token ---- */

/* y[0 .. n_rows) of one token; kind and n_rows are constants where this is expanded, mostly the group too. */
static inline void token_rows(const we_matrix *w, size_t row, const we_acts *a, size_t t, float *y, const int kind,
                              const size_t group, const size_t n_rows)
{
    const size_t n_groups = we_n_groups(w), group_bytes = group_bytes_of(kind, group);
    const uint8_t *codes = (const uint8_t *)w->payload + row * w->row_bytes;
    const int16_t *q = (kind == WE_Q8G ? a->q : a->q_halves) + t * a->q_stride;
    const float *scale = a->scale + t * a->scale_stride;
    const int32_t *bias = a->bias + t * a->scale_stride;
    float32x4_t sum = vdupq_n_f32(0);
    for (size_t g = 0; g < n_groups; g++, codes += group_bytes, q += group) {
        int32x4_t dot[ROWS];
        WE_UNROLL for (size_t i = 0; i < ROWS; i++) dot[i] = vdupq_n_s32(0);
        for (size_t k = 0; k < group_bytes; k += 16) {
            WE_UNROLL for (size_t i = 0; i < n_rows; i++) {
                const uint8x16_t bytes = vld1q_u8(codes + i * w->row_bytes + k);
                dot[i] = multiply_x16(dot[i], even_codes(bytes, kind), q + k);
                if (kind != WE_Q8G) dot[i] = multiply_x16(dot[i], odd_codes(bytes, kind), q + group / 2 + k);
            }
        }
        const int32x4_t total = vaddq_s32(totals_x4(dot), vdupq_n_s32(kind == WE_Q4G ? bias[g] : 0));
        sum = add_group(sum, total, scale[g], scales_x4(w, row * n_groups + g, n_groups, n_rows));
    }
    store_sums(y, sum, n_rows);
}

static inline void token_of_kind(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t t, float *y,
                                 const int kind, const size_t group)
{
    size_t r = row0;
    for (; r + ROWS <= row1; r += ROWS) token_rows(w, r, a, t, y + (r - row0), kind, group, ROWS);
    for (; r < row1; r++) token_rows(w, r, a, t, y + (r - row0), kind, group, 1);
}

static void one_token(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t t, float *y)
{
    const int most = w->group == 128;
    if (w->encoding == WE_MXFP4)             token_of_kind(w, row0, row1, a, t, y, WE_MXFP4, 32);
    else if (w->encoding == WE_Q4G && most)  token_of_kind(w, row0, row1, a, t, y, WE_Q4G, 128);
    else if (w->encoding == WE_Q4G)          token_of_kind(w, row0, row1, a, t, y, WE_Q4G, w->group);
    else if (most)                           token_of_kind(w, row0, row1, a, t, y, WE_Q8G, 128);
    else                                     token_of_kind(w, row0, row1, a, t, y, WE_Q8G, w->group);
}

/* ------------------------------------------------------------ many tokens ---- */

/* One group of a row as int16, in the order of the activations it will meet. */
static inline void widen_group(const uint8_t *codes, size_t group, int kind, int16_t *out)
{
    int8_t nibbles[128];
    if (kind != WE_Q8G) unpack_nibbles(codes, group, kind, nibbles);
    const int8_t *from = kind != WE_Q8G ? nibbles : (const int8_t *)codes;
    for (size_t i = 0; i < group; i += 8) vst1q_s16(out + i, vmovl_s8(vld1_s8(from + i)));
}

typedef struct group_args {         /* one group of ROWS rows and some tokens */
    const int16_t *w;               /* [ROWS][group]                          */
    const int16_t *q;               /* [n][q_stride]                          */
    const float   *scale;           /* [n][scale_stride]                      */
    const int32_t *bias;            /* [n][scale_stride], or NULL: zeros      */
    float32x4_t    weight;
    size_t         group, q_stride, scale_stride;
} group_args;

/* sums[t] += this group, for tokens [t, t + n_tokens); n_tokens is a constant. */
static inline void group_tokens(const group_args *g, size_t t, const size_t n_tokens, float sums[][ROWS])
{
    int32x4_t dot[4][ROWS];
    for (size_t u = 0; u < n_tokens; u++)
        for (size_t i = 0; i < ROWS; i++) dot[u][i] = vdupq_n_s32(0);
    for (size_t k = 0; k < g->group; k += 8) {
        int16x8_t w[ROWS];
        for (size_t i = 0; i < ROWS; i++) w[i] = vld1q_s16(g->w + i * g->group + k);
        for (size_t u = 0; u < n_tokens; u++)
            for (size_t i = 0; i < ROWS; i++)
                dot[u][i] = multiply_x8(dot[u][i], w[i], g->q + (t + u) * g->q_stride + k);
    }
    for (size_t u = 0; u < n_tokens; u++) {
        const size_t at = (t + u) * g->scale_stride;
        const int32x4_t total = vaddq_s32(totals_x4(dot[u]), vdupq_n_s32(g->bias ? g->bias[at] : 0));
        vst1q_f32(sums[t + u], add_group(vld1q_f32(sums[t + u]), total, g->scale[at], g->weight));
    }
}

/* y[t][0 .. ROWS) of n <= TOKENS tokens. */
static void tokens_rows(const we_matrix *w, size_t row, const we_acts *a, size_t t0, size_t n, float *y,
                        size_t y_stride)
{
    const int kind = w->encoding;
    const size_t group = w->group, n_groups = we_n_groups(w), group_bytes = group_bytes_of(kind, group);
    const int16_t *q = (kind == WE_Q8G ? a->q : a->q_halves) + t0 * a->q_stride;
    int16_t wide[ROWS * 128];
    float sums[TOKENS][ROWS];
    group_args args = {.w = wide, .group = group, .q_stride = a->q_stride, .scale_stride = a->scale_stride};
    memset(sums, 0, n * sizeof sums[0]);
    for (size_t g = 0; g < n_groups; g++) {
        for (size_t i = 0; i < ROWS; i++)
            widen_group((const uint8_t *)w->payload + (row + i) * w->row_bytes + g * group_bytes, group, kind,
                        wide + i * group);
        args.weight = scales_x4(w, row * n_groups + g, n_groups, ROWS);
        args.q = q + g * group;
        args.scale = a->scale + t0 * a->scale_stride + g;
        args.bias = kind == WE_Q4G ? a->bias + t0 * a->scale_stride + g : NULL;
        size_t t = 0;
        for (; t + 4 <= n; t += 4) group_tokens(&args, t, 4, sums);
        for (; t < n; t++) group_tokens(&args, t, 1, sums);
    }
    for (size_t t = 0; t < n; t++) vst1q_f32(y + t * y_stride, vld1q_f32(sums[t]));
}

void we_neon_matmul_integer(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                            size_t y_stride)
{
    const size_t whole = n > 1 ? row0 + (row1 - row0) / ROWS * ROWS : row0;     /* rows done for many tokens at once */
    for (size_t r = row0; r < whole; r += ROWS)
        for (size_t t = 0; t < n; t += TOKENS)
            tokens_rows(w, r, a, t, we_min(TOKENS, n - t), y + t * y_stride + (r - row0), y_stride);
    for (size_t t = 0; t < n; t++) one_token(w, whole, row1, a, t, y + t * y_stride + (whole - row0));
}

#else
typedef int we_no_neon_integer;     /* ISO C wants a declaration in every file */
#endif
