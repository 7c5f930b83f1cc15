/* front.c: rows, or pieces of a row, at once, chunk by chunk; the sum alone of a row that somebody holds; and the plain operations. */
#include "backends/cpu/front.h"

#include "backends/cpu/backend.h"
#include "backends/cpu/mathf.h"
#include "kvstream/candidates.h"

#include <string.h>

#define MAX_PIECES 8u /* of a row: each finds best columns of its own, which is most of what a short one costs */

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

/* What is found of a row, piece by piece: whole chunks, in order, of which every thread may take one. */
struct row {
    const float *x;
    uint32_t n_chunks, n_pieces;
    float largest[KVS_FRONT_MAX_CHUNKS];
    double sums[KVS_FRONT_MAX_CHUNKS];
    uint32_t bad[MAX_PIECES]; /* the first column that is no logit, KVS_NONE where all are */
    struct best bests[MAX_PIECES];
};

static void begin_row(struct row *row, const kvs_front_desc *desc, uint32_t index, uint32_t n_pieces)
{
    row->x = desc->rows + index * desc->stride;
    row->n_chunks = (uint32_t)kvs_div_up(desc->n_tokens, KVS_FRONT_CHUNK);
    row->n_pieces = n_pieces < row->n_chunks ? n_pieces : row->n_chunks;
}

/* The first value of [first, end) that is no logit, `end` where there is none. */
static uint32_t look(const kvs_front_ops *ops, const float *x, uint32_t first, uint32_t end, float *largest)
{
    return first + (uint32_t)ops->scan(x + first, end - first, largest);
}

/* Columns of a piece behind the tokens are the last piece's. */
static void run_piece(const kvs_front_ops *ops, const kvs_front_desc *desc, struct row *row, uint32_t piece)
{
    const uint32_t last = row->n_chunks * (piece + 1) / row->n_pieces;
    struct best *best = &row->bests[piece];
    best->n = 0;
    best->most = desc->n_best;
    row->bad[piece] = KVS_NONE;
    for (uint32_t chunk = row->n_chunks * piece / row->n_pieces; chunk < last; chunk++) {
        const uint32_t first = chunk * KVS_FRONT_CHUNK;
        const uint32_t end = desc->n_tokens - first < KVS_FRONT_CHUNK ? desc->n_tokens : first + KVS_FRONT_CHUNK;
        float most = -INFINITY;
        const uint32_t bad = look(ops, row->x, first, end, &most);
        if (bad != end) {
            row->bad[piece] = bad;
            return;
        }
        row->largest[chunk] = most;
        row->sums[chunk] = most > -INFINITY ? sum_exps(ops, row->x + first, end - first, most) : 0.0;
        take_best(ops, best, row->x + first, end - first, first);
    }
    if (piece + 1 == row->n_pieces && desc->n_cols > desc->n_tokens) {
        float ignored;
        const uint32_t bad = look(ops, row->x, desc->n_tokens, desc->n_cols, &ignored);
        row->bad[piece] = bad == desc->n_cols ? KVS_NONE : bad;
    }
}

/* The best of the first piece become those of all. */
static void merge_best(struct row *row)
{
    struct best *best = &row->bests[0];
    for (uint32_t piece = 1; piece < row->n_pieces; piece++) {
        const struct best *more = &row->bests[piece];
        for (uint32_t i = 0; i < more->n; i++) {
            if (best->n == best->most && !(more->values[i] > best->values[best->n - 1])) {
                break;
            }
            insert(best, more->values[i], more->ids[i]);
        }
    }
}

static double sum_of(const struct row *row)
{
    float peak = -INFINITY;
    for (uint32_t i = 0; i < row->n_chunks; i++) {
        peak = row->largest[i] > peak ? row->largest[i] : peak;
    }
    double total = 0.0;
    for (uint32_t i = 0; i < row->n_chunks; i++) {
        if (row->sums[i] != 0.0) {
            total += weighed(row->sums[i], row->largest[i], peak);
        }
    }
    return total;
}

static void finish_row(const kvs_front_desc *desc, struct row *row, uint32_t index)
{
    const uint32_t n_words = 2 * desc->n_best + KVS_FRONT_TAIL;
    uint32_t *out = desc->out + (uint64_t)index * n_words, *tail = out + 2 * desc->n_best;
    memset(out, 0, n_words * sizeof *out);
    tail[KVS_FRONT_BAD] = KVS_NONE;
    for (uint32_t piece = 0; piece < row->n_pieces; piece++) {
        if (row->bad[piece] != KVS_NONE) {
            tail[KVS_FRONT_BAD] = row->bad[piece];
            put_float(out + desc->n_best, row->x[row->bad[piece]]);
            return;
        }
    }
    merge_best(row);
    const struct best *best = &row->bests[0];
    for (uint32_t i = 0; i < best->n; i++) {
        out[i] = best->ids[i];
        put_float(out + desc->n_best + i, best->values[i]);
    }
    tail[KVS_FRONT_COUNT] = best->n;
    const double total = sum_of(row);
    memcpy(tail + KVS_FRONT_SUM, &total, sizeof total);
}

/* ---- rows ---- */

struct run {
    const kvs_front_ops *ops;
    const kvs_front_desc *desc;
    struct row *row; /* that is taken piece by piece */
};

static void piece_task(void *argument, uint32_t piece, uint32_t worker)
{
    (void)worker;
    const struct run *run = argument;
    run_piece(run->ops, run->desc, run->row, piece);
}

static void row_task(void *argument, uint32_t index, uint32_t worker)
{
    (void)worker;
    const struct run *run = argument;
    struct row row;
    begin_row(&row, run->desc, index, 1);
    run_piece(run->ops, run->desc, &row, 0);
    finish_row(run->desc, &row, index);
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

/* Where there are fewer rows than threads, each row is all threads'. */
void kvs_front_run(kvs_threads *threads, uint32_t isa, const kvs_front_desc *desc)
{
    struct row row;
    struct run run = {.ops = ops_for(isa), .desc = desc, .row = &row};
    const uint32_t n_threads = kvs_threads_count(threads);
    if (desc->n_rows >= n_threads) {
        kvs_threads_run(threads, desc->n_rows, row_task, &run);
        return;
    }
    for (uint32_t index = 0; index < desc->n_rows; index++) {
        begin_row(&row, desc, index, n_threads < MAX_PIECES ? n_threads : MAX_PIECES);
        kvs_threads_run(threads, row.n_pieces, piece_task, &run);
        finish_row(desc, &row, index);
    }
}
