/* Which table is in use. */
#include <assert.h>
#include <stdatomic.h>
#include "kernels_internal.h"
#include "warp_embed/cpu.h"

/* The levels of this architecture and build, best last, and what a processor must have for them. */
static const struct { const we_kernels *table; unsigned needs; } levels[] = {
    {&we_reference, 0},
#ifdef WE_X86
    {&we_avx2, WE_CPU_AVX2},
#ifdef WE_X86_AVXVNNI
    {&we_avxvnni, WE_CPU_AVX2 | WE_CPU_AVXVNNI},
#endif
#ifdef WE_X86_AVX512
    {&we_avx512, WE_CPU_AVX512},
    {&we_avx512vnni, WE_CPU_AVX512 | WE_CPU_AVX512VNNI},
#endif
#endif
#ifdef WE_ARM64
    {&we_neon, 0},
#endif
#ifdef WE_DOTPROD
    {&we_dotprod, WE_CPU_DOTPROD},
#endif
#ifdef WE_I8MM
    {&we_i8mm, WE_CPU_DOTPROD | WE_CPU_I8MM},
#endif
};
enum { N_LEVELS = sizeof levels / sizeof *levels };

/* Those that run here, what a level leaves out taken from the one below. Written once, by the first who asks. */
static we_kernels  tables[N_LEVELS];
static const char *names[N_LEVELS + 1];
static int         n_tables;
static atomic_int  stage;
enum { UNTOUCHED, IN_WORK, DONE };

typedef void (*any_kernel)(void);
static_assert(sizeof(we_kernels) % sizeof(any_kernel) == 0 && sizeof(const char *) == sizeof(any_kernel),
              "a table is a row of pointers of one size");

static void inherit(we_kernels *table, const we_kernels *below)
{
    for (size_t at = 0; at < sizeof *table; at += sizeof(any_kernel)) {
        any_kernel kernel;
        memcpy(&kernel, (const char *)table + at, sizeof kernel);
        if (!kernel) memcpy((char *)table + at, (const char *)below + at, sizeof kernel);
    }
}

static void prepare(void)
{
    int expected = UNTOUCHED;
    if (atomic_compare_exchange_strong(&stage, &expected, IN_WORK)) {
        const unsigned features = we_cpu_features();
        for (int i = 0; i < N_LEVELS; i++) {
            if ((features & levels[i].needs) != levels[i].needs) continue;
            tables[n_tables] = *levels[i].table;
            if (n_tables > 0) inherit(&tables[n_tables], &tables[n_tables - 1]);
            names[n_tables++] = levels[i].table->isa;
        }
        atomic_store_explicit(&stage, DONE, memory_order_release);
    }
    while (atomic_load_explicit(&stage, memory_order_acquire) != DONE) {}       /* some copies of a table long */
}

static _Atomic(const we_kernels *) active;      /* NULL until first asked for */

const we_kernels *we_kernels_active(void)
{
    const we_kernels *table = atomic_load_explicit(&active, memory_order_acquire);
    if (!table) {
        prepare();
        table = &tables[n_tables - 1];
        atomic_store_explicit(&active, table, memory_order_release);
    }
    return table;
}

int we_kernels_force(const char *isa)
{
    prepare();
    for (int i = 0; i < n_tables; i++) {
        if (isa ? strcmp(isa, tables[i].isa) == 0 : i == n_tables - 1) {
            atomic_store_explicit(&active, &tables[i], memory_order_release);
            return 0;
        }
    }
    return -1;
}

const char *const *we_kernels_levels(void)
{
    prepare();
    return names;
}
