/* AVX-512: int16 activations by int8, nibble and E2M1 weights; what is its own, for x86_integer.h. The file that
 * includes this defines add_products, sum + the products of 16-bit neighbours in each 32-bit lane: two instructions, or
 * one with VNNI. */

enum {
    LANES = 16,
    PANEL_ROWS = 2 * LANES, SPAN = 128,         /* rows and columns that are unpacked at a time */
    TILE_TOKENS = 8, TOKENS = 12 * TILE_TOKENS, /* tokens in registers, and those whose sums wait in memory */
    STREAMS = LANES / 2, AHEAD = 512,           /* places that one token reads side by side, and prefetches in each */
    GROUPS = 64, SOME_GROUPS = 8                /* groups whose dots wait; those whose scales do */
};

typedef __m512i ints;
typedef __m512 floats;
typedef __m256i half_ints;
#ifdef _MSC_VER
typedef __m512i sums_of_ints;
#else
typedef int32_t sums_of_ints __attribute__((vector_size(64)));
#endif

EXPANDED __m512i load_bits(const void *p) { return _mm512_loadu_si512(p); }
EXPANDED __m512 load_floats(const float *p) { return _mm512_loadu_ps(p); }
EXPANDED void store_floats(float *p, __m512 x) { _mm512_storeu_ps(p, x); }
EXPANDED __m512i spread(int32_t x) { return _mm512_set1_epi32(x); }
EXPANDED __m512 spread_float(float x) { return _mm512_set1_ps(x); }
EXPANDED __m512i add_ints(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
EXPANDED __m512 add_floats(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
EXPANDED __m512i joined(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }

EXPANDED __m512 scaled(__m512i dot, __m512 activation, __m512 weight)
{
    return _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot), activation), weight);
}

/* ----------------------------------------------------- rows become lanes ---- */

/* Quads of four vectors at a time: x[i + c] becomes rows i .. i + 3 of columns c, 4 + c, 8 + c, 12 + c. */
EXPANDED void transpose_quads(__m512i *x, const size_t n)
{
    __m512i y[LANES];
    WE_UNROLL
    for (size_t i = 0; i < n; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    WE_UNROLL
    for (size_t i = 0; i < n; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
}

/* x[i] lane j becomes x[j] lane i. */
EXPANDED void transpose(__m512i x[LANES])
{
    __m512i y[LANES];
    transpose_quads(x, LANES);
    WE_UNROLL
    for (size_t c = 0; c < 4; c++) {
        const __m512i low = _mm512_shuffle_i32x4(x[c], x[c + 4], 0x88);
        const __m512i low2 = _mm512_shuffle_i32x4(x[c], x[c + 4], 0xdd);
        const __m512i high = _mm512_shuffle_i32x4(x[c + 8], x[c + 12], 0x88);
        const __m512i high2 = _mm512_shuffle_i32x4(x[c + 8], x[c + 12], 0xdd);
        y[c] = _mm512_shuffle_i32x4(low, high, 0x88);
        y[c + 8] = _mm512_shuffle_i32x4(low, high, 0xdd);
        y[c + 4] = _mm512_shuffle_i32x4(low2, high2, 0x88);
        y[c + 12] = _mm512_shuffle_i32x4(low2, high2, 0xdd);
    }
    WE_UNROLL
    for (size_t i = 0; i < 16; i++) x[i] = y[i];
}

/* Two vectors of quads: the first and third of a and b, the second and fourth. */
EXPANDED __m512i quads_13(__m512i a, __m512i b)
{
    return _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), b);
}

EXPANDED __m512i quads_24(__m512i a, __m512i b)
{
    return _mm512_permutex2var_epi64(a, _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15), b);
}

/* Scales of groups [g, g + n), n <= 8, of a row, zeros behind, and of another; bytes is a constant, that of a scale. */
EXPANDED __m512i load_weights(const we_matrix *w, size_t row, size_t row2, size_t g, size_t n, const size_t bytes)
{
    const __mmask8 some = (__mmask8)((1u << n) - 1);
    const size_t at = row * we_n_groups(w) + g, at2 = row2 * we_n_groups(w) + g;
    if (bytes == 2) {
        const __m256i x = _mm256_castsi128_si256(_mm_maskz_loadu_epi16(some, w->scales + at));
        const __m128i x2 = _mm_maskz_loadu_epi16(some, w->scales + at2);
        return _mm512_castps_si512(_mm512_cvtph_ps(_mm256_inserti128_si256(x, x2, 1)));
    }
    const __m128i x = _mm_maskz_loadu_epi8(some, we_e8m0_scales(w) + at);
    const __m512i e = _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(x, _mm_maskz_loadu_epi8(some, we_e8m0_scales(w) + at2)));
    const __m512i bits = _mm512_max_epi32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(0x400000));
    return _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0.5f))); /* as we_e8m0_halved */
}

/* Halves of x[i] lane j become halves of x[j] lane i. */
EXPANDED void transpose_halves(__m512i x[8])
{
    transpose_quads(x, 8);
    WE_UNROLL
    for (size_t c = 0; c < 4; c++) {
        const __m512i low = x[c], high = x[c + 4];
        x[c] = quads_13(low, high);
        x[c + 4] = quads_24(low, high);
    }
}

/* out[g stride] has the scales of group g0 + g, g < n <= 8, of sixteen rows; bytes is a constant, that of a scale. */
EXPANDED void weights_of_rows(const we_matrix *w, const size_t rows[LANES], size_t g0, size_t n, float out[][LANES],
                              size_t stride, const size_t bytes)
{
    __m512i x[8];
    WE_UNROLL
    for (size_t i = 0; i < 8; i++) x[i] = load_weights(w, rows[i], rows[i + 8], g0, n, bytes);
    transpose_halves(x);
    for (size_t g = 0; g < n; g++) _mm512_storeu_si512(out[g * stride], x[g]);
}

/* -------------------------------------------------------------- one token ---- */

/* The products of 32 codes of Q8G, or of 64 nibbles (q2: the inputs of the odd ones), added to dot. */
EXPANDED __m512i add_codes(__m512i dot, __m256i codes, __m512i q, __m512i q2, const int kind)
{
    if (kind == WE_Q8G) return add_products(dot, _mm512_cvtepi8_epi16(codes), q);
    const __m512i pairs = _mm512_cvtepu8_epi16(codes);
    __m512i evens = _mm512_and_si512(pairs, _mm512_set1_epi16(15)), odds = _mm512_srli_epi16(pairs, 4);
    if (kind == WE_MXFP4) {             /* the table twice: a look-up takes five bits, the fifth is of the odd nibble */
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)we_e2m1_doubled);
        const __m512i table = _mm512_broadcast_i64x4(_mm256_cvtepi8_epi16(bytes));
        evens = _mm512_permutexvar_epi16(pairs, table);
        odds = _mm512_permutexvar_epi16(odds, table);
    }
    return add_products(add_products(dot, evens, q), odds, q2);
}

/* In each quad a0 + a2, b0 + b2, a1 + a3, b1 + b3. */
EXPANDED __m512i add_pairs(__m512i a, __m512i b)
{
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

/* In each quad a0 + a2, a1 + a3, b0 + b2, b1 + b3: the totals of quads of four vectors, two results of add_pairs. */
EXPANDED __m512i add_quads(__m512i a, __m512i b)
{
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

/* Sums of the lower halves of eight vectors in the lower half, of the upper halves in the upper one. */
EXPANDED __m512i sums_of_halves(const __m512i x[8])
{
    const __m512i a = add_quads(add_pairs(x[0], x[1]), add_pairs(x[2], x[3]));
    const __m512i b = add_quads(add_pairs(x[4], x[5]), add_pairs(x[6], x[7]));
    return _mm512_add_epi32(quads_13(a, b), quads_24(a, b));
}

/* Dots of a group of eight rows in both halves together, or, where a group has 16 bytes, of two groups (or one, and
 * zeros), each in its half. group, kind and n are constants. */
EXPANDED __m512i group_dots(const uint8_t *const rows[STREAMS], size_t at, const int16_t *q, const size_t group,
                            const int kind, const size_t n)
{
    const size_t group_bytes = kind == WE_Q8G ? group : group / 2;
    __m512i dot[STREAMS];
    WE_UNROLL
    for (size_t i = 0; i < STREAMS; i++) {
        for (size_t b = 0; b < group_bytes; b += 64) _mm_prefetch((const char *)rows[i] + at + AHEAD + b, _MM_HINT_T0);
        dot[i] = _mm512_setzero_si512();
    }
    for (size_t c = 0; c < group_bytes; c += 32) {
        __m512i q1 = load_bits(q + c), q2 = q1;
        if (group_bytes == 16) {
            const __m512i next = n == 2 ? load_bits(q + 32) : _mm512_setzero_si512();
            q2 = _mm512_shuffle_i32x4(q1, next, 0xee);
            q1 = _mm512_shuffle_i32x4(q1, next, 0x44);
        } else if (kind != WE_Q8G) {
            q2 = load_bits(q + group / 2 + c);
        }
        WE_UNROLL
        for (size_t i = 0; i < STREAMS; i++) {
            const uint8_t *from = rows[i] + at + c;
            const __m256i codes = group_bytes == 16 && n == 1
                                      ? _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)from))
                                      : _mm256_loadu_si256((const __m256i *)(const void *)from);
            dot[i] = add_codes(dot[i], codes, q1, q2, kind);
            IN_REGISTER(dot[i]);        /* as IN_ORDER in x86_avx2_integer.h */
        }
    }
    return sums_of_halves(dot);
}

/* dots[g - g0] of groups [g0, g1) of eight rows, each a stream of its own: see one_token. */
EXPANDED void row_dots(const uint8_t *const rows[STREAMS], const int16_t *q, size_t g0, size_t g1, __m256i *dots,
                       const size_t group, const int kind)
{
    const size_t group_bytes = kind == WE_Q8G ? group : group / 2, step = group_bytes == 16 ? 2 : 1;
    size_t g = g0;
    for (; g + step <= g1; g += step) {
        const __m512i sums = group_dots(rows, g * group_bytes, q + g * group, group, kind, step);
        if (step == 2) _mm512_storeu_si512(dots + (g - g0), sums);
        else dots[g - g0] = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
    }
    if (g < g1) {
        const __m512i sums = group_dots(rows, g * group_bytes, q + g * group, group, kind, 1);
        dots[g - g0] = _mm512_castsi512_si256(sums);
    }
}

/* ------------------------------------------------------------ many tokens ---- */

/* Nibbles of 16 rows, 8 columns in a lane, to four vectors of pairs. */
EXPANDED void unpack_nibbles(__m512i x, const int kind, __m512i (*out)[2])
{
    const __m512i low = _mm512_set1_epi8(15);
    if (kind == WE_Q4G) {
        const __m512i pairs = _mm512_set1_epi32(0x000f000f);
        WE_UNROLL
        for (unsigned p = 0; p < 4; p++) {
            const __m512i byte = _mm512_srli_epi32(x, 8 * p), up = _mm512_slli_epi32(byte, 12);
            out[p][0] = _mm512_and_si512(_mm512_mask_blend_epi16(0xaaaaaaaa, byte, up), pairs);
        }
        return;
    }
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)we_e2m1_doubled));
    const __m512i evens = _mm512_shuffle_epi8(table, _mm512_and_si512(x, low));
    const __m512i odds = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi32(x, 4), low));
    WE_UNROLL
    for (unsigned p = 0; p < 4; p++) {                  /* each code into the upper byte of its 16 bits */
        const __m512i even = _mm512_slli_epi32(_mm512_srli_epi32(evens, 8 * p), 8);
        const __m512i odd = _mm512_slli_epi32(_mm512_srli_epi32(odds, 8 * p), 24);
        const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaa, even, odd);
        out[p][0] = _mm512_srai_epi16(both, 8);
    }
}

/* Columns [c0, c0 + 128) of 16 rows, zeros behind the row's end; rows behind the range repeat its last. */
EXPANDED void unpack_rows(const we_matrix *w, size_t row, size_t n_rows, size_t c0, __m512i (*out)[2], const int kind)
{
    const size_t begin = kind == WE_Q8G ? c0 : c0 / 2, n = kind == WE_Q8G ? SPAN : SPAN / 2;
    for (size_t b = 0; b < n && begin + b < w->row_bytes; b += 64) {
        const size_t left = w->row_bytes - begin - b;
        const __mmask64 some = left < 64 ? ((__mmask64)1 << left) - 1 : ~(__mmask64)0;
        const uint8_t *codes = (const uint8_t *)w->payload + row * w->row_bytes + begin + b;
        __m512i x[16];
        WE_UNROLL
        for (size_t i = 0; i < 16; i++) {
            const uint8_t *at = codes + we_min(i, n_rows - 1) * w->row_bytes;
            _mm_prefetch((const char *)at + PANEL_ROWS * w->row_bytes, _MM_HINT_T0);    /* the next panel's */
            x[i] = _mm512_maskz_loadu_epi8(some, at);
        }
        transpose(x);
        if (kind != WE_Q8G) {
            for (size_t i = 0; i < 16; i++) unpack_nibbles(x[i], kind, out + 4 * i);
            continue;
        }
        const __m512i lane = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
        const __m512i first = _mm512_add_epi32(lane, _mm512_set1_epi32(0x01000000));    /* bytes 0 and 1 upwards */
        const __m512i second = _mm512_add_epi32(lane, _mm512_set1_epi32(0x03000200));   /* bytes 2 and 3 */
        for (size_t i = 0; i < 16; i++) {
            out[b / 2 + 2 * i][0] = _mm512_srai_epi16(_mm512_shuffle_epi8(x[i], first), 8);
            out[b / 2 + 2 * i + 1][0] = _mm512_srai_epi16(_mm512_shuffle_epi8(x[i], second), 8);
        }
    }
}

#include "x86_integer.h"
