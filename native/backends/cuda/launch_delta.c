/* launch_delta.c: recurrent layers: the rows of a pass, or folding alone. Scratch of a pass in chunks: what delta_chunk.cu hands on. */
#include "backends/cuda/launcher.h"
#include "kernels/weight_params.h"

#define THREADS 128u
#define BLOCK_ROWS 16u /* of a head's matrix */
#define CHUNKS_ARCH 80u
#define CHUNK_THREADS 256u
#define SCAN_THREADS 128u
#define SLICE_ROWS 32u /* of a head's matrix, of a block of delta_scan at most */

/* Before CHUNKS_ARCH there are no products for chunks, and rows go one after another. */
static bool is_chunked(const kvs_cuda_launcher *launcher, const kvs_bound_op *op)
{
    return op->u[0] == KVS_DELTA_CHUNKED && launcher->arch >= CHUNKS_ARCH;
}

/* Floats of a chunk of one head in scratch. */
static uint64_t chunk_floats(const kvs_delta_layer *layer)
{
    return UINT64_C(4) * KVS_CHUNK_TOKENS * layer->head_dim + KVS_CHUNK_TOKENS * KVS_CHUNK_TOKENS + 32;
}

kvs_status kvs_cuda_scratch_delta(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes)
{
    const uint64_t n_chunks = kvs_div_up(max_rows, KVS_CHUNK_TOKENS) + 1; /* the first may be short */
    *bytes = is_chunked(launcher, op) ? n_chunks * op->delta->n_value_heads * chunk_floats(op->delta) * sizeof(float) : 0;
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
                              .waits = true,
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

/* What a chunk needs of shared memory: rows of q and k, and scores. */
static uint32_t chunk_shared_bytes(const kvs_delta_layer *layer)
{
    return (2 * KVS_CHUNK_TOKENS * (layer->head_dim + 8) + KVS_CHUNK_TOKENS * (KVS_CHUNK_TOKENS + 4)) * (uint32_t)sizeof(float);
}

static kvs_status launch_chunks(kvs_cuda_launcher *launcher, const kvs_delta_layer *layer, const kvs_delta_chunk_params *params)
{
    kvs_cuda_key key = {.source = "delta_chunk",
                        .kernel = "delta_chunk",
                        .n_macros = 2,
                        .macros = {{"KVS_DIM", (int32_t)layer->head_dim}, {"KVS_TAPS", (int32_t)layer->conv_width}}};
    const uint32_t slice = layer->head_dim < SLICE_ROWS ? layer->head_dim : SLICE_ROWS;
    kvs_status status =
        kvs_cuda_launch(launcher, &key, (kvs_cuda_dim){layer->n_value_heads, params->n_chunks, 1},
                        (kvs_cuda_dim){CHUNK_THREADS, 1, 1}, chunk_shared_bytes(layer), params, sizeof *params);
    if (status == KVS_OK) {
        key.kernel = "delta_scan";
        status = kvs_cuda_launch(launcher, &key, (kvs_cuda_dim){layer->n_value_heads, layer->head_dim / slice, 1},
                                 (kvs_cuda_dim){SCAN_THREADS, 1, 1}, 0, params, sizeof *params);
    }
    return status;
}

/* What is pending goes into the state row by row, as always; then the rows of the pass. */
static kvs_status run_chunks(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step,
                             const kvs_delta_params *pass)
{
    kvs_delta_chunk_params params = {.pass = *pass, .chunks = (uint64_t)(uintptr_t)op->scratch};
    if (pass->n_pending > 0) {
        kvs_delta_params fold = *pass;
        fold.n_rows = 0;
        fold.is_logged = 1;
        const kvs_status status = launch(launcher, op->delta, &fold);
        if (status != KVS_OK) {
            return status;
        }
        params.pass.matrix_in = pass->matrix_out;
    }
    const uint32_t room = KVS_CHUNK_TOKENS - (uint32_t)(step->first_token % KVS_CHUNK_TOKENS);
    params.first_rows = pass->n_rows < room ? pass->n_rows : room;
    params.n_chunks = 1 + (uint32_t)kvs_div_up(pass->n_rows - params.first_rows, KVS_CHUNK_TOKENS);
    return launch_chunks(launcher, op->delta, &params);
}

/* Without a state to look at. */
static kvs_status launch_dry(kvs_cuda_launcher *launcher, const kvs_bound_op *op)
{
    const kvs_status status = launch(launcher, op->delta, &(kvs_delta_params){0});
    return status == KVS_OK && is_chunked(launcher, op)
               ? launch_chunks(launcher, op->delta, &(kvs_delta_chunk_params){.n_chunks = 1})
               : status;
}

kvs_status kvs_cuda_launch_delta(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    if (launcher->is_dry) {
        return launch_dry(launcher, op);
    }
    kvs_delta_params params = params_of(&step->deltas[op->layer]);
    params.step = launcher->places.deltas == 0 ? 0 : launcher->places.deltas + op->layer * sizeof(kvs_step_delta);
    params.inputs = address_of(kvs_operand_data(&op->in[0], step));
    params.beta = address_of(kvs_operand_data(&op->in[1], step));
    params.alpha = address_of(kvs_operand_data(&op->in[2], step));
    params.out = address_of(kvs_operand_data(&op->out[0], step));
    params.n_rows = step->n_rows;
    params.is_logged = op->u[0] == KVS_DELTA_LOGGED;
    if (is_chunked(launcher, op)) {
        return run_chunks(launcher, op, step, &params);
    }
    return launch(launcher, op->delta, &params);
}

kvs_status kvs_cuda_launch_delta_fold(kvs_cuda_launcher *launcher, const kvs_delta_view *views, uint32_t layer, void *scratch)
{
    (void)scratch;
    const kvs_delta_params params = params_of(&views[layer]);
    return launch(launcher, views[layer].layer, &params);
}
