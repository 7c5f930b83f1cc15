/* tape.c: recording and sealing. Sealing gives each tensor the lowest workspace offset that no tensor alive at the same time
 * covers: lifetimes are intervals of operation numbers, so overlap of intervals is the only hazard there is. */
#include "core/tape.h"

#include "core/delta.h"
#include "core/device.h"
#include "core/tape_check.h"
#include "core/weight.h"

#include <string.h>

#define TENSOR_ALIGNMENT 64u
#define MAX_ROWS 65536u

kvs_status kvs_tape_create(kvs_device *device, uint32_t max_rows, uint32_t max_out_rows, kvs_tape **tape)
{
    if (device == NULL || tape == NULL || max_rows == 0 || max_rows > MAX_ROWS || max_out_rows > max_rows) {
        return kvs_fail(device, KVS_EINVAL, "tape rows %u (output rows %u) must be 1 to %u", max_rows, max_out_rows,
                        MAX_ROWS);
    }
    kvs_tape *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "no memory for a tape");
    }
    made->device = device;
    atomic_init(&made->claims, 1);
    made->max_rows = max_rows;
    made->max_out_rows = max_out_rows;
    *tape = made;
    return KVS_OK;
}

void kvs_tape_retain(kvs_tape *tape)
{
    atomic_fetch_add_explicit(&tape->claims, 1, memory_order_relaxed);
}

void kvs_tape_release(kvs_tape *tape)
{
    if (tape == NULL || atomic_fetch_sub_explicit(&tape->claims, 1, memory_order_acq_rel) != 1) {
        return;
    }
    for (uint32_t i = 0; i < tape->n_weights; i++) {
        kvs_weight_release(tape->weights[i]);
    }
    kvs_array_free(tape->tensors);
    kvs_array_free(tape->ops);
    kvs_array_free(tape->weights);
    kvs_array_free(tape->layers);
    for (uint32_t i = 0; i < tape->n_deltas; i++) {
        kvs_delta_layer_release(&tape->deltas[i]);
    }
    kvs_array_free(tape->deltas);
    kvs_object_free(tape->device, tape);
}

/* Room for one more item; capacity doubles at powers of two, so it needs no field of its own. */
static kvs_status grow(kvs_tape *tape, void **items, uint32_t n_items, size_t item_bytes)
{
    if (n_items != 0 && (n_items & (n_items - 1)) != 0) {
        return KVS_OK;
    }
    void *larger = kvs_array_alloc(tape->device, n_items == 0 ? 1 : (size_t)n_items * 2, item_bytes);
    if (larger == NULL) {
        return kvs_fail(tape->device, KVS_ENOMEM, "no memory to lengthen a tape of %u items", n_items);
    }
    if (n_items != 0) {
        memcpy(larger, *items, n_items * item_bytes);
    }
    kvs_array_free(*items);
    *items = larger;
    return KVS_OK;
}

static kvs_status check_open(kvs_tape *tape)
{
    if (tape == NULL) {
        return KVS_EINVAL;
    }
    return tape->is_sealed ? kvs_fail(tape->device, KVS_EBUSY, "the tape is sealed") : KVS_OK;
}

kvs_status kvs_tape_add_tensor(kvs_tape *tape, const kvs_tensor_desc *desc, uint32_t *id)
{
    kvs_status status = check_open(tape);
    if (status != KVS_OK) {
        return status;
    }
    if (!KVS_STRUCT_OK(desc) || id == NULL || desc->kind > KVS_TENSOR_INPUT || desc->rows > KVS_ROWS_OUT ||
        desc->cols == 0 || (desc->kind == KVS_TENSOR_INPUT && desc->rows != KVS_ROWS_PASS)) {
        return kvs_fail(tape->device, KVS_EINVAL, "tensor %u: kind, row kind or columns out of range", tape->n_tensors);
    }
    status = grow(tape, (void **)&tape->tensors, tape->n_tensors, sizeof *tape->tensors);
    if (status != KVS_OK) {
        return status;
    }
    const bool is_output = desc->kind == KVS_TENSOR_OUTPUT;
    const bool is_input = desc->kind == KVS_TENSOR_INPUT;
    tape->tensors[tape->n_tensors] = (kvs_tape_tensor){.kind = desc->kind,
                                                       .rows = desc->rows,
                                                       .cols = desc->cols,
                                                       .output_slot = is_output  ? tape->n_outputs
                                                                      : is_input ? tape->n_inputs
                                                                                 : KVS_NONE,
                                                       .first_write = is_input ? 0 : KVS_NONE};
    tape->n_outputs += is_output;
    tape->n_inputs += is_input;
    *id = tape->n_tensors++;
    return KVS_OK;
}

kvs_status kvs_tape_add_weight(kvs_tape *tape, kvs_weight *weight, uint32_t *id)
{
    kvs_status status = check_open(tape);
    if (status != KVS_OK) {
        return status;
    }
    if (weight == NULL || id == NULL || kvs_weight_device(weight) != tape->device) {
        return kvs_fail(tape->device, KVS_EINVAL, "weight %u is missing or belongs to another device", tape->n_weights);
    }
    status = grow(tape, (void **)&tape->weights, tape->n_weights, sizeof(kvs_weight *));
    if (status != KVS_OK) {
        return status;
    }
    kvs_weight_retain(weight);
    tape->weights[tape->n_weights] = weight;
    *id = tape->n_weights++;
    return KVS_OK;
}

kvs_status kvs_tape_add_layer(kvs_tape *tape, const kvs_kv_layer *layer, uint32_t *id)
{
    kvs_status status = check_open(tape);
    if (status != KVS_OK) {
        return status;
    }
    kvs_tape_layer made = {.record = {.struct_size = sizeof made.record}};
    if (layer == NULL || id == NULL) {
        return kvs_fail(tape->device, KVS_EINVAL, "layer %u needs a geometry and an output", tape->n_layers);
    }
    status = kvs_record_layout(layer, &made.record);
    if (status != KVS_OK) {
        return kvs_fail(tape->device, status, "layer %u: its types cannot hold its head sizes", tape->n_layers);
    }
    made.kv = *layer;
    status = grow(tape, (void **)&tape->layers, tape->n_layers, sizeof *tape->layers);
    if (status != KVS_OK) {
        return status;
    }
    tape->layers[tape->n_layers] = made;
    *id = tape->n_layers++;
    return KVS_OK;
}

kvs_status kvs_tape_add_delta(kvs_tape *tape, const kvs_delta_layer *layer, uint32_t *id)
{
    kvs_status status = check_open(tape);
    if (status != KVS_OK) {
        return status;
    }
    if (layer == NULL || id == NULL) {
        return kvs_fail(tape->device, KVS_EINVAL, "recurrent layer %u needs sizes and an output", tape->n_deltas);
    }
    status = kvs_delta_layer_check(tape->device, layer, tape->n_deltas);
    if (status == KVS_OK) {
        status = grow(tape, (void **)&tape->deltas, tape->n_deltas, sizeof *tape->deltas);
    }
    if (status != KVS_OK) {
        return status;
    }
    kvs_delta_layer_retain(layer);
    tape->deltas[tape->n_deltas] = *layer;
    *id = tape->n_deltas++;
    return KVS_OK;
}

kvs_status kvs_tape_add_op(kvs_tape *tape, const kvs_op_desc *desc)
{
    kvs_status status = check_open(tape);
    if (status != KVS_OK) {
        return status;
    }
    if (!KVS_STRUCT_OK(desc)) {
        return kvs_fail(tape->device, KVS_EINVAL, "operation %u: struct_size", tape->n_ops);
    }
    status = kvs_tape_check_op(tape, desc);
    if (status == KVS_OK) {
        status = grow(tape, (void **)&tape->ops, tape->n_ops, sizeof *tape->ops);
    }
    if (status == KVS_OK) {
        tape->ops[tape->n_ops++] = *desc;
    }
    return status;
}

/* Find each tensor's lifetime; refuse reading what nothing has written. */
static kvs_status find_lifetimes(kvs_tape *tape)
{
    for (uint32_t i = 0; i < tape->n_ops; i++) {
        kvs_op_access access;
        kvs_tape_op_access(&tape->ops[i], &access);
        for (uint32_t j = 0; j < access.n_reads; j++) {
            kvs_tape_tensor *tensor = &tape->tensors[access.reads[j]];
            if (tensor->first_write == KVS_NONE) {
                return kvs_fail(tape->device, KVS_EINVAL, "operation %u (%s) reads tensor %u before it is written", i,
                                kvs_op_name(tape->ops[i].code), access.reads[j]);
            }
            tensor->last_use = i;
        }
        for (uint32_t j = 0; j < access.n_writes; j++) {
            kvs_tape_tensor *tensor = &tape->tensors[access.writes[j]];
            if (tensor->kind == KVS_TENSOR_INPUT) {
                return kvs_fail(tape->device, KVS_EINVAL, "operation %u (%s) writes tensor %u, an input", i,
                                kvs_op_name(tape->ops[i].code), access.writes[j]);
            }
            if (tensor->first_write == KVS_NONE) {
                tensor->first_write = i;
            }
            tensor->last_use = i;
        }
    }
    for (uint32_t i = 0; i < tape->n_tensors; i++) {
        if (tape->tensors[i].first_write == KVS_NONE) {
            return kvs_fail(tape->device, KVS_EINVAL, "tensor %u is never written", i);
        }
    }
    return KVS_OK;
}

static bool is_written_before(const kvs_tape *tape, uint32_t layer, uint32_t end)
{
    for (uint32_t i = 0; i < end; i++) {
        if (tape->ops[i].code == KVS_OP_KV_WRITE && tape->ops[i].layer == layer) {
            return true;
        }
    }
    return false;
}

/* Pages stream in the order of layers, and the tail must hold the rows of the pass before anybody reads it. */
static kvs_status check_layer_order(kvs_tape *tape)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < tape->n_ops; i++) {
        const kvs_op_desc *op = &tape->ops[i];
        if (op->code == KVS_OP_KV_WRITE && is_written_before(tape, op->layer, i)) {
            return kvs_fail(tape->device, KVS_EINVAL, "operation %u (kv_write): layer %u is written twice", i, op->layer);
        }
        if (op->code != KVS_OP_ATTEND) {
            continue;
        }
        if (op->layer < next) {
            return kvs_fail(tape->device, KVS_EINVAL, "operation %u (attend): layer %u comes after layer %u", i, op->layer,
                            next - 1);
        }
        if (!is_written_before(tape, op->layer, i)) {
            return kvs_fail(tape->device, KVS_EINVAL, "operation %u (attend): layer %u is not written before", i, op->layer);
        }
        next = op->layer + 1;
    }
    return KVS_OK;
}

/* A recurrent layer has one place in the order of rows, and a pass is either logged or not. */
static kvs_status check_deltas(kvs_tape *tape)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < tape->n_ops; i++) {
        const kvs_op_desc *op = &tape->ops[i];
        if (op->code != KVS_OP_DELTA) {
            continue;
        }
        const bool is_logged = op->u[0] == KVS_DELTA_LOGGED;
        if (op->layer != next) {
            return kvs_fail(tape->device, KVS_EINVAL, "operation %u (delta): layer %u, the next one is %u", i, op->layer, next);
        }
        if (next != 0 && is_logged != tape->is_logged) {
            return kvs_fail(tape->device, KVS_EINVAL, "operation %u (delta): logged and chunked layers on one tape", i);
        }
        tape->is_logged = is_logged;
        next++;
    }
    return next == tape->n_deltas ? KVS_OK
                                  : kvs_fail(tape->device, KVS_EINVAL, "recurrent layer %u has no operation", next);
}

static bool alive_together(const kvs_tape_tensor *a, const kvs_tape_tensor *b)
{
    return a->first_write <= b->last_use && b->first_write <= a->last_use;
}

/* Lowest offset at which `tensor` overlaps none of the tensors placed before it. Each pass over the placed ones moves it past
 * at least one, so it ends. */
static uint64_t first_fit(const kvs_tape *tape, const kvs_tape_tensor *tensor)
{
    uint64_t offset = 0;
    bool moved = true;
    while (moved) {
        moved = false;
        for (const kvs_tape_tensor *other = tape->tensors; other < tensor; other++) {
            bool clashes = other->size_bytes != 0 && alive_together(other, tensor) &&
                           offset < other->offset_bytes + other->size_bytes &&
                           other->offset_bytes < offset + tensor->size_bytes;
            if (clashes) {
                offset = other->offset_bytes + other->size_bytes;
                moved = true;
            }
        }
    }
    return offset;
}

static kvs_status place_tensors(kvs_tape *tape)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < tape->n_tensors; i++) {
        kvs_tape_tensor *tensor = &tape->tensors[i];
        if (tensor->kind != KVS_TENSOR_WORK) {
            continue;
        }
        uint64_t rows = tensor->rows == KVS_ROWS_OUT ? tape->max_out_rows : tape->max_rows;
        uint64_t bytes = (rows == 0 ? 1 : rows) * tensor->cols * sizeof(float);
        if (!kvs_align_up(bytes, TENSOR_ALIGNMENT, &tensor->size_bytes)) {
            return kvs_fail(tape->device, KVS_EOVERFLOW, "tensor %u is too large", i);
        }
        tensor->offset_bytes = first_fit(tape, tensor);
        uint64_t tensor_end;
        if (!kvs_add_u64(tensor->offset_bytes, tensor->size_bytes, &tensor_end)) {
            return kvs_fail(tape->device, KVS_EOVERFLOW, "tensor %u ends beyond what an address can name", i);
        }
        end = tensor_end > end ? tensor_end : end;
    }
    tape->scratch_offset_bytes = end;
    return KVS_OK;
}

/* All operations share one scratch area, sized for the one that needs most. Asking also refuses what the backend cannot run. */
static kvs_status size_scratch(kvs_tape *tape)
{
    struct kvs_device_view backend = kvs_device_backend(tape->device);
    uint64_t most = 0;
    for (uint32_t i = 0; i < tape->n_ops; i++) {
        kvs_bound_op op;
        uint64_t bytes = 0;
        kvs_tape_describe_op(tape, i, &op);
        bool is_out = op.out[0].rows == KVS_ROWS_OUT && op.code != KVS_OP_KV_WRITE;
        kvs_status status = backend.backend->op_scratch_bytes(backend.self, &op, is_out ? tape->max_out_rows : tape->max_rows,
                                                              &bytes);
        if (status != KVS_OK) {
            return status;
        }
        most = bytes > most ? bytes : most;
    }
    if (!kvs_add_u64(tape->scratch_offset_bytes, most, &tape->workspace_bytes) ||
        !kvs_align_up(tape->workspace_bytes, TENSOR_ALIGNMENT, &tape->workspace_bytes)) {
        return kvs_fail(tape->device, KVS_EOVERFLOW, "scratch of %llu bytes is too large", (kvs_ull)most);
    }
    return KVS_OK;
}

kvs_status kvs_tape_seal(kvs_tape *tape)
{
    kvs_status status = check_open(tape);
    if (status != KVS_OK) {
        return status;
    }
    if (tape->n_ops == 0) {
        return kvs_fail(tape->device, KVS_EINVAL, "a tape without operations");
    }
    status = find_lifetimes(tape);
    if (status == KVS_OK) {
        status = check_layer_order(tape);
    }
    if (status == KVS_OK) {
        status = check_deltas(tape);
    }
    if (status == KVS_OK) {
        status = place_tensors(tape);
    }
    if (status == KVS_OK) {
        status = size_scratch(tape);
    }
    tape->is_sealed = status == KVS_OK;
    return status;
}

kvs_status kvs_tape_get_info(kvs_tape *tape, kvs_tape_info *info)
{
    if (tape == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_refuse(tape == NULL ? NULL : tape->device);
    }
    uint64_t weight_bytes = 0;
    for (uint32_t i = 0; i < tape->n_weights; i++) {
        weight_bytes += kvs_weight_pass_bytes(tape->weights[i]);
    }
    *info = (kvs_tape_info){.struct_size = info->struct_size,
                            .is_sealed = tape->is_sealed ? 1u : 0u,
                            .n_ops = tape->n_ops,
                            .n_tensors = tape->n_tensors,
                            .n_layers = tape->n_layers,
                            .max_rows = tape->max_rows,
                            .workspace_bytes = tape->workspace_bytes,
                            .weight_bytes = weight_bytes,
                            .n_delta_layers = tape->n_deltas,
                            .is_logged = tape->is_logged ? 1u : 0u};
    return KVS_OK;
}

static kvs_operand describe_operand(const kvs_tape *tape, uint32_t id)
{
    if (id >= tape->n_tensors) {
        return (kvs_operand){.output_slot = KVS_NONE};
    }
    const kvs_tape_tensor *tensor = &tape->tensors[id];
    return (kvs_operand){.cols = tensor->cols,
                         .rows = tensor->rows,
                         .output_slot = tensor->output_slot,
                         .is_input = tensor->kind == KVS_TENSOR_INPUT};
}

void kvs_tape_describe_op(const kvs_tape *tape, uint32_t index, kvs_bound_op *op)
{
    const kvs_op_desc *desc = &tape->ops[index];
    *op = (kvs_bound_op){.code = desc->code,
                         .layer = desc->layer,
                         .flags = desc->flags,
                         .f = {desc->f[0], desc->f[1]},
                         .f64 = {desc->f64[0]}};
    for (uint32_t i = 0; i < 3; i++) {
        op->in[i] = describe_operand(tape, desc->in[i]);
    }
    for (uint32_t i = 0; i < 4; i++) {
        op->out[i] = describe_operand(tape, desc->out[i]);
    }
    memcpy(op->u, desc->u, sizeof op->u);
    for (uint32_t i = 0; i < 6; i++) {
        op->weights[i] = desc->weights[i] < tape->n_weights ? kvs_weight_get_view(tape->weights[desc->weights[i]]) : NULL;
    }
    if (desc->code == KVS_OP_KV_WRITE || desc->code == KVS_OP_ATTEND) {
        op->kv = &tape->layers[desc->layer].kv;
        op->record = &tape->layers[desc->layer].record;
    }
    if (desc->code == KVS_OP_DELTA) {
        op->delta = &tape->deltas[desc->layer];
    }
}
