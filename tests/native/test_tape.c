/* Tapes without Python: every refusal that the header names, sealing, binding, epochs, release orders. */
#include "rig.h"

#include "kvstream/tape.h"

#include <math.h>

enum { N_VOCAB = 8, COLS = 32, MAX_ROWS = 4, WORKSPACE = 1, OTHER = 2 };

static const kvs_kv_layer kv = {
    .n_kv_heads = 1, .head_dim_k = COLS, .head_dim_v = COLS, .type_k = KVS_TYPE_F32, .type_v = KVS_TYPE_F32};

static float table[N_VOCAB * COLS];

static kvs_weight *rows_weight(kvs_device *device)
{
    kvs_weight *weight = NULL;
    for (uint32_t i = 0; i < N_VOCAB * COLS; i++) {
        table[i] = (float)i;
    }
    CHECK_OK(kvs_weight_create(device, KVS_TYPE_F32, COLS, N_VOCAB, table, KVS_WEIGHT_ROWS, &weight));
    return weight;
}

static uint32_t tensor(kvs_tape *tape, uint32_t kind, uint32_t rows, uint32_t cols)
{
    uint32_t id = KVS_NONE;
    const kvs_tensor_desc desc = {.struct_size = sizeof desc, .kind = kind, .rows = rows, .cols = cols};
    CHECK_OK(kvs_tape_add_tensor(tape, &desc, &id));
    return id;
}

static uint32_t work(kvs_tape *tape)
{
    return tensor(tape, KVS_TENSOR_WORK, KVS_ROWS_PASS, COLS);
}

static kvs_op_desc op_of(uint32_t code)
{
    kvs_op_desc desc = {.struct_size = sizeof desc, .code = code};
    for (int i = 0; i < 2; i++) {
        desc.in[i] = KVS_NONE;
    }
    for (int i = 0; i < 3; i++) {
        desc.out[i] = KVS_NONE;
    }
    for (int i = 0; i < 4; i++) {
        desc.weights[i] = KVS_NONE;
    }
    return desc;
}

/* A tape of two tensors, one layer, and the weights 0 (rows), 1 (panels, square) and 2 (norm). */
typedef struct bench {
    kvs_device *device;
    kvs_tape *tape;
    kvs_weight *weights[3];
    uint32_t a, b;
} bench;

static void open_bench(bench *b)
{
    b->device = rig_device(0, 0);
    CHECK_OK(kvs_tape_create(b->device, MAX_ROWS, 2, &b->tape));
    b->weights[0] = rows_weight(b->device);
    static float square[COLS * COLS];
    CHECK_OK(kvs_weight_create(b->device, KVS_TYPE_F32, COLS, COLS, square, KVS_WEIGHT_PANELS, &b->weights[1]));
    CHECK_OK(kvs_weight_create(b->device, KVS_TYPE_F32, COLS, 1, table, KVS_WEIGHT_ROWS, &b->weights[2]));
    uint32_t id = KVS_NONE;
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_OK(kvs_tape_add_weight(b->tape, b->weights[i], &id));
        CHECK_U64(id, i);
    }
    CHECK_OK(kvs_tape_add_layer(b->tape, &kv, &id));
    CHECK_U64(id, 0);
    b->a = work(b->tape);
    b->b = work(b->tape);
}

static void close_bench(bench *b)
{
    for (uint32_t i = 0; i < 3; i++) {
        kvs_weight_release(b->weights[i]);
    }
    kvs_tape_release(b->tape);
    rig_close(b->device);
}

static void test_create_refuses(void)
{
    kvs_device *device = rig_device(0, 0);
    kvs_tape *tape = NULL;
    CHECK_STATUS(kvs_tape_create(NULL, 1, 1, &tape), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_create(device, 1, 1, NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_create(device, 0, 0, &tape), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_create(device, 65537, 0, &tape), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_create(device, 4, 5, &tape), KVS_EINVAL);
    kvs_tape_release(NULL);
    rig_close(device);
}

static int refuse_allocation(void *user, int point, uint64_t index)
{
    (void)index;
    uint64_t *left = user;
    if (point != KVS_HOOK_ALLOC) {
        return 0;
    }
    return (*left)-- == 0 ? KVS_ENOMEM : 0;
}

static void test_without_memory_nothing_is_left(void)
{
    bench b;
    open_bench(&b);
    const uint64_t before = rig_info(b.device).live_objects;
    uint64_t left = 0;
    kvs_tape *tape = NULL;
    kvs_weight *weight = NULL;
    CHECK_OK(kvs_device_set_hook(b.device, refuse_allocation, &left));
    CHECK_STATUS(kvs_tape_create(b.device, 1, 1, &tape), KVS_ENOMEM);
    for (uint64_t at = 0; at < 2; at++) {
        left = at;
        CHECK_STATUS(kvs_weight_create(b.device, KVS_TYPE_F32, COLS, 1, table, KVS_WEIGHT_PANELS, &weight), KVS_ENOMEM);
        CHECK_U64(rig_info(b.device).live_objects, before);
    }
    CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
    close_bench(&b);
}

static void test_weights_refuse(void)
{
    bench b;
    open_bench(&b);
    kvs_weight *weight = NULL;
    uint64_t bytes;
    CHECK_STATUS(kvs_weight_create(NULL, KVS_TYPE_F32, 1, 1, table, 0, &weight), KVS_EINVAL);
    CHECK_STATUS(kvs_weight_create(b.device, KVS_TYPE_F32, 1, 1, table, 2, &weight), KVS_EINVAL);
    CHECK_STATUS(kvs_weight_create(b.device, KVS_TYPE_F32, 1, 1, table, 0, NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_weight_create(b.device, KVS_TYPE_F32, 0, 1, table, 0, &weight), KVS_EINVAL);
    CHECK_STATUS(kvs_weight_create(b.device, KVS_TYPE_F32, 1, UINT64_MAX, table, 0, &weight), KVS_EINVAL);
    CHECK_STATUS(kvs_weight_create(b.device, KVS_TYPE_Q8_0, 33, 1, table, 0, &weight), KVS_EINVAL);
    CHECK_STATUS(kvs_weight_create(b.device, 77, 32, 1, table, 0, &weight), KVS_EUNSUPPORTED);
    CHECK_STATUS(kvs_weight_get_bytes(NULL, &bytes), KVS_EINVAL);
    CHECK_STATUS(kvs_weight_get_bytes(b.weights[0], NULL), KVS_EINVAL);
    CHECK_OK(kvs_weight_get_bytes(b.weights[0], &bytes));
    CHECK_U64(bytes, 0);
    CHECK_OK(kvs_weight_get_bytes(b.weights[1], &bytes));
    CHECK(bytes >= sizeof(float) * COLS * COLS);
    kvs_weight_release(NULL);
    close_bench(&b);
}

static void test_tensors_weights_and_layers_refuse(void)
{
    bench b;
    open_bench(&b);
    uint32_t id = 0;
    kvs_tensor_desc desc = {.struct_size = sizeof desc, .cols = 1};
    CHECK_STATUS(kvs_tape_add_tensor(NULL, &desc, &id), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_add_tensor(b.tape, NULL, &id), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_add_tensor(b.tape, &desc, NULL), KVS_EINVAL);
    desc.kind = 2;
    CHECK_STATUS(kvs_tape_add_tensor(b.tape, &desc, &id), KVS_EINVAL);
    desc = (kvs_tensor_desc){.struct_size = sizeof desc, .rows = 2, .cols = 1};
    CHECK_STATUS(kvs_tape_add_tensor(b.tape, &desc, &id), KVS_EINVAL);
    desc = (kvs_tensor_desc){.struct_size = sizeof desc, .cols = 0};
    CHECK_STATUS(kvs_tape_add_tensor(b.tape, &desc, &id), KVS_EINVAL);
    desc = (kvs_tensor_desc){.struct_size = 4, .cols = 1};
    CHECK_STATUS(kvs_tape_add_tensor(b.tape, &desc, &id), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_add_weight(b.tape, NULL, &id), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_add_weight(b.tape, b.weights[0], NULL), KVS_EINVAL);
    kvs_device *other = rig_device(0, 0);
    kvs_weight *foreign = rows_weight(other);
    CHECK_STATUS(kvs_tape_add_weight(b.tape, foreign, &id), KVS_EINVAL);
    kvs_weight_release(foreign);
    rig_close(other);
    CHECK_STATUS(kvs_tape_add_layer(b.tape, NULL, &id), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_add_layer(b.tape, &kv, NULL), KVS_EINVAL);
    kvs_kv_layer bad = kv;
    bad.n_kv_heads = 0;
    CHECK_STATUS(kvs_tape_add_layer(b.tape, &bad, &id), KVS_EINVAL);
    bad = kv;
    bad.head_dim_k = 48;
    bad.type_k = KVS_TYPE_Q8_0;
    CHECK_STATUS(kvs_tape_add_layer(b.tape, &bad, &id), KVS_EUNSUPPORTED);
    kvs_tape_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_tape_get_info(b.tape, &info));
    CHECK(info.n_tensors == 2 && info.n_layers == 1 && info.n_ops == 0 && info.is_sealed == 0);
    CHECK_STATUS(kvs_tape_get_info(NULL, &info), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_get_info(b.tape, NULL), KVS_EINVAL);
    close_bench(&b);
}

static void test_operations_refuse_what_they_cannot_run(void)
{
    bench b;
    open_bench(&b);
    const uint32_t narrow = tensor(b.tape, KVS_TENSOR_WORK, KVS_ROWS_PASS, COLS / 2);
    const uint32_t out = tensor(b.tape, KVS_TENSOR_WORK, KVS_ROWS_OUT, COLS);
    CHECK_STATUS(kvs_tape_add_op(NULL, NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_add_op(b.tape, NULL), KVS_EINVAL);
    kvs_op_desc op = op_of(11);
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    /* Operands that do not exist: every code wants at least one. */
    for (uint32_t code = KVS_OP_EMBED; code <= KVS_OP_GATHER; code++) {
        op = op_of(code);
        op.u[0] = 2;
        CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    }
    op = op_of(KVS_OP_EMBED); /* shape, layout */
    op.weights[0] = 0;
    op.out[0] = narrow;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.out[0] = out;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.out[0] = b.a;
    op.weights[0] = 1;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op = op_of(KVS_OP_NORM); /* group, weight length */
    op.in[0] = b.a;
    op.out[0] = b.b;
    op.weights[0] = 2;
    op.u[0] = 5;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.u[0] = 16;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op = op_of(KVS_OP_MATMUL); /* parts, aliases, layout */
    op.in[0] = b.a;
    op.out[0] = b.b;
    op.weights[0] = op.weights[1] = 1;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.u[0] = 4;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.u[0] = 1;
    op.u[1] = 2;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.u[1] = 0;
    op.out[0] = b.a;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.u[0] = 2;
    op.out[0] = op.out[1] = b.b;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.u[0] = 1;
    op.weights[0] = 0;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op = op_of(KVS_OP_ROPE_TABLE); /* odd, base, columns */
    op.out[0] = b.a;
    op.u[0] = 31;
    op.f64[0] = 10000.0;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.u[0] = 16;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.u[0] = 32;
    op.f64[0] = (double)NAN;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op = op_of(KVS_OP_ROPE); /* beyond the head, mode, head size */
    op.in[0] = b.a;
    op.out[0] = b.b;
    const uint32_t ropes[][3] = {{32, 34, 0}, {32, 32, 2}, {32, 31, 0}, {0, 32, 0}, {33, 32, 0}};
    for (uint32_t i = 0; i < 5; i++) {
        memcpy(op.u, ropes[i], sizeof ropes[i]);
        CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    }
    op = op_of(KVS_OP_HADAMARD);
    op.out[0] = b.a;
    const uint32_t blocks[] = {0, 1, 3, 64};
    for (uint32_t i = 0; i < 4; i++) {
        op.u[0] = blocks[i];
        CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    }
    op = op_of(KVS_OP_KV_WRITE);
    op.in[0] = b.a;
    op.in[1] = narrow;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.in[1] = b.b;
    op.layer = 1;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op = op_of(KVS_OP_ATTEND);
    op.in[0] = b.a;
    op.out[0] = b.b;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.u[0] = 2;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.u[0] = 1;
    op.out[0] = b.a;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op = op_of(KVS_OP_GATHER);
    op.in[0] = b.a;
    op.out[0] = b.b;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op = op_of(KVS_OP_ADD);
    op.in[0] = b.a;
    op.out[0] = out;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    kvs_tape_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_tape_get_info(b.tape, &info));
    CHECK_U64(info.n_ops, 0);
    close_bench(&b);
}

static void add_embed(kvs_tape *tape, uint32_t out)
{
    kvs_op_desc op = op_of(KVS_OP_EMBED);
    op.weights[0] = 0;
    op.out[0] = out;
    CHECK_OK(kvs_tape_add_op(tape, &op));
}

static void add_binary(kvs_tape *tape, uint32_t code, uint32_t in, uint32_t out)
{
    kvs_op_desc op = op_of(code);
    op.in[0] = in;
    op.out[0] = out;
    CHECK_OK(kvs_tape_add_op(tape, &op));
}

static void add_layer_op(kvs_tape *tape, uint32_t code, uint32_t layer, uint32_t in, uint32_t other)
{
    kvs_op_desc op = op_of(code);
    op.layer = layer;
    op.in[0] = in;
    op.in[1] = code == KVS_OP_KV_WRITE ? other : KVS_NONE;
    op.out[0] = code == KVS_OP_KV_WRITE ? KVS_NONE : other;
    op.u[0] = 1;
    op.f[0] = 1.0F;
    CHECK_OK(kvs_tape_add_op(tape, &op));
}

static void test_sealing_wants_writes_before_reads(void)
{
    bench b;
    open_bench(&b);
    CHECK_STATUS(kvs_tape_seal(NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_seal(b.tape), KVS_EINVAL); /* empty */
    add_embed(b.tape, b.a);
    CHECK_STATUS(kvs_tape_seal(b.tape), KVS_EINVAL); /* b is never written */
    add_binary(b.tape, KVS_OP_ADD, b.a, b.b);
    CHECK_STATUS(kvs_tape_seal(b.tape), KVS_EINVAL); /* add reads b */
    close_bench(&b);
}

static void test_sealing_wants_layers_in_order(void)
{
    enum { WRITE = KVS_OP_KV_WRITE, ATTEND = KVS_OP_ATTEND };
    const struct {
        uint32_t code[4];
        uint32_t layer[4];
        kvs_status expected;
    } cases[] = {{{WRITE, ATTEND, WRITE, ATTEND}, {0, 0, 1, 1}, KVS_OK},
                 {{WRITE, WRITE, ATTEND, ATTEND}, {1, 0, 0, 1}, KVS_OK},
                 {{WRITE, WRITE, ATTEND, ATTEND}, {0, 1, 1, 0}, KVS_EINVAL},
                 {{WRITE, WRITE, ATTEND, ATTEND}, {0, 1, 0, 0}, KVS_EINVAL},
                 {{WRITE, WRITE, ATTEND, ATTEND}, {0, 0, 0, 1}, KVS_EINVAL},
                 {{ATTEND, WRITE, WRITE, ATTEND}, {0, 0, 1, 1}, KVS_EINVAL}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bench b;
        open_bench(&b);
        uint32_t id;
        CHECK_OK(kvs_tape_add_layer(b.tape, &kv, &id));
        add_embed(b.tape, b.a);
        add_embed(b.tape, b.b);
        for (int j = 0; j < 4; j++) {
            add_layer_op(b.tape, cases[i].code[j], cases[i].layer[j], b.a, b.b);
        }
        CHECK_STATUS(kvs_tape_seal(b.tape), cases[i].expected);
        close_bench(&b);
    }
}

static void test_a_sealed_tape_is_closed(void)
{
    bench b;
    open_bench(&b);
    add_embed(b.tape, b.a);
    add_embed(b.tape, b.b);
    CHECK_OK(kvs_tape_seal(b.tape));
    uint32_t id;
    const kvs_tensor_desc desc = {.struct_size = sizeof desc, .cols = 1};
    const kvs_op_desc op = op_of(KVS_OP_EMBED);
    CHECK_STATUS(kvs_tape_seal(b.tape), KVS_EBUSY);
    CHECK_STATUS(kvs_tape_add_tensor(b.tape, &desc, &id), KVS_EBUSY);
    CHECK_STATUS(kvs_tape_add_weight(b.tape, b.weights[0], &id), KVS_EBUSY);
    CHECK_STATUS(kvs_tape_add_layer(b.tape, &kv, &id), KVS_EBUSY);
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EBUSY);
    kvs_tape_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_tape_get_info(b.tape, &info));
    CHECK(info.is_sealed == 1 && info.workspace_bytes >= sizeof(float) * MAX_ROWS * COLS && info.workspace_bytes % 64 == 0);
    close_bench(&b);
}

/* A runnable tape: row = 2 * table[token], then the requested rows. */
typedef struct player {
    kvs_device *device;
    kvs_arena *arena;
    kvs_lease *lease;
    kvs_weight *weight;
    kvs_tape *tape;
    kvs_binding *binding;
    uint64_t workspace_bytes;
} player;

static kvs_arena *make_arena(kvs_device *device, uint64_t bytes)
{
    kvs_arena *arena = NULL;
    kvs_region region = {.struct_size = sizeof region, .flags = KVS_REGION_PERSISTENT, .id = WORKSPACE, .size_bytes = bytes};
    CHECK_OK(kvs_arena_create(device, bytes + 4096, 64, &arena));
    CHECK_OK(kvs_arena_begin(arena, 0));
    CHECK_OK(kvs_arena_reserve(arena, &region));
    CHECK_OK(kvs_arena_commit(arena));
    return arena;
}

static void open_player(player *p)
{
    *p = (player){.device = rig_device(0, 0)};
    p->weight = rows_weight(p->device);
    CHECK_OK(kvs_tape_create(p->device, MAX_ROWS, 2, &p->tape));
    uint32_t id;
    CHECK_OK(kvs_tape_add_weight(p->tape, p->weight, &id));
    const uint32_t a = work(p->tape);
    const uint32_t sum = work(p->tape);
    const uint32_t out = tensor(p->tape, KVS_TENSOR_OUTPUT, KVS_ROWS_OUT, COLS);
    add_embed(p->tape, a);
    add_embed(p->tape, sum);
    add_binary(p->tape, KVS_OP_ADD, a, sum);
    add_binary(p->tape, KVS_OP_GATHER, sum, out);
    CHECK_OK(kvs_tape_seal(p->tape));
    kvs_tape_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_tape_get_info(p->tape, &info));
    p->workspace_bytes = info.workspace_bytes;
    p->arena = make_arena(p->device, info.workspace_bytes);
    CHECK_OK(kvs_arena_acquire(p->arena, WORKSPACE, &p->lease));
    CHECK_OK(kvs_tape_bind(p->tape, p->arena, p->lease, NULL, &p->binding));
}

static void close_player(player *p)
{
    kvs_binding_release(p->binding);
    kvs_lease_release(p->lease);
    kvs_arena_release(p->arena);
    kvs_tape_release(p->tape);
    kvs_weight_release(p->weight);
    rig_close(p->device);
}

static const uint32_t tokens[] = {3, 0, 7, 1, 2};
static const uint32_t wanted[] = {0, 2};
static float result[2 * COLS];
static float *const outputs[] = {result};

static kvs_pass_desc pass_of(uint32_t n_rows, uint32_t n_out_rows)
{
    return (kvs_pass_desc){.struct_size = sizeof(kvs_pass_desc),
                           .n_rows = n_rows,
                           .tokens = tokens,
                           .n_out_rows = n_out_rows,
                           .n_outputs = 1,
                           .out_rows = wanted,
                           .outputs = outputs};
}

static void test_a_pass_gives_the_rows_that_were_asked_for(void)
{
    player p;
    open_player(&p);
    const kvs_pass_desc pass = pass_of(3, 2);
    memset(result, 0xff, sizeof result);
    CHECK_OK(kvs_binding_run(p.binding, &pass));
    for (uint32_t col = 0; col < COLS; col++) {
        CHECK(result[col] == 2.0F * table[3 * COLS + col]);
        CHECK(result[COLS + col] == 2.0F * table[7 * COLS + col]);
    }
    close_player(&p);
}

static int refuse_operation(void *user, int point, uint64_t index)
{
    (void)index;
    (void)user;
    return point == KVS_HOOK_OP ? KVS_EIO : 0;
}

static void test_a_pass_refuses(void)
{
    player p;
    open_player(&p);
    kvs_pass_desc pass = pass_of(3, 2);
    CHECK_STATUS(kvs_binding_run(NULL, &pass), KVS_EINVAL);
    CHECK_STATUS(kvs_binding_run(p.binding, NULL), KVS_EINVAL);
    pass.struct_size = 8;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    const struct {
        uint32_t rows, out_rows;
    } sizes[] = {{0, 0}, {MAX_ROWS + 1, 0}, {3, 3}, {2, 2}};
    for (int i = 0; i < 4; i++) {
        pass = pass_of(sizes[i].rows, sizes[i].out_rows);
        CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    }
    pass = pass_of(3, 2);
    pass.tokens = NULL;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    pass = pass_of(3, 2);
    pass.out_rows = NULL;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    const uint32_t falling[] = {2, 0};
    pass.out_rows = falling;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    pass = pass_of(3, 2);
    pass.outputs = NULL;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    pass = pass_of(3, 2);
    pass.n_outputs = 2;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    const uint32_t foreign[] = {0, N_VOCAB, 0};
    pass = pass_of(3, 2);
    pass.tokens = foreign;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    const uint32_t stop = 1;
    pass = pass_of(3, 2);
    pass.cancel = &stop;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_ECANCELLED);
    pass.cancel = NULL;
    CHECK_OK(kvs_device_set_hook(p.device, refuse_operation, NULL));
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EIO);
    CHECK_OK(kvs_device_set_hook(p.device, NULL, NULL));
    CHECK_OK(kvs_binding_run(p.binding, &pass));
    close_player(&p);
}

static void test_a_binding_of_an_old_epoch_is_stale(void)
{
    player p;
    open_player(&p);
    const kvs_pass_desc pass = pass_of(3, 2);
    kvs_region region = {.struct_size = sizeof region, .id = OTHER, .size_bytes = 64};
    CHECK_OK(kvs_arena_begin(p.arena, KVS_BEGIN_KEEP_PERSISTENT));
    CHECK_OK(kvs_arena_reserve(p.arena, &region));
    CHECK_OK(kvs_binding_run(p.binding, &pass)); /* staged is not committed */
    CHECK_OK(kvs_arena_commit(p.arena));
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_ESTALE);
    kvs_binding_release(p.binding);
    CHECK_OK(kvs_tape_bind(p.tape, p.arena, p.lease, NULL, &p.binding));
    CHECK_OK(kvs_binding_run(p.binding, &pass));
    close_player(&p);
}

static void test_bind_refuses(void)
{
    player p;
    open_player(&p);
    kvs_binding *binding = NULL;
    CHECK_STATUS(kvs_tape_bind(NULL, p.arena, p.lease, NULL, &binding), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_bind(p.tape, NULL, p.lease, NULL, &binding), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_bind(p.tape, p.arena, NULL, NULL, &binding), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_bind(p.tape, p.arena, p.lease, NULL, NULL), KVS_EINVAL);
    kvs_arena *small = make_arena(p.device, p.workspace_bytes - 64);
    kvs_lease *lease = NULL;
    CHECK_OK(kvs_arena_acquire(small, WORKSPACE, &lease));
    CHECK_STATUS(kvs_tape_bind(p.tape, p.arena, lease, NULL, &binding), KVS_EINVAL); /* another arena's */
    CHECK_STATUS(kvs_tape_bind(p.tape, small, lease, NULL, &binding), KVS_ENOSPACE);
    kvs_lease_release(lease);
    kvs_arena_release(small);
    kvs_device *device = rig_device(0, 0);
    kvs_arena *foreign = make_arena(device, p.workspace_bytes);
    CHECK_OK(kvs_arena_acquire(foreign, WORKSPACE, &lease));
    CHECK_STATUS(kvs_tape_bind(p.tape, foreign, lease, NULL, &binding), KVS_EINVAL);
    kvs_lease_release(lease);
    kvs_arena_release(foreign);
    rig_close(device);
    kvs_tape *other = NULL;
    CHECK_OK(kvs_tape_create(p.device, 1, 1, &other));
    CHECK_STATUS(kvs_tape_bind(other, p.arena, p.lease, NULL, &binding), KVS_EINVAL); /* not sealed */
    for (uint32_t layout = KVS_WEIGHT_PANELS; layout <= KVS_WEIGHT_ROWS; layout++) {
        kvs_weight *declared = NULL;
        uint32_t id;
        CHECK_OK(kvs_weight_create(p.device, KVS_TYPE_F32, COLS, N_VOCAB, NULL, layout, &declared));
        CHECK_OK(kvs_tape_add_weight(other, declared, &id));
        kvs_weight_release(declared);
    }
    kvs_op_desc op = op_of(KVS_OP_EMBED);
    op.weights[0] = 1;
    op.out[0] = work(other);
    CHECK_OK(kvs_tape_add_op(other, &op));
    CHECK_OK(kvs_tape_seal(other));
    CHECK_STATUS(kvs_tape_bind(other, p.arena, p.lease, NULL, &binding), KVS_EINVAL); /* declared only */
    kvs_tape_release(other);
    uint64_t left = 0;
    const uint64_t before = rig_info(p.device).live_objects;
    CHECK_OK(kvs_device_set_hook(p.device, refuse_allocation, &left));
    CHECK_STATUS(kvs_tape_bind(p.tape, p.arena, p.lease, NULL, &binding), KVS_ENOMEM);
    CHECK_OK(kvs_device_set_hook(p.device, NULL, NULL));
    CHECK_U64(rig_info(p.device).live_objects, before);
    close_player(&p);
}

static void test_attention_wants_a_pager_of_its_layers(void)
{
    bench b;
    open_bench(&b);
    add_embed(b.tape, b.a);
    add_embed(b.tape, b.b);
    add_layer_op(b.tape, KVS_OP_KV_WRITE, 0, b.a, b.b);
    CHECK_OK(kvs_tape_seal(b.tape));
    kvs_tape_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_tape_get_info(b.tape, &info));
    kvs_arena *arena = make_arena(b.device, info.workspace_bytes);
    kvs_lease *lease = NULL;
    kvs_binding *binding = NULL;
    CHECK_OK(kvs_arena_acquire(arena, WORKSPACE, &lease));
    CHECK_STATUS(kvs_tape_bind(b.tape, arena, lease, NULL, &binding), KVS_EINVAL);
    kvs_kv_layer others[] = {kv, kv};
    others[0].head_dim_k = 16;
    for (uint32_t i = 0; i < 2; i++) { /* another geometry; another number */
        others[0] = i == 0 ? others[0] : kv;
        kvs_cache *cache = NULL;
        kvs_pager *pager = NULL;
        CHECK_OK(kvs_cache_create(b.device, others, i + 1, &cache));
        CHECK_OK(kvs_pager_create(cache, &pager));
        CHECK_STATUS(kvs_tape_bind(b.tape, arena, lease, pager, &binding), KVS_EINVAL);
        kvs_pager_release(pager);
        kvs_cache_release(cache);
    }
    kvs_lease_release(lease);
    kvs_arena_release(arena);
    close_bench(&b);
}

static void release_one(player *p, int which)
{
    switch (which) {
    case 0: kvs_weight_release(p->weight); break;
    case 1: kvs_tape_release(p->tape); break;
    case 2: kvs_lease_release(p->lease); break;
    case 3: kvs_arena_release(p->arena); break;
    default: kvs_binding_release(p->binding); break;
    }
}

static void test_any_order_of_release_is_safe(void)
{
    for (int code = 0; code < 3125; code++) {
        int order[5];
        unsigned seen = 0;
        for (int i = 0, rest = code; i < 5; i++, rest /= 5) {
            order[i] = rest % 5;
            seen |= 1U << order[i];
        }
        if (seen != 31U) {
            continue;
        }
        player p;
        open_player(&p);
        bool runs = true;
        for (int i = 0; i < 5; i++) {
            release_one(&p, order[i]);
            runs = runs && order[i] != 4;
            if (runs) {
                const kvs_pass_desc pass = pass_of(3, 2);
                CHECK_OK(kvs_binding_run(p.binding, &pass));
            }
        }
        rig_close(p.device);
    }
}

int main(void)
{
    test_create_refuses();
    test_without_memory_nothing_is_left();
    test_weights_refuse();
    test_tensors_weights_and_layers_refuse();
    test_operations_refuse_what_they_cannot_run();
    test_sealing_wants_writes_before_reads();
    test_sealing_wants_layers_in_order();
    test_a_sealed_tape_is_closed();
    test_a_pass_gives_the_rows_that_were_asked_for();
    test_a_pass_refuses();
    test_a_binding_of_an_old_epoch_is_stale();
    test_bind_refuses();
    test_attention_wants_a_pager_of_its_layers();
    test_any_order_of_release_is_safe();
    return check_finish();
}
