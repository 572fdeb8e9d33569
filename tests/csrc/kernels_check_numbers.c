/* kernels_check: conversions, exp and sigmoid, elementwise kernels, norms, logits, router. */
#include "kernels_check.h"

/* ------------------------------------------------------------ conversions ---- */

static void check_widening(void)
{
    enum { N = 65536 };
    uint16_t *x = edge(2 * N);
    float *wide = floats(N), *bf16 = floats(N);
    for (uint32_t i = 0; i < N; i++) x[i] = (uint16_t)i;
    kernels->f16_to_f32(wide, x, N);
    kernels->bf16_to_f32(bf16, x, N);
    for (uint32_t i = 0; i < N; i++) {
        equal("f16_to_f32", wide[i], half_value(x[i]));
        if (isnan(wide[i]))                             /* quiet, sign and payload kept */
            equal("f16_to_f32", bits_of(wide[i]), (i & 0x8000) << 16 | 0x7fc00000 | (i & 1023) << 13);
        equal("bf16_to_f32", bits_of(bf16[i]), i << 16);
    }
    equal("f16_to_f32", signbit(wide[0x8000]) != 0, 1);
}

static void narrow_one(float x)
{
    uint16_t *half = edge(2), *bf16 = edge(2);
    float *at = floats(1);
    *at = x;
    kernels->f32_to_f16(half, at, 1);
    kernels->f32_to_bf16(bf16, at, 1);
    equal("f32_to_f16", isnan(half_value(*half)), isnan(x));
    equal("f32_to_bf16", isnan(of_bits((uint32_t)*bf16 << 16)), isnan(x));
}

/* The two numbers of 16 bits around x are those of its upper half and of the next pattern. */
static double bf16_nearest(float x)
{
    const uint32_t cut = bits_of(x) & 0xffff0000u;
    const double low = of_bits(cut), next = of_bits(cut + 0x10000), high = isinf(next) ? copysign(0x1p128, x) : next;
    if (isinf(x)) return x;
    const double to_low = fabs(x - low), to_high = fabs(high - x);
    return to_low < to_high || (to_low == to_high && !(cut >> 16 & 1)) ? low : next;
}

static void check_narrowing(void)
{
    const size_t n = full ? 1 << 22 : 1 << 17, extra = 8 * 0x7c00;
    float *x = floats(n + extra);
    uint16_t *half = edge(2 * (n + extra)), *bf16 = edge(2 * (n + extra));
    size_t m = 0;
    for (uint32_t h = 0; h + 1 < 0x7c00; h++) {         /* ties and their neighbours, both signs */
        const float tie = (float)((half_value((uint16_t)h) + half_value((uint16_t)(h + 1))) / 2);
        for (int s = 0; s < 6; s++)
            x[m++] = of_bits((bits_of(tie) + (uint32_t)(s % 3) - 1) | (s < 3 ? 0 : 0x80000000u));
    }
    const float limits[] = {65519.9f, 65520, 65536, 1e38f, -65520, INFINITY, -INFINITY, 0, -0.0f, 1e-45f};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) x[m++] = limits[i];
    for (uint64_t b = 0; m < n + extra; b += 0x100000000u / n, m++) x[m] = of_bits((uint32_t)b + (uint32_t)below(9));
    kernels->f32_to_f16(half, x, m);
    kernels->f32_to_bf16(bf16, x, m);
    for (size_t i = 0; i < m; i++) {
        if (isnan(x[i])) continue;
        equal("f32_to_f16", half[i], half_nearest(x[i]));
        equal("f32_to_bf16", of_bits((uint32_t)bf16[i] << 16), bf16_nearest(x[i]));
    }
}

/* -------------------------------------------------------- exp and sigmoid ---- */

static double exact_sigmoid(double x) { return 1 / (1 + exp(-x)); }

static void check_ulps(const char *op, void (*kernel)(float *, const float *, size_t), double (*exact)(double),
                       const float *x, size_t n)
{
    float *y = floats(n);
    kernel(y, x, n);
    for (size_t i = 0; i < n; i++) within(op, y[i], exact(x[i]), 2 * ulp_of(exact(x[i])));
    float *same = copy(x, n * sizeof *x);
    kernel(same, same, n);
    same_bits(op, same, y, n * sizeof *y);
    for SIZES(m) {                                      /* the end of a vector has the same bits */
        const size_t from = n / 2;
        float *part = floats(m);
        kernel(part, copy_at(x + from, m * sizeof *x, 4), m);
        same_bits(op, part, y + from, m * sizeof *y);
    }
    kernel(y, x, 0);
}

void check_numbers(void)
{
    check_widening();
    check_narrowing();
    const uint32_t nans[] = {0x7f800001, 0xff800001, 0x7fc00000, 0x7fffffff};
    for (size_t i = 0; i < 4; i++) narrow_one(of_bits(nans[i]));
    const size_t n = full ? 1 << 22 : 1 << 16, near = full ? 1 << 20 : 1 << 15;
    float *x = floats(n + near);
    for (size_t i = 0; i < n; i++) x[i] = of_bits((uint32_t)(i * (0x100000000u / n) + below(0x100000000u / n)));
    for (size_t i = n; i < n + near; i++) x[i] = (float)uniform(-110, 110);
    const float ends[] = {88.73f, 88.72f, -87.5f, -103.9f, -104, INFINITY, -INFINITY, NAN, 0, -0.0f, 1e-42f, -1e-42f};
    memcpy(x, ends, sizeof ends);
    check_ulps("exp", kernels->exp, exp, x, n + near);
    check_ulps("sigmoid", kernels->sigmoid, exact_sigmoid, x, n + near);
}

/* ---------------------------------------------------- elementwise and norms ---- */

static void check_all(const char *op, const float *y, const double *exact, double eps, size_t n)
{
    for (size_t i = 0; i < n; i++) within(op, y[i], exact[i], eps * EPS * fabs(exact[i]) + 1e-40);
}

static void elementwise(size_t n, kind how)
{
    const float *x = inputs(n, how), *y = inputs(n, how);
    float *sum = copy(y, 4 * n), *scaled = copy(y, 4 * n), *share = copy(y, 4 * n), *product = floats(n);
    double *exact = doubles(n);
    kernels->add(sum, x, n);
    kernels->add_scaled(scaled, 0.3f, x, n);
    kernels->divide(share, share, 0.3f, n);
    kernels->silu_mul(product, y, x, n);
    for (size_t i = 0; i < n; i++) {
        equal("add", sum[i], y[i] + x[i]);
        within("add_scaled", scaled[i], y[i] + (double)0.3f * x[i], EPS * (fabs(y[i]) + fabs(x[i])) + 1e-44);
        equal("divide", share[i], y[i] / 0.3f);
        exact[i] = y[i] * exact_sigmoid(y[i]) * x[i];
    }
    check_all("silu_mul", product, exact, 4, n);
    float *gate = copy(y, 4 * n), *up = copy(x, 4 * n);
    kernels->silu_mul(gate, gate, x, n);
    kernels->silu_mul(up, y, up, n);
    same_bits("silu_mul", gate, product, 4 * n);
    same_bits("silu_mul", up, product, 4 * n);
}

static double exact_situ(double gate, double up, double beta, double linear)
{
    return beta * tanh(gate / beta) * exact_sigmoid(gate) * (linear > 0 ? linear * tanh(up / linear) : up);
}

static void gates(size_t n, kind how, float beta, float linear)
{
    const float *gate = inputs(n, how), *up = inputs(n, how);
    float *product = floats(n), *open = copy(up, 4 * n), *in_gate = copy(gate, 4 * n), *in_up = copy(up, 4 * n);
    double *exact = doubles(n);
    kernels->situ_mul(product, gate, up, beta, linear, n);
    for (size_t i = 0; i < n; i++) exact[i] = exact_situ(gate[i], up[i], beta, linear);
    check_all("situ_mul", product, exact, 4, n);
    kernels->situ_mul(in_gate, in_gate, up, beta, linear, n);
    kernels->situ_mul(in_up, gate, in_up, beta, linear, n);
    same_bits("situ_mul", in_gate, product, 4 * n);
    same_bits("situ_mul", in_up, product, 4 * n);
    kernels->mul_sigmoid(open, gate, n);
    for (size_t i = 0; i < n; i++) exact[i] = up[i] * exact_sigmoid(gate[i]);
    check_all("mul_sigmoid", open, exact, 3, n);
}

/* Where tanh is nearly its argument, nearly 1, and around the seam between. */
static void situ_everywhere(void)
{
    const size_t n = 4096;
    float *gate = floats(n), *up = floats(n), *y = floats(n);
    for (size_t i = 0; i < n; i++) {
        gate[i] = (float)uniform(-25, 25);
        up[i] = (float)(ldexp(uniform(-2, 2), (int)below(60) - 50));
    }
    const float ends[] = {INFINITY, -INFINITY, NAN, 0, -0.0f, 2.5f, -2.5f, 1e30f};
    memcpy(gate, ends, sizeof ends);
    memcpy(up + 8, ends, sizeof ends);
    kernels->situ_mul(y, gate, up, 4, 1, n);
    for (size_t i = 0; i < n; i++) {
        const double exact = exact_situ(gate[i], up[i], 4, 1);
        within("situ_mul", y[i], exact, 4 * EPS * fabs(exact) + 1e-40);
    }
    float part[61];
    kernels->situ_mul(part, copy_at(gate + 100, sizeof part, 4), copy_at(up + 100, sizeof part, 8), 4, 1, 61);
    same_bits("situ_mul", part, y + 100, sizeof part);
}

void check_elementwise(void)
{
    for (int how = 0; how < N_KINDS; how++) {
        for SIZES(n) {
            elementwise(n, (kind)how);
            gates(n, (kind)how, 4, 25);
            gates(n, (kind)how, 0.5f, 0);
            release();
        }
    }
    elementwise(0, NORMAL);
    gates(0, NORMAL, 1, 1);
    situ_everywhere();
}

static double mean_square(const float *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sum / (double)n;
}

static void norms(size_t n, kind how)
{
    const float *x = inputs(n, how), *w = inputs(n, NORMAL), *gate = inputs(n, NORMAL), eps = 1e-5f;
    float *plain = floats(n), *gated = floats(n), *unit = copy(x, 4 * n), *same = copy(x, 4 * n);
    float *in_gate = copy(gate, 4 * n);
    double *exact = doubles(n), *open = doubles(n), *l2 = doubles(n);
    for (size_t i = 0; i < n; i++) {
        exact[i] = x[i] / sqrt(mean_square(x, n) + eps) * w[i];
        open[i] = exact[i] * exact_sigmoid(gate[i]);
        l2[i] = x[i] / sqrt(mean_square(x, n) * (double)n + 1e-6) * 0.25;
    }
    kernels->rms_norm(plain, x, w, eps, n);
    kernels->rms_norm_gated(gated, x, w, gate, eps, n);
    kernels->l2_norm(unit, 0.25f, n);
    check_all("rms_norm", plain, exact, 2, n);
    check_all("rms_norm_gated", gated, open, 5, n);
    check_all("l2_norm", unit, l2, 2, n);
    kernels->rms_norm_gated(same, same, w, gate, eps, n);
    kernels->rms_norm_gated(in_gate, x, w, in_gate, eps, n);
    same_bits("rms_norm_gated", same, gated, 4 * n);
    same_bits("rms_norm_gated", in_gate, gated, 4 * n);
    memcpy(same, x, 4 * n);
    kernels->rms_norm(same, same, w, eps, n);
    same_bits("rms_norm", same, plain, 4 * n);
}

void check_norms(void)
{
    for (int how = 0; how < N_KINDS; how++) {
        for SIZES(n) {
            norms(n, (kind)how);
            release();
        }
    }
    const float huge[4] = {1e30f, -1e30f, 3e-30f, 0}, ones[4] = {1, 1, 1, 1};
    float *y = floats(4);
    kernels->rms_norm(y, copy(huge, 16), copy(ones, 16), 1e-5f, 4);
    within("rms_norm", y[0], sqrt(2), 4 * EPS);
}

/* ------------------------------------------------------------------- depth ---- */

/* Softmax over rows of what the formula says, all in f64; how far y may be off: scores are off by eps sum |x w proj|. */
static void mix(size_t n_rows, size_t n, kind how)
{
    const size_t stride = n + 5;
    float *v = floats((n_rows - 1) * stride + n), *y = floats(n), *alpha = floats(n_rows);
    const float *w = inputs(n, NORMAL), *proj = inputs(n, NORMAL);
    double *score = doubles(n_rows), largest = -INFINITY, sum = 0, slack = 0;
    for (size_t r = 0; r < n_rows; r++) {
        double dot = 0, size = 0;
        fill(v + r * stride, n, r % 2 ? NORMAL : how);
        for (size_t i = 0; i < n; i++) {
            dot += (double)v[r * stride + i] * w[i] * proj[i];
            size += fabs((double)v[r * stride + i] * w[i] * proj[i]);
        }
        const double inverse = 1 / sqrt(mean_square(v + r * stride, n) + 1e-5f);
        score[r] = dot * inverse;
        slack = fmax(slack, size * inverse);
        largest = fmax(largest, score[r]);
    }
    for (size_t r = 0; r < n_rows; r++) sum += score[r] = exp(score[r] - largest);
    kernels->mix_rows(y, alpha, v, stride, n_rows, w, proj, 1e-5f, n);
    for (size_t i = 0; i < n; i++) {
        double exact = 0, size = 0;
        for (size_t r = 0; r < n_rows; r++) {
            exact += score[r] / sum * v[r * stride + i];
            size += score[r] / sum * fabs(v[r * stride + i]);
        }
        within("mix_rows", y[i], exact, (2 * slack + (double)n_rows + 8) * EPS * size + 1e-40);
    }
    for (size_t r = 0; r < n_rows; r++)
        within("mix_rows", alpha[r], score[r] / sum, (2 * slack + (double)n_rows + 8) * EPS);
}

void check_depth(void)
{
    for (int how = 0; how < N_KINDS; how++) {
        for SIZES(n) {
            mix(1 + below(9), n, (kind)how);
            release();
        }
    }
    mix(1, 100, NORMAL);
    mix(129, 7, NORMAL);
    mix(9, 7168, NORMAL);
    const float nan = NAN, one = 1;
    float y, alpha;
    kernels->mix_rows(&y, &alpha, &nan, 1, 1, &one, &one, 1e-5f, 1);
    holds("mix_rows", isnan(y), "NaN is lost");
    release();
}

/* ------------------------------------------------------- logits and router ---- */

static void logits(size_t n)
{
    float *x = floats(n);
    size_t first = 0;
    double largest = -INFINITY, sum = 0;
    for (size_t i = 0; i < n; i++) x[i] = (float)((double)below(7) - 3);
    for (size_t i = 1; i < n; i++) if (x[i] > x[first]) first = i;
    equal("argmax", (double)kernels->argmax(x, n), (double)first);
    for (size_t i = 0; i < n; i++) x[i] = (float)(20 * normal());
    for (size_t i = 0; i < n; i++) largest = fmax(largest, x[i]);
    for (size_t i = 0; i < n; i++) sum += exp(x[i] - largest);
    const double exact = largest + log(sum), y = kernels->log_sum_exp(x, n);
    holds("log_sum_exp", fabs(y - exact) <= 4 * EPS + 1e-15 * fabs(exact), "its formula");
    const size_t at = below(n);
    x[at] = NAN;
    holds("log_sum_exp", isnan(kernels->log_sum_exp(x, n)), "NaN is lost");
    holds("argmax", n == 1 || !isnan(x[kernels->argmax(x, n)]), "NaN is chosen");
    for (size_t i = 0; i < n; i++) x[i] = NAN;
    equal("argmax", (double)kernels->argmax(x, n), 0);
    for (size_t i = 0; i < n; i++) x[i] = -INFINITY;
    equal("argmax", (double)kernels->argmax(x, n), 0);
    equal("log_sum_exp", kernels->log_sum_exp(x, n), -INFINITY);
    x[at] = INFINITY;
    equal("argmax", (double)kernels->argmax(x, n), (double)at);
    equal("log_sum_exp", kernels->log_sum_exp(x, n), INFINITY);
}

void check_logits(void) { for SIZES(n) logits(n); }

/* Is expert e among the chosen, by counting who comes before it? Groups by their two best, then experts. */
static int is_chosen(const we_router *r, const double *score, uint32_t e)
{
    const uint32_t size = r->experts / r->groups;
    double sum[64];
    uint32_t before = 0;
    for (uint32_t g = 0; g < r->groups; g++) {
        double a = -INFINITY, b = -INFINITY;
        for (uint32_t i = g * size; i < (g + 1) * size; i++) {
            if (score[i] > a) { b = a; a = score[i]; } else if (score[i] > b) b = score[i];
        }
        sum[g] = size > 1 ? a + b : a;
    }
    int alive[64];
    for (uint32_t g = 0; g < r->groups; g++) {
        uint32_t better = 0;
        for (uint32_t h = 0; h < r->groups; h++) better += sum[h] > sum[g] || (sum[h] == sum[g] && h < g);
        alive[g] = better < r->top_groups;
    }
    for (uint32_t i = 0; i < r->experts; i++)
        before += alive[i / size] && (score[i] > score[e] || (score[i] == score[e] && i < e));
    return alive[e / size] && before < r->top_k;
}

static void route_once(we_router r, double spread)
{
    float *x = floats(r.experts), *weight = floats(r.top_k), *work = floats(r.experts), *bias = floats(r.experts);
    int32_t *idx = edge(4 * r.top_k);
    double *score = doubles(r.experts), sum = 0;
    for (uint32_t e = 0; e < r.experts; e++) {
        x[e] = (float)(spread * normal());
        bias[e] = (float)(spread * normal());
        score[e] = (float)(exact_sigmoid(x[e]) + (r.bias ? bias[e] : 0));
    }
    if (r.bias) r.bias = bias;
    kernels->route(&r, x, idx, weight, work);
    for (uint32_t i = 0; i < r.top_k; i++) {
        holds("route", idx[i] >= 0 && idx[i] < (int32_t)r.experts && (i == 0 || idx[i] > idx[i - 1]), "ids ascend");
        holds("route", is_chosen(&r, score, (uint32_t)idx[i]), "another expert is better");
        sum += exact_sigmoid(x[idx[i]]);
    }
    for (uint32_t i = 0; i < r.top_k; i++) {
        const double exact = exact_sigmoid(x[idx[i]]) / (r.renormalize ? sum + 1e-20 : 1) * (double)r.scaling;
        within("route", weight[i], exact, (r.top_k + 4) * EPS * exact);
    }
}

void check_router(void)
{
    static const uint32_t shapes[][4] = {{1, 1, 1, 1}, {8, 8, 1, 1}, {16, 4, 4, 2}, {24, 3, 8, 3}, {16, 2, 16, 5},
                                         {256, 8, 1, 1}, {256, 8, 8, 4}, {896, 16, 1, 1}};
    static const float some_bias;
    for (size_t i = 0; i < 8 * 4; i++) {
        const uint32_t *s = shapes[i / 4];
        const we_router r = {i & 1 ? &some_bias : NULL, s[0], s[1], s[2], s[3], (int)(i >> 1 & 1), 2.446f};
        route_once(r, 3);
        route_once(r, 0);                               /* ties: the lowest ids */
    }
}
