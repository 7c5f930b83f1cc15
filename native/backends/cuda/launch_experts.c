/* launch_experts.c: a mixture of expert feed-forwards. Rows are taken in blocks, so that scratch stays small; in a block each chosen
 * expert's rows have slots of their own, in tiles of 8, and a tile meets one expert's weights. */
#include "backends/cuda/product.h"

#include "kernels/act_record.h"
#include "kernels/weight_form.h"

#define MAX_EXPERTS 1024u
#define BLOCK_ROWS 256u
#define PLACE_THREADS 1024u
#define COMBINE_THREADS 256u

/* Offsets in the scratch, and sizes. */
typedef struct layout {
    uint64_t choices, slots, weights, slot_rows, tile_experts, n_used, records, copies, hidden, up, results, bytes;
    uint64_t n_embd, n_ff;
    uint32_t n_slots;
    bool has_copies; /* a gate or up of a float type takes float32 rows */
    bool has_up;
} layout;

/* Room for the slots of n_rows rows however they choose: all but one of the tiles of an expert are full. */
static uint64_t slot_room(const kvs_bound_op *op, uint64_t n_rows)
{
    const uint64_t n_pairs = n_rows * op->u[1];
    const uint64_t n_experts = n_pairs < op->u[0] ? n_pairs : op->u[0];
    return (n_pairs / KVS_ACT_TILE + n_experts) * KVS_ACT_TILE;
}

static bool reserve_rows(layout *made, uint64_t n_rows, uint64_t n_values, uint64_t *offset)
{
    return kvs_cuda_reserve(&made->bytes, n_rows * n_values, sizeof(float), offset);
}

static bool lay_out(const kvs_bound_op *op, uint64_t n_rows, layout *made)
{
    const uint64_t rows = n_rows < BLOCK_ROWS ? n_rows : BLOCK_ROWS;
    const uint64_t n_slots = slot_room(op, rows);
    const int gate = op->weights[0]->type, up = op->weights[1]->type;
    *made = (layout){.n_embd = op->in[0].cols,
                     .n_ff = op->weights[2]->k,
                     .n_slots = (uint32_t)n_slots,
                     .has_copies = kvs_form_is_float(gate) || kvs_form_is_float(up),
                     .has_up = kvs_cuda_needs_up(gate, up)};
    const uint64_t n_wide = made->n_embd > made->n_ff ? made->n_embd : made->n_ff;
    uint64_t record_bytes;
    return kvs_cuda_act_bytes(n_wide, n_slots, &record_bytes) && reserve_rows(made, rows, op->u[1], &made->choices) &&
           reserve_rows(made, rows, op->u[1], &made->slots) && reserve_rows(made, rows, op->u[1], &made->weights) &&
           reserve_rows(made, n_slots, 1, &made->slot_rows) &&
           reserve_rows(made, n_slots / KVS_ACT_TILE, 1, &made->tile_experts) && reserve_rows(made, 2, 1, &made->n_used) &&
           kvs_cuda_reserve(&made->bytes, record_bytes, 1, &made->records) &&
           reserve_rows(made, made->has_copies ? n_slots : 0, made->n_embd, &made->copies) &&
           reserve_rows(made, n_slots, made->n_ff, &made->hidden) &&
           reserve_rows(made, made->has_up ? n_slots : 0, made->n_ff, &made->up) &&
           reserve_rows(made, n_slots, made->n_embd, &made->results);
}

static kvs_status check(kvs_cuda_launcher *launcher, const kvs_bound_op *op)
{
    const uint64_t n_embd = op->in[0].cols, n_ff = op->weights[2]->k;
    if (op->u[0] > MAX_EXPERTS || n_embd % KVS_FORM_ROWS != 0 || n_ff % KVS_FORM_ROWS != 0) {
        return kvs_fail(launcher->device, KVS_EUNSUPPORTED, "%u experts of %llu x %llu values: at most %u, sizes multiples of %u",
                        op->u[0], (kvs_ull)n_ff, (kvs_ull)n_embd, MAX_EXPERTS, KVS_FORM_ROWS);
    }
    return KVS_OK;
}

kvs_status kvs_cuda_scratch_experts(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes)
{
    layout made;
    const kvs_status status = check(launcher, op);
    if (status != KVS_OK) {
        return status;
    }
    if (!lay_out(op, max_rows, &made)) {
        return kvs_fail(launcher->device, KVS_EOVERFLOW, "experts for %u rows are too large", max_rows);
    }
    *bytes = made.bytes;
    return KVS_OK;
}

/* One block of rows. */
typedef struct block {
    kvs_cuda_launcher *launcher;
    const kvs_bound_op *op;
    const layout *layout;
    uint64_t scratch;
    kvs_experts_params experts;
    uint64_t x;
} block;

static kvs_status launch_step(const block *b, const char *kernel, kvs_cuda_dim grid, uint32_t n_threads)
{
    const kvs_cuda_key key = {.source = "experts", .kernel = kernel};
    return kvs_cuda_launch(b->launcher, &key, grid, (kvs_cuda_dim){n_threads, 1, 1}, 0, &b->experts, sizeof b->experts);
}

/* Records of the slots' rows of x, or of the slots themselves. */
static kvs_status quantize(const block *b, uint64_t x, uint64_t k, bool is_by_row)
{
    const kvs_act_params params = {.x = x,
                                   .normed = is_by_row && b->layout->has_copies ? b->scratch + b->layout->copies : 0,
                                   .records = b->scratch + b->layout->records,
                                   .slot_rows = is_by_row ? b->experts.slot_rows : 0,
                                   .n_slots_used = b->experts.n_used,
                                   .k = (uint32_t)k,
                                   .x_stride = (uint32_t)k,
                                   .n_slots = b->experts.n_slots,
                                   .n_groups = (uint32_t)kvs_cuda_act_groups(k)};
    return kvs_cuda_quantize(b->launcher, &params);
}

static kvs_cuda_factor factor_of(const block *b, uint32_t i, uint64_t n, uint64_t out)
{
    const kvs_weight_view *weight = b->op->weights[i], *scales = b->op->weights[i + 3];
    return (kvs_cuda_factor){.type = weight->type,
                             .n = n,
                             .address = weight->address,
                             .scales = scales == NULL ? 0 : scales->address,
                             .out = out,
                             .out_stride = (uint32_t)n};
}

static kvs_cuda_product product_of(const block *b, uint64_t k, uint64_t x)
{
    return (kvs_cuda_product){.n_rows = b->experts.n_slots,
                              .x_stride = (uint32_t)k,
                              .k = k,
                              .x = x,
                              .records = b->scratch + b->layout->records,
                              .up = b->scratch + b->layout->up,
                              .tile_experts = b->experts.tile_experts,
                              .n_tiles_used = b->experts.n_used + sizeof(uint32_t)};
}

static kvs_status run_feed_forward(const block *b)
{
    const layout *l = b->layout;
    const uint64_t hidden = b->scratch + l->hidden;
    kvs_cuda_product first = product_of(b, l->n_embd, b->scratch + l->copies);
    first.n_parts = 2;
    first.epilogue = KVS_STORE_SWIGLU;
    first.part[0] = factor_of(b, 0, l->n_ff, hidden);
    first.part[1] = factor_of(b, 1, l->n_ff, 0);
    kvs_cuda_product second = product_of(b, l->n_ff, hidden);
    second.n_parts = 1;
    second.part[0] = factor_of(b, 2, l->n_embd, b->experts.results);
    kvs_status status = quantize(b, b->x, l->n_embd, true);
    if (status == KVS_OK) {
        status = kvs_cuda_product_run(b->launcher, &first);
    }
    if (status == KVS_OK && !kvs_form_is_float(b->op->weights[2]->type)) {
        status = quantize(b, hidden, l->n_ff, false);
    }
    return status == KVS_OK ? kvs_cuda_product_run(b->launcher, &second) : status;
}

static kvs_status run_block(const block *b)
{
    const uint32_t n_rows = b->experts.n_rows;
    kvs_status status = launch_step(b, "experts_route", (kvs_cuda_dim){n_rows, 1, 1}, 32);
    if (status == KVS_OK) {
        status = launch_step(b, "experts_place", (kvs_cuda_dim){1, 1, 1}, PLACE_THREADS);
    }
    if (status == KVS_OK) {
        status = run_feed_forward(b);
    }
    const kvs_cuda_dim grid = {(uint32_t)kvs_div_up(b->layout->n_embd, COMBINE_THREADS), n_rows, 1};
    return status == KVS_OK ? launch_step(b, "experts_combine", grid, COMBINE_THREADS) : status;
}

static kvs_experts_params experts_params(const kvs_bound_op *op, const layout *made, uint64_t scratch)
{
    return (kvs_experts_params){.choices = scratch + made->choices,
                                .slots = scratch + made->slots,
                                .weights = scratch + made->weights,
                                .slot_rows = scratch + made->slot_rows,
                                .tile_experts = scratch + made->tile_experts,
                                .n_used = scratch + made->n_used,
                                .results = scratch + made->results,
                                .n_experts = op->u[0],
                                .n_chosen = op->u[1],
                                .n_embd = (uint32_t)made->n_embd,
                                .factor = op->f[0]};
}

kvs_status kvs_cuda_launch_experts(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    const uint64_t x = (uint64_t)(uintptr_t)kvs_operand_data(&op->in[0], step);
    const uint64_t router = (uint64_t)(uintptr_t)kvs_operand_data(&op->in[1], step);
    const uint64_t out = (uint64_t)(uintptr_t)kvs_operand_data(&op->out[0], step);
    layout made;
    if (!lay_out(op, step->n_rows, &made)) {
        return kvs_fail(launcher->device, KVS_EOVERFLOW, "experts for %u rows are too large", step->n_rows);
    }
    block b = {.launcher = launcher, .op = op, .layout = &made, .scratch = (uint64_t)(uintptr_t)op->scratch};
    b.experts = experts_params(op, &made, b.scratch);
    kvs_status status = KVS_OK;
    for (uint32_t first = 0; status == KVS_OK && first < step->n_rows; first += BLOCK_ROWS) {
        const uint32_t left = step->n_rows - first;
        b.x = x + (uint64_t)first * made.n_embd * sizeof(float);
        b.experts.n_rows = left < BLOCK_ROWS ? left : BLOCK_ROWS;
        b.experts.n_slots = (uint32_t)slot_room(op, b.experts.n_rows);
        b.experts.router = router + (uint64_t)first * op->u[0] * sizeof(float);
        b.experts.out = out + (uint64_t)first * made.n_embd * sizeof(float);
        status = run_block(&b);
    }
    return status;
}
