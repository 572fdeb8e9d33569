/* Integer products of AVX2 and AVX-512: how rows, groups and tokens are walked. Included at the end of a level's own
 * header, which defines
 *   LANES, STREAMS = LANES / 2, PANEL_ROWS = 2 LANES, SPAN, TILE_TOKENS, TOKENS, GROUPS, SOME_GROUPS
 *   ints, floats, half_ints         vectors of LANES int32, of LANES floats, of LANES / 2 int32
 *   sums_of_ints                    ints as a type of its own: GCC copies every sum that a loop carries in every round
 *                                   if it has the type of all integer vectors
 *   load_bits load_floats store_floats spread spread_float add_ints add_floats joined     a vector instruction each
 *   add_products, scaled, weights_of_rows, row_dots, unpack_rows                          as they say there
 *
 * A (row, token) has one sum: sum + float(dot) * activation scale * weight scale, group after group, dot being exact
 * whatever the order inside a group. So one token, whose vectors lie along a row, and many, whose lanes are rows, give
 * the same bits. */

/* -------------------------------------------------------------- one token ---- */

/* y[i] of one token for LANES rows, as row_dots reads them: a half, then the other; group and kind are constants. */
EXPANDED void token_rows(const we_matrix *w, const size_t rows[LANES], const we_acts *a, size_t t, float y[LANES],
                         const size_t group, const int kind)
{
    const size_t n_groups = we_n_groups(w), scale_bytes = kind == WE_MXFP4 ? 1 : 2;
    const int16_t *q = (kind == WE_Q8G ? a->q : a->q_halves) + t * a->q_stride;
    const float *scale = a->scale + t * a->scale_stride;
    const int32_t *bias = kind == WE_Q4G ? a->bias + t * a->scale_stride : NULL;
    const uint8_t *codes[LANES];
    half_ints low[GROUPS], high[GROUPS];
    float weights[GROUPS][LANES];
    floats sum = spread_float(0);
    WE_UNROLL
    for (size_t i = 0; i < LANES; i++) codes[i] = (const uint8_t *)w->payload + rows[i] * w->row_bytes;
    for (size_t g0 = 0, g1; g0 < n_groups; g0 = g1) {
        g1 = we_min(g0 + GROUPS, n_groups);
        size_t g = g0;
        for (; g + SOME_GROUPS <= g1; g += SOME_GROUPS)
            weights_of_rows(w, rows, g, SOME_GROUPS, weights + (g - g0), 1, scale_bytes);
        if (g < g1) weights_of_rows(w, rows, g, g1 - g, weights + (g - g0), 1, scale_bytes);
        row_dots(codes, q, g0, g1, low, group, kind);
        row_dots(codes + STREAMS, q, g0, g1, high, group, kind);
        for (g = g0; g < g1; g++) {
            ints dot = joined(low[g - g0], high[g - g0]);
            if (bias) dot = add_ints(dot, spread(bias[g]));
            sum = add_floats(sum, scaled(dot, spread_float(scale[g]), load_floats(weights[g - g0])));
        }
    }
    store_floats(y, sum);
}

/* A core reads faster from several places than from one, so the rows are STREAMS ranges that go side by side, two rows
 * of each at a time; then a rest of less than LANES rows, its last repeated. */
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

typedef ints panel[SPAN / 2][2];        /* columns 2 k and 2 k + 1 of LANES rows, and of LANES more */

/* What a panel needs is prepared apart: beside the constants for it GCC would keep the sums of tokens in memory. */
#ifdef _MSC_VER
#define SEPARATE static __declspec(noinline)
#else
#define SEPARATE static __attribute__((noinline))
#endif

SEPARATE void panel_weights(const we_matrix *w, const size_t rows[PANEL_ROWS], size_t g, size_t n,
                            float out[SOME_GROUPS][PANEL_ROWS])
{
    for (size_t v = 0; v < PANEL_ROWS; v += LANES) {
        float (*half)[LANES] = (float (*)[LANES])(void *)&out[0][v];
        if (w->encoding == WE_MXFP4) weights_of_rows(w, rows + v, g, n, half, 2, 1);
        else weights_of_rows(w, rows + v, g, n, half, 2, 2);
    }
}

SEPARATE void unpack_panel(const we_matrix *w, size_t row, size_t n_rows, size_t c0, panel out)
{
    for (size_t v = 0; v < 2; v++) {
        const size_t first = v * LANES < n_rows ? v * LANES : 0, n = we_min(LANES, n_rows - first);
        ints (*half)[2] = (ints (*)[2])(void *)&out[0][v];
        if (w->encoding == WE_Q8G)      unpack_rows(w, row + first, n, c0, half, WE_Q8G);
        else if (w->encoding == WE_Q4G) unpack_rows(w, row + first, n, c0, half, WE_Q4G);
        else                            unpack_rows(w, row + first, n, c0, half, WE_MXFP4);
    }
}

typedef struct group_args {             /* one group of the rows of a panel, and some tokens */
    const ints    (*w)[2];
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
    const ints *w = g->w[0];
    sums_of_ints dot0[TILE_TOKENS], dot1[TILE_TOKENS];
    WE_UNROLL
    for (size_t u = 0; u < n_tokens; u++) {
        const int32_t start = g->bias ? g->bias[(t + u) * g->scale_stride] : 0;
        dot0[u] = dot1[u] = (sums_of_ints)spread(start);
    }
    for (const ints *const end = w + g->group; w < end; w += 2, q += 2) {
        const ints w0 = w[0], w1 = w[1];
        WE_UNROLL
        for (size_t u = 0; u < n_tokens; u++) {
            const ints pairs = spread(*(const int32_t *)(const void *)(q + u * step));
            dot0[u] = (sums_of_ints)add_products((ints)dot0[u], w0, pairs);
            dot1[u] = (sums_of_ints)add_products((ints)dot1[u], w1, pairs);
        }
    }
    const floats weight0 = load_floats(g->weights), weight1 = load_floats(g->weights + LANES);
    WE_UNROLL
    for (size_t u = 0; u < n_tokens; u++) {
        const floats activation = spread_float(g->scale[(t + u) * g->scale_stride]);
        float *sum = sums[t + u];
        store_floats(sum, add_floats(load_floats(sum), scaled((ints)dot0[u], activation, weight0)));
        sum += LANES;
        store_floats(sum, add_floats(load_floats(sum), scaled((ints)dot1[u], activation, weight1)));
    }
}

/* y[t][0 .. n_rows) of n <= TOKENS tokens, n_rows <= PANEL_ROWS. */
static void tokens_rows(const we_matrix *w, size_t row, size_t n_rows, const we_acts *a, size_t t0, size_t n, float *y,
                        size_t y_stride)
{
    const size_t n_groups = we_n_groups(w);
    panel unpacked;
    float sums[TOKENS][PANEL_ROWS], weights[SOME_GROUPS][PANEL_ROWS];
    size_t rows[PANEL_ROWS];
    group_args args = {.group = w->group, .q_stride = a->q_stride, .scale_stride = a->scale_stride};
    memset(sums, 0, n * sizeof sums[0]);
    for (size_t i = 0; i < PANEL_ROWS; i++) rows[i] = row + we_min(i, n_rows - 1);
    for (size_t g = 0; g < n_groups; g++) {
        const size_t c = g * w->group;
        if (g % SOME_GROUPS == 0) panel_weights(w, rows, g, we_min(SOME_GROUPS, n_groups - g), weights);
        if (c % SPAN == 0) unpack_panel(w, row, n_rows, c, unpacked);
        args.w = (const ints (*)[2])(unpacked + c % SPAN / 2);
        args.q = a->q + t0 * a->q_stride + c;
        args.scale = a->scale + t0 * a->scale_stride + g;
        args.bias = w->encoding == WE_Q4G ? a->bias + t0 * a->scale_stride + g : NULL;
        args.weights = weights[g % SOME_GROUPS];
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
