"""What the next layer will ask for: a guess that never changes a result."""
from warp_embed.engine.structs cimport Lookahead, Pass

cdef void start_ahead(Lookahead *a) noexcept nogil
cdef void judge_guess(Pass *p, int layer) noexcept nogil
cdef void look_ahead(Pass *p, int layer) noexcept nogil
