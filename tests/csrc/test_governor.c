/* The governor on a made-up machine: files in a folder say how much is free. Sources: governor.c platform_watch_posix.c.
 * argv[1]: where files may be written. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "alloc.h"
#include "check.h"
#include "warp_embed/governor.h"

#define MIB ((uint64_t)1 << 20)
#define GIB (1024 * MIB)

static char folder[512];

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sleep_s(double s)
{
    const struct timespec t = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
    nanosleep(&t, NULL);
}

static const char *put(const char *name, const char *text)      /* the file's path; four may be in use at a time */
{
    static char paths[4][600];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    close(fd);
    return path;
}

static const char *put_free(uint64_t bytes)
{
    char text[200];
    snprintf(text, sizeof text, "MemTotal: 99 kB\nMemFree:   1 kB\nMemAvailable: %9llu kB\nBuffers: 7 kB\n",
             (unsigned long long)(bytes / 1024));
    return put("meminfo", text);
}

/* ---- the rule ---- */

static void the_rule(void)
{
    const we_governor_rule fresh = {64 * MIB, 4 * GIB, GIB, 8 * MIB, 0};
    const uint64_t slack = GIB / 8;
    we_governor_rule r = fresh;
    /* short: to what leaves the reserve and a slack */
    CHECK(we_governor_decide(&r, GIB / 2, 4 * GIB, 4 * GIB, 0.25, 0) == 4 * GIB - GIB / 2 - slack);
    /* what was promised and is not in use gives nothing back: it is cut first */
    CHECK(we_governor_decide(&r, GIB / 2, 4 * GIB, 2 * GIB, 0.25, 0) == 2 * GIB - GIB / 2 - slack);
    CHECK(we_governor_decide(&r, 0, 4 * GIB, 100 * MIB, 0.25, 0) == 64 * MIB);         /* never below the least */
    CHECK(we_governor_decide(&r, 0, 64 * MIB, 64 * MIB, 0.25, 0) == 64 * MIB);
    /* a swing of a slack around the size that fits moves nothing, for ever */
    uint64_t size = we_governor_decide(&r, GIB / 2, 4 * GIB, 4 * GIB, 0.25, 0);
    for (int i = 0; i < 1000; i++) {
        const uint64_t others = i % 2 ? slack : 0;
        CHECK(we_governor_decide(&r, GIB + others, size, size, 0.25, 0) == size);
    }
    /* room: nothing for two seconds, then a 64th a tick up to the most */
    r = fresh;
    size = GIB;
    for (int i = 0; i < 7; i++) CHECK(we_governor_decide(&r, 40 * GIB, size, size, 0.25, 0) == size);
    CHECK(we_governor_decide(&r, 40 * GIB, size, size, 0.25, 1) == size);              /* pressure: from the beginning */
    for (int i = 0; i < 7; i++) CHECK(we_governor_decide(&r, 40 * GIB, size, size, 0.25, 0) == size);
    for (int i = 0; i < 200; i++) {
        const uint64_t next = we_governor_decide(&r, 40 * GIB, size, size, 0.25, 0);
        CHECK(next >= size && next - size <= 4 * GIB / 64 && next <= 4 * GIB);
        size = next;
    }
    CHECK(size == 4 * GIB);
    /* steps are a record at least, and a step that is smaller is not taken */
    we_governor_rule small = {MIB, 10 * MIB, 8 * MIB, MIB, 60};
    CHECK(we_governor_decide(&small, GIB, 5 * MIB, 5 * MIB, 0.25, 0) == 6 * MIB);
    CHECK(we_governor_decide(&small, 8 * MIB + 2 * MIB + MIB / 2, 5 * MIB, 5 * MIB, 0.25, 0) == 5 * MIB);
    CHECK(we_governor_decide(&small, UINT64_MAX - 1, 10 * MIB, 10 * MIB, 0.25, 0) == 10 * MIB);
}

/* Cache and others share a machine; the cache fills what it is granted. No size is ever left for another and back. */
static void the_rule_does_not_swing(void)
{
    we_governor_rule r = {64 * MIB, 8 * GIB, GIB, 8 * MIB, 0};
    const uint64_t machine = 12 * GIB;
    uint64_t granted = 8 * GIB, holds = 0, random = 7, others = 2 * GIB;
    int turns = 0, last = 0;
    for (int i = 0; i < 4000; i++) {
        if (i == 1000) others = 7 * GIB;
        if (i == 2000) others = 4 * GIB;
        const uint64_t noise = next_random(&random) % (GIB / 8), used = others + noise + holds;
        const uint64_t size = we_governor_decide(&r, used < machine ? machine - used : 0, granted, holds, 0.25, 0);
        const int direction = size > granted ? 1 : size < granted ? -1 : 0;
        if (direction && last && direction != last) turns++;
        if (direction) last = direction;
        granted = size;
        holds = holds + 50 * MIB < granted ? holds + 50 * MIB : granted;
        if (i == 999) CHECK(holds == 8 * GIB);
        if (i == 1999) CHECK(holds <= 4 * GIB && holds >= 4 * GIB - GIB / 2);
    }
    CHECK(turns == 1);                  /* down for the hog, up when it left */
    CHECK(granted >= 7 * GIB - GIB / 2 && granted <= 7 * GIB);
}

/* ---- the watch ---- */

static void the_watch(void)
{
    we_fault fault;
    we_watch *w;
    const char *stat = put("stat", "anon 1\ninactive_file 1048576\n\nactive_file 2097152\nworkingset 9\n");
    const we_group_files groups[2] = {
        {{put("max", "max\n"), NULL}, put("usage", "104857600\n"), stat, UINT64_MAX}, {{0}, NULL, NULL, UINT64_MAX}};
    CHECK(we_watch_open(&w, put_free(3 * GIB), NULL, groups, 2, &fault) == WE_OK);
    CHECK(we_watch_available(w) == 3 * GIB && !we_watch_has_signal(w));
    put("max", "209715200\n");                          /* 200 MiB, 100 used, of which 3 are files */
    CHECK(we_watch_available(w) == 103 * MIB);
    put("usage", "419430400\n");                        /* over the limit, as memory.high may be */
    CHECK(we_watch_available(w) == 0);
    put("usage", "nonsense");
    CHECK(we_watch_available(w) == 3 * GIB);
    put("max", "");
    put_free(5 * GIB);
    CHECK(we_watch_available(w) == 5 * GIB);
    put("meminfo", "MemFree: 1 kB\n");
    CHECK(we_watch_available(w) == UINT64_MAX);
    const double start = now_s();
    CHECK(we_watch_wait(w, 0.05) == 0 && now_s() - start > 0.04);
    we_watch_wake(w);
    CHECK(we_watch_wait(w, 100) == 0);
    we_watch_close(w);

    const we_group_files v1 = {{NULL, NULL}, put("usage", "100"), put("stat", "inactive_file 1\ntotal_inactive_file 60\n"
                               "total_active_file 0\n"), 1000};
    CHECK(we_watch_open(&w, put_free(GIB), "/nowhere/pressure", &v1, 1, &fault) == WE_OK);
    CHECK(we_watch_available(w) == 960);
    we_watch_close(w);
    for (int n = 1; n < 3; n++) {
        fails_in = n;
        const we_status status = we_watch_open(&w, put_free(GIB), NULL, NULL, 0, &fault);
        CHECK(n == 1 ? status == WE_E_MEMORY && !w : status == WE_OK);
        we_watch_close(w);
        fails_in = 0;
    }
}

/* ---- the thread ---- */

typedef struct cache {
    _Atomic uint64_t granted, holds;
    atomic_int       resizes, reports;
    _Atomic uint64_t after;
    we_governor     *governor;      /* report stops it */
    atomic_int       stops, stopped;
} cache;

static void sizes(void *arg, uint64_t *granted, uint64_t *holds)
{
    cache *c = arg;
    *granted = c->granted;
    *holds = c->holds;
}

static void resize(void *arg, uint64_t bytes)
{
    cache *c = arg;
    c->granted = bytes;
    if (c->holds > bytes) c->holds = bytes;
    c->resizes++;
}

static void report(void *arg, const we_pressure *p)
{
    cache *c = arg;
    CHECK(p->available < GIB && p->after <= p->before);
    c->after = p->after;
    c->reports++;
    if (c->stops) {
        we_governor_stop(c->governor);
        c->stopped = 1;
    }
}

static we_governor *start(cache *c, uint64_t reserve)
{
    we_fault fault;
    we_watch *w;
    we_governor *g;
    const we_governor_rule rule = {16 * MIB, 512 * MIB, reserve, MIB, 0};
    const we_governed on = {c, sizes, resize, report, c};
    c->granted = c->holds = 512 * MIB;
    CHECK(we_watch_open(&w, put_free(8 * GIB), NULL, NULL, 0, &fault) == WE_OK);
    CHECK(we_governor_start(&g, &rule, &on, w, &fault) == WE_OK);
    return g;
}

#define WAIT_FOR(condition)                                                      \
    do {                                                                         \
        const double until = now_s() + 20;                                       \
        while (!(condition) && now_s() < until) sleep_s(0.01);                   \
        CHECK(condition);                                                        \
    } while (0)

static void it_gives_and_takes(void)
{
    cache c = {0};
    we_governor *g = start(&c, GIB);
    sleep_s(0.6);
    CHECK(c.resizes == 0 && c.reports == 0);
    put_free(GIB - 100 * MIB);
    WAIT_FOR(c.reports > 0);
    CHECK(c.granted == c.after && c.granted <= 412 * MIB && c.resizes >= 1);
    put_free(0);
    WAIT_FOR(c.granted == 16 * MIB);
    const int told = c.reports;
    sleep_s(0.8);
    CHECK(c.granted == 16 * MIB && c.reports <= told + 1);          /* told once that nothing is left */
    put_free(8 * GIB);
    WAIT_FOR(c.granted > 16 * MIB);
    CHECK(we_governor_set(g, 100 * MIB, 100 * MIB) == 100 * MIB && we_governor_most(g) == 100 * MIB);
    CHECK(we_governor_set(g, 100 * MIB, 0) == 16 * MIB);            /* trimmed: it grows again */
    WAIT_FOR(c.granted > 18 * MIB);
    CHECK(we_governor_set(g, 0, GIB) == 16 * MIB && we_governor_most(g) == 16 * MIB);
    we_governor_stop(g);
}

static void a_file_that_cannot_be_read_changes_nothing(void)
{
    cache c = {0};
    we_governor *g = start(&c, GIB);
    put("meminfo", "");
    sleep_s(0.8);
    CHECK(c.granted == 512 * MIB && c.resizes == 0);
    we_governor_stop(g);
}

static void it_may_be_stopped_by_its_listener(void)
{
    cache c = {0};
    c.stops = 1;
    c.governor = start(&c, GIB);
    put_free(0);
    WAIT_FOR(c.stopped);
    sleep_s(0.6);
    CHECK(c.reports == 1);
}

static int threads(void)
{
    char text[4096], *at;
    const int fd = open("/proc/self/status", O_RDONLY);
    if (fd < 0) return -1;
    const ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    at = strstr(text, "Threads:");
    return at ? atoi(at + 8) : -1;
}

static void many_come_and_go(void)
{
    const int before = threads();
    for (int i = 0; i < 100; i++) {
        cache c = {0};
        we_governor *g = start(&c, GIB);
        if (i % 2) we_governor_set(g, 50 * MIB, 50 * MIB);
        we_governor_stop(g);
        CHECK(i % 2 == 0 || c.granted == 50 * MIB);
    }
    for (int i = 0; i < 100 && threads() != before; i++) sleep_s(0.01);
    CHECK(threads() == before);
    we_governor_stop(NULL);
    we_fault fault;
    we_watch *w;
    we_governor *g;
    const we_governor_rule rule = {1, 2, 1, 1, 0};
    const we_governed on = {NULL, sizes, resize, NULL, NULL};
    CHECK(we_watch_open(&w, put_free(GIB), NULL, NULL, 0, &fault) == WE_OK);
    fails_in = 1;
    CHECK(we_governor_start(&g, &rule, &on, w, &fault) == WE_E_MEMORY && !g);
    fails_in = 0;
}

int main(int argc, char **argv)
{
    CHECK(argc > 1);
    snprintf(folder, sizeof folder, "%s", argv[1]);
    CHECK(mkdir(folder, 0700) == 0 || errno == EEXIST);
    the_rule();
    the_rule_does_not_swing();
    the_watch();
    it_gives_and_takes();
    a_file_that_cannot_be_read_changes_nothing();
    it_may_be_stopped_by_its_listener();
    many_come_and_go();
    return 0;
}
