/* The meaning of the kernels: KDA and MLA. */
#include <math.h>
#include "kernels_internal.h"

/* -------------------------------------------------------------------- KDA ---- */

void we_conv_tail(float *tail_out, const float *u, size_t u_stride, const float *tail_in, size_t tail_stride, size_t K,
                  size_t n, size_t c0, size_t c1)
{
    for (size_t j = 0; j + 1 < K; j++) {                /* input n - (K - 1) + j of the chunk */
        const float *from = n + j >= K - 1 ? u + (n + j - (K - 1)) * u_stride : tail_in + (n + j) * tail_stride;
        memcpy(tail_out + j * tail_stride + c0, from + c0, (c1 - c0) * sizeof *from);
    }
}

void we_ref_short_conv(float *y, size_t y_stride, float *tail_out, const float *u, size_t u_stride,
                       const float *tail_in, size_t tail_stride, const float *taps, size_t taps_stride, size_t K,
                       size_t n, size_t c0, size_t c1)
{
    for (size_t t = 0; t < n; t++) {
        for (size_t c = c0; c < c1; c++) {
            float sum = 0;
            for (size_t j = 0; j < K; j++) {
                const float *from = t + j >= K - 1 ? u + (t + j - (K - 1)) * u_stride : tail_in + (t + j) * tail_stride;
                sum += taps[j * taps_stride + c] * from[c];
            }
            y[t * y_stride + c] = (float)(sum / (1 + exp(-(double)sum)));
        }
    }
    we_conv_tail(tail_out, u, u_stride, tail_in, tail_stride, K, n, c0, c1);
}

void we_ref_decay_softplus(float *decay, const float *f, const float *dt_bias, float rate, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const double z = (double)f[i] + dt_bias[i];
        const double softplus = fmax(z, 0) + log1p(exp(-fabs(z)));
        decay[i] = (float)exp(-rate * softplus);
    }
}

void we_ref_decay_bounded(float *decay, const float *f, const float *dt_bias, float rate, float lower, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const double z = rate * ((double)f[i] + dt_bias[i]);
        decay[i] = (float)exp(lower / (1 + exp(-z)));           /* exp(-z) may be inf: then the decay is 1 */
    }
}

enum { KDA_BLOCK = 16 };        /* columns that are done together */

/* Token t for columns [j0, j1): decay from S_in to S_out, then the delta rule. */
static void kda_step(const we_kda_args *a, const float *S_in, size_t t, size_t j0, size_t j1)
{
    const float *q = a->q + t * a->qk_stride, *k = a->k + t * a->qk_stride, *decay = a->decay + t * a->qk_stride;
    const float *v = a->v + t * a->v_stride, beta = a->beta[t * a->beta_stride];
    float *o = a->o + t * a->v_stride, *S = a->S_out;
    float kq = 0, sk[KDA_BLOCK] = {0}, sq[KDA_BLOCK] = {0}, d[KDA_BLOCK];
    for (size_t i = 0; i < a->dk; i++) {
        kq += k[i] * q[i];
        for (size_t j = j0; j < j1; j++) {
            const float s = S_in[i * a->dv + j] * decay[i];
            sk[j - j0] += s * k[i];
            sq[j - j0] += s * q[i];
            S[i * a->dv + j] = s;
        }
    }
    for (size_t j = j0; j < j1; j++) {
        d[j - j0] = beta * (v[j] - sk[j - j0]);
        o[j] = sq[j - j0] + kq * d[j - j0];
    }
    for (size_t i = 0; i < a->dk; i++)
        for (size_t j = j0; j < j1; j++) S[i * a->dv + j] += k[i] * d[j - j0];
}

void we_ref_kda(const we_kda_args *a)
{
    for (size_t j = 0; j < a->dv; j += KDA_BLOCK)
        for (size_t t = 0; t < a->n; t++)
            kda_step(a, t ? a->S_out : a->S_in, t, j, we_min(j + KDA_BLOCK, a->dv));
    if (a->n == 0 && a->S_out != a->S_in) memcpy(a->S_out, a->S_in, a->dk * a->dv * sizeof *a->S_in);
}

/* -------------------------------------------------------------------- MLA ---- */

/* Codes of one part of a q8 latent, its scales behind them at `scales`; returns where the next scale goes. */
static uint16_t *store_q8(int8_t *codes, uint16_t *scales, const float *x, size_t n)
{
    for (size_t c = 0; c < n; c += WE_LATENT_GROUP) {
        const size_t end = we_min(c + WE_LATENT_GROUP, n);
        uint32_t largest = 0;                           /* as bits: NaN stays the largest */
        for (size_t i = c; i < end; i++) {
            const uint32_t magnitude = we_float_bits(x[i]) & 0x7fffffff;
            largest = magnitude > largest ? magnitude : largest;
        }
        const uint16_t bits = we_f16_bits(we_bits_float(largest) / 127);
        const float scale = we_f16_value(bits);
        for (size_t i = c; i < end; i++) {
            const float code = scale > 0 && scale < INFINITY ? nearbyintf(x[i] / scale) : 0;
            codes[i] = (int8_t)(code > 127 ? 127 : code < -127 ? -127 : code);
        }
        *scales++ = bits;
    }
    return scales;
}

void we_ref_latent_store(void *latent, const float *c, const float *key, size_t r, size_t rope, we_kv kv)
{
    if (kv == WE_KV_F32) {
        memcpy(latent, c, r * sizeof *c);
        memcpy((float *)latent + r, key, rope * sizeof *key);
    } else if (kv == WE_KV_F16) {
        we_ref_f32_to_f16((uint16_t *)latent, c, r);
        we_ref_f32_to_f16((uint16_t *)latent + r, key, rope);
    } else {
        int8_t *codes = (int8_t *)latent;
        uint16_t *scales = (uint16_t *)(void *)(codes + r + rope + ((r + rope) & 1));
        if ((r + rope) & 1) codes[r + rope] = 0;
        scales = store_q8(codes, scales, c, r);
        store_q8(codes + r, scales, key, rope);
    }
}

static const uint16_t *load_q8(float *y, const int8_t *codes, const uint16_t *scales, size_t n)
{
    for (size_t c = 0; c < n; c += WE_LATENT_GROUP, scales++)
        for (size_t i = c; i < we_min(c + WE_LATENT_GROUP, n); i++) y[i] = we_f16_value(*scales) * (float)codes[i];
    return scales;
}

void we_ref_latent_load(float *y, const void *latent, size_t r, size_t rope, we_kv kv)
{
    if (kv == WE_KV_F32) {
        memcpy(y, latent, (r + rope) * sizeof *y);
    } else if (kv == WE_KV_F16) {
        we_ref_f16_to_f32(y, (const uint16_t *)latent, r + rope);
    } else {
        const int8_t *codes = (const int8_t *)latent;
        const uint16_t *scales = (const uint16_t *)(const void *)(codes + r + rope + ((r + rope) & 1));
        scales = load_q8(y, codes, scales, r);
        load_q8(y + r, codes + r, scales, rope);
    }
}

/* One query against the first `seen` latents of a tile [seen][width]: o, *largest and *sum are the softmax so far. */
static void mla_tile(const float *q, const float *tile, size_t seen, size_t r, size_t width, float scale, float *o,
                     float *largest, float *sum)
{
    float score[WE_LATENT_TILE], above = *largest;
    for (size_t s = 0; s < seen; s++) {
        float dot = 0;
        for (size_t i = 0; i < width; i++) dot += q[i] * tile[s * width + i];
        score[s] = dot * scale;
        above = score[s] > above ? score[s] : above;
    }
    const float shrink = expf(*largest - above);            /* 0 at the first tile */
    *sum *= shrink;
    for (size_t i = 0; i < r; i++) o[i] *= shrink;
    for (size_t s = 0; s < seen; s++) {
        const float p = expf(score[s] - above);
        *sum += p;
        for (size_t i = 0; i < r; i++) o[i] += p * tile[s * width + i];
    }
    *largest = above;
}

void we_ref_mla(const we_mla_args *a)
{
    const size_t width = a->r + a->rope, latent_bytes = we_latent_bytes(a->r, a->rope, a->kv);
    const size_t end = we_mla_start(a);
    float *tile = a->work;
    for (size_t begin = a->begin; begin < end; begin += WE_LATENT_TILE) {
        const char *block = (const char *)a->blocks[begin / WE_LATENT_TILE];
        for (size_t s = 0; s < we_min(WE_LATENT_TILE, end - begin); s++)
            we_ref_latent_load(tile + s * width, block + s * latent_bytes, a->r, a->rope, a->kv);
        for (size_t t = begin > a->position ? begin - a->position : 0; t < a->n; t++) {
            const size_t seen = we_min(WE_LATENT_TILE, a->position + t + 1 - begin);
            for (size_t h = 0; h < a->heads; h++) {
                float *state = a->softmax + 2 * (t * a->heads + h);
                mla_tile(a->q + t * a->q_stride + h * width, tile, seen, a->r, width, a->scale,
                         a->o + t * a->o_stride + h * a->r, state, state + 1);
            }
        }
    }
}

size_t we_mla_start(const we_mla_args *a)
{
    for (size_t t = 0; t < a->n; t++) {
        memset(a->o + t * a->o_stride, 0, a->heads * a->r * sizeof *a->o);
        for (size_t h = 0; h < a->heads; h++) {
            a->softmax[2 * (t * a->heads + h)] = -INFINITY;
            a->softmax[2 * (t * a->heads + h) + 1] = 0;
        }
    }
    return a->n ? we_min(a->end, a->position + a->n) : 0;
}

void we_ref_mla_fold(float *o, float *softmax, const float *part, const float *part_softmax, size_t r)
{
    if (part_softmax[1] == 0) return;                       /* a sum is 0 only where nothing is seen */
    const float above = softmax[0] > part_softmax[0] ? softmax[0] : part_softmax[0];
    const float shrink = expf(softmax[0] - above), part_shrink = expf(part_softmax[0] - above);
    for (size_t i = 0; i < r; i++) o[i] = o[i] * shrink + part[i] * part_shrink;
    softmax[0] = above;
    softmax[1] = softmax[1] * shrink + part_softmax[1] * part_shrink;
}
