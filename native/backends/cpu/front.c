/* front.c: rows one after another, chunk by chunk; the sum alone of a row that somebody holds; and the plain operations. */
#include "backends/cpu/front.h"

#include "backends/cpu/backend.h"
#include "backends/cpu/mathf.h"
#include "kvstream/candidates.h"

#include <string.h>

/* ---- plain operations ---- */

static uint64_t scan_reference(const float *x, uint64_t n, float *largest)
{
    float most = -INFINITY;
    for (uint64_t i = 0; i < n; i++) {
        if (!(x[i] < INFINITY)) {
            return i;
        }
        most = x[i] > most ? x[i] : most;
    }
    *largest = most;
    return n;
}

static void add_exps_reference(const float *x, uint64_t n, float largest, double lanes[KVS_FRONT_LANES])
{
    for (uint64_t i = 0; i < n; i++) {
        lanes[i % KVS_FRONT_LANES] += (double)kvs_expf(x[i] - largest);
    }
}

static uint64_t next_above_reference(const float *x, uint64_t n, uint64_t from, float bound)
{
    while (from < n && !(x[from] > bound)) {
        from++;
    }
    return from;
}

static const kvs_front_ops PLAIN = {
    .scan = scan_reference, .add_exps = add_exps_reference, .next_above = next_above_reference};

static const kvs_front_ops *ops_for(uint32_t isa)
{
#if defined(__x86_64__)
    if (isa >= KVS_ISA_AVX2) {
        return &kvs_front_ops_avx2;
    }
#endif
    (void)isa;
    return &PLAIN;
}

/* ---- a row ---- */

/* The best columns so far, best first. */
struct best {
    float values[KVS_FRONT_MAX_BEST];
    uint32_t ids[KVS_FRONT_MAX_BEST];
    uint32_t n, most;
};

/* Columns come in rising order: a column goes behind all that are equal. */
static void insert(struct best *best, float value, uint32_t id)
{
    uint32_t low = 0, high = best->n;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (best->values[middle] >= value) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    best->n += best->n < best->most;
    memmove(best->values + low + 1, best->values + low, (best->n - 1 - low) * sizeof *best->values);
    memmove(best->ids + low + 1, best->ids + low, (best->n - 1 - low) * sizeof *best->ids);
    best->values[low] = value;
    best->ids[low] = id;
}

static void take_best(const kvs_front_ops *ops, struct best *best, const float *x, uint64_t n, uint32_t first)
{
    uint64_t at = 0;
    while (true) {
        const float bound = best->n < best->most ? -INFINITY : best->values[best->n - 1];
        at = ops->next_above(x, n, at, bound);
        if (at == n) {
            return;
        }
        insert(best, x[at], first + (uint32_t)at);
        at++;
    }
}

static double sum_exps(const kvs_front_ops *ops, const float *x, uint64_t n, float largest)
{
    double lanes[KVS_FRONT_LANES] = {0.0};
    ops->add_exps(x, n, largest, lanes);
    for (uint32_t half = KVS_FRONT_LANES / 2; half != 0; half /= 2) {
        for (uint32_t j = 0; j < half; j++) {
            lanes[j] += lanes[j + half];
        }
    }
    return lanes[0];
}

/* A chunk's part of the row's sum. */
static double weighed(double sum, float largest, float peak)
{
    return sum * (double)kvs_expf(largest - peak);
}

static void put_float(uint32_t *to, float value)
{
    memcpy(to, &value, sizeof value);
}

struct run {
    const kvs_front_ops *ops;
    const kvs_front_desc *desc;
};

static void run_row(void *argument, uint32_t row, uint32_t worker)
{
    (void)worker;
    const struct run *run = argument;
    const kvs_front_desc *desc = run->desc;
    const float *x = desc->rows + row * desc->stride;
    uint32_t *out = desc->out + (uint64_t)row * (2 * desc->n_best + KVS_FRONT_TAIL);
    uint32_t *tail = out + 2 * desc->n_best;
    struct best best;
    best.n = 0;
    best.most = desc->n_best;
    float largest[KVS_FRONT_MAX_CHUNKS];
    double sums[KVS_FRONT_MAX_CHUNKS];
    float peak = -INFINITY;
    uint32_t n_chunks = 0;
    memset(out, 0, (2 * desc->n_best + KVS_FRONT_TAIL) * sizeof *out);
    tail[KVS_FRONT_BAD] = KVS_NONE;
    for (uint32_t first = 0; first < desc->n_tokens; first += KVS_FRONT_CHUNK, n_chunks++) {
        const uint64_t n = desc->n_tokens - first < KVS_FRONT_CHUNK ? desc->n_tokens - first : KVS_FRONT_CHUNK;
        const uint64_t bad = run->ops->scan(x + first, n, &largest[n_chunks]);
        if (bad != n) {
            tail[KVS_FRONT_BAD] = first + (uint32_t)bad;
            break;
        }
        const float most = largest[n_chunks];
        sums[n_chunks] = most > -INFINITY ? sum_exps(run->ops, x + first, n, most) : 0.0;
        peak = most > peak ? most : peak;
        take_best(run->ops, &best, x + first, n, first);
    }
    if (tail[KVS_FRONT_BAD] == KVS_NONE && desc->n_cols > desc->n_tokens) {
        float ignored;
        const uint64_t n = desc->n_cols - desc->n_tokens, bad = run->ops->scan(x + desc->n_tokens, n, &ignored);
        tail[KVS_FRONT_BAD] = bad == n ? KVS_NONE : desc->n_tokens + (uint32_t)bad;
    }
    if (tail[KVS_FRONT_BAD] != KVS_NONE) {
        put_float(out + desc->n_best, x[tail[KVS_FRONT_BAD]]);
        return;
    }
    double total = 0.0;
    for (uint32_t i = 0; i < n_chunks; i++) {
        if (sums[i] != 0.0) {
            total += weighed(sums[i], largest[i], peak);
        }
    }
    for (uint32_t i = 0; i < best.n; i++) {
        out[i] = best.ids[i];
        put_float(out + desc->n_best + i, best.values[i]);
    }
    tail[KVS_FRONT_COUNT] = best.n;
    memcpy(tail + KVS_FRONT_SUM, &total, sizeof total);
}

/* Twice over the row, since nothing holds what the first look finds of each chunk: rows are as wide as they like. */
kvs_status kvs_sum_exps(const float *row, uint64_t n, uint32_t isa, float *largest, double *sum)
{
    if (row == NULL || largest == NULL || sum == NULL || isa > KVS_ISA_AVX2) {
        return KVS_EINVAL;
    }
    const bool has_avx2 = kvs_cpu_isa_detect() >= KVS_ISA_AVX2;
    if (isa == KVS_ISA_AVX2 && !has_avx2) {
        return KVS_EUNSUPPORTED;
    }
    const kvs_front_ops *ops = ops_for(isa == KVS_ISA_BEST && has_avx2 ? KVS_ISA_AVX2 : isa);
    float peak;
    if (ops->scan(row, n, &peak) != n || !(peak > -INFINITY)) {
        return KVS_EINVAL;
    }
    double total = 0.0;
    for (uint64_t first = 0; first < n; first += KVS_FRONT_CHUNK) {
        const uint64_t n_chunk = n - first < KVS_FRONT_CHUNK ? n - first : KVS_FRONT_CHUNK;
        float most = -INFINITY;
        (void)ops->scan(row + first, n_chunk, &most);
        if (most > -INFINITY) {
            total += weighed(sum_exps(ops, row + first, n_chunk, most), most, peak);
        }
    }
    *largest = peak;
    *sum = total;
    return KVS_OK;
}

void kvs_front_run(kvs_threads *threads, uint32_t isa, const kvs_front_desc *desc)
{
    struct run run = {.ops = ops_for(isa), .desc = desc};
    kvs_threads_run(threads, desc->n_rows, run_row, &run);
}
