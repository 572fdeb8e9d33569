"""Python's view of the kernels, for the converter and the tests; the engine cimports the tables instead.

Functions take what NumPy can turn into contiguous arrays and check shapes. What the converter calls on whole tensors
computes without the GIL; wrappers of a single vector, block or token, which only tests call, keep it.
"""
import os

import numpy as np

from libc.stdint cimport int8_t, int16_t, int32_t, uint8_t, uint16_t, uint32_t, uintptr_t

cdef extern from "warp_embed/kernels.h" nogil:
    const we_kernels *we_kernels_active()
    int we_kernels_force(const char *isa)
    const char *const *we_kernels_levels()

cdef extern from "warp_embed/pool.h" nogil:
    we_status we_pool_create(we_pool **pool, unsigned threads)
    void we_pool_run(we_pool *pool, we_task *task, void *arg, size_t n_items, size_t grain)
    we_status we_pool_bind(we_pool *pool, const int *cpus)
    unsigned we_pool_threads(const we_pool *pool)
    void we_pool_destroy(we_pool *pool)
    double we_now_s()

# ------------------------------------------------------------------ tables ----
cdef we_pool_api POOL
POOL.create, POOL.bind, POOL.run, POOL.threads = we_pool_create, we_pool_bind, we_pool_run, we_pool_threads
POOL.destroy, POOL.now_s = we_pool_destroy, we_now_s

cdef const we_kernels *kernels() noexcept nogil:
    return we_kernels_active()

cdef const we_pool_api *pool_api() noexcept nogil:
    return &POOL

def levels():
    """Names of the kernel levels that run here, best last."""
    cdef const char *const *names = we_kernels_levels()
    found = []
    while names[len(found)] != NULL:
        found.append(names[len(found)].decode())
    return found

def active():
    """Name of the level in use."""
    return we_kernels_active().isa.decode()

def force(name):
    """Use one level from now on; None for the best. ValueError if it does not run here."""
    encoded = (name or "").encode()
    cdef const char *isa = <const char *>encoded if name is not None else NULL
    if we_kernels_force(isa) != 0:
        raise ValueError(f"kernel level {name!r} does not run here; available: {', '.join(levels())}")

def table_address():
    """Address of the table in use, a `const we_kernels *` that stays valid: for timing the kernels in C."""
    return <uintptr_t>we_kernels_active()

if os.environ.get("WARP_EMBED_ISA"):
    try:
        force(os.environ["WARP_EMBED_ISA"])
    except ValueError as error:
        raise ValueError(f"WARP_EMBED_ISA: {error}") from None

# --------------------------------------------------------------- arguments ----
cdef inline size_t address(a) except? 0:
    return <uintptr_t>a.ctypes.data

cdef inline float *floats(a) except? NULL:
    return <float *>address(a)

def _f32(x, ndim=None, name="x"):
    a = np.ascontiguousarray(x, dtype=np.float32)
    if ndim is not None and a.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, not {a.ndim}")
    return a

def _shaped(x, shape, name):
    a = np.ascontiguousarray(x, dtype=np.float32)
    if a.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, not {a.shape}")
    return a

def _rows(row0, row1, rows):
    row1 = rows if row1 is None else row1
    if not 0 <= row0 <= row1 <= rows:
        raise ValueError(f"rows [{row0}, {row1}) are not within [0, {rows})")
    return row0, row1

# ----------------------------------------------------------------- numbers ----
ctypedef void (*Widen)(float *y, const uint16_t *x, size_t n) noexcept nogil
ctypedef void (*Narrow)(uint16_t *y, const float *x, size_t n) noexcept nogil
ctypedef void (*Unary)(float *y, const float *x, size_t n) noexcept nogil

cdef object widen(Widen kernel, x):
    a = np.ascontiguousarray(x, dtype=np.uint16)
    y = np.empty(np.shape(x), np.float32)
    cdef const uint16_t *from_ = <const uint16_t *>address(a)
    cdef float *to = floats(y)
    cdef size_t n = y.size
    with nogil:
        kernel(to, from_, n)
    return y

cdef object narrow(Narrow kernel, x):
    a = _f32(x)
    y = np.empty(np.shape(x), np.uint16)
    cdef const float *from_ = floats(a)
    cdef uint16_t *to = <uint16_t *>address(y)
    cdef size_t n = y.size
    with nogil:
        kernel(to, from_, n)
    return y

cdef object in_place(Unary kernel, x):
    y = np.array(x, dtype=np.float32, order="C")
    cdef float *at = floats(y)
    cdef size_t n = y.size
    with nogil:
        kernel(at, at, n)
    return y

def f16_to_f32(x):
    """float32 of float16 bit patterns (uint16), exactly."""
    return widen(we_kernels_active().f16_to_f32, x)

def f32_to_f16(x):
    """Bit patterns (uint16) of the nearest float16, ties to even."""
    return narrow(we_kernels_active().f32_to_f16, x)

def bf16_to_f32(x):
    """float32 of bfloat16 bit patterns (uint16), exactly."""
    return widen(we_kernels_active().bf16_to_f32, x)

def f32_to_bf16(x):
    """Bit patterns (uint16) of the nearest bfloat16, ties to even."""
    return narrow(we_kernels_active().f32_to_bf16, x)

def exp(x):
    """e to the x, elementwise, within 2 ulp."""
    return in_place(we_kernels_active().exp, x)

def sigmoid(x):
    """1 / (1 + e^-x), elementwise, within 2 ulp."""
    return in_place(we_kernels_active().sigmoid, x)

# ---------------------------------------------------------------- encoders ----
cdef object encode_groups(x, size_t group, bint nibbles):
    a = _f32(x, 2)
    if group < 1 or (nibbles and group % 2):
        raise ValueError("group must be at least 1, and even for Q4G")
    cdef size_t rows = a.shape[0], cols = a.shape[1], n_groups = (cols + group - 1) // group
    payload = np.empty((rows, n_groups * group // (2 if nibbles else 1)), np.uint8)
    scales = np.empty((rows, n_groups), np.uint16)
    cdef const float *from_ = floats(a)
    cdef void *codes = <void *>address(payload)
    cdef uint16_t *halves = <uint16_t *>address(scales)
    with nogil:
        if nibbles:
            we_kernels_active().encode_q4g(<uint8_t *>codes, halves, from_, rows, cols, group)
        else:
            we_kernels_active().encode_q8g(<int8_t *>codes, halves, from_, rows, cols, group)
    return payload, scales

def encode_q8g(x, size_t group=128):
    """Codes and scales of a matrix in Q8G: (payload u8 [rows][row_bytes], scales u16 [rows][groups])."""
    return encode_groups(x, group, False)

def encode_q4g(x, size_t group=128):
    """Codes and scales of a matrix in Q4G: (payload u8 [rows][row_bytes], scales u16 [rows][groups]); group even."""
    return encode_groups(x, group, True)

def vq_encode(x, books, residual=False):
    """Residual vector quantisation of x [n][8] with books [stages][entries][8].

    Returns index u8 [n][stages], and with residual=True also what is left of x.
    """
    a, b = _f32(x, 2), _f32(books, 3, "books")
    if a.shape[1] != 8 or b.shape[2] != 8:
        raise ValueError("vectors and codewords have 8 elements")
    if not (1 <= b.shape[0] <= 8 and 1 <= b.shape[1] <= 256):
        raise ValueError("books must have 1 to 8 stages of 1 to 256 entries")
    cdef size_t n = a.shape[0]
    cdef unsigned stages = b.shape[0], entries = b.shape[1]
    index = np.empty((n, stages), np.uint8)
    left = np.empty((n, 8), np.float32) if residual else None
    cdef uint8_t *to = <uint8_t *>address(index)
    cdef float *left_at = floats(left) if residual else NULL
    cdef const float *from_ = floats(a)
    cdef const float *books_at = floats(b)
    with nogil:
        we_kernels_active().vq_encode(to, left_at, from_, books_at, n, stages, entries)
    return (index, left) if residual else index

# ------------------------------------------------------------- linear maps ----
cdef class Activations:
    """Inputs of a matmul [n][cols], with their integers if group is not 0."""
    cdef we_acts acts
    cdef readonly object x, q, q_halves, scale, bias
    cdef readonly size_t address        # of the we_acts

    def __init__(self, x, size_t group=0):
        self.x = _f32(x, 2)
        cdef size_t n = self.x.shape[0], cols = self.x.shape[1], n_groups = 0
        if group not in (0, 32, 64, 128):
            raise ValueError("group must be 0, 32, 64 or 128")
        self.address = <uintptr_t>&self.acts
        self.acts.x = floats(self.x)
        self.acts.x_stride = cols
        self.acts.group = group
        if group:
            n_groups = (cols + group - 1) // group
            self.q = np.empty((n, n_groups * group), np.int16)
            self.q_halves = np.empty((n, n_groups * group), np.int16)
            self.scale = np.empty((n, n_groups), np.float32)
            self.bias = np.empty((n, n_groups), np.int32)
            self.acts.q = <int16_t *>address(self.q)
            self.acts.q_halves = <int16_t *>address(self.q_halves)
            self.acts.scale = floats(self.scale)
            self.acts.bias = <int32_t *>address(self.bias)
            self.acts.q_stride = n_groups * group
            self.acts.scale_stride = n_groups
            with nogil:
                we_kernels_active().quantize(&self.acts, 0, n, cols)

def _payload_geometry(int encoding, size_t rows, size_t cols, size_t group, size_t vec_dim, size_t stages):
    """(row_bytes, payload bytes, scales) of a matrix; ValueError for what no format allows."""
    if encoding in (WE_F32, WE_BF16):
        width = 4 if encoding == WE_F32 else 2
        return width * cols, width * cols * rows, 0
    if encoding in (WE_Q8G, WE_Q4G, WE_Q3G):
        if group < 1 or (encoding == WE_Q4G and group % 2):
            raise ValueError("group must be at least 1, and even for Q4G")
        n_groups = (cols + group - 1) // group
        padded = n_groups * group
        row_bytes = {WE_Q8G: padded, WE_Q4G: padded // 2, WE_Q3G: (3 * padded + 7) // 8 + 1}[encoding]
        return row_bytes, row_bytes * rows, rows * n_groups
    if encoding == WE_MXFP4:
        if group != 32:
            raise ValueError("MXFP4 has groups of 32")
        n_groups = (cols + 31) // 32
        return 16 * n_groups, 16 * n_groups * rows, n_groups * rows
    if encoding in (WE_VQ3R, WE_VQ2R, WE_VQ4P):
        if not (1 <= vec_dim <= 64 and 1 <= stages <= 8 and cols % vec_dim == 0):
            raise ValueError("VQ needs 1 to 8 stages, vec_dim in 1 .. 64, and whole vectors in a row")
        if encoding == WE_VQ4P and stages != 4:
            raise ValueError("VQ4P has 4 stages")
        unit = 3 if encoding == WE_VQ4P else stages
        return 0, (rows + 63) // 64 * 64 * (cols // vec_dim) * unit, rows
    raise ValueError(f"unknown encoding {encoding}")

cdef class Matrix:
    """A weight matrix over arrays it keeps alive. See we_matrix in kernels.h for the layouts.

    payload: any array of exactly the payload's bytes; scales: uint16 or float16, for MXFP4 uint8; books: float32
    [stages][256, or 64 for VQ4P][vec_dim].
    """
    cdef we_matrix w
    cdef object keep
    cdef readonly size_t address        # of the we_matrix

    def __init__(self, int encoding, size_t rows, size_t cols, payload, scales=None, size_t group=0, books=None,
                 size_t vec_dim=8, size_t stages=0):
        books = None if books is None else _f32(books, 3, "books")
        if books is not None and stages == 0:
            stages = books.shape[0]
        row_bytes, n_bytes, n_scales = _payload_geometry(encoding, rows, cols, group, vec_dim, stages)
        payload = np.ascontiguousarray(payload).reshape(-1).view(np.uint8)
        if payload.size != n_bytes:
            raise ValueError(f"the payload must have {n_bytes} bytes, not {payload.size}")
        if n_scales:
            scales = np.ascontiguousarray(scales).reshape(-1).view(np.uint8 if encoding == WE_MXFP4 else np.uint16)
            if scales.size != n_scales:
                raise ValueError(f"there must be {n_scales} scales, not {scales.size}")
        if encoding in (WE_VQ3R, WE_VQ2R, WE_VQ4P):
            expected = (stages, 64 if encoding == WE_VQ4P else 256, vec_dim)
            books = _shaped(books, expected, "books")
        self.keep = (payload, scales, books)
        self.address = <uintptr_t>&self.w
        self.w.encoding, self.w.rows, self.w.cols = encoding, rows, cols
        self.w.group, self.w.row_bytes = group, row_bytes
        self.w.payload = <const void *>address(payload)
        self.w.scales = <const uint16_t *>address(scales) if n_scales else NULL
        self.w.books = floats(books) if books is not None else NULL
        self.w.vec_dim, self.w.stages = vec_dim, stages

    def decode(self, size_t row0=0, row1=None):
        """Rows [row0, row1) as float32 [rows][cols]."""
        row0, row1 = _rows(row0, row1, self.w.rows)
        y = np.empty((row1 - row0, self.w.cols), np.float32)
        cdef size_t first = row0, end = row1
        cdef float *to = floats(y)
        with nogil:
            we_kernels_active().decode_rows(&self.w, first, end, to, self.w.cols)
        return y

    def matmul(self, x, size_t row0=0, row1=None, bint exact=False):
        """x [n][cols] by rows [row0, row1): float32 [n][rows]; with exact=True never by integers."""
        row0, row1 = _rows(row0, row1, self.w.rows)
        cdef Activations a = Activations(x, 0 if exact else we_integer_group(&self.w))
        if a.x.shape[1] != self.w.cols:
            raise ValueError(f"x must have {self.w.cols} columns, not {a.x.shape[1]}")
        cdef size_t first = row0, end = row1, n = a.x.shape[0]
        y = np.empty((n, end - first), np.float32)
        cdef float *to = floats(y)
        with nogil:
            we_kernels_active().matmul(&self.w, first, end, &a.acts, n, to, end - first)
        return y

    def matmul_t(self, x, size_t row0=0, row1=None):
        """x [n][row1 - row0] by the transposed rows [row0, row1): float32 [n][cols]."""
        row0, row1 = _rows(row0, row1, self.w.rows)
        a = _f32(x, 2)
        cdef size_t first = row0, end = row1, n = a.shape[0]
        if a.shape[1] != row1 - row0:
            raise ValueError(f"x must have {row1 - row0} columns, not {a.shape[1]}")
        y = np.empty((n, self.w.cols), np.float32)
        row = np.empty(self.w.cols, np.float32)
        cdef float *to = floats(y)
        cdef float *row_at = floats(row)
        cdef const float *from_ = floats(a)
        with nogil:
            we_kernels_active().matmul_t(&self.w, first, end, from_, end - first, n, to, self.w.cols, row_at)
        return y

# --------------------------------------------------- elementwise and norms ----
def _copy(x):
    return np.array(x, dtype=np.float32, order="C", ndmin=1)

def add(y, x):
    """y + x."""
    y = _copy(y)
    x = _shaped(x, y.shape, "x")
    we_kernels_active().add(floats(y), floats(x), y.size)
    return y

def add_scaled(y, float a, x):
    """y + a x."""
    y = _copy(y)
    x = _shaped(x, y.shape, "x")
    we_kernels_active().add_scaled(floats(y), a, floats(x), y.size)
    return y

def silu_mul(gate, up):
    """silu(gate) up."""
    gate = _copy(gate)
    up = _shaped(up, gate.shape, "up")
    we_kernels_active().silu_mul(floats(gate), floats(gate), floats(up), gate.size)
    return gate

def rms_norm(x, w, float eps):
    """x / sqrt(mean(x^2) + eps) w, over one vector."""
    x = _copy(x)
    w = _shaped(w, x.shape, "w")
    we_kernels_active().rms_norm(floats(x), floats(x), floats(w), eps, x.size)
    return x

def rms_norm_gated(x, w, gate, float eps):
    """rms_norm(x, w, eps) sigmoid(gate)."""
    x = _copy(x)
    w, gate = _shaped(w, x.shape, "w"), _shaped(gate, x.shape, "gate")
    we_kernels_active().rms_norm_gated(floats(x), floats(x), floats(w), floats(gate), eps, x.size)
    return x

def l2_norm(x, float scale=1.0):
    """x / sqrt(sum(x^2) + 1e-6) scale, over one vector."""
    x = _copy(x)
    we_kernels_active().l2_norm(floats(x), scale, x.size)
    return x

# --------------------------------------------------------------------- KDA ----
def short_conv(u, taps, tail, size_t c0=0, c1=None):
    """Causal convolution and SiLU of u [n][C] with taps [K][C] after tail [K - 1][C]: (y, new tail), zeros
    outside channels [c0, c1)."""
    u, taps = _f32(u, 2, "u"), _f32(taps, 2, "taps")
    n, C, K = u.shape[0], u.shape[1], taps.shape[0]
    if K < 1:
        raise ValueError("taps must have at least one row")
    taps, tail = _shaped(taps, (K, C), "taps"), _shaped(tail, (K - 1, C), "tail")
    first, last = _rows(c0, c1, C)
    y, after = np.zeros_like(u), np.zeros_like(tail)
    we_kernels_active().short_conv(floats(y), C, floats(after), floats(u), C, floats(tail), C, floats(taps), C, K, n,
                                   first, last)
    return y, after

def decay_softplus(f, dt_bias, float rate):
    """exp(-rate softplus(f + dt_bias)), elementwise over one vector."""
    f = _copy(f)
    dt_bias = _shaped(dt_bias, f.shape, "dt_bias")
    we_kernels_active().decay_softplus(floats(f), floats(f), floats(dt_bias), rate, f.size)
    return f

def decay_bounded(f, dt_bias, float rate, float lower):
    """exp(lower sigmoid(rate (f + dt_bias))), elementwise over one vector."""
    f = _copy(f)
    dt_bias = _shaped(dt_bias, f.shape, "dt_bias")
    we_kernels_active().decay_bounded(floats(f), floats(f), floats(dt_bias), rate, lower, f.size)
    return f

def kda(S, q, k, v, decay, beta, bint stream=False):
    """One head over n tokens: S [dk][dv], q k decay [n][dk], v [n][dv], beta [n]; returns (S after, o [n][dv])."""
    S, q, v = _f32(S, 2, "S"), _f32(q, 2, "q"), _f32(v, 2, "v")
    n, dk, dv = q.shape[0], S.shape[0], S.shape[1]
    q, k = _shaped(q, (n, dk), "q"), _shaped(k, (n, dk), "k")
    v, decay, beta = _shaped(v, (n, dv), "v"), _shaped(decay, (n, dk), "decay"), _shaped(beta, (n,), "beta")
    after, o = np.empty_like(S), np.empty_like(v)
    cdef we_kda_args a
    a.S_in, a.S_out, a.q, a.k = floats(S), floats(after), floats(q), floats(k)
    a.v, a.decay, a.beta, a.o = floats(v), floats(decay), floats(beta), floats(o)
    a.n, a.dk, a.dv, a.qk_stride, a.v_stride, a.beta_stride, a.stream = n, dk, dv, dk, dv, 1, stream
    we_kernels_active().kda(&a)
    return after, o

# --------------------------------------------------------------------- MLA ----
_KV = {"f32": WE_KV_F32, "f16": WE_KV_F16, "q8": WE_KV_Q8}

def latent_bytes(size_t r, size_t rope, kv):
    """Bytes of one position's latent."""
    return we_latent_bytes(r, rope, <we_kv><int>_KV[kv])

def latent_store(c, key, kv):
    """Latent rows c [n][r] and keys [n][rope] as bytes [n][latent_bytes]."""
    c, key = _f32(c, 2, "c"), _f32(key, 2, "key")
    if c.shape[0] != key.shape[0]:
        raise ValueError("c and key must have as many rows")
    r, rope = c.shape[1], key.shape[1]
    latents = np.zeros((c.shape[0], latent_bytes(r, rope, kv)), np.uint8)
    for t in range(c.shape[0]):
        we_kernels_active().latent_store(<void *>address(latents[t]), floats(c[t]), floats(key[t]), r, rope,
                                         <we_kv><int>_KV[kv])
    return latents

def latent_load(latents, size_t r, size_t rope, kv):
    """Bytes [n][latent_bytes] as float32 [n][r + rope]."""
    latents = np.ascontiguousarray(latents, dtype=np.uint8)
    if latents.ndim != 2 or latents.shape[1] != latent_bytes(r, rope, kv):
        raise ValueError(f"latents must be [n][{latent_bytes(r, rope, kv)}] bytes")
    y = np.empty((latents.shape[0], r + rope), np.float32)
    for t in range(latents.shape[0]):
        we_kernels_active().latent_load(floats(y[t]), <const void *>address(latents[t]), r, rope, <we_kv><int>_KV[kv])
    return y

def mla(q, latents, size_t r, size_t position, float scale, kv, size_t head_begin=0, head_end=None, cuts=()):
    """Attention of q [n][heads][r + rope] at position .. position + n over latents [position + n][latent_bytes], folded
    from the windows between `cuts`, if any. Returns o [n][heads][r]; heads outside [head_begin, head_end) are zeros."""
    q = _f32(q, 3, "q")
    n, heads, rope = q.shape[0], q.shape[1], q.shape[2] - r
    if rope < 0:
        raise ValueError("q must have at least r elements a head")
    step, n_blocks = latent_bytes(r, rope, kv), (position + n + WE_LATENT_TILE - 1) // WE_LATENT_TILE
    first, last = _rows(head_begin, head_end, heads)
    latents = np.ascontiguousarray(latents, dtype=np.uint8)
    if latents.shape != (position + n, step) or any(cut % WE_LATENT_TILE for cut in cuts):
        raise ValueError(f"latents must be [{position + n}][{step}] bytes, cuts multiples of {WE_LATENT_TILE}")
    blocks = np.zeros((n_blocks, WE_LATENT_TILE, step), np.uint8)
    blocks.reshape(-1, step)[:position + n] = latents
    pointers, work = np.array([b.ctypes.data for b in blocks], np.uintp), np.empty(we_mla_work(r, rope), np.float32)
    parts, softmax = (np.zeros((len(cuts) + 1, n, *size), np.float32) for size in ((heads, r), (last - first, 2)))
    cdef we_mla_args a
    a.q, a.work, a.blocks = floats(q[:, first:]), floats(work), <const void **>address(pointers)
    a.n, a.position, a.heads, a.q_stride, a.o_stride = n, position, last - first, heads * (r + rope), heads * r
    a.r, a.rope, a.scale, a.kv, o = r, rope, scale, <we_kv><int>_KV[kv], parts[:, :, first:last]
    for i, (a.begin, a.end) in enumerate(zip((0, *cuts), (*cuts, n_blocks * WE_LATENT_TILE), strict=True)):
        a.o, a.softmax = floats(o[i]), floats(softmax[i])
        we_kernels_active().mla(&a)
        for at in np.ndindex(n, last - first if i else 0):
            we_kernels_active().mla_fold(floats(o[0][at]), floats(softmax[0][at]), floats(o[i][at]),
                                         floats(softmax[i][at]), r)
    o[0] /= softmax[0, :, :, 1:]
    return parts[0]

# ------------------------------------------------------- router and logits ----
def route(logits, top_k, bias=None, groups=1, top_groups=1, renormalize=True, float scaling=1.0):
    """Experts of one token: (ids int32 [top_k] ascending, weights float32 [top_k])."""
    logits = _f32(logits, 1, "logits")
    experts = logits.shape[0]
    if not (1 <= top_k <= experts and 1 <= top_groups <= groups and experts % groups == 0):
        raise ValueError("top_k or groups do not fit the number of experts")
    bias = None if bias is None else _shaped(bias, (experts,), "bias")
    ids, weights, work = np.empty(top_k, np.int32), np.empty(top_k, np.float32), np.empty(experts, np.float32)
    cdef we_router r
    r.bias = floats(bias) if bias is not None else NULL
    r.experts, r.top_k, r.groups, r.top_groups = experts, top_k, groups, top_groups
    r.renormalize, r.scaling = bool(renormalize), scaling
    we_kernels_active().route(&r, floats(logits), <int32_t *>address(ids), floats(weights), floats(work))
    return ids, weights

def argmax(x):
    """Lowest index of the largest element."""
    x = _f32(x, 1)
    if not x.size:
        raise ValueError("x is empty")
    return we_kernels_active().argmax(floats(x), x.size)

def log_sum_exp(x):
    """log(sum(e^x)); NaN if any element is."""
    x = _f32(x, 1)
    if not x.size:
        raise ValueError("x is empty")
    return we_kernels_active().log_sum_exp(floats(x), x.size)
