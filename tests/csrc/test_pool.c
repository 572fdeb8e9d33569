/* The pool: every item once, results visible to the caller, idle when idle, gone when destroyed. Sources: pool.c. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "check.h"
#include "alloc.h"
#include "warp_embed/pool.h"

#define ITEMS 5000

typedef struct job {
    unsigned threads, done[ITEMS];      /* done is not atomic: an item given to two threads is a data race */
    size_t   grain, sum[16];            /* per worker */
} job;

static void sleep_us(long us)
{
    struct timespec t = {0, us * 1000};
    nanosleep(&t, NULL);
}

static void count_items(void *arg, size_t begin, size_t end, unsigned worker)
{
    job *j = arg;
    CHECK(worker < j->threads && begin < end && end - begin <= j->grain);
    for (size_t i = begin; i < end; i++) {
        j->done[i]++;
        j->sum[worker] += i;
    }
}

static void run_and_check(we_pool *pool, job *j, size_t n, size_t grain)
{
    memset(j->done, 0, sizeof j->done);
    memset(j->sum, 0, sizeof j->sum);
    j->grain = grain;
    we_pool_run(pool, count_items, j, n, grain);
    size_t sum = 0;
    for (unsigned w = 0; w < j->threads; w++) sum += j->sum[w];
    CHECK(sum == (n ? n * (n - 1) / 2 : 0));
    for (size_t i = 0; i < ITEMS; i++) CHECK(j->done[i] == (i < n));
}

static void every_size(unsigned threads)
{
    static const size_t sizes[] = {0, 1, 2, 3, 7, 64, 1000, ITEMS}, grains[] = {1, 2, 3, 64, 4999, 1 << 20};
    we_pool *pool;
    job *j = calloc(1, sizeof *j);
    CHECK(we_pool_create(&pool, threads) == WE_OK && we_pool_threads(pool) == threads);
    j->threads = threads;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (size_t g = 0; g < sizeof grains / sizeof *grains; g++) {
            run_and_check(pool, j, sizes[s], grains[g]);
            if (s % 3 == 0) sleep_us(200);          /* long enough to park */
        }
    we_pool_destroy(pool);
    free(j);
}

/* Regions in quick succession, each using what the one before wrote. */
typedef struct chain { size_t step, value[64]; } chain;

static void add_step(void *arg, size_t begin, size_t end, unsigned worker)
{
    chain *c = arg;
    (void)worker;
    for (size_t i = begin; i < end; i++) c->value[i] += c->step;
}

static void quick_succession(unsigned threads, size_t regions)
{
    we_pool *pool;
    chain c = {0, {0}};
    size_t want = 0;
    CHECK(we_pool_create(&pool, threads) == WE_OK);
    for (c.step = 1; c.step <= regions; c.step++) {
        we_pool_run(pool, add_step, &c, 64, 1 + c.step % 9);
        want += c.step;
        if (c.step % 97 == 0) sleep_us(100);
    }
    for (int i = 0; i < 64; i++) CHECK(c.value[i] == want);
    we_pool_destroy(pool);
}

static atomic_size_t total;
static void add_length(void *arg, size_t begin, size_t end, unsigned worker)
{
    (void)arg, (void)worker;
    atomic_fetch_add(&total, end - begin);
}

static void huge_counts(void)
{
    we_pool *pool;
    CHECK(we_pool_create(&pool, 3) == WE_OK);
    const size_t grains[] = {SIZE_MAX, SIZE_MAX / 2, SIZE_MAX / 7};
    for (int i = 0; i < 3; i++) {
        total = 0;
        we_pool_run(pool, add_length, NULL, SIZE_MAX, grains[i]);
        CHECK(total == SIZE_MAX);
    }
    we_pool_destroy(pool);
}

static void idle_costs_nothing(void)
{
    we_pool *pool;
    struct timespec before, after;
    chain c = {1, {0}};
    CHECK(we_pool_create(&pool, 4) == WE_OK);
    we_pool_run(pool, add_step, &c, 64, 1);
    sleep_us(50000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    for (int i = 0; i < 5; i++) sleep_us(100000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    CHECK((after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1000000 < 50);
    we_pool_destroy(pool);
}

static pthread_t main_thread;
static volatile sig_atomic_t here, elsewhere;
static void on_signal(int number)
{
    (void)number;
    if (pthread_equal(pthread_self(), main_thread)) here++; else elsewhere++;
}

static void signals_are_the_hosts(void)
{
    we_pool *pool;
    struct sigaction action;
    chain c = {1, {0}};
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    main_thread = pthread_self();
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0 && we_pool_create(&pool, 4) == WE_OK);
    for (int i = 0; i < 50; i++) {
        CHECK(kill(getpid(), SIGUSR1) == 0);
        we_pool_run(pool, add_step, &c, 64, 1);
    }
    CHECK(here == 50 && elsewhere == 0);
    we_pool_destroy(pool);
}

static void *own_pool(void *arg)
{
    quick_succession(2 + (unsigned)(size_t)arg, 300);
    return NULL;
}

static void pools_side_by_side(void)
{
    pthread_t threads[3];
    for (size_t i = 0; i < 3; i++) CHECK(pthread_create(&threads[i], NULL, own_pool, (void *)i) == 0);
    for (size_t i = 0; i < 3; i++) pthread_join(threads[i], NULL);
}

static void report_cpu(void *arg, size_t begin, size_t end, unsigned worker)
{
    (void)begin, (void)end;
    ((int *)arg)[worker] = sched_getcpu();
    sleep_us(2000);                         /* or one worker would do all of them */
}

static void workers_stay_where_they_are_bound(void)
{
    we_pool *pool;
    cpu_set_t all, after;
    int cpus[4], seen[4] = {-1, -1, -1, -1}, bad[4] = {0, 1 << 20, 0, 0}, n = 0;
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0 && we_pool_create(&pool, 4) == WE_OK);
    for (int cpu = 0; n < 4; cpu = (cpu + 1) % CPU_SETSIZE)
        if (CPU_ISSET(cpu, &all)) cpus[n++] = cpu;
    CHECK(we_pool_bind(pool, cpus) == WE_OK);
    for (int i = 0; i < 20; i++) we_pool_run(pool, report_cpu, seen, 8, 1);
    for (int i = 1; i < 4; i++) CHECK(seen[i] == cpus[i]);
    CHECK(we_pool_bind(pool, bad) == WE_E_IO);
    CHECK(sched_getaffinity(0, sizeof after, &after) == 0 && CPU_EQUAL(&all, &after));
    we_pool_destroy(pool);
}

static void births_and_deaths(void)
{
    we_pool *pool;
    for (unsigned i = 0; i < 100; i++) {
        CHECK(we_pool_create(&pool, 1 + i % 5) == WE_OK);
        we_pool_destroy(pool);              /* some workers have not even begun */
    }
    we_pool_destroy(NULL);
    for (int n = 1;; n++) {
        fails_in = n;
        const we_status status = we_pool_create(&pool, 3);
        if (status == WE_OK) break;
        CHECK(status == WE_E_MEMORY && pool == NULL && n < 10);
    }
    fails_in = 0;
    we_pool_destroy(pool);
}

int main(void)
{
    for (unsigned threads = 1; threads <= 8; threads++) every_size(threads);
    quick_succession(1, 100);
    quick_succession(2, 3000);
    quick_succession(5, 2000);
    huge_counts();
    idle_costs_nothing();
    signals_are_the_hosts();
    pools_side_by_side();
    workers_stay_where_they_are_bound();
    births_and_deaths();
    return 0;
}
