/* Who stays in the cache of cache.h, and how many slots there are.
 *
 * How often a record was used is remembered also after its eviction, halved from time to time: otherwise a popular
 * record starts again from nothing whenever it is pushed out.
 *
 * Tokens also repeat the choices of the token before them, more than popularity explains. How much more is measured:
 * `bonus` says what having been used in its layer's last turn is worth, in uses. It counts only while a whole round, a
 * turn of every layer, fits into the cache; otherwise such a record would be gone before its next turn. */
#include "cache_private.h"

#define SAMPLES 64u                 /* candidates looked at per eviction: all, when there are no more */
#define USES_MAX UINT16_MAX

void we_slots_check(const we_cache *c)
{
    (void)c;
#ifndef NDEBUG
    uint32_t known = 0;
    assert(c->n_active + c->n_gone <= c->n_slots && c->n_empty <= c->n_active);
    for (uint32_t r = 0; r < c->n_records; r++) {
        if (c->where[r] == NOWHERE) continue;
        assert(c->slots[c->where[r]].record == r && c->slots[c->where[r]].state != SLOT_EMPTY);
        known++;
    }
    assert(known + c->n_empty == c->n_active);
    for (uint32_t i = 0; i < c->n_active; i++) assert(c->slots[c->active[i]].place == i);
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

static int round_fits(const we_cache *c) { return c->n_active >= c->round; }

/* Of the records that were used in the last turn, a share P would come again for being popular. If a share Q of all uses
 * is of such records, the rest of them are repetitions: (Q - P) / (1 - P). */
static uint32_t bonus(const we_cache *c)
{
    if (!round_fits(c) || c->round == 0 || c->again <= c->expected) return 0;
    const double repeats = (c->again - c->expected) / (c->seen - c->expected), rounds = (double)c->total_uses / c->round;
    return (uint32_t)(repeats * rounds + 0.5);
}

void we_slots_begin_turn(we_cache *c, uint32_t layer)
{
    const uint32_t before = c->turn_layer;
    if (layer == before) return;
    c->turn_layer = layer;
    if (before == NOWHERE) return;
    uint8_t *fresh = c->fresh + c->first[before];
    for (uint32_t i = 0; i < c->banks[before].n_experts; i++) fresh[i] = fresh[i] == 2;
    c->round += c->turn_now - c->turn_size[before];
    c->turn_size[before] = c->turn_now;
    c->turn_now = 0;
    c->bonus = bonus(c);
}

static void age(we_cache *c)
{
    c->total_uses = 0;
    for (uint32_t r = 0; r < c->n_records; r++) c->total_uses += c->uses[r] >>= 1;
    c->seen /= 2;
    c->again /= 2;
    c->expected /= 2;
    const uint64_t period = (uint64_t)AGE_PERIOD * c->n_active;
    c->age_at = c->clock + (period > c->n_records ? period : c->n_records);
}

void we_slots_count_use(we_cache *c, uint32_t record)
{
    if (c->fresh[record] != 2) {
        const double share = c->total_uses ? (double)c->uses[record] * c->round / (double)c->total_uses : 0;
        c->seen++;
        c->again += c->fresh[record];
        c->expected += share < 1 ? share : 1;
        c->fresh[record] = 2;
        c->turn_now++;
    }
    if (c->uses[record] < USES_MAX) {
        c->uses[record]++;
        c->total_uses++;
    }
    if (++c->clock >= c->age_at) age(c);
}

static uint32_t worth(const we_cache *c, uint32_t record)
{
    return c->uses[record] + (c->fresh[record] ? c->bonus : 0);
}

/* Is slot a worth less than slot b? An empty slot is worth nothing. Of equals the one goes that was not used for longer;
 * but while a round does not fit, that is the one whose turn comes next: then the one that was used last. */
static int is_worse(const we_cache *c, uint32_t a, uint32_t b)
{
    const slot *x = &c->slots[a], *y = &c->slots[b];
    if (x->record == NOWHERE || y->record == NOWHERE) return x->record == NOWHERE && y->record != NOWHERE;
    const uint32_t p = worth(c, x->record), q = worth(c, y->record);
    if (p != q) return p < q;
    return round_fits(c) ? x->last < y->last : x->last > y->last;
}

/* May this one go? Not what the call that looks for a place has named itself; what was guessed for the next layer only
 * for a demand that finds nothing else. */
static int may_go(const we_cache *c, const slot *s, int guesses_too)
{
    if (!is_evictable(s) || s->demand == c->demand_number) return 0;
    if (!guesses_too && s->guess == c->guess_number) return 0;
    return s->keep_until_s == 0 || s->keep_until_s <= we_clock_s();
}

static uint32_t worse_of(const we_cache *c, uint32_t best, uint32_t candidate, int guesses_too)
{
    if (!may_go(c, &c->slots[candidate], guesses_too)) return best;
    return best == NOWHERE || is_worse(c, candidate, best) ? candidate : best;
}

/* The slot to empty; NOWHERE when none may go. */
static uint32_t choose_victim(we_cache *c, int guesses_too)
{
    uint32_t victim = NOWHERE;
    if (c->n_active == 0) return NOWHERE;
    const int few = c->n_active <= SAMPLES;
    for (uint32_t i = 0; i < SAMPLES && !few; i++)
        victim = worse_of(c, victim, c->active[next_random(c) % c->n_active], guesses_too);
    for (uint32_t i = 0; i < c->n_active && (few || victim == NOWHERE); i++)
        victim = worse_of(c, victim, c->active[i], guesses_too);
    return victim;
}

void we_slots_clear(we_cache *c, uint32_t at)
{
    slot *s = &c->slots[at];
    if (s->unused) c->stats.wasted++;
    c->where[s->record] = NOWHERE;
    s->record = NOWHERE;
    s->state = SLOT_EMPTY;
    s->unused = s->owed = 0;
    s->keep_until_s = 0;
    s->pins = 0;
    c->empty[c->n_empty++] = at;
}

void we_slots_evict(we_cache *c, uint32_t at)
{
    c->stats.evictions++;
    we_slots_clear(c, at);
}

void we_slots_fill(we_cache *c, uint32_t at, uint32_t record, slot_state state, slot_origin origin)
{
    slot *s = &c->slots[at];
    assert(s->state == SLOT_EMPTY && c->n_empty > 0 && c->empty[c->n_empty - 1] == at);
    c->n_empty--;
    c->where[record] = at;
    s->record = record;
    s->state = (uint8_t)state;
    s->origin = (uint8_t)origin;
    s->unused = origin != BY_DEMAND;
    s->last = c->clock;
    s->demand = c->demand_number - 1;
    s->guess = c->guess_number - (origin != BY_GUESS);
}

static uint32_t emptied(we_cache *c, uint32_t victim)
{
    if (victim != NOWHERE) we_slots_evict(c, victim);
    return victim;
}

uint32_t we_slots_for_hint(we_cache *c) { return c->n_empty ? c->empty[c->n_empty - 1] : NOWHERE; }

uint32_t we_slots_for_guess(we_cache *c)
{
    return c->n_empty ? c->empty[c->n_empty - 1] : emptied(c, choose_victim(c, 0));
}

uint32_t we_slots_for_demand(we_cache *c)
{
    const uint32_t at = we_slots_for_guess(c);
    return at != NOWHERE ? at : emptied(c, choose_victim(c, 1));
}

/* ---- size ---- */

/* Take an empty or evictable slot out of `active`. The caller calls unlist_detached, gives its memory back and puts it
 * into `gone`. */
static void detach(we_cache *c, uint32_t at)
{
    slot *s = &c->slots[at];
    if (s->state != SLOT_EMPTY) we_slots_evict(c, at);
    const uint32_t moved = c->active[--c->n_active];
    c->active[s->place] = moved;
    c->slots[moved].place = s->place;
    s->place = NOWHERE;
}

static void unlist_detached(we_cache *c)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->n_empty; i++)
        if (c->slots[c->empty[i]].place != NOWHERE) c->empty[n++] = c->empty[i];
    c->n_empty = n;
}

/* Large pages while no slot's memory is given back. */
static void prefer_large(we_cache *c, int yes)
{
    for (segment *s = c->segments; s; s = s->next) we_pages_prefer_large(s->data, s->bytes, yes);
}

void we_slots_settle(we_cache *c, uint32_t at)
{
    const slot *s = &c->slots[at];
    if (c->n_active <= c->target || !(is_evictable(s) || s->state == SLOT_EMPTY)) return;
    detach(c, at);
    unlist_detached(c);
    prefer_large(c, 0);
    we_pages_give_back(s->data, c->layout.record_bytes);
    c->gone[c->n_gone++] = at;
}

/* A strict order, so that equals do not make the selection slow. */
static int is_better(const we_cache *c, uint32_t a, uint32_t b)
{
    return is_worse(c, b, a) || (!is_worse(c, a, b) && a < b);
}

static void swap_active(we_cache *c, uint32_t i, uint32_t j)
{
    const uint32_t a = c->active[i], b = c->active[j];
    c->active[i] = b;
    c->slots[b].place = i;
    c->active[j] = a;
    c->slots[a].place = j;
}

/* Order `active` so that none of the first n is worse than any of the others (quickselect). */
static void best_to_front(we_cache *c, uint32_t n)
{
    uint32_t begin = 0, end = c->n_active;
    while (end - begin > 1) {
        swap_active(c, begin + (uint32_t)(next_random(c) % (end - begin)), end - 1);
        const uint32_t pivot = c->active[end - 1];
        uint32_t better = begin;
        for (uint32_t i = begin; i + 1 < end; i++)
            if (is_better(c, c->active[i], pivot)) swap_active(c, i, better++);
        swap_active(c, better, end - 1);
        if (better == n) return;
        if (better < n) begin = better + 1;
        else end = better;
    }
}

/* The worst that may go, until only `target` are left or none may; a chain through slot.next. */
static uint32_t detach_surplus(we_cache *c)
{
    uint32_t chain = NOWHERE;
    best_to_front(c, c->target);
    for (uint32_t i = c->n_active; i-- > 0 && c->n_active > c->target;) {
        const uint32_t at = c->active[i];           /* what detach moves here was looked at already */
        slot *s = &c->slots[at];
        if (!is_evictable(s) && s->state != SLOT_EMPTY) continue;
        detach(c, at);
        s->next = chain;
        chain = at;
    }
    unlist_detached(c);
    return chain;
}

static void shrink(we_cache *c)
{
    uint32_t chain = detach_surplus(c), last = NOWHERE;
    if (chain == NOWHERE) return;
    prefer_large(c, 0);
    os_unlock(&c->mutex);                           /* to give back gigabytes takes a while */
    for (uint32_t at = chain; at != NOWHERE; at = c->slots[at].next)
        we_pages_give_back(c->slots[at].data, c->layout.record_bytes);
    os_lock(&c->mutex);
    while (chain != NOWHERE) {
        last = chain;
        chain = c->slots[last].next;
        c->gone[c->n_gone++] = last;
    }
}

/* n more slots, in `gone`. On failure nothing changes. */
static we_status reserve_slots(we_cache *c, uint32_t n)
{
    const size_t bytes = c->layout.record_bytes;
    if (n > SIZE_MAX / bytes) return WE_E_MEMORY;
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
        slot *new = &c->slots[c->n_slots + i];
        memset(new, 0, sizeof *new);
        new->data = (uint8_t *)s->data + i * bytes;
        new->record = NOWHERE;
        c->gone[c->n_gone++] = c->n_slots + i;
    }
    c->n_slots += n;
    return WE_OK;
}

static void grow(we_cache *c)
{
    while (c->n_active < c->target && c->n_gone > 0) {
        const uint32_t at = c->gone[--c->n_gone];
        c->slots[at].place = c->n_active;
        c->active[c->n_active++] = at;
        c->empty[c->n_empty++] = at;
    }
    if (c->n_active == c->n_slots) prefer_large(c, 1);
}

we_status we_cache_resize(we_cache *c, uint32_t slots, we_fault *fault)
{
    we_status status = WE_OK;
    if (slots > c->n_records) slots = c->n_records;
    if (slots < 1) slots = 1;
    os_lock(&c->mutex);
    /* Slots that another thread is giving back just now are counted in n_slots, but cannot be had yet. */
    if (slots > c->n_active && slots - c->n_active > c->n_gone) {
        const uint32_t lacking = slots - c->n_active - c->n_gone, room = c->n_records - c->n_slots;
        if (room > 0) status = reserve_slots(c, lacking < room ? lacking : room);
    }
    if (status == WE_OK) {
        c->target = slots;
        grow(c);
        if (c->n_active > c->target) shrink(c);
        grow(c);                                    /* another call may have raised the target meanwhile */
        if (c->waiting) os_broadcast(&c->ready);
        if (c->n_empty && c->n_hints) we_reader_wake(c, c->n_hints);
    }
    we_slots_check(c);
    os_unlock(&c->mutex);
    return status == WE_OK ? WE_OK : we_fail(fault, status, "slots of the cache", 0, 0);
}

size_t we_cache_bytes(const we_record_layout *layout, uint32_t n_layers, uint32_t n_experts, uint32_t slots)
{
    const uint64_t records = (uint64_t)n_layers * n_experts;
    if (slots > records) slots = (uint32_t)records;
    const uint64_t per_slot = layout->record_bytes + sizeof(slot) + 3 * sizeof(uint32_t);
    const uint64_t per_record = sizeof(uint32_t) + sizeof(uint16_t) + sizeof(uint32_t) + 2 * sizeof(uint8_t);
    return (size_t)(sizeof(we_cache) + sizeof(segment) + n_layers * (sizeof(we_bank) + 2 * sizeof(uint32_t)) +
                    records * per_record + slots * per_slot);
}

void we_slots_free(we_cache *c)
{
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
}
