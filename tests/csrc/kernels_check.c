/* Every kernel of every level that runs here against the formulas in kernels.h, in float64 or exact integers.
 *
 *     kernels_check [--full] [--list] [LEVEL ...]
 *
 * Prints a table of the largest errors as shares of their bounds. --list prints the levels' names only.
 * Sources: all of kernels_check, csrc/kernels and csrc/cpu.c; libm. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>
#include "kernels_check.h"

const we_kernels *kernels;
int full;
const size_t sizes[] = {1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 128, 130, 264}, n_sizes = 15;

/* ----------------------------------------------------------------- memory ---- */

enum { MAX_BLOCKS = 4096, PATTERN = 0xA5 };
static struct { void *at; size_t bytes; } blocks[MAX_BLOCKS];
static size_t n_blocks;

void *edge(size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    CHECK(n_blocks < MAX_BLOCKS);
    char *at = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED && mprotect(at + whole, page, PROT_NONE) == 0);
    memset(at, PATTERN, whole);
    blocks[n_blocks].at = at;
    blocks[n_blocks++].bytes = whole + page;
    return at + whole - bytes;
}

void release(void)
{
    while (n_blocks > 0) {
        n_blocks--;
        munmap(blocks[n_blocks].at, blocks[n_blocks].bytes);
    }
}

void *copy(const void *from, size_t bytes) { return memcpy(edge(bytes), from, bytes); }

void *copy_at(const void *from, size_t bytes, size_t offset)
{
    char *at = edge(bytes + 192);
    at += 64 - (uintptr_t)at % 64;
    return memcpy(at + offset, from, bytes);
}

/* ----------------------------------------------------------------- inputs ---- */

static uint64_t seed;

double uniform(double low, double high) { return low + (high - low) * (double)(next_random(&seed) >> 11) * 0x1p-53; }
double normal(void) { return sqrt(-2 * log(uniform(1e-12, 1))) * cos(uniform(0, 6.283185307179586)); }
size_t below(size_t n) { return (size_t)(next_random(&seed) % n); }

void fill(float *x, size_t n, kind how)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = (float)normal();
        if (how == SUBNORMAL) x[i] *= 1e-39f;
        if (how == ALTERNATING) x[i] = i & 1 ? fabsf(x[i]) : -fabsf(x[i]);
        if (how == ZEROS) x[i] = 0;
    }
    if (how == ONE_HUGE && n > 0) x[below(n)] = 1e20f;
}

/* ---------------------------------------------------------------- numbers ---- */

uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
float of_bits(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

double half_value(uint16_t h)
{
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    double x = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31) x = fraction ? NAN : INFINITY;
    return h & 0x8000 ? -x : x;
}

uint16_t half_nearest(double x)
{
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    int exponent;
    x = fabs(x);
    if (isnan(x)) return sign | 0x7e00;
    if (x >= 65520) return sign | 0x7c00;
    frexp(x, &exponent);                                /* x in [2^(e-1), 2^e) has steps of 2^(e-11) */
    if (x == 0 || exponent < -13) return sign | (uint16_t)nearbyint(ldexp(x, 24));
    return sign | (uint16_t)(((exponent + 13) << 10) + nearbyint(ldexp(x, 11 - exponent)));
}

double ulp_of(double x)
{
    int exponent;
    frexp((double)(float)x, &exponent);
    return ldexp(1, exponent - 24 < -149 ? -149 : exponent - 24);
}

/* --------------------------------------------------------------- verdicts ---- */

enum { MAX_OPS = 64, SHOWN = 3 };
typedef struct verdict {
    const char *op;
    double      worst;
    size_t      n_checks, n_failures;
} verdict;
static verdict verdicts[MAX_OPS];
static size_t n_verdicts, n_failures;

static verdict *verdict_of(const char *op)
{
    size_t i = 0;
    while (i < n_verdicts && strcmp(verdicts[i].op, op) != 0) i++;
    CHECK(i < MAX_OPS);
    if (i == n_verdicts) verdicts[n_verdicts++] = (verdict){op, 0, 0, 0};
    return &verdicts[i];
}

static void judge(const char *op, int good, const char *what, double y, double expected)
{
    verdict *v = verdict_of(op);
    v->n_checks++;
    if (good) return;
    n_failures++;
    if (v->n_failures++ < SHOWN)
        fprintf(stderr, "%s %s: %s: %.9g, expected %.9g\n", kernels->isa, op, what, y, expected);
}

void within(const char *op, double y, double exact, double bound)
{
    if (y == (float)exact || (isnan(y) && isnan(exact))) {
        judge(op, 1, "", y, exact);
        return;
    }
    const double share = fabs(y - exact) / bound;
    verdict *v = verdict_of(op);
    if (share > v->worst) v->worst = share;
    judge(op, share <= 1, "outside its bound", y, exact);
}

void equal(const char *op, double y, double expected)
{
    judge(op, y == expected || (isnan(y) && isnan(expected)), "not equal", y, expected);
}

void same_bits(const char *op, const void *a, const void *b, size_t bytes)
{
    const unsigned char *x = a, *y = b;
    size_t i = 0;
    while (i < bytes && x[i] == y[i]) i++;
    judge(op, i == bytes, "other bits, from byte", (double)i, (double)bytes);
}

void holds(const char *op, int condition, const char *what) { judge(op, condition, what, condition, 1); }

void untouched(const char *op, const float *y, size_t n)
{
    static const unsigned char pattern[8] = {PATTERN, PATTERN, PATTERN, PATTERN, PATTERN, PATTERN, PATTERN, PATTERN};
    for (size_t i = 0; i < n; i++) judge(op, memcmp(y + i, pattern, 4) == 0, "written outside", y[i], 0);
}

/* --------------------------------------------------------------------- main ---- */

static void check_level(void)
{
    static void (*const checks[])(void) = {
        check_numbers, check_elementwise, check_norms, check_logits, check_router, check_decoding, check_encoding,
        check_quantize, check_matmul, check_matmul_exact_integers, check_matmul_invariance, check_matmul_t,
        check_convolution, check_decays, check_kda, check_latents, check_mla, check_depth};
    n_verdicts = 0;
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        seed = 88172645463325252u + i;                  /* every level gets the same inputs */
        checks[i]();
        release();
    }
    for (size_t i = 0; i < n_verdicts; i++)
        printf("%-10s %-16s %9zu checks, largest error %.3f of its bound%s\n", kernels->isa, verdicts[i].op,
               verdicts[i].n_checks, verdicts[i].worst, verdicts[i].n_failures ? "  FAILED" : "");
}

int main(int argc, char **argv)
{
    const char *const *all = we_kernels_levels();
    int n_named = 0, listing = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--full") == 0) full = 1;
        else if (strcmp(argv[i], "--list") == 0) listing = 1;
        else argv[++n_named] = argv[i];
    }
    for (size_t i = 0; listing && all[i]; i++) puts(all[i]);
    if (listing) return 0;
    holds("force", we_kernels_force("no such level") == -1, "an unknown level");
    for (size_t i = 0; n_named ? i < (size_t)n_named : all[i] != NULL; i++) {
        const char *name = n_named ? argv[i + 1] : all[i];
        if (we_kernels_force(name) != 0) {
            fprintf(stderr, "%s does not run here\n", name);
            return 1;
        }
        kernels = we_kernels_active();
        CHECK(strcmp(kernels->isa, name) == 0);
        check_level();
    }
    if (n_failures) fprintf(stderr, "%zu checks failed\n", n_failures);
    return n_failures != 0;
}
