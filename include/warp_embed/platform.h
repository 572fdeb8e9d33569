/* The operating system, behind one header: files, memory, threads. Stateless: it may be linked into several
 * extensions. Implemented in csrc/platform_posix.c and csrc/platform_win32.c. */
#ifndef WARP_EMBED_PLATFORM_H
#define WARP_EMBED_PLATFORM_H
#include <stddef.h>
#include <stdint.h>
#include "warp_embed/status.h"

#define WE_PAGE 4096u           /* alignment of records in a bank, of slots, and of unbuffered reads */

/* ---- files: read only, positional, close-on-exec, 64-bit offsets ---- */
typedef struct we_file {
    intptr_t handle;            /* descriptor or HANDLE; -1: closed                          */
    int      direct;            /* 1: reads bypass the page cache (aligned reads only)       */
} we_file;

/* Open `path` (UTF-8 on Windows, the file system's bytes elsewhere). With want_direct the page cache is bypassed
 * where the file system allows it: one aligned read is probed, and on refusal the file is reopened buffered. */
we_status we_file_open(we_file *file, const char *path, int want_direct, we_fault *fault);
we_status we_file_size(const we_file *file, uint64_t *bytes, we_fault *fault);
/* Read exactly n bytes at offset. Restarts after EINTR and partial reads; the file's end is WE_E_SHORT_READ.
 * Of a direct file offset, n and dst must be multiples of WE_PAGE. */
we_status we_file_read(const we_file *file, void *dst, size_t n, uint64_t offset, we_fault *fault);
void we_file_close(we_file *file);

/* ---- memory: page-aligned, zeroed, committed on first touch ---- */
void *we_pages_reserve(size_t bytes);                   /* NULL when refused              */
void  we_pages_give_back(void *p, size_t bytes);        /* contents lost, RSS falls       */
void  we_pages_release(void *p, size_t bytes);
/* A hint. Large pages (yes = 1) suit memory that will be filled whole: weights read in a row stream one to three percent
 * faster. They do not suit memory of which parts were given back: the system would fill the gaps again. */
void  we_pages_prefer_large(void *p, size_t bytes, int yes);

#endif
