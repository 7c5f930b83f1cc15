/* elementwise.h: operations on rows of float32 on the CPU. Strides are in values. Same bits whatever the number of
 * rows, threads and the instruction set; a NaN is a NaN everywhere, its payload is not defined.
 *
 * Every call may work in place (out == x with equal strides); other overlaps are not allowed. `isa` is a kvs_isa that
 * the machine has. Nothing is validated beyond what an errors clause names: the recorder of the operation does that.
 */
#ifndef KVS_NATIVE_CPU_ELEMENTWISE_H
#define KVS_NATIVE_CPU_ELEMENTWISE_H

#include "backends/cpu/threads.h"
#include "kvstream/base.h"

/* out = x / sqrt(mean(x^2) + eps) * weight over each run of `group` values of a row; n is a multiple of group.
 * Order: 16 lanes, lane j sums the squares of values j, j+16, ... by fused multiply-add; lanes fold 8, 4, 2, 1. */
typedef struct kvs_rms_norm_desc {
    const float *x;
    uint64_t x_stride;
    float *out;
    uint64_t out_stride;
    const float *weight; /* `group` values, or NULL for ones */
    uint64_t n;
    uint64_t group;
    uint32_t n_rows;
    float eps;
} kvs_rms_norm_desc;

void kvs_rms_norm(kvs_threads *threads, uint32_t isa, const kvs_rms_norm_desc *desc);

/* Two inputs of one shape, one output. */
typedef struct kvs_binary_desc {
    const float *a;
    uint64_t a_stride;
    const float *b;
    uint64_t b_stride;
    float *out;
    uint64_t out_stride;
    uint64_t n;
    uint32_t n_rows;
} kvs_binary_desc;

typedef enum kvs_activation { KVS_ACTIVATION_SILU = 0, KVS_ACTIVATION_SIGMOID = 1 } kvs_activation;

typedef struct kvs_glu_desc {
    kvs_binary_desc operands; /* a is the gate */
    uint32_t activation;      /* kvs_activation */
    bool is_one_gate;         /* a has one value per row, for all of the row */
} kvs_glu_desc;

/* out = activation(a) * b */
void kvs_glu(kvs_threads *threads, uint32_t isa, const kvs_glu_desc *desc);

/* out = a + b */
void kvs_add(kvs_threads *threads, uint32_t isa, const kvs_binary_desc *desc);

typedef enum kvs_rope_mode {
    KVS_ROPE_PAIRS = 0, /* rotates (2i, 2i+1) */
    KVS_ROPE_HALVES = 1 /* rotates (i, i + n_rot/2) */
} kvs_rope_mode;

typedef struct kvs_rope_table_desc {
    const double *inv_freq;    /* [n_pairs] */
    const uint8_t *axes;       /* [n_pairs] which positions turn a pair */
    const uint32_t *positions; /* [axis][n_rows]; NULL: first_position and on, on every axis */
    uint64_t first_position;
    uint32_t n_rows;
    uint32_t n_pairs; /* n_rot/2 */
} kvs_rope_table_desc;

/* Cosines and sines for a pass: table[row][i] = {cos, sin} of positions[axes[i]][row] * inv_freq[i].
 * The angle is formed and reduced in float64. */
void kvs_rope_table(const kvs_rope_table_desc *desc, float *table);

typedef struct kvs_rope_desc {
    const float *x; /* row: n_heads heads of head_values values */
    uint64_t x_stride;
    float *out;
    uint64_t out_stride;
    const float *table; /* kvs_rope_table: [n_rows][n_rot/2][2] */
    uint32_t n_rows;
    uint32_t n_heads;
    uint32_t head_values;
    uint32_t n_rot; /* even, at most head_values; the rest of a head is copied */
    uint32_t mode;  /* kvs_rope_mode */
} kvs_rope_desc;

/* a' = a cos - b sin, b' = a sin + b cos, each fma(first, cos or sin, rounded second product). */
void kvs_rope(kvs_threads *threads, uint32_t isa, const kvs_rope_desc *desc);

/* out[i] = row ids[i] of a [n_table_rows][k] table in file layout, decoded: each value is the float32 rounding of the
 * stored numbers' product (and sum). Nothing is written on failure.
 * errors: EUNSUPPORTED type; EINVAL k is no multiple of the type's block, or an id is not below n_table_rows */
kvs_status kvs_embed_rows(int type, uint64_t k, uint64_t n_table_rows, const void *table, const uint32_t *ids,
                          uint32_t n_rows, float *out, uint64_t out_stride);

/* out[i] = row indices[i] of x, n values each. errors: EINVAL an index is not below n_x_rows */
kvs_status kvs_gather_rows(const float *x, uint64_t x_stride, uint32_t n_x_rows, const uint32_t *indices, uint32_t n_rows,
                           uint64_t n, float *out, uint64_t out_stride);

#endif
