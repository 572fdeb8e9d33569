/* The governor of governor.h. */
#include "os_threads.h"
#include "warp_embed/governor.h"
#include <stdatomic.h>
#include <stdlib.h>
#include "platform_fault.h"

#define SLACK_SHARE 8
#define STEPS 64
#define BREATH_S 0.05           /* between two looks, however often the kernel signals */

struct we_governor {
    os_mutex         mutex;     /* rule, and whoever changes the cache's size */
    we_governor_rule rule;
    we_governed      on;
    we_watch        *watch;
    os_thread        thread;
    atomic_uint      owners;    /* the caller and the thread: the last frees  */
    atomic_bool      stop;
    int              told;      /* the listener knows that memory is short    */
};

static uint64_t less(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }
static uint64_t plus(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

static uint64_t clamp(uint64_t x, uint64_t low, uint64_t high)
{
    if (x > high) x = high;
    return x < low ? low : x;
}

uint64_t we_governor_decide(we_governor_rule *rule, uint64_t available, uint64_t granted, uint64_t holds,
                            double elapsed_s, int pressed)
{
    const uint64_t slack = rule->reserve / SLACK_SHARE, room = less(plus(holds, available), rule->reserve);
    if (room < granted) {
        rule->calm_s = 0;
        const uint64_t size = clamp(less(room, slack), rule->least, rule->most);
        return size < granted ? size : granted;
    }
    const uint64_t top = clamp(less(room, 2 * slack), rule->least, rule->most);
    if (pressed || top < plus(granted, rule->grain)) {
        rule->calm_s = 0;
        return granted;
    }
    rule->calm_s += elapsed_s;
    if (rule->calm_s < WE_GOVERNOR_CALM_S) return granted;
    const uint64_t step = rule->most / STEPS > rule->grain ? rule->most / STEPS : rule->grain;
    return top - granted < step ? top : granted + step;
}

/* ---- the thread ---- */

static void drop(we_governor *g)
{
    if (atomic_fetch_sub(&g->owners, 1) != 1) return;
    we_watch_close(g->watch);
    os_mutex_destroy(&g->mutex);
    free(g);
}

static void tick(we_governor *g, double elapsed_s, int pressed)
{
    we_pressure seen = {we_watch_available(g->watch), 0, 0};
    uint64_t holds;
    if (seen.available == UINT64_MAX) return;
    os_lock(&g->mutex);
    if (atomic_load(&g->stop)) {
        os_unlock(&g->mutex);
        return;
    }
    g->on.sizes(g->on.cache, &seen.before, &holds);
    const uint64_t size = we_governor_decide(&g->rule, seen.available, seen.before, holds, elapsed_s, pressed);
    seen.after = seen.before;
    if (size != seen.before) {
        g->on.resize(g->on.cache, size);
        g->on.sizes(g->on.cache, &seen.after, &holds);
    }
    const uint64_t reserve = g->rule.reserve;
    os_unlock(&g->mutex);
    const int is_short = seen.available < reserve, tell = is_short && (seen.after < seen.before || !g->told);
    g->told = is_short;
    if (tell && g->on.report) g->on.report(g->on.listener, &seen);
}

static THREAD_RESULT run(void *arg)
{
    we_governor *g = arg;
    double last = we_clock_s();
    while (!atomic_load(&g->stop)) {
        const int pressed = we_watch_wait(g->watch, WE_GOVERNOR_TICK_S);
        if (atomic_load(&g->stop)) break;
        const double now = we_clock_s();
        tick(g, now - last, pressed);
        last = now;
        if (pressed) we_watch_wait(g->watch, BREATH_S);
    }
    drop(g);
    return THREAD_DONE;
}

/* ---- life ---- */

we_status we_governor_start(we_governor **out, const we_governor_rule *rule, const we_governed *governed,
                            we_watch *watch, we_fault *fault)
{
    *out = NULL;
    we_governor *g = calloc(1, sizeof *g);
    if (!g || os_mutex_init(&g->mutex)) {
        free(g);
        we_watch_close(watch);
        return we_fail(fault, WE_E_MEMORY, "governor", 0, 0);
    }
    g->rule = *rule;
    g->on = *governed;
    g->watch = watch;
    atomic_init(&g->owners, 2);
    atomic_init(&g->stop, 0);
    os_lock(&g->mutex);                 /* the thread's first tick is after g->thread was written */
    const int error = os_start(&g->thread, run, g);
    os_unlock(&g->mutex);
    if (error) {
        atomic_store(&g->owners, 1);
        drop(g);
        return we_fail(fault, WE_E_IO, "thread of the governor", 0, error);
    }
    *out = g;
    return WE_OK;
}

uint64_t we_governor_set(we_governor *g, uint64_t most, uint64_t size)
{
    uint64_t granted, holds;
    os_lock(&g->mutex);
    g->rule.most = most > g->rule.least ? most : g->rule.least;
    g->rule.calm_s = 0;
    if (!atomic_load(&g->stop)) g->on.resize(g->on.cache, clamp(size, g->rule.least, g->rule.most));
    g->on.sizes(g->on.cache, &granted, &holds);
    os_unlock(&g->mutex);
    return granted;
}

uint64_t we_governor_most(we_governor *g)
{
    os_lock(&g->mutex);
    const uint64_t most = g->rule.most;
    os_unlock(&g->mutex);
    return most;
}

void we_governor_stop(we_governor *g)
{
    if (!g) return;
    os_lock(&g->mutex);                 /* a tick that changes the cache is waited for */
    atomic_store(&g->stop, 1);
    os_unlock(&g->mutex);
    we_watch_wake(g->watch);
    const os_thread thread = g->thread;
    if (os_is_self(thread)) {
        os_detach(thread);
    } else {
        os_join(thread);
    }
    drop(g);
}
