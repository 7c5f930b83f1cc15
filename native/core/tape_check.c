/* tape_check.c: one rule per operation code; the table of codes is the list of operations. */
#include "core/tape_check.h"

#include "core/delta.h"
#include "core/weight.h"

#define MATMUL_ADD 1u
#define MATMUL_SWIGLU 2u
#define MATMUL_PARTS 4u
#define MATMUL_GATES 2u /* kinds, from 1 on */
#define MATMUL_LEAST_GROUP 32u
#define MATMUL_MOST_GROUP 512u
#define GLU_SIGMOID 1u

static const char *const OP_NAMES[] = {"embed",    "norm",   "matmul", "rope_table", "rope", "hadamard",
                                       "kv_write", "attend", "glu",    "add",        "gather", "delta",
                                       "experts",  "front"};

#define N_OPS ((uint32_t)(sizeof OP_NAMES / sizeof OP_NAMES[0]))

const char *kvs_op_name(uint32_t code)
{
    return code < N_OPS ? OP_NAMES[code] : "unknown";
}

/* What one check looks at. */
struct checker {
    const kvs_tape *tape;
    const kvs_op_desc *op;
};

static kvs_status refuse(const struct checker *c, const char *what, uint64_t have, uint64_t want)
{
    return kvs_fail(c->tape->device, KVS_EINVAL, "operation %u (%s): %s is %llu, must be %llu", c->tape->n_ops,
                    kvs_op_name(c->op->code), what, (kvs_ull)have, (kvs_ull)want);
}

static kvs_status refuse_text(const struct checker *c, const char *what)
{
    return kvs_fail(c->tape->device, KVS_EINVAL, "operation %u (%s): %s", c->tape->n_ops, kvs_op_name(c->op->code), what);
}

static const kvs_tape_tensor *tensor_of(const struct checker *c, uint32_t id)
{
    return id < c->tape->n_tensors ? &c->tape->tensors[id] : NULL;
}

/* A tensor with the given columns (0: any) and row kind. */
static kvs_status want_tensor(const struct checker *c, uint32_t id, const char *what, uint64_t cols, uint32_t rows)
{
    const kvs_tape_tensor *tensor = tensor_of(c, id);
    if (tensor == NULL) {
        return kvs_fail(c->tape->device, KVS_EINVAL, "operation %u (%s): %s tensor %u does not exist", c->tape->n_ops,
                        kvs_op_name(c->op->code), what, id);
    }
    if (cols != 0 && tensor->cols != cols) {
        return refuse(c, what, tensor->cols, cols);
    }
    return tensor->rows == rows ? KVS_OK : refuse(c, "row kind", tensor->rows, rows);
}

static kvs_status want_weight(const struct checker *c, uint32_t id, uint32_t layout, uint64_t k, uint64_t n)
{
    if (id >= c->tape->n_weights) {
        return refuse_text(c, "weight does not exist");
    }
    const kvs_weight_view *view = kvs_weight_get_view(c->tape->weights[id]);
    if (view->layout != layout) {
        return refuse(c, "weight layout", view->layout, layout);
    }
    if (k != 0 && view->k != k) {
        return refuse(c, "weight row length", view->k, k);
    }
    return n == 0 || view->n == n ? KVS_OK : refuse(c, "weight row count", view->n, n);
}

/* A float32 vector that normalisation multiplies with. */
static kvs_status want_vector(const struct checker *c, uint32_t id, uint64_t k)
{
    kvs_status status = want_weight(c, id, KVS_WEIGHT_ROWS, k, 1);
    if (status == KVS_OK && kvs_weight_get_view(c->tape->weights[id])->type != KVS_TYPE_F32) {
        status = refuse_text(c, "norm weights must be f32");
    }
    return status;
}

static kvs_status check_embed(const struct checker *c)
{
    kvs_status status = want_weight(c, c->op->weights[0], KVS_WEIGHT_ROWS, 0, 0);
    if (status != KVS_OK) {
        return status;
    }
    uint64_t k = kvs_weight_get_view(c->tape->weights[c->op->weights[0]])->k;
    return want_tensor(c, c->op->out[0], "output columns", k, KVS_ROWS_PASS);
}

/* Element-wise shapes: input and output alike in columns and row kind. */
static kvs_status want_same(const struct checker *c, uint32_t in, uint32_t out)
{
    const kvs_tape_tensor *tensor = tensor_of(c, in);
    if (tensor == NULL) {
        return refuse_text(c, "input tensor does not exist");
    }
    return want_tensor(c, out, "output columns", tensor->cols, tensor->rows);
}

static kvs_status check_norm(const struct checker *c)
{
    kvs_status status = want_same(c, c->op->in[0], c->op->out[0]);
    if (status != KVS_OK) {
        return status;
    }
    uint64_t cols = tensor_of(c, c->op->in[0])->cols;
    uint64_t group = c->op->u[0] == 0 ? cols : c->op->u[0];
    if (cols % group != 0) {
        return refuse(c, "remainder of columns by group", cols % group, 0);
    }
    return want_vector(c, c->op->weights[0], group);
}

/* Norm and gate of a matmul's input. */
static kvs_status check_matmul_input(const struct checker *c, const kvs_tape_tensor *in)
{
    const kvs_op_desc *op = c->op;
    const uint32_t group = op->u[3];
    if (op->u[2] > MATMUL_GATES || (op->u[2] == 0 && group != 0)) {
        return refuse_text(c, "the gate must be one of 0, 1 and 2, and groups are for gated input");
    }
    if (group != 0 && (!kvs_is_power_of_two(group) || group < MATMUL_LEAST_GROUP || group > MATMUL_MOST_GROUP || in->cols % group != 0)) {
        return refuse_text(c, "groups must be a power of two from 32 to 512 that divides the columns");
    }
    if (op->u[2] != 0) {
        const kvs_status status = want_same(c, op->in[0], op->in[1]);
        if (status != KVS_OK) {
            return status;
        }
        for (uint32_t i = 0; i < (op->u[1] == MATMUL_SWIGLU ? 1 : op->u[0]); i++) {
            if (op->out[i] == op->in[1]) {
                return refuse_text(c, "gate and output are the same tensor");
            }
        }
    }
    return op->weights[4] == KVS_NONE ? KVS_OK : want_vector(c, op->weights[4], group == 0 ? in->cols : group);
}

static kvs_status check_matmul(const struct checker *c)
{
    const kvs_op_desc *op = c->op;
    const kvs_tape_tensor *in = tensor_of(c, op->in[0]);
    if (in == NULL) {
        return refuse_text(c, "input tensor does not exist");
    }
    uint32_t n_outputs = op->u[1] == MATMUL_SWIGLU ? 1 : op->u[0];
    if (op->u[0] == 0 || op->u[0] > MATMUL_PARTS || op->u[1] > MATMUL_SWIGLU || (op->u[1] == MATMUL_SWIGLU && op->u[0] != 2)) {
        return refuse_text(c, "parts must be 1 to 4, and 2 for swiglu");
    }
    for (uint32_t i = 0; i < op->u[0]; i++) {
        uint32_t out = op->out[i < n_outputs ? i : 0];
        kvs_status status = want_tensor(c, out, "output columns", 0, in->rows);
        if (status == KVS_OK && out == op->in[0]) {
            status = refuse_text(c, "input and output are the same tensor");
        }
        for (uint32_t j = 0; status == KVS_OK && j < i && i < n_outputs; j++) {
            if (out == op->out[j]) {
                status = refuse_text(c, "two outputs are the same tensor");
            }
        }
        if (status == KVS_OK) {
            status = want_weight(c, op->weights[i], KVS_WEIGHT_PANELS, in->cols, tensor_of(c, out)->cols);
        }
        if (status != KVS_OK) {
            return status;
        }
    }
    return check_matmul_input(c, in);
}

static kvs_status check_rope_table(const struct checker *c)
{
    if (c->op->u[0] == 0 || c->op->u[0] % 2 != 0) {
        return refuse_text(c, "rotary values must be even and above zero");
    }
    if (!(c->op->f64[0] > 0.0)) {
        return refuse_text(c, "rotary base must be above zero");
    }
    if (c->op->weights[0] != KVS_NONE) {
        kvs_status status = want_vector(c, c->op->weights[0], c->op->u[0] / 2);
        if (status != KVS_OK) {
            return status;
        }
    }
    return want_tensor(c, c->op->out[0], "output columns", c->op->u[0], KVS_ROWS_PASS);
}

/* Blocks of a Walsh-Hadamard rotation within heads; 0 is none. */
static kvs_status want_block_of_head(const struct checker *c, uint32_t block, uint32_t head)
{
    if (block != 0 && (!kvs_is_power_of_two(block) || block < 2 || head % block != 0)) {
        return refuse_text(c, "block must be a power of two of at least 2 that divides the head size");
    }
    return KVS_OK;
}

/* Rows that a rope turns in place. */
static uint32_t n_turned(const kvs_op_desc *op)
{
    return op->out[2] != KVS_NONE ? 3 : op->out[1] != KVS_NONE ? 2 : 1;
}

/* Part i of a rope: rows of whole heads, or of whole blocks where only Walsh-Hadamard is for them. */
static kvs_status check_turned(const struct checker *c, uint32_t i)
{
    const kvs_op_desc *op = c->op;
    const uint32_t grain = i < 2 ? op->u[0] : op->u[3];
    kvs_status status = want_tensor(c, op->out[i], "columns", 0, KVS_ROWS_PASS);
    if (status == KVS_OK && (grain == 0 || tensor_of(c, op->out[i])->cols % grain != 0)) {
        status = refuse_text(c, i < 2 ? "columns are no multiple of the head size" : "columns are no multiple of the block");
    }
    /* Rotation is in place, so a table that is also what it rotates would change under the reader. */
    if (status == KVS_OK && op->in[0] == op->out[i]) {
        status = refuse_text(c, "table and rotated rows are the same tensor");
    }
    for (uint32_t j = 0; status == KVS_OK && j < i; j++) {
        status = op->out[j] == op->out[i] ? refuse_text(c, "two of its rows are the same tensor") : KVS_OK;
    }
    return status == KVS_OK && i < 2 && op->weights[i] != KVS_NONE ? want_vector(c, op->weights[i], op->u[0]) : status;
}

static kvs_status check_rope(const struct checker *c)
{
    uint32_t head = c->op->u[0];
    uint32_t n_rot = c->op->u[1];
    if (head == 0 || n_rot == 0 || n_rot > head || n_rot % 2 != 0 || c->op->u[2] > 1) {
        return refuse_text(c, "head size, rotary values or mode out of range");
    }
    kvs_status status = want_tensor(c, c->op->in[0], "table columns", n_rot, KVS_ROWS_PASS);
    if (status == KVS_OK) {
        status = want_block_of_head(c, c->op->u[3], head);
    }
    for (uint32_t i = 0; status == KVS_OK && i < n_turned(c->op); i++) {
        status = check_turned(c, i);
    }
    return status;
}

static kvs_status check_hadamard(const struct checker *c)
{
    uint32_t block = c->op->u[0];
    if (!kvs_is_power_of_two(block) || block < 2) {
        return refuse_text(c, "block must be a power of two of at least 2");
    }
    kvs_status status = want_tensor(c, c->op->out[0], "columns", 0, KVS_ROWS_PASS);
    if (status == KVS_OK && tensor_of(c, c->op->out[0])->cols % block != 0) {
        status = refuse_text(c, "columns are no multiple of the block");
    }
    return status;
}

static kvs_status check_layer(const struct checker *c)
{
    return c->op->layer < c->tape->n_layers ? KVS_OK : refuse_text(c, "layer does not exist");
}

static kvs_status check_kv_write(const struct checker *c)
{
    kvs_status status = check_layer(c);
    if (status != KVS_OK) {
        return status;
    }
    const kvs_kv_layer *kv = &c->tape->layers[c->op->layer].kv;
    status = want_tensor(c, c->op->in[0], "k columns", (uint64_t)kv->n_kv_heads * kv->head_dim_k, KVS_ROWS_PASS);
    if (status != KVS_OK) {
        return status;
    }
    return want_tensor(c, c->op->in[1], "v columns", (uint64_t)kv->n_kv_heads * kv->head_dim_v, KVS_ROWS_PASS);
}

static kvs_status check_attend(const struct checker *c)
{
    kvs_status status = check_layer(c);
    if (status != KVS_OK) {
        return status;
    }
    const kvs_kv_layer *kv = &c->tape->layers[c->op->layer].kv;
    uint32_t heads = c->op->u[0];
    if (heads == 0 || heads % kv->n_kv_heads != 0) {
        return refuse_text(c, "query heads are no multiple of KV heads");
    }
    status = want_block_of_head(c, c->op->u[1], kv->head_dim_v);
    if (status != KVS_OK) {
        return status;
    }
    status = want_tensor(c, c->op->in[0], "q columns", (uint64_t)heads * kv->head_dim_k, KVS_ROWS_PASS);
    if (status == KVS_OK && c->op->in[0] == c->op->out[0]) {
        status = refuse_text(c, "input and output are the same tensor");
    }
    if (status != KVS_OK) {
        return status;
    }
    return want_tensor(c, c->op->out[0], "output columns", (uint64_t)heads * kv->head_dim_v, KVS_ROWS_PASS);
}

static kvs_status check_glu(const struct checker *c)
{
    if (c->op->u[0] > GLU_SIGMOID) {
        return refuse(c, "activation", c->op->u[0], GLU_SIGMOID);
    }
    const kvs_tape_tensor *gate = tensor_of(c, c->op->in[0]);
    kvs_status status = want_same(c, c->op->in[1], c->op->out[0]);
    if (status == KVS_OK && gate != NULL && gate->cols == 1) {
        status = c->op->in[0] == c->op->out[0] && tensor_of(c, c->op->out[0])->cols != 1
                     ? refuse_text(c, "a gate of one column cannot be the output")
                     : want_tensor(c, c->op->in[0], "gate columns", 1, tensor_of(c, c->op->out[0])->rows);
    } else if (status == KVS_OK) {
        status = want_same(c, c->op->in[0], c->op->out[0]);
    }
    return status;
}

static kvs_status check_add(const struct checker *c)
{
    return want_same(c, c->op->in[0], c->op->out[0]);
}

static kvs_status check_gather(const struct checker *c)
{
    kvs_status status = want_tensor(c, c->op->in[0], "columns", 0, KVS_ROWS_PASS);
    if (status != KVS_OK) {
        return status;
    }
    return want_tensor(c, c->op->out[0], "output columns", tensor_of(c, c->op->in[0])->cols, KVS_ROWS_OUT);
}

static kvs_status check_delta(const struct checker *c)
{
    const kvs_op_desc *op = c->op;
    if (op->layer >= c->tape->n_deltas) {
        return refuse_text(c, "recurrent layer does not exist");
    }
    if (op->u[0] > KVS_DELTA_CHUNKED) {
        return refuse(c, "mode", op->u[0], KVS_DELTA_CHUNKED);
    }
    const kvs_delta_layer *layer = &c->tape->deltas[op->layer];
    kvs_status status = want_tensor(c, op->in[0], "convolution channels", kvs_delta_channels(layer), KVS_ROWS_PASS);
    if (status == KVS_OK) {
        status = want_tensor(c, op->in[1], "beta columns", layer->n_value_heads, KVS_ROWS_PASS);
    }
    if (status == KVS_OK) {
        status = want_tensor(c, op->in[2], "alpha columns", layer->n_value_heads, KVS_ROWS_PASS);
    }
    if (status == KVS_OK) {
        status = want_tensor(c, op->out[0], "output columns", (uint64_t)layer->n_value_heads * layer->head_dim, KVS_ROWS_PASS);
    }
    if (status == KVS_OK && (op->out[0] == op->in[0] || op->out[0] == op->in[1] || op->out[0] == op->in[2])) {
        status = refuse_text(c, "input and output are the same tensor");
    }
    return status;
}

/* Three matrices of one row of panels after another for each expert, and factors of each expert where there are any. */
static kvs_status check_experts(const struct checker *c)
{
    const kvs_op_desc *op = c->op;
    const uint32_t n_experts = op->u[0];
    if (n_experts == 0 || op->u[1] == 0 || op->u[1] > n_experts || !(op->f[0] > 0.0f)) {
        return refuse_text(c, "experts, chosen experts or factor out of range");
    }
    kvs_status status = want_tensor(c, op->in[1], "router columns", n_experts, KVS_ROWS_PASS);
    if (status == KVS_OK) {
        status = want_tensor(c, op->in[0], "input columns", 0, KVS_ROWS_PASS);
    }
    if (status == KVS_OK) {
        status = want_tensor(c, op->out[0], "output columns", tensor_of(c, op->in[0])->cols, KVS_ROWS_PASS);
    }
    if (status == KVS_OK && (op->out[0] == op->in[0] || op->out[0] == op->in[1])) {
        status = refuse_text(c, "input and output are the same tensor");
    }
    const uint64_t n_embd = status == KVS_OK ? tensor_of(c, op->in[0])->cols : 0;
    if (status == KVS_OK) {
        status = want_weight(c, op->weights[2], KVS_WEIGHT_PANELS, 0, n_experts * n_embd);
    }
    const uint64_t n_ff = status == KVS_OK ? kvs_weight_get_view(c->tape->weights[op->weights[2]])->k : 0;
    for (uint32_t i = 0; status == KVS_OK && i < 2; i++) {
        status = want_weight(c, op->weights[i], KVS_WEIGHT_PANELS, n_embd, n_experts * n_ff);
    }
    for (uint32_t i = 3; status == KVS_OK && i < 6; i++) {
        status = op->weights[i] == KVS_NONE ? KVS_OK : want_vector(c, op->weights[i], n_experts);
    }
    return status;
}

static kvs_status check_front(const struct checker *c)
{
    const kvs_op_desc *op = c->op;
    const uint32_t n_best = op->u[0], n_tokens = op->u[1];
    if (n_best == 0 || n_best > KVS_FRONT_MAX_BEST) {
        return refuse(c, "best columns", n_best, KVS_FRONT_MAX_BEST);
    }
    kvs_status status = want_tensor(c, op->in[0], "logits", 0, KVS_ROWS_OUT);
    if (status != KVS_OK) {
        return status;
    }
    const uint64_t cols = tensor_of(c, op->in[0])->cols;
    if (n_tokens == 0 || n_tokens > cols) {
        return refuse(c, "tokens among the columns", n_tokens, cols);
    }
    if (cols > (uint64_t)KVS_FRONT_CHUNK * KVS_FRONT_MAX_CHUNKS) {
        return refuse(c, "columns", cols, (uint64_t)KVS_FRONT_CHUNK * KVS_FRONT_MAX_CHUNKS);
    }
    status = want_tensor(c, op->out[0], "output columns", 2 * (uint64_t)n_best + KVS_FRONT_TAIL, KVS_ROWS_OUT);
    if (status == KVS_OK && tensor_of(c, op->out[0])->kind != KVS_TENSOR_OUTPUT) {
        status = refuse_text(c, "it is not run in every pass, so that only an output can hold what it finds");
    }
    return status;
}

static kvs_status (*const CHECKS[])(const struct checker *) = {
    check_embed,  check_norm, check_matmul, check_rope_table, check_rope,  check_hadamard, check_kv_write,
    check_attend, check_glu,  check_add,    check_gather,     check_delta, check_experts,
    check_front};

kvs_status kvs_tape_check_op(const kvs_tape *tape, const kvs_op_desc *op)
{
    struct checker c = {.tape = tape, .op = op};
    if (op->flags > KVS_OP_PROMPT) {
        return refuse(&c, "flags", op->flags, KVS_OP_PROMPT);
    }
    return op->code < N_OPS ? CHECKS[op->code](&c) : refuse(&c, "code", op->code, N_OPS - 1);
}

static void reads(kvs_op_access *access, uint32_t id)
{
    access->reads[access->n_reads++] = id;
}

static void writes(kvs_op_access *access, uint32_t id)
{
    access->writes[access->n_writes++] = id;
}

/* Tensors that an operation reads besides those that it updates in place. */
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

static uint32_t n_outputs(const kvs_op_desc *op)
{
    if (op->code == KVS_OP_KV_WRITE || op->code == KVS_OP_ROPE) {
        return op->code == KVS_OP_ROPE ? n_turned(op) : 0;
    }
    return op->code == KVS_OP_MATMUL && op->u[1] != MATMUL_SWIGLU ? op->u[0] : 1;
}

static bool is_in_place(const kvs_op_desc *op)
{
    return op->code == KVS_OP_ROPE || op->code == KVS_OP_HADAMARD || op->code == KVS_OP_ADD ||
           (op->code == KVS_OP_MATMUL && op->u[1] == MATMUL_ADD);
}

void kvs_tape_op_access(const kvs_op_desc *op, kvs_op_access *access)
{
    *access = (kvs_op_access){.n_reads = 0};
    for (uint32_t i = 0; i < n_inputs(op); i++) {
        reads(access, op->in[i]);
    }
    for (uint32_t i = 0; i < n_outputs(op); i++) {
        if (is_in_place(op)) {
            reads(access, op->out[i]);
        }
        writes(access, op->out[i]);
    }
}
