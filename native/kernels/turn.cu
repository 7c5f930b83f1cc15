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
#define PAIRS_PER_LANE ((PER_LANE + 1u) / 2u) /* at most */
#define BLOCK_LANE (KVS_BLOCK == 0 ? 1u : KVS_BLOCK / 32u)

/* Of the weights of the norm, what a lane multiplies by; they may be read before the kernel ahead has ended. */
static __device__ void load_weights(const float *weight, kvs_u32 lane, float (&weights)[PER_LANE])
{
#pragma unroll
    for (kvs_u32 i = 0; i < PER_LANE; i++) {
        weights[i] = weight == nullptr ? 0.0f : weight[i * 32 + lane];
    }
}

/* Cosine and sine of a lane's pairs. */
static __device__ void load_turns(const kvs_turn_params *p, kvs_u32 row, kvs_u32 lane, float2 (&turns)[PAIRS_PER_LANE])
{
    const kvs_u32 n_pairs = p->n_rotary / 2;
#pragma unroll
    for (kvs_u32 i = 0; i < PAIRS_PER_LANE; i++) {
        if (i * 32 + lane < n_pairs) {
            turns[i] = ((const float2 *)p->table)[(kvs_u64)row * n_pairs + i * 32 + lane];
        }
    }
}

/* The head's values into `room`. */
static __device__ void norm_head(const kvs_turn_params *p, const float (&x)[PER_LANE], bool has_norm, const float (&weights)[PER_LANE],
                                 kvs_u32 lane, float *room)
{
    float sum = 0.0f;
#pragma unroll
    for (kvs_u32 i = 0; i < PER_LANE; i++) {
        sum = fmaf(x[i], x[i], sum);
    }
    for (kvs_u32 distance = 16; distance != 0; distance /= 2) {
        sum += __shfl_xor_sync(KVS_FULL_WARP, sum, distance);
    }
    const float factor = 1.0f / sqrtf(sum / (float)KVS_HEAD + p->eps);
#pragma unroll
    for (kvs_u32 i = 0; i < PER_LANE; i++) {
        room[i * 32 + lane] = has_norm ? x[i] * factor * weights[i] : x[i];
    }
}

static __device__ void rotate_head(const kvs_turn_params *p, const float2 (&turns)[PAIRS_PER_LANE], kvs_u32 lane, float *room)
{
    const kvs_u32 n_pairs = p->n_rotary / 2;
#pragma unroll
    for (kvs_u32 i = 0; i < PAIRS_PER_LANE; i++) {
        const kvs_u32 pair = i * 32 + lane;
        if (pair < n_pairs) {
            float *first = room + (p->is_halves ? pair : 2 * pair), *second = first + (p->is_halves ? n_pairs : 1);
            const float a = *first, b = *second, cosine = turns[i].x, sine = turns[i].y;
            *first = fmaf(a, cosine, -(b * sine));
            *second = fmaf(a, sine, b * cosine);
        }
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

/* Which part the warp's head belongs to, and its number there, at least that of all heads where there is none. */
static __device__ kvs_turn_part part_of_warp(const kvs_turn_params *p, kvs_u64 *head)
{
    kvs_turn_part part = p->parts[0];
    *head = (kvs_u64)blockIdx.x * HEADS + threadIdx.x / 32;
#pragma unroll
    for (kvs_u32 i = 1; i < KVS_CUDA_TURN_PARTS; i++) {
        const kvs_u64 before = (kvs_u64)p->n_rows * part.n_heads;
        if (*head >= before) {
            *head -= before;
            part = p->parts[i];
        }
    }
    return part;
}

/* All that a head reads is asked for before any of it is used. */
extern "C" __global__ void __launch_bounds__(HEADS * 32) turn(const kvs_turn_params p)
{
    __shared__ float rooms[HEADS][KVS_HEAD];
    kvs_let_next_begin();
    kvs_u64 head;
    const kvs_turn_part part = part_of_warp(&p, &head);
    const kvs_u32 lane = threadIdx.x % 32;
    float weights[PER_LANE];
    load_weights((const float *)part.weight, lane, weights);
    kvs_wait_for_previous();
    if (head >= (kvs_u64)p.n_rows * part.n_heads) {
        return; /* a whole warp */
    }
    float *values = (float *)part.values + head * KVS_HEAD, *room = rooms[threadIdx.x / 32];
    float x[PER_LANE];
    float2 turns[PAIRS_PER_LANE] = {};
#pragma unroll
    for (kvs_u32 i = 0; i < PER_LANE; i++) {
        x[i] = values[i * 32 + lane];
    }
    if (part.is_rotated) {
        load_turns(&p, (kvs_u32)(head / part.n_heads), lane, turns);
    }
    norm_head(&p, x, part.weight != 0, weights, lane, room);
    __syncwarp();
    if (part.is_rotated) {
        rotate_head(&p, turns, lane, room);
    }
    __syncwarp();
    store_head(&p, room, lane, values);
}
