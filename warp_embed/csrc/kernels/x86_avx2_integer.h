/* AVX2: int16 activations by int8, nibble and E2M1 weights. The file that includes this defines add_products, sum + the
 * products of 16-bit neighbours in each 32-bit lane: two instructions, or one with AVX-VNNI.
 *
 * A (row, token) has one sum: sum + float(dot) * activation scale * weight scale, group after group, dot being exact
 * whatever the order inside a group. So one token, whose vectors lie along a row, and many, whose lanes are rows, give
 * the same bits. */

enum {
    LANES = 8,
    PANEL_ROWS = 2 * LANES, SPAN = 128,         /* rows and columns that are unpacked at a time */
    TILE_TOKENS = 4, TOKENS = 24 * TILE_TOKENS, /* tokens in registers, and those whose sums wait in memory */
    STREAMS = 4, AHEAD = 384,                   /* places that one token reads side by side; bytes of prefetch in each */
    GROUPS = 64                                 /* groups whose dots wait */
};

/* Sums that loops carry: GCC copies every sum in every round if it has the type of all integer vectors. */
#ifdef _MSC_VER
typedef __m256i dots_x8;
#else
typedef int32_t dots_x8 __attribute__((vector_size(32)));
#endif

/* GCC would add the products of an unrolled loop in another order, and keep most of them in memory until then. */
#ifdef __GNUC__
#define IN_ORDER(sum) __asm__("" : "+x"(sum))
#else
#define IN_ORDER(sum)
#endif

EXPANDED __m256i load_bits(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
EXPANDED __m128i load_half(const void *p) { return _mm_loadu_si128((const __m128i *)p); }

/* ----------------------------------------------------- rows become lanes ---- */

/* x[i] lane j becomes x[j] lane i. */
EXPANDED void transpose_x8(__m256i x[8])
{
    __m256i y[8];
    WE_UNROLL
    for (size_t i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    }
    WE_UNROLL
    for (size_t i = 0; i < 8; i += 4) {                 /* x[i + c]: rows i .. i + 3, columns c and 4 + c */
        x[i] = _mm256_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm256_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm256_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm256_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    WE_UNROLL
    for (size_t c = 0; c < 4; c++) {
        const __m256i low = x[c], high = x[c + 4];
        x[c] = _mm256_permute2x128_si256(low, high, 0x20);
        x[c + 4] = _mm256_permute2x128_si256(low, high, 0x31);
    }
}

/* Scales of groups [g, g + n), n <= 8, of a row, zeros behind: the last groups of a row are read with those before
 * them, which are shifted out. bytes is a constant, that of a scale. */
EXPANDED __m256 load_weights(const we_matrix *w, size_t row, size_t g, size_t n, const size_t bytes)
{
    static const uint8_t down[32] = {0,    1,    2,    3,    4,    5,    6,    7,    8,    9,    10,
                                     11,   12,   13,   14,   15,   0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
                                     0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80};
    const size_t n_groups = we_n_groups(w), before = (LANES - n) * bytes;
    const char *from = (const char *)w->scales + (row * n_groups + g) * bytes;
    const int shift = n < LANES && n_groups >= LANES;
    uint64_t some[2] = {0, 0};
    if (shift) from -= before;
    else if (n < LANES) from = memcpy(some, from, n * bytes);
    __m128i x = bytes == 2 ? load_half(from) : _mm_loadl_epi64((const __m128i *)(const void *)from);
    if (shift) x = _mm_shuffle_epi8(x, load_half(down + before));
    if (bytes == 2) return _mm256_cvtph_ps(x);
    const __m256i bits = _mm256_max_epi32(_mm256_slli_epi32(_mm256_cvtepu8_epi32(x), 23), _mm256_set1_epi32(0x400000));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0.5f));      /* as we_e8m0_halved */
}

/* out[g stride] has the scales of group g0 + g, g < n <= 8, of eight rows. */
EXPANDED void weights_of_rows(const we_matrix *w, const size_t rows[LANES], size_t g0, size_t n, float out[][LANES],
                              size_t stride, const size_t bytes)
{
    __m256i x[LANES];
    WE_UNROLL
    for (size_t i = 0; i < LANES; i++) x[i] = _mm256_castps_si256(load_weights(w, rows[i], g0, n, bytes));
    transpose_x8(x);
    for (size_t g = 0; g < n; g++) _mm256_storeu_si256((__m256i *)(void *)out[g * stride], x[g]);
}

EXPANDED __m256 scaled(__m256i dot, __m256 activation, __m256 weight)
{
    return _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot), activation), weight);
}

/* -------------------------------------------------------------- one token ---- */

/* Codes of E2M1 nibbles, doubled. */
EXPANDED __m128i doubled_x16(__m128i nibbles) { return _mm_shuffle_epi8(load_half(we_e2m1_doubled), nibbles); }

/* The products of 16 codes of Q8G, or of 32 nibbles (q2: the inputs of the odd ones), added to dot. */
EXPANDED __m256i add_codes(__m256i dot, const uint8_t *codes, __m256i q, __m256i q2, const int kind)
{
    if (kind == WE_Q8G) return add_products(dot, _mm256_cvtepi8_epi16(load_half(codes)), q);
    __m256i evens, odds;
    if (kind == WE_Q4G) {
        const __m256i pairs = _mm256_cvtepu8_epi16(load_half(codes));
        evens = _mm256_and_si256(pairs, _mm256_set1_epi16(15));
        odds = _mm256_srli_epi16(pairs, 4);
    } else {
        const __m128i pairs = load_half(codes), low = _mm_set1_epi8(15);
        evens = _mm256_cvtepi8_epi16(doubled_x16(_mm_and_si128(pairs, low)));
        odds = _mm256_cvtepi8_epi16(doubled_x16(_mm_and_si128(_mm_srli_epi16(pairs, 4), low)));
    }
    return add_products(add_products(dot, evens, q), odds, q2);
}

/* Dots of a group of four rows; group and kind are constants. Each row is a stream of its own: see one_token. Where the
 * group is two cache lines, the processor fetches what comes by itself, and faster. */
EXPANDED __m128i group_dots(const uint8_t *const rows[STREAMS], size_t at, const int16_t *q, const size_t group,
                            const int kind)
{
    const size_t group_bytes = kind == WE_Q8G ? group : group / 2;
    __m256i dot[STREAMS];
    WE_UNROLL
    for (size_t i = 0; i < STREAMS; i++) {
        if (group_bytes <= 64) _mm_prefetch((const char *)rows[i] + at + AHEAD, _MM_HINT_T0);
        dot[i] = _mm256_setzero_si256();
    }
    for (size_t c = 0; c < group_bytes; c += 16) {
        const __m256i q1 = load_bits(q + c), q2 = kind == WE_Q8G ? q1 : load_bits(q + group / 2 + c);
        WE_UNROLL
        for (size_t i = 0; i < STREAMS; i++) {
            dot[i] = add_codes(dot[i], rows[i] + at + c, q1, q2, kind);
            IN_ORDER(dot[i]);
        }
    }
    const __m256i a = _mm256_add_epi32(_mm256_unpacklo_epi32(dot[0], dot[1]), _mm256_unpackhi_epi32(dot[0], dot[1]));
    const __m256i b = _mm256_add_epi32(_mm256_unpacklo_epi32(dot[2], dot[3]), _mm256_unpackhi_epi32(dot[2], dot[3]));
    const __m256i c = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    return _mm_add_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
}

/* y[i] of one token for eight rows, as group_dots reads them: four, then four. */
EXPANDED void token_rows(const we_matrix *w, const size_t rows[LANES], const we_acts *a, size_t t, float y[LANES],
                         const size_t group, const int kind)
{
    const size_t n_groups = we_n_groups(w), group_bytes = kind == WE_Q8G ? group : group / 2;
    const size_t scale_bytes = kind == WE_MXFP4 ? 1 : 2;
    const int16_t *q = (kind == WE_Q8G ? a->q : a->q_halves) + t * a->q_stride;
    const float *scale = a->scale + t * a->scale_stride;
    const int32_t *bias = kind == WE_Q4G ? a->bias + t * a->scale_stride : NULL;
    const uint8_t *low[STREAMS], *high[STREAMS];
    __m128i dots[GROUPS];                       /* of the first four rows */
    float weights[GROUPS][LANES];
    __m256 sum = _mm256_setzero_ps();
    WE_UNROLL
    for (size_t i = 0; i < STREAMS; i++) {
        low[i] = (const uint8_t *)w->payload + rows[i] * w->row_bytes;
        high[i] = (const uint8_t *)w->payload + rows[STREAMS + i] * w->row_bytes;
    }
    for (size_t g0 = 0, g1; g0 < n_groups; g0 = g1) {
        g1 = we_min(g0 + GROUPS, n_groups);
        size_t g = g0;
        for (; g + LANES <= g1; g += LANES) weights_of_rows(w, rows, g, LANES, weights + (g - g0), 1, scale_bytes);
        if (g < g1) weights_of_rows(w, rows, g, g1 - g, weights + (g - g0), 1, scale_bytes);
        for (g = g0; g < g1; g++) dots[g - g0] = group_dots(low, g * group_bytes, q + g * group, group, kind);
        for (g = g0; g < g1; g++) {
            const __m128i four = group_dots(high, g * group_bytes, q + g * group, group, kind);
            __m256i dot = _mm256_inserti128_si256(_mm256_castsi128_si256(dots[g - g0]), four, 1);
            if (bias) dot = _mm256_add_epi32(dot, _mm256_set1_epi32(bias[g]));
            sum = _mm256_add_ps(sum, scaled(dot, _mm256_set1_ps(scale[g]), _mm256_loadu_ps(weights[g - g0])));
        }
    }
    _mm256_storeu_ps(y, sum);
}

/* A core reads faster from four places than from one, so the rows are four ranges that go side by side, two rows of
 * each at a time; then a rest of less than eight rows, its last repeated. */
static void one_token(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t t, float *y)
{
    const size_t n = row1 - row0, whole = n - n % LANES;
    for (size_t r = 0; r < n; r += LANES) {
        size_t rows[LANES];
        float sums[LANES];
        for (size_t i = 0; i < LANES; i++)
            rows[i] = row0 + (r < whole ? (r + i) / STREAMS + i % STREAMS * (whole / STREAMS) : we_min(r + i, n - 1));
        if (w->encoding == WE_MXFP4)    token_rows(w, rows, a, t, sums, 32, WE_MXFP4);
        else if (w->encoding == WE_Q4G) {
            if (w->group == 128)        token_rows(w, rows, a, t, sums, 128, WE_Q4G);
            else if (w->group == 64)    token_rows(w, rows, a, t, sums, 64, WE_Q4G);
            else                        token_rows(w, rows, a, t, sums, 32, WE_Q4G);
        } else if (w->group == 128)     token_rows(w, rows, a, t, sums, 128, WE_Q8G);
        else                            token_rows(w, rows, a, t, sums, w->group, WE_Q8G);
        for (size_t i = 0; i < LANES; i++) y[rows[i] - row0] = sums[i];
    }
}

/* ------------------------------------------------------------ many tokens ---- */

typedef __m256i panel[SPAN / 2][2];     /* columns 2 k and 2 k + 1 of 8 rows, and of 8 more */

/* Each byte p of a lane and of another to the upper bytes of a pair, then down with its sign. */
EXPANDED __m256i pair_of(__m256i low, __m256i high, const int p)
{
    const __m256i to_low = _mm256_slli_epi32(_mm256_srli_epi32(low, 8 * p), 8);
    const __m256i to_high = _mm256_slli_epi32(_mm256_srli_epi32(high, 8 * p), 24);
    return _mm256_srai_epi16(_mm256_blend_epi16(to_low, to_high, 0xaa), 8);
}

/* Nibbles of 8 rows, 8 columns in a lane, to four vectors of pairs. */
EXPANDED void unpack_nibbles(__m256i x, const int kind, __m256i (*out)[2])
{
    const __m256i low = _mm256_set1_epi8(15), table = _mm256_broadcastsi128_si256(load_half(we_e2m1_doubled));
    __m256i evens = _mm256_and_si256(x, low), odds = _mm256_and_si256(_mm256_srli_epi32(x, 4), low);
    if (kind == WE_MXFP4) {
        evens = _mm256_shuffle_epi8(table, evens);
        odds = _mm256_shuffle_epi8(table, odds);
    }
    out[0][0] = pair_of(evens, odds, 0);
    out[1][0] = pair_of(evens, odds, 1);
    out[2][0] = pair_of(evens, odds, 2);
    out[3][0] = pair_of(evens, odds, 3);
}

/* Columns [c0, c0 + 128) of 8 rows, as far as they go; rows behind the range repeat its last. */
EXPANDED void unpack_rows(const we_matrix *w, size_t row, size_t n_rows, size_t c0, __m256i (*out)[2], const int kind)
{
    const size_t begin = kind == WE_Q8G ? c0 : c0 / 2, n = kind == WE_Q8G ? SPAN : SPAN / 2;
    for (size_t b = 0; b < n && begin + b < w->row_bytes; b += 32) {
        const uint8_t *codes = (const uint8_t *)w->payload + row * w->row_bytes + begin + b;
        const int whole = w->row_bytes - begin - b >= 32;               /* rows are multiples of 16 bytes */
        __m256i x[LANES];
        WE_UNROLL
        for (size_t i = 0; i < LANES; i++) {
            const uint8_t *at = codes + we_min(i, n_rows - 1) * w->row_bytes;
            _mm_prefetch((const char *)at + PANEL_ROWS * w->row_bytes, _MM_HINT_T0);    /* the next panel's */
            x[i] = whole ? load_bits(at) : _mm256_castsi128_si256(load_half(at));
        }
        transpose_x8(x);
        if (kind != WE_Q8G) {
            for (size_t i = 0; i < LANES; i++) unpack_nibbles(x[i], kind, out + b + 4 * i);
            continue;
        }
        for (size_t i = 0; i < LANES; i++) {
            out[b / 2 + 2 * i][0] = pair_of(x[i], _mm256_srli_epi32(x[i], 8), 0);
            out[b / 2 + 2 * i + 1][0] = pair_of(_mm256_srli_epi32(x[i], 16), _mm256_srli_epi32(x[i], 24), 0);
        }
    }
}

static void unpack_panel(const we_matrix *w, size_t row, size_t n_rows, size_t c0, panel out)
{
    for (size_t v = 0; v < 2; v++) {
        const size_t first = v * LANES < n_rows ? v * LANES : 0, n = we_min(LANES, n_rows - first);
        __m256i (*half)[2] = (__m256i (*)[2])(void *)&out[0][v];
        if (w->encoding == WE_Q8G)      unpack_rows(w, row + first, n, c0, half, WE_Q8G);
        else if (w->encoding == WE_Q4G) unpack_rows(w, row + first, n, c0, half, WE_Q4G);
        else                            unpack_rows(w, row + first, n, c0, half, WE_MXFP4);
    }
}

typedef struct group_args {             /* one group of the rows of a panel, and some tokens */
    const __m256i (*w)[2];
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
    const __m256i *w = g->w[0];
    dots_x8 dot0[TILE_TOKENS], dot1[TILE_TOKENS];
    WE_UNROLL
    for (size_t u = 0; u < n_tokens; u++) {
        const int32_t start = g->bias ? g->bias[(t + u) * g->scale_stride] : 0;
        dot0[u] = dot1[u] = (dots_x8)_mm256_set1_epi32(start);
    }
    for (const __m256i *const end = w + g->group; w < end; w += 2, q += 2) {
        const __m256i w0 = w[0], w1 = w[1];
        WE_UNROLL
        for (size_t u = 0; u < n_tokens; u++) {
            const __m256i pairs = _mm256_set1_epi32(*(const int32_t *)(const void *)(q + u * step));
            dot0[u] = (dots_x8)add_products((__m256i)dot0[u], w0, pairs);
            dot1[u] = (dots_x8)add_products((__m256i)dot1[u], w1, pairs);
        }
    }
    const __m256 weight0 = _mm256_loadu_ps(g->weights), weight1 = _mm256_loadu_ps(g->weights + LANES);
    WE_UNROLL
    for (size_t u = 0; u < n_tokens; u++) {
        const __m256 activation = _mm256_set1_ps(g->scale[(t + u) * g->scale_stride]);
        float *sum = sums[t + u];
        _mm256_storeu_ps(sum, _mm256_add_ps(_mm256_loadu_ps(sum), scaled((__m256i)dot0[u], activation, weight0)));
        const __m256 second = scaled((__m256i)dot1[u], activation, weight1);
        _mm256_storeu_ps(sum + LANES, _mm256_add_ps(_mm256_loadu_ps(sum + LANES), second));
    }
}

/* y[t][0 .. n_rows) of n <= TOKENS tokens, n_rows <= PANEL_ROWS. */
static void tokens_rows(const we_matrix *w, size_t row, size_t n_rows, const we_acts *a, size_t t0, size_t n, float *y,
                        size_t y_stride)
{
    const size_t n_groups = we_n_groups(w);
    panel unpacked;
    float sums[TOKENS][PANEL_ROWS], weights[LANES][PANEL_ROWS];
    size_t rows[PANEL_ROWS];
    group_args args = {.group = w->group, .q_stride = a->q_stride, .scale_stride = a->scale_stride};
    memset(sums, 0, n * sizeof sums[0]);
    for (size_t i = 0; i < PANEL_ROWS; i++) rows[i] = row + we_min(i, n_rows - 1);
    for (size_t g = 0; g < n_groups; g++) {
        const size_t c = g * w->group;
        for (size_t v = 0; v < PANEL_ROWS && g % LANES == 0; v += LANES) {
            float (*out)[LANES] = (float (*)[LANES])(void *)&weights[0][v];
            if (w->encoding == WE_MXFP4) weights_of_rows(w, rows + v, g, we_min(LANES, n_groups - g), out, 2, 1);
            else weights_of_rows(w, rows + v, g, we_min(LANES, n_groups - g), out, 2, 2);
        }
        if (c % SPAN == 0) unpack_panel(w, row, n_rows, c, unpacked);
        args.w = (const __m256i (*)[2])(unpacked + c % SPAN / 2);
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
