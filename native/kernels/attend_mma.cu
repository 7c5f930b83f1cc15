/* attend_mma.cu: attention as attend.cu has it, by matrix products of halves. For types whose codes are exact as halves: all but F32 and
 * BF16.
 *
 * Kernels: attend_leaf, then attend_fold. Argument: kvs_attend_params. Architecture: sm_80.
 * Macros: KVS_TYPE_K, KVS_TYPE_V (numbers of kvs_type), KVS_DIM_K, KVS_DIM_V (multiples of 32, at most 256), KVS_TILES (1 to 5:
 * products of 8 queries that share a decoded page).
 * attend_leaf: grid (tiles of N = 8 * KVS_TILES queries, KV heads, slots), block 256, dynamic shared memory:
 * N * 64 * (2 * KVS_DIM_K / 32 + 16) bytes, and N * 128 * (V_SPLITS - 1) * KVS_DIM_V / 32 more; with KVS_STAGED a page of both sides
 * and 256 times what its rows of codes lie apart. Then K of the next page is on its way while values of one are added up, and its V
 * while tokens are scored.
 *
 * Order. Scores are K q^T: 16 tokens by 8 queries at a time, a query as a sum of two halves times a power of two, codes exact, a block
 * of 32 at a time, blocks in order. Weights are p, as sums of two halves. Weighted sums are V^T p^T: 16 values by 8 queries, 16 tokens
 * at a time in order, V as a sum of two halves; the smallest of the four products is left out. A column of a product depends
 * on that column alone, so a row's bits do not depend on its tile. m, s, leaves, groups and folds are those of attend.cu, but s adds
 * a warp's 32 tokens in a tree and warps in order, and with V_SPLITS > 1 runs of tokens add up in order.
 * A page that some query of the tile sees in part is gone over once for each row, with V beyond what the row sees as zero:
 * zero times a broken value would not be zero.
 */
#include "attend_pages.cuh"

#define V_SPLITS (V_BLOCKS == 1 ? 8u : V_BLOCKS == 2 ? 4u : V_BLOCKS <= 4 ? 2u : 1u) /* runs of tokens that warps share */
#define V_STEPS (16u / V_SPLITS)                                                     /* of 16 tokens, of a warp */
#define FOURS_PER_LANE ((8u * K_BLOCKS + 31u) / 32u)                                 /* values of a query, four by four */

#ifndef KVS_AHEAD
#define KVS_AHEAD 1
#endif
#ifndef KVS_K_UNROLL
#define KVS_K_UNROLL (KVS_TILES == 1 ? 4 : 2) /* blocks of K that are read before the first of them is used */
#endif
#ifndef KVS_V_AHEAD
#define KVS_V_AHEAD 4u
#endif
#define V_AHEAD (V_STEPS < KVS_V_AHEAD ? V_STEPS : KVS_V_AHEAD)
#ifndef KVS_BLOCKS
#define KVS_BLOCKS (KVS_STAGED || KVS_TILES > 2 ? 1 : 2)
#endif

#ifdef __CUDACC__
extern __shared__ uint4 dynamic_shared[];
#endif

template <kvs_u32 TILES> struct shared_state {
    float maxima[N_WARPS][8 * TILES];
    float partial_sums[N_WARPS][8 * TILES];
    fold_factors factors[8 * TILES];
    kvs_u32 n_visible[2][8 * TILES]; /* of even and odd pages */
    float q_inverse[8 * TILES];      /* powers of two that bring the largest value of a query to [1, 2) */
    float q_factor[8 * TILES];       /* what a product with the query is multiplied by to be a score */
    float q_sums[8 * TILES][K_BLOCKS];
};

/* Dynamic shared memory: queries [step of 16 values][tile][lane], weights [step of 16 tokens][tile][lane], then the sums of all
 * but the first split. A word each: first half of a column, second half, and the same of its rest. */
template <kvs_u32 TILES> __device__ inline uint4 *query_words()
{
    return dynamic_shared;
}

template <kvs_u32 TILES> __device__ inline uint4 *weight_words()
{
    return dynamic_shared + 2 * K_BLOCKS * TILES * 32;
}

template <kvs_u32 TILES> __device__ inline float *split_sums(kvs_u32 split, kvs_u32 block)
{
    return (float *)(dynamic_shared + (2 * K_BLOCKS + 16) * TILES * 32) +
           ((split - 1) * V_BLOCKS + block) * 8 * TILES * 32;
}

/* Behind them the page's K, then its V. */
template <kvs_u32 TILES> __device__ inline kvs_u8 *page_stage()
{
    return (kvs_u8 *)split_sums<TILES>(V_SPLITS, 0);
}

/* Step s multiplies, as numbers 0 .. 3 of lane t, values 16 s + 4 t on of a block whose codes are nibbles, and 8 t + 4 s on of others: as
 * their words lie in memory. So four neighbouring values of a query belong to one step and lane: */
__device__ inline kvs_u32 step_of_four(kvs_u32 four)
{
    return four / 8 * 2 + (k_traits::is_nibbles ? four % 8 / 4 : four % 2);
}

__device__ inline kvs_u32 lane_of_four(kvs_u32 four)
{
    return k_traits::is_nibbles ? four % 4 : four % 8 / 2;
}

/* A query a warp: its values are read once, eight by a lane, and become words where they are. */
template <kvs_u32 TILES>
__device__ inline void load_queries(const kvs_attend_params *p, const tile_view *tile, shared_state<TILES> *s)
{
    const kvs_u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (kvs_u32 i = warp; i < 8 * TILES; i += N_WARPS) {
        float4 x[FOURS_PER_LANE] = {};
        kvs_u32 largest = 0;
#pragma unroll
        for (kvs_u32 j = 0; j < FOURS_PER_LANE; j++) {
            if (i < tile->n && lane + 32 * j < 8 * K_BLOCKS) {
                x[j] = ((const float4 *)query_values(p, tile, i))[lane + 32 * j];
            }
        }
#pragma unroll
        for (kvs_u32 j = 0; j < 4 * FOURS_PER_LANE; j++) {
            const kvs_u32 bits = __float_as_uint(((const float *)x)[j]) & 0x7fffffffu;
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
            s->q_inverse[i] = inverse;
            s->q_factor[i] = p->scale * (is_scaled ? __uint_as_float(exponent << 23) : 1.0f);
        }
#pragma unroll
        for (kvs_u32 j = 0; j < FOURS_PER_LANE; j++) {
            const kvs_u32 four = lane + 32 * j;
            const kvs_split first = kvs_split_floats(x[j].x * inverse, x[j].y * inverse);
            const kvs_split second = kvs_split_floats(x[j].z * inverse, x[j].w * inverse);
            const uint4 words = {first.high, second.high, first.low, second.low};
            if (four < 8 * K_BLOCKS) {
                query_words<TILES>()[(step_of_four(four) * TILES + i / 8) * 32 + i % 8 * 4 + lane_of_four(four)] = words;
            }
        }
    }
    if (!k_traits::has_minimum) {
        return;
    }
    __syncthreads();
    for (kvs_u32 i = threadIdx.x; i < 8 * TILES * K_BLOCKS; i += N_THREADS) {
        const kvs_u32 query = i / K_BLOCKS, block = i % K_BLOCKS;
        float sum = 0.0f;
        for (kvs_u32 d = 0; d < 32 && query < tile->n; d++) {
            sum += query_values(p, tile, query)[block * 32 + d] * s->q_inverse[query];
        }
        s->q_sums[query][block] = sum;
    }
}

/* Tokens of a page that each query sees, for all. */
template <kvs_u32 TILES>
__device__ inline void note_visible(const kvs_attend_params *p, const tile_view *tile, kvs_u32 page, shared_state<TILES> *s)
{
    if (threadIdx.x < 8 * TILES) {
        s->n_visible[page % 2][threadIdx.x] = threadIdx.x < tile->n ? visible_tokens(p, tile, threadIdx.x, page) : 0u;
    }
}

/* Scores of the warp's 32 tokens, two matrices of 16, before the query's factor. */
template <kvs_u32 TILES>
__device__ inline void score_tokens(const tile_view *tile, const kvs_u8 *k, const shared_state<TILES> *s,
                                    float (*scores)[TILES][4])
{
    const kvs_u32 lane = threadIdx.x % 32, t = lane % 4;
    const k_lane mine = lane_of_k(k, threadIdx.x / 32 * 32 + lane / 4, t);
#pragma unroll KVS_K_UNROLL
    for (kvs_u32 block = 0; block < K_BLOCKS; block++) {
        k_words loaded[4];
#pragma unroll
        for (kvs_u32 i = 0; i < 4; i++) {
            load_k(&mine, 8 * i, block, &loaded[i]);
        }
        float dots[2][TILES][4] = {};
#pragma unroll
        for (kvs_u32 step = 0; step < 2; step++) {
            kvs_u32 codes[2][4];
#pragma unroll
            for (kvs_u32 i = 0; i < 4; i++) {
                k_halves(&loaded[i], step, t, &codes[i / 2][i % 2], &codes[i / 2][i % 2 + 2]);
            }
#pragma unroll
            for (kvs_u32 n = 0; n < TILES; n++) {
                if (n == 0 || 8 * n < tile->n) {
                    const uint4 q = query_words<TILES>()[((2 * block + step) * TILES + n) * 32 + lane];
                    kvs_mma(dots[0][n], codes[0], q.x, q.y);
                    kvs_mma(dots[1][n], codes[1], q.x, q.y);
                    kvs_mma(dots[0][n], codes[0], q.z, q.w);
                    kvs_mma(dots[1][n], codes[1], q.z, q.w);
                }
            }
        }
#pragma unroll
        for (kvs_u32 i = 0; i < 4 * TILES * 2; i++) {
            const kvs_u32 m = i / (4 * TILES), n = i / 4 % TILES, j = i % 4;
            const kvs_kv_scale *scale = &loaded[2 * m + j / 2].scale;
            float *score = &scores[m][n][j];
            *score = k_traits::is_float ? *score + dots[m][n][j] : fmaf(scale->scale, dots[m][n][j], *score);
            if (k_traits::has_minimum) {
                *score = fmaf(scale->minimum, s->q_sums[8 * n + 2 * t + j % 2][block], *score);
            }
        }
    }
}

/* Largest score, or sum, of the lanes that hold the same queries. */
__device__ inline float column_maximum(float value)
{
    for (kvs_u32 distance = 16; distance != 2; distance /= 2) {
        const float other = __shfl_xor_sync(KVS_FULL_WARP, value, distance);
        value = other > value ? other : value;
    }
    return value;
}

__device__ inline float column_sum(float value)
{
    for (kvs_u32 distance = 16; distance != 2; distance /= 2) {
        value += __shfl_xor_sync(KVS_FULL_WARP, value, distance);
    }
    return value;
}

/* Number i of a lane's four tokens lies in matrix i / 2, from element 2 * (i % 2) on. */
template <kvs_u32 TILES>
__device__ inline void find_maxima(const tile_view *tile, const kvs_u32 *n_visible, shared_state<TILES> *s,
                                   float (*scores)[TILES][4])
{
    const kvs_u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = warp * 32 + lane / 4;
#pragma unroll
    for (kvs_u32 n = 0; n < TILES; n++) {
        if (n != 0 && 8 * n >= tile->n) {
            break;
        }
#pragma unroll
        for (kvs_u32 e = 0; e < 2; e++) {
            const kvs_u32 query = 8 * n + 2 * (lane % 4) + e;
            float m = __uint_as_float(0xff800000u);
#pragma unroll
            for (kvs_u32 i = 0; i < 4; i++) {
                float *score = &scores[i / 2][n][2 * (i % 2) + e];
                *score *= s->q_factor[query];
                m = token + 8 * i < n_visible[query] && *score > m ? *score : m;
            }
            m = column_maximum(m);
            if (lane < 4) {
                s->maxima[warp][query] = m;
            }
        }
    }
}

template <kvs_u32 TILES> __device__ inline float page_maximum(const shared_state<TILES> *s, kvs_u32 query)
{
    float m = s->maxima[0][query];
    for (kvs_u32 warp = 1; warp < N_WARPS; warp++) {
        m = s->maxima[warp][query] > m ? s->maxima[warp][query] : m;
    }
    return m;
}

/* Scores become weights, in the order in which products take them. */
template <kvs_u32 TILES>
__device__ inline void weigh_tokens(const tile_view *tile, const kvs_u32 *n_visible, shared_state<TILES> *s,
                                    float (*scores)[TILES][4])
{
    const kvs_u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = warp * 32 + lane / 4;
#pragma unroll
    for (kvs_u32 n = 0; n < TILES; n++) {
        if (n != 0 && 8 * n >= tile->n) {
            break;
        }
#pragma unroll
        for (kvs_u32 e = 0; e < 2; e++) {
            const kvs_u32 query = 8 * n + 2 * (lane % 4) + e;
            const float m = page_maximum(s, query);
            float sum = 0.0f;
#pragma unroll
            for (kvs_u32 i = 0; i < 4; i++) {
                float *score = &scores[i / 2][n][2 * (i % 2) + e];
                *score = token + 8 * i < n_visible[query] ? kvs_exp(*score - m) : 0.0f;
                sum += *score;
            }
            sum = column_sum(sum);
            if (lane < 4) {
                s->partial_sums[warp][query] = sum;
            }
        }
#pragma unroll
        for (kvs_u32 m = 0; m < 2; m++) {
            const kvs_split first = kvs_split_floats(scores[m][n][0], scores[m][n][1]);
            const kvs_split second = kvs_split_floats(scores[m][n][2], scores[m][n][3]);
            const uint4 words = {kvs_transpose(first.high), kvs_transpose(second.high), kvs_transpose(first.low),
                                 kvs_transpose(second.low)};
            weight_words<TILES>()[((warp * 2 + m) * TILES + n) * 32 + lane] = words;
        }
    }
}

/* The page's maximum and sum of a query join its running ones. One thread a query. */
template <kvs_u32 TILES>
__device__ inline void fold_heads(const tile_view *tile, const kvs_u32 *n_visible, shared_state<TILES> *s, running *mine)
{
    const kvs_u32 query = threadIdx.x;
    if (query < tile->n) {
        float sum = s->partial_sums[0][query];
        for (kvs_u32 warp = 1; warp < N_WARPS; warp++) {
            sum += s->partial_sums[warp][query];
        }
        s->factors[query] = fold_into(mine, page_maximum(s, query), n_visible[query] == 0 ? 0.0f : sum);
    }
}

/* Ones in the halves of tokens `token` and `token + 1` that come before n_visible. */
__device__ inline kvs_u32 kept_halves(kvs_u32 token, kvs_u32 n_visible)
{
    return (token < n_visible ? 0x0000ffffu : 0u) | (token + 1 < n_visible ? 0xffff0000u : 0u);
}

/* Weighted sums of the warp's block of V over its steps, tokens before n_visible, for the tiles from n_begin on. Codes of V_AHEAD steps
 * are read before the first of them is used, of tokens that do not count too: the page has them, and no product takes them. */
template <kvs_u32 TILES, bool IS_WHOLE>
__device__ inline void gather_values(const kvs_u8 *v, kvs_u32 n_visible, kvs_u32 n_begin, kvs_u32 n_end,
                                     float (*sums)[TILES][4])
{
    const kvs_u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const kvs_u32 block = warp % V_BLOCKS, first = warp / V_BLOCKS * V_STEPS;
    v_lane mine = lane_of_v(v, first * 16 + 2 * t, block, g);
#pragma unroll 1
    for (kvs_u32 begin = first; begin < first + V_STEPS && (IS_WHOLE || begin * 16 < n_visible); begin += V_AHEAD) {
        v_words loaded[V_AHEAD][4];
#pragma unroll
        for (kvs_u32 i = 0; i < 4 * V_AHEAD; i++) {
            loaded[i / 4][i % 4] = load_v(&mine, i / 4 * 16 + i % 4 / 2 * 8 + i % 2, g);
        }
        step_over(&mine, V_AHEAD * 16);
#pragma unroll
        for (kvs_u32 i = 0; i < V_AHEAD; i++) {
            const kvs_u32 step = begin + i, token = step * 16 + 2 * t;
            if (!IS_WHOLE && step * 16 >= n_visible) {
                break;
            }
            kvs_split near[4], far[4];
            v_pairs(&loaded[i][0], &loaded[i][1], IS_WHOLE ? 0xffffffffu : kept_halves(token, n_visible), near);
            v_pairs(&loaded[i][2], &loaded[i][3], IS_WHOLE ? 0xffffffffu : kept_halves(token + 8, n_visible), far);
#pragma unroll
            for (kvs_u32 m = 0; m < 2; m++) {
                const kvs_u32 high[4] = {near[2 * m].high, near[2 * m + 1].high, far[2 * m].high, far[2 * m + 1].high};
                const kvs_u32 low[4] = {near[2 * m].low, near[2 * m + 1].low, far[2 * m].low, far[2 * m + 1].low};
#pragma unroll
                for (kvs_u32 n = 0; n < TILES; n++) {
                    if ((IS_WHOLE && n == 0) || (n >= n_begin && n < n_end)) {
                        const uint4 weights = weight_words<TILES>()[(step * TILES + n) * 32 + lane];
                        kvs_mma(sums[m][n], high, weights.x, weights.y);
                        kvs_mma(sums[m][n], high, weights.z, weights.w);
                        if (!v_traits::is_float) {
                            kvs_mma(sums[m][n], low, weights.x, weights.y);
                        }
                    }
                }
            }
        }
    }
}

/* One row at a time: each takes the columns of its queries from products that end where it sees no more. */
template <kvs_u32 TILES>
__device__ inline void gather_rows(const tile_view *tile, const kvs_u8 *v, const kvs_u32 *n_visible, float (*sums)[TILES][4])
{
    const kvs_u32 t = threadIdx.x % 4;
#pragma unroll 1
    for (kvs_u32 begin = 0, end; begin < tile->n; begin = end) {
        end = begin + tile->group - (tile->first + begin) % tile->group;
        end = end < tile->n ? end : tile->n;
        float of_row[2][TILES][4] = {};
        gather_values<TILES, false>(v, n_visible[begin], begin / 8, (end + 7) / 8, of_row);
#pragma unroll
        for (kvs_u32 i = 0; i < 8 * TILES; i++) {
            const kvs_u32 m = i / (4 * TILES), n = i / 4 % TILES, j = i % 4, query = 8 * n + 2 * t + j % 2;
            sums[m][n][j] = query >= begin && query < end ? of_row[m][n][j] : sums[m][n][j];
        }
    }
}

/* Runs of tokens beyond the first lay down their sums. */
template <kvs_u32 TILES> __device__ inline void hand_over_sums(float (*sums)[TILES][4])
{
    const kvs_u32 warp = threadIdx.x / 32, split = warp / V_BLOCKS;
    if (V_SPLITS > 1 && split > 0 && split < V_SPLITS) {
        float *to = split_sums<TILES>(split, warp % V_BLOCKS) + threadIdx.x % 32;
#pragma unroll
        for (kvs_u32 i = 0; i < 8 * TILES; i++) {
            to[i * 32] = sums[i / (4 * TILES)][i / 4 % TILES][i % 4];
        }
    }
}

/* The first run adds those of the others in order, and the page joins what was there. */
template <kvs_u32 TILES>
__device__ inline void fold_sums(const shared_state<TILES> *s, float (*sums)[TILES][4], float (*so_far)[TILES][4])
{
    const kvs_u32 warp = threadIdx.x / 32, t = threadIdx.x % 4;
    if (warp >= V_BLOCKS) {
        return;
    }
#pragma unroll
    for (kvs_u32 i = 0; i < 8 * TILES; i++) {
        const kvs_u32 m = i / (4 * TILES), n = i / 4 % TILES, j = i % 4;
        float sum = sums[m][n][j];
        for (kvs_u32 split = 1; split < V_SPLITS; split++) {
            sum += split_sums<TILES>(split, warp)[i * 32 + threadIdx.x % 32];
        }
        so_far[m][n][j] = fold_value(&s->factors[8 * n + 2 * t + j % 2], so_far[m][n][j], sum);
    }
}

/* Between a region of parts and the running state of the tile. */
template <kvs_u32 TILES, bool IS_STORE>
__device__ inline void move_running(const kvs_attend_params *p, const tile_view *tile, float *region, running *mine,
                                    float (*so_far)[TILES][4])
{
    const kvs_u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if (threadIdx.x < tile->n) {
        float *head = part_of(p, tile, threadIdx.x, region);
        if (IS_STORE) {
            head[0] = mine->m;
            head[1] = mine->s;
        } else {
            mine->m = head[0];
            mine->s = head[1];
        }
    }
    if (warp >= V_BLOCKS) {
        return;
    }
#pragma unroll
    for (kvs_u32 i = 0; i < 2 * TILES; i++) {
        const kvs_u32 n = i / 2, e = i % 2, query = 8 * n + 2 * t + e;
        if (query < tile->n) {
            float4 *at = (float4 *)(part_of(p, tile, query, region) + PART_HEAD + warp * 32 + 4 * g);
            if (IS_STORE) {
                const float4 four = {so_far[0][n][e], so_far[0][n][2 + e], so_far[1][n][e], so_far[1][n][2 + e]};
                *at = four;
            } else {
                const float4 four = *at;
                so_far[0][n][e] = four.x, so_far[0][n][2 + e] = four.y;
                so_far[1][n][e] = four.z, so_far[1][n][2 + e] = four.w;
            }
        }
    }
}

template <kvs_u32 TILES>
__device__ inline void attend_page(const kvs_attend_params *p, const tile_view *tile, kvs_u32 page, kvs_u32 next,
                                   shared_state<TILES> *s, running *mine, float (*so_far)[TILES][4])
{
    const kvs_u32 *n_visible = s->n_visible[page % 2];
    const kvs_u32 n_tokens = n_visible[tile->n - 1];
    const kvs_u8 *head = head_of_page(p, tile, page);
    const kvs_u8 *next_head = head_of_page(p, tile, next);
    kvs_u8 *const k_stage = page_stage<TILES>(), *const v_stage = k_stage + K_STAGE_BYTES;
    const kvs_u8 *const k = KVS_STAGED ? k_stage : head, *const v = KVS_STAGED ? v_stage : head + k_side::bytes;
    const bool is_whole = n_visible[0] == KVS_PAGE_TOKENS;
    if (KVS_STAGED) {
        kvs_copies_wait<1>(); /* K is here */
        __syncwarp();
    } else if (KVS_AHEAD) {
        prefetch_bytes(head + k_side::bytes, v_side::bytes);
        prefetch_bytes(next_head, k_side::bytes);
    }
    {
        float scores[2][TILES][4] = {};
        if (threadIdx.x / 32 * 32 < n_tokens) {
            score_tokens(tile, k, s, scores);
        }
        if (KVS_STAGED) {
            __syncwarp();
            if (next != page) {
                stage_k(k_stage, next_head);
            }
            kvs_copies_end();
        }
        find_maxima(tile, n_visible, s, scores);
        __syncthreads();
        weigh_tokens(tile, n_visible, s, scores);
    }
    if (KVS_STAGED) {
        kvs_copies_wait<1>(); /* V is here, of this thread's; of all behind the barrier */
    }
    __syncthreads();
    fold_heads(tile, n_visible, s, mine);
    note_visible(p, tile, page + 1, s);
    float sums[2][TILES][4] = {};
    if (threadIdx.x / 32 < V_SPLITS * V_BLOCKS) {
        if (is_whole) {
            gather_values<TILES, true>(v, KVS_PAGE_TOKENS, 0, (tile->n + 7) / 8, sums);
        } else {
            gather_rows(tile, v, n_visible, sums);
        }
    }
    hand_over_sums<TILES>(sums);
    __syncthreads();
    if (KVS_STAGED) {
        if (next != page) {
            stage_v(v_stage, next_head + k_side::bytes);
        }
        kvs_copies_end();
    }
    fold_sums(s, sums, so_far);
}

/* Many queries take the registers of a whole multiprocessor. */
extern "C" __global__ void __launch_bounds__(N_THREADS, KVS_BLOCKS) attend_leaf(const kvs_attend_params given)
{
    __shared__ shared_state<KVS_TILES> s;
    kvs_let_next_begin();
    const kvs_attend_params p = params_of_pass(given);
    const tile_view tile = tile_of(&p, 8 * KVS_TILES);
    const page_run pages = pages_of_slot(&p, blockIdx.z);
    if (pages.begin != pages.end) {
        prefetch_bytes(head_of_page(&p, &tile, pages.begin), k_side::bytes + v_side::bytes);
    }
    kvs_wait_for_previous();
    if (pages.begin == pages.end) {
        return;
    }
    if (KVS_STAGED) {
        const kvs_u8 *head = head_of_page(&p, &tile, pages.begin);
        stage_k(page_stage<KVS_TILES>(), head);
        kvs_copies_end();
        stage_v(page_stage<KVS_TILES>() + K_STAGE_BYTES, head + k_side::bytes);
        kvs_copies_end();
    }
    running mine = {0.0f, 0.0f};
    float so_far[2][KVS_TILES][4] = {};
    if (pages.is_continued) {
        move_running<KVS_TILES, false>(&p, &tile, (float *)p.groups, &mine, so_far);
    }
    load_queries(&p, &tile, &s);
    note_visible(&p, &tile, pages.begin, &s);
    __syncthreads();
    for (kvs_u32 page = pages.begin; page < pages.end && s.n_visible[page % 2][tile.n - 1] != 0; page++) {
        attend_page(&p, &tile, page, page + 1 < pages.end ? page + 1 : page, &s, &mine, so_far);
    }
    if (KVS_STAGED) {
        kvs_copies_wait<0>(); /* of a page that nobody sees */
    }
    move_running<KVS_TILES, true>(&p, &tile, region_of_slot(&p, blockIdx.z), &mine, so_far);
}

__device__ inline kvs_u32 value_of_element(kvs_u32 element)
{
    return element;
}

#include "attend_fold.cuh"
