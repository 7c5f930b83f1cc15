/* The logical cache: tokens, pages, shared columns, copy on write, extents, publication, loading. */
#include "rig.h"

#include "core/cache.h"

enum { P = KVS_PAGE_TOKENS };

/* Two layers of different records. */
static const kvs_kv_layer layers[] = {
    {.n_kv_heads = 1, .head_dim_k = 32, .head_dim_v = 32, .type_k = KVS_TYPE_Q8_0, .type_v = KVS_TYPE_Q8_0},
    {.n_kv_heads = 2, .head_dim_k = 32, .head_dim_v = 64, .type_k = KVS_TYPE_F16, .type_v = KVS_TYPE_Q4_0},
};

typedef struct bench {
    kvs_device *device;
    kvs_cache *cache;
    kvs_seq *seq;
} bench;

static void open_bench(bench *b, uint64_t ctx_tokens)
{
    b->device = rig_device(0, 0);
    b->cache = NULL;
    b->seq = NULL;
    CHECK_OK(kvs_cache_create(b->device, layers, 2, &b->cache));
    CHECK_OK(kvs_seq_create(b->cache, ctx_tokens, &b->seq));
}

static void close_bench(bench *b)
{
    kvs_seq_release(b->seq);
    kvs_cache_release(b->cache);
    rig_close(b->device);
}

static void extend(kvs_seq *seq, uint64_t n_tokens)
{
    CHECK_OK(kvs_seq_append(seq, n_tokens));
    CHECK_OK(kvs_seq_commit(seq, n_tokens));
    CHECK_OK(kvs_cache_check_integrity(kvs_seq_cache(seq)));
}

static kvs_seq_info info_of(kvs_seq *seq)
{
    kvs_seq_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_seq_get_info(seq, &info));
    return info;
}

static uint64_t columns_of(kvs_cache *cache)
{
    kvs_cache_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_cache_get_info(cache, &info));
    return info.n_pages;
}

static kvs_page_info page_of(kvs_seq *seq, uint32_t layer, uint64_t page)
{
    kvs_page_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_seq_get_page(seq, layer, page, &info));
    return info;
}

static kvs_seq *fork_of(kvs_seq *seq)
{
    kvs_seq *child = NULL;
    CHECK_OK(kvs_seq_fork(seq, &child));
    CHECK_OK(kvs_cache_check_integrity(kvs_seq_cache(seq)));
    return child;
}

static void test_append_commit_truncate_count_tokens_and_pages(void)
{
    bench b;
    open_bench(&b, 4 * P);
    CHECK_OK(kvs_seq_append(b.seq, P + 1));
    CHECK_STATUS(kvs_seq_append(b.seq, 1), KVS_EBUSY);
    CHECK_STATUS(kvs_seq_commit(b.seq, P + 2), KVS_EINVAL);
    kvs_seq_info info = info_of(b.seq);
    CHECK(info.committed_tokens == 0 && info.appended_tokens == P + 1 && info.n_pages == 2);
    const uint64_t generation = info.generation;
    CHECK_OK(kvs_seq_commit(b.seq, P));
    info = info_of(b.seq);
    CHECK(info.committed_tokens == P && info.appended_tokens == P && info.n_pages == 1);
    CHECK(info.generation > generation);
    CHECK_STATUS(kvs_seq_truncate(b.seq, P + 1), KVS_EINVAL);
    CHECK_OK(kvs_seq_truncate(b.seq, 3));
    info = info_of(b.seq);
    CHECK(info.committed_tokens == 3 && info.n_pages == 1);
    CHECK_OK(kvs_seq_truncate(b.seq, 0));
    CHECK_U64(info_of(b.seq).n_pages, 0);
    CHECK_U64(columns_of(b.cache), 0);
    close_bench(&b);
}

static void test_context_is_filled_exactly_and_no_further(void)
{
    bench b;
    open_bench(&b, P + 2);
    CHECK_STATUS(kvs_seq_append(b.seq, 0), KVS_EINVAL);
    CHECK_STATUS(kvs_seq_append(b.seq, P + 3), KVS_ECONTEXT);
    CHECK_STATUS(kvs_seq_append(b.seq, UINT64_MAX), KVS_ECONTEXT);
    extend(b.seq, P + 2);
    CHECK_STATUS(kvs_seq_append(b.seq, 1), KVS_ECONTEXT);
    CHECK_U64(info_of(b.seq).appended_tokens, P + 2);
    CHECK_OK(kvs_seq_truncate(b.seq, P + 1));
    extend(b.seq, 1);
    close_bench(&b);
}

static void test_pages_of_a_layer_lie_one_behind_another(void)
{
    bench b;
    open_bench(&b, 5 * P);
    extend(b.seq, 3);
    extend(b.seq, 4 * P);
    for (uint32_t layer = 0; layer < 2; layer++) {
        const uint64_t record_bytes = kvs_cache_record(b.cache, layer)->record_bytes;
        const uint64_t base = layer == 0 ? 0 : 5 * kvs_cache_record(b.cache, 0)->record_bytes;
        for (uint64_t page = 0; page < 5; page++) {
            CHECK_U64(page_of(b.seq, layer, page).host_offset_bytes, base + page * record_bytes);
        }
    }
    CHECK_U64(page_of(b.seq, 0, 0).extent_id, page_of(b.seq, 1, 4).extent_id);
    kvs_page_info info = {.struct_size = sizeof info};
    CHECK_STATUS(kvs_seq_get_page(b.seq, 2, 0, &info), KVS_EINVAL);
    CHECK_STATUS(kvs_seq_get_page(b.seq, 0, 5, &info), KVS_ENOTFOUND);
    close_bench(&b);
}

/* The child holds the same columns; whoever appends to the shared tail gets a private one, the other keeps the old. */
static void test_fork_shares_and_append_replaces_the_tail(void)
{
    bench b;
    open_bench(&b, 4 * P);
    extend(b.seq, P + 10);
    CHECK_OK(kvs_page_set_published(b.seq, 0, P));
    CHECK_OK(kvs_page_set_published(b.seq, 1, 10));
    kvs_seq *child = fork_of(b.seq);
    CHECK_U64(columns_of(b.cache), 2);
    CHECK_U64(info_of(child).n_shared_pages, 2);
    CHECK_U64(info_of(child).reserved_host_bytes, 0);
    CHECK_U64(page_of(child, 1, 1).page_id, page_of(b.seq, 1, 1).page_id);
    const uint64_t old_id = page_of(b.seq, 0, 1).page_id;

    CHECK_OK(kvs_seq_append(child, 2));
    CHECK_OK(kvs_cache_check_integrity(b.cache));
    CHECK(page_of(child, 0, 1).page_id != old_id);
    CHECK_U64(page_of(child, 0, 1).published_rows, 0);
    CHECK_U64(page_of(b.seq, 0, 1).page_id, old_id);
    CHECK_U64(page_of(child, 0, 0).page_id, page_of(b.seq, 0, 0).page_id);
    CHECK(info_of(child).reserved_host_bytes > 0);
    uint64_t page = 0;
    uint64_t rows = 0;
    kvs_page_view source;
    CHECK(kvs_seq_copy_source(child, &page, &source, &rows));
    CHECK(page == 1 && rows == 10 && source.page_id == old_id && source.published_rows == 10);
    kvs_seq_copy_done(child);
    CHECK(!kvs_seq_copy_source(child, NULL, NULL, NULL));
    CHECK_OK(kvs_seq_commit(child, 2));
    /* The parent is alone on the old page now and goes on in it. */
    extend(b.seq, 1);
    CHECK_U64(page_of(b.seq, 0, 1).page_id, old_id);
    kvs_seq_release(child);
    CHECK_OK(kvs_cache_check_integrity(b.cache));
    close_bench(&b);
}

/* A column that somebody waits for is nobody's to write, though only one sequence holds it. */
static void test_waited_for_rows_survive_their_last_holder(void)
{
    bench b;
    open_bench(&b, 2 * P);
    extend(b.seq, 100);
    CHECK_OK(kvs_page_set_published(b.seq, 0, 100));
    kvs_seq *child = fork_of(b.seq);
    const uint64_t old_id = page_of(b.seq, 0, 0).page_id;
    CHECK_OK(kvs_seq_append(b.seq, 1));
    CHECK_OK(kvs_seq_truncate(child, 50));
    CHECK_OK(kvs_seq_append(child, 1));
    CHECK(page_of(child, 0, 0).page_id != old_id);
    uint64_t rows = 0;
    kvs_page_view source;
    CHECK(kvs_seq_copy_source(b.seq, NULL, &source, &rows));
    CHECK(source.page_id == old_id && rows == 100 && source.published_rows == 100 && source.n_holders == 0);
    CHECK(kvs_seq_copy_source(child, NULL, &source, &rows));
    CHECK(source.page_id == old_id && rows == 50 && source.published_rows == 50);
    CHECK_U64(columns_of(b.cache), 3);
    kvs_seq_copy_done(b.seq);
    CHECK_U64(columns_of(b.cache), 3);
    kvs_seq_copy_done(child);
    CHECK_U64(columns_of(b.cache), 2);
    CHECK_OK(kvs_cache_check_integrity(b.cache));
    kvs_seq_release(child);
    close_bench(&b);
}

/* When all new rows are dropped before the old ones were brought over, the old column is the page again. */
static void test_dropping_new_rows_puts_the_shared_page_back(void)
{
    bench b;
    open_bench(&b, 2 * P);
    extend(b.seq, 20);
    kvs_seq *child = fork_of(b.seq);
    const uint64_t old_id = page_of(b.seq, 0, 0).page_id;
    CHECK_OK(kvs_seq_append(child, 5));
    CHECK_STATUS(kvs_seq_commit(child, 6), KVS_EINVAL);
    CHECK_OK(kvs_seq_commit(child, 0));
    CHECK_U64(page_of(child, 0, 0).page_id, old_id);
    CHECK_U64(page_of(child, 0, 0).n_holders, 2);
    CHECK_U64(columns_of(b.cache), 1);
    CHECK(!kvs_seq_copy_source(child, NULL, NULL, NULL));

    kvs_seq *none = NULL;
    CHECK_OK(kvs_seq_append(child, 5));
    CHECK_STATUS(kvs_seq_fork(child, &none), KVS_EBUSY);
    CHECK_OK(kvs_seq_commit(child, 5));
    CHECK_STATUS(kvs_seq_fork(child, &none), KVS_EBUSY);
    CHECK(none == NULL);
    CHECK_OK(kvs_seq_truncate(child, 10));
    CHECK_U64(page_of(child, 0, 0).page_id, old_id);
    CHECK_OK(kvs_cache_check_integrity(b.cache));
    kvs_seq_release(child);
    close_bench(&b);
}

static void test_truncate_inside_a_page_unpublishes_rows(void)
{
    bench b;
    open_bench(&b, 3 * P);
    extend(b.seq, 2 * P);
    CHECK_OK(kvs_page_set_published(b.seq, 0, P));
    CHECK_OK(kvs_page_set_published(b.seq, 1, P));
    CHECK_OK(kvs_seq_truncate(b.seq, P + 9));
    CHECK_U64(page_of(b.seq, 0, 1).published_rows, 9);
    CHECK_OK(kvs_seq_append(b.seq, 1));
    CHECK_U64(page_of(b.seq, 0, 1).published_rows, 9);
    CHECK_STATUS(kvs_page_set_published(b.seq, 1, 11), KVS_EINVAL);
    CHECK_STATUS(kvs_page_set_published(b.seq, 2, 1), KVS_ENOTFOUND);
    CHECK_OK(kvs_seq_commit(b.seq, 0));
    /* A shared page stays shared: each sees its own rows of it. */
    kvs_seq *child = fork_of(b.seq);
    CHECK_OK(kvs_seq_truncate(child, 7));
    CHECK_U64(page_of(child, 0, 0).published_rows, 7);
    CHECK_U64(page_of(b.seq, 0, 0).published_rows, P);
    CHECK_STATUS(kvs_page_set_published(child, 0, 6), KVS_EBUSY);
    /* Alone again, the longer history's rows do not come back. */
    kvs_seq_release(b.seq);
    b.seq = child;
    CHECK_OK(kvs_seq_append(child, P - 7));
    CHECK_U64(page_of(child, 0, 0).published_rows, 7);
    CHECK_OK(kvs_cache_check_integrity(b.cache));
    close_bench(&b);
}

/* The slot belongs to the fork: the parent goes on elsewhere, and nothing is overwritten. */
static void test_occupied_slot_moves_the_sequence_to_a_new_extent(void)
{
    bench b;
    open_bench(&b, 3 * P);
    extend(b.seq, 2 * P);
    kvs_seq *child = fork_of(b.seq);
    const kvs_page_info before = page_of(child, 0, 1);
    CHECK_OK(kvs_seq_truncate(b.seq, P));
    extend(b.seq, 2 * P);
    const kvs_page_info after = page_of(b.seq, 0, 1);
    CHECK(after.extent_id != before.extent_id && after.page_id != before.page_id);
    CHECK_U64(page_of(b.seq, 0, 2).extent_id, after.extent_id);
    CHECK_U64(page_of(b.seq, 0, 0).extent_id, before.extent_id);
    CHECK_U64(page_of(child, 0, 1).page_id, before.page_id);
    CHECK_U64(after.host_offset_bytes, 0);
    const uint64_t live = rig_info(b.device).host_bytes;
    kvs_seq_release(b.seq);
    CHECK(rig_info(b.device).host_bytes < live);
    b.seq = child;
    CHECK_OK(kvs_cache_check_integrity(b.cache));
    close_bench(&b);
}

static void test_page_ids_are_never_used_again(void)
{
    bench b;
    open_bench(&b, 2 * P);
    uint64_t last = 0;
    for (uint32_t round = 0; round < 20; round++) {
        extend(b.seq, 1);
        const uint64_t id = page_of(b.seq, 0, 0).page_id;
        CHECK(round == 0 || id > last);
        last = id;
        CHECK_OK(kvs_seq_truncate(b.seq, 0));
    }
    close_bench(&b);
}

static void fill_record(uint8_t *record, uint64_t n_bytes, uint32_t seed)
{
    for (uint64_t i = 0; i < n_bytes; i++) {
        record[i] = (uint8_t)(i * 7 + seed);
    }
}

static void test_written_page_is_published_with_its_last_layer(void)
{
    bench b;
    open_bench(&b, 2 * P);
    extend(b.seq, P + 40);
    static uint8_t record[64 * 1024];
    static uint8_t again[64 * 1024];
    const uint64_t bytes[] = {kvs_cache_record(b.cache, 0)->record_bytes, kvs_cache_record(b.cache, 1)->record_bytes};
    CHECK_STATUS(kvs_seq_read_page_wait(b.seq, 0, 1, again), KVS_ENOTFOUND);
    CHECK_STATUS(kvs_seq_write_page_wait(b.seq, 0, 1, record, 41), KVS_EINVAL);
    CHECK_STATUS(kvs_seq_write_page_wait(b.seq, 0, 1, record, 0), KVS_EINVAL);
    CHECK_STATUS(kvs_seq_write_page_wait(b.seq, 2, 1, record, 1), KVS_EINVAL);
    CHECK_STATUS(kvs_seq_write_page_wait(b.seq, 0, 2, record, 1), KVS_ENOTFOUND);
    fill_record(record, bytes[0], 1);
    CHECK_OK(kvs_seq_write_page_wait(b.seq, 0, 1, record, 40));
    CHECK_OK(kvs_seq_write_page_wait(b.seq, 0, 1, record, 40));
    CHECK_U64(page_of(b.seq, 0, 1).published_rows, 0);
    fill_record(record, bytes[1], 2);
    CHECK_OK(kvs_seq_write_page_wait(b.seq, 1, 1, record, 39)); /* begins anew */
    CHECK_OK(kvs_seq_write_page_wait(b.seq, 1, 1, record, 40)); /* and anew */
    CHECK_U64(page_of(b.seq, 0, 1).published_rows, 0);
    fill_record(record, bytes[0], 3);
    CHECK_OK(kvs_seq_write_page_wait(b.seq, 0, 1, record, 40));
    CHECK_U64(page_of(b.seq, 0, 1).published_rows, 40);
    for (uint32_t layer = 0; layer < 2; layer++) {
        fill_record(record, bytes[layer], layer == 0 ? 3 : 2);
        CHECK_OK(kvs_seq_read_page_wait(b.seq, layer, 1, again));
        CHECK(memcmp(record, again, bytes[layer]) == 0);
    }
    kvs_seq *child = fork_of(b.seq);
    CHECK_STATUS(kvs_seq_write_page_wait(child, 0, 1, record, 40), KVS_EBUSY);
    /* A whole written page needs no rows of the page it replaced. */
    extend(child, 1);
    CHECK(kvs_seq_copy_source(child, NULL, NULL, NULL));
    CHECK_OK(kvs_seq_write_page_wait(child, 0, 1, record, 41));
    CHECK_OK(kvs_seq_write_page_wait(child, 1, 1, record, 41));
    CHECK(!kvs_seq_copy_source(child, NULL, NULL, NULL));
    fill_record(record, bytes[0], 3);
    CHECK_OK(kvs_seq_read_page_wait(b.seq, 0, 1, again));
    CHECK(memcmp(record, again, bytes[0]) == 0);
    kvs_seq_release(child);
    close_bench(&b);
}

static int fail_from(void *user, int point, uint64_t index)
{
    const uint64_t *first = user;
    return point == KVS_HOOK_ALLOC && index >= *first ? KVS_ENOMEM : 0;
}

static int count_allocations(void *user, int point, uint64_t index)
{
    uint64_t *next = user;
    if (point == KVS_HOOK_ALLOC) {
        *next = index + 1;
    }
    return 0;
}

/* Whichever allocation fails, append, fork and create change nothing. */
static void test_failed_allocation_changes_nothing(void)
{
    bench b;
    open_bench(&b, 6 * P);
    extend(b.seq, P / 2);
    kvs_seq *child = fork_of(b.seq);
    uint64_t next = 0;
    CHECK_OK(kvs_device_set_hook(b.device, count_allocations, &next));
    kvs_host *probe = NULL;
    CHECK_OK(kvs_host_create(b.device, 64, &probe));
    kvs_host_release(probe);
    const kvs_device_info before = rig_info(b.device);
    for (uint64_t attempt = 0; attempt < 6; attempt++) {
        uint64_t first = next + attempt;
        CHECK_OK(kvs_device_set_hook(b.device, fail_from, &first));
        CHECK_STATUS(kvs_seq_append(child, 4 * P), KVS_ENOMEM);
        CHECK_OK(kvs_cache_check_integrity(b.cache));
        CHECK_U64(rig_info(b.device).live_objects, before.live_objects);
        CHECK_U64(rig_info(b.device).host_bytes, before.host_bytes);
        CHECK_U64(info_of(child).generation, 0);
        CHECK_U64(info_of(child).appended_tokens, P / 2);
        kvs_seq *none = NULL;
        first = 0;
        CHECK_STATUS(kvs_seq_fork(child, &none), KVS_ENOMEM);
        CHECK_STATUS(kvs_seq_create(b.cache, 10, &none), KVS_ENOMEM);
        CHECK(none == NULL);
        CHECK_OK(kvs_device_set_hook(b.device, count_allocations, &next));
        CHECK_OK(kvs_host_create(b.device, 64, &probe));
        kvs_host_release(probe);
    }
    CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
    CHECK_OK(kvs_seq_append(child, 4 * P));
    kvs_seq_release(child);
    close_bench(&b);
}

static void test_geometry_is_refused_by_layer(void)
{
    kvs_device *device = rig_device(0, 0);
    kvs_cache *cache = NULL;
    kvs_kv_layer bad[2] = {layers[0], layers[1]};
    bad[1].head_dim_v = 48;
    CHECK_STATUS(kvs_cache_create(device, bad, 2, &cache), KVS_EUNSUPPORTED);
    char text[300];
    CHECK_OK(kvs_device_last_error(device, text, sizeof text));
    CHECK(strstr(text, "layer 1") != NULL && strstr(text, "48") != NULL);
    CHECK_STATUS(kvs_cache_create(device, bad, 0, &cache), KVS_EINVAL);
    CHECK_STATUS(kvs_cache_create(device, NULL, 1, &cache), KVS_EINVAL);
    CHECK_OK(kvs_cache_create(device, bad, 1, &cache));
    kvs_seq *seq = NULL;
    CHECK_STATUS(kvs_seq_create(cache, 0, &seq), KVS_EINVAL);
    CHECK_STATUS(kvs_seq_create(cache, UINT64_MAX, &seq), KVS_EOVERFLOW);
    CHECK_OK(kvs_seq_create(cache, 10, &seq));
    /* A sequence keeps its cache. */
    kvs_cache_release(cache);
    extend(seq, 10);
    kvs_seq_release(seq);
    kvs_seq_release(NULL);
    kvs_cache_release(NULL);
    rig_close(device);
}

int main(void)
{
    test_append_commit_truncate_count_tokens_and_pages();
    test_context_is_filled_exactly_and_no_further();
    test_pages_of_a_layer_lie_one_behind_another();
    test_fork_shares_and_append_replaces_the_tail();
    test_waited_for_rows_survive_their_last_holder();
    test_dropping_new_rows_puts_the_shared_page_back();
    test_truncate_inside_a_page_unpublishes_rows();
    test_occupied_slot_moves_the_sequence_to_a_new_extent();
    test_page_ids_are_never_used_again();
    test_written_page_is_published_with_its_last_layer();
    test_failed_allocation_changes_nothing();
    test_geometry_is_refused_by_layer();
    return check_finish();
}
