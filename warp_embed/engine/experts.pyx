"""Dense feed-forward, router, routed experts and shared experts.

The routed experts' results are added in ascending order of expert id, in every path, so that the sum of a token does
not depend on how its pass was cut.
"""
from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memcpy, memset

from warp_embed._kernels cimport we_acts, we_kernels, we_matrix, we_router, we_status
from warp_embed._kernels cimport WE_OK
from warp_embed._store cimport WE_DOWN, WE_GATE, WE_MATRICES, WE_UP
from warp_embed.engine.linear cimport add_exact_product, add_product, for_each, product, run_products, set_acts
from warp_embed.engine.structs cimport Config, FfnWeights, LayerWeights, MoeWeights, Pass, Scratch


# ------------------------------------------------------------------- dense ----

cdef struct ActivationArgs:
    Pass *p
    float *gate
    const float *up
    size_t width


cdef void activate_rows(void *arg, size_t begin, size_t end, unsigned worker) noexcept nogil:
    cdef ActivationArgs *a = <ActivationArgs *>arg
    cdef size_t first = begin * a.width
    cdef const Config *c = a.p.c
    if c.situ_beta > 0:
        a.p.linear.K.situ_mul(a.gate + first, a.gate + first, a.up + first, c.situ_beta, c.situ_linear,
                              (end - begin) * a.width)
    else:
        a.p.linear.K.silu_mul(a.gate + first, a.gate + first, a.up + first, (end - begin) * a.width)


cdef void activate(Pass *p, float *gate, const float *up, size_t n, size_t width) noexcept nogil:
    """gate = act(gate, up), n rows: silu(gate) up, or SiTU."""
    cdef ActivationArgs args
    args.p, args.gate, args.up, args.width = p, gate, up, width
    for_each(&p.linear, activate_rows, &args, n, n * width)


cdef void dense_layer(Pass *p, const FfnWeights *w, size_t inter) noexcept nogil:
    """y = W_down act(W_gate h, W_up h)."""
    cdef Scratch *s = p.s
    set_acts(&s.in_acts, s.h, p.c.hidden)
    add_product(&p.linear, w.gate, &s.in_acts, p.n, s.inner_gate, inter)
    add_product(&p.linear, w.up, &s.in_acts, p.n, s.inner_up, inter)
    run_products(&p.linear)
    activate(p, s.inner_gate, s.inner_up, p.n, inter)
    set_acts(&s.inner_acts, s.inner_gate, inter)
    product(&p.linear, w.down, &s.inner_acts, p.n, s.y, p.c.hidden)


# ------------------------------------------------------------------ router ----

cdef struct RouteArgs:
    Pass *p
    we_router router


cdef void route_tokens(void *arg, size_t begin, size_t end, unsigned worker) noexcept nogil:
    cdef RouteArgs *a = <RouteArgs *>arg
    cdef const Config *c = a.p.c
    cdef Scratch *s = a.p.s
    cdef size_t t
    for t in range(begin, end):
        a.p.linear.K.route(&a.router, s.router_logits + t * c.E, s.idx + t * c.k, s.weight + t * c.k,
                           s.router_work + worker * c.E)


cdef void route(Pass *p, const MoeWeights *w) noexcept nogil:
    """Choose k experts for every token: s.idx, s.weight. The router takes its inputs as f32, whatever its encoding."""
    cdef Scratch *s = p.s
    cdef RouteArgs args
    cdef size_t n = p.n * p.c.k, row = w.index * n
    if p.forced_idx == NULL or p.trace_idx != NULL:
        set_acts(&s.in_acts, s.h, p.c.hidden)
        add_exact_product(&p.linear, w.router, &s.in_acts, p.n, s.router_logits, p.c.E)
        run_products(&p.linear)
        args.p = p
        args.router = p.c.router
        args.router.bias = w.bias
        for_each(&p.linear, route_tokens, &args, p.n, p.n * p.c.E * p.c.k)
    if p.trace_idx != NULL:
        memcpy(p.trace_idx + row, s.idx, n * sizeof(int32_t))
        memcpy(p.trace_weight + row, s.weight, n * sizeof(float))
        memcpy(p.trace_logits + w.index * p.n * p.c.E, s.router_logits, p.n * p.c.E * sizeof(float))
    if p.forced_idx != NULL:
        memcpy(s.idx, p.forced_idx + row, n * sizeof(int32_t))
        memcpy(s.weight, p.forced_weight + row, n * sizeof(float))


# ---------------------------------------------------------- routed experts ----

cdef void sort_pairs(Pass *p) noexcept nogil:
    """List the (token, expert) pairs by expert, then token."""
    cdef Scratch *s = p.s
    cdef size_t E = p.c.E, k = p.c.k, e, t, j, place
    memset(s.first, 0, (E + 1) * sizeof(size_t))
    for j in range(p.n * k):
        s.first[s.idx[j] + 1] += 1
    for e in range(E):
        s.first[e + 1] += s.first[e]
    for t in range(p.n):
        for j in range(k):
            e = s.idx[t * k + j]
            place = s.first[e]
            s.first[e] += 1
            s.pair_token[place] = <int32_t>t
            s.pair_weight[place] = s.weight[t * k + j]
    for e in range(E, 0, -1):               # each first[e] has moved to the next expert's first: shift back
        s.first[e] = s.first[e - 1]
    s.first[0] = 0


cdef we_status fetch_experts(Pass *p, int layer, size_t begin, size_t *end, size_t max_pins) noexcept nogil:
    """Pin experts from `begin` on, until one more would exceed the pair buffer or the cache; *end is the first left out.
    s.experts[e] are the views of those that have tokens."""
    cdef Scratch *s = p.s
    cdef const float *books[3]
    cdef size_t e = begin, pins = 0, row0 = s.first[begin], i
    cdef uint32_t pinned = 0, ready
    cdef we_status status
    cdef int m
    for m in range(WE_MATRICES):
        books[m] = NULL
        if p.books != NULL:
            books[m] = p.books + (layer * WE_MATRICES + m) * p.book_stride
    while e < p.c.E and pins < max_pins and s.first[e + 1] - row0 <= s.pair_rows:
        if s.first[e + 1] > s.first[e]:
            s.wants[pins].expert = <uint32_t>e
            pins += 1
        e += 1
    while pinned == 0:
        status = p.store.demand(p.cache, layer, s.wants, <uint32_t>pins, &pinned, &p.fault)
        if status != WE_OK:
            return status
    s.n_wants = pinned
    if pinned < pins:
        e = s.wants[pinned].expert
    for i in range(pinned):
        while s.wants[i].record == NULL:
            status = p.store.wait(p.cache, s.wants, pinned, 1e9, &ready, &p.fault)
            if status != WE_OK:
                return status
        p.store.views(p.layout, s.wants[i].record, books, s.experts + s.wants[i].expert * WE_MATRICES)
    end[0] = e
    return WE_OK


cdef void slice_acts(we_acts *part, const we_acts *whole, size_t row) noexcept nogil:
    """part = whole from a row on."""
    part[0] = whole[0]
    part.x += row * whole.x_stride
    part.q += row * whole.q_stride
    part.q_halves += row * whole.q_stride
    part.scale += row * whole.scale_stride
    part.bias += row * whole.scale_stride


cdef void add_expert_products(Pass *p, size_t begin, size_t end, int matrix) noexcept nogil:
    """Note one product for each expert of [begin, end), on the rows of its pairs."""
    cdef Scratch *s = p.s
    cdef const Config *c = p.c
    cdef size_t e, row, n
    cdef we_acts *a
    for e in range(begin, end):
        n = s.first[e + 1] - s.first[e]
        row = s.first[e] - s.first[begin]
        a = s.expert_acts + 2 * e + (matrix == WE_DOWN)
        if n == 0:
            continue
        if matrix != WE_UP:                 # the up projection shares the gate's inputs
            slice_acts(a, &s.pair_inner_acts if matrix == WE_DOWN else &s.pair_acts, row)
        if matrix == WE_GATE:
            add_product(&p.linear, s.experts + e * WE_MATRICES + matrix, a, n, s.pair_gate + row * c.I, c.I)
        elif matrix == WE_UP:
            add_product(&p.linear, s.experts + e * WE_MATRICES + matrix, a, n, s.pair_up + row * c.I, c.I)
        else:
            add_product(&p.linear, s.experts + e * WE_MATRICES + matrix, a, n, s.pair_y + row * c.X, c.X)


cdef struct CombineArgs:
    Pass *p
    size_t first, rows


cdef void combine_columns(void *arg, size_t begin, size_t end, unsigned worker) noexcept nogil:
    """y[token] += weight * pair_y, pair after pair, for columns [begin, end)."""
    cdef CombineArgs *a = <CombineArgs *>arg
    cdef Scratch *s = a.p.s
    cdef size_t X = a.p.c.X, i
    for i in range(a.rows):
        a.p.linear.K.add_scaled(s.y + s.pair_token[a.first + i] * X + begin, s.pair_weight[a.first + i],
                                s.pair_y + i * X + begin, end - begin)


cdef void run_experts(Pass *p, size_t begin, size_t end) noexcept nogil:
    """All pairs of the pinned experts [begin, end)."""
    cdef Scratch *s = p.s
    cdef const Config *c = p.c
    cdef CombineArgs args
    cdef size_t i, rows = s.first[end] - s.first[begin]
    for i in range(rows):
        memcpy(s.pair_x + i * c.X, s.z + s.pair_token[s.first[begin] + i] * c.X, c.X * sizeof(float))
    set_acts(&s.pair_acts, s.pair_x, c.X)
    add_expert_products(p, begin, end, WE_GATE)
    add_expert_products(p, begin, end, WE_UP)
    run_products(&p.linear)
    activate(p, s.pair_gate, s.pair_up, rows, c.I)
    set_acts(&s.pair_inner_acts, s.pair_gate, c.I)
    add_expert_products(p, begin, end, WE_DOWN)
    run_products(&p.linear)
    args.p, args.first, args.rows = p, s.first[begin], rows
    for_each(&p.linear, combine_columns, &args, c.X, rows * c.X)


cdef void enter_latent(Pass *p, const MoeWeights *w) noexcept nogil:
    """z = W_down h, where experts work on a latent; elsewhere z is h."""
    if w.latent_down != NULL:
        set_acts(&p.s.in_acts, p.s.h, p.c.hidden)
        product(&p.linear, w.latent_down, &p.s.in_acts, p.n, p.s.z, p.c.X)


cdef void leave_latent(Pass *p, const MoeWeights *w) noexcept nogil:
    """routed_y = W_up rms(y) of the routed experts' sum y, or y itself."""
    cdef Scratch *s = p.s
    cdef size_t X = p.c.X, t
    if w.latent_up == NULL:
        memcpy(s.routed_y, s.y, p.n * X * sizeof(float))
        return
    if w.latent_norm != NULL:
        for t in range(p.n):
            p.linear.K.rms_norm(s.y + t * X, s.y + t * X, w.latent_norm, p.c.eps, X)
    set_acts(&s.pair_acts, s.y, X)
    product(&p.linear, w.latent_up, &s.pair_acts, p.n, s.routed_y, p.c.hidden)


cdef we_status moe_layer(Pass *p, const LayerWeights *w, int layer, size_t *expert) noexcept nogil:
    """y = sum over chosen experts of weight W_down act(W_gate z, W_up z), plus the shared experts' of h.

    *expert is the first expert that is still to do: 0 at the start. When the pass is stopped between two of them, the
    sum so far is in s.y, and s.h, s.z, s.idx and s.weight are what the caller must bring back to go on."""
    cdef Scratch *s = p.s
    cdef const Config *c = p.c
    cdef size_t end = 0
    cdef we_status status
    if expert[0] == 0:
        route(p, &w.moe)
        enter_latent(p, &w.moe)
        memset(s.y, 0, p.n * c.X * sizeof(float))
    sort_pairs(p)
    while s.first[expert[0]] < s.first[c.E]:
        status = fetch_experts(p, layer, expert[0], &end, p.max_pins)
        if status == WE_OK:
            run_experts(p, expert[0], end)
        p.store.release(p.cache, s.wants, <uint32_t>s.n_wants, False)
        s.n_wants = 0
        if status != WE_OK:
            return status
        expert[0] = end
        if s.first[end] < s.first[c.E]:
            status = p.watch.look(&p.watch)
            if status != WE_OK:
                return status
    leave_latent(p, &w.moe)
    dense_layer(p, &w.moe.shared, c.shared_inter)
    p.linear.K.add(s.y, s.routed_y, p.n * c.hidden)
    return WE_OK
