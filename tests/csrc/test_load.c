/* A file read by several threads at once: everything arrives, the first failure is told, a stop stops. Sources: load.c
 * record.c platform_posix.c. argv[1]: where a file may be written. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>
#include "alloc.h"
#include "check.h"
#include "warp_embed/load.h"
#include "warp_embed/record.h"

enum { THREADS = 4, PIECES = 300, BYTES = 4000 };

static const char *path;
static uint8_t file[PIECES * BYTES], memory[PIECES * BYTES];
static we_piece pieces[PIECES];
static uint64_t seed = 88172645463325252u;

static void write_file(size_t bytes)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, file, bytes) == (ssize_t)bytes);
    close(fd);
}

static void prepare(void)
{
    for (size_t i = 0; i < sizeof file; i++) file[i] = (uint8_t)next_random(&seed);
    for (size_t i = 0; i < PIECES; i++)
        pieces[i] = (we_piece){i * BYTES, memory + i * BYTES, BYTES, (uint32_t)i, WE_Q8G, 0};
    memset(memory, 0, sizeof memory);
    write_file(sizeof file);
}

static void *work(void *load)
{
    we_load_work(load);
    return NULL;
}

static void *work_and_stop(void *load)
{
    for (uint64_t n = next_random(&seed) % 100000; n > 0; n--) (void)we_load_done(load);
    we_load_stop(load);
    return NULL;
}

/* What THREADS threads make of it, with `also` beside them. */
static we_status run(void *(*also)(void *), size_t *piece, we_fault *fault)
{
    we_load *load;
    pthread_t threads[THREADS];
    CHECK(we_load_create(&load, path, pieces, PIECES, fault) == WE_OK);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, i ? work : also, load) == 0);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    const we_status status = we_load_result(load, piece, fault);
    CHECK(we_load_done(load) <= sizeof file && (status != WE_OK || we_load_done(load) == sizeof file));
    we_load_destroy(load);
    return status;
}

static void everything_arrives(void)
{
    size_t piece;
    we_fault fault;
    prepare();
    CHECK(run(work, &piece, &fault) == WE_OK && piece == PIECES);
    CHECK(memcmp(memory, file, sizeof file) == 0);
}

static void the_lowest_failure_is_told(void)
{
    static const uint32_t nan = 0x7fc00000u;
    size_t piece;
    we_fault fault;
    for (size_t bad = 0; bad < PIECES; bad += 23) {
        prepare();
        for (size_t i = bad; i < PIECES; i++) {         /* from there on none is sound */
            pieces[i].encoding = WE_F32;
            memcpy(file + i * BYTES + 4 * (i % (BYTES / 4)), &nan, sizeof nan);
        }
        write_file(sizeof file);
        CHECK(run(work, &piece, &fault) == WE_E_NUMERIC && piece == bad);
    }
    prepare();
    write_file(sizeof file - 1);
    CHECK(run(work, &piece, &fault) == WE_E_SHORT_READ && piece == PIECES - 1);
}

static void a_stop_stops(void)
{
    size_t piece;
    we_fault fault;
    prepare();
    for (int i = 0; i < 200; i++) {
        const we_status status = run(work_and_stop, &piece, &fault);
        CHECK((status == WE_E_CANCELLED || status == WE_OK) && piece == PIECES);
    }
}

/* Large files are read past the page cache where that is possible: the pieces lie across pages, and behind the last. */
static void a_large_file(void)
{
    const uint64_t bytes = WE_LOAD_DIRECT + 3 * WE_PAGE + 1234;
    size_t piece;
    we_fault fault;
    prepare();
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    CHECK(pwrite(fd, file, sizeof file, (off_t)(bytes - sizeof file)) == (ssize_t)sizeof file);
    close(fd);
    for (size_t i = 0; i < PIECES; i++) pieces[i].offset += bytes - sizeof file;
    CHECK(run(work, &piece, &fault) == WE_OK && memcmp(memory, file, sizeof file) == 0);
}

static void what_cannot_be_had(void)
{
    we_load *load;
    we_fault fault;
    fails_in = 1;
    CHECK(we_load_create(&load, path, pieces, PIECES, &fault) == WE_E_MEMORY && !load);
    fails_in = 0;
    unlink(path);
    CHECK(we_load_create(&load, path, pieces, PIECES, &fault) == WE_E_IO && !load);
    we_load_destroy(NULL);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    path = argv[1];
    everything_arrives();
    the_lowest_failure_is_told();
    a_stop_stops();
    a_large_file();
    what_cannot_be_had();
    return 0;
}
