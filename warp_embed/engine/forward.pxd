"""The model as the engine holds it, and one conversation's state."""
from libc.stdint cimport int32_t

from warp_embed._kernels cimport we_pool, we_status
from warp_embed._experts cimport ExpertStore
from warp_embed._store cimport Pages, Trunk
from warp_embed.engine.ids cimport Ids
from warp_embed.engine.structs cimport Config, Linear, Lookahead, Pass, Scratch, StateParts, Weights


cdef class Engine:
    cdef Config c
    cdef Weights w
    cdef Scratch s
    cdef Linear linear                  # jobs live in the scratch arena
    cdef we_pool *pool
    cdef readonly Trunk trunk
    cdef readonly ExpertStore store     # None without experts
    cdef Pages arena                    # scratch, and what is derived from the weights
    cdef Lookahead ahead
    cdef public bint read_ahead         # all of a layer's experts are asked for before the first is used
    cdef public bint lookahead          # the next layer's experts are guessed
    cdef object interrupt               # what a signal handler raised inside a pass
    cdef void start(self, Pass *p) noexcept


cdef class State:
    cdef readonly Engine engine
    cdef StateParts parts
    cdef Pages arena                    # both halves
    cdef int parity                     # the half that is committed
    cdef readonly size_t position       # tokens committed
    cdef readonly Ids tokens            # their ids; changed together with position, so that nothing comes between
    cdef readonly size_t context        # most tokens it can hold
    cdef readonly size_t paused_layer   # layer, and expert in it, at which a token waits; 0 and 0: none waits
    cdef readonly size_t paused_expert
    cdef int32_t paused_id              # that token
    cdef volatile int cancel_flag
    cdef int check(self, const int32_t[::1] ids, float[:, ::1] logits, double budget_s) except -1
    cdef int fail(self, Pass *p, we_status status) except -1
    cdef float[::1] half(self)
    cdef void set_half(self, const float[::1] half) noexcept
