/* attend_fold.cuh: the second kernel of attention: slots in order into groups, groups into the result, the result out, rotated by
 * Walsh-Hadamard where that is asked for.
 *
 * Kernel: attend_fold. Grid (queries of all heads), block KVS_DIM_V. The file that includes this says by value_of_element which value
 * an element of a part is.
 *
 * Which maximum a slot meets depends on maxima alone, so the factors of 32 slots are found side by side, a lane each, and sums are one
 * product and one sum a slot behind them. Four groups of pages are folded at a time, by a quarter of the block each, four weighted sums
 * a thread; then each thread folds groups for one sum. The order of every sum is that of attend.cu.
 */
#ifndef KVS_KERNELS_ATTEND_FOLD_CUH
#define KVS_KERNELS_ATTEND_FOLD_CUH

#include "attend_parts.cuh"

#define TEAMS 4u
#define TEAM_THREADS (KVS_DIM_V / TEAMS)
#define SLOTS_AT_ONCE 32u /* TEAMS * KVS_CUDA_GROUP_PAGES: a lane each */
#define SLOTS_AHEAD 8u    /* that are read before the first of them is folded */
#define NOTHING __uint_as_float(0xff800000u) /* the maximum of what is empty: no other is smaller */

static_assert(TEAMS * KVS_CUDA_GROUP_PAGES == SLOTS_AT_ONCE, "a lane a slot");

struct folding {
    running head;
    float value;
};

/* Groups that a launch has folded side by side. */
struct folded_groups {
    float4 values[TEAMS][TEAM_THREADS];
    running heads[TEAMS];
};

/* What a lane knows of the fold of its slot, and all lanes of which slots there are. */
struct slot_factors {
    float keep;
    float add;
    float s;
    float m;           /* of all slots of the segment up to this one, and of what was there before */
    kvs_u32 is_filled; /* a bit a lane */
};

__device__ inline folding load_part(const float *part)
{
    folding loaded = {{part[0], part[1]}, part[PART_HEAD + threadIdx.x]};
    return loaded;
}

/* The values of an empty part count for nothing, whatever they are. */
__device__ inline void store_part(float *part, const folding *folded)
{
    if (threadIdx.x == 0) {
        part[0] = folded->head.m;
        part[1] = folded->head.s;
    }
    if (folded->head.s != 0.0f) {
        part[PART_HEAD + threadIdx.x] = folded->value;
    }
}

__device__ inline float later_maximum(float earlier, float later)
{
    return later > earlier ? later : earlier;
}

__device__ inline float maximum_of(const running *head)
{
    return head->s == 0.0f ? NOTHING : head->m;
}

/* Slots of SEGMENT neighbouring lanes follow one another, behind something whose maximum is `before`. */
template <kvs_u32 SEGMENT> __device__ inline slot_factors find_factors(running slot, float before)
{
    const kvs_u32 lane = threadIdx.x % 32, number = lane % SEGMENT;
    const float m = maximum_of(&slot);
    slot_factors found;
    found.s = slot.s;
    found.is_filled = __ballot_sync(KVS_FULL_WARP, slot.s != 0.0f);
    found.m = m;
#pragma unroll
    for (kvs_u32 distance = 1; distance < SEGMENT; distance *= 2) {
        const float earlier = __shfl_sync(KVS_FULL_WARP, found.m, lane - distance & 31u);
        found.m = number >= distance ? later_maximum(earlier, found.m) : found.m;
    }
    found.m = later_maximum(before, found.m);
    const float last = __shfl_sync(KVS_FULL_WARP, found.m, lane - 1 & 31u);
    const float earlier = number == 0 ? before : last;
    found.keep = kvs_exp(earlier - found.m);
    found.add = kvs_exp(m - found.m);
    return found;
}

/* Slot number i of SLOTS_AHEAD that follow one another from the lane `first` on joins what is there already, as has_begun says, or not. */
struct slot_fold {
    float keep[SLOTS_AHEAD];
    float add[SLOTS_AHEAD];
    float s[SLOTS_AHEAD];
    kvs_u32 is_filled;
    kvs_u32 has_begun;
};

__device__ inline slot_fold folds_from(const slot_factors *mine, kvs_u32 first, bool has_begun)
{
    slot_fold folds;
    folds.is_filled = mine->is_filled >> first;
    folds.has_begun = has_begun ? 0xffffffffu : 0u;
#pragma unroll
    for (kvs_u32 i = 0; i < SLOTS_AHEAD; i++) {
        folds.keep[i] = __shfl_sync(KVS_FULL_WARP, mine->keep, first + i);
        folds.add[i] = __shfl_sync(KVS_FULL_WARP, mine->add, first + i);
        folds.s[i] = __shfl_sync(KVS_FULL_WARP, mine->s, first + i);
        folds.has_begun |= (folds.is_filled >> i & 1u) != 0 ? 0xfffffffeu << i : 0u;
    }
    return folds;
}

/* fold_value without branches: several sums take the same way. */
__device__ inline float join(const slot_fold *folds, kvs_u32 i, float into, float part)
{
    const float both = fmaf(part, folds->add[i], into * folds->keep[i]);
    const float joined = (folds->has_begun >> i & 1u) != 0 ? both : part;
    return (folds->is_filled >> i & 1u) != 0 ? joined : into;
}

__device__ inline float value_of_group(const folded_groups *groups, kvs_u32 i)
{
    return ((const float *)groups->values[i])[threadIdx.x];
}

__device__ inline const float *part_of_slot(const kvs_attend_params *p, kvs_u32 slot)
{
    return (const float *)p->slots + ((kvs_u64)slot * p->n_query_heads * p->n_rows + blockIdx.x) * PART_FLOATS;
}

__device__ inline running head_of_slot(const kvs_attend_params *p, kvs_u32 slot, bool is_there)
{
    running head = {0.0f, 0.0f};
    if (is_there) {
        const float2 both = *(const float2 *)part_of_slot(p, slot);
        head.m = both.x;
        head.s = both.y;
    }
    return head;
}

/* The thread's team folds the pages of its group, of the groups from `first` on; one of the launch's first page goes on with `begun`. */
__device__ inline void fold_pages(const kvs_attend_params *p, kvs_u32 first, const float *begun, folded_groups *groups)
{
    const kvs_u32 lane = threadIdx.x % 32, team = threadIdx.x / TEAM_THREADS, column = threadIdx.x % TEAM_THREADS;
    const kvs_u32 page = first * KVS_CUDA_GROUP_PAGES + lane, first_page = (first + team) * KVS_CUDA_GROUP_PAGES;
    const bool goes_on = begun != nullptr && team == 0;
    const running slot = head_of_slot(p, page - p->page_begin, page >= p->page_begin && page < p->page_end);
    running head = {0.0f, 0.0f}, before = head;
    float4 sums = {}, parts[KVS_CUDA_GROUP_PAGES] = {};
    if (begun != nullptr) {
        before.m = begun[0];
        before.s = begun[1];
    }
    if (goes_on) {
        head = before;
        sums = ((const float4 *)(begun + PART_HEAD))[column];
    }
#pragma unroll
    for (kvs_u32 i = 0; i < KVS_CUDA_GROUP_PAGES; i++) {
        if (first_page + i >= p->page_begin && first_page + i < p->page_end) {
            parts[i] = ((const float4 *)(part_of_slot(p, first_page + i - p->page_begin) + PART_HEAD))[column];
        }
    }
    const slot_factors mine =
        find_factors<KVS_CUDA_GROUP_PAGES>(slot, lane < KVS_CUDA_GROUP_PAGES ? maximum_of(&before) : NOTHING);
    const slot_fold folds = folds_from(&mine, team * KVS_CUDA_GROUP_PAGES, head.s != 0.0f);
#pragma unroll
    for (kvs_u32 i = 0; i < KVS_CUDA_GROUP_PAGES; i++) {
        head.s = join(&folds, i, head.s, folds.s[i]);
        sums.x = join(&folds, i, sums.x, parts[i].x);
        sums.y = join(&folds, i, sums.y, parts[i].y);
        sums.z = join(&folds, i, sums.z, parts[i].z);
        sums.w = join(&folds, i, sums.w, parts[i].w);
    }
    head.m = __shfl_sync(KVS_FULL_WARP, mine.m, (team + 1) * KVS_CUDA_GROUP_PAGES - 1);
    groups->values[team][column] = sums;
    if (column == 0) {
        groups->heads[team] = head;
    }
}

/* Groups from `first` on that are complete join the result in order; one that is not is left in `group`. */
__device__ inline void fold_groups(const kvs_attend_params *p, kvs_u32 first, const folded_groups *groups, folding *group,
                                   folding *result)
{
    const kvs_u32 lane = threadIdx.x % 32, n_whole = p->page_end / KVS_CUDA_GROUP_PAGES - first;
    const running none = {0.0f, 0.0f}, head = lane < TEAMS && lane < n_whole ? groups->heads[lane % TEAMS] : none;
    const slot_factors mine = find_factors<SLOTS_AHEAD>(head, maximum_of(&result->head));
    const slot_fold folds = folds_from(&mine, 0, result->head.s != 0.0f);
#pragma unroll
    for (kvs_u32 i = 0; i < TEAMS; i++) {
        result->head.s = join(&folds, i, result->head.s, folds.s[i]);
        result->value = join(&folds, i, result->value, value_of_group(groups, i));
    }
    result->head.m = __shfl_sync(KVS_FULL_WARP, mine.m, SLOTS_AHEAD - 1);
    if (n_whole < TEAMS && p->page_end % KVS_CUDA_GROUP_PAGES != 0) {
        group->head = groups->heads[n_whole];
        group->value = value_of_group(groups, n_whole);
    }
}

/* Slots of pages: four groups at a time. */
__device__ inline void fold_slots_of_pages(const kvs_attend_params *p, const float *begun, folded_groups *groups, folding *group,
                                           folding *result)
{
    const kvs_u32 first = p->page_begin / KVS_CUDA_GROUP_PAGES;
    for (kvs_u32 at = first; at * KVS_CUDA_GROUP_PAGES < p->page_end; at += TEAMS) {
        if (at != first) {
            __syncthreads(); /* the groups before have been read */
        }
        fold_pages(p, at, at == first ? begun : nullptr, groups);
        __syncthreads();
        fold_groups(p, at, groups, group, result);
    }
}

/* Slots of groups: each began with what its group held. */
__device__ inline void fold_slots_of_groups(const kvs_attend_params *p, folding *group, folding *result)
{
    const kvs_u32 lane = threadIdx.x % 32, first = p->page_begin / KVS_CUDA_GROUP_PAGES;
    const kvs_u32 n_whole = p->page_end / KVS_CUDA_GROUP_PAGES - first;
    for (kvs_u32 begin = 0; begin < n_whole; begin += SLOTS_AT_ONCE) {
        const running slot = head_of_slot(p, begin + lane, begin + lane < n_whole);
        const slot_factors mine = find_factors<SLOTS_AT_ONCE>(slot, maximum_of(&result->head));
#pragma unroll 1
        for (kvs_u32 some = 0; some < SLOTS_AT_ONCE && begin + some < n_whole; some += SLOTS_AHEAD) {
            float parts[SLOTS_AHEAD];
#pragma unroll
            for (kvs_u32 i = 0; i < SLOTS_AHEAD; i++) {
                const kvs_u32 number = begin + some + i;
                parts[i] = number < n_whole ? part_of_slot(p, number)[PART_HEAD + threadIdx.x] : 0.0f;
            }
            const slot_fold folds = folds_from(&mine, some, result->head.s != 0.0f);
#pragma unroll
            for (kvs_u32 i = 0; i < SLOTS_AHEAD; i++) {
                result->head.s = join(&folds, i, result->head.s, folds.s[i]);
                result->value = join(&folds, i, result->value, parts[i]);
            }
        }
        result->head.m = __shfl_sync(KVS_FULL_WARP, mine.m, SLOTS_AT_ONCE - 1);
    }
    if (p->page_end % KVS_CUDA_GROUP_PAGES != 0) {
        *group = load_part(part_of_slot(p, n_whole));
    }
}

/* Sums and differences at distance 1, 2, 4, ... within blocks, then one product: the bits of hadamard.cuh. `value` is number
 * threadIdx.x of the head. */
__device__ inline float rotate_value(const kvs_attend_params *p, float value, float (*rows)[KVS_DIM_V])
{
    for (kvs_u32 distance = 1; distance < 32 && distance < p->block; distance *= 2) {
        const float other = __shfl_xor_sync(KVS_FULL_WARP, value, distance);
        value = (threadIdx.x & distance) == 0 ? value + other : other - value;
    }
    for (kvs_u32 distance = 32, row = 1; distance < p->block; distance *= 2, row ^= 1u) {
        rows[row][threadIdx.x] = value;
        __syncthreads(); /* the row after next is this one again, and all have passed the next one's barrier before that */
        const float other = rows[row][threadIdx.x ^ distance];
        value = (threadIdx.x & distance) == 0 ? value + other : other - value;
    }
    return value * p->block_scale;
}

extern "C" __global__ void __launch_bounds__(KVS_DIM_V) attend_fold(const kvs_attend_params given)
{
    __shared__ folded_groups groups;
    __shared__ float rows[2][KVS_DIM_V];
    kvs_let_next_begin();
    const kvs_attend_params p = params_of_pass(given);
    kvs_wait_for_previous();
    if (p.page_begin >= p.page_end) {
        return;
    }
    const kvs_u64 query = blockIdx.x;
    float *group_part = (float *)p.groups + query * PART_FLOATS, *result_part = (float *)p.results + query * PART_FLOATS;
    folding group = {{0.0f, 0.0f}, 0.0f}, result = {{0.0f, 0.0f}, 0.0f};
    if (!p.is_first) {
        result = load_part(result_part);
    }
    if (p.is_grouped) {
        fold_slots_of_groups(&p, &group, &result);
    } else {
        fold_slots_of_pages(&p, p.is_first ? nullptr : group_part, &groups, &group, &result);
    }
    if (!p.is_last) {
        __syncthreads(); /* all have read what one writes for all */
        store_part(group_part, &group);
        store_part(result_part, &result);
        return;
    }
    const fold_factors factors = fold_into(&result.head, group.head.m, group.head.s);
    float value = fold_value(&factors, result.value, group.value) * (1.0f / result.head.s);
    value = value != value ? __uint_as_float(KVS_NAN_BITS) : value;
    kvs_u32 number = value_of_element(threadIdx.x);
    if (p.block != 0) {
        rows[0][number] = value;
        __syncthreads();
        number = threadIdx.x;
        value = rotate_value(&p, rows[0][number], rows);
    }
    const kvs_u32 heads = p.n_query_heads / p.n_kv_heads, per_head = p.n_rows * heads;
    const kvs_u32 kv_head = (kvs_u32)(query / per_head), rest = (kvs_u32)(query % per_head);
    float *out = (float *)p.out + (kvs_u64)(rest / heads) * p.out_stride + (kv_head * heads + rest % heads) * KVS_DIM_V;
    out[number] = value;
}

#endif
