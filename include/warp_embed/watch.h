/* How much memory is left, asked again and again: nothing is allocated or opened after we_watch_open.
 *
 * Linux: MemAvailable of /proc/meminfo, bounded by the headroom of every control group that is named. Elsewhere: the
 * system's own figure, and the files are not looked at. */
#ifndef WARP_EMBED_WATCH_H
#define WARP_EMBED_WATCH_H
#include <stddef.h>
#include <stdint.h>
#include "warp_embed/status.h"

#define WE_WATCH_GROUPS 32              /* more are not looked at */

/* Files of one control group; NULL where it has none. A limit is a number or "max". Headroom: the smallest limit less
 * the usage, not counting the file pages that `stat` names, which the kernel drops when asked. */
typedef struct we_group_files {
    const char *limits[2];              /* memory.max, memory.high; memory.limit_in_bytes                     */
    const char *usage;                  /* memory.current; memory.usage_in_bytes                              */
    const char *stat;                   /* memory.stat                                                        */
    uint64_t    ceiling;                /* a limit known otherwise, bytes; UINT64_MAX: none                   */
} we_group_files;

typedef struct we_watch we_watch;

/* meminfo: path of a file like /proc/meminfo. pressure: NULL, or the path of a pressure file that takes triggers
 * (/proc/pressure/memory, a group's memory.pressure); it is a help, and a refusal is not an error. */
we_status we_watch_open(we_watch **watch, const char *meminfo, const char *pressure, const we_group_files *groups,
                        size_t n_groups, we_fault *fault);

/* Bytes; UINT64_MAX when nothing could be read. */
uint64_t we_watch_available(we_watch *watch);

/* Wait. 1: the kernel signalled pressure; 0: the time is over, or we_watch_wake was called. */
int  we_watch_wait(we_watch *watch, double seconds);
void we_watch_wake(we_watch *watch);    /* from any thread; also ends a wait that begins later */
int  we_watch_has_signal(const we_watch *watch);       /* is the kernel's pressure signal listened to? */
void we_watch_close(we_watch *watch);

#endif
