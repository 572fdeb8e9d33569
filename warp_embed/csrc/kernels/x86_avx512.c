/* AVX-512 (F, BW, DQ, VL). */
#include "x86_avx512.h"
#ifdef WE_X86_AVX512

static void matmul(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y, size_t y_stride)
{
    if (we_takes_integers(w, a)) we_avx512_matmul_integer(w, row0, row1, a, n, y, y_stride);
    else we_avx2.matmul(w, row0, row1, a, n, y, y_stride);
}

const we_kernels we_avx512 = {.isa = "avx512", .matmul = matmul};
#else
typedef int we_no_avx512;           /* ISO C wants a declaration in every file */
#endif
