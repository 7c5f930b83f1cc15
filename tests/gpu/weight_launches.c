/* weight_launches.c: operations of the weight side, and the sampling front, without a backend: bound operations built from flat arguments, launches handed
 * to whoever runs kernels. */
#include "backends/cuda/launcher.h"
#include "backends/cuda/weight_form.h"

#define EXPORT __attribute__((visibility("default")))

typedef int (*launch_fn)(const char *source, const char *kernel, uint32_t n_macros, const kvs_cuda_macro *macros,
                         const uint32_t *grid, uint32_t block, uint32_t shared_bytes, const void *params);

static launch_fn launch_kernel;
static kvs_cuda_launcher launcher = {.arch = 75, .n_sm = 1};

EXPORT void set_launch(launch_fn launch)
{
    launch_kernel = launch;
}

/* What launchers believe of the device from here on. */
EXPORT void set_device(uint32_t arch, uint32_t n_sm, uint32_t shared_bytes)
{
    launcher.arch = arch;
    launcher.n_sm = n_sm;
    launcher.shared_bytes = shared_bytes;
}

kvs_status kvs_fail(kvs_device *device, kvs_status status, const char *format, ...)
{
    (void)device;
    (void)format;
    return status;
}

kvs_status kvs_cuda_launch(kvs_cuda_launcher *who, const kvs_cuda_key *key, kvs_cuda_dim grid, kvs_cuda_dim block,
                           uint32_t shared_bytes, const void *params, size_t params_bytes)
{
    (void)who;
    (void)params_bytes;
    const uint32_t blocks[3] = {grid.x, grid.y, grid.z};
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
        return KVS_OK;
    }
    return (kvs_status)launch_kernel(key->source, key->kernel, key->n_macros, key->macros, blocks, block.x,
                                     shared_bytes, params);
}

/* Bytes of the device form, or 0. */
EXPORT uint64_t form_bytes(int type, uint64_t k, uint64_t n)
{
    kvs_cuda_weight_shape shape;
    return kvs_cuda_weight_shape_make(type, k, n, &shape) == KVS_OK ? shape.bytes : 0;
}

EXPORT void form(int type, uint64_t k, uint64_t n, const void *rows, uint8_t *to)
{
    kvs_cuda_weight_shape shape;
    if (kvs_cuda_weight_shape_make(type, k, n, &shape) == KVS_OK) {
        kvs_cuda_weight_form(&shape, rows, 0, shape.n_pieces, to);
    }
}

typedef struct flat_weight {
    int32_t type;
    uint32_t n_scales;
    uint64_t k;
    uint64_t n;
    uint64_t address;
    uint64_t scales;
} flat_weight;

/* One operation, its weights and its rows. What it does not need is zero. */
typedef struct flat_op {
    flat_weight weights[6]; /* n 0: none */
    uint64_t in[3];
    uint64_t out[4];
    uint64_t scratch;
    uint64_t tokens;
    uint32_t in_cols[3];
    uint32_t out_cols[4];
    uint32_t u[4];
    uint32_t code;
    uint32_t n_rows;
    float f;
    uint32_t flags; /* kvs_op_flags */
} flat_op;

static kvs_operand operand(uint64_t address, uint32_t cols)
{
    return (kvs_operand){.data = (float *)(uintptr_t)address, .cols = cols, .output_slot = KVS_NONE};
}

static kvs_bound_op bind(const flat_op *flat, kvs_weight_view views[6])
{
    kvs_bound_op op = {.code = flat->code, .flags = flat->flags, .f = {flat->f}, .scratch = (void *)(uintptr_t)flat->scratch};
    for (uint32_t i = 0; i < 6; i++) {
        const flat_weight *weight = &flat->weights[i];
        views[i] = (kvs_weight_view){.type = weight->type,
                                     .k = weight->k,
                                     .n = weight->n,
                                     .address = weight->address,
                                     .scales = (const float *)(uintptr_t)weight->scales,
                                     .n_scales = weight->n_scales};
        op.weights[i] = weight->n == 0 ? NULL : &views[i];
    }
    for (uint32_t i = 0; i < 3; i++) {
        op.in[i] = operand(flat->in[i], flat->in_cols[i]);
    }
    for (uint32_t i = 0; i < 4; i++) {
        op.out[i] = operand(flat->out[i], flat->out_cols[i]);
    }
    for (uint32_t i = 0; i < 4; i++) {
        op.u[i] = flat->u[i];
    }
    return op;
}

EXPORT int scratch_bytes(const flat_op *flat, uint32_t max_rows, uint64_t *bytes)
{
    kvs_weight_view views[6];
    const kvs_bound_op op = bind(flat, views);
    switch (flat->code) {
    case KVS_OP_MATMUL:
        return kvs_cuda_scratch_matmul(&launcher, &op, max_rows, bytes);
    case KVS_OP_FRONT:
        return kvs_cuda_scratch_front(&launcher, &op, max_rows, bytes);
    default:
        return kvs_cuda_scratch_experts(&launcher, &op, max_rows, bytes);
    }
}

EXPORT int run_op(const flat_op *flat)
{
    kvs_weight_view views[6];
    const kvs_bound_op op = bind(flat, views);
    const struct kvs_step step = {.n_rows = flat->n_rows, .tokens = (const uint32_t *)(uintptr_t)flat->tokens};
    switch (flat->code) {
    case KVS_OP_EMBED:
        return kvs_cuda_launch_embed(&launcher, &op, &step);
    case KVS_OP_MATMUL:
        return kvs_cuda_launch_matmul(&launcher, &op, &step);
    case KVS_OP_FRONT:
        return kvs_cuda_launch_front(&launcher, &op, &step);
    default:
        return kvs_cuda_launch_experts(&launcher, &op, &step);
    }
}

/* A pass of a recurrent layer, or its folding alone. */
typedef struct flat_delta {
    uint64_t conv, dt_bias, decay;
    uint64_t matrix_in, conv_in, log_in, matrix_out, conv_out, log_out;
    uint64_t inputs, beta, alpha, out;
    uint32_t n_key_heads, n_value_heads, head_dim, conv_width;
    uint32_t n_pending, n_rows, mode, folds;
    float norm_eps;
    uint32_t first_token;
    uint64_t scratch;
    uint64_t step; /* kvs_step_delta of a recorded pass, or 0 */
} flat_delta;

static kvs_bound_op bind_delta(const flat_delta *flat, const kvs_delta_layer *layer)
{
    return (kvs_bound_op){.code = KVS_OP_DELTA,
                          .in = {operand(flat->inputs, 0), operand(flat->beta, 0), operand(flat->alpha, 0)},
                          .out = {operand(flat->out, 0)},
                          .u = {flat->mode},
                          .scratch = (void *)(uintptr_t)flat->scratch,
                          .delta = layer};
}

static kvs_delta_layer layer_of(const flat_delta *flat)
{
    return (kvs_delta_layer){.n_key_heads = flat->n_key_heads,
                             .n_value_heads = flat->n_value_heads,
                             .head_dim = flat->head_dim,
                             .conv_width = flat->conv_width,
                             .norm_eps = flat->norm_eps};
}

EXPORT int delta_scratch_bytes(const flat_delta *flat, uint32_t max_rows, uint64_t *bytes)
{
    const kvs_delta_layer layer = layer_of(flat);
    const kvs_bound_op op = bind_delta(flat, &layer);
    return kvs_cuda_scratch_delta(&launcher, &op, max_rows, bytes);
}

EXPORT int run_delta(const flat_delta *flat)
{
    const kvs_delta_layer layer = layer_of(flat);
    const kvs_weight_view conv = {.address = flat->conv}, dt_bias = {.address = flat->dt_bias}, decay = {.address = flat->decay};
    const kvs_delta_view view = {.layer = &layer,
                                 .conv = &conv,
                                 .dt_bias = &dt_bias,
                                 .decay = &decay,
                                 .matrix_in = (const float *)(uintptr_t)flat->matrix_in,
                                 .conv_in = (const float *)(uintptr_t)flat->conv_in,
                                 .log_in = (const float *)(uintptr_t)flat->log_in,
                                 .matrix_out = (float *)(uintptr_t)flat->matrix_out,
                                 .conv_out = (float *)(uintptr_t)flat->conv_out,
                                 .log_out = (float *)(uintptr_t)flat->log_out,
                                 .n_pending = flat->n_pending};
    if (flat->folds) {
        return kvs_cuda_launch_delta_fold(&launcher, &view, 0, NULL);
    }
    const kvs_bound_op op = bind_delta(flat, &layer);
    const struct kvs_step step = {.n_rows = flat->n_rows, .first_token = flat->first_token, .deltas = &view};
    launcher.places = (kvs_cuda_places){.words = flat->step, .deltas = flat->step};
    const kvs_status status = kvs_cuda_launch_delta(&launcher, &op, &step);
    launcher.places = (kvs_cuda_places){.words = 0};
    return status;
}
