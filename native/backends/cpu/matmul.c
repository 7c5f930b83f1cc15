/* matmul.c: how a matmul is cut into tasks. No arithmetic of its own.
 *
 * First the rows of x are normed and quantized once, then tasks of some panels by some rows are claimed. A panel is read
 * from memory once per block of rows and stays in the first-level cache while the tiles of the block pass over it.
 */
#include "backends/cpu/matmul.h"

#include "backends/cpu/elementwise_rows.h"
#include "backends/cpu/matmul_kernels.h"
#include "base/internal.h"

#include <string.h>

#define LANES KVS_PANEL_ROWS
#define PAIR 2u            /* panels to a kernel call */
#define BLOCK_TILES 8u     /* 64 rows of codes stay in the second-level cache */
/* Short tasks, so that no thread waits long for the last one. A thread's tasks lie one behind another, so what each reads
 * ahead is the next one's. */
#define TASKS_PER_THREAD 16u
#define CHUNK_SLOTS 16u
#define WIDE_ROWS 8u       /* from here on the rows are prepared by all threads */

typedef struct matmul_run {
    const kvs_matmul_desc *desc;
    const kvs_matmul_kernels *kernels;
    const kvs_row_ops *row_ops;
    kvs_panel_layout layout[KVS_MATMUL_PARTS];
    uint64_t n_pairs[KVS_MATMUL_PARTS]; /* pairs of panels, the last perhaps a single one */
    uint64_t n_slots;                   /* pairs of all parts; with swiglu those of the gate */
    uint64_t chunk_slots;               /* slots to a task */
    uint64_t n_chunks;
    uint32_t n_tiles;
    bool has_quantized;
    const float *x; /* normed, if there is a norm */
    uint64_t x_stride;
    kvs_act_group *tiles;
    uint64_t tile_groups; /* records of a whole tile */
} matmul_run;

typedef struct workspace_layout {
    uint64_t row_values; /* of the normed copy */
    uint64_t tiles;      /* offset */
    uint64_t bytes;
} workspace_layout;

static kvs_status lay_out_workspace(uint64_t k, uint32_t n_rows, workspace_layout *workspace)
{
    if (k == 0 || n_rows == 0 || n_rows > KVS_MATMUL_ROWS) {
        return KVS_EINVAL;
    }
    uint64_t values, groups;
    if (!kvs_align_up(k, LANES, &workspace->row_values) ||
        !kvs_mul_u64(workspace->row_values, n_rows * sizeof(float), &values) ||
        !kvs_mul_u64(kvs_div_up(k, KVS_GROUP), n_rows * sizeof(kvs_act_group), &groups) ||
        !kvs_add_u64(values, groups, &workspace->bytes)) {
        return KVS_EOVERFLOW;
    }
    workspace->tiles = values;
    return KVS_OK;
}

kvs_status kvs_matmul_workspace_bytes(uint64_t k, uint32_t n_rows, uint64_t *bytes)
{
    workspace_layout workspace;
    kvs_status status = lay_out_workspace(k, n_rows, &workspace);
    if (status == KVS_OK) {
        *bytes = workspace.bytes;
    }
    return status;
}

static uint32_t tile_rows(const matmul_run *run, uint32_t tile)
{
    uint32_t left = run->desc->n_rows - tile * KVS_TILE_ROWS;
    return left < KVS_TILE_ROWS ? left : KVS_TILE_ROWS;
}

/* Task: norm and quantize the rows of one tile. */
static void prepare_tile(void *argument, uint32_t tile, uint32_t worker)
{
    (void)worker;
    const matmul_run *run = argument;
    const kvs_matmul_desc *desc = run->desc;
    const uint32_t n_rows = tile_rows(run, tile);
    for (uint32_t r = 0; r < n_rows; r++) {
        uint64_t row = tile * KVS_TILE_ROWS + r;
        const float *x = desc->x + row * desc->x_stride;
        if (desc->norm_weight != NULL) {
            float *normed = (float *)desc->workspace + row * run->x_stride;
            run->row_ops->rms_norm(x, desc->norm_weight, desc->k, desc->norm_eps, normed);
            x = normed;
        }
        if (run->has_quantized) {
            run->kernels->quantize(x, desc->k, run->tiles + tile * run->tile_groups + r, n_rows);
        }
    }
}

static kvs_panel_run find_panels(const matmul_run *run, uint32_t part, uint64_t panel, uint32_t n_panels)
{
    const kvs_panel_layout *layout = &run->layout[part];
    const uint8_t *panels = (const uint8_t *)run->desc->part[part].panels + panel * layout->panel_bytes;
    return (kvs_panel_run){layout, panels, n_panels, true};
}

static void sum_tile(const matmul_run *run, const kvs_panel_run *panels, uint32_t tile, float *sums)
{
    const uint32_t n_rows = tile_rows(run, tile);
    if (panels->layout->n_groups != 0) {
        run->kernels->quantized(panels, run->tiles + tile * run->tile_groups, n_rows, sums);
    } else {
        const float *x = run->x + (uint64_t)tile * KVS_TILE_ROWS * run->x_stride;
        run->kernels->floats(panels, x, run->x_stride, n_rows, sums);
    }
}

/* Sums of one panel, whose first lane is output value `first`, by the scales of their runs of output values. */
static void scale_panel(const kvs_matmul_part *part, uint64_t first, uint32_t n_rows, float *sums)
{
    const uint64_t run_values = part->n / part->n_scales;
    for (uint32_t lane = 0; lane < LANES && first + lane < part->n; lane++) {
        const float scale = part->scales[(first + lane) / run_values];
        for (uint32_t r = 0; r < n_rows; r++) {
            sums[r * LANES + lane] *= scale;
        }
    }
}

/* Sums of panels `panel` and, perhaps, the next with a tile, scaled. */
static void sum_part(const matmul_run *run, uint32_t part_index, const kvs_panel_run *panels, uint64_t panel,
                     uint32_t tile, float *sums)
{
    const kvs_matmul_part *part = &run->desc->part[part_index];
    const uint32_t n_rows = tile_rows(run, tile);
    sum_tile(run, panels, tile, sums);
    for (uint32_t p = 0; part->scales != NULL && p < panels->n_panels; p++) {
        scale_panel(part, (panel + p) * LANES, n_rows, sums + p * n_rows * LANES);
    }
}

/* Bias of 16 lanes, padded where the part ends inside them. */
static const float *lane_bias(const kvs_matmul_part *part, uint64_t first, uint32_t n_lanes, float padded[LANES])
{
    if (part->bias == NULL || n_lanes == LANES) {
        return part->bias != NULL ? part->bias + first : NULL;
    }
    memset(padded, 0, LANES * sizeof *padded);
    memcpy(padded, part->bias + first, n_lanes * sizeof *padded);
    return padded;
}

typedef struct store_source {
    const float *sums; /* [row][16] */
    const float *bias;
} store_source;

/* 16 lanes of one row to `out`; `up` is used by swiglu alone. */
static void store_row(const matmul_run *run, store_source y, store_source up, uint32_t row, float *out)
{
    const float *sums = y.sums + row * LANES;
    switch (run->desc->epilogue) {
    case KVS_EPILOGUE_NONE:
        run->kernels->store(sums, y.bias, out);
        break;
    case KVS_EPILOGUE_ADD:
        run->kernels->store_add(sums, y.bias, out);
        break;
    default:
        run->kernels->store_swiglu(sums, y.bias, up.sums + row * LANES, up.bias, out);
        break;
    }
}

static void store_panel(const matmul_run *run, uint32_t part_index, uint64_t panel, uint32_t tile, const float *sums,
                        const float *up_sums)
{
    const kvs_matmul_part *part = &run->desc->part[part_index];
    const uint64_t first = panel * LANES;
    const uint32_t n_lanes = part->n - first < LANES ? (uint32_t)(part->n - first) : LANES;
    const uint32_t n_rows = tile_rows(run, tile);
    float padded[2][LANES];
    store_source y = {sums, lane_bias(part, first, n_lanes, padded[0])};
    store_source up = {up_sums, up_sums != NULL ? lane_bias(&run->desc->part[1], first, n_lanes, padded[1]) : NULL};
    for (uint32_t r = 0; r < n_rows; r++) {
        float *out = part->out + ((uint64_t)tile * KVS_TILE_ROWS + r) * part->out_stride + first;
        if (n_lanes == LANES) {
            store_row(run, y, up, r, out);
            continue;
        }
        float whole[LANES] = {0};
        memcpy(whole, out, n_lanes * sizeof *whole);
        store_row(run, y, up, r, whole);
        memcpy(out, whole, n_lanes * sizeof *whole);
    }
}

/* One pair of panels over the tiles of a block. */
static void do_slot(const matmul_run *run, uint64_t slot, uint32_t first_tile, uint32_t end_tile)
{
    const bool is_swiglu = run->desc->epilogue == KVS_EPILOGUE_SWIGLU;
    uint32_t part = 0;
    while (slot >= run->n_pairs[part]) {
        slot -= run->n_pairs[part];
        part++;
    }
    const uint64_t panel = slot * PAIR;
    const uint64_t n_left = kvs_panel_count(run->desc->part[part].n) - panel;
    const uint32_t n_panels = n_left < PAIR ? (uint32_t)n_left : PAIR;
    _Alignas(64) float sums[PAIR * KVS_TILE_ROWS * LANES];
    _Alignas(64) float up_sums[PAIR * KVS_TILE_ROWS * LANES];
    kvs_panel_run panels = find_panels(run, part, panel, n_panels);
    kvs_panel_run up_panels = is_swiglu ? find_panels(run, 1, panel, n_panels) : panels;
    for (uint32_t tile = first_tile; tile < end_tile; tile++) {
        const uint32_t panel_sums = tile_rows(run, tile) * LANES;
        panels.is_first = up_panels.is_first = tile == first_tile;
        sum_part(run, part, &panels, panel, tile, sums);
        if (is_swiglu) {
            sum_part(run, 1, &up_panels, panel, tile, up_sums);
        }
        for (uint32_t p = 0; p < n_panels; p++) {
            store_panel(run, part, panel + p, tile, sums + p * panel_sums,
                        is_swiglu ? up_sums + p * panel_sums : NULL);
        }
    }
}

/* Task: chunk by block. Blocks change fastest, so that neighbours in time read the same panels. */
static void do_chunk(void *argument, uint32_t index, uint32_t worker)
{
    (void)worker;
    const matmul_run *run = argument;
    const uint32_t n_blocks = (run->n_tiles + BLOCK_TILES - 1) / BLOCK_TILES;
    const uint32_t first_tile = index % n_blocks * BLOCK_TILES;
    const uint32_t end_tile = first_tile + BLOCK_TILES < run->n_tiles ? first_tile + BLOCK_TILES : run->n_tiles;
    const uint64_t first = index / n_blocks * run->chunk_slots;
    const uint64_t end = first + run->chunk_slots < run->n_slots ? first + run->chunk_slots : run->n_slots;
    for (uint64_t slot = first; slot < end; slot++) {
        do_slot(run, slot, first_tile, end_tile);
    }
}

static bool is_shape_valid(const kvs_matmul_desc *desc)
{
    if (desc->n_parts == 0 || desc->n_parts > KVS_MATMUL_PARTS || desc->epilogue > KVS_EPILOGUE_SWIGLU) {
        return false;
    }
    for (uint32_t i = 0; i < desc->n_parts; i++) {
        const kvs_matmul_part *part = &desc->part[i];
        if (part->n == 0 || (part->scales != NULL && (part->n_scales == 0 || part->n % part->n_scales != 0))) {
            return false;
        }
    }
    return desc->epilogue != KVS_EPILOGUE_SWIGLU || (desc->n_parts == 2 && desc->part[0].n == desc->part[1].n);
}

static const kvs_matmul_kernels *kernels_for(uint32_t isa)
{
#if defined(__x86_64__)
    if (isa == KVS_ISA_AVX512) {
        return &kvs_matmul_kernels_avx512;
    }
    if (isa == KVS_ISA_AVX2) {
        return &kvs_matmul_kernels_avx2;
    }
#endif
    (void)isa;
    return &kvs_matmul_kernels_reference;
}

static kvs_status lay_out_parts(matmul_run *run)
{
    const kvs_matmul_desc *desc = run->desc;
    const bool is_swiglu = desc->epilogue == KVS_EPILOGUE_SWIGLU;
    for (uint32_t i = 0; i < desc->n_parts; i++) {
        kvs_status status = kvs_panel_layout_make(desc->part[i].type, desc->k, &run->layout[i]);
        if (status != KVS_OK) {
            return status;
        }
        run->has_quantized = run->has_quantized || run->layout[i].n_groups != 0;
        run->n_pairs[i] = kvs_div_up(kvs_panel_count(desc->part[i].n), PAIR);
        run->n_slots += is_swiglu && i != 0 ? 0 : run->n_pairs[i];
    }
    return KVS_OK;
}

static void cut_chunks(matmul_run *run, uint32_t n_threads)
{
    const uint64_t n_tasks = (uint64_t)n_threads * TASKS_PER_THREAD;
    const uint64_t even = kvs_div_up(run->n_slots, n_tasks);
    run->chunk_slots = even < CHUNK_SLOTS ? even : CHUNK_SLOTS;
    run->n_chunks = kvs_div_up(run->n_slots, run->chunk_slots);
}

kvs_status kvs_matmul_run(kvs_threads *threads, uint32_t isa, const kvs_matmul_desc *desc)
{
    if (!is_shape_valid(desc)) {
        return KVS_EINVAL;
    }
    matmul_run run = {.desc = desc, .kernels = kernels_for(isa), .row_ops = kvs_row_ops_for(isa)};
    workspace_layout workspace;
    kvs_status status = lay_out_workspace(desc->k, desc->n_rows, &workspace);
    if (status == KVS_OK) {
        status = lay_out_parts(&run);
    }
    if (status != KVS_OK) {
        return status;
    }
    if (desc->workspace_bytes < workspace.bytes) {
        return KVS_ENOSPACE;
    }
    const bool has_norm = desc->norm_weight != NULL;
    run.x = has_norm ? desc->workspace : desc->x;
    run.x_stride = has_norm ? workspace.row_values : desc->x_stride;
    run.tiles = (kvs_act_group *)((uint8_t *)desc->workspace + workspace.tiles);
    run.tile_groups = desc->k / KVS_GROUP * KVS_TILE_ROWS;
    run.n_tiles = (desc->n_rows + KVS_TILE_ROWS - 1) / KVS_TILE_ROWS;
    cut_chunks(&run, kvs_threads_count(threads));
    if (has_norm || run.has_quantized) {
        kvs_threads_run(threads, run.n_tiles, prepare_tile, &run);
    }
    const uint64_t n_blocks = kvs_div_up(run.n_tiles, BLOCK_TILES);
    kvs_threads_run_stretches(threads, (uint32_t)(run.n_chunks * n_blocks), do_chunk, &run);
    return KVS_OK;
}
