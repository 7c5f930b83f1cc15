/* matmul_fold.cu: the slices that matmul_wide.cu left apart, added up, scaled and stored.
 *
 * Kernel matmul_fold(kvs_matmul_params). No macros. Grid: (columns of all parts / 256 rounded up, n_rows), with swiglu of part 0.
 * Block: 256. No dynamic shared memory. Architecture: 75.
 * Order: slices in order, as in weight_product.cuh.
 * Twin: native/backends/cpu/matmul_reference.c.
 */
#include "grid.cuh"
#include "weight_math.cuh"
#include "weight_params.h"
#include "weight_product.cuh"

#define ROWS 16 /* of a panel */

static __device__ float fold(const kvs_matmul_params &p, unsigned int row, unsigned int n_columns, unsigned int column)
{
    const float *partials = (const float *)p.partials + (unsigned long long)row * n_columns + column;
    const unsigned long long slice = (unsigned long long)p.n_rows * n_columns;
    float sum = partials[0];
#pragma unroll
    for (int s = 1; s < KVS_SLICES; s++) {
        sum = __fadd_rn(sum, partials[s * slice]);
    }
    return sum;
}

static __device__ float scaled(const kvs_matmul_part_params &part, unsigned int column, float sum)
{
    return part.scales == 0 ? sum : __fmul_rn(sum, ((const float *)part.scales)[column / part.scale_run]);
}

extern "C" __global__ void __launch_bounds__(256) matmul_fold(const kvs_matmul_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    const unsigned int row = blockIdx.y, at = blockIdx.x * 256 + threadIdx.x;
    unsigned int n_columns = 0, part = 0, first_column = 0;
    for (unsigned int i = 0; i < p.n_parts; i++) {
        n_columns += p.part[i].n_panels * ROWS;
    }
    if (at >= n_columns) {
        return;
    }
    while (at - first_column >= p.part[part].n_panels * ROWS) {
        first_column += p.part[part].n_panels * ROWS;
        part++;
    }
    const unsigned int column = at - first_column;
    if (column >= p.part[part].n || (p.epilogue == KVS_STORE_SWIGLU && part != 0)) {
        return;
    }
    float *out = (float *)p.part[part].out + (unsigned long long)row * p.part[part].out_stride + column;
    float y = scaled(p.part[part], column, fold(p, row, n_columns, at));
    if (p.epilogue == KVS_STORE_SWIGLU) {
        const float up = fold(p, row, n_columns, p.part[0].n_panels * ROWS + column);
        y = __fmul_rn(kvs_silu(y), scaled(p.part[1], column, up));
    } else if (p.epilogue == KVS_STORE_ADD) {
        y = __fadd_rn(*out, y);
    }
    *out = y;
}
