/* Tapes without Python: every refusal of recording and sealing that the header names. */
#include "tape_scene.h"

#include <math.h>

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
    static const float scales[2] = {2.0f, INFINITY};
    CHECK_STATUS(kvs_weight_set_scales(NULL, scales, 1), KVS_EINVAL);
    CHECK_STATUS(kvs_weight_set_scales(b.weights[0], scales, 1), KVS_EINVAL); /* rows */
    CHECK_STATUS(kvs_weight_set_scales(b.weights[1], NULL, 1), KVS_EINVAL);
    CHECK_STATUS(kvs_weight_set_scales(b.weights[1], scales, 0), KVS_EINVAL);
    CHECK_STATUS(kvs_weight_set_scales(b.weights[1], scales, COLS + 1), KVS_EINVAL);
    CHECK_STATUS(kvs_weight_set_scales(b.weights[1], scales + 1, 1), KVS_EINVAL);
    CHECK_OK(kvs_weight_set_scales(b.weights[1], scales, 1));
    CHECK_OK(kvs_weight_set_scales(b.weights[1], scales, 1));
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
    desc.kind = KVS_TENSOR_INPUT + 1;
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
    op.u[0] = 5;
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.u[0] = 1;
    const uint32_t gates[][2] = {{3, 0}, {0, 32}, {1, 16}, {1, 48}, {1, 0}};
    for (uint32_t i = 0; i < 5; i++) { /* kind, groups without a gate, group, no gate */
        memcpy(op.u + 2, gates[i], sizeof gates[i]);
        CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    }
    op.in[1] = b.b; /* gate and output */
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.u[2] = 0;
    op.in[1] = KVS_NONE;
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
    memcpy(op.u, (const uint32_t[]){32, 32, 1, 64}, sizeof op.u); /* block beyond the head */
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    memcpy(op.u, (const uint32_t[]){32, 32, 1, 32}, sizeof op.u); /* parts: twice the same, the table, none before the third */
    const uint32_t parts[][2] = {{b.b, KVS_NONE}, {b.a, KVS_NONE}, {KVS_NONE, narrow}, {narrow, narrow}, {narrow, b.b}};
    for (uint32_t i = 0; i < 5; i++) {
        memcpy(op.out + 1, parts[i], sizeof parts[i]);
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
    op.u[1] = 64; /* block beyond the head */
    CHECK_STATUS(kvs_tape_add_op(b.tape, &op), KVS_EINVAL);
    op.u[1] = 0;
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
    return check_finish();
}
