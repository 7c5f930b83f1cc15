/* matmul_float.cu: float32 activations times float weights.
 *
 * Kernel matmul_float(kvs_matmul_float_params). Macros: KVS_T0 type of the weights.
 * Grid: (output values / 4 rounded up, of all parts; rows / 8 rounded up). Block: 128, a warp to an output value. No dynamic
 * shared memory.
 * Architecture: 75.
 * Order, for every number of rows: lane l takes values 8l .. 8l+7, then those 256 further on, ...; acc = fma(w, x, acc) rising,
 * then the tree of kvs_warp_sum.
 * Twin: native/backends/cpu/matmul_reference.c, whose sum is one chain.
 */
#include "grid.cuh"
#include "weight_form.h"
#include "weight_math.cuh"
#include "weight_params.h"

#define WARPS 4
#define ROWS 8
#define RUN 8 /* values to a lane at a time */

static __device__ __forceinline__ void load_weights(float (&w)[RUN], const unsigned char *row, unsigned int i)
{
    if (KVS_T0 == KVS_W_F32) {
        const float4 *from = (const float4 *)((const float *)row + i);
        const float4 low = __ldg(from), high = __ldg(from + 1);
        w[0] = low.x, w[1] = low.y, w[2] = low.z, w[3] = low.w;
        w[4] = high.x, w[5] = high.y, w[6] = high.z, w[7] = high.w;
        return;
    }
    const uint4 words = __ldg((const uint4 *)(row + 2 * i));
    const unsigned int word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int v = 0; v < RUN; v++) {
        const unsigned int bits = word[v / 2] >> (16 * (v % 2)) & 0xffffu;
        w[v] = KVS_T0 == KVS_W_F16 ? kvs_f16_to_f32(bits) : kvs_bf16_to_f32(bits);
    }
}

static __device__ __forceinline__ void load_inputs(float (&x)[RUN], const float *row, unsigned int i, unsigned int k, bool is_aligned)
{
    if (is_aligned && i + RUN <= k) {
        const float4 low = *(const float4 *)(row + i), high = *(const float4 *)(row + i + 4);
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
        return;
    }
#pragma unroll
    for (int v = 0; v < RUN; v++) {
        x[v] = i + v < k ? row[i + v] : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) matmul_float(const kvs_matmul_float_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    unsigned int block = blockIdx.x, at = 0;
    while (block >= p.part[at].n_panels) {
        block -= p.part[at++].n_panels;
    }
    const kvs_matmul_part_params &part = p.part[at];
    const unsigned int column = block * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned int first = blockIdx.y * ROWS;
    if (column >= part.n) {
        return;
    }
    unsigned int expert = 0;
    if (p.tile_experts != 0) {
        if (blockIdx.y >= *(const unsigned int *)p.n_tiles_used) {
            return;
        }
        expert = ((const unsigned int *)p.tile_experts)[blockIdx.y];
    }
    const unsigned int n_rows = p.n_rows - first < ROWS ? p.n_rows - first : ROWS;
    const unsigned int value_bytes = KVS_T0 == KVS_W_F32 ? 4 : 2;
    const unsigned char *weights = (const unsigned char *)part.panels +
                                   ((unsigned long long)expert * part.n + column) * p.row_values * value_bytes;
    const float *x = (const float *)p.x + (unsigned long long)first * p.x_stride;
    const bool is_aligned = p.x % 16 == 0 && p.x_stride % 4 == 0;
    float sums[ROWS] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (unsigned int i = lane * RUN; i < p.row_values; i += 32 * RUN) {
        float w[RUN];
        load_weights(w, weights, i);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r < n_rows) {
                float values[RUN];
                load_inputs(values, x + (unsigned long long)r * p.x_stride, i, p.k, is_aligned);
#pragma unroll
                for (int v = 0; v < RUN; v++) {
                    sums[r] = __fmaf_rn(w[v], values[v], sums[r]);
                }
            }
        }
    }
    for (unsigned int r = 0; r < n_rows; r++) {
        float y = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            y = i == r ? sums[i] : y;
        }
        y = kvs_warp_sum(y);
        if (lane == 0) {
            float *out = (float *)part.out + (unsigned long long)(first + r) * part.out_stride + column;
            if (part.scales != 0) {
                y = __fmul_rn(y, ((const float *)part.scales)[p.tile_experts != 0 ? expert : column / part.scale_run]);
            }
            *out = p.epilogue == KVS_STORE_ADD ? __fadd_rn(*out, y) : y;
        }
    }
}
