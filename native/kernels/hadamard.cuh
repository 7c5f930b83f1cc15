/* hadamard.cuh: Walsh-Hadamard sums of a block that a warp holds: value i of a lane is number 32 i + lane.
 *
 * Order: sums and differences at distance 1, 2, 4, ...: the bits of the host.
 */
#ifndef KVS_KERNELS_HADAMARD_CUH
#define KVS_KERNELS_HADAMARD_CUH

#include "numeric.cuh"

template <kvs_u32 PER_LANE> __device__ inline void kvs_hadamard(float (&x)[PER_LANE], kvs_u32 lane)
{
#pragma unroll
    for (kvs_u32 distance = 1; distance < 32; distance *= 2) {
#pragma unroll
        for (kvs_u32 i = 0; i < PER_LANE; i++) {
            const float other = __shfl_xor_sync(KVS_FULL_WARP, x[i], distance);
            x[i] = (lane & distance) == 0 ? x[i] + other : other - x[i];
        }
    }
#pragma unroll
    for (kvs_u32 distance = 1; distance < PER_LANE; distance *= 2) {
#pragma unroll
        for (kvs_u32 i = 0; i < PER_LANE; i++) {
            if ((i & distance) == 0) {
                const float a = x[i], b = x[i + distance];
                x[i] = a + b;
                x[i + distance] = a - b;
            }
        }
    }
}

#endif
