/* What the kernel files share and nobody else sees. */
#ifndef WE_KERNELS_INTERNAL_H
#define WE_KERNELS_INTERNAL_H
#include <string.h>
#include "warp_embed/kernels.h"
#include "warp_embed/target.h"

extern const we_kernels we_reference;
#ifdef WE_X86
extern const we_kernels we_avx2;
/* Columns [c0, c1), multiples of 8, of some rows of VQ weights with vec_dim 8, without their scales: row i begins at
 * tile + i row_stride, its eight columns from c on at (c - c0) / 8 vector_stride behind. */
void we_avx2_vq_tile(const we_matrix *w, size_t row, size_t n_rows, size_t c0, size_t c1, float *tile,
                     size_t row_stride, size_t vector_stride);
#ifdef WE_X86_AVXVNNI
extern const we_kernels we_avxvnni;
#endif
#ifdef WE_X86_AVX512
extern const we_kernels we_avx512, we_avx512vnni;
#endif
#endif
#ifdef WE_ARM64
extern const we_kernels we_neon, we_dotprod, we_i8mm;
#endif

enum {
    WE_VQ_ROWS = 64,            /* rows of a block of VQ units                                     */
    WE_Q_MAX = 32639,           /* largest integer activation                                      */
    WE_LATENT_GROUP = 64        /* elements of a q8 latent that share a scale                      */
};

extern const int8_t we_e2m1_doubled[16];            /* MXFP4's codes */

static inline size_t we_min(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t we_n_groups(const we_matrix *w) { return ((size_t)w->cols + w->group - 1) / w->group; }
static inline int we_takes_integers(const we_matrix *w, const we_acts *a)
{
    return a->group != 0 && a->group == we_integer_group(w);
}
static inline int we_is_vq(const we_matrix *w)
{
    return w->encoding == WE_VQ3R || w->encoding == WE_VQ2R || w->encoding == WE_VQ4P;
}
static inline size_t we_vq_unit(const we_matrix *w) { return w->encoding == WE_VQ4P ? 3 : w->stages; }
static inline size_t we_vq_entries(const we_matrix *w) { return w->encoding == WE_VQ4P ? 64 : 256; }

/* The units of a row: the one of vector v is WE_VQ_ROWS * unit bytes further for each v. */
static inline const uint8_t *we_vq_row(const we_matrix *w, size_t row)
{
    const size_t n_vecs = w->cols / w->vec_dim;
    return (const uint8_t *)w->payload + (row / WE_VQ_ROWS * n_vecs * WE_VQ_ROWS + row % WE_VQ_ROWS) * we_vq_unit(w);
}

static inline uint32_t we_float_bits(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
static inline float we_bits_float(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

/* Scale of a group of MXFP4 for doubled codes, 2^(e - 128): halved from 2^(e - 127), which is subnormal for e = 0. */
static inline float we_e8m0_halved(uint8_t e) { return we_bits_float(e ? (uint32_t)e << 23 : 0x400000) * 0.5f; }
static inline const uint8_t *we_e8m0_scales(const we_matrix *w) { return (const uint8_t *)w->scales; }

/* The numbers a 16-bit pattern stands for and back; NaN comes out quiet, as F16C does it. */
float we_f16_value(uint16_t h);
uint16_t we_f16_bits(float x);

/* Reference kernels; meaning and shapes in kernels.h. */
void we_ref_f16_to_f32(float *y, const uint16_t *x, size_t n);
void we_ref_f32_to_f16(uint16_t *y, const float *x, size_t n);
void we_ref_bf16_to_f32(float *y, const uint16_t *x, size_t n);
void we_ref_f32_to_bf16(uint16_t *y, const float *x, size_t n);
void we_ref_exp(float *y, const float *x, size_t n);
void we_ref_sigmoid(float *y, const float *x, size_t n);
void we_ref_decode_rows(const we_matrix *w, size_t row0, size_t row1, float *y, size_t y_stride);
void we_ref_encode_q8g(int8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols, size_t group);
void we_ref_encode_q4g(uint8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols, size_t group);
void we_ref_vq_encode(uint8_t *index, float *residual, const float *x, const float *books, size_t n, unsigned stages,
                      unsigned entries);
void we_ref_quantize(const we_acts *a, size_t t0, size_t t1, size_t cols);
void we_ref_matmul(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                   size_t y_stride);
void we_ref_matmul_t(const we_matrix *w, size_t row0, size_t row1, const float *x, size_t x_stride, size_t n, float *y,
                     size_t y_stride, float *row);
void we_ref_short_conv(float *y, size_t y_stride, float *tail_out, const float *u, size_t u_stride,
                       const float *tail_in, size_t tail_stride, const float *taps, size_t taps_stride, size_t K,
                       size_t n, size_t c0, size_t c1);
void we_ref_decay_softplus(float *decay, const float *f, const float *dt_bias, float rate, size_t n);
void we_ref_decay_bounded(float *decay, const float *f, const float *dt_bias, float rate, float lower, size_t n);
void we_ref_kda(const we_kda_args *a);
void we_ref_latent_store(void *latent, const float *c, const float *key, size_t r, size_t rope, we_kv kv);
void we_ref_latent_load(float *y, const void *latent, size_t r, size_t rope, we_kv kv);
void we_ref_mla(const we_mla_args *a);
void we_ref_mla_fold(float *o, float *softmax, const float *part, const float *part_softmax, size_t r);

/* Results of every (token, head) before its first tile; where the last latent that is looked at ends. */
size_t we_mla_start(const we_mla_args *a);

/* The router with a level's own sigmoid. */
void we_route_by(void (*sigmoid)(float *, const float *, size_t), const we_router *r, const float *logits, int32_t *idx,
                 float *weight, float *work);

/* mix_rows with a level's own score, rms_norm(x; w, eps) . proj, and add_scaled. */
void we_mix_by(double (*score)(const float *x, const float *w, const float *proj, float eps, size_t n),
               void (*add_scaled)(float *y, float a, const float *x, size_t n), float *y, float *alpha, const float *v,
               size_t stride, size_t n_rows, const float *w, const float *proj, float eps, size_t n);

/* The last K - 1 inputs of channels [c0, c1), from u and, where n < K - 1, from tail_in. */
void we_conv_tail(float *tail_out, const float *u, size_t u_stride, const float *tail_in, size_t tail_stride, size_t K,
                  size_t n, size_t c0, size_t c1);

#endif
