/* What this processor and its operating system can run. */
#ifndef WARP_EMBED_CPU_H
#define WARP_EMBED_CPU_H

enum {
    WE_CPU_AVX2 = 1u << 0,      /* AVX2, FMA and F16C, and the system saves the YMM registers (XGETBV) */
    WE_CPU_DOTPROD = 1u << 1,   /* ARM64: dot products of bytes, sdot                                  */
    WE_CPU_I8MM = 1u << 2,      /* ARM64: products of matrices of bytes, smmla                         */
    WE_CPU_AVXVNNI = 1u << 3,   /* vpdpwssd on YMM without AVX-512's encoding                          */
    WE_CPU_AVX512 = 1u << 4,    /* F, BW, DQ and VL, and the system saves opmasks and ZMM              */
    WE_CPU_AVX512VNNI = 1u << 5
};

/* Feature bits, read from the processor once and the same for the life of the process. */
unsigned we_cpu_features(void);

#endif
