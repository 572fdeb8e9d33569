/* AVX-512: int16 activations by int8, nibble and E2M1 weights. The file that includes this defines add_products,
 * sum + the products of 16-bit neighbours in each 32-bit lane: two instructions, or one with VNNI.
 *
 * A (row, token) has one sum: sum + float(dot) * activation scale * weight scale, group after group, dot being exact
 * whatever the order inside a group. So one token, whose vectors lie along a row, and many, whose lanes are rows,
 * give the same bits. */

enum {
    LANES = 16,
    PANEL_ROWS = 2 * LANES, SPAN = 128,         /* rows and columns that are unpacked at a time */
    TILE_TOKENS = 8, TOKENS = 12 * TILE_TOKENS, /* tokens in registers, and those whose sums wait in memory */
    GROUPS = 64, AHEAD = 4096                   /* groups whose dots wait; bytes of prefetch in a row */
};

/* Sums that loops carry: GCC copies every sum in every round if it has the type of all integer vectors. */
#ifdef _MSC_VER
typedef __m512i dots_x16;
#else
typedef int32_t dots_x16 __attribute__((vector_size(64)));
#endif

EXPANDED __m512i load_bits(const void *p) { return _mm512_loadu_si512(p); }

/* ----------------------------------------------------- rows become lanes ---- */

/* x[i] lane j becomes x[j] lane i. */
EXPANDED void transpose_x16(__m512i x[16])
{
    __m512i y[16];
    WE_UNROLL
    for (size_t i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    WE_UNROLL
    for (size_t i = 0; i < 16; i += 4) {                /* x[i + c]: rows i .. i + 3, columns c, 4 + c, ... */
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    WE_UNROLL
    for (size_t c = 0; c < 4; c++) {
        const __m512i low = _mm512_shuffle_i32x4(x[c], x[c + 4], 0x88);
        const __m512i low2 = _mm512_shuffle_i32x4(x[c], x[c + 4], 0xdd);
        const __m512i high = _mm512_shuffle_i32x4(x[c + 8], x[c + 12], 0x88);
        const __m512i high2 = _mm512_shuffle_i32x4(x[c + 8], x[c + 12], 0xdd);
        y[c] = _mm512_shuffle_i32x4(low, high, 0x88);
        y[c + 8] = _mm512_shuffle_i32x4(low, high, 0xdd);
        y[c + 4] = _mm512_shuffle_i32x4(low2, high2, 0x88);
        y[c + 12] = _mm512_shuffle_i32x4(low2, high2, 0xdd);
    }
    WE_UNROLL
    for (size_t i = 0; i < 16; i++) x[i] = y[i];
}

/* Scales of groups [g, g + 16) of a row, zeros where `some` has none. */
EXPANDED __m512 load_weights(const we_matrix *w, size_t row, size_t g, __mmask16 some)
{
    const size_t at = row * we_n_groups(w) + g;
    if (w->encoding != WE_MXFP4) return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, w->scales + at));
    const __m512i e = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(some, we_e8m0_scales(w) + at));
    const __m512i bits = _mm512_max_epi32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(0x400000));
    return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0.5f));      /* as we_e8m0_halved */
}

/* out[g stride] has the scales of group g0 + g, g < n <= 16, of n_rows <= 16 rows. */
static void weights_of_rows(const we_matrix *w, size_t row, size_t n_rows, size_t g0, size_t n, float out[][LANES],
                            size_t stride)
{
    const __mmask16 some = (__mmask16)((1u << n) - 1);
    __m512i x[LANES];
    WE_UNROLL
    for (size_t i = 0; i < LANES; i++)
        x[i] = _mm512_castps_si512(load_weights(w, row + we_min(i, n_rows - 1), g0, some));
    transpose_x16(x);
    for (size_t g = 0; g < n; g++) _mm512_storeu_si512(out[g * stride], x[g]);
}

EXPANDED __m512 scaled(__m512i dot, __m512 activation, __m512 weight)
{
    return _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot), activation), weight);
}

/* -------------------------------------------------------------- one token ---- */

/* 32 codes of a group of 32, in the order of the activations they meet: Q8G's own, else evens before odds. */
EXPANDED __m512i codes_x32(const uint8_t *codes, const int kind)
{
    if (kind == WE_Q8G) return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)codes));
    const __m128i pairs = _mm_loadu_si128((const __m128i *)(const void *)codes);
    __m256i nibbles = _mm256_inserti128_si256(_mm256_castsi128_si256(pairs), _mm_srli_epi16(pairs, 4), 1);
    nibbles = _mm256_and_si256(nibbles, _mm256_set1_epi8(15));
    if (kind == WE_MXFP4) {
        const __m128i table = _mm_loadu_si128((const __m128i *)(const void *)we_e2m1_doubled);
        nibbles = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles);
    }
    return _mm512_cvtepi8_epi16(nibbles);
}

EXPANDED __m512i row_dot(const uint8_t *codes, const int16_t *q, const size_t group, const int kind)
{
    __m512i dot = _mm512_setzero_si512();
    if (kind == WE_Q8G || group == 32) {
        for (size_t i = 0; i < group; i += 32) dot = add_products(dot, codes_x32(codes + i, kind), load_bits(q + i));
        return dot;
    }
    for (size_t i = 0; i < group / 2; i += 32) {
        const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)(codes + i)));
        dot = add_products(dot, _mm512_and_si512(pairs, _mm512_set1_epi16(15)), load_bits(q + i));
        dot = add_products(dot, _mm512_srli_epi16(pairs, 4), load_bits(q + group / 2 + i));
    }
    return dot;
}

/* The totals of four vectors. */
EXPANDED __m128i totals_x4(const __m512i dot[4])
{
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(dot[0], dot[1]), _mm512_unpackhi_epi32(dot[0], dot[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(dot[2], dot[3]), _mm512_unpackhi_epi32(dot[2], dot[3]));
    const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m256i d = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
}

/* dots[g - g0] of a row's groups [g0, g1), zeros behind; group and kind are constants. */
EXPANDED void row_dots(const uint8_t *codes, const int16_t *q, size_t g0, size_t g1, int32_t *dots, const size_t group,
                       const int kind)
{
    const size_t group_bytes = kind == WE_Q8G ? group : group / 2;
    for (size_t g = g0; g < g1; g += 4) {
        __m512i dot[4];
        WE_UNROLL
        for (size_t i = 0; i < 4; i++) {
            const uint8_t *at = codes + (g + i) * group_bytes;
            for (size_t b = 0; b < group_bytes; b += 64) _mm_prefetch((const char *)at + AHEAD + b, _MM_HINT_T0);
            dot[i] = g + i < g1 ? row_dot(at, q + (g + i) * group, group, kind) : _mm512_setzero_si512();
        }
        _mm_storeu_si128((__m128i *)(void *)(dots + (g - g0)), totals_x4(dot));
    }
}

/* sum += groups [g, g + n), n <= 16, of n_rows rows: dots + 64 i has row i's. */
EXPANDED __m512 add_groups(__m512 sum, const we_matrix *w, size_t row, size_t n_rows, size_t g, size_t n,
                           const int32_t *dots, const float *scale, const int32_t *bias)
{
    const __mmask16 some = (__mmask16)((1u << n) - 1);
    const __m512 activation = _mm512_maskz_loadu_ps(some, scale + g);
    __m512i x[LANES];
    WE_UNROLL
    for (size_t i = 0; i < LANES; i++) {
        __m512i dot = load_bits(dots + i * GROUPS);
        if (bias) dot = _mm512_add_epi32(dot, _mm512_maskz_loadu_epi32(some, bias + g));
        const __m512 weight = load_weights(w, row + we_min(i, n_rows - 1), g, some);
        x[i] = _mm512_castps_si512(scaled(dot, activation, weight));
    }
    transpose_x16(x);
    for (size_t k = 0; k < n; k++) sum = _mm512_add_ps(sum, _mm512_castsi512_ps(x[k]));
    return sum;
}

/* y[0 .. n_rows) of one token, n_rows <= 16. */
EXPANDED void token_rows(const we_matrix *w, size_t row, size_t n_rows, const we_acts *a, size_t t, float *y,
                         const size_t group, const int kind)
{
    const size_t n_groups = we_n_groups(w);
    const int16_t *q = (kind == WE_Q8G ? a->q : a->q_halves) + t * a->q_stride;
    const float *scale = a->scale + t * a->scale_stride;
    const int32_t *bias = kind == WE_Q4G ? a->bias + t * a->scale_stride : NULL;
    int32_t dots[LANES][GROUPS];
    __m512 sum = _mm512_setzero_ps();
    if (n_rows < LANES) memset(dots, 0, sizeof dots);
    for (size_t g0 = 0, g1; g0 < n_groups; g0 = g1) {
        g1 = we_min(g0 + GROUPS, n_groups);
        for (size_t i = 0; i < n_rows; i++)
            row_dots((const uint8_t *)w->payload + (row + i) * w->row_bytes, q, g0, g1, dots[i], group, kind);
        for (size_t g = g0; g < g1; g += LANES)
            sum = add_groups(sum, w, row, n_rows, g, we_min(LANES, g1 - g), &dots[0][g - g0], scale, bias);
    }
    _mm512_mask_storeu_ps(y, (__mmask16)((1u << n_rows) - 1), sum);
}

static void one_token(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t t, float *y)
{
    for (size_t r = row0, n; r < row1; r += n, y += n) {
        n = we_min(LANES, row1 - r);
        if (w->encoding == WE_MXFP4)    token_rows(w, r, n, a, t, y, 32, WE_MXFP4);
        else if (w->encoding == WE_Q4G) {
            if (w->group == 128)        token_rows(w, r, n, a, t, y, 128, WE_Q4G);
            else if (w->group == 64)    token_rows(w, r, n, a, t, y, 64, WE_Q4G);
            else                        token_rows(w, r, n, a, t, y, 32, WE_Q4G);
        } else if (w->group == 128)     token_rows(w, r, n, a, t, y, 128, WE_Q8G);
        else                            token_rows(w, r, n, a, t, y, w->group, WE_Q8G);
    }
}

/* ------------------------------------------------------------ many tokens ---- */

typedef __m512i panel[SPAN / 2][2];     /* columns 2 k and 2 k + 1 of 16 rows, and of 16 more */

/* Nibbles of 16 rows, 8 columns in a lane, to four vectors of pairs. */
EXPANDED void unpack_nibbles(__m512i x, const int kind, __m512i (*out)[2])
{
    const __m512i low = _mm512_set1_epi8(15);
    if (kind == WE_Q4G) {
        const __m512i pairs = _mm512_set1_epi32(0x000f000f);
        WE_UNROLL
        for (unsigned p = 0; p < 4; p++) {
            const __m512i byte = _mm512_srli_epi32(x, 8 * p), up = _mm512_slli_epi32(byte, 12);
            out[p][0] = _mm512_and_si512(_mm512_mask_blend_epi16(0xaaaaaaaa, byte, up), pairs);
        }
        return;
    }
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)we_e2m1_doubled));
    const __m512i evens = _mm512_shuffle_epi8(table, _mm512_and_si512(x, low));
    const __m512i odds = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi32(x, 4), low));
    WE_UNROLL
    for (unsigned p = 0; p < 4; p++) {                  /* each code into the upper byte of its 16 bits */
        const __m512i even = _mm512_slli_epi32(_mm512_srli_epi32(evens, 8 * p), 8);
        const __m512i odd = _mm512_slli_epi32(_mm512_srli_epi32(odds, 8 * p), 24);
        const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaa, even, odd);
        out[p][0] = _mm512_srai_epi16(both, 8);
    }
}

/* Columns [c0, c0 + 128) of 16 rows, zeros behind the row's end; rows behind the range repeat its last. */
EXPANDED void unpack_rows(const we_matrix *w, size_t row, size_t n_rows, size_t c0, __m512i (*out)[2], const int kind)
{
    const size_t begin = kind == WE_Q8G ? c0 : c0 / 2, n = kind == WE_Q8G ? SPAN : SPAN / 2;
    for (size_t b = 0; b < n && begin + b < w->row_bytes; b += 64) {
        const size_t left = w->row_bytes - begin - b;
        const __mmask64 some = left < 64 ? ((__mmask64)1 << left) - 1 : ~(__mmask64)0;
        const uint8_t *codes = (const uint8_t *)w->payload + row * w->row_bytes + begin + b;
        __m512i x[16];
        WE_UNROLL
        for (size_t i = 0; i < 16; i++) {
            const uint8_t *at = codes + we_min(i, n_rows - 1) * w->row_bytes;
            _mm_prefetch((const char *)at + PANEL_ROWS * w->row_bytes, _MM_HINT_T0);    /* the next panel's */
            x[i] = _mm512_maskz_loadu_epi8(some, at);
        }
        transpose_x16(x);
        if (kind != WE_Q8G) {
            for (size_t i = 0; i < 16; i++) unpack_nibbles(x[i], kind, out + 4 * i);
            continue;
        }
        const __m512i lane = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
        const __m512i first = _mm512_add_epi32(lane, _mm512_set1_epi32(0x01000000));    /* bytes 0 and 1 upwards */
        const __m512i second = _mm512_add_epi32(lane, _mm512_set1_epi32(0x03000200));   /* bytes 2 and 3 */
        for (size_t i = 0; i < 16; i++) {
            out[b / 2 + 2 * i][0] = _mm512_srai_epi16(_mm512_shuffle_epi8(x[i], first), 8);
            out[b / 2 + 2 * i + 1][0] = _mm512_srai_epi16(_mm512_shuffle_epi8(x[i], second), 8);
        }
    }
}

static void unpack_panel(const we_matrix *w, size_t row, size_t n_rows, size_t c0, panel out)
{
    for (size_t v = 0; v < 2; v++) {
        const size_t first = v * LANES < n_rows ? v * LANES : 0, n = we_min(LANES, n_rows - first);
        __m512i (*half)[2] = (__m512i (*)[2])(void *)&out[0][v];
        if (w->encoding == WE_Q8G)      unpack_rows(w, row + first, n, c0, half, WE_Q8G);
        else if (w->encoding == WE_Q4G) unpack_rows(w, row + first, n, c0, half, WE_Q4G);
        else                            unpack_rows(w, row + first, n, c0, half, WE_MXFP4);
    }
}

typedef struct group_args {             /* one group of the rows of a panel, and some tokens */
    const __m512i (*w)[2];
    const int16_t *q;                   /* [n][q_stride]                                     */
    const float   *scale;               /* [n][scale_stride]                                 */
    const int32_t *bias;                /* [n][scale_stride], or NULL: zeros                 */
    const float   *weights;             /* [PANEL_ROWS]                                      */
    size_t         group, q_stride, scale_stride;
} group_args;

/* sums[t][row] += this group, for tokens [t, t + n_tokens); n_tokens is a constant. */
EXPANDED void group_tokens(const group_args *g, size_t t, const size_t n_tokens, float sums[][PANEL_ROWS])
{
    const size_t step = g->q_stride;
    const int16_t *q = g->q + t * step;
    const __m512i *w = g->w[0];
    dots_x16 dot0[TILE_TOKENS], dot1[TILE_TOKENS];
    WE_UNROLL
    for (size_t u = 0; u < n_tokens; u++) {
        const int32_t start = g->bias ? g->bias[(t + u) * g->scale_stride] : 0;
        dot0[u] = dot1[u] = (dots_x16)_mm512_set1_epi32(start);
    }
    for (const __m512i *const end = w + g->group; w < end; w += 2, q += 2) {
        const __m512i w0 = w[0], w1 = w[1];
        WE_UNROLL
        for (size_t u = 0; u < n_tokens; u++) {
            const __m512i pairs = _mm512_set1_epi32(*(const int32_t *)(const void *)(q + u * step));
            dot0[u] = (dots_x16)add_products((__m512i)dot0[u], w0, pairs);
            dot1[u] = (dots_x16)add_products((__m512i)dot1[u], w1, pairs);
        }
    }
    const __m512 weight0 = _mm512_loadu_ps(g->weights), weight1 = _mm512_loadu_ps(g->weights + LANES);
    WE_UNROLL
    for (size_t u = 0; u < n_tokens; u++) {
        const __m512 activation = _mm512_set1_ps(g->scale[(t + u) * g->scale_stride]);
        float *sum = sums[t + u];
        _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), scaled((__m512i)dot0[u], activation, weight0)));
        const __m512 second = scaled((__m512i)dot1[u], activation, weight1);
        _mm512_storeu_ps(sum + LANES, _mm512_add_ps(_mm512_loadu_ps(sum + LANES), second));
    }
}

/* y[t][0 .. n_rows) of n <= TOKENS tokens, n_rows <= PANEL_ROWS. */
static void tokens_rows(const we_matrix *w, size_t row, size_t n_rows, const we_acts *a, size_t t0, size_t n, float *y,
                        size_t y_stride)
{
    const size_t n_groups = we_n_groups(w);
    panel unpacked;
    float sums[TOKENS][PANEL_ROWS], weights[LANES][PANEL_ROWS];
    group_args args = {.group = w->group, .q_stride = a->q_stride, .scale_stride = a->scale_stride};
    memset(sums, 0, n * sizeof sums[0]);
    for (size_t g = 0; g < n_groups; g++) {
        const size_t c = g * w->group;
        for (size_t v = 0; v < 2 && g % LANES == 0; v++) {
            const size_t first = v * LANES < n_rows ? v * LANES : 0, some = we_min(LANES, n_groups - g);
            float (*out)[LANES] = (float (*)[LANES])(void *)&weights[0][v * LANES];
            weights_of_rows(w, row + first, we_min(LANES, n_rows - first), g, some, out, 2);
        }
        if (c % SPAN == 0) unpack_panel(w, row, n_rows, c, unpacked);
        args.w = (const __m512i (*)[2])(unpacked + c % SPAN / 2);
        args.q = a->q + t0 * a->q_stride + c;
        args.scale = a->scale + t0 * a->scale_stride + g;
        args.bias = w->encoding == WE_Q4G ? a->bias + t0 * a->scale_stride + g : NULL;
        args.weights = weights[g % LANES];
        size_t t = 0;
        for (; t + TILE_TOKENS <= n; t += TILE_TOKENS) group_tokens(&args, t, TILE_TOKENS, sums);
        for (; t + 4 <= n; t += 4) group_tokens(&args, t, 4, sums);
        for (; t < n; t++) group_tokens(&args, t, 1, sums);
    }
    for (size_t t = 0; t < n; t++) memcpy(y + t * y_stride, sums[t], n_rows * sizeof *y);
}

static void matmul_integer(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                           size_t y_stride)
{
    for (size_t t = 0; t < n && n < 4; t++) one_token(w, row0, row1, a, t, y + t * y_stride);
    for (size_t t = 0; t < n && n >= 4; t += TOKENS)
        for (size_t r = row0; r < row1; r += PANEL_ROWS)
            tokens_rows(w, r, we_min(PANEL_ROWS, row1 - r), a, t, we_min(TOKENS, n - t), y + t * y_stride + (r - row0),
                        y_stride);
}
