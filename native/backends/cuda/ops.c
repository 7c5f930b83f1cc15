/* ops.c: which launcher runs which operation; and the same launchers run dry. */
#include "backends/cuda/ops.h"

#include <string.h>

/* Passes up to this wide have kernels of their own for some widths. */
#define NARROW_ROWS 64u
/* A page number and a number of rows that stand for long histories. */
#define MANY_PAGES 1024u

typedef kvs_status (*launch)(kvs_cuda_launcher *, const kvs_bound_op *, const struct kvs_step *);

static const launch LAUNCHES[] = {
    [KVS_OP_EMBED] = kvs_cuda_launch_embed,
    [KVS_OP_NORM] = kvs_cuda_launch_norm,
    [KVS_OP_MATMUL] = kvs_cuda_launch_matmul,
    [KVS_OP_ROPE_TABLE] = kvs_cuda_launch_rope_table,
    [KVS_OP_ROPE] = kvs_cuda_launch_rope,
    [KVS_OP_HADAMARD] = kvs_cuda_launch_hadamard,
    [KVS_OP_KV_WRITE] = kvs_cuda_launch_kv_write,
    [KVS_OP_ATTEND] = NULL,
    [KVS_OP_GLU] = kvs_cuda_launch_glu,
    [KVS_OP_ADD] = kvs_cuda_launch_add,
    [KVS_OP_GATHER] = kvs_cuda_launch_gather,
    [KVS_OP_DELTA] = kvs_cuda_launch_delta,
    [KVS_OP_EXPERTS] = kvs_cuda_launch_experts,
    [KVS_OP_FRONT] = kvs_cuda_launch_front,
};

kvs_status kvs_cuda_run_op(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    if (op->code >= sizeof LAUNCHES / sizeof *LAUNCHES || LAUNCHES[op->code] == NULL) {
        return kvs_fail(launcher->device, KVS_EUNSUPPORTED, "operation %u has no kernel", op->code);
    }
    return LAUNCHES[op->code](launcher, op, step);
}

static kvs_status scratch_bytes(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes)
{
    *bytes = 0;
    switch (op->code) {
    case KVS_OP_MATMUL:
        return kvs_cuda_scratch_matmul(launcher, op, max_rows, bytes);
    case KVS_OP_ATTEND:
        return kvs_cuda_scratch_attend(launcher, op, max_rows, bytes);
    case KVS_OP_DELTA:
        return kvs_cuda_scratch_delta(launcher, op, max_rows, bytes);
    case KVS_OP_EXPERTS:
        return kvs_cuda_scratch_experts(launcher, op, max_rows, bytes);
    case KVS_OP_FRONT:
        return kvs_cuda_scratch_front(launcher, op, max_rows, bytes);
    default:
        return KVS_OK;
    }
}

/* ---- dry ---- */

/* An address that nobody reads. */
static uint64_t nowhere(void)
{
    return UINT64_C(1) << 40;
}

static float *no_values(void)
{
    return (float *)(uintptr_t)nowhere();
}

static void give_addresses(kvs_bound_op *op)
{
    for (int i = 0; i < 3; i++) {
        op->in[i].data = no_values();
        op->in[i].output_slot = KVS_NONE;
        op->in[i].is_input = 0;
    }
    for (int i = 0; i < 4; i++) {
        op->out[i].data = no_values();
        op->out[i].output_slot = KVS_NONE;
    }
    op->scratch = no_values();
    op->layer = 0;
}

static kvs_status attend_dry(kvs_cuda_launcher *launcher, const kvs_bound_op *op, struct kvs_step *step)
{
    kvs_status status = kvs_cuda_launch_attend_begin(launcher, op, step);
    for (uint64_t pages = 1; status == KVS_OK && pages <= MANY_PAGES; pages *= MANY_PAGES) {
        step->active_pages = pages;
        step->first_token = pages * KVS_PAGE_TOKENS - KVS_PAGE_TOKENS;
        status = kvs_cuda_launch_attend_wave(launcher, op, step, 0, pages);
    }
    return status == KVS_OK ? kvs_cuda_launch_attend_finish(launcher, op, step) : status;
}

static kvs_status run_dry(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t n_rows)
{
    const kvs_weight_view vector = {.type = KVS_TYPE_F32, .layout = KVS_WEIGHT_ROWS, .address = nowhere()};
    kvs_delta_view delta = {.layer = op->delta,
                            .conv = &vector,
                            .dt_bias = &vector,
                            .decay = &vector,
                            .matrix_in = no_values(),
                            .conv_in = no_values(),
                            .log_in = no_values(),
                            .matrix_out = no_values(),
                            .conv_out = no_values(),
                            .log_out = no_values()};
    const uint64_t *const table = (const uint64_t *)(uintptr_t)nowhere();
    const uint32_t *const words = (const uint32_t *)(uintptr_t)nowhere();
    struct kvs_step step = {.n_rows = n_rows,
                            .n_out_rows = n_rows,
                            .tokens = words,
                            .positions = words,
                            .n_axes = 1,
                            .out_rows = words,
                            .n_layers = 1,
                            .active_pages = 1,
                            .page_tables = &table,
                            .deltas = &delta};
    if (op->code == KVS_OP_ATTEND) {
        return attend_dry(launcher, op, &step);
    }
    kvs_status status = kvs_cuda_run_op(launcher, op, &step);
    if (status == KVS_OK && op->code == KVS_OP_DELTA) {
        delta.n_pending = 1;
        status = kvs_cuda_run_op(launcher, op, &step);
    }
    return status;
}

/* Every narrow width, then powers of two: a launcher tells wider passes apart by tiles at most. */
static kvs_status note_kernels(const kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows)
{
    kvs_cuda_launcher dry = *launcher;
    kvs_bound_op without = *op;
    dry.is_dry = 1;
    give_addresses(&without);
    kvs_status status = KVS_OK;
    for (uint32_t n_rows = 1; status == KVS_OK && n_rows < max_rows; n_rows = n_rows < NARROW_ROWS ? n_rows + 1 : n_rows * 2) {
        status = run_dry(&dry, &without, n_rows);
    }
    return status == KVS_OK ? run_dry(&dry, &without, max_rows) : status;
}

/* An operation without shapes is only measured. */
kvs_status kvs_cuda_plan_op(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes)
{
    const bool has_shapes = op->in[0].cols != 0 || op->out[0].cols != 0;
    const kvs_status status = scratch_bytes(launcher, op, max_rows, bytes);
    return status == KVS_OK && has_shapes && max_rows != 0 ? note_kernels(launcher, op, max_rows) : status;
}
