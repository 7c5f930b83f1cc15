/* attend_fold.cuh: the second kernel of attention: slots in order into groups, groups into the result, the result out.
 *
 * Kernel: attend_fold. Grid (queries of all heads), block KVS_DIM_V: a weighted sum a thread. Maxima come first, so that all
 * exponentials are taken at once; then sums and weighted sums fold in order. The file that includes this says by value_of_element
 * which value an element of a part is.
 */
#ifndef KVS_KERNELS_ATTEND_FOLD_CUH
#define KVS_KERNELS_ATTEND_FOLD_CUH

#include "attend_parts.cuh"

/* Values of slots that are read before the first of them is folded: one after another they would cost a trip to memory each. */
#define SLOTS_AHEAD 8u

/* What is known of every slot before any weighted sum is read. */
struct fold_plan {
    running slots[KVS_CUDA_MAX_SLOTS];
    fold_factors into_group[KVS_CUDA_MAX_SLOTS];
    fold_factors into_result[KVS_CUDA_MAX_SLOTS]; /* of the group, where the slot completes one */
    float group_m[KVS_CUDA_MAX_SLOTS];            /* of the group, with the slot */
    float result_m[KVS_CUDA_MAX_SLOTS];           /* of the result, with the group */
};

/* A fold as fold_into has it, for factors alone: the sum stands for whether a part is empty. */
__device__ inline fold_factors factors_of(running *into, const running *part)
{
    fold_factors factors = {FOLD_NOTHING, 1.0f, 0.0f};
    if (part->s == 0.0f) {
        return factors;
    }
    const float larger = into->s != 0.0f && !(part->m > into->m) ? into->m : part->m;
    factors.kind = into->s == 0.0f ? FOLD_COPY : FOLD_BOTH;
    factors.keep = into->m - larger;
    factors.add = part->m - larger;
    into->m = larger;
    into->s = 1.0f;
    return factors;
}

/* Until here the factors are exponents. */
__device__ inline void raise(fold_factors *factors)
{
    if (factors->kind == FOLD_BOTH) {
        factors->keep = kvs_exp(factors->keep);
        factors->add = kvs_exp(factors->add);
    }
}

/* Slots of a launch, and where groups end among them. */
struct slot_view {
    kvs_u32 stride; /* pages of a slot */
    kvs_u32 first;  /* page of the first slot, or of its group */
    kvs_u32 n;
};

__device__ inline slot_view slots_of(const kvs_attend_params *p)
{
    slot_view view;
    view.stride = p->is_grouped ? KVS_CUDA_GROUP_PAGES : 1u;
    view.first = p->page_begin / view.stride * view.stride;
    view.n = (p->page_end - view.first + view.stride - 1) / view.stride;
    return view;
}

/* Does the slot complete its group? */
__device__ inline bool ends_group(const kvs_attend_params *p, const slot_view *view, kvs_u32 slot)
{
    const kvs_u32 next = view->first + (slot + 1) * view->stride;
    return next % KVS_CUDA_GROUP_PAGES == 0 && next <= p->page_end;
}

/* One slot a thread, each from the start of its group: maxima alone, so that no thread waits for another's exponential. */
__device__ inline void plan_group(const kvs_attend_params *p, const slot_view *view, kvs_u32 slot, running group,
                                  fold_plan *plan)
{
    const kvs_u32 in_group = (view->first + slot) % KVS_CUDA_GROUP_PAGES;
    const kvs_u32 begin = p->is_grouped ? slot : slot > in_group ? slot - in_group : 0;
    if (p->is_grouped || in_group <= slot) {
        group.s = 0.0f; /* the group begins here: a slot of a whole group began with what there was */
    }
    fold_factors factors = {FOLD_NOTHING, 1.0f, 0.0f};
    for (kvs_u32 i = begin; i <= slot; i++) {
        factors = factors_of(&group, &plan->slots[i]);
    }
    raise(&factors);
    plan->into_group[slot] = factors;
    plan->group_m[slot] = group.m;
}

/* One slot a thread that completes a group, over all groups before. */
__device__ inline void plan_result(const kvs_attend_params *p, const slot_view *view, kvs_u32 slot, running group,
                                   running result, fold_plan *plan)
{
    fold_factors factors = {FOLD_NOTHING, 1.0f, 0.0f};
    for (kvs_u32 i = 0; i <= slot; i++) {
        const bool begins = p->is_grouped || (view->first + i) % KVS_CUDA_GROUP_PAGES == 0;
        const float before = begins ? 0.0f : group.s;
        group.s = plan->slots[i].s != 0.0f ? 1.0f : before;
        group.m = plan->group_m[i];
        if (ends_group(p, view, i)) {
            factors = factors_of(&result, &group);
        }
    }
    raise(&factors);
    plan->into_result[slot] = factors;
    plan->result_m[slot] = result.m;
}

/* A weighted sum a thread; every thread folds the query's sum for itself. */
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

__device__ inline void fold_planned(const fold_factors *factors, float m, float s, float value, folding *into)
{
    into->value = fold_value(factors, into->value, value);
    into->head.s = fold_value(factors, into->head.s, s);
    into->head.m = factors->kind == FOLD_NOTHING ? into->head.m : m;
}

extern "C" __global__ void __launch_bounds__(KVS_DIM_V) attend_fold(const kvs_attend_params p)
{
    __shared__ fold_plan plan;
    const kvs_u64 n_queries = (kvs_u64)p.n_query_heads * p.n_rows, query = blockIdx.x;
    float *group_part = (float *)p.groups + query * PART_FLOATS, *result_part = (float *)p.results + query * PART_FLOATS;
    const float *slots = (const float *)p.slots + query * PART_FLOATS;
    const slot_view view = slots_of(&p);
    folding group = {{0.0f, 0.0f}, 0.0f}, result = {{0.0f, 0.0f}, 0.0f};
    if (!p.is_first) {
        group = load_part(group_part);
        result = load_part(result_part);
    }
    for (kvs_u32 slot = threadIdx.x; slot < view.n; slot += KVS_DIM_V) {
        const float *part = slots + slot * n_queries * PART_FLOATS;
        plan.slots[slot].m = part[0];
        plan.slots[slot].s = part[1];
    }
    __syncthreads();
    for (kvs_u32 slot = threadIdx.x; slot < view.n; slot += KVS_DIM_V) {
        plan_group(&p, &view, slot, group.head, &plan);
    }
    __syncthreads();
    for (kvs_u32 slot = threadIdx.x; slot < view.n; slot += KVS_DIM_V) {
        if (ends_group(&p, &view, slot)) {
            plan_result(&p, &view, slot, group.head, result.head, &plan);
        }
    }
    __syncthreads();
    for (kvs_u32 begin = 0; begin < view.n; begin += SLOTS_AHEAD) {
        float values[SLOTS_AHEAD];
#pragma unroll
        for (kvs_u32 i = 0; i < SLOTS_AHEAD; i++) {
            const kvs_u32 slot = begin + i < view.n ? begin + i : view.n - 1;
            values[i] = slots[slot * n_queries * PART_FLOATS + PART_HEAD + threadIdx.x];
        }
#pragma unroll
        for (kvs_u32 i = 0; i < SLOTS_AHEAD; i++) {
            const kvs_u32 slot = begin + i;
            if (slot < view.n) {
                if (p.is_grouped || (view.first + slot) % KVS_CUDA_GROUP_PAGES == 0) {
                    group.head.s = 0.0f;
                }
                fold_planned(&plan.into_group[slot], plan.group_m[slot], plan.slots[slot].s, values[i], &group);
                if (ends_group(&p, &view, slot)) {
                    fold_planned(&plan.into_result[slot], plan.result_m[slot], group.head.s, group.value, &result);
                    group.head.s = 0.0f;
                }
            }
        }
    }
    if (!p.is_last) {
        store_part(group_part, &group);
        store_part(result_part, &result);
        return;
    }
    const fold_factors factors = fold_into(&result.head, group.head.m, group.head.s);
    result.value = fold_value(&factors, result.value, group.value);
    const kvs_u32 heads = p.n_query_heads / p.n_kv_heads, per_head = p.n_rows * heads;
    const kvs_u32 kv_head = (kvs_u32)(query / per_head), rest = (kvs_u32)(query % per_head);
    const float value = result.value * (1.0f / result.head.s);
    float *out = (float *)p.out + (kvs_u64)(rest / heads) * p.out_stride + (kv_head * heads + rest % heads) * KVS_DIM_V;
    out[value_of_element(threadIdx.x)] = value != value ? __uint_as_float(KVS_NAN_BITS) : value;
}

#endif
