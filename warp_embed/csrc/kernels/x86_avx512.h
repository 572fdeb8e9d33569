/* What the AVX-512 files share: masked ends of vectors, sums in a fixed order, exp and its kin on sixteen lanes. */
#ifndef WE_X86_AVX512_H
#define WE_X86_AVX512_H
#include "kernels_internal.h"

#ifdef WE_X86_AVX512
#ifdef WE_SIMDE                     /* a test: these files on a machine without AVX-512 */
#include "simde_avx512.h"
#define WE_AVX512 "avx2,fma,f16c"
#define WE_AVX512VNNI WE_AVX512
#else
#include <immintrin.h>
#define WE_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define WE_AVX512VNNI WE_AVX512 ",avx512vnni"
#endif

void we_avx512_matmul_integer(const we_matrix *w, size_t row0, size_t row1, const we_acts *a, size_t n, float *y,
                              size_t y_stride);

#ifdef _MSC_VER
#define EXPANDED static __forceinline
#else
#define EXPANDED static inline __attribute__((always_inline))
#endif

#endif
#endif
