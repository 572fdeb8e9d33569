/* AVX2: int16 activations by int8, nibble and E2M1 weights; what is its own, for x86_integer.h. The file that includes
 * this defines add_products, sum + the products of 16-bit neighbours in each 32-bit lane: two instructions, or one with
 * AVX-VNNI. */

enum {
    LANES = 8,
    PANEL_ROWS = 2 * LANES, SPAN = 128,         /* rows and columns that are unpacked at a time */
    TILE_TOKENS = 4, TOKENS = 24 * TILE_TOKENS, /* tokens in registers, and those whose sums wait in memory */
    STREAMS = LANES / 2, AHEAD = 384,           /* places that one token reads side by side, and prefetches in each */
    GROUPS = 64, SOME_GROUPS = 8                /* groups whose dots wait; those whose scales do */
};

typedef __m256i ints;
typedef __m256 floats;
typedef __m128i half_ints;
#ifdef _MSC_VER
typedef __m256i sums_of_ints;
#else
typedef int32_t sums_of_ints __attribute__((vector_size(32)));
#endif

/* GCC would add the products of an unrolled loop in another order, and keep most of them in memory until then. */
#ifdef __GNUC__
#define IN_ORDER(sum) __asm__("" : "+x"(sum))
#else
#define IN_ORDER(sum)
#endif

EXPANDED __m256i load_bits(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
EXPANDED __m128i load_half(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
EXPANDED __m256 load_floats(const float *p) { return _mm256_loadu_ps(p); }
EXPANDED void store_floats(float *p, __m256 x) { _mm256_storeu_ps(p, x); }
EXPANDED __m256i spread(int32_t x) { return _mm256_set1_epi32(x); }
EXPANDED __m256 spread_float(float x) { return _mm256_set1_ps(x); }
EXPANDED __m256i add_ints(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
EXPANDED __m256 add_floats(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
EXPANDED __m256i joined(__m128i low, __m128i high)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

EXPANDED __m256 scaled(__m256i dot, __m256 activation, __m256 weight)
{
    return _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot), activation), weight);
}

/* ----------------------------------------------------- rows become lanes ---- */

/* x[i] lane j becomes x[j] lane i. */
EXPANDED void transpose(__m256i x[LANES])
{
    __m256i y[8];
    WE_UNROLL
    for (size_t i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    }
    WE_UNROLL
    for (size_t i = 0; i < 8; i += 4) {                 /* x[i + c]: rows i .. i + 3, columns c and 4 + c */
        x[i] = _mm256_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm256_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm256_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm256_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    WE_UNROLL
    for (size_t c = 0; c < 4; c++) {
        const __m256i low = x[c], high = x[c + 4];
        x[c] = _mm256_permute2x128_si256(low, high, 0x20);
        x[c + 4] = _mm256_permute2x128_si256(low, high, 0x31);
    }
}

/* Scales of groups [g, g + n), n <= 8, of a row, zeros behind: the last groups of a row are read with those before
 * them, which are shifted out. bytes is a constant, that of a scale. */
EXPANDED __m256i load_weights(const we_matrix *w, size_t row, size_t g, size_t n, const size_t bytes)
{
    static const uint8_t down[32] = {0,    1,    2,    3,    4,    5,    6,    7,    8,    9,    10,
                                     11,   12,   13,   14,   15,   0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
                                     0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80};
    const size_t n_groups = we_n_groups(w), before = (LANES - n) * bytes;
    const char *from = (const char *)w->scales + (row * n_groups + g) * bytes;
    const int shift = n < LANES && n_groups >= LANES;
    uint64_t some[2] = {0, 0};
    if (shift) from -= before;
    else if (n < LANES) from = memcpy(some, from, n * bytes);
    __m128i x = bytes == 2 ? load_half(from) : _mm_loadl_epi64((const __m128i *)(const void *)from);
    if (shift) x = _mm_shuffle_epi8(x, load_half(down + before));
    if (bytes == 2) return _mm256_castps_si256(_mm256_cvtph_ps(x));
    const __m256i bits = _mm256_max_epi32(_mm256_slli_epi32(_mm256_cvtepu8_epi32(x), 23), _mm256_set1_epi32(0x400000));
    return _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0.5f)));  /* as we_e8m0_halved */
}

/* out[g stride] has the scales of group g0 + g, g < n <= 8, of eight rows; bytes is a constant, that of a scale. */
EXPANDED void weights_of_rows(const we_matrix *w, const size_t rows[LANES], size_t g0, size_t n, float out[][LANES],
                              size_t stride, const size_t bytes)
{
    __m256i x[8];
    WE_UNROLL
    for (size_t i = 0; i < 8; i++) x[i] = load_weights(w, rows[i], g0, n, bytes);
    transpose(x);
    for (size_t g = 0; g < n; g++) _mm256_storeu_si256((__m256i *)(void *)out[g * stride], x[g]);
}

/* -------------------------------------------------------------- one token ---- */

/* Codes of E2M1 nibbles, doubled. */
EXPANDED __m128i doubled_x16(__m128i nibbles) { return _mm_shuffle_epi8(load_half(we_e2m1_doubled), nibbles); }

/* The products of 16 codes of Q8G, or of 32 nibbles (q2: the inputs of the odd ones), added to dot. */
EXPANDED __m256i add_codes(__m256i dot, const uint8_t *codes, __m256i q, __m256i q2, const int kind)
{
    if (kind == WE_Q8G) return add_products(dot, _mm256_cvtepi8_epi16(load_half(codes)), q);
    __m256i evens, odds;
    if (kind == WE_Q4G) {
        const __m256i pairs = _mm256_cvtepu8_epi16(load_half(codes));
        evens = _mm256_and_si256(pairs, _mm256_set1_epi16(15));
        odds = _mm256_srli_epi16(pairs, 4);
    } else {
        const __m128i pairs = load_half(codes), low = _mm_set1_epi8(15);
        evens = _mm256_cvtepi8_epi16(doubled_x16(_mm_and_si128(pairs, low)));
        odds = _mm256_cvtepi8_epi16(doubled_x16(_mm_and_si128(_mm_srli_epi16(pairs, 4), low)));
    }
    return add_products(add_products(dot, evens, q), odds, q2);
}

/* The dots of a group of four rows; group and kind are constants. Where the group is two cache lines, the processor
 * fetches what comes by itself, and faster. */
EXPANDED __m128i group_dots(const uint8_t *const rows[STREAMS], size_t at, const int16_t *q, const size_t group,
                            const int kind)
{
    const size_t group_bytes = kind == WE_Q8G ? group : group / 2;
    __m256i dot[STREAMS];
    WE_UNROLL
    for (size_t i = 0; i < STREAMS; i++) {
        if (group_bytes <= 64) _mm_prefetch((const char *)rows[i] + at + AHEAD, _MM_HINT_T0);
        dot[i] = _mm256_setzero_si256();
    }
    for (size_t c = 0; c < group_bytes; c += 16) {
        const __m256i q1 = load_bits(q + c), q2 = kind == WE_Q8G ? q1 : load_bits(q + group / 2 + c);
        WE_UNROLL
        for (size_t i = 0; i < STREAMS; i++) {
            dot[i] = add_codes(dot[i], rows[i] + at + c, q1, q2, kind);
            IN_ORDER(dot[i]);
        }
    }
    const __m256i a = _mm256_add_epi32(_mm256_unpacklo_epi32(dot[0], dot[1]), _mm256_unpackhi_epi32(dot[0], dot[1]));
    const __m256i b = _mm256_add_epi32(_mm256_unpacklo_epi32(dot[2], dot[3]), _mm256_unpackhi_epi32(dot[2], dot[3]));
    const __m256i c = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    return _mm_add_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
}

/* dots[g - g0] of groups [g0, g1) of four rows, each a stream of its own: see one_token. */
EXPANDED void row_dots(const uint8_t *const rows[STREAMS], const int16_t *q, size_t g0, size_t g1, __m128i *dots,
                       const size_t group, const int kind)
{
    const size_t group_bytes = kind == WE_Q8G ? group : group / 2;
    for (size_t g = g0; g < g1; g++) dots[g - g0] = group_dots(rows, g * group_bytes, q + g * group, group, kind);
}

/* ------------------------------------------------------------ many tokens ---- */

/* Each byte p of a lane and of another to the upper bytes of a pair, then down with its sign. */
EXPANDED __m256i pair_of(__m256i low, __m256i high, const int p)
{
    const __m256i to_low = _mm256_slli_epi32(_mm256_srli_epi32(low, 8 * p), 8);
    const __m256i to_high = _mm256_slli_epi32(_mm256_srli_epi32(high, 8 * p), 24);
    return _mm256_srai_epi16(_mm256_blend_epi16(to_low, to_high, 0xaa), 8);
}

/* Nibbles of 8 rows, 8 columns in a lane, to four vectors of pairs. */
EXPANDED void unpack_nibbles(__m256i x, const int kind, __m256i (*out)[2])
{
    const __m256i low = _mm256_set1_epi8(15), table = _mm256_broadcastsi128_si256(load_half(we_e2m1_doubled));
    __m256i evens = _mm256_and_si256(x, low), odds = _mm256_and_si256(_mm256_srli_epi32(x, 4), low);
    if (kind == WE_MXFP4) {
        evens = _mm256_shuffle_epi8(table, evens);
        odds = _mm256_shuffle_epi8(table, odds);
    }
    out[0][0] = pair_of(evens, odds, 0);
    out[1][0] = pair_of(evens, odds, 1);
    out[2][0] = pair_of(evens, odds, 2);
    out[3][0] = pair_of(evens, odds, 3);
}

/* Columns [c0, c0 + 128) of 8 rows, as far as they go; rows behind the range repeat its last. */
EXPANDED void unpack_rows(const we_matrix *w, size_t row, size_t n_rows, size_t c0, __m256i (*out)[2], const int kind)
{
    const size_t begin = kind == WE_Q8G ? c0 : c0 / 2, n = kind == WE_Q8G ? SPAN : SPAN / 2;
    for (size_t b = 0; b < n && begin + b < w->row_bytes; b += 32) {
        const uint8_t *codes = (const uint8_t *)w->payload + row * w->row_bytes + begin + b;
        const int whole = w->row_bytes - begin - b >= 32;               /* rows are multiples of 16 bytes */
        __m256i x[LANES];
        WE_UNROLL
        for (size_t i = 0; i < LANES; i++) {
            const uint8_t *at = codes + we_min(i, n_rows - 1) * w->row_bytes;
            _mm_prefetch((const char *)at + PANEL_ROWS * w->row_bytes, _MM_HINT_T0);    /* the next panel's */
            x[i] = whole ? load_bits(at) : _mm256_castsi128_si256(load_half(at));
        }
        transpose(x);
        if (kind != WE_Q8G) {
            for (size_t i = 0; i < LANES; i++) unpack_nibbles(x[i], kind, out + b + 4 * i);
            continue;
        }
        for (size_t i = 0; i < LANES; i++) {
            out[b / 2 + 2 * i][0] = pair_of(x[i], _mm256_srli_epi32(x[i], 8), 0);
            out[b / 2 + 2 * i + 1][0] = pair_of(_mm256_srli_epi32(x[i], 16), _mm256_srli_epi32(x[i], 24), 0);
        }
    }
}

#include "x86_integer.h"
