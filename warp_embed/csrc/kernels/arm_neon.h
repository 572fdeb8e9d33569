/* What the files for ARM64 share: ends of vectors, sums in a fixed order, exp and its kin on four lanes.
 * NEON with FMA is part of every ARM64 processor, so these files need no target. */
#ifndef WE_ARM_NEON_H
#define WE_ARM_NEON_H
#include "kernels_internal.h"

#ifdef WE_ARM64
#include <arm_neon.h>

void we_neon_f16_to_f32(float *y, const uint16_t *x, size_t n);
void we_neon_decode_rows(const we_matrix *w, size_t row0, size_t row1, float *y, size_t y_stride);
void we_neon_encode_q8g(int8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols, size_t group);
void we_neon_encode_q4g(uint8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols, size_t group);
void we_neon_vq_encode(uint8_t *index, float *residual, const float *x, const float *books, size_t n, unsigned stages,
                       unsigned entries);
void we_neon_quantize(const we_acts *a, size_t t0, size_t t1, size_t cols);
void we_neon_matmul(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                    size_t y_stride);
void we_neon_matmul_t(const we_matrix *w, size_t row0, size_t row1, const float *x, size_t x_stride, size_t n, float *y,
                      size_t y_stride, float *row);
void we_neon_kda(const we_kda_args *a);
void we_neon_latent_load(float *y, const void *latent, size_t r, size_t rope, we_kv kv);
void we_neon_mla(const we_mla_args *a);

void we_dotprod_matmul(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                       size_t y_stride);

/* Parts of matmul and decode_rows, in files of their own. */
void we_neon_matmul_integer(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                            size_t y_stride);
void we_neon_vq_token(const we_matrix *w, size_t row0, size_t row1, const float *x, float *y);
void we_neon_vq_tile(const we_matrix *w, size_t row, size_t n_rows, size_t c0, size_t c1, float *tile, size_t stride);

/* n elements, zeros behind them. Without a loop: one would keep compilers from unrolling those around it. */
static inline float32x4_t load_some(const float *x, size_t n)
{
    float32x4_t v = vdupq_n_f32(0);
    if (n >= 4) return vld1q_f32(x);
    if (n > 0) v = vld1q_lane_f32(x, v, 0);
    if (n > 1) v = vld1q_lane_f32(x + 1, v, 1);
    if (n > 2) v = vld1q_lane_f32(x + 2, v, 2);
    return v;
}

static inline void store_some(float *y, float32x4_t v, size_t n)
{
    if (n >= 4) {
        vst1q_f32(y, v);
        return;
    }
    if (n > 0) vst1q_lane_f32(y, v, 0);
    if (n > 1) vst1q_lane_f32(y + 1, v, 1);
    if (n > 2) vst1q_lane_f32(y + 2, v, 2);
}

static inline size_t we_left(size_t n, size_t done) { return n > done ? n - done : 0; }

/* (0 + 1) + (2 + 3), which vpaddq gives too */
static inline float sum_lanes(float32x4_t v) { return vaddvq_f32(v); }

/* e^x within 1 ulp: x = n ln 2 + r, e^r = 1 + (r + r^2 P(r)), times 2^n in two steps so that subnormal results are
 * rounded once. x is clamped to where the result is 0 or inf already; min and max keep NaN. */
static inline float32x4_t exp_x4(float32x4_t x)
{
    x = vmaxq_f32(vdupq_n_f32(-104.0f), vminq_f32(vdupq_n_f32(89.0f), x));
    const float32x4_t n = vrndnq_f32(vmulq_f32(x, vdupq_n_f32(0x1.715476p+0f)));
    float32x4_t r = vfmsq_f32(x, n, vdupq_n_f32(0x1.62e4p-1f));                 /* 17 bits of ln 2: exact; the rest */
    r = vfmsq_f32(r, n, vdupq_n_f32(0x1.7f7d1cp-20f));
    float32x4_t p = vdupq_n_f32(1.3814598475e-3f);
    p = vfmaq_f32(vdupq_n_f32(8.3687170168e-3f), p, r);
    p = vfmaq_f32(vdupq_n_f32(4.1668388058e-2f), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.6666520630e-1f), p, r);
    p = vfmaq_f32(vdupq_n_f32(4.9999993448e-1f), p, r);
    p = vaddq_f32(vdupq_n_f32(1), vfmaq_f32(r, vmulq_f32(r, r), p));
    const int32x4_t whole = vcvtq_s32_f32(n), half = vshrq_n_s32(whole, 1), bias = vdupq_n_s32(127);
    const int32x4_t rest = vsubq_s32(whole, half);
    p = vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23)));
    return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, bias), 23)));
}

/* With e = e^-|x|, which never overflows, 1 / (1 + e) or, left of 0, e / (1 + e), which keeps its relative accuracy.
 * The quotient is corrected by its remainder, what 1 + e lost in rounding included; within 2 ulp as e is within 1. */
static inline float32x4_t sigmoid_x4(float32x4_t x)
{
    const float32x4_t one = vdupq_n_f32(1), e = exp_x4(vnegq_f32(vabsq_f32(x)));
    const float32x4_t above = vbslq_f32(vcltzq_s32(vreinterpretq_s32_f32(x)), e, one), below = vaddq_f32(one, e);
    const float32x4_t lost = vsubq_f32(e, vsubq_f32(below, one));
    const float32x4_t inverse = vdivq_f32(one, below), y = vmulq_f32(above, inverse);
    const float32x4_t remainder = vfmsq_f32(vfmsq_f32(above, y, below), y, lost);
    return vfmaq_f32(y, remainder, inverse);
}

static inline float32x4_t silu_x4(float32x4_t x) { return vmulq_f32(x, sigmoid_x4(x)); }

/* Below 0.625 x + x^3 P(x^2), which keeps the relative accuracy; above (1 - e) / (1 + e), e = e^-2|x|. Within 3 ulp. */
static inline float32x4_t tanh_x4(float32x4_t x)
{
    const float32x4_t one = vdupq_n_f32(1), size = vabsq_f32(x), x2 = vmulq_f32(x, x);
    float32x4_t p = vdupq_n_f32(-5.7049869552e-3f);
    p = vfmaq_f32(vdupq_n_f32(2.0639087186e-2f), p, x2);
    p = vfmaq_f32(vdupq_n_f32(-5.3739715058e-2f), p, x2);
    p = vfmaq_f32(vdupq_n_f32(1.3331442198e-1f), p, x2);
    p = vfmaq_f32(vdupq_n_f32(-3.3333281942e-1f), p, x2);
    p = vfmaq_f32(x, vmulq_f32(x2, x), p);
    const float32x4_t e = exp_x4(vmulq_f32(size, vdupq_n_f32(-2)));
    const float32x4_t outer = vdivq_f32(vsubq_f32(one, e), vaddq_f32(one, e));
    const float32x4_t signed_outer = vbslq_f32(vdupq_n_u32(0x80000000), x, outer);
    return vbslq_f32(vcltq_f32(size, vdupq_n_f32(0.625f)), p, signed_outer);
}

/* log(1 + e^x) = max(x, 0) + 2 atanh(s), s = e^-|x| / (2 + e^-|x|) <= 1/3. */
static inline float32x4_t softplus_x4(float32x4_t x)
{
    const float32x4_t e = exp_x4(vnegq_f32(vabsq_f32(x)));
    const float32x4_t s = vdivq_f32(e, vaddq_f32(e, vdupq_n_f32(2))), s2 = vmulq_f32(s, s);
    float32x4_t p = vdupq_n_f32(2.4301679029e-1f);
    p = vfmaq_f32(vdupq_n_f32(2.1427476108e-1f), p, s2);
    p = vfmaq_f32(vdupq_n_f32(2.8616899905e-1f), p, s2);
    p = vfmaq_f32(vdupq_n_f32(3.9998877256e-1f), p, s2);
    p = vfmaq_f32(vdupq_n_f32(6.6666675626e-1f), p, s2);
    const float32x4_t log1p = vfmaq_f32(vaddq_f32(s, s), vmulq_f32(s2, s), p);
    return vaddq_f32(vmaxq_f32(vdupq_n_f32(0), x), log1p);
}

#endif
#endif
