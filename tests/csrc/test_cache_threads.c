/* The cache used by many threads at a time, and what happens when a disk hangs.
 * Sources: cache.c cache_slots.c cache_reader.c record.c. */
#include "banks.h"

static atomic_int stop;
static atomic_ullong demanded, failures;

/* Groups of records, as a pass uses them: some paused and taken up again, some given up half-way. */
static void *user(void *arg)
{
    we_cache *cache = ((void **)arg)[0];
    uint64_t seed = 77 + (uint64_t)(uintptr_t)((void **)arg)[1];
    while (!stop) {
        we_want wants[4];
        we_fault fault;
        uint32_t pinned, ready, got = 0;
        const int layer = 1 + (int)(next_random(&seed) % 3), first = (int)(next_random(&seed) % (EXPERTS - 3));
        for (int i = 0; i < 4; i++) wants[i] = (we_want){.expert = (uint32_t)(first + i)};
        CHECK(we_cache_demand(cache, (uint32_t)layer, wants, 4, &pinned, &fault) == WE_OK && pinned <= 4);
        if (pinned == 0) we_cache_wait(cache, wants, 0, now_s() + 0.001, &ready, &fault);
        while (got < pinned && next_random(&seed) % 16) {
            const we_status status = we_cache_wait(cache, wants, pinned, now_s() + 0.001, &ready, &fault);
            got += status == WE_OK ? ready : 0;
            if (status == WE_OK || status == WE_E_PAUSED) continue;
            CHECK(fault.layer == layer && fault.expert >= first && fault.expert < first + 4);
            atomic_fetch_add(&failures, 1);
            break;
        }
        for (uint32_t i = 0; i < pinned; i++)
            if (wants[i].record) CHECK(is_right(wants[i].record, layer, first + (int)i));
        atomic_fetch_add(&demanded, pinned);
        we_cache_release(cache, wants, pinned, (int)(next_random(&seed) % 2));
    }
    return NULL;
}

static void *governor(void *arg)
{
    we_cache *cache = ((void **)arg)[0];
    uint64_t seed = 5 + (uint64_t)(uintptr_t)((void **)arg)[1];
    we_fault fault;
    while (!stop) {
        CHECK(we_cache_resize(cache, 1 + (uint32_t)(next_random(&seed) % 24), &fault) == WE_OK);
        if (next_random(&seed) % 4 == 0) sleep_us(300);
    }
    return NULL;
}

static void *prophet(void *arg)
{
    we_cache *cache = ((void **)arg)[0];
    uint64_t seed = 9;
    uint32_t experts[EXPERTS];
    uint8_t missing[EXPERTS];
    uint16_t uses[RECORDS];
    while (!stop) {
        const uint32_t layer = 1 + (uint32_t)(next_random(&seed) % 3);
        for (uint32_t e = 0; e < EXPERTS; e++) experts[e] = (uint32_t)(next_random(&seed) % EXPERTS);
        we_cache_hint(cache, layer, experts, 5);
        we_cache_missing(cache, layer, experts, EXPERTS, missing);
        we_cache_guess(cache, layer, experts, 5);
        we_cache_uses(cache, uses);
        CHECK(we_cache_slots(cache) <= RECORDS);
        sleep_us(200);
    }
    return NULL;
}

static void everybody_at_once(unsigned threads, int fails, int damages)
{
    we_fault fault;
    we_cache *cache = new_cache(12, threads);
    pthread_t running[5];
    void *args[5][2];
    void *(*const play[])(void *) = {user, user, governor, governor, prophet};
    stop = 0;
    demanded = failures = 0;
    fail_one_in = fails;
    damage_one_in = damages;
    for (size_t i = 0; i < 5; i++) {
        args[i][0] = cache;
        args[i][1] = (void *)i;
        CHECK(pthread_create(&running[i], NULL, play[i], args[i]) == 0);
    }
    sleep_us(400000);
    stop = 1;
    for (int i = 0; i < 5; i++) pthread_join(running[i], NULL);
    fail_one_in = damage_one_in = 0;
    CHECK(we_cache_resize(cache, RECORDS, &fault) == WE_OK);
    for (int r = 0; r < RECORDS; r++) {                     /* drains the queue, also without threads */
        we_want want;
        CHECK(get(cache, 1 + r / EXPERTS, r % EXPERTS, &want, &fault) == WE_OK);
        CHECK(is_right(want.record, 1 + r / EXPERTS, r % EXPERTS));
        we_cache_release(cache, &want, 1, 0);
    }
    wait_until_quiet();
    const we_cache_stats s = we_cache_get_stats(cache);
    CHECK(s.hits + s.misses <= demanded + RECORDS);         /* what was paused and demanded again counts once */
    CHECK(demanded > 50 && (fails ? failures > 0 : damages || failures == 0) && (threads > 0 || s.prefetched == 0));
    check_stats(cache, s.hits + s.misses);
    CHECK(we_cache_resize(cache, 2, &fault) == WE_OK && we_cache_slots(cache) == 2);
    we_cache_destroy(cache);
}

/* Guesses wait while there are demands, and one thread is always left for a demand. */
static void demands_go_first(void)
{
    we_fault fault;
    we_want want;
    uint32_t experts[EXPERTS];
    for (uint32_t e = 0; e < EXPERTS; e++) experts[e] = e;
    we_cache *cache = new_cache(RECORDS, 2);
    hang = 1;
    CHECK(we_cache_hint(cache, 2, experts, EXPERTS) == EXPERTS);
    sleep_us(20000);
    uint32_t n, ready;
    want = (we_want){.expert = 0};
    CHECK(we_cache_demand(cache, 1, &want, 1, &n, &fault) == WE_OK && n == 1);
    CHECK(we_cache_wait(cache, &want, 1, now_s() + 0.05, &ready, &fault) == WE_E_PAUSED);
    CHECK(we_cache_get_stats(cache).prefetched == 1);       /* the other thread took the demand */
    hang = 0;
    CHECK(we_cache_wait(cache, &want, 1, now_s() + 10, &ready, &fault) == WE_OK && ready == 1);
    we_cache_release(cache, &want, 1, 0);
    wait_until_quiet();
    CHECK(we_cache_get_stats(cache).prefetched == EXPERTS);
    we_cache_destroy(cache);
}

static void a_failure_is_told_at_once(void)
{
    we_fault fault;
    we_want wants[EXPERTS];
    uint32_t n, ready;
    we_cache *cache = new_cache(RECORDS, 3);
    bad_layer = 2;
    bad_expert = 5;
    slow_us = 2000;
    for (uint32_t e = 0; e < EXPERTS; e++) wants[e] = (we_want){.expert = e};
    CHECK(we_cache_demand(cache, 2, wants, EXPERTS, &n, &fault) == WE_OK && n == EXPERTS);
    we_status status;
    do status = we_cache_wait(cache, wants, n, now_s() + 10, &ready, &fault);
    while (status == WE_OK);
    CHECK(status == WE_E_IO && fault.layer == 2 && fault.expert == 5 && fault.os_error == 5);
    CHECK(fault.offset == 5 * (int64_t)layout.record_bytes);
    we_cache_release(cache, wants, n, 0);
    bad_layer = bad_expert = -1;
    CHECK(get(cache, 2, 5, wants, &fault) == WE_OK && is_right(wants[0].record, 2, 5));
    we_cache_release(cache, wants, 1, 0);
    slow_us = 0;
    wait_until_quiet();
    check_stats(cache, EXPERTS + 1);
    we_cache_destroy(cache);
}

static void idle_threads_cost_nothing(void)
{
    struct timespec before, after;
    we_fault fault;
    we_want want;
    we_cache *cache = new_cache(4, 8);
    CHECK(get(cache, 1, 1, &want, &fault) == WE_OK);
    we_cache_release(cache, &want, 1, 0);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    sleep_us(300000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    CHECK((after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1000000 < 30);
    we_cache_destroy(cache);
}

/* A cache is given up while its disk hangs: nobody waits, and the last read frees what is left. */
static void a_hanging_disk(void)
{
    we_fault fault;
    we_want wants[EXPERTS];
    uint32_t n, ready;
    const int before = closed;
    we_cache *cache = new_cache(RECORDS, 3);
    hang = 1;
    for (uint32_t e = 0; e < EXPERTS; e++) wants[e] = (we_want){.expert = e};
    CHECK(we_cache_demand(cache, 1, wants, EXPERTS, &n, &fault) == WE_OK && n == EXPERTS);
    const double start = now_s();
    CHECK(we_cache_wait(cache, wants, n, start + 0.02, &ready, &fault) == WE_E_PAUSED && now_s() - start < 2);
    CHECK(we_cache_resize(cache, 1, &fault) == WE_OK && we_cache_slots(cache) == 1);
    we_cache_release(cache, wants, n, 0);
    CHECK(we_cache_get_stats(cache).dropped >= EXPERTS - 3);
    we_cache_destroy(cache);
    CHECK(now_s() - start < 3 && closed == before);         /* the files are still in use */
    hang = 0;
    for (int i = 0; i < 2000 && closed != before + LAYERS - 1; i++) sleep_us(1000);
    CHECK(closed == before + LAYERS - 1);
    sleep_us(50000);                                        /* the thread's last steps */
}

static void births_and_deaths(void)
{
    for (unsigned i = 0; i < 60; i++) {
        we_fault fault;
        we_want wants[EXPERTS];
        uint32_t n;
        we_cache *cache = new_cache(1 + i % 7, i % 9);
        for (uint32_t e = 0; e < EXPERTS; e++) wants[e] = (we_want){.expert = e};
        if (i % 3) CHECK(we_cache_demand(cache, 1 + i % 3, wants, EXPERTS, &n, &fault) == WE_OK);
        we_cache_destroy(cache);
    }
}

int main(void)
{
    make_banks();
    everybody_at_once(4, 0, 0);
    everybody_at_once(8, 5, 7);
    everybody_at_once(1, 0, 5);
    everybody_at_once(0, 5, 0);
    demands_go_first();
    a_failure_is_told_at_once();
    idle_threads_cost_nothing();
    a_hanging_disk();
    births_and_deaths();
    return 0;
}
