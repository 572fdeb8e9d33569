/* os_threads.h on pthreads. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>
#include "os_clock.h"

#define THREAD_RESULT void *
#define THREAD_DONE NULL

typedef pthread_mutex_t os_mutex;
typedef pthread_cond_t  os_cond;
typedef pthread_t       os_thread;
typedef THREAD_RESULT   os_entry(void *arg);

static inline int os_mutex_init(os_mutex *m) { return pthread_mutex_init(m, NULL); }
static inline void os_mutex_destroy(os_mutex *m) { pthread_mutex_destroy(m); }
static inline void os_lock(os_mutex *m) { pthread_mutex_lock(m); }
static inline void os_unlock(os_mutex *m) { pthread_mutex_unlock(m); }

/* Waits are measured on the clock of we_clock_s. */
static inline int os_cond_init(os_cond *c)
{
#ifdef __APPLE__
    return pthread_cond_init(c, NULL);
#else
    pthread_condattr_t attr;
    int error = pthread_condattr_init(&attr);
    if (error) return error;
    error = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    if (!error) error = pthread_cond_init(c, &attr);
    pthread_condattr_destroy(&attr);
    return error;
#endif
}
static inline void os_cond_destroy(os_cond *c) { pthread_cond_destroy(c); }
static inline void os_wait(os_cond *c, os_mutex *m) { pthread_cond_wait(c, m); }
static inline void os_signal(os_cond *c) { pthread_cond_signal(c); }
static inline void os_broadcast(os_cond *c) { pthread_cond_broadcast(c); }

/* As os_wait, but not beyond a moment of we_clock_s. It may return early, as any wait. */
static inline void os_wait_until(os_cond *c, os_mutex *m, double until_s)
{
#ifdef __APPLE__
    until_s -= we_clock_s();        /* this system's wait takes a duration */
#endif
    struct timespec t;
    if (until_s < 0) until_s = 0;
    t.tv_sec = (time_t)until_s;
    t.tv_nsec = (long)((until_s - (double)t.tv_sec) * 1e9);
    if (t.tv_nsec > 999999999L) t.tv_nsec = 999999999L;
#ifdef __APPLE__
    pthread_cond_timedwait_relative_np(c, m, &t);
#else
    pthread_cond_timedwait(c, m, &t);
#endif
}

/* The host's signal handlers must run in the host's threads: everything is blocked in ours, before it starts. */
static inline int os_start(os_thread *thread, os_entry *entry, void *arg)
{
    sigset_t all, before;
    pthread_attr_t attr;
    int error = pthread_attr_init(&attr);
    if (error) return error;
    pthread_attr_setstacksize(&attr, (size_t)1 << 20);      /* musl's default is 128 KiB; a refusal changes nothing */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(thread, &attr, entry, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    return error;
}

static inline void os_join(os_thread thread) { pthread_join(thread, NULL); }
static inline void os_detach(os_thread thread) { pthread_detach(thread); }
static inline int os_is_self(os_thread thread) { return pthread_equal(thread, pthread_self()); }
static inline void os_yield(void) { sched_yield(); }
static inline long os_pid(void) { return (long)getpid(); }

/* Let a thread run on one processor only; 0, or an errno. */
static inline int os_bind(os_thread thread, int cpu)
{
#if defined(__linux__) && defined(CPU_SET)
    cpu_set_t set;
    if (cpu < 0 || cpu >= CPU_SETSIZE) return EINVAL;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return pthread_setaffinity_np(thread, sizeof set, &set);
#else
    (void)thread, (void)cpu;
    return ENOTSUP;
#endif
}
