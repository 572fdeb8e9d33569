/* Reads of a real file, also while a timer interrupts them. Argument: a path to write to. Sources: platform_posix.c. */
#define _GNU_SOURCE
#include <signal.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>
#include "check.h"
#include "alloc.h"
#include "warp_embed/platform.h"

#define PAGES 300u

static uint8_t byte_at(uint64_t i) { return (uint8_t)(i * 2654435761u >> 13); }

static void write_file(const char *path, size_t bytes)
{
    FILE *f = fopen(path, "wb");
    CHECK(f);
    for (size_t i = 0; i < bytes; i++) CHECK(fputc(byte_at(i), f) != EOF);
    CHECK(fclose(f) == 0);
}

static void check_range(const we_file *file, uint8_t *to, size_t n, uint64_t offset)
{
    we_fault fault;
    memset(to, 0, n);
    CHECK(we_file_read(file, to, n, offset, &fault) == WE_OK);
    for (size_t i = 0; i < n; i++) CHECK(to[i] == byte_at(offset + i));
}

static void on_alarm(int number) { (void)number; }

static void reads(const char *path, int want_direct)
{
    we_file file;
    we_fault fault;
    uint64_t size = 0, seed = 5;
    uint8_t *to = we_pages_reserve(PAGES * WE_PAGE);
    CHECK(to && we_file_open(&file, path, want_direct, &fault) == WE_OK);
    CHECK(we_file_size(&file, &size, &fault) == WE_OK && size == PAGES * WE_PAGE + 100);
    for (int i = 0; i < 40; i++) {
        const uint64_t first = next_random(&seed) % PAGES, n = 1 + next_random(&seed) % (PAGES - first);
        check_range(&file, to, n * WE_PAGE, first * WE_PAGE);
        if (!file.direct) check_range(&file, to, n * WE_PAGE - 7, first * WE_PAGE + 3);
    }
    CHECK(we_file_read(&file, to, WE_PAGE, PAGES * WE_PAGE, &fault) == WE_E_SHORT_READ);
    CHECK(we_file_read(&file, to, PAGES * WE_PAGE, WE_PAGE, &fault) == WE_E_SHORT_READ);
    CHECK(we_file_read(&file, to, WE_PAGE, (uint64_t)1 << 40, &fault) == WE_E_SHORT_READ);
    CHECK(we_file_read(&file, to, WE_PAGE, UINT64_MAX - 10, &fault) == WE_E_SHORT_READ);
    CHECK(we_file_read(&file, to, 0, 0, &fault) == WE_OK);
    we_file_close(&file);
    we_file_close(&file);
    CHECK(we_file_read(&file, to, WE_PAGE, 0, &fault) == WE_E_IO && fault.os_error != 0);
    we_pages_release(to, PAGES * WE_PAGE);
}

static void memory(void)
{
    const size_t bytes = 5 * WE_PAGE + 1;
    uint8_t *p = we_pages_reserve(bytes);
    CHECK(p && (uintptr_t)p % WE_PAGE == 0 && p[0] == 0 && p[bytes - 1] == 0);
    memset(p, 1, bytes);
    we_pages_give_back(p, bytes);
    p[bytes - 1] = 3;
    CHECK(p[bytes - 1] == 3);
    we_pages_release(p, bytes);
    we_pages_release(NULL, 5);
    we_pages_give_back(NULL, 5);
    CHECK(we_pages_reserve(SIZE_MAX) == NULL && we_pages_reserve(SIZE_MAX - WE_PAGE) == NULL);
}

int main(int argc, char **argv)
{
    we_fault fault;
    we_file file;
    CHECK(argc == 2);
    write_file(argv[1], PAGES * WE_PAGE + 100);
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_alarm;               /* without SA_RESTART */
    const struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0);
    reads(argv[1], 0);
    reads(argv[1], 1);
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
    memory();
    CHECK(we_file_open(&file, "/no/such/file", 1, &fault) == WE_E_IO && file.handle == -1 && fault.os_error != 0);
    CHECK(we_file_open(&file, "/", 1, &fault) == WE_E_IO && file.handle == -1);
    return 0;
}
