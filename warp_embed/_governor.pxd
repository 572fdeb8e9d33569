"""The governor of an expert cache. Meaning: include/warp_embed/governor.h, watch.h."""
from libc.stdint cimport uint64_t

from warp_embed._kernels cimport we_fault, we_status


cdef extern from "warp_embed/watch.h" nogil:
    enum:
        WE_WATCH_GROUPS
    ctypedef struct we_group_files:
        const char *limits[2]
        const char *usage
        const char *stat
        uint64_t ceiling
    ctypedef struct we_watch:
        pass
    we_status we_watch_open(we_watch **watch, const char *meminfo, const char *pressure, const we_group_files *groups,
                            size_t n_groups, we_fault *fault)
    uint64_t we_watch_available(we_watch *watch)
    int we_watch_has_signal(const we_watch *watch)
    void we_watch_close(we_watch *watch)


cdef extern from "warp_embed/governor.h" nogil:
    ctypedef struct we_governor_rule:
        uint64_t least
        uint64_t most
        uint64_t reserve
        uint64_t grain
        double calm_s
    ctypedef struct we_pressure:
        uint64_t available
        uint64_t before
        uint64_t after
    ctypedef struct we_governed:
        void *cache
        void (*sizes)(void *cache, uint64_t *granted, uint64_t *holds) noexcept nogil
        void (*resize)(void *cache, uint64_t nbytes) noexcept nogil
        void (*report)(void *listener, const we_pressure *pressure) noexcept nogil
        void *listener
    ctypedef struct we_governor:
        pass
    we_status we_governor_start(we_governor **governor, const we_governor_rule *rule, const we_governed *governed,
                                we_watch *watch, we_fault *fault)
    uint64_t we_governor_set(we_governor *governor, uint64_t most, uint64_t size)
    uint64_t we_governor_most(we_governor *governor)
    void we_governor_stop(we_governor *governor)
