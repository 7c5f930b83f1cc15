/* product.h: what matmuls and experts share: rows of activations, times up to three weights in the form of the device. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_PRODUCT_H
#define KVS_NATIVE_BACKENDS_CUDA_PRODUCT_H

#include "backends/cuda/launcher.h"
#include "kernels/weight_params.h"

typedef struct kvs_cuda_factor {
    int type;
    uint64_t n;           /* output values, with experts those of one */
    uint64_t address;
    uint64_t scales;      /* address or 0 */
    uint64_t n_scales;
    uint64_t out;
    uint32_t out_stride;
} kvs_cuda_factor;

typedef struct kvs_cuda_product {
    kvs_cuda_factor part[KVS_MATMUL_MAX_PARTS];
    uint32_t n_parts;
    uint32_t n_rows;       /* with experts: slots */
    uint32_t epilogue;     /* kvs_epilogue_kind */
    uint32_t x_stride;
    uint64_t k;
    uint64_t x;            /* float32 rows, for float weights: as they come from `rows` */
    uint64_t records;      /* of the same rows, for the others: act_record.h, or with is_tiled the atoms of tile_record.h */
    uint64_t up;           /* room for the second part of a swiglu, [n_rows][n], where kvs_cuda_needs_up says so */
    uint64_t partials;     /* room of kvs_cuda_partial_bytes; not with experts */
    uint64_t tile_experts; /* 0: no experts */
    uint64_t n_tiles_used;
    kvs_act_params rows;   /* what forms records and normed rows; records and normed 0: they are there */
    bool is_tiled;         /* matmul_tile.cu takes the quantized parts; not with experts */
} kvs_cuda_product;

/* Groups of a record row. */
uint64_t kvs_cuda_act_groups(uint64_t k);

/* Bytes of the records of n_rows rows of k values. False: too many. */
bool kvs_cuda_act_bytes(uint64_t k, uint64_t n_rows, uint64_t *bytes);

/* Whether rows of a prompt go to matmul_tile.cu: where there are products of bfloat16. */
bool kvs_cuda_has_tiles(const kvs_cuda_launcher *launcher);

/* Bytes of the atoms of n_rows rows of k values. False: too many. */
bool kvs_cuda_atom_bytes(uint64_t k, uint64_t n_rows, uint64_t *bytes);

/* Room for partial sums of any pass of up to max_rows rows. Of the parts types and sizes count. */
uint64_t kvs_cuda_partial_bytes(const kvs_cuda_factor *parts, uint32_t n_parts, uint64_t max_rows);

/* Whether a swiglu of weights of these types cannot be formed in one kernel. */
bool kvs_cuda_needs_up(int gate_type, int up_type);

/* Reserve n items of item_bytes behind *end, aligned to 64 bytes. False: too many. */
bool kvs_cuda_reserve(uint64_t *end, uint64_t n, uint64_t item_bytes, uint64_t *offset);

/* errors: kvs_cuda_launch's */
kvs_status kvs_cuda_quantize(kvs_cuda_launcher *launcher, const kvs_act_params *params);
kvs_status kvs_cuda_product_run(kvs_cuda_launcher *launcher, const kvs_cuda_product *product);

#endif
