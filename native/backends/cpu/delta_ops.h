/* delta_ops.h: the arithmetic of one head of a gated delta net, one table per instruction set, all with the same bits.
 *
 * A head size is 16, 32, 64 or 128. Sums over a head are sixteen lanes, lane j of values j, j+16, ..., by fused multiply-add,
 * folded 8, 4, 2, 1; sums of products of matrices run over their depth in rising order, by fused multiply-add.
 */
#ifndef KVS_NATIVE_CPU_DELTA_OPS_H
#define KVS_NATIVE_CPU_DELTA_OPS_H

#include <stdbool.h>
#include <stdint.h>

#define KVS_DELTA_LANES 16u
#define KVS_DELTA_MAX_HEAD 128u

/* Row by row. With s = M k, row t does d = beta (v - decay s), M = decay M + d k^T, and its output is M q: row j of M sees no
 * other row, so it is loaded once and taken through all rows of the pass. */
typedef struct kvs_delta_recurrence {
    uint32_t head_dim;
    uint32_t n_rows;
    uint32_t n_fold;    /* of these, rows without an output, which come first */
    const float *q;     /* [n_rows][head_dim] */
    const float *k;
    const float *v;
    const float *decay; /* [n_rows] */
    const float *beta;
    const float *from;  /* [head_dim values][head_dim keys] */
    float *folded;      /* M after n_fold rows; NULL: not wanted; may be `from` */
    float *last;        /* M after all rows; NULL: not wanted; may be `from` */
    float *out;         /* row n_fold first */
    uint64_t out_stride;
} kvs_delta_recurrence;

/* c = a b, or keep c + a b. a: value r, s at a[r * a_row + s * a_step]. n_cols is a multiple of 16. */
typedef struct kvs_delta_product {
    const float *a;
    uint64_t a_row;
    uint64_t a_step;
    const float *b; /* [depth][n_cols] */
    uint64_t b_stride;
    float *c; /* [n_rows][n_cols] */
    uint64_t c_stride;
    uint32_t n_rows;
    uint32_t depth;
    uint32_t n_cols;
    float keep; /* factor of what c holds */
    bool keeps; /* else c is not read */
} kvs_delta_product;

typedef struct kvs_delta_ops {
    void (*recur)(const kvs_delta_recurrence *recurrence);
    /* out = silu(sum over taps of weights[tap][i] * rows[tap][i]), taps rising: a product, then fused multiply-adds.
     * n is a multiple of 16 */
    void (*convolve)(const float *const *rows, const float *weights, uint32_t n_taps, uint32_t n, float *out);
    /* x *= 1 / sqrt(sum x^2 + eps) * scale */
    void (*normalise)(float *x, uint32_t n, float eps, float scale);
    void (*multiply)(const kvs_delta_product *product);
    /* x += sum over s of factors[s] * rows[s], s rising, rows `n` apart */
    void (*accumulate)(const float *factors, const float *rows, uint32_t n_rows, uint32_t n, float *x);
    /* x = exp(x); n is a multiple of 16 */
    void (*exponential)(float *x, uint32_t n);
} kvs_delta_ops;

const kvs_delta_ops *kvs_delta_ops_reference(void);
const kvs_delta_ops *kvs_delta_ops_avx2(void);
const kvs_delta_ops *kvs_delta_ops_avx512(void);

#endif
