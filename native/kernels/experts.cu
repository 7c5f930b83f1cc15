/* experts.cu: which experts a row goes to, where their results lie, and their weighted sum.
 *
 * Kernels, each of kvs_experts_params; no macros; architecture 75:
 *   experts_route    grid n_rows, block 32: choices and weights. An expert's logit that is no number counts as the largest; of
 *                    equal ones the lower number comes first. The sum of the softmax: lane l takes experts l, l + 32, ..., then
 *                    the tree of kvs_warp_sum.
 *   experts_place    grid 1, block 1024, at most 1024 experts: slots of each expert side by side from a multiple of 8 on.
 *   experts_combine  grid (n_embd / 256 rounded up, n_rows), block 256: results times weights, added by falling logit.
 * Twin: native/backends/cpu/experts.c.
 */
#include "act_record.h"
#include "weight_math.cuh"
#include "weight_params.h"

#define MAX_EXPERTS 1024
#define MIN_WEIGHT_SUM 6.1e-5f

/* Order of logits, then of falling numbers, in one integer; a zero's sign does not count. Never 0. */
static __device__ unsigned long long sort_key(float logit, unsigned int expert)
{
    const unsigned int bits = __float_as_uint(__fadd_rn(logit, 0.0f));
    unsigned int order = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
    if ((bits & 0x7fffffffu) > KVS_INFINITY_BITS) {
        order = 0xfffffffeu;
    }
    return (unsigned long long)order << 32 | (0xffffffffu - expert);
}

static __device__ unsigned long long warp_largest(unsigned long long key)
{
    for (int width = 16; width != 0; width /= 2) {
        const unsigned long long other = __shfl_xor_sync(KVS_FULL_WARP, key, width);
        key = other > key ? other : key;
    }
    return key;
}

extern "C" __global__ void __launch_bounds__(32) experts_route(const kvs_experts_params p)
{
    const unsigned int lane = threadIdx.x;
    const float *logits = (const float *)p.router + (unsigned long long)blockIdx.x * p.n_experts;
    unsigned int *choices = (unsigned int *)p.choices + (unsigned long long)blockIdx.x * p.n_chosen;
    float *weights = (float *)p.weights + (unsigned long long)blockIdx.x * p.n_chosen;
    unsigned long long before = ~0ull;
    float largest = 0.0f, all = 0.0f, sum = 0.0f;
    for (unsigned int i = 0; i < p.n_chosen; i++) {
        unsigned long long best = 0;
        for (unsigned int expert = lane; expert < p.n_experts; expert += 32) {
            const unsigned long long key = sort_key(logits[expert], expert);
            best = key < before && key > best ? key : best;
        }
        before = warp_largest(best);
        const unsigned int chosen = 0xffffffffu - (unsigned int)before;
        if (i == 0) {
            largest = logits[chosen];
            for (unsigned int expert = lane; expert < p.n_experts; expert += 32) {
                all = __fadd_rn(all, kvs_exp(__fsub_rn(logits[expert], largest)));
            }
            all = kvs_warp_sum(all);
        }
        const float weight = __fdiv_rn(kvs_exp(__fsub_rn(logits[chosen], largest)), all);
        sum = __fadd_rn(sum, weight);
        if (lane == 0) {
            choices[i] = chosen;
            weights[i] = weight;
        }
    }
    const float divisor = sum < MIN_WEIGHT_SUM ? MIN_WEIGHT_SUM : sum;
    __syncwarp();
    for (unsigned int i = lane; i < p.n_chosen; i += 32) {
        weights[i] = __fmul_rn(__fdiv_rn(weights[i], divisor), p.factor);
    }
}

/* Tiles of the experts before this thread's. */
static __device__ unsigned int tiles_before(unsigned int n_tiles, unsigned int *room)
{
    room[threadIdx.x] = n_tiles;
    __syncthreads();
    for (unsigned int width = 1; width < MAX_EXPERTS; width *= 2) {
        const unsigned int more = threadIdx.x >= width ? room[threadIdx.x - width] : 0;
        __syncthreads();
        room[threadIdx.x] += more;
        __syncthreads();
    }
    return room[threadIdx.x] - n_tiles;
}

extern "C" __global__ void __launch_bounds__(MAX_EXPERTS) experts_place(const kvs_experts_params p)
{
    __shared__ unsigned int room[MAX_EXPERTS];
    const unsigned int expert = threadIdx.x, n_pairs = p.n_rows * p.n_chosen;
    const unsigned int *choices = (const unsigned int *)p.choices;
    unsigned int *slot_rows = (unsigned int *)p.slot_rows;
    unsigned int n_slots = 0;
    for (unsigned int pair = 0; pair < n_pairs; pair++) {
        n_slots += choices[pair] == expert;
    }
    const unsigned int n_tiles = (n_slots + KVS_ACT_TILE - 1) / KVS_ACT_TILE;
    const unsigned int first_tile = tiles_before(n_tiles, room);
    for (unsigned int tile = 0; tile < n_tiles; tile++) {
        ((unsigned int *)p.tile_experts)[first_tile + tile] = expert;
    }
    unsigned int slot = first_tile * KVS_ACT_TILE;
    for (unsigned int pair = 0; n_slots != 0 && pair < n_pairs; pair++) {
        if (choices[pair] == expert) {
            ((unsigned int *)p.slots)[pair] = slot;
            slot_rows[slot++] = pair / p.n_chosen;
        }
    }
    for (; slot < (first_tile + n_tiles) * KVS_ACT_TILE; slot++) {
        slot_rows[slot] = KVS_NO_SLOT;
    }
    if (expert == MAX_EXPERTS - 1) {
        ((unsigned int *)p.n_used)[0] = (first_tile + n_tiles) * KVS_ACT_TILE;
        ((unsigned int *)p.n_used)[1] = first_tile + n_tiles;
    }
}

extern "C" __global__ void __launch_bounds__(256) experts_combine(const kvs_experts_params p)
{
    const unsigned int column = blockIdx.x * 256 + threadIdx.x;
    if (column >= p.n_embd) {
        return;
    }
    const unsigned long long first = (unsigned long long)blockIdx.y * p.n_chosen;
    float sum = 0.0f;
    for (unsigned int i = 0; i < p.n_chosen; i++) {
        const unsigned int slot = ((const unsigned int *)p.slots)[first + i];
        const float result = ((const float *)p.results)[(unsigned long long)slot * p.n_embd + column];
        const float term = __fmul_rn(((const float *)p.weights)[first + i], result);
        sum = i == 0 ? term : __fadd_rn(sum, term);
    }
    ((float *)p.out)[(unsigned long long)blockIdx.y * p.n_embd + column] = sum;
}
