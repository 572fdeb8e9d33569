/* The meaning of the kernels: weights, their encoders, linear maps. */
#include <math.h>
#include "kernels_internal.h"

enum { PIECE = 256 };           /* columns that are decoded at a time, on the stack */

/* --------------------------------------------------------------- decoding ---- */

static unsigned vq_index(const we_matrix *w, const uint8_t *unit, size_t stage)
{
    if (w->encoding != WE_VQ4P) return unit[stage];
    return ((unsigned)unit[0] | (unsigned)unit[1] << 8 | (unsigned)unit[2] << 16) >> (6 * stage) & 63;
}

static void decode_vq(const we_matrix *w, size_t row, size_t c0, size_t c1, float *y)
{
    const size_t D = w->vec_dim, step = WE_VQ_ROWS * we_vq_unit(w), entries = we_vq_entries(w);
    const uint8_t *units = we_vq_row(w, row);
    const float scale = we_f16_value(w->scales[row]);
    for (size_t c = c0, n; c < c1; c += n, y += n) {
        const uint8_t *unit = units + c / D * step;
        n = we_min(D - c % D, c1 - c);
        for (size_t d = 0; d < n; d++) y[d] = 0;
        for (size_t s = 0; s < w->stages; s++) {
            const float *codeword = w->books + (s * entries + vq_index(w, unit, s)) * D + c % D;
            for (size_t d = 0; d < n; d++) y[d] += codeword[d];
        }
        for (size_t d = 0; d < n; d++) y[d] *= scale;
    }
}

const int8_t we_e2m1_doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static int integer_code(const we_matrix *w, const uint8_t *codes, size_t c)
{
    switch (w->encoding) {
    case WE_Q8G: return (int8_t)codes[c];
    case WE_Q4G: return (codes[c / 2] >> (c & 1 ? 4 : 0) & 15) - 8;
    case WE_MXFP4: return we_e2m1_doubled[codes[c / 2] >> (c & 1 ? 4 : 0) & 15];
    default: {                          /* Q3G: the guard byte makes the second read safe */
        const unsigned two = (unsigned)codes[3 * c / 8] | (unsigned)codes[3 * c / 8 + 1] << 8;
        return (int)(two >> (3 * c % 8) & 7) - 4;
    }
    }
}

static float scale_of(const we_matrix *w, size_t row, size_t g)
{
    const size_t at = row * we_n_groups(w) + g;
    return w->encoding == WE_MXFP4 ? we_e8m0_halved(we_e8m0_scales(w)[at]) : we_f16_value(w->scales[at]);
}

static void decode_groups(const we_matrix *w, size_t row, size_t c0, size_t c1, float *y)
{
    const uint8_t *codes = (const uint8_t *)w->payload + row * w->row_bytes;
    for (size_t c = c0; c < c1; c++) y[c - c0] = scale_of(w, row, c / w->group) * (float)integer_code(w, codes, c);
}

/* y[0 .. c1 - c0) = W[row][c0 .. c1) */
static void decode(const we_matrix *w, size_t row, size_t c0, size_t c1, float *y)
{
    const uint8_t *payload = (const uint8_t *)w->payload + row * w->row_bytes;
    if (we_is_vq(w)) decode_vq(w, row, c0, c1, y);
    else if (w->encoding == WE_F32) memcpy(y, payload + 4 * c0, 4 * (c1 - c0));
    else if (w->encoding == WE_BF16) we_ref_bf16_to_f32(y, (const uint16_t *)(const void *)payload + c0, c1 - c0);
    else decode_groups(w, row, c0, c1, y);
}

void we_ref_decode_rows(const we_matrix *w, size_t row0, size_t row1, float *y, size_t y_stride)
{
    for (size_t r = row0; r < row1; r++) decode(w, r, 0, w->cols, y + (r - row0) * y_stride);
}

/* --------------------------------------------------------------- encoding ---- */

static float group_scale(const float *x, size_t n, float q_max)
{
    float largest = 1e-8f;
    for (size_t i = 0; i < n; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    return largest / q_max;
}

/* x / scale to nearest even, clamped; NaN gives lo. */
static int code_of(float x, float scale, float lo, float hi)
{
    const float code = nearbyintf(x / scale);
    if (!(code >= lo)) return (int)lo;
    return (int)(code < hi ? code : hi);
}

void we_ref_encode_q8g(int8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols, size_t group)
{
    for (size_t r = 0; r < rows; r++, x += cols) {
        for (size_t c0 = 0; c0 < cols; c0 += group, payload += group) {
            const size_t n = we_min(group, cols - c0);
            const float scale = group_scale(x + c0, n, 127);
            for (size_t i = 0; i < n; i++) payload[i] = (int8_t)code_of(x[c0 + i], scale, -127, 127);
            for (size_t i = n; i < group; i++) payload[i] = 0;
            *scales++ = we_f16_bits(scale);
        }
    }
}

void we_ref_encode_q4g(uint8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols, size_t group)
{
    for (size_t r = 0; r < rows; r++, x += cols) {
        for (size_t c0 = 0; c0 < cols; c0 += group, payload += group / 2) {
            const size_t n = we_min(group, cols - c0);
            const float scale = group_scale(x + c0, n, 7);
            memset(payload, 0x88, group / 2);
            for (size_t i = 0; i < n; i++) {
                const int nibble = code_of(x[c0 + i], scale, -8, 7) + 8;
                payload[i / 2] ^= (uint8_t)(i & 1 ? (nibble ^ 8) << 4 : nibble ^ 8);
            }
            *scales++ = we_f16_bits(scale);
        }
    }
}

static float squared_distance(const float *a, const float *b)
{
    float sum = 0;
    for (size_t d = 0; d < 8; d++) sum += (a[d] - b[d]) * (a[d] - b[d]);
    return sum;
}

void we_ref_vq_encode(uint8_t *index, float *residual, const float *x, const float *books, size_t n, unsigned stages,
                      unsigned entries)
{
    for (size_t i = 0; i < n; i++) {
        float left[8];
        memcpy(left, x + 8 * i, sizeof left);
        for (unsigned s = 0; s < stages; s++) {
            const float *book = books + (size_t)s * entries * 8;
            unsigned best = 0;
            float least = squared_distance(left, book);
            for (unsigned e = 1; e < entries; e++) {
                const float distance = squared_distance(left, book + 8 * e);
                if (distance < least) { least = distance; best = e; }
            }
            for (size_t d = 0; d < 8; d++) left[d] -= book[8 * best + d];
            index[i * stages + s] = (uint8_t)best;
        }
        if (residual) memcpy(residual + 8 * i, left, sizeof left);
    }
}

/* ------------------------------------------------- activations as integers ---- */

/* One group. A scale that is not finite leaves q at 0, so that the product is not finite either. */
static void quantize_group(const float *x, size_t n, size_t group, int16_t *q, int16_t *halves, float *scale,
                           int32_t *bias)
{
    uint32_t largest = 0;                       /* as bits: NaN is above infinity, so that it is not lost */
    for (size_t i = 0; i < n; i++) {
        const uint32_t magnitude = we_float_bits(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    const float s = we_bits_float(largest) / WE_Q_MAX;
    const int usable = s > 0 && s < INFINITY;
    int32_t sum = 0;
    for (size_t i = 0; i < group; i++) {
        const float ratio = usable && i < n ? nearbyintf(x[i] / s) : 0;
        q[i] = (int16_t)(ratio > WE_Q_MAX ? WE_Q_MAX : ratio < -WE_Q_MAX ? -WE_Q_MAX : ratio);  /* subnormal scales */
        halves[i / 2 + (i & 1 ? group / 2 : 0)] = q[i];
        sum += q[i];
    }
    *scale = s;
    *bias = -8 * sum;
}

void we_ref_quantize(const we_acts *a, size_t t0, size_t t1, size_t cols)
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

/* --------------------------------------------------------------- products ---- */

static int32_t dot_q8(const int8_t *codes, const int16_t *q, size_t group)
{
    int32_t dot = 0;                            /* at most 128 * 128 * 32639 */
    for (size_t i = 0; i < group; i++) dot += codes[i] * q[i];
    return dot;
}

static int32_t dot_q4(const uint8_t *codes, const int16_t *halves, size_t group, int32_t bias)
{
    int32_t dot = bias;
    for (size_t i = 0; i < group / 2; i++)
        dot += (codes[i] & 15) * halves[i] + (codes[i] >> 4) * halves[group / 2 + i];
    return dot;
}

static int32_t dot_mxfp4(const uint8_t *codes, const int16_t *halves, size_t group)
{
    int32_t dot = 0;                            /* at most 32 * 12 * 32639 */
    for (size_t i = 0; i < group / 2; i++) {
        dot += we_e2m1_doubled[codes[i] & 15] * halves[i];
        dot += we_e2m1_doubled[codes[i] >> 4] * halves[group / 2 + i];
    }
    return dot;
}

static float integer_row(const we_matrix *w, size_t row, const we_acts *a, size_t t)
{
    const uint8_t *codes = (const uint8_t *)w->payload + row * w->row_bytes;
    const size_t n_groups = we_n_groups(w), group = w->group;
    float sum = 0;
    for (size_t g = 0; g < n_groups; g++) {
        const size_t at = t * a->q_stride + g * group, at_scale = t * a->scale_stride + g;
        int32_t dot;
        if (w->encoding == WE_Q8G)      dot = dot_q8((const int8_t *)codes + g * group, a->q + at, group);
        else if (w->encoding == WE_Q4G) dot = dot_q4(codes + g * group / 2, a->q_halves + at, group, a->bias[at_scale]);
        else                            dot = dot_mxfp4(codes + g * group / 2, a->q_halves + at, group);
        sum += (float)dot * a->scale[at_scale] * scale_of(w, row, g);
    }
    return sum;
}

/* One row by n tokens; y is the running sum, so that a piece is decoded once for all tokens. */
static void float_row(const we_matrix *w, size_t row, const we_acts *a, size_t n, float *y, size_t y_stride)
{
    float piece[PIECE];
    for (size_t t = 0; t < n; t++) y[t * y_stride] = 0;
    for (size_t c0 = 0; c0 < w->cols; c0 += PIECE) {
        const size_t c1 = we_min(c0 + PIECE, w->cols);
        decode(w, row, c0, c1, piece);
        for (size_t t = 0; t < n; t++) {
            const float *x = a->x + t * a->x_stride + c0;
            float sum = y[t * y_stride];
            for (size_t i = 0; i < c1 - c0; i++) sum += piece[i] * x[i];
            y[t * y_stride] = sum;
        }
    }
}

void we_ref_matmul(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                   size_t y_stride)
{
    const int integer = we_takes_integers(w, a);
    for (size_t r = row0; r < row1; r++) {
        if (!integer) float_row(w, r, a, n, y + (r - row0), y_stride);
        else for (size_t t = 0; t < n; t++) y[t * y_stride + (r - row0)] = integer_row(w, r, a, t);
    }
}

void we_ref_matmul_t(const we_matrix *w, size_t row0, size_t row1, const float *x, size_t x_stride, size_t n, float *y,
                     size_t y_stride, float *row)
{
    for (size_t t = 0; t < n; t++)
        for (size_t i = 0; i < w->cols; i++) y[t * y_stride + i] = 0;
    for (size_t r = row0; r < row1; r++) {
        decode(w, r, 0, w->cols, row);
        for (size_t t = 0; t < n; t++)
            for (size_t i = 0; i < w->cols; i++) y[t * y_stride + i] += row[i] * x[t * x_stride + (r - row0)];
    }
}
