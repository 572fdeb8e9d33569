/* Mutex, condition and thread for pool.c and governor.c, on pthreads. */
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#define THREAD_RESULT void *
#define THREAD_DONE NULL

typedef pthread_mutex_t os_mutex;
typedef pthread_cond_t  os_cond;
typedef pthread_t       os_thread;
typedef THREAD_RESULT   os_entry(void *arg);

static int os_mutex_init(os_mutex *m) { return pthread_mutex_init(m, NULL); }
static void os_mutex_destroy(os_mutex *m) { pthread_mutex_destroy(m); }
static void os_lock(os_mutex *m) { pthread_mutex_lock(m); }
static void os_unlock(os_mutex *m) { pthread_mutex_unlock(m); }

static inline int os_cond_init(os_cond *c) { return pthread_cond_init(c, NULL); }
static inline void os_cond_destroy(os_cond *c) { pthread_cond_destroy(c); }
static inline void os_wait(os_cond *c, os_mutex *m) { pthread_cond_wait(c, m); }
static inline void os_signal(os_cond *c) { pthread_cond_signal(c); }
static inline void os_broadcast(os_cond *c) { pthread_cond_broadcast(c); }

/* The host's signal handlers must run in the host's threads: everything is blocked in ours, before it starts. */
static int os_start(os_thread *thread, os_entry *entry, void *arg)
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

static void os_join(os_thread thread) { pthread_join(thread, NULL); }
static inline void os_yield(void) { sched_yield(); }
static inline void os_detach(os_thread thread) { pthread_detach(thread); }
static inline int os_is_self(os_thread thread) { return pthread_equal(thread, pthread_self()); }
