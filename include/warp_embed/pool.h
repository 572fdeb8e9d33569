/* A few threads that wait for work and share a range of items.
 *
 * Threads are parked between calls: an idle pool costs nothing. A region's items are claimed `grain` at a time, so
 * which thread does which item is not fixed; a task must write only what belongs to its items, and then the result
 * does not depend on the number of threads. Tasks never take the GIL and never fail.
 * A pool belongs to one caller at a time. After fork() the child must not use it (the owner compares pids). */
#ifndef WARP_EMBED_POOL_H
#define WARP_EMBED_POOL_H
#include <stddef.h>
#include "warp_embed/status.h"

typedef struct we_pool we_pool;

/* Do items [begin, end). worker is in [0, threads): the index of a private scratch area. */
typedef void we_task(void *arg, size_t begin, size_t end, unsigned worker);

/* A pool of `threads` workers, the caller of we_pool_run being one of them (threads >= 1; 1 starts no thread).
 * Signals are blocked in the others. WE_E_MEMORY or WE_E_IO when it cannot be made; *pool is then NULL. */
we_status we_pool_create(we_pool **pool, unsigned threads);

/* Run task over [0, n_items), at most `grain` (>= 1) items a claim, and return when all are done.
 * One claim's worth of items, or a pool of one thread, runs in the calling thread without waking anybody. */
void we_pool_run(we_pool *pool, we_task *task, void *arg, size_t n_items, size_t grain);

/* Bind the workers to processors: worker i to cpus[i], [threads]. The caller of we_pool_run, cpus[0], stays as it is.
 * WE_E_IO when the system refuses one of them, or binds no threads. */
we_status we_pool_bind(we_pool *pool, const int *cpus);

unsigned we_pool_threads(const we_pool *pool);

/* Seconds on a clock that only goes forward. */
double we_now_s(void);

/* Stop and join the threads. NULL is allowed. */
void we_pool_destroy(we_pool *pool);

#endif
