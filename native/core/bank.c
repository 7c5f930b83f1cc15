#include "kvstream/bank.h"

#include "core/delta.h"
#include "core/device.h"
#include "core/state_sides.h"

#define ALIGNMENT 64u
#define N_STAGES 2u
#define MAX_SLOTS 65536u

typedef struct bank_layer {
    kvs_delta_layer sizes; /* weights are not used */
    uint64_t offset;       /* in a slot */
    uint64_t matrix_bytes;
    uint64_t conv_bytes;
} bank_layer;

typedef struct snapshot {
    bool is_valid;
    uint64_t capture;
    uint64_t seq_id;
    uint64_t generation;
    uint64_t n_tokens;
} snapshot;

struct kvs_bank {
    kvs_device *device;
    bank_layer *layers;
    snapshot *slots;
    kvs_host *host;
    kvs_buffer *stages;
    uint32_t n_layers;
    uint32_t n_slots;
    uint64_t slot_bytes;
    uint64_t stage_bytes;
    uint64_t n_captures;
    uint64_t n_restores;
    uint64_t last_capture;
    bool is_capturing;
    uint32_t target;       /* slot that is captured to */
    snapshot coming;
    uint64_t n_submitted;  /* copies since creation; `done` follows */
    _Atomic uint64_t done;
    _Atomic int failed;
};

/* ---- sizes ---- */

static bool add_layer(const kvs_delta_layer *sizes, bank_layer *layer, uint64_t *end, uint64_t *largest)
{
    uint64_t bytes;
    layer->sizes = *sizes;
    layer->offset = *end;
    if (!kvs_mul_u64(kvs_delta_matrix_values(sizes), sizeof(float), &layer->matrix_bytes) ||
        !kvs_mul_u64(kvs_delta_conv_values(sizes), sizeof(float), &layer->conv_bytes) ||
        !kvs_add_u64(layer->matrix_bytes, layer->conv_bytes, &bytes) || !kvs_align_up(bytes, ALIGNMENT, &bytes) ||
        !kvs_add_u64(*end, bytes, end)) {
        return false;
    }
    *largest = bytes > *largest ? bytes : *largest;
    return true;
}

static kvs_status measure(kvs_device *device, const kvs_bank_desc *desc, bank_layer *layers, uint64_t *slot_bytes,
                          uint64_t *largest)
{
    *slot_bytes = 0;
    *largest = 0;
    for (uint32_t i = 0; i < desc->n_layers; i++) {
        bank_layer layer;
        const kvs_status status = kvs_delta_layer_check_sizes(device, &desc->layers[i], i);
        if (status != KVS_OK) {
            return status;
        }
        if (!add_layer(&desc->layers[i], &layer, slot_bytes, largest)) {
            return kvs_fail(device, KVS_EOVERFLOW, "a snapshot is too large at recurrent layer %u", i);
        }
        if (layers != NULL) {
            layers[i] = layer;
        }
    }
    return KVS_OK;
}

static kvs_status check_desc(kvs_device *device, const kvs_bank_desc *desc)
{
    if (!KVS_STRUCT_OK(desc) || desc->layers == NULL || desc->n_layers == 0) {
        return kvs_fail(device, KVS_EINVAL, "a bank needs layers");
    }
    if (desc->n_slots == 0 || desc->n_slots > MAX_SLOTS) {
        return kvs_fail(device, KVS_EINVAL, "a bank has 1 to %u slots, got %u", MAX_SLOTS, desc->n_slots);
    }
    return KVS_OK;
}

kvs_status kvs_bank_slot_bytes(kvs_device *device, const kvs_bank_desc *desc, uint64_t *bytes)
{
    if (device == NULL || bytes == NULL) {
        return kvs_fail(device, KVS_EINVAL, "bytes of a snapshot: no device, or no place for the number");
    }
    uint64_t slot_bytes, largest;
    kvs_status status = check_desc(device, desc);
    if (status == KVS_OK) {
        status = measure(device, desc, NULL, &slot_bytes, &largest);
    }
    if (status == KVS_OK) {
        *bytes = slot_bytes;
    }
    return status;
}

/* ---- life ---- */

static kvs_status fill(kvs_bank *bank, const kvs_bank_desc *desc)
{
    bank->layers = kvs_array_alloc(bank->device, desc->n_layers, sizeof *bank->layers);
    bank->slots = kvs_array_alloc(bank->device, desc->n_slots, sizeof *bank->slots);
    if (bank->layers == NULL || bank->slots == NULL) {
        return kvs_fail(bank->device, KVS_ENOMEM, "no memory for a bank of %u slots", desc->n_slots);
    }
    kvs_status status = measure(bank->device, desc, bank->layers, &bank->slot_bytes, &bank->stage_bytes);
    uint64_t host_bytes;
    if (status == KVS_OK && !kvs_mul_u64(bank->slot_bytes, desc->n_slots, &host_bytes)) {
        status = kvs_fail(bank->device, KVS_EOVERFLOW, "%u snapshots of %llu bytes are too large", desc->n_slots,
                          (kvs_ull)bank->slot_bytes);
    }
    bank->n_layers = desc->n_layers;
    bank->n_slots = desc->n_slots;
    if (status == KVS_OK) {
        status = kvs_host_create(bank->device, host_bytes, &bank->host);
    }
    if (status == KVS_OK) {
        status = kvs_buffer_create(bank->device, N_STAGES * bank->stage_bytes, ALIGNMENT, &bank->stages);
    }
    return status;
}

kvs_status kvs_bank_create(kvs_device *device, const kvs_bank_desc *desc, kvs_bank **bank)
{
    if (device == NULL || bank == NULL) {
        return kvs_fail(device, KVS_EINVAL, "bank: no device, or no place for the handle");
    }
    kvs_status status = check_desc(device, desc);
    if (status != KVS_OK) {
        return status;
    }
    kvs_bank *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "no memory for a bank");
    }
    made->device = device;
    atomic_init(&made->done, 0);
    atomic_init(&made->failed, KVS_OK);
    status = fill(made, desc);
    if (status != KVS_OK) {
        kvs_bank_release(made);
        return status;
    }
    *bank = made;
    return KVS_OK;
}

void kvs_bank_release(kvs_bank *bank)
{
    if (bank == NULL) {
        return;
    }
    (void)kvs_bank_cancel(bank);
    kvs_buffer_release(bank->stages);
    kvs_host_release(bank->host);
    kvs_array_free(bank->layers);
    kvs_array_free(bank->slots);
    kvs_object_free(bank->device, bank);
}

/* ---- reports ---- */

kvs_status kvs_bank_get_info(kvs_bank *bank, kvs_bank_info *info)
{
    if (bank == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_fail(bank == NULL ? NULL : bank->device, KVS_EINVAL, "bank: no place for what is asked");
    }
    uint32_t n_valid = 0;
    for (uint32_t i = 0; i < bank->n_slots; i++) {
        n_valid += bank->slots[i].is_valid;
    }
    *info = (kvs_bank_info){.struct_size = info->struct_size,
                            .n_slots = bank->n_slots,
                            .n_valid = n_valid,
                            .is_capturing = bank->is_capturing,
                            .slot_bytes = bank->slot_bytes,
                            .host_bytes = bank->slot_bytes * bank->n_slots,
                            .device_bytes = kvs_buffer_bytes(bank->stages),
                            .n_captures = bank->n_captures,
                            .n_restores = bank->n_restores};
    return KVS_OK;
}

static kvs_status check_slot(kvs_bank *bank, uint32_t slot)
{
    return slot < bank->n_slots ? KVS_OK
                                : kvs_fail(bank->device, KVS_EINVAL, "slot %u of a bank of %u", slot, bank->n_slots);
}

kvs_status kvs_bank_get_snapshot(kvs_bank *bank, uint32_t slot, kvs_snapshot_info *info)
{
    if (bank == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_fail(bank == NULL ? NULL : bank->device, KVS_EINVAL, "bank: no place for what is asked");
    }
    const kvs_status status = check_slot(bank, slot);
    if (status == KVS_OK) {
        const snapshot *held = &bank->slots[slot];
        *info = (kvs_snapshot_info){.struct_size = info->struct_size,
                                    .is_valid = held->is_valid,
                                    .capture = held->capture,
                                    .seq_id = held->seq_id,
                                    .generation = held->generation,
                                    .n_tokens = held->n_tokens};
    }
    return status;
}

/* ---- copies ---- */

static kvs_status check_transfer(kvs_bank *bank, const kvs_state *state)
{
    if (state->device != bank->device || state->n_layers != bank->n_layers) {
        return kvs_fail(bank->device, KVS_EINVAL, "a state of %u recurrent layers, the bank is for %u", state->n_layers,
                        bank->n_layers);
    }
    for (uint32_t i = 0; i < bank->n_layers; i++) {
        const kvs_delta_layer *a = &bank->layers[i].sizes, *b = &state->layers[i].layer;
        if (a->n_key_heads != b->n_key_heads || a->n_value_heads != b->n_value_heads || a->head_dim != b->head_dim ||
            a->conv_width != b->conv_width) {
            return kvs_fail(bank->device, KVS_EINVAL, "recurrent layer %u has other sizes than the bank's", i);
        }
    }
    return bank->is_capturing ? kvs_fail(bank->device, KVS_EBUSY, "a capture to slot %u is not published", bank->target) : KVS_OK;
}

static uint64_t stage_address(const kvs_bank *bank, uint32_t layer)
{
    return kvs_buffer_address(bank->stages) + layer % N_STAGES * bank->stage_bytes;
}

/* Queue the copy between a layer's stage slot and its place in host memory. */
static kvs_status submit(kvs_bank *bank, uint32_t slot, uint32_t layer, bool is_out)
{
    const bank_layer *part = &bank->layers[layer];
    const kvs_copy copy = {.host_base = kvs_host_base(bank->host),
                           .host_offset = slot * bank->slot_bytes + part->offset,
                           .device_address = stage_address(bank, layer),
                           .n_bytes = part->matrix_bytes + part->conv_bytes,
                           .n_pieces = 1,
                           .is_out = is_out,
                           .done = &bank->done,
                           .done_value = bank->n_submitted + 1,
                           .failed = &bank->failed};
    const kvs_status status = kvs_device_submit(bank->device, &copy, 1);
    bank->n_submitted += status == KVS_OK;
    return status;
}

/* Until all copies but the newest `n_newest` have ended. */
static kvs_status wait_copies(kvs_bank *bank, uint64_t n_newest)
{
    const uint64_t n_done = bank->n_submitted > n_newest ? bank->n_submitted - n_newest : 0;
    const kvs_status status = kvs_device_wait_counter(bank->device, &bank->done, n_done, &bank->failed);
    return status == KVS_OK ? KVS_OK : kvs_fail_copy(bank->device, status, "a copy of a snapshot failed");
}

/* Nothing of this bank is queued or under way afterwards, and the next copy starts without a failure behind it. */
static void settle(kvs_bank *bank)
{
    const struct kvs_device_view backend = kvs_device_backend(bank->device);
    backend.backend->copy_cancel(backend.self, &bank->done);
    atomic_store_explicit(&bank->done, bank->n_submitted, memory_order_release);
    atomic_store_explicit(&bank->failed, KVS_OK, memory_order_release);
}

static kvs_status move(kvs_bank *bank, uint64_t from, uint64_t to, uint64_t n_bytes)
{
    const struct kvs_device_view backend = kvs_device_backend(bank->device);
    return backend.backend->device_move(backend.self, from, to, n_bytes);
}

/* A layer of one side of the state to its stage slot, or back. */
static kvs_status move_layer(kvs_bank *bank, kvs_state *state, uint32_t layer, uint32_t side, bool is_capture)
{
    const bank_layer *part = &bank->layers[layer];
    const uint64_t stage = stage_address(bank, layer), conv_stage = stage + part->matrix_bytes;
    const uint64_t matrix = state->address + state->layers[layer].matrix[side];
    const uint64_t conv = state->address + state->layers[layer].conv[side];
    kvs_status status = is_capture ? move(bank, matrix, stage, part->matrix_bytes) : move(bank, stage, matrix, part->matrix_bytes);
    if (status == KVS_OK) {
        status = is_capture ? move(bank, conv, conv_stage, part->conv_bytes) : move(bank, conv_stage, conv, part->conv_bytes);
    }
    return status;
}

/* ---- capture ---- */

static kvs_status capture_layers(kvs_bank *bank, uint32_t slot, kvs_state *state)
{
    kvs_status status = KVS_OK;
    for (uint32_t layer = 0; status == KVS_OK && layer < bank->n_layers; layer++) {
        /* The copy that last read this stage slot is the one before the newest. */
        status = layer < N_STAGES ? KVS_OK : wait_copies(bank, N_STAGES - 1);
        if (status == KVS_OK) {
            status = move_layer(bank, state, layer, state->bank, true);
        }
        if (status == KVS_OK) {
            status = submit(bank, slot, layer, true);
        }
    }
    return status;
}

kvs_status kvs_bank_capture_wait(kvs_bank *bank, uint32_t slot, kvs_state *state)
{
    if (bank == NULL || state == NULL) {
        return kvs_fail(bank != NULL ? bank->device : state != NULL ? state->device : NULL, KVS_EINVAL,
                        "no bank, or no state");
    }
    kvs_status status = check_slot(bank, slot);
    if (status == KVS_OK) {
        status = check_transfer(bank, state);
    }
    if (status == KVS_OK) {
        status = kvs_state_check_idle(state);
    }
    if (status == KVS_OK && state->n_pending != 0) {
        status = kvs_fail(bank->device, KVS_EBUSY, "%u rows of the state are not folded", state->n_pending);
    }
    if (status != KVS_OK) {
        return status;
    }
    bank->slots[slot] = (snapshot){.is_valid = false};
    bank->is_capturing = true;
    bank->target = slot;
    bank->coming = (snapshot){.is_valid = true,
                              .capture = ++bank->last_capture,
                              .seq_id = state->seq_id,
                              .generation = state->generation,
                              .n_tokens = state->n_folded};
    status = capture_layers(bank, slot, state);
    if (status != KVS_OK) {
        (void)kvs_bank_cancel(bank);
    }
    return status;
}

kvs_status kvs_bank_publish_wait(kvs_bank *bank)
{
    if (bank == NULL) {
        return KVS_EINVAL;
    }
    if (!bank->is_capturing) {
        return KVS_OK;
    }
    const kvs_status status = wait_copies(bank, 0);
    if (status != KVS_OK) {
        (void)kvs_bank_cancel(bank);
        return status;
    }
    bank->slots[bank->target] = bank->coming;
    bank->is_capturing = false;
    bank->n_captures++;
    return KVS_OK;
}

kvs_status kvs_bank_cancel(kvs_bank *bank)
{
    if (bank == NULL) {
        return KVS_EINVAL;
    }
    if (bank->is_capturing) {
        settle(bank);
        bank->is_capturing = false;
    }
    return KVS_OK;
}

kvs_status kvs_bank_drop(kvs_bank *bank, uint32_t slot)
{
    if (bank == NULL) {
        return KVS_EINVAL;
    }
    const kvs_status status = check_slot(bank, slot);
    if (status != KVS_OK) {
        return status;
    }
    if (bank->is_capturing && bank->target == slot) {
        return kvs_fail(bank->device, KVS_EBUSY, "slot %u is being captured to", slot);
    }
    bank->slots[slot] = (snapshot){.is_valid = false};
    return KVS_OK;
}

/* ---- restore ---- */

static kvs_status check_snapshot(kvs_bank *bank, uint32_t slot, uint64_t capture, uint64_t seq_id)
{
    const snapshot *held = &bank->slots[slot];
    if (!held->is_valid) {
        return kvs_fail(bank->device, KVS_ENOTFOUND, "slot %u holds no snapshot", slot);
    }
    if (held->capture != capture || held->seq_id != seq_id) {
        return kvs_fail(bank->device, KVS_ESTALE, "slot %u holds capture %llu of sequence %llu, not %llu of %llu", slot,
                        (kvs_ull)held->capture, (kvs_ull)held->seq_id, (kvs_ull)capture, (kvs_ull)seq_id);
    }
    return KVS_OK;
}

/* While one layer moves on, the next one comes to the other stage slot. */
static kvs_status restore_layers(kvs_bank *bank, uint32_t slot, kvs_state *state)
{
    kvs_status status = submit(bank, slot, 0, false);
    for (uint32_t layer = 0; status == KVS_OK && layer < bank->n_layers; layer++) {
        const bool has_next = layer + 1 < bank->n_layers;
        status = has_next ? submit(bank, slot, layer + 1, false) : KVS_OK;
        if (status == KVS_OK) {
            status = wait_copies(bank, has_next ? 1 : 0);
        }
        if (status == KVS_OK) {
            status = move_layer(bank, state, layer, state->bank ^ 1, false);
        }
    }
    return status;
}

kvs_status kvs_bank_restore_wait(kvs_bank *bank, uint32_t slot, uint64_t capture, uint64_t seq_id, kvs_state *state)
{
    if (bank == NULL || state == NULL) {
        return kvs_fail(bank != NULL ? bank->device : state != NULL ? state->device : NULL, KVS_EINVAL,
                        "no bank, or no state");
    }
    kvs_status status = check_slot(bank, slot);
    if (status == KVS_OK) {
        status = check_transfer(bank, state);
    }
    if (status == KVS_OK) {
        status = kvs_state_check_idle(state);
    }
    if (status == KVS_OK) {
        status = check_snapshot(bank, slot, capture, seq_id);
    }
    if (status != KVS_OK) {
        return status;
    }
    status = restore_layers(bank, slot, state);
    if (status != KVS_OK) {
        settle(bank);
        return status;
    }
    kvs_state_turn(state, bank->slots[slot].n_tokens, 0);
    bank->n_restores++;
    return KVS_OK;
}

/* ---- integrity ---- */

kvs_status kvs_bank_check_integrity(kvs_bank *bank)
{
    if (bank == NULL) {
        return KVS_EINVAL;
    }
    const uint64_t done = atomic_load_explicit(&bank->done, memory_order_acquire);
    if (done > bank->n_submitted || (!bank->is_capturing && done != bank->n_submitted)) {
        return kvs_fail(bank->device, KVS_ECORRUPT, "%llu copies ended of %llu", (kvs_ull)done, (kvs_ull)bank->n_submitted);
    }
    if (bank->is_capturing && (bank->target >= bank->n_slots || bank->slots[bank->target].is_valid)) {
        return kvs_fail(bank->device, KVS_ECORRUPT, "slot %u is valid while it is captured to", bank->target);
    }
    for (uint32_t i = 0; i < bank->n_slots; i++) {
        const snapshot *held = &bank->slots[i];
        if (held->is_valid && (held->capture == 0 || held->capture > bank->last_capture)) {
            return kvs_fail(bank->device, KVS_ECORRUPT, "slot %u holds capture %llu of %llu", i, (kvs_ull)held->capture,
                            (kvs_ull)bank->last_capture);
        }
        for (uint32_t j = 0; held->is_valid && j < i; j++) {
            if (bank->slots[j].is_valid && bank->slots[j].capture == held->capture) {
                return kvs_fail(bank->device, KVS_ECORRUPT, "slots %u and %u hold the same capture", j, i);
            }
        }
    }
    return KVS_OK;
}
