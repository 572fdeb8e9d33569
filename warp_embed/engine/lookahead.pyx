"""What a layer will ask for: guesses that fill the disk's idle time, and never change a result.

A half of a layer adds little to the residual stream, compared with what is there. So a layer's router, applied to the
stream before its time, mostly chooses what it will choose in earnest. It is asked twice: EARLY, with the stream before
the last layer's feed-forward half, when that layer's own reads have been asked for; the disk has nothing to do once
these are through. And LATE, with the stream before its own layer's attention, which fewer halves separate from its own:
this guess takes the place of the first. Its choices are ranked, and how often each rank is right is measured, of those
whose records are missing: the others cost nothing. Only ranks that are right often enough are handed to the cache, which
takes few enough that the wrong ones stay a small share of all reads (cache.h). When no rank is, or hardly a record is
missing, the router runs for one pass of many, to measure.
"""
from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memset

from warp_embed._kernels cimport we_acts
from warp_embed.engine.linear cimport add_exact_product, run_products, set_acts
from warp_embed.engine.structs cimport Guess, LayerWeights, Lookahead, MoeWeights, Pass, Scratch
from warp_embed.engine.structs cimport AHEAD_RANKS, AHEAD_TOKENS, EARLY, LATE

cdef double RATE = 1.0 / 32             # of the running averages
cdef double DEMANDING = 0.995           # bounds of the precision that is asked for
cdef double EASY = 0.6
cdef double FEW = 0.05                  # missing records a guess, on average, below which it is not worth the work
cdef size_t PROBE_PERIOD = 16           # passes
cdef size_t LEARNING = 64               # passes at first, all of which measure


cdef void start_ahead(Lookahead *a) noexcept nogil:
    cdef size_t many, time, rank
    memset(a, 0, sizeof(Lookahead))
    a.threshold = 0.8
    forget_guesses(a)
    for many in range(2):
        for time in range(2):
            a.missed[many][time] = 1
            for rank in range(<size_t>AHEAD_RANKS):
                a.precision[many][time][rank] = 0.5


cdef void forget_guesses(Lookahead *a) noexcept nogil:
    a.guesses[EARLY].layer = a.guesses[LATE].layer = -1


cdef bint is_worth_it(const Lookahead *a, size_t many, int time) noexcept nogil:
    cdef size_t rank
    if a.n_passes < LEARNING or a.n_passes % PROBE_PERIOD == 0:
        return True
    if a.missed[many][time] < FEW:
        return False
    for rank in range(<size_t>AHEAD_RANKS):
        if a.precision[many][time][rank] >= a.threshold:
            return True
    return False


cdef void judge_guesses(Pass *p, int layer) noexcept nogil:
    """The router of `layer` has chosen, s.first is known: which ranks of the guesses about it were right?"""
    cdef Scratch *s = p.s
    cdef Guess *g
    cdef double *precision
    cdef double right
    cdef size_t i
    cdef int time
    if p.ahead == NULL:
        return
    for time in range(2):
        g = &p.ahead.guesses[time]
        if g.layer != layer:
            continue
        precision = p.ahead.precision[p.n > 1][time]
        for i in range(g.n):
            if g.missing[i]:
                right = 1 if s.first[g.experts[i] + 1] > s.first[g.experts[i]] else 0
                precision[i] += RATE * (right - precision[i])
    forget_guesses(p.ahead)


cdef void count_choice(Pass *p, float *logits, const float *bias, const int32_t *idx) noexcept nogil:
    """s.ahead_score += 1 for each expert that a token chose, and by how much it was better than the worst of them: those
    that barely were chosen are wrong most often. Logits become scores."""
    cdef size_t E = p.c.E, k = p.c.k, i
    cdef float least
    p.linear.K.sigmoid(logits, logits, E)
    if bias != NULL:
        p.linear.K.add(logits, bias, E)
    least = logits[idx[0]]
    for i in range(1, k):
        least = min(least, logits[idx[i]])
    for i in range(k):
        p.s.ahead_score[idx[i]] += 1 + (logits[idx[i]] - least)


cdef size_t rank_experts(Pass *p, uint32_t *experts) noexcept nogil:
    """Experts in descending order of s.ahead_score, which is used up; how many."""
    cdef Scratch *s = p.s
    cdef size_t E = p.c.E, n = 0, e, best
    while n < <size_t>AHEAD_RANKS:
        best = 0
        for e in range(1, E):
            if s.ahead_score[e] > s.ahead_score[best]:
                best = e
        if s.ahead_score[best] <= 0:
            break
        experts[n] = <uint32_t>best
        s.ahead_score[best] = 0
        n += 1
    return n


cdef void route_ahead(Pass *p, const LayerWeights *w) noexcept nogil:
    """Let a layer's router choose for some of the tokens: s.ahead_score."""
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
                                w.feed_forward_mix.norm, w.feed_forward_mix.proj, p.c.eps, hidden)
            x = s.ahead_h + i * hidden
        p.linear.K.rms_norm(s.ahead_h + i * hidden, x, w.post_norm, p.c.eps, hidden)
    set_acts(&acts, s.ahead_h, hidden)
    add_exact_product(&p.linear, w.moe.router, &acts, m, s.ahead_logits, p.c.E)
    run_products(&p.linear)
    p.ahead.router = p.c.router
    p.ahead.router.bias = w.moe.bias
    memset(s.ahead_score, 0, p.c.E * sizeof(float))
    for i in range(m):
        p.linear.K.route(&p.ahead.router, s.ahead_logits + i * p.c.E, s.ahead_idx, s.ahead_weight, s.router_work)
        count_choice(p, s.ahead_logits + i * p.c.E, w.moe.bias, s.ahead_idx)


cdef void look_ahead(Pass *p, int layer, int time) noexcept nogil:
    """Guess what `layer` will demand, before the last layer's feed-forward half (EARLY) or before its own attention."""
    cdef Lookahead *a = p.ahead
    cdef Guess *g
    cdef size_t many = p.n > 1, i, n = 0, missing = 0, wanted = 0
    cdef uint32_t taken
    if a == NULL or <size_t>layer >= p.c.n_layers or not p.w.layers[layer].is_moe or not is_worth_it(a, many, time):
        return
    g = &a.guesses[time]
    route_ahead(p, &p.w.layers[layer])
    g.n = rank_experts(p, g.experts)
    g.layer = layer
    p.store.missing(p.cache, layer, g.experts, <uint32_t>g.n, g.missing)
    for i in range(g.n):
        missing += g.missing[i]
        if g.missing[i] and a.precision[many][time][i] < a.threshold:
            continue
        wanted += g.missing[i]
        a.named[n] = g.experts[i]
        n += 1
    a.missed[many][time] += RATE * (<double>missing - a.missed[many][time])
    taken = p.store.guess(p.cache, layer, a.named, <uint32_t>n)
    # Too many for the share that may be wrong: ask for more precision. Otherwise slowly for less.
    if taken < wanted:
        a.threshold += 0.02 * (DEMANDING - a.threshold)
    else:
        a.threshold += 0.002 * (EASY - a.threshold)
