/* The meaning of the kernels: numbers, norms, router, logits. Transcendental functions are computed in f64. */
#include <math.h>
#include "kernels_internal.h"

/* ---------------------------------------------------------------- numbers ---- */

float we_f16_value(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 31) return we_bits_float(sign | 0x7f800000 | (fraction ? 0x400000 | fraction << 13 : 0));
    if (exponent == 0) {
        const float magnitude = (float)fraction * 0x1p-24f;         /* exact: ten bits */
        return sign ? -magnitude : magnitude;
    }
    return we_bits_float(sign | (exponent + 112) << 23 | fraction << 13);
}

/* x >> shift, to nearest even. */
static uint32_t shift_rounded(uint32_t x, unsigned shift)
{
    const uint32_t half = (1u << (shift - 1)) - 1 + (x >> shift & 1);
    return (x + half) >> shift;
}

uint16_t we_f16_bits(float x)
{
    const uint32_t bits = we_float_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);              /* 65520 rounds to infinity */
    if (magnitude >= 0x38800000)                                                /* 2^-14: a carry raises the exponent */
        return (uint16_t)(sign | (shift_rounded(magnitude, 13) - (112u << 10)));
    if (magnitude < 0x33000000) return (uint16_t)sign;                          /* below half the smallest */
    return (uint16_t)(sign | shift_rounded((magnitude & 0x7fffff) | 0x800000, 126 - (magnitude >> 23)));
}

void we_ref_f16_to_f32(float *y, const uint16_t *x, size_t n)
{
    for (size_t i = 0; i < n; i++) y[i] = we_f16_value(x[i]);
}

void we_ref_f32_to_f16(uint16_t *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) y[i] = we_f16_bits(x[i]);
}

void we_ref_bf16_to_f32(float *y, const uint16_t *x, size_t n)
{
    for (size_t i = 0; i < n; i++) y[i] = we_bits_float((uint32_t)x[i] << 16);
}

void we_ref_f32_to_bf16(uint16_t *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = we_float_bits(x[i]);
        const int is_nan = (bits & 0x7fffffff) > 0x7f800000;
        y[i] = (uint16_t)(is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

/* exp overflows to inf only where the result is 0 in f32. */
static double sigmoid64(double x) { return 1 / (1 + exp(-x)); }

void we_ref_exp(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) y[i] = (float)exp(x[i]);
}

void we_ref_sigmoid(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) y[i] = (float)sigmoid64(x[i]);
}

/* ------------------------------------------------- elementwise and norms ---- */

static void add(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) y[i] += x[i];
}

static void add_scaled(float *y, float a, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) y[i] += a * x[i];
}

static void divide(float *y, const float *x, float a, size_t n)
{
    for (size_t i = 0; i < n; i++) y[i] = x[i] / a;
}

static void silu_mul(float *y, const float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i++) y[i] = (float)(gate[i] * sigmoid64(gate[i])) * up[i];
}

static void situ_mul(float *y, const float *gate, const float *up, float beta, float linear, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const double u = linear > 0 ? linear * tanh((double)up[i] / linear) : up[i];
        y[i] = (float)(beta * tanh((double)gate[i] / beta) * sigmoid64(gate[i]) * u);
    }
}

static void mul_sigmoid(float *y, const float *gate, size_t n)
{
    for (size_t i = 0; i < n; i++) y[i] *= (float)sigmoid64(gate[i]);
}

static double sum_of_squares(const float *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sum;
}

static void rms_norm(float *y, const float *x, const float *w, float eps, size_t n)
{
    const float inverse = (float)(1 / sqrt(sum_of_squares(x, n) / (double)n + eps));
    for (size_t i = 0; i < n; i++) y[i] = x[i] * inverse * w[i];
}

static void rms_norm_gated(float *y, const float *x, const float *w, const float *gate, float eps, size_t n)
{
    const float inverse = (float)(1 / sqrt(sum_of_squares(x, n) / (double)n + eps));
    for (size_t i = 0; i < n; i++) y[i] = x[i] * inverse * w[i] * (float)sigmoid64(gate[i]);
}

static void l2_norm(float *x, float scale, size_t n)
{
    const float inverse = (float)(scale / sqrt(sum_of_squares(x, n) + 1e-6));
    for (size_t i = 0; i < n; i++) x[i] *= inverse;
}

void we_mix_by(double (*score)(const float *x, const float *w, const float *proj, float eps, size_t n),
               void (*add_scaled)(float *y, float a, const float *x, size_t n), float *y, float *alpha, const float *v,
               size_t stride, size_t n_rows, const float *w, const float *proj, float eps, size_t n)
{
    float largest = -INFINITY, sum = 0;
    for (size_t i = 0; i < n_rows; i++) {
        alpha[i] = (float)score(v + i * stride, w, proj, eps, n);
        largest = alpha[i] > largest ? alpha[i] : largest;
    }
    for (size_t i = 0; i < n_rows; i++) sum += alpha[i] = expf(alpha[i] - largest);
    memset(y, 0, n * sizeof *y);
    for (size_t i = 0; i < n_rows; i++) {
        alpha[i] /= sum;
        add_scaled(y, alpha[i], v + i * stride, n);
    }
}

static double depth_score(const float *x, const float *w, const float *proj, float eps, size_t n)
{
    double dot = 0;
    for (size_t i = 0; i < n; i++) dot += (double)x[i] * w[i] * proj[i];
    return dot / sqrt(sum_of_squares(x, n) / (double)n + eps);
}

static void mix_rows(float *y, float *alpha, const float *v, size_t stride, size_t n_rows, const float *w,
                     const float *proj, float eps, size_t n)
{
    we_mix_by(depth_score, add_scaled, y, alpha, v, stride, n_rows, w, proj, eps, n);
}

/* ----------------------------------------------------------------- router ---- */

/* Put id into idx [*n], which is sorted by falling score, equal scores by rising id; keep `limit` of them. Ids come
 * in rising order. */
static void keep_best(int32_t *idx, uint32_t *n, uint32_t limit, const float *score, int32_t id)
{
    uint32_t at = *n;
    if (at == limit && (at == 0 || !(score[id] > score[idx[at - 1]]))) return;
    if (at == limit) at--; else ++*n;
    for (; at > 0 && score[id] > score[idx[at - 1]]; at--) idx[at] = idx[at - 1];
    idx[at] = id;
}

static float sum_of_two_best(const float *score, uint32_t n)
{
    float first = -INFINITY, second = -INFINITY;
    for (uint32_t i = 0; i < n; i++) {
        if (score[i] > first) { second = first; first = score[i]; }
        else if (score[i] > second) second = score[i];
    }
    return n > 1 ? first + second : first;
}

/* Experts outside the best groups get the score -inf: a group is out when top_groups others are better, or equal and
 * earlier. Those others stay, so that dropping one group changes no verdict on the next. */
static void drop_groups(const we_router *r, float *score)
{
    const uint32_t size = r->experts / r->groups;
    for (uint32_t g = 0; g < r->groups; g++) {
        const float sum = sum_of_two_best(score + (size_t)g * size, size);
        uint32_t n_better = 0;
        for (uint32_t h = 0; h < r->groups; h++) {
            const float other = sum_of_two_best(score + (size_t)h * size, size);
            n_better += other > sum || (other == sum && h < g);
        }
        for (uint32_t e = 0; n_better >= r->top_groups && e < size; e++) score[(size_t)g * size + e] = -INFINITY;
    }
}

void we_route_by(void (*sigmoid)(float *, const float *, size_t), const we_router *r, const float *logits, int32_t *idx,
                 float *weight, float *work)
{
    sigmoid(work, logits, r->experts);
    for (uint32_t e = 0; e < r->experts; e++) {
        const float score = r->bias ? work[e] + r->bias[e] : work[e];
        work[e] = score > -INFINITY ? score : -INFINITY;            /* NaN loses against every number */
    }
    if (r->groups > 1) drop_groups(r, work);
    uint32_t n = 0;
    for (uint32_t e = 0; e < r->experts; e++) keep_best(idx, &n, r->top_k, work, (int32_t)e);
    for (uint32_t i = 1; i < n; i++) {                              /* by id */
        const int32_t id = idx[i];
        uint32_t at = i;
        for (; at > 0 && idx[at - 1] > id; at--) idx[at] = idx[at - 1];
        idx[at] = id;
    }
    for (uint32_t i = 0; i < n; i++) weight[i] = logits[idx[i]];
    sigmoid(weight, weight, n);
    float sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += weight[i];
    const float factor = r->renormalize ? r->scaling / (sum + 1e-20f) : r->scaling;
    for (uint32_t i = 0; i < n; i++) weight[i] *= factor;
}

static void route(const we_router *r, const float *logits, int32_t *idx, float *weight, float *work)
{
    we_route_by(we_ref_sigmoid, r, logits, idx, weight, work);
}

/* ----------------------------------------------------------------- logits ---- */

static size_t argmax(const float *x, size_t n)
{
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (x[i] > x[best] || (isnan(x[best]) && !isnan(x[i]))) best = i;
    return best;
}

static double log_sum_exp(const float *x, size_t n)
{
    const double largest = x[argmax(x, n)];
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += isinf(largest) && x[i] == largest ? 1 : exp(x[i] - largest);
    return largest + log(sum);
}

const we_kernels we_reference = {
    .isa = "reference",
    .f16_to_f32 = we_ref_f16_to_f32, .f32_to_f16 = we_ref_f32_to_f16,
    .bf16_to_f32 = we_ref_bf16_to_f32, .f32_to_bf16 = we_ref_f32_to_bf16,
    .exp = we_ref_exp, .sigmoid = we_ref_sigmoid,
    .decode_rows = we_ref_decode_rows, .encode_q8g = we_ref_encode_q8g, .encode_q4g = we_ref_encode_q4g,
    .vq_encode = we_ref_vq_encode,
    .quantize = we_ref_quantize, .matmul = we_ref_matmul, .matmul_t = we_ref_matmul_t,
    .add = add, .add_scaled = add_scaled, .divide = divide, .silu_mul = silu_mul, .situ_mul = situ_mul,
    .mul_sigmoid = mul_sigmoid,
    .rms_norm = rms_norm, .rms_norm_gated = rms_norm_gated, .l2_norm = l2_norm, .mix_rows = mix_rows,
    .short_conv = we_ref_short_conv, .decay_softplus = we_ref_decay_softplus, .decay_bounded = we_ref_decay_bounded,
    .kda = we_ref_kda,
    .latent_store = we_ref_latent_store, .latent_load = we_ref_latent_load, .mla = we_ref_mla,
    .mla_fold = we_ref_mla_fold,
    .route = route, .argmax = argmax, .log_sum_exp = log_sum_exp,
};
