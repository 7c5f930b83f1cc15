/* weight_form.h: weights of matmuls in the form that kernels read (kernels/weight_form.h), made on the host. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_WEIGHT_FORM_H
#define KVS_NATIVE_BACKENDS_CUDA_WEIGHT_FORM_H

#include "base/internal.h"
#include "kernels/weight_form.h"

/* Sizes of a weight of n rows of k values. Float weights have rows instead of panels. */
typedef struct kvs_cuda_weight_shape {
    int type;
    uint64_t k;
    uint64_t n;
    uint64_t n_pieces;    /* panels of 16 output rows, or rows */
    uint64_t piece_bytes;
    uint64_t n_groups;    /* of 32 values, rounded up to even; 0 for float types */
    uint64_t n_units;     /* to a panel */
    uint64_t row_values;  /* float types: k, rounded up to 8 */
    uint64_t bytes;
} kvs_cuda_weight_shape;

/* errors: EUNSUPPORTED type; EINVAL k or n is zero, or k is no multiple of the block; EOVERFLOW */
kvs_status kvs_cuda_weight_shape_make(int type, uint64_t k, uint64_t n, kvs_cuda_weight_shape *shape);

/* Pieces `first` to `first + n_pieces - 1`, one after another. `rows` is the start of the whole matrix in file layout. */
void kvs_cuda_weight_form(const kvs_cuda_weight_shape *shape, const void *rows, uint64_t first, uint64_t n_pieces, uint8_t *to);

#endif
