/* platform.h on Windows. */
#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include "warp_embed/platform.h"
#include <windows.h>
#include <errno.h>
#include <stdlib.h>
#include "platform_fault.h"

#define READ_MAX ((size_t)1 << 30)      /* ReadFile counts in 32 bits */

/* fault.os_error is an errno everywhere: it becomes the errno of a Python OSError. */
static int errno_of(DWORD error)
{
    switch (error) {
    case ERROR_FILE_NOT_FOUND: case ERROR_PATH_NOT_FOUND: case ERROR_INVALID_NAME: return ENOENT;
    case ERROR_ACCESS_DENIED: case ERROR_SHARING_VIOLATION: case ERROR_LOCK_VIOLATION: return EACCES;
    case ERROR_TOO_MANY_OPEN_FILES: return EMFILE;
    case ERROR_NOT_ENOUGH_MEMORY: case ERROR_OUTOFMEMORY: case ERROR_COMMITMENT_LIMIT: return ENOMEM;
    case ERROR_INVALID_HANDLE: return EBADF;
    case ERROR_INVALID_PARAMETER: return EINVAL;
    default: return EIO;
    }
}

static we_status os_fail(we_fault *fault, const char *what, int64_t offset, DWORD error)
{
    const int number = errno_of(error);
    return we_fail(fault, number == ENOMEM ? WE_E_MEMORY : WE_E_IO, what, offset, number);
}

/* ---- files ---- */

static wchar_t *wide_path(const char *path)     /* malloc; NULL with GetLastError set */
{
    const int n = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, NULL, 0);
    if (n <= 0) {
        SetLastError(ERROR_INVALID_NAME);
        return NULL;
    }
    wchar_t *wide = malloc((size_t)n * sizeof *wide);
    if (!wide) SetLastError(ERROR_NOT_ENOUGH_MEMORY);
    else MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, wide, n);
    return wide;
}

/* Handles are not inherited by child processes: no security attributes. */
static HANDLE open_flags(const wchar_t *path, DWORD flags)
{
    const HANDLE h = CreateFileW(path, GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_DELETE, NULL, OPEN_EXISTING,
                                 FILE_ATTRIBUTE_NORMAL | flags, NULL);
    if (h != INVALID_HANDLE_VALUE && GetFileType(h) != FILE_TYPE_DISK) {
        CloseHandle(h);
        SetLastError(ERROR_INVALID_PARAMETER);
        return INVALID_HANDLE_VALUE;
    }
    return h;
}

/* One read at an offset; *got is 0 at the file's end. */
static DWORD read_once(HANDLE h, void *dst, size_t n, uint64_t offset, size_t *got)
{
    OVERLAPPED at = {0};
    DWORD done = 0;
    at.Offset = (DWORD)offset;
    at.OffsetHigh = (DWORD)(offset >> 32);
    DWORD error = ReadFile(h, dst, (DWORD)(n < READ_MAX ? n : READ_MAX), &done, &at) ? 0 : GetLastError();
    if (error == ERROR_HANDLE_EOF) error = 0;
    *got = done;
    return error;
}

static int probe_read(HANDLE h)
{
    size_t got;
    void *page = we_pages_reserve(WE_PAGE);
    const int good = page && read_once(h, page, WE_PAGE, 0, &got) == 0;
    we_pages_release(page, WE_PAGE);
    return good;
}

we_status we_file_open(we_file *file, const char *path, int want_direct, we_fault *fault)
{
    HANDLE h = INVALID_HANDLE_VALUE;
    file->handle = -1;
    file->direct = 0;
    wchar_t *wide = wide_path(path);
    if (!wide) return os_fail(fault, "open", 0, GetLastError());
    if (want_direct) {
        h = open_flags(wide, FILE_FLAG_NO_BUFFERING);
        if (h != INVALID_HANDLE_VALUE && !probe_read(h)) {
            CloseHandle(h);
            h = INVALID_HANDLE_VALUE;
        }
        file->direct = h != INVALID_HANDLE_VALUE;
    }
    if (h == INVALID_HANDLE_VALUE) h = open_flags(wide, want_direct ? FILE_FLAG_RANDOM_ACCESS : 0);
    const DWORD error = h == INVALID_HANDLE_VALUE ? GetLastError() : 0;
    free(wide);
    if (error) return os_fail(fault, "open", 0, error);
    file->handle = (intptr_t)h;
    return WE_OK;
}

we_status we_file_size(const we_file *file, uint64_t *bytes, we_fault *fault)
{
    LARGE_INTEGER size;
    if (!GetFileSizeEx((HANDLE)file->handle, &size)) return os_fail(fault, "size", 0, GetLastError());
    *bytes = (uint64_t)size.QuadPart;
    return WE_OK;
}

we_status we_file_read(const we_file *file, void *dst, size_t n, uint64_t offset, we_fault *fault)
{
    size_t done = 0;
    if (n > INT64_MAX || offset > INT64_MAX - n) return we_fail(fault, WE_E_SHORT_READ, "offset", 0, 0);
    while (done < n) {
        size_t got = 0;
        const DWORD error = read_once((HANDLE)file->handle, (char *)dst + done, n - done, offset + done, &got);
        if (error) return os_fail(fault, "read", (int64_t)(offset + done), error);
        done += got;
        /* An unbuffered read ends off a page only at the file's end. */
        if (got == 0 || (file->direct && done < n && done % WE_PAGE))
            return we_fail(fault, WE_E_SHORT_READ, "end of file", (int64_t)(offset + done), 0);
    }
    return WE_OK;
}

void we_file_close(we_file *file)
{
    if (file->handle != -1) CloseHandle((HANDLE)file->handle);
    file->handle = -1;
}

/* ---- memory ---- */

void *we_pages_reserve(size_t bytes)
{
    return VirtualAlloc(NULL, bytes ? bytes : 1, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

void we_pages_prefer_large(void *p, size_t bytes, int yes) { (void)p, (void)bytes, (void)yes; } /* needs a privilege */

void we_pages_give_back(void *p, size_t bytes)
{
    if (!p || !bytes) return;
    VirtualAlloc(p, bytes, MEM_RESET, PAGE_READWRITE);      /* the contents need not be kept ...      */
    VirtualUnlock(p, bytes);                                /* ... and leave the working set: for pages that are not
                                                               locked this fails, and trims them all the same */
}

void we_pages_release(void *p, size_t bytes)
{
    (void)bytes;
    if (p) VirtualFree(p, 0, MEM_RELEASE);
}
#else
typedef int we_not_this_platform;       /* a translation unit may not be empty */
#endif
