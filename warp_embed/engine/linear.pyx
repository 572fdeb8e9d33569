"""Products of weight matrices with the activations of a pass, spread over the pool.

Products that do not depend on each other are gathered (add_product) and run as one region (run_products): waking the
threads costs more than a small product.
"""
import numpy as np

from warp_embed._kernels cimport WE_OK, pool_api, we_acts, we_integer_group, we_matrix, we_pool, we_status, we_task
from warp_embed.engine.structs cimport Job, Linear

cdef enum:
    ROW_BLOCK = 16              # rows that a thread takes at a time
    SERIAL_WORK = 1 << 17       # multiply-adds below which waking a thread costs more than it saves
    SMALL_MATRIX = 1 << 18      # weights below which inputs stay f32: integers would save no time that anybody sees,
                                # and their rounding is what limits the accuracy of small models


cdef we_pool *start_pool(unsigned threads, cpus) except NULL:
    """cpus: None, or a processor for each thread; the first thread is the caller's, which is not bound."""
    cdef we_pool *pool = NULL
    cdef we_status status = pool_api().create(&pool, threads)
    cdef int[::1] numbers
    if status != WE_OK:
        raise MemoryError(f"the system refused to start {threads} threads")
    if cpus is not None:
        numbers = np.array(cpus, np.intc)
        if <unsigned>numbers.shape[0] != threads or pool_api().bind(pool, &numbers[0]) != WE_OK:
            pool_api().destroy(pool)
            raise ValueError(f"threads cannot be bound to the processors {list(cpus)} here")
    return pool


cdef void set_acts(we_acts *a, const float *x, size_t x_stride) noexcept nogil:
    """Point a at new inputs; whoever needs them as integers quantises them."""
    a.x = x
    a.x_stride = x_stride
    a.group = 0


cdef struct QuantizeArgs:
    const Linear *L
    const we_acts *a
    size_t cols


cdef void quantize_tokens(void *arg, size_t begin, size_t end, unsigned worker) noexcept nogil:
    cdef QuantizeArgs *q = <QuantizeArgs *>arg
    q.L.K.quantize(q.a, begin, end, q.cols)


cdef void quantize(Linear *L, const we_acts *a, size_t n, size_t cols) noexcept nogil:
    """Integers of n tokens of a, for a.group."""
    cdef QuantizeArgs q
    q.L = L
    q.a = a
    q.cols = cols
    for_each(L, quantize_tokens, &q, n, 4 * n * cols)


cdef unsigned input_group(const we_matrix *w) noexcept nogil:
    """The group in which a matrix gets its inputs as integers; 0: as f32. A matter of shape and encoding alone."""
    return we_integer_group(w) if <size_t>w.rows * w.cols >= SMALL_MATRIX else 0


cdef void add_product(Linear *L, const we_matrix *w, we_acts *a, size_t n, float *y, size_t y_stride) noexcept nogil:
    """Note y[t] = W x[t] for n tokens; it is computed by the next run_products. a stays as it is until then."""
    cdef unsigned group = input_group(w)
    if n == 0:
        return
    if group != 0 and a.group != group:
        if a.group != 0:
            run_products(L)                 # a second group in one input: the users of the first go before
        a.group = group
        quantize(L, a, n, w.cols)
    add_job(L, w, a, group, n, y, y_stride)


cdef void add_exact_product(Linear *L, const we_matrix *w, const we_acts *a, size_t n, float *y,
                            size_t y_stride) noexcept nogil:
    """The same with inputs as f32, whatever the matrix."""
    add_job(L, w, a, 0, n, y, y_stride)


cdef void add_job(Linear *L, const we_matrix *w, const we_acts *a, unsigned group, size_t n, float *y,
                  size_t y_stride) noexcept nogil:
    cdef Job *job
    if L.n_jobs == L.capacity:
        run_products(L)
    job = &L.jobs[L.n_jobs]
    job.w = w
    job.a = a[0]
    job.a.group = group
    job.n = n
    job.y = y
    job.y_stride = y_stride
    job.first = L.blocks
    L.n_jobs += 1
    L.blocks += (w.rows + ROW_BLOCK - 1) // ROW_BLOCK
    L.work += n * w.rows * w.cols


cdef void multiply_rows(void *arg, size_t begin, size_t end, unsigned worker) noexcept nogil:
    """Row blocks [begin, end) of all jobs, counted through."""
    cdef Linear *L = <Linear *>arg
    cdef Job *job = L.jobs
    cdef size_t row0, row1, stop
    while begin < end:
        while job + 1 < L.jobs + L.n_jobs and job[1].first <= begin:
            job += 1
        stop = end
        if job + 1 < L.jobs + L.n_jobs and job[1].first < stop:
            stop = job[1].first
        row0 = (begin - job.first) * ROW_BLOCK
        row1 = (stop - job.first) * ROW_BLOCK
        if row1 > job.w.rows:
            row1 = job.w.rows
        L.K.matmul(job.w, row0, row1, &job.a, job.n, job.y + row0, job.y_stride)
        begin = stop


cdef void run_products(Linear *L) noexcept nogil:
    """Compute all that was added."""
    cdef size_t grain
    if L.n_jobs == 0:
        return
    if L.work < SERIAL_WORK:
        multiply_rows(L, 0, L.blocks, 0)
    else:
        grain = L.blocks // (16 * L.pool_api.threads(L.pool))
        L.pool_api.run(L.pool, multiply_rows, L, L.blocks, grain if grain > 0 else 1)
    L.n_jobs = 0
    L.blocks = 0
    L.work = 0


cdef void product(Linear *L, const we_matrix *w, we_acts *a, size_t n, float *y, size_t y_stride) noexcept nogil:
    """y[t] = W x[t], at once."""
    add_product(L, w, a, n, y, y_stride)
    run_products(L)


cdef void for_each(Linear *L, we_task *task, void *arg, size_t n_items, size_t work) noexcept nogil:
    """Run task over [0, n_items), a few equal shares a thread; in this thread alone when `work`, about as many
    multiply-adds, is small."""
    cdef size_t grain = n_items // (4 * L.pool_api.threads(L.pool))
    if work < SERIAL_WORK:
        task(arg, 0, n_items, 0)
    else:
        L.pool_api.run(L.pool, task, arg, n_items, grain if grain > 0 else 1)
