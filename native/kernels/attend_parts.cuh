/* attend_parts.cuh: what a softmax over some tokens has come to, how two such parts fold, and which queries a block has.
 *
 * A part is a maximum m, a sum s of exp(score - m), and weighted sums of V. Its sum is 0 exactly where it is empty.
 */
#ifndef KVS_KERNELS_ATTEND_PARTS_CUH
#define KVS_KERNELS_ATTEND_PARTS_CUH

#include "attend_params.h"
#include "grid.cuh"
#include "kv_types.cuh"
#include "page_gate.cuh"

#define N_THREADS 256u
#define N_WARPS (N_THREADS / 32u)
#define PART_HEAD 4u
#define PART_FLOATS (PART_HEAD + KVS_DIM_V)

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

/* The arguments, and what a launch of a recorded pass finds out for itself, of words that are there before its first kernel. */
__device__ inline kvs_attend_params params_of_pass(kvs_attend_params p)
{
    if (p.step != 0) {
        p.first_token = ((const kvs_step_words *)p.step)->first_token;
        const kvs_u32 n_pages = (kvs_u32)((p.first_token + p.n_rows - 1) / KVS_PAGE_TOKENS) + 1;
        p.is_last = p.page_begin < n_pages && n_pages <= p.page_end;
        p.page_end = p.page_end < n_pages ? p.page_end : n_pages;
    }
    return p;
}

/* Which part of a launch a block does. */
struct leaf_place {
    kvs_u32 tile;
    kvs_u32 kv_head;
    kvs_u32 slot;
};

/* Which slot of the launch comes next: of pages that go through the ring as many first as lie in it when the launch begins, then those
 * that are resident, which wait for nothing, then the others of the ring in order. So slots are given back, and the bus goes on, while
 * resident pages are read. */
__device__ inline kvs_u32 slot_in_turn(const kvs_attend_params *p, const page_gate *gate, kvs_u32 turn)
{
    const kvs_u32 pages = p->is_grouped ? KVS_CUDA_GROUP_PAGES : 1u;
    const kvs_u32 begin = p->is_grouped ? p->page_begin / pages * pages : p->page_begin;
    const kvs_u32 n_resident = gate->first_page > begin ? (gate->first_page - begin) / pages : 0u;
    const kvs_u32 n_left = n_resident < gridDim.z ? gridDim.z - n_resident : 0u, n_lying = gate->words->n_slots / pages;
    const kvs_u32 n_first = n_lying < n_left ? n_lying : n_left;
    return turn < n_first ? n_resident + turn : turn < n_first + n_resident ? turn - n_first : turn;
}

/* All threads. By ticket where pages go through a ring, in the order in which blocks begin. */
__device__ inline leaf_place place_of_block(const kvs_attend_params *p, const page_gate *gate, kvs_u64 *shared)
{
    leaf_place place = {blockIdx.x, blockIdx.y, blockIdx.z};
    if (gate->words != nullptr) {
        if (threadIdx.x == 0) {
            *shared = take_ticket(p->ticket);
        }
        __syncthreads();
        const kvs_u32 ticket = (kvs_u32)*shared, of_slot = gridDim.x * gridDim.y;
        __syncthreads();
        place.tile = ticket % gridDim.x;
        place.kv_head = ticket % of_slot / gridDim.x;
        place.slot = slot_in_turn(p, gate, ticket / of_slot);
    }
    return place;
}

__device__ inline leaf_place place_of_block()
{
    const leaf_place place = {blockIdx.x, blockIdx.y, blockIdx.z};
    return place;
}

/* Queries of a block. */
struct tile_view {
    kvs_u32 first;   /* among those of the KV head */
    kvs_u32 n;
    kvs_u32 group;   /* query heads per KV head */
    kvs_u32 kv_head;
};

__device__ inline tile_view tile_of(const kvs_attend_params *p, const leaf_place *place, kvs_u32 most)
{
    tile_view tile;
    tile.group = p->n_query_heads / p->n_kv_heads;
    tile.kv_head = place->kv_head;
    tile.first = place->tile * most;
    const kvs_u32 left = p->n_rows * tile.group - tile.first;
    tile.n = left < most ? left : most;
    return tile;
}

/* Tokens of a page that a query of the tile sees. */
__device__ inline kvs_u32 visible_tokens(const kvs_attend_params *p, const tile_view *tile, kvs_u32 query, kvs_u32 page)
{
    const kvs_u64 seen = p->first_token + (tile->first + query) / tile->group + 1;
    const kvs_u64 before = (kvs_u64)page * KVS_PAGE_TOKENS;
    return seen <= before ? 0u : seen - before < KVS_PAGE_TOKENS ? (kvs_u32)(seen - before) : KVS_PAGE_TOKENS;
}

/* Where a query's values begin. */
__device__ inline const float *query_values(const kvs_attend_params *p, const tile_view *tile, kvs_u32 query)
{
    const kvs_u32 number = tile->first + query;
    return (const float *)p->q + (kvs_u64)(number / tile->group) * p->q_stride +
           (tile->kv_head * tile->group + number % tile->group) * KVS_DIM_K;
}

/* A query's part in a region of parts. */
__device__ inline float *part_of(const kvs_attend_params *p, const tile_view *tile, kvs_u32 query, float *region)
{
    return region + ((kvs_u64)tile->kv_head * p->n_rows * tile->group + tile->first + query) * PART_FLOATS;
}

/* The head of a KV head's page. */
__device__ inline const kvs_u8 *head_of_page(const kvs_attend_params *p, const tile_view *tile, kvs_u32 page)
{
    const kvs_u8 *record = (const kvs_u8 *)((const kvs_u64 *)p->page_table)[page];
#ifdef __CUDACC__
    __builtin_assume(__isGlobal(record)); /* an address out of memory may be of any kind, and loads from such wait for stores to shared */
#endif
    return record + (kvs_u64)tile->kv_head * (k_side::bytes + v_side::bytes);
}

/* Bring bytes that the block will read soon from memory to the second-level cache. */
__device__ inline void prefetch_bytes(const kvs_u8 *begin, kvs_u32 n_bytes)
{
#ifdef __CUDACC__
    for (kvs_u32 at = threadIdx.x * 128; at < n_bytes; at += N_THREADS * 128) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(begin + at));
    }
#endif
}

/* Pages of the block's slot; none of a recorded launch behind the last page. */
struct page_run {
    kvs_u32 begin;
    kvs_u32 end;
    bool is_continued; /* the group has begun before `begin` */
};

__device__ inline page_run pages_of_slot(const kvs_attend_params *p, kvs_u32 slot)
{
    page_run run = {p->page_begin + slot, p->page_begin + slot + 1, false};
    if (p->is_grouped) {
        const kvs_u32 first = (p->page_begin / KVS_CUDA_GROUP_PAGES + slot) * KVS_CUDA_GROUP_PAGES;
        run.begin = first < p->page_begin ? p->page_begin : first;
        run.end = first + KVS_CUDA_GROUP_PAGES < p->page_end ? first + KVS_CUDA_GROUP_PAGES : p->page_end;
        run.is_continued = run.begin != first;
    }
    run.end = run.begin < p->page_end ? run.end : run.begin;
    return run;
}

__device__ inline float *region_of_slot(const kvs_attend_params *p, kvs_u32 slot)
{
    return (float *)p->slots + (kvs_u64)slot * p->n_query_heads * p->n_rows * PART_FLOATS;
}

#endif
