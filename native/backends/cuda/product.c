/* product.c: which kernels a product of activations and weights takes. Quantized parts share one launch. */
#include "backends/cuda/product.h"

#include "kernels/act_record.h"
#include "kernels/attend_params.h"
#include "kernels/tile_record.h"
#include "kernels/weight_form.h"
#include "kernels/weight_ring.h"

#define ALIGNMENT 64u
#define ATOM_THREADS 1024u
#define UNIT_THREADS 256u /* act_unit.cuh */
#define UNIT_VALUES 1024u
#define MATMUL_THREADS 256u
#define FLOAT_THREADS 128u
#define FLOAT_COLUMNS 4u /* to a block */
#define GLU_THREADS 256u
#define FOLD_THREADS 256u
#define NARROW_ROWS 16u  /* up to here a block takes one or two panels and all rows */
#define NARROW_BLOCKS 2u /* to a multiprocessor */
#define ONE_ROW_BLOCKS 3u
#define NARROW_PANELS 2u
#define FEW_PANELS 640u  /* below, a block takes one at a time: not how many multiprocessors there are, for it names a kernel */
#define RING_STAGES 2u   /* of a warp, where they fit */
#define BLOCK_BYTES 1024u /* of shared memory that a block takes besides what it asks for */
#define WIDE_ROWS 64u    /* of a block that takes several */
#define WIDE_PANELS 8u
#define TILES_ARCH 80u
#define GROUPS_ARCH 90u /* where four warps multiply together */
#define TILE_SIZES 4u
#define NARROW_TILE_SIZES 2u /* before GROUPS_ARCH */
#define TILE_DECODING 40u    /* what weights cost a block beside its rows, in rows */
#define TILE_ROW_BYTES 640u /* of shared memory */
#define SLICES 8u        /* weight_product.cuh */
/* So many blocks leave most of a large card idle, so that slices are taken apart. It bounds what partial sums take: 16 MiB. */
#define SPLIT_BLOCKS 64u

uint64_t kvs_cuda_act_groups(uint64_t k)
{
    return kvs_div_up(kvs_div_up(k, KVS_FORM_GROUP_VALUES), 2) * 2;
}

bool kvs_cuda_act_bytes(uint64_t k, uint64_t n_rows, uint64_t *bytes)
{
    uint64_t tile_bytes;
    return kvs_mul_u64(kvs_cuda_act_groups(k), KVS_ACT_RECORD_BYTES, &tile_bytes) &&
           kvs_mul_u64(tile_bytes, kvs_div_up(n_rows, KVS_ACT_TILE), bytes);
}

bool kvs_cuda_has_tiles(const kvs_cuda_launcher *launcher)
{
    return launcher->arch >= TILES_ARCH;
}

bool kvs_cuda_atom_bytes(uint64_t k, uint64_t n_rows, uint64_t *bytes)
{
    const uint64_t n_blocks = kvs_cuda_act_groups(k) * KVS_FORM_GROUP_VALUES / KVS_TILE_VALUES;
    uint64_t block_bytes;
    return kvs_mul_u64(kvs_div_up(n_rows, KVS_TILE_SLOTS), KVS_TILE_ATOM_BYTES, &block_bytes) &&
           kvs_mul_u64(n_blocks, block_bytes, bytes);
}

bool kvs_cuda_needs_up(int gate_type, int up_type)
{
    return gate_type != up_type || kvs_form_is_float(gate_type);
}

bool kvs_cuda_reserve(uint64_t *end, uint64_t n, uint64_t item_bytes, uint64_t *offset)
{
    uint64_t bytes;
    *offset = *end;
    return kvs_mul_u64(n, item_bytes, &bytes) && kvs_add_u64(*end, bytes, &bytes) && kvs_align_up(bytes, ALIGNMENT, end);
}

kvs_status kvs_cuda_quantize(kvs_cuda_launcher *launcher, const kvs_act_params *params)
{
    static const kvs_cuda_key key = {.source = "act_quantize", .kernel = "act_quantize", .waits = true};
    const uint64_t n_values = (uint64_t)params->n_groups * KVS_FORM_GROUP_VALUES;
    const kvs_cuda_dim grid = {params->n_slots, (uint32_t)kvs_div_up(n_values, UNIT_VALUES), 1};
    return kvs_cuda_launch(launcher, &key, grid, (kvs_cuda_dim){UNIT_THREADS, 1, 1}, 0, params, sizeof *params);
}

static kvs_status make_atoms(kvs_cuda_launcher *launcher, const kvs_act_params *params)
{
    static const kvs_cuda_key key = {.source = "act_tile", .kernel = "act_tile", .waits = true};
    return kvs_cuda_launch(launcher, &key, (kvs_cuda_dim){params->n_slots, 1, 1}, (kvs_cuda_dim){ATOM_THREADS, 1, 1}, 0,
                           params, sizeof *params);
}

static uint32_t scale_run(const kvs_cuda_factor *part)
{
    return part->n_scales == 0 ? 1 : (uint32_t)(part->n / part->n_scales);
}

/* How a launch is cut. Every way gives a row the same bits. */
typedef enum cut {
    CUT_NARROW, /* a block to one or two panels and all rows, a warp to a slice */
    CUT_WIDE,   /* a block to eight panels and 64 rows */
    CUT_SPLIT   /* the same, with blocks for each slice, and a kernel that adds them up */
} cut;

/* Blocks of eight panels by 64 rows. */
static uint64_t wide_blocks(uint64_t n_eights, uint64_t n_rows)
{
    return n_eights * kvs_div_up(n_rows, WIDE_ROWS);
}

static cut choose_cut(uint64_t n_eights, uint64_t n_rows)
{
    if (n_rows <= NARROW_ROWS) {
        return CUT_NARROW;
    }
    return wide_blocks(n_eights, n_rows) <= SPLIT_BLOCKS ? CUT_SPLIT : CUT_WIDE;
}

static uint64_t eights_of(uint64_t n)
{
    return kvs_div_up(n, (uint64_t)KVS_FORM_ROWS * WIDE_PANELS);
}

uint64_t kvs_cuda_partial_bytes(const kvs_cuda_factor *parts, uint32_t n_parts, uint64_t max_rows)
{
    uint64_t n_eights = 0, n_columns = 0;
    for (uint32_t i = 0; i < n_parts; i++) {
        if (!kvs_form_is_float(parts[i].type)) {
            n_eights += eights_of(parts[i].n);
            n_columns += kvs_div_up(parts[i].n, KVS_FORM_ROWS) * KVS_FORM_ROWS;
        }
    }
    if (n_eights == 0 || n_eights > SPLIT_BLOCKS || max_rows <= NARROW_ROWS) {
        return 0;
    }
    const uint64_t most = SPLIT_BLOCKS / n_eights * WIDE_ROWS;
    return SLICES * n_columns * (max_rows < most ? max_rows : most) * sizeof(float);
}

static kvs_matmul_part_params part_params(const kvs_cuda_factor *part)
{
    return (kvs_matmul_part_params){.panels = part->address,
                                    .out = part->out,
                                    .scales = part->scales,
                                    .n = (uint32_t)part->n,
                                    .n_panels = (uint32_t)kvs_div_up(part->n, KVS_FORM_ROWS),
                                    .out_stride = part->out_stride,
                                    .scale_run = scale_run(part)};
}

/* A launch of quantized parts. */
typedef struct quantized {
    kvs_matmul_params params;
    kvs_cuda_macro types[KVS_MATMUL_MAX_PARTS];
    uint64_t n_panels; /* of the parts that have blocks of their own */
    uint64_t n_eights; /* likewise */
    uint64_t all_eights;
    bool is_swiglu;
    bool has_experts;
} quantized;

static quantized quantized_parts(const kvs_cuda_product *product)
{
    static const char *const names[KVS_MATMUL_MAX_PARTS] = {"KVS_T0", "KVS_T1", "KVS_T2", "KVS_T3"};
    quantized q = {.is_swiglu = product->epilogue == KVS_STORE_SWIGLU, .has_experts = product->tile_experts != 0};
    q.params = (kvs_matmul_params){.records = product->records,
                                   .tile_experts = product->tile_experts,
                                   .n_tiles_used = product->n_tiles_used,
                                   .partials = product->partials,
                                   .n_rows = product->n_rows,
                                   .n_groups = (uint32_t)kvs_cuda_act_groups(product->k),
                                   .epilogue = product->epilogue};
    for (uint32_t i = 0; i < product->n_parts; i++) {
        const kvs_cuda_factor *part = &product->part[i];
        if (!kvs_form_is_float(part->type)) {
            const bool has_blocks = !q.is_swiglu || i == 0;
            q.types[q.params.n_parts] = (kvs_cuda_macro){names[q.params.n_parts], part->type};
            q.params.part[q.params.n_parts] = part_params(part);
            q.n_panels += has_blocks ? q.params.part[q.params.n_parts].n_panels : 0;
            q.n_eights += has_blocks ? eights_of(part->n) : 0;
            q.all_eights += eights_of(part->n);
            q.params.n_parts++;
        }
    }
    for (uint32_t i = q.params.n_parts; i < KVS_MATMUL_MAX_PARTS; i++) {
        q.types[i] = (kvs_cuda_macro){names[i], q.types[0].value};
    }
    return q;
}

typedef struct launch_shape {
    uint64_t n_blocks;
    uint32_t n_slices; /* apart */
    uint32_t shared_bytes;
} launch_shape;

static kvs_status too_large(kvs_cuda_launcher *launcher, const quantized *q)
{
    return kvs_fail(launcher->device, KVS_EUNSUPPORTED, "a matmul of %u rows by %u output values is too large", q->params.n_rows,
                    q->params.part[0].n);
}

static kvs_status launch_quantized(kvs_cuda_launcher *launcher, const quantized *q, const kvs_cuda_key *key, launch_shape shape)
{
    if (shape.n_blocks > INT32_MAX) {
        return too_large(launcher, q);
    }
    return kvs_cuda_launch(launcher, key, (kvs_cuda_dim){(uint32_t)shape.n_blocks, shape.n_slices, 1},
                           (kvs_cuda_dim){MATMUL_THREADS, 1, 1}, shape.shared_bytes, &q->params, sizeof q->params);
}

/* How a narrow launch is shaped; every shape gives the same bits. What names a kernel depends on neither k nor multiprocessors. */
typedef struct narrow_shape {
    uint32_t rows;     /* room for so many */
    uint32_t panels;   /* at a time */
    uint32_t n_stages;
    uint32_t n_blocks; /* to a multiprocessor */
    uint32_t shared_bytes;
} narrow_shape;

static uint32_t largest_stage(const quantized *q, uint32_t panels)
{
    uint32_t bytes = 0;
    for (uint32_t i = 0; i < KVS_MATMUL_MAX_PARTS; i++) {
        const uint32_t mine = kvs_stage_bytes(q->types[i].value, panels);
        bytes = mine > bytes ? mine : bytes;
    }
    return bytes;
}

/* Of the one row, for all groups. */
static uint32_t row_bytes(const quantized *q)
{
    bool has_halves = false;
    for (uint32_t i = 0; i < KVS_MATMUL_MAX_PARTS; i++) {
        has_halves = has_halves || kvs_form_is_halved(q->types[i].value);
    }
    const uint64_t bytes = (uint64_t)q->params.n_groups * kvs_row_group_bytes(has_halves);
    return bytes < UINT32_MAX / 2 ? (uint32_t)bytes : UINT32_MAX / 2;
}

/* A ring of two stages, or where a block has no room for them, of one, which waits for every one. */
static narrow_shape shape_of(const kvs_cuda_launcher *launcher, const quantized *q, uint32_t panels, uint32_t rows)
{
    const uint32_t stage_bytes = SLICES * largest_stage(q, panels), n_rooms = rows == 1 ? 2 : 1;
    const uint32_t n_panels = q->is_swiglu ? NARROW_PANELS : panels;
    const uint32_t sums_bytes = n_rooms * SLICES * n_panels * rows * KVS_FORM_ROWS * (uint32_t)sizeof(float);
    narrow_shape shape = {.rows = rows, .panels = panels, .n_blocks = rows == 1 ? ONE_ROW_BLOCKS : NARROW_BLOCKS};
    shape.n_stages = sums_bytes + RING_STAGES * stage_bytes + BLOCK_BYTES <= launcher->shared_bytes ? RING_STAGES : 1;
    shape.shared_bytes = shape.n_stages * stage_bytes + sums_bytes + (rows == 1 ? row_bytes(q) : 0);
    const uint32_t fitting = launcher->shared_bytes / (shape.shared_bytes + BLOCK_BYTES);
    shape.n_blocks = fitting == 0 ? 1 : fitting < shape.n_blocks ? fitting : shape.n_blocks;
    return shape;
}

/* Of several rows: one panel at a time where there are few, or where the rings of two leave no room for a second block. */
static narrow_shape several_rows(const kvs_cuda_launcher *launcher, const quantized *q, uint32_t rows)
{
    narrow_shape shape = shape_of(launcher, q, q->is_swiglu || q->n_panels >= FEW_PANELS ? NARROW_PANELS : 1, rows);
    if (shape.n_blocks < NARROW_BLOCKS || shape.n_stages != RING_STAGES) {
        shape = shape_of(launcher, q, 1, rows);
    }
    return shape;
}

static narrow_shape choose_shape(const kvs_cuda_launcher *launcher, const quantized *q)
{
    if (q->params.n_rows == 1 && !q->has_experts) {
        const narrow_shape shape = shape_of(launcher, q, 1, 1);
        if (shape.shared_bytes <= launcher->shared_bytes) {
            return shape;
        }
        return several_rows(launcher, q, KVS_ACT_TILE); /* the row is longer than what a block can keep */
    }
    const bool is_one_tile = q->has_experts || q->params.n_rows <= KVS_ACT_TILE;
    const narrow_shape shape = several_rows(launcher, q, is_one_tile ? KVS_ACT_TILE : NARROW_ROWS);
    /* Gate and up of 16 rows take 68.5 KiB of some types, a block of sm_75 has 64: tiles of rows apart. */
    return shape.shared_bytes <= launcher->shared_bytes ? shape : several_rows(launcher, q, KVS_ACT_TILE);
}

/* Records that a launch forms for itself, or none. */
static kvs_status run_narrow(kvs_cuda_launcher *launcher, quantized *q, const kvs_act_params *rows)
{
    const narrow_shape shape = choose_shape(launcher, q);
    const kvs_cuda_key key = {.source = "matmul",
                              .kernel = "matmul",
                              .waits = true,
                              .n_macros = 8,
                              .macros = {q->types[0],
                                         q->types[1],
                                         q->types[2],
                                         q->types[3],
                                         {"KVS_KIND", q->is_swiglu + 2 * q->has_experts},
                                         {"KVS_ROWS", (int32_t)shape.rows},
                                         {"KVS_PANELS", (int32_t)shape.panels},
                                         {"KVS_STAGES", (int32_t)shape.n_stages}}};
    uint64_t n_items = 0;
    for (uint32_t i = 0; i < (q->is_swiglu ? 1 : q->params.n_parts); i++) {
        n_items += kvs_div_up(q->params.part[i].n_panels, q->is_swiglu ? 1 : shape.panels);
    }
    q->params.n_row_tiles = (uint32_t)kvs_div_up(q->params.n_rows, shape.rows);
    n_items *= q->params.n_row_tiles;
    if (n_items > INT32_MAX) {
        return too_large(launcher, q);
    }
    q->params.n_items = (uint32_t)n_items;
    const uint64_t most = (uint64_t)shape.n_blocks * launcher->n_sm;
    kvs_matmul_narrow_params params = {.product = q->params};
    if (rows != NULL) {
        params.rows = *rows;
    }
    const kvs_cuda_dim grid = {(uint32_t)(n_items < most ? n_items : most), 1, 1};
    return kvs_cuda_launch(launcher, &key, grid, (kvs_cuda_dim){MATMUL_THREADS, 1, 1}, shape.shared_bytes, &params, sizeof params);
}

/* Apart, both parts of a swiglu have blocks of their own. */
static kvs_status run_wide(kvs_cuda_launcher *launcher, quantized *q, bool is_split)
{
    const kvs_cuda_key key = {
        .source = "matmul_wide",
        .kernel = "matmul_wide",
        .n_macros = 6,
        .macros = {q->types[0],
                   q->types[1],
                   q->types[2],
                   q->types[3],
                   {"KVS_SWIGLU", q->is_swiglu && !is_split},
                   {"KVS_SPLIT", is_split}}};
    q->params.n_row_tiles = (uint32_t)kvs_div_up(q->params.n_rows, WIDE_ROWS);
    const uint64_t n_eights = is_split ? q->all_eights : q->n_eights;
    return launch_quantized(launcher, q, &key,
                            (launch_shape){.n_blocks = n_eights * q->params.n_row_tiles,
                                           .n_slices = is_split ? SLICES : 1});
}

/* Rows of a block. */
static const uint32_t TILE_ROWS[TILE_SIZES] = {64, 128, 176, 256};

static uint32_t tile_sizes(const kvs_cuda_launcher *launcher)
{
    return launcher->arch == GROUPS_ARCH ? TILE_SIZES : NARROW_TILE_SIZES;
}

/* Blocks that follow one another on a multiprocessor, times what one takes: the size that is done first. */
static uint32_t choose_tile(const kvs_cuda_launcher *launcher, uint64_t n_tiles, uint32_t n_rows)
{
    const uint64_t n_sm = launcher->n_sm == 0 ? 1 : launcher->n_sm;
    uint32_t best = 0;
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < tile_sizes(launcher); i++) {
        const uint64_t rounds = kvs_div_up(n_tiles * kvs_div_up(n_rows, TILE_ROWS[i]), n_sm);
        const uint64_t cost = rounds * (TILE_ROWS[i] + TILE_DECODING);
        if (cost < least) {
            least = cost;
            best = i;
        }
    }
    return TILE_ROWS[best];
}

static kvs_status launch_tiles(kvs_cuda_launcher *launcher, quantized *q, uint64_t n_tiles, uint32_t rows)
{
    const kvs_cuda_key key = {
        .source = "matmul_tile",
        .kernel = "matmul_tile",
        .n_macros = 6,
        .macros = {q->types[0],
                   q->types[1],
                   q->types[2],
                   q->types[3],
                   {"KVS_SWIGLU", q->is_swiglu},
                   {"KVS_ROWS", (int32_t)rows}}};
    q->params.n_row_tiles = (uint32_t)kvs_div_up(q->params.n_rows, rows);
    return launch_quantized(launcher, q, &key,
                            (launch_shape){.n_blocks = n_tiles * q->params.n_row_tiles,
                                           .n_slices = 1,
                                           .shared_bytes = rows * TILE_ROW_BYTES + KVS_TILE_ATOM_BYTES});
}

/* With swiglu a block takes four panels of both parts. Every size gives a row the same bits; dry, all are asked for. */
static kvs_status run_tiles(kvs_cuda_launcher *launcher, quantized *q)
{
    const uint64_t n_tiles = q->is_swiglu ? kvs_div_up(q->params.part[0].n_panels, WIDE_PANELS / 2) : q->n_eights;
    if (!launcher->is_dry) {
        return launch_tiles(launcher, q, n_tiles, choose_tile(launcher, n_tiles, q->params.n_rows));
    }
    kvs_status status = KVS_OK;
    for (uint32_t i = 0; status == KVS_OK && i < tile_sizes(launcher); i++) {
        status = launch_tiles(launcher, q, n_tiles, TILE_ROWS[i]);
    }
    return status;
}

static kvs_status fold_slices(kvs_cuda_launcher *launcher, const quantized *q)
{
    static const kvs_cuda_key key = {.source = "matmul_fold", .kernel = "matmul_fold", .waits = true};
    uint64_t n_columns = 0;
    for (uint32_t i = 0; i < (q->is_swiglu ? 1 : q->params.n_parts); i++) {
        n_columns += (uint64_t)q->params.part[i].n_panels * KVS_FORM_ROWS;
    }
    const kvs_cuda_dim grid = {(uint32_t)kvs_div_up(n_columns, FOLD_THREADS), q->params.n_rows, 1};
    return kvs_cuda_launch(launcher, &key, grid, (kvs_cuda_dim){FOLD_THREADS, 1, 1}, 0, &q->params, sizeof q->params);
}

/* What float weights, and kernels that form no records for themselves, take of the rows. */
static kvs_status prepare_rows(kvs_cuda_launcher *launcher, const kvs_cuda_product *product)
{
    const kvs_act_params *rows = &product->rows;
    if (rows->records == 0 && rows->normed == 0) {
        return KVS_OK;
    }
    return product->is_tiled ? make_atoms(launcher, rows) : kvs_cuda_quantize(launcher, rows);
}

/* The quantized parts of a product; with swiglu both are. `rows`: what a narrow launch forms records of, or NULL. */
static kvs_status run_quantized(kvs_cuda_launcher *launcher, const kvs_cuda_product *product, quantized *q, const kvs_act_params *rows)
{
    if (product->is_tiled) {
        return run_tiles(launcher, q);
    }
    const cut how = q->has_experts ? CUT_NARROW : choose_cut(q->all_eights, product->n_rows);
    if (how == CUT_NARROW) {
        return run_narrow(launcher, q, rows);
    }
    const kvs_status status = run_wide(launcher, q, how == CUT_SPLIT);
    return status == KVS_OK && how == CUT_SPLIT ? fold_slices(launcher, q) : status;
}

/* Whether the kernel of the quantized parts forms records, and normed rows for the float ones behind it. */
static bool forms_records(const kvs_cuda_product *product, const quantized *q)
{
    return q->params.n_parts != 0 && product->rows.records != 0 && !product->is_tiled &&
           choose_cut(q->all_eights, product->n_rows) == CUT_NARROW;
}

/* Float parts of one type. */
static kvs_status run_float(kvs_cuda_launcher *launcher, const kvs_cuda_product *product, int type)
{
    kvs_matmul_float_params params = {.tile_experts = product->tile_experts,
                                      .n_tiles_used = product->n_tiles_used,
                                      .x = product->x,
                                      .k = (uint32_t)product->k,
                                      .row_values = (uint32_t)(kvs_div_up(product->k, 8) * 8),
                                      .x_stride = product->x_stride,
                                      .n_rows = product->n_rows,
                                      .epilogue = product->epilogue};
    uint32_t n_blocks = 0;
    for (uint32_t i = 0; i < product->n_parts; i++) {
        if (product->part[i].type == type) {
            kvs_matmul_part_params *part = &params.part[params.n_parts++];
            *part = part_params(&product->part[i]);
            part->n_panels = (uint32_t)kvs_div_up(product->part[i].n, FLOAT_COLUMNS);
            n_blocks += part->n_panels;
        }
    }
    const kvs_cuda_key key = {.source = "matmul_float",
                              .kernel = "matmul_float",
                              .waits = true,
                              .n_macros = 1,
                              .macros = {{"KVS_T0", type}}};
    const kvs_cuda_dim grid = {n_blocks, (uint32_t)kvs_div_up(product->n_rows, KVS_ACT_TILE), 1};
    return kvs_cuda_launch(launcher, &key, grid, (kvs_cuda_dim){FLOAT_THREADS, 1, 1}, 0, &params, sizeof params);
}

/* Whether no part before it has its type. */
static bool is_first_of_type(const kvs_cuda_product *product, uint32_t index)
{
    for (uint32_t i = 0; i < index; i++) {
        if (product->part[i].type == product->part[index].type) {
            return false;
        }
    }
    return true;
}

static kvs_status run_parts(kvs_cuda_launcher *launcher, const kvs_cuda_product *product)
{
    quantized q = quantized_parts(product);
    const bool is_joined = forms_records(product, &q);
    kvs_status status = is_joined ? KVS_OK : prepare_rows(launcher, product);
    if (status == KVS_OK && q.params.n_parts != 0) {
        status = run_quantized(launcher, product, &q, is_joined ? &product->rows : NULL);
    }
    for (uint32_t i = 0; status == KVS_OK && i < product->n_parts; i++) {
        if (kvs_form_is_float(product->part[i].type) && is_first_of_type(product, i)) {
            status = run_float(launcher, product, product->part[i].type);
        }
    }
    return status;
}

kvs_status kvs_cuda_product_run(kvs_cuda_launcher *launcher, const kvs_cuda_product *product)
{
    const kvs_cuda_factor *gate = &product->part[0];
    if (product->epilogue != KVS_STORE_SWIGLU || !kvs_cuda_needs_up(gate->type, product->part[1].type)) {
        return run_parts(launcher, product);
    }
    kvs_cuda_product apart = *product;
    apart.epilogue = KVS_STORE;
    apart.part[1].out = product->up;
    apart.part[1].out_stride = (uint32_t)gate->n;
    const kvs_status status = run_parts(launcher, &apart);
    if (status != KVS_OK) {
        return status;
    }
    static const kvs_cuda_key key = {.source = "glu", .kernel = "glu", .waits = true};
    const kvs_glu_params params = {.gate = gate->out,
                                   .up = product->up,
                                   .out = gate->out,
                                   .n_values = product->n_rows * gate->n,
                                   .cols = (uint32_t)gate->n};
    const kvs_cuda_dim grid = {(uint32_t)kvs_div_up(params.n_values, GLU_THREADS), 1, 1};
    return kvs_cuda_launch(launcher, &key, grid, (kvs_cuda_dim){GLU_THREADS, 1, 1}, 0, &params, sizeof params);
}
