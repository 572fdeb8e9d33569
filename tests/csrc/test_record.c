/* Layouts of every geometry, records of random bytes: nothing outside a record is touched. Sources: record.c. */
#include <string.h>
#include "check.h"
#include "alloc.h"
#include "warp_embed/platform.h"
#include "warp_embed/record.h"

static uint64_t seed = 88172645463325252u;
static uint32_t below(uint32_t n) { return (uint32_t)(next_random(&seed) % n); }

static uint32_t some_size(void)
{
    switch (below(5)) {
    case 0:  return below(4);
    case 1:  return 8 * below(20);
    case 2:  return (1u << 20) - below(3) + 1;
    case 3:  return (uint32_t)next_random(&seed);
    default: return below(300);
    }
}

static void fill(we_record_layout *l)
{
    static const uint8_t encodings[] = {WE_F32, WE_BF16, WE_Q8G, WE_Q4G, WE_VQ3R, WE_VQ2R, WE_Q3G, WE_VQ4P,
                                        WE_MXFP4, 6, 99, 255};
    memset(l, 0xA5, sizeof *l);
    l->encoding = encodings[below(sizeof encodings)];
    l->group = below(4) ? 32u << below(3) : some_size();
    l->vec_dim = below(4) ? 8 : some_size();
    const int packed = l->encoding == WE_VQ4P;
    l->stages = below(4) ? (packed ? 4u : l->encoding == WE_VQ2R ? 2u : 3u) : some_size();
    l->entries = below(4) ? (packed ? 64u : 256u) : some_size();
    l->index_bits = below(8) ? (packed ? 6u : 8u) : some_size();
}

static void check_layout(const we_record_layout *l)
{
    CHECK(l->record_bytes % WE_PAGE == 0 && l->end <= l->record_bytes && l->record_bytes - l->end < WE_PAGE);
    CHECK(l->payload_off[0] >= 48 && l->payload_off[0] < l->payload_off[1] && l->payload_off[1] < l->payload_off[2]);
    CHECK(l->payload_off[2] < l->first_scales_off && l->first_scales_off == l->scales_off[0]);
    CHECK(l->scales_off[0] <= l->scales_off[1] && l->scales_off[2] <= l->end && l->first_scales_off % 2 == 0);
    for (int m = 0; m < WE_MATRICES && l->row_bytes[m]; m++)
        CHECK(l->payload_off[m] + l->rows[m] * l->row_bytes[m] <= (m < 2 ? l->payload_off[m + 1] : l->first_scales_off));
}

static we_record_header good_header(const we_record_layout *l)
{
    we_record_header h = {.magic = WE_RECORD_MAGIC, .layer = 3, .expert = 7, .encoding = l->encoding, .codebook = 9,
                          .pages = (uint32_t)(l->record_bytes / WE_PAGE), .gate_off = l->payload_off[WE_GATE],
                          .up_off = l->payload_off[WE_UP], .down_off = l->payload_off[WE_DOWN],
                          .scales_off = l->first_scales_off};
    return h;
}

/* Random bytes behind a good header, in a block of exactly the record's size: a sanitizer sees one byte too many. */
static void check_records(const we_record_layout *l)
{
    we_fault fault;
    we_matrix views[WE_MATRICES];
    uint8_t *record = malloc(l->record_bytes);
    CHECK(record);
    for (size_t i = 0; i < l->record_bytes; i++) record[i] = (uint8_t)next_random(&seed);
    const we_status noise = we_record_check(l, record, 3, 7, 9, 1, &fault);
    CHECK(noise == WE_E_RECORD && fault.layer == 3 && fault.expert == 7 && fault.what);
    we_record_header h = good_header(l);
    h.crc32 = we_crc32(0, record + 48, l->end - 48);
    memcpy(record, &h, sizeof h);
    const we_status status = we_record_check(l, record, 3, 7, 9, 1, &fault);
    CHECK(status == WE_OK || (strcmp(fault.what, "index") == 0 && l->entries < 256));
    const float *const books[WE_MATRICES] = {NULL, NULL, NULL};
    we_record_views(l, record, books, views);
    for (int m = 0; m < WE_MATRICES; m++) {
        CHECK((const uint8_t *)views[m].payload == record + l->payload_off[m] && views[m].rows == l->rows[m]);
        CHECK(!views[m].scales || (const uint8_t *)(const void *)views[m].scales == record + l->scales_off[m]);
    }
    for (int bit = 0; bit < 48 * 8 && status == WE_OK; bit++) {
        record[bit / 8] ^= (uint8_t)(1 << bit % 8);
        if (bit / 8 != 8 || (record[8] != WE_VQ3R && record[8] != WE_VQ2R))
            CHECK(we_record_check(l, record, 3, 7, 9, 1, &fault) == WE_E_RECORD);
        record[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    free(record);
}

/* Every byte of codes under every scale, alone in three groups of two rows: finite exactly where its values are. */
static void check_mxfp4_values(void)
{
    static const float magnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (unsigned scale = 0; scale < 256; scale++)
        for (unsigned code = 0; code < 256; code++) {
            uint8_t payload[2 * 48] = {0}, scales[6] = {127, 127, 127, 127, 127, 127};
            const unsigned group = (scale + code) % 6, at = 16 * group + code % 16;
            payload[at] = (uint8_t)code;
            scales[group] = (uint8_t)scale;
            const we_matrix m = {.encoding = WE_MXFP4, .rows = 2, .cols = 90, .group = 32, .row_bytes = 48,
                                 .payload = payload, .scales = (const uint16_t *)(const void *)scales};
            const float low = magnitude[code & 7], high = magnitude[code >> 4 & 7], larger = low > high ? low : high;
            const int finite = scale < 253 || (scale < 255 && (double)larger * (scale == 253 ? 0.25 : 0.5) < 1.0);
            CHECK(we_matrix_is_finite(&m) == finite);
        }
}

static uint32_t crc_bit_by_bit(uint32_t crc, const uint8_t *p, size_t n)
{
    for (crc = ~crc; n--; p++) {
        crc ^= *p;
        for (int i = 0; i < 8; i++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    return ~crc;
}

static void check_crc(void)
{
    for (size_t n = 0; n < 300; n++) {
        uint8_t *p = malloc(n + 1);
        for (size_t i = 0; i <= n; i++) p[i] = (uint8_t)next_random(&seed);
        CHECK(we_crc32(0, p, n) == crc_bit_by_bit(0, p, n));
        CHECK(we_crc32(123, p + 1, n) == crc_bit_by_bit(123, p + 1, n));
        free(p);
    }
}

int main(void)
{
    int good = 0;
    check_crc();
    check_mxfp4_values();
    for (int i = 0; i < 100000; i++) {
        we_record_layout l;
        we_fault fault;
        fill(&l);
        const we_status status = we_record_layout_init(&l, some_size(), some_size(), &fault);
        CHECK(status == WE_OK || (status == WE_E_RECORD && fault.what));
        if (status != WE_OK) continue;
        check_layout(&l);
        if (l.record_bytes <= 1 << 16 && good++ < 300) check_records(&l);
    }
    CHECK(good > 100);
    return 0;
}
