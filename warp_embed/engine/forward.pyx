"""The way of a token: embedding, layers, logits. Prefill and decode are the same pass over n tokens.

A pass is a transaction: it reads one half of the state and writes the other, and only a commit makes the other half
and the new position count. Cancel, a failed read or a number that is not finite leaves the state as it was.
"""
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t
from libc.string cimport memcpy, memset

import numpy as np

from warp_embed._kernels cimport kernels, pool_api, we_kernels, we_latent_bytes, we_status
from warp_embed._kernels cimport WE_E_CANCELLED, WE_E_INTERRUPTED, WE_E_NUMERIC, WE_E_PAUSED, WE_LATENT_TILE, WE_OK
from warp_embed._experts cimport ExpertStore, store_api, we_cache_stats
from warp_embed._store cimport Pages, Trunk, raise_fault
from warp_embed.engine.attention cimport kda_layer, mla_layer
from warp_embed.engine.experts cimport dense_layer, moe_layer
from warp_embed.engine.ids cimport Ids
from warp_embed.engine.layout cimport carve_scratch, carve_state, carve_weights, fill_config, free_blocks, reserve_blocks
from warp_embed.engine.layout cimport share_blocks
from warp_embed.engine.linear cimport product, set_acts, start_pool
from warp_embed.engine.lookahead cimport forget_guesses, look_ahead, start_ahead
from warp_embed.engine.residual cimport norm, seat, start_block
from warp_embed.engine.structs cimport Config, LayerState, LayerWeights, Pass, StateParts, Watch, Weights, EARLY, LATE

from warp_embed.engine.layout import checkpoint_bytes, scratch_bytes, state_bytes  # noqa: F401 (of a plan)
from warp_embed.errors import Cancelled, NumericError, SessionClosed

cdef double SIGNAL_PERIOD_S = 0.02      # at most this often is the GIL taken to look for signals


# ------------------------------------------------------------------- pass ----

cdef void embed_tokens(Pass *p, const int32_t *ids) noexcept nogil:
    cdef size_t t
    for t in range(p.n):
        p.linear.K.decode_rows(p.w.embed, ids[t], ids[t] + 1, p.x + t * p.c.hidden, p.c.hidden)


cdef we_status run_layer(Pass *p, State state, size_t layer, size_t *expert) noexcept nogil:
    """x += attention(h); x += feed_forward(h). *expert > 0: go on inside the feed-forward half."""
    cdef const LayerWeights *w = &p.w.layers[layer]
    cdef we_status status = WE_OK
    if expert[0] > 0:
        bring_back(p, &state.parts)
    else:
        look_ahead(p, <int>layer, LATE)
        norm(p, &w.attention_mix, w.input_norm, False)
        if p.c.block_layers > 0 and layer % p.c.block_layers == 0:
            start_block(p)
        if w.is_kda:
            kda_layer(p, w, &state.parts.layers[layer])
        else:
            mla_layer(p, w, &state.parts.layers[layer])
        norm(p, &w.feed_forward_mix, w.post_norm, True)
    if w.is_moe:
        status = moe_layer(p, w, <int>layer, expert)
    else:
        look_ahead(p, <int>layer + 1, EARLY)
        dense_layer(p, &w.ffn, p.c.dense_inter, p.s.y)
    if status == WE_OK:
        p.linear.K.add(p.x, p.s.y, p.n * p.c.hidden)
    elif status == WE_E_PAUSED:
        put_aside(p, &state.parts)
    return status


cdef void put_aside(const Pass *p, StateParts *parts) noexcept nogil:
    """Keep what a token needs to go on between two experts: another session may use the scratch meanwhile."""
    memcpy(parts.z, p.s.z, p.c.X * sizeof(float))
    memcpy(parts.y, p.s.y, p.c.X * sizeof(float))
    memcpy(parts.shared_y, p.s.shared_y, p.c.hidden * sizeof(float))
    memcpy(parts.idx, p.s.idx, p.c.k * sizeof(int32_t))
    memcpy(parts.weight, p.s.weight, p.c.k * sizeof(float))


cdef void bring_back(Pass *p, const StateParts *parts) noexcept nogil:
    memcpy(p.s.z, parts.z, p.c.X * sizeof(float))
    memcpy(p.s.y, parts.y, p.c.X * sizeof(float))
    memcpy(p.s.shared_y, parts.shared_y, p.c.hidden * sizeof(float))
    memcpy(p.s.idx, parts.idx, p.c.k * sizeof(int32_t))
    memcpy(p.s.weight, parts.weight, p.c.k * sizeof(float))


cdef we_status unembed(Pass *p, float *hidden, float *logits, size_t rows) noexcept nogil:
    """hidden = rms of the last token; logits of the last `rows` tokens, [rows][vocab]."""
    cdef size_t first = p.n - (rows if rows > 0 else 1), width = p.c.hidden
    norm(p, &p.w.mix, p.w.norm, False)
    memcpy(hidden, p.s.h + (p.n - 1) * width, width * sizeof(float))
    if rows == 0:
        return WE_OK if all_finite(p, hidden, width) else WE_E_NUMERIC
    set_acts(&p.s.in_acts, p.s.h + first * width, width)
    product(&p.linear, p.w.unembed, &p.s.in_acts, rows, logits, p.c.vocab)
    return WE_OK if all_finite(p, logits + (rows - 1) * p.c.vocab, p.c.vocab) else WE_E_NUMERIC


cdef inline bint all_finite(Pass *p, const float *x, size_t n) noexcept nogil:
    cdef double total = p.linear.K.log_sum_exp(x, n)
    return total - total == 0


cdef we_status look_up(Watch *watch) noexcept nogil:
    """Between two layers or experts: has anybody asked to stop?"""
    cdef double now
    if watch.cancel[0]:
        return WE_E_CANCELLED
    if watch.deadline_s == 0 and watch.next_signals_s == 0:
        return WE_OK
    now = pool_api().now_s()
    if watch.next_signals_s != 0 and now >= watch.next_signals_s:
        watch.next_signals_s = now + SIGNAL_PERIOD_S
        if not signals_are_quiet(watch.engine):
            return WE_E_INTERRUPTED
    return WE_E_PAUSED if watch.deadline_s != 0 and now >= watch.deadline_s else WE_OK


cdef bint signals_are_quiet(void *engine) noexcept with gil:
    try:
        PyErr_CheckSignals()
        return True
    except BaseException as error:      # KeyboardInterrupt, or whatever the program's handler raises
        (<Engine>engine).interrupt = error
        return False


cdef we_status forward(Pass *p, State state, const int32_t *ids, float *logits, size_t rows, size_t *layer,
                       size_t *expert) noexcept nogil:
    """Layers *layer and on, then the logits. After WE_E_PAUSED, *layer and *expert are what to go on with."""
    cdef we_status status
    cdef bint began = False                 # a budget of nothing still does something: every call gets further
    seat(p, layer[0] + (expert[0] > 0))     # a token that was paused among experts has started its layer's block
    if layer[0] == 0 and expert[0] == 0:
        embed_tokens(p, ids)
    while layer[0] < p.c.n_layers:
        status = look_up(&p.watch)
        if status == WE_OK or (status == WE_E_PAUSED and not began):
            status = run_layer(p, state, layer[0], expert)
        if status != WE_OK:
            return status
        began = True
        layer[0] += 1
        expert[0] = 0
    return unembed(p, state.parts.hidden[1 - p.parity], logits, rows)


# ----------------------------------------------------------------- engine ----

@cython.final
cdef class Engine:
    """Weights, scratch, threads and expert cache of one open model. One pass at a time: callers hold the model's lock.

    Parameters
    ----------
    config : ModelConfig
    trunk : Trunk
    store : ExpertStore or None
    prefix : str
        In front of every tensor name.
    context, chunk, threads : int
        Most positions of a state, most tokens of a pass, size of the pool.
    kv : {"f32", "f16", "q8"}
        Storage of the MLA latents.
    cpus : sequence of int, optional
        Processors that the threads are bound to, but for the first: that is the caller's.

    Raises
    ------
    ValueError (no such processor), MemoryError, FormatError (a tensor is missing or not F32 where it must be)
    """

    def __init__(self, config, Trunk trunk, ExpertStore store, str prefix, *, size_t context, size_t chunk,
                 unsigned threads, str kv, cpus=None):
        cdef size_t scratch, weights
        fill_config(&self.c, config, context, chunk, threads, kv)
        self.trunk = trunk
        self.store = store
        self.read_ahead = self.lookahead = True
        start_ahead(&self.ahead)
        scratch = carve_scratch(&self.c, &self.s, &self.linear, NULL)
        weights = carve_weights(&self.c, &self.w, config, None, prefix, NULL)
        self.arena = Pages(scratch + weights)
        carve_scratch(&self.c, &self.s, &self.linear, <char *>self.arena.data)
        carve_weights(&self.c, &self.w, config, trunk, prefix, <char *>self.arena.data + scratch)
        self.pool = start_pool(threads, cpus)
        self.linear.pool_api = pool_api()
        self.linear.pool = self.pool

    def close(self):
        """Stop the threads; states of this engine cannot run any more. The caller holds the model's lock."""
        if self.pool != NULL:
            pool_api().destroy(self.pool)
            self.pool = NULL

    def forget(self):
        """Drop the threads without joining them: in a child after fork() they do not exist."""
        self.pool = NULL

    def __dealloc__(self):
        if self.pool != NULL:
            pool_api().destroy(self.pool)

    def counters(self):
        """(hits, misses, bytes read, seconds waited for reads) of the expert cache since open."""
        cdef we_cache_stats stats
        if self.store is None or self.store.cache == NULL:
            return 0, 0, 0, 0.0
        stats = store_api().stats(self.store.cache)
        return stats.hits, stats.misses, stats.bytes_read, stats.wait_s

    cdef void start(self, Pass *p) noexcept:
        """Point a pass at this engine's parts."""
        memset(p, 0, sizeof(Pass))
        p.c, p.w, p.s = &self.c, &self.w, &self.s
        p.linear = self.linear
        p.linear.K = kernels()
        p.fault.layer = p.fault.expert = -1
        if self.store is not None:
            p.store = store_api()
            p.read_ahead = self.read_ahead
            self.ahead.n_passes += 1
            forget_guesses(&self.ahead)     # of another pass
            if self.lookahead and self.store.can_read_ahead:
                p.ahead = &self.ahead
            p.cache = self.store.cache
            p.layout = &self.store.layout
            p.books = self.store.books
            p.book_stride = self.store.book_stride


# ------------------------------------------------------------------ state ----

cdef char *latent(const LayerState *layer, size_t position, size_t row) noexcept nogil:
    return <char *>layer.blocks[position // WE_LATENT_TILE] + position % WE_LATENT_TILE * row


cdef void copy_floats(float *to, const float *source, size_t n) noexcept:
    """A state may have hundreds of megabytes: other Python threads run meanwhile."""
    with nogil:
        memcpy(to, source, n * sizeof(float))


@cython.final
cdef class State:
    """What a conversation is to the engine: KDA matrices, convolution tails, latents, a position.

    Raises MemoryError when its arena cannot be had.
    """

    def __init__(self, Engine engine not None, config):
        cdef Config *c = &engine.c
        self.engine = engine
        self.context = c.context
        self.tokens = Ids(c.context)
        self.arena = Pages(carve_state(c, config, NULL, NULL))
        carve_state(c, config, &self.parts, <char *>self.arena.data)

    def __dealloc__(self):
        cdef Engine e = self.engine
        if self.parts.layers != NULL:
            with nogil:                         # a long conversation has thousands of blocks
                free_blocks(self.parts.layers, e.c.n_layers)

    def cancel(self, bint yes=True):
        """Ask the running pass to stop at the next layer (any thread), or forget that it was asked. Was it asked?"""
        cdef bint asked = self.cancel_flag
        self.cancel_flag = yes
        return asked

    def look(self):
        """Raise Cancelled if cancel was called since the flag was last cleared."""
        if self.cancel_flag:
            raise Cancelled("cancelled; the session is at its last committed token", position=self.position)

    def drop(self):
        """Forget a paused token."""
        self.paused_layer = self.paused_expert = 0

    def advance(self, const int32_t[::1] ids, float[:, ::1] logits=None, *, bint signals=False, double budget_s=0,
                int32_t[:, :, ::1] trace_idx=None, float[:, :, ::1] trace_weight=None,
                float[:, :, ::1] trace_logits=None,
                const int32_t[:, :, ::1] forced_idx=None, const float[:, :, ::1] forced_weight=None):
        """Evaluate n tokens and commit them.

        Parameters
        ----------
        ids : int32 array, shape (n,)
            1 <= n <= engine.chunk. A paused token is resumed with the same id, and dropped with any other.
        logits : float32 array, shape (rows, vocab), optional
            Receives the logits of the last `rows` tokens.
        signals : bool
            Look for Python signals between layers (main thread only).
        budget_s : float
            0: no limit; otherwise pause between layers or experts once so many seconds have passed (n = 1).
        trace_idx, trace_weight : arrays, shape (MoE layers, n, top_k), optional
            Receive what the router chose; trace_logits, (MoE layers, n, experts), what it chose from.
        forced_idx, forced_weight : arrays, shape (MoE layers, n, top_k), optional
            Obeyed instead of the router.

        Returns
        -------
        bool
            True: committed. False: paused; call again.

        Raises
        ------
        ValueError      an id, n or a shape is out of range.
        Cancelled, NumericError, RecordError, OSError, MemoryError, or what a signal handler raised
            The state is as before the call.
        """
        cdef Engine e = self.engine
        cdef Pass p
        cdef we_status status
        cdef size_t layer = 0, expert = 0, n = ids.shape[0], rows = 0 if logits is None else logits.shape[0]
        cdef float *out = &logits[0, 0] if rows > 0 else NULL
        if e.pool == NULL:
            raise SessionClosed("the model was closed; open it again")
        self.check(ids, logits, budget_s)
        if n == 1 and ids[0] == self.paused_id:
            layer, expert = self.paused_layer, self.paused_expert
        reserve_blocks(&e.c, &e.w, self.parts.layers, self.position, self.position + n)
        e.start(&p)
        p.n, p.position, p.parity = n, self.position, self.parity
        p.blocks = self.parts.x if n == 1 else e.s.x
        if trace_idx is not None:
            p.trace_idx, p.trace_weight = &trace_idx[0, 0, 0], &trace_weight[0, 0, 0]
            p.trace_logits = &trace_logits[0, 0, 0]
        if forced_idx is not None:
            p.forced_idx, p.forced_weight = &forced_idx[0, 0, 0], &forced_weight[0, 0, 0]
        p.watch.cancel = &self.cancel_flag
        p.watch.next_signals_s = pool_api().now_s() + SIGNAL_PERIOD_S if signals else 0
        p.watch.engine = <void *>e
        p.watch.look = look_up
        if budget_s > 0:
            p.watch.deadline_s = pool_api().now_s() + budget_s
            p.one_by_one = True
        with nogil:
            status = forward(&p, self, &ids[0], out, rows, &layer, &expert)
        self.drop()
        if status == WE_E_PAUSED:
            self.paused_layer, self.paused_expert, self.paused_id = layer, expert, ids[0]
            return False
        if status == WE_OK:
            self.tokens.append(&ids[0], n)
            self.position += n
            self.parity = 1 - self.parity
            return True
        self.fail(&p, status)

    cdef int check(self, const int32_t[::1] ids, float[:, ::1] logits, double budget_s) except -1:
        cdef Engine e = self.engine
        cdef size_t n = ids.shape[0], i
        if not 1 <= n <= e.c.chunk:
            raise ValueError(f"{n} tokens in one pass; 1 to {e.c.chunk} are possible")
        if self.position + n > self.context:
            raise ValueError(f"position {self.position} + {n} tokens is beyond the context of {self.context}")
        for i in range(n):
            if not 0 <= ids[i] < <int32_t>e.c.vocab:
                raise ValueError(f"token id {ids[i]} is outside the vocabulary of {e.c.vocab}")
        if logits is not None and (<size_t>logits.shape[0] > n or <size_t>logits.shape[1] != e.c.vocab):
            raise ValueError(f"logits must be (at most {n}, {e.c.vocab})")
        if budget_s > 0 and n != 1:
            raise ValueError("only a single token can be paused")
        return 0

    cdef int fail(self, Pass *p, we_status status) except -1:
        cdef object interrupt
        if status == WE_E_CANCELLED:
            raise Cancelled("cancelled; the session is at its last committed token", position=self.position)
        if status == WE_E_NUMERIC:
            raise NumericError("the logits are not finite: the weights or the state are damaged")
        if status == WE_E_INTERRUPTED:
            interrupt, self.engine.interrupt = self.engine.interrupt, None
            raise interrupt
        return raise_fault(&p.fault, self.engine.store.paths)

    def logits_again(self, float[::1] logits not None):
        """Compute the logits (vocab,) after the last committed token from the stored hidden vector."""
        cdef Engine e = self.engine
        cdef Pass p
        if <size_t>logits.shape[0] != e.c.vocab or self.position == 0:
            raise ValueError("no token was evaluated, or logits is not (vocab,)")
        if e.pool == NULL:
            raise SessionClosed("the model was closed; open it again")
        e.start(&p)
        with nogil:
            set_acts(&p.s.in_acts, self.parts.hidden[self.parity], p.c.hidden)
            product(&p.linear, p.w.unembed, &p.s.in_acts, 1, &logits[0], p.c.vocab)

    # ---- copies: forks, checkpoints, state files, and what tests look at ----

    def fork(self, config):
        """A new State at the same position; latents are shared until one of the two writes."""
        cdef Engine e = self.engine
        cdef State child = State(e, config)
        with nogil:
            share_blocks(&e.c, child.parts.layers, self.parts.layers, self.position)
        child.set_half(self.half())
        child.tokens.append(self.tokens.data, self.tokens.n)
        child.position = self.position
        return child

    def rewind(self, size_t position, const float[::1] half not None):
        """Go back to an earlier position, whose arena_half this is; half of zeros for position 0."""
        if position > self.position or <size_t>half.shape[0] != self.parts.half_floats:
            raise ValueError(f"position {position} is not behind {self.position}, or the half has another shape")
        self.set_half(half)
        self.tokens.cut(position)
        self.position = position
        self.drop()

    cdef float[::1] half(self):
        return <float[:self.parts.half_floats]>(<float *>self.arena.data + self.parity * self.parts.half_floats)

    cdef void set_half(self, const float[::1] half) noexcept:
        copy_floats(&self.half()[0], &half[0], self.parts.half_floats)

    def arena_half(self):
        """float32 copy of the committed half: for every KDA layer S [H][D][D] and tail [K - 1][3 C], then hidden."""
        cdef float[::1] out
        copy = np.frombuffer(Pages(self.parts.half_floats * sizeof(float)), np.float32, self.parts.half_floats)
        out = copy
        copy_floats(&out[0], &self.half()[0], self.parts.half_floats)
        return copy

    def hidden(self):
        """float32 copy (hidden,) of the normed hidden vector after the last committed token."""
        return np.array(<float[:self.engine.c.hidden]>self.parts.hidden[self.parity])

    def latent_bytes(self, size_t layer):
        """uint8 copy (position, bytes of a latent) of an MLA layer's committed latents."""
        cdef Config *c = &self.engine.c
        cdef size_t row = we_latent_bytes(c.r, c.rope, c.kv), t
        cdef unsigned char[:, ::1] out
        if layer >= c.n_layers or self.engine.w.layers[layer].is_kda:
            raise ValueError(f"layer {layer} has no latents")
        result = np.frombuffer(Pages(self.position * row or 1), np.uint8, self.position * row).reshape(-1, row)
        if self.position > 0:
            out = result
            with nogil:
                for t in range(<size_t>out.shape[0]):
                    memcpy(&out[t, 0], latent(&self.parts.layers[layer], t, row), row)
        return result

    def load(self, const int32_t[::1] tokens not None, const float[::1] half not None, dict latents not None):
        """Become the state that arena_half and latent_bytes {layer: array} describe; only for a new State."""
        cdef Config *c = &self.engine.c
        cdef Weights *w = &self.engine.w
        cdef size_t row = we_latent_bytes(c.r, c.rope, c.kv), layer, t, position = tokens.shape[0]
        cdef const unsigned char[:, ::1] rows
        if <size_t>half.shape[0] != self.parts.half_floats or not 0 < position <= self.context:
            raise ValueError("the state has another shape")
        with nogil:
            reserve_blocks(c, w, self.parts.layers, 0, position)
        for layer in range(c.n_layers):
            if self.engine.w.layers[layer].is_kda:
                continue
            rows = latents[layer]
            if <size_t>rows.shape[0] != position or <size_t>rows.shape[1] != row:
                raise ValueError(f"the latents of layer {layer} have another shape")
            with nogil:
                for t in range(position):
                    memcpy(latent(&self.parts.layers[layer], t, row), &rows[t, 0], row)
        self.set_half(half)
        self.tokens.append(&tokens[0], position)
        self.position = position

    def kda_state(self, size_t layer):
        """(S [H][D][D], tail [3][C][K - 1] oldest first) of a KDA layer, copies."""
        cdef Config *c = &self.engine.c
        if layer >= c.n_layers or not self.engine.w.layers[layer].is_kda:
            raise ValueError(f"layer {layer} is not a KDA layer")
        S = np.array(<float[:c.H * c.D * c.D]>self.parts.layers[layer].S[self.parity]).reshape(c.H, c.D, c.D)
        if c.K == 1:
            return S, np.zeros((3, c.C, 0), np.float32)
        tail = np.array(<float[:(c.K - 1) * 3 * c.C]>self.parts.layers[layer].tail[self.parity])
        return S, tail.reshape(c.K - 1, 3, c.C).transpose(1, 2, 0).copy()

    def latents(self, size_t layer):
        """float32 (position, r + rope) of an MLA layer: normed latent, then rope key."""
        cdef Config *c = &self.engine.c
        cdef const we_kernels *K = kernels()
        cdef unsigned char[:, ::1] rows
        cdef float[:, ::1] out
        cdef size_t t
        stored = self.latent_bytes(layer)
        result = np.empty((self.position, c.r + c.rope), np.float32)
        if self.position > 0:
            rows, out = stored, result
            for t in range(self.position):
                K.latent_load(&out[t, 0], &rows[t, 0], c.r, c.rope, c.kv)
        return result
