/* Mutex, condition and thread, for the thread pool, the cache's readers and the governor. Whoever includes this does so before
 * anything else: it asks the system's headers for more than the language's standard. */
#ifndef WARP_EMBED_OS_THREADS_H
#define WARP_EMBED_OS_THREADS_H
#if defined(__APPLE__)
#define _DARWIN_C_SOURCE        /* the timed wait on a clock that only goes forward */
#elif defined(__linux__)
#define _GNU_SOURCE             /* threads bound to processors */
#elif !defined(_WIN32)
#define _POSIX_C_SOURCE 200809L
#endif
#ifdef _WIN32
#include "os_threads_win32.h"
#else
#include "os_threads_posix.h"
#endif
#endif
