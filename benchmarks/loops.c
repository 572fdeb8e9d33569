/* Kernels of a table, called again and again: what Python would add to a short call is paid once a sample. */
#include <stddef.h>
#include <stdint.h>
#include "warp_embed/kernels.h"

void baseline_q4_float(const we_matrix *w, size_t row0, size_t row1, const float *x, float *y);
void baseline_vq_tables(const we_matrix *w, size_t row0, size_t row1, const float *x, float *y, float *work);

/* Rows [row0, row1) of one matrix after another, beginning with number `first`, `rows` at a time: the engine's threads
 * take rows in pieces too. y has room for n tokens of row1 - row0. */
void loop_matmul(const we_kernels *K, const we_matrix *const *w, size_t n_matrices, size_t first, size_t repeats,
                 const we_acts *a, size_t n, size_t row0, size_t row1, size_t rows, float *y)
{
    for (size_t i = 0; i < repeats; i++)
        for (size_t r = row0; r < row1; r += rows) {
            const size_t end = row1 - r < rows ? row1 : r + rows;
            K->matmul(w[(first + i) % n_matrices], r, end, a, n, y + (r - row0), row1 - row0);
        }
}

void loop_matmul_t(const we_kernels *K, const we_matrix *const *w, size_t n_matrices, size_t first, size_t repeats,
                   const float *x, size_t n, size_t row0, size_t row1, float *y, float *row)
{
    for (size_t i = 0; i < repeats; i++) {
        const we_matrix *m = w[(first + i) % n_matrices];
        K->matmul_t(m, row0, row1, x, row1 - row0, n, y, m->cols, row);
    }
}

/* The baselines have no form for many tokens: one after the other. */
void loop_q4_float(const we_matrix *const *w, size_t n_matrices, size_t first, size_t repeats, const float *x,
                   size_t n, size_t row0, size_t row1, float *y)
{
    for (size_t i = 0; i < repeats; i++)
        for (size_t t = 0; t < n; t++) {
            const we_matrix *m = w[(first + i) % n_matrices];
            baseline_q4_float(m, row0, row1, x + t * m->cols, y + t * (row1 - row0));
        }
}

void loop_vq_tables(const we_matrix *const *w, size_t n_matrices, size_t first, size_t repeats, const float *x,
                    size_t n, size_t row0, size_t row1, float *y, float *work)
{
    for (size_t i = 0; i < repeats; i++)
        for (size_t t = 0; t < n; t++) {
            const we_matrix *m = w[(first + i) % n_matrices];
            baseline_vq_tables(m, row0, row1, x + t * m->cols, y + t * (row1 - row0), work);
        }
}

void loop_quantize(const we_kernels *K, const we_acts *a, size_t n, size_t cols, size_t repeats)
{
    for (size_t i = 0; i < repeats; i++) K->quantize(a, 0, n, cols);
}

/* n tokens of heads [h0, h1) of one layer after another. states [layers][2][heads][dk][dv]: a pass reads one half
 * and writes the other, past the caches if there is more than one layer; layer l is at parity l's turn. The rest is [n][heads][...], shared by all layers. */
void loop_kda(const we_kernels *K, float *states, size_t layers, size_t first, size_t repeats, const float *q,
              const float *k, const float *v, const float *decay, const float *beta, float *o, size_t n,
              size_t heads, size_t h0, size_t h1, size_t dk, size_t dv)
{
    const size_t half = heads * dk * dv;
    for (size_t i = 0; i < repeats; i++) {
        const size_t turn = first + i, parity = turn / layers & 1;
        float *layer = states + turn % layers * 2 * half;
        for (size_t h = h0; h < h1; h++) {
            const we_kda_args a = {
                .S_in = layer + parity * half + h * dk * dv, .S_out = layer + (1 - parity) * half + h * dk * dv,
                .q = q + h * dk, .k = k + h * dk, .v = v + h * dv, .decay = decay + h * dk, .beta = beta + h,
                .o = o + h * dv, .n = n, .dk = dk, .dv = dv, .qk_stride = heads * dk, .v_stride = heads * dv,
                .beta_stride = heads, .stream = layers > 1};
            K->kda(&a);
        }
    }
}

/* The same tokens, a step at a time: every token passes over all heads. */
void loop_kda_steps(const we_kernels *K, float *states, size_t repeats, const float *q, const float *k, const float *v,
                    const float *decay, const float *beta, float *o, size_t n, size_t heads, size_t dk, size_t dv)
{
    for (size_t i = 0; i < repeats; i++)
        for (size_t t = 0; t < n; t++)
            loop_kda(K, states, 1, t, 1, q + t * heads * dk, k + t * heads * dk, v + t * heads * dv,
                     decay + t * heads * dk, beta + t * heads, o + t * heads * dv, 1, heads, 0, heads, dk, dv);
}

void loop_latents(const we_kernels *K, void *const *blocks, const float *c, const float *key, size_t positions,
                  size_t r, size_t rope, int kv)
{
    const size_t bytes = we_latent_bytes(r, rope, (we_kv)kv);
    for (size_t s = 0; s < positions; s++)
        K->latent_store((char *)blocks[s / WE_LATENT_TILE] + s % WE_LATENT_TILE * bytes, c + s % 64 * r,
                        key + s % 64 * rope, r, rope, (we_kv)kv);
}

size_t loop_mla_work(size_t r, size_t rope) { return we_mla_work(r, rope); }
size_t loop_latent_bytes(size_t r, size_t rope, int kv) { return we_latent_bytes(r, rope, (we_kv)kv); }

/* softmax [n][heads][2]; all positions in one window. */
void loop_mla(const we_kernels *K, const void *const *blocks, size_t repeats, const float *q, float *o, float *softmax,
              float *work, size_t n, size_t position, size_t heads, size_t r, size_t rope, int kv)
{
    const we_mla_args a = {.q = q, .blocks = blocks, .o = o, .softmax = softmax, .work = work, .n = n,
                           .position = position, .end = SIZE_MAX, .heads = heads, .q_stride = heads * (r + rope),
                           .o_stride = heads * r, .r = r, .rope = rope, .scale = 0.07f, .kv = (we_kv)kv};
    for (size_t i = 0; i < repeats; i++) K->mla(&a);
}

void loop_short_conv(const we_kernels *K, size_t repeats, float *y, float *tail_out, const float *u,
                     const float *tail_in, const float *taps, size_t taps_n, size_t n, size_t channels)
{
    for (size_t i = 0; i < repeats; i++)
        K->short_conv(y, channels, tail_out, u, channels, tail_in, channels, taps, channels, taps_n, n, 0, channels);
}

/* Vectors x [rows][n], with a second operand of one row, or of all. */
enum { EXP, SIGMOID, SOFTPLUS, BOUNDED, SILU_MUL, SITU_MUL, RMS_NORM, RMS_NORM_GATED, L2_NORM, F16_TO_F32, F32_TO_F16 };

void loop_vector(const we_kernels *K, int what, size_t repeats, float *y, const float *x, const float *w, size_t rows,
                 size_t n)
{
    for (size_t i = 0; i < repeats; i++)
        for (size_t row = 0; row < rows; row++) {
            float *to = y + row * n;
            const float *from = x + row * n;
            switch (what) {
            case EXP:            K->exp(to, from, n); break;
            case SIGMOID:        K->sigmoid(to, from, n); break;
            case SOFTPLUS:       K->decay_softplus(to, from, w, 0.5f, n); break;
            case BOUNDED:        K->decay_bounded(to, from, w, 0.5f, -5.0f, n); break;
            case SILU_MUL:       K->silu_mul(to, from, x, n); break;
            case SITU_MUL:       K->situ_mul(to, from, x, 4, 25, n); break;
            case RMS_NORM:       K->rms_norm(to, from, w, 1e-5f, n); break;
            case RMS_NORM_GATED: K->rms_norm_gated(to, from, w, x, 1e-5f, n); break;
            case L2_NORM:        K->l2_norm(to, 1.0f, n); break;
            case F16_TO_F32:     K->f16_to_f32(to, (const uint16_t *)(const void *)from, n); break;
            case F32_TO_F16:     K->f32_to_f16((uint16_t *)(void *)to, from, n); break;
            }
        }
}

void loop_route(const we_kernels *K, size_t repeats, const float *logits, const float *bias, size_t experts,
                size_t top_k, int32_t *idx, float *weight, float *work)
{
    const we_router router = {.bias = bias, .experts = (uint32_t)experts, .top_k = (uint32_t)top_k, .groups = 1,
                              .top_groups = 1, .renormalize = 1, .scaling = 2.446f};
    for (size_t i = 0; i < repeats; i++) K->route(&router, logits, idx, weight, work);
}

void loop_vq_encode(const we_kernels *K, size_t repeats, uint8_t *index, const float *x, const float *books, size_t n,
                    unsigned stages, unsigned entries)
{
    for (size_t i = 0; i < repeats; i++) K->vq_encode(index, NULL, x, books, n, stages, entries);
}
