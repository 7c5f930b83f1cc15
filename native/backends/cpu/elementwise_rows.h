/* elementwise_rows.h: what an instruction set provides for elementwise.c and for the norm in front of a matmul: one row,
 * or one head of it, at a time. All sets give the same bits; `out` may be `x`. */
#ifndef KVS_NATIVE_CPU_ELEMENTWISE_ROWS_H
#define KVS_NATIVE_CPU_ELEMENTWISE_ROWS_H

#include <stdint.h>

typedef struct kvs_row_ops {
    /* `weight` NULL: ones. The order is that of kvs_rms_norm_desc. */
    void (*rms_norm)(const float *x, const float *weight, uint64_t n, float eps, float *out);
    void (*swiglu)(const float *gate, const float *up, uint64_t n, float *out);
    void (*sigmoid_glu)(const float *gate, const float *up, uint64_t n, float *out);
    void (*add)(const float *a, const float *b, uint64_t n, float *out);
    /* The first 2 * n_pairs values of a head; table: [n_pairs]{cos, sin}. */
    void (*rope_pairs)(const float *x, const float *table, uint32_t n_pairs, float *out);
    void (*rope_halves)(const float *x, const float *table, uint32_t n_pairs, float *out);
} kvs_row_ops;

extern const kvs_row_ops kvs_row_ops_reference;
#if defined(__x86_64__)
extern const kvs_row_ops kvs_row_ops_avx2;
#endif

/* The best set for a kvs_isa. Memory, not arithmetic, bounds these: AVX-512 has no set of its own. */
const kvs_row_ops *kvs_row_ops_for(uint32_t isa);

#endif
