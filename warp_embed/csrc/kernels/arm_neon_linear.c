/* NEON: decoding, encoding by groups, activations as integers, products in f32.
 *
 * In a product in f32 a (row, token) has eight sums; columns 8 j + l go to sum l, in order, by FMA; the end of a row is
 * filled with zeros. Many tokens share decoded pieces of rows, whose sums wait in memory. */
#include "arm_neon.h"
#ifdef WE_ARM64

enum { ROWS = 4, TOKENS = 16, COLS = 256 };
typedef float lanes[8];

/* --------------------------------------------------------------- decoding ---- */

/* Sixteen codes in order. */
static inline int8x16_t codes_x16(const uint8_t *codes, size_t c, int kind)
{
    if (kind == WE_Q8G) return vreinterpretq_s8_u8(vld1q_u8(codes + c));
    const uint8x8_t pairs = vld1_u8(codes + c / 2), evens = vand_u8(pairs, vdup_n_u8(15)), odds = vshr_n_u8(pairs, 4);
    const uint8x16_t nibbles = vcombine_u8(vzip1_u8(evens, odds), vzip2_u8(evens, odds));
    if (kind == WE_Q4G) return vsubq_s8(vreinterpretq_s8_u8(nibbles), vdupq_n_s8(8));
    return vqtbl1q_s8(vld1q_s8(we_e2m1_doubled), nibbles);
}

static int has_groups_of_16(const we_matrix *w)
{
    return (w->encoding == WE_Q8G || w->encoding == WE_Q4G || w->encoding == WE_MXFP4) && w->group % 16 == 0;
}

/* Columns [c0, c1) of a row; c0 is a multiple of 16, and so is the group; rows are padded to whole groups. */
static void decode_groups(const we_matrix *w, size_t row, size_t c0, size_t c1, float *y)
{
    const int kind = w->encoding;
    const uint8_t *codes = (const uint8_t *)w->payload + row * w->row_bytes;
    const size_t first = row * we_n_groups(w);
    for (size_t c = c0; c < c1;) {
        const size_t at = first + c / w->group;
        const float scale = kind == WE_MXFP4 ? we_e8m0_halved(we_e8m0_scales(w)[at]) : we_f16_value(w->scales[at]);
        const size_t end = we_min(c / w->group * w->group + w->group, c1);
        for (; c < end; c += 16, y += 16) {
            const int8x16_t code = codes_x16(codes, c, kind);
            const int16x8_t half[2] = {vmovl_s8(vget_low_s8(code)), vmovl_high_s8(code)};
            for (size_t k = 0; k < 4; k++) {
                const int32x4_t four = k & 1 ? vmovl_high_s16(half[k / 2]) : vmovl_s16(vget_low_s16(half[k / 2]));
                if (end - c > 4 * k) store_some(y + 4 * k, vmulq_n_f32(vcvtq_f32_s32(four), scale), end - c - 4 * k);
            }
        }
    }
}

static int is_vq8(const we_matrix *w) { return we_is_vq(w) && w->vec_dim == 8; }

void we_neon_decode_rows(const we_matrix *w, size_t row0, size_t row1, float *y, size_t y_stride)
{
    for (size_t r = row0; r < row1; r++, y += y_stride) {
        if (has_groups_of_16(w)) {
            decode_groups(w, r, 0, w->cols, y);
        } else if (is_vq8(w)) {
            const float scale = we_f16_value(w->scales[r]);
            we_neon_vq_tile(w, r, 1, 0, w->cols, y, 0);
            for (size_t i = 0; i < w->cols; i++) y[i] *= scale;
        } else {
            we_ref_decode_rows(w, r, r + 1, y, y_stride);
        }
    }
}

/* --------------------------------------------------------------- encoding ---- */

/* The larger of each lane; as in the reference, NaN in a is passed over. */
static inline float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }

static float group_scale(const float *x, size_t n, float q_max)
{
    float32x4_t largest = vdupq_n_f32(1e-8f);
    for (size_t i = 0; i < n; i += 4) largest = larger(vabsq_f32(load_some(x + i, n - i)), largest);
    return vmaxvq_f32(largest) / q_max;
}

/* Sixteen codes of x[0 .. n), zeros behind; NaN gives lo. */
static inline int8x16_t encode_x16(const float *x, size_t n, float scale, float lo, float hi)
{
    int16x4_t code[4];
    for (size_t k = 0; k < 4; k++) {
        const float32x4_t v = n > 4 * k ? load_some(x + 4 * k, n - 4 * k) : vdupq_n_f32(0);
        const float32x4_t above = larger(vdivq_f32(v, vdupq_n_f32(scale)), vdupq_n_f32(lo));
        code[k] = vmovn_s32(vcvtnq_s32_f32(vminq_f32(above, vdupq_n_f32(hi))));
    }
    return vcombine_s8(vmovn_s16(vcombine_s16(code[0], code[1])), vmovn_s16(vcombine_s16(code[2], code[3])));
}

void we_neon_encode_q8g(int8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols, size_t group)
{
    if (group % 16) {
        we_ref_encode_q8g(payload, scales, x, rows, cols, group);
        return;
    }
    for (size_t r = 0; r < rows; r++, x += cols) {
        for (size_t c0 = 0; c0 < cols; c0 += group, payload += group) {
            const size_t n = we_min(group, cols - c0);
            const float scale = group_scale(x + c0, n, 127);
            for (size_t i = 0; i < group; i += 16) {
                const size_t at = we_min(i, n);
                vst1q_s8(payload + i, encode_x16(x + c0 + at, n - at, scale, -127, 127));
            }
            *scales++ = we_f16_bits(scale);
        }
    }
}

void we_neon_encode_q4g(uint8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols, size_t group)
{
    if (group % 16) {
        we_ref_encode_q4g(payload, scales, x, rows, cols, group);
        return;
    }
    for (size_t r = 0; r < rows; r++, x += cols) {
        for (size_t c0 = 0; c0 < cols; c0 += group, payload += group / 2) {
            const size_t n = we_min(group, cols - c0);
            const float scale = group_scale(x + c0, n, 7);
            for (size_t i = 0; i < group; i += 16) {
                const size_t at = we_min(i, n);
                const int8x16_t codes = encode_x16(x + c0 + at, n - at, scale, -8, 7);
                const uint8x16_t nibbles = vreinterpretq_u8_s8(vaddq_s8(codes, vdupq_n_s8(8)));
                const uint8x16_t evens = vuzp1q_u8(nibbles, nibbles), odds = vuzp2q_u8(nibbles, nibbles);
                vst1_u8(payload + i / 2, vget_low_u8(vorrq_u8(evens, vshlq_n_u8(odds, 4))));
            }
            *scales++ = we_f16_bits(scale);
        }
    }
}

/* ------------------------------------------------- activations as integers ---- */

/* As bits: NaN is above infinity, so that it is not lost. */
static float largest_magnitude(const float *x, size_t n)
{
    uint32x4_t largest = vdupq_n_u32(0);
    for (size_t i = 0; i < n; i += 4)
        largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(load_some(x + i, n - i))));
    return we_bits_float(vmaxvq_u32(largest));
}

/* x[0 .. n) / scale to nearest even, zeros behind. */
static inline int16x8_t quantize_x8(const float *x, size_t n, float scale)
{
    int16x4_t q[2];
    for (size_t k = 0; k < 2; k++) {
        const float32x4_t ratio = vdivq_f32(load_some(x + 4 * k, we_left(n, 4 * k)), vdupq_n_f32(scale));
        const float32x4_t most = vdupq_n_f32(WE_Q_MAX), clamped = vmaxq_f32(vminq_f32(ratio, most), vnegq_f32(most));
        q[k] = vmovn_s32(vcvtnq_s32_f32(clamped));
    }
    return vcombine_s16(q[0], q[1]);
}

static void quantize_group(const float *x, size_t n, size_t group, int16_t *q, int16_t *halves, float *scale,
                           int32_t *bias)
{
    const float s = largest_magnitude(x, n) / WE_Q_MAX;
    const int usable = s > 0 && s < we_bits_float(0x7f800000);
    int32x4_t sums = vdupq_n_s32(0);
    for (size_t i = 0; i < group; i += 16) {
        int16x8_t low = vdupq_n_s16(0), high = low;
        if (usable && i < n) low = quantize_x8(x + i, n - i, s);
        if (usable && i + 8 < n) high = quantize_x8(x + i + 8, n - i - 8, s);
        vst1q_s16(q + i, low);
        vst1q_s16(q + i + 8, high);
        vst1q_s16(halves + i / 2, vuzp1q_s16(low, high));
        vst1q_s16(halves + group / 2 + i / 2, vuzp2q_s16(low, high));
        sums = vpadalq_s16(vpadalq_s16(sums, low), high);
    }
    *scale = s;
    *bias = -8 * vaddvq_s32(sums);
}

void we_neon_quantize(const we_acts *a, size_t t0, size_t t1, size_t cols)
{
    const size_t group = a->group;
    for (size_t t = t0; t < t1; t++) {
        for (size_t c = 0, g = 0; c < cols; c += group, g++) {
            const size_t at = t * a->scale_stride + g;
            quantize_group(a->x + t * a->x_stride + c, we_min(group, cols - c), group, a->q + t * a->q_stride + c,
                           a->q_halves + t * a->q_stride + c, a->scale + at, a->bias + at);
        }
    }
}

/* --------------------------------------------------------- products in f32 ---- */

/* Eight columns of some rows by some tokens; n_rows and n_tokens are constants. */
static inline void product_step(float32x4_t sum[][2][2], const float *tile, size_t stride, const float *x,
                                size_t x_stride, const size_t n_rows, const size_t n_tokens)
{
    for (size_t k = 0; k < 2; k++) {
        float32x4_t x_x4[2];
        for (size_t u = 0; u < n_tokens; u++) x_x4[u] = vld1q_f32(x + u * x_stride + 4 * k);
        for (size_t i = 0; i < n_rows; i++) {
            const float32x4_t w = vld1q_f32(tile + i * stride + 4 * k);
            WE_UNROLL for (size_t u = 0; u < n_tokens; u++) sum[i][u][k] = vfmaq_f32(sum[i][u][k], w, x_x4[u]);
        }
    }
}

/* The last n < 8 columns, zeros behind them. */
static void pad(lanes *to, const float *from, size_t stride, size_t n_rows, size_t n)
{
    memset(to, 0, n_rows * sizeof *to);
    for (size_t i = 0; i < n_rows; i++) memcpy(to[i], from + i * stride, n * sizeof *from);
}

/* sums[t][i] += tile row i by token t; n_rows and n_tokens are constants where this is expanded. */
static inline void product(lanes sums[][ROWS], const float *tile, size_t stride, const float *x, size_t x_stride,
                           size_t n_cols, const size_t n_rows, const size_t n_tokens)
{
    float32x4_t sum[ROWS][2][2];
    size_t c = 0;
    for (size_t i = 0; i < n_rows; i++)
        for (size_t u = 0; u < n_tokens; u++)
            for (size_t k = 0; k < 2; k++) sum[i][u][k] = vld1q_f32(sums[u][i] + 4 * k);
    for (; c + 8 <= n_cols; c += 8) product_step(sum, tile + c, stride, x + c, x_stride, n_rows, n_tokens);
    if (c < n_cols) {
        lanes last_w[ROWS], last_x[2];
        pad(last_w, tile + c, stride, n_rows, n_cols - c);
        pad(last_x, x + c, x_stride, n_tokens, n_cols - c);
        product_step(sum, last_w[0], 8, last_x[0], 8, n_rows, n_tokens);
    }
    for (size_t i = 0; i < n_rows; i++)
        for (size_t u = 0; u < n_tokens; u++)
            for (size_t k = 0; k < 2; k++) vst1q_f32(sums[u][i] + 4 * k, sum[i][u][k]);
}

static void tile_product(lanes sums[][ROWS], const float *tile, size_t stride, size_t n_rows, const float *x,
                         size_t x_stride, size_t n, size_t n_cols)
{
    size_t t = 0;
    for (; n_rows == ROWS && t + 2 <= n; t += 2)
        product(sums + t, tile, stride, x + t * x_stride, x_stride, n_cols, ROWS, 2);
    for (; t < n; t++) {
        if (n_rows == ROWS) product(sums + t, tile, stride, x + t * x_stride, x_stride, n_cols, ROWS, 1);
        else product(sums + t, tile, stride, x + t * x_stride, x_stride, n_cols, n_rows, 1);
    }
}

/* Columns [c0, c1) of some rows: in place for F32, else decoded to piece; *stride is set. */
static const float *rows_piece(const we_matrix *w, size_t row, size_t n_rows, size_t c0, size_t c1, float *piece,
                               size_t *stride)
{
    *stride = w->encoding == WE_F32 ? w->cols : COLS;
    if (w->encoding == WE_F32) return (const float *)w->payload + row * w->cols + c0;
    if (is_vq8(w)) we_neon_vq_tile(w, row, n_rows, c0, c1, piece, COLS);
    for (size_t i = 0; i < n_rows && !is_vq8(w); i++) {
        const uint16_t *upper = (const uint16_t *)w->payload + (row + i) * w->cols + c0;
        if (w->encoding == WE_BF16) we_ref_bf16_to_f32(piece + i * COLS, upper, c1 - c0);
        else decode_groups(w, row + i, c0, c1, piece + i * COLS);
    }
    return piece;
}

/* Rows [row, row + n_rows) by n <= TOKENS tokens; n_rows <= ROWS. */
static void float_rows(const we_matrix *w, size_t row, size_t n_rows, const float *x, size_t x_stride, size_t n,
                       float *y, size_t y_stride)
{
    float piece[ROWS * COLS];
    lanes sums[TOKENS][ROWS];
    memset(sums, 0, n * sizeof sums[0]);
    for (size_t c0 = 0; c0 < w->cols; c0 += COLS) {
        const size_t c1 = we_min(c0 + COLS, w->cols);
        size_t stride;
        const float *tile = rows_piece(w, row, n_rows, c0, c1, piece, &stride);
        tile_product(sums, tile, stride, n_rows, x + c0, x_stride, n, c1 - c0);
    }
    for (size_t i = 0; i < n_rows; i++) {
        const float scale = is_vq8(w) ? we_f16_value(w->scales[row + i]) : 1;
        for (size_t t = 0; t < n; t++) {
            const float32x4_t sum = vaddq_f32(vld1q_f32(sums[t][i]), vld1q_f32(sums[t][i] + 4));
            y[t * y_stride + i] = scale * sum_lanes(sum);
        }
    }
}

void we_neon_matmul(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y, size_t y_stride)
{
    if (we_takes_integers(w, a)) {
        we_neon_matmul_integer(w, row0, row1, a, n, y, y_stride);
    } else if (is_vq8(w) && n == 1) {
        we_neon_vq_token(w, row0, row1, a->x, y);
    } else if (is_vq8(w) || has_groups_of_16(w) || w->encoding == WE_F32 || w->encoding == WE_BF16) {
        for (size_t r = row0; r < row1; r += ROWS)
            for (size_t t = 0; t < n; t += TOKENS)
                float_rows(w, r, we_min(ROWS, row1 - r), a->x + t * a->x_stride, a->x_stride, we_min(TOKENS, n - t),
                           y + t * y_stride + (r - row0), y_stride);
    } else {
        we_ref_matmul(w, row0, row1, a, n, y, y_stride);
    }
}

void we_neon_matmul_t(const we_matrix *w, size_t row0, size_t row1, const float *x, size_t x_stride, size_t n, float *y,
                      size_t y_stride, float *row)
{
    for (size_t t = 0; t < n; t++) memset(y + t * y_stride, 0, w->cols * sizeof *y);
    for (size_t r = row0; r < row1; r++) {
        we_neon_decode_rows(w, r, r + 1, row, w->cols);
        for (size_t t = 0; t < n; t++)
            we_reference.add_scaled(y + t * y_stride, x[t * x_stride + (r - row0)], row, w->cols);
    }
}

#else
typedef int we_no_neon_linear;      /* ISO C wants a declaration in every file */
#endif
