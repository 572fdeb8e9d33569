"""Where everything lies: shapes from the configuration, memory from one arena, weights from their names.

Each carve_* function walks its structs in one order. With base == NULL it only adds up the bytes, so that a plan made
before anything is loaded and the allocation that follows cannot disagree.
"""
from libc.math cimport expf
from libc.stdint cimport int16_t, int32_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from warp_embed._kernels cimport we_acts, we_latent_bytes, we_matrix, we_mla_work
from warp_embed._kernels cimport WE_F32, WE_KV_F16, WE_KV_F32, WE_KV_Q8, WE_LATENT_TILE
from warp_embed._experts cimport we_want
from warp_embed._store cimport Trunk
from warp_embed.engine.structs cimport Config, FfnWeights, Job, KdaWeights, LayerState, LayerWeights, Linear
from warp_embed.engine.structs cimport AHEAD_TOKENS, MixWeights, MlaWeights, Scratch, StateParts, Weights
from warp_embed.engine.structs cimport MLA_HEADS, MLA_SEGMENT, MLA_TOKENS

from warp_embed.errors import FormatError

cdef extern from "warp_embed/latents.h" nogil:
    void *we_block_new(size_t nbytes)
    void *we_block_own(void *block, size_t nbytes)
    void we_block_share(void *block)
    void we_block_drop(void *block)

cdef enum:
    ALIGN = 64                  # a cache line, and the widest vector
    GROUP = 128                 # the largest group of integers: rows of integers are padded to it
    SMALLEST_GROUP = 32
    LARGE_STATE = 4 << 20       # bytes of S: nothing of it is in the caches any more when the next token comes

KV_KINDS = {"f32": WE_KV_F32, "f16": WE_KV_F16, "q8": WE_KV_Q8}


cdef struct Carver:
    char *base                  # NULL: only count
    size_t used


cdef void *take(Carver *k, size_t nbytes) noexcept nogil:
    cdef char *place = NULL if k.base == NULL else k.base + k.used
    k.used += (nbytes + ALIGN - 1) // ALIGN * ALIGN
    return place


cdef float *take_floats(Carver *k, size_t n) noexcept nogil:
    return <float *>take(k, n * sizeof(float))


cdef void take_acts(Carver *k, we_acts *a, size_t n, size_t cols, size_t parts) noexcept nogil:
    """Integers of n tokens with `parts` inputs of `cols` side by side, each padded by itself."""
    memset(a, 0, sizeof(we_acts))
    a.q_stride = parts * ((cols + GROUP - 1) // GROUP * GROUP)
    a.scale_stride = a.q_stride // SMALLEST_GROUP
    a.q = <int16_t *>take(k, n * a.q_stride * sizeof(int16_t))
    a.q_halves = <int16_t *>take(k, n * a.q_stride * sizeof(int16_t))
    a.scale = take_floats(k, n * a.scale_stride)
    a.bias = <int32_t *>take(k, n * a.scale_stride * sizeof(int32_t))


# ----------------------------------------------------------------- config ----

cdef int fill_config(Config *c, config, size_t context, size_t chunk, size_t threads, str kv) except -1:
    """The numbers of a ModelConfig."""
    if kv not in KV_KINDS:
        raise ValueError(f"kv={kv!r}: one of {', '.join(map(repr, KV_KINDS))} is expected")
    memset(c, 0, sizeof(Config))
    c.n_layers, c.hidden, c.vocab, c.eps = config.n_layers, config.hidden, config.vocab, config.eps
    c.H, c.D, c.C, c.K = config.kda_heads, config.kda_dim, config.kda_heads * config.kda_dim, config.conv
    c.decay_lower = config.decay_lower
    c.stream_state = 4 * len(config.kda_layers) * c.H * c.D * c.D > LARGE_STATE
    c.nh, c.r, c.nope, c.rope, c.v = config.heads, config.kv_lora, config.nope, config.rope, config.v_head
    c.q_rank = config.q_lora
    c.mla_scale = (config.nope + config.rope) ** -0.5 if config.nope + config.rope else 0
    c.kv = KV_KINDS[kv]
    c.block_layers = config.attn_res
    c.B = (config.n_layers + config.attn_res - 1) // config.attn_res if config.attn_res else 0
    if config.act == "situ":
        c.situ_beta, c.situ_linear = config.situ_beta, config.situ_linear_beta
    c.dense_inter = config.dense_inter
    c.E, c.k, c.I, c.X = config.n_experts, config.top_k, config.moe_inter, config.expert_width
    c.latent = config.latent > 0
    c.shared_inter = config.moe_inter * max(1, config.n_shared) if config.n_experts else 0
    c.router.experts, c.router.top_k, c.router.renormalize = config.n_experts, config.top_k, config.renormalize
    c.router.groups, c.router.top_groups = 1, 1
    if config.groups > config.top_groups > 0:
        c.router.groups, c.router.top_groups = config.groups, config.top_groups
    c.router.scaling = config.scaling
    c.context, c.chunk, c.threads = context, chunk, threads
    return 0


# ---------------------------------------------------------------- scratch ----

cdef void carve_kda(const Config *c, Scratch *s, Carver *k) noexcept nogil:
    cdef size_t n = c.chunk, part
    s.qkv = take_floats(k, n * 3 * c.C)
    for part in range(3):
        s.conv[part] = take_floats(k, n * c.C)
    s.low_f = take_floats(k, n * c.D)
    s.low_g = take_floats(k, n * c.D)
    s.decay = take_floats(k, n * c.C)
    s.gate = take_floats(k, n * c.C)
    s.beta = take_floats(k, n * c.H)
    take_acts(k, &s.f_acts, n, c.D, 1)
    take_acts(k, &s.g_acts, n, c.D, 1)


cdef void carve_mla(const Config *c, Scratch *s, Carver *k) noexcept nogil:
    cdef size_t n = c.chunk, segments = (c.context + MLA_SEGMENT - 1) // MLA_SEGMENT, parts = 0
    s.q_low = take_floats(k, n * c.q_rank)
    take_acts(k, &s.q_acts, n, c.q_rank, 1)
    s.q = take_floats(k, n * c.nh * (c.nope + c.rope))
    s.kv = take_floats(k, n * (c.r + c.rope))
    s.absorbed = take_floats(k, n * c.nh * (c.r + c.rope))
    s.attended = take_floats(k, n * c.nh * c.r)
    take_acts(k, &s.head_acts, n, c.r, c.nh)
    s.head_gate = take_floats(k, n * c.nh * c.v)
    s.softmax_at = we_mla_work(c.r, c.rope)
    s.work_stride = s.softmax_at + MLA_TOKENS * MLA_HEADS * 2
    s.work = take_floats(k, c.threads * s.work_stride)
    if segments > 1:
        parts = max(segments * c.nh, c.threads * MLA_TOKENS * MLA_HEADS)
    s.part = take_floats(k, parts * c.r)
    s.part_softmax = take_floats(k, parts * 2)


cdef void carve_feed_forward(const Config *c, Scratch *s, Carver *k) noexcept nogil:
    cdef size_t n = c.chunk, inter = c.dense_inter if c.dense_inter > c.shared_inter else c.shared_inter
    s.inner_gate = take_floats(k, n * inter)
    s.inner_up = take_floats(k, n * inter)
    take_acts(k, &s.inner_acts, n, inter, 1)
    if c.E == 0:
        return
    s.z = take_floats(k, n * c.X) if c.latent else s.h
    s.shared_y = take_floats(k, n * c.hidden)
    s.router_logits = take_floats(k, n * c.E)
    s.router_work = take_floats(k, c.threads * c.E)
    s.idx = <int32_t *>take(k, n * c.k * sizeof(int32_t))
    s.weight = take_floats(k, n * c.k)
    s.first = <size_t *>take(k, (c.E + 1) * sizeof(size_t))
    s.pair_token = <int32_t *>take(k, n * c.k * sizeof(int32_t))
    s.pair_weight = take_floats(k, n * c.k)
    s.pair_rows = 2 * n if 2 * n > c.k else c.k
    s.pair_x = take_floats(k, s.pair_rows * c.X)
    s.pair_y = take_floats(k, s.pair_rows * c.X)
    s.pair_gate = take_floats(k, s.pair_rows * c.I)
    s.pair_up = take_floats(k, s.pair_rows * c.I)
    take_acts(k, &s.pair_acts, s.pair_rows, c.X, 1)
    take_acts(k, &s.pair_inner_acts, s.pair_rows, c.I, 1)
    s.wants = <we_want *>take(k, c.E * sizeof(we_want))
    s.batch = <we_want *>take(k, c.E * sizeof(we_want))
    s.ahead_h = take_floats(k, min(n, <size_t>AHEAD_TOKENS) * c.hidden)
    s.ahead_logits = take_floats(k, min(n, <size_t>AHEAD_TOKENS) * c.E)
    s.ahead_idx = <int32_t *>take(k, c.k * sizeof(int32_t))
    s.ahead_weight = take_floats(k, c.k)
    s.ahead_score = take_floats(k, c.E)
    s.experts = <we_matrix *>take(k, 3 * c.E * sizeof(we_matrix))
    s.expert_acts = <we_acts *>take(k, 2 * c.E * sizeof(we_acts))


cdef size_t carve_scratch(const Config *c, Scratch *s, Linear *linear, char *base) noexcept:
    """Lay out the scratch of passes of at most c.chunk tokens; its bytes. A layer's two halves, and the two kinds of
    attention, are never alive together and share their memory."""
    cdef Carver k
    cdef size_t n = c.chunk, shared, most
    k.base, k.used = base, 0
    s.x = take_floats(&k, (c.B + 1) * n * c.hidden)
    s.h = take_floats(&k, n * c.hidden)
    s.y = take_floats(&k, n * (c.hidden if c.hidden > c.X else c.X))
    take_acts(&k, &s.in_acts, n, c.hidden, 1)
    s.alpha = take_floats(&k, c.threads * (c.B + 1))
    s.o = take_floats(&k, n * (c.C if c.C > c.nh * c.v else c.nh * c.v))
    take_acts(&k, &s.o_acts, n, c.C if c.C > c.nh * c.v else c.nh * c.v, 1)
    linear.capacity = 2 * c.E + 16
    linear.jobs = <Job *>take(&k, linear.capacity * sizeof(Job))
    linear.n_jobs = linear.blocks = linear.work = 0
    shared = most = k.used
    carve_kda(c, s, &k)
    most = max(most, k.used)
    k.used = shared
    carve_mla(c, s, &k)
    most = max(most, k.used)
    k.used = shared
    carve_feed_forward(c, s, &k)
    return max(most, k.used)


# ---------------------------------------------------------------- weights ----

cdef const float *vector(Trunk trunk, str name, size_t at_least) except? NULL:
    """The values of a tensor that must be stored as F32."""
    cdef const we_matrix *m
    if trunk is None:
        return NULL
    m = trunk.matrix(name)
    if m.encoding != WE_F32 or <size_t>m.rows * m.cols < at_least:
        raise FormatError(f"{name}: {at_least} F32 values are needed", field=name)
    return <const float *>m.payload


cdef const we_matrix *matrix(Trunk trunk, str name, size_t rows, size_t cols) except? NULL:
    """A weight matrix [rows, cols]. Kernels take their sizes from it, so its shape is checked here once more."""
    cdef const we_matrix *m
    if trunk is None:
        return NULL
    m = trunk.matrix(name)
    if m.rows != rows or m.cols != cols:
        raise FormatError(f"{name}: shape [{m.rows}, {m.cols}] where [{rows}, {cols}] is needed", field=name)
    return m


cdef int bind_kda(const Config *c, config, KdaWeights *w, Trunk trunk, str att, Carver *k) except -1:
    cdef const float *taps
    cdef const float *log_rate
    cdef size_t part, channel, j, C = c.C, D = c.D, K = c.K
    w.q_proj = matrix(trunk, att + "q_proj.weight", C, c.hidden)
    w.k_proj = matrix(trunk, att + "k_proj.weight", C, c.hidden)
    w.v_proj = matrix(trunk, att + "v_proj.weight", C, c.hidden)
    w.f_a, w.f_b = matrix(trunk, att + "f_a_proj.weight", D, c.hidden), matrix(trunk, att + "f_b_proj.weight", C, D)
    if config.full_rank_gate:
        w.g_b = matrix(trunk, att + "g_proj.weight", C, c.hidden)
    else:
        w.g_a, w.g_b = matrix(trunk, att + "g_a_proj.weight", D, c.hidden), matrix(trunk, att + "g_b_proj.weight", C, D)
    w.b_proj = matrix(trunk, att + "b_proj.weight", c.H, c.hidden)
    w.o_proj = matrix(trunk, att + "o_proj.weight", c.hidden, C)
    w.dt_bias = vector(trunk, att + "dt_bias", C)
    w.o_norm = vector(trunk, att + "o_norm.weight", D)
    w.taps = take_floats(k, K * 3 * C)
    w.rate = take_floats(k, c.H)
    if trunk is None:
        return 0
    for part in range(3):               # [C, 1, K] a projection -> [K][3 C]: channels become the fast axis
        taps = vector(trunk, f"{att}{'qkv'[part]}_conv1d.weight", C * K)
        for channel in range(C):
            for j in range(K):
                w.taps[j * 3 * C + part * C + channel] = taps[channel * K + j]
    log_rate = vector(trunk, att + "A_log", c.H)
    for j in range(c.H):                # one a head; K3 stores zeros behind them
        w.rate[j] = expf(log_rate[j])
    return 0


cdef int bind_mla(const Config *c, config, MlaWeights *w, Trunk trunk, str att) except -1:
    cdef size_t q = c.nh * (c.nope + c.rope)
    if c.q_rank > 0:
        w.q_a = matrix(trunk, att + "q_a_proj.weight", c.q_rank, c.hidden)
        w.q_a_norm = vector(trunk, att + "q_a_layernorm.weight", c.q_rank)
        w.q_proj = matrix(trunk, att + "q_b_proj.weight", q, c.q_rank)
    else:
        w.q_proj = matrix(trunk, att + "q_proj.weight", q, c.hidden)
    if config.mla_gate:
        w.gate = matrix(trunk, att + "g_proj.weight", c.nh * c.v, c.hidden)
    w.kv_a = matrix(trunk, att + "kv_a_proj_with_mqa.weight", c.r + c.rope, c.hidden)
    w.kv_b = matrix(trunk, att + "kv_b_proj.weight", c.nh * (c.nope + c.v), c.r)
    w.o_proj = matrix(trunk, att + "o_proj.weight", c.hidden, c.nh * c.v)
    w.kv_a_norm = vector(trunk, att + "kv_a_layernorm.weight", c.r)
    return 0


cdef int bind_mix(const Config *c, MixWeights *w, Trunk trunk, str name) except -1:
    if c.B > 0:
        w.norm = vector(trunk, name + "_norm.weight", c.hidden)
        w.proj = vector(trunk, name + "_proj.weight", c.hidden)
    return 0


cdef int bind_ffn(FfnWeights *w, Trunk trunk, str name, size_t inter, size_t width) except -1:
    w.gate = matrix(trunk, name + "gate_proj.weight", inter, width)
    w.up = matrix(trunk, name + "up_proj.weight", inter, width)
    w.down = matrix(trunk, name + "down_proj.weight", width, inter)
    return 0


cdef size_t carve_weights(const Config *c, Weights *w, config, Trunk trunk, str prefix, char *base) except? 0:
    """Resolve every tensor name to a pointer; the bytes of what is derived (layer table, transposed taps, rates)."""
    cdef Carver k
    cdef LayerWeights layer                     # filled, then copied into the arena when there is one
    cdef size_t i
    k.base, k.used = base, 0
    w.layers = <LayerWeights *>take(&k, c.n_layers * sizeof(LayerWeights))
    w.embed = matrix(trunk, prefix + "model.embed_tokens.weight", c.vocab, c.hidden)
    w.unembed = matrix(trunk, prefix + "lm_head.weight", c.vocab, c.hidden)
    w.norm = vector(trunk, prefix + "model.norm.weight", c.hidden)
    bind_mix(c, &w.mix, trunk, prefix + "model.output_attn_res")
    for i in range(c.n_layers):
        memset(&layer, 0, sizeof(layer))
        top = f"{prefix}model.layers.{i}."
        layer.is_kda, layer.is_moe = config.is_kda(i), config.is_moe(i)
        layer.input_norm = vector(trunk, top + "input_layernorm.weight", c.hidden)
        layer.post_norm = vector(trunk, top + "post_attention_layernorm.weight", c.hidden)
        bind_mix(c, &layer.attention_mix, trunk, top + "self_attention_res")
        bind_mix(c, &layer.feed_forward_mix, trunk, top + "mlp_res")
        if layer.is_kda:
            bind_kda(c, config, &layer.kda, trunk, top + "self_attn.", &k)
        else:
            bind_mla(c, config, &layer.mla, trunk, top + "self_attn.")
        if layer.is_moe:
            moe = top + "block_sparse_moe."
            layer.moe.index = config.moe_layers.index(i)
            layer.moe.router = matrix(trunk, moe + "gate.weight", c.E, c.hidden)
            if trunk is not None and moe + "gate.e_score_correction_bias" in trunk.index:
                layer.moe.bias = vector(trunk, moe + "gate.e_score_correction_bias", c.E)
            if c.latent:
                layer.moe.latent_down = matrix(trunk, moe + "routed_expert_down_proj.weight", c.X, c.hidden)
                layer.moe.latent_up = matrix(trunk, moe + "routed_expert_up_proj.weight", c.hidden, c.X)
            if c.latent and config.latent_norm:
                layer.moe.latent_norm = vector(trunk, moe + "routed_expert_norm.weight", c.X)
            bind_ffn(&layer.moe.shared, trunk, moe + "shared_experts.", c.shared_inter, c.hidden)
        else:
            bind_ffn(&layer.ffn, trunk, top + "mlp.", c.dense_inter, c.hidden)
        if base != NULL:
            w.layers[i] = layer
    return k.used


# ------------------------------------------------------------------ state ----

cdef size_t carve_state(const Config *c, config, StateParts *s, char *base) except? 0:
    """Lay out both halves of a state, one behind the other, then what exists once; the bytes. The tables of layers and
    latent blocks are allocated when there is a base; free_blocks frees them."""
    cdef size_t half = state_half(c, config, NULL, 0, NULL), i, tiles = (c.context + WE_LATENT_TILE - 1) // WE_LATENT_TILE
    cdef StateParts unused
    cdef StateParts *parts = s if base != NULL else &unused
    cdef Carver k
    cdef int parity
    k.base, k.used = base, 2 * half
    parts.x = take_floats(&k, (c.B + 1) * c.hidden)
    parts.z = take_floats(&k, c.X)
    parts.y = take_floats(&k, max(c.hidden, c.X))
    parts.shared_y = take_floats(&k, c.hidden)
    parts.idx = <int32_t *>take(&k, c.k * sizeof(int32_t))
    parts.weight = take_floats(&k, c.k)
    if base == NULL:
        return k.used
    parts.half_floats = half // sizeof(float)
    parts.layers = <LayerState *>calloc(c.n_layers, sizeof(LayerState))
    if parts.layers == NULL:
        raise MemoryError("no memory for a session's layer table")
    for i in range(c.n_layers):
        if not config.is_kda(i):
            parts.layers[i].blocks = <void **>calloc(tiles, sizeof(void *))
            if parts.layers[i].blocks == NULL:
                raise MemoryError("no memory for a session's latent table")
    for parity in range(2):
        state_half(c, config, parts.layers, parity, base + parity * half)
        parts.hidden[parity] = <float *>(base + (parity + 1) * half - hidden_bytes(c))
    return k.used


cdef size_t hidden_bytes(const Config *c) noexcept:
    return (c.hidden * sizeof(float) + ALIGN - 1) // ALIGN * ALIGN


cdef size_t state_half(const Config *c, config, LayerState *layers, int parity, char *base) except? 0:
    """One half: S and tail of every KDA layer, then the hidden vector."""
    cdef Carver k
    cdef float *S
    cdef float *tail
    k.base, k.used = base, 0
    for i in sorted(config.kda_layers):
        S, tail = take_floats(&k, c.H * c.D * c.D), take_floats(&k, (c.K - 1) * 3 * c.C)
        if layers != NULL:
            layers[<size_t>i].S[parity] = S
            layers[<size_t>i].tail[parity] = tail
    return k.used + hidden_bytes(c)


cdef int reserve_blocks(const Config *c, const Weights *w, LayerState *layers, size_t position,
                        size_t positions) except -1 nogil:
    """Have blocks for `positions` latents in every MLA layer; those from `position` on may be written."""
    cdef size_t i, tile, tiles = (positions + WE_LATENT_TILE - 1) // WE_LATENT_TILE
    cdef size_t nbytes = WE_LATENT_TILE * we_latent_bytes(c.r, c.rope, c.kv)
    cdef LayerState *layer
    cdef void *block
    for i in range(c.n_layers):
        layer = &layers[i]
        if w.layers[i].is_kda:
            continue
        while layer.n_blocks < tiles:
            block = we_block_new(nbytes)
            if block == NULL:
                return no_latents(positions)
            layer.blocks[layer.n_blocks] = block
            layer.n_blocks += 1
        for tile in range(position // WE_LATENT_TILE, tiles):
            block = we_block_own(layer.blocks[tile], nbytes)
            if block == NULL:
                return no_latents(positions)
            layer.blocks[tile] = block
    return 0


cdef int no_latents(size_t positions) except -1 with gil:
    raise MemoryError(f"no memory for the latents of position {positions}")


cdef void share_blocks(const Config *c, LayerState *to, const LayerState *source, size_t positions) noexcept nogil:
    """Let a new state's tables hold the blocks of the first `positions` latents, too."""
    cdef size_t i, b, tiles = (positions + WE_LATENT_TILE - 1) // WE_LATENT_TILE
    for i in range(c.n_layers):
        if source[i].blocks == NULL:
            continue
        for b in range(tiles):
            we_block_share(source[i].blocks[b])
            to[i].blocks[b] = source[i].blocks[b]
        to[i].n_blocks = tiles


cdef void free_blocks(LayerState *layers, size_t n_layers) noexcept nogil:
    cdef size_t i, b
    for i in range(n_layers):
        for b in range(layers[i].n_blocks):
            we_block_drop(layers[i].blocks[b])
        free(layers[i].blocks)
    free(layers)


# ------------------------------------------------------------------ sizes ----

def scratch_bytes(config, context, chunk, threads):
    """Bytes that an Engine allocates beside its trunk and cache, for ModelConfig, positions, tokens a pass, threads."""
    cdef Config c
    cdef Scratch scratch
    cdef Linear linear
    cdef Weights weights
    fill_config(&c, config, context, chunk, threads, "f32")
    return (carve_scratch(&c, &scratch, &linear, NULL)
            + carve_weights(&c, &weights, config, None, "", NULL))


def state_bytes(config, context, kv):
    """Bytes of one State at its last position: both halves, the latents of `context` positions, the token ids."""
    cdef Config c
    cdef size_t mla = config.n_layers - len(config.kda_layers), tiles
    fill_config(&c, config, context, 1, 1, kv)
    tiles = (c.context + WE_LATENT_TILE - 1) // WE_LATENT_TILE
    return (carve_state(&c, config, NULL, NULL) + sizeof(int32_t) * c.context
            + mla * tiles * (WE_LATENT_TILE * we_latent_bytes(c.r, c.rope, c.kv) + sizeof(void *)))


def checkpoint_bytes(config):
    """Bytes of State.arena_half."""
    cdef Config c
    fill_config(&c, config, 1, 1, 1, "f32")
    return carve_state(&c, config, NULL, NULL) // 2
