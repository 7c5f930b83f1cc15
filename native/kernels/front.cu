/* front.cu: of rows of logits what a sampler looks at: the best columns, and the sum of exponentials.
 *
 * Kernels, each of kvs_front_params; no macros; architecture 75:
 *   front_chunk  grid (chunks, rows), block 256: the best columns of a chunk, its sum, its first column that is no logit.
 *   front_merge  grid (rows), block 512: those of the row.
 *
 * A column is a key: the order of its value (of zeros the sign does not count), then of its falling number, so that no two are
 * equal, and that of nothing is 0. The n_best-th largest of what is each thread's best key is a bound that at least n_best keys
 * reach, and that none of the keys of other threads do: at most n_best times 32 are left to sort, of random logits some 200.
 *
 * Order: thread j of a chunk is lane j: it adds the exponentials of columns j, j + 256, ... in float64; lanes fold 128, 64, ... 1;
 * chunks add up in order, each times the exponential of its largest less that of the row.
 * Twin: native/backends/cpu/front.c, with the same bits for the same logits.
 */
#include "front_params.h"
#include "grid.cuh"
#include "numeric.cuh"

/* Keys of a thread, of a chunk and of all chunks of a row alike. */
#define KEYS 32
#define LANES KVS_CARD_FRONT_LANES
#define MERGERS KVS_CARD_FRONT_MERGERS
#define MINUS_INFINITY_BITS 0xff800000u
#define ROOM (KVS_CARD_FRONT_BEST * KEYS)

/* Rises with the value; 0 for minus infinity, of which nothing is chosen. */
static __device__ kvs_u32 order_of(float x)
{
    const kvs_u32 bits = __float_as_uint(__fadd_rn(x, 0.0f)); /* -0 becomes +0 */
    const kvs_u32 order = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
    return x > __uint_as_float(MINUS_INFINITY_BITS) ? order : 0;
}

static __device__ float value_of(kvs_u32 order)
{
    return __uint_as_float(order >> 31 != 0 ? order & 0x7fffffffu : ~order);
}

static __device__ kvs_u64 key_of(kvs_u32 order, kvs_u32 column)
{
    return order != 0 ? (kvs_u64)order << 32 | (0xffffffffu - column) : 0;
}

static __device__ kvs_u32 column_of(kvs_u64 key)
{
    return 0xffffffffu - (kvs_u32)key;
}

/* The largest first; n is a power of two. All threads of the block see what all have written before, and the result. */
static __device__ void sort_keys(kvs_u64 *room, kvs_u32 n)
{
    for (kvs_u32 size = 2; size <= n; size *= 2) {
        for (kvs_u32 stride = size / 2; stride != 0; stride /= 2) {
            __syncthreads();
            for (kvs_u32 pair = threadIdx.x; pair < n / 2; pair += blockDim.x) {
                const kvs_u32 i = 2 * pair - (pair & (stride - 1)), j = i + stride;
                const kvs_u64 a = room[i], b = room[j];
                if ((a < b) == ((i & size) == 0)) {
                    room[i] = b;
                    room[j] = a;
                }
            }
        }
    }
    __syncthreads();
}

/* The n_best largest keys of the block, the largest first in the room; returns how many there are. `key(i)`: the thread's. */
template <class Key>
static __device__ __forceinline__ kvs_u32 keep_best(Key key, kvs_u32 n_best, kvs_u64 *room, kvs_u32 *n_kept)
{
    kvs_u64 largest = 0;
#pragma unroll
    for (kvs_u32 i = 0; i < KEYS; i++) {
        largest = key(i) > largest ? key(i) : largest;
    }
    room[threadIdx.x] = largest;
    if (threadIdx.x == 0) {
        *n_kept = 0;
    }
    sort_keys(room, blockDim.x);
    /* Of fewer threads than n_best that have a key, all keys. */
    const kvs_u64 bound = room[n_best - 1] != 0 ? room[n_best - 1] : 1;
    __syncthreads();
    kvs_u32 n_mine = 0;
#pragma unroll
    for (kvs_u32 i = 0; i < KEYS; i++) {
        n_mine += key(i) >= bound;
    }
    if (n_mine != 0) {
        kvs_u32 at = atomicAdd(n_kept, n_mine);
#pragma unroll
        for (kvs_u32 i = 0; i < KEYS; i++) {
            if (key(i) >= bound) {
                room[at++] = key(i);
            }
        }
    }
    __syncthreads();
    const kvs_u32 n = *n_kept;
    kvs_u32 size = 1;
    while (size < n) {
        size *= 2;
    }
    for (kvs_u32 i = n + threadIdx.x; i < size; i += blockDim.x) {
        room[i] = 0;
    }
    sort_keys(room, size);
    return n < n_best ? n : n_best;
}

static __device__ kvs_u32 warp_least(kvs_u32 x)
{
    for (kvs_u32 distance = 16; distance != 0; distance /= 2) {
        const kvs_u32 other = __shfl_xor_sync(KVS_FULL_WARP, x, distance);
        x = other < x ? other : x;
    }
    return x;
}

static __device__ float warp_largest(float x)
{
    for (kvs_u32 distance = 16; distance != 0; distance /= 2) {
        const float other = __shfl_xor_sync(KVS_FULL_WARP, x, distance);
        x = other > x ? other : x;
    }
    return x;
}

extern "C" __global__ void __launch_bounds__(LANES, 2) front_chunk(const kvs_front_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    __shared__ kvs_u64 room[ROOM];
    __shared__ double lanes[LANES];
    __shared__ kvs_u32 n_kept;
    __shared__ kvs_u32 bads[LANES / 32];
    const kvs_u32 lane = threadIdx.x;
    const kvs_u32 first = blockIdx.x * KVS_CARD_FRONT_CHUNK + lane;
    const kvs_u64 at = (kvs_u64)blockIdx.y * p.n_chunks + blockIdx.x;
    const float *row = (const float *)p.rows + (kvs_u64)blockIdx.y * p.n_cols;
    kvs_u32 orders[KEYS];
    kvs_u32 bad = KVS_NO_COLUMN;
#pragma unroll
    for (kvs_u32 i = 0; i < KEYS; i++) {
        const kvs_u32 column = first + i * LANES;
        const float x = column < p.n_cols ? row[column] : __uint_as_float(MINUS_INFINITY_BITS);
        if (!(x < __uint_as_float(KVS_INFINITY_BITS))) {
            bad = column < bad ? column : bad;
        }
        orders[i] = column < p.n_tokens ? order_of(x) : 0;
    }
    bad = warp_least(bad);
    if (lane % 32 == 0) {
        bads[lane / 32] = bad;
    }
    const auto key = [&](kvs_u32 i) { return key_of(orders[i], first + i * LANES); };
    const kvs_u32 n = keep_best(key, p.n_best, room, &n_kept);
    if (lane < p.n_best) {
        ((kvs_u64 *)p.keys)[at * p.n_best + lane] = lane < n ? room[lane] : 0;
    }
    const float largest = n != 0 ? value_of((kvs_u32)(room[0] >> 32)) : __uint_as_float(MINUS_INFINITY_BITS);
    double sum = 0.0;
#pragma unroll
    for (kvs_u32 i = 0; i < KEYS; i++) {
        /* Minus infinity has no key, and adds nothing. */
        if (orders[i] != 0) {
            sum += (double)kvs_exp(value_of(orders[i]) - largest);
        }
    }
    lanes[lane] = sum;
    __syncthreads();
    for (kvs_u32 half = LANES / 2; half != 0; half /= 2) {
        if (lane < half) {
            lanes[lane] += lanes[lane + half];
        }
        __syncthreads();
    }
    if (lane == 0) {
        for (kvs_u32 i = 1; i < LANES / 32; i++) {
            bad = bads[i] < bad ? bads[i] : bad;
        }
        kvs_front_part *part = (kvs_front_part *)p.parts + at;
        part->sum = lanes[0];
        part->largest = largest;
        part->bad = bad;
    }
}

/* By the first warp: the first column of a row that is no logit, and the sum of all chunks. `room`: a number to a chunk. */
static __device__ kvs_u32 merge_parts(const kvs_front_params &p, kvs_u32 row, double *room, double *total)
{
    const kvs_front_part *parts = (const kvs_front_part *)p.parts + (kvs_u64)row * p.n_chunks;
    float peak = __uint_as_float(MINUS_INFINITY_BITS);
    kvs_u32 bad = KVS_NO_COLUMN;
    for (kvs_u32 i = threadIdx.x; i < p.n_chunks; i += 32) {
        peak = parts[i].largest > peak ? parts[i].largest : peak;
        bad = parts[i].bad < bad ? parts[i].bad : bad;
    }
    peak = warp_largest(peak);
    bad = warp_least(bad);
    for (kvs_u32 i = threadIdx.x; i < p.n_chunks; i += 32) {
        const kvs_front_part part = parts[i];
        room[i] = part.sum != 0.0 ? part.sum * (double)kvs_exp(part.largest - peak) : 0.0;
    }
    __syncwarp();
    double sum = 0.0;
    for (kvs_u32 i = 0; i < p.n_chunks; i++) {
        sum += room[i];
    }
    *total = sum;
    return bad;
}

extern "C" __global__ void __launch_bounds__(MERGERS) front_merge(const kvs_front_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    __shared__ kvs_u64 room[ROOM];
    __shared__ double weighed[KVS_CARD_FRONT_CHUNKS];
    __shared__ double total;
    __shared__ kvs_u32 n_kept, bad;
    const kvs_u32 row = blockIdx.x, n_keys = p.n_chunks * p.n_best;
    const kvs_u64 *from = (const kvs_u64 *)p.keys + (kvs_u64)row * n_keys;
    kvs_u64 keys[KEYS];
#pragma unroll
    for (kvs_u32 i = 0; i < KEYS; i++) {
        const kvs_u32 at = i * MERGERS + threadIdx.x;
        keys[i] = at < n_keys ? from[at] : 0;
    }
    if (threadIdx.x < 32) {
        double sum;
        const kvs_u32 found = merge_parts(p, row, weighed, &sum);
        if (threadIdx.x == 0) {
            bad = found;
            total = sum;
        }
    }
    const kvs_u32 n = keep_best([&](kvs_u32 i) { return keys[i]; }, p.n_best, room, &n_kept);
    const float *logits = (const float *)p.rows + (kvs_u64)row * p.n_cols;
    kvs_u32 *out = (kvs_u32 *)p.out + (kvs_u64)row * (2 * p.n_best + KVS_CARD_FRONT_TAIL);
    const bool is_whole = bad == KVS_NO_COLUMN;
    if (threadIdx.x < p.n_best) {
        const bool is_found = is_whole && threadIdx.x < n;
        const kvs_u32 column = is_found ? column_of(room[threadIdx.x]) : 0;
        const kvs_u32 shown = is_whole ? column : bad;
        /* The value as it lies there: a zero has its sign. */
        const bool has_value = is_found || (!is_whole && threadIdx.x == 0);
        out[threadIdx.x] = column;
        out[p.n_best + threadIdx.x] = has_value ? __float_as_uint(logits[shown]) : 0;
    }
    if (threadIdx.x == 0) {
        const kvs_u64 bits = is_whole ? (kvs_u64)__double_as_longlong(total) : 0;
        kvs_u32 *tail = out + 2 * p.n_best;
        tail[0] = is_whole ? n : 0;
        tail[1] = bad;
        tail[2] = (kvs_u32)bits;
        tail[3] = (kvs_u32)(bits >> 32);
    }
}
