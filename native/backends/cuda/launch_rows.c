/* launch_rows.c: the kernels of operations on rows. Rows never touch each other. */
#include "backends/cuda/launcher.h"
#include "kernels/attend_params.h"

#define THREADS 256u
#define WARP 32u
#define TABLE_THREADS 64u
#define HADAMARD_LEAST 32u
#define HADAMARD_MOST 1024u
/* Groups up to this size take a warp, larger ones a block. */
#define WARP_GROUP 512u
/* Parts of a rope that the table rotates. */
#define N_ROTATED 2u

static uint64_t address_of(const kvs_operand *operand, const struct kvs_step *step)
{
    return (uint64_t)(uintptr_t)kvs_operand_data(operand, step);
}

static uint64_t weight_address(const kvs_bound_op *op, uint32_t i)
{
    return op->weights[i] == NULL ? 0 : op->weights[i]->address;
}

static kvs_status launch(kvs_cuda_launcher *launcher, const kvs_cuda_key *key, uint64_t x, uint64_t y, uint32_t threads,
                         const void *params, size_t params_bytes)
{
    if (x > INT32_MAX || y > UINT16_MAX) {
        return kvs_fail(launcher->device, KVS_EOVERFLOW, "%llu x %llu blocks of %s are too many", (kvs_ull)x, (kvs_ull)y,
                        key->kernel);
    }
    return kvs_cuda_launch(launcher, key, (kvs_cuda_dim){(uint32_t)x, (uint32_t)y, 1}, (kvs_cuda_dim){threads, 1, 1}, 0,
                           params, params_bytes);
}

/* Groups of `x` into out[part], which may be x, by weights[part]. */
static kvs_status run_norm(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const kvs_operand *x, uint32_t part,
                           const struct kvs_step *step, uint32_t group)
{
    const kvs_cuda_key key = {.source = "norm", .kernel = "rms_norm", .waits = true};
    const kvs_norm_params params = {.x = address_of(x, step),
                                    .out = address_of(&op->out[part], step),
                                    .weight = weight_address(op, part),
                                    .n_groups = (uint64_t)kvs_operand_rows(x, step) * (x->cols / group),
                                    .group = group,
                                    .team = group <= WARP_GROUP ? WARP : THREADS,
                                    .eps = op->f[0]};
    return launch(launcher, &key, kvs_div_up(params.n_groups, THREADS / params.team), 1, THREADS, &params, sizeof params);
}

kvs_status kvs_cuda_launch_norm(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    return run_norm(launcher, op, &op->in[0], 0, step, op->u[0] == 0 ? op->in[0].cols : op->u[0]);
}

static bool is_turnable(uint32_t block)
{
    return block >= HADAMARD_LEAST && block <= HADAMARD_MOST && (block & (block - 1)) == 0;
}

static kvs_status run_hadamard(kvs_cuda_launcher *launcher, const kvs_operand *out, const struct kvs_step *step, uint32_t block)
{
    if (!is_turnable(block)) {
        return kvs_fail(launcher->device, KVS_EUNSUPPORTED, "rotation of %u values: CUDA has powers of two from %u to %u", block,
                        HADAMARD_LEAST, HADAMARD_MOST);
    }
    const kvs_cuda_key key = {.source = "hadamard",
                              .kernel = "hadamard",
                              .waits = true,
                              .n_macros = 1,
                              .macros = {{"KVS_BLOCK", (int32_t)block}}};
    const uint64_t n_values = (uint64_t)kvs_operand_rows(out, step) * out->cols;
    const kvs_hadamard_params params = {.values = address_of(out, step), .n_blocks = n_values / block, .scale = kvs_cuda_hadamard_scale(block)};
    return launch(launcher, &key, kvs_div_up(params.n_blocks, THREADS / WARP), 1, THREADS, &params, sizeof params);
}

kvs_status kvs_cuda_launch_hadamard(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    return run_hadamard(launcher, &op->out[0], step, op->u[0]);
}

kvs_status kvs_cuda_launch_rope_table(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    const kvs_cuda_key key = {.source = "rope_table", .kernel = "rope_table", .waits = true};
    const kvs_rope_table_params params = {.table = address_of(&op->out[0], step),
                                          .positions = (uint64_t)(uintptr_t)step->positions,
                                          .divisors = weight_address(op, 0),
                                          .first_token = step->first_token,
                                          .step = launcher->places.words,
                                          .base = op->f64[0],
                                          .factor = (double)op->f[0],
                                          .n_rows = step->n_rows,
                                          .n_rotary = op->u[0],
                                          .n_axes = step->n_axes,
                                          .section = {0, op->u[1], op->u[2]}};
    return launch(launcher, &key, step->n_rows, kvs_div_up(op->u[0] / 2, TABLE_THREADS), TABLE_THREADS, &params,
                  sizeof params);
}

static kvs_status run_rope(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t part, const struct kvs_step *step)
{
    const kvs_cuda_key key = {.source = "rope", .kernel = "rope", .waits = true};
    const kvs_rope_params params = {.values = address_of(&op->out[part], step),
                                    .table = address_of(&op->in[0], step),
                                    .n_rows = step->n_rows,
                                    .n_heads = op->out[part].cols / op->u[0],
                                    .head_values = op->u[0],
                                    .n_rotary = op->u[1],
                                    .is_halves = op->u[2] == 1};
    const uint64_t n_pairs = (uint64_t)params.n_heads * (params.n_rotary / 2);
    return launch(launcher, &key, step->n_rows, kvs_div_up(n_pairs, THREADS), THREADS, &params, sizeof params);
}

/* Norm, rope and Walsh-Hadamard of all parts in one kernel: heads whose warp holds them. */
static kvs_status turn_heads(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    const uint32_t head = op->u[0];
    const kvs_cuda_key key = {.source = "turn",
                              .kernel = "turn",
                              .waits = true,
                              .n_macros = 2,
                              .macros = {{"KVS_HEAD", (int32_t)head}, {"KVS_BLOCK", (int32_t)op->u[3]}}};
    kvs_turn_params params = {.table = address_of(&op->in[0], step),
                              .n_rows = step->n_rows,
                              .n_rotary = op->u[1],
                              .is_halves = op->u[2] == 1,
                              .eps = op->f[0],
                              .scale = kvs_cuda_hadamard_scale(op->u[3])};
    /* Values whose heads have another size take a kernel of their own. */
    const uint32_t n_parts = op->out[2].cols % head == 0 ? KVS_CUDA_TURN_PARTS : N_ROTATED;
    uint64_t n_heads = 0;
    for (uint32_t i = 0; i < n_parts && op->out[i].cols != 0; i++) {
        params.parts[i] = (kvs_turn_part){.values = address_of(&op->out[i], step),
                                          .weight = i < N_ROTATED ? weight_address(op, i) : 0,
                                          .n_heads = op->out[i].cols / head,
                                          .is_rotated = i < N_ROTATED};
        n_heads += (uint64_t)params.n_rows * params.parts[i].n_heads;
    }
    const kvs_status status =
        launch(launcher, &key, kvs_div_up(n_heads, THREADS / WARP), 1, THREADS, &params, sizeof params);
    return status == KVS_OK && n_parts == N_ROTATED ? run_hadamard(launcher, &op->out[2], step, op->u[3]) : status;
}

static bool are_heads_turnable(const kvs_bound_op *op)
{
    const uint32_t head = op->u[0], block = op->u[3];
    const bool is_more_than_rope = op->weights[0] != NULL || block != 0 || op->out[1].cols != 0;
    return is_more_than_rope && head % WARP == 0 && head <= WARP_GROUP && (block == 0 || is_turnable(block));
}

/* Heads that no warp holds take a kernel for each step; the bits are the same. */
kvs_status kvs_cuda_launch_rope(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    const uint32_t head = op->u[0], block = op->u[3];
    if (are_heads_turnable(op)) {
        return turn_heads(launcher, op, step);
    }
    kvs_status status = KVS_OK;
    for (uint32_t i = 0; i < KVS_CUDA_TURN_PARTS && op->out[i].cols != 0 && status == KVS_OK; i++) {
        if (i < N_ROTATED && op->weights[i] != NULL) {
            status = run_norm(launcher, op, &op->out[i], i, step, head);
        }
        if (i < N_ROTATED && status == KVS_OK) {
            status = run_rope(launcher, op, i, step);
        }
        if (block != 0 && status == KVS_OK) {
            status = run_hadamard(launcher, &op->out[i], step, block);
        }
    }
    return status;
}

/* The value-by-value operations share their parameters. */
static kvs_status launch_values(kvs_cuda_launcher *launcher, const kvs_cuda_key *key, const kvs_bound_op *op,
                                const struct kvs_step *step, kvs_glu_params params)
{
    params.out = address_of(&op->out[0], step);
    params.cols = op->out[0].cols;
    params.n_values = (uint64_t)kvs_operand_rows(&op->out[0], step) * params.cols;
    return launch(launcher, key, kvs_div_up(params.n_values, THREADS), 1, THREADS, &params, sizeof params);
}

kvs_status kvs_cuda_launch_glu(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    const kvs_cuda_key key = {.source = "glu", .kernel = "glu", .waits = true};
    const kvs_glu_params params = {.gate = address_of(&op->in[0], step),
                                   .up = address_of(&op->in[1], step),
                                   .is_sigmoid = op->u[0] == 1,
                                   .is_one_gate = op->in[0].cols == 1};
    return launch_values(launcher, &key, op, step, params);
}

kvs_status kvs_cuda_launch_add(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    const kvs_cuda_key key = {.source = "add", .kernel = "add", .waits = true};
    return launch_values(launcher, &key, op, step, (kvs_glu_params){.up = address_of(&op->in[0], step)});
}

kvs_status kvs_cuda_launch_gather(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    const kvs_cuda_key key = {.source = "gather", .kernel = "gather", .waits = true};
    const kvs_gather_params params = {.in = address_of(&op->in[0], step),
                                      .out = address_of(&op->out[0], step),
                                      .rows = (uint64_t)(uintptr_t)step->out_rows,
                                      .n_rows = step->n_out_rows,
                                      .cols = op->in[0].cols};
    return launch(launcher, &key, step->n_out_rows, kvs_div_up(params.cols, THREADS), THREADS, &params, sizeof params);
}
