/* kernels_check: convolution, decays, KDA, latents, MLA. */
#include "kernels_check.h"

/* ------------------------------------------------------------ convolution ---- */

static void convolution(size_t K, size_t n, size_t C)
{
    const size_t past = K - 1, stride = C + 2;
    const float *u = inputs(n * stride, NORMAL), *tail = inputs(past * stride, NORMAL);
    const float *taps = inputs(K * stride, NORMAL);
    float *y = floats(n * stride), *after = floats(past * stride);
    kernels->short_conv(y, stride, after, u, stride, tail, stride, taps, stride, K, n, 0, C);
    for (size_t t = 0; t < n; t++) {
        for (size_t c = 0; c < C; c++) {
            double exact = 0, size = 0;
            for (size_t j = 0; j < K; j++) {
                const double from = t + j >= past ? u[(t + j - past) * stride + c] : tail[(t + j) * stride + c];
                exact += taps[j * stride + c] * from;
                size += fabs(taps[j * stride + c] * from);
            }
            const double silu = exact / (1 + exp(-exact));
            within("short_conv", y[t * stride + c], silu, ((double)K + 4) * EPS * (size + fabs(silu)));
        }
        untouched("short_conv", y + t * stride + C, 2);
    }
    for (size_t j = 0; j < past; j++) {
        const float *from = n + j >= past ? u + (n + j - past) * stride : tail + (n + j) * stride;
        same_bits("short_conv", after + j * stride, from, 4 * C);
        untouched("short_conv", after + j * stride + C, 2);
    }
    float *parts = floats(n * stride), *states = floats(past * stride), *next = floats(past * stride);
    memcpy(states, tail, 4 * past * stride);
    for (size_t t = 0; t < n; t++) {                    /* token by token, in two ranges of channels */
        for (size_t i = 0; i < 2; i++)
            kernels->short_conv(parts + t * stride, stride, next, u + t * stride, stride, states, stride, taps, stride,
                                K, 1, i ? C / 3 : 0, i ? C : C / 3);
        memcpy(states, next, 4 * past * stride);
    }
    float *right = floats(n * stride), *right_after = floats(past * stride);
    kernels->short_conv(right, stride, right_after, u, stride, tail, stride, taps, stride, K, n, C / 3, C);
    for (size_t t = 0; t < n; t++) untouched("short_conv", right + t * stride, C / 3);
    for (size_t j = 0; j < past; j++) untouched("short_conv", right_after + j * stride, C / 3);
    for (size_t t = 0; t < n; t++) same_bits("short_conv", parts + t * stride, y + t * stride, 4 * C);
    for (size_t j = 0; j < past && n; j++) same_bits("short_conv", states + j * stride, after + j * stride, 4 * C);
}

void check_convolution(void)
{
    static const size_t shapes[][2] = {{1, 1}, {2, 9}, {9, 33}, {5, 64}, {0, 8}, {3, 130}, {4, 15}};
    for (size_t K = 1; K <= 7; K += K == 2 ? 2 : K == 4 ? 3 : 1)
        for (size_t i = 0; i < 7; i++, release()) convolution(K, shapes[i][0], shapes[i][1]);
}

/* ----------------------------------------------------------------- decays ---- */

void check_decays(void)
{
    static const float rates[] = {1e-3f, 1, 15.6f, 40};
    const size_t n = full ? 200001 : 20001;
    float *z = floats(n), *zeros = memset(floats(n), 0, 4 * n), *soft = floats(n), *bounded = floats(n);
    for (size_t i = 0; i < n; i++) z[i] = (float)uniform(-100, 100);
    for (size_t k = 0; k < 4; k++) {
        const double rate = rates[k];
        kernels->decay_softplus(soft, z, zeros, rates[k], n);
        kernels->decay_bounded(bounded, z, zeros, rates[k], -5, n);
        for (size_t i = 0; i < n; i++) {
            const double g = -rate * (fmax(z[i], 0) + log1p(exp(-fabs(z[i])))), b = -5 / (1 + exp(-rate * z[i]));
            within("decay_softplus", soft[i], exp(g), 3 * EPS * (1 + fabs(g)) * exp(g) + 2e-45);
            within("decay_bounded", bounded[i], exp(b), 8 * EPS * exp(b));
        }
        float *part = copy(z + 100, 4 * 61);
        kernels->decay_softplus(part, part, zeros, rates[k], 61);
        same_bits("decay_softplus", part, soft + 100, 4 * 61);
        memcpy(part, z + 100, 4 * 61);
        kernels->decay_bounded(part, part, zeros, rates[k], -5, 61);
        same_bits("decay_bounded", part, bounded + 100, 4 * 61);
    }
    const float far[5] = {1e30f, -1e30f, INFINITY, -INFINITY, NAN};
    const double limits[5] = {0, 1, 0, 1, NAN}, bounds[5] = {exp(-5), 1, exp(-5), 1, NAN};
    kernels->decay_softplus(soft, copy(far, 20), zeros, 1, 5);
    kernels->decay_bounded(bounded, copy(far, 20), zeros, 1, -5, 5);
    for (int i = 0; i < 5; i++) {
        equal("decay_softplus", soft[i], limits[i]);
        within("decay_bounded", bounded[i], bounds[i], 4 * EPS);
    }
    const float *f = inputs(130, NORMAL), *dt = inputs(130, NORMAL);
    kernels->decay_softplus(soft, f, dt, 2, 130);
    for (int i = 0; i < 130; i++) {
        const double t = (double)f[i] + dt[i], g = -2 * log1p(exp(t));
        within("decay_softplus", soft[i], exp(g), (4 * (1 + fabs(g)) + 2 * fabs(t)) * EPS * exp(g));
    }
}

/* -------------------------------------------------------------------- KDA ---- */

/* Decays of both kinds that occur: near 1, and from 1 to exp(-80) or 0. */
static we_kda_args kda_inputs(size_t n, size_t dk, size_t dv, int harsh)
{
    we_kda_args a = {.n = n, .dk = dk, .dv = dv, .qk_stride = dk + 1, .v_stride = dv + 2, .beta_stride = 3};
    float *q = inputs(n * a.qk_stride, NORMAL), *k = inputs(n * a.qk_stride, NORMAL), *decay = floats(n * a.qk_stride);
    float *beta = floats(n * a.beta_stride);
    for (size_t t = 0; t < n; t++) {
        double q_norm = 0, k_norm = 0;
        for (size_t i = t * a.qk_stride; i < t * a.qk_stride + dk; i++) {
            q_norm += (double)q[i] * q[i];
            k_norm += (double)k[i] * k[i];
        }
        for (size_t i = t * a.qk_stride; i < t * a.qk_stride + dk; i++) {
            q[i] = (float)(q[i] / sqrt(q_norm));
            k[i] = (float)(k[i] / sqrt(k_norm));
            decay[i] = (float)exp(harsh ? uniform(-80, 0) : 0.1 * log(uniform(1e-9, 1)));
            if (harsh && below(20) == 0) decay[i] = 0;
            if (harsh && below(4) == 0) decay[i] = 1;
        }
        beta[t * a.beta_stride] = (float)uniform(0, 1);
    }
    a.S_in = inputs(dk * dv, NORMAL);
    a.S_out = floats(dk * dv);
    a.q = q;
    a.k = k;
    a.v = inputs(n * a.v_stride, NORMAL);
    a.decay = decay;
    a.beta = beta;
    a.o = floats(n * a.v_stride);
    return a;
}

static double kda_step(const we_kda_args *a, size_t t, double *S, double *o)
{
    const float *q = a->q + t * a->qk_stride, *k = a->k + t * a->qk_stride, *decay = a->decay + t * a->qk_stride;
    double largest = 0;
    for (size_t j = 0; j < a->dv; j++) {
        double sk = 0;
        for (size_t i = 0; i < a->dk; i++) {
            S[i * a->dv + j] *= decay[i];
            sk += S[i * a->dv + j] * k[i];
        }
        const double d = a->beta[t * a->beta_stride] * (a->v[t * a->v_stride + j] - sk);
        o[j] = 0;
        for (size_t i = 0; i < a->dk; i++) {
            S[i * a->dv + j] += k[i] * d;
            o[j] += S[i * a->dv + j] * q[i];
            largest = fmax(largest, fabs(S[i * a->dv + j]));
        }
        largest = fmax(largest, fabs(o[j]));
    }
    return largest;
}

static void kda(size_t n, size_t dk, size_t dv, int harsh)
{
    we_kda_args a = kda_inputs(n, dk, dv, harsh);
    double *S = doubles(dk * dv), *o = doubles(dv), largest = 0;
    for (size_t i = 0; i < dk * dv; i++) largest = fmax(largest, fabs(S[i] = a.S_in[i]));
    kernels->kda(&a);
    for (size_t t = 0; t < n; t++) {
        largest = fmax(largest, kda_step(&a, t, S, o));
        for (size_t j = 0; j < dv; j++) within("kda", a.o[t * a.v_stride + j], o[j], 64 * EPS * largest);
        untouched("kda", a.o + t * a.v_stride + dv, 2);
    }
    for (size_t i = 0; i < dk * dv; i++) within("kda", a.S_out[i], S[i], 64 * EPS * largest);
    static const size_t cuts[][4] = {{1, 1, 1, 1}, {5, 1, 7, 90}, {2, 90, 0, 0}, {3, 0, 4, 5}};
    for (size_t c = 0; c < 4; c++) {                    /* in pieces, also in place */
        we_kda_args part = a;
        float *state = copy_at(a.S_in, 4 * dk * dv, c < 2 ? 4 : 0), *other = copy_at(a.S_in, 4 * dk * dv, c < 2 ? 8 : 0);
        part.S_in = state;
        part.stream = c != 1;
        part.o = floats(n * a.v_stride);
        for (size_t t = 0, i = 0; t < n; i++) {
            part.n = cuts[c][i % 4] < n - t ? cuts[c][i % 4] : n - t;
            part.S_out = c & 1 ? (float *)(uintptr_t)part.S_in : part.S_in == state ? other : state;
            kernels->kda(&part);
            part.S_in = part.S_out;
            t += part.n;
            part.q += part.n * a.qk_stride;
            part.k += part.n * a.qk_stride;
            part.decay += part.n * a.qk_stride;
            part.v += part.n * a.v_stride;
            part.o += part.n * a.v_stride;
            part.beta += part.n * a.beta_stride;
        }
        part.o -= n * a.v_stride;
        for (size_t t = 0; t < n; t++) same_bits("kda", part.o + t * a.v_stride, a.o + t * a.v_stride, 4 * dv);
        same_bits("kda", part.S_in, a.S_out, 4 * dk * dv);
    }
}

void check_kda(void)
{
    static const size_t shapes[][2] = {{1, 1}, {3, 7}, {8, 8}, {5, 9}, {64, 100}, {128, 128}, {31, 33}, {16, 264},
                                       {7, 31}};
    for (size_t i = 0; i < 9; i++)
        for (int harsh = 0; harsh < 2; harsh++, release()) kda(full ? 200 : 13, shapes[i][0], shapes[i][1], harsh);
}

/* ---------------------------------------------------------------- latents ---- */

/* What a part of a latent reads back as; *scale_bits, if q8, the f16 of each group. */
static void define_latent(const float *x, size_t n, we_kv kv, double *y, uint16_t *scale_bits, int *codes)
{
    for (size_t i = 0; i < n; i++) {
        y[i] = kv == WE_KV_F32 ? x[i] : half_value(half_nearest(x[i]));
        if (kv != WE_KV_Q8) continue;
        float largest = 0;
        for (size_t j = i / 64 * 64; j < n && j < i / 64 * 64 + 64; j++) largest = fmaxf(largest, fabsf(x[j]));
        scale_bits[i / 64] = half_nearest(largest / 127);
        const float scale = (float)half_value(scale_bits[i / 64]);
        codes[i] = scale > 0 ? (int)fminf(fmaxf(rintf(x[i] / scale), -127), 127) : 0;
        y[i] = scale * codes[i];
    }
}

static void latent(size_t r, size_t rope, we_kv kv, float size)
{
    float *x = inputs(r + rope, NORMAL), *y = floats(r + rope);
    double *expected = doubles(r + rope);
    int *codes = edge((r + rope) * sizeof(int));
    uint16_t *scales = edge(2 * ((r + 63) / 64 + (rope + 63) / 64));
    for (size_t i = 0; i < r + rope; i++) x[i] *= i % 7 == 3 ? 30 * size : size;
    uint8_t *bytes = edge(we_latent_bytes(r, rope, kv));
    kernels->latent_store(bytes, x, x + r, r, rope, kv);
    kernels->latent_load(y, bytes, r, rope, kv);
    define_latent(x, r, kv, expected, scales, codes);
    define_latent(x + r, rope, kv, expected + r, scales + (r + 63) / 64, codes + r);
    for (size_t i = 0; i < r + rope; i++) {
        equal("latent_load", y[i], expected[i]);
        if (kv == WE_KV_F16) equal("latent_store", ((uint16_t *)(void *)bytes)[i], half_nearest(x[i]));
        if (kv == WE_KV_Q8) equal("latent_store", ((int8_t *)bytes)[i], codes[i]);
    }
    if (kv == WE_KV_F32) same_bits("latent_store", bytes, x, 4 * (r + rope));
    if (kv == WE_KV_Q8)
        same_bits("latent_store", bytes + (r + rope + 1) / 2 * 2, scales, 2 * ((r + 63) / 64 + (rope + 63) / 64));
}

static const size_t widths[][2] = {{8, 0}, {7, 2}, {16, 8}, {77, 20}, {130, 64}, {512, 64}, {1, 0}, {33, 31}};

void check_latents(void)
{
    for (size_t i = 0; i < 8 * 3; i++, release()) {
        latent(widths[i / 3][0], widths[i / 3][1], (we_kv)(i % 3), 1);
        latent(widths[i / 3][0], widths[i / 3][1], (we_kv)(i % 3), 1e-7f);
        latent(widths[i / 3][0], widths[i / 3][1], (we_kv)(i % 3), 0);
        latent(widths[i / 3][0], widths[i / 3][1], (we_kv)(i % 3), 100);
    }
}

/* -------------------------------------------------------------------- MLA ---- */

/* Run with results of its own, which start at patterns. */
static we_mla_args run_mla(we_mla_args a)
{
    a.work = floats(we_mla_work(a.r, a.rope));
    a.o = floats(a.n * a.o_stride);
    a.softmax = floats(2 * a.n * a.heads);
    kernels->mla(&a);
    for (size_t t = 0; t < a.n; t++)
        untouched("mla", a.o + t * a.o_stride + a.heads * a.r, a.o_stride - a.heads * a.r);
    return a;
}

static float *o_of(const we_mla_args *a, size_t i) { return a->o + i / a->heads * a->o_stride + i % a->heads * a->r; }

static void divide_mla(const we_mla_args *a)
{
    for (size_t i = 0; i < a->n * a->heads; i++)
        kernels->divide(o_of(a, i), o_of(a, i), a->softmax[2 * i + 1], a->r);
}

/* Tokens that see nothing of the window of `part` keep their bits; they and their parts are as the contract says. */
static void fold_mla(const we_mla_args *a, const we_mla_args *part)
{
    for (size_t i = 0; i < a->n * a->heads; i++) {
        const int nothing = a->position + i / a->heads < part->begin;
        const float *before = copy(o_of(a, i), 4 * a->r), *softmax = copy(a->softmax + 2 * i, 8);
        kernels->mla_fold(o_of(a, i), a->softmax + 2 * i, o_of(part, i), part->softmax + 2 * i, a->r);
        if (!nothing) continue;
        same_bits("mla_fold", o_of(a, i), before, 4 * a->r);
        same_bits("mla_fold", a->softmax + 2 * i, softmax, 8);
        equal("mla", part->softmax[2 * i], -INFINITY);
        equal("mla", part->softmax[2 * i + 1], 0);
        for (size_t c = 0; c < a->r; c++) equal("mla", o_of(part, i)[c], 0);
    }
}

/* Token by token, heads in two ranges: the bits of all at once. */
static void mla_pieces(const we_mla_args *whole)
{
    const size_t width = whole->r + whole->rope, cut = whole->heads / 3;
    for (size_t i = 0; i < 2 * whole->n; i++) {
        const size_t t = i / 2, first = i % 2 ? cut : 0;
        we_mla_args part = *whole;
        part.n = 1;
        part.position += t;
        part.q += t * whole->q_stride + first * width;
        part.heads = i % 2 ? whole->heads - cut : cut;
        part = run_mla(part);
        same_bits("mla", part.o, o_of(whole, t * whole->heads) + first * part.r, 4 * part.heads * part.r);
        same_bits("mla", part.softmax, whole->softmax + 2 * (t * whole->heads + first), 8 * part.heads);
    }
}

/* Blocks of the latents of `n` positions; seen [n][r + rope] is what they read back as. */
static const void *const *store_latents(size_t n, size_t r, size_t rope, we_kv kv, float *seen)
{
    const size_t n_blocks = (n + WE_LATENT_TILE - 1) / WE_LATENT_TILE, bytes = we_latent_bytes(r, rope, kv);
    void **blocks = edge(n_blocks * sizeof *blocks);
    const float *x = inputs(n * (r + rope), NORMAL);
    for (size_t s = 0; s < n; s++) {
        const size_t b = s / WE_LATENT_TILE, left = n - b * WE_LATENT_TILE;
        if (s % WE_LATENT_TILE == 0) blocks[b] = edge((left < WE_LATENT_TILE ? left : WE_LATENT_TILE) * bytes);
        char *at = (char *)blocks[b] + s % WE_LATENT_TILE * bytes;
        kernels->latent_store(at, x + s * (r + rope), x + s * (r + rope) + r, r, rope, kv);
        kernels->latent_load(seen + s * (r + rope), at, r, rope, kv);
    }
    return (const void *const *)blocks;
}

static void compare_mla(const we_mla_args *a, const float *seen)
{
    const size_t r = a->r, width = r + a->rope, last = a->position + a->n;
    double *score = doubles(last), *exact = doubles(r);
    for (size_t i = 0; i < a->n * a->heads; i++) {
        const size_t visible = a->position + i / a->heads + 1;
        const float *q = a->q + i / a->heads * a->q_stride + i % a->heads * width;
        double largest = -INFINITY, sum = 0, size = 0;
        memset(exact, 0, r * sizeof *exact);
        for (size_t s = 0; s < visible; s++) {
            double dot = 0, magnitude = 0;
            for (size_t c = 0; c < width; c++) {
                dot += (double)q[c] * seen[s * width + c];
                magnitude += fabs((double)q[c] * seen[s * width + c]);
            }
            score[s] = dot * a->scale;
            largest = fmax(largest, score[s]);
            size = fmax(size, magnitude * a->scale);
        }
        double value = 0;
        for (size_t s = 0; s < visible; s++) sum += score[s] = exp(score[s] - largest);
        for (size_t s = 0; s < visible; s++) {
            for (size_t c = 0; c < r; c++) {
                exact[c] += score[s] / sum * seen[s * width + c];
                value = fmax(value, fabs(seen[s * width + c]));
            }
        }
        const double bound = EPS * (size * (double)width / 4 + (double)visible + 16) * value;
        for (size_t c = 0; c < r; c++) within("mla", o_of(a, i)[c], exact[c], bound);
    }
}

/* Windows of `step` positions, each by itself and all folded. */
static void mla_windows(we_mla_args a, size_t step, const float *seen)
{
    a.end = step;
    we_mla_args sum = run_mla(a);
    mla_pieces(&sum);
    for (a.begin = step; a.begin < a.position + a.n + WE_LATENT_TILE; a.begin += step) {      /* the last may be empty */
        a.end = a.begin + step;
        const we_mla_args part = run_mla(a);
        mla_pieces(&part);
        fold_mla(&sum, &part);
    }
    divide_mla(&sum);
    compare_mla(&sum, seen);
}

static void mla(size_t r, size_t rope, we_kv kv, size_t position, size_t n, size_t heads)
{
    const size_t width = r + rope, last = position + n;
    float *seen = floats(last * width);
    we_mla_args a = {.n = n, .position = position, .end = SIZE_MAX, .heads = heads, .q_stride = heads * width + 1,
                     .o_stride = heads * r + 2, .r = r, .rope = rope, .scale = 1 / sqrtf((float)width), .kv = kv};
    a.blocks = store_latents(last, r, rope, kv, seen);
    a.q = inputs(n * a.q_stride, NORMAL);
    const we_mla_args whole = run_mla(a);
    mla_pieces(&whole);
    divide_mla(&whole);
    compare_mla(&whole, seen);
    for (size_t step = WE_LATENT_TILE; step < last + WE_LATENT_TILE; step += WE_LATENT_TILE) mla_windows(a, step, seen);
}

/* Scores far beyond the range of exp: all of the weight on some latents, or equal. */
static void hostile_mla(void)
{
    float *x = memset(floats(70 * 9), 0, 4 * 70 * 9), *q = floats(5 * 9);
    const void *blocks[2] = {x, x + 64 * 9};
    for (size_t s = 0; s < 70; s++) x[s * 9 + s % 9] = s == 66 ? 600 : 300;
    for (size_t i = 0; i < 45; i++) q[i] = 30;
    we_mla_args a = {.q = q, .blocks = blocks, .n = 1, .position = 65, .end = 128, .heads = 5, .q_stride = 45,
                     .o_stride = 45, .r = 9, .scale = 1, .kv = WE_KV_F32};
    we_mla_args all = run_mla(a);
    divide_mla(&all);
    for (size_t i = 0; i < 45; i++)
        within("mla", all.o[i], i % 9 < 3 ? 300 * 8 / 66.0 : 300 * 7 / 66.0, 300 * 82 * EPS);
    a.position = 69;
    all = run_mla(a);
    divide_mla(&all);
    for (size_t i = 0; i < 45; i++) equal("mla", all.o[i], i % 9 == 66 % 9 ? 600 : 0);
    a.begin = 64;
    const we_mla_args late = run_mla(a);
    a.begin = 0;
    a.end = 64;
    const we_mla_args early = run_mla(a);
    fold_mla(&early, &late);
    divide_mla(&early);
    same_bits("mla_fold", early.o, all.o, 4 * 45);
    /* what is not a number stays visible, whichever part it comes from */
    float o[2] = {1, 2}, softmax[2] = {-INFINITY, NAN}, part[2] = {3, 4}, part_softmax[2] = {5, 6};
    kernels->mla_fold(part, part_softmax, o, softmax, 2);
    holds("mla_fold", isnan(part_softmax[1]) && part_softmax[0] == 5, "a part without a number is lost");
}

void check_mla(void)
{
    static const size_t shapes[][3] = {{0, 1, 1}, {0, 5, 3}, {62, 4, 5}, {127, 1, 8}, {63, 66, 2}, {0, 3, 7}};
    const size_t n_widths = full ? 8 : 5;               /* 512 + 64 takes most of the time */
    for (size_t i = 0; i < n_widths * 3 * 6; i++, release()) {
        const size_t n = full || shapes[i % 6][1] < 9 ? shapes[i % 6][1] : 3;
        mla(widths[i / 18][0], widths[i / 18][1], (we_kv)(i / 6 % 3), shapes[i % 6][0], n, shapes[i % 6][2]);
    }
    for (int kv = 0; kv < 3; kv++, release()) mla(512, 64, (we_kv)kv, 66, 2, 5);
    hostile_mla();
}
