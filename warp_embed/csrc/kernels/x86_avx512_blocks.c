/* AVX-512: KDA and MLA. The same steps as AVX2's, on sixteen lanes; MLA takes eight heads at a time. */
#include <math.h>
#include "x86_avx512.h"
#ifdef WE_X86_AVX512
WE_TARGET_PUSH(WE_AVX512)

/* Lanes 16 j + l of a . b by FMA, then across lanes. */
EXPANDED float dot(const float *a, const float *b, size_t n)
{
    __m512 sum = _mm512_setzero_ps();
    for (size_t i = 0; i < n; i += 16) sum = _mm512_fmadd_ps(load_some(a + i, n - i), load_some(b + i, n - i), sum);
    return sum_lanes(sum);
}

/* -------------------------------------------------------------------- KDA ----
 * One sweep over a block of columns a token: it applies the update that the token before left, k d^T, and this token's
 * decay, and sums S^T k and S^T q; d and o follow. The last sweep stores nothing: the pass that writes the state
 * repeats its two operations and adds the last update. So every element sees the same operations in the same order
 * however the tokens are split among calls. */

enum { KDA_VECTORS = 8, KDA_BLOCK = 4 };  /* vectors of columns: with one token, with more */

typedef struct kda_update {     /* what the token before left for the columns of a block */
    const float *k;
    __m512       d[KDA_VECTORS];
} kda_update;

/* Row i of the state as the token's decay leaves it; n_vecs is a constant where this is expanded, `has_update` too. */
EXPANDED void kda_row(const float *S, size_t n_cols, float decay, const kda_update *update, size_t i,
                           __m512 *row, const size_t n_vecs, const int has_update)
{
    const __m512 decay_x16 = _mm512_set1_ps(decay);
    for (size_t v = 0; v < n_vecs; v++) {
        __m512 s = load_some(S + 16 * v, n_cols - 16 * v);
        if (has_update) s = _mm512_fmadd_ps(_mm512_set1_ps(update->k[i]), update->d[v], s);
        row[v] = _mm512_mul_ps(s, decay_x16);
    }
}

/* Token t over columns [j, j + n_cols): leaves its own update in *update. */
EXPANDED void kda_sweep(const we_kda_args *a, size_t t, size_t j, size_t n_cols, kda_update *update,
                             const size_t n_vecs, const int has_update, const int store)
{
    const float *q = a->q + t * a->qk_stride, *k = a->k + t * a->qk_stride, *decay = a->decay + t * a->qk_stride;
    const float *S = (has_update ? a->S_out : a->S_in) + j;
    const size_t dk = a->dk, dv = a->dv;        /* a store could change *a, for all that compilers know */
    float *to = a->S_out + j;
    __m512 sk[KDA_VECTORS], sq[KDA_VECTORS], row[KDA_VECTORS];
    WE_UNROLL
    for (size_t v = 0; v < n_vecs; v++) sk[v] = sq[v] = _mm512_setzero_ps();
    for (size_t i = 0; i < dk; i++) {
        const __m512 k_i = _mm512_set1_ps(k[i]), q_i = _mm512_set1_ps(q[i]);
        kda_row(S + i * dv, n_cols, decay[i], update, i, row, n_vecs, has_update);
        WE_UNROLL
        for (size_t v = 0; v < n_vecs; v++) {
            if (store) store_some(to + i * dv + 16 * v, row[v], n_cols - 16 * v);
            sk[v] = _mm512_fmadd_ps(k_i, row[v], sk[v]);
            sq[v] = _mm512_fmadd_ps(q_i, row[v], sq[v]);
        }
    }
    const __m512 beta = _mm512_set1_ps(a->beta[t * a->beta_stride]), kq = _mm512_set1_ps(dot(k, q, a->dk));
    for (size_t v = 0; v < n_vecs; v++) {
        const size_t at = t * a->v_stride + j + 16 * v, n = n_cols - 16 * v;
        update->d[v] = _mm512_mul_ps(beta, _mm512_sub_ps(load_some(a->v + at, n), sk[v]));
        store_some(a->o + at, _mm512_fmadd_ps(kq, update->d[v], sq[v]), n);
    }
    update->k = k;
}

/* The state after the last token; `before` is the update that token met, `last` the one it leaves. Of whole rows it
 * fetches the next head, which commonly lies behind this one: memory is read and written at the same time. */
EXPANDED void kda_finish(const we_kda_args *a, size_t j, size_t n_cols, const kda_update *before,
                              const kda_update *last, const size_t n_vecs, const int has_update, const int stream)
{
    const float *decay = a->decay + (a->n - 1) * a->qk_stride;
    const float *S = (has_update ? a->S_out : a->S_in) + j;
    __m512 row[KDA_VECTORS];
    for (size_t i = 0; i < a->dk; i++) {
        kda_row(S + i * a->dv, n_cols, decay[i], before, i, row, n_vecs, has_update);
        WE_UNROLL
        for (size_t v = 0; v < n_vecs; v++) {
            if (n_vecs == KDA_VECTORS)
                _mm_prefetch((const char *)(S + (a->dk + i) * a->dv + 16 * v), _MM_HINT_T0);
            float *to = a->S_out + i * a->dv + j + 16 * v;
            const __m512 s = _mm512_fmadd_ps(_mm512_set1_ps(last->k[i]), last->d[v], row[v]);
            if (stream) _mm512_stream_ps(to, s);
            else store_some(to, s, n_cols - 16 * v);
        }
    }
}

/* Many tokens, or a tail of columns. */
EXPANDED void kda_columns(const we_kda_args *a, size_t j, size_t n_cols, const size_t n_vecs)
{
    kda_update update = {0}, before = {0};
    if (a->n == 1) {
        kda_sweep(a, 0, j, n_cols, &update, n_vecs, 0, 0);
        if (a->stream && n_cols == 16 * n_vecs && a->dv % 16 == 0 && (uintptr_t)(a->S_out + j) % 64 == 0) {
            kda_finish(a, j, n_cols, &before, &update, n_vecs, 0, 1);
            _mm_sfence();                       /* another thread may read the state after this call */
        } else {
            kda_finish(a, j, n_cols, &before, &update, n_vecs, 0, 0);
        }
        return;
    }
    kda_sweep(a, 0, j, n_cols, &update, n_vecs, 0, 1);
    for (size_t t = 1; t + 1 < a->n; t++) kda_sweep(a, t, j, n_cols, &update, n_vecs, 1, 1);
    before = update;
    kda_sweep(a, a->n - 1, j, n_cols, &update, n_vecs, 1, 0);
    kda_finish(a, j, n_cols, &before, &update, n_vecs, 1, 0);
}

void we_avx512_kda(const we_kda_args *a)
{
    size_t j = 0;
    if (a->n == 0) {
        we_ref_kda(a);
        return;
    }
    /* One token: whole rows of a common head, so that memory is read in its order. */
    for (; a->n == 1 && j + 16 * KDA_VECTORS <= a->dv; j += 16 * KDA_VECTORS)
        kda_columns(a, j, 16 * KDA_VECTORS, KDA_VECTORS);
    for (; j + 16 * KDA_BLOCK <= a->dv; j += 16 * KDA_BLOCK) kda_columns(a, j, 16 * KDA_BLOCK, KDA_BLOCK);
    for (; j < a->dv; j += 16) kda_columns(a, j, we_min(16, a->dv - j), 1);
}

/* ---------------------------------------------------------------- latents ---- */

static const uint16_t *load_q8(float *y, const int8_t *codes, const uint16_t *scales, size_t n)
{
    for (size_t c0 = 0; c0 < n; c0 += WE_LATENT_GROUP, scales++) {
        const __m512 scale = _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(*scales)));
        const size_t c1 = we_min(c0 + WE_LATENT_GROUP, n);
        for (size_t c = c0; c < c1; c += 16) {
            const __m128i code = _mm_maskz_loadu_epi8(lanes_below(we_min(16, c1 - c)), codes + c);
            store_some(y + c, _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(code))), c1 - c);
        }
    }
    return scales;
}

void we_avx512_latent_load(float *y, const void *latent, size_t r, size_t rope, we_kv kv)
{
    if (kv == WE_KV_F32) {
        memcpy(y, latent, (r + rope) * sizeof *y);
    } else if (kv == WE_KV_F16) {
        const uint16_t *x = (const uint16_t *)latent;
        const size_t n = r + rope, whole = n / 16 * 16;
        for (size_t i = 0; i < whole; i += 16)
            _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(x + i))));
        we_avx2.f16_to_f32(y + whole, x + whole, n - whole);
    } else {
        const int8_t *codes = (const int8_t *)latent;
        const uint16_t *scales = (const uint16_t *)(const void *)(codes + r + rope + ((r + rope) & 1));
        scales = load_q8(y, codes, scales, r);
        load_q8(y + r, codes + r, scales, rope);
    }
}

/* -------------------------------------------------------------------- MLA ---- */

enum { MLA_HEADS = 8 };         /* heads that share loads of the latents */

typedef struct mla_tile {       /* the latents of one tile that a token sees */
    const float *latents;       /* [seen][width] */
    size_t       seen, width, r;
    float        scale;
} mla_tile;

/* Columns [i, i + n), n <= 16. */
EXPANDED void scores_step(const float *q, const float *c, size_t width, size_t i, size_t n, __m512 *sum,
                          const size_t n_heads, const size_t n_latents)
{
    __m512 c_x16[2];
    for (size_t k = 0; k < n_latents; k++) c_x16[k] = load_some(c + k * width + i, n);
    for (size_t h = 0; h < n_heads; h++) {
        __m512 q_x16 = load_some(q + h * width + i, n);
        IN_REGISTER(q_x16);             /* GCC would load it again for every product; loads are what limits them */
        for (size_t k = 0; k < n_latents; k++) sum[2 * h + k] = _mm512_fmadd_ps(q_x16, c_x16[k], sum[2 * h + k]);
    }
}

/* score[h][s] for latents s and, with n_latents 2, s + 1; n_heads and n_latents are constants. */
EXPANDED void scores(const mla_tile *tile, const float *q, size_t s, float score[][WE_LATENT_TILE],
                          const size_t n_heads, const size_t n_latents)
{
    const size_t width = tile->width;
    const float *c = tile->latents + s * width;
    __m512 sum[2 * MLA_HEADS];
    WE_UNROLL
    for (size_t i = 0; i < 2 * MLA_HEADS; i++) sum[i] = _mm512_setzero_ps();
    size_t i = 0;
    for (; i + 16 <= width; i += 16) scores_step(q, c, width, i, 16, sum, n_heads, n_latents);
    if (i < width) scores_step(q, c, width, i, width - i, sum, n_heads, n_latents);
    const __m512 total = _mm512_mul_ps(sums_of_x16(sum), _mm512_set1_ps(tile->scale));
    float totals[MLA_HEADS][2];
    _mm512_storeu_ps(totals[0], total);
    for (size_t h = 0; h < n_heads; h++)
        for (size_t k = 0; k < n_latents; k++) score[h][s + k] = totals[h][k];
}

/* Scores become weights relative to the new maximum; returns what earlier sums shrink by. */
static float soften(float *score, size_t seen, float *largest, float *sum)
{
    __m512 most = _mm512_set1_ps(*largest), total = _mm512_setzero_ps();
    for (size_t s = seen; s % 16; s++) score[s] = -INFINITY;
    for (size_t s = 0; s < seen; s += 16) most = _mm512_max_ps(_mm512_loadu_ps(score + s), most);
    const float above = largest_lane(most);
    for (size_t s = 0; s < seen; s += 16) {
        const __m512 p = exp_x16(_mm512_sub_ps(_mm512_loadu_ps(score + s), _mm512_set1_ps(above)));
        _mm512_storeu_ps(score + s, p);
        total = _mm512_add_ps(total, p);
    }
    const float shrink = _mm512_cvtss_f32(exp_x16(_mm512_set1_ps(*largest - above)));
    *sum = *sum * shrink + sum_lanes(total);
    *largest = above;
    return shrink;
}

/* o[h][i ..] = shrink[h] o + sum over s of p[h][s] c(s), n_vecs vectors of n columns; n_heads, n_vecs are constants. */
EXPANDED void values(const mla_tile *tile, float *o, size_t i, size_t n, const float *shrink,
                          float p[][WE_LATENT_TILE], const size_t n_heads, const size_t n_vecs)
{
    __m512 sum[MLA_HEADS][2];
    for (size_t h = 0; h < n_heads; h++)
        for (size_t v = 0; v < n_vecs; v++)
            sum[h][v] = _mm512_mul_ps(_mm512_set1_ps(shrink[h]), load_some(o + h * tile->r + i + 16 * v, n - 16 * v));
    for (size_t s = 0; s < tile->seen; s++) {
        const float *c = tile->latents + s * tile->width + i;
        __m512 c_x16[2];
        for (size_t v = 0; v < n_vecs; v++) c_x16[v] = load_some(c + 16 * v, n - 16 * v);
        for (size_t h = 0; h < n_heads; h++)
            for (size_t v = 0; v < n_vecs; v++)
                sum[h][v] = _mm512_fmadd_ps(_mm512_set1_ps(p[h][s]), c_x16[v], sum[h][v]);
    }
    for (size_t h = 0; h < n_heads; h++)
        for (size_t v = 0; v < n_vecs; v++) store_some(o + h * tile->r + i + 16 * v, sum[h][v], n - 16 * v);
}

/* Some heads of one token by one tile; softmax [n_heads][largest, sum]; n_heads is a constant. */
EXPANDED void mla_heads(const mla_tile *tile, const float *q, float *o, float *softmax,
                             float score[][WE_LATENT_TILE], const size_t n_heads)
{
    float shrink[MLA_HEADS];
    size_t s = 0, i = 0;
    for (; s + 2 <= tile->seen; s += 2) scores(tile, q, s, score, n_heads, 2);
    if (s < tile->seen) scores(tile, q, s, score, n_heads, 1);
    for (size_t h = 0; h < n_heads; h++)
        shrink[h] = soften(score[h], tile->seen, softmax + 2 * h, softmax + 2 * h + 1);
    for (; i + 32 <= tile->r; i += 32) values(tile, o, i, 32, shrink, score, n_heads, 2);
    for (; i < tile->r; i += 16) values(tile, o, i, we_min(16, tile->r - i), shrink, score, n_heads, 1);
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

void we_avx512_mla(const we_mla_args *a)
{
    const size_t width = a->r + a->rope, latent_bytes = we_latent_bytes(a->r, a->rope, a->kv);
    const size_t end = we_mla_start(a);
    float *decoded = a->work;
    float (*score)[WE_LATENT_TILE] = (float (*)[WE_LATENT_TILE])(void *)(decoded + WE_LATENT_TILE * width);
    for (size_t begin = a->begin; begin < end; begin += WE_LATENT_TILE) {
        const char *block = (const char *)a->blocks[begin / WE_LATENT_TILE];
        mla_tile tile = {(const float *)(const void *)block, 0, width, a->r, a->scale};
        for (size_t s = 0; a->kv != WE_KV_F32 && s < we_min(WE_LATENT_TILE, end - begin); s++)
            we_avx512_latent_load(decoded + s * width, block + s * latent_bytes, a->r, a->rope, a->kv);
        if (a->kv != WE_KV_F32) tile.latents = decoded;
        for (size_t t = begin > a->position ? begin - a->position : 0; t < a->n; t++) {
            tile.seen = we_min(WE_LATENT_TILE, a->position + t + 1 - begin);
            mla_token(a, &tile, t, score);
        }
    }
}

WE_TARGET_POP
#else
typedef int we_no_avx512_blocks;    /* ISO C wants a declaration in every file */
#endif
