/* The threads that fill the slots of cache.h, and what they do next: demands in their order, then guesses, then hints.
 *
 * Idle threads sleep. At most all but one of them read ahead at a time, so that a demand finds one free. */
#include "cache_private.h"

/* ---- the queue of demands ---- */

void we_reader_push(we_cache *c, uint32_t at)
{
    c->slots[at].next = NOWHERE;
    if (c->queue_first == NOWHERE) c->queue_first = at;
    else c->slots[c->queue_last].next = at;
    c->queue_last = at;
}

void we_reader_drop(we_cache *c, uint32_t at)
{
    uint32_t before = NOWHERE;
    for (uint32_t i = c->queue_first; i != at; i = c->slots[i].next) before = i;
    if (before == NOWHERE) c->queue_first = c->slots[at].next;
    else c->slots[before].next = c->slots[at].next;
    if (c->queue_last == at) c->queue_last = before;
}

static uint32_t pop_demand(we_cache *c)
{
    const uint32_t at = c->queue_first;
    if (at == NOWHERE) return NOWHERE;
    c->queue_first = c->slots[at].next;
    if (c->queue_first == NOWHERE) c->queue_last = NOWHERE;
    c->slots[at].state = SLOT_READING;
    return at;
}

/* ---- what to read ahead ---- */

static uint32_t begin_ahead(we_cache *c, uint32_t at, uint32_t record, slot_origin origin)
{
    we_slots_fill(c, at, record, SLOT_READING, origin);
    c->stats.prefetched++;
    if (origin == BY_GUESS) c->stats.guessed++;
    return at;
}

static uint32_t pop_guess(we_cache *c)
{
    while (c->n_guesses > 0) {
        const uint32_t record = c->guesses[0];
        memmove(c->guesses, c->guesses + 1, --c->n_guesses * sizeof *c->guesses);
        if (c->where[record] != NOWHERE) continue;
        const uint32_t at = we_slots_for_guess(c);
        if (at != NOWHERE) return begin_ahead(c, at, record, BY_GUESS);
    }
    return NOWHERE;
}

static uint32_t pop_hint(we_cache *c)
{
    while (c->n_hints > 0) {
        const uint32_t record = c->hints[c->first_hint];
        c->first_hint = (c->first_hint + 1) % c->n_records;
        c->n_hints--;
        c->hinted[record] = 0;
        if (c->where[record] != NOWHERE) continue;
        const uint32_t at = we_slots_for_hint(c);
        if (at != NOWHERE) return begin_ahead(c, at, record, BY_HINT);
    }
    return NOWHERE;
}

static uint32_t next_read(we_cache *c)
{
    const uint32_t at = pop_demand(c);
    const unsigned most = c->n_readers > 1 ? c->n_readers - 1 : 1;
    if (at != NOWHERE || c->ahead >= most) return at;
    const uint32_t guess = pop_guess(c);
    return guess != NOWHERE ? guess : pop_hint(c);
}

/* ---- one read ---- */

static we_status read_record(const we_cache *c, const we_bank *bank, uint32_t expert, void *data, int *complete,
                             we_fault *fault)
{
    const size_t bytes = c->layout.record_bytes;
    const we_status status = we_file_read(&bank->file, data, bytes, (uint64_t)expert * bytes, fault);
    *complete = status == WE_OK;
    if (status == WE_OK)
        return we_record_check(&c->layout, data, bank->layer, (int)expert, bank->codebook, c->check_crc, fault);
    fault->layer = bank->layer;
    fault->expert = (int32_t)expert;
    return status;
}

static const we_bank *bank_of(const we_cache *c, uint32_t record)
{
    uint32_t low = 0, high = c->n_layers - 1;       /* the last layer that begins at or before it: first[] ascends, */
    while (low < high) {                            /* and a layer without experts begins where the next one does   */
        const uint32_t middle = (low + high + 1) / 2;
        if (c->first[middle] <= record) low = middle;
        else high = middle - 1;
    }
    return &c->banks[low];
}

static void finish(we_cache *c, uint32_t at, we_status status, const we_fault *fault)
{
    slot *s = &c->slots[at];
    if (status == WE_OK) {
        s->state = SLOT_FILLED;
        if (s->keep_until_s != 0) s->keep_until_s = we_clock_s() + KEEP_S;
    } else {
        c->stats.failed++;
        s->state = SLOT_FAILED;
        s->fault = *fault;
        if (s->pins == 0) we_slots_clear(c, at);
    }
    we_slots_settle(c, at);
    if (c->waiting) os_broadcast(&c->ready);
}

/* Read the record of a slot that is READING. A read that failed, or gave a damaged record, is tried once more. */
static void read_slot(we_cache *c, uint32_t at)
{
    const uint32_t record = c->slots[at].record, ahead = c->slots[at].unused;
    const we_bank *bank = bank_of(c, record);
    const uint32_t expert = record - c->first[bank - c->banks];
    void *data = c->slots[at].data;
    we_fault fault;
    we_status status;
    c->ahead += ahead;
    if (c->reading++ == 0) c->busy_since_s = we_clock_s();
    for (int attempt = 0;; attempt++) {
        int complete;
        os_unlock(&c->mutex);
        status = read_record(c, bank, expert, data, &complete, &fault);
        os_lock(&c->mutex);
        c->stats.reads++;
        if (complete) c->stats.bytes_read += c->layout.record_bytes;
        else c->stats.broken++;
        if (status == WE_OK || attempt == 1 || c->stop) break;
        c->stats.retries++;
    }
    if (--c->reading == 0) c->stats.read_s += we_clock_s() - c->busy_since_s;
    c->ahead -= ahead;
    finish(c, at, status, &fault);
}

int we_reader_read_one(we_cache *c)
{
    const uint32_t at = pop_demand(c);
    if (at != NOWHERE) read_slot(c, at);
    return at != NOWHERE;
}

/* ---- threads ---- */

static THREAD_RESULT run_reader(void *arg)
{
    reader *self = arg;
    we_cache *c = self->cache;
    os_lock(&c->mutex);
    while (!c->stop) {
        const uint32_t at = next_read(c);
        if (at != NOWHERE) {
            read_slot(c, at);
        } else {
            c->idle++;
            os_wait(&c->work, &c->mutex);
            c->idle--;
        }
    }
    self->ended = 1;
    const int last = --c->alive == 0 && c->abandoned;
    os_broadcast(&c->ready);
    os_unlock(&c->mutex);
    if (last) we_cache_free(c);
    return THREAD_DONE;
}

void we_reader_start(we_cache *c, unsigned threads)
{
    if (threads > WE_IO_THREADS_MAX) threads = WE_IO_THREADS_MAX;
    os_lock(&c->mutex);
    while (c->n_readers < threads) {
        reader *r = &c->readers[c->n_readers];
        r->cache = c;
        if (os_start(&r->thread, run_reader, r) != 0) break;
        c->n_readers++;
        c->alive++;
    }
    os_unlock(&c->mutex);
}

void we_reader_wake(we_cache *c, uint32_t n)
{
    if (n >= c->idle) {
        if (c->idle) os_broadcast(&c->work);
    } else {
        while (n--) os_signal(&c->work);
    }
}
