/* attend_tile.cu: attention of a prompt's rows: 128 queries share decoded tokens, products of halves by warpgroups.
 *
 * Kernels: attend_leaf, then attend_fold. Argument: kvs_attend_params, is_grouped always. Architecture: sm_90a alone.
 * Macros: KVS_TYPE_K, KVS_TYPE_V (not F32 or BF16), KVS_DIM_K (a multiple of 64, at most 256), KVS_DIM_V (64, 128, 256).
 * attend_leaf: grid (tiles of 128 queries, KV heads, groups), block 256, dynamic shared memory
 * 384 * KVS_DIM_K + 128 * KVS_DIM_V + 1,024 bytes.
 *
 * Order. Queries are halves times a power of two, K and V are scale * code (+ minimum) rounded to halves. A group of 8 pages is one
 * chain of steps of 64 tokens: scores K q^T, 16 values at a time; the running maximum; weights, rounded to halves for V but not for
 * their sum, which adds a lane's tokens in order, then lanes in a tree; what was there before decays. Groups fold as in attend.cu. So
 * a row's bits depend on no cut, no tile and no neighbour.
 * A step that some query sees in part takes broken values of V as zeros and marks their tokens: who sees one gets a weight that is
 * no number, who does not would get zero times a broken value.
 * Twin: attend.cu, attend_mma.cu: rows differ by what rounding queries, K, V and weights to halves costs.
 */
#include "attend_parts.cuh"
#include "mma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "wgmma.cuh"

#define TILE_QUERIES 128u
#define STEP 64u /* tokens */
#define GROUP_QUERIES 64u
#define ATOM_BYTES 1024u
#define PLANE_BYTES (8u * ATOM_BYTES) /* 64 tokens or queries by 64 values */
#define LOG2_E 1.44269504f
#define MINUS_INFINITY __uint_as_float(0xff800000u)

extern __shared__ uint4 dynamic_shared[];

struct shared_state {
    float factors[TILE_QUERIES];  /* what a product with the query is multiplied by to be a score */
    float inverses[TILE_QUERIES]; /* powers of two that bring the largest value of a query to [1, 2) */
    kvs_u32 is_broken[STEP];
};

/* What a warp's lane knows of its two queries. */
struct lane_state {
    float m[2];
    float s[2];
    float factor[2];
    kvs_u32 n_visible[2]; /* tokens from the run's first on */
};

typedef float sums_t[KVS_DIM_V / 8][4];
typedef float scores_t[STEP / 8][4];

static __device__ __forceinline__ kvs_u32 queries_at()
{
    return (kvs_shared_address(dynamic_shared) + ATOM_BYTES - 1) / ATOM_BYTES * ATOM_BYTES;
}

static __device__ __forceinline__ kvs_u32 keys_at()
{
    return queries_at() + TILE_QUERIES * KVS_DIM_K * 2;
}

static __device__ __forceinline__ kvs_u32 values_at()
{
    return keys_at() + STEP * KVS_DIM_K * 2;
}

/* Eight halves of a row into planes of 64 values. */
static __device__ __forceinline__ void store_piece(kvs_u32 planes, kvs_u32 row, kvs_u32 piece, const uint4 &halves)
{
    const kvs_u32 at = planes + piece / 8 * PLANE_BYTES + row / 8 * ATOM_BYTES + row % 8 * 128 + (piece % 8 ^ row % 8) * 16;
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(halves.x), "r"(halves.y), "r"(halves.z), "r"(halves.w)
                 : "memory");
}

/* A warp to a query: its largest value, then its halves. */
static __device__ void load_queries(const kvs_attend_params *p, const tile_view *tile, shared_state *s)
{
    const kvs_u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (kvs_u32 i = warp; i < TILE_QUERIES; i += N_WARPS) {
        kvs_u32 largest = 0;
        for (kvs_u32 d = lane; d < KVS_DIM_K && i < tile->n; d += 32) {
            const kvs_u32 bits = __float_as_uint(query_values(p, tile, i)[d]) & 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
        for (kvs_u32 distance = 16; distance != 0; distance /= 2) {
            const kvs_u32 other = __shfl_xor_sync(KVS_FULL_WARP, largest, distance);
            largest = other > largest ? other : largest;
        }
        const kvs_u32 exponent = largest >> 23;
        const bool is_scaled = exponent > 0 && exponent < 254;
        const float inverse = is_scaled ? __uint_as_float((254 - exponent) << 23) : 1.0f;
        if (lane == 0) {
            s->factors[i] = p->scale * (is_scaled ? __uint_as_float(exponent << 23) : 1.0f);
        }
        for (kvs_u32 piece = lane; piece < KVS_DIM_K / 8; piece += 32) {
            float x[8] = {};
            for (kvs_u32 j = 0; j < 8 && i < tile->n; j++) {
                x[j] = query_values(p, tile, i)[8 * piece + j] * inverse;
            }
            const uint4 halves = {kvs_pack_halves(x[0], x[1]), kvs_pack_halves(x[2], x[3]), kvs_pack_halves(x[4], x[5]),
                                  kvs_pack_halves(x[6], x[7])};
            store_piece(queries_at() + i / GROUP_QUERIES * (GROUP_QUERIES * KVS_DIM_K * 2), i % GROUP_QUERIES, piece, halves);
        }
    }
}

/* Blocks of 32 values of a step's tokens that a thread decodes: its token is warp * 8 + lane % 8, its blocks lane / 8 and every fourth. */
template <int TYPE, kvs_u32 DIM> struct raw_blocks {
    typedef kvs_kv_traits<TYPE> traits;
    static constexpr kvs_u32 n_blocks = DIM / 32;
    static constexpr kvs_u32 n_mine = (n_blocks + 3) / 4;
    static constexpr kvs_u32 n_words = traits::codes_bytes / 4;
    kvs_u32 words[n_mine][n_words];
    kvs_u32 high[n_mine];
    kvs_u32 scales[n_mine];

    /* side: of the page's head; row: the step's first in the page. Tokens from n_seen on are zeros. */
    __device__ __forceinline__ void load(const kvs_u8 *side, kvs_u32 row, kvs_u32 n_seen)
    {
        const kvs_u32 token = threadIdx.x / 32 * 8 + threadIdx.x % 8;
#pragma unroll
        for (kvs_u32 i = 0; i < n_mine; i++) {
            const kvs_u32 block = threadIdx.x % 32 / 8 + 4 * i;
            high[i] = scales[i] = 0;
#pragma unroll
            for (kvs_u32 w = 0; w < n_words; w++) {
                words[i][w] = 0;
            }
            if (block < n_blocks && token < n_seen) {
                const kvs_u8 *codes = kvs_kv_codes_at<TYPE, DIM>(side, row + token, block);
#pragma unroll
                for (kvs_u32 w = 0; w < n_words; w += 4) {
                    const uint4 four = *(const uint4 *)(codes + 4 * w);
                    words[i][w] = four.x, words[i][w + 1] = four.y, words[i][w + 2] = four.z, words[i][w + 3] = four.w;
                }
                high[i] = kvs_kv_load_high<TYPE, DIM>(side, row + token, block);
                const kvs_u8 *at = side + kvs_kv_side<TYPE, DIM>::scales_at + ((row + token) * n_blocks + block) * traits::scales_bytes;
                if (traits::has_minimum) {
                    scales[i] = *(const kvs_u32 *)at;
                } else if (!traits::is_float) {
                    scales[i] = *(const kvs_u16 *)at;
                }
            }
        }
    }

    __device__ __forceinline__ kvs_u32 pair(kvs_u32 codes, kvs_u32 scale, kvs_u32 minimum) const
    {
        return traits::has_minimum ? kvs_halves_fms(codes, scale, minimum ^ 0x80008000u) : kvs_halves_mul(codes, scale);
    }

    /* Values 8c .. 8c + 7 of block i. */
    __device__ __forceinline__ uint4 piece(kvs_u32 i, kvs_u32 c) const
    {
        uint4 halves;
        if constexpr (traits::is_float) {
            halves.x = words[i][4 * c], halves.y = words[i][4 * c + 1], halves.z = words[i][4 * c + 2], halves.w = words[i][4 * c + 3];
            return halves;
        }
        kvs_u32 quads[2];
#pragma unroll
        for (kvs_u32 j = 0; j < 2; j++) {
            const kvs_u32 quad = 2 * c + j;
            quads[j] = traits::is_nibbles ? kvs_kv_quad_bytes<TYPE>(words[i][quad % 4], high[i], quad)
                                          : words[i][quad % n_words] ^ 0x80808080u;
        }
        const kvs_u32 scale = __byte_perm(scales[i], 0, 0x1010), minimum = __byte_perm(scales[i], 0, 0x3232);
        halves.x = pair(kvs_bytes_to_halves<traits::offset, false>(quads[0]), scale, minimum);
        halves.y = pair(kvs_bytes_to_halves<traits::offset, true>(quads[0]), scale, minimum);
        halves.z = pair(kvs_bytes_to_halves<traits::offset, false>(quads[1]), scale, minimum);
        halves.w = pair(kvs_bytes_to_halves<traits::offset, true>(quads[1]), scale, minimum);
        return halves;
    }
};

static __device__ __forceinline__ bool has_broken(kvs_u32 halves)
{
    return (halves & 0x7c00u) == 0x7c00u || (halves & 0x7c000000u) == 0x7c000000u;
}

/* Decoded blocks into shared memory. With `marks` a piece with a value that is infinite or no number becomes zeros. */
template <int TYPE, kvs_u32 DIM>
static __device__ __forceinline__ void store_blocks(const raw_blocks<TYPE, DIM> &raw, kvs_u32 planes, kvs_u32 *marks)
{
    const kvs_u32 token = threadIdx.x / 32 * 8 + threadIdx.x % 8;
#pragma unroll
    for (kvs_u32 i = 0; i < raw.n_mine; i++) {
        const kvs_u32 block = threadIdx.x % 32 / 8 + 4 * i;
#pragma unroll
        for (kvs_u32 c = 0; c < 4 && block < raw.n_blocks; c++) {
            uint4 halves = raw.piece(i, c);
            if (marks != 0 && (has_broken(halves.x) || has_broken(halves.y) || has_broken(halves.z) || has_broken(halves.w))) {
                marks[token] = 1;
                halves.x = halves.y = halves.z = halves.w = 0;
            }
            store_piece(planes, token, 4 * block + c, halves);
        }
    }
}

/* Scores of the group's 64 queries with the step's tokens: issued, not waited for. */
static __device__ __forceinline__ void score_step(scores_t &scores)
{
    const kvs_u32 mine = queries_at() + threadIdx.x / 128 * (GROUP_QUERIES * KVS_DIM_K * 2);
    kvs_wgmma_begin();
#pragma unroll
    for (kvs_u32 i = 0; i < KVS_DIM_K / 16; i++) {
        const kvs_u32 offset = i / 4 * PLANE_BYTES + i % 4 * 32;
        const unsigned long long a = kvs_wgmma_operand(mine + offset), b = kvs_wgmma_operand(keys_at() + offset);
        if (i == 0) {
            kvs_wgmma_shared<true>(scores, a, b);
        } else {
            kvs_wgmma_shared<false>(scores, a, b);
        }
    }
    kvs_wgmma_commit();
}

/* Hide tokens that a query does not see, and break the scores of those that are broken. `first`: the step's, from the run's first on. */
static __device__ __forceinline__ void mask_step(const shared_state *s, const lane_state *lane, kvs_u32 first, scores_t &scores)
{
#pragma unroll
    for (kvs_u32 i = 0; i < STEP / 2; i++) {
        const kvs_u32 token = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, row = i % 4 / 2;
        float *score = &scores[i / 4][i % 4];
        *score = first + token >= lane->n_visible[row] ? MINUS_INFINITY
                 : s->is_broken[token] != 0            ? __uint_as_float(KVS_NAN_BITS)
                                                       : *score;
    }
}

static __device__ __forceinline__ float power_of_two(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Scores become weights, in pairs as a left operand of the products with V; maximum, sum and sums so far follow. */
static __device__ __forceinline__ void weigh_step(lane_state *lane, scores_t &scores, kvs_u32 (&weights)[STEP / 16][4], sums_t &sums)
{
    float keep[2];
#pragma unroll
    for (kvs_u32 row = 0; row < 2; row++) {
        float largest = MINUS_INFINITY;
#pragma unroll
        for (kvs_u32 i = 0; i < STEP / 4; i++) {
            const float score = scores[i / 2][2 * row + i % 2];
            largest = score > largest ? score : largest;
        }
        for (kvs_u32 distance = 1; distance != 4; distance *= 2) {
            const float other = __shfl_xor_sync(KVS_FULL_WARP, largest, distance);
            largest = other > largest ? other : largest;
        }
        largest *= lane->factor[row];
        const float m = largest > lane->m[row] ? largest : lane->m[row];
        const float shift = m == MINUS_INFINITY ? 0.0f : -(m * LOG2_E), factor = lane->factor[row] * LOG2_E;
        keep[row] = lane->m[row] == MINUS_INFINITY ? 0.0f : power_of_two((lane->m[row] - m) * LOG2_E);
        lane->m[row] = m;
        float sum = 0.0f;
#pragma unroll
        for (kvs_u32 i = 0; i < STEP / 4; i++) {
            float *score = &scores[i / 2][2 * row + i % 2];
            *score = power_of_two(fmaf(*score, factor, shift));
            sum += *score;
        }
        for (kvs_u32 distance = 1; distance != 4; distance *= 2) {
            sum += __shfl_xor_sync(KVS_FULL_WARP, sum, distance);
        }
        lane->s[row] = fmaf(lane->s[row], keep[row], sum);
    }
#pragma unroll
    for (kvs_u32 i = 0; i < STEP / 16 * 4; i++) {
        const float *pair = &scores[i / 4 * 2 + i % 4 / 2][i % 2 * 2];
        weights[i / 4][i % 4] = kvs_pack_halves(pair[0], pair[1]);
    }
    if (__any_sync(KVS_FULL_WARP, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
        for (kvs_u32 i = 0; i < KVS_DIM_V / 2; i++) {
            sums[i / 4][i % 4] *= keep[i % 4 / 2];
        }
    }
}

static __device__ __forceinline__ void add_step(const kvs_u32 (&weights)[STEP / 16][4], sums_t &sums)
{
    kvs_wgmma_begin();
#pragma unroll
    for (kvs_u32 i = 0; i < STEP / 16; i++) {
        kvs_wgmma_columns(sums, weights[i], kvs_wgmma_columns_operand(values_at() + 2 * i * ATOM_BYTES, PLANE_BYTES));
    }
    kvs_wgmma_commit();
}

/* Between a region of parts and a lane's two queries. */
template <bool IS_STORE>
static __device__ __forceinline__ void move_parts(const kvs_attend_params *p, const tile_view *tile, float *region, lane_state *lane,
                                                  sums_t &sums)
{
    const kvs_u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (kvs_u32 row = 0; row < 2; row++) {
        const kvs_u32 query = threadIdx.x / 32 * 16 + g + 8 * row;
        if (query >= tile->n) {
            continue;
        }
        float *part = part_of(p, tile, query, region);
        if (IS_STORE && t == 0) {
            part[0] = lane->m[row];
            part[1] = lane->s[row];
        } else if (!IS_STORE) {
            lane->s[row] = part[1];
            lane->m[row] = part[1] == 0.0f ? MINUS_INFINITY : part[0];
        }
#pragma unroll
        for (kvs_u32 i = 0; i < KVS_DIM_V / 8; i++) {
            float2 *at = (float2 *)(part + PART_HEAD + 8 * i + 2 * t);
            if (IS_STORE) {
                const float2 two = {sums[i][2 * row], sums[i][2 * row + 1]};
                *at = two;
            } else {
                const float2 two = *at;
                sums[i][2 * row] = two.x, sums[i][2 * row + 1] = two.y;
            }
        }
    }
}

/* The pages of a run as steps of 64 tokens. */
struct steps_t {
    const kvs_attend_params *p;
    const tile_view *tile;
    kvs_u32 begin;  /* page */
    kvs_u32 n_seen; /* tokens that some query sees, from the run's first on */

    __device__ __forceinline__ const kvs_u8 *head_at(kvs_u32 step) const
    {
        return head_of_page(p, tile, begin + step / (KVS_PAGE_TOKENS / STEP));
    }

    __device__ __forceinline__ kvs_u32 row_of(kvs_u32 step) const
    {
        return step % (KVS_PAGE_TOKENS / STEP) * STEP;
    }
};

/* Tokens that a query sees from a page on. */
static __device__ __forceinline__ kvs_u32 seen_from(const kvs_attend_params *p, const tile_view *tile, kvs_u32 query, const page_run &run)
{
    const kvs_u64 seen = p->first_token + (tile->first + (query < tile->n ? query : tile->n - 1)) / tile->group + 1;
    const kvs_u64 before = (kvs_u64)run.begin * KVS_PAGE_TOKENS, most = (kvs_u64)(run.end - run.begin) * KVS_PAGE_TOKENS;
    return (kvs_u32)(seen <= before ? 0 : seen - before < most ? seen - before : most);
}

static __device__ __forceinline__ void run_steps(const steps_t &steps, kvs_u32 n_whole, shared_state *s, lane_state *lane, sums_t &sums)
{
    const kvs_u32 n_steps = (steps.n_seen + STEP - 1) / STEP;
    raw_blocks<KVS_TYPE_K, KVS_DIM_K> k;
    raw_blocks<KVS_TYPE_V, KVS_DIM_V> v;
    const kvs_u8 *head = steps.head_at(0);
    k.load(head, 0, steps.n_seen);
    v.load(head + k_side::bytes, 0, steps.n_seen);
    store_blocks(k, keys_at(), 0);
    kvs_shared_written();
    __syncthreads();
#pragma unroll 1
    for (kvs_u32 step = 0; step < n_steps; step++) {
        const kvs_u32 next = step + 1 < n_steps ? step + 1 : step, first = step * STEP;
        const bool is_whole = first + STEP <= n_whole;
        scores_t scores;
        kvs_u32 weights[STEP / 16][4];
        score_step(scores);
        head = steps.head_at(next);
        k.load(head, steps.row_of(next), steps.n_seen - next * STEP);
        store_blocks(v, values_at(), is_whole ? 0 : s->is_broken);
        v.load(head + k_side::bytes, steps.row_of(next), steps.n_seen - next * STEP);
        kvs_wgmma_wait();
        kvs_wgmma_done(scores);
        if (!is_whole) {
            __syncthreads(); /* all marks are there */
            mask_step(s, lane, first, scores);
        }
        weigh_step(lane, scores, weights, sums);
        kvs_shared_written();
        __syncthreads();
        add_step(weights, sums);
        store_blocks(k, keys_at(), 0);
        if (!is_whole && threadIdx.x < STEP) {
            s->is_broken[threadIdx.x] = 0;
        }
        kvs_wgmma_wait();
        kvs_wgmma_done(sums);
        kvs_shared_written();
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(N_THREADS, 1) attend_leaf(const kvs_attend_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    __shared__ shared_state s;
    const leaf_place place = place_of_block();
    const tile_view tile = tile_of(&p, &place, TILE_QUERIES);
    const page_run run = pages_of_slot(&p, blockIdx.z);
    const steps_t steps = {&p, &tile, run.begin, seen_from(&p, &tile, tile.n - 1, run)};
    lane_state lane = {{MINUS_INFINITY, MINUS_INFINITY}, {0.0f, 0.0f}, {0.0f, 0.0f}, {0, 0}};
    sums_t sums = {};
    load_queries(&p, &tile, &s);
    if (threadIdx.x < STEP) {
        s.is_broken[threadIdx.x] = 0;
    }
    kvs_shared_written();
    __syncthreads();
#pragma unroll
    for (kvs_u32 row = 0; row < 2; row++) {
        const kvs_u32 query = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * row;
        lane.factor[row] = s.factors[query];
        lane.n_visible[row] = seen_from(&p, &tile, query, run);
    }
    if (run.is_continued) {
        move_parts<false>(&p, &tile, (float *)p.groups, &lane, sums);
    }
    if (steps.n_seen != 0) {
        run_steps(steps, seen_from(&p, &tile, 0, run), &s, &lane, sums);
    }
    move_parts<true>(&p, &tile, region_of_slot(&p, blockIdx.z), &lane, sums);
}
#endif

__device__ inline kvs_u32 value_of_element(kvs_u32 element)
{
    return element;
}

#include "attend_fold.cuh"
