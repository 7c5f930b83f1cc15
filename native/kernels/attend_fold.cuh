/* attend_fold.cuh: the second kernel of attention: slots in order into groups, groups into the result, the result out.
 *
 * Kernel: attend_fold. Grid (queries of all heads), block KVS_DIM_V: a weighted sum a thread; every thread folds the query's maximum and
 * sum for itself. The file that includes this says by value_of_element which value an element of a part is.
 */
#ifndef KVS_KERNELS_ATTEND_FOLD_CUH
#define KVS_KERNELS_ATTEND_FOLD_CUH

#include "attend_parts.cuh"

/* Slots that are read before the first of them is folded: one after another they would cost a trip to memory each. */
#define SLOTS_AHEAD 8u

struct folding {
    running head;
    float value;
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

__device__ inline void fold_part(folding *into, const folding *part)
{
    const fold_factors factors = fold_into(&into->head, part->head.m, part->head.s);
    into->value = fold_value(&factors, into->value, part->value);
}

/* A slot that ends before page `next` joins its group, and a group that is complete the result. */
__device__ inline void fold_slot(const kvs_attend_params *p, kvs_u32 next, const folding *part, folding *group,
                                 folding *result)
{
    if (p->is_grouped) {
        *group = *part; /* it began with what the group held */
    } else {
        fold_part(group, part);
    }
    if (next % KVS_CUDA_GROUP_PAGES == 0 && next <= p->page_end) {
        fold_part(result, group);
        group->head.s = 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(KVS_DIM_V) attend_fold(const kvs_attend_params given)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    const kvs_attend_params p = params_of_pass(given);
    if (p.page_begin >= p.page_end) {
        return;
    }
    const kvs_u64 n_queries = (kvs_u64)p.n_query_heads * p.n_rows, query = blockIdx.x;
    float *group_part = (float *)p.groups + query * PART_FLOATS, *result_part = (float *)p.results + query * PART_FLOATS;
    folding group = {{0.0f, 0.0f}, 0.0f}, result = {{0.0f, 0.0f}, 0.0f};
    if (!p.is_first) {
        result = load_part(result_part);
        if (!p.is_grouped) { /* slots of groups hold it */
            group = load_part(group_part);
        }
    }
    const kvs_u32 stride = p.is_grouped ? KVS_CUDA_GROUP_PAGES : 1u, first = p.page_begin / stride * stride;
    const kvs_u32 n_slots = (p.page_end - first + stride - 1) / stride;
    const float *slots = (const float *)p.slots + query * PART_FLOATS;
    for (kvs_u32 begin = 0; begin < n_slots; begin += SLOTS_AHEAD) {
        folding parts[SLOTS_AHEAD];
#pragma unroll
        for (kvs_u32 i = 0; i < SLOTS_AHEAD; i++) {
            if (begin + i < n_slots) {
                parts[i] = load_part(slots + (begin + i) * n_queries * PART_FLOATS);
            }
        }
#pragma unroll
        for (kvs_u32 i = 0; i < SLOTS_AHEAD; i++) {
            if (begin + i < n_slots) {
                fold_slot(&p, first + (begin + i + 1) * stride, &parts[i], &group, &result);
            }
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

#endif
