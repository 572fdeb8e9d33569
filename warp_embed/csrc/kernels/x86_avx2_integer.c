/* AVX2: products of integer activations with Q8G, Q4G and MXFP4. */
#include "x86_avx2.h"
#ifdef WE_X86
WE_TARGET_PUSH("avx2,fma,f16c")

EXPANDED __m256i add_products(__m256i sum, __m256i a, __m256i b)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}

#include "x86_avx2_integer.h"

void we_avx2_matmul_integer(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                            size_t y_stride)
{
    matmul_integer(w, row0, row1, a, n, y, y_stride);
}

WE_TARGET_POP
#else
typedef int we_no_avx2_integer;     /* ISO C wants a declaration in every file */
#endif
