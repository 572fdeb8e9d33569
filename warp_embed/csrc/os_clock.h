/* Monotonic seconds, for durations only. */
#ifndef WARP_EMBED_OS_CLOCK_H
#define WARP_EMBED_OS_CLOCK_H
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
static inline double we_clock_s(void)
{
    LARGE_INTEGER now, rate;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&rate);
    return (double)now.QuadPart / (double)rate.QuadPart;
}
#else
#include <time.h>
static inline double we_clock_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
#endif
#endif
