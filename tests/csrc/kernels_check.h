/* What the parts of kernels_check share: guarded memory, inputs, weight matrices, verdicts. */
#ifndef KERNELS_CHECK_H
#define KERNELS_CHECK_H
#include <math.h>
#include <string.h>
#include "check.h"
#include "warp_embed/kernels.h"

#define EPS 0x1p-23                 /* float: from 1 to the next */
#define SIZES(n) (size_t at_ = 0, n; at_ < n_sizes && (n = sizes[at_], 1); at_++)

extern const we_kernels *kernels;   /* the level under test */
extern int full;                    /* more values, larger shapes */
extern const size_t n_sizes, sizes[];       /* around the numbers of lanes that vectors have */

/* ---- memory: it ends where a page begins that nobody may touch; filled with a pattern; all freed by release ---- */
void *edge(size_t bytes);
void release(void);
static inline float *floats(size_t n) { return (float *)edge(n * sizeof(float)); }
static inline double *doubles(size_t n) { return (double *)edge(n * sizeof(double)); }
/* A copy, and one that starts `offset` bytes behind a multiple of 64 instead of ending at a guard. */
void *copy(const void *from, size_t bytes);
void *copy_at(const void *from, size_t bytes, size_t offset);

/* ---- inputs ---- */
typedef enum kind { NORMAL, ONE_HUGE, SUBNORMAL, ALTERNATING, ZEROS, N_KINDS } kind;
double uniform(double low, double high);
double normal(void);
size_t below(size_t n);
void fill(float *x, size_t n, kind how);
static inline float *inputs(size_t n, kind how) { float *x = floats(n); fill(x, n, how); return x; }

/* ---- numbers, by arithmetic on f64 instead of bits ---- */
double half_value(uint16_t h);
uint16_t half_nearest(double x);
double ulp_of(double x);            /* of the float nearest to x */
uint32_t bits_of(float x);
float of_bits(uint32_t b);

/* ---- verdicts on the kernel `op` of this level; they print what failed and count ---- */
/* |y - exact| <= bound, or y is what exact rounds to; NaN for NaN. The report has the worst share of a bound. */
void within(const char *op, double y, double exact, double bound);
void equal(const char *op, double y, double expected);
void same_bits(const char *op, const void *a, const void *b, size_t bytes);
void holds(const char *op, int condition, const char *what);
/* Elements behind the n first of y still have the pattern of edge. */
void untouched(const char *op, const float *y, size_t n);

/* ---- weights ---- */
typedef struct sample {
    const char *name;
    we_matrix   w;
    double     *value, *size;       /* [rows][cols]; size: what rounding is relative to */
} sample;
extern const size_t n_samples;
/* Kind `which` with at least cols columns (VQ: whole vectors); ordinary, subnormal and zero scales. */
sample make_sample(size_t which, size_t rows, size_t cols);
double e2m1_value(unsigned code);
/* The level's integers of x [n][cols] for group, or f32 inputs for group 0. Strides leave gaps. */
we_acts make_acts(const float *x, size_t n, size_t cols, size_t x_stride, uint32_t group);
/* The same by the definition: q [n][padded], scale [n][groups]. */
void define_integers(const float *x, size_t n, size_t cols, size_t x_stride, size_t group, int32_t *q, float *scale);

/* ---- the checks ---- */
void check_numbers(void);
void check_elementwise(void);
void check_norms(void);
void check_depth(void);
void check_logits(void);
void check_router(void);
void check_decoding(void);
void check_encoding(void);
void check_quantize(void);
void check_matmul(void);
void check_matmul_exact_integers(void);
void check_matmul_invariance(void);
void check_matmul_t(void);
void check_convolution(void);
void check_decays(void);
void check_kda(void);
void check_latents(void);
void check_mla(void);

#endif
