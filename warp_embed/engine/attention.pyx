"""KDA and MLA, as in Kimi Linear (arXiv 2510.26692); the formulas are beside the kernels in kernels.h. What a model adds
or leaves out (factors of a matrix, an output gate) is a weight that is NULL or is not."""
from libc.string cimport memcpy
from warp_embed._kernels cimport we_acts, we_kda_args, we_kernels, we_latent_bytes, we_mla_args
from warp_embed._kernels cimport WE_LATENT_TILE
from warp_embed.engine.linear cimport add_product, for_each, input_group, product, run_products, set_acts
from warp_embed.engine.structs cimport Config, KdaWeights, LayerState, LayerWeights, Linear, MlaWeights, Pass, Scratch
from warp_embed.engine.structs cimport MLA_HEADS, MLA_SEGMENT, MLA_TOKENS

cdef float LATENT_EPS = 1e-6        # of kv_a_layernorm and q_a_layernorm; not rms_norm_eps


cdef struct KdaArgs:
    Pass *p
    const KdaWeights *w
    LayerState *state


cdef void kda_heads(void *arg, size_t begin, size_t end, unsigned worker) noexcept nogil:
    """Heads [begin, end) from projections to gated outputs, for all tokens of the pass."""
    cdef KdaArgs *a = <KdaArgs *>arg
    cdef Pass *p = a.p
    cdef const KdaWeights *w = a.w
    cdef Scratch *s = p.s
    cdef const we_kernels *K = p.linear.K
    cdef size_t D = p.c.D, C = p.c.C, t, h, part
    cdef float q_scale = <float>(<double>D ** -0.5)
    cdef float *decay
    cdef we_kda_args kda
    for h in range(begin, end):
        for part in range(3):               # q, k, v
            K.short_conv(s.conv[part], C, a.state.tail[1 - p.parity] + part * C, s.qkv + part * C, 3 * C,
                         a.state.tail[p.parity] + part * C, 3 * C, w.taps + part * C, 3 * C, p.c.K, p.n,
                         h * D, (h + 1) * D)
        for t in range(p.n):
            K.l2_norm(s.conv[0] + t * C + h * D, q_scale, D)
            K.l2_norm(s.conv[1] + t * C + h * D, 1.0, D)
            decay = s.decay + t * C + h * D
            if p.c.decay_lower < 0:
                K.decay_bounded(decay, decay, w.dt_bias + h * D, w.rate[h], p.c.decay_lower, D)
            else:
                K.decay_softplus(decay, decay, w.dt_bias + h * D, w.rate[h], D)
        kda.S_in = a.state.S[p.parity] + h * D * D
        kda.S_out = a.state.S[1 - p.parity] + h * D * D
        kda.q = s.conv[0] + h * D
        kda.k = s.conv[1] + h * D
        kda.v = s.conv[2] + h * D
        kda.decay = s.decay + h * D
        kda.beta = s.beta + h
        kda.o = s.o + h * D
        kda.n, kda.dk, kda.dv = p.n, D, D
        kda.qk_stride, kda.v_stride, kda.beta_stride = C, C, p.c.H
        kda.stream = p.c.stream_state
        K.kda(&kda)
        for t in range(p.n):
            K.rms_norm_gated(s.o + t * C + h * D, s.o + t * C + h * D, w.o_norm, s.gate + t * C + h * D, p.c.eps, D)


cdef void kda_layer(Pass *p, const LayerWeights *weights, LayerState *state) noexcept nogil:
    cdef const KdaWeights *w = &weights.kda
    cdef Scratch *s = p.s
    cdef size_t C = p.c.C, D = p.c.D
    cdef KdaArgs args
    set_acts(&s.in_acts, s.h, p.c.hidden)
    add_product(&p.linear, w.q_proj, &s.in_acts, p.n, s.qkv, 3 * C)
    add_product(&p.linear, w.k_proj, &s.in_acts, p.n, s.qkv + C, 3 * C)
    add_product(&p.linear, w.v_proj, &s.in_acts, p.n, s.qkv + 2 * C, 3 * C)
    add_product(&p.linear, w.f_a, &s.in_acts, p.n, s.low_f, D)
    if w.g_a != NULL:
        add_product(&p.linear, w.g_a, &s.in_acts, p.n, s.low_g, D)
    else:
        add_product(&p.linear, w.g_b, &s.in_acts, p.n, s.gate, C)
    add_product(&p.linear, w.b_proj, &s.in_acts, p.n, s.beta, p.c.H)
    run_products(&p.linear)
    set_acts(&s.f_acts, s.low_f, D)
    add_product(&p.linear, w.f_b, &s.f_acts, p.n, s.decay, C)
    if w.g_a != NULL:
        set_acts(&s.g_acts, s.low_g, D)
        add_product(&p.linear, w.g_b, &s.g_acts, p.n, s.gate, C)
    run_products(&p.linear)
    p.linear.K.sigmoid(s.beta, s.beta, p.n * p.c.H)
    args.p, args.w, args.state = p, w, state
    for_each(&p.linear, kda_heads, &args, p.c.H, p.n * C * D)
    set_acts(&s.o_acts, s.o, C)
    product(&p.linear, w.o_proj, &s.o_acts, p.n, s.y, p.c.hidden)


cdef struct MlaArgs:
    Pass *p
    const MlaWeights *w
    LayerState *state
    size_t segments                 # that the last token sees
    size_t heads, groups            # heads that share a claim's latents, ceil(nh / heads)


cdef void mla_heads(void *arg, size_t begin, size_t end, unsigned worker) noexcept nogil:
    """Groups of heads [begin, end) from queries to gated values, for all tokens of the pass."""
    cdef MlaArgs *a = <MlaArgs *>arg
    begin, end = begin * a.heads, min(end * a.heads, a.p.c.nh)
    absorb_heads(a, begin, end, worker)
    attend_heads(a, begin, end, worker)
    leave_heads(a, begin, end)


cdef void absorb_heads(void *arg, size_t begin, size_t end, unsigned worker) noexcept nogil:
    """Queries that meet the latents themselves: W^K absorbed, the rope part behind."""
    cdef MlaArgs *a = <MlaArgs *>arg
    cdef Scratch *s = a.p.s
    cdef const Config *c = a.p.c
    cdef size_t q_stride = c.nh * (c.nope + c.rope), row = c.r + c.rope, t, h, key_row
    for h in range(begin, end):
        key_row = h * (c.nope + c.v)
        a.p.linear.K.matmul_t(a.w.kv_b, key_row, key_row + c.nope, s.q + h * (c.nope + c.rope), q_stride, a.p.n,
                              s.absorbed + h * row, c.nh * row, s.work + worker * s.work_stride)
        for t in range(a.p.n):
            memcpy(s.absorbed + (t * c.nh + h) * row + c.r,
                   s.q + t * q_stride + h * (c.nope + c.rope) + c.nope, c.rope * sizeof(float))


cdef void attend(MlaArgs *a, size_t segment, size_t t, size_t n, size_t h, size_t heads, float *o, size_t o_stride,
                 float *softmax, float *work) noexcept nogil:
    """Tokens t .. t + n and some heads over one segment: what it alone gives."""
    cdef const Config *c = a.p.c
    cdef we_mla_args mla
    mla.q_stride, mla.o_stride = c.nh * (c.r + c.rope), o_stride
    mla.q, mla.blocks = a.p.s.absorbed + t * mla.q_stride + h * (c.r + c.rope), <const void **>a.state.blocks
    mla.o, mla.softmax, mla.work = o, softmax, work
    mla.n, mla.position, mla.heads, mla.r, mla.rope = n, a.p.position + t, heads, c.r, c.rope
    mla.begin, mla.end = segment * MLA_SEGMENT, (segment + 1) * MLA_SEGMENT
    mla.scale, mla.kv = c.mla_scale, c.kv
    a.p.linear.K.mla(&mla)


cdef void attend_heads(MlaArgs *a, size_t begin, size_t end, unsigned worker) noexcept nogil:
    """Some tokens and heads at a time, segment by segment, each folded into those before it."""
    cdef Scratch *s = a.p.s
    cdef const we_kernels *K = a.p.linear.K
    cdef size_t nh = a.p.c.nh, r = a.p.c.r, slot = worker * MLA_TOKENS * MLA_HEADS, h = begin, t, n, heads, segment, i
    cdef float *work = s.work + worker * s.work_stride
    cdef float *softmax = work + s.softmax_at
    cdef float *part = s.part + slot * r
    cdef float *part_softmax = s.part_softmax + slot * 2
    cdef size_t together = MLA_HEADS if a.p.n > 1 else <size_t>MLA_TOKENS * MLA_HEADS
    cdef float *o
    while h < end:
        heads, t = min(together, end - h), 0
        while t < a.p.n:
            n = min(<size_t>MLA_TOKENS, a.p.n - t)
            o = s.attended + (t * nh + h) * r
            attend(a, 0, t, n, h, heads, o, nh * r, softmax, work)
            for segment in range(1, (a.p.position + t + n - 1) // MLA_SEGMENT + 1):
                attend(a, segment, t, n, h, heads, part, heads * r, part_softmax, work)
                for i in range(n * heads):
                    K.mla_fold(o + (i // heads * nh + i % heads) * r, softmax + 2 * i, part + i * r,
                               part_softmax + 2 * i, r)
            for i in range(n * heads):
                K.divide(o + (i // heads * nh + i % heads) * r, o + (i // heads * nh + i % heads) * r,
                         softmax[2 * i + 1], r)
            t += n
        h += heads


cdef void attend_parts(void *arg, size_t begin, size_t end, unsigned worker) noexcept nogil:
    """One token: (segment, group of heads) pairs [begin, end), each by itself."""
    cdef MlaArgs *a = <MlaArgs *>arg
    cdef Scratch *s = a.p.s
    cdef size_t nh = a.p.c.nh, r = a.p.c.r, i, h, slot
    for i in range(begin, end):
        h = i % a.groups * a.heads
        slot = i // a.groups * nh + h
        attend(a, i // a.groups, 0, 1, h, min(a.heads, nh - h), s.part + slot * r, nh * r, s.part_softmax + slot * 2,
               s.work + worker * s.work_stride)


cdef void fold_heads(void *arg, size_t begin, size_t end, unsigned worker) noexcept nogil:
    """One token: the segments of heads [begin, end) folded in their order, then as for many."""
    cdef MlaArgs *a = <MlaArgs *>arg
    cdef Scratch *s = a.p.s
    cdef size_t nh = a.p.c.nh, r = a.p.c.r, h, segment, slot
    for h in range(begin, end):
        for segment in range(1, a.segments):
            slot = segment * nh + h
            a.p.linear.K.mla_fold(s.part + h * r, s.part_softmax + 2 * h, s.part + slot * r, s.part_softmax + 2 * slot,
                                  r)
        a.p.linear.K.divide(s.attended + h * r, s.part + h * r, s.part_softmax[2 * h + 1], r)
    leave_heads(a, begin, end)


cdef void leave_heads(MlaArgs *a, size_t begin, size_t end) noexcept nogil:
    """Latents become values: W^V and the gate."""
    cdef Pass *p = a.p
    cdef Scratch *s = p.s
    cdef const Config *c = p.c
    cdef const we_kernels *K = p.linear.K
    cdef size_t t, h, value_row
    cdef we_acts acts
    for h in range(begin, end):
        value_row = h * (c.nope + c.v) + c.nope
        head_acts(&acts, s, c, h, input_group(a.w.kv_b))
        if acts.group != 0:
            K.quantize(&acts, 0, p.n, c.r)
        K.matmul(a.w.kv_b, value_row, value_row + c.v, &acts, p.n, s.o + h * c.v, c.nh * c.v)
        if a.w.gate != NULL:
            for t in range(p.n):
                K.mul_sigmoid(s.o + (t * c.nh + h) * c.v, s.head_gate + (t * c.nh + h) * c.v, c.v)


cdef void split_token(MlaArgs *a) noexcept nogil:
    """One token over several segments. As many heads share a tile as leave every thread two claims of a whole segment,
    but 8 at least: with fewer, loading the tile costs more than threads without work."""
    cdef Linear *L = &a.p.linear
    cdef size_t nh = a.p.c.nh, r = a.p.c.r, whole = (a.p.position + 1) // MLA_SEGMENT
    a.heads = 32
    while a.heads > 8 and whole * nh < 2 * L.pool_api.threads(L.pool) * a.heads:
        a.heads //= 2
    a.groups = (nh + a.heads - 1) // a.heads
    for_each(L, absorb_heads, a, nh, nh * r * a.p.c.nope)
    for_each(L, attend_parts, a, a.segments * a.groups, nh * r * a.p.position)
    for_each(L, fold_heads, a, nh, nh * r * (a.p.c.v + a.segments))


cdef inline void head_acts(we_acts *acts, const Scratch *s, const Config *c, size_t h, unsigned group) noexcept nogil:
    """The slice of attended that belongs to head h."""
    cdef size_t integers = s.head_acts.q_stride // c.nh, scales = s.head_acts.scale_stride // c.nh
    acts[0] = s.head_acts
    acts.x = s.attended + h * c.r
    acts.x_stride = c.nh * c.r
    acts.q += h * integers
    acts.q_halves += h * integers
    acts.scale += h * scales
    acts.bias += h * scales
    acts.group = group


cdef void project_queries(Pass *p, const MlaWeights *w) noexcept nogil:
    """q = W_q h, or in factors W_qb rms(W_qa h); what else takes h is in the same region."""
    cdef Scratch *s = p.s
    cdef size_t width = p.c.nh * (p.c.nope + p.c.rope), rank = p.c.q_rank, t
    add_product(&p.linear, w.kv_a, &s.in_acts, p.n, s.kv, p.c.r + p.c.rope)
    if w.gate != NULL:
        add_product(&p.linear, w.gate, &s.in_acts, p.n, s.head_gate, p.c.nh * p.c.v)
    if w.q_a == NULL:
        add_product(&p.linear, w.q_proj, &s.in_acts, p.n, s.q, width)
        run_products(&p.linear)
        return
    add_product(&p.linear, w.q_a, &s.in_acts, p.n, s.q_low, rank)
    run_products(&p.linear)
    for t in range(p.n):
        p.linear.K.rms_norm(s.q_low + t * rank, s.q_low + t * rank, w.q_a_norm, LATENT_EPS, rank)
    set_acts(&s.q_acts, s.q_low, rank)
    product(&p.linear, w.q_proj, &s.q_acts, p.n, s.q, width)


cdef void store_latents(Pass *p, const MlaWeights *w, LayerState *state) noexcept nogil:
    """Norm the latent of every token and write it, with the rope key, at its position."""
    cdef const Config *c = p.c
    cdef float *kv
    cdef size_t t, position, latent = we_latent_bytes(c.r, c.rope, c.kv)
    for t in range(p.n):
        kv = p.s.kv + t * (c.r + c.rope)
        position = p.position + t
        p.linear.K.rms_norm(kv, kv, w.kv_a_norm, LATENT_EPS, c.r)
        p.linear.K.latent_store(<char *>state.blocks[position // WE_LATENT_TILE] + position % WE_LATENT_TILE * latent,
                                kv, kv + c.r, c.r, c.rope, c.kv)


cdef void mla_layer(Pass *p, const LayerWeights *weights, LayerState *state) noexcept nogil:
    cdef const MlaWeights *w = &weights.mla
    cdef Scratch *s = p.s
    cdef MlaArgs args
    set_acts(&s.in_acts, s.h, p.c.hidden)
    project_queries(p, w)
    store_latents(p, w, state)
    args.p, args.w, args.state = p, w, state
    args.segments = (p.position + p.n + MLA_SEGMENT - 1) // MLA_SEGMENT
    if p.n == 1 and args.segments > 1:
        split_token(&args)
    else:
        # Two claims a thread of one token: every claim converts all latents for itself.
        args.heads = max(<size_t>1, p.c.nh // (2 * p.linear.pool_api.threads(p.linear.pool))) if p.n == 1 else 1
        args.groups = (p.c.nh + args.heads - 1) // args.heads
        for_each(&p.linear, mla_heads, &args, args.groups, p.n * p.c.nh * p.c.r * (p.c.nope + p.c.v + p.position))
    set_acts(&s.o_acts, s.o, p.c.nh * p.c.v)
    product(&p.linear, w.o_proj, &s.o_acts, p.n, s.y, p.c.hidden)
