/* tape.h: a tape as the executor reads it. */
#ifndef KVS_NATIVE_CORE_TAPE_H
#define KVS_NATIVE_CORE_TAPE_H

#include "base/internal.h"
#include "core/step.h"

typedef struct kvs_tape_tensor {
    uint32_t kind;
    uint32_t rows;
    uint32_t cols;
    uint32_t output_slot;  /* of outputs or inputs; KVS_NONE for workspace */
    uint32_t first_write;  /* operation numbers, set by sealing */
    uint32_t last_use;
    uint64_t offset_bytes; /* in the workspace */
    uint64_t size_bytes;
} kvs_tape_tensor;

typedef struct kvs_tape_layer {
    kvs_kv_layer kv;
    kvs_record_info record;
} kvs_tape_layer;

struct kvs_tape {
    kvs_device *device;
    _Atomic uint32_t claims;
    uint32_t max_rows;
    uint32_t max_out_rows;
    bool is_sealed;
    kvs_tape_tensor *tensors;
    kvs_op_desc *ops;
    kvs_weight **weights;
    kvs_tape_layer *layers;
    kvs_delta_layer *deltas;
    uint32_t n_tensors, n_ops, n_weights, n_layers, n_deltas, n_outputs, n_inputs;
    bool is_logged; /* of its delta operations, known when sealed */
    uint64_t scratch_offset_bytes;
    uint64_t workspace_bytes;
};

void kvs_tape_retain(kvs_tape *tape);

/* Describe operation `index` with shapes; addresses are left zero. */
void kvs_tape_describe_op(const kvs_tape *tape, uint32_t index, kvs_bound_op *op);

#endif
