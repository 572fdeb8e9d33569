/* The cache over banks that exist only here, with reads and allocations that fail at will. Sources: cache.c record.c. */
#include <string.h>
#include "check.h"
#include "alloc.h"
#include "warp_embed/cache.h"

enum { LAYERS = 4, EXPERTS = 9 };

static we_record_layout layout;
static int reads, read_fails_in, pages_fail;
static we_status read_failure;
static int damaged;                     /* the next read returns a record with a wrong byte */

/* ---- the platform, as this test plays it: handle = layer ---- */

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

we_status we_file_read(const we_file *file, void *dst, size_t n, uint64_t offset, we_fault *fault)
{
    CHECK(n == layout.record_bytes && offset % n == 0 && (uintptr_t)dst % WE_PAGE == 0);
    reads++;
    if (read_fails_in > 0 && --read_fails_in == 0) {
        memset(dst, 0xEE, n / 2);       /* a short read leaves half a record behind */
        fault->status = read_failure;
        fault->layer = fault->expert = -1;
        fault->what = "test";
        return read_failure;
    }
    make_record(dst, (int)file->handle, (int)(offset / n));
    if (damaged) ((uint8_t *)dst)[100] ^= 1;
    return WE_OK;
}

void *we_pages_reserve(size_t bytes)
{
    void *p = pages_fail ? NULL : aligned_alloc(WE_PAGE, (bytes + WE_PAGE - 1) / WE_PAGE * WE_PAGE);
    if (p) memset(p, 0, bytes);
    return p;
}
void we_pages_give_back(void *p, size_t bytes) { memset(p, 0, bytes); }
void we_pages_release(void *p, size_t bytes) { (void)bytes; free(p); }

/* ---- tests ---- */

static we_bank banks[LAYERS];

static we_cache *new_cache(uint32_t slots)
{
    we_fault fault;
    we_cache *cache;
    CHECK(we_cache_create(&cache, &layout, banks, LAYERS, slots, 1, &fault) == WE_OK);
    return cache;
}

static int is_right(const void *record, int layer, int expert)
{
    uint8_t *want = malloc(layout.record_bytes);
    make_record(want, layer, expert);
    const int right = memcmp(record, want, layout.record_bytes) == 0;
    free(want);
    return right;
}

/* Random requests; what was handed out stays right and in place until it is unpinned, also when reads fail. */
static void pinned_records_stay(uint32_t slots, uint64_t seed)
{
    we_cache *cache = new_cache(slots);
    const void *held[64];
    int held_layer[64], held_expert[64];
    uint64_t failures = 0, gets = 0;
    for (int round = 0; round < 150; round++) {
        unsigned n = 0, wanted = 1 + (unsigned)(next_random(&seed) % slots);
        while (n < wanted) {
            const int layer = 1 + (int)(next_random(&seed) % 3), expert = (int)(next_random(&seed) % EXPERTS);
            we_fault fault;
            if (next_random(&seed) % 9 == 0) {
                read_fails_in = 1;
                read_failure = next_random(&seed) % 2 ? WE_E_SHORT_READ : WE_E_IO;
            }
            damaged = next_random(&seed) % 13 == 0;
            const we_status status = we_cache_get(cache, (uint32_t)layer, (uint32_t)expert, &held[n], &fault);
            read_fails_in = damaged = 0;
            gets++;
            if (status == WE_OK) {
                held_layer[n] = layer;
                held_expert[n++] = expert;
            } else {
                CHECK(status != WE_E_MEMORY && fault.layer == layer && fault.expert == expert);
                failures++;
            }
            for (unsigned i = 0; i < n; i++) CHECK(is_right(held[i], held_layer[i], held_expert[i]));
        }
        we_cache_unpin_all(cache);
    }
    const we_cache_stats s = we_cache_get_stats(cache);
    CHECK(s.hits + s.misses == gets && failures > 10 && s.misses >= failures);
    CHECK(s.bytes_read % layout.record_bytes == 0 && s.bytes_read / layout.record_bytes <= s.misses);
    we_cache_destroy(cache);
}

static void all_pinned(void)
{
    we_fault fault;
    const void *record;
    we_cache *cache = new_cache(3);
    for (uint32_t e = 0; e < 3; e++) CHECK(we_cache_get(cache, 1, e, &record, &fault) == WE_OK);
    const int before = reads;
    CHECK(we_cache_get(cache, 1, 3, &record, &fault) == WE_E_MEMORY && reads == before);
    CHECK(we_cache_get(cache, 1, 1, &record, &fault) == WE_OK && is_right(record, 1, 1));
    CHECK(we_cache_resize(cache, 2, &fault) == WE_E_MEMORY && we_cache_slots(cache) == 3);
    we_cache_unpin_all(cache);
    CHECK(we_cache_get(cache, 1, 3, &record, &fault) == WE_OK && is_right(record, 1, 3));
    we_cache_unpin_all(cache);
    CHECK(we_cache_resize(cache, 2, &fault) == WE_OK && we_cache_slots(cache) == 2);
    we_cache_destroy(cache);
}

static void no_such_record(void)
{
    we_fault fault;
    const void *record;
    we_cache *cache = new_cache(3);
    CHECK(we_cache_get(cache, 0, 0, &record, &fault) == WE_E_RECORD);           /* a layer without a bank */
    CHECK(we_cache_get(cache, LAYERS, 0, &record, &fault) == WE_E_RECORD);
    CHECK(we_cache_get(cache, 1, EXPERTS, &record, &fault) == WE_E_RECORD);
    CHECK(we_cache_get(cache, UINT32_MAX, UINT32_MAX, &record, &fault) == WE_E_RECORD);
    we_cache_destroy(cache);
    const we_bank none[2] = {{.n_experts = 0}, {.n_experts = 0}};
    CHECK(we_cache_create(&cache, &layout, none, 2, 3, 1, &fault) == WE_E_RECORD && cache == NULL);
}

static void sizes_change(uint64_t seed)
{
    we_cache *cache = new_cache(5);
    we_fault fault;
    for (int round = 0; round < 500; round++) {
        const uint32_t slots = (uint32_t)(next_random(&seed) % 35), before = we_cache_slots(cache);
        fails_in = next_random(&seed) % 4 == 0 ? 1 + (int)(next_random(&seed) % 6) : 0;
        pages_fail = next_random(&seed) % 5 == 0;
        const we_status status = we_cache_resize(cache, slots, &fault);
        const uint32_t most = LAYERS * EXPERTS - EXPERTS, want = slots < 1 ? 1 : slots > most ? most : slots;
        CHECK(status == WE_OK ? we_cache_slots(cache) == want : we_cache_slots(cache) == before);
        CHECK(status == WE_OK || (status == WE_E_MEMORY && slots > before));    /* shrinking needs no memory */
        fails_in = pages_fail = 0;
        for (int i = 0; i < 6; i++) {
            const void *record;
            const int layer = 1 + (int)(next_random(&seed) % 3), expert = (int)(next_random(&seed) % EXPERTS);
            CHECK(we_cache_get(cache, (uint32_t)layer, (uint32_t)expert, &record, &fault) == WE_OK);
            CHECK(is_right(record, layer, expert));
            we_cache_unpin_all(cache);
        }
    }
    we_cache_destroy(cache);
}

static void the_nth_allocation_fails(void)
{
    we_fault fault;
    we_cache *cache;
    for (int n = 1;; n++) {
        fails_in = n;
        const we_status status = we_cache_create(&cache, &layout, banks, LAYERS, 4, 1, &fault);
        if (status == WE_OK) break;
        CHECK(status == WE_E_MEMORY && cache == NULL && n < 20);
    }
    fails_in = 0;
    we_cache_destroy(cache);
    we_cache_destroy(NULL);
    pages_fail = 1;
    CHECK(we_cache_create(&cache, &layout, banks, LAYERS, 4, 1, &fault) == WE_E_MEMORY && cache == NULL);
    pages_fail = 0;
}

int main(void)
{
    we_fault fault;
    layout = (we_record_layout){.encoding = WE_Q8G, .group = 32};
    CHECK(we_record_layout_init(&layout, 40, 24, &fault) == WE_OK);
    for (int layer = 0; layer < LAYERS; layer++)
        banks[layer] = (we_bank){.file = {.handle = layer}, .layer = layer, .n_experts = layer ? EXPERTS : 0};
    for (uint32_t slots = 1; slots <= 30; slots += slots < 4 ? 1 : 9) pinned_records_stay(slots, 7 + slots);
    all_pinned();
    no_such_record();
    sizes_change(3);
    the_nth_allocation_fails();
    CHECK(we_cache_bytes(&layout, LAYERS, EXPERTS, 7) - we_cache_bytes(&layout, LAYERS, EXPERTS, 6) > layout.record_bytes);
    return 0;
}
