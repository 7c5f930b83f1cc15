/* attend.cu: causal attention of 1 and more rows over page records, in one fixed order of summation.
 *
 * Kernels: attend_leaf, then attend_fold, for each run of pages. Argument: kvs_attend_params. Architecture: sm_75.
 * Macros: KVS_TYPE_K, KVS_TYPE_V (numbers of kvs_type), KVS_DIM_K, KVS_DIM_V (multiples of 32, at most 256).
 * attend_leaf: grid (tiles of KVS_CUDA_TILE_QUERIES queries, KV heads, slots), block 256, no dynamic shared memory.
 * attend_fold: grid (queries of all heads), block KVS_DIM_V.
 *
 * Order. The result of a row depends on its query and on the stored codes of the tokens that it sees, on nothing else:
 * - score(t) = scale * sum over blocks of 32 of (block scale * (fmaf chain of q and codes, octet by octet) + minimum * sum of q)
 * - leaf, one page afresh: m = largest score; p(t) = exp(score(t) - m); s: lane l of 32 adds t = l, l + 32, ..., lanes in a
 *   tree of xor distances 16, 8, 4, 2, 1; acc[d]: token slot j adds fmaf(p(t), V[t][d]) for t = j, j + n_slots, ..., slots in order
 * - fold of a later part b into an earlier a: m = larger; x = fmaf(b.x, exp(b.m - m), a.x * exp(a.m - m)). Folding into
 *   nothing copies. Leaves fold in order into groups of KVS_CUDA_GROUP_PAGES by absolute page index, groups into the result.
 * Where pages lie, how a run is cut into waves and slots, and which rows share a tile only choose who computes what when.
 */
#include "attend_parts.cuh"

#define TILE KVS_CUDA_TILE_QUERIES
#define OCTETS (KVS_DIM_V / 8u)                /* of a V row: as many lanes read it */
#define ROWS_PER_WARP (32u / OCTETS)           /* V rows that a warp reads at once */
#define TOKEN_SLOTS (N_WARPS * ROWS_PER_WARP)
#define PAIR_VALUES (2u * KVS_DIM_V)           /* sums of two queries */
#define PAIR_ROUNDS ((PAIR_VALUES + N_THREADS - 1u) / N_THREADS)

static_assert(TILE == N_WARPS, "a warp weighs the tokens of one query");

struct shared_state {
    float q[TILE][KVS_DIM_K];
    float q_sums[TILE][k_side::n_blocks];
    float weights[KVS_PAGE_TOKENS][TILE];           /* scores, then weights */
    float sums[N_WARPS][16][32];                    /* of two queries: [warp][query * 8 + value of the octet][lane] */
    fold_factors factors[TILE];
    kvs_u32 n_visible[TILE];
};

__device__ inline void load_queries(const kvs_attend_params *p, const tile_view *tile, shared_state *s)
{
    for (kvs_u32 i = threadIdx.x; i < TILE * KVS_DIM_K; i += N_THREADS) {
        const kvs_u32 query = i / KVS_DIM_K, d = i % KVS_DIM_K;
        s->q[query][d] = query < tile->n ? query_values(p, tile, query)[d] : 0.0f;
    }
    __syncthreads();
    if (k_traits::has_minimum && threadIdx.x < TILE * k_side::n_blocks) {
        const kvs_u32 query = threadIdx.x / k_side::n_blocks, block = threadIdx.x % k_side::n_blocks;
        float sum = 0.0f;
        for (kvs_u32 d = 0; d < 32; d++) {
            sum += s->q[query][block * 32 + d];
        }
        s->q_sums[query][block] = sum;
    }
    __syncthreads();
}

/* Eight fused products of an octet of codes with the same values of a query. */
__device__ inline float octet_dot(const float *q, const float *codes, float dot)
{
    const float4 first = *(const float4 *)q, second = *(const float4 *)(q + 16);
    dot = fmaf(first.x, codes[0], dot);
    dot = fmaf(first.y, codes[1], dot);
    dot = fmaf(first.z, codes[2], dot);
    dot = fmaf(first.w, codes[3], dot);
    dot = fmaf(second.x, codes[4], dot);
    dot = fmaf(second.y, codes[5], dot);
    dot = fmaf(second.z, codes[6], dot);
    return fmaf(second.w, codes[7], dot);
}

/* One token a thread. Every query of the tile gets a score, also where it does not see the token: nobody reads that one. */
__device__ inline void score_token(const kvs_attend_params *p, const tile_view *tile, const kvs_u8 *k, shared_state *s)
{
    const kvs_u32 token = threadIdx.x;
    float score[TILE] = {};
    for (kvs_u32 block = 0; block < k_side::n_blocks; block++) {
        kvs_kv_block<KVS_TYPE_K> codes;
        codes.load(kvs_kv_codes_at<KVS_TYPE_K, KVS_DIM_K>(k, token, block),
                   kvs_kv_load_high<KVS_TYPE_K, KVS_DIM_K>(k, token, block));
        const kvs_kv_scale scale = kvs_kv_load_scale<KVS_TYPE_K, KVS_DIM_K>(k, token, block);
        float dot[TILE] = {};
#pragma unroll
        for (kvs_u32 octet = 0; octet < 4; octet++) {
            float values[8];
            codes.octet(octet, values);
#pragma unroll
            for (kvs_u32 i = 0; i < TILE; i++) {
                if (i < tile->n) {
                    dot[i] = octet_dot(&s->q[i][block * 32 + 4 * octet], values, dot[i]);
                }
            }
        }
#pragma unroll
        for (kvs_u32 i = 0; i < TILE; i++) {
            score[i] = k_traits::is_float ? score[i] + dot[i] : fmaf(scale.scale, dot[i], score[i]);
            if (k_traits::has_minimum) {
                score[i] = fmaf(scale.minimum, s->q_sums[i][block], score[i]);
            }
        }
    }
#pragma unroll
    for (kvs_u32 i = 0; i < TILE; i++) {
        s->weights[token][i] = score[i] * p->scale;
    }
}

/* One query a warp: scores become weights, and the page's part joins the running one. */
__device__ inline void weigh_tokens(kvs_u32 n_visible, running *so_far, shared_state *s)
{
    const kvs_u32 query = threadIdx.x / 32, lane = threadIdx.x % 32;
    float m = __uint_as_float(0xff800000u), sum = 0.0f;
    for (kvs_u32 t = lane; t < n_visible; t += 32) {
        const float score = s->weights[t][query];
        m = score > m ? score : m;
    }
    for (kvs_u32 distance = 16; distance != 0; distance /= 2) {
        const float other = __shfl_xor_sync(KVS_FULL_WARP, m, distance);
        m = other > m ? other : m;
    }
    for (kvs_u32 t = lane; t < n_visible; t += 32) {
        const float weight = kvs_exp(s->weights[t][query] - m);
        s->weights[t][query] = weight;
        sum += weight;
    }
    for (kvs_u32 distance = 16; distance != 0; distance /= 2) {
        sum += __shfl_xor_sync(KVS_FULL_WARP, sum, distance);
    }
    const fold_factors factors = fold_into(so_far, m, n_visible == 0 ? 0.0f : sum);
    if (lane == 0) {
        s->factors[query] = factors;
        s->n_visible[query] = n_visible;
    }
}

/* Weighted sums of one octet over the tokens of one slot. IS_WHOLE: every query of the tile sees the whole page. */
template <bool IS_WHOLE>
__device__ inline void gather_values(const tile_view *tile, const kvs_u8 *v, kvs_u32 n_tokens, const shared_state *s,
                                     float (*sums)[8])
{
    const kvs_u32 lane = threadIdx.x % 32, octet = lane % OCTETS;
    if (lane >= ROWS_PER_WARP * OCTETS) {
        return;
    }
    for (kvs_u32 t = threadIdx.x / 32 * ROWS_PER_WARP + lane / OCTETS; t < n_tokens; t += TOKEN_SLOTS) {
        float values[8];
        kvs_kv_load_octet<KVS_TYPE_V>(kvs_kv_codes_at<KVS_TYPE_V, KVS_DIM_V>(v, t, octet / 4),
                                      kvs_kv_load_high<KVS_TYPE_V, KVS_DIM_V>(v, t, octet / 4), octet % 4, values);
        const kvs_kv_scale scale = kvs_kv_load_scale<KVS_TYPE_V, KVS_DIM_V>(v, t, octet / 4);
#pragma unroll
        for (kvs_u32 j = 0; j < 8; j++) {
            if (v_traits::has_minimum) {
                values[j] = fmaf(scale.scale, values[j], scale.minimum);
            } else if (!v_traits::is_float) {
                values[j] = scale.scale * values[j];
            }
        }
        float weights[TILE];
        *(float4 *)weights = *(const float4 *)&s->weights[t][0];
        *(float4 *)(weights + 4) = *(const float4 *)&s->weights[t][4];
#pragma unroll
        for (kvs_u32 i = 0; i < TILE; i++) {
            if (i < tile->n && (IS_WHOLE || t < s->n_visible[i])) {
#pragma unroll
                for (kvs_u32 j = 0; j < 8; j++) {
                    sums[i][j] = fmaf(weights[i], values[j], sums[i][j]);
                }
            }
        }
    }
}

/* A thread's running weighted sums: of query pair, element threadIdx.x + round * N_THREADS of the pair's. Elements of a query are
 * numbered by octet value first, so that neighbours lie in neighbouring banks. */
struct running_sums {
    float of[TILE / 2][PAIR_ROUNDS];
};

/* Add the token slots of each query, two queries at a time, and fold the page into what was there. */
__device__ inline void fold_page(const tile_view *tile, float (*sums)[8], shared_state *s, running_sums *so_far)
{
    const kvs_u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (kvs_u32 pair = 0; pair < TILE / 2; pair++) {
        if (2 * pair >= tile->n) {
            break;
        }
#pragma unroll
        for (kvs_u32 j = 0; j < 16; j++) {
            s->sums[warp][j][lane] = sums[2 * pair + j / 8][j % 8];
        }
        __syncthreads();
#pragma unroll
        for (kvs_u32 round = 0; round < PAIR_ROUNDS; round++) {
            const kvs_u32 element = threadIdx.x + round * N_THREADS;
            if (element < PAIR_VALUES) {
                float sum = 0.0f;
#pragma unroll
                for (kvs_u32 slot = 0; slot < TOKEN_SLOTS; slot++) {
                    sum += s->sums[slot / ROWS_PER_WARP][element / OCTETS][slot % ROWS_PER_WARP * OCTETS + element % OCTETS];
                }
                float *into = &so_far->of[pair][round];
                *into = fold_value(&s->factors[2 * pair + element / KVS_DIM_V], *into, sum);
            }
        }
        __syncthreads();
    }
}

/* Between a region of parts and the running state of the tile. */
template <bool IS_STORE>
__device__ inline void move_running(const kvs_attend_params *p, const tile_view *tile, float *region, running *mine,
                                    running_sums *sums)
{
    const kvs_u32 query = threadIdx.x / 32;
    if (query < tile->n) {
        float *head = part_of(p, tile, query, region);
        if (!IS_STORE) {
            mine->m = head[0];
            mine->s = head[1];
        } else if (threadIdx.x % 32 == 0) {
            head[0] = mine->m;
            head[1] = mine->s;
        }
    }
#pragma unroll
    for (kvs_u32 pair = 0; pair < TILE / 2; pair++) {
#pragma unroll
        for (kvs_u32 round = 0; round < PAIR_ROUNDS; round++) {
            const kvs_u32 element = threadIdx.x + round * N_THREADS;
            const kvs_u32 of = 2 * pair + element / KVS_DIM_V;
            if (element < PAIR_VALUES && of < tile->n) {
                float *at = part_of(p, tile, of, region) + PART_HEAD + element % KVS_DIM_V;
                if (IS_STORE) {
                    *at = sums->of[pair][round];
                } else {
                    sums->of[pair][round] = *at;
                }
            }
        }
    }
}

__device__ inline void attend_page(const kvs_attend_params *p, const tile_view *tile, kvs_u32 page, shared_state *s,
                                   running *mine, running_sums *so_far)
{
    const kvs_u32 n_tokens = visible_tokens(p, tile, tile->n - 1, page);
    if (n_tokens == 0) {
        return;
    }
    const kvs_u8 *head = head_of_page(p, tile, page);
    if (threadIdx.x < n_tokens) {
        score_token(p, tile, head, s);
    }
    __syncthreads();
    if (threadIdx.x / 32 < tile->n) {
        weigh_tokens(visible_tokens(p, tile, threadIdx.x / 32, page), mine, s);
    }
    __syncthreads();
    float sums[TILE][8] = {};
    if (visible_tokens(p, tile, 0, page) == KVS_PAGE_TOKENS) {
        gather_values<true>(tile, head + k_side::bytes, KVS_PAGE_TOKENS, s, sums);
    } else {
        gather_values<false>(tile, head + k_side::bytes, n_tokens, s, sums);
    }
    fold_page(tile, sums, s, so_far);
}

extern "C" __global__ void __launch_bounds__(N_THREADS, 2) attend_leaf(const kvs_attend_params given)
{
    kvs_let_next_begin();
    const kvs_attend_params p = params_of_pass(given);
    kvs_wait_for_previous();
    __shared__ shared_state s;
    __shared__ kvs_u64 seen;
    page_gate gate = gate_of(p.step, p.layer);
    const leaf_place place = place_of_block(&p, &gate, &seen);
    const tile_view tile = tile_of(&p, &place, TILE);
    const page_run pages = pages_of_slot(&p, place.slot);
    if (pages.begin == pages.end) {
        return;
    }
    running mine = {0.0f, 0.0f};
    running_sums so_far = {};
    if (pages.is_continued) {
        move_running<false>(&p, &tile, (float *)p.groups, &mine, &so_far);
    }
    load_queries(&p, &tile, &s);
    for (kvs_u32 page = pages.begin; page < pages.end; page++) {
        await_page(&gate, page, &seen);
        attend_page(&p, &tile, page, &s, &mine, &so_far);
    }
    if (threadIdx.x == 0) { /* a barrier follows the block's last read of a page */
        leave_pages(&gate, pages.begin, pages.end, gridDim.x * gridDim.y);
    }
    move_running<true>(&p, &tile, region_of_slot(&p, place.slot), &mine, &so_far);
}

/* See running_sums. */
__device__ inline kvs_u32 value_of_element(kvs_u32 element)
{
    const kvs_u32 octet = element % OCTETS, j = element / OCTETS;
    return octet / 4 * 32 + octet % 4 * 4 + j % 4 + (j < 4 ? 0 : 16);
}

#include "attend_fold.cuh"
