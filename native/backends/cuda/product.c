/* product.c: which kernels a product of activations and weights takes. Quantized parts share one launch. */
#include "backends/cuda/product.h"

#include "kernels/act_record.h"
#include "kernels/attend_params.h"
#include "kernels/weight_form.h"

#define ALIGNMENT 64u
#define QUANTIZE_THREADS 1024u
#define MATMUL_THREADS 256u
#define FLOAT_THREADS 128u
#define FLOAT_COLUMNS 4u /* to a block */
#define GLU_THREADS 256u
#define MAX_TILES 8u     /* of rows, to a block */
#define WIDE_ROWS 128u   /* from here on blocks take several panels */
#define WIDE_PANELS 8u

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

bool kvs_cuda_needs_up(int gate_type, int up_type)
{
    return kvs_form_is_float(gate_type) || kvs_form_is_float(up_type);
}

bool kvs_cuda_reserve(uint64_t *end, uint64_t n, uint64_t item_bytes, uint64_t *offset)
{
    uint64_t bytes;
    *offset = *end;
    return kvs_mul_u64(n, item_bytes, &bytes) && kvs_add_u64(*end, bytes, &bytes) && kvs_align_up(bytes, ALIGNMENT, end);
}

kvs_status kvs_cuda_quantize(kvs_cuda_launcher *launcher, const kvs_act_params *params)
{
    static const kvs_cuda_key key = {.source = "act_quantize", .kernel = "act_quantize"};
    const uint64_t n_values = (uint64_t)params->n_groups * KVS_FORM_GROUP_VALUES;
    const kvs_cuda_dim grid = {params->n_slots, (uint32_t)kvs_div_up(n_values, QUANTIZE_THREADS), 1};
    return kvs_cuda_launch(launcher, &key, grid, (kvs_cuda_dim){QUANTIZE_THREADS, 1, 1}, 0, params, sizeof *params);
}

static uint32_t scale_run(const kvs_cuda_factor *part)
{
    return part->n_scales == 0 ? 1 : (uint32_t)(part->n / part->n_scales);
}

/* How a launch is cut. Every way gives a row the same bits. */
typedef struct cut {
    bool is_wide;
    uint32_t tiles;  /* of 8 rows, to a block */
    uint32_t panels; /* to a block */
} cut;

static cut cut_of(const kvs_cuda_product *product)
{
    const bool has_experts = product->tile_experts != 0;
    cut made = {.is_wide = !has_experts && product->n_rows >= WIDE_ROWS, .tiles = 1, .panels = 1};
    while (!has_experts && made.tiles < MAX_TILES && made.tiles * KVS_ACT_TILE < product->n_rows) {
        made.tiles *= 2;
    }
    made.panels = made.is_wide ? WIDE_PANELS : 1;
    return made;
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

static kvs_cuda_key quantized_key(const kvs_cuda_product *product, const cut *how, const int types[KVS_MATMUL_MAX_PARTS])
{
    const kvs_cuda_macro t0 = {"KVS_T0", types[0]}, t1 = {"KVS_T1", types[1]}, t2 = {"KVS_T2", types[2]};
    const kvs_cuda_macro swiglu = {"KVS_SWIGLU", product->epilogue == KVS_STORE_SWIGLU};
    if (how->is_wide) {
        return (kvs_cuda_key){.source = "matmul_wide", .kernel = "matmul_wide", .n_macros = 4, .macros = {t0, t1, t2, swiglu}};
    }
    return (kvs_cuda_key){
        .source = "matmul",
        .kernel = "matmul",
        .n_macros = 6,
        .macros = {t0, t1, t2, swiglu, {"KVS_TILES", (int32_t)how->tiles}, {"KVS_EXPERTS", product->tile_experts != 0}}};
}

/* The quantized parts of a product; with swiglu both are. */
static kvs_status run_quantized(kvs_cuda_launcher *launcher, const kvs_cuda_product *product)
{
    const bool is_swiglu = product->epilogue == KVS_STORE_SWIGLU;
    const cut how = cut_of(product);
    int types[KVS_MATMUL_MAX_PARTS];
    kvs_matmul_params params = {.records = product->records,
                                .tile_experts = product->tile_experts,
                                .n_tiles_used = product->n_tiles_used,
                                .n_rows = product->n_rows,
                                .n_groups = (uint32_t)kvs_cuda_act_groups(product->k),
                                .n_row_tiles = (uint32_t)kvs_div_up(product->n_rows, (uint64_t)how.tiles * KVS_ACT_TILE),
                                .epilogue = product->epilogue};
    uint64_t n_blocks = 0;
    for (uint32_t i = 0; i < product->n_parts; i++) {
        if (!kvs_form_is_float(product->part[i].type)) {
            types[params.n_parts] = product->part[i].type;
            params.part[params.n_parts] = part_params(&product->part[i]);
            n_blocks += is_swiglu && i != 0 ? 0 : kvs_div_up(params.part[params.n_parts].n_panels, how.panels);
            params.n_parts++;
        }
    }
    if (params.n_parts == 0) {
        return KVS_OK;
    }
    for (uint32_t i = params.n_parts; i < KVS_MATMUL_MAX_PARTS; i++) {
        types[i] = types[0];
    }
    n_blocks *= params.n_row_tiles;
    if (n_blocks > INT32_MAX) {
        return kvs_fail(launcher->device, KVS_EUNSUPPORTED, "a matmul of %u rows by %llu output values is too large",
                        product->n_rows, (kvs_ull)product->part[0].n);
    }
    const kvs_cuda_key key = quantized_key(product, &how, types);
    return kvs_cuda_launch(launcher, &key, (kvs_cuda_dim){(uint32_t)n_blocks, 1, 1}, (kvs_cuda_dim){MATMUL_THREADS, 1, 1}, 0,
                           &params, sizeof params);
}

static kvs_status run_float(kvs_cuda_launcher *launcher, const kvs_cuda_product *product, const kvs_cuda_factor *part)
{
    const kvs_matmul_float_params params = {.weights = part->address,
                                            .tile_experts = product->tile_experts,
                                            .n_tiles_used = product->n_tiles_used,
                                            .x = product->x,
                                            .out = part->out,
                                            .scales = part->scales,
                                            .n = (uint32_t)part->n,
                                            .k = (uint32_t)product->k,
                                            .row_values = (uint32_t)(kvs_div_up(product->k, 8) * 8),
                                            .x_stride = product->x_stride,
                                            .out_stride = part->out_stride,
                                            .scale_run = scale_run(part),
                                            .n_rows = product->n_rows,
                                            .epilogue = product->epilogue};
    const kvs_cuda_key key = {
        .source = "matmul_float", .kernel = "matmul_float", .n_macros = 1, .macros = {{"KVS_T0", part->type}}};
    const kvs_cuda_dim grid = {(uint32_t)kvs_div_up(part->n, FLOAT_COLUMNS), (uint32_t)kvs_div_up(product->n_rows, KVS_ACT_TILE), 1};
    return kvs_cuda_launch(launcher, &key, grid, (kvs_cuda_dim){FLOAT_THREADS, 1, 1}, 0, &params, sizeof params);
}

static kvs_status run_parts(kvs_cuda_launcher *launcher, const kvs_cuda_product *product)
{
    kvs_status status = run_quantized(launcher, product);
    for (uint32_t i = 0; status == KVS_OK && i < product->n_parts; i++) {
        if (kvs_form_is_float(product->part[i].type)) {
            status = run_float(launcher, product, &product->part[i]);
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
    static const kvs_cuda_key key = {.source = "glu", .kernel = "glu"};
    const kvs_glu_params params = {.gate = gate->out,
                                   .up = product->up,
                                   .out = gate->out,
                                   .n_values = product->n_rows * gate->n,
                                   .cols = (uint32_t)gate->n};
    const kvs_cuda_dim grid = {(uint32_t)kvs_div_up(params.n_values, GLU_THREADS), 1, 1};
    return kvs_cuda_launch(launcher, &key, grid, (kvs_cuda_dim){GLU_THREADS, 1, 1}, 0, &params, sizeof params);
}
