#include "core/state.h"

#include "core/cache.h"
#include "core/delta.h"
#include "core/device.h"
#include "core/state_sides.h"
#include "core/weight.h"

#include <string.h>

#define ALIGNMENT 64u
#define MAX_LAYERS 4096u

/* ---- where everything lies ---- */

/* Both sides of `n_values` float32 behind `end`. */
static bool place_sides(uint64_t *end, uint64_t n_values, uint64_t offsets[2])
{
    for (uint32_t side = 0; side < 2; side++) {
        uint64_t n_bytes;
        offsets[side] = *end;
        if (!kvs_mul_u64(n_values, sizeof(float), &n_bytes) || !kvs_add_u64(*end, n_bytes, end) ||
            !kvs_align_up(*end, ALIGNMENT, end)) {
            return false;
        }
    }
    return true;
}

static bool place_layer(uint64_t *end, uint32_t log_rows, kvs_state_layer *layer)
{
    return place_sides(end, kvs_delta_matrix_values(&layer->layer), layer->matrix) &&
           place_sides(end, kvs_delta_conv_values(&layer->layer), layer->conv) &&
           place_sides(end, kvs_delta_log_values(&layer->layer) * log_rows, layer->log);
}

/* Scratch of the layer that needs most. */
static kvs_status scratch_bytes(kvs_device *device, const kvs_state_desc *desc, uint64_t *most)
{
    const struct kvs_device_view backend = kvs_device_backend(device);
    *most = 0;
    for (uint32_t i = 0; i < desc->n_layers; i++) {
        const kvs_bound_op op = {.code = KVS_OP_DELTA, .delta = &desc->layers[i], .u = {KVS_DELTA_LOGGED}};
        uint64_t n_bytes = 0;
        const kvs_status status = backend.backend->op_scratch_bytes(backend.self, &op, desc->log_rows, &n_bytes);
        if (status != KVS_OK) {
            return status;
        }
        *most = n_bytes > *most ? n_bytes : *most;
    }
    return KVS_OK;
}

static kvs_status check_desc(kvs_device *device, const kvs_state_desc *desc)
{
    if (!KVS_STRUCT_OK(desc) || desc->layers == NULL || desc->n_layers == 0 || desc->n_layers > MAX_LAYERS) {
        return kvs_fail(device, KVS_EINVAL, "a state needs 1 to %u layers", MAX_LAYERS);
    }
    if (desc->log_rows == 0 || desc->log_rows > KVS_STATE_MAX_LOG_ROWS) {
        return kvs_fail(device, KVS_EINVAL, "log rows must be 1 to %u, got %u", KVS_STATE_MAX_LOG_ROWS, desc->log_rows);
    }
    for (uint32_t i = 0; i < desc->n_layers; i++) {
        const kvs_status status = kvs_delta_layer_check(device, &desc->layers[i], i);
        if (status != KVS_OK) {
            return status;
        }
    }
    return KVS_OK;
}

/* Where scratch begins, and all bytes with it. */
static kvs_status measure(kvs_device *device, const kvs_state_desc *desc, uint64_t *scratch, uint64_t *n_bytes)
{
    uint64_t end = 0;
    kvs_status status = check_desc(device, desc);
    for (uint32_t i = 0; status == KVS_OK && i < desc->n_layers; i++) {
        kvs_state_layer layer = {.layer = desc->layers[i]};
        if (!place_layer(&end, desc->log_rows, &layer)) {
            status = kvs_fail(device, KVS_EOVERFLOW, "the state is too large at recurrent layer %u", i);
        }
    }
    uint64_t most = 0;
    if (status == KVS_OK) {
        status = scratch_bytes(device, desc, &most);
    }
    if (status == KVS_OK && !kvs_add_u64(end, most, n_bytes)) {
        status = kvs_fail(device, KVS_EOVERFLOW, "the scratch of a state is too large");
    }
    *scratch = end;
    return status;
}

kvs_status kvs_state_bytes(kvs_device *device, const kvs_state_desc *desc, uint64_t *bytes)
{
    if (device == NULL || bytes == NULL) {
        return kvs_fail(device, KVS_EINVAL, "bytes of a state: no device, or no place for the number");
    }
    uint64_t scratch, n_bytes;
    const kvs_status status = measure(device, desc, &scratch, &n_bytes);
    if (status == KVS_OK) {
        *bytes = n_bytes;
    }
    return status;
}

/* ---- life ---- */

static kvs_status check_weights(kvs_device *device, const kvs_state_desc *desc)
{
    for (uint32_t i = 0; i < desc->n_layers; i++) {
        const kvs_delta_layer *layer = &desc->layers[i];
        if (kvs_weight_get_view(layer->conv)->address == 0 || kvs_weight_get_view(layer->dt_bias)->address == 0 ||
            kvs_weight_get_view(layer->decay)->address == 0) {
            return kvs_fail(device, KVS_EINVAL, "recurrent layer %u: a weight is declared only", i);
        }
    }
    return KVS_OK;
}

static kvs_status zero_bank(kvs_state *state, uint32_t side)
{
    const struct kvs_device_view backend = kvs_device_backend(state->device);
    for (uint32_t i = 0; i < state->n_layers; i++) {
        const kvs_state_layer *layer = &state->layers[i];
        const uint64_t matrix = kvs_delta_matrix_values(&layer->layer) * sizeof(float);
        const uint64_t conv = kvs_delta_conv_values(&layer->layer) * sizeof(float);
        kvs_status status = backend.backend->device_zero(backend.self, state->address + layer->matrix[side], matrix);
        if (status == KVS_OK) {
            status = backend.backend->device_zero(backend.self, state->address + layer->conv[side], conv);
        }
        if (status != KVS_OK) {
            return status;
        }
    }
    return KVS_OK;
}

static kvs_status fill(kvs_state *state, const kvs_state_desc *desc)
{
    state->layers = kvs_array_alloc(state->device, desc->n_layers, sizeof *state->layers);
    state->views = kvs_array_alloc(state->device, desc->n_layers, sizeof *state->views);
    if (state->layers == NULL || state->views == NULL) {
        return kvs_fail(state->device, KVS_ENOMEM, "no memory for a state of %u layers", desc->n_layers);
    }
    uint64_t end = 0;
    for (uint32_t i = 0; i < desc->n_layers; i++) {
        kvs_state_layer *layer = &state->layers[i];
        layer->layer = desc->layers[i];
        (void)place_layer(&end, desc->log_rows, layer);
        kvs_delta_layer_retain(&layer->layer);
        state->n_layers++;
    }
    const kvs_status status = kvs_buffer_create(state->device, state->n_bytes, ALIGNMENT, &state->memory);
    if (status != KVS_OK) {
        return kvs_fail(state->device, status, "no device memory for a state of %llu bytes", (kvs_ull)state->n_bytes);
    }
    state->address = kvs_buffer_address(state->memory);
    return zero_bank(state, state->bank);
}

kvs_status kvs_state_create(kvs_device *device, const kvs_state_desc *desc, kvs_state **state)
{
    if (device == NULL || state == NULL) {
        return kvs_fail(device, KVS_EINVAL, "state: no device, or no place for the handle");
    }
    uint64_t scratch, n_bytes;
    kvs_status status = measure(device, desc, &scratch, &n_bytes);
    if (status == KVS_OK) {
        status = check_weights(device, desc);
    }
    if (status != KVS_OK) {
        return status;
    }
    kvs_state *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "no memory for a state");
    }
    made->device = device;
    made->n_bytes = n_bytes;
    made->scratch = scratch;
    made->log_rows = desc->log_rows;
    status = fill(made, desc);
    if (status != KVS_OK) {
        kvs_state_release(made);
        return status;
    }
    *state = made;
    return KVS_OK;
}

void kvs_state_release(kvs_state *state)
{
    if (state == NULL) {
        return;
    }
    for (uint32_t i = 0; i < state->n_layers; i++) {
        kvs_delta_layer_release(&state->layers[i].layer);
    }
    kvs_array_free(state->layers);
    kvs_array_free(state->views);
    kvs_buffer_release(state->memory);
    kvs_object_free(state->device, state);
}

/* ---- whose, and where ---- */

static uint64_t position_of(const kvs_state *state)
{
    return state->n_folded + state->n_pending;
}

kvs_status kvs_state_check_idle(kvs_state *state)
{
    return state->n_open == 0 ? KVS_OK
                              : kvs_fail(state->device, KVS_EBUSY, "a pass of %u rows waits to be accepted", state->n_open);
}

static kvs_status check_owner(kvs_state *state, const kvs_seq *seq)
{
    if (kvs_seq_device(seq) == state->device && kvs_seq_identity(seq) == state->seq_id) {
        return KVS_OK;
    }
    return kvs_fail(state->device, KVS_ESTALE, "the state belongs to sequence %llu, not to %llu", (kvs_ull)state->seq_id,
                    (kvs_ull)kvs_seq_identity(seq));
}

kvs_status kvs_state_attach(kvs_state *state, kvs_seq *seq)
{
    if (state == NULL || seq == NULL) {
        return kvs_fail(state != NULL ? state->device : seq != NULL ? kvs_seq_device(seq) : NULL, KVS_EINVAL,
                        "no state, or no sequence");
    }
    const kvs_status status = kvs_state_check_idle(state);
    if (status != KVS_OK) {
        return status;
    }
    if (kvs_seq_device(seq) != state->device) {
        return kvs_fail(state->device, KVS_EINVAL, "the sequence lies on another device");
    }
    if (kvs_seq_committed(seq) != position_of(state)) {
        return kvs_fail(state->device, KVS_EINVAL, "the state is at position %llu, the sequence has %llu tokens",
                        (kvs_ull)position_of(state), (kvs_ull)kvs_seq_committed(seq));
    }
    state->seq_id = kvs_seq_identity(seq);
    state->n_rewrites = kvs_seq_rewrites(seq);
    return KVS_OK;
}

void kvs_state_turn(kvs_state *state, uint64_t n_folded, uint32_t n_pending)
{
    state->bank ^= 1;
    state->n_folded = n_folded;
    state->n_pending = n_pending;
    state->n_open = 0;
    state->seq_id = 0;
    state->n_rewrites = 0;
    state->generation++;
}

kvs_status kvs_state_clear(kvs_state *state)
{
    if (state == NULL) {
        return KVS_EINVAL;
    }
    const kvs_status status = zero_bank(state, state->bank ^ 1);
    if (status == KVS_OK) {
        kvs_state_turn(state, 0, 0);
    }
    return status;
}

/* ---- passes ---- */

static float *values_at(const kvs_state *state, uint64_t offset)
{
    return (float *)(uintptr_t)(state->address + offset);
}

static void describe_views(kvs_state *state)
{
    const uint32_t bank = state->bank, log = state->log;
    for (uint32_t i = 0; i < state->n_layers; i++) {
        const kvs_state_layer *layer = &state->layers[i];
        state->views[i] = (kvs_delta_view){.layer = &layer->layer,
                                           .conv = kvs_weight_get_view(layer->layer.conv),
                                           .dt_bias = kvs_weight_get_view(layer->layer.dt_bias),
                                           .decay = kvs_weight_get_view(layer->layer.decay),
                                           .matrix_in = values_at(state, layer->matrix[bank]),
                                           .conv_in = values_at(state, layer->conv[bank]),
                                           .log_in = values_at(state, layer->log[log]),
                                           .matrix_out = values_at(state, layer->matrix[bank ^ 1]),
                                           .conv_out = values_at(state, layer->conv[bank ^ 1]),
                                           .log_out = values_at(state, layer->log[log ^ 1]),
                                           .n_pending = state->n_pending};
    }
}

static kvs_status check_layers(kvs_state *state, const kvs_delta_layer *layers, uint32_t n_layers)
{
    if (n_layers != state->n_layers) {
        return kvs_fail(state->device, KVS_EINVAL, "the tape has %u recurrent layers, the state %u", n_layers,
                        state->n_layers);
    }
    for (uint32_t i = 0; i < n_layers; i++) {
        if (!kvs_delta_layer_equal(&layers[i], &state->layers[i].layer)) {
            return kvs_fail(state->device, KVS_EINVAL, "recurrent layer %u of the tape is not that of the state", i);
        }
    }
    return KVS_OK;
}

static kvs_status check_place(kvs_state *state, const kvs_pass_view *pass)
{
    if (pass->seq_id != state->seq_id) {
        return kvs_fail(state->device, KVS_ESTALE, "the state belongs to sequence %llu, the pass is of %llu",
                        (kvs_ull)state->seq_id, (kvs_ull)pass->seq_id);
    }
    if (pass->first_token != position_of(state)) {
        return kvs_fail(state->device, KVS_ESTALE, "the state is at position %llu, the pass begins at %llu",
                        (kvs_ull)position_of(state), (kvs_ull)pass->first_token);
    }
    if (pass->n_rewrites != state->n_rewrites) {
        return kvs_fail(state->device, KVS_ESTALE, "the sequence was truncated or rewritten without its state");
    }
    return KVS_OK;
}

kvs_status kvs_state_open_pass(kvs_state *state, const kvs_pass_view *pass, const kvs_delta_layer *layers, uint32_t n_layers,
                               bool is_logged, const kvs_delta_view **views)
{
    kvs_status status = check_layers(state, layers, n_layers);
    if (status == KVS_OK && is_logged && pass->n_rows > state->log_rows) {
        status = kvs_fail(state->device, KVS_EINVAL, "a logged pass of %u rows, the log holds %u", pass->n_rows,
                          state->log_rows);
    }
    if (status == KVS_OK) {
        status = kvs_state_check_idle(state);
    }
    if (status == KVS_OK) {
        status = check_place(state, pass);
    }
    if (status != KVS_OK) {
        return status;
    }
    describe_views(state);
    state->n_open = pass->n_rows;
    state->is_open_logged = is_logged;
    *views = state->views;
    return KVS_OK;
}

static kvs_status check_accept(kvs_state *state, const kvs_seq *seq, uint32_t n_rows)
{
    if (n_rows > state->n_open) {
        return kvs_fail(state->device, KVS_EINVAL, "%u rows accepted, the pass has %u", n_rows, state->n_open);
    }
    if (!state->is_open_logged && n_rows != state->n_open) {
        return kvs_fail(state->device, KVS_EINVAL, "%u rows accepted of a pass in chunks of %u", n_rows, state->n_open);
    }
    if (kvs_seq_committed(seq) != position_of(state) + n_rows || kvs_seq_rewrites(seq) != state->n_rewrites) {
        return kvs_fail(state->device, KVS_EINVAL, "%u rows accepted behind position %llu, the sequence has %llu tokens",
                        n_rows, (kvs_ull)position_of(state), (kvs_ull)kvs_seq_committed(seq));
    }
    return KVS_OK;
}

kvs_status kvs_state_accept(kvs_state *state, kvs_seq *seq, uint32_t n_rows)
{
    if (state == NULL || seq == NULL) {
        return kvs_fail(state != NULL ? state->device : seq != NULL ? kvs_seq_device(seq) : NULL, KVS_EINVAL,
                        "no state, or no sequence");
    }
    if (state->n_open == 0) {
        return n_rows == 0 ? KVS_OK
                           : kvs_fail(state->device, KVS_EBUSY, "%u rows accepted, but no pass has run", n_rows);
    }
    kvs_status status = check_owner(state, seq);
    if (status != KVS_OK) {
        return status;
    }
    /* Giving a pass up asks nothing of the sequence: its rows may be committed where what followed has failed. */
    status = n_rows == 0 ? KVS_OK : check_accept(state, seq, n_rows);
    state->n_open = 0;
    if (status != KVS_OK || n_rows == 0) {
        return status;
    }
    state->bank ^= 1;
    state->n_folded = position_of(state) + (state->is_open_logged ? 0 : n_rows);
    state->n_pending = state->is_open_logged ? n_rows : 0;
    state->log ^= state->is_open_logged ? 1 : 0;
    state->generation++;
    return KVS_OK;
}

kvs_status kvs_state_truncate(kvs_state *state, kvs_seq *seq, uint64_t n_tokens)
{
    if (state == NULL || seq == NULL) {
        return kvs_fail(state != NULL ? state->device : seq != NULL ? kvs_seq_device(seq) : NULL, KVS_EINVAL,
                        "no state, or no sequence");
    }
    kvs_status status = kvs_state_check_idle(state);
    if (status == KVS_OK) {
        status = check_owner(state, seq);
    }
    if (status != KVS_OK) {
        return status;
    }
    if (n_tokens > position_of(state) || n_tokens != kvs_seq_committed(seq)) {
        return kvs_fail(state->device, KVS_EINVAL, "truncate to %llu: the state is at position %llu, the sequence has %llu tokens",
                        (kvs_ull)n_tokens, (kvs_ull)position_of(state), (kvs_ull)kvs_seq_committed(seq));
    }
    if (n_tokens < state->n_folded) {
        return kvs_fail(state->device, KVS_ENOTFOUND, "truncate to %llu: the state can go back to %llu", (kvs_ull)n_tokens,
                        (kvs_ull)state->n_folded);
    }
    state->n_pending = (uint32_t)(n_tokens - state->n_folded);
    state->n_rewrites = kvs_seq_rewrites(seq);
    state->generation++;
    return KVS_OK;
}

kvs_status kvs_state_fold(kvs_state *state)
{
    if (state == NULL) {
        return KVS_EINVAL;
    }
    kvs_status status = kvs_state_check_idle(state);
    if (status != KVS_OK || state->n_pending == 0) {
        return status;
    }
    const struct kvs_device_view backend = kvs_device_backend(state->device);
    describe_views(state);
    for (uint32_t i = 0; i < state->n_layers; i++) {
        status = kvs_hook_ask(state->device, KVS_HOOK_OP);
        if (status != KVS_OK) {
            return kvs_fail(state->device, status, "injected fault when recurrent layer %u is folded", i);
        }
        status = backend.backend->delta_fold(backend.self, state->views, i, values_at(state, state->scratch));
        if (status != KVS_OK) {
            return status;
        }
    }
    state->bank ^= 1;
    state->n_folded += state->n_pending;
    state->n_pending = 0;
    state->generation++;
    return KVS_OK;
}

/* ---- integrity ---- */

kvs_status kvs_state_check_integrity(kvs_state *state)
{
    if (state == NULL) {
        return KVS_EINVAL;
    }
    uint64_t end = 0;
    for (uint32_t i = 0; i < state->n_layers; i++) {
        const kvs_state_layer *layer = &state->layers[i];
        kvs_state_layer again = {.layer = layer->layer};
        if (!place_layer(&end, state->log_rows, &again) || memcmp(again.matrix, layer->matrix, sizeof again.matrix) != 0 ||
            memcmp(again.conv, layer->conv, sizeof again.conv) != 0 ||
            memcmp(again.log, layer->log, sizeof again.log) != 0) {
            return kvs_fail(state->device, KVS_ECORRUPT, "recurrent layer %u lies at another place", i);
        }
    }
    if (end != state->scratch || end > state->n_bytes || kvs_buffer_bytes(state->memory) != state->n_bytes ||
        kvs_buffer_address(state->memory) != state->address) {
        return kvs_fail(state->device, KVS_ECORRUPT, "the state's memory has another size or place");
    }
    if (state->bank > 1 || state->log > 1 || state->n_pending > state->log_rows ||
        (state->is_open_logged && state->n_open > state->log_rows)) {
        return kvs_fail(state->device, KVS_ECORRUPT, "%u pending and %u open rows, the log holds %u", state->n_pending,
                        state->n_open, state->log_rows);
    }
    if (state->seq_id == 0 && (state->n_open != 0 || state->n_rewrites != 0)) {
        return kvs_fail(state->device, KVS_ECORRUPT, "a pass is open on a state of no sequence");
    }
    return KVS_OK;
}
