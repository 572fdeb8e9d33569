/* Which table is in use. */
#include <stdatomic.h>
#include "kernels_internal.h"
#include "warp_embed/cpu.h"

enum { MAX_LEVELS = 2 };

/* Tables that run here, best last. */
static int levels(const we_kernels *tables[MAX_LEVELS])
{
    int n = 0;
    tables[n++] = &we_reference;
#ifdef WE_X86
    if (we_cpu_features() & WE_CPU_AVX2) tables[n++] = &we_avx2;
#endif
    return n;
}

static _Atomic(const we_kernels *) active;      /* NULL until first asked for */

const we_kernels *we_kernels_active(void)
{
    const we_kernels *table = atomic_load_explicit(&active, memory_order_acquire);
    if (!table) {
        const we_kernels *tables[MAX_LEVELS];
        const int n = levels(tables);
        table = tables[n - 1];
        atomic_store_explicit(&active, table, memory_order_release);
    }
    return table;
}

int we_kernels_force(const char *isa)
{
    const we_kernels *tables[MAX_LEVELS];
    const int n = levels(tables);
    for (int i = 0; i < n; i++) {
        if (isa ? strcmp(isa, tables[i]->isa) == 0 : i == n - 1) {
            atomic_store_explicit(&active, tables[i], memory_order_release);
            return 0;
        }
    }
    return -1;
}

const char *const *we_kernels_levels(void)
{
    static const char *const reference[] = {"reference", NULL};
#ifdef WE_X86
    static const char *const avx2[] = {"reference", "avx2", NULL};
    if (we_cpu_features() & WE_CPU_AVX2) return avx2;
#endif
    return reference;
}
