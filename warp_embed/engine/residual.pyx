"""The residual stream: what layers add to, and what they read of it.

Plainly it is one vector x a token: a layer's halves read h = rms(x) and add their results to x. With attention residuals
the layers come in blocks. x is the sum of the running block alone; the sums of the blocks before it are kept, the
embedding as the first, and a half reads a softmax over all of them, the depth of the model:
    h = rms(mix),  mix = sum over i of alpha_i v_i,  v = blocks..., x,  alpha_i ~ exp(proj . rms(v_i; norm))
A block starts at each layer that is a multiple of block_layers, when its attention has read what was there: x becomes
the last of the blocks, and a new x begins at 0. Without blocks, and so in layer 0, mix is x.
Nothing of this goes from one token to the next.
"""
from libc.string cimport memset

from warp_embed._kernels cimport we_kernels
from warp_embed.engine.linear cimport for_each
from warp_embed.engine.structs cimport MixWeights, Pass


cdef void seat(Pass *p, size_t layer) noexcept nogil:
    """Point x behind the blocks that were started in layers before `layer`."""
    cdef size_t length = p.c.block_layers
    p.n_blocks = (layer + length - 1) // length if length > 0 else 0
    p.x = p.blocks + p.n_blocks * p.n * p.c.hidden


cdef void start_block(Pass *p) noexcept nogil:
    """x is finished; a new one begins behind it."""
    p.n_blocks += 1
    p.x += p.n * p.c.hidden
    memset(p.x, 0, p.n * p.c.hidden * sizeof(float))


cdef struct NormArgs:
    Pass *p
    const MixWeights *mix
    const float *weight
    bint add


cdef void norm_tokens(void *arg, size_t begin, size_t end, unsigned worker) noexcept nogil:
    cdef NormArgs *a = <NormArgs *>arg
    cdef Pass *p = a.p
    cdef const we_kernels *K = p.linear.K
    cdef size_t hidden = p.c.hidden, t
    cdef float *x
    cdef float *h
    for t in range(begin, end):
        x, h = p.x + t * hidden, p.s.h + t * hidden
        if a.add:
            K.add(x, p.s.y + t * hidden, hidden)
        if p.n_blocks > 0:
            K.mix_rows(h, p.s.alpha + worker * (p.c.B + 1), p.blocks + t * hidden, p.n * hidden, p.n_blocks + 1,
                       a.mix.norm, a.mix.proj, p.c.eps, hidden)
            x = h
        K.rms_norm(h, x, a.weight, p.c.eps, hidden)


cdef void norm(Pass *p, const MixWeights *mix, const float *weight, bint add) noexcept nogil:
    """h = rms(mix), after x += y if a half's result is waiting in y."""
    cdef NormArgs args
    args.p, args.mix, args.weight, args.add = p, mix, weight, add
    for_each(&p.linear, norm_tokens, &args, p.n, 4 * (p.n_blocks + 1) * p.n * p.c.hidden)
