/* Compile one file's functions for an instruction set, whatever the compiler's flags.
 * Every #include comes before WE_TARGET_PUSH. */
#ifndef WARP_EMBED_TARGET_H
#define WARP_EMBED_TARGET_H

#if defined(__x86_64__) || defined(_M_X64)
#define WE_X86 1
#elif defined(__aarch64__) || defined(_M_ARM64)
#define WE_ARM64 1
#endif

/* Compilers whose functions can be given these instructions; Apple counts clang's versions in its own way. */
#if defined(WE_ARM64) && defined(__clang__)
#if __clang_major__ >= 16 || (defined(__apple_build_version__) && __clang_major__ >= 15)
#define WE_DOTPROD 1
#define WE_I8MM 1
#endif
#elif defined(WE_ARM64) && defined(__GNUC__) && __GNUC__ >= 10
#define WE_DOTPROD 1
#define WE_I8MM 1
#endif

/* Instruction sets that not every compiler knows; a level whose name is missing here is left out of the build. */
#ifdef WE_X86
#if defined(__clang__) ? __clang_major__ >= 8 : defined(__GNUC__) ? __GNUC__ >= 9 : _MSC_VER >= 1927
#define WE_X86_AVX512 1
#endif
#if defined(__clang__) ? __clang_major__ >= 12 : defined(__GNUC__) ? __GNUC__ >= 11 : _MSC_VER >= 1930
#define WE_X86_AVXVNNI 1
#endif
#endif

#define WE_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define WE_TARGET_PUSH(isa) WE_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define WE_TARGET_POP WE_PRAGMA(clang attribute pop)
#elif defined(__GNUC__)
#define WE_TARGET_PUSH(isa) WE_PRAGMA(GCC push_options) WE_PRAGMA(GCC target(isa))
#define WE_TARGET_POP WE_PRAGMA(GCC pop_options)
#else /* MSVC: intrinsics need no switch */
#define WE_TARGET_PUSH(isa)
#define WE_TARGET_POP
#endif

/* Before a short loop of a constant length: GCC then unrolls it before it decides what stays in registers. */
#if defined(__GNUC__) && !defined(__clang__)
#define WE_UNROLL WE_PRAGMA(GCC unroll 16)
#else
#define WE_UNROLL
#endif

#endif
