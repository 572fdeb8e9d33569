"""What the next layer will ask for: a guess that fills the disk's idle time, and never changes a result.

A layer's feed-forward half adds little to the residual stream, compared with what is there. So the next layer's router,
applied to this layer's input, mostly chooses what it will choose in earnest. Its choices are ranked, and how often each
rank is right is measured, of those whose records are missing: the others cost nothing. Only ranks that are right often
enough are handed to the cache, which takes few enough that the wrong ones stay a small share of all reads (cache.h).
When no rank is, or hardly a record is missing, the router runs for one pass of many, to measure.
"""
from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memset

from warp_embed._kernels cimport we_acts
from warp_embed.engine.linear cimport add_exact_product, run_products, set_acts
from warp_embed.engine.structs cimport LayerWeights, Lookahead, MoeWeights, Pass, Scratch
from warp_embed.engine.structs cimport AHEAD_RANKS, AHEAD_TOKENS

cdef double RATE = 1.0 / 32             # of the running averages
cdef double DEMANDING = 0.995           # bounds of the precision that is asked for
cdef double EASY = 0.6
cdef double FEW = 0.05                  # missing records a guess, on average, below which it is not worth the work
cdef size_t PROBE_PERIOD = 16           # passes
cdef size_t LEARNING = 64               # passes at first, all of which measure


cdef void start_ahead(Lookahead *a) noexcept nogil:
    cdef size_t kind, rank
    memset(a, 0, sizeof(Lookahead))
    a.threshold = 0.8
    a.layer = -1
    for kind in range(2):
        a.missed[kind] = 1
        for rank in range(<size_t>AHEAD_RANKS):
            a.precision[kind][rank] = 0.5


cdef bint is_worth_it(const Lookahead *a, size_t kind) noexcept nogil:
    cdef size_t rank
    if a.n_passes < LEARNING or a.n_passes % PROBE_PERIOD == 0:
        return True
    if a.missed[kind] < FEW:
        return False
    for rank in range(<size_t>AHEAD_RANKS):
        if a.precision[kind][rank] >= a.threshold:
            return True
    return False


cdef void judge_guess(Pass *p, int layer) noexcept nogil:
    """The router of `layer` has chosen, s.first is known: which ranks of the guess about it were right?"""
    cdef Lookahead *a = p.ahead
    cdef Scratch *s = p.s
    cdef size_t kind = p.n > 1, i
    cdef double right
    if a == NULL or a.layer != layer:
        return
    a.layer = -1
    for i in range(a.n):
        if s.ahead_missing[i]:
            right = 1 if s.first[s.ahead[i] + 1] > s.first[s.ahead[i]] else 0
            a.precision[kind][i] += RATE * (right - a.precision[kind][i])


cdef size_t rank_experts(Pass *p, size_t m) noexcept nogil:
    """s.ahead = the experts that m routed tokens chose, those of most tokens and weight first; how many."""
    cdef Scratch *s = p.s
    cdef size_t E = p.c.E, n = 0, i, e, best
    memset(s.ahead_score, 0, E * sizeof(float))
    for i in range(m * p.c.k):
        s.ahead_score[s.ahead_idx[i]] += 1 + s.ahead_weight[i]
    while n < <size_t>AHEAD_RANKS:
        best = 0
        for e in range(1, E):
            if s.ahead_score[e] > s.ahead_score[best]:
                best = e
        if s.ahead_score[best] <= 0:
            break
        s.ahead[n] = <uint32_t>best
        s.ahead_score[best] = 0
        n += 1
    return n


cdef size_t route_ahead(Pass *p, const LayerWeights *next) noexcept nogil:
    """Let the next layer's router choose for some of the tokens; the number of them."""
    cdef Scratch *s = p.s
    cdef size_t hidden = p.c.hidden, m = min(p.n, <size_t>AHEAD_TOKENS), i, t
    cdef const float *x
    cdef we_acts acts
    memset(&acts, 0, sizeof(we_acts))
    for i in range(m):
        t = i * p.n // m
        x = p.x + t * hidden
        if p.n_blocks > 0:
            p.linear.K.mix_rows(s.ahead_h + i * hidden, s.alpha, p.blocks + t * hidden, p.n * hidden, p.n_blocks + 1,
                                next.feed_forward_mix.norm, next.feed_forward_mix.proj, p.c.eps, hidden)
            x = s.ahead_h + i * hidden
        p.linear.K.rms_norm(s.ahead_h + i * hidden, x, next.post_norm, p.c.eps, hidden)
    set_acts(&acts, s.ahead_h, hidden)
    add_exact_product(&p.linear, next.moe.router, &acts, m, s.ahead_logits, p.c.E)
    run_products(&p.linear)
    p.ahead.router = p.c.router
    p.ahead.router.bias = next.moe.bias
    for i in range(m):
        p.linear.K.route(&p.ahead.router, s.ahead_logits + i * p.c.E, s.ahead_idx + i * p.c.k,
                         s.ahead_weight + i * p.c.k, s.router_work)
    return m


cdef void look_ahead(Pass *p, int layer) noexcept nogil:
    """Guess what the layer after `layer`, whose own demands are on their way, will demand."""
    cdef Lookahead *a = p.ahead
    cdef Scratch *s = p.s
    cdef size_t kind = p.n > 1, i, n = 0, missing = 0, wanted = 0
    cdef uint32_t taken
    if a == NULL or <size_t>layer + 1 >= p.c.n_layers or not p.w.layers[layer + 1].is_moe or not is_worth_it(a, kind):
        return
    a.n = rank_experts(p, route_ahead(p, &p.w.layers[layer + 1]))
    a.layer = layer + 1
    p.store.missing(p.cache, layer + 1, s.ahead, <uint32_t>a.n, s.ahead_missing)
    for i in range(a.n):
        missing += s.ahead_missing[i]
        if s.ahead_missing[i] and a.precision[kind][i] < a.threshold:
            continue
        wanted += s.ahead_missing[i]
        s.ahead_named[n] = s.ahead[i]
        n += 1
    a.missed[kind] += RATE * (<double>missing - a.missed[kind])
    taken = p.store.guess(p.cache, layer + 1, s.ahead_named, <uint32_t>n)
    # Too many for the share that may be wrong: ask for more precision. Otherwise slowly for less.
    if taken < wanted:
        a.threshold += 0.02 * (DEMANDING - a.threshold)
    else:
        a.threshold += 0.002 * (EASY - a.threshold)
