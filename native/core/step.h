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
    uint32_t output_slot; /* index into the pass's outputs, or inputs; KVS_NONE for workspace */
    uint32_t is_input;
} kvs_operand;

typedef struct kvs_bound_op {
    uint32_t code; /* kvs_op_code */
    uint32_t layer;
    uint32_t flags; /* kvs_op_flags */
    kvs_operand in[3];
    kvs_operand out[4];
    const kvs_weight_view *weights[6];
    uint32_t u[4];
    float f[2];
    double f64[1];
    const kvs_kv_layer *kv;        /* KV_WRITE, ATTEND */
    const kvs_record_info *record; /* KV_WRITE, ATTEND */
    const kvs_delta_layer *delta;  /* DELTA */
    void *scratch;                 /* shared by all operations, at least what op_scratch_bytes asked for */
} kvs_bound_op;

/* One recurrent layer of a state in one pass: what it reads and what it writes never overlap. Float32 throughout.
 * C convolution channels, H value heads, D values per head. */
typedef struct kvs_delta_view {
    const kvs_delta_layer *layer;
    const kvs_weight_view *conv; /* of the layer's weights */
    const kvs_weight_view *dt_bias;
    const kvs_weight_view *decay;
    const float *matrix_in; /* [H][D values][D keys] */
    const float *conv_in;   /* [conv_width - 1][C], oldest first */
    const float *log_in;    /* [n_pending] rows to fold first, each [C] inputs, [H] beta, [H] alpha */
    float *matrix_out;
    float *conv_out;
    float *log_out;         /* rows of this pass, when it is logged */
    uint32_t n_pending;
    uint32_t reserved;
} kvs_delta_view;

/* Convolution channels. The layer has been checked. */
static inline uint64_t kvs_delta_channels(const kvs_delta_layer *layer)
{
    return (uint64_t)layer->head_dim * (2 * (uint64_t)layer->n_key_heads + layer->n_value_heads);
}

/* Float32 values of a matrix set, of the convolution tail, of one log row. */
static inline uint64_t kvs_delta_matrix_values(const kvs_delta_layer *layer)
{
    return (uint64_t)layer->n_value_heads * layer->head_dim * layer->head_dim;
}

static inline uint64_t kvs_delta_conv_values(const kvs_delta_layer *layer)
{
    return kvs_delta_channels(layer) * (layer->conv_width - 1);
}

static inline uint64_t kvs_delta_log_values(const kvs_delta_layer *layer)
{
    return kvs_delta_channels(layer) + 2 * (uint64_t)layer->n_value_heads;
}

/* An output or input of a pass. */
typedef struct kvs_rows_shape {
    uint32_t cols;
    uint32_t rows;     /* kvs_row_kind */
    uint32_t is_front; /* written in passes with KVS_PASS_FRONT alone */
} kvs_rows_shape;

/* One layer's pages [first_page, end_page) that a ring brings, the first of them as demand first_demand. */
typedef struct kvs_stream_layer {
    uint64_t first_demand;
    uint32_t first_page;
    uint32_t end_page;
} kvs_stream_layer;

/* What the readers of a layer tell: clock of the device. */
typedef struct kvs_stream_note {
    uint64_t wanted_ns; /* when the first page of the ring was wanted */
    uint64_t left_ns;   /* when the last one was left */
    uint64_t n_lying;   /* pages that lay there when it was wanted; 0: it was waited for */
    uint64_t reserved;
} kvs_stream_note;

/* What of a pass comes through a ring. Demand d lies in slot (d - base_demand) % n_slots. */
typedef struct kvs_stream_view {
    const _Atomic uint64_t *gate; /* of its copies: the ring's name. NULL: nothing streams */
    uint64_t base_demand;
    uint32_t n_slots;
    uint32_t run_slots;           /* of the longest copy */
    const kvs_stream_layer *layers; /* [n_layers of the step] */
} kvs_stream_view;

/* One pass as operations see it. */
struct kvs_step {
    uint32_t n_rows;
    uint32_t n_out_rows;
    const uint32_t *tokens;
    const uint32_t *positions; /* [n_axes][n_rows], or NULL */
    uint32_t n_axes;
    const uint32_t *out_rows;
    float *const *outputs;
    const float *const *inputs;
    const kvs_rows_shape *output_shapes;
    const kvs_rows_shape *input_shapes;
    uint32_t n_outputs;
    uint32_t n_inputs;
    uint32_t has_front;                 /* front operations run */
    uint64_t number;                    /* of the pass, from 1 on, where outputs stay on the device; the backend says it */
    uint32_t n_layers;                  /* of page_tables */
    uint64_t active_pages;              /* entries of each page table */
    uint64_t cache_id;                  /* of the pages: layers of two caches are not the same */
    uint64_t first_token;               /* committed tokens before the pass: row r is token first_token + r */
    const uint64_t *const *page_tables; /* [layer][absolute page] device addresses */
    const kvs_delta_view *deltas;       /* [recurrent layer] */
    uint32_t n_deltas;
    bool is_resident;                   /* no page comes through a ring */
    bool takes_whole_layers;            /* set by pass_begin */
    kvs_stream_view stream;             /* what comes through one */
    const kvs_stream_note *notes;       /* [n_layers], set by pass_begin: of layers that stream, true when the pass has ended */
    uint64_t binding;                   /* whose operations these are, never the same for two; 0: a prompt's, whose passes differ */
};

static inline float *kvs_operand_data(const kvs_operand *operand, const struct kvs_step *step)
{
    if (operand->output_slot == KVS_NONE) {
        return operand->data;
    }
    /* Sealing has seen that no operation writes an input. */
    return operand->is_input ? (float *)(uintptr_t)step->inputs[operand->output_slot] : step->outputs[operand->output_slot];
}

static inline uint32_t kvs_operand_rows(const kvs_operand *operand, const struct kvs_step *step)
{
    return operand->rows == KVS_ROWS_OUT ? step->n_out_rows : step->n_rows;
}

#endif
