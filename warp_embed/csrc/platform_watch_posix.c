/* watch.h on Linux, macOS and other POSIX systems. Files stay open and are read again from their beginning. */
#ifndef _WIN32
#if defined(__linux__)
#define _GNU_SOURCE
#elif defined(__APPLE__)
#define _DARWIN_C_SOURCE
#include <mach/mach.h>
#else
#define _POSIX_C_SOURCE 200809L
#endif
#include "warp_embed/watch.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "platform_fault.h"

#define TEXT_MAX 8192                   /* of a file; what is behind it is not seen */
/* Somebody waits for memory for a tenth of two seconds: the shortest window that every user may ask for. */
#define TRIGGER "some 200000 2000000"

typedef struct group {
    int      limits[2], usage, stat;    /* descriptors; -1: none */
    uint64_t ceiling;
} group;

struct we_watch {
    int    meminfo, pressure, wake[2];
    size_t n_groups;
    group  groups[WE_WATCH_GROUPS];
#if defined(__APPLE__)
    host_t host;
#endif
};

/* ---- files ---- */

static int open_for(const char *path, int flags)
{
    if (!path) return -1;
    int fd;
    do fd = open(path, flags | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    while (fd < 0 && errno == EINTR);
    return fd;
}

static void close_fd(int fd)
{
    if (fd >= 0) close(fd);
}

/* The file's text, ended by a 0; its length, 0 when there is none. */
static size_t read_text(int fd, char text[TEXT_MAX])
{
    ssize_t got = -1;
    if (fd >= 0) {
        do got = pread(fd, text, TEXT_MAX - 1, 0);
        while (got < 0 && errno == EINTR);
    }
    text[got > 0 ? got : 0] = 0;
    return got > 0 ? (size_t)got : 0;
}

/* A decimal number; 0 when there is none, as for "max". */
static int parse_number(const char *text, uint64_t *out)
{
    while (*text == ' ' || *text == '\t') text++;
    if (*text < '0' || *text > '9') return 0;
    char *end;
    errno = 0;
    *out = strtoull(text, &end, 10);
    return errno == 0;
}

static int read_number(int fd, uint64_t *out)
{
    char text[TEXT_MAX];
    return read_text(fd, text) && parse_number(text, out);
}

/* The number in the line that begins with `name`, which includes what separates it from the number. */
static int find_number(const char *text, const char *name, uint64_t *out)
{
    const size_t n = strlen(name);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        if (*line == '\n') line++;
        if (strncmp(line, name, n) == 0) return parse_number(line + n, out);
    }
    return 0;
}

/* ---- what is left ---- */

static uint64_t file_pages(int stat)
{
    char text[TEXT_MAX];
    uint64_t sum = 0, n;
    read_text(stat, text);
    if (find_number(text, "total_inactive_file ", &n) || find_number(text, "inactive_file ", &n)) sum += n;
    if (find_number(text, "total_active_file ", &n) || find_number(text, "active_file ", &n)) sum += n;
    return sum;
}

/* The smaller of `available` and the group's headroom. */
static uint64_t bounded(const group *g, uint64_t available)
{
    uint64_t limit = g->ceiling, used = 0, n;
    for (int i = 0; i < 2; i++)
        if (read_number(g->limits[i], &n) && n < limit) limit = n;
    if (limit == UINT64_MAX || !read_number(g->usage, &used) || used + available <= limit) return available;
    const uint64_t files = file_pages(g->stat), kept = used > files ? used - files : 0;
    const uint64_t headroom = limit > kept ? limit - kept : 0;
    return headroom < available ? headroom : available;
}

#if defined(__APPLE__)
static uint64_t system_available(const we_watch *w)
{
    vm_statistics64_data_t stat;
    mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
    if (host_statistics64(w->host, HOST_VM_INFO64, (host_info64_t)&stat, &count) != KERN_SUCCESS)
        return UINT64_MAX;
    return ((uint64_t)stat.free_count + stat.inactive_count) * vm_kernel_page_size;
}
#else
static uint64_t system_available(const we_watch *w)
{
    char text[TEXT_MAX];
    uint64_t kib;
    if (!read_text(w->meminfo, text) || !find_number(text, "MemAvailable:", &kib) || kib > UINT64_MAX / 1024)
        return UINT64_MAX;
    return kib * 1024;
}
#endif

uint64_t we_watch_available(we_watch *w)
{
    uint64_t available = system_available(w);
    if (available == UINT64_MAX) return available;
    for (size_t i = 0; i < w->n_groups; i++) available = bounded(&w->groups[i], available);
    return available;
}

/* ---- waiting ---- */

int we_watch_wait(we_watch *w, double seconds)
{
    struct pollfd fds[2] = {{w->wake[0], POLLIN, 0}, {w->pressure, POLLPRI, 0}};
    const int n = poll(fds, 2, (int)ceil(seconds * 1e3));       /* a negative descriptor is not looked at */
    if (n <= 0) return 0;                                       /* EINTR: the caller looks, and waits again */
    if (fds[1].revents & (POLLERR | POLLNVAL)) {                /* the group is gone */
        close_fd(w->pressure);
        w->pressure = -1;
    }
    return (fds[1].revents & POLLPRI) != 0;
}

void we_watch_wake(we_watch *w)
{
    ssize_t done;
    do done = write(w->wake[1], "", 1);
    while (done < 0 && errno == EINTR);                         /* full: it is awake */
}

int we_watch_has_signal(const we_watch *w) { return w->pressure >= 0; }

/* ---- life ---- */

static int open_trigger(const char *path)
{
    const int fd = open_for(path, O_RDWR);
    if (fd < 0) return -1;
    if (write(fd, TRIGGER, sizeof TRIGGER) == (ssize_t)sizeof TRIGGER) return fd;
    close(fd);
    return -1;
}

static int open_pipe(int ends[2])
{
    if (pipe(ends) != 0) return 0;
    for (int i = 0; i < 2; i++) {
        fcntl(ends[i], F_SETFD, FD_CLOEXEC);
        fcntl(ends[i], F_SETFL, O_NONBLOCK);
    }
    return 1;
}

we_status we_watch_open(we_watch **out, const char *meminfo, const char *pressure, const we_group_files *groups,
                        size_t n_groups, we_fault *fault)
{
    *out = NULL;
    we_watch *w = calloc(1, sizeof *w);
    if (!w) return we_fail(fault, WE_E_MEMORY, "watch", 0, 0);
    if (!open_pipe(w->wake)) {
        const int error = errno;
        free(w);
        return we_fail(fault, WE_E_IO, "pipe", 0, error);
    }
#if defined(__APPLE__)
    w->host = mach_host_self();
#endif
    w->meminfo = open_for(meminfo, O_RDONLY);
    w->pressure = open_trigger(pressure);
    w->n_groups = n_groups < WE_WATCH_GROUPS ? n_groups : WE_WATCH_GROUPS;
    for (size_t i = 0; i < w->n_groups; i++) {
        const we_group_files *f = &groups[i];
        w->groups[i] = (group){{open_for(f->limits[0], O_RDONLY), open_for(f->limits[1], O_RDONLY)},
                               open_for(f->usage, O_RDONLY), open_for(f->stat, O_RDONLY), f->ceiling};
    }
    *out = w;
    return WE_OK;
}

void we_watch_close(we_watch *w)
{
    if (!w) return;
    close_fd(w->meminfo);
    close_fd(w->pressure);
    for (int i = 0; i < 2; i++) close_fd(w->wake[i]);
    for (size_t i = 0; i < w->n_groups; i++) {
        const group *g = &w->groups[i];
        const int fds[] = {g->limits[0], g->limits[1], g->usage, g->stat};
        for (int f = 0; f < 4; f++) close_fd(fds[f]);
    }
    free(w);
}
#else
typedef int we_not_this_platform;       /* a translation unit may not be empty */
#endif
