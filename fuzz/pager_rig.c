/* pager_rig.c: small integers in tables, which every cache type holds exactly, and plain attention over them. */
#include "pager_rig.h"

#include <math.h>
#include <string.h>

enum { POOL = 1, WORKSPACE = 2 };

#define SCALE 0.125

static const kvs_kv_layer LAYERS[N_LAYERS] = {
    {.n_kv_heads = 1, .head_dim_k = 16, .head_dim_v = 16, .type_k = KVS_TYPE_F32, .type_v = KVS_TYPE_F32},
    {.n_kv_heads = 2, .head_dim_k = 16, .head_dim_v = 16, .type_k = KVS_TYPE_F16, .type_v = KVS_TYPE_F16},
};

const kvs_kv_layer *rig_layer(uint32_t layer)
{
    return &LAYERS[layer];
}

uint32_t rig_cols(uint32_t layer)
{
    return LAYERS[layer].n_kv_heads * LAYERS[layer].head_dim_k;
}

static const float *row_of(const rig *rig, uint32_t layer, uint32_t table, uint32_t token)
{
    return &rig->tables[3 * layer + table][token * rig_cols(layer)];
}

static void fill_tables(rig *rig)
{
    uint32_t state = 5;
    for (uint32_t i = 0; i < N_WEIGHTS; i++) {
        for (uint32_t j = 0; j < N_VOCAB * MAX_COLS; j++) {
            state = state * 1664525u + 1013904223u;
            rig->tables[i][j] = (float)(int)(state >> 24) / 32.0F;
            rig->tables[i][j] = (float)(int)rig->tables[i][j] - 4.0F;
        }
    }
}

/* ---- recording ---- */

static kvs_op_desc operation(uint32_t code, uint32_t layer)
{
    kvs_op_desc op = {.struct_size = sizeof op, .code = code, .layer = layer};
    memset(op.in, 0xff, sizeof op.in);
    memset(op.out, 0xff, sizeof op.out);
    memset(op.weights, 0xff, sizeof op.weights);
    return op;
}

static uint32_t tensor(kvs_tape *tape, uint32_t kind, uint32_t cols)
{
    uint32_t id = 0;
    const kvs_tensor_desc desc = {.struct_size = sizeof desc, .kind = kind, .rows = KVS_ROWS_PASS, .cols = cols};
    EXPECT_OK(kvs_tape_add_tensor(tape, &desc, &id));
    return id;
}

/* Rows of a table by token. */
static uint32_t embed(rig *rig, uint32_t layer, uint32_t table)
{
    const uint32_t at = 3 * layer + table;
    kvs_op_desc op = operation(KVS_OP_EMBED, 0);
    EXPECT_OK(kvs_weight_create(rig->device, KVS_TYPE_F32, rig_cols(layer), N_VOCAB, rig->tables[at], KVS_WEIGHT_ROWS,
                                &rig->weights[at]));
    EXPECT_OK(kvs_tape_add_weight(rig->tape, rig->weights[at], &op.weights[0]));
    op.out[0] = tensor(rig->tape, KVS_TENSOR_WORK, rig_cols(layer));
    EXPECT_OK(kvs_tape_add_op(rig->tape, &op));
    return op.out[0];
}

static void record_layer(rig *rig, uint32_t layer)
{
    kvs_op_desc write = operation(KVS_OP_KV_WRITE, layer);
    kvs_op_desc attend = operation(KVS_OP_ATTEND, layer);
    write.in[0] = embed(rig, layer, TABLE_K);
    write.in[1] = embed(rig, layer, TABLE_V);
    attend.in[0] = embed(rig, layer, TABLE_Q);
    attend.out[0] = tensor(rig->tape, KVS_TENSOR_OUTPUT, rig_cols(layer));
    attend.u[0] = LAYERS[layer].n_kv_heads;
    attend.f[0] = (float)SCALE;
    EXPECT_OK(kvs_tape_add_op(rig->tape, &write));
    EXPECT_OK(kvs_tape_add_op(rig->tape, &attend));
}

static void record_tape(rig *rig)
{
    uint32_t id = 0;
    EXPECT_OK(kvs_tape_create(rig->device, MAX_ROWS, 1, &rig->tape));
    for (uint32_t layer = 0; layer < rig->n_layers; layer++) {
        EXPECT_OK(kvs_tape_add_layer(rig->tape, &LAYERS[layer], &id));
    }
    for (uint32_t layer = 0; layer < rig->n_layers; layer++) {
        record_layer(rig, layer);
    }
    EXPECT_OK(kvs_tape_seal(rig->tape));
}

/* ---- life ---- */

static void divide_arena(rig *rig, uint64_t pool_bytes, uint64_t workspace_bytes)
{
    kvs_region pool = {.struct_size = sizeof pool, .id = POOL, .size_bytes = pool_bytes};
    kvs_region workspace = {.struct_size = sizeof workspace, .id = WORKSPACE, .size_bytes = workspace_bytes};
    EXPECT_OK(kvs_arena_create(rig->device, pool_bytes + workspace_bytes + 4096, 64, &rig->arena));
    EXPECT_OK(kvs_arena_begin(rig->arena, 0));
    EXPECT_OK(kvs_arena_reserve(rig->arena, &pool));
    EXPECT_OK(kvs_arena_reserve(rig->arena, &workspace));
    EXPECT_OK(kvs_arena_commit(rig->arena));
    EXPECT_OK(kvs_arena_acquire(rig->arena, POOL, &rig->pool));
    EXPECT_OK(kvs_arena_acquire(rig->arena, WORKSPACE, &rig->workspace));
}

void rig_open(rig *rig, bool is_deferred, uint64_t seed)
{
    rig_open_beside(rig, script_device(KVS_DEVICE_POISON_RELEASED | KVS_DEVICE_STRICT_HISTORY |
                                           (is_deferred ? KVS_DEVICE_DEFERRED : 0u), seed), N_LAYERS, N_SLOTS);
}

void rig_open_beside(rig *rig, kvs_device *device, uint32_t n_layers, uint32_t n_slots)
{
    fill_tables(rig);
    rig->device = device;
    rig->n_layers = n_layers;
    EXPECT_OK(kvs_cache_create(rig->device, LAYERS, n_layers, &rig->cache));
    record_tape(rig);
    kvs_cache_info cache = {.struct_size = sizeof cache};
    kvs_tape_info tape = {.struct_size = sizeof tape};
    EXPECT_OK(kvs_cache_get_info(rig->cache, &cache));
    EXPECT_OK(kvs_tape_get_info(rig->tape, &tape));
    EXPECT(cache.max_record_bytes <= sizeof rig->record);
    divide_arena(rig, n_slots * cache.max_record_bytes, tape.workspace_bytes);
    EXPECT_OK(kvs_pager_create(rig->cache, &rig->pager));
    EXPECT_OK(kvs_tape_bind(rig->tape, rig->arena, rig->workspace, rig->pager, &rig->binding));
}

static void release_part(rig *rig, uint32_t part)
{
    switch (part) {
    case 0:
        /* A binding borrows the pager. */
        kvs_binding_release(rig->binding);
        kvs_pager_release(rig->pager);
        break;
    case 1:
        kvs_lease_release(rig->pool);
        break;
    case 2:
        kvs_lease_release(rig->workspace);
        break;
    case 3:
        kvs_arena_release(rig->arena);
        break;
    case 4:
        kvs_tape_release(rig->tape);
        break;
    case 5:
        kvs_cache_release(rig->cache);
        break;
    default:
        kvs_weight_release(rig->weights[part - 6]);
    }
}

void rig_release(rig *rig, kvs_seq **seqs, uint32_t n_seqs, uint32_t order)
{
    enum { MOST_PARTS = 6 + N_WEIGHTS + 8 };
    uint32_t parts[MOST_PARTS];
    const uint32_t n_parts = 6 + 3 * rig->n_layers;
    const uint32_t n = n_parts + n_seqs;
    for (uint32_t i = 0; i < n; i++) {
        parts[i] = i;
    }
    uint32_t state = order * 2654435761u + 1;
    for (uint32_t i = n; i > 0; i--) {
        state = state * 1664525u + 1013904223u;
        const uint32_t at = order == 0 ? 0 : (state >> 16) % i;
        if (parts[at] < n_parts) {
            release_part(rig, parts[at]);
        } else {
            kvs_seq_release(seqs[parts[at] - n_parts]);
        }
        memmove(&parts[at], &parts[at + 1], (i - at - 1) * sizeof parts[0]);
    }
}

void rig_close(rig *rig, kvs_seq **seqs, uint32_t n_seqs, uint32_t order)
{
    rig_release(rig, seqs, n_seqs, order);
    script_device_close(rig->device);
}

/* ---- what must come out ---- */

static void attend_head(const rig *rig, uint32_t layer, uint32_t head, const uint32_t *tokens, uint64_t row, double *out)
{
    const uint32_t dim = LAYERS[layer].head_dim_k;
    const float *q = row_of(rig, layer, TABLE_Q, tokens[row]) + head * dim;
    double weights[MAX_CTX + MAX_ROWS];
    double highest = -INFINITY;
    double sum = 0.0;
    for (uint64_t at = 0; at <= row; at++) {
        const float *k = row_of(rig, layer, TABLE_K, tokens[at]) + head * dim;
        weights[at] = 0.0;
        for (uint32_t i = 0; i < dim; i++) {
            weights[at] += (double)q[i] * (double)k[i] * SCALE;
        }
        highest = weights[at] > highest ? weights[at] : highest;
    }
    memset(out, 0, dim * sizeof *out);
    for (uint64_t at = 0; at <= row; at++) {
        const float *v = row_of(rig, layer, TABLE_V, tokens[at]) + head * dim;
        const double weight = exp(weights[at] - highest);
        sum += weight;
        for (uint32_t i = 0; i < dim; i++) {
            out[i] += weight * (double)v[i];
        }
    }
    for (uint32_t i = 0; i < dim; i++) {
        out[i] /= sum;
    }
}

static void check_row(const rig *rig, uint32_t layer, const uint32_t *tokens, uint64_t first, uint32_t row)
{
    const uint32_t dim = LAYERS[layer].head_dim_v;
    for (uint32_t head = 0; head < LAYERS[layer].n_kv_heads; head++) {
        double expected[MAX_COLS];
        const float *found = &rig->outputs[layer][row * rig_cols(layer) + head * dim];
        attend_head(rig, layer, head, tokens, first + row, expected);
        for (uint32_t i = 0; i < dim; i++) {
            /* Sums of at most 2,100 weights in single precision. */
            EXPECT(fabs((double)found[i] - expected[i]) <= 1e-4 + 1e-4 * fabs(expected[i]));
        }
    }
}

void rig_check_outputs(const rig *rig, const uint32_t *tokens, uint64_t first, uint32_t n_rows)
{
    for (uint32_t layer = 0; layer < rig->n_layers; layer++) {
        check_row(rig, layer, tokens, first, 0);
        check_row(rig, layer, tokens, first, n_rows / 2);
        check_row(rig, layer, tokens, first, n_rows - 1);
    }
}

void rig_check_page(rig *rig, kvs_seq *seq, uint32_t layer, uint64_t page, const uint32_t *tokens, uint32_t n_rows)
{
    static const uint32_t sides[] = {TABLE_K, TABLE_V};
    float rows[2][KVS_PAGE_TOKENS * MAX_COLS];
    const size_t row_bytes = rig_cols(layer) * sizeof(float);
    EXPECT_OK(kvs_seq_read_page_wait(seq, layer, page, rig->record));
    EXPECT_OK(kvs_record_decode_rows(rig->device, &LAYERS[layer], rig->record, 0, n_rows, rows[0], rows[1]));
    for (uint32_t row = 0; row < n_rows; row++) {
        for (uint32_t side = 0; side < 2; side++) {
            EXPECT(memcmp(&rows[side][row * rig_cols(layer)], row_of(rig, layer, sides[side], tokens[row]), row_bytes) == 0);
        }
    }
}
