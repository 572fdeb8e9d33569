/* Banks that exist only here: the platform as the cache's tests play it, handle = layer. Reads fail, give damaged
 * records or hang at will. */
#ifndef BANKS_H
#define BANKS_H
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include "check.h"
#include "alloc.h"
#include "warp_embed/cache.h"
#include "warp_embed/pool.h"

enum { LAYERS = 4, EXPERTS = 9, RECORDS = (LAYERS - 1) * EXPERTS };

static we_record_layout layout;
static we_bank banks[LAYERS];
static atomic_int reads, closed;
static atomic_int fail_one_in, damage_one_in;       /* 0: never */
static atomic_int bad_layer, bad_expert;            /* always refused; -1: none */
static atomic_int hang, slow_us;                    /* reads do not return while `hang`; or take so long */
static atomic_uint chance = 12345;

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sleep_us(long us)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&t, NULL);
}

static void make_record(uint8_t *to, int layer, int expert)
{
    we_record_header h = {.magic = WE_RECORD_MAGIC, .layer = (uint16_t)layer, .expert = (uint16_t)expert,
                          .encoding = layout.encoding, .pages = (uint32_t)(layout.record_bytes / WE_PAGE),
                          .gate_off = layout.payload_off[0], .up_off = layout.payload_off[1],
                          .down_off = layout.payload_off[2], .scales_off = layout.first_scales_off};
    memset(to, layer * 16 + expert, layout.record_bytes);
    h.crc32 = we_crc32(0, to + 48, layout.end - 48);
    memcpy(to, &h, sizeof h);
}

static int is_right(const void *record, int layer, int expert)
{
    uint8_t want[1 << 15];
    make_record(want, layer, expert);
    return memcmp(record, want, layout.record_bytes) == 0;
}

static int happens(int one_in)
{
    return one_in > 0 && (atomic_fetch_add(&chance, 2654435761u) >> 8) % (unsigned)one_in == 0;
}

we_status we_file_read(const we_file *file, void *dst, size_t n, uint64_t offset, we_fault *fault)
{
    const int layer = (int)file->handle, expert = (int)(offset / n);        /* every bank is whole records */
    CHECK(n == layout.record_bytes && offset % n == 0 && (uintptr_t)dst % WE_PAGE == 0);
    atomic_fetch_add(&reads, 1);
    while (hang) sleep_us(1000);
    if (slow_us) sleep_us(slow_us);
    if (happens(fail_one_in) || (layer == bad_layer && expert == bad_expert)) {
        memset(dst, 0xEE, n / 2);       /* a short read leaves half a record behind */
        *fault = (we_fault){layer % 2 ? WE_E_SHORT_READ : WE_E_IO, -1, -1, 5, (int64_t)offset, "test"};
        return fault->status;
    }
    make_record(dst, layer, expert);
    if (happens(damage_one_in)) ((uint8_t *)dst)[100] ^= 1;
    return WE_OK;
}

void we_file_close(we_file *file)
{
    CHECK(file->handle >= 0);
    file->handle = -1;
    atomic_fetch_add(&closed, 1);
}

static int pages_fail;
void *we_pages_reserve(size_t bytes)
{
    void *p = pages_fail ? NULL : aligned_alloc(WE_PAGE, (bytes + WE_PAGE - 1) / WE_PAGE * WE_PAGE);
    return p ? memset(p, 0, bytes) : NULL;
}
void we_pages_give_back(void *p, size_t bytes) { memset(p, 0, bytes); }
void we_pages_prefer_large(void *p, size_t bytes, int yes) { (void)p, (void)bytes, (void)yes; }
void we_pages_release(void *p, size_t bytes) { (void)bytes; free(p); }

static void make_banks(void)
{
    we_fault fault;
    layout = (we_record_layout){.encoding = WE_Q8G, .group = 32};
    CHECK(we_record_layout_init(&layout, 40, 24, &fault) == WE_OK && layout.record_bytes <= 1 << 15);
    bad_layer = bad_expert = -1;
    for (int layer = 0; layer < LAYERS; layer++)
        banks[layer] = (we_bank){.file = {.handle = layer}, .layer = layer, .n_experts = layer ? EXPERTS : 0};
}

static we_cache *new_cache(uint32_t slots, unsigned threads)
{
    we_fault fault;
    we_cache *cache;
    CHECK(we_cache_create(&cache, &layout, banks, LAYERS, slots, 1, threads, &fault) == WE_OK);
    return cache;
}

static void wait_until_quiet(void)
{
    for (int still = 0, before = -1; still < 20; sleep_us(500)) {
        still = reads == before ? still + 1 : 0;
        before = reads;
    }
}

/* The relations of cache.h, when nothing is in flight. */
static void check_stats(we_cache *cache, uint64_t demanded)
{
    const we_cache_stats s = we_cache_get_stats(cache);
    CHECK(s.hits + s.misses == demanded);
    CHECK(s.misses - s.dropped + s.prefetched + s.retries == s.reads);
    CHECK((s.reads - s.broken) * layout.record_bytes == s.bytes_read);
    CHECK(s.wasted <= s.prefetched && s.guesses_used <= s.guessed && s.guessed <= s.prefetched);
    CHECK(s.failed <= s.retries && s.dropped <= s.misses && s.read_s >= 0 && s.wait_s >= 0);
}

/* One record, waited for; released when it cannot be had. */
static we_status get(we_cache *cache, int layer, int expert, we_want *want, we_fault *fault)
{
    uint32_t n = 0, ready = 0;
    we_status status = WE_OK;
    want->expert = (uint32_t)expert;
    want->record = NULL;
    while (n == 0) {
        status = we_cache_demand(cache, (uint32_t)layer, want, 1, &n, fault);
        if (status != WE_OK) return status;
        if (n == 0) we_cache_wait(cache, want, 0, now_s() + 0.001, &ready, fault);
    }
    do status = we_cache_wait(cache, want, 1, now_s() + 0.01, &ready, fault);
    while (status == WE_E_PAUSED);
    if (status != WE_OK) we_cache_release(cache, want, 1, 0);
    else CHECK(ready == 1 && want->record);
    return status;
}

#endif
