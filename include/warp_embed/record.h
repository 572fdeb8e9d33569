/* Encodings, and how the three matrices of an expert lie in its record (docs/format.md). */
#ifndef WARP_EMBED_RECORD_H
#define WARP_EMBED_RECORD_H
#include <stddef.h>
#include <stdint.h>
#include "warp_embed/kernels.h"
#include "warp_embed/status.h"

enum { WE_GATE, WE_UP, WE_DOWN, WE_MATRICES };

/* Header of one expert record, little-endian, 48 bytes (format 6.2). */
typedef struct we_record_header {
    uint32_t magic;                                             /* "WEXP" */
    uint16_t layer, expert;
    uint8_t  encoding, flags;
    uint16_t codebook, lowrank, reserved0;
    uint32_t pages;                                             /* record bytes / WE_PAGE */
    uint32_t gate_off, up_off, down_off, scales_off;
    uint32_t crc32, reserved1, reserved2;
} we_record_header;
#if defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
_Static_assert(sizeof(we_record_header) == 48, "the record header is 48 bytes");
#endif
#define WE_RECORD_MAGIC 0x50584557u

/* Everything a record of one container has in common; computed once from the manifest. */
typedef struct we_record_layout {
    uint8_t  encoding;                  /* we_encoding of the header: F32 BF16 Q8G Q4G MXFP4 VQ3R VQ2R VQ4P */
    uint8_t  alt_encoding;              /* second value the header may carry (VQ2R records say VQ3R)   */
    uint32_t rows[WE_MATRICES], cols[WE_MATRICES];
    uint32_t group;                     /* Q8G, Q4G, MXFP4 (32)                                        */
    uint32_t vec_dim, stages, entries, index_bits;              /* VQ                                  */
    uint32_t payload_off[WE_MATRICES];  /* from the record's start                                     */
    uint32_t scales_off[WE_MATRICES];   /* f16 (MXFP4: a byte) per row and group, or f16 per row (VQ)  */
    size_t   row_bytes[WE_MATRICES];    /* stride of a row; 0 for VQ                                   */
    uint32_t first_scales_off;          /* header's chan_corr_off                                      */
    uint32_t end;                       /* end of scales: the CRC covers [48, end)                     */
    size_t   record_bytes;              /* multiple of WE_PAGE                                         */
} we_record_layout;

/* Fill rows, cols and everything after them from encoding, group and VQ geometry. WE_E_RECORD with fault->what when
 * the geometry is not one of the format's (columns no multiple of vec_dim, a record of 4 GiB or more, ...). */
we_status we_record_layout_init(we_record_layout *layout, uint32_t expert_width, uint32_t expert_inter,
                                we_fault *fault);

/* Check a record that was read: header, identity, offsets; with check_crc also the checksum. Indices beyond
 * `entries` are refused always. Nothing of the record may be used before. */
we_status we_record_check(const we_record_layout *layout, const void *record, int layer, int expert,
                          uint32_t codebook, int check_crc, we_fault *fault);

/* Views of the three matrices of a checked record. books[m]: f32 [stages][256 or 64][vec_dim] of matrix m (VQ). */
void we_record_views(const we_record_layout *layout, const void *record, const float *const books[WE_MATRICES],
                     we_matrix out[WE_MATRICES]);

/* Is every number that a matrix stores finite: weights of F32, BF16 and MXFP4, scales of the others? */
int we_matrix_is_finite(const we_matrix *matrix);

/* CRC-32 as in zlib; start with crc = 0. */
uint32_t we_crc32(uint32_t crc, const void *data, size_t n);

#endif
