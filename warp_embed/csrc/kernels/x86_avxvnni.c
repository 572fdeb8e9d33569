/* AVX-VNNI without AVX-512: the products of integer activations, one instruction where AVX2 has two. */
#include "x86_avx2.h"
#ifdef WE_X86_AVXVNNI
WE_TARGET_PUSH("avx2,fma,f16c,avxvnni")

EXPANDED __m256i add_products(__m256i sum, __m256i a, __m256i b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }

#include "x86_avx2_integer.h"

static void matmul(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y, size_t y_stride)
{
    if (we_takes_integers(w, a)) matmul_integer(w, row0, row1, a, n, y, y_stride);
    else we_avx2.matmul(w, row0, row1, a, n, y, y_stride);
}

WE_TARGET_POP

const we_kernels we_avxvnni = {.isa = "avxvnni", .matmul = matmul};
#else
typedef int we_no_avxvnni;          /* ISO C wants a declaration in every file */
#endif
