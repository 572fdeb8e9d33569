"""Dense feed-forward, router, routed experts and shared experts.

The routed experts' results are added in ascending order of expert id, in every path, so that the sum of a token does
not depend on how its pass was cut.
"""
from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memcpy, memset

from warp_embed._kernels cimport we_acts, we_kernels, we_matrix, we_router, we_status
from warp_embed._kernels cimport WE_E_PAUSED, WE_OK
from warp_embed._store cimport WE_DOWN, WE_GATE, WE_MATRICES, WE_UP
from warp_embed.engine.linear cimport add_exact_product, add_product, for_each, product, run_products, set_acts
from warp_embed.engine.lookahead cimport judge_guesses, look_ahead
from warp_embed.engine.structs cimport Config, FfnWeights, LayerWeights, MoeWeights, Pass, Scratch, EARLY

cdef double SLICE_S = 0.01              # a pass that waits for a read looks so often whether it is to stop
cdef size_t PINNED_MOST = 32            # records of a layer: half of them are read while half are multiplied


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


cdef void dense_layer(Pass *p, const FfnWeights *w, size_t inter, float *y) noexcept nogil:
    """y = W_down act(W_gate h, W_up h)."""
    cdef Scratch *s = p.s
    set_acts(&s.in_acts, s.h, p.c.hidden)
    add_product(&p.linear, w.gate, &s.in_acts, p.n, s.inner_gate, inter)
    add_product(&p.linear, w.up, &s.in_acts, p.n, s.inner_up, inter)
    run_products(&p.linear)
    activate(p, s.inner_gate, s.inner_up, p.n, inter)
    set_acts(&s.inner_acts, s.inner_gate, inter)
    product(&p.linear, w.down, &s.inner_acts, p.n, y, p.c.hidden)


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


cdef void list_wants(Pass *p, size_t begin) noexcept nogil:
    """s.wants: the experts from `begin` on that have tokens, ascending; none is pinned yet."""
    cdef Scratch *s = p.s
    cdef size_t e
    s.n_wants = s.n_done = s.n_pinned = 0
    for e in range(begin, p.c.E):
        if s.first[e + 1] > s.first[e]:
            s.wants[s.n_wants].expert = <uint32_t>e
            s.wants[s.n_wants].record = NULL
            s.n_wants += 1


cdef we_status demand(Pass *p, int layer) noexcept nogil:
    """Pin more of s.wants, as far as the cache has slots, and let the missing ones be read. A prompt may want all experts
    of a layer: no more at a time than it takes to keep reading, since each takes the place of what other layers, or the
    tokens after the prompt, would have found."""
    cdef Scratch *s = p.s
    cdef size_t n = min(s.n_wants - s.n_pinned, PINNED_MOST - (s.n_pinned - s.n_done))
    cdef uint32_t pinned = 0
    cdef we_status status = WE_OK
    if not p.read_ahead:
        n = 1 if n > 0 and s.n_pinned == s.n_done else 0
    if n > 0:
        status = p.store.demand(p.cache, layer, s.wants + s.n_pinned, <uint32_t>n, &pinned, &p.fault)
        s.n_pinned += pinned
    return status


cdef we_status await_some(Pass *p, size_t end) noexcept nogil:
    """Wait a while for pinned records of the experts before `end`. OK does not say that there is one."""
    cdef Scratch *s = p.s
    cdef size_t n = s.n_done
    cdef uint32_t ready = 0
    cdef bint have = False
    cdef double until_s = 0
    cdef we_status status
    while n < s.n_pinned and s.wants[n].expert < end:
        have = have or s.wants[n].record != NULL
        n += 1
    if not have:
        until_s = p.linear.pool_api.now_s() + SLICE_S
        if p.watch.deadline_s != 0 and p.watch.deadline_s < until_s:
            until_s = p.watch.deadline_s
    status = p.store.wait(p.cache, s.wants + s.n_done, <uint32_t>(n - s.n_done), until_s, &ready, &p.fault)
    if status != WE_E_PAUSED:
        return status
    return WE_OK if have else p.watch.look(&p.watch)


cdef void take_batch(Pass *p, size_t end) noexcept nogil:
    """Move those of the experts before `end` whose records are there from s.wants to s.batch. While not all of a layer's
    experts are pinned, half of the pinned ones at most: the other half is read meanwhile."""
    cdef Scratch *s = p.s
    cdef size_t i, kept = s.n_done, most = s.n_pinned - s.n_done
    if s.n_pinned < s.n_wants and most > 1:
        most //= 2
    s.n_batch = 0
    for i in range(s.n_done, s.n_pinned):
        if s.n_batch == most or s.wants[i].expert >= end:
            break
        if s.wants[i].record != NULL:
            s.batch[s.n_batch] = s.wants[i]
            s.n_batch += 1
    if s.n_batch == 0:
        return
    kept = s.n_pinned
    for i in range(s.n_pinned, s.n_done, -1):           # from behind: what stays moves up, in its order
        if s.wants[i - 1].record == NULL or s.wants[i - 1].expert > s.batch[s.n_batch - 1].expert:
            kept -= 1
            s.wants[kept] = s.wants[i - 1]
    s.n_done = kept


cdef void view_records(Pass *p, int layer) noexcept nogil:
    """s.experts of the batch."""
    cdef Scratch *s = p.s
    cdef const float *books[3]
    cdef size_t i
    cdef int m
    for m in range(WE_MATRICES):
        books[m] = NULL
        if p.books != NULL:
            books[m] = p.books + (layer * WE_MATRICES + m) * p.book_stride
    for i in range(s.n_batch):
        p.store.views(p.layout, s.batch[i].record, books, s.experts + s.batch[i].expert * WE_MATRICES)


cdef void slice_acts(we_acts *part, const we_acts *whole, size_t row) noexcept nogil:
    """part = whole from a row on."""
    part[0] = whole[0]
    part.x += row * whole.x_stride
    part.q += row * whole.q_stride
    part.q_halves += row * whole.q_stride
    part.scale += row * whole.scale_stride
    part.bias += row * whole.scale_stride


cdef void add_expert_products(Pass *p, size_t row0, int matrix) noexcept nogil:
    """Note one product for each expert of the batch, on the rows of its pairs; the buffer begins with pair row0."""
    cdef Scratch *s = p.s
    cdef const Config *c = p.c
    cdef size_t i, e, row, n
    cdef we_acts *a
    for i in range(s.n_batch):
        e = s.batch[i].expert
        n = s.first[e + 1] - s.first[e]
        row = s.first[e] - row0
        a = s.expert_acts + 2 * e + (matrix == WE_DOWN)
        if matrix != WE_UP:                 # the up projection shares the gate's inputs
            slice_acts(a, &s.pair_inner_acts if matrix == WE_DOWN else &s.pair_acts, row)
        if matrix == WE_GATE:
            add_product(&p.linear, s.experts + e * WE_MATRICES + matrix, a, n, s.pair_gate + row * c.I, c.I)
        elif matrix == WE_UP:
            add_product(&p.linear, s.experts + e * WE_MATRICES + matrix, a, n, s.pair_up + row * c.I, c.I)
        else:
            add_product(&p.linear, s.experts + e * WE_MATRICES + matrix, a, n, s.pair_y + row * c.X, c.X)


cdef void activate_batch(Pass *p, size_t row0) noexcept nogil:
    """gate = act(gate, up) on the rows of the batch, neighbours together."""
    cdef Scratch *s = p.s
    cdef size_t i = 0, begin, end
    while i < s.n_batch:
        begin, end = s.first[s.batch[i].expert], s.first[s.batch[i].expert + 1]
        i += 1
        while i < s.n_batch and s.first[s.batch[i].expert] == end:
            end = s.first[s.batch[i].expert + 1]
            i += 1
        activate(p, s.pair_gate + (begin - row0) * p.c.I, s.pair_up + (begin - row0) * p.c.I, end - begin, p.c.I)


cdef void run_batch(Pass *p, size_t row0) noexcept nogil:
    """pair_y = W_down act(W_gate x, W_up x) for all pairs of the batch."""
    cdef Scratch *s = p.s
    add_expert_products(p, row0, WE_GATE)
    add_expert_products(p, row0, WE_UP)
    run_products(&p.linear)
    activate_batch(p, row0)
    set_acts(&s.pair_inner_acts, s.pair_gate, p.c.I)
    add_expert_products(p, row0, WE_DOWN)
    run_products(&p.linear)


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


cdef void combine(Pass *p, size_t begin, size_t end) noexcept nogil:
    """Add the results of experts [begin, end) to y."""
    cdef CombineArgs args
    args.p, args.first, args.rows = p, p.s.first[begin], p.s.first[end] - p.s.first[begin]
    for_each(&p.linear, combine_columns, &args, p.c.X, args.rows * p.c.X)


cdef void gather(Pass *p, size_t begin, size_t end) noexcept nogil:
    """pair_x = the inputs of experts [begin, end)."""
    cdef Scratch *s = p.s
    cdef size_t X = p.c.X, first = s.first[begin], i
    for i in range(s.first[end] - first):
        memcpy(s.pair_x + i * X, s.z + s.pair_token[first + i] * X, X * sizeof(float))
    set_acts(&s.pair_acts, s.pair_x, X)


cdef we_status run_group(Pass *p, int layer, size_t begin, size_t end) noexcept nogil:
    """The experts [begin, end): each is computed when its record has come, and all are added when the last is done."""
    cdef Scratch *s = p.s
    cdef we_status status
    gather(p, begin, end)
    while s.n_done < s.n_wants and s.wants[s.n_done].expert < end:
        status = demand(p, layer)
        if status == WE_OK:
            status = await_some(p, end)
        if status != WE_OK:
            return status
        take_batch(p, end)
        if s.n_batch > 0:
            view_records(p, layer)
            run_batch(p, s.first[begin])
            p.store.release(p.cache, s.batch, <uint32_t>s.n_batch, False)
    combine(p, begin, end)
    return WE_OK


cdef size_t group_end(const Pass *p, size_t begin) noexcept nogil:
    """Experts from `begin` on whose pairs fit the buffer; one, when the pass may stop between two of them."""
    cdef const Scratch *s = p.s
    cdef size_t end = begin + 1
    while not p.one_by_one and end < p.c.E and s.first[end + 1] - s.first[begin] <= s.pair_rows:
        end += 1
    return end


cdef void enter_latent(Pass *p, const MoeWeights *w) noexcept nogil:
    """z = W_down h, where experts work on a latent; elsewhere z is h."""
    if w.latent_down != NULL:
        set_acts(&p.s.in_acts, p.s.h, p.c.hidden)
        product(&p.linear, w.latent_down, &p.s.in_acts, p.n, p.s.z, p.c.X)


cdef void leave_latent(Pass *p, const MoeWeights *w) noexcept nogil:
    """y = W_up rms(y), where experts work on a latent. h is used up."""
    cdef Scratch *s = p.s
    cdef size_t X = p.c.X, t
    if w.latent_up == NULL:
        return
    if w.latent_norm != NULL:
        for t in range(p.n):
            p.linear.K.rms_norm(s.y + t * X, s.y + t * X, w.latent_norm, p.c.eps, X)
    set_acts(&s.pair_acts, s.y, X)
    product(&p.linear, w.latent_up, &s.pair_acts, p.n, s.h, p.c.hidden)
    memcpy(s.y, s.h, p.n * p.c.hidden * sizeof(float))


cdef we_status moe_layer(Pass *p, const LayerWeights *w, int layer, size_t *expert) noexcept nogil:
    """y = sum over chosen experts of weight W_down act(W_gate z, W_up z), plus the shared experts' of h.

    All reads that the cache has room for are asked for first; the shared experts are computed meanwhile.
    *expert is 0 at the start, else 1 + the first expert that is still to do. When the pass is stopped between two of
    them, the sum so far is in s.y, and s.z, s.shared_y, s.idx and s.weight are what the caller must bring back to go on.
    """
    cdef Scratch *s = p.s
    cdef const Config *c = p.c
    cdef size_t begin, end
    cdef we_status status
    if expert[0] == 0:
        route(p, &w.moe)
        memset(s.y, 0, p.n * c.X * sizeof(float))
    sort_pairs(p)
    list_wants(p, expert[0] - 1 if expert[0] > 0 else 0)
    status = demand(p, layer)
    if status == WE_OK and expert[0] == 0:
        judge_guesses(p, layer)
        look_ahead(p, layer + 1, EARLY)
        enter_latent(p, &w.moe)
        dense_layer(p, &w.moe.shared, c.shared_inter, s.shared_y)
        expert[0] = 1
    while status == WE_OK and s.n_done < s.n_wants:
        begin = s.wants[s.n_done].expert
        end = group_end(p, begin)
        status = run_group(p, layer, begin, end)
        if status == WE_OK:
            expert[0] = 1 + end
            if s.n_done < s.n_wants:
                status = p.watch.look(&p.watch)
    if s.n_pinned > s.n_done:
        p.store.release(p.cache, s.wants + s.n_done, <uint32_t>(s.n_pinned - s.n_done), status == WE_E_PAUSED)
    if status == WE_OK:
        leave_latent(p, &w.moe)
        p.linear.K.add(s.y, s.shared_y, p.n * c.hidden)
    return status
