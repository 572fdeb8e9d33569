"""The residual stream: what layers add to, and what they read of it."""
from warp_embed.engine.structs cimport MixWeights, Pass

cdef void seat(Pass *p, size_t layer) noexcept nogil
cdef void start_block(Pass *p) noexcept nogil
cdef void norm(Pass *p, const MixWeights *mix, const float *weight, bint add) noexcept nogil
