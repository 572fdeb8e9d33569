/* What the callers of cache.h see: demands, waits, releases, and what may be read ahead. */
#include "cache_private.h"

#define GUESS_SHARE 200u            /* one read of so many may be a guess that was not used */
#define GRACE_S 0.1                 /* so long are threads waited for that are inside a read at the end */

/* ---- demand ---- */

static we_status no_such_expert(we_fault *fault) { return we_fail(fault, WE_E_RECORD, "no such expert", 0, 0); }

/* Nothing may go but what this very demand will come to later: the last of that. */
static int sacrifice(we_cache *c, uint32_t layer, const we_want *wants, uint32_t n)
{
    for (uint32_t i = n; i-- > 1;) {
        const uint32_t at = c->where[c->first[layer] + wants[i].expert];
        if (at == NOWHERE || !is_evictable(&c->slots[at]) || c->slots[at].keep_until_s != 0) continue;
        we_slots_evict(c, at);
        return 1;
    }
    return 0;
}

/* The slot of a record, which is on its way from now on; NOWHERE: there is no room. */
static uint32_t find_or_queue(we_cache *c, uint32_t number, uint32_t *queued)
{
    uint32_t at = c->where[number];
    if (at != NOWHERE) {
        slot *s = &c->slots[at];
        if (s->owed) return at;
        c->stats.hits++;
        if (s->unused && s->origin == BY_GUESS) c->stats.guesses_used++;
        s->unused = 0;
    } else {
        at = we_slots_for_demand(c);
        if (at == NOWHERE) return NOWHERE;
        we_slots_fill(c, at, number, SLOT_QUEUED, BY_DEMAND);
        we_reader_push(c, at);
        c->stats.misses++;
        ++*queued;
    }
    c->slots[at].owed = 1;
    we_slots_count_use(c, number);
    return at;
}

we_status we_cache_demand(we_cache *c, uint32_t layer, we_want *wants, uint32_t n, uint32_t *pinned, we_fault *fault)
{
    uint32_t done, queued = 0;
    *pinned = 0;
    if (layer >= c->n_layers) return no_such_expert(fault);
    for (uint32_t i = 0; i < n; i++)
        if (wants[i].expert >= c->banks[layer].n_experts) return no_such_expert(fault);
    os_lock(&c->mutex);
    c->demand_number++;
    we_slots_begin_turn(c, layer);
    for (uint32_t i = 0; i < n; i++) {              /* what is there must not make room for what is not */
        const uint32_t at = c->where[c->first[layer] + wants[i].expert];
        if (at != NOWHERE) c->slots[at].demand = c->demand_number;
    }
    for (done = 0; done < n; done++) {
        const uint32_t number = c->first[layer] + wants[done].expert;
        uint32_t at = find_or_queue(c, number, &queued);
        if (at == NOWHERE && done == 0 && sacrifice(c, layer, wants, n)) at = find_or_queue(c, number, &queued);
        if (at == NOWHERE) break;
        c->slots[at].last = c->clock;
        c->slots[at].pins++;
        wants[done].slot = at;
        wants[done].record = NULL;
    }
    if (layer == c->guess_layer) c->guess_number++;         /* what was guessed is used now, or as good as any other */
    we_reader_wake(c, queued);
    os_unlock(&c->mutex);
    *pinned = done;
    return WE_OK;
}

/* ---- wait and release ---- */

static we_status hand_out(we_cache *c, we_want *wants, uint32_t n, uint32_t *ready, we_fault *fault)
{
    for (uint32_t i = 0; i < n; i++) {
        slot *s = &c->slots[wants[i].slot];
        if (s->state != SLOT_FAILED) continue;
        *fault = s->fault;
        return fault->status;
    }
    for (uint32_t i = 0; i < n; i++) {
        slot *s = &c->slots[wants[i].slot];
        if (s->state != SLOT_FILLED || wants[i].record) continue;
        wants[i].record = s->data;
        s->owed = 0;
        s->keep_until_s = 0;
        ++*ready;
    }
    return *ready ? WE_OK : WE_E_PAUSED;
}

we_status we_cache_wait(we_cache *c, we_want *wants, uint32_t n, double until_s, uint32_t *ready, we_fault *fault)
{
    int changed = 0;
    *ready = 0;
    os_lock(&c->mutex);
    we_status status = hand_out(c, wants, n, ready, fault);
    if (status == WE_E_PAUSED) {
        const double start = we_clock_s();
        double now = start;
        do {
            if (c->n_readers == 0 && we_reader_read_one(c)) {
                changed = 1;
            } else if (now < until_s) {
                c->waiting++;
                os_wait_until(&c->ready, &c->mutex, until_s);
                c->waiting--;
                changed = 1;
            }
            status = hand_out(c, wants, n, ready, fault);
            now = we_clock_s();
        } while (status == WE_E_PAUSED && now < until_s && !(n == 0 && changed));
        c->stats.wait_s += now - start;
    }
    os_unlock(&c->mutex);
    return status;
}

static void unpin(we_cache *c, uint32_t at, int come_back)
{
    slot *s = &c->slots[at];
    if (--s->pins > 0) return;
    if (s->state == SLOT_FAILED) {
        we_slots_clear(c, at);
    } else if (s->state == SLOT_QUEUED && !come_back) {
        we_reader_drop(c, at);
        we_slots_clear(c, at);
        c->stats.dropped++;
    }
    we_slots_settle(c, at);
}

void we_cache_release(we_cache *c, we_want *wants, uint32_t n, int come_back)
{
    os_lock(&c->mutex);
    for (uint32_t i = 0; i < n && come_back; i++) {
        if (wants[i].record) continue;
        c->slots[wants[i].slot].keep_until_s = we_clock_s() + KEEP_S;
        break;
    }
    for (uint32_t i = 0; i < n; i++) {
        unpin(c, wants[i].slot, come_back);
        wants[i].record = NULL;
    }
    we_slots_check(c);
    if (c->waiting) os_broadcast(&c->ready);
    os_unlock(&c->mutex);
}

/* ---- ahead ---- */

static int is_real(const we_cache *c, uint32_t layer, uint32_t expert)
{
    return layer < c->n_layers && expert < c->banks[layer].n_experts;
}

/* Guesses that may be read: those that were not used, as far as one knows, stay a share of all reads. */
static uint32_t guesses_allowed(const we_cache *c)
{
    const uint64_t unused = c->stats.guessed - c->stats.guesses_used, most = c->stats.reads / GUESS_SHARE;
    return most > unused ? (uint32_t)(most - unused < GUESSES_MAX ? most - unused : GUESSES_MAX) : 0;
}

uint32_t we_cache_guess(we_cache *c, uint32_t layer, const uint32_t *experts, uint32_t n)
{
    os_lock(&c->mutex);
    const uint32_t most = guesses_allowed(c);
    c->n_guesses = 0;
    c->guess_number++;
    c->guess_layer = layer;
    for (uint32_t i = 0; i < n && c->n_readers > 0; i++) {
        if (!is_real(c, layer, experts[i])) continue;
        const uint32_t record = c->first[layer] + experts[i], at = c->where[record];
        if (at != NOWHERE) c->slots[at].guess = c->guess_number;
        else if (c->n_guesses < most) c->guesses[c->n_guesses++] = record;
    }
    const uint32_t taken = c->n_guesses;
    we_reader_wake(c, taken);
    os_unlock(&c->mutex);
    return taken;
}

void we_cache_missing(we_cache *c, uint32_t layer, const uint32_t *experts, uint32_t n, uint8_t *missing)
{
    os_lock(&c->mutex);
    for (uint32_t i = 0; i < n; i++)
        missing[i] = is_real(c, layer, experts[i]) && c->where[c->first[layer] + experts[i]] == NOWHERE;
    os_unlock(&c->mutex);
}

uint32_t we_cache_hint(we_cache *c, uint32_t layer, const uint32_t *experts, uint32_t n)
{
    uint32_t taken = 0;
    os_lock(&c->mutex);
    for (uint32_t i = 0; i < n && c->n_readers > 0; i++) {
        if (!is_real(c, layer, experts[i])) continue;
        const uint32_t record = c->first[layer] + experts[i];
        if (c->where[record] != NOWHERE || c->hinted[record]) continue;
        c->hints[(c->first_hint + c->n_hints++) % c->n_records] = record;
        c->hinted[record] = 1;
        taken++;
    }
    we_reader_wake(c, taken);
    os_unlock(&c->mutex);
    return taken;
}

void we_cache_uses(we_cache *c, uint16_t *uses)
{
    os_lock(&c->mutex);
    memcpy(uses, c->uses, c->n_records * sizeof *uses);
    os_unlock(&c->mutex);
}

void we_cache_recall(we_cache *c, const uint16_t *uses)
{
    os_lock(&c->mutex);
    for (uint32_t r = 0; r < c->n_records; r++) {
        const uint32_t sum = (uint32_t)c->uses[r] + uses[r];
        c->total_uses -= c->uses[r];
        c->total_uses += c->uses[r] = (uint16_t)(sum < UINT16_MAX ? sum : UINT16_MAX);
    }
    os_unlock(&c->mutex);
}

uint32_t we_cache_slots(we_cache *c)
{
    os_lock(&c->mutex);
    const uint32_t slots = c->target;
    os_unlock(&c->mutex);
    return slots;
}

uint32_t we_cache_held(we_cache *c)
{
    os_lock(&c->mutex);
    const uint32_t held = c->n_active - c->n_empty;
    os_unlock(&c->mutex);
    return held;
}

we_cache_stats we_cache_get_stats(we_cache *c)
{
    os_lock(&c->mutex);
    we_cache_stats stats = c->stats;
    if (c->reading) stats.read_s += we_clock_s() - c->busy_since_s;
    os_unlock(&c->mutex);
    return stats;
}

/* ---- life ---- */

static int make_arrays(we_cache *c, const we_bank *banks)
{
    const size_t n = c->n_records;
    c->banks = malloc(c->n_layers * sizeof *c->banks);
    c->first = calloc(c->n_layers, sizeof *c->first);
    c->where = malloc(n * sizeof *c->where);
    c->uses = calloc(n, sizeof *c->uses);
    c->fresh = calloc(n, sizeof *c->fresh);
    c->turn_size = calloc(c->n_layers, sizeof *c->turn_size);
    c->slots = malloc(n * sizeof *c->slots);        /* of these four only what is used is ever touched */
    c->active = malloc(n * sizeof *c->active);
    c->empty = malloc(n * sizeof *c->empty);
    c->gone = malloc(n * sizeof *c->gone);
    c->hints = malloc(n * sizeof *c->hints);
    c->hinted = calloc(n, sizeof *c->hinted);
    if (!c->banks || !c->first || !c->where || !c->uses || !c->fresh || !c->turn_size || !c->slots || !c->active || !c->empty || !c->gone ||
        !c->hints || !c->hinted)
        return 0;
    memcpy(c->banks, banks, c->n_layers * sizeof *banks);
    for (uint32_t layer = 1; layer < c->n_layers; layer++)
        c->first[layer] = c->first[layer - 1] + banks[layer - 1].n_experts;
    for (uint32_t r = 0; r < c->n_records; r++) c->where[r] = NOWHERE;
    return 1;
}

static int make_locks(we_cache *c)
{
    if (os_mutex_init(&c->mutex) != 0) return 0;
    if (os_cond_init(&c->work) != 0) goto no_work;
    if (os_cond_init(&c->ready) == 0) return 1;
    os_cond_destroy(&c->work);
no_work:
    os_mutex_destroy(&c->mutex);
    return 0;
}

static void free_arrays(we_cache *c)
{
    we_slots_free(c);
    free(c->banks);
    free(c->first);
    free(c->where);
    free(c->uses);
    free(c->fresh);
    free(c->turn_size);
    free(c->hints);
    free(c->hinted);
    free(c);
}

void we_cache_free(we_cache *c)
{
    for (uint32_t layer = 0; layer < c->n_layers; layer++)
        if (c->banks[layer].n_experts) we_file_close(&c->banks[layer].file);
    os_cond_destroy(&c->ready);
    os_cond_destroy(&c->work);
    os_mutex_destroy(&c->mutex);
    free_arrays(c);
}

we_status we_cache_create(we_cache **out, const we_record_layout *layout, const we_bank *banks, uint32_t n_layers,
                          uint32_t slots, int check_crc, unsigned io_threads, we_fault *fault)
{
    *out = NULL;
    uint64_t records = 0;
    for (uint32_t layer = 0; layer < n_layers; layer++) records += banks[layer].n_experts;
    if (records == 0 || records >= NOWHERE) return we_fail(fault, WE_E_RECORD, "number of experts", 0, 0);
    we_cache *c = calloc(1, sizeof *c);
    if (!c) return we_fail(fault, WE_E_MEMORY, "cache", 0, 0);
    c->layout = *layout;
    c->n_layers = n_layers;
    c->n_records = (uint32_t)records;
    c->check_crc = check_crc;
    c->pid = os_pid();
    c->random = 0x9e3779b97f4a7c15u;
    c->demand_number = c->guess_number = 1;
    c->guess_layer = c->turn_layer = c->queue_first = c->queue_last = NOWHERE;
    if (!make_arrays(c, banks) || !make_locks(c)) {
        free_arrays(c);
        return we_fail(fault, WE_E_MEMORY, "cache", 0, 0);
    }
    const we_status status = we_cache_resize(c, slots, fault);
    if (status != WE_OK) {
        for (uint32_t layer = 0; layer < n_layers; layer++) c->banks[layer].n_experts = 0;      /* the caller's files */
        we_cache_free(c);
        return status;
    }
    c->age_at = (uint64_t)AGE_PERIOD * c->n_active + c->n_records;
    we_reader_start(c, io_threads);
    *out = c;
    return WE_OK;
}

/* In a child process: the threads are not here, and one of them may have held the mutex. */
static void forget(we_cache *c)
{
    for (uint32_t layer = 0; layer < c->n_layers; layer++)
        if (c->banks[layer].n_experts) we_file_close(&c->banks[layer].file);
}

void we_cache_destroy(we_cache *c)
{
    os_thread threads[WE_IO_THREADS_MAX];
    int ended[WE_IO_THREADS_MAX];
    if (!c) return;
    if (c->pid != os_pid()) {
        forget(c);
        return;
    }
    os_lock(&c->mutex);
    const double until_s = we_clock_s() + GRACE_S;
    c->stop = 1;
    os_broadcast(&c->work);
    while (c->alive > 0 && we_clock_s() < until_s) os_wait_until(&c->ready, &c->mutex, until_s);
    const unsigned n = c->n_readers;
    const int abandoned = c->alive > 0;
    for (unsigned i = 0; i < n; i++) {
        threads[i] = c->readers[i].thread;
        ended[i] = c->readers[i].ended;
    }
    c->abandoned = abandoned;
    os_unlock(&c->mutex);                           /* from here on an abandoned cache is its last thread's */
    for (unsigned i = 0; i < n; i++) {
        if (ended[i]) os_join(threads[i]);
        else os_detach(threads[i]);
    }
    if (!abandoned) we_cache_free(c);
}
