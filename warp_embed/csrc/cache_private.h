/* What cache.c (callers), cache_slots.c (who stays, and how many) and cache_reader.c (threads) share.
 *
 * Everything is guarded by `mutex`, but for a slot's bytes: while it is READING they belong to the thread that reads,
 * and once it is FILLED they do not change before it is evicted, which pins prevent.
 *
 * A slot is in one of these places: in `active`, from where it may also be listed in `empty` (state EMPTY); in `gone`
 * (its memory was given back by a smaller size); or, for a moment, with a thread that gives its memory back.
 * where[r] is the slot of record r, and slot.record is r, from the moment its read was asked for. */
#ifndef WARP_EMBED_CACHE_PRIVATE_H
#define WARP_EMBED_CACHE_PRIVATE_H
#include "os_threads.h"
#include "warp_embed/cache.h"
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include "platform_fault.h"

#define NOWHERE UINT32_MAX
#define GUESSES_MAX 64u
#define AGE_PERIOD 10u              /* uses are halved after this many accesses per slot */
#define KEEP_S 0.25                 /* so long is kept what a paused caller comes back for */

typedef enum slot_state {
    SLOT_EMPTY,
    SLOT_QUEUED,                    /* demanded, waits for a thread           */
    SLOT_READING,
    SLOT_FILLED,
    SLOT_FAILED                     /* its fault is kept while it is pinned   */
} slot_state;

typedef enum slot_origin { BY_DEMAND, BY_GUESS, BY_HINT } slot_origin;

typedef struct slot {
    uint8_t *data;                  /* [record_bytes], page-aligned           */
    uint64_t last;                  /* clock of the last demand               */
    double   keep_until_s;          /* of one that a paused caller comes back for; 0: no such one */
    uint32_t record;                /* NOWHERE: empty or gone                 */
    uint32_t place;                 /* index in `active`                      */
    uint32_t pins;
    uint32_t next;                  /* in the queue of demands                */
    uint32_t demand, guess;         /* number of the last call that named it  */
    uint8_t  state, origin;
    uint8_t  unused;                /* read ahead and not demanded yet        */
    uint8_t  owed;                  /* demanded and not handed out yet        */
    we_fault fault;
} slot;

typedef struct segment {            /* slots that were reserved together      */
    struct segment *next;
    void           *data;
    size_t          bytes;
} segment;

typedef struct reader {
    we_cache *cache;
    os_thread thread;
    int       ended;
} reader;

struct we_cache {
    we_record_layout layout;
    we_bank  *banks;                /* [n_layers]                             */
    uint32_t  n_layers, n_records;
    uint32_t *first;                /* [n_layers]: record number of a layer's expert 0 */
    uint32_t *where;                /* [n_records]: slot, or NOWHERE          */
    uint16_t *uses;                 /* [n_records], aged                      */
    uint8_t  *fresh;                /* [n_records]: 1: used when its layer had its last turn, 2: in the present turn */
    uint32_t *turn_size;            /* [n_layers]: records demanded in its last turn */
    uint32_t  turn_layer, turn_now; /* whose turn it is; records demanded in it so far */
    uint32_t  round;                /* sum of turn_size: what a token uses    */
    uint64_t  total_uses;           /* sum of uses                            */
    double    seen, again, expected;    /* uses, aged; of fresh records; that was to be expected from `uses` alone */
    uint32_t  bonus;                /* uses that a fresh record is worth in addition */
    int       check_crc;
    long      pid;                  /* of the process that made it            */

    os_mutex  mutex;
    os_cond   work, ready;          /* threads wait for work; callers for what is ready */
    uint32_t  idle, waiting;        /* how many of them                       */

    slot     *slots;                /* [n_records], of which n_slots have memory */
    uint32_t *active, *empty, *gone;    /* [n_records] each, of which n_... count */
    uint32_t  n_slots, n_active, n_empty, n_gone;
    uint32_t  target;               /* slots that there may be                */
    segment  *segments;
    uint64_t  clock, age_at, random;
    uint32_t  demand_number, guess_number, guess_layer;

    uint32_t  queue_first, queue_last;  /* slots that were demanded, oldest first; NOWHERE: none */
    uint32_t  guesses[GUESSES_MAX], n_guesses;      /* records, most likely first */
    uint32_t *hints;                /* [n_records] ring of records            */
    uint8_t  *hinted;               /* [n_records] is it in the ring?         */
    uint32_t  first_hint, n_hints;

    reader    readers[WE_IO_THREADS_MAX];
    unsigned  n_readers, alive;     /* started; of these, not at their end    */
    unsigned  reading, ahead;       /* reads that run; of these, guesses and hints */
    double    busy_since_s;
    int       stop, abandoned;
    we_cache_stats stats;
};

/* ---- cache_slots.c; the mutex is held ---- */
void we_slots_check(const we_cache *c);
void we_slots_begin_turn(we_cache *c, uint32_t layer);
void we_slots_count_use(we_cache *c, uint32_t record);
uint32_t we_slots_for_demand(we_cache *c);          /* an empty slot, perhaps by an eviction; NOWHERE: none */
uint32_t we_slots_for_guess(we_cache *c);
uint32_t we_slots_for_hint(we_cache *c);
void we_slots_evict(we_cache *c, uint32_t at);      /* FILLED and not pinned -> EMPTY */
void we_slots_fill(we_cache *c, uint32_t at, uint32_t record, slot_state state, slot_origin origin);
void we_slots_clear(we_cache *c, uint32_t at);      /* -> EMPTY, whatever it was */
void we_slots_settle(we_cache *c, uint32_t at);     /* after a release or a read: give it back if it is one too many */
void we_slots_free(we_cache *c);

static inline int is_evictable(const slot *s) { return s->state == SLOT_FILLED && s->pins == 0; }

/* ---- cache_reader.c; the mutex is held but for we_reader_start, and given away while a read runs ---- */
void we_reader_start(we_cache *c, unsigned threads);        /* fewer when not all can be had */
void we_reader_push(we_cache *c, uint32_t at);
void we_reader_drop(we_cache *c, uint32_t at);      /* take a slot out of the queue */
void we_reader_wake(we_cache *c, uint32_t n);       /* there is work for n threads  */
int we_reader_read_one(we_cache *c);                /* the oldest demand, in this thread; 0: there is none */

/* cache.c; nobody else uses the cache any more */
void we_cache_free(we_cache *c);

#endif
