"""What a layer will ask for: guesses that never change a result."""
from warp_embed.engine.structs cimport Lookahead, Pass

cdef void start_ahead(Lookahead *a) noexcept nogil
cdef void forget_guesses(Lookahead *a) noexcept nogil
cdef void judge_guesses(Pass *p, int layer) noexcept nogil
cdef void look_ahead(Pass *p, int layer, int time) noexcept nogil
