/* AVX2: int16 activations by int8 and nibble weights.
 *
 * A (row, token) has eight sums. In a group, lane l adds the products of the 16-bit elements 2 l and 2 l + 1 of each
 * 256-bit piece, exactly, in int32; then sum[l] += (dot[l] * activation scale) * weight scale. One token and many take
 * different paths to the same lanes, so their bits agree. Elements come in memory order for Q8G, evens before odds for
 * Q4G, whose bias starts lane 0. */
#include "x86_avx2.h"
#ifdef WE_X86
WE_TARGET_PUSH("avx2,fma,f16c")

enum { ROWS = 4, TOKENS = 32, GROUPS = 64, AHEAD = 512 };   /* AHEAD: bytes of prefetch in a row */

EXPANDED __m256i load_i16(const int16_t *p) { return _mm256_loadu_si256((const __m256i *)(const void *)p); }
EXPANDED __m128i load_bytes(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)(const void *)p); }

EXPANDED __m256 add_group(__m256 sum, __m256i dot, float activation, float weight)
{
    const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(activation));
    return _mm256_fmadd_ps(scaled, _mm256_set1_ps(weight), sum);
}

EXPANDED __m256i dot_q8(const uint8_t *codes, const int16_t *q, size_t group)
{
    __m256i dot = _mm256_setzero_si256();
    for (size_t i = 0; i < group; i += 16)
        dot = _mm256_add_epi32(dot, _mm256_madd_epi16(_mm256_cvtepi8_epi16(load_bytes(codes + i)), load_i16(q + i)));
    return dot;
}

EXPANDED __m256i dot_q4(const uint8_t *codes, const int16_t *halves, size_t group, int32_t bias)
{
    __m256i dot = _mm256_setr_epi32(bias, 0, 0, 0, 0, 0, 0, 0);
    for (size_t i = 0; i < group / 2; i += 16) {
        const __m256i pairs = _mm256_cvtepu8_epi16(load_bytes(codes + i));
        const __m256i evens = _mm256_and_si256(pairs, _mm256_set1_epi16(15)), odds = _mm256_srli_epi16(pairs, 4);
        dot = _mm256_add_epi32(dot, _mm256_madd_epi16(evens, load_i16(halves + i)));
        dot = _mm256_add_epi32(dot, _mm256_madd_epi16(odds, load_i16(halves + group / 2 + i)));
    }
    return dot;
}

/* f16 scales of groups [g0, g1) of n_rows rows. */
static void load_scales(const we_matrix *w, size_t row, size_t n_rows, size_t g0, size_t g1, float scales[][GROUPS])
{
    const size_t n_groups = we_n_groups(w);
    for (size_t i = 0; i < n_rows; i++)
        we_avx2.f16_to_f32(scales[i], w->scales + (row + i) * n_groups + g0, g1 - g0);
}

/* -------------------------------------------------------------- one token ---- */

/* y[0 .. n_rows) of one token; q4, group and n_rows are constants where this is expanded. */
EXPANDED void token_rows(const we_matrix *w, size_t row, const we_acts *a, size_t t, float *y, const int q4,
                              const size_t group, const size_t n_rows)
{
    const size_t n_groups = we_n_groups(w), group_bytes = q4 ? group / 2 : group;
    const uint8_t *codes = (const uint8_t *)w->payload + row * w->row_bytes;
    const int16_t *q = (q4 ? a->q_halves : a->q) + t * a->q_stride;
    const float *scale = a->scale + t * a->scale_stride;
    const int32_t *bias = a->bias + t * a->scale_stride;
    float weight[ROWS][GROUPS];
    __m256 sums[ROWS];
    for (size_t i = 0; i < n_rows; i++) sums[i] = _mm256_setzero_ps();
    for (size_t g0 = 0; g0 < n_groups; g0 += GROUPS) {
        const size_t g1 = we_min(g0 + GROUPS, n_groups);
        load_scales(w, row, n_rows, g0, g1, weight);
        for (size_t g = g0; g < g1; g++) {
            for (size_t i = 0; i < n_rows; i++) {
                const uint8_t *at = codes + i * w->row_bytes + g * group_bytes;
                for (size_t line = 0; line < group_bytes; line += 64)
                    _mm_prefetch((const char *)at + AHEAD + line, _MM_HINT_T0);
                const __m256i dot = q4 ? dot_q4(at, q + g * group, group, bias[g]) : dot_q8(at, q + g * group, group);
                sums[i] = add_group(sums[i], dot, scale[g], weight[i][g - g0]);
            }
        }
    }
    for (size_t i = 0; i < n_rows; i++) y[i] = sum_lanes(sums[i]);
}

static void one_token(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t t, float *y)
{
    const int q4 = w->encoding == WE_Q4G;
    size_t r = row0;
    for (; r + ROWS <= row1; r += ROWS) {
        if (q4 && w->group == 128) token_rows(w, r, a, t, y + (r - row0), 1, 128, ROWS);
        else if (q4)               token_rows(w, r, a, t, y + (r - row0), 1, w->group, ROWS);
        else if (w->group == 128)  token_rows(w, r, a, t, y + (r - row0), 0, 128, ROWS);
        else                       token_rows(w, r, a, t, y + (r - row0), 0, w->group, ROWS);
    }
    for (; r < row1; r++) token_rows(w, r, a, t, y + (r - row0), q4, w->group, 1);
}

/* ------------------------------------------------------------ many tokens ---- */

/* One group of a row as int16, in the order of the activations it will meet. */
EXPANDED void unpack_group(const uint8_t *codes, size_t group, int q4, int16_t *out)
{
    for (size_t i = 0; i < (q4 ? group / 2 : group); i += 16) {
        const __m128i bytes = load_bytes(codes + i);
        const __m256i pairs = q4 ? _mm256_cvtepu8_epi16(bytes) : _mm256_cvtepi8_epi16(bytes);
        if (!q4) {
            _mm256_storeu_si256((__m256i *)(void *)(out + i), pairs);
        } else {
            _mm256_storeu_si256((__m256i *)(void *)(out + i), _mm256_and_si256(pairs, _mm256_set1_epi16(15)));
            _mm256_storeu_si256((__m256i *)(void *)(out + group / 2 + i), _mm256_srli_epi16(pairs, 4));
        }
    }
}

typedef struct group_args {         /* one group of ROWS rows and some tokens */
    const int16_t *w;               /* [ROWS][group]                          */
    const int16_t *q;               /* [n][q_stride]                          */
    const float   *scale;           /* [n][scale_stride]                      */
    const int32_t *bias;            /* [n][scale_stride], or NULL: zeros      */
    float          weight[ROWS];
    size_t         group, q_stride, scale_stride;
} group_args;

/* sums[t][i] += this group, for tokens [t, t + n_tokens); n_tokens is a constant. */
EXPANDED void group_tokens(const group_args *g, size_t t, const size_t n_tokens, float sums[][ROWS][8])
{
    __m256i dot[ROWS][2];
    for (size_t u = 0; u < n_tokens; u++)
        for (size_t i = 0; i < ROWS; i++)
            dot[i][u] = g->bias ? _mm256_setr_epi32(g->bias[(t + u) * g->scale_stride], 0, 0, 0, 0, 0, 0, 0)
                                : _mm256_setzero_si256();
    for (size_t k = 0; k < g->group; k += 16) {
        __m256i q[2];
        for (size_t u = 0; u < n_tokens; u++) q[u] = load_i16(g->q + (t + u) * g->q_stride + k);
        for (size_t i = 0; i < ROWS; i++) {
            const __m256i w = load_i16(g->w + i * g->group + k);
            for (size_t u = 0; u < n_tokens; u++) dot[i][u] = _mm256_add_epi32(dot[i][u], _mm256_madd_epi16(w, q[u]));
        }
    }
    for (size_t u = 0; u < n_tokens; u++) {
        const float activation = g->scale[(t + u) * g->scale_stride];
        for (size_t i = 0; i < ROWS; i++) {
            float *sum = sums[t + u][i];
            _mm256_storeu_ps(sum, add_group(_mm256_loadu_ps(sum), dot[i][u], activation, g->weight[i]));
        }
    }
}

/* y[t][0 .. ROWS) of n <= TOKENS tokens. */
static void tokens_rows(const we_matrix *w, size_t row, const we_acts *a, size_t t0, size_t n, float *y,
                        size_t y_stride)
{
    const int q4 = w->encoding == WE_Q4G;
    const size_t group = w->group, n_groups = we_n_groups(w), group_bytes = q4 ? group / 2 : group;
    const int16_t *q = (q4 ? a->q_halves : a->q) + t0 * a->q_stride;
    int16_t unpacked[ROWS * 128];
    float sums[TOKENS][ROWS][8], weight[ROWS][GROUPS];
    group_args args = {.w = unpacked, .group = group, .q_stride = a->q_stride, .scale_stride = a->scale_stride};
    memset(sums, 0, n * sizeof sums[0]);
    for (size_t g = 0; g < n_groups; g++) {
        if (g % GROUPS == 0) load_scales(w, row, ROWS, g, we_min(g + GROUPS, n_groups), weight);
        for (size_t i = 0; i < ROWS; i++) {
            const uint8_t *codes = (const uint8_t *)w->payload + (row + i) * w->row_bytes + g * group_bytes;
            unpack_group(codes, group, q4, unpacked + i * group);
            args.weight[i] = weight[i][g % GROUPS];
        }
        args.q = q + g * group;
        args.scale = a->scale + t0 * a->scale_stride + g;
        args.bias = q4 ? a->bias + t0 * a->scale_stride + g : NULL;
        size_t t = 0;
        for (; t + 2 <= n; t += 2) group_tokens(&args, t, 2, sums);
        if (t < n) group_tokens(&args, t, 1, sums);
    }
    for (size_t t = 0; t < n; t++)
        for (size_t i = 0; i < ROWS; i++) y[t * y_stride + i] = sum_lanes(_mm256_loadu_ps(sums[t][i]));
}

void we_avx2_matmul_integer(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                            size_t y_stride)
{
    const size_t whole = n > 1 ? row0 + (row1 - row0) / ROWS * ROWS : row0;     /* rows done for many tokens at once */
    for (size_t r = row0; r < whole; r += ROWS)
        for (size_t t = 0; t < n; t += TOKENS)
            tokens_rows(w, r, a, t, we_min(TOKENS, n - t), y + t * y_stride + (r - row0), y_stride);
    for (size_t t = 0; t < n; t++) one_token(w, whole, row1, a, t, y + t * y_stride + (whole - row0));
}

WE_TARGET_POP
#else
typedef int we_no_avx2_integer;     /* ISO C wants a declaration in every file */
#endif
