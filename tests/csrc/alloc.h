/* Where the allocations of the core's files go here: fails_in == n lets the n-th from now on fail, 0 lets all succeed.
 * Not every program uses all three. */
#ifndef ALLOC_H
#define ALLOC_H
#include <stdlib.h>
static int fails_in;
static int fails_now(void) { return fails_in > 0 && --fails_in == 0; }
void *test_malloc(size_t bytes) { return fails_now() ? NULL : malloc(bytes); }
void *test_calloc(size_t n, size_t bytes) { return fails_now() ? NULL : calloc(n, bytes); }
void *test_realloc(void *p, size_t bytes) { return fails_now() ? NULL : realloc(p, bytes); }
#endif
