/* What a C function of warp_embed says when it fails: a code, and where.
 * Nothing here prints, aborts or raises; _store.pyx maps a fault to an exception. */
#ifndef WARP_EMBED_STATUS_H
#define WARP_EMBED_STATUS_H
#include <stdint.h>

typedef enum we_status {
    WE_OK = 0,
    WE_E_MEMORY,        /* an allocation failed                                  */
    WE_E_IO,            /* the operating system refused; fault.os_error is errno */
    WE_E_SHORT_READ,    /* the file ends before the bytes that were asked for    */
    WE_E_RECORD,        /* an expert record breaks a rule; fault.what says which */
    WE_E_CANCELLED,     /* the caller's cancel flag was set                      */
    WE_E_INTERRUPTED,   /* a Python signal handler raised                        */
    WE_E_PAUSED,        /* the time budget is used up; call again to go on       */
    WE_E_NUMERIC        /* a result is not finite                                */
} we_status;

typedef struct we_fault {
    we_status   status;
    int32_t     layer, expert;  /* -1 where there is none                    */
    int32_t     os_error;       /* errno, 0 where there is none              */
    int64_t     offset;         /* of the record or read in its file, bytes  */
    const char *what;           /* a constant string: the field or the rule  */
} we_fault;

#endif
