/* matmul.h: out = x * W^T on the CPU, for 1 to KVS_MATMUL_ROWS rows, with one order of summation.
 *
 * The bits of an output row depend on that row of x, the weights and nothing else: not on the number of rows, threads
 * or the instruction set. matmul_reference.c defines the order; a NaN is a NaN everywhere, its payload is not defined.
 *
 * Float weights: acc = fma(w[k], x[k], acc) for k = 0, 1, ... in float32.
 * Quantized weights: activations become 8-bit codes per 32 values with one float32 scale dx, once per row and matmul
 * (act.h). For each group, in order, with the exact integer dot product and dw the exact float32 scale of the weights:
 * acc = fma(dw * dx, dot, acc), and for types with a minimum m then acc = fma(m, dx * sum_of_codes, acc). Types with
 * 16 values to a scale do both halves of a group in order.
 */
#ifndef KVS_NATIVE_CPU_MATMUL_H
#define KVS_NATIVE_CPU_MATMUL_H

#include "backends/cpu/panel.h"
#include "backends/cpu/threads.h"

#define KVS_MATMUL_ROWS 2048u
#define KVS_MATMUL_PARTS 4u

typedef enum kvs_epilogue {
    KVS_EPILOGUE_NONE = 0,  /* out = y */
    KVS_EPILOGUE_ADD = 1,   /* out = out + y */
    KVS_EPILOGUE_SWIGLU = 2 /* two parts, gate and up: out of part 0 = silu(gate) * up; out of part 1 unused */
} kvs_epilogue;

typedef struct kvs_matmul_part {
    int type; /* kvs_type */
    uint64_t n;          /* output values to a row */
    const void *panels;  /* kvs_panel_pack, 64-byte aligned */
    const float *scales; /* n_scales numbers for runs of n / n_scales output values, or NULL: y = acc * scale */
    uint64_t n_scales;
    const float *bias;   /* n values, or NULL: y = acc + bias, or acc * scale + bias with two roundings */
    float *out;          /* must not overlap x */
    uint64_t out_stride; /* values from one row to the next */
} kvs_matmul_part;

typedef struct kvs_matmul_desc {
    kvs_matmul_part part[KVS_MATMUL_PARTS];
    uint32_t n_parts;
    uint32_t n_rows;
    uint32_t epilogue; /* kvs_epilogue */
    float norm_eps;
    uint64_t k; /* reduction axis, of all parts */
    const float *x;
    uint64_t x_stride;        /* values from one row to the next */
    const float *norm_weight; /* k values: each row of x goes through an RMS norm first. NULL: no norm */
    void *workspace;          /* kvs_matmul_workspace_bytes, 64-byte aligned */
    uint64_t workspace_bytes;
} kvs_matmul_desc;

/* Workspace of any matmul over k with n_rows rows. errors: EINVAL zero or too many rows; EOVERFLOW */
kvs_status kvs_matmul_workspace_bytes(uint64_t k, uint32_t n_rows, uint64_t *bytes);

/* `isa` is a kvs_isa that the machine has (kvs_cpu_isa_detect).
 * errors: EINVAL a field out of range; EUNSUPPORTED type; ENOSPACE workspace too small */
kvs_status kvs_matmul_run(kvs_threads *threads, uint32_t isa, const kvs_matmul_desc *desc);

#endif
