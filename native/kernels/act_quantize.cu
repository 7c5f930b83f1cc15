/* act_quantize.cu: rows of activations, normed and gated if so wished, as 8-bit codes with one scale to 32 values.
 *
 * Kernel act_quantize(kvs_act_params). No macros.
 * Grid: (n_slots, values / 1024 rounded up); each block of a row forms its norm anew. Block: 1024. No dynamic shared memory. Architecture: 75.
 * Order: the sum of squares of a row is one chain of fused multiply-adds a thread, k rising by 1024, then the tree of
 * kvs_warp_sum, and that tree over the warps; of a group, as in norm.cu, a chain a lane, k rising by 32, then the tree. A gate
 * multiplies behind the norm, as in glu.cu. Scale: largest magnitude / 127; code: round to nearest even (x * (127 / largest)); a group below 1e-30 counts
 * as zeros; one with a value that is no number has a NaN for its scale.
 * Twin: native/backends/cpu/act.c.
 */
#include "act_record.h"
#include "act_values.cuh"
#include "grid.cuh"
#include "weight_math.cuh"
#include "weight_params.h"

#define THREADS KVS_ACT_THREADS

/* One group by one warp, a value to a lane. */
static __device__ void quantize_group(float x, unsigned int slot, unsigned char *record)
{
    const unsigned int lane = threadIdx.x % 32;
    unsigned int largest = __float_as_uint(x) & 0x7fffffffu; /* magnitudes order as their bits do, NaNs on top */
    for (int width = 16; width != 0; width /= 2) {
        const unsigned int other = __shfl_xor_sync(KVS_FULL_WARP, largest, width);
        largest = other > largest ? other : largest;
    }
    const float amax = __uint_as_float(largest);
    float d = 0.0f, inverse = 0.0f;
    if (largest >= KVS_INFINITY_BITS) {
        d = __uint_as_float(0x7fc00000u);
    } else if (amax >= 1e-30f) {
        d = __fdiv_rn(amax, 127.0f);
        inverse = __fdiv_rn(127.0f, amax);
    }
    const int code = inverse != 0.0f ? __float2int_rn(__fmul_rn(x, inverse)) : 0;
    int count = code;
    for (int width = 8; width != 0; width /= 2) {
        count += __shfl_xor_sync(KVS_FULL_WARP, count, width);
    }
    const int low = __shfl_sync(KVS_FULL_WARP, count, 0);
    const int high = __shfl_sync(KVS_FULL_WARP, count, 16);
    record[(slot * 4 + lane % 16 / 4) * 8 + lane / 16 * 4 + lane % 4] = (unsigned char)code;
    const unsigned int at = slot / 2 * 4 + slot % 2;
    if (lane == 0) {
        ((float *)(record + KVS_ACT_WHOLE_AT))[at] = d;
        ((int *)(record + KVS_ACT_WHOLE_AT))[at + 2] = low + high;
        ((int *)(record + KVS_ACT_HALVES_AT))[at] = low;
        ((int *)(record + KVS_ACT_HALVES_AT))[at + 2] = high;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) act_quantize(const kvs_act_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    const unsigned int slot = blockIdx.x;
    if (p.n_slots_used != 0 && slot >= *(const unsigned int *)p.n_slots_used) {
        return;
    }
    const unsigned int row = p.slot_rows != 0 ? ((const unsigned int *)p.slot_rows)[slot] : slot;
    if (row == KVS_NO_SLOT) {
        return;
    }
    const float *x = (const float *)p.x + (unsigned long long)row * p.x_stride;
    const float *gate = p.gate != 0 ? (const float *)p.gate + (unsigned long long)row * p.x_stride : 0;
    float *normed = (float *)p.normed + (unsigned long long)slot * p.k;
    const float factor = p.norm == 0 ? 1.0f : p.group != 0 ? group_factor(p, x, blockIdx.y * THREADS) : row_factor(p, x);
    unsigned char *tile = (unsigned char *)p.records +
                          (unsigned long long)(slot / KVS_ACT_TILE) * p.n_groups * KVS_ACT_RECORD_BYTES;
    const unsigned int i = blockIdx.y * THREADS + threadIdx.x;
    if (i >= p.n_groups * 32) {
        return;
    }
    const float value = i < p.k ? value_of(p, x, gate, factor, i) : 0.0f;
    if (p.normed != 0 && i < p.k) {
        normed[i] = value;
    }
    if (p.records != 0) {
        quantize_group(value, slot % KVS_ACT_TILE, tile + (unsigned long long)(i / 32) * KVS_ACT_RECORD_BYTES);
    }
}
