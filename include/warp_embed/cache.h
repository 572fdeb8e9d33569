/* The expert cache: a bounded number of page-aligned slots, each holding one record, shared by all sessions of a model,
 * and a few threads that fill them from the banks.
 *
 * A caller demands the records that it needs next, waits until some of them are there, uses them, and releases them.
 * Demanded records are pinned: they stay where they are until the release. What is missing is read in the order of the
 * demands, one aligned read a record, before anything that is only expected: guesses about the next layer, and hints.
 * Who stays: the most often used, recency breaking ties (plain LRU keeps nothing once a token's working set exceeds
 * the cache); what the last token used counts for more as far as tokens are seen to repeat each other's choices. The
 * victim is the worst of a few sampled slots.
 *
 * Every function may be called from any thread at any time, but for create and destroy. In a child after fork() the
 * threads do not exist: it may destroy its copy, which then forgets, and nothing else. */
#ifndef WARP_EMBED_CACHE_H
#define WARP_EMBED_CACHE_H
#include <stdint.h>
#include "warp_embed/platform.h"
#include "warp_embed/record.h"

#define WE_IO_THREADS_MAX 8u

typedef struct we_bank {                /* the records of one layer                            */
    we_file  file;
    int      layer;
    uint32_t n_experts, codebook;       /* codebook: base that every record must carry         */
} we_bank;

typedef struct we_want {                /* one record that a caller uses                       */
    uint32_t    expert;                 /* set by the caller                                   */
    uint32_t    slot;                   /* the cache's own                                     */
    const void *record;                 /* NULL until it is ready; then valid to the release   */
} we_want;

/* With nothing in flight: hits + misses is what was demanded, misses - dropped + prefetched + retries == reads, and
 * (reads - broken) records make bytes_read. */
typedef struct we_cache_stats {
    uint64_t hits, misses;              /* demanded, and there or on its way by a guess; or not             */
    uint64_t prefetched, wasted;        /* read for a guess or hint; of these, gone before they were used   */
    uint64_t guessed, guesses_used;     /* read for a guess alone; of these, demanded later                 */
    uint64_t dropped;                   /* misses that were released before their read began                */
    uint64_t reads, retries, broken;    /* tried; of these, second tries; refused or cut short              */
    uint64_t failed;                    /* records that could not be had in two tries                       */
    uint64_t evictions, bytes_read;
    double   read_s, wait_s;            /* while at least one read ran; while callers waited for records    */
} we_cache_stats;

typedef struct we_cache we_cache;

/* banks: [n_layers], n_experts == 0 where a layer has none; they are copied, and from success on the cache closes
 * their files. slots >= 1. io_threads: 0 to WE_IO_THREADS_MAX; 0, or when none can be started: who waits reads, and
 * guesses and hints are ignored. WE_E_MEMORY when the slots cannot be reserved. */
we_status we_cache_create(we_cache **cache, const we_record_layout *layout, const we_bank *banks, uint32_t n_layers,
                          uint32_t slots, int check_crc, unsigned io_threads, we_fault *fault);

/* Pin wants[0], wants[1], ... as far as there are slots, and start reading those that are missing; *pinned is how many.
 * It may be 0 when all slots are in use or in flight: wait (n = 0), and demand again. A record that was demanded and
 * released before it was handed out counts once. WE_E_RECORD, nothing pinned: there is no such layer or expert. */
we_status we_cache_demand(we_cache *cache, uint32_t layer, we_want *wants, uint32_t n, uint32_t *pinned,
                          we_fault *fault);

/* Hand out: set .record of those of n pinned wants that have none and are there. Waits until there is at least one;
 * *ready is their number. WE_E_PAUSED at until_s (seconds of we_now_s; a moment in the past: only looks). As soon as
 * one of them cannot be read, its fault. Nothing is unpinned. n == 0: waits until a slot may have become free. */
we_status we_cache_wait(we_cache *cache, we_want *wants, uint32_t n, double until_s, uint32_t *ready, we_fault *fault);

/* Unpin. come_back: the same will be demanded again soon, so reads that were asked for go on, and the first that was
 * not handed out is kept until then, if that is soon. Otherwise those that have not begun are dropped. */
void we_cache_release(we_cache *cache, we_want *wants, uint32_t n, int come_back);

/* What the next layer will probably demand, most likely first; replaces what is left of the last guess. Reads when
 * nothing is demanded, in place of what is worth little. As many are taken as keep the guesses that were not used
 * below half a hundredth of all reads; returns how many. */
uint32_t we_cache_guess(we_cache *cache, uint32_t layer, const uint32_t *experts, uint32_t n);
/* Which of the experts are neither there nor on their way: missing[i] = 1, else 0. */
void we_cache_missing(we_cache *cache, uint32_t layer, const uint32_t *experts, uint32_t n, uint8_t *missing);

/* What may be read when there is nothing else to do, into slots that are empty. Returns how many were taken. */
uint32_t we_cache_hint(we_cache *cache, uint32_t layer, const uint32_t *experts, uint32_t n);
/* How often each record was used, fading: [sum of n_experts], by layer, then expert. */
void we_cache_uses(we_cache *cache, uint16_t *uses);
/* Count uses that happened earlier, in the same order. */
void we_cache_recall(we_cache *cache, const uint16_t *uses);

/* Slots that the cache may have; more may be in use for a moment after it was made smaller. */
uint32_t we_cache_slots(we_cache *cache);
uint32_t we_cache_held(we_cache *cache);        /* slots that hold a record, or are about to */
/* Change the number of slots. With fewer, the least used go first and their memory goes back at once; what is pinned
 * or in flight goes back when it is released. WE_E_MEMORY: more could not be reserved, and nothing has changed. */
we_status we_cache_resize(we_cache *cache, uint32_t slots, we_fault *fault);
we_cache_stats we_cache_get_stats(we_cache *cache);
/* Bytes a cache of that many slots takes in all, bookkeeping included. */
size_t we_cache_bytes(const we_record_layout *layout, uint32_t n_layers, uint32_t n_experts, uint32_t slots);

/* Stop the threads and free everything; NULL is allowed. No other call may be running. A thread that is stuck in a read
 * is not waited for: it frees what is left when the read returns. */
void we_cache_destroy(we_cache *cache);

#endif
