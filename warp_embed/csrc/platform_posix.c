/* platform.h on Linux, macOS and other POSIX systems. */
#ifndef _WIN32
#if defined(__linux__)
#define _GNU_SOURCE             /* O_DIRECT, statx, madvise */
#elif defined(__APPLE__)
#define _DARWIN_C_SOURCE        /* F_NOCACHE, MADV_FREE_REUSABLE */
#endif
#define _FILE_OFFSET_BITS 64
#include "warp_embed/platform.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "platform_fault.h"

#define READ_MAX ((size_t)1 << 30)      /* Linux caps a read a little below 2 GiB, macOS refuses more than INT_MAX */

static we_status os_fail(we_fault *fault, const char *what, int64_t offset)
{
    const int error = errno;
    return we_fail(fault, error == ENOMEM ? WE_E_MEMORY : WE_E_IO, what, offset, error);
}

/* ---- files ---- */

static int open_flags(const char *path, int flags)
{
    int fd;
    /* O_NONBLOCK: a FIFO must not hang the host; it changes nothing for regular files. */
    do fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | flags);
    while (fd < 0 && errno == EINTR);
    return fd;
}

static int is_regular(int fd)           /* errno is set when not */
{
    struct stat st;
    if (fstat(fd, &st) != 0) return 0;
    if (S_ISREG(st.st_mode)) return 1;
    errno = S_ISDIR(st.st_mode) ? EISDIR : EINVAL;
    return 0;
}

#if defined(__linux__) && defined(O_DIRECT)
/* The file system's own word on alignment, where kernel and headers have it; otherwise WE_PAGE is believed. */
static int alignment_fits(int fd)
{
#ifdef STATX_DIOALIGN
    struct statx sx;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &sx) == 0 && (sx.stx_mask & STATX_DIOALIGN)) {
        return sx.stx_dio_offset_align != 0 && WE_PAGE % sx.stx_dio_offset_align == 0 &&
               sx.stx_dio_mem_align != 0 && WE_PAGE % sx.stx_dio_mem_align == 0;
    }
#else
    (void)fd;
#endif
    return 1;
}

/* Some file systems accept O_DIRECT at open and refuse it at the first read. */
static int probe_read(int fd)
{
    void *page = we_pages_reserve(WE_PAGE);
    if (!page) return 0;
    ssize_t got;
    do got = pread(fd, page, WE_PAGE, 0);
    while (got < 0 && errno == EINTR);
    we_pages_release(page, WE_PAGE);
    return got >= 0;
}

static int open_direct(const char *path)
{
    const int fd = open_flags(path, O_DIRECT);
    if (fd < 0) return -1;
    if (is_regular(fd) && alignment_fits(fd) && probe_read(fd)) return fd;
    close(fd);
    return -1;
}
#elif defined(F_NOCACHE)
static int open_direct(const char *path)
{
    const int fd = open_flags(path, 0);
    if (fd < 0) return -1;
    if (is_regular(fd) && fcntl(fd, F_NOCACHE, 1) != -1) return fd;
    close(fd);
    return -1;
}
#else
static int open_direct(const char *path) { (void)path; return -1; }
#endif

we_status we_file_open(we_file *file, const char *path, int want_direct, we_fault *fault)
{
    file->handle = -1;
    file->direct = 0;
    int fd = want_direct ? open_direct(path) : -1;
    if (fd >= 0) {
        file->direct = 1;
    } else {
        fd = open_flags(path, 0);
        if (fd < 0) return os_fail(fault, "open", 0);
        if (!is_regular(fd)) {
            const we_status status = os_fail(fault, "not a regular file", 0);
            close(fd);
            return status;
        }
#ifdef POSIX_FADV_RANDOM
        if (want_direct) posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);    /* whole records, so no reading ahead */
#endif
    }
    file->handle = fd;
    return WE_OK;
}

we_status we_file_size(const we_file *file, uint64_t *bytes, we_fault *fault)
{
    struct stat st;
    if (fstat((int)file->handle, &st) != 0) return os_fail(fault, "size", 0);
    *bytes = (uint64_t)st.st_size;
    return WE_OK;
}

we_status we_file_read(const we_file *file, void *dst, size_t n, uint64_t offset, we_fault *fault)
{
    size_t done = 0, refused = (size_t)-1;      /* refused: where an unbuffered read could not be continued */
    if (n > INT64_MAX || offset > INT64_MAX - n) return we_fail(fault, WE_E_SHORT_READ, "offset", 0, 0);
    while (done < n) {
        const size_t want = n - done < READ_MAX ? n - done : READ_MAX;
        const ssize_t got = pread((int)file->handle, (char *)dst + done, want, (off_t)(offset + done));
        if (got < 0) {
            if (errno == EINTR) continue;
            return os_fail(fault, "read", (int64_t)(offset + done));
        }
        if (got == 0) return we_fail(fault, WE_E_SHORT_READ, "end of file", (int64_t)(offset + done), 0);
        done += (size_t)got;
        if (file->direct && done < n && done % WE_PAGE) {
            /* The next read must be aligned again: repeat the partial page, once, for it may be the file's end. */
            if (done == refused) return we_fail(fault, WE_E_SHORT_READ, "end of file", (int64_t)(offset + done), 0);
            refused = done;
            done -= done % WE_PAGE;
        }
    }
    return WE_OK;
}

void we_file_close(we_file *file)
{
    if (file->handle >= 0) close((int)file->handle);
    file->handle = -1;
}

/* ---- memory ---- */

static size_t whole_pages(size_t bytes)         /* 0: does not fit */
{
    if (bytes == 0) bytes = 1;
    return bytes > SIZE_MAX - (WE_PAGE - 1) ? 0 : (bytes + WE_PAGE - 1) / WE_PAGE * WE_PAGE;
}

void *we_pages_reserve(size_t bytes)
{
    bytes = whole_pages(bytes);
    if (bytes == 0) return NULL;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    we_pages_prefer_large(p, bytes, 0);         /* a huge page would commit 2 MiB on one touch and undo give_back */
    return p;
}

void we_pages_prefer_large(void *p, size_t bytes, int yes)
{
#ifdef MADV_HUGEPAGE
    madvise(p, whole_pages(bytes), yes ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
    (void)p, (void)bytes, (void)yes;
#endif
}

void we_pages_give_back(void *p, size_t bytes)
{
    bytes = whole_pages(bytes);
    if (!p || bytes == 0) return;
#if defined(MADV_FREE_REUSABLE)
    madvise(p, bytes, MADV_FREE_REUSABLE);      /* macOS: DONTNEED would leave the pages resident */
#else
#if defined(__linux__) && defined(MADV_FREE)
    madvise(p, bytes, MADV_FREE);               /* splits huge pages at both ends, which DONTNEED leaves whole */
#endif
    madvise(p, bytes, MADV_DONTNEED);
#endif
}

void we_pages_release(void *p, size_t bytes)
{
    if (p) munmap(p, whole_pages(bytes));
}
#else
typedef int we_not_this_platform;       /* a translation unit may not be empty */
#endif
