/* The cache over banks that exist only here (banks.h), used by one thread.
 * Sources: cache.c cache_slots.c cache_reader.c record.c. */
#include "banks.h"

/* Random requests; what was handed out stays right and in place until it is released, also when reads fail. */
static void pinned_records_stay(uint32_t slots, unsigned threads, uint64_t seed)
{
    we_cache *cache = new_cache(slots, threads);
    we_want held[64];
    int held_layer[64];
    uint64_t failures = 0, gets = 0;
    for (int round = 0; round < 150; round++) {
        unsigned n = 0, wanted = 1 + (unsigned)(next_random(&seed) % slots);
        while (n < wanted) {
            const int layer = 1 + (int)(next_random(&seed) % 3), expert = (int)(next_random(&seed) % EXPERTS);
            we_fault fault;
            fail_one_in = next_random(&seed) % 9 == 0 ? 1 : 0;
            damage_one_in = next_random(&seed) % 13 == 0 ? 1 : 0;
            const we_status status = get(cache, layer, expert, &held[n], &fault);
            fail_one_in = damage_one_in = 0;
            gets++;
            if (status == WE_OK) {
                held_layer[n++] = layer;
            } else {
                CHECK(status != WE_E_MEMORY && fault.layer == layer && fault.expert == expert);
                failures++;
            }
            for (unsigned i = 0; i < n; i++) CHECK(is_right(held[i].record, held_layer[i], (int)held[i].expert));
        }
        we_cache_release(cache, held, n, 0);
    }
    const we_cache_stats s = we_cache_get_stats(cache);
    CHECK(failures > 10 && s.failed == failures && s.retries == failures && s.dropped == 0 && s.prefetched == 0);
    check_stats(cache, gets);
    we_cache_destroy(cache);
}

static uint32_t demand(we_cache *cache, int layer, we_want *wants, int from, int to)
{
    we_fault fault;
    uint32_t pinned;
    for (int e = from; e < to; e++) wants[e - from] = (we_want){.expert = (uint32_t)e};
    CHECK(we_cache_demand(cache, (uint32_t)layer, wants, (uint32_t)(to - from), &pinned, &fault) == WE_OK);
    return pinned;
}

static void wait_for_all(we_cache *cache, we_want *wants, uint32_t n)
{
    we_fault fault;
    uint32_t ready, done = 0;
    while (done < n) {
        CHECK(we_cache_wait(cache, wants, n, now_s() + 10, &ready, &fault) == WE_OK && ready > 0);
        done += ready;
    }
    for (uint32_t i = 0; i < n; i++) CHECK(wants[i].record);
}

static void as_many_as_there_are_slots(unsigned threads)
{
    we_fault fault;
    we_want wants[EXPERTS], more[1];
    uint32_t ready;
    we_cache *cache = new_cache(3, threads);
    CHECK(demand(cache, 1, wants, 0, 8) == 3);
    wait_for_all(cache, wants, 3);
    const int before = reads;
    CHECK(demand(cache, 1, more, 3, 4) == 0 && reads == before);
    CHECK(we_cache_wait(cache, more, 0, now_s() + 0.002, &ready, &fault) == WE_E_PAUSED);
    CHECK(demand(cache, 1, more, 1, 2) == 1 && more[0].slot == wants[1].slot);
    we_cache_release(cache, more, 1, 0);
    for (uint32_t i = 0; i < 3; i++) CHECK(is_right(wants[i].record, 1, (int)i));
    we_cache_release(cache, wants, 3, 0);
    CHECK(demand(cache, 1, wants, 2, 5) == 3);          /* what is there does not make room for what is not */
    wait_for_all(cache, wants, 3);
    we_cache_release(cache, wants, 3, 0);
    check_stats(cache, 7);
    const we_cache_stats s = we_cache_get_stats(cache);
    CHECK(s.hits == 2 && s.misses == 5 && s.evictions == 2);
    we_cache_destroy(cache);
}

/* All slots hold what is demanded, and the first of the demands is not among it: there is a way nevertheless. */
static void the_first_always_finds_a_place(void)
{
    we_want wants[EXPERTS];
    we_cache *cache = new_cache(2, 2);
    CHECK(demand(cache, 1, wants, 4, 6) == 2);
    wait_for_all(cache, wants, 2);
    we_cache_release(cache, wants, 2, 0);
    CHECK(demand(cache, 1, wants, 3, 6) >= 1);
    wait_for_all(cache, wants, 1);
    CHECK(is_right(wants[0].record, 1, 3));
    we_cache_destroy(cache);
}

static void what_was_paused_counts_once_and_is_kept(unsigned threads)
{
    we_fault fault;
    we_want mine[2], others[3];
    uint32_t ready;
    we_cache *cache = new_cache(2, threads);
    CHECK(demand(cache, 1, mine, 0, 2) == 2);
    if (threads == 0) CHECK(we_cache_wait(cache, mine, 1, 0, &ready, &fault) == WE_OK && ready == 1);
    we_cache_release(cache, mine, 2, 1);
    if (threads) wait_until_quiet();
    while (demand(cache, 2, others, 0, 1) == 0) CHECK(we_cache_wait(cache, others, 0, now_s() + 1, &ready, &fault) < 9);
    wait_for_all(cache, others, 1);
    we_cache_release(cache, others, 1, 0);
    const uint64_t before = (uint64_t)reads;
    CHECK(demand(cache, 1, mine, 0, 2) == 2);
    wait_for_all(cache, mine, 2);
    we_cache_release(cache, mine, 2, 0);
    CHECK((uint64_t)reads - before <= 1);               /* one of the two, at most, had to go */
    const we_cache_stats s = we_cache_get_stats(cache);
    CHECK(s.hits + s.misses <= 4 && s.reads == s.misses);
    we_cache_destroy(cache);
}

static void no_such_record(void)
{
    we_fault fault;
    we_want want = {.expert = 0};
    uint32_t n;
    we_cache *cache = new_cache(3, 1);
    CHECK(we_cache_demand(cache, 0, &want, 1, &n, &fault) == WE_E_RECORD && n == 0);     /* a layer without a bank */
    CHECK(we_cache_demand(cache, LAYERS, &want, 1, &n, &fault) == WE_E_RECORD);
    want.expert = EXPERTS;
    CHECK(we_cache_demand(cache, 1, &want, 1, &n, &fault) == WE_E_RECORD);
    want.expert = UINT32_MAX;
    CHECK(we_cache_demand(cache, UINT32_MAX, &want, 1, &n, &fault) == WE_E_RECORD);
    CHECK(we_cache_hint(cache, 0, &want.expert, 1) == 0 && we_cache_hint(cache, 1, &want.expert, 1) == 0);
    CHECK(we_cache_guess(cache, LAYERS, &want.expert, 1) == 0);
    we_cache_destroy(cache);
    const we_bank none[2] = {{.n_experts = 0}, {.n_experts = 0}};
    CHECK(we_cache_create(&cache, &layout, none, 2, 3, 1, 1, &fault) == WE_E_RECORD && cache == NULL);
}

static void sizes_change(uint64_t seed, unsigned threads)
{
    we_cache *cache = new_cache(5, threads);
    we_fault fault;
    uint64_t demanded = 0;
    for (int round = 0; round < 300; round++) {
        const uint32_t slots = (uint32_t)(next_random(&seed) % 35), before = we_cache_slots(cache);
        fails_in = next_random(&seed) % 4 == 0 ? 1 : 0;
        pages_fail = next_random(&seed) % 5 == 0;
        const we_status status = we_cache_resize(cache, slots, &fault);
        const uint32_t want = slots < 1 ? 1 : slots > RECORDS ? RECORDS : slots;
        CHECK(we_cache_slots(cache) == (status == WE_OK ? want : before));
        CHECK(status == WE_OK || (status == WE_E_MEMORY && slots > before));    /* shrinking needs no memory */
        fails_in = pages_fail = 0;
        for (int i = 0; i < 6; i++, demanded++) {
            we_want record;
            const int layer = 1 + (int)(next_random(&seed) % 3), expert = (int)(next_random(&seed) % EXPERTS);
            CHECK(get(cache, layer, expert, &record, &fault) == WE_OK);
            CHECK(is_right(record.record, layer, expert));
            if (i == 3) CHECK(we_cache_resize(cache, 1, &fault) == WE_OK && is_right(record.record, layer, expert));
            we_cache_release(cache, &record, 1, 0);
        }
    }
    check_stats(cache, demanded);
    we_cache_destroy(cache);
}

static void the_nth_allocation_fails(void)
{
    we_fault fault;
    we_cache *cache;
    const int before = closed;
    for (int n = 1;; n++) {
        fails_in = n;
        const we_status status = we_cache_create(&cache, &layout, banks, LAYERS, 4, 1, 2, &fault);
        if (status == WE_OK) break;
        CHECK(status == WE_E_MEMORY && cache == NULL && n < 20 && closed == before);    /* the files stay the caller's */
    }
    fails_in = 0;
    we_cache_destroy(cache);
    CHECK(closed == before + LAYERS - 1);
    we_cache_destroy(NULL);
    pages_fail = 1;
    CHECK(we_cache_create(&cache, &layout, banks, LAYERS, 4, 1, 2, &fault) == WE_E_MEMORY && cache == NULL);
    pages_fail = 0;
}

/* Hints fill what is empty, in order, and never count; guesses may push others out, but only so many. */
static void reading_ahead(void)
{
    we_fault fault;
    we_want want;
    uint32_t all[EXPERTS], layer1[EXPERTS];
    uint8_t missing[EXPERTS];
    uint16_t uses[RECORDS];
    for (uint32_t e = 0; e < EXPERTS; e++) all[e] = layer1[e] = e;
    we_cache *cache = new_cache(6, 3);
    CHECK(we_cache_guess(cache, 2, all, 4) == 0);                   /* nothing was read: no share of it either */
    CHECK(we_cache_hint(cache, 1, all, 4) == 4 && we_cache_hint(cache, 1, all, 4) <= 4);
    wait_until_quiet();
    we_cache_stats s = we_cache_get_stats(cache);
    CHECK(s.hits + s.misses == 0 && s.prefetched == 4 && s.reads == 4 && s.wasted == 0);
    we_cache_missing(cache, 1, layer1, 6, missing);
    for (int e = 0; e < 6; e++) CHECK(missing[e] == (e >= 4));
    for (int e = 0; e < 6; e++) CHECK(get(cache, 1, e, &want, &fault) == WE_OK && (we_cache_release(cache, &want, 1, 0), 1));
    s = we_cache_get_stats(cache);
    CHECK(s.hits == 4 && s.misses == 2 && s.wasted == 0);
    we_cache_uses(cache, uses);
    for (int r = 0; r < RECORDS; r++) CHECK(uses[r] == (r < 6));
    CHECK(we_cache_hint(cache, 2, all, 9) == 9);                    /* no slot is empty */
    wait_until_quiet();
    CHECK(we_cache_get_stats(cache).prefetched == 4);
    for (int i = 0; i < 1200; i++) {
        CHECK(get(cache, 1 + i % 3, i % EXPERTS, &want, &fault) == WE_OK);
        we_cache_release(cache, &want, 1, 0);
        if (i % 10 == 9) we_cache_guess(cache, 1 + (i + 1) % 3, all + (i + 1) % EXPERTS, 1);    /* right */
        if (i % 100 == 4) we_cache_guess(cache, 1 + i % 3, all + (i + 5) % EXPERTS, 1);          /* never demanded */
        if (i % 10 == 9 || i % 100 == 4) sleep_us(300);
        s = we_cache_get_stats(cache);
        CHECK(s.guessed - s.guesses_used <= s.reads / 100);
    }
    wait_until_quiet();
    s = we_cache_get_stats(cache);
    CHECK(s.guessed > 0 && s.guesses_used > 0 && s.wasted + s.guesses_used <= s.prefetched);
    check_stats(cache, 1206);
    we_cache_destroy(cache);
}

int main(void)
{
    make_banks();
    for (unsigned threads = 0; threads <= 4; threads += 2)
        for (uint32_t slots = 1; slots <= 30; slots += slots < 4 ? 1 : 9) pinned_records_stay(slots, threads, 7 + slots);
    for (unsigned threads = 0; threads <= 2; threads++) as_many_as_there_are_slots(threads);
    the_first_always_finds_a_place();
    for (unsigned threads = 0; threads <= 2; threads += 2) what_was_paused_counts_once_and_is_kept(threads);
    no_such_record();
    for (unsigned threads = 0; threads <= 3; threads += 3) sizes_change(3, threads);
    the_nth_allocation_fails();
    reading_ahead();
    CHECK(we_cache_bytes(&layout, LAYERS, EXPERTS, 7) - we_cache_bytes(&layout, LAYERS, EXPERTS, 6) > layout.record_bytes);
    return 0;
}
