/* ops.c: one function per operation code: unpack the operands, call the kernel. */
#include "backends/cpu/ops.h"

#include "backends/cpu/attend.h"
#include "backends/cpu/delta.h"
#include "backends/cpu/elementwise.h"
#include "backends/cpu/encode.h"
#include "backends/cpu/experts.h"
#include "backends/cpu/front.h"
#include "backends/cpu/hadamard.h"
#include "backends/cpu/matmul.h"

#include <math.h>

#define MAX_ROTARY_PAIRS 512u
/* Rows that one task rotates or encodes: short passes stay on the calling thread. */
#define ROWS_PER_TASK 16u
#define GATED_ALIGNMENT 64u
/* Outputs of a rope that are rotated by its table, and all that it turns. */
#define N_ROTATED 2u
#define N_TURNED 3u

struct call {
    const kvs_cpu_compute *cpu;
    const kvs_bound_op *op;
    const struct kvs_step *step;
};

static float *in_data(const struct call *c, uint32_t i)
{
    return kvs_operand_data(&c->op->in[i], c->step);
}

static float *out_data(const struct call *c, uint32_t i)
{
    return kvs_operand_data(&c->op->out[i], c->step);
}

static const void *weight_data(const struct call *c, uint32_t i)
{
    return c->op->weights[i] == NULL ? NULL : (const void *)(uintptr_t)c->op->weights[i]->address;
}

static kvs_status run_embed(const struct call *c)
{
    const kvs_weight_view *table = c->op->weights[0];
    return kvs_embed_rows(table->type, table->k, table->n, weight_data(c, 0), c->step->tokens, c->step->n_rows,
                          out_data(c, 0), c->op->out[0].cols);
}

static kvs_status run_norm(const struct call *c)
{
    uint32_t cols = c->op->in[0].cols;
    kvs_rms_norm_desc desc = {.x = in_data(c, 0),
                              .x_stride = cols,
                              .out = out_data(c, 0),
                              .out_stride = cols,
                              .weight = weight_data(c, 0),
                              .n = cols,
                              .group = c->op->u[0] == 0 ? cols : c->op->u[0],
                              .n_rows = kvs_operand_rows(&c->op->in[0], c->step),
                              .eps = c->op->f[0]};
    kvs_rms_norm(c->cpu->threads, c->cpu->isa, &desc);
    return KVS_OK;
}

static uint64_t matmul_workspace(const kvs_bound_op *op, uint32_t n_rows)
{
    uint64_t bytes = 0;
    return kvs_matmul_workspace_bytes(op->weights[0]->k, n_rows, &bytes) == KVS_OK ? bytes : 0;
}

/* Rows of a gated input lie behind the workspace. */
static uint64_t gated_offset(uint64_t workspace_bytes)
{
    return kvs_div_up(workspace_bytes, GATED_ALIGNMENT) * GATED_ALIGNMENT;
}

/* Norm and gate as operations of their own do them. */
static const float *gate_input(const struct call *c, uint32_t n_rows)
{
    const kvs_bound_op *op = c->op;
    const uint32_t cols = op->in[0].cols;
    float *out = (float *)((uint8_t *)op->scratch + gated_offset(matmul_workspace(op, n_rows)));
    const float *x = in_data(c, 0);
    if (op->weights[4] != NULL) {
        const kvs_rms_norm_desc norm = {.x = x,
                                        .x_stride = cols,
                                        .out = out,
                                        .out_stride = cols,
                                        .weight = weight_data(c, 4),
                                        .n = cols,
                                        .group = op->u[3] == 0 ? cols : op->u[3],
                                        .n_rows = n_rows,
                                        .eps = op->f[0]};
        kvs_rms_norm(c->cpu->threads, c->cpu->isa, &norm);
        x = out;
    }
    const kvs_glu_desc glu = {.operands = {.a = in_data(c, 1),
                                           .a_stride = cols,
                                           .b = x,
                                           .b_stride = cols,
                                           .out = out,
                                           .out_stride = cols,
                                           .n = cols,
                                           .n_rows = n_rows},
                              .activation = op->u[2] - 1};
    kvs_glu(c->cpu->threads, c->cpu->isa, &glu);
    return out;
}

static kvs_status run_matmul(const struct call *c)
{
    const kvs_bound_op *op = c->op;
    uint32_t n_rows = kvs_operand_rows(&op->in[0], c->step);
    if (n_rows == 0) {
        return KVS_OK;
    }
    kvs_matmul_desc desc = {.n_parts = op->u[0],
                            .n_rows = n_rows,
                            .epilogue = op->u[1],
                            .norm_eps = op->f[0],
                            .k = op->in[0].cols,
                            .x = op->u[2] == 0 ? in_data(c, 0) : gate_input(c, n_rows),
                            .x_stride = op->in[0].cols,
                            .norm_weight = op->u[2] == 0 ? weight_data(c, 4) : NULL,
                            .workspace = op->scratch,
                            .workspace_bytes = matmul_workspace(op, n_rows)};
    for (uint32_t i = 0; i < op->u[0]; i++) {
        bool has_out = op->u[1] != KVS_EPILOGUE_SWIGLU || i == 0;
        desc.part[i] = (kvs_matmul_part){.type = op->weights[i]->type,
                                         .n = op->weights[i]->n,
                                         .panels = weight_data(c, i),
                                         .scales = op->weights[i]->scales,
                                         .n_scales = op->weights[i]->n_scales,
                                         .out = has_out ? out_data(c, i) : NULL,
                                         .out_stride = has_out ? op->out[i].cols : 0};
    }
    return kvs_matmul_run(c->cpu->threads, c->cpu->isa, &desc);
}

/* The axis of positions that turns a pair: sections interleave, and pairs behind the last of one follow axis 0. */
static uint32_t pair_axis(const kvs_bound_op *op, uint32_t pair)
{
    const uint32_t axis = pair % 3;
    return axis != 0 && pair < 3 * (uint64_t)op->u[axis] ? axis : 0;
}

/* Frequencies are formed in float64, so that the angle of position 262,143 is right. */
static kvs_status run_rope_table(const struct call *c)
{
    const struct kvs_step *step = c->step;
    const float *divisors = weight_data(c, 0);
    double inv_freq[MAX_ROTARY_PAIRS];
    uint8_t axes[MAX_ROTARY_PAIRS];
    const kvs_rope_table_desc desc = {.inv_freq = inv_freq,
                                      .axes = axes,
                                      .positions = step->positions,
                                      .first_position = step->first_token,
                                      .n_rows = step->n_rows,
                                      .n_pairs = c->op->u[0] / 2};
    for (uint32_t i = 0; i < desc.n_pairs; i++) {
        const double divisor = divisors == NULL ? 1.0 : (double)divisors[i];
        inv_freq[i] = pow(c->op->f64[0], -2.0 * i / c->op->u[0]) / divisor * (double)c->op->f[0];
        axes[i] = (uint8_t)(step->n_axes == 3 ? pair_axis(c->op, i) : 0);
    }
    kvs_rope_table(&desc, out_data(c, 0));
    return KVS_OK;
}

typedef void (*rows_fn)(const struct call *c, uint32_t begin, uint32_t end);

struct rows_job {
    const struct call *call;
    rows_fn run;
};

static void rows_task(void *argument, uint32_t index, uint32_t worker)
{
    (void)worker;
    const struct rows_job *job = argument;
    uint32_t begin = index * ROWS_PER_TASK;
    uint32_t end = begin + ROWS_PER_TASK;
    job->run(job->call, begin, end < job->call->step->n_rows ? end : job->call->step->n_rows);
}

/* Rows do not touch each other, so any cut gives the same bits. */
static kvs_status run_rows(const struct call *c, rows_fn run)
{
    struct rows_job job = {.call = c, .run = run};
    if (c->step->n_rows <= ROWS_PER_TASK) {
        run(c, 0, c->step->n_rows);
    } else {
        kvs_threads_run(c->cpu->threads, (uint32_t)kvs_div_up(c->step->n_rows, ROWS_PER_TASK), rows_task, &job);
    }
    return KVS_OK;
}

static void hadamard_rows(const struct call *c, uint32_t begin, uint32_t end)
{
    uint32_t cols = c->op->out[0].cols;
    kvs_hadamard_rows(c->cpu->isa, out_data(c, 0) + (size_t)begin * cols, end - begin, cols, cols, c->op->u[0]);
}

static kvs_status run_hadamard(const struct call *c)
{
    return run_rows(c, hadamard_rows);
}

/* Part i of a rope has blocks of u[3]; operations of their own have blocks of u[0]. */
static void turned_rows(const struct call *c, uint32_t begin, uint32_t end)
{
    for (uint32_t i = 0; i < N_TURNED && c->op->out[i].cols != 0; i++) {
        const uint32_t cols = c->op->out[i].cols;
        kvs_hadamard_rows(c->cpu->isa, out_data(c, i) + (size_t)begin * cols, end - begin, cols, cols, c->op->u[3]);
    }
}

static void norm_heads(const struct call *c, uint32_t part)
{
    const uint32_t cols = c->op->out[part].cols;
    const kvs_rms_norm_desc desc = {.x = out_data(c, part),
                                    .x_stride = cols,
                                    .out = out_data(c, part),
                                    .out_stride = cols,
                                    .weight = weight_data(c, part),
                                    .n = cols,
                                    .group = c->op->u[0],
                                    .n_rows = c->step->n_rows,
                                    .eps = c->op->f[0]};
    kvs_rms_norm(c->cpu->threads, c->cpu->isa, &desc);
}

static void rotate_heads(const struct call *c, uint32_t part)
{
    uint32_t cols = c->op->out[part].cols;
    kvs_rope_desc desc = {.x = out_data(c, part),
                          .x_stride = cols,
                          .out = out_data(c, part),
                          .out_stride = cols,
                          .table = in_data(c, 0),
                          .n_rows = c->step->n_rows,
                          .n_heads = cols / c->op->u[0],
                          .head_values = c->op->u[0],
                          .n_rot = c->op->u[1],
                          .mode = c->op->u[2]};
    if (c->op->weights[part] != NULL) {
        norm_heads(c, part);
    }
    kvs_rope(c->cpu->threads, c->cpu->isa, &desc);
}

static kvs_status run_rope(const struct call *c)
{
    for (uint32_t i = 0; i < N_ROTATED && c->op->out[i].cols != 0; i++) {
        rotate_heads(c, i);
    }
    return c->op->u[3] == 0 ? KVS_OK : run_rows(c, turned_rows);
}

/* Rows go to the tail pages of the pass: a page boundary ends a run. */
static void write_rows(const struct call *c, uint32_t begin, uint32_t end)
{
    const struct kvs_step *step = c->step;
    const uint64_t *table = step->page_tables[c->op->layer];
    for (uint32_t row = begin; row < end;) {
        uint64_t token = step->first_token + row;
        uint32_t first = (uint32_t)(token % KVS_PAGE_TOKENS);
        uint32_t room = KVS_PAGE_TOKENS - first;
        uint32_t n_rows = end - row < room ? end - row : room;
        kvs_encode_rows(c->cpu->isa, c->op->kv, c->op->record, (void *)(uintptr_t)table[token / KVS_PAGE_TOKENS], first,
                        n_rows, in_data(c, 0) + (size_t)row * c->op->in[0].cols, c->op->in[0].cols,
                        in_data(c, 1) + (size_t)row * c->op->in[1].cols, c->op->in[1].cols);
        row += n_rows;
    }
}

static kvs_status run_kv_write(const struct call *c)
{
    return run_rows(c, write_rows);
}

static kvs_binary_desc binary(const struct call *c, const float *a, const float *b)
{
    uint32_t cols = c->op->out[0].cols;
    return (kvs_binary_desc){.a = a,
                             .a_stride = cols,
                             .b = b,
                             .b_stride = cols,
                             .out = out_data(c, 0),
                             .out_stride = cols,
                             .n = cols,
                             .n_rows = kvs_operand_rows(&c->op->out[0], c->step)};
}

static kvs_status run_glu(const struct call *c)
{
    kvs_glu_desc desc = {.operands = binary(c, in_data(c, 0), in_data(c, 1)),
                         .activation = c->op->u[0],
                         .is_one_gate = c->op->in[0].cols == 1};
    desc.operands.a_stride = c->op->in[0].cols;
    kvs_glu(c->cpu->threads, c->cpu->isa, &desc);
    return KVS_OK;
}

static kvs_status run_add(const struct call *c)
{
    kvs_binary_desc desc = binary(c, out_data(c, 0), in_data(c, 0));
    kvs_add(c->cpu->threads, c->cpu->isa, &desc);
    return KVS_OK;
}

static kvs_expert_matrix expert_matrix(const kvs_bound_op *op, uint32_t i)
{
    const kvs_weight_view *scales = op->weights[i + 3];
    return (kvs_expert_matrix){.type = op->weights[i]->type,
                               .panels = (const void *)(uintptr_t)op->weights[i]->address,
                               .scales = scales == NULL ? NULL : (const float *)(uintptr_t)scales->address};
}

/* Without the addresses that change from pass to pass. */
static kvs_experts_desc experts_desc(const kvs_bound_op *op, uint32_t n_rows)
{
    return (kvs_experts_desc){.gate = expert_matrix(op, 0),
                              .up = expert_matrix(op, 1),
                              .down = expert_matrix(op, 2),
                              .n_experts = op->u[0],
                              .n_chosen = op->u[1],
                              .n_rows = n_rows,
                              .factor = op->f[0],
                              .n_embd = op->in[0].cols,
                              .n_ff = op->weights[2]->k,
                              .workspace = op->scratch};
}

static kvs_status run_experts(const struct call *c)
{
    kvs_experts_desc desc = experts_desc(c->op, c->step->n_rows);
    desc.x = in_data(c, 0);
    desc.router = in_data(c, 1);
    desc.out = out_data(c, 0);
    return kvs_experts_run(c->cpu->threads, c->cpu->isa, &desc);
}

static kvs_status run_gather(const struct call *c)
{
    uint32_t cols = c->op->in[0].cols;
    return kvs_gather_rows(in_data(c, 0), cols, c->step->n_rows, c->step->out_rows, c->step->n_out_rows, cols,
                           out_data(c, 0), cols);
}

static kvs_status run_delta(const struct call *c)
{
    const kvs_delta_job job = {.view = &c->step->deltas[c->op->layer],
                               .inputs = in_data(c, 0),
                               .beta = in_data(c, 1),
                               .alpha = in_data(c, 2),
                               .out = out_data(c, 0),
                               .n_rows = c->step->n_rows,
                               .mode = c->op->u[0],
                               .first_token = c->step->first_token,
                               .scratch = c->op->scratch};
    kvs_delta_run(c->cpu->threads, c->cpu->isa, &job);
    return KVS_OK;
}

static kvs_status run_front(const struct call *c)
{
    const kvs_front_desc desc = {.rows = in_data(c, 0),
                                 .stride = c->op->in[0].cols,
                                 .n_rows = c->step->n_out_rows,
                                 .n_cols = c->op->in[0].cols,
                                 .n_tokens = c->op->u[1],
                                 .n_best = c->op->u[0],
                                 .out = (uint32_t *)(void *)out_data(c, 0)};
    kvs_front_run(c->cpu->threads, c->cpu->isa, &desc);
    return KVS_OK;
}

static kvs_status (*const RUN[])(const struct call *) = {
    [KVS_OP_EMBED] = run_embed,       [KVS_OP_NORM] = run_norm,
    [KVS_OP_MATMUL] = run_matmul,     [KVS_OP_ROPE_TABLE] = run_rope_table,
    [KVS_OP_ROPE] = run_rope,         [KVS_OP_HADAMARD] = run_hadamard,
    [KVS_OP_KV_WRITE] = run_kv_write, [KVS_OP_GLU] = run_glu,
    [KVS_OP_ADD] = run_add,           [KVS_OP_GATHER] = run_gather,
    [KVS_OP_DELTA] = run_delta,       [KVS_OP_EXPERTS] = run_experts,
    [KVS_OP_FRONT] = run_front,
};

kvs_status kvs_cpu_run_op(const kvs_cpu_compute *cpu, const kvs_bound_op *op, const struct kvs_step *step)
{
    struct call c = {.cpu = cpu, .op = op, .step = step};
    if (op->code >= sizeof RUN / sizeof RUN[0] || RUN[op->code] == NULL) {
        return kvs_fail(cpu->device, KVS_EUNSUPPORTED, "the CPU backend has no operation %u", op->code);
    }
    kvs_status status = RUN[op->code](&c);
    return status == KVS_OK ? KVS_OK : kvs_fail(cpu->device, status, "operation code %u failed", op->code);
}

kvs_status kvs_cpu_op_scratch_bytes(const kvs_cpu_compute *cpu, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes)
{
    *bytes = 0;
    if (op->code == KVS_OP_ROPE_TABLE && op->u[0] / 2 > MAX_ROTARY_PAIRS) {
        return kvs_fail(cpu->device, KVS_EUNSUPPORTED, "%u rotary values, at most %u", op->u[0], 2 * MAX_ROTARY_PAIRS);
    }
    if (op->code == KVS_OP_MATMUL) {
        kvs_status status = kvs_matmul_workspace_bytes(op->weights[0]->k, max_rows == 0 ? 1 : max_rows, bytes);
        if (status == KVS_OK && op->u[2] != 0) {
            *bytes = gated_offset(*bytes) + (max_rows == 0 ? 1 : max_rows) * op->weights[0]->k * sizeof(float);
        }
        return status == KVS_OK ? KVS_OK : kvs_fail(cpu->device, status, "a matmul of %u rows, at most %u", max_rows, KVS_MATMUL_ROWS);
    }
    if (op->code == KVS_OP_EXPERTS) {
        const kvs_experts_desc desc = experts_desc(op, max_rows == 0 ? 1 : max_rows);
        kvs_status status = kvs_experts_workspace_bytes(&desc, bytes);
        return status == KVS_OK ? KVS_OK
                                : kvs_fail(cpu->device, status, "%u experts of %llu x %llu values: at most %u, sizes multiples of %u",
                                           desc.n_experts, (kvs_ull)desc.n_ff, (kvs_ull)desc.n_embd, KVS_EXPERTS_MAX,
                                           KVS_PANEL_ROWS);
    }
    if (op->code == KVS_OP_DELTA) {
        *bytes = kvs_delta_scratch_bytes(op->delta, op->u[0], cpu->n_threads);
        return KVS_OK;
    }
    if (op->code == KVS_OP_ATTEND) {
        *bytes = kvs_attend_state_bytes(op->kv, op->u[0], max_rows, cpu->n_threads);
        return *bytes == 0 ? kvs_fail(cpu->device, KVS_EOVERFLOW, "attention of %u rows is too wide", max_rows) : KVS_OK;
    }
    return KVS_OK;
}

/* What attention gives is rotated over blocks of u[1]. */
static void attended_rows(const struct call *c, uint32_t begin, uint32_t end)
{
    const uint32_t cols = c->op->out[0].cols;
    kvs_hadamard_rows(c->cpu->isa, out_data(c, 0) + (size_t)begin * cols, end - begin, cols, cols, c->op->u[1]);
}

static kvs_attend_job attend_job(const kvs_bound_op *op, const struct kvs_step *step)
{
    return (kvs_attend_job){.layer = op->kv,
                            .record = op->record,
                            .n_query_heads = op->u[0],
                            .n_rows = step->n_rows,
                            .q = kvs_operand_data(&op->in[0], step),
                            .q_stride = op->in[0].cols,
                            .out = kvs_operand_data(&op->out[0], step),
                            .out_stride = op->out[0].cols,
                            .scale = op->f[0],
                            .first_position = step->first_token,
                            .page_table = step->page_tables[op->layer],
                            .state = op->scratch};
}

void kvs_cpu_attend_begin(const kvs_bound_op *op, const struct kvs_step *step)
{
    kvs_attend_job job = attend_job(op, step);
    kvs_attend_begin(&job);
}

void kvs_cpu_attend_wave(const kvs_cpu_compute *cpu, const kvs_bound_op *op, const struct kvs_step *step,
                         uint64_t page_begin, uint64_t page_end)
{
    kvs_attend_job job = attend_job(op, step);
    kvs_attend_wave(cpu->threads, cpu->isa, &job, page_begin, page_end);
}

void kvs_cpu_attend_finish(const kvs_cpu_compute *cpu, const kvs_bound_op *op, const struct kvs_step *step)
{
    kvs_attend_job job = attend_job(op, step);
    kvs_attend_finish(cpu->threads, cpu->isa, &job);
    if (op->u[1] != 0) {
        (void)run_rows(&(struct call){.cpu = cpu, .op = op, .step = step}, attended_rows);
    }
}
