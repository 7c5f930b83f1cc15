/* add.cu: out += up.
 *
 * Kernel: add. Argument: kvs_glu_params; gate is not read. Architecture: sm_75. No macros. A thread a value: grid (values / 256, rounded
 * up), block 256.
 */
#include "attend_params.h"
#include "grid.cuh"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(256) add(const kvs_glu_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    const kvs_u64 i = (kvs_u64)blockIdx.x * 256 + threadIdx.x;
    if (i < p.n_values) {
        ((float *)p.out)[i] += ((const float *)p.up)[i];
    }
}
