/* A disk to test against, preloaded before libc (LD_PRELOAD): reads of files whose path begins with disk.prefix are slow,
 * short, late, wrong or refused, as the fields of `disk` say; benchmarks/disk.py sets them through ctypes.
 *
 * The slow disk has one queue. A read occupies it for seek_s + bytes / bytes_per_s from when it is free, and is through
 * latency_s later; the real read happens meanwhile. So busy_s is exact whatever the machine does, and late_s says by how
 * much the real disk was too slow to play this one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { FAULT_NONE, FAULT_EIO, FAULT_EINTR, FAULT_SHORT, FAULT_END, FAULT_FLIP };

struct disk {                   /* benchmarks/disk.py has the same fields */
    char    prefix[1024];       /* empty: no file                                             */
    double  bytes_per_s;        /* 0: as fast as the real disk                                */
    double  seek_s, latency_s;
    int64_t fault_at;           /* the n-th read from now on, counted down; 0: none           */
    int32_t fault, fault_on;    /* FAULT_...; fault_on: that read and every one after it      */
    int64_t flip_byte;          /* FAULT_FLIP: of the read's own bytes                        */
    int32_t flip_mask, stalled; /* stalled: while it is not 0, no read ends                   */
    int64_t reads, bytes;       /* calls, and bytes that they returned                        */
    int64_t waiting, depth;     /* reads inside now; the most at once                         */
    double  busy_s, late_s, free_at;
} disk;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sleep_until(double end_s)
{
    const struct timespec t = {(time_t)end_s, (long)(1e9 * (end_s - (double)(time_t)end_s))};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {}
}

static int is_ours(int fd)
{
    char name[64], path[sizeof disk.prefix + 1];
    const size_t n = strlen(disk.prefix);
    if (n == 0) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    const ssize_t got = readlink(name, path, sizeof path);
    return got >= (ssize_t)n && memcmp(path, disk.prefix, n) == 0;
}

/* Enter the queue; the fault of this read and, in *end_s, when it is through (0: when it is). */
static int begin(size_t n, double *end_s)
{
    int fault = FAULT_NONE;
    pthread_mutex_lock(&lock);
    disk.reads++;
    if (++disk.waiting > disk.depth) disk.depth = disk.waiting;
    if (disk.fault_at > 0 && --disk.fault_at == 0) {
        fault = disk.fault;
        if (disk.fault_on) disk.fault_at = 1;
    }
    *end_s = 0;
    if (disk.bytes_per_s > 0) {
        const double now = now_s(), s = disk.seek_s + (double)n / disk.bytes_per_s;
        disk.free_at = (disk.free_at > now ? disk.free_at : now) + s;
        disk.busy_s += s;
        *end_s = disk.free_at + disk.latency_s;
    }
    pthread_mutex_unlock(&lock);
    return fault;
}

static void end(ssize_t got, double end_s)
{
    const int error = errno;
    double late = 0;
    if (end_s > 0) {
        late = now_s() - end_s;
        if (late < 0) sleep_until(end_s);
    }
    while (__atomic_load_n(&disk.stalled, __ATOMIC_ACQUIRE)) sleep_until(now_s() + 1e-3);
    pthread_mutex_lock(&lock);
    disk.waiting--;
    if (got > 0) disk.bytes += got;
    if (late > 0) disk.late_s += late;
    pthread_mutex_unlock(&lock);
    errno = error;
}

typedef ssize_t pread_fn(int, void *, size_t, off_t);
typedef ssize_t read_fn(int, void *, size_t);

/* at < 0: a read at the file's own position. */
static ssize_t play(void *real, int fd, void *to, size_t n, off_t at)
{
    double end_s = 0;
    ssize_t got = -1;
    const int ours = is_ours(fd), fault = ours ? begin(n, &end_s) : FAULT_NONE;
    if (fault == FAULT_EIO || fault == FAULT_EINTR) {
        errno = fault == FAULT_EIO ? EIO : EINTR;
    } else if (fault == FAULT_END) {
        got = 0;
    } else {
        if (fault == FAULT_SHORT && n > 1) n /= 2;
        got = at < 0 ? ((read_fn *)real)(fd, to, n) : ((pread_fn *)real)(fd, to, n, at);
        if (fault == FAULT_FLIP && got > 0) ((unsigned char *)to)[disk.flip_byte % got] ^= (unsigned char)disk.flip_mask;
    }
    if (ours) end(got, end_s);
    return got;
}

#define REAL(name) static void *real; if (!real) real = dlsym(RTLD_NEXT, name)

ssize_t pread(int fd, void *to, size_t n, off_t at)   { REAL("pread"); return play(real, fd, to, n, at); }
ssize_t pread64(int fd, void *to, size_t n, off_t at) { REAL("pread64"); return play(real, fd, to, n, at); }
ssize_t read(int fd, void *to, size_t n)              { REAL("read"); return play(real, fd, to, n, -1); }
