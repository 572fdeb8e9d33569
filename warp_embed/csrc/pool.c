/* The thread pool of pool.h.
 *
 * A region is open while `open` holds its number. A worker joins by adding itself to `inside` and then looking at
 * `open`; the caller closes the region by clearing `open` and then looking at `inside`. Both are sequentially
 * consistent, so either the worker sees a closed region and leaves, or the caller sees the worker and waits for it.
 * A worker that wakes too late therefore delays nobody, and the region's fields are never read while they change.
 * The same pattern, a store then a load of the other side's word, rules out lost wake-ups for `parked` and `waiting`. */
#include "os_threads.h"
#include "warp_embed/pool.h"
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include "warp_embed/target.h"
#ifdef WE_X86
#include <immintrin.h>
#endif

#define SPIN_S 50e-6            /* between the regions of one call; parked afterwards */
#define CACHE_LINE 64

typedef struct worker {
    we_pool  *pool;
    os_thread thread;
    unsigned  index;            /* 1 .. threads - 1 */
} worker;

struct we_pool {
    unsigned  threads, started; /* started: workers that run, to be joined */
    worker   *workers;          /* [threads - 1]                           */
    os_mutex  mutex;
    os_cond   wake, done;

    we_task  *task;             /* the open region; written only while `open` is 0 and `inside` is 0 */
    void     *arg;
    size_t    n_items, grain, n_claims;
    unsigned  number;           /* of the last region, never 0 */

    char        pad0[CACHE_LINE];
    atomic_uint open;           /* number of the open region, or 0 */
    atomic_uint parked;         /* workers that wait for `wake`    */
    atomic_bool stop;
    char          pad1[CACHE_LINE];
    atomic_size_t next;         /* next claim                      */
    char        pad2[CACHE_LINE];
    atomic_uint inside;         /* workers in the region           */
    atomic_bool waiting;        /* the caller waits for `done`     */
};

static void pause_cpu(void)
{
#if defined(WE_X86)
    _mm_pause();
#elif defined(WE_ARM64) && defined(__GNUC__)
    __asm__ __volatile__("yield");
#else
    os_yield();
#endif
}

static void do_claims(we_pool *pool, unsigned index)
{
    const size_t n_claims = pool->n_claims, grain = pool->grain, n_items = pool->n_items;
    for (;;) {
        const size_t claim = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (claim >= n_claims) return;
        const size_t begin = claim * grain;
        pool->task(pool->arg, begin, n_items - begin > grain ? begin + grain : n_items, index);
    }
}

/* ---- workers ---- */

static int is_new(we_pool *pool, unsigned seen)
{
    const unsigned open = atomic_load(&pool->open);
    return (open != 0 && open != seen) || atomic_load(&pool->stop);
}

static void wait_for_region(we_pool *pool, unsigned seen)
{
    const double until = we_clock_s() + SPIN_S;
    do {
        for (int i = 0; i < 32; i++) {
            if (is_new(pool, seen)) return;
            pause_cpu();
        }
    } while (we_clock_s() < until);
    os_lock(&pool->mutex);
    atomic_fetch_add(&pool->parked, 1);
    while (!is_new(pool, seen)) os_wait(&pool->wake, &pool->mutex);
    atomic_fetch_sub(&pool->parked, 1);
    os_unlock(&pool->mutex);
}

static void leave_region(we_pool *pool)
{
    if (atomic_fetch_sub(&pool->inside, 1) == 1 && atomic_load(&pool->waiting)) {
        os_lock(&pool->mutex);
        os_signal(&pool->done);
        os_unlock(&pool->mutex);
    }
}

static THREAD_RESULT run_worker(void *arg)
{
    const worker *self = arg;
    we_pool *pool = self->pool;
    unsigned seen = 0;
    for (;;) {
        wait_for_region(pool, seen);
        if (atomic_load(&pool->stop)) return THREAD_DONE;
        atomic_fetch_add(&pool->inside, 1);
        const unsigned open = atomic_load(&pool->open);
        if (open != 0) {
            seen = open;
            do_claims(pool, self->index);
        }
        leave_region(pool);
    }
}

/* ---- the caller ---- */

static void wake_workers(we_pool *pool, size_t wanted)
{
    if (atomic_load(&pool->parked) == 0) return;
    os_lock(&pool->mutex);
    if (wanted >= pool->threads - 1) os_broadcast(&pool->wake);
    else while (wanted--) os_signal(&pool->wake);
    os_unlock(&pool->mutex);
}

static void wait_until_empty(we_pool *pool)
{
    const double until = we_clock_s() + SPIN_S;
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load(&pool->inside) == 0) return;
            pause_cpu();
        }
    } while (we_clock_s() < until);
    os_lock(&pool->mutex);
    atomic_store(&pool->waiting, 1);
    while (atomic_load(&pool->inside) != 0) os_wait(&pool->done, &pool->mutex);
    atomic_store(&pool->waiting, 0);
    os_unlock(&pool->mutex);
}

void we_pool_run(we_pool *pool, we_task *task, void *arg, size_t n_items, size_t grain)
{
    if (n_items == 0) return;
    if (grain == 0) grain = 1;
    if (pool->started == 0 || n_items <= grain) {       /* by claims here too: tasks may count on their size */
        for (size_t begin = 0; begin < n_items;) {
            const size_t end = n_items - begin > grain ? begin + grain : n_items;
            task(arg, begin, end, 0);
            begin = end;
        }
        return;
    }
    pool->task = task;
    pool->arg = arg;
    pool->n_items = n_items;
    pool->grain = grain;
    pool->n_claims = (n_items - 1) / grain + 1;
    if (++pool->number == 0) pool->number = 1;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    atomic_store(&pool->open, pool->number);
    wake_workers(pool, pool->n_claims - 1);
    do_claims(pool, 0);
    atomic_store(&pool->open, 0);
    wait_until_empty(pool);
}

we_status we_pool_bind(we_pool *pool, const int *cpus)
{
    for (unsigned i = 1; i <= pool->started; i++)
        if (os_bind(pool->workers[i - 1].thread, cpus[i])) return WE_E_IO;
    return WE_OK;
}

unsigned we_pool_threads(const we_pool *pool) { return pool->threads; }

double we_now_s(void) { return we_clock_s(); }

/* ---- life ---- */

static int init_locks(we_pool *pool)
{
    int error = os_mutex_init(&pool->mutex);
    if (error) return error;
    error = os_cond_init(&pool->wake);
    if (error) goto no_wake;
    error = os_cond_init(&pool->done);
    if (error) goto no_done;
    return 0;
no_done:
    os_cond_destroy(&pool->wake);
no_wake:
    os_mutex_destroy(&pool->mutex);
    return error;
}

we_status we_pool_create(we_pool **out, unsigned threads)
{
    *out = NULL;
    if (threads == 0) threads = 1;
    we_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return WE_E_MEMORY;
    pool->threads = threads;
    pool->workers = calloc(threads, sizeof *pool->workers);
    if (!pool->workers || init_locks(pool)) {
        free(pool->workers);
        free(pool);
        return WE_E_MEMORY;
    }
    atomic_init(&pool->open, 0);
    atomic_init(&pool->parked, 0);
    atomic_init(&pool->stop, 0);
    atomic_init(&pool->next, 0);
    atomic_init(&pool->inside, 0);
    atomic_init(&pool->waiting, 0);
    for (unsigned i = 1; i < threads; i++) {
        worker *w = &pool->workers[i - 1];
        w->pool = pool;
        w->index = i;
        const int error = os_start(&w->thread, run_worker, w);
        if (error) {
            we_pool_destroy(pool);
            return error == ENOMEM ? WE_E_MEMORY : WE_E_IO;
        }
        pool->started = i;
    }
    *out = pool;
    return WE_OK;
}

void we_pool_destroy(we_pool *pool)
{
    if (!pool) return;
    os_lock(&pool->mutex);
    atomic_store(&pool->stop, 1);
    os_broadcast(&pool->wake);
    os_unlock(&pool->mutex);
    for (unsigned i = 0; i < pool->started; i++) os_join(pool->workers[i].thread);
    os_cond_destroy(&pool->done);
    os_cond_destroy(&pool->wake);
    os_mutex_destroy(&pool->mutex);
    free(pool->workers);
    free(pool);
}
