/* Every loop over numbers of warp_embed, once per instruction set: the table of kernels.
 *
 * reference.c is the meaning; a file per instruction set replaces those kernels that it makes faster. All kernels
 *   - cannot fail: they allocate nothing, lock nothing and accept any size, also 0 where a size may be 0;
 *   - give the same bits for a token whether it comes alone or among others, and for any range of rows, heads or
 *     channels that a thread may be given (the order of every sum depends on the shapes alone);
 *   - leave the floating-point environment alone and count subnormal numbers as numbers.
 *
 * Letters are the papers': q k v g beta S o; dk, dv key and value width of a head; n tokens; H heads.
 * [n][stride] means row t starts at t * stride; sizes are in elements unless they end in _bytes. */
#ifndef WARP_EMBED_KERNELS_H
#define WARP_EMBED_KERNELS_H
#include <stddef.h>
#include <stdint.h>

/* ------------------------------------------------------------------ weights ---- */

typedef enum we_encoding {          /* codes of trunk.bin and of expert records */
    WE_F32 = 0, WE_BF16 = 1, WE_Q8G = 2, WE_Q4G = 3, WE_VQ3R = 4, WE_VQ2R = 5, WE_Q3G = 7, WE_VQ4P = 8,
    WE_MXFP4 = 9
} we_encoding;

/* A weight matrix W [rows][cols] as it lies in memory.
 *   F32, BF16   payload [rows][cols]
 *   Q8G         W[r][i] = scale[r][i / group] * int8[i]; rows padded with zeros to whole groups
 *   Q4G         W[r][i] = scale[r][i / group] * (nibble[i] - 8); even i in the low nibble
 *   Q3G         W[r][i] = scale[r][i / group] * (code3[i] - 4); a little-endian bit stream a row, one guard byte
 *   MXFP4       W[r][i] = 2^(scale[r][i / 32] - 127) * E2M1(nibble[i]); even i in the low nibble; E2M1: bit 3 is the sign,
 *               bits 0-2 count 0, 0.5, 1, 1.5, 2, 3, 4, 6; scale 255 is not finite, all below 253 are exact; group = 32
 *   VQ3R VQ2R   W[r][v vec_dim + d] = scale[r] * sum over stages s of book[s][index(r, v, s)][d]; a unit is `stages`
 *               bytes
 *   VQ4P        the same with four 6-bit indices in a unit of 3 bytes, stage 0 in the low bits
 * A VQ matrix stores its units [ceil(rows / 64)][cols / vec_dim][64][unit]; missing rows of the last block are zeros.
 * payload needs no alignment for Q3G and bytes, 4 bytes for F32, 2 for BF16; scales need 2. */
typedef struct we_matrix {
    int32_t         encoding;       /* we_encoding                                                     */
    uint32_t        rows, cols;
    uint32_t        group;          /* Q8G Q4G Q3G MXFP4 (32): inputs that share a scale               */
    size_t          row_bytes;      /* stride of a payload row; 0 for VQ                               */
    const void     *payload;
    const uint16_t *scales;         /* f16 [rows][ceil(cols / group)]; VQ: f16 [rows]; MXFP4: these are
                                     * bytes [rows][ceil(cols / 32)], read through a cast              */
    const float    *books;          /* VQ: [stages][entries][vec_dim], entries = 256, VQ4P 64          */
    uint32_t        vec_dim, stages;
} we_matrix;

/* ------------------------------------------------- activations as integers ---- */

/* Inputs x of n tokens, and beside them, when group != 0, the same as 16-bit integers: a group's largest magnitude
 * becomes 32639 = 127 * 256 + 127 (it splits into two signed bytes), so x ~ scale * q.
 *     scale = max|x| / 32639,  q = round to nearest even of x / scale;  an all-zero group has scale 0 and q 0,
 *     a group with inf or NaN a scale that is not finite and q 0: its products are not finite
 * q is padded with zeros to whole groups. q_halves is q with each group as its even, then its odd elements.
 * bias = -8 * (sum of the group's q): what the nibble's offset of 8 adds up to. */
typedef struct we_acts {
    const float *x;                 /* [n][x_stride]                               */
    int16_t     *q, *q_halves;      /* [n][q_stride]                               */
    float       *scale;             /* [n][scale_stride], one per group            */
    int32_t     *bias;              /* [n][scale_stride]                           */
    size_t       x_stride, q_stride, scale_stride;
    uint32_t     group;             /* 0: only x is valid                          */
} we_acts;

/* The group in which a matrix wants its inputs as integers, or 0 if it takes them as f32. */
static inline uint32_t we_integer_group(const we_matrix *w)
{
    if (w->encoding == WE_MXFP4) return 32;         /* doubled, its values are whole numbers up to 12 */
    const int integer = w->encoding == WE_Q8G || w->encoding == WE_Q4G;
    return integer && (w->group == 32 || w->group == 64 || w->group == 128) ? w->group : 0;
}

/* ------------------------------------------------------------ blocks' arguments ---- */

/* n tokens of one KDA head; see we_kernels.kda. All strides in floats. */
typedef struct we_kda_args {
    const float *S_in;              /* [dk][dv] before the first token             */
    float       *S_out;             /* [dk][dv] after the last; may be S_in        */
    const float *q, *k;             /* [n][qk_stride], unit length, q scaled       */
    const float *v;                 /* [n][v_stride]                               */
    const float *decay;             /* [n][qk_stride], exp(g), in [0, 1]           */
    const float *beta;              /* [n][beta_stride], in [0, 1]                 */
    float       *o;                 /* [n][v_stride]; may not overlap v            */
    size_t       n, dk, dv, qk_stride, v_stride, beta_stride;
    int          stream;            /* with n = 1, S_out may be written past the caches: they do not hold the state */
} we_kda_args;

typedef enum we_kv { WE_KV_F32, WE_KV_F16, WE_KV_Q8 } we_kv;    /* storage of the MLA latents */

#define WE_LATENT_TILE 64           /* positions in a block of latents and in a tile of the attention */

/* MLA attention of n tokens over a window of the latents of one layer; see we_kernels.mla. */
typedef struct we_mla_args {
    const float  *q;                /* [n][q_stride], `heads` times [r + rope]: absorbed query, then q_rope; not scaled */
    const void *const *blocks;      /* block b holds positions [64 b, 64 b + 64), as we_latent_bytes says */
    float        *o;                /* [n][o_stride], `heads` times [r]: sum of e^(score - largest) c  */
    float        *softmax;          /* [n][heads][2]: largest score, sum of e^(score - largest)        */
    float        *work;             /* we_mla_work(r, rope) floats, this thread's                      */
    size_t        n, position;      /* token t is at position + t and sees positions 0 .. position + t, */
    size_t        begin, end;       /* of these [begin, end): multiples of the tile; end may lie beyond the last token */
    size_t        heads, q_stride, o_stride, r, rope;
    float         scale;            /* (nope + rope)^-0.5                                              */
    we_kv         kv;
} we_mla_args;

/* A decoded tile and the scores of eight queries. */
static inline size_t we_mla_work(size_t r, size_t rope) { return WE_LATENT_TILE * (r + rope + 8); }

/* Bytes of one position's latent: f32 or f16 [r + rope], or int8 [r], int8 [rope], then f16 scales, one per 64
 * elements of each part (the last group of a part may be short). A block is WE_LATENT_TILE of them, one after
 * another. */
static inline size_t we_latent_bytes(size_t r, size_t rope, we_kv kv)
{
    if (kv == WE_KV_F32) return 4 * (r + rope);
    if (kv == WE_KV_F16) return 2 * (r + rope);
    return r + rope + 2 * ((r + 63) / 64 + (rope + 63) / 64) + ((r + rope) & 1);   /* scales on even offsets */
}

/* Grouped top-k of one layer; see we_kernels.route. */
typedef struct we_router {
    const float *bias;              /* [experts] e_score_correction_bias, or NULL  */
    uint32_t     experts, top_k, groups, top_groups;
    int          renormalize;
    float        scaling;
} we_router;

/* ---------------------------------------------------------------------- kernels ---- */

typedef struct we_kernels {
    const char *isa;                /* "reference", "avx2", "neon", "dotprod", "i8mm" */

    /* -- numbers -- */
    void (*f16_to_f32)(float *y, const uint16_t *x, size_t n);          /* exact, subnormals included      */
    void (*f32_to_f16)(uint16_t *y, const float *x, size_t n);          /* to nearest even                 */
    void (*bf16_to_f32)(float *y, const uint16_t *x, size_t n);
    void (*f32_to_bf16)(uint16_t *y, const float *x, size_t n);         /* to nearest even; NaN stays NaN  */
    /* y = exp(x), sigmoid(x) within 2 ulp for every float; y may be x. */
    void (*exp)(float *y, const float *x, size_t n);
    void (*sigmoid)(float *y, const float *x, size_t n);

    /* -- weights -- */
    /* y[r - row0][0 .. cols) = W[r][:] for rows [row0, row1). Every encoding. */
    void (*decode_rows)(const we_matrix *w, size_t row0, size_t row1, float *y, size_t y_stride);
    /* Encode rows x [rows][cols] by the format's rule: scale = max(|x|, 1e-8) / 127 (Q8G) or / 7 (Q4G) a group,
     * code = round-half-even(x / scale) clamped to [-127, 127] or [-8, 7], stored scale f16(scale). Rows are padded
     * with zero codes to whole groups (Q4G: group even). payload [rows][row_bytes], scales [rows][groups]. Same bytes
     * on every level. */
    void (*encode_q8g)(int8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols, size_t group);
    void (*encode_q4g)(uint8_t *payload, uint16_t *scales, const float *x, size_t rows, size_t cols, size_t group);
    /* Residual vector quantisation: for each of n vectors x [n][8], stage after stage, the entry with the smallest
     * squared distance to what is left (ties: lowest), which is then subtracted. A level may compare |c|^2 / 2 - x . c
     * instead, so that levels differ where two distances are equal but for rounding in f32. index [n][stages]; books
     * f32 [stages][entries][8], entries <= 256, stages <= 8; residual [n][8] = what is left at the end, or NULL. */
    void (*vq_encode)(uint8_t *index, float *residual, const float *x, const float *books, size_t n, unsigned stages,
                      unsigned entries);

    /* -- linear maps -- */
    /* Tokens [t0, t1): q, q_halves, scale and bias of a from a->x, for a->group; cols inputs a token. */
    void (*quantize)(const we_acts *a, size_t t0, size_t t1, size_t cols);
    /* y[t][r - row0] = sum over i of W[r][i] x[t][i], for rows [row0, row1) and n tokens; y [n][y_stride].
     * With we_integer_group(w) != 0 and a->group equal to it the inputs are a's integers: int32 inside a group, f32
     * over groups. Otherwise, and always when a->group is 0 (the router), f32 throughout. Error: c eps sum|w x|, where
     * with integers Q4G's |w| counts with its offset of 8 scales; integers also scale / 2 a group times sum|w|. */
    void (*matmul)(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y, size_t y_stride);
    /* The transposed product, f32: y[t][i] = sum over rows r in [row0, row1) of W[r][i] x[t][r - row0]. */
    void (*matmul_t)(const we_matrix *w, size_t row0, size_t row1, const float *x, size_t x_stride, size_t n, float *y,
                     size_t y_stride, float *row /* [cols] scratch */);

    /* -- elementwise and norms -- */
    void (*add)(float *y, const float *x, size_t n);                    /* y += x                          */
    void (*add_scaled)(float *y, float a, const float *x, size_t n);    /* y += a x                        */
    void (*divide)(float *y, const float *x, float a, size_t n);        /* y = x / a; y may be x           */
    void (*silu_mul)(float *y, const float *gate, const float *up, size_t n);   /* y = silu(gate) up; y may be either */
    /* y = beta tanh(gate / beta) sigmoid(gate) u,  u = linear tanh(up / linear), or up if linear is 0; beta > 0,
     * linear >= 0; y may be either. SiTU: silu between -beta and beta. */
    void (*situ_mul)(float *y, const float *gate, const float *up, float beta, float linear, size_t n);
    void (*mul_sigmoid)(float *y, const float *gate, size_t n);         /* y *= sigmoid(gate)              */
    /* y = x / sqrt(mean(x^2) + eps) * w, n elements; y may be x. The mean is summed in f64. */
    void (*rms_norm)(float *y, const float *x, const float *w, float eps, size_t n);
    /* y = rms_norm(x; w, eps) * sigmoid(gate); y may be x or gate. */
    void (*rms_norm_gated)(float *y, const float *x, const float *w, const float *gate, float eps, size_t n);
    /* x = x / sqrt(sum(x^2) + 1e-6) * scale, in place. */
    void (*l2_norm)(float *x, float scale, size_t n);
    /* Attention over the depth of a model: of n_rows >= 1 rows v_i = v + i stride, n elements each,
     *     y = sum over i of alpha_i v_i,  alpha = softmax over i of rms_norm(v_i; w, eps) . proj
     * The scores are summed in f64. alpha [n_rows] is written; y is none of the rows. */
    void (*mix_rows)(float *y, float *alpha, const float *v, size_t stride, size_t n_rows, const float *w,
                     const float *proj, float eps, size_t n);

    /* -- KDA -- */
    /* Causal depthwise convolution and SiLU of n tokens, channels [c0, c1):
     *     y[t][c] = silu( sum over j of taps[j][c] u[t - (K - 1) + j][c] ),   tap K - 1 meets the newest input
     * u [n][u_stride]; inputs before the first token are tail_in [K - 1][tail_stride], oldest first; tail_out
     * (not tail_in) receives the last K - 1. taps [K][taps_stride]. y [n][y_stride], not u. */
    void (*short_conv)(float *y, size_t y_stride, float *tail_out, const float *u, size_t u_stride,
                       const float *tail_in, size_t tail_stride, const float *taps, size_t taps_stride, size_t K,
                       size_t n, size_t c0, size_t c1);
    /* decay = exp(g),  g = -rate softplus(f + dt_bias), softplus(t) = log(1 + e^t); f, dt_bias, decay [n] of one head;
     * rate = exp(A_log). decay may be f. */
    void (*decay_softplus)(float *decay, const float *f, const float *dt_bias, float rate, size_t n);
    /* decay = exp(g),  g = lower sigmoid(rate (f + dt_bias)); lower < 0. */
    void (*decay_bounded)(float *decay, const float *f, const float *dt_bias, float rate, float lower, size_t n);
    /* n steps of one KDA head (Kimi Linear, arXiv 2510.26692):
     *     S <- diag(decay) S                     one rate per key channel
     *     d <- beta (v - S^T k)                  with the decayed S
     *     S <- S + k d^T
     *     o <- S^T q                             with the new S; computed as S_old^T q + (k . q) d
     * Columns of S never meet: a block of them stays in L1 while all tokens pass over it. */
    void (*kda)(const we_kda_args *a);

    /* -- MLA -- */
    /* One position's latent into a block: row of c [r] (normed) and rope key [rope] (raw), encoded as kv says.
     * q8: scale = max|x| / 127 of a group of 64, code = round-half-even(x / f16(scale)) in [-127, 127]. */
    void (*latent_store)(void *latent, const float *c, const float *key, size_t r, size_t rope, we_kv kv);
    void (*latent_load)(float *y /* [r + rope] */, const void *latent, size_t r, size_t rope, we_kv kv);
    /* o[t][h] / sum[t][h] = sum over s of alpha c(s),  alpha = softmax of the scores scale (q . [c(s); key(s)]) over the
     * s <= position + t in the window. Online softmax over tiles of WE_LATENT_TILE positions, tile edges at absolute
     * multiples. A token that sees nothing of the window has largest -inf, sum 0 and o 0. */
    void (*mla)(const we_mla_args *a);
    /* What `mla` gave for one token and head in a later window, folded into what it gave in the ones before: o [r] and
     * softmax {largest, sum} are then those of both windows. A part that saw nothing changes no bit. */
    void (*mla_fold)(float *o, float *softmax, const float *part, const float *part_softmax, size_t r);

    /* -- router -- */
    /* idx [top_k] ascending, weight [top_k]: s = sigmoid(logits); the top_k largest s + bias (ties: lower id) among the
     * top_groups groups with the largest sum of their two best; weight = s [/ (sum + 1e-20)] * scaling. work [experts].
     * Ids are distinct and in range whatever the logits. */
    void (*route)(const we_router *r, const float *logits, int32_t *idx, float *weight, float *work);

    /* -- logits -- */
    size_t (*argmax)(const float *x, size_t n);                 /* lowest index of the largest number; n >= 1     */
    double (*log_sum_exp)(const float *x, size_t n);            /* NaN if any is NaN; n >= 1                      */
} we_kernels;

/* The best table for this CPU, or the one that was forced. */
const we_kernels *we_kernels_active(void);
/* Use one level from now on: its name, or NULL for the best. -1 and no change if this CPU or build lacks it. */
int we_kernels_force(const char *isa);
/* Names of the levels that run here, best last, NULL-terminated. */
const char *const *we_kernels_levels(void);

#endif
