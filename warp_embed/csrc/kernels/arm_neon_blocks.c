/* NEON: KDA and MLA. */
#include <math.h>
#include "arm_neon.h"
#ifdef WE_ARM64

/* Lanes 4 j + l of a . b by FMA, then across lanes. */
static float dot(const float *a, const float *b, size_t n)
{
    float32x4_t sum = vdupq_n_f32(0);
    for (size_t i = 0; i < n; i += 4) sum = vfmaq_f32(sum, load_some(a + i, n - i), load_some(b + i, n - i));
    return sum_lanes(sum);
}

/* -------------------------------------------------------------------- KDA ----
 * One sweep over a block of columns a token: it applies the update that the token before left, k d^T, and this token's
 * decay, and sums S^T k and S^T q; d and o follow. The last sweep stores nothing: the pass that writes the state
 * repeats its two operations and adds the last update. So every element sees the same operations in the same order
 * however the tokens are split among calls.
 *
 * A block is sixteen columns: a cache line, and the four sets of four vectors leave half of the registers free. */

enum { KDA_VECTORS = 4 };       /* columns of a block, in vectors */

typedef struct kda_update {     /* what the token before left for the columns of a block */
    const float *k;
    float32x4_t  d[KDA_VECTORS];
} kda_update;

/* Row i of the state as the token's decay leaves it; n_vecs is a constant where this is expanded, `has_update` too. */
static inline void kda_row(const float *S, size_t n_cols, float decay, const kda_update *update, size_t i,
                           float32x4_t *row, const size_t n_vecs, const int has_update)
{
    for (size_t v = 0; v < n_vecs; v++) {
        float32x4_t s = n_vecs > 1 ? vld1q_f32(S + 4 * v) : load_some(S, n_cols);
        if (has_update) s = vfmaq_f32(s, vdupq_n_f32(update->k[i]), update->d[v]);
        row[v] = vmulq_f32(s, vdupq_n_f32(decay));
    }
}

static inline void kda_store(float *S, const float32x4_t *row, size_t n_cols, const size_t n_vecs)
{
    for (size_t v = 0; v < n_vecs; v++) {
        if (n_vecs > 1) vst1q_f32(S + 4 * v, row[v]);
        else store_some(S, row[v], n_cols);
    }
}

/* Token t over columns [j, j + n_cols): leaves its own update in *update. */
static inline void kda_sweep(const we_kda_args *a, size_t t, size_t j, size_t n_cols, kda_update *update,
                             const size_t n_vecs, const int has_update, const int store)
{
    const float *q = a->q + t * a->qk_stride, *k = a->k + t * a->qk_stride, *decay = a->decay + t * a->qk_stride;
    const float *S = (has_update ? a->S_out : a->S_in) + j;
    float32x4_t sk[KDA_VECTORS], sq[KDA_VECTORS], row[KDA_VECTORS];
    for (size_t v = 0; v < n_vecs; v++) sk[v] = sq[v] = vdupq_n_f32(0);
    for (size_t i = 0; i < a->dk; i++) {
        kda_row(S + i * a->dv, n_cols, decay[i], update, i, row, n_vecs, has_update);
        if (store) kda_store(a->S_out + i * a->dv + j, row, n_cols, n_vecs);
        for (size_t v = 0; v < n_vecs; v++) {
            sk[v] = vfmaq_f32(sk[v], vdupq_n_f32(k[i]), row[v]);
            sq[v] = vfmaq_f32(sq[v], vdupq_n_f32(q[i]), row[v]);
        }
    }
    const float32x4_t beta = vdupq_n_f32(a->beta[t * a->beta_stride]), kq = vdupq_n_f32(dot(k, q, a->dk));
    for (size_t v = 0; v < n_vecs; v++) {
        const size_t at = t * a->v_stride + j + 4 * v, n = n_cols - 4 * v;
        update->d[v] = vmulq_f32(beta, vsubq_f32(load_some(a->v + at, n), sk[v]));
        store_some(a->o + at, vfmaq_f32(sq[v], kq, update->d[v]), n);
    }
    update->k = k;
}

/* The state after the last token; `before` is the update that token met, `last` the one it leaves. */
static inline void kda_finish(const we_kda_args *a, size_t j, size_t n_cols, const kda_update *before,
                              const kda_update *last, const size_t n_vecs, const int has_update)
{
    const float *decay = a->decay + (a->n - 1) * a->qk_stride;
    const float *S = (has_update ? a->S_out : a->S_in) + j;
    float32x4_t row[KDA_VECTORS];
    for (size_t i = 0; i < a->dk; i++) {
        kda_row(S + i * a->dv, n_cols, decay[i], before, i, row, n_vecs, has_update);
        for (size_t v = 0; v < n_vecs; v++) row[v] = vfmaq_f32(row[v], vdupq_n_f32(last->k[i]), last->d[v]);
        kda_store(a->S_out + i * a->dv + j, row, n_cols, n_vecs);
    }
}

static inline void kda_columns(const we_kda_args *a, size_t j, size_t n_cols, const size_t n_vecs)
{
    kda_update update = {0}, before = {0};
    if (a->n == 1) {
        kda_sweep(a, 0, j, n_cols, &update, n_vecs, 0, 0);
        kda_finish(a, j, n_cols, &before, &update, n_vecs, 0);
        return;
    }
    kda_sweep(a, 0, j, n_cols, &update, n_vecs, 0, 1);
    for (size_t t = 1; t + 1 < a->n; t++) kda_sweep(a, t, j, n_cols, &update, n_vecs, 1, 1);
    before = update;
    kda_sweep(a, a->n - 1, j, n_cols, &update, n_vecs, 1, 0);
    kda_finish(a, j, n_cols, &before, &update, n_vecs, 1);
}

void we_neon_kda(const we_kda_args *a)
{
    enum { BLOCK = 4 * KDA_VECTORS };
    size_t j = 0;
    if (a->n == 0) {
        we_ref_kda(a);
        return;
    }
    for (; j + BLOCK <= a->dv; j += BLOCK) kda_columns(a, j, BLOCK, KDA_VECTORS);
    for (; j < a->dv; j += 4) kda_columns(a, j, we_min(4, a->dv - j), 1);
}

/* ---------------------------------------------------------------- latents ---- */

static const uint16_t *load_q8(float *y, const int8_t *codes, const uint16_t *scales, size_t n)
{
    for (size_t c0 = 0; c0 < n; c0 += WE_LATENT_GROUP, scales++) {
        const float scale = we_f16_value(*scales);
        const size_t c1 = we_min(c0 + WE_LATENT_GROUP, n);
        size_t c = c0;
        for (; c + 8 <= c1; c += 8) {
            const int16x8_t code = vmovl_s8(vld1_s8(codes + c));
            vst1q_f32(y + c, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(code))), scale));
            vst1q_f32(y + c + 4, vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(code)), scale));
        }
        for (; c < c1; c++) y[c] = scale * (float)codes[c];
    }
    return scales;
}

void we_neon_latent_load(float *y, const void *latent, size_t r, size_t rope, we_kv kv)
{
    if (kv == WE_KV_F32) {
        memcpy(y, latent, (r + rope) * sizeof *y);
    } else if (kv == WE_KV_F16) {
        we_neon_f16_to_f32(y, (const uint16_t *)latent, r + rope);
    } else {
        const int8_t *codes = (const int8_t *)latent;
        const uint16_t *scales = (const uint16_t *)(const void *)(codes + r + rope + ((r + rope) & 1));
        scales = load_q8(y, codes, scales, r);
        load_q8(y + r, codes + r, scales, rope);
    }
}

/* -------------------------------------------------------------------- MLA ---- */

enum { MLA_HEADS = 4 };         /* heads that share loads of the latents; also latents that share loads of queries */

typedef struct mla_tile {       /* the latents of one tile that a token sees */
    const float *latents;       /* [seen][width] */
    size_t       seen, width, r;
    float        scale;
} mla_tile;

/* sum[h][k] += q_h . c_k over n columns, a vector at most; n_heads and n_latents are constants, mostly n too. */
static inline void score_step(float32x4_t sum[][4], const float *q, const float *c, size_t width, size_t n,
                              const size_t n_heads, const size_t n_latents)
{
    float32x4_t c_x4[4];
    for (size_t k = 0; k < n_latents; k++) c_x4[k] = load_some(c + k * width, n);
    for (size_t h = 0; h < n_heads; h++) {
        const float32x4_t q_x4 = load_some(q + h * width, n);
        for (size_t k = 0; k < n_latents; k++) sum[h][k] = vfmaq_f32(sum[h][k], q_x4, c_x4[k]);
    }
}

/* score[h][s .. s + n_latents); n_heads and n_latents are constants. */
static inline void scores(const mla_tile *tile, const float *q, size_t s, float score[][WE_LATENT_TILE],
                          const size_t n_heads, const size_t n_latents)
{
    const size_t width = tile->width;
    const float *c = tile->latents + s * width;
    float32x4_t sum[MLA_HEADS][4];
    size_t i = 0;
    for (size_t h = 0; h < n_heads; h++)
        for (size_t k = 0; k < n_latents; k++) sum[h][k] = vdupq_n_f32(0);
    for (; i + 4 <= width; i += 4) score_step(sum, q + i, c + i, width, 4, n_heads, n_latents);
    if (i < width) score_step(sum, q + i, c + i, width, width - i, n_heads, n_latents);
    for (size_t h = 0; h < n_heads; h++)
        for (size_t k = 0; k < n_latents; k++) score[h][s + k] = sum_lanes(sum[h][k]) * tile->scale;
}

/* Scores become weights relative to the new maximum; returns what earlier sums shrink by. */
static float soften(float *score, size_t seen, float *largest, float *sum)
{
    float above = *largest, shrink;
    for (size_t s = 0; s < seen; s++) above = score[s] > above ? score[s] : above;
    for (size_t s = seen; s % 4; s++) score[s] = -INFINITY;
    float32x4_t total = vdupq_n_f32(0);
    for (size_t s = 0; s < seen; s += 4) {
        const float32x4_t p = exp_x4(vsubq_f32(vld1q_f32(score + s), vdupq_n_f32(above)));
        vst1q_f32(score + s, p);
        total = vaddq_f32(total, p);
    }
    shrink = vgetq_lane_f32(exp_x4(vdupq_n_f32(*largest - above)), 0);
    *sum = *sum * shrink + sum_lanes(total);
    *largest = above;
    return shrink;
}

/* o[h][i ..] = shrink[h] o + sum over s of p[h][s] c(s), n_vecs vectors of n columns; n_heads, n_vecs are constants. */
static inline void values(const mla_tile *tile, float *o, size_t i, size_t n, const float *shrink,
                          float p[][WE_LATENT_TILE], const size_t n_heads, const size_t n_vecs)
{
    float32x4_t sum[MLA_HEADS][4];
    for (size_t h = 0; h < n_heads; h++)
        for (size_t v = 0; v < n_vecs; v++)
            sum[h][v] = vmulq_n_f32(load_some(o + h * tile->r + i + 4 * v, n - 4 * v), shrink[h]);
    for (size_t s = 0; s < tile->seen; s++) {
        const float *c = tile->latents + s * tile->width + i;
        float32x4_t c_x4[4];
        for (size_t v = 0; v < n_vecs; v++) c_x4[v] = load_some(c + 4 * v, n - 4 * v);
        for (size_t h = 0; h < n_heads; h++)
            for (size_t v = 0; v < n_vecs; v++) sum[h][v] = vfmaq_f32(sum[h][v], vdupq_n_f32(p[h][s]), c_x4[v]);
    }
    for (size_t h = 0; h < n_heads; h++)
        for (size_t v = 0; v < n_vecs; v++) store_some(o + h * tile->r + i + 4 * v, sum[h][v], n - 4 * v);
}

/* Some heads of one token by one tile; softmax [n_heads][largest, sum]; n_heads is a constant. */
static inline void mla_heads(const mla_tile *tile, const float *q, float *o, float *softmax,
                             float score[][WE_LATENT_TILE], const size_t n_heads)
{
    float shrink[MLA_HEADS];
    size_t s = 0, i = 0;
    for (; s + 4 <= tile->seen; s += 4) scores(tile, q, s, score, n_heads, 4);
    for (; s < tile->seen; s++) scores(tile, q, s, score, n_heads, 1);
    for (size_t h = 0; h < n_heads; h++)
        shrink[h] = soften(score[h], tile->seen, softmax + 2 * h, softmax + 2 * h + 1);
    for (; i + 16 <= tile->r; i += 16) values(tile, o, i, 16, shrink, score, n_heads, 4);
    for (; i < tile->r; i += 4) values(tile, o, i, we_min(4, tile->r - i), shrink, score, n_heads, 1);
}

/* All heads of token t by one tile. */
static void mla_token(const we_mla_args *a, const mla_tile *tile, size_t t, float score[][WE_LATENT_TILE])
{
    const float *q = a->q + t * a->q_stride;
    float *o = a->o + t * a->o_stride, *softmax = a->softmax + 2 * t * a->heads;
    size_t h = 0;
    for (; h + MLA_HEADS <= a->heads; h += MLA_HEADS)
        mla_heads(tile, q + h * tile->width, o + h * a->r, softmax + 2 * h, score, MLA_HEADS);
    for (; h < a->heads; h++) mla_heads(tile, q + h * tile->width, o + h * a->r, softmax + 2 * h, score, 1);
}

void we_neon_mla(const we_mla_args *a)
{
    const size_t width = a->r + a->rope, latent_bytes = we_latent_bytes(a->r, a->rope, a->kv);
    const size_t end = we_mla_start(a);
    float *decoded = a->work;
    float (*score)[WE_LATENT_TILE] = (float (*)[WE_LATENT_TILE])(void *)(decoded + WE_LATENT_TILE * width);
    for (size_t begin = a->begin; begin < end; begin += WE_LATENT_TILE) {
        const char *block = (const char *)a->blocks[begin / WE_LATENT_TILE];
        mla_tile tile = {(const float *)(const void *)block, 0, width, a->r, a->scale};
        for (size_t s = 0; a->kv != WE_KV_F32 && s < we_min(WE_LATENT_TILE, end - begin); s++)
            we_neon_latent_load(decoded + s * width, block + s * latent_bytes, a->r, a->rope, a->kv);
        if (a->kv != WE_KV_F32) tile.latents = decoded;
        for (size_t t = begin > a->position ? begin - a->position : 0; t < a->n; t++) {
            tile.seen = we_min(WE_LATENT_TILE, a->position + t + 1 - begin);
            mla_token(a, &tile, t, score);
        }
    }
}

#else
typedef int we_no_neon_blocks;      /* ISO C wants a declaration in every file */
#endif
