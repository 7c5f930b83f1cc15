/* test_bank.c: snapshots come back to the bit; a copy that fails anywhere leaves old state or old snapshot; names that no longer
 * hold are refused. */
#include "rig.h"

#include "core/state_sides.h"
#include "kvstream/bank.h"
#include "kvstream/tape.h"

#include <stdlib.h>

enum { N_LAYERS = 5, KEY_HEADS = 2, VALUE_HEADS = 4, DIM = 16, TAPS = 4, CHANNELS = DIM * (2 * KEY_HEADS + VALUE_HEADS), LOG_ROWS = 4 };

typedef struct world {
    kvs_device *device;
    kvs_delta_layer layers[N_LAYERS];
    float values[CHANNELS * TAPS];
    kvs_weight *weights[3];
    kvs_bank *bank;
} world;

static kvs_state *make_state(world *w)
{
    const kvs_state_desc desc = {.struct_size = sizeof desc, .n_layers = N_LAYERS, .layers = w->layers, .log_rows = LOG_ROWS};
    kvs_state *state = NULL;
    CHECK_OK(kvs_state_create(w->device, &desc, &state));
    return state;
}

static void open_world(world *w, uint32_t flags, uint32_t n_slots)
{
    w->device = rig_device(flags, 3);
    memset(w->values, 0, sizeof w->values);
    CHECK_OK(kvs_weight_create(w->device, KVS_TYPE_F32, TAPS, CHANNELS, w->values, KVS_WEIGHT_ROWS, &w->weights[0]));
    CHECK_OK(kvs_weight_create(w->device, KVS_TYPE_F32, VALUE_HEADS, 1, w->values, KVS_WEIGHT_ROWS, &w->weights[1]));
    CHECK_OK(kvs_weight_create(w->device, KVS_TYPE_F32, VALUE_HEADS, 1, w->values, KVS_WEIGHT_ROWS, &w->weights[2]));
    for (int i = 0; i < N_LAYERS; i++) {
        w->layers[i] = (kvs_delta_layer){.n_key_heads = KEY_HEADS, .n_value_heads = VALUE_HEADS, .head_dim = DIM,
                                         .conv_width = TAPS, .norm_eps = 1e-6f, .conv = w->weights[0],
                                         .dt_bias = w->weights[1], .decay = w->weights[2]};
    }
    const kvs_bank_desc desc = {.struct_size = sizeof desc, .n_layers = N_LAYERS, .layers = w->layers, .n_slots = n_slots};
    CHECK_OK(kvs_bank_create(w->device, &desc, &w->bank));
}

static void close_world(world *w)
{
    kvs_bank_release(w->bank);
    for (int i = 0; i < 3; i++) {
        kvs_weight_release(w->weights[i]);
    }
    rig_close(w->device);
}

/* Every byte of the state as passes would have left it, and a position. */
static void fill_state(kvs_state *state, uint8_t value, uint64_t position)
{
    memset(rig_bytes(state->address), value, state->scratch);
    state->n_folded = position;
}

typedef struct image {
    uint8_t *bytes;
    uint64_t n_bytes;
} image;

static image save(kvs_state *state)
{
    kvs_state_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_state_get_info(state, &info));
    image made = {.bytes = malloc(info.image_bytes), .n_bytes = info.image_bytes};
    CHECK_OK(kvs_state_save(state, made.bytes, made.n_bytes));
    return made;
}

/* Consumes both. */
static bool equal(image a, image b)
{
    const bool is_equal = a.n_bytes == b.n_bytes && memcmp(a.bytes, b.bytes, a.n_bytes) == 0;
    free(a.bytes);
    free(b.bytes);
    return is_equal;
}

static kvs_snapshot_info snapshot_of(world *w, uint32_t slot)
{
    kvs_snapshot_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_bank_get_snapshot(w->bank, slot, &info));
    return info;
}

static uint64_t capture(world *w, uint32_t slot, kvs_state *state)
{
    CHECK_OK(kvs_bank_capture_wait(w->bank, slot, state));
    CHECK_OK(kvs_bank_publish_wait(w->bank));
    CHECK_OK(kvs_bank_check_integrity(w->bank));
    return snapshot_of(w, slot).capture;
}

static void test_snapshots_come_back(uint32_t flags)
{
    world w;
    open_world(&w, flags, 3);
    kvs_state *state = make_state(&w), *other = make_state(&w);
    uint64_t captures[3];
    for (uint32_t round = 0; round < 20; round++) {
        for (uint32_t slot = 0; slot < 3; slot++) {
            fill_state(state, (uint8_t)(round * 3 + slot), 64 * (slot + 1));
            captures[slot] = capture(&w, slot, state);
        }
        for (uint32_t i = 0; i < 3; i++) {
            const uint32_t slot = (round + i) % 3;
            fill_state(state, (uint8_t)(round * 3 + slot), 64 * (slot + 1));
            fill_state(other, 0xee, 9);
            CHECK_OK(kvs_bank_restore_wait(w.bank, slot, captures[slot], 0, other));
            CHECK(equal(save(other), save(state)));
            CHECK_OK(kvs_state_check_integrity(other));
        }
    }
    kvs_state_release(other);
    kvs_state_release(state);
    close_world(&w);
}

/* What the state does while the last layers are under way does not reach the snapshot. */
static void test_the_state_is_free_at_once(uint32_t flags)
{
    world w;
    open_world(&w, flags, 1);
    kvs_state *state = make_state(&w), *expected = make_state(&w);
    for (uint32_t round = 0; round < 50; round++) {
        fill_state(state, (uint8_t)round, 128);
        fill_state(expected, (uint8_t)round, 128);
        CHECK_OK(kvs_bank_capture_wait(w.bank, 0, state));
        fill_state(state, 0x5a, 4);
        CHECK_OK(kvs_bank_publish_wait(w.bank));
        CHECK_OK(kvs_bank_restore_wait(w.bank, 0, snapshot_of(&w, 0).capture, 0, state));
        CHECK(equal(save(state), save(expected)));
    }
    kvs_state_release(expected);
    kvs_state_release(state);
    close_world(&w);
}

/* ---- failures ---- */

typedef struct fault {
    uint32_t countdown;
    kvs_status status;
} fault;

static int fail_kth(void *user, int point, uint64_t index)
{
    (void)index;
    fault *f = user;
    return point == KVS_HOOK_COPY && --f->countdown == 0 ? (int)f->status : KVS_OK;
}

static void test_a_failed_capture_leaves_an_empty_slot(void)
{
    world w;
    open_world(&w, 0, 2);
    kvs_state *state = make_state(&w);
    uint32_t n_failed = 0;
    for (uint32_t k = 1; k <= N_LAYERS + 1; k++) {
        fill_state(state, (uint8_t)k, 64);
        const uint64_t kept = capture(&w, 1, state);
        image before = save(state);
        fault f = {.countdown = k, .status = KVS_EIO};
        CHECK_OK(kvs_device_set_hook(w.device, fail_kth, &f));
        kvs_status status = kvs_bank_capture_wait(w.bank, 0, state);
        status = status == KVS_OK ? kvs_bank_publish_wait(w.bank) : status;
        CHECK_OK(kvs_device_set_hook(w.device, NULL, NULL));
        n_failed += status < 0;
        CHECK_U64(snapshot_of(&w, 0).is_valid, status == KVS_OK);
        CHECK_OK(kvs_bank_check_integrity(w.bank));
        CHECK(equal(before, save(state)));
        CHECK_OK(kvs_bank_restore_wait(w.bank, 1, kept, 0, state));
    }
    CHECK_U64(n_failed, N_LAYERS);
    kvs_state_release(state);
    close_world(&w);
}

static void test_a_failed_restore_leaves_the_old_state(void)
{
    world w;
    open_world(&w, 0, 1);
    kvs_state *state = make_state(&w);
    uint32_t n_failed = 0;
    for (uint32_t k = 1; k <= N_LAYERS + 1; k++) {
        fill_state(state, (uint8_t)k, 64);
        const uint64_t kept = capture(&w, 0, state);
        fill_state(state, 0x77, 300);
        image before = save(state);
        fault f = {.countdown = k, .status = KVS_EIO};
        CHECK_OK(kvs_device_set_hook(w.device, fail_kth, &f));
        const kvs_status status = kvs_bank_restore_wait(w.bank, 0, kept, 0, state);
        CHECK_OK(kvs_device_set_hook(w.device, NULL, NULL));
        n_failed += status < 0;
        CHECK(equal(before, save(state)) == (status < 0));
        CHECK_OK(kvs_bank_check_integrity(w.bank));
        CHECK_OK(kvs_bank_restore_wait(w.bank, 0, kept, 0, state));
    }
    CHECK_U64(n_failed, N_LAYERS);
    kvs_state_release(state);
    close_world(&w);
}

static void test_cancel_empties_the_slot(void)
{
    world w;
    open_world(&w, 0, 1);
    kvs_state *state = make_state(&w);
    fill_state(state, 1, 64);
    for (int i = 0; i < 50; i++) {
        CHECK_OK(kvs_bank_capture_wait(w.bank, 0, state));
        CHECK_STATUS(kvs_bank_drop(w.bank, 0), KVS_EBUSY);
        CHECK_OK(kvs_bank_cancel(w.bank));
        CHECK_U64(snapshot_of(&w, 0).is_valid, 0);
        CHECK_OK(kvs_bank_check_integrity(w.bank));
    }
    CHECK_OK(kvs_bank_capture_wait(w.bank, 0, state)); /* released while under way */
    kvs_state_release(state);
    close_world(&w);
}

/* ---- refusals ---- */

static void test_other_names_are_refused(void)
{
    world w;
    open_world(&w, 0, 2);
    kvs_state *state = make_state(&w);
    fill_state(state, 5, 64);
    state->seq_id = 41;
    const uint64_t first = capture(&w, 0, state);
    const uint64_t second = capture(&w, 0, state);
    CHECK(second > first);
    CHECK_STATUS(kvs_bank_restore_wait(w.bank, 0, first, 41, state), KVS_ESTALE);
    CHECK_STATUS(kvs_bank_restore_wait(w.bank, 0, second, 42, state), KVS_ESTALE);
    CHECK_STATUS(kvs_bank_restore_wait(w.bank, 1, second, 41, state), KVS_ENOTFOUND);
    CHECK_STATUS(kvs_bank_restore_wait(w.bank, 2, second, 41, state), KVS_EINVAL);
    CHECK_OK(kvs_bank_drop(w.bank, 0));
    CHECK_STATUS(kvs_bank_restore_wait(w.bank, 0, second, 41, state), KVS_ENOTFOUND);
    state->n_pending = 1;
    CHECK_STATUS(kvs_bank_capture_wait(w.bank, 0, state), KVS_EBUSY);
    state->n_pending = 0;
    CHECK_OK(kvs_bank_capture_wait(w.bank, 0, state));
    CHECK_STATUS(kvs_bank_capture_wait(w.bank, 1, state), KVS_EBUSY);
    CHECK_STATUS(kvs_bank_restore_wait(w.bank, 0, second + 1, 41, state), KVS_EBUSY);
    state->seq_id = 0;
    kvs_state_release(state);
    close_world(&w);
}

static void test_other_sizes_are_refused(void)
{
    world w;
    open_world(&w, 0, 1);
    w.layers[2].n_value_heads = 2 * VALUE_HEADS; /* of no state that could be made here */
    const kvs_bank_desc desc = {.struct_size = sizeof desc, .n_layers = N_LAYERS, .layers = w.layers, .n_slots = 1};
    kvs_bank *other = NULL;
    CHECK_OK(kvs_bank_create(w.device, &desc, &other));
    w.layers[2].n_value_heads = VALUE_HEADS;
    kvs_state *state = make_state(&w);
    CHECK_STATUS(kvs_bank_capture_wait(other, 0, state), KVS_EINVAL);
    kvs_bank_release(other);
    kvs_bank_desc bad = desc;
    bad.n_slots = 0;
    CHECK_STATUS(kvs_bank_create(w.device, &bad, &other), KVS_EINVAL);
    bad = desc;
    bad.n_layers = 0;
    CHECK_STATUS(kvs_bank_create(w.device, &bad, &other), KVS_EINVAL);
    uint64_t bytes = 0;
    CHECK_OK(kvs_bank_slot_bytes(w.device, &desc, &bytes));
    CHECK_U64(bytes, N_LAYERS * (VALUE_HEADS * DIM * DIM + (TAPS - 1) * CHANNELS) * sizeof(float));
    kvs_state_release(state);
    close_world(&w);
}

int main(void)
{
    test_snapshots_come_back(0);
    test_snapshots_come_back(KVS_DEVICE_DEFERRED | KVS_DEVICE_STRICT_HISTORY);
    test_the_state_is_free_at_once(0);
    test_the_state_is_free_at_once(KVS_DEVICE_DEFERRED);
    test_a_failed_capture_leaves_an_empty_slot();
    test_a_failed_restore_leaves_the_old_state();
    test_cancel_empties_the_slot();
    test_other_names_are_refused();
    test_other_sizes_are_refused();
    return check_finish();
}
