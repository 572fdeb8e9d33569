/* os_threads.h on Win32. Condition variables and slim locks need no destruction. */
#include <process.h>
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#include <errno.h>
#include "os_clock.h"

#define THREAD_RESULT unsigned __stdcall
#define THREAD_DONE 0

typedef SRWLOCK            os_mutex;
typedef CONDITION_VARIABLE os_cond;
typedef HANDLE             os_thread;
typedef THREAD_RESULT      os_entry(void *arg);

static inline int os_mutex_init(os_mutex *m) { InitializeSRWLock(m); return 0; }
static inline void os_mutex_destroy(os_mutex *m) { (void)m; }
static inline void os_lock(os_mutex *m) { AcquireSRWLockExclusive(m); }
static inline void os_unlock(os_mutex *m) { ReleaseSRWLockExclusive(m); }

static inline int os_cond_init(os_cond *c) { InitializeConditionVariable(c); return 0; }
static inline void os_cond_destroy(os_cond *c) { (void)c; }
static inline void os_wait(os_cond *c, os_mutex *m) { SleepConditionVariableSRW(c, m, INFINITE, 0); }
static inline void os_signal(os_cond *c) { WakeConditionVariable(c); }
static inline void os_broadcast(os_cond *c) { WakeAllConditionVariable(c); }

static inline void os_wait_until(os_cond *c, os_mutex *m, double until_s)
{
    const double left_s = until_s - we_clock_s();
    const double left_ms = left_s < 0 ? 0 : left_s > 1e6 ? 1e9 : left_s * 1e3 + 0.999;
    SleepConditionVariableSRW(c, m, (DWORD)left_ms, 0);
}

static inline int os_start(os_thread *thread, os_entry *entry, void *arg)
{
    const uintptr_t handle = _beginthreadex(NULL, 1u << 20, entry, arg, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    *thread = (HANDLE)handle;
    return handle ? 0 : EAGAIN;
}

static inline void os_join(os_thread thread)
{
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}

static inline void os_detach(os_thread thread) { CloseHandle(thread); }
static inline int os_is_self(os_thread thread) { return GetThreadId(thread) == GetCurrentThreadId(); }
static inline void os_yield(void) { SwitchToThread(); }
static inline long os_pid(void) { return 0; }       /* there is no fork */

static inline int os_bind(os_thread thread, int cpu)
{
    if (cpu < 0 || cpu >= (int)(8 * sizeof(DWORD_PTR))) return EINVAL;
    return SetThreadAffinityMask(thread, (DWORD_PTR)1 << cpu) ? 0 : EINVAL;
}
