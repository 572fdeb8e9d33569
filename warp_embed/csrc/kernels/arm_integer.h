/* What the products of int16 activations with int8 and four-bit weights share on ARM64.
 *
 * A (row, token) has one sum. A group's products are added in int32, exactly, so in any order; then
 *     sum = fma(float(total) * activation scale, weight scale, sum),
 * the totals of four rows in four lanes. So NEON, dotprod and i8mm, one token and many, give the same bits. */
#ifndef WE_ARM_INTEGER_H
#define WE_ARM_INTEGER_H
#include "arm_neon.h"

#ifdef WE_ARM64

/* Scales [at], [at + stride] ... of one group of n_rows rows, zeros behind; n_rows is 1 or 4, a constant where this is
 * expanded. MXFP4's are for doubled codes, 2^(e - 128): halved from 2^(e - 127), which is subnormal for e = 0. */
static inline float32x4_t scales_x4(const we_matrix *w, size_t at, size_t stride, const size_t n_rows)
{
    if (w->encoding == WE_MXFP4) {
        const uint8_t *scales = we_e8m0_scales(w) + at;
        uint32x4_t e = vdupq_n_u32(scales[0]);
        if (n_rows == 4) {
            e = vsetq_lane_u32(scales[stride], e, 1);
            e = vsetq_lane_u32(scales[2 * stride], e, 2);
            e = vsetq_lane_u32(scales[3 * stride], e, 3);
        }
        return vmulq_n_f32(vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(e, 23), vdupq_n_u32(0x400000))), 0.5f);
    }
    const uint16_t *scales = w->scales + at;
    uint16x4_t half = vdup_n_u16(0);
    half = vld1_lane_u16(scales, half, 0);
    if (n_rows == 4) {
        half = vld1_lane_u16(scales + stride, half, 1);
        half = vld1_lane_u16(scales + 2 * stride, half, 2);
        half = vld1_lane_u16(scales + 3 * stride, half, 3);
    }
    return vcvt_f32_f16(vreinterpret_f16_u16(half));
}

/* The sums of the lanes of four vectors. */
static inline int32x4_t totals_x4(const int32x4_t dot[4])
{
    return vpaddq_s32(vpaddq_s32(dot[0], dot[1]), vpaddq_s32(dot[2], dot[3]));
}

static inline float32x4_t add_group(float32x4_t sum, int32x4_t total, float activation, float32x4_t weight)
{
    return vfmaq_f32(sum, vmulq_n_f32(vcvtq_f32_s32(total), activation), weight);
}

/* Sums of one or four rows that wait in y. */
static inline float32x4_t load_sums(const float *y, const size_t n_rows)
{
    return n_rows == 4 ? vld1q_f32(y) : vld1q_lane_f32(y, vdupq_n_f32(0), 0);
}

static inline void store_sums(float *y, float32x4_t sum, const size_t n_rows)
{
    if (n_rows == 4) vst1q_f32(y, sum);
    else vst1q_lane_f32(y, sum, 0);
}

static inline size_t group_bytes_of(int kind, size_t group) { return kind == WE_Q8G ? group : group / 2; }

/* Sixteen codes out of sixteen bytes: all that there are for Q8G, else the even and the odd ones. Q4G's are 0 to 15,
 * its offset is in the bias; MXFP4's are doubled. kind, an encoding, is a constant where this is expanded. */
static inline int8x16_t even_codes(uint8x16_t bytes, const int kind)
{
    if (kind == WE_Q8G) return vreinterpretq_s8_u8(bytes);
    const uint8x16_t nibbles = vandq_u8(bytes, vdupq_n_u8(15));
    return kind == WE_Q4G ? vreinterpretq_s8_u8(nibbles) : vqtbl1q_s8(vld1q_s8(we_e2m1_doubled), nibbles);
}

static inline int8x16_t odd_codes(uint8x16_t bytes, const int kind)
{
    const uint8x16_t nibbles = vshrq_n_u8(bytes, 4);
    return kind == WE_Q4G ? vreinterpretq_s8_u8(nibbles) : vqtbl1q_s8(vld1q_s8(we_e2m1_doubled), nibbles);
}

/* A row's group of nibbles as bytes, evens before odds, as in q_halves. */
static inline void unpack_nibbles(const uint8_t *codes, size_t group, int kind, int8_t *out)
{
    for (size_t i = 0; i < group / 2; i += 16) {
        const uint8x16_t pairs = vld1q_u8(codes + i);
        vst1q_s8(out + i, kind == WE_Q4G ? even_codes(pairs, WE_Q4G) : even_codes(pairs, WE_MXFP4));
        vst1q_s8(out + group / 2 + i, kind == WE_Q4G ? odd_codes(pairs, WE_Q4G) : odd_codes(pairs, WE_MXFP4));
    }
}

#endif
#endif
