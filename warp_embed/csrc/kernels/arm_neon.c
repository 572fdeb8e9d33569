/* NEON: numbers, elementwise kernels, norms, convolution, decays, logits; and the level's table.
 *
 * What the table leaves out, compilers make as good from the reference: plain loops without a sum or a function. */
#include <math.h>
#include "arm_neon.h"
#ifdef WE_ARM64

/* ---------------------------------------------------------------- numbers ---- */

void we_neon_f16_to_f32(float *y, const uint16_t *x, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) vst1q_f32(y + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + i))));
    we_ref_f16_to_f32(y + i, x + i, n - i);
}

static void f32_to_f16(uint16_t *y, const float *x, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) vst1_u16(y + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x + i))));
    we_ref_f32_to_f16(y + i, x + i, n - i);
}

static void exp_f32(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += 4) store_some(y + i, exp_x4(load_some(x + i, n - i)), n - i);
}

static void sigmoid(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += 4) store_some(y + i, sigmoid_x4(load_some(x + i, n - i)), n - i);
}

/* ------------------------------------------------- elementwise and norms ---- */

static void silu_mul(float *y, const float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i += 4)
        store_some(y + i, vmulq_f32(silu_x4(load_some(gate + i, n - i)), load_some(up + i, n - i)), n - i);
}

static void situ_mul(float *y, const float *gate, const float *up, float beta, float linear, size_t n)
{
    const float32x4_t beta_x4 = vdupq_n_f32(beta), linear_x4 = vdupq_n_f32(linear);
    for (size_t i = 0; i < n; i += 4) {
        const float32x4_t g = load_some(gate + i, n - i);
        float32x4_t u = load_some(up + i, n - i);
        if (linear > 0) u = vmulq_f32(linear_x4, tanh_x4(vdivq_f32(u, linear_x4)));
        const float32x4_t bounded = vmulq_f32(beta_x4, tanh_x4(vdivq_f32(g, beta_x4)));
        store_some(y + i, vmulq_f32(vmulq_f32(bounded, sigmoid_x4(g)), u), n - i);
    }
}

static void mul_sigmoid(float *y, const float *gate, size_t n)
{
    for (size_t i = 0; i < n; i += 4)
        store_some(y + i, vmulq_f32(load_some(y + i, n - i), sigmoid_x4(load_some(gate + i, n - i))), n - i);
}

/* sum += x y, in f64: four sums over columns. */
static inline void add_products(float64x2_t sum[2], float32x4_t x, float32x4_t y)
{
    sum[0] = vfmaq_f64(sum[0], vcvt_f64_f32(vget_low_f32(x)), vcvt_f64_f32(vget_low_f32(y)));
    sum[1] = vfmaq_f64(sum[1], vcvt_high_f64_f32(x), vcvt_high_f64_f32(y));
}

static double sum_of_squares(const float *x, size_t n)
{
    float64x2_t sum[2] = {vdupq_n_f64(0), vdupq_n_f64(0)};
    for (size_t i = 0; i < n; i += 4) {
        const float32x4_t v = load_some(x + i, n - i);
        add_products(sum, v, v);
    }
    return vaddvq_f64(vaddq_f64(sum[0], sum[1]));
}

static double depth_score(const float *x, const float *w, const float *proj, float eps, size_t n)
{
    float64x2_t squares[2] = {vdupq_n_f64(0), vdupq_n_f64(0)}, dots[2] = {squares[0], squares[0]};
    for (size_t i = 0; i < n; i += 4) {
        const float32x4_t v = load_some(x + i, n - i);
        add_products(squares, v, v);
        add_products(dots, v, vmulq_f32(load_some(w + i, n - i), load_some(proj + i, n - i)));
    }
    const double dot = vaddvq_f64(vaddq_f64(dots[0], dots[1]));
    return dot / sqrt(vaddvq_f64(vaddq_f64(squares[0], squares[1])) / (double)n + eps);
}

static void mix_rows(float *y, float *alpha, const float *v, size_t stride, size_t n_rows, const float *w,
                     const float *proj, float eps, size_t n)
{
    we_mix_by(depth_score, we_reference.add_scaled, y, alpha, v, stride, n_rows, w, proj, eps, n);
}

static void rms_norm(float *y, const float *x, const float *w, float eps, size_t n)
{
    const float32x4_t inverse = vdupq_n_f32((float)(1 / sqrt(sum_of_squares(x, n) / (double)n + eps)));
    for (size_t i = 0; i < n; i += 4) {
        const float32x4_t unit = vmulq_f32(load_some(x + i, n - i), inverse);
        store_some(y + i, vmulq_f32(unit, load_some(w + i, n - i)), n - i);
    }
}

static void rms_norm_gated(float *y, const float *x, const float *w, const float *gate, float eps, size_t n)
{
    const float32x4_t inverse = vdupq_n_f32((float)(1 / sqrt(sum_of_squares(x, n) / (double)n + eps)));
    for (size_t i = 0; i < n; i += 4) {
        const float32x4_t unit = vmulq_f32(load_some(x + i, n - i), inverse);
        const float32x4_t open = sigmoid_x4(load_some(gate + i, n - i));
        store_some(y + i, vmulq_f32(vmulq_f32(unit, load_some(w + i, n - i)), open), n - i);
    }
}

static void l2_norm(float *x, float scale, size_t n)
{
    const float32x4_t factor = vdupq_n_f32((float)(scale / sqrt(sum_of_squares(x, n) + 1e-6)));
    for (size_t i = 0; i < n; i += 4) store_some(x + i, vmulq_f32(load_some(x + i, n - i), factor), n - i);
}

/* -------------------------------------------------- convolution and decay ---- */

static void short_conv(float *y, size_t y_stride, float *tail_out, const float *u, size_t u_stride,
                       const float *tail_in, size_t tail_stride, const float *taps, size_t taps_stride, size_t K,
                       size_t n, size_t c0, size_t c1)
{
    for (size_t t = 0; t < n; t++) {
        for (size_t c = c0; c < c1; c += 4) {
            float32x4_t sum = vdupq_n_f32(0);
            for (size_t j = 0; j < K; j++) {
                const float *from = t + j >= K - 1 ? u + (t + j - (K - 1)) * u_stride : tail_in + (t + j) * tail_stride;
                sum = vfmaq_f32(sum, load_some(taps + j * taps_stride + c, c1 - c), load_some(from + c, c1 - c));
            }
            store_some(y + t * y_stride + c, silu_x4(sum), c1 - c);
        }
    }
    we_conv_tail(tail_out, u, u_stride, tail_in, tail_stride, K, n, c0, c1);
}

static void decay_softplus(float *decay, const float *f, const float *dt_bias, float rate, size_t n)
{
    const float32x4_t minus_rate = vdupq_n_f32(-rate);
    for (size_t i = 0; i < n; i += 4) {
        const float32x4_t z = vaddq_f32(load_some(f + i, n - i), load_some(dt_bias + i, n - i));
        store_some(decay + i, exp_x4(vmulq_f32(minus_rate, softplus_x4(z))), n - i);
    }
}

static void decay_bounded(float *decay, const float *f, const float *dt_bias, float rate, float lower, size_t n)
{
    const float32x4_t rate_x4 = vdupq_n_f32(rate), lower_x4 = vdupq_n_f32(lower);
    for (size_t i = 0; i < n; i += 4) {
        const float32x4_t z = vaddq_f32(load_some(f + i, n - i), load_some(dt_bias + i, n - i));
        store_some(decay + i, exp_x4(vmulq_f32(lower_x4, sigmoid_x4(vmulq_f32(rate_x4, z)))), n - i);
    }
}

/* ------------------------------------------------------ router and logits ---- */

static void route(const we_router *r, const float *logits, int32_t *idx, float *weight, float *work)
{
    we_route_by(sigmoid, r, logits, idx, weight, work);
}

/* The largest of x, -inf if there is no number in it: a comparison with NaN keeps what there was. */
static float largest_of(const float *x, size_t n)
{
    float32x4_t best[2] = {vdupq_n_f32(-INFINITY), vdupq_n_f32(-INFINITY)};
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (size_t k = 0; k < 2; k++) {
            const float32x4_t v = vld1q_f32(x + i + 4 * k);
            best[k] = vbslq_f32(vcgtq_f32(v, best[k]), v, best[k]);
        }
    }
    float result = vmaxvq_f32(vmaxq_f32(best[0], best[1]));
    for (; i < n; i++) result = x[i] > result ? x[i] : result;
    return result;
}

static size_t argmax(const float *x, size_t n)
{
    const float best = largest_of(x, n);
    size_t i = 0;
    while (i + 4 <= n && !vmaxvq_u32(vceqq_f32(vld1q_f32(x + i), vdupq_n_f32(best)))) i += 4;
    while (i < n && x[i] != best) i++;
    return i < n ? i : 0;
}

static double log_sum_exp(const float *x, size_t n)
{
    const float largest = largest_of(x, n);
    if (isinf(largest)) return we_reference.log_sum_exp(x, n);
    float64x2_t low = vdupq_n_f64(0), high = low;
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const float32x4_t e = exp_x4(vsubq_f32(vld1q_f32(x + i), vdupq_n_f32(largest)));
        low = vaddq_f64(low, vcvt_f64_f32(vget_low_f32(e)));
        high = vaddq_f64(high, vcvt_high_f64_f32(e));
    }
    double sum = vaddvq_f64(vaddq_f64(low, high));
    for (; i < n; i++) sum += exp((double)x[i] - largest);
    return largest + log(sum);
}

const we_kernels we_neon = {
    .isa = "neon",
    .f16_to_f32 = we_neon_f16_to_f32, .f32_to_f16 = f32_to_f16,
    .exp = exp_f32, .sigmoid = sigmoid,
    .decode_rows = we_neon_decode_rows, .encode_q8g = we_neon_encode_q8g, .encode_q4g = we_neon_encode_q4g,
    .vq_encode = we_neon_vq_encode,
    .quantize = we_neon_quantize, .matmul = we_neon_matmul, .matmul_t = we_neon_matmul_t,
    .silu_mul = silu_mul, .situ_mul = situ_mul, .mul_sigmoid = mul_sigmoid,
    .rms_norm = rms_norm, .rms_norm_gated = rms_norm_gated, .l2_norm = l2_norm, .mix_rows = mix_rows,
    .short_conv = short_conv, .decay_softplus = decay_softplus, .decay_bounded = decay_bounded,
    .kda = we_neon_kda,
    .latent_load = we_neon_latent_load, .mla = we_neon_mla,
    .route = route, .argmax = argmax, .log_sum_exp = log_sum_exp,
};
#else
typedef int we_no_neon;     /* ISO C wants a declaration in every file */
#endif
