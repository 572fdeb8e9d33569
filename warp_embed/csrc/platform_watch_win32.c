/* watch.h on Windows: physical memory, and what the process may still commit. */
#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#include "warp_embed/watch.h"
#include <stdlib.h>
#include "platform_fault.h"

struct we_watch {
    HANDLE wake;        /* an event that stays set */
    HANDLE low;         /* signalled by the system while memory is low; NULL: none */
};

we_status we_watch_open(we_watch **out, const char *meminfo, const char *pressure, const we_group_files *groups,
                        size_t n_groups, we_fault *fault)
{
    (void)meminfo, (void)pressure, (void)groups, (void)n_groups;
    *out = NULL;
    we_watch *w = calloc(1, sizeof *w);
    if (!w) return we_fail(fault, WE_E_MEMORY, "watch", 0, 0);
    w->wake = CreateEventW(NULL, TRUE, FALSE, NULL);
    if (!w->wake) {
        free(w);
        return we_fail(fault, WE_E_IO, "event", 0, (int)GetLastError());
    }
    w->low = CreateMemoryResourceNotification(LowMemoryResourceNotification);
    *out = w;
    return WE_OK;
}

uint64_t we_watch_available(we_watch *w)
{
    (void)w;
    MEMORYSTATUSEX m = {.dwLength = sizeof m};
    if (!GlobalMemoryStatusEx(&m)) return UINT64_MAX;
    return m.ullAvailPageFile < m.ullAvailPhys ? m.ullAvailPageFile : m.ullAvailPhys;
}

int we_watch_wait(we_watch *w, double seconds)
{
    BOOL low = FALSE;
    WaitForSingleObject(w->wake, (DWORD)(seconds * 1e3 + 0.5));     /* `low` stays signalled: it is asked, not waited for */
    return w->low && QueryMemoryResourceNotification(w->low, &low) && low;
}

void we_watch_wake(we_watch *w) { SetEvent(w->wake); }

int we_watch_has_signal(const we_watch *w) { return w->low != NULL; }

void we_watch_close(we_watch *w)
{
    if (!w) return;
    CloseHandle(w->wake);
    if (w->low) CloseHandle(w->low);
    free(w);
}
#else
typedef int we_not_this_platform;       /* a translation unit may not be empty */
#endif
