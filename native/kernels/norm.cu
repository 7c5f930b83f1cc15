/* norm.cu: x / sqrt(mean(x^2) + eps) * weight over groups of values.
 *
 * Kernel: rms_norm. Argument: kvs_norm_params. Architecture: sm_75. No macros. Grid (groups / (256 / team), rounded up), block 256: `team`
 * threads, 32 or 256, share a group. The host chooses the team by the group's size alone.
 *
 * Order: thread i of a team adds squares i, i + team, ... by fused multiply-add; lanes in a tree of xor distances 16 .. 1; the
 * warps of a team of 256 in order.
 */
#include "attend_params.h"
#include "grid.cuh"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(256) rms_norm(const kvs_norm_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    __shared__ float warps[8];
    const kvs_u32 member = threadIdx.x % p.team;
    const kvs_u64 group = (kvs_u64)blockIdx.x * (256 / p.team) + threadIdx.x / p.team;
    if (group >= p.n_groups) {
        return; /* a whole warp, and a whole block where the team is one */
    }
    const float *x = (const float *)p.x + group * p.group, *weight = (const float *)p.weight;
    float sum = 0.0f;
    for (kvs_u32 i = member; i < p.group; i += p.team) {
        sum = fmaf(x[i], x[i], sum);
    }
    for (kvs_u32 distance = 16; distance != 0; distance /= 2) {
        sum += __shfl_xor_sync(KVS_FULL_WARP, sum, distance);
    }
    if (p.team != 32) {
        if (threadIdx.x % 32 == 0) {
            warps[threadIdx.x / 32] = sum;
        }
        __syncthreads();
        sum = warps[0];
        for (kvs_u32 i = 1; i < 8; i++) {
            sum += warps[i];
        }
    }
    const float factor = 1.0f / sqrtf(sum / (float)p.group + p.eps);
    float *out = (float *)p.out + group * p.group;
    for (kvs_u32 i = member; i < p.group; i += p.team) {
        const float scaled = x[i] * factor;
        out[i] = weight != nullptr ? scaled * weight[i] : scaled;
    }
}
