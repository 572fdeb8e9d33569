"""The feed-forward half of a layer. Each reads p.s.h; moe_layer leaves its result in p.s.y."""
from warp_embed._kernels cimport we_status
from warp_embed.engine.structs cimport FfnWeights, LayerWeights, Pass


cdef void dense_layer(Pass *p, const FfnWeights *w, size_t inter, float *y) noexcept nogil
cdef we_status moe_layer(Pass *p, const LayerWeights *w, int layer, size_t *expert) noexcept nogil
