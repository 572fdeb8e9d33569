/* Blocks of MLA latents, counted, so that forks of a conversation share what neither will change.
 *
 * A block belongs to every table that holds it. Only an owner that is alone may write: we_block_own makes it so.
 * Counting is atomic: states may be forked and freed in different threads. */
#ifndef WARP_EMBED_LATENTS_H
#define WARP_EMBED_LATENTS_H
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define WE_BLOCK_HEADER 64u         /* keeps the latents on a cache line of their own */

/* A new block of nbytes for one owner, contents undefined; NULL without memory. */
static inline void *we_block_new(size_t nbytes)
{
    char *start = (char *)malloc(WE_BLOCK_HEADER + nbytes);
    if (!start) return NULL;
    atomic_init((atomic_int *)(void *)start, 1);
    return start + WE_BLOCK_HEADER;
}

static inline atomic_int *we_block_owners(void *block)
{
    return (atomic_int *)(void *)((char *)block - WE_BLOCK_HEADER);
}

static inline void we_block_share(void *block) { atomic_fetch_add(we_block_owners(block), 1); }

static inline void we_block_drop(void *block)
{
    if (atomic_fetch_sub(we_block_owners(block), 1) == 1) free((char *)block - WE_BLOCK_HEADER);
}

/* The block itself if it has one owner, else a copy that has; NULL without memory, and *block as it was. */
static inline void *we_block_own(void *block, size_t nbytes)
{
    if (atomic_load(we_block_owners(block)) == 1) return block;
    void *copy = we_block_new(nbytes);
    if (copy) {
        memcpy(copy, block, nbytes);
        we_block_drop(block);
    }
    return copy;
}

#endif
