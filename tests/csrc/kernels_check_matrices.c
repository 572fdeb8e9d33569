/* kernels_check: weight matrices of every encoding with their values in f64, and activations as integers. */
#include "kernels_check.h"

static const struct { const char *name; int32_t encoding; uint32_t group, vec_dim, stages; } recipes[] = {
    {"F32", WE_F32, 0, 0, 0},           {"BF16", WE_BF16, 0, 0, 0},       {"Q8G-32", WE_Q8G, 32, 0, 0},
    {"Q8G-64", WE_Q8G, 64, 0, 0},       {"Q8G-128", WE_Q8G, 128, 0, 0},   {"Q8G-5", WE_Q8G, 5, 0, 0},
    {"Q8G-48", WE_Q8G, 48, 0, 0},       {"Q4G-32", WE_Q4G, 32, 0, 0},     {"Q4G-64", WE_Q4G, 64, 0, 0},
    {"Q4G-128", WE_Q4G, 128, 0, 0},     {"Q4G-6", WE_Q4G, 6, 0, 0},       {"Q4G-48", WE_Q4G, 48, 0, 0},
    {"Q3G-128", WE_Q3G, 128, 0, 0},     {"Q3G-10", WE_Q3G, 10, 0, 0},     {"VQ3R", WE_VQ3R, 0, 8, 3},
    {"VQ2R", WE_VQ2R, 0, 8, 2},         {"VQ4P", WE_VQ4P, 0, 8, 4},       {"VQ3R of 5", WE_VQ3R, 0, 8, 5},
    {"VQ3R by 4", WE_VQ3R, 0, 4, 3},       {"MXFP4", WE_MXFP4, 32, 0, 0},
};
const size_t n_samples = sizeof recipes / sizeof *recipes;

/* 0.01, 0.5, 1.25, 0.003; the subnormal 6e-8, 3e-7, 5e-5; zero */
static uint16_t some_scale(void)
{
    static const uint16_t scales[8] = {0x211f, 0x3800, 0x3d00, 0x1a25, 1, 5, 0x347, 0};
    return scales[below(8)];
}

static void make_plain(sample *s)
{
    const size_t n = (size_t)s->w.rows * s->w.cols;
    const int bf16 = s->w.encoding == WE_BF16;
    float *x = inputs(n, NORMAL);
    uint16_t *upper = edge(2 * n);
    for (size_t i = 0; i < n; i++) {
        upper[i] = (uint16_t)(bits_of(x[i]) >> 16);
        if (bf16) x[i] = of_bits((uint32_t)upper[i] << 16);
        s->value[i] = x[i];
        s->size[i] = fabs(x[i]);
    }
    s->w.payload = bf16 ? (const void *)upper : x;
    s->w.row_bytes = s->w.cols * (bf16 ? 2u : 4u);
}

/* Code c of element i of a row: 8, 4 or 3 bits, least significant first. */
static void put_code(uint8_t *row, size_t i, unsigned bits, unsigned c)
{
    for (unsigned b = 0; b < bits; b++)
        if (c >> b & 1) row[(i * bits + b) / 8] |= (uint8_t)(1u << (i * bits + b) % 8);
}

static void make_grouped(sample *s)
{
    const size_t rows = s->w.rows, cols = s->w.cols, group = s->w.group, n_groups = (cols + group - 1) / group;
    const unsigned n_bits = s->w.encoding == WE_Q8G ? 8 : s->w.encoding == WE_Q4G ? 4 : 3;
    const int offset = n_bits == 8 ? 0 : 1 << (n_bits - 1);
    uint16_t *scales = edge(2 * rows * n_groups);
    s->w.row_bytes = (n_groups * group * n_bits + 7) / 8 + (n_bits == 3);
    uint8_t *payload = memset(edge(rows * s->w.row_bytes), 0, rows * s->w.row_bytes);
    for (size_t i = 0; i < rows * n_groups; i++) scales[i] = some_scale();
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < n_groups * group; i++) {
            const int code = i < cols ? (int)below(1u << n_bits) - (1 << (n_bits - 1)) : 0;
            const double scale = half_value(scales[r * n_groups + i / group]);
            put_code(payload + r * s->w.row_bytes, i, n_bits, (unsigned)(code + offset) & ((1u << n_bits) - 1));
            if (i >= cols) continue;
            s->value[r * cols + i] = scale * code;
            s->size[r * cols + i] = fabs(scale * code) + (n_bits == 4 ? 8 * scale : 0);     /* offset: summed apart */
        }
    }
    s->w.payload = payload;
    s->w.scales = scales;
}

double e2m1_value(unsigned code)
{
    const int exponent = code >> 1 & 3, half = code & 1;
    const double magnitude = exponent ? ldexp(2 + half, exponent - 2) : half * 0.5;
    return code & 8 ? -magnitude : magnitude;
}

static void make_mxfp4(sample *s)
{
    static const uint8_t exponents[8] = {0, 1, 2, 90, 120, 127, 128, 140};      /* results stay finite */
    const size_t rows = s->w.rows, cols = s->w.cols, n_groups = (cols + 31) / 32;
    uint8_t *scales = edge(rows * n_groups), *payload = memset(edge(16 * rows * n_groups), 0, 16 * rows * n_groups);
    s->w.row_bytes = 16 * n_groups;
    for (size_t i = 0; i < rows * n_groups; i++) scales[i] = exponents[below(8)];
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < cols; i++) {
            const unsigned code = (unsigned)below(16);
            put_code(payload + r * s->w.row_bytes, i, 4, code);
            s->value[r * cols + i] = ldexp(e2m1_value(code), scales[r * n_groups + i / 32] - 127);
            s->size[r * cols + i] = fabs(s->value[r * cols + i]);
        }
    }
    s->w.payload = payload;
    s->w.scales = (const uint16_t *)(const void *)scales;
}

static void make_vq(sample *s)
{
    const size_t rows = s->w.rows, cols = s->w.cols, D = s->w.vec_dim, n_vecs = cols / D, stages = s->w.stages;
    const size_t entries = s->w.encoding == WE_VQ4P ? 64 : 256, unit = s->w.encoding == WE_VQ4P ? 3 : stages;
    const size_t n_bytes = (rows + 63) / 64 * n_vecs * 64 * unit;
    const unsigned n_bits = s->w.encoding == WE_VQ4P ? 6 : 8;
    float *books = floats(stages * entries * D);
    uint16_t *scales = edge(2 * rows);
    uint8_t *payload = memset(edge(n_bytes), 0, n_bytes);
    for (size_t i = 0; i < stages * entries * D; i++) {
        const size_t stage = i / (entries * D);         /* the last stage has subnormal halves */
        const double spread = pow(0.4, (double)stage) * (stage + 1 == stages ? 1e-5 : 1);
        books[i] = (float)half_value(half_nearest(normal() * spread));
    }
    for (size_t r = 0; r < rows; r++) {
        scales[r] = some_scale();
        for (size_t c = 0; c < cols; c++) s->value[r * cols + c] = s->size[r * cols + c] = 0;
        for (size_t v = 0; v < n_vecs; v++) {
            for (size_t k = 0; k < stages; k++) {
                const size_t index = below(entries);
                put_code(payload + ((r / 64 * n_vecs + v) * 64 + r % 64) * unit, k, n_bits, (unsigned)index);
                for (size_t d = 0; d < D; d++) {
                    const double part = half_value(scales[r]) * books[(k * entries + index) * D + d];
                    s->value[r * cols + v * D + d] += part;
                    s->size[r * cols + v * D + d] += fabs(part);
                }
            }
        }
    }
    s->w.payload = payload;
    s->w.scales = scales;
    s->w.books = books;
}

sample make_sample(size_t which, size_t rows, size_t cols)
{
    sample s = {recipes[which].name, {0}, NULL, NULL};
    const size_t D = recipes[which].vec_dim;
    if (D) cols = (cols + D - 1) / D * D;
    s.w.encoding = recipes[which].encoding;
    s.w.rows = (uint32_t)rows;
    s.w.cols = (uint32_t)cols;
    s.w.group = recipes[which].group;
    s.w.vec_dim = recipes[which].vec_dim;
    s.w.stages = recipes[which].stages;
    s.value = doubles(rows * cols);
    s.size = doubles(rows * cols);
    if (s.w.vec_dim) make_vq(&s);
    else if (s.w.encoding == WE_MXFP4) make_mxfp4(&s);
    else if (s.w.group) make_grouped(&s);
    else make_plain(&s);
    return s;
}

/* ------------------------------------------------- activations as integers ---- */

we_acts make_acts(const float *x, size_t n, size_t cols, size_t x_stride, uint32_t group)
{
    we_acts a = {.x = x, .x_stride = x_stride, .group = group};
    if (group == 0) return a;
    const size_t n_groups = (cols + group - 1) / group, padded = n_groups * group, last = n ? n - 1 : 0;
    a.q_stride = padded + 32;
    a.scale_stride = n_groups + 1;
    a.q = edge(2 * (last * a.q_stride + padded));
    a.q_halves = edge(2 * (last * a.q_stride + padded));
    a.scale = edge(4 * (last * a.scale_stride + n_groups));
    a.bias = edge(4 * (last * a.scale_stride + n_groups));
    kernels->quantize(&a, 0, n, cols);
    return a;
}

void define_integers(const float *x, size_t n, size_t cols, size_t x_stride, size_t group, int32_t *q, float *scale)
{
    const size_t n_groups = (cols + group - 1) / group;
    for (size_t t = 0; t < n; t++) {
        for (size_t g = 0; g < n_groups; g++) {
            float largest = 0;
            const size_t end = (g + 1) * group < cols ? (g + 1) * group : cols;
            for (size_t i = g * group; i < end; i++) largest = fmaxf(largest, fabsf(x[t * x_stride + i]));
            const float s = scale[t * n_groups + g] = largest / 32639;
            for (size_t i = g * group; i < (g + 1) * group; i++) {
                const float ratio = s > 0 && i < cols ? rintf(x[t * x_stride + i] / s) : 0;
                q[t * n_groups * group + i] = (int32_t)fminf(fmaxf(ratio, -32639), 32639);
            }
        }
    }
}
