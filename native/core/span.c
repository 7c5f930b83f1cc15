#include "kvstream/span.h"

#include "core/device.h"

#include <math.h>

struct kvs_span_plan {
    _Atomic uint64_t n_claims;
    kvs_device *device;
    kvs_kv_layer layer;
    kvs_record_info record;
    uint64_t active_tokens;
    uint64_t n_pages;
    uint32_t n_query_rows;
    uint32_t n_spans;
    kvs_span spans[];
};

/* ---- validation, in the order that the header promises ---- */

static kvs_status check_numbers(kvs_device *device, const kvs_span_desc *desc)
{
    if (desc->layer == NULL || desc->spans == NULL || desc->n_spans == 0) {
        return kvs_fail(device, KVS_EINVAL, "span plan: no layer or no spans");
    }
    if (desc->active_tokens == 0 || desc->n_query_rows == 0 || desc->n_query_rows > desc->active_tokens) {
        return kvs_fail(device, KVS_EINVAL, "span plan: %u query rows of %llu active tokens", desc->n_query_rows,
                        (kvs_ull)desc->active_tokens);
    }
    return KVS_OK;
}

static kvs_status check_executors(kvs_device *device, const kvs_span_desc *desc)
{
    for (uint32_t i = 0; i < desc->n_spans; i++) {
        if (desc->spans[i].executor != KVS_EXECUTOR_DEVICE) {
            return kvs_fail(device, KVS_EUNSUPPORTED, "span %u: executor %u (%s) is not offered by this backend", i,
                            desc->spans[i].executor,
                            desc->spans[i].executor == KVS_EXECUTOR_HOST ? "host" : "unknown");
        }
    }
    return KVS_OK;
}

static kvs_status check_partition(kvs_device *device, const kvs_span_desc *desc)
{
    uint64_t frontier = 0;
    for (uint32_t i = 0; i < desc->n_spans; i++) {
        const kvs_span *span = &desc->spans[i];
        if (span->n_tokens == 0 || span->token_begin != frontier) {
            return kvs_fail(device, KVS_EINVAL, "span %u: %llu tokens from %llu on, expected to begin at %llu", i,
                            (kvs_ull)span->n_tokens, (kvs_ull)span->token_begin, (kvs_ull)frontier);
        }
        if (span->token_begin % KVS_PAGE_TOKENS != 0) {
            return kvs_fail(device, KVS_EINVAL, "span %u: begins at %llu, inside a page", i,
                            (kvs_ull)span->token_begin);
        }
        /* Stays in range: more than what is left is refused before it is added. */
        if (span->n_tokens > desc->active_tokens - frontier) {
            return kvs_fail(device, KVS_EINVAL, "span %u: %llu tokens, %llu are left", i, (kvs_ull)span->n_tokens,
                            (kvs_ull)(desc->active_tokens - frontier));
        }
        frontier += span->n_tokens;
    }
    if (frontier != desc->active_tokens) {
        return kvs_fail(device, KVS_EINVAL, "span %u: ends at %llu, %llu tokens are active", desc->n_spans - 1,
                        (kvs_ull)frontier, (kvs_ull)desc->active_tokens);
    }
    return KVS_OK;
}

static kvs_status check_leases(kvs_device *device, const kvs_span_desc *desc, uint64_t record_bytes)
{
    for (uint32_t i = 0; i < desc->n_spans; i++) {
        const kvs_span *span = &desc->spans[i];
        if (span->lease == NULL || kvs_lease_device(span->lease) != device) {
            return kvs_fail(device, KVS_EINVAL, "span %u: no lease, or one of another device", i);
        }
        if (span->offset_bytes % 64 != 0 || span->stride_bytes % 64 != 0 || span->stride_bytes < record_bytes) {
            return kvs_fail(device, KVS_EINVAL,
                            "span %u: offset %llu and stride %llu go by 64; a record has %llu bytes", i,
                            (kvs_ull)span->offset_bytes, (kvs_ull)span->stride_bytes, (kvs_ull)record_bytes);
        }
    }
    return KVS_OK;
}

/* End of the last record of a span; false on overflow. */
static bool span_end(const kvs_span *span, uint64_t record_bytes, uint64_t *end)
{
    uint64_t strides;
    return kvs_mul_u64(kvs_div_up(span->n_tokens, KVS_PAGE_TOKENS) - 1, span->stride_bytes, &strides) &&
           kvs_add_u64(strides, span->offset_bytes, end) && kvs_add_u64(*end, record_bytes, end);
}

static kvs_status check_ranges(kvs_device *device, const kvs_span_desc *desc, uint64_t record_bytes)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < desc->n_spans; i++) {
        if (!span_end(&desc->spans[i], record_bytes, &end)) {
            return kvs_fail(device, KVS_EOVERFLOW, "span %u: ends beyond 64 bits", i);
        }
    }
    for (uint32_t i = 0; i < desc->n_spans; i++) {
        const uint64_t have = kvs_lease_bytes(desc->spans[i].lease);
        if (span_end(&desc->spans[i], record_bytes, &end) && end > have) {
            return kvs_fail(device, KVS_ENOSPACE, "span %u: ends at %llu, its region has %llu bytes", i, (kvs_ull)end,
                            (kvs_ull)have);
        }
    }
    return KVS_OK;
}

static kvs_status check_all(kvs_device *device, const kvs_span_desc *desc, kvs_record_info *record)
{
    kvs_status status = check_numbers(device, desc);
    if (status == KVS_OK) {
        status = kvs_record_layout(desc->layer, record);
        if (status < 0) {
            return kvs_fail(device, status, "span plan: the layer's geometry is refused with %s",
                            kvs_status_name(status));
        }
        status = check_executors(device, desc);
    }
    if (status == KVS_OK) {
        status = check_partition(device, desc);
    }
    if (status == KVS_OK) {
        status = check_leases(device, desc, record->record_bytes);
    }
    if (status == KVS_OK) {
        status = check_ranges(device, desc, record->record_bytes);
    }
    return status;
}

/* ---- life ---- */

kvs_status kvs_span_plan_make(kvs_device *device, const kvs_span_desc *desc, kvs_span_plan **plan)
{
    if (device == NULL || plan == NULL || !KVS_STRUCT_OK(desc)) {
        return kvs_fail(device, KVS_EINVAL, "span plan: no device, no place for the handle or no description");
    }
    kvs_record_info record = {.struct_size = sizeof record};
    const kvs_status status = check_all(device, desc, &record);
    if (status < 0) {
        return status;
    }
    uint64_t span_bytes;
    if (!kvs_mul_u64(desc->n_spans, sizeof(kvs_span), &span_bytes) || span_bytes > SIZE_MAX / 2) {
        return kvs_fail(device, KVS_EOVERFLOW, "span plan: %u spans", desc->n_spans);
    }
    kvs_span_plan *made = kvs_object_alloc(device, sizeof *made + (size_t)span_bytes);
    if (made == NULL) {
        return KVS_ENOMEM;
    }
    atomic_init(&made->n_claims, 1);
    made->device = device;
    made->layer = *desc->layer;
    made->record = record;
    made->active_tokens = desc->active_tokens;
    made->n_pages = kvs_div_up(desc->active_tokens, KVS_PAGE_TOKENS);
    made->n_query_rows = desc->n_query_rows;
    made->n_spans = desc->n_spans;
    for (uint32_t i = 0; i < desc->n_spans; i++) {
        made->spans[i] = desc->spans[i];
        kvs_lease_retain(desc->spans[i].lease);
    }
    *plan = made;
    return KVS_OK;
}

void kvs_span_plan_retain(kvs_span_plan *plan)
{
    if (plan != NULL) {
        atomic_fetch_add_explicit(&plan->n_claims, 1, memory_order_relaxed);
    }
}

void kvs_span_plan_release(kvs_span_plan *plan)
{
    if (plan == NULL || atomic_fetch_sub_explicit(&plan->n_claims, 1, memory_order_acq_rel) != 1) {
        return;
    }
    for (uint32_t i = 0; i < plan->n_spans; i++) {
        kvs_lease_release(plan->spans[i].lease);
    }
    kvs_object_free(plan->device, plan);
}

/* ---- reports ---- */

kvs_status kvs_span_plan_get_info(kvs_span_plan *plan, kvs_span_plan_info *info)
{
    if (plan == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_fail(plan == NULL ? NULL : plan->device, KVS_EINVAL, "span plan: no place for its state");
    }
    info->n_spans = plan->n_spans;
    info->active_tokens = plan->active_tokens;
    info->n_pages = plan->n_pages;
    info->live_bytes = plan->n_pages * plan->record.record_bytes;
    info->n_query_rows = plan->n_query_rows;
    const uint64_t n_claims = atomic_load_explicit(&plan->n_claims, memory_order_relaxed);
    info->n_claims = n_claims > UINT32_MAX ? UINT32_MAX : (uint32_t)n_claims;
    return KVS_OK;
}

static void write_table(const kvs_span_plan *plan, uint64_t *addresses)
{
    for (uint32_t i = 0; i < plan->n_spans; i++) {
        const kvs_span *span = &plan->spans[i];
        uint64_t address = kvs_lease_address(span->lease) + span->offset_bytes;
        for (uint64_t page = 0; page < kvs_div_up(span->n_tokens, KVS_PAGE_TOKENS); page++) {
            *addresses++ = address;
            address += span->stride_bytes;
        }
    }
}

kvs_status kvs_span_plan_page_table(kvs_span_plan *plan, uint64_t *addresses, uint64_t capacity)
{
    if (plan == NULL || addresses == NULL) {
        return kvs_fail(plan == NULL ? NULL : plan->device, KVS_EINVAL, "span plan: no place for the page table");
    }
    if (capacity < plan->n_pages) {
        return kvs_fail(plan->device, KVS_ENOSPACE, "span plan: need %llu table entries, have %llu",
                        (kvs_ull)plan->n_pages, (kvs_ull)capacity);
    }
    write_table(plan, addresses);
    return KVS_OK;
}

/* ---- attention over a plan ---- */

static kvs_status check_attend(kvs_device *device, const kvs_attend_desc *desc)
{
    if (device == NULL || !KVS_STRUCT_OK(desc) || desc->plan == NULL || desc->q == NULL || desc->out == NULL) {
        return kvs_fail(device, KVS_EINVAL, "attention: no device, plan, queries or place for the result");
    }
    if (desc->plan->device != device) {
        return kvs_fail(device, KVS_EINVAL, "attention: the plan belongs to another device");
    }
    const uint32_t n_kv_heads = desc->plan->layer.n_kv_heads;
    if (desc->n_query_heads == 0 || desc->n_query_heads % n_kv_heads != 0) {
        return kvs_fail(device, KVS_EINVAL, "attention: %u query heads are no multiple of %u KV heads",
                        desc->n_query_heads, n_kv_heads);
    }
    if (!isfinite(desc->scale)) {
        return kvs_fail(device, KVS_EINVAL, "attention: the scale is not finite");
    }
    return KVS_OK;
}

kvs_status kvs_attend_run(kvs_device *device, const kvs_attend_desc *desc)
{
    kvs_status status = check_attend(device, desc);
    if (status < 0) {
        return status;
    }
    const kvs_span_plan *plan = desc->plan;
    uint64_t *pages = plan->n_pages > SIZE_MAX ? NULL : kvs_array_alloc(plan->device, (size_t)plan->n_pages, sizeof *pages);
    if (pages == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "attention: no memory for a table of %llu pages", (kvs_ull)plan->n_pages);
    }
    write_table(plan, pages);
    const struct kvs_device_view view = kvs_device_backend(device);
    if (view.backend->attend_plan == NULL) {
        kvs_array_free(pages);
        return kvs_fail(device, KVS_EUNSUPPORTED, "a %s device attends to pages in a tape alone", view.backend->name);
    }
    status = view.backend->attend_plan(view.self, desc, &plan->layer, pages, plan->active_tokens,
                                       plan->n_query_rows);
    kvs_array_free(pages);
    return status;
}
