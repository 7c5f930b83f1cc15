/* step.h: what a backend sees of one pass, and one operation of a tape with its addresses. */
#ifndef KVS_NATIVE_CORE_STEP_H
#define KVS_NATIVE_CORE_STEP_H

#include "kvstream/tape.h"

/* A weight on the device. */
typedef struct kvs_weight_view {
    int32_t type;
    uint32_t layout; /* kvs_weight_layout */
    uint64_t k;
    uint64_t n;
    uint64_t address;
    const float *scales; /* [n_scales], each of n / n_scales output rows of a matmul; NULL: none */
    uint64_t n_scales;
} kvs_weight_view;

/* A tensor operand. `data` is resolved for each pass where output_slot is not KVS_NONE. */
typedef struct kvs_operand {
    float *data;
    uint32_t cols;
    uint32_t rows;        /* kvs_row_kind */
    uint32_t output_slot; /* index into the pass's outputs, KVS_NONE for workspace */
    uint32_t reserved;
} kvs_operand;

typedef struct kvs_bound_op {
    uint32_t code; /* kvs_op_code */
    uint32_t layer;
    kvs_operand in[2];
    kvs_operand out[3];
    const kvs_weight_view *weights[4];
    uint32_t u[4];
    float f[2];
    double f64[1];
    const kvs_kv_layer *kv;        /* KV_WRITE, ATTEND */
    const kvs_record_info *record; /* KV_WRITE, ATTEND */
    void *scratch;                 /* shared by all operations, at least what op_scratch_bytes asked for */
} kvs_bound_op;

/* One pass as operations see it. */
struct kvs_step {
    uint32_t n_rows;
    uint32_t n_out_rows;
    const uint32_t *tokens;
    const uint32_t *positions;
    const uint32_t *out_rows;
    float *const *outputs;
    uint64_t first_token;               /* committed tokens before the pass: row r is token first_token + r */
    const uint64_t *const *page_tables; /* [layer][absolute page] device addresses */
};

static inline float *kvs_operand_data(const kvs_operand *operand, const struct kvs_step *step)
{
    return operand->output_slot == KVS_NONE ? operand->data : step->outputs[operand->output_slot];
}

static inline uint32_t kvs_operand_rows(const kvs_operand *operand, const struct kvs_step *step)
{
    return operand->rows == KVS_ROWS_OUT ? step->n_out_rows : step->n_rows;
}

#endif
