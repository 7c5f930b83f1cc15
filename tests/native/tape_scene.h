/* tape_scene.h: small tapes for the tests of recording, sealing and running. */
#ifndef KVS_TESTS_TAPE_SCENE_H
#define KVS_TESTS_TAPE_SCENE_H

#include "rig.h"

#include "kvstream/tape.h"


enum { N_VOCAB = 8, COLS = 32, MAX_ROWS = 4, WORKSPACE = 1, OTHER = 2 };

static const kvs_kv_layer kv = {
    .n_kv_heads = 1, .head_dim_k = COLS, .head_dim_v = COLS, .type_k = KVS_TYPE_F32, .type_v = KVS_TYPE_F32};

static float table[N_VOCAB * COLS];

static inline kvs_weight *rows_weight(kvs_device *device)
{
    kvs_weight *weight = NULL;
    for (uint32_t i = 0; i < N_VOCAB * COLS; i++) {
        table[i] = (float)i;
    }
    CHECK_OK(kvs_weight_create(device, KVS_TYPE_F32, COLS, N_VOCAB, table, KVS_WEIGHT_ROWS, &weight));
    return weight;
}

static inline uint32_t tensor(kvs_tape *tape, uint32_t kind, uint32_t rows, uint32_t cols)
{
    uint32_t id = KVS_NONE;
    const kvs_tensor_desc desc = {.struct_size = sizeof desc, .kind = kind, .rows = rows, .cols = cols};
    CHECK_OK(kvs_tape_add_tensor(tape, &desc, &id));
    return id;
}

static inline uint32_t work(kvs_tape *tape)
{
    return tensor(tape, KVS_TENSOR_WORK, KVS_ROWS_PASS, COLS);
}

static inline kvs_op_desc op_of(uint32_t code)
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

static inline void open_bench(bench *b)
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

static inline void close_bench(bench *b)
{
    for (uint32_t i = 0; i < 3; i++) {
        kvs_weight_release(b->weights[i]);
    }
    kvs_tape_release(b->tape);
    rig_close(b->device);
}

static inline void add_embed(kvs_tape *tape, uint32_t out)
{
    kvs_op_desc op = op_of(KVS_OP_EMBED);
    op.weights[0] = 0;
    op.out[0] = out;
    CHECK_OK(kvs_tape_add_op(tape, &op));
}

static inline void add_binary(kvs_tape *tape, uint32_t code, uint32_t in, uint32_t out)
{
    kvs_op_desc op = op_of(code);
    op.in[0] = in;
    op.out[0] = out;
    CHECK_OK(kvs_tape_add_op(tape, &op));
}

static inline void add_layer_op(kvs_tape *tape, uint32_t code, uint32_t layer, uint32_t in, uint32_t other)
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

static inline int refuse_allocation(void *user, int point, uint64_t index)
{
    (void)index;
    uint64_t *left = user;
    if (point != KVS_HOOK_ALLOC) {
        return 0;
    }
    return (*left)-- == 0 ? KVS_ENOMEM : 0;
}

#endif
