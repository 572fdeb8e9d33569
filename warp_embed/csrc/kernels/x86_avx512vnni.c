/* AVX-512 with VNNI: the products of integer activations, one instruction where AVX-512 has two. */
#include "x86_avx512.h"
#ifdef WE_X86_AVX512
WE_TARGET_PUSH(WE_AVX512VNNI)

EXPANDED __m512i add_products(__m512i sum, __m512i a, __m512i b) { return _mm512_dpwssd_epi32(sum, a, b); }

#include "x86_avx512_integer.h"

static void matmul(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y, size_t y_stride)
{
    if (we_takes_integers(w, a)) matmul_integer(w, row0, row1, a, n, y, y_stride);
    else we_avx512.matmul(w, row0, row1, a, n, y, y_stride);
}

WE_TARGET_POP

const we_kernels we_avx512vnni = {.isa = "avx512vnni", .matmul = matmul};
#else
typedef int we_no_avx512vnni;       /* ISO C wants a declaration in every file */
#endif
