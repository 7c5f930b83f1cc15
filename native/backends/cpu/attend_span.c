/* attend_span.c: attention of a frozen span plan, in one wave. */
#include "backends/cpu/attend.h"
#include "base/internal.h"

#define ALIGNMENT 64u

kvs_status kvs_cpu_attend_plan(kvs_device *device, kvs_threads *threads, uint32_t isa, const kvs_attend_desc *desc,
                               const kvs_kv_layer *layer, const uint64_t *pages, uint64_t active_tokens,
                               uint32_t n_query_rows)
{
    kvs_record_info record = {.struct_size = sizeof record};
    kvs_status status = kvs_record_layout(layer, &record);
    if (status != KVS_OK) {
        return status;
    }
    if (desc->q == NULL || desc->out == NULL || desc->n_query_heads == 0 ||
        desc->n_query_heads % layer->n_kv_heads != 0) {
        return kvs_fail(device, KVS_EINVAL, "%u query heads over %u KV heads, or no memory", desc->n_query_heads,
                        layer->n_kv_heads);
    }
    if (n_query_rows == 0 || n_query_rows > active_tokens) {
        return kvs_fail(device, KVS_EINVAL, "%u query rows of %llu tokens", n_query_rows, (kvs_ull)active_tokens);
    }
    const uint64_t bytes =
        kvs_attend_state_bytes(layer, desc->n_query_heads, n_query_rows, kvs_threads_count(threads));
    if (bytes == 0 || bytes > SIZE_MAX - ALIGNMENT) {
        return kvs_fail(device, KVS_EOVERFLOW, "attention of %u rows and %u heads does not fit", n_query_rows,
                        desc->n_query_heads);
    }
    void *memory = kvs_array_alloc(NULL, (size_t)bytes + ALIGNMENT, 1);
    if (memory == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "need %llu bytes for attention", (kvs_ull)bytes);
    }
    const uintptr_t aligned = ((uintptr_t)memory + ALIGNMENT - 1) & ~(uintptr_t)(ALIGNMENT - 1);
    const kvs_attend_job job = {.layer = layer,
                                .record = &record,
                                .n_query_heads = desc->n_query_heads,
                                .n_rows = n_query_rows,
                                .q = desc->q,
                                .q_stride = (uint64_t)desc->n_query_heads * layer->head_dim_k,
                                .out = desc->out,
                                .out_stride = (uint64_t)desc->n_query_heads * layer->head_dim_v,
                                .scale = desc->scale,
                                .first_position = active_tokens - n_query_rows,
                                .page_table = pages,
                                .state = (void *)aligned};
    kvs_attend_begin(&job);
    kvs_attend_wave(threads, isa, &job, 0, kvs_div_up(active_tokens, KVS_PAGE_TOKENS));
    kvs_attend_finish(threads, isa, &job);
    kvs_array_free(memory);
    return KVS_OK;
}
