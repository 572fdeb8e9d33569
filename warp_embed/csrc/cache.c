/* The expert cache of cache.h.
 *
 * A slot is in one of three places: `active` and filled, `active` and listed in `empty`, or in `gone` (its memory was
 * given back by a smaller size). where[r] is the slot of record r and slot.record is r exactly when the slot is filled;
 * check_sanity() says the rest. How often a record was used is remembered also after its eviction, halved from
 * time to time: otherwise a popular record starts again from nothing whenever it is pushed out. */
#ifndef _WIN32
#define _POSIX_C_SOURCE 200809L
#endif
#include "warp_embed/cache.h"
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include "platform_fault.h"
#include "pool_clock.h"

#define NOWHERE UINT32_MAX
/* Candidates looked at per eviction. More of them follow the rule more closely, and that is worse when a working set
 * larger than the cache is walked through in the same order again and again: the rule then picks what comes next. */
#define SAMPLES 8u
#define AGE_PERIOD 10u              /* uses are halved after this many accesses per slot */
#define USES_MAX UINT16_MAX

typedef struct slot {
    uint8_t *data;                  /* [record_bytes], page-aligned           */
    uint64_t last;                  /* clock of the last access               */
    uint64_t pinned;                /* epoch in which it was handed out       */
    uint32_t record;                /* NOWHERE: empty or gone                 */
} slot;

typedef struct segment {            /* slots that were reserved together      */
    struct segment *next;
    void           *data;
    size_t          bytes;
} segment;

struct we_cache {
    we_record_layout layout;
    const we_bank   *banks;         /* [n_layers], borrowed                   */
    uint32_t  n_layers, n_records;
    uint32_t *first;                /* [n_layers]: record number of a layer's expert 0 */
    uint32_t *where;                /* [n_records]: slot, or NOWHERE          */
    uint16_t *uses;                 /* [n_records], aged                      */
    slot     *slots;                /* [n_slots], the three places together   */
    uint32_t *active, *empty, *gone;    /* [n_slots] each, of which n_... count */
    uint32_t  n_slots, n_active, n_empty, n_gone, n_pinned;
    segment  *segments;
    uint64_t  clock, epoch, age_at, random;
    int       check_crc;
    we_cache_stats stats;
};

static void check_sanity(const we_cache *c)
{
    (void)c;
    assert(c->n_active + c->n_gone == c->n_slots && c->n_empty <= c->n_active && c->n_pinned <= c->n_active);
#ifndef NDEBUG
    uint32_t filled = 0;
    for (uint32_t r = 0; r < c->n_records; r++) {
        if (c->where[r] == NOWHERE) continue;
        assert(c->slots[c->where[r]].record == r);
        filled++;
    }
    assert(filled + c->n_empty == c->n_active);
#endif
}

/* ---- who stays ---- */

static uint64_t next_random(we_cache *c)
{
    c->random ^= c->random << 13;           /* xorshift64; the seed is fixed, so a trace always evicts alike */
    c->random ^= c->random >> 7;
    c->random ^= c->random << 17;
    return c->random;
}

/* Is slot a worth less than slot b? An empty slot is worth nothing. */
static int is_worse(const we_cache *c, uint32_t a, uint32_t b)
{
    const slot *x = &c->slots[a], *y = &c->slots[b];
    if (x->record == NOWHERE || y->record == NOWHERE) return x->record == NOWHERE && y->record != NOWHERE;
    const uint16_t p = c->uses[x->record], q = c->uses[y->record];
    return p != q ? p < q : x->last < y->last;
}

static uint32_t worse_unpinned(const we_cache *c, uint32_t best, uint32_t candidate)
{
    if (c->slots[candidate].pinned == c->epoch) return best;
    return best == NOWHERE || is_worse(c, candidate, best) ? candidate : best;
}

/* The slot to empty; NOWHERE when all are pinned. */
static uint32_t choose_victim(we_cache *c)
{
    uint32_t victim = NOWHERE;
    for (uint32_t i = 0; i < SAMPLES; i++)
        victim = worse_unpinned(c, victim, c->active[next_random(c) % c->n_active]);
    for (uint32_t i = 0; i < c->n_active && victim == NOWHERE; i++)
        victim = worse_unpinned(c, victim, c->active[i]);
    return victim;
}

static void count_use(we_cache *c, uint32_t record)
{
    if (c->uses[record] < USES_MAX) c->uses[record]++;
    if (++c->clock < c->age_at) return;
    for (uint32_t r = 0; r < c->n_records; r++) c->uses[r] >>= 1;
    const uint64_t period = (uint64_t)AGE_PERIOD * c->n_active;
    c->age_at = c->clock + (period > c->n_records ? period : c->n_records);
}

static void evict(we_cache *c, uint32_t at)
{
    slot *s = &c->slots[at];
    c->where[s->record] = NOWHERE;
    s->record = NOWHERE;
    c->stats.evictions++;
}

/* ---- get ---- */

static void pin(we_cache *c, slot *s)
{
    if (s->pinned == c->epoch) return;
    s->pinned = c->epoch;
    c->n_pinned++;
}

static we_status read_record(we_cache *c, uint32_t layer, uint32_t expert, void *data, we_fault *fault)
{
    const we_bank *bank = &c->banks[layer];
    const size_t bytes = c->layout.record_bytes;
    const double start = we_clock_s();
    const we_status status = we_file_read(&bank->file, data, bytes, (uint64_t)expert * bytes, fault);
    c->stats.read_s += we_clock_s() - start;
    if (status != WE_OK) {
        fault->layer = (int32_t)layer;
        fault->expert = (int32_t)expert;
        return status;
    }
    c->stats.bytes_read += bytes;
    return we_record_check(&c->layout, data, (int)layer, (int)expert, bank->codebook, c->check_crc, fault);
}

we_status we_cache_get(we_cache *c, uint32_t layer, uint32_t expert, const void **record, we_fault *fault)
{
    if (layer >= c->n_layers || expert >= c->banks[layer].n_experts)
        return we_fail(fault, WE_E_RECORD, "no such expert", 0, 0);
    const uint32_t number = c->first[layer] + expert;
    uint32_t at = c->where[number];
    if (at != NOWHERE) {
        c->stats.hits++;
    } else {
        c->stats.misses++;
        if (c->n_empty == 0) {
            at = choose_victim(c);
            if (at == NOWHERE) return we_fail(fault, WE_E_MEMORY, "every slot of the cache is pinned", 0, 0);
            evict(c, at);
            c->empty[c->n_empty++] = at;
        }
        at = c->empty[c->n_empty - 1];              /* stays listed as empty until it holds a good record */
        const we_status status = read_record(c, layer, expert, c->slots[at].data, fault);
        if (status != WE_OK) return status;
        c->n_empty--;
        c->slots[at].record = number;
        c->where[number] = at;
    }
    count_use(c, number);
    c->slots[at].last = c->clock;
    pin(c, &c->slots[at]);
    *record = c->slots[at].data;
    return WE_OK;
}

void we_cache_unpin_all(we_cache *c)
{
    check_sanity(c);
    c->epoch++;
    c->n_pinned = 0;
}

/* ---- size ---- */

#define GROW(array, n) grow_array((n), sizeof *(array), (array), &bigger) && ((array) = bigger, 1)

static int grow_array(size_t n, size_t item_bytes, void *array, void **bigger)
{
    *bigger = n > SIZE_MAX / item_bytes ? NULL : realloc(array, n * item_bytes);
    return *bigger != NULL;
}

/* n more slots, in `gone`. On failure nothing changes. */
static we_status reserve_slots(we_cache *c, uint32_t n)
{
    const size_t bytes = c->layout.record_bytes, total = (size_t)c->n_slots + n;
    if (n > SIZE_MAX / bytes) return WE_E_MEMORY;
    void *bigger;
    if (!(GROW(c->slots, total)) || !(GROW(c->active, total)) || !(GROW(c->empty, total)) || !(GROW(c->gone, total)))
        return WE_E_MEMORY;
    segment *s = malloc(sizeof *s);
    if (!s) return WE_E_MEMORY;
    s->bytes = n * bytes;
    s->data = we_pages_reserve(s->bytes);
    if (!s->data) {
        free(s);
        return WE_E_MEMORY;
    }
    s->next = c->segments;
    c->segments = s;
    for (uint32_t i = n; i-- > 0;) {                /* so that the lowest address is used first */
        c->slots[c->n_slots + i] = (slot){(uint8_t *)s->data + i * bytes, 0, 0, NOWHERE};
        c->gone[c->n_gone++] = c->n_slots + i;
    }
    c->n_slots += n;
    return WE_OK;
}

static void sift_down(const we_cache *c, uint32_t *heap, uint32_t at, uint32_t n)
{
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= n) return;
        if (child + 1 < n && is_worse(c, heap[child + 1], heap[child])) child++;
        if (!is_worse(c, heap[child], heap[at])) return;
        const uint32_t swap = heap[at];
        heap[at] = heap[child];
        heap[child] = swap;
        at = child;
    }
}

/* Best first. A heap sort: shrinking must not need memory. */
static void sort_active(we_cache *c)
{
    uint32_t *heap = c->active;
    for (uint32_t i = c->n_active / 2; i-- > 0;) sift_down(c, heap, i, c->n_active);
    for (uint32_t n = c->n_active; n > 1; n--) {
        const uint32_t worst = heap[0];
        heap[0] = heap[n - 1];
        heap[n - 1] = worst;
        sift_down(c, heap, 0, n - 1);
    }
}

static void shrink(we_cache *c, uint32_t slots)
{
    sort_active(c);
    while (c->n_active > slots) {
        const uint32_t at = c->active[--c->n_active];
        if (c->slots[at].record != NOWHERE) evict(c, at);
        we_pages_give_back(c->slots[at].data, c->layout.record_bytes);
        c->gone[c->n_gone++] = at;
    }
    c->n_empty = 0;
    for (uint32_t i = 0; i < c->n_active; i++)
        if (c->slots[c->active[i]].record == NOWHERE) c->empty[c->n_empty++] = c->active[i];
}

we_status we_cache_resize(we_cache *c, uint32_t slots, we_fault *fault)
{
    if (c->n_pinned) return we_fail(fault, WE_E_MEMORY, "a record of the cache is in use", 0, 0);
    if (slots > c->n_records) slots = c->n_records;
    if (slots < 1) slots = 1;
    if (slots < c->n_active) {
        shrink(c, slots);
    } else if (slots - c->n_active > c->n_gone) {
        const we_status status = reserve_slots(c, slots - c->n_active - c->n_gone);
        if (status != WE_OK) return we_fail(fault, status, "slots of the cache", 0, 0);
    }
    while (c->n_active < slots) {
        const uint32_t at = c->gone[--c->n_gone];
        c->active[c->n_active++] = at;
        c->empty[c->n_empty++] = at;
    }
    check_sanity(c);
    return WE_OK;
}

uint32_t we_cache_slots(const we_cache *c) { return c->n_active; }

we_cache_stats we_cache_get_stats(const we_cache *c) { return c->stats; }

size_t we_cache_bytes(const we_record_layout *layout, uint32_t n_layers, uint32_t n_experts, uint32_t slots)
{
    const uint64_t records = (uint64_t)n_layers * n_experts;
    if (slots > records) slots = (uint32_t)records;
    const uint64_t per_slot = layout->record_bytes + sizeof(slot) + 3 * sizeof(uint32_t);
    return (size_t)(sizeof(we_cache) + sizeof(segment) + n_layers * sizeof(uint32_t) +
                    records * (sizeof(uint32_t) + sizeof(uint16_t)) + slots * per_slot);
}

/* ---- life ---- */

we_status we_cache_create(we_cache **out, const we_record_layout *layout, const we_bank *banks, uint32_t n_layers,
                          uint32_t slots, int check_crc, we_fault *fault)
{
    *out = NULL;
    uint64_t records = 0;
    for (uint32_t layer = 0; layer < n_layers; layer++) records += banks[layer].n_experts;
    if (records == 0 || records >= NOWHERE) return we_fail(fault, WE_E_RECORD, "number of experts", 0, 0);
    we_cache *c = calloc(1, sizeof *c);
    if (!c) return we_fail(fault, WE_E_MEMORY, "cache", 0, 0);
    c->layout = *layout;
    c->banks = banks;
    c->n_layers = n_layers;
    c->n_records = (uint32_t)records;
    c->check_crc = check_crc;
    c->epoch = 1;
    c->random = 0x9e3779b97f4a7c15u;
    c->first = calloc(n_layers, sizeof *c->first);
    c->where = malloc(records * sizeof *c->where);
    c->uses = calloc(records, sizeof *c->uses);
    if (!c->first || !c->where || !c->uses) {
        we_cache_destroy(c);
        return we_fail(fault, WE_E_MEMORY, "cache", 0, 0);
    }
    for (uint32_t layer = 1; layer < n_layers; layer++)
        c->first[layer] = c->first[layer - 1] + banks[layer - 1].n_experts;
    for (uint32_t r = 0; r < c->n_records; r++) c->where[r] = NOWHERE;
    const we_status status = we_cache_resize(c, slots, fault);
    if (status != WE_OK) {
        we_cache_destroy(c);
        return status;
    }
    c->age_at = (uint64_t)AGE_PERIOD * c->n_active + c->n_records;
    *out = c;
    return WE_OK;
}

void we_cache_destroy(we_cache *c)
{
    if (!c) return;
    while (c->segments) {
        segment *s = c->segments;
        c->segments = s->next;
        we_pages_release(s->data, s->bytes);
        free(s);
    }
    free(c->slots);
    free(c->active);
    free(c->empty);
    free(c->gone);
    free(c->first);
    free(c->where);
    free(c->uses);
    free(c);
}
