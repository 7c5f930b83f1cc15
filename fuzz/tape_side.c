/* tape_side.c: weights of every layout, two cache layers, recurrent layers, a pool in which nothing streams. */
#include "tape_side.h"

#include <stdlib.h>
#include <string.h>

enum { REGION = 1, POOL_PAGES = 3, N_PARTS = 8 };

static const kvs_kv_layer LAYERS[N_LAYERS] = {
    {.n_kv_heads = 1, .head_dim_k = 32, .head_dim_v = 32, .type_k = KVS_TYPE_Q8_0, .type_v = KVS_TYPE_F16},
    {.n_kv_heads = 2, .head_dim_k = 32, .head_dim_v = 32, .type_k = KVS_TYPE_F32, .type_v = KVS_TYPE_Q4_0},
};

typedef struct weight_shape {
    int type;
    uint32_t k, n;
    uint32_t layout;
} weight_shape;

static const weight_shape WEIGHTS[N_WEIGHTS] = {
    {KVS_TYPE_F32, 32, N_VOCAB, KVS_WEIGHT_ROWS}, {KVS_TYPE_Q8_0, 64, N_VOCAB, KVS_WEIGHT_ROWS},
    {KVS_TYPE_F32, 32, 32, KVS_WEIGHT_PANELS},    {KVS_TYPE_Q8_0, 32, 64, KVS_WEIGHT_PANELS},
    {KVS_TYPE_Q4_0, 64, 32, KVS_WEIGHT_PANELS},   {KVS_TYPE_F16, 64, 64, KVS_WEIGHT_PANELS},
    {KVS_TYPE_F32, 32, 1, KVS_WEIGHT_ROWS},       {KVS_TYPE_F32, 64, 1, KVS_WEIGHT_ROWS},
    {KVS_TYPE_F32, 16, 1, KVS_WEIGHT_ROWS},       {KVS_TYPE_F32, 8, 1, KVS_WEIGHT_ROWS},
    {KVS_TYPE_Q8_0, 32, 256, KVS_WEIGHT_PANELS}, /* gate, up or down of eight experts of 32 x 32 */
    {KVS_TYPE_F32, 32, 1, KVS_WEIGHT_PANELS},     {KVS_TYPE_F16, 64, 2, KVS_WEIGHT_PANELS},
};

/* Columns of convolution inputs, beta and outputs are widths that tensors have: 64, 2 and 32. */
static const kvs_delta_layer DELTA = {
    .n_key_heads = 1, .n_value_heads = 2, .head_dim = 16, .conv_width = 4, .norm_eps = 1e-6F};

static const weight_shape DELTA_WEIGHTS[N_DELTA_WEIGHTS] = {
    {KVS_TYPE_F32, 4, 64, KVS_WEIGHT_ROWS},
    {KVS_TYPE_F32, 2, 1, KVS_WEIGHT_ROWS},
    {KVS_TYPE_F32, 2, 1, KVS_WEIGHT_ROWS},
};

/* Halves that are small numbers wherever a block keeps its scale; whole floats where there are no blocks. */
static const void *weight_bytes(int type)
{
    static union {
        float floats[WIDEST * WIDEST];
        uint16_t halves[2 * WIDEST * WIDEST];
    } bytes;
    for (uint32_t i = 0; type == KVS_TYPE_F32 && i < WIDEST * WIDEST; i++) {
        bytes.floats[i] = 0.25F * (float)(i % 13) - 1.25F;
    }
    for (uint32_t i = 0; type != KVS_TYPE_F32 && i < 2 * WIDEST * WIDEST; i++) {
        bytes.halves[i] = (uint16_t)(0x2c00u + 0x101u * (i % 9) + (i % 5 == 0 ? 0x8000u : 0u));
    }
    return bytes.halves;
}

static kvs_weight *make_weight(kvs_device *device, const weight_shape *shape, unsigned char *rows)
{
    kvs_weight *weight = NULL;
    memcpy(rows, weight_bytes(shape->type), WIDEST * WIDEST * sizeof(float));
    EXPECT_OK(kvs_weight_create(device, shape->type, shape->k, shape->n, rows, shape->layout, &weight));
    return weight;
}

/* A weight in rows borrows its bytes, so each of them has memory of its own. */
static void open_weights(side *side)
{
    static unsigned char rows[N_WEIGHTS + N_DELTA_WEIGHTS][WIDEST * WIDEST * sizeof(float)];
    for (uint32_t i = 0; i < N_WEIGHTS; i++) {
        uint32_t id = 0;
        side->weights[i] = make_weight(side->device, &WEIGHTS[i], rows[i]);
        EXPECT_OK(kvs_tape_add_weight(side->tape, side->weights[i], &id));
        EXPECT_U64(id, i);
    }
    for (uint32_t i = 0; i < N_DELTA_WEIGHTS; i++) {
        side->delta_weights[i] = make_weight(side->device, &DELTA_WEIGHTS[i], rows[N_WEIGHTS + i]);
    }
}

/* A lease on the one region of an arena. */
static kvs_lease *lease_of(kvs_device *device, uint64_t n_bytes, kvs_arena **arena)
{
    kvs_lease *lease = NULL;
    kvs_region region = {.struct_size = sizeof region, .id = REGION, .size_bytes = n_bytes};
    EXPECT_OK(kvs_arena_create(device, n_bytes, 64, arena));
    EXPECT_OK(kvs_arena_begin(*arena, 0));
    EXPECT_OK(kvs_arena_reserve(*arena, &region));
    EXPECT_OK(kvs_arena_commit(*arena));
    EXPECT_OK(kvs_arena_acquire(*arena, REGION, &lease));
    return lease;
}

static void open_pool(side *side)
{
    kvs_cache_info info = {.struct_size = sizeof info};
    kvs_arena *arena = NULL;
    const uint32_t pages[N_LAYERS] = {POOL_PAGES, POOL_PAGES};
    const kvs_placement placement = {
        .struct_size = sizeof placement, .n_layers = N_LAYERS, .resident_pages = pages, .max_rows = MAX_ROWS};
    EXPECT_OK(kvs_cache_create(side->device, LAYERS, N_LAYERS, &side->cache));
    EXPECT_OK(kvs_seq_create(side->cache, CTX, &side->seq));
    EXPECT_OK(kvs_cache_get_info(side->cache, &info));
    EXPECT_OK(kvs_pager_create(side->cache, &side->pager));
    side->pool = lease_of(side->device, N_LAYERS * POOL_PAGES * info.max_record_bytes, &arena);
    kvs_arena_release(arena);
    EXPECT_OK(kvs_pager_attach(side->pager, side->pool, &placement));
}

void side_open(side *side, uint32_t flags, uint32_t max_out_rows)
{
    uint32_t id = 0;
    side->device = script_device(flags | KVS_DEVICE_DEFERRED, 0);
    EXPECT_OK(kvs_tape_create(side->device, MAX_ROWS, max_out_rows, &side->tape));
    open_weights(side);
    for (uint32_t i = 0; i < N_LAYERS; i++) {
        EXPECT_OK(kvs_tape_add_layer(side->tape, &LAYERS[i], &id));
        EXPECT_U64(id, i);
    }
    open_pool(side);
}

static kvs_delta_layer delta_layer(const side *side)
{
    kvs_delta_layer layer = DELTA;
    layer.conv = side->delta_weights[0];
    layer.dt_bias = side->delta_weights[1];
    layer.decay = side->delta_weights[2];
    return layer;
}

kvs_status side_add_delta(side *side, uint32_t *id)
{
    const kvs_delta_layer layer = delta_layer(side);
    return kvs_tape_add_delta(side->tape, &layer, id);
}

void side_open_state(side *side, uint32_t n_deltas)
{
    kvs_delta_layer layers[MAX_DELTAS];
    const kvs_state_desc desc = {
        .struct_size = sizeof desc, .n_layers = n_deltas, .layers = layers, .log_rows = MAX_ROWS};
    for (uint32_t i = 0; i < n_deltas; i++) {
        layers[i] = delta_layer(side);
    }
    EXPECT_OK(kvs_device_set_hook(side->device, NULL, NULL));
    EXPECT_OK(kvs_state_create(side->device, &desc, &side->state));
    EXPECT_OK(kvs_state_attach(side->state, side->seq));
}

kvs_status side_bind(side *side, uint64_t n_missing)
{
    kvs_tape_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_tape_get_info(side->tape, &info));
    const uint64_t n_bytes = info.workspace_bytes > n_missing ? info.workspace_bytes - n_missing : 64;
    EXPECT_OK(kvs_device_set_hook(side->device, NULL, NULL)); /* the fault is meant for the binding */
    side->workspace = lease_of(side->device, n_bytes, &side->arena);
    fault_begin(&side->fault, side->device);
    const kvs_status status = kvs_tape_bind(side->tape, side->arena, side->workspace, side->pager, &side->binding);
    if (status != KVS_OK) {
        EXPECT(side->binding == NULL);
        side_unbind(side);
    }
    return status;
}

void side_unbind(side *side)
{
    kvs_binding_release(side->binding);
    kvs_lease_release(side->workspace);
    kvs_arena_release(side->arena);
    side->binding = NULL;
    side->workspace = NULL;
    side->arena = NULL;
}

static void release_part(side *side, uint32_t part)
{
    switch (part) {
    case 0:
        side_unbind(side);
        break;
    case 1:
        kvs_tape_release(side->tape);
        break;
    case 2:
        kvs_seq_release(side->seq); /* not retained by its state */
        kvs_state_release(side->state);
        break;
    case 3:
        kvs_cache_release(side->cache);
        break;
    case 4:
        kvs_lease_release(side->pool);
        break;
    case 5:
        kvs_device_release(side->device); /* lives on in what was made on it */
        break;
    default:
        for (uint32_t i = part - 6; i < N_WEIGHTS; i += 2) {
            kvs_weight_release(side->weights[i]);
        }
        for (uint32_t i = part - 6; i < N_DELTA_WEIGHTS; i += 2) {
            kvs_weight_release(side->delta_weights[i]);
        }
    }
}

void side_close(side *side, uint32_t order)
{
    kvs_fence *last = NULL; /* something of the device is there until the end, to look at what else is */
    EXPECT_OK(kvs_fence_create(side->device, &last));
    for (uint32_t i = 0; i < N_PARTS; i++) {
        release_part(side, (order + i * (1 + 2 * (order / N_PARTS % 4))) % N_PARTS);
        if (i == order % 3) {
            /* A binding borrows the pager, so it goes first. */
            kvs_binding_release(side->binding);
            side->binding = NULL;
            kvs_pager_release(side->pager);
            side->pager = NULL;
        }
    }
    EXPECT_U64(script_device_info(side->device).live_objects, 1);
    kvs_fence_release(last);
}
