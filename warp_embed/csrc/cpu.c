#include "warp_embed/cpu.h"
#include "warp_embed/target.h"
#include <stdint.h>

#ifdef WE_X86
#ifdef _MSC_VER
#include <intrin.h>
static void cpuid(unsigned leaf, unsigned sub, unsigned out[4]) { __cpuidex((int *)out, (int)leaf, (int)sub); }
static uint64_t saved_registers(void) { return _xgetbv(0); }
#else
#include <cpuid.h>
static void cpuid(unsigned leaf, unsigned sub, unsigned out[4])
{
    if (!__get_cpuid_count(leaf, sub, &out[0], &out[1], &out[2], &out[3])) out[0] = out[1] = out[2] = out[3] = 0;
}
static uint64_t saved_registers(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}
#endif

unsigned we_cpu_features(void)
{
    enum { ECX_FMA = 1u << 12, ECX_OSXSAVE = 1u << 27, ECX_AVX = 1u << 28, ECX_F16C = 1u << 29, EBX_AVX2 = 1u << 5 };
    const unsigned need = (unsigned)ECX_FMA | ECX_OSXSAVE | ECX_AVX | ECX_F16C;
    unsigned r[4];                      /* eax ebx ecx edx */
    cpuid(0, 0, r);
    if (r[0] < 7) return 0;
    cpuid(1, 0, r);
    if ((r[2] & need) != need) return 0;
    if ((saved_registers() & 6) != 6) return 0;     /* XMM and the upper halves of YMM survive a task switch */
    cpuid(7, 0, r);
    return (r[1] & EBX_AVX2) ? WE_CPU_AVX2 : 0;
}
#else
unsigned we_cpu_features(void) { return 0; }
#endif
