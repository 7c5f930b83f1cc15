/* attend_params.h: arguments of the attention-side kernels, filled by the host and passed by value. Addresses are the device's,
 * strides are in floats. No includes: compiled by the host's compiler and by NVRTC.
 */
#ifndef KVS_KERNELS_ATTEND_PARAMS_H
#define KVS_KERNELS_ATTEND_PARAMS_H

/* Leaves of one page fold in order into groups of so many pages, by absolute page index; groups fold in order into the result. */
#define KVS_CUDA_GROUP_PAGES 8u
/* Queries of one KV head that share a decoded page in a block. */
#define KVS_CUDA_TILE_QUERIES 8u

/* attend.cu: attend_leaf, attend_fold. A part is a float32 maximum, a sum, two unused, then head_dim_v weighted sums; its sum
 * is 0 exactly where it is empty. Queries are numbered [KV head][row][query head of the KV head]. */
typedef struct kvs_attend_params {
    unsigned long long q;          /* row r, head h: q + r * q_stride + h * head_dim_k */
    unsigned long long out;
    unsigned long long page_table; /* addresses of records by absolute page index */
    unsigned long long slots;      /* [slot][query] parts: of one page each, or of one group each */
    unsigned long long groups;     /* [query] parts: the group that has begun */
    unsigned long long results;    /* [query] parts: all groups before it */
    unsigned long long first_token; /* row r sees tokens 0 .. first_token + r; where `step` is 0 */
    unsigned long long step;        /* kvs_step_words, or 0. With it page_end is an upper bound, and is_last is found out */
    unsigned long long layer;       /* kvs_step_layer, or 0: all pages are there */
    unsigned long long ticket;      /* unsigned int, 0 before the launch: where pages go through a ring */
    unsigned int q_stride;
    unsigned int out_stride;
    unsigned int n_rows;
    unsigned int n_query_heads;
    unsigned int n_kv_heads;
    unsigned int page_begin;       /* pages of this launch */
    unsigned int page_end;
    unsigned int is_grouped;       /* slots are of groups */
    unsigned int is_first;         /* nothing has been folded before: groups and results hold nothing */
    unsigned int is_last;          /* write `out` */
    float scale;                   /* of the scores */
    unsigned int block;            /* of the Walsh-Hadamard rotation of `out`, or 0 */
    float block_scale;             /* 1 / sqrt(block), rounded by the host */
    unsigned int reserved;
} kvs_attend_params;

/* kv_write.cu: encode rows of k and v into the records of their tokens. */
typedef struct kvs_kv_write_params {
    unsigned long long k;
    unsigned long long v;
    unsigned long long page_table;
    unsigned long long first_token; /* of row 0; where `step` is 0 */
    unsigned long long step;        /* kvs_step_words, or 0 */
    unsigned int k_stride;
    unsigned int v_stride;
    unsigned int n_rows;
    unsigned int n_kv_heads;
} kvs_kv_write_params;

/* hadamard.cu: rotate blocks of KVS_BLOCK values in place. */
typedef struct kvs_hadamard_params {
    unsigned long long values;
    unsigned long long n_blocks;
    float scale; /* 1 / sqrt(block), rounded by the host */
    unsigned int reserved;
} kvs_hadamard_params;

/* rope_table.cu: cosine and sine of each row and pair. */
typedef struct kvs_rope_table_params {
    unsigned long long table;       /* [n_rows][n_rotary / 2][2] */
    unsigned long long positions;   /* [n_axes][n_rows] u32, or 0: row r is at first_token + r */
    unsigned long long divisors;    /* [n_rotary / 2] float32, or 0 */
    unsigned long long first_token; /* where `step` is 0 */
    unsigned long long step;        /* kvs_step_words, or 0 */
    double base;
    double factor;                  /* of the positions */
    unsigned int n_rows;
    unsigned int n_rotary;
    unsigned int n_axes;
    unsigned int section[3];        /* pairs of axis 1 and 2 as KVS_OP_ROPE_TABLE states them; [0] is not read */
} kvs_rope_table_params;

/* rope.cu: rotate the first n_rotary values of each head in place. */
typedef struct kvs_rope_params {
    unsigned long long values; /* [n_rows][n_heads][head_values] */
    unsigned long long table;  /* [n_rows][n_rotary / 2][2] */
    unsigned int n_rows;
    unsigned int n_heads;
    unsigned int head_values;
    unsigned int n_rotary;
    unsigned int is_halves;    /* pairs (i, i + n_rotary / 2) instead of (2i, 2i + 1) */
    unsigned int reserved;
} kvs_rope_params;

/* turn.cu: norm, rotation and Walsh-Hadamard rotation of heads in place. */
#define KVS_CUDA_TURN_PARTS 3u

/* Queries, keys or values. */
typedef struct kvs_turn_part {
    unsigned long long values; /* [n_rows][n_heads][head] */
    unsigned long long weight; /* [head] float32, or 0: no norm */
    unsigned int n_heads;      /* 0: no such part */
    unsigned int is_rotated;   /* by the table */
} kvs_turn_part;

typedef struct kvs_turn_params {
    kvs_turn_part parts[KVS_CUDA_TURN_PARTS];
    unsigned long long table;  /* [n_rows][n_rotary / 2][2] */
    unsigned int n_rows;
    unsigned int n_rotary;
    unsigned int is_halves;
    float eps;
    float scale;               /* 1 / sqrt(block), rounded by the host */
    unsigned int reserved;
} kvs_turn_params;

/* norm.cu: root mean square norm of groups of values. */
typedef struct kvs_norm_params {
    unsigned long long x;
    unsigned long long out;      /* may be x */
    unsigned long long weight;   /* [group] float32, or 0 */
    unsigned long long n_groups; /* of all rows */
    unsigned int group;          /* values */
    unsigned int team;           /* threads that share a group: 32 or the whole block */
    float eps;
    unsigned int reserved;
} kvs_norm_params;

/* glu.cu: out = act(gate) * up; add.cu: out += up. */
typedef struct kvs_glu_params {
    unsigned long long gate;     /* [n_rows][cols], or [n_rows] with is_one_gate */
    unsigned long long up;
    unsigned long long out;
    unsigned long long n_values; /* n_rows * cols */
    unsigned int cols;
    unsigned int is_sigmoid;     /* silu otherwise */
    unsigned int is_one_gate;
    unsigned int reserved;
} kvs_glu_params;

/* gather.cu: out[i] = in[rows[i]]. */
typedef struct kvs_gather_params {
    unsigned long long in;
    unsigned long long out;
    unsigned long long rows;     /* [n_rows] u32 */
    unsigned int n_rows;
    unsigned int cols;
} kvs_gather_params;

#endif
