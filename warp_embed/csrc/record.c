/* Layout, check and views of expert records, and CRC-32 (record.h; byte offsets in docs/format.md). */
#include "warp_embed/record.h"
#include <string.h>
#include "platform_fault.h"
#include "warp_embed/platform.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "containers are little-endian and read without conversion"
#endif

#define HEADER_BYTES 48u
#define OWN_ALIGN 64u               /* of payloads and scales in our own encodings: a cache line */
#define BLOCK_ROWS 64u              /* rows of a VQ block */
#define WIDTH_MAX (1u << 20)        /* bounds of the format; they keep every product below 2^63 */
#define GROUP_MAX (1u << 26)
#define MXFP4_GROUP 32u

static int is_vq(int encoding) { return encoding == WE_VQ3R || encoding == WE_VQ2R || encoding == WE_VQ4P; }
static int has_groups(int encoding) { return encoding == WE_Q8G || encoding == WE_Q4G || encoding == WE_MXFP4; }
static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }
static uint64_t blocks_of(uint64_t n, uint64_t size) { return (n + size - 1) / size; }

/* ---- layout ---- */

static const char *vq_fault(const we_record_layout *l)
{
    if (l->stages < 1 || l->stages > 8) return "stages must be 1 to 8";
    if (l->vec_dim < 1 || l->vec_dim > 64) return "vec_dim must be 1 to 64";
    if (l->entries < 1 || l->entries > 256) return "entries must be 1 to 256";
    if (l->index_bits != (l->encoding == WE_VQ4P ? 6u : 8u)) return "index_bits does not go with the encoding";
    if (l->encoding == WE_VQ4P && (l->stages != 4 || l->entries != 64)) return "VQ4P has 4 stages of 64 entries";
    if (l->encoding == WE_VQ2R && l->stages != 2) return "VQ2R has 2 stages";
    for (int m = 0; m < WE_MATRICES; m++)
        if (l->cols[m] % l->vec_dim) return "the columns of a matrix are not a multiple of vec_dim";
    return NULL;
}

static const char *geometry_fault(const we_record_layout *l, uint32_t width, uint32_t inter)
{
    if (width < 1 || width > WIDTH_MAX || inter < 1 || inter > WIDTH_MAX) return "a width is not 1 to 2^20";
    if (is_vq(l->encoding)) return vq_fault(l);
    if (has_groups(l->encoding)) {
        if (l->group < 1 || l->group > GROUP_MAX) return "group must be 1 to 2^26";
        if (l->encoding == WE_Q4G && l->group % 2) return "group must be even with two codes in a byte";
        if (l->encoding == WE_MXFP4 && l->group != MXFP4_GROUP) return "MXFP4 has groups of 32";
        return NULL;
    }
    return l->encoding == WE_F32 || l->encoding == WE_BF16 ? NULL : "not an encoding of experts";
}

static uint64_t row_bytes(const we_record_layout *l, uint64_t cols)
{
    switch (l->encoding) {
    case WE_F32:  return 4 * cols;
    case WE_BF16: return 2 * cols;
    case WE_Q8G:  return round_up(cols, l->group);
    case WE_Q4G:
    case WE_MXFP4: return round_up(cols, l->group) / 2;
    default:      return 0;
    }
}

static uint64_t payload_bytes(const we_record_layout *l, int m)
{
    if (!is_vq(l->encoding)) return (uint64_t)l->rows[m] * row_bytes(l, l->cols[m]);
    const uint64_t unit = l->encoding == WE_VQ4P ? 3 : l->stages;
    return blocks_of(l->rows[m], BLOCK_ROWS) * (l->cols[m] / l->vec_dim) * BLOCK_ROWS * unit;
}

static uint64_t scale_bytes(const we_record_layout *l, int m)
{
    if (is_vq(l->encoding)) return 2 * (uint64_t)l->rows[m];
    if (!has_groups(l->encoding)) return 0;
    return (l->encoding == WE_MXFP4 ? 1 : 2) * l->rows[m] * blocks_of(l->cols[m], l->group);
}

we_status we_record_layout_init(we_record_layout *l, uint32_t width, uint32_t inter, we_fault *fault)
{
    l->rows[WE_GATE] = l->rows[WE_UP] = l->cols[WE_DOWN] = inter;
    l->cols[WE_GATE] = l->cols[WE_UP] = l->rows[WE_DOWN] = width;
    const char *why = geometry_fault(l, width, inter);
    if (why) return we_fail(fault, WE_E_RECORD, why, 0, 0);
    const int vq = is_vq(l->encoding);
    /* Writers put the code of VQ3R into 8-bit records of any number of stages. */
    l->alt_encoding = l->encoding == WE_VQ3R ? WE_VQ2R : l->encoding == WE_VQ2R ? WE_VQ3R : l->encoding;
    uint64_t at = vq ? HEADER_BYTES : OWN_ALIGN;
    for (int m = 0; m < WE_MATRICES; m++) {
        l->row_bytes[m] = (size_t)row_bytes(l, l->cols[m]);
        l->payload_off[m] = (uint32_t)at;
        at += payload_bytes(l, m);
        if (!vq) at = round_up(at, OWN_ALIGN);
        if (at > UINT32_MAX) return we_fail(fault, WE_E_RECORD, "a record of 4 GiB or more", 0, 0);
    }
    l->first_scales_off = (uint32_t)at;
    for (int m = 0; m < WE_MATRICES; m++) {
        l->scales_off[m] = (uint32_t)at;
        at += scale_bytes(l, m);
        if (at > UINT32_MAX) return we_fail(fault, WE_E_RECORD, "a record of 4 GiB or more", 0, 0);
    }
    l->end = (uint32_t)at;
    at = round_up(at, WE_PAGE);
    if (at > UINT32_MAX) return we_fail(fault, WE_E_RECORD, "a record of 4 GiB or more", 0, 0);
    l->record_bytes = (size_t)at;
    return WE_OK;
}

/* ---- check ---- */

/* The name of the first header field that is wrong, or NULL. */
static const char *header_fault(const we_record_layout *l, const we_record_header *h, int layer, int expert,
                                uint32_t codebook)
{
    if (h->magic != WE_RECORD_MAGIC) return "magic";
    if (h->layer != layer) return "layer";
    if (h->expert != expert) return "expert";
    if (h->encoding != l->encoding && h->encoding != l->alt_encoding) return "encoding";
    if (h->flags != 0) return "flags";
    if (h->codebook != codebook) return "codebook";
    if (h->lowrank != 0) return "lowrank";
    if (h->reserved0 != 0 || h->reserved1 != 0 || h->reserved2 != 0) return "reserved";
    if ((uint64_t)h->pages * WE_PAGE != l->record_bytes) return "pages";
    if (h->gate_off != l->payload_off[WE_GATE]) return "gate_off";
    if (h->up_off != l->payload_off[WE_UP]) return "up_off";
    if (h->down_off != l->payload_off[WE_DOWN]) return "down_off";
    if (h->scales_off != l->first_scales_off) return "scales_off";
    return NULL;
}

static int has_index_beyond(const uint8_t *index, size_t n, uint32_t entries)
{
    uint8_t largest = 0;
    for (size_t i = 0; i < n; i++) largest = index[i] > largest ? index[i] : largest;
    return n != 0 && largest >= entries;
}

we_status we_record_check(const we_record_layout *l, const void *record, int layer, int expert, uint32_t codebook,
                          int check_crc, we_fault *fault)
{
    we_record_header header;
    memcpy(&header, record, sizeof header);
    const char *why = header_fault(l, &header, layer, expert, codebook);
    const uint8_t *bytes = record;
    /* 6-bit indices cannot reach beyond 64 entries, nor bytes beyond 256. The spans of a VQ record are contiguous. */
    if (!why && is_vq(l->encoding) && l->index_bits == 8 && l->entries < 256 &&
        has_index_beyond(bytes + l->payload_off[WE_GATE], l->first_scales_off - l->payload_off[WE_GATE], l->entries))
        why = "index";
    if (!why && check_crc && we_crc32(0, bytes + HEADER_BYTES, l->end - HEADER_BYTES) != header.crc32) why = "crc32";
    if (!why) return WE_OK;
    we_fail(fault, WE_E_RECORD, why, (int64_t)expert * (int64_t)l->record_bytes, 0);
    fault->layer = layer;
    fault->expert = expert;
    return WE_E_RECORD;
}

/* ---- views ---- */

void we_record_views(const we_record_layout *l, const void *record, const float *const books[WE_MATRICES],
                     we_matrix out[WE_MATRICES])
{
    const uint8_t *bytes = record;
    const int vq = is_vq(l->encoding), scaled = vq || has_groups(l->encoding);
    for (int m = 0; m < WE_MATRICES; m++) {
        out[m].encoding = l->encoding;
        out[m].rows = l->rows[m];
        out[m].cols = l->cols[m];
        out[m].group = has_groups(l->encoding) ? l->group : 0;
        out[m].row_bytes = l->row_bytes[m];
        out[m].payload = bytes + l->payload_off[m];
        out[m].scales = scaled ? (const uint16_t *)(const void *)(bytes + l->scales_off[m]) : NULL;
        out[m].books = vq ? books[m] : NULL;
        out[m].vec_dim = vq ? l->vec_dim : 0;
        out[m].stages = vq ? l->stages : 0;
    }
}

/* ---- NaN and infinity: all bits of the exponent are set ---- */

static int finite_16(const uint16_t *x, size_t n, uint16_t exponent)
{
    unsigned bad = 0;
    for (size_t i = 0; i < n; i++) bad |= (unsigned)((x[i] & exponent) == exponent);
    return !bad;
}

static int finite_32(const uint32_t *x, size_t n)
{
    unsigned bad = 0;
    for (size_t i = 0; i < n; i++) bad |= (unsigned)((x[i] & 0x7f800000u) == 0x7f800000u);
    return !bad;
}

/* Codes 6 and 7 (4 and 6) pass the range of f32 under the scale 253, and 4 and 5 (2 and 3) under 254; 255 is NaN. */
static int finite_mxfp4(const we_matrix *m)
{
    const size_t n_groups = (size_t)blocks_of(m->cols, MXFP4_GROUP);
    const uint8_t *scales = (const uint8_t *)m->scales;
    for (size_t r = 0; r < m->rows; r++)
        for (size_t g = 0; g < n_groups; g++) {
            const unsigned scale = scales[r * n_groups + g];
            if (scale < 253) continue;
            const uint8_t *codes = (const uint8_t *)m->payload + r * m->row_bytes + g * (MXFP4_GROUP / 2);
            const unsigned least = scale == 253 ? 6 : scale == 254 ? 4 : 0;
            for (size_t i = 0; i < MXFP4_GROUP / 2; i++)
                if ((codes[i] & 7u) >= least || (codes[i] >> 4 & 7u) >= least) return 0;
        }
    return 1;
}

int we_matrix_is_finite(const we_matrix *m)
{
    const size_t n = (size_t)m->rows * m->cols;
    if (m->encoding == WE_F32) return finite_32(m->payload, n);
    if (m->encoding == WE_BF16) return finite_16(m->payload, n, 0x7f80);
    if (m->encoding == WE_MXFP4) return finite_mxfp4(m);
    return finite_16(m->scales, is_vq(m->encoding) ? m->rows : m->rows * (size_t)blocks_of(m->cols, m->group), 0x7c00);
}

/* ---- CRC-32, polynomial 0xEDB88320 reflected, eight bytes a step ---- */

/* A table is linear over exclusive or, so its 256 entries follow from those of the eight powers of two. */
#define BIT(n, b, v) (((n) >> (b) & 1u) * (v))
#define ENTRY(n, a, b, c, d, e, f, g, h)                                                                        \
    (BIT(n, 0, a) ^ BIT(n, 1, b) ^ BIT(n, 2, c) ^ BIT(n, 3, d) ^ BIT(n, 4, e) ^ BIT(n, 5, f) ^ BIT(n, 6, g) ^ BIT(n, 7, h))
#define ENTRIES_4(n, ...) \
    ENTRY((n), __VA_ARGS__), ENTRY((n) + 1u, __VA_ARGS__), ENTRY((n) + 2u, __VA_ARGS__), ENTRY((n) + 3u, __VA_ARGS__)
#define ENTRIES_16(n, ...)                                            \
    ENTRIES_4(n, __VA_ARGS__), ENTRIES_4((n) + 4u, __VA_ARGS__),      \
    ENTRIES_4((n) + 8u, __VA_ARGS__), ENTRIES_4((n) + 12u, __VA_ARGS__)
#define ENTRIES_64(n, ...)                                            \
    ENTRIES_16(n, __VA_ARGS__), ENTRIES_16((n) + 16u, __VA_ARGS__),   \
    ENTRIES_16((n) + 32u, __VA_ARGS__), ENTRIES_16((n) + 48u, __VA_ARGS__)
#define TABLE(...) {ENTRIES_64(0u, __VA_ARGS__), ENTRIES_64(64u, __VA_ARGS__),  \
                    ENTRIES_64(128u, __VA_ARGS__), ENTRIES_64(192u, __VA_ARGS__)}

/* table[k][n]: the checksum register after byte n and then k zero bytes. */
static const uint32_t table[8][256] = {
    TABLE(0x77073096u, 0xee0e612cu, 0x076dc419u, 0x0edb8832u, 0x1db71064u, 0x3b6e20c8u, 0x76dc4190u, 0xedb88320u),
    TABLE(0x191b3141u, 0x32366282u, 0x646cc504u, 0xc8d98a08u, 0x4ac21251u, 0x958424a2u, 0xf0794f05u, 0x3b83984bu),
    TABLE(0x01c26a37u, 0x0384d46eu, 0x0709a8dcu, 0x0e1351b8u, 0x1c26a370u, 0x384d46e0u, 0x709a8dc0u, 0xe1351b80u),
    TABLE(0xb8bc6765u, 0xaa09c88bu, 0x8f629757u, 0xc5b428efu, 0x5019579fu, 0xa032af3eu, 0x9b14583du, 0xed59b63bu),
    TABLE(0x3d6029b0u, 0x7ac05360u, 0xf580a6c0u, 0x30704bc1u, 0x60e09782u, 0xc1c12f04u, 0x58f35849u, 0xb1e6b092u),
    TABLE(0xcb5cd3a5u, 0x4dc8a10bu, 0x9b914216u, 0xec53826du, 0x03d6029bu, 0x07ac0536u, 0x0f580a6cu, 0x1eb014d8u),
    TABLE(0xa6770bb4u, 0x979f1129u, 0xf44f2413u, 0x33ef4e67u, 0x67de9cceu, 0xcfbd399cu, 0x440b7579u, 0x8816eaf2u),
    TABLE(0xccaa009eu, 0x4225077du, 0x844a0efau, 0xd3e51bb5u, 0x7cbb312bu, 0xf9766256u, 0x299dc2edu, 0x533b85dau),
};

uint32_t we_crc32(uint32_t crc, const void *data, size_t n)
{
    const uint8_t *p = data;
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + 4, 4);
        low ^= crc;
        crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
              table[3][high & 255] ^ table[2][high >> 8 & 255] ^ table[1][high >> 16 & 255] ^ table[0][high >> 24];
    }
    while (n--) crc = crc >> 8 ^ table[0][(crc ^ *p++) & 255];
    return ~crc;
}
