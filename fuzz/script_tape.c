/* script_tape.c: any operations in any order on two devices: both must accept, refuse, seal, bind and run alike, to the bit.
 *
 * create (kind | rows << 1, columns; first: output rows at most): a tensor, or above 127 a recurrent layer. record (code, layer, in,
 * in, out, out, weight, weight, u, u): an operation; its third input and output, third weight, norm and factors follow from the
 * others. commit: seal, which must succeed exactly when everything is written before it is read, and each recurrent layer runs
 * once, in order, and as the others. bind (bit 0: a workspace too small). run (rows - 1 | output rows << 4): a pass. cancel
 * (rows): so many of the next pass are not accepted. truncate (rows): the sequence, and its state with it as far as rows are
 * pending. unbind. fail. release (which): a weight of the caller's. close (order): end.
 */
#include "tape_side.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_OPS = 24, N_SIDES = 2 };

typedef struct model_tensor {
    uint32_t kind, rows, cols;
} model_tensor;

typedef struct world {
    side sides[N_SIDES];
    uint32_t max_out_rows;
    model_tensor tensors[MAX_TENSORS];
    uint32_t n_tensors;
    uint32_t n_outputs;
    kvs_op_desc ops[MAX_OPS];
    uint32_t n_ops;
    bool is_sealed;
    bool is_bound;
    bool writes_all_layers;
    uint32_t n_deltas;
    bool is_logged;
    uint32_t n_refused; /* rows of the next pass that are not accepted */
    uint64_t n_tokens;
    uint64_t n_pending; /* of them, in the log of the state */
} world;

/* ---- recording ---- */

static void create_delta(world *w)
{
    if (w->n_deltas == MAX_DELTAS) {
        return;
    }
    bool is_made = false;
    for (uint32_t i = 0; i < N_SIDES; i++) {
        uint32_t id = KVS_NONE;
        const kvs_status expected = w->is_sealed ? KVS_EBUSY : KVS_OK;
        is_made = OUTCOME(&w->sides[i].fault, side_add_delta(&w->sides[i], &id), expected);
        EXPECT_U64(id, is_made ? w->n_deltas : KVS_NONE);
    }
    w->n_deltas += is_made ? 1 : 0;
}

static void create_tensor(world *w, const step *step)
{
    static const uint32_t widths[] = {32, 64, 16, 8, 2, 1};
    const model_tensor made = {.kind = step->operand[0] % 2,
                               .rows = step->operand[0] / 2 % 2,
                               .cols = widths[step->operand[1] % (sizeof widths / sizeof widths[0])]};
    const kvs_tensor_desc desc = {
        .struct_size = sizeof desc, .kind = made.kind, .rows = made.rows, .cols = made.cols};
    if (w->n_tensors == MAX_TENSORS) {
        return;
    }
    bool is_made = false;
    for (uint32_t i = 0; i < N_SIDES; i++) {
        uint32_t id = KVS_NONE;
        const kvs_status expected = w->is_sealed ? KVS_EBUSY : KVS_OK;
        is_made = OUTCOME(&w->sides[i].fault, kvs_tape_add_tensor(w->sides[i].tape, &desc, &id), expected);
        EXPECT_U64(id, is_made ? w->n_tensors : KVS_NONE);
    }
    if (is_made) {
        w->tensors[w->n_tensors++] = made;
        w->n_outputs += made.kind == KVS_TENSOR_OUTPUT ? 1 : 0;
    }
}

static uint32_t tensor_of(const world *w, uint8_t operand)
{
    const uint32_t id = operand % (w->n_tensors + 1);
    return id == w->n_tensors ? KVS_NONE : id;
}

static uint32_t weight_of(uint8_t operand)
{
    const uint32_t id = operand % (N_WEIGHTS + 1);
    return id == N_WEIGHTS ? KVS_NONE : id;
}

static kvs_op_desc read_op(const world *w, const step *step)
{
    static const uint32_t numbers[] = {0, 1, 2, 3, 4, 8, 16, 32, 64, 5, UINT32_MAX};
    static const uint32_t n_numbers = sizeof numbers / sizeof numbers[0];
    const uint8_t *operand = step->operand;
    kvs_op_desc op = {.struct_size = sizeof op, .code = operand[0] % (KVS_OP_EXPERTS + 2u)};
    op.layer = operand[1] % (N_LAYERS + 1);
    op.in[0] = tensor_of(w, operand[2]);
    op.in[1] = tensor_of(w, operand[3]);
    op.in[2] = tensor_of(w, operand[5]); /* no operation has both a third input and a second output */
    op.out[0] = tensor_of(w, operand[4]);
    op.out[1] = tensor_of(w, operand[5]);
    op.out[2] = tensor_of(w, (uint8_t)(operand[5] / MAX_TENSORS));
    op.weights[0] = weight_of(operand[6]);
    op.weights[1] = weight_of(operand[7]);
    op.weights[2] = weight_of((uint8_t)(operand[7] / (N_WEIGHTS + 1)));
    op.weights[3] = weight_of((uint8_t)(operand[6] / (N_WEIGHTS + 1) + N_WEIGHTS));
    op.weights[4] = op.weights[3];
    op.weights[5] = op.weights[3];
    op.u[0] = numbers[operand[8] % n_numbers];
    op.u[1] = numbers[operand[9] % n_numbers];
    op.u[2] = operand[8] / n_numbers % 3;
    op.f[0] = op.code == KVS_OP_NORM || op.code == KVS_OP_MATMUL ? 1e-5F : 0.5F;
    op.f64[0] = operand[9] / n_numbers % 8 == 7 ? 0.0 : 10000.0;
    return op;
}

static void record(world *w, const step *step)
{
    const kvs_op_desc op = read_op(w, step);
    if (w->n_ops == MAX_OPS) {
        return;
    }
    kvs_status status[N_SIDES];
    for (uint32_t i = 0; i < N_SIDES; i++) {
        status[i] = kvs_tape_add_op(w->sides[i].tape, &op);
        EXPECT(!w->is_sealed || status[i] == KVS_EBUSY);
        EXPECT(status[i] == KVS_OK || status[i] == KVS_EINVAL || status[i] == KVS_EBUSY ||
               (status[i] == KVS_ENOMEM && w->sides[i].fault.n_fired != 0));
    }
    EXPECT_STATUS(status[0], status[1]);
    if (status[0] == KVS_OK) {
        w->ops[w->n_ops++] = op;
    }
}

/* ---- sealing ---- */

typedef struct progress {
    bool is_written[MAX_TENSORS];
    bool has_rows[N_LAYERS];
    uint32_t next_layer;
    uint32_t next_delta;
    bool is_logged;
} progress;

static bool in_place(const kvs_op_desc *op)
{
    return op->code == KVS_OP_ROPE || op->code == KVS_OP_HADAMARD || op->code == KVS_OP_ADD ||
           (op->code == KVS_OP_MATMUL && op->u[1] == 1);
}

static uint32_t n_inputs(const kvs_op_desc *op)
{
    switch (op->code) {
    case KVS_OP_EMBED:
    case KVS_OP_ROPE_TABLE:
    case KVS_OP_HADAMARD:
        return 0;
    case KVS_OP_KV_WRITE:
    case KVS_OP_GLU:
    case KVS_OP_EXPERTS:
        return 2;
    case KVS_OP_DELTA:
        return 3;
    case KVS_OP_MATMUL:
        return op->u[2] == 0 ? 1 : 2;
    default:
        return 1;
    }
}

static uint32_t n_written(const kvs_op_desc *op)
{
    const bool is_split = op->code == KVS_OP_MATMUL && op->u[1] != 2;
    if (op->code == KVS_OP_ROPE) {
        return op->out[2] != KVS_NONE ? 3 : op->out[1] != KVS_NONE ? 2 : 1;
    }
    return op->code == KVS_OP_KV_WRITE ? 0 : is_split ? op->u[0] : 1;
}

static bool layer_in_order(progress *p, const kvs_op_desc *op)
{
    if (op->code == KVS_OP_KV_WRITE) {
        const bool is_first = !p->has_rows[op->layer];
        p->has_rows[op->layer] = true;
        return is_first;
    }
    if (op->code == KVS_OP_ATTEND) {
        const bool is_next = op->layer >= p->next_layer && p->has_rows[op->layer];
        p->next_layer = op->layer + 1;
        return is_next;
    }
    if (op->code == KVS_OP_DELTA) {
        const bool is_logged = op->u[0] == KVS_DELTA_LOGGED;
        const bool is_next = op->layer == p->next_delta && (op->layer == 0 || is_logged == p->is_logged);
        p->is_logged = is_logged;
        p->next_delta++;
        return is_next;
    }
    return true;
}

/* Replay one operation on flags; false where it reads what is not there. */
static bool follows(progress *p, const kvs_op_desc *op)
{
    bool is_good = layer_in_order(p, op);
    for (uint32_t i = 0; i < n_inputs(op); i++) {
        is_good = is_good && p->is_written[op->in[i]];
    }
    for (uint32_t i = 0; i < n_written(op); i++) {
        is_good = is_good && (!in_place(op) || p->is_written[op->out[i]]);
    }
    for (uint32_t i = 0; i < n_written(op); i++) {
        p->is_written[op->out[i]] = true;
    }
    return is_good;
}

static bool can_be_sealed(world *w)
{
    progress p = {.next_layer = 0};
    bool is_good = w->n_ops != 0;
    for (uint32_t i = 0; i < w->n_ops; i++) {
        is_good = follows(&p, &w->ops[i]) && is_good;
    }
    for (uint32_t i = 0; i < w->n_tensors; i++) {
        is_good = is_good && p.is_written[i];
    }
    w->writes_all_layers = p.has_rows[0] && p.has_rows[1];
    w->is_logged = p.is_logged;
    return is_good && p.next_delta == w->n_deltas;
}

static void seal(world *w)
{
    const kvs_status expected = w->is_sealed ? KVS_EBUSY : can_be_sealed(w) ? KVS_OK : KVS_EINVAL;
    bool is_sealed = false;
    for (uint32_t i = 0; i < N_SIDES; i++) {
        is_sealed = OUTCOME(&w->sides[i].fault, kvs_tape_seal(w->sides[i].tape), expected);
    }
    for (uint32_t i = 0; is_sealed && w->n_deltas != 0 && i < N_SIDES; i++) {
        side_open_state(&w->sides[i], w->n_deltas);
    }
    w->is_sealed = w->is_sealed || is_sealed;
}

/* ---- binding and running ---- */

static void bind(world *w, const step *step)
{
    if (w->is_bound) {
        return;
    }
    kvs_tape_info info = {.struct_size = sizeof info};
    for (uint32_t i = 0; i < N_SIDES; i++) {
        EXPECT_OK(kvs_tape_get_info(w->sides[i].tape, &info));
        const bool is_short = step->operand[0] % 2 != 0 && info.workspace_bytes > 64;
        const kvs_status expected = !w->is_sealed ? KVS_EINVAL : is_short ? KVS_ENOSPACE : KVS_OK;
        w->is_bound = OUTCOME(&w->sides[i].fault, side_bind(&w->sides[i], is_short ? 64 : 0), expected);
    }
}

static uint32_t output_bytes(const world *w, uint32_t tensor, uint32_t n_rows, uint32_t n_out_rows)
{
    const uint32_t rows = w->tensors[tensor].rows == KVS_ROWS_OUT ? n_out_rows : n_rows;
    return rows * w->tensors[tensor].cols * (uint32_t)sizeof(float);
}

typedef struct shape {
    uint32_t n_rows, n_out_rows;
} shape;

static void make_outputs(const world *w, side *side, shape shape)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->n_tensors; i++) {
        if (w->tensors[i].kind == KVS_TENSOR_OUTPUT) {
            const uint32_t n_bytes = output_bytes(w, i, shape.n_rows, shape.n_out_rows);
            side->outputs[n] = malloc(n_bytes == 0 ? 1 : n_bytes);
            EXPECT(side->outputs[n] != NULL);
            memset(side->outputs[n++], 0xff, n_bytes == 0 ? 1 : n_bytes);
        }
    }
}

static kvs_status run_side(const world *w, side *side, shape shape)
{
    static const uint32_t tokens[MAX_ROWS] = {3, 0, 7, 5, 2};
    static const uint32_t out_rows[MAX_ROWS] = {0, 1, 2, 3, 4};
    const kvs_pass_desc pass = {.struct_size = sizeof pass,
                                .n_rows = shape.n_rows,
                                .tokens = tokens,
                                .n_out_rows = shape.n_out_rows,
                                .out_rows = out_rows,
                                .n_outputs = w->n_outputs,
                                .outputs = side->outputs,
                                .state = side->state};
    return kvs_binding_run(side->binding, &pass);
}

/* To the bit, but for how a value is not a number. */
static bool is_same(const float *a, const float *b, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (memcmp(&a[i], &b[i], sizeof a[i]) != 0 && !(isnan(a[i]) && isnan(b[i]))) {
            return false;
        }
    }
    return true;
}

static void compare_outputs(const world *w, shape shape)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->n_tensors; i++) {
        if (w->tensors[i].kind == KVS_TENSOR_OUTPUT) {
            const uint32_t n_bytes = output_bytes(w, i, shape.n_rows, shape.n_out_rows);
            EXPECT(is_same(w->sides[0].outputs[n], w->sides[1].outputs[n], n_bytes / (uint32_t)sizeof(float)));
            n++;
        }
    }
}

/* Vectors are rows too, but have no row for every token of a pass. */
static bool embeds_a_vector(const world *w)
{
    for (uint32_t i = 0; i < w->n_ops; i++) {
        if (w->ops[i].code == KVS_OP_EMBED && w->ops[i].weights[0] >= FIRST_VECTOR) {
            return true;
        }
    }
    return false;
}

/* A pass in chunks is accepted whole or not at all. */
static uint32_t kept_rows(const world *w, uint32_t n_rows)
{
    const uint32_t n_kept = n_rows - (uint32_t)least(w->n_refused, n_rows);
    const bool is_whole = n_kept == n_rows || w->n_deltas == 0 || w->is_logged;
    return w->writes_all_layers && is_whole ? n_kept : 0;
}

static void end_pass(side *side, uint32_t n_kept)
{
    EXPECT_OK(kvs_device_set_hook(side->device, NULL, NULL));
    EXPECT_OK(kvs_pager_end(side->pager, n_kept));
    if (side->state != NULL) {
        EXPECT_OK(kvs_state_accept(side->state, side->seq, n_kept));
    }
}

static void run(world *w, const step *step)
{
    const shape shape = {.n_rows = 1 + step->operand[0] % MAX_ROWS,
                         .n_out_rows = (uint32_t)least(step->operand[0] / 16 % (w->max_out_rows + 1), MAX_ROWS)};
    if (!w->is_bound || w->n_tokens + shape.n_rows > CTX) {
        return;
    }
    const bool is_valid = shape.n_out_rows <= shape.n_rows && !embeds_a_vector(w);
    const uint32_t n_kept = is_valid ? kept_rows(w, shape.n_rows) : 0;
    bool has_run = false;
    for (uint32_t i = 0; i < N_SIDES; i++) {
        side *side = &w->sides[i];
        make_outputs(w, side, shape);
        EXPECT_OK(kvs_device_set_hook(side->device, NULL, NULL));
        EXPECT_OK(kvs_pager_begin(side->pager, side->seq, shape.n_rows));
        fault_begin(&side->fault, side->device);
        has_run = OUTCOME(&side->fault, run_side(w, side, shape), is_valid ? KVS_OK : KVS_EINVAL);
        end_pass(side, has_run ? n_kept : 0);
    }
    w->n_refused = 0;
    if (has_run) {
        compare_outputs(w, shape);
        w->n_tokens += n_kept;
    }
    if (has_run && n_kept != 0) {
        w->n_pending = w->is_logged ? n_kept : 0;
    }
    for (uint32_t i = 0; i < N_SIDES; i++) {
        for (uint32_t j = 0; j < w->n_outputs; j++) {
            free(w->sides[i].outputs[j]);
        }
    }
}

/* Rows that the state has folded cannot be taken back. */
static void truncate_rows(world *w, const step *step)
{
    const uint64_t most = w->sides[0].state != NULL ? w->n_pending : w->n_tokens;
    const uint64_t n_removed = step_u16(step, 0) % (most + 1);
    w->n_tokens -= n_removed;
    w->n_pending -= least(w->n_pending, n_removed);
    for (uint32_t i = 0; i < N_SIDES; i++) {
        side *side = &w->sides[i];
        EXPECT_OK(kvs_device_set_hook(side->device, NULL, NULL));
        EXPECT_OK(kvs_pager_truncate(side->pager, side->seq, w->n_tokens));
        if (side->state != NULL) {
            EXPECT_OK(kvs_state_truncate(side->state, side->seq, w->n_tokens));
        }
    }
}

static void release(world *w, const step *step)
{
    for (uint32_t i = 0; i < N_SIDES; i++) {
        kvs_weight **weight = &w->sides[i].weights[step->operand[0] % N_WEIGHTS];
        kvs_weight_release(*weight);
        *weight = NULL;
    }
}

static void act(world *w, const step *step)
{
    switch (step->action) {
    case ACTION_CREATE:
        if (step->operand[0] > 127) {
            create_delta(w);
        } else {
            create_tensor(w, step);
        }
        break;
    case ACTION_RECORD:
        record(w, step);
        break;
    case ACTION_COMMIT:
        seal(w);
        break;
    case ACTION_BIND:
        bind(w, step);
        break;
    case ACTION_UNBIND:
        side_unbind(&w->sides[0]);
        side_unbind(&w->sides[1]);
        w->is_bound = false;
        break;
    case ACTION_RUN:
        run(w, step);
        break;
    case ACTION_CANCEL:
        w->n_refused = step->operand[0];
        break;
    case ACTION_TRUNCATE:
        truncate_rows(w, step);
        break;
    case ACTION_RELEASE:
        release(w, step);
        break;
    default:
        break;
    }
}

static void compare_state(const world *w, kvs_state *state)
{
    kvs_state_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_state_get_info(state, &info));
    EXPECT_U64(info.n_layers, w->n_deltas);
    EXPECT_U64(info.position, w->n_tokens);
    EXPECT_U64(info.pending_rows, w->n_pending);
    EXPECT_U64(info.open_rows, 0);
    EXPECT_OK(kvs_state_check_integrity(state));
}

static void compare(world *w)
{
    for (uint32_t i = 0; i < N_SIDES; i++) {
        kvs_tape_info info = {.struct_size = sizeof info};
        EXPECT_OK(kvs_tape_get_info(w->sides[i].tape, &info));
        EXPECT_U64(info.n_ops, w->n_ops);
        EXPECT_U64(info.n_tensors, w->n_tensors);
        EXPECT_U64(info.n_layers, N_LAYERS);
        EXPECT_U64(info.n_delta_layers, w->n_deltas);
        EXPECT_U64(info.is_sealed, w->is_sealed ? 1 : 0);
        EXPECT_OK(kvs_pager_check_integrity(w->sides[i].pager));
        if (w->sides[i].state != NULL) {
            compare_state(w, w->sides[i].state);
        }
    }
}

void script_tape(script *script)
{
    world *w = calloc(1, sizeof *w);
    EXPECT(w != NULL);
    step step;
    script_open(script, &step);
    w->max_out_rows = step.operand[0] % (MAX_ROWS + 1);
    side_open(&w->sides[0], 0, w->max_out_rows);
    side_open(&w->sides[1], KVS_DEVICE_REFERENCE_OPS, w->max_out_rows);
    while (script_next(script, &step) && step.action != ACTION_CLOSE) {
        if (step.action == ACTION_FAIL) {
            fault_arm(&w->sides[0].fault, &step);
            fault_arm(&w->sides[1].fault, &step);
            continue;
        }
        for (uint32_t i = 0; i < N_SIDES; i++) {
            fault_begin(&w->sides[i].fault, w->sides[i].device);
        }
        act(w, &step);
        for (uint32_t i = 0; i < N_SIDES; i++) {
            (void)fault_end(&w->sides[i].fault, w->sides[i].device, true);
        }
        compare(w);
    }
    const uint32_t order = step.action == ACTION_CLOSE ? step.operand[0] : 0;
    side_close(&w->sides[0], order);
    side_close(&w->sides[1], order);
    free(w);
}
