/* act_tile.cu: rows of activations, normed if so wished, as bfloat16 in the atoms of tile_record.h.
 *
 * Kernel act_tile(kvs_act_params); `records` are atoms, n_groups is of 32 values and even. No macros.
 * Grid: n_slots. Block: 1024. No dynamic shared memory. Architecture: 75.
 * Order: the sum of squares is one chain of fused multiply-adds a thread, k rising by 1024, then the tree of kvs_warp_sum, then warps in
 * order, as in act_quantize.cu.
 * Twin: none; matmul_tile.cu says what products of such values may differ by.
 */
#include "tile_record.h"
#include "weight_math.cuh"
#include "weight_params.h"

#define THREADS 1024

static __device__ float norm_factor(const kvs_act_params &p, const float *x)
{
    __shared__ float room[THREADS / 32];
    float sum = 0.0f;
    for (unsigned int i = threadIdx.x; i < p.k; i += THREADS) {
        sum = __fmaf_rn(x[i], x[i], sum);
    }
    const float mean = __fdiv_rn(kvs_block_sum(sum, room), (float)p.k);
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, p.eps)));
}

/* Where value i of a slot lies in its atoms, in values. */
static __device__ unsigned long long place_of(unsigned int i, unsigned int slot, unsigned int n_atoms)
{
    const unsigned int in_block = i % KVS_TILE_VALUES, in_step = in_block % 16;
    const unsigned int position = in_step / 4 * 2 + in_step % 4 / 2 * 8 + in_step % 2;
    const unsigned int piece = (in_block / 16 * 2 + position / 8) ^ (slot % KVS_TILE_SLOTS);
    const unsigned long long atom = (unsigned long long)(i / KVS_TILE_VALUES) * n_atoms + slot / KVS_TILE_SLOTS;
    return atom * (KVS_TILE_ATOM_BYTES / 2) + slot % KVS_TILE_SLOTS * KVS_TILE_VALUES + piece * 8 + position % 8;
}

extern "C" __global__ void __launch_bounds__(THREADS) act_tile(const kvs_act_params p)
{
    const unsigned int slot = blockIdx.x, n_atoms = (p.n_slots + KVS_TILE_SLOTS - 1) / KVS_TILE_SLOTS;
    const float *x = (const float *)p.x + (unsigned long long)slot * p.x_stride;
    const float *norm = (const float *)p.norm;
    float *normed = (float *)p.normed + (unsigned long long)slot * p.k;
    kvs_u16 *atoms = (kvs_u16 *)p.records;
    const float factor = norm != 0 ? norm_factor(p, x) : 1.0f;
    for (unsigned int i = threadIdx.x; i < p.n_groups * 32; i += THREADS) {
        float value = i < p.k ? x[i] : 0.0f;
        if (norm != 0 && i < p.k) {
            value = __fmul_rn(__fmul_rn(value, factor), norm[i]);
        }
        if (p.normed != 0 && i < p.k) {
            normed[i] = value;
        }
        if (atoms != 0) {
            atoms[place_of(i, slot, n_atoms)] = kvs_f32_to_bf16(value);
        }
    }
}
