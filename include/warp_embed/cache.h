/* The expert cache: a bounded number of page-aligned slots, each holding one record, shared by all sessions of a model.
 *
 * Who stays: the most often used, recency breaking ties (plain LRU keeps nothing once a token's working set exceeds
 * the cache); the victim is the worst of a few sampled slots. A record that was handed out is pinned and stays where
 * it is until we_cache_unpin_all. One thread uses a cache at a time: the model's engine lock is held. */
#ifndef WARP_EMBED_CACHE_H
#define WARP_EMBED_CACHE_H
#include <stdint.h>
#include "warp_embed/platform.h"
#include "warp_embed/record.h"

typedef struct we_bank {                /* the records of one layer                            */
    we_file  file;
    int      layer;
    uint32_t n_experts, codebook;       /* codebook: base that every record must carry         */
} we_bank;

typedef struct we_cache_stats {
    uint64_t hits, misses, evictions, bytes_read;
    double   read_s;                    /* time spent waiting for reads                        */
} we_cache_stats;

typedef struct we_cache we_cache;

/* banks: [n_layers], n_experts == 0 where a layer has none; the cache borrows them. slots >= 1.
 * WE_E_MEMORY when the slots cannot be reserved. */
we_status we_cache_create(we_cache **cache, const we_record_layout *layout, const we_bank *banks, uint32_t n_layers,
                          uint32_t slots, int check_crc, we_fault *fault);

/* The record of an expert, checked and pinned; one aligned read when it is not in a slot. WE_E_MEMORY when every slot
 * is pinned. On any failure nothing is pinned that was not before, and the cache stays usable. */
we_status we_cache_get(we_cache *cache, uint32_t layer, uint32_t expert, const void **record, we_fault *fault);

void we_cache_unpin_all(we_cache *cache);
uint32_t we_cache_slots(const we_cache *cache);
/* Change the number of slots; with fewer, the least used go first and their memory goes back. Nothing may be pinned. */
we_status we_cache_resize(we_cache *cache, uint32_t slots, we_fault *fault);
we_cache_stats we_cache_get_stats(const we_cache *cache);
/* Bytes a cache of that many slots takes in all, bookkeeping included. */
size_t we_cache_bytes(const we_record_layout *layout, uint32_t n_layers, uint32_t n_experts, uint32_t slots);
void we_cache_destroy(we_cache *cache);

#endif
