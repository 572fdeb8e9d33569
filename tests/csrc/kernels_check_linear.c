/* kernels_check: decoding, encoding, activations as integers, products with matrices. */
#include "kernels_check.h"

/* --------------------------------------------------------------- decoding ---- */

static void decode_one(size_t which, size_t rows, size_t cols)
{
    const sample s = make_sample(which, rows, cols);
    const size_t row0 = rows / 3, n = rows - row0, stride = s.w.cols + 3u;
    float *y = floats(n ? (n - 1) * stride + s.w.cols : 0), *again = floats(s.w.cols);
    kernels->decode_rows(&s.w, row0, rows, y, stride);
    for (size_t r = 0; r < n; r++) {
        for (size_t c = 0; c < s.w.cols; c++) {
            const size_t at = (row0 + r) * s.w.cols + c;
            if (s.w.vec_dim) within("decode_rows", y[r * stride + c], s.value[at], 3 * EPS * s.size[at] + 1e-44);
            else equal("decode_rows", y[r * stride + c], s.value[at]);
        }
        if (r + 1 < n) untouched("decode_rows", y + r * stride + s.w.cols, 3);
        kernels->decode_rows(&s.w, row0 + r, row0 + r + 1, again, 0);
        same_bits("decode_rows", again, y + r * stride, 4 * s.w.cols);
    }
}

/* All sixteen codes under every scale byte up to 252; 255 is not finite. */
static void decode_mxfp4(void)
{
    uint8_t payload[16] = {0}, scale;
    float y[32];
    for (unsigned i = 0; i < 8; i++) payload[i] = payload[8 + i] = (uint8_t)(2 * i | (2 * i + 1) << 4);
    const we_matrix w = {WE_MXFP4, 1, 32, 32, 16, payload, (const uint16_t *)(const void *)&scale, NULL, 0, 0};
    for (unsigned e = 0; e < 253; e++) {
        scale = (uint8_t)e;
        kernels->decode_rows(&w, 0, 1, y, 32);
        for (unsigned i = 0; i < 32; i++) equal("decode_rows", y[i], ldexp(e2m1_value(i & 15), (int)e - 127));
    }
    scale = 255;
    kernels->decode_rows(&w, 0, 1, y, 32);
    for (unsigned i = 0; i < 32; i++) holds("decode_rows", !isfinite(y[i]), "a scale of 255");
}

void check_decoding(void)
{
    static const size_t shapes[][2] = {{1, 8}, {3, 100}, {5, 264}, {72, 16}, {96, 40}, {2, 130}};
    for (size_t which = 0; which < n_samples; which++) {
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            decode_one(which, shapes[i][0], shapes[i][1]);
            release();
        }
    }
    decode_mxfp4();
}

/* --------------------------------------------------------------- encoding ---- */

static void encode_one(size_t group, size_t cols, int four_bits)
{
    enum { ROWS = 6 };
    const size_t n_groups = (cols + group - 1) / group, row_bytes = n_groups * group / (four_bits ? 2 : 1);
    const float q_max = four_bits ? 7 : 127, lowest = four_bits ? -8 : -127;
    float *x = inputs(ROWS * cols, NORMAL);
    uint8_t *payload = edge(ROWS * row_bytes);
    uint16_t *scales = edge(2 * ROWS * n_groups);
    for (size_t i = 0; i < cols; i++) {
        x[i] = 0;
        if (i % 3 == 0) x[cols + i] = 1e4f;
        x[2 * cols + i] *= 1e-9f;                       /* below the least scale */
        x[3 * cols + i] = i % group ? 0.5f * (float)((int)below(29) - 14) : q_max;      /* ties */
        if (i % 11 == 5) x[4 * cols + i] = NAN;         /* the least code, and no part in the scale */
        if (i % 11 == 7) x[5 * cols + i] = INFINITY;
    }
    if (four_bits) kernels->encode_q4g(payload, scales, x, ROWS, cols, group);
    else kernels->encode_q8g((int8_t *)payload, scales, x, ROWS, cols, group);
    const char *op = four_bits ? "encode_q4g" : "encode_q8g";
    for (size_t r = 0; r < ROWS; r++) {
        for (size_t g = 0; g < n_groups; g++) {
            float largest = 1e-8f;
            for (size_t i = g * group; i < (g + 1) * group && i < cols; i++)
                largest = fmaxf(largest, fabsf(x[r * cols + i]));
            const float scale = largest / q_max;
            equal(op, scales[r * n_groups + g], half_nearest(scale));
            for (size_t i = g * group; i < (g + 1) * group; i++) {
                const float code = i < cols ? fminf(fmaxf(rintf(x[r * cols + i] / scale), lowest), q_max) : 0;
                const uint8_t byte = payload[r * row_bytes + (four_bits ? i / 2 : i)];
                equal(op, four_bits ? (byte >> 4 * (i & 1) & 15) - 8 : (int8_t)byte, code);
            }
        }
    }
}

/* Small whole numbers: distances are exact, and often equal. */
static void encode_vq(size_t n, unsigned stages, unsigned entries)
{
    float *x = floats(8 * n), *books = floats(8u * stages * entries), *left = floats(8 * n), now[8];
    uint8_t *index = edge(n * stages);
    for (size_t i = 0; i < 8 * n; i++) x[i] = (float)((int)below(9) - 4);
    for (size_t i = 0; i < (size_t)8 * stages * entries; i++) books[i] = (float)((int)below(3) - 1);
    kernels->vq_encode(index, left, x, books, n, stages, entries);
    for (size_t i = 0; i < n; i++) {
        memcpy(now, x + 8 * i, sizeof now);
        for (unsigned s = 0; s < stages; s++) {
            double least = INFINITY;
            unsigned best = 0;
            for (unsigned e = 0; e < entries; e++) {
                double distance = 0;
                const float *entry = books + ((size_t)s * entries + e) * 8;
                for (int d = 0; d < 8; d++) distance += pow(now[d] - entry[d], 2);
                if (distance < least) { least = distance; best = e; }
            }
            equal("vq_encode", index[i * stages + s], best);
            for (int d = 0; d < 8; d++) now[d] -= books[((size_t)s * entries + best) * 8 + (size_t)d];
        }
        same_bits("vq_encode", now, left + 8 * i, sizeof now);
    }
    uint8_t *again = edge(n * stages);
    kernels->vq_encode(again, NULL, x, books, n, stages, entries);
    same_bits("vq_encode", again, index, n * stages);
}

void check_encoding(void)
{
    static const size_t groups[] = {2, 6, 16, 32, 48, 64, 128}, widths[] = {1, 15, 33, 100, 128, 264};
    for (size_t g = 0; g < 7; g++) {
        for (size_t c = 0; c < 6; c++) {
            encode_one(groups[g], widths[c], 0);
            encode_one(groups[g], widths[c], 1);
            release();
        }
    }
    encode_vq(5, 3, 256);
    encode_vq(131, 2, 16);
    encode_vq(1, 8, 1);
    encode_vq(9, 1, 61);
}

/* ------------------------------------------------- activations as integers ---- */

static void quantize_one(size_t cols, uint32_t group, kind how)
{
    enum { N = 3 };
    const size_t n_groups = (cols + group - 1) / group, padded = n_groups * group;
    const float *x = inputs((N - 1) * (cols + 5) + cols, how);
    int32_t *q = edge(4 * N * padded);
    float *scale = floats(N * n_groups);
    define_integers(x, N, cols, cols + 5, group, q, scale);
    const we_acts a = make_acts(x, N, cols, cols + 5, group);
    for (size_t t = 0; t < N; t++) {
        for (size_t g = 0; g < n_groups; g++) {
            int32_t sum = 0;
            for (size_t i = 0; i < group; i++) {
                const int32_t expected = q[t * padded + g * group + i];
                equal("quantize", a.q[t * a.q_stride + g * group + i], expected);
                equal("quantize", a.q_halves[t * a.q_stride + g * group + i / 2 + (i & 1) * group / 2], expected);
                sum += expected;
            }
            equal("quantize", a.scale[t * a.scale_stride + g], scale[t * n_groups + g]);
            equal("quantize", a.bias[t * a.scale_stride + g], -8.0 * sum);
        }
        if (t + 1 < N) untouched("quantize", (const float *)(const void *)(a.q + t * a.q_stride + padded), 16);
        if (t + 1 < N) untouched("quantize", a.scale + t * a.scale_stride + n_groups, 1);
    }
}

void check_quantize(void)
{
    for (int how = 0; how < N_KINDS; how++) {
        for SIZES(cols) {
            for (uint32_t group = 32; group <= 128; group *= 2) quantize_one(cols, group, (kind)how);
            release();
        }
    }
}

/* --------------------------------------------------------------- products ---- */

/* y within the bound of kernels.h of what the inputs, or the integers the level sees, give in f64. */
static void compare_product(const sample *s, const float *x, size_t n, uint32_t group, const float *y, size_t y_stride)
{
    const size_t cols = s->w.cols, n_groups = group ? (cols + group - 1) / group : 0, padded = n_groups * group;
    int32_t *q = edge(4 * n * padded);
    float *scale = floats(n * n_groups);
    if (group) define_integers(x, n, cols, cols, group, q, scale);
    for (size_t t = 0; t < n; t++) {
        for (size_t r = 0; r < s->w.rows; r++) {
            double exact = 0, size = 0, step = 0, integers = 0, integers_size = 0, all = 0;
            for (size_t i = 0; i < cols; i++) {
                const double v = x[t * cols + i], w = s->value[r * cols + i], w_size = s->size[r * cols + i];
                exact += v * w;
                size += fabs(v) * w_size;
                all += w_size;
                if (!group) continue;
                const double unit = scale[t * n_groups + i / group], seen = q[t * padded + i] * unit;
                integers += seen * w;
                integers_size += fabs(seen) * w_size;
                step += unit * (0.5 + 1e-3) * fabs(w);
            }
            const double tiny = 1e-37 * (1 + all), result = y[t * y_stride + r];
            const double rounding = ((double)cols / 4 + 8) * EPS * size + tiny;
            if (!group) within("matmul f32", result, exact, rounding);
            if (!group) continue;
            within("matmul rounded", result, exact, rounding + step);
            within("matmul integer", result, integers, ((double)n_groups + 8) * EPS * integers_size + tiny);
        }
        if (t + 1 < n) untouched("matmul", y + t * y_stride + s->w.rows, y_stride - s->w.rows);
    }
}

static void product(size_t which, size_t rows, size_t cols, size_t n, kind how)
{
    const sample s = make_sample(which, rows, cols);
    const uint32_t group = we_integer_group(&s.w);
    const float *x = inputs(n * s.w.cols, how);
    for (int integer = 0; integer <= (group != 0); integer++) {
        const we_acts a = make_acts(x, n, s.w.cols, s.w.cols, integer ? group : 0);
        float *y = floats((n - 1) * (rows + 2) + rows);
        kernels->matmul(&s.w, 0, rows, &a, n, y, rows + 2);
        compare_product(&s, x, n, integer ? group : 0, y, rows + 2);
    }
}

void check_matmul(void)
{
    for (size_t which = 0; which < n_samples; which++) {
        for SIZES(cols) {
            product(which, 1 + below(9), cols, 1 + below(4), NORMAL);
            release();
        }
        for (int how = 0; how < N_KINDS; how++) {
            product(which, 1, 130, 1, (kind)how);
            product(which, 9, 264, full ? 19 : 5, (kind)how);
            release();
        }
        product(which, 5, 1100, 3, NORMAL);             /* more than one piece of whatever a level cuts */
        product(which, 2, 4300, 1, NORMAL);
        if (full) product(which, 33, 2304, 3, NORMAL);
        release();
    }
}

/* Not finite in, not finite out; sizes of 0. */
static void degenerate_products(const sample *s, uint32_t group)
{
    static const float values[3] = {NAN, INFINITY, -INFINITY};
    const we_acts none = make_acts(floats(0), 0, s->w.cols, s->w.cols, 0);
    kernels->matmul(&s->w, 0, s->w.rows, &none, 0, floats(0), 0);
    for (int i = 0; i < 3; i++) {
        float *x = inputs(s->w.cols, NORMAL), *y = floats(s->w.rows);
        x[below(s->w.cols)] = values[i];
        const we_acts a = make_acts(x, 1, s->w.cols, s->w.cols, group);
        kernels->matmul(&s->w, 1, 1, &a, 1, y, 0);
        untouched("matmul", y, s->w.rows);
        kernels->matmul(&s->w, 0, s->w.rows, &a, 1, y, 0);
        for (size_t r = 0; r < s->w.rows; r++) holds("matmul", !isfinite(y[r]), "finite from what is not");
    }
}

/* Scales of 1 and integers that f32 holds whatever the order of the sums: equal, not close. */
static void exact_product(uint32_t group, int encoding, size_t cols, size_t n)
{
    enum { ROWS = 9 };
    const size_t n_groups = (cols + group - 1) / group, padded = n_groups * group;
    const int mxfp4 = encoding == WE_MXFP4, four_bits = encoding != WE_Q8G;
    const int step = four_bits ? 8 : 64;                /* sums are multiples of it and below 2^24 times it */
    uint8_t *payload = memset(edge(ROWS * padded / (four_bits ? 2 : 1)), 0, ROWS * padded / (four_bits ? 2 : 1));
    uint16_t *scales = edge(2 * ROWS * n_groups);
    float *x = floats(n * cols), *y = floats(n * ROWS);
    int *code = edge(ROWS * padded * sizeof(int));
    for (size_t i = 0; i < ROWS * n_groups; i++) scales[i] = 0x3c00;
    if (mxfp4) memset(scales, 128, ROWS * n_groups);    /* for doubled codes */
    for (size_t i = 0; i < n * cols; i++) {             /* the first of a group makes the scale 1 */
        const int whole = step * ((int)below((unsigned)(2 * (32639 / step) + 1)) - 32639 / step);
        x[i] = (float)(i % cols % group == 0 ? (i & 1 ? 32639 : -32639) : i % 5 == 4 ? step * (32639 / step) : whole);
    }
    for (size_t i = 0; i < ROWS * padded; i++) {
        const size_t r = i / padded, c = i % padded;
        if (mxfp4) {
            const unsigned c4 = (unsigned)below(16);
            code[i] = (int)(2 * e2m1_value(c4));
            payload[i / 2] |= (uint8_t)(c4 << (c & 1 ? 4 : 0));
            continue;
        }
        code[i] = four_bits ? (int)below(16) - 8 : r == 0 ? -128 : r == 1 ? 127 : (int)below(256) - 128;
        if (c % group == 0 || c >= cols) code[i] = four_bits && c % group == 0 ? -8 : 0;
        if (four_bits) payload[i / 2] |= (uint8_t)((code[i] + 8) << (c & 1 ? 4 : 0));
        else payload[i] = (uint8_t)code[i];
    }
    const we_matrix w = {encoding, ROWS, (uint32_t)cols, group, padded / (four_bits ? 2 : 1),
                         payload, scales, NULL, 0, 0};
    const we_acts a = make_acts(x, n, cols, cols, group);
    kernels->matmul(&w, 0, ROWS, &a, n, y, ROWS);
    for (size_t t = 0; t < n; t++) {
        for (size_t r = 0; r < ROWS; r++) {
            int64_t exact = 0;
            for (size_t i = 0; i < cols; i++) exact += (int64_t)code[r * padded + i] * (int64_t)x[t * cols + i];
            equal("matmul integer", y[t * ROWS + r], (double)exact);
        }
    }
}

void check_matmul_exact_integers(void)
{
    static const int encodings[3] = {WE_Q8G, WE_Q4G, WE_MXFP4};
    for (uint32_t group = 32; group <= 128; group *= 2) {
        for (int kind = 0; kind < (group == 32 ? 3 : 2); kind++) {
            for (size_t n = 1; n <= 19; n += 6) {
                exact_product(group, encodings[kind], group, n);
                exact_product(group, encodings[kind], group - 3, n);
                release();
            }
        }
    }
    for (size_t which = 0; which < n_samples; which++) {
        sample s = make_sample(which, 3, 64);
        uint16_t *scales = edge(2 * 3 * 64);
        for (size_t i = 0; i < 3 * 64; i++) scales[i] = s.w.encoding == WE_MXFP4 ? 0x7f7f : 0x3c00;
        s.w.scales = scales;
        degenerate_products(&s, we_integer_group(&s.w));
        degenerate_products(&s, 0);
        release();
    }
}

/* ---------------------------------------------- what bits may not depend on ---- */

/* The same tokens and rows out of a larger call, other addresses: tokens [t0, t1), rows [row0, row1). */
static void part_of_product(const we_matrix *w, const we_acts *a, const float *y, size_t t0, size_t t1, size_t row0,
                            size_t row1)
{
    const size_t n_rows = row1 - row0, n = t1 - t0;
    we_acts some = *a;
    some.x += t0 * a->x_stride;
    if (a->group) {
        some.q += t0 * a->q_stride;
        some.q_halves += t0 * a->q_stride;
        some.scale += t0 * a->scale_stride;
        some.bias += t0 * a->scale_stride;
    }
    float *part = floats(n * (n_rows + 1));
    kernels->matmul(w, row0, row1, &some, n, part, n_rows + 1);
    for (size_t t = 0; t < n; t++) {
        same_bits("matmul", part + t * (n_rows + 1), y + (t0 + t) * w->rows + row0, 4 * n_rows);
        untouched("matmul", part + t * (n_rows + 1) + n_rows, 1);
    }
}

static void invariance(size_t which, size_t rows, size_t n, size_t cols)
{
    static const size_t tokens[][2] = {{0, 1}, {5, 7}, {1, 4}, {0, 17}, {16, 35}, {30, 35}, {34, 35}};
    static const size_t ranges[][2] = {{0, 1}, {3, 10}, {61, 70}, {8, 70}, {20, 20}, {5, 9}, {66, 70}};
    sample s = make_sample(which, rows, cols);
    const size_t n_scales = s.w.group ? rows * ((s.w.cols + s.w.group - 1) / s.w.group) : rows;
    const float *x = inputs(n * s.w.cols, NORMAL);
    const uint32_t group = we_integer_group(&s.w);
    for (int integer = 0; integer <= (group != 0); integer++) {
        const we_acts a = make_acts(x, n, s.w.cols, s.w.cols, integer ? group : 0);
        float *y = floats(n * rows);
        kernels->matmul(&s.w, 0, rows, &a, n, y, rows);
        for (size_t i = 0; i < 7; i++) {
            part_of_product(&s.w, &a, y, tokens[i][0], tokens[i][1], 0, rows);
            part_of_product(&s.w, &a, y, 0, n, ranges[i][0], ranges[i][1]);
            part_of_product(&s.w, &a, y, tokens[i][0], tokens[i][1], ranges[i][0], ranges[i][1]);
        }
        we_matrix moved = s.w;                          /* other addresses: bytes, halves and floats allow them */
        const size_t step = s.w.encoding == WE_F32 ? 4 : s.w.encoding == WE_BF16 ? 2 : 1;
        if (s.w.row_bytes) moved.payload = copy_at(s.w.payload, rows * s.w.row_bytes, step);
        const size_t scale_bytes = s.w.encoding == WE_MXFP4 ? 1 : 2;
        if (s.w.scales) moved.scales = copy_at(s.w.scales, scale_bytes * n_scales, scale_bytes);
        part_of_product(&moved, &a, y, 3, 8, 3, rows);
    }
}

void check_matmul_invariance(void)
{
    for (size_t which = 0; which < n_samples; which++) {
        invariance(which, 70, 35, full ? 2304 + 40 : 264);
        release();
    }
}

/* ------------------------------------------------------- transposed product ---- */

void check_matmul_t(void)
{
    static const size_t shapes[][5] = {{9, 40, 1, 0, 9}, {70, 136, 6, 3, 69}, {3, 130, 2, 1, 1}, {5, 264, 3, 1, 4}};
    for (size_t i = 0; i < n_samples * 4; i++, release()) {
        const size_t *at = shapes[i % 4], n = at[2], row0 = at[3], row1 = at[4], n_rows = row1 - row0;
        const sample s = make_sample(i / 4, at[0], at[1]);
        const size_t cols = s.w.cols;
        const float *x = inputs(n * (n_rows + 1), NORMAL);
        float *y = floats(n * (cols + 2)), *again = floats(cols), *row = floats(cols);
        kernels->matmul_t(&s.w, row0, row1, x, n_rows + 1, n, y, cols + 2, row);
        for (size_t t = 0; t < n; t++) {
            for (size_t c = 0; c < cols; c++) {
                double exact = 0, size = 0;
                for (size_t r = 0; r < n_rows; r++) {
                    exact += s.value[(row0 + r) * cols + c] * x[t * (n_rows + 1) + r];
                    size += s.size[(row0 + r) * cols + c] * fabs(x[t * (n_rows + 1) + r]);
                }
                within("matmul_t", y[t * (cols + 2) + c], exact, ((double)n_rows + 4) * EPS * size + 1e-37);
            }
            untouched("matmul_t", y + t * (cols + 2) + cols, 2);
            kernels->matmul_t(&s.w, row0, row1, x + t * (n_rows + 1), 0, 1, again, 0, row);
            same_bits("matmul_t", again, y + t * (cols + 2), 4 * cols);
        }
    }
}
