"""What a layer will ask for: guesses that fill the disk's idle time, and never change a result.

A half of a layer adds little to the residual stream, compared with what is there. So a layer's router, applied to the
stream before its time, mostly chooses what it will choose in earnest. It is asked twice: EARLY, with the stream before
the last layer's feed-forward half, when that layer's own reads have been asked for; the disk has nothing to do once
these are through. And LATE, with the stream before its own layer's attention, which fewer halves separate from its own:
this guess takes the place of the first. A choice by a wide margin is right more often than one by a narrow one. How
often is measured, for a number of classes of margins, of those whose records are missing: the others cost nothing. Only
classes that are right often enough are handed to the cache, which takes few enough that the wrong ones stay a small share
of all reads (cache.h). When none is, or hardly a record is missing, the router runs for one pass of many, to measure.
"""
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, uint32_t, uint8_t
from libc.string cimport memset

from warp_embed._kernels cimport we_acts
from warp_embed.engine.linear cimport add_exact_product, run_products, set_acts
from warp_embed.engine.structs cimport Guess, LayerWeights, Lookahead, MoeWeights, Pass, Scratch
from warp_embed.engine.structs cimport AHEAD_MOST, AHEAD_TOKENS, MARGINS, EARLY, LATE

cdef double RATE = 1.0 / 32             # of the running averages
cdef double DEMANDING = 0.995           # bounds of the precision that is asked for
cdef double EASY = 0.6
cdef double FEW = 0.05                  # missing records a guess, on average, below which it is not worth the work
cdef size_t PROBE_PERIOD = 16           # passes
cdef size_t LEARNING = 64               # passes at first, all of which measure


cdef void start_ahead(Lookahead *a) noexcept nogil:
    cdef size_t many, time, margin
    memset(a, 0, sizeof(Lookahead))
    a.threshold = 0.8
    forget_guesses(a)
    for many in range(2):
        for time in range(2):
            a.missed[many][time] = 1
            for margin in range(<size_t>MARGINS):
                a.precision[many][time][margin] = 0.5


cdef void forget_guesses(Lookahead *a) noexcept nogil:
    a.guesses[EARLY].layer = a.guesses[LATE].layer = -1


cdef bint is_worth_it(const Lookahead *a, size_t many, int time) noexcept nogil:
    cdef size_t margin
    if a.n_passes < LEARNING or a.n_passes % PROBE_PERIOD == 0:
        return True
    if a.missed[many][time] < FEW:
        return False
    for margin in range(<size_t>MARGINS):
        if a.precision[many][time][margin] >= a.threshold:
            return True
    return False


cdef void judge_guesses(Pass *p, int layer) noexcept nogil:
    """The router of `layer` has chosen, s.first is known: which of the guesses about it were right?"""
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
                precision[g.margin[i]] += RATE * (right - precision[g.margin[i]])
    forget_guesses(p.ahead)


cdef void count_choice(Pass *p, float *logits, const float *bias, const int32_t *idx) noexcept nogil:
    """s.ahead_score += 1 for each expert that a token chose, and by how much its score was above the best that was not
    chosen. Logits become scores."""
    cdef size_t E = p.c.E, k = p.c.k, e, i = 0
    cdef float refused = -INFINITY
    p.linear.K.sigmoid(logits, logits, E)
    if bias != NULL:
        p.linear.K.add(logits, bias, E)
    for e in range(E):
        if i < k and idx[i] == <int32_t>e:
            i += 1
        else:
            refused = max(refused, logits[e])
    for i in range(k):
        p.s.ahead_score[idx[i]] += 1 + max(<float>0, logits[idx[i]] - refused)


cdef void list_experts(Pass *p, Guess *g) noexcept nogil:
    """Experts in descending order of s.ahead_score, which is used up. Of one token, a 64th of the range of scores is a
    class of margins; of many, a token that chose the expert."""
    cdef Scratch *s = p.s
    cdef size_t E = p.c.E, e, best
    cdef float classes = <float>MARGINS if p.n == 1 else 1, margin
    g.n = 0
    while g.n < <size_t>AHEAD_MOST:
        best = 0
        for e in range(1, E):
            if s.ahead_score[e] > s.ahead_score[best]:
                best = e
        if s.ahead_score[best] <= 0:
            break
        margin = classes * (s.ahead_score[best] - 1)
        g.margin[g.n] = <uint8_t>min(margin, <float>(MARGINS - 1))
        g.experts[g.n] = <uint32_t>best
        s.ahead_score[best] = 0
        g.n += 1


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
    list_experts(p, g)
    g.layer = layer
    p.store.missing(p.cache, layer, g.experts, <uint32_t>g.n, g.missing)
    for i in range(g.n):
        missing += g.missing[i]
        if g.missing[i] and a.precision[many][time][g.margin[i]] < a.threshold:
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
