/* turn.cu: what stands between a projection and attention: norm of each head, rotation by the table, Walsh-Hadamard rotation.
 *
 * Kernel: turn. Argument: kvs_turn_params. Architecture: sm_75. Macros: KVS_HEAD, values of a head, a multiple of 32 up to 512;
 * KVS_BLOCK, values of a Walsh-Hadamard block, a power of two from 32 that divides the head, or 0. Grid (rows * heads of all parts / 8,
 * rounded up), block 256: a warp turns a head. Heads are numbered part after part, and row after row within one.
 *
 * Order: that of norm.cu, rope.cu and hadamard.cu one after another.
 */
#include "attend_params.h"
#include "grid.cuh"
#include "hadamard.cuh"
#include "numeric.cuh"

#define HEADS 8 /* of a block */
#define PER_LANE (KVS_HEAD / 32u)
#define BLOCK_LANE (KVS_BLOCK == 0 ? 1u : KVS_BLOCK / 32u)

/* The head's values into `room`. */
static __device__ void norm_head(const float *weight, float eps, const float *values, kvs_u32 lane, float *room)
{
    float x[PER_LANE], sum = 0.0f;
#pragma unroll
    for (kvs_u32 i = 0; i < PER_LANE; i++) {
        x[i] = values[i * 32 + lane];
        sum = fmaf(x[i], x[i], sum);
    }
    for (kvs_u32 distance = 16; distance != 0; distance /= 2) {
        sum += __shfl_xor_sync(KVS_FULL_WARP, sum, distance);
    }
    const float factor = 1.0f / sqrtf(sum / (float)KVS_HEAD + eps);
#pragma unroll
    for (kvs_u32 i = 0; i < PER_LANE; i++) {
        room[i * 32 + lane] = weight == nullptr ? x[i] : x[i] * factor * weight[i * 32 + lane];
    }
}

static __device__ void rotate_head(const kvs_turn_params *p, kvs_u32 row, kvs_u32 lane, float *room)
{
    const kvs_u32 n_pairs = p->n_rotary / 2;
    for (kvs_u32 pair = lane; pair < n_pairs; pair += 32) {
        const float *turn = (const float *)p->table + ((kvs_u64)row * n_pairs + pair) * 2;
        float *first = room + (p->is_halves ? pair : 2 * pair), *second = first + (p->is_halves ? n_pairs : 1);
        const float a = *first, b = *second, cosine = turn[0], sine = turn[1];
        *first = fmaf(a, cosine, -(b * sine));
        *second = fmaf(a, sine, b * cosine);
    }
}

static __device__ void store_head(const kvs_turn_params *p, const float *room, kvs_u32 lane, float *values)
{
    if (KVS_BLOCK == 0) {
#pragma unroll
        for (kvs_u32 i = 0; i < PER_LANE; i++) {
            values[i * 32 + lane] = room[i * 32 + lane];
        }
        return;
    }
#pragma unroll
    for (kvs_u32 first = 0; first < PER_LANE; first += BLOCK_LANE) {
        float x[BLOCK_LANE];
#pragma unroll
        for (kvs_u32 i = 0; i < BLOCK_LANE; i++) {
            x[i] = room[(first + i) * 32 + lane];
        }
        kvs_hadamard<BLOCK_LANE>(x, lane);
#pragma unroll
        for (kvs_u32 i = 0; i < BLOCK_LANE; i++) {
            values[(first + i) * 32 + lane] = x[i] * p->scale;
        }
    }
}

extern "C" __global__ void __launch_bounds__(HEADS * 32) turn(const kvs_turn_params p)
{
    __shared__ float rooms[HEADS][KVS_HEAD];
    kvs_let_next_begin();
    kvs_wait_for_previous();
    kvs_u64 head = (kvs_u64)blockIdx.x * HEADS + threadIdx.x / 32;
    const kvs_u32 lane = threadIdx.x % 32;
    kvs_turn_part part = p.parts[0];
#pragma unroll
    for (kvs_u32 i = 1; i < KVS_CUDA_TURN_PARTS; i++) {
        const kvs_u64 before = (kvs_u64)p.n_rows * part.n_heads;
        if (head >= before) {
            head -= before;
            part = p.parts[i];
        }
    }
    if (head >= (kvs_u64)p.n_rows * part.n_heads) {
        return; /* a whole warp */
    }
    float *values = (float *)part.values + head * KVS_HEAD, *room = rooms[threadIdx.x / 32];
    norm_head((const float *)part.weight, p.eps, values, lane, room);
    __syncwarp();
    if (part.is_rotated) {
        rotate_head(&p, (kvs_u32)(head / part.n_heads), lane, room);
    }
    __syncwarp();
    store_head(&p, room, lane, values);
}
