/* norm.cu: x / sqrt(mean(x^2) + eps) * weight over groups of values.
 *
 * Kernel: rms_norm. Argument: kvs_norm_params. Architecture: sm_75. No macros. `team` threads share a group, chosen by the group's
 * size alone: 32 in a block of 256, or a block of 1,024. Grid (groups / teams of a block, rounded up).
 *
 * Order: thread i of a team adds squares i, i + team, ... by fused multiply-add; lanes in a tree of xor distances 16 .. 1; the
 * warps of a block in order.
 */
#include "attend_params.h"
#include "numeric.cuh"

/* Values that a thread holds between the two times it needs them; of a larger group it reads the others again. */
#define HELD 8u

extern "C" __global__ void __launch_bounds__(1024) rms_norm(const kvs_norm_params p)
{
    __shared__ float warps[32];
    const kvs_u32 member = threadIdx.x % p.team;
    const kvs_u64 group = (kvs_u64)blockIdx.x * (blockDim.x / p.team) + threadIdx.x / p.team;
    if (group >= p.n_groups) {
        return; /* a whole warp, and a whole block where the team is one */
    }
    const float *x = (const float *)p.x + group * p.group, *weight = (const float *)p.weight;
    float held[HELD], weights[HELD];
#pragma unroll
    for (kvs_u32 i = 0; i < HELD; i++) {
        const kvs_u32 at = member + i * p.team;
        held[i] = at < p.group ? x[at] : 0.0f;
        weights[i] = at < p.group && weight != nullptr ? weight[at] : 1.0f;
    }
    float sum = 0.0f;
#pragma unroll
    for (kvs_u32 i = 0; i < HELD; i++) {
        sum = fmaf(held[i], held[i], sum);
    }
    for (kvs_u32 at = member + HELD * p.team; at < p.group; at += p.team) {
        sum = fmaf(x[at], x[at], sum);
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
        for (kvs_u32 i = 1; i < p.team / 32; i++) {
            sum += warps[i];
        }
    }
    const float factor = 1.0f / sqrtf(sum / (float)p.group + p.eps);
    float *out = (float *)p.out + group * p.group;
#pragma unroll
    for (kvs_u32 i = 0; i < HELD; i++) {
        if (member + i * p.team < p.group) {
            out[member + i * p.team] = held[i] * factor * weights[i];
        }
    }
    for (kvs_u32 at = member + HELD * p.team; at < p.group; at += p.team) {
        const float scaled = x[at] * factor;
        out[at] = weight != nullptr ? scaled * weight[at] : scaled;
    }
}
