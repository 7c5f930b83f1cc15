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
#include "attend_params.h"
#include "kv_types.cuh"

#define N_THREADS 256u
#define N_WARPS (N_THREADS / 32u)
#define TILE KVS_CUDA_TILE_QUERIES
#define PART_HEAD 4u
#define PART_FLOATS (PART_HEAD + KVS_DIM_V)
#define OCTETS (KVS_DIM_V / 8u)                /* of a V row: as many lanes read it */
#define ROWS_PER_WARP (32u / OCTETS)           /* V rows that a warp reads at once */
#define TOKEN_SLOTS (N_WARPS * ROWS_PER_WARP)
#define PAIR_VALUES (2u * KVS_DIM_V)           /* sums of two queries */
#define PAIR_ROUNDS ((PAIR_VALUES + N_THREADS - 1u) / N_THREADS)

static_assert(TILE == N_WARPS, "a warp weighs the tokens of one query");

typedef kvs_kv_side<KVS_TYPE_K, KVS_DIM_K> k_side;
typedef kvs_kv_side<KVS_TYPE_V, KVS_DIM_V> v_side;
typedef kvs_kv_traits<KVS_TYPE_K> k_traits;
typedef kvs_kv_traits<KVS_TYPE_V> v_traits;

enum fold_kind { FOLD_NOTHING = 0, FOLD_COPY = 1, FOLD_BOTH = 2 };

/* The running part of one query, without its weighted sums. */
struct running {
    float m;
    float s;
};

/* How the weighted sums of a later part join those of an earlier one. */
struct fold_factors {
    fold_kind kind;
    float keep;
    float add;
};

__device__ inline fold_factors fold_into(running *into, float m, float s)
{
    fold_factors factors = {FOLD_NOTHING, 1.0f, 0.0f};
    if (s == 0.0f) {
        return factors;
    }
    if (into->s == 0.0f) {
        factors.kind = FOLD_COPY;
        into->m = m;
        into->s = s;
        return factors;
    }
    const float larger = m > into->m ? m : into->m;
    factors.kind = FOLD_BOTH;
    factors.keep = kvs_exp(into->m - larger);
    factors.add = kvs_exp(m - larger);
    into->m = larger;
    into->s = fmaf(s, factors.add, into->s * factors.keep);
    return factors;
}

__device__ inline float fold_value(const fold_factors *factors, float into, float part)
{
    return factors->kind == FOLD_NOTHING ? into
           : factors->kind == FOLD_COPY  ? part
                                         : fmaf(part, factors->add, into * factors->keep);
}

struct shared_state {
    float q[TILE][KVS_DIM_K];
    float q_sums[TILE][k_side::n_blocks];
    float weights[KVS_PAGE_TOKENS][TILE];           /* scores, then weights */
    float sums[N_WARPS][16][32];                    /* of two queries: [warp][query * 8 + value of the octet][lane] */
    fold_factors factors[TILE];
    kvs_u32 n_visible[TILE];
};

/* Queries of this block. */
struct tile_view {
    kvs_u32 first;   /* among those of the KV head */
    kvs_u32 n;
    kvs_u32 group;   /* query heads per KV head */
    kvs_u32 kv_head;
};

__device__ inline tile_view tile_of(const kvs_attend_params *p)
{
    tile_view tile;
    tile.group = p->n_query_heads / p->n_kv_heads;
    tile.kv_head = blockIdx.y;
    tile.first = blockIdx.x * TILE;
    const kvs_u32 left = p->n_rows * tile.group - tile.first;
    tile.n = left < TILE ? left : TILE;
    return tile;
}

/* Tokens of a page that a query of the tile sees. */
__device__ inline kvs_u32 visible_tokens(const kvs_attend_params *p, const tile_view *tile, kvs_u32 query, kvs_u32 page)
{
    const kvs_u64 seen = p->first_token + (tile->first + query) / tile->group + 1;
    const kvs_u64 before = (kvs_u64)page * KVS_PAGE_TOKENS;
    return seen <= before ? 0u : seen - before < KVS_PAGE_TOKENS ? (kvs_u32)(seen - before) : KVS_PAGE_TOKENS;
}

__device__ inline void load_queries(const kvs_attend_params *p, const tile_view *tile, shared_state *s)
{
    const float *q = (const float *)p->q;
    for (kvs_u32 i = threadIdx.x; i < TILE * KVS_DIM_K; i += N_THREADS) {
        const kvs_u32 query = i / KVS_DIM_K, d = i % KVS_DIM_K, number = tile->first + query;
        const kvs_u32 row = number / tile->group, head = tile->kv_head * tile->group + number % tile->group;
        s->q[query][d] = query < tile->n ? q[(kvs_u64)row * p->q_stride + head * KVS_DIM_K + d] : 0.0f;
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

/* Number of a query of the tile among all of the pass. */
__device__ inline kvs_u64 query_number(const kvs_attend_params *p, const tile_view *tile, kvs_u32 query)
{
    return (kvs_u64)tile->kv_head * p->n_rows * tile->group + tile->first + query;
}

/* Between a region of parts and the running state of the tile; `parts` is the region's first part. */
template <bool IS_STORE>
__device__ inline void move_running(const kvs_attend_params *p, const tile_view *tile, float *parts, running *mine,
                                    running_sums *sums)
{
    const kvs_u32 query = threadIdx.x / 32;
    if (query < tile->n) {
        float *head = parts + query_number(p, tile, query) * PART_FLOATS;
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
                float *at = parts + query_number(p, tile, of) * PART_FLOATS + PART_HEAD + element % KVS_DIM_V;
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
    const kvs_u8 *head = (const kvs_u8 *)((const kvs_u64 *)p->page_table)[page] +
                         (kvs_u64)tile->kv_head * (k_side::bytes + v_side::bytes);
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

extern "C" __global__ void __launch_bounds__(N_THREADS, 2) attend_leaf(const kvs_attend_params p)
{
    __shared__ shared_state s;
    const tile_view tile = tile_of(&p);
    kvs_u32 begin = p.page_begin + blockIdx.z, end = begin + 1;
    running mine = {0.0f, 0.0f};
    running_sums so_far = {};
    if (p.is_grouped) {
        const kvs_u32 first = (p.page_begin / KVS_CUDA_GROUP_PAGES + blockIdx.z) * KVS_CUDA_GROUP_PAGES;
        begin = first < p.page_begin ? p.page_begin : first;
        end = first + KVS_CUDA_GROUP_PAGES < p.page_end ? first + KVS_CUDA_GROUP_PAGES : p.page_end;
        if (begin != first) {
            move_running<false>(&p, &tile, (float *)p.groups, &mine, &so_far);
        }
    }
    load_queries(&p, &tile, &s);
    for (kvs_u32 page = begin; page < end; page++) {
        attend_page(&p, &tile, page, &s, &mine, &so_far);
    }
    const kvs_u64 n_queries = (kvs_u64)p.n_query_heads * p.n_rows;
    move_running<true>(&p, &tile, (float *)p.slots + blockIdx.z * n_queries * PART_FLOATS, &mine, &so_far);
}

/* One weighted sum a thread; every thread folds the query's maximum and sum for itself. */
struct folding {
    running head;
    float value;
};

__device__ inline folding load_part(const float *part)
{
    folding loaded = {{part[0], part[1]}, part[PART_HEAD + threadIdx.x]};
    return loaded;
}

__device__ inline void store_part(float *part, const folding *folded)
{
    if (threadIdx.x == 0) {
        part[0] = folded->head.m;
        part[1] = folded->head.s;
    }
    part[PART_HEAD + threadIdx.x] = folded->value;
}

__device__ inline void fold_part(folding *into, const folding *part)
{
    const fold_factors factors = fold_into(&into->head, part->head.m, part->head.s);
    into->value = fold_value(&factors, into->value, part->value);
}

/* The value that an element of a part is: see running_sums. */
__device__ inline kvs_u32 value_of_element(kvs_u32 element)
{
    const kvs_u32 octet = element % OCTETS, j = element / OCTETS;
    return octet / 4 * 32 + octet % 4 * 4 + j % 4 + (j < 4 ? 0 : 16);
}

extern "C" __global__ void __launch_bounds__(KVS_DIM_V) attend_fold(const kvs_attend_params p)
{
    const kvs_u64 n_queries = (kvs_u64)p.n_query_heads * p.n_rows, query = blockIdx.x;
    float *group_part = (float *)p.groups + query * PART_FLOATS, *result_part = (float *)p.results + query * PART_FLOATS;
    folding group = {{0.0f, 0.0f}, 0.0f}, result = {{0.0f, 0.0f}, 0.0f};
    if (!p.is_first) {
        group = load_part(group_part);
        result = load_part(result_part);
    }
    const kvs_u32 stride = p.is_grouped ? KVS_CUDA_GROUP_PAGES : 1u;
    const float *slot = (const float *)p.slots + query * PART_FLOATS;
    for (kvs_u32 page = p.page_begin / stride * stride; page < p.page_end; page += stride) {
        const folding part = load_part(slot);
        slot += n_queries * PART_FLOATS;
        if (p.is_grouped) {
            group = part; /* it began with what the group held */
        } else {
            fold_part(&group, &part);
        }
        const kvs_u32 next = page + stride;
        if (next % KVS_CUDA_GROUP_PAGES == 0 && next <= p.page_end) {
            fold_part(&result, &group);
            group.head.s = 0.0f;
        }
    }
    if (!p.is_last) {
        __syncthreads(); /* all have read what one writes for all */
        store_part(group_part, &group);
        store_part(result_part, &result);
        return;
    }
    fold_part(&result, &group);
    const kvs_u32 heads = p.n_query_heads / p.n_kv_heads, per_head = p.n_rows * heads;
    const kvs_u32 kv_head = (kvs_u32)(query / per_head), rest = (kvs_u32)(query % per_head);
    const float value = result.value * (1.0f / result.head.s);
    float *out = (float *)p.out + (kvs_u64)(rest / heads) * p.out_stride + (kv_head * heads + rest % heads) * KVS_DIM_V;
    out[value_of_element(threadIdx.x)] = value != value ? __uint_as_float(KVS_NAN_BITS) : value;
}
