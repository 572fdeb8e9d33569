"""The two token mixers. Each reads p.s.h (normed inputs of the pass) and leaves its result in p.s.y."""
from warp_embed.engine.structs cimport LayerState, LayerWeights, Pass


cdef void kda_layer(Pass *p, const LayerWeights *w, LayerState *state) noexcept nogil
cdef void mla_layer(Pass *p, const LayerWeights *w, LayerState *state) noexcept nogil
