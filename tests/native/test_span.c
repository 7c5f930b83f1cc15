/* Span plans: exact ordered partitions, named refusals, kept leases, page tables. */
#include "rig.h"

#include "kvstream/span.h"

enum { N_RECORDS = 8 };

static const kvs_kv_layer layer = {
    .n_kv_heads = 2, .head_dim_k = 64, .head_dim_v = 64, .type_k = KVS_TYPE_Q8_0, .type_v = KVS_TYPE_Q4_0};

typedef struct bench {
    kvs_device *device;
    kvs_lease *lease;
    uint64_t record_bytes;
    kvs_span spans[3];
    kvs_span_desc desc;
} bench;

/* Three spans over 5 pages: 2 pages, 1 page, 1 page and 7 tokens; 16 rows of slack in the lease. */
static void open_bench(bench *b)
{
    kvs_record_info record = {.struct_size = sizeof record};
    CHECK_OK(kvs_record_layout(&layer, &record));
    b->device = rig_device(0, 0);
    b->record_bytes = record.record_bytes;
    b->lease = rig_lease(b->device, N_RECORDS * record.record_bytes);
    const kvs_span plain = {.lease = b->lease, .stride_bytes = record.record_bytes};
    for (uint32_t i = 0; i < 3; i++) {
        b->spans[i] = plain;
    }
    b->spans[0].n_tokens = 512;
    b->spans[0].offset_bytes = 6 * record.record_bytes;
    b->spans[1].token_begin = 512;
    b->spans[1].n_tokens = 256;
    b->spans[2].token_begin = 768;
    b->spans[2].n_tokens = 263;
    b->spans[2].offset_bytes = record.record_bytes;
    b->spans[2].stride_bytes = 2 * record.record_bytes;
    b->desc = (kvs_span_desc){.struct_size = sizeof b->desc,
                              .n_spans = 3,
                              .layer = &layer,
                              .spans = b->spans,
                              .active_tokens = 1031,
                              .n_query_rows = 4};
}

static void close_bench(bench *b)
{
    kvs_lease_release(b->lease);
    rig_close(b->device);
}

static void refuse(bench *b, kvs_status expected)
{
    kvs_span_plan *const sentinel = (kvs_span_plan *)(uintptr_t)0x1234;
    kvs_span_plan *plan = sentinel;
    const uint64_t live = rig_info(b->device).live_objects;
    CHECK_STATUS(kvs_span_plan_make(b->device, &b->desc, &plan), expected);
    CHECK(plan == sentinel);
    CHECK_U64(rig_info(b->device).live_objects, live);
}

static void test_page_table_is_in_logical_order(void)
{
    bench b;
    open_bench(&b);
    kvs_span_plan *plan = NULL;
    CHECK_OK(kvs_span_plan_make(b.device, &b.desc, &plan));
    memset(b.spans, 0, sizeof b.spans); /* the plan copied them */
    uint64_t table[5] = {9, 9, 9, 9, 9};
    CHECK_STATUS(kvs_span_plan_page_table(plan, table, 4), KVS_ENOSPACE);
    CHECK_U64(table[0], 9);
    CHECK_OK(kvs_span_plan_page_table(plan, table, 5));
    const uint64_t places[5] = {6, 7, 0, 1, 3};
    for (uint32_t i = 0; i < 5; i++) {
        CHECK_U64(table[i], kvs_lease_address(b.lease) + places[i] * b.record_bytes);
    }
    kvs_span_plan_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_span_plan_get_info(plan, &info));
    CHECK_U64(info.n_spans, 3);
    CHECK_U64(info.active_tokens, 1031);
    CHECK_U64(info.n_pages, 5);
    CHECK_U64(info.live_bytes, 5 * b.record_bytes);
    CHECK_U64(info.n_query_rows, 4);
    CHECK_U64(info.n_claims, 1);
    kvs_span_plan_release(plan);
    close_bench(&b);
}

/* P-SP2: the region cannot be laid out anew, nor the memory go, while a claim on a plan lives. */
static void test_plan_keeps_its_leases(void)
{
    bench b;
    open_bench(&b);
    kvs_span_plan *plan = NULL;
    CHECK_OK(kvs_span_plan_make(b.device, &b.desc, &plan));
    kvs_span_plan_retain(plan);
    kvs_lease_release(b.lease);
    kvs_span_plan_release(plan);
    uint64_t table[5];
    CHECK_OK(kvs_span_plan_page_table(plan, table, 5));
    memset(rig_bytes(table[4]), 1, b.record_bytes);
    kvs_span_plan_release(plan);
    kvs_span_plan_release(NULL);
    rig_close(b.device);
}

static void test_plan_keeps_every_one_of_its_leases(void)
{
    bench b;
    open_bench(&b);
    kvs_lease *second = rig_lease(b.device, N_RECORDS * b.record_bytes);
    b.spans[1].lease = second;
    kvs_span_plan *plan = NULL;
    CHECK_OK(kvs_span_plan_make(b.device, &b.desc, &plan));
    const uint64_t live = rig_info(b.device).live_objects;
    kvs_lease_release(second);
    kvs_lease_release(b.lease);
    CHECK_U64(rig_info(b.device).live_objects, live);
    kvs_span_plan_release(plan);
    rig_close(b.device);
}

static void test_numbers_are_refused(void)
{
    bench b;
    open_bench(&b);
    const kvs_span_desc good = b.desc;
    b.desc.struct_size = 8;
    refuse(&b, KVS_EINVAL);
    b.desc = good;
    b.desc.n_spans = 0;
    refuse(&b, KVS_EINVAL);
    b.desc = good;
    b.desc.spans = NULL;
    refuse(&b, KVS_EINVAL);
    b.desc = good;
    b.desc.layer = NULL;
    refuse(&b, KVS_EINVAL);
    b.desc = good;
    b.desc.active_tokens = 0;
    refuse(&b, KVS_EINVAL);
    b.desc = good;
    b.desc.n_query_rows = 0;
    refuse(&b, KVS_EINVAL);
    b.desc.n_query_rows = 1032;
    refuse(&b, KVS_EINVAL);
    kvs_kv_layer strange = layer;
    strange.head_dim_k = 48;
    b.desc = good;
    b.desc.layer = &strange;
    refuse(&b, KVS_EUNSUPPORTED);
    close_bench(&b);
}

static void test_partition_is_exact(void)
{
    bench b;
    open_bench(&b);
    const bench good = b;
#define REFUSE_WITH(change)                                    \
    do {                                                       \
        memcpy(b.spans, good.spans, sizeof b.spans);           \
        b.desc.active_tokens = 1031;                           \
        change;                                                \
        refuse(&b, KVS_EINVAL);                                \
    } while (0)
    REFUSE_WITH(b.spans[1].n_tokens = 0);               /* empty */
    REFUSE_WITH(b.spans[0].token_begin = 256);          /* does not begin at 0 */
    REFUSE_WITH(b.spans[1].token_begin = 768);          /* gap */
    REFUSE_WITH(b.spans[1].token_begin = 256);          /* overlap */
    REFUSE_WITH(b.spans[1] = good.spans[2]);            /* order */
    REFUSE_WITH(b.spans[1].n_tokens = 255; b.spans[2].token_begin = 767; b.spans[2].n_tokens = 264);
    REFUSE_WITH(b.desc.active_tokens = 1030);           /* too many */
    REFUSE_WITH(b.desc.active_tokens = 1032);           /* too few */
    REFUSE_WITH(b.spans[2].n_tokens = UINT64_MAX - 768); /* no wrap */
#undef REFUSE_WITH
    close_bench(&b);
}

static void test_leases_and_ranges_are_checked(void)
{
    bench b;
    open_bench(&b);
    const kvs_span good = b.spans[2];
    b.spans[2].lease = NULL;
    refuse(&b, KVS_EINVAL);
    b.spans[2] = good;
    b.spans[2].offset_bytes += 32;
    refuse(&b, KVS_EINVAL);
    b.spans[2] = good;
    b.spans[2].stride_bytes = b.record_bytes - 64;
    refuse(&b, KVS_EINVAL);
    b.spans[2].stride_bytes = b.record_bytes + 32;
    refuse(&b, KVS_EINVAL);
    b.spans[2].stride_bytes = UINT64_MAX - 63;
    refuse(&b, KVS_EOVERFLOW);
    b.spans[2] = good;
    b.spans[2].offset_bytes = (N_RECORDS - 2) * b.record_bytes;
    refuse(&b, KVS_ENOSPACE);
    b.spans[2].offset_bytes -= b.record_bytes - 64;
    refuse(&b, KVS_ENOSPACE);
    b.spans[2].offset_bytes -= 64;
    kvs_span_plan *plan = NULL;
    CHECK_OK(kvs_span_plan_make(b.device, &b.desc, &plan));
    kvs_span_plan_release(plan);
    close_bench(&b);
}

/* The first check that fails decides, whatever else is wrong. */
static void test_checks_run_in_the_promised_order(void)
{
    bench b;
    open_bench(&b);
    b.spans[2].lease = NULL;                       /* EINVAL, fourth */
    b.spans[1].stride_bytes = UINT64_MAX - 63;     /* a one-page span has no stride to overflow */
    b.spans[0].offset_bytes = UINT64_MAX - 63;     /* EOVERFLOW, fifth */
    refuse(&b, KVS_EINVAL);
    b.spans[0].executor = KVS_EXECUTOR_HOST;       /* EUNSUPPORTED, second */
    refuse(&b, KVS_EUNSUPPORTED);
    b.desc.active_tokens = 0;                      /* EINVAL, first */
    refuse(&b, KVS_EINVAL);
    b.desc.active_tokens = 1031;
    b.spans[0].executor = KVS_EXECUTOR_DEVICE;
    b.spans[2].lease = b.lease;
    refuse(&b, KVS_EOVERFLOW);
    b.spans[0].offset_bytes = N_RECORDS * b.record_bytes;
    refuse(&b, KVS_ENOSPACE);
    close_bench(&b);
}

static int fail_objects(void *user, int point, uint64_t index)
{
    (void)user;
    (void)index;
    return point == KVS_HOOK_ALLOC ? KVS_ENOMEM : 0;
}

static void test_no_memory_leaves_no_claim(void)
{
    bench b;
    open_bench(&b);
    CHECK_OK(kvs_device_set_hook(b.device, fail_objects, NULL));
    refuse(&b, KVS_ENOMEM);
    CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
    close_bench(&b);
}

int main(void)
{
    test_page_table_is_in_logical_order();
    test_plan_keeps_its_leases();
    test_plan_keeps_every_one_of_its_leases();
    test_numbers_are_refused();
    test_partition_is_exact();
    test_leases_and_ranges_are_checked();
    test_checks_run_in_the_promised_order();
    test_no_memory_leaves_no_claim();
    return check_finish();
}
