/* launch_delta.c: recurrent layers: the rows of a pass, or folding alone. No scratch. */
#include "backends/cuda/launcher.h"
#include "kernels/step_words.h"
#include "kernels/weight_params.h"

#define THREADS 128u
#define BLOCK_ROWS 16u /* of a head's matrix */

kvs_status kvs_cuda_scratch_delta(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes)
{
    (void)launcher;
    (void)op;
    (void)max_rows;
    *bytes = 0;
    return KVS_OK;
}

static uint64_t address_of(const float *data)
{
    return (uint64_t)(uintptr_t)data;
}

static kvs_status launch(kvs_cuda_launcher *launcher, const kvs_delta_layer *layer, const kvs_delta_params *params)
{
    const kvs_cuda_key key = {.source = "delta",
                              .kernel = "delta",
                              .n_macros = 2,
                              .macros = {{"KVS_DIM", (int32_t)layer->head_dim}, {"KVS_TAPS", (int32_t)layer->conv_width}}};
    const kvs_cuda_dim grid = {layer->n_value_heads, layer->head_dim / BLOCK_ROWS, 1};
    return kvs_cuda_launch(launcher, &key, grid, (kvs_cuda_dim){THREADS, 1, 1}, 0, params, sizeof *params);
}

/* Everything but the rows of the pass. */
static kvs_delta_params params_of(const kvs_delta_view *view)
{
    const kvs_delta_layer *layer = view->layer;
    return (kvs_delta_params){.conv = view->conv->address,
                              .dt_bias = view->dt_bias->address,
                              .decay = view->decay->address,
                              .matrix_in = address_of(view->matrix_in),
                              .conv_in = address_of(view->conv_in),
                              .log_in = address_of(view->log_in),
                              .matrix_out = address_of(view->matrix_out),
                              .conv_out = address_of(view->conv_out),
                              .log_out = address_of(view->log_out),
                              .n_key_heads = layer->n_key_heads,
                              .n_value_heads = layer->n_value_heads,
                              .taps = layer->conv_width,
                              .n_pending = view->n_pending,
                              .is_logged = 1,
                              .norm_eps = layer->norm_eps};
}

kvs_status kvs_cuda_launch_delta(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    if (launcher->is_dry) { /* no state to look at */
        return launch(launcher, op->delta, &(kvs_delta_params){0});
    }
    kvs_delta_params params = params_of(&step->deltas[op->layer]);
    params.step = launcher->places.deltas == 0 ? 0 : launcher->places.deltas + op->layer * sizeof(kvs_step_delta);
    params.inputs = address_of(kvs_operand_data(&op->in[0], step));
    params.beta = address_of(kvs_operand_data(&op->in[1], step));
    params.alpha = address_of(kvs_operand_data(&op->in[2], step));
    params.out = address_of(kvs_operand_data(&op->out[0], step));
    params.n_rows = step->n_rows;
    params.is_logged = op->u[0] == KVS_DELTA_LOGGED;
    return launch(launcher, op->delta, &params);
}

kvs_status kvs_cuda_launch_delta_fold(kvs_cuda_launcher *launcher, const kvs_delta_view *views, uint32_t layer, void *scratch)
{
    (void)scratch;
    const kvs_delta_params params = params_of(&views[layer]);
    return launch(launcher, views[layer].layer, &params);
}
