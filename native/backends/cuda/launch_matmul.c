/* launch_matmul.c: matmuls and embedding rows. Scratch of a matmul: records or atoms of the activations; where a float weight takes normed
 * rows, those; where a swiglu takes two kernels, the rows of its second part; partial sums. */
#include "backends/cuda/product.h"

#include "kernels/weight_form.h"

#define EMBED_THREADS 256u
#define GATE_SIGMOID 2u /* u[2] of a matmul */

typedef struct layout {
    uint64_t records;
    uint64_t normed;
    uint64_t up;
    uint64_t partials;
    uint64_t bytes;
    bool has_quantized;
    bool has_normed;
    bool has_up;
} layout;

static bool is_tiled(const kvs_cuda_launcher *launcher, const kvs_bound_op *op)
{
    return (op->flags & KVS_OP_PROMPT) != 0 && kvs_cuda_has_tiles(launcher);
}

static bool lay_out(const kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint64_t n_rows, layout *made)
{
    bool has_float = false;
    kvs_cuda_factor parts[KVS_MATMUL_MAX_PARTS];
    *made = (layout){0};
    for (uint32_t i = 0; i < op->u[0]; i++) {
        const bool is_float = kvs_form_is_float(op->weights[i]->type);
        parts[i] = (kvs_cuda_factor){.type = op->weights[i]->type, .n = op->weights[i]->n};
        has_float = has_float || is_float;
        made->has_quantized = made->has_quantized || !is_float;
    }
    const uint64_t k = op->weights[0]->k;
    made->has_normed = has_float && (op->weights[4] != NULL || op->u[2] != 0);
    made->has_up = op->u[1] == KVS_STORE_SWIGLU && kvs_cuda_needs_up(op->weights[0]->type, op->weights[1]->type);
    const bool has_atoms = is_tiled(launcher, op);
    uint64_t record_bytes;
    return (has_atoms ? kvs_cuda_atom_bytes : kvs_cuda_act_bytes)(k, n_rows, &record_bytes) &&
           kvs_cuda_reserve(&made->bytes, made->has_quantized ? record_bytes : 0, 1, &made->records) &&
           kvs_cuda_reserve(&made->bytes, made->has_normed ? n_rows * k : 0, sizeof(float), &made->normed) &&
           kvs_cuda_reserve(&made->bytes, made->has_up ? n_rows * op->weights[1]->n : 0, sizeof(float), &made->up) &&
           kvs_cuda_reserve(&made->bytes, has_atoms ? 0 : kvs_cuda_partial_bytes(parts, op->u[0], n_rows), 1, &made->partials);
}

kvs_status kvs_cuda_scratch_matmul(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes)
{
    layout made;
    if (!lay_out(launcher, op, max_rows, &made)) {
        return kvs_fail(launcher->device, KVS_EOVERFLOW, "a matmul of %u rows is too large", max_rows);
    }
    *bytes = made.bytes;
    return KVS_OK;
}

static uint64_t address_of(const float *data)
{
    return (uint64_t)(uintptr_t)data;
}

static kvs_cuda_factor part_of(const kvs_bound_op *op, const struct kvs_step *step, uint32_t i)
{
    const kvs_weight_view *weight = op->weights[i];
    const bool has_out = op->u[1] != KVS_STORE_SWIGLU || i == 0;
    return (kvs_cuda_factor){.type = weight->type,
                             .n = weight->n,
                             .address = weight->address,
                             .scales = address_of(weight->scales),
                             .n_scales = weight->n_scales,
                             .out = has_out ? address_of(kvs_operand_data(&op->out[i], step)) : 0,
                             .out_stride = has_out ? op->out[i].cols : 0};
}

static kvs_act_params rows_of(const kvs_bound_op *op, const struct kvs_step *step, const layout *made,
                              const kvs_cuda_product *product)
{
    return (kvs_act_params){.x = product->x,
                            .norm = op->weights[4] == NULL ? 0 : op->weights[4]->address,
                            .gate = op->u[2] == 0 ? 0 : address_of(kvs_operand_data(&op->in[1], step)),
                            .normed = made->has_normed ? address_of(op->scratch) + made->normed : 0,
                            .records = made->has_quantized ? product->records : 0,
                            .k = (uint32_t)product->k,
                            .x_stride = product->x_stride,
                            .n_slots = product->n_rows,
                            .n_groups = (uint32_t)kvs_cuda_act_groups(product->k),
                            .group = op->u[3],
                            .is_sigmoid = op->u[2] == GATE_SIGMOID,
                            .eps = op->f[0]};
}

kvs_status kvs_cuda_launch_matmul(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    const uint64_t scratch = address_of(op->scratch);
    kvs_cuda_product product = {.n_parts = op->u[0],
                                .n_rows = kvs_operand_rows(&op->in[0], step),
                                .epilogue = op->u[1],
                                .k = op->in[0].cols,
                                .x = address_of(kvs_operand_data(&op->in[0], step)),
                                .x_stride = op->in[0].cols,
                                .is_tiled = is_tiled(launcher, op)};
    if (product.n_rows == 0) {
        return KVS_OK;
    }
    layout made;
    if (!lay_out(launcher, op, product.n_rows, &made)) {
        return kvs_fail(launcher->device, KVS_EOVERFLOW, "a matmul of %u rows is too large", product.n_rows);
    }
    for (uint32_t i = 0; i < product.n_parts; i++) {
        product.part[i] = part_of(op, step, i);
    }
    product.records = scratch + made.records;
    product.up = scratch + made.up;
    product.partials = scratch + made.partials;
    product.rows = rows_of(op, step, &made, &product);
    if (made.has_normed) {
        product.x = scratch + made.normed;
    }
    return kvs_cuda_product_run(launcher, &product);
}

kvs_status kvs_cuda_launch_embed(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    const kvs_weight_view *table = op->weights[0];
    uint32_t block_values, block_bytes;
    kvs_status status = kvs_type_block(table->type, &block_values, &block_bytes);
    if (status != KVS_OK) {
        return kvs_fail(launcher->device, status, "an embedding table of type %d", table->type);
    }
    const kvs_embed_params params = {.table = table->address,
                                     .tokens = (uint64_t)(uintptr_t)step->tokens,
                                     .out = address_of(kvs_operand_data(&op->out[0], step)),
                                     .k = (uint32_t)table->k,
                                     .row_bytes = (uint32_t)(table->k / block_values * block_bytes),
                                     .n_table_rows = (uint32_t)table->n,
                                     .out_stride = op->out[0].cols,
                                     .n_rows = step->n_rows};
    const kvs_cuda_key key = {.source = "embed", .kernel = "embed", .waits = true, .n_macros = 1, .macros = {{"KVS_T0", table->type}}};
    const kvs_cuda_dim grid = {(uint32_t)kvs_div_up(table->k, EMBED_THREADS), step->n_rows, 1};
    return kvs_cuda_launch(launcher, &key, grid, (kvs_cuda_dim){EMBED_THREADS, 1, 1}, 0, &params, sizeof params);
}
