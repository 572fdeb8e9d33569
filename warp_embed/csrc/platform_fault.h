/* How the C files of this folder fill in a we_fault. */
#ifndef WARP_EMBED_PLATFORM_FAULT_H
#define WARP_EMBED_PLATFORM_FAULT_H
#include "warp_embed/status.h"

static inline we_status we_fail(we_fault *fault, we_status status, const char *what, int64_t offset, int os_error)
{
    fault->status = status;
    fault->layer = fault->expert = -1;
    fault->os_error = os_error;
    fault->offset = offset;
    fault->what = what;
    return status;
}

#endif
