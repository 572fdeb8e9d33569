/* AVX-512 without VNNI: products of integer activations with Q8G, Q4G and MXFP4. */
#include "x86_avx512.h"
#ifdef WE_X86_AVX512
WE_TARGET_PUSH(WE_AVX512)

EXPANDED __m512i add_products(__m512i sum, __m512i a, __m512i b)
{
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}

#include "x86_avx512_integer.h"

void we_avx512_matmul_integer(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                              size_t y_stride)
{
    matmul_integer(w, row0, row1, a, n, y, y_stride);
}

WE_TARGET_POP
#else
typedef int we_no_avx512_integer;   /* ISO C wants a declaration in every file */
#endif
