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
    enum { EBX_AVX512F = 1u << 16, EBX_AVX512DQ = 1u << 17, EBX_AVX512BW = 1u << 30, ECX_AVX512VNNI = 1u << 11,
           EAX_AVXVNNI = 1u << 4, YMM = 6, ZMM = 0xe6 };
    const unsigned avx512 = (unsigned)EBX_AVX512F | EBX_AVX512DQ | EBX_AVX512BW | 1u << 31;      /* the last: VL */
    enum { ECX_FMA = 1u << 12, ECX_OSXSAVE = 1u << 27, ECX_AVX = 1u << 28, ECX_F16C = 1u << 29, EBX_AVX2 = 1u << 5 };
    const unsigned need = (unsigned)ECX_FMA | ECX_OSXSAVE | ECX_AVX | ECX_F16C;
    unsigned r[4];                      /* eax ebx ecx edx */
    cpuid(0, 0, r);
    if (r[0] < 7) return 0;
    cpuid(1, 0, r);
    if ((r[2] & need) != need) return 0;
    const uint64_t saved = saved_registers();       /* by the system at a task switch */
    if ((saved & YMM) != YMM) return 0;
    cpuid(7, 0, r);
    if (!(r[1] & EBX_AVX2)) return 0;
    unsigned features = WE_CPU_AVX2;
    if ((r[1] & avx512) == avx512 && (saved & ZMM) == ZMM)      /* ZMM's upper halves, ZMM16-31, opmasks */
        features |= WE_CPU_AVX512 | (r[2] & ECX_AVX512VNNI ? WE_CPU_AVX512VNNI : 0);
    if (r[0] >= 1) {
        cpuid(7, 1, r);
        if (r[0] & EAX_AVXVNNI) features |= WE_CPU_AVXVNNI;
    }
#ifdef WE_SIMDE                         /* a test's build: made of AVX2's instructions */
    features |= WE_CPU_AVX512 | WE_CPU_AVX512VNNI;
#endif
    return features;
}
#elif defined(WE_ARM64) && defined(__linux__)
#include <sys/auxv.h>

unsigned we_cpu_features(void)
{
    enum { DOTPROD = 1ul << 20, I8MM = 1ul << 13 };     /* HWCAP_ASIMDDP, HWCAP2_I8MM; old headers lack the second */
    return (getauxval(AT_HWCAP) & DOTPROD ? WE_CPU_DOTPROD : 0u) | (getauxval(AT_HWCAP2) & I8MM ? WE_CPU_I8MM : 0u);
}

#elif defined(WE_ARM64) && defined(__APPLE__)
#include <sys/sysctl.h>

static int has(const char *name)
{
    int value = 0;
    size_t bytes = sizeof value;
    return sysctlbyname(name, &value, &bytes, NULL, 0) == 0 && value != 0;
}

unsigned we_cpu_features(void)
{
    return (has("hw.optional.arm.FEAT_DotProd") ? WE_CPU_DOTPROD : 0u) |
           (has("hw.optional.arm.FEAT_I8MM") ? WE_CPU_I8MM : 0u);
}

#elif defined(WE_ARM64) && defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

unsigned we_cpu_features(void)
{
    enum { DOTPROD = 43, I8MM = 66 };   /* PF_ARM_V82_DP_ and PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE of new SDKs */
    return (IsProcessorFeaturePresent(DOTPROD) ? WE_CPU_DOTPROD : 0u) |
           (IsProcessorFeaturePresent(I8MM) ? WE_CPU_I8MM : 0u);
}

#else
unsigned we_cpu_features(void) { return 0; }
#endif
