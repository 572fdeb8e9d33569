/* AVX2: KDA and MLA. */
#include <math.h>
#include "x86_avx2.h"
#ifdef WE_X86
WE_TARGET_PUSH("avx2,fma,f16c")

/* Lanes 8 j + l of a . b by FMA, then across lanes. */
EXPANDED float dot(const float *a, const float *b, size_t n)
{
    __m256 sum = _mm256_setzero_ps();
    for (size_t i = 0; i < n; i += 8) sum = _mm256_fmadd_ps(load_some(a + i, n - i), load_some(b + i, n - i), sum);
    return sum_lanes(sum);
}

/* -------------------------------------------------------------------- KDA ----
 * One sweep over a block of columns a token: it applies the update that the token before left, k d^T, and this token's
 * decay, and sums S^T k and S^T q; d and o follow. The last sweep stores nothing: the pass that writes the state
 * repeats its two operations and adds the last update. So every element sees the same operations in the same order
 * however the tokens are split among calls. */

enum { KDA_VECTORS = 4, KDA_ROWS = 128 };       /* a block: columns in vectors; rows of one that is copied */

typedef struct kda_block {      /* some columns of a state */
    float *S;
    size_t stride;              /* from row to row */
} kda_block;

typedef struct kda_update {     /* what the token before left for the columns of a block */
    const float *k;
    __m256       d[KDA_VECTORS];
} kda_update;

/* Row i of the state as the token's decay leaves it; n_vecs is a constant where this is expanded, `has_update` too. */
EXPANDED void kda_row(const float *S, size_t n_cols, float decay, const kda_update *update, size_t i,
                           __m256 *row, const size_t n_vecs, const int has_update)
{
    const __m256 decay_x8 = _mm256_set1_ps(decay);
    for (size_t v = 0; v < n_vecs; v++) {
        __m256 s = load_some(S + 8 * v, n_cols - 8 * v);
        if (has_update) s = _mm256_fmadd_ps(_mm256_set1_ps(update->k[i]), update->d[v], s);
        row[v] = _mm256_mul_ps(s, decay_x8);
    }
}

/* Token t over columns [j, j + n_cols), which lie in `from`: leaves its own update in *update and, if `store`, the
 * state as its decay left it in `to`. */
EXPANDED void kda_sweep(const we_kda_args *a, size_t t, size_t j, size_t n_cols, kda_block from, kda_block to,
                        kda_update *update, const size_t n_vecs, const int has_update, const int store)
{
    const float *q = a->q + t * a->qk_stride, *k = a->k + t * a->qk_stride, *decay = a->decay + t * a->qk_stride;
    const size_t dk = a->dk;                    /* a store could change *a, for all that compilers know */
    __m256 sk[KDA_VECTORS], sq[KDA_VECTORS], row[KDA_VECTORS];
    for (size_t v = 0; v < n_vecs; v++) sk[v] = sq[v] = _mm256_setzero_ps();
    for (size_t i = 0; i < dk; i++) {
        const __m256 k_i = _mm256_set1_ps(k[i]), q_i = _mm256_set1_ps(q[i]);
        kda_row(from.S + i * from.stride, n_cols, decay[i], update, i, row, n_vecs, has_update);
        for (size_t v = 0; v < n_vecs; v++) {
            if (store) store_some(to.S + i * to.stride + 8 * v, row[v], n_cols - 8 * v);
            sk[v] = _mm256_fmadd_ps(k_i, row[v], sk[v]);
            sq[v] = _mm256_fmadd_ps(q_i, row[v], sq[v]);
        }
    }
    const __m256 beta = _mm256_set1_ps(a->beta[t * a->beta_stride]), kq = _mm256_set1_ps(dot(k, q, a->dk));
    for (size_t v = 0; v < n_vecs; v++) {
        const size_t at = t * a->v_stride + j + 8 * v, n = n_cols - 8 * v;
        update->d[v] = _mm256_mul_ps(beta, _mm256_sub_ps(load_some(a->v + at, n), sk[v]));
        store_some(a->o + at, _mm256_fmadd_ps(kq, update->d[v], sq[v]), n);
    }
    update->k = k;
}

/* The state after the last token; `before` is the update that token met, `last` the one it leaves. */
EXPANDED void kda_finish(const we_kda_args *a, size_t j, size_t n_cols, kda_block from, const kda_update *before,
                         const kda_update *last, const size_t n_vecs)
{
    const float *decay = a->decay + (a->n - 1) * a->qk_stride;
    __m256 row[KDA_VECTORS];
    for (size_t i = 0; i < a->dk; i++) {
        kda_row(from.S + i * from.stride, n_cols, decay[i], before, i, row, n_vecs, 1);
        for (size_t v = 0; v < n_vecs; v++)
            store_some(a->S_out + i * a->dv + j + 8 * v,
                       _mm256_fmadd_ps(_mm256_set1_ps(last->k[i]), last->d[v], row[v]), n_cols - 8 * v);
    }
}

/* All tokens, two at least. Between them the block lies in a copy without gaps: its lines in S are as far apart as a
 * row, so they fall into a quarter of L1's sets, which do not hold them. */
EXPANDED void kda_columns(const we_kda_args *a, size_t j, size_t n_cols, const size_t n_vecs)
{
    float copy[KDA_ROWS * 8 * KDA_VECTORS];
    const kda_block first = {(float *)a->S_in + j, a->dv};
    kda_block block = {copy, 8 * n_vecs};
    kda_update update = {0}, before = {0};
    if (a->dk > KDA_ROWS) block = (kda_block){a->S_out + j, a->dv};
    kda_sweep(a, 0, j, n_cols, first, block, &update, n_vecs, 0, 1);
    for (size_t t = 1; t + 1 < a->n; t++) kda_sweep(a, t, j, n_cols, block, block, &update, n_vecs, 1, 1);
    before = update;
    kda_sweep(a, a->n - 1, j, n_cols, block, block, &update, n_vecs, 1, 0);
    kda_finish(a, j, n_cols, block, &before, &update, n_vecs);
}

/* ---- one token: the same operations, whole rows at a time, so that memory is read in its order ----
 *
 * Two passes over a head: sums, then the update that writes. Memory is busy in both: the one that writes fetches the
 * first three quarters of the next head, which commonly lies behind this one, the other the rest of its own. */

enum { STEP_COLUMNS = 256, STEP_ROWS = 4, LINE = 16 };      /* LINE: floats of a cache line */

/* Vector c of step_sums, n columns of it. */
EXPANDED void step_sums_vector(const float *S, size_t dv, size_t n, const __m256 decay[STEP_ROWS],
                               const __m256 k[STEP_ROWS], const __m256 q[STEP_ROWS], float *sk, float *sq,
                               const size_t n_rows)
{
    __m256 k_sum = _mm256_loadu_ps(sk), q_sum = _mm256_loadu_ps(sq);
    WE_UNROLL
    for (size_t r = 0; r < n_rows; r++) {
        const __m256 row = _mm256_mul_ps(load_some(S + r * dv, n), decay[r]);
        k_sum = _mm256_fmadd_ps(k[r], row, k_sum);
        q_sum = _mm256_fmadd_ps(q[r], row, q_sum);
    }
    _mm256_storeu_ps(sk, k_sum);
    _mm256_storeu_ps(sq, q_sum);
}

/* sk += S^T k, sq += S^T q over n_rows rows from i on, columns [j, j + n_cols); n_rows is a constant. */
EXPANDED void step_sums(const we_kda_args *a, size_t i, size_t j, size_t n_cols, float *sk, float *sq,
                        const size_t n_rows)
{
    const float *S = a->S_in + i * a->dv + j, *last_quarter = a->S_in + (3 * a->dk / 4 + i / 4) * a->dv + j;
    const size_t dv = a->dv;
    __m256 decay[STEP_ROWS], k[STEP_ROWS], q[STEP_ROWS];
    WE_UNROLL
    for (size_t r = 0; r < n_rows; r++) {
        decay[r] = _mm256_set1_ps(a->decay[i + r]);
        k[r] = _mm256_set1_ps(a->k[i + r]);
        q[r] = _mm256_set1_ps(a->q[i + r]);
    }
    size_t c = 0;
    for (; c + 8 <= n_cols; c += 8) {
        if (c % LINE == 0) _mm_prefetch((const char *)(last_quarter + c), _MM_HINT_T0);
        step_sums_vector(S + c, dv, 8, decay, k, q, sk + c, sq + c, n_rows);
    }
    if (c < n_cols) step_sums_vector(S + c, dv, n_cols - c, decay, k, q, sk + c, sq + c, n_rows);
}

/* S_out = diag(decay) S_in + k d^T. */
EXPANDED void step_update(const we_kda_args *a, size_t j, size_t n_cols, const float *d, const int stream)
{
    for (size_t i = 0; i < a->dk; i++) {
        const float *S = a->S_in + i * a->dv + j, *next = a->S_in + (a->dk + i / 4 * 3 + i % 4) * a->dv + j;
        float *to = a->S_out + i * a->dv + j;
        const __m256 decay = _mm256_set1_ps(a->decay[i]), k = _mm256_set1_ps(a->k[i]);
        size_t c = 0;
        for (; c + 8 <= n_cols; c += 8) {
            if (stream && c % LINE == 0 && i % 4 < 3) _mm_prefetch((const char *)(next + c), _MM_HINT_T0);
            const __m256 s = _mm256_fmadd_ps(k, _mm256_loadu_ps(d + c), _mm256_mul_ps(_mm256_loadu_ps(S + c), decay));
            if (stream) _mm256_stream_ps(to + c, s);
            else _mm256_storeu_ps(to + c, s);
        }
        if (c == n_cols) continue;
        const __m256 row = _mm256_mul_ps(load_some(S + c, n_cols - c), decay);
        store_some(to + c, _mm256_fmadd_ps(k, _mm256_loadu_ps(d + c), row), n_cols - c);
    }
}

static void kda_step(const we_kda_args *a, size_t j, size_t n_cols)
{
    float sk[STEP_COLUMNS] = {0}, sq[STEP_COLUMNS] = {0};
    size_t i = 0;
    for (; i + STEP_ROWS <= a->dk; i += STEP_ROWS) step_sums(a, i, j, n_cols, sk, sq, STEP_ROWS);
    for (; i < a->dk; i++) step_sums(a, i, j, n_cols, sk, sq, 1);
    const __m256 beta = _mm256_set1_ps(a->beta[0]), kq = _mm256_set1_ps(dot(a->k, a->q, a->dk));
    for (size_t c = 0; c < n_cols; c += 8) {
        const size_t n = n_cols - c;
        const __m256 d = _mm256_mul_ps(beta, _mm256_sub_ps(load_some(a->v + j + c, n), _mm256_loadu_ps(sk + c)));
        store_some(a->o + j + c, _mm256_fmadd_ps(kq, d, _mm256_loadu_ps(sq + c)), n);
        _mm256_storeu_ps(sk + c, d);
    }
    if (a->stream && n_cols % 8 == 0 && a->dv % 8 == 0 && (uintptr_t)(a->S_out + j) % 32 == 0) {
        step_update(a, j, n_cols, sk, 1);
        _mm_sfence();                           /* another thread may read the state after this call */
    } else {
        step_update(a, j, n_cols, sk, 0);
    }
}

void we_avx2_kda(const we_kda_args *a)
{
    enum { BLOCK = 8 * KDA_VECTORS };
    size_t j = 0;
    if (a->n == 0) {
        we_ref_kda(a);
        return;
    }
    for (; a->n == 1 && j < a->dv; j += STEP_COLUMNS) kda_step(a, j, we_min(STEP_COLUMNS, a->dv - j));
    for (; j + BLOCK <= a->dv; j += BLOCK) kda_columns(a, j, BLOCK, KDA_VECTORS);
    for (; j < a->dv; j += 8) kda_columns(a, j, we_min(8, a->dv - j), 1);
}

/* ---------------------------------------------------------------- latents ---- */

static const uint16_t *load_q8(float *y, const int8_t *codes, const uint16_t *scales, size_t n)
{
    for (size_t c0 = 0; c0 < n; c0 += WE_LATENT_GROUP, scales++) {
        const __m256 scale = _mm256_set1_ps(we_f16_value(*scales));
        const size_t c1 = we_min(c0 + WE_LATENT_GROUP, n);
        size_t c = c0;
        for (; c + 8 <= c1; c += 8) {
            const __m128i code = _mm_loadl_epi64((const __m128i *)(const void *)(codes + c));
            _mm256_storeu_ps(y + c, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(code))));
        }
        for (; c < c1; c++) y[c] = _mm256_cvtss_f32(scale) * (float)codes[c];
    }
    return scales;
}

void we_avx2_latent_load(float *y, const void *latent, size_t r, size_t rope, we_kv kv)
{
    if (kv == WE_KV_F32) {
        memcpy(y, latent, (r + rope) * sizeof *y);
    } else if (kv == WE_KV_F16) {
        we_avx2.f16_to_f32(y, (const uint16_t *)latent, r + rope);
    } else {
        const int8_t *codes = (const int8_t *)latent;
        const uint16_t *scales = (const uint16_t *)(const void *)(codes + r + rope + ((r + rope) & 1));
        scales = load_q8(y, codes, scales, r);
        load_q8(y + r, codes + r, scales, rope);
    }
}

/* -------------------------------------------------------------------- MLA ---- */

enum { MLA_HEADS = 4 };         /* heads that share loads of the latents */

typedef struct mla_tile {       /* the latents of one tile that a token sees */
    const float *latents;       /* [seen][width] */
    size_t       seen, width, r;
    float        scale;
} mla_tile;

/* Columns [i, i + n), n <= 8. */
EXPANDED void scores_step(const float *q, const float *c, size_t width, size_t i, size_t n, __m256 sum[][2],
                          const size_t n_heads, const size_t n_latents)
{
    __m256 c_x8[2];
    for (size_t k = 0; k < n_latents; k++) c_x8[k] = load_some(c + k * width + i, n);
    for (size_t h = 0; h < n_heads; h++) {
        const __m256 q_x8 = load_some(q + h * width + i, n);
        for (size_t k = 0; k < n_latents; k++) sum[h][k] = _mm256_fmadd_ps(q_x8, c_x8[k], sum[h][k]);
    }
}

/* score[h][s] for latents s and, with n_latents 2, s + 1; n_heads and n_latents are constants. */
EXPANDED void scores(const mla_tile *tile, const float *q, size_t s, float score[][WE_LATENT_TILE],
                          const size_t n_heads, const size_t n_latents)
{
    const size_t width = tile->width;
    const float *c = tile->latents + s * width;
    __m256 sum[MLA_HEADS][2];
    for (size_t h = 0; h < n_heads; h++)
        for (size_t k = 0; k < n_latents; k++) sum[h][k] = _mm256_setzero_ps();
    size_t i = 0;
    for (; i + 8 <= width; i += 8) scores_step(q, c, width, i, 8, sum, n_heads, n_latents);
    if (i < width) scores_step(q, c, width, i, width - i, sum, n_heads, n_latents);
    for (size_t h = 0; h < n_heads; h++)
        for (size_t k = 0; k < n_latents; k++) score[h][s + k] = sum_lanes(sum[h][k]) * tile->scale;
}

/* Scores become weights relative to the new maximum; returns what earlier sums shrink by. */
static float soften(float *score, size_t seen, float *largest, float *sum)
{
    __m256 most = _mm256_set1_ps(*largest), total = _mm256_setzero_ps();
    for (size_t s = seen; s % 8; s++) score[s] = -INFINITY;
    for (size_t s = 0; s < seen; s += 8) most = _mm256_max_ps(_mm256_loadu_ps(score + s), most);
    const float above = largest_lane(most);
    for (size_t s = 0; s < seen; s += 8) {
        const __m256 p = exp_x8(_mm256_sub_ps(_mm256_loadu_ps(score + s), _mm256_set1_ps(above)));
        _mm256_storeu_ps(score + s, p);
        total = _mm256_add_ps(total, p);
    }
    const float shrink = _mm256_cvtss_f32(exp_x8(_mm256_set1_ps(*largest - above)));
    *sum = *sum * shrink + sum_lanes(total);
    *largest = above;
    return shrink;
}

/* o[h][i ..] = shrink[h] o + sum over s of p[h][s] c(s), n_vecs vectors of n columns; n_heads, n_vecs are constants. */
EXPANDED void values(const mla_tile *tile, float *o, size_t i, size_t n, const float *shrink,
                          float p[][WE_LATENT_TILE], const size_t n_heads, const size_t n_vecs)
{
    __m256 sum[MLA_HEADS][2];
    for (size_t h = 0; h < n_heads; h++)
        for (size_t v = 0; v < n_vecs; v++)
            sum[h][v] = _mm256_mul_ps(_mm256_set1_ps(shrink[h]), load_some(o + h * tile->r + i + 8 * v, n - 8 * v));
    for (size_t s = 0; s < tile->seen; s++) {
        const float *c = tile->latents + s * tile->width + i;
        __m256 c_x8[2];
        for (size_t v = 0; v < n_vecs; v++) c_x8[v] = load_some(c + 8 * v, n - 8 * v);
        for (size_t h = 0; h < n_heads; h++)
            for (size_t v = 0; v < n_vecs; v++)
                sum[h][v] = _mm256_fmadd_ps(_mm256_set1_ps(p[h][s]), c_x8[v], sum[h][v]);
    }
    for (size_t h = 0; h < n_heads; h++)
        for (size_t v = 0; v < n_vecs; v++) store_some(o + h * tile->r + i + 8 * v, sum[h][v], n - 8 * v);
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
    for (; i + 16 <= tile->r; i += 16) values(tile, o, i, 16, shrink, score, n_heads, 2);
    for (; i < tile->r; i += 8) values(tile, o, i, we_min(8, tile->r - i), shrink, score, n_heads, 1);
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

void we_avx2_mla(const we_mla_args *a)
{
    const size_t width = a->r + a->rope, latent_bytes = we_latent_bytes(a->r, a->rope, a->kv);
    const size_t end = we_mla_start(a);
    float *decoded = a->work;
    float (*score)[WE_LATENT_TILE] = (float (*)[WE_LATENT_TILE])(void *)(decoded + WE_LATENT_TILE * width);
    for (size_t begin = a->begin; begin < end; begin += WE_LATENT_TILE) {
        const char *block = (const char *)a->blocks[begin / WE_LATENT_TILE];
        mla_tile tile = {(const float *)(const void *)block, 0, width, a->r, a->scale};
        for (size_t s = 0; a->kv != WE_KV_F32 && s < we_min(WE_LATENT_TILE, end - begin); s++)
            we_avx2_latent_load(decoded + s * width, block + s * latent_bytes, a->r, a->rope, a->kv);
        if (a->kv != WE_KV_F32) tile.latents = decoded;
        for (size_t t = begin > a->position ? begin - a->position : 0; t < a->n; t++) {
            tile.seen = we_min(WE_LATENT_TILE, a->position + t + 1 - begin);
            mla_token(a, &tile, t, score);
        }
    }
}

WE_TARGET_POP
#else
typedef int we_no_avx2_blocks;      /* ISO C wants a declaration in every file */
#endif
