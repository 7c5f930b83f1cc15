/* gather.cu: the requested rows of a tensor.
 *
 * Kernel: gather. Argument: kvs_gather_params. Architecture: sm_75. No macros. A thread a value: grid (rows, columns / 256 rounded
 * up), block 256.
 */
#include "attend_params.h"
#include "grid.cuh"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(256) gather(const kvs_gather_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    const kvs_u32 col = blockIdx.y * 256 + threadIdx.x, row = blockIdx.x;
    if (col < p.cols) {
        const kvs_u64 from = ((const kvs_u32 *)p.rows)[row];
        ((float *)p.out)[(kvs_u64)row * p.cols + col] = ((const float *)p.in)[from * p.cols + col];
    }
}
