/* hadamard.cu: Walsh-Hadamard rotation of blocks of values in place.
 *
 * Kernel: hadamard. Argument: kvs_hadamard_params. Architecture: sm_75. Macros: KVS_BLOCK, values of a block, a power of two
 * from 32 to 1024. Grid (blocks / 8, rounded up), block 256: a warp rotates a block; lane l holds values l, l + 32, ...
 *
 * Order: sums and differences at distance 1, 2, 4, ..., then one product: the bits of the host.
 */
#include "attend_params.h"
#include "grid.cuh"
#include "hadamard.cuh"
#include "numeric.cuh"

#define PER_LANE (KVS_BLOCK / 32u)

extern "C" __global__ void __launch_bounds__(256) hadamard(const kvs_hadamard_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    const kvs_u64 block = (kvs_u64)blockIdx.x * 8 + threadIdx.x / 32;
    const kvs_u32 lane = threadIdx.x % 32;
    if (block >= p.n_blocks) {
        return;
    }
    float *values = (float *)p.values + block * KVS_BLOCK + lane;
    float x[PER_LANE];
#pragma unroll
    for (kvs_u32 i = 0; i < PER_LANE; i++) {
        x[i] = values[i * 32];
    }
    kvs_hadamard<PER_LANE>(x, lane);
#pragma unroll
    for (kvs_u32 i = 0; i < PER_LANE; i++) {
        values[i * 32] = x[i] * p.scale;
    }
}
