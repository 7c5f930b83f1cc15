/* state_scene.h: a state beside its sequence, and passes over it that are opened by hand and filled with a number. */
#ifndef KVS_TESTS_STATE_SCENE_H
#define KVS_TESTS_STATE_SCENE_H

#include "rig.h"

#include "core/state_sides.h"
#include "core/weight.h"

#include <stdlib.h>

enum { HEADS = 4, DIM = 16, TAPS = 4, CHANNELS = DIM * (2 * 2 + HEADS), LAYERS = 2, LOG_ROWS = 6 };

static float conv[CHANNELS * TAPS], bias[HEADS], decay[HEADS];
static const kvs_kv_layer kv = {
    .n_kv_heads = 1, .head_dim_k = 16, .head_dim_v = 16, .type_k = KVS_TYPE_F32, .type_v = KVS_TYPE_F32};

/* A device with weights, layers, two sequences and a state. */
typedef struct scene {
    kvs_device *device;
    kvs_weight *weights[3];
    kvs_delta_layer layers[LAYERS];
    kvs_state_desc desc;
    kvs_cache *cache;
    kvs_seq *seq, *other;
    kvs_state *state;
} scene;

static inline kvs_weight *rows_of(kvs_device *device, const float *rows, uint64_t k, uint64_t n)
{
    kvs_weight *weight = NULL;
    CHECK_OK(kvs_weight_create(device, KVS_TYPE_F32, k, n, rows, KVS_WEIGHT_ROWS, &weight));
    return weight;
}

static inline scene *open_scene(kvs_device *device)
{
    scene *s = calloc(1, sizeof *s);
    s->device = device;
    s->weights[0] = rows_of(device, conv, TAPS, CHANNELS);
    s->weights[1] = rows_of(device, bias, HEADS, 1);
    s->weights[2] = rows_of(device, decay, HEADS, 1);
    for (int i = 0; i < LAYERS; i++) {
        s->layers[i] = (kvs_delta_layer){.n_key_heads = 2,
                                         .n_value_heads = HEADS,
                                         .head_dim = DIM,
                                         .conv_width = TAPS,
                                         .norm_eps = 1e-6f,
                                         .conv = s->weights[0],
                                         .dt_bias = s->weights[1],
                                         .decay = s->weights[2]};
    }
    s->desc = (kvs_state_desc){
        .struct_size = sizeof s->desc, .n_layers = LAYERS, .layers = s->layers, .log_rows = LOG_ROWS};
    CHECK_OK(kvs_cache_create(device, &kv, 1, &s->cache));
    CHECK_OK(kvs_seq_create(s->cache, 1000, &s->seq));
    CHECK_OK(kvs_seq_create(s->cache, 1000, &s->other));
    CHECK_OK(kvs_state_create(device, &s->desc, &s->state));
    CHECK_OK(kvs_state_attach(s->state, s->seq));
    return s;
}

static inline void close_scene(scene *s)
{
    kvs_state_release(s->state);
    kvs_seq_release(s->seq);
    kvs_seq_release(s->other);
    kvs_cache_release(s->cache);
    for (int i = 0; i < 3; i++) {
        kvs_weight_release(s->weights[i]);
    }
    rig_close(s->device);
    free(s);
}

static inline kvs_state_info info_of(kvs_state *state)
{
    kvs_state_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_state_get_info(state, &info));
    return info;
}

static inline kvs_pass_view pass_of(const scene *s, uint32_t n_rows)
{
    kvs_seq_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_seq_get_info(s->seq, &info));
    return (kvs_pass_view){
        .n_rows = n_rows, .first_token = info.committed_tokens, .seq_id = info.seq_id, .n_rewrites = info.n_rewrites};
}

static inline kvs_status open_pass(scene *s, uint32_t n_rows, bool is_logged, const kvs_delta_view **views)
{
    const kvs_pass_view pass = pass_of(s, n_rows);
    return kvs_state_open_pass(s->state, &pass, s->layers, LAYERS, is_logged, views);
}

static inline void commit(const scene *s, uint32_t n_rows, uint32_t n_kept)
{
    CHECK_OK(kvs_seq_append(s->seq, n_rows));
    CHECK_OK(kvs_seq_commit(s->seq, n_kept));
}

/* A pass whose operations are a fill with a number. */
static inline void take(scene *s, uint32_t n_rows, bool is_logged, uint32_t n_kept, float number)
{
    const kvs_delta_view *views = NULL;
    CHECK_OK(open_pass(s, n_rows, is_logged, &views));
    for (uint32_t i = 0; i < LAYERS && number != 0.0f; i++) {
        const kvs_delta_view *view = &views[i];
        for (uint64_t j = 0; j < kvs_delta_matrix_values(view->layer); j++) {
            view->matrix_out[j] = number;
        }
        for (uint64_t j = 0; j < kvs_delta_conv_values(view->layer); j++) {
            view->conv_out[j] = number;
        }
        for (uint64_t j = 0; is_logged && j < n_rows * kvs_delta_log_values(view->layer); j++) {
            view->log_out[j] = number;
        }
    }
    commit(s, n_rows, n_kept);
    CHECK_OK(kvs_state_accept(s->state, s->seq, n_kept));
}

static inline uint8_t *save(kvs_state *state, uint64_t *n_bytes)
{
    *n_bytes = info_of(state).image_bytes;
    uint8_t *image = malloc(*n_bytes);
    CHECK_OK(kvs_state_save(state, image, *n_bytes));
    return image;
}

static inline bool saves(kvs_state *state, const uint8_t *image, uint64_t n_bytes)
{
    uint64_t n_now = 0;
    uint8_t *now = save(state, &n_now);
    const bool is_same = n_now == n_bytes && memcmp(now, image, n_bytes) == 0;
    free(now);
    return is_same;
}

#endif
