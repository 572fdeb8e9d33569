/* Filling memory from a file, piece by piece, by as many threads as call we_load_work at the same time.
 *
 * Large files are read past the page cache: a trunk of many gigabytes would be in memory twice, and would push out what
 * the user's other programs have there. Small ones are not, since opening a model again is then quicker. */
#ifndef WARP_EMBED_LOAD_H
#define WARP_EMBED_LOAD_H
#include "warp_embed/platform.h"

#define WE_LOAD_PIECE ((size_t)4 << 20)         /* most bytes of a piece: how soon a load can be stopped */
#define WE_LOAD_DIRECT ((uint64_t)1 << 30)      /* files of so many bytes are read past the page cache   */

typedef struct we_piece {
    uint64_t offset;
    uint8_t *to;
    uint32_t bytes;                 /* 1 to WE_LOAD_PIECE                                                */
    uint32_t owner;                 /* whose piece it is: for the caller                                 */
    uint8_t  encoding;              /* what the bytes are; WE_F32 and WE_BF16 must be finite numbers         */
    uint8_t  scales;                /* 1: they are f16 scales, which must be finite                        */
} we_piece;

typedef struct we_load we_load;

/* pieces: [n], borrowed. WE_E_IO, WE_E_MEMORY. */
we_status we_load_create(we_load **load, const char *path, const we_piece *pieces, size_t n, we_fault *fault);
/* Read pieces until none is left, a number is not finite, a read fails, or we_load_stop was called. */
void we_load_work(we_load *load);
void we_load_stop(we_load *load);
/* Bytes read so far. */
uint64_t we_load_done(const we_load *load);
/* After all threads have returned: WE_OK when everything was read; otherwise the failure of the piece with the lowest
 * number, in *piece and *fault. WE_E_NUMERIC: it holds NaN or infinity; WE_E_CANCELLED: it was stopped. */
we_status we_load_result(const we_load *load, size_t *piece, we_fault *fault);
void we_load_destroy(we_load *load);

#endif
