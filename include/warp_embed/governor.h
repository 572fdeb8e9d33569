/* The governor of an expert cache: it gives memory back when the machine runs short, and takes it again later.
 *
 * The rule. Let room = what the cache holds + available - reserve: the size at which exactly the reserve stays free.
 * What the cache takes or gives moves `holds` and `available` by the same amount in opposite directions, so room does
 * not depend on it: only on what the others use. With slack = reserve / 8:
 *   - room below the size: the size becomes room - slack, at once. This also cuts what was promised but is not yet used.
 *   - room above the size by more than 2 slack, for CALM_S seconds without a break: the size grows by a 64th of the most
 *     it may be, every tick, and never beyond room - 2 slack.
 *   - between the two: nothing. What others use may swing by a slack and nothing moves, so there is no oscillation.
 * The size stays within [least, most]. */
#ifndef WARP_EMBED_GOVERNOR_H
#define WARP_EMBED_GOVERNOR_H
#include <stdint.h>
#include "warp_embed/status.h"
#include "warp_embed/watch.h"

#define WE_GOVERNOR_TICK_S 0.25
#define WE_GOVERNOR_CALM_S 2.0

typedef struct we_governor_rule {       /* all in bytes                                                        */
    uint64_t least, most;               /* what the cache needs; what the plan, or its owner, allows           */
    uint64_t reserve;                   /* what others may count on                                            */
    uint64_t grain;                     /* one record: the smallest step that changes anything                 */
    double   calm_s;                    /* for how long there has been room to grow; starts at 0               */
} we_governor_rule;

/* The size that a cache of `granted` bytes, of which `holds` are in use, should have. pressed: the kernel signalled
 * that somebody waits for memory; then nothing grows. elapsed_s: since the last call. */
uint64_t we_governor_decide(we_governor_rule *rule, uint64_t available, uint64_t granted, uint64_t holds,
                            double elapsed_s, int pressed);

typedef struct we_pressure {            /* bytes: before the cache changed, its sizes before and after         */
    uint64_t available, before, after;
} we_pressure;

/* The governed cache. Called from the governor's thread and from callers of we_governor_set, one at a time. */
typedef struct we_governed {
    void *cache;
    void (*sizes)(void *cache, uint64_t *granted, uint64_t *holds);
    void (*resize)(void *cache, uint64_t bytes);
    /* NULL, or told that less than the reserve is available: whenever the cache gave some, and once when it has
     * nothing more to give. It is the last thing in a tick and holds no lock; it may stop the governor. */
    void (*report)(void *listener, const we_pressure *pressure);
    void *listener;
} we_governed;

typedef struct we_governor we_governor;

/* Start the thread; it owns the watch from now on, also when this fails. Signals are blocked in it. */
we_status we_governor_start(we_governor **governor, const we_governor_rule *rule, const we_governed *governed,
                            we_watch *watch, we_fault *fault);

/* Have a size now, and from now on at most `most`; what the size is then. Waits for no pass, at most for a tick. */
uint64_t we_governor_set(we_governor *governor, uint64_t most, uint64_t size);
uint64_t we_governor_most(we_governor *governor);

/* No call of the cache's functions begins after this. Joins the thread, unless it is called by report: then the thread
 * ends by itself. NULL is allowed. After fork() the child must not call it: there is no thread. */
void we_governor_stop(we_governor *governor);

#endif
