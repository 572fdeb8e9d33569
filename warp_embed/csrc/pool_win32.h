/* Mutex, condition and thread for pool.c and governor.c, on Win32. Condition variables and slim locks
 * need no destruction. */
#include <process.h>
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#include <errno.h>

#define THREAD_RESULT unsigned __stdcall
#define THREAD_DONE 0

typedef SRWLOCK            os_mutex;
typedef CONDITION_VARIABLE os_cond;
typedef HANDLE             os_thread;
typedef THREAD_RESULT      os_entry(void *arg);

static int os_mutex_init(os_mutex *m) { InitializeSRWLock(m); return 0; }
static void os_mutex_destroy(os_mutex *m) { (void)m; }
static void os_lock(os_mutex *m) { AcquireSRWLockExclusive(m); }
static void os_unlock(os_mutex *m) { ReleaseSRWLockExclusive(m); }

static inline int os_cond_init(os_cond *c) { InitializeConditionVariable(c); return 0; }
static inline void os_cond_destroy(os_cond *c) { (void)c; }
static inline void os_wait(os_cond *c, os_mutex *m) { SleepConditionVariableSRW(c, m, INFINITE, 0); }
static inline void os_signal(os_cond *c) { WakeConditionVariable(c); }
static inline void os_broadcast(os_cond *c) { WakeAllConditionVariable(c); }

static int os_start(os_thread *thread, os_entry *entry, void *arg)
{
    const uintptr_t handle = _beginthreadex(NULL, 1u << 20, entry, arg, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    *thread = (HANDLE)handle;
    return handle ? 0 : EAGAIN;
}

static void os_join(os_thread thread)
{
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}

static inline void os_yield(void) { SwitchToThread(); }
static inline void os_detach(os_thread thread) { CloseHandle(thread); }
static inline int os_is_self(os_thread thread) { return GetThreadId(thread) == GetCurrentThreadId(); }
