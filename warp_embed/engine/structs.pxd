"""Every struct of the forward pass, with every shape. Letters: n tokens of a pass, H heads and D width of KDA,
C = H D, K taps, nh heads of MLA, r latent, I and X inner and outer width of an expert, E experts, k chosen, B the most
blocks of attention residuals."""
from libc.stdint cimport int32_t, uint8_t, uint32_t

from warp_embed._kernels cimport we_acts, we_kernels, we_kv, we_matrix, we_pool, we_pool_api, we_router
from warp_embed._kernels cimport we_fault, we_status
from warp_embed._experts cimport we_cache, we_store_api, we_want
from warp_embed._store cimport we_record_layout

cdef enum:
    MLA_SEGMENT = 8192                  # positions whose attention is summed by itself; segments are then folded in order
    MLA_TOKENS = 32
    MLA_HEADS = 8                       # tokens and heads of a pass that a thread attends for at a time


cdef struct Config:
    size_t n_layers, hidden, vocab
    float eps
    size_t H, D, C, K                   # KDA
    float decay_lower                   # bounded decay gate; 0: softplus gate
    bint stream_state                   # S is larger than caches: one token writes it past them
    size_t nh, r, nope, rope, v         # MLA
    size_t q_rank                       # of factorised queries; 0: one matrix
    float mla_scale                     # (nope + rope)^-0.5
    we_kv kv
    size_t block_layers, B              # attention residuals: layers of a block, blocks in all; 0: none
    float situ_beta, situ_linear        # SiTU's bounds; situ_beta 0: SiLU
    size_t dense_inter
    size_t E, k, I, X, shared_inter     # mixture of experts
    bint latent                         # X is not the hidden width: experts work on a projection
    we_router router                    # all but the layer's bias
    size_t context                      # positions a state can hold
    size_t chunk                        # most tokens of one pass
    size_t threads


cdef struct KdaWeights:
    const we_matrix *q_proj
    const we_matrix *k_proj
    const we_matrix *v_proj             # [C, hidden]
    const we_matrix *f_a
    const we_matrix *f_b                # [D, hidden], [C, D]: decay
    const we_matrix *g_a                # the same for the output gate, or NULL: then one matrix of full rank,
    const we_matrix *g_b                # [C, hidden]
    const we_matrix *b_proj             # [H, hidden]: write strength
    const we_matrix *o_proj             # [hidden, C]
    float *taps                         # [K][3 C], q k v side by side
    float *rate                         # [H] exp(A_log)
    const float *dt_bias                # [C]
    const float *o_norm                 # [D]


cdef struct MlaWeights:
    const we_matrix *q_a                # [q_rank, hidden] or NULL: q_proj takes the layer's input
    const float *q_a_norm               # [q_rank]
    const we_matrix *q_proj             # [nh (nope + rope), q_rank or hidden]
    const we_matrix *kv_a               # [r + rope, hidden]
    const we_matrix *kv_b               # [nh (nope + v), r]: per head W^K, then W^V
    const we_matrix *gate               # [nh v, hidden] or NULL: no output gate
    const we_matrix *o_proj             # [hidden, nh v]
    const float *kv_a_norm              # [r]


cdef struct MixWeights:                 # attention over the depth; unused without attention residuals
    const float *norm
    const float *proj                   # [hidden]


cdef struct FfnWeights:
    const we_matrix *gate
    const we_matrix *up                 # [inter, width]
    const we_matrix *down               # [width, inter]


cdef struct MoeWeights:
    const we_matrix *router             # [E, hidden]
    const float *bias                   # [E] or NULL
    const we_matrix *latent_down        # [X, hidden], [hidden, X]; NULL: experts take the layer's input itself
    const we_matrix *latent_up
    const float *latent_norm            # [X] or NULL
    FfnWeights shared
    int index                           # among the MoE layers: row of a routing trace


cdef struct LayerWeights:
    const float *input_norm             # [hidden]
    const float *post_norm              # [hidden]
    MixWeights attention_mix
    MixWeights feed_forward_mix
    bint is_kda, is_moe
    KdaWeights kda                      # when is_kda
    MlaWeights mla                      # when not
    MoeWeights moe                      # when is_moe
    FfnWeights ffn                      # when not


cdef struct Weights:
    const we_matrix *embed              # [vocab, hidden]
    const we_matrix *unembed            # [vocab, hidden]
    const float *norm                   # [hidden]
    MixWeights mix
    LayerWeights *layers


cdef struct LayerState:
    # KDA: two halves; a pass reads half [parity] and writes the other, and commit flips the parity
    float *S[2]                         # [H][D][D]
    float *tail[2]                      # [K - 1][3 C], oldest first
    # MLA: blocks of WE_LATENT_TILE latents, allocated as positions need them; forks share them, writers own them
    void **blocks                       # [ceil(context / WE_LATENT_TILE)]
    size_t n_blocks


cdef struct StateParts:                 # one conversation
    LayerState *layers                  # [n_layers]
    float *hidden[2]                    # [hidden] last normed vector, by parity; logits are recomputed from it
    float *x                            # [B + 1][hidden] residual stream of a token that was paused
    float *z                            # [X] of one paused between two experts: their input, sums so far, route
    float *y                            # [max(hidden, X)]
    float *shared_y                     # [hidden]
    int32_t *idx                        # [k]
    float *weight                       # [k]
    size_t half_floats                  # a half: S and tail of every KDA layer, then hidden


cdef struct Scratch:                    # one per model; a pass at a time
    float *x                            # [B + 1][n][hidden] residual stream of a prefill pass
    float *h                            # [n][hidden] normed
    float *y                            # [n][hidden] a block's result
    we_acts in_acts                     # of h
    float *alpha                        # [threads][B + 1]
    # KDA, sharing memory with MLA and the feed-forward part
    float *qkv                          # [n][3 C] before the convolution
    float *conv[3]                      # [n][C] after it: q, k, v
    float *low_f                        # [n][D]
    float *low_g                        # [n][D]
    float *decay                        # [n][C]
    float *gate                         # [n][C]
    float *beta                         # [n][H]
    we_acts f_acts
    we_acts g_acts
    # MLA
    float *q_low                        # [n][q_rank]
    we_acts q_acts
    float *q                            # [n][nh (nope + rope)]
    float *kv                           # [n][r + rope]
    float *absorbed                     # [n][nh][r + rope]
    float *attended                     # [n][nh][r]
    we_acts head_acts                   # of attended, each head's groups by themselves
    float *head_gate                    # [n][nh v]
    float *work                         # [threads][work_stride] of we_kernels.mla, then what softmax says
    size_t work_stride
    size_t softmax_at                   # in work: [MLA_TOKENS][MLA_HEADS][2]
    # contexts of several segments: what one of them gave, of all segments for one token, of one in each thread for more
    float *part                         # [segments][nh][r]    or [threads][MLA_TOKENS][MLA_HEADS][r]
    float *part_softmax                 # [segments][nh][2]    or [threads][MLA_TOKENS][MLA_HEADS][2]
    # both
    float *o                            # [n][max(C, nh v)]
    we_acts o_acts
    # feed-forward
    float *z                            # [n][X] what the routed experts take: h, or its latent
    float *shared_y                     # [n][hidden] the shared experts' result
    float *inner_gate                   # [n][inter]
    float *inner_up                     # [n][inter]
    we_acts inner_acts
    float *router_logits                # [n][E]
    float *router_work                  # [threads][E]
    int32_t *idx                        # [n][k] ascending
    float *weight                       # [n][k]
    # (token, expert) pairs in ascending order of expert, then token
    size_t *first                       # [E + 1] first pair of an expert
    int32_t *pair_token                 # [n k]
    float *pair_weight                  # [n k]
    size_t pair_rows                    # pairs that are multiplied at a time
    float *pair_x                       # [pair_rows][X]
    float *pair_y                       # [pair_rows][X]
    float *pair_gate                    # [pair_rows][I]
    float *pair_up                      # [pair_rows][I]
    we_acts pair_acts                   # of pair_x
    we_acts pair_inner_acts             # of pair_gate
    we_want *wants                      # [E] records of a layer, ascending: [n_done, n_pinned) are pinned
    size_t n_done, n_pinned, n_wants
    float *ahead_h                      # [AHEAD_TOKENS][hidden] a later router's input, as far as one knows
    float *ahead_logits                 # [AHEAD_TOKENS][E]
    int32_t *ahead_idx                  # [k]
    float *ahead_weight                 # [k]
    float *ahead_score                  # [E]
    we_want *batch                      # [E] records that are computed with together
    size_t n_batch
    we_matrix *experts                  # [E][3] views of pinned records
    we_acts *expert_acts                # [E][2] slices of pair_acts and pair_inner_acts


cdef struct Job:                        # y[t][i] = W[row0 + i] x[t]
    const we_matrix *w
    we_acts a                           # as the matrix takes it: group 0 for f32
    float *y
    size_t n, y_stride
    size_t first                        # row blocks of the jobs before


cdef struct Linear:                     # products that may run at the same time
    const we_kernels *K
    const we_pool_api *pool_api
    we_pool *pool
    Job *jobs                           # [capacity]
    size_t n_jobs, capacity
    size_t blocks                       # row blocks of all jobs
    size_t work                         # multiply-adds of all jobs


cdef enum:
    AHEAD_MOST = 64                     # experts of a layer that are guessed at most
    MARGINS = 64                        # classes of guesses, by how clearly an expert was chosen
    AHEAD_TOKENS = 32                   # tokens of a prompt that a guess is made from
    EARLY = 0                           # when: before the feed-forward half of the layer before,
    LATE = 1                            # or before the layer's own attention


cdef struct Guess:
    int layer                           # that it is about; -1: none
    size_t n
    uint32_t experts[64]                # [AHEAD_MOST] most likely first
    uint8_t margin[64]                  # [AHEAD_MOST] class
    uint8_t missing[64]                 # [AHEAD_MOST] not in the cache when they were guessed


cdef struct Lookahead:                  # what was learned about guesses; kept from pass to pass. [2]s: of one token, of many
    double precision[2][2][64]          # [2][EARLY, LATE][MARGINS] how often a class's missing are right
    double missed[2][2]                 # [2][EARLY, LATE] missing records a guess, on average
    double threshold                    # precision that is asked for
    Guess guesses[2]                    # [EARLY, LATE] the last ones
    uint32_t named[64]                  # [AHEAD_MOST] what the cache is told
    size_t n_passes
    we_router router


cdef struct Watch:                      # what may stop a pass between two layers or experts
    volatile int *cancel
    double deadline_s                   # 0: none
    double next_signals_s               # 0: not the main thread, never look
    void *engine
    we_status (*look)(Watch *watch) noexcept nogil


cdef struct Pass:                       # n tokens on their way through the layers
    const Config *c
    const Weights *w
    Scratch *s
    Linear linear
    const we_store_api *store
    we_cache *cache
    bint one_by_one                     # it may stop between two experts
    bint read_ahead                     # demand all of a layer before the first is used
    Lookahead *ahead                    # NULL: the next layer is not guessed
    const we_record_layout *layout
    const float *books                  # [n_layers][3][book_stride] or NULL
    size_t book_stride
    size_t n, position
    int parity                          # half of the state that is read
    float *x                            # [n][hidden] residual stream
    float *blocks                       # [n_blocks][n][hidden] finished blocks of attention residuals; x is behind them
    size_t n_blocks
    int32_t *trace_idx                  # [MoE layers][n][k] what the router chose, or NULL
    float *trace_weight
    float *trace_logits                 # [MoE layers][n][E]
    const int32_t *forced_idx           # [MoE layers][n][k] to obey instead, or NULL
    const float *forced_weight
    Watch watch
    we_fault fault
