/* weight_params.h: what kernels of the weight side take, by value, as their only argument. Plain C without includes: the host
 * fills these structs, and the same text stands at the head of each kernel.
 *
 * Units: addresses are of the device; `_bytes` are bytes, strides of float rows are values. Host and device agree on the layout:
 * 8-byte members come first.
 */
#ifndef KVS_NATIVE_KERNELS_WEIGHT_PARAMS_H
#define KVS_NATIVE_KERNELS_WEIGHT_PARAMS_H

#define KVS_MATMUL_MAX_PARTS 4

/* act_unit.cuh: rows of float32 to records of 8-bit codes (act_record.h), normed before if `norm` is not 0. */
typedef struct kvs_act_params {
    unsigned long long x;         /* float32 rows */
    unsigned long long norm;      /* [k] float32, with groups [group], or 0 */
    unsigned long long gate;      /* float32 rows like x, or 0 */
    unsigned long long normed;    /* float32 rows of k values for float weights, or 0 */
    unsigned long long records;   /* or 0: only the norm */
    unsigned long long slot_rows; /* [n_slots] row of x for each slot, KVS_NO_SLOT for none; 0: slot r takes row r */
    unsigned long long n_slots_used; /* one unsigned int on the device, or 0: all n_slots */
    unsigned int k;
    unsigned int x_stride;
    unsigned int n_slots;
    unsigned int n_groups; /* of a record row: k / 32, rounded up to even */
    unsigned int group;    /* values of a norm, a power of two from 32 to 512; 0: the whole row */
    unsigned int is_sigmoid; /* of the gate; silu otherwise */
    float eps;
    unsigned int reserved;
} kvs_act_params;

#define KVS_NO_SLOT 0xffffffffu

/* One weight matrix of a matmul. */
typedef struct kvs_matmul_part_params {
    unsigned long long panels;
    unsigned long long out;
    unsigned long long scales;      /* float32, or 0 */
    unsigned int n;          /* output values */
    unsigned int n_panels;   /* of 16 output values */
    unsigned int out_stride;
    unsigned int scale_run;  /* output values to a scale */
} kvs_matmul_part_params;

/* matmul_wide.cu, matmul_fold.cu, and within kvs_matmul_narrow_params matmul.cu. With experts (tile_experts not 0) a tile of 8 slots belongs to one expert, whose panels begin
 * expert * n_panels further on, and whose scale is scales[expert]. */
typedef struct kvs_matmul_params {
    unsigned long long records;      /* of the activations */
    unsigned long long tile_experts; /* [n_tiles] or 0 */
    unsigned long long n_tiles_used; /* one unsigned int on the device, with experts */
    unsigned long long partials;     /* [8 slices][n_rows][columns of all panels] float32, where slices are apart */
    kvs_matmul_part_params part[KVS_MATMUL_MAX_PARTS];
    unsigned int n_parts;
    unsigned int n_rows;
    unsigned int n_groups;    /* as in kvs_act_params; of a panel: units cover them */
    unsigned int n_items;     /* matmul.cu: what its blocks share out */
    unsigned int n_row_tiles; /* blocks along the rows */
    unsigned int epilogue;    /* kvs_epilogue_kind */
} kvs_matmul_params;

/* matmul.cu: a product, and the rows it forms records of before. */
typedef struct kvs_matmul_narrow_params {
    kvs_matmul_params product;
    kvs_act_params rows; /* its records are those of the product, or 0: they are there */
} kvs_matmul_narrow_params;

typedef enum kvs_epilogue_kind {
    KVS_STORE = 0,
    KVS_STORE_ADD = 1,
    KVS_STORE_SWIGLU = 2
} kvs_epilogue_kind;

/* matmul_float.cu: float weights, [n][row_values] values of the type, rows padded with zeros: `panels` of a part. Experts as in
 * matmul.cu. */
typedef struct kvs_matmul_float_params {
    unsigned long long tile_experts; /* or 0 */
    unsigned long long n_tiles_used;
    unsigned long long x;           /* float32 rows */
    kvs_matmul_part_params part[KVS_MATMUL_MAX_PARTS]; /* n_panels: blocks of 4 output values */
    unsigned int k;
    unsigned int row_values; /* k, rounded up to 8 */
    unsigned int x_stride;
    unsigned int n_rows;
    unsigned int epilogue;   /* KVS_STORE or KVS_STORE_ADD */
    unsigned int n_parts;
} kvs_matmul_float_params;

/* embed.cu: rows of a table in file layout, named by tokens. */
typedef struct kvs_embed_params {
    unsigned long long table;
    unsigned long long tokens; /* [n_rows] unsigned int */
    unsigned long long out;
    unsigned int k;
    unsigned int row_bytes;
    unsigned int n_table_rows;
    unsigned int out_stride;
    unsigned int n_rows;
    unsigned int reserved;
} kvs_embed_params;

/* experts.cu. Slots: rows of chosen experts, those of one expert side by side, from a multiple of 8 on. */
typedef struct kvs_experts_params {
    unsigned long long router;       /* [n_rows][n_experts] float32 logits */
    unsigned long long choices;      /* [n_rows][n_chosen] unsigned int: experts by falling logit */
    unsigned long long slots;        /* [n_rows][n_chosen] unsigned int: where each one's result is */
    unsigned long long weights;      /* [n_rows][n_chosen] float32 */
    unsigned long long slot_rows;    /* [n_slots] */
    unsigned long long tile_experts; /* [n_slots / 8] */
    unsigned long long n_used;       /* two unsigned int: slots, tiles */
    unsigned long long results;      /* [n_slots][n_embd] float32 */
    unsigned long long out;          /* [n_rows][n_embd] */
    unsigned int n_rows;
    unsigned int n_experts;
    unsigned int n_chosen;
    unsigned int n_slots;     /* room: a multiple of 8 */
    unsigned int n_embd;
    float factor;
} kvs_experts_params;

/* delta.cu: one recurrent layer, as kvs_delta_view in core/step.h. */
typedef struct kvs_delta_params {
    unsigned long long step;       /* kvs_step_delta, or 0. With it the addresses of the state and n_pending are there */
    unsigned long long conv;       /* [C][taps] */
    unsigned long long dt_bias;    /* [H] */
    unsigned long long decay;      /* [H] */
    unsigned long long matrix_in;  /* [H][D values][D keys] */
    unsigned long long conv_in;    /* [taps - 1][C] */
    unsigned long long log_in;     /* [n_pending][C + 2H] */
    unsigned long long matrix_out;
    unsigned long long conv_out;
    unsigned long long log_out;    /* [n_rows][C + 2H], or 0 */
    unsigned long long inputs;     /* [n_rows][C] */
    unsigned long long beta;       /* [n_rows][H] */
    unsigned long long alpha;      /* [n_rows][H] */
    unsigned long long out;        /* [n_rows][H * D] */
    unsigned int n_key_heads;
    unsigned int n_value_heads;
    unsigned int taps;
    unsigned int n_pending;
    unsigned int n_rows;
    unsigned int is_logged; /* the state is written behind the pending rows, and rows go to the log */
    float norm_eps;
    unsigned int reserved;
} kvs_delta_params;

/* delta_chunk.cu: the rows of the pass in chunks. What is pending has been folded into matrix_in; n_pending says where the rows
 * before the first one lie. */
typedef struct kvs_delta_chunk_params {
    kvs_delta_params pass;
    unsigned long long chunks; /* scratch, [n_chunks][H][4 * 64 * D + 64 * 64 + 32] float32 */
    unsigned int first_rows;   /* of the first chunk: at most up to the next multiple of 64 in absolute positions */
    unsigned int n_chunks;
} kvs_delta_chunk_params;

#endif
