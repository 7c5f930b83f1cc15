/* Pagers and the order of things: nothing is read, moved or counted before what it needs has happened. */
#include "pager_scene.h"

#include "core/cache.h"
#include "core/history.h"

static uint32_t run_all_copies(const bench *b)
{
    uint32_t ran = 0;
    CHECK_OK(kvs_device_run_copies(b->device, UINT32_MAX, &ran));
    return ran;
}

/* Neither rows on their way out nor pages asked for ahead of time: their slots and history belong to others now. */
static void test_a_truncation_leaves_no_copy_under_way(void)
{
    bench b;
    open_bench(&b, KVS_DEVICE_DEFERRED);
    const kvs_placement placement = placement_of(shares, 5, P);
    CHECK_OK(kvs_pager_place(b.pager, &placement));
    for (int i = 0; i < 5; i++) {
        take_pass(&b, b.seq, P, P);
    }
    take_pass(&b, b.seq, 10, 10);
    CHECK_OK(kvs_pager_truncate(b.pager, b.seq, 2 * P));
    CHECK_U64(run_all_copies(&b), 0);
    take_pass(&b, b.seq, 10, 10);
    check_history(&b, b.seq);
    close_bench(&b);
}

/* Whoever gets the pool next may write to it at once. */
static void test_a_pool_is_given_back_with_no_copy_under_way(void)
{
    bench b;
    open_bench(&b, KVS_DEVICE_DEFERRED);
    take_pass(&b, b.seq, 10, 10);
    CHECK_OK(kvs_pager_detach(b.pager));
    CHECK_U64(run_all_copies(&b), 0);
    check_history(&b, b.seq);
    close_bench(&b);
}

/* The slots of pages that nobody read may change hands after the pass, and a copy that failed must be heard of. */
static void test_a_pass_does_not_end_before_its_pages_have_come(void)
{
    bench b;
    open_bench(&b, KVS_DEVICE_DEFERRED);
    take_pass(&b, b.seq, P, P);
    CHECK_OK(kvs_pager_forget(b.pager));
    fault f = {.count = 1};
    CHECK_OK(kvs_device_set_hook(b.device, fail_copies, &f));
    CHECK_OK(kvs_pager_begin(b.pager, b.seq, 1));
    CHECK_STATUS(kvs_pager_end(b.pager, 1), KVS_EIO);
    CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
    CHECK_U64(tokens_of(b.seq), P);
    take_pass(&b, b.seq, 1, 1);
    check_history(&b, b.seq);
    close_bench(&b);
}

/* A pass across a page boundary keeps a page less of the prefix than the pass that looked ahead for it. */
static void test_a_wider_pass_asks_for_its_own_pages(uint32_t flags)
{
    bench b;
    open_bench(&b, flags);
    for (int i = 0; i < 4; i++) {
        take_pass(&b, b.seq, P, P);
    }
    take_pass(&b, b.seq, 200, 200);
    take_pass(&b, b.seq, 1, 1);
    take_pass(&b, b.seq, 100, 100);
    check_history(&b, b.seq);
    close_bench(&b);
}

static void test_a_pass_over_two_pages_reaches_history_whole(uint32_t flags)
{
    bench b;
    open_bench(&b, flags);
    take_pass(&b, b.seq, 200, 200);
    take_pass(&b, b.seq, P, P);
    check_history(&b, b.seq);
    close_bench(&b);
}

/* A page that was written anew has another id: what a slot holds under the old one is not it. */
static void test_a_page_loaded_behind_the_pager_is_brought_anew(uint32_t flags)
{
    static uint8_t records[N_LAYERS][P * 256];
    bench b;
    open_bench(&b, flags);
    take_pass(&b, b.seq, P, P);
    take_pass(&b, b.seq, 10, 10);
    CHECK_OK(kvs_pager_publish_wait(b.pager));
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        CHECK_OK(kvs_seq_read_page_wait(b.seq, layer, 0, records[layer]));
    }
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        CHECK_OK(kvs_seq_write_page_wait(b.seq, layer, 0, records[layer], P));
    }
    const uint64_t loaded = info_of(&b).loaded_pages;
    take_pass(&b, b.seq, 1, 1);
    CHECK(info_of(&b).loaded_pages >= loaded + N_LAYERS);
    check_history(&b, b.seq);
    close_bench(&b);
}

/* A bench whose sequence has 100 tokens in history, and a fork of it, which the caller releases. */
static kvs_seq *open_fork(bench *b, uint32_t flags)
{
    kvs_seq *child = NULL;
    open_bench(b, flags);
    take_pass(b, b->seq, 100, 100);
    CHECK_OK(kvs_pager_publish_wait(b->pager));
    CHECK_OK(kvs_seq_fork(b->seq, &child));
    return child;
}

/* The parent goes on in a page of its own; the slot holds what is now the fork's. */
static void test_a_page_that_an_append_replaced_stays_with_the_fork(uint32_t flags)
{
    bench b;
    kvs_seq *child = open_fork(&b, flags);
    take_pass(&b, b.seq, 30, 30);
    take_pass(&b, child, 1, 1);
    check_history(&b, b.seq);
    check_history(&b, child);
    kvs_seq_release(child);
    close_bench(&b);
}

/* Rows that were committed past the pager were never written anywhere. */
static void test_a_page_that_history_does_not_have_is_not_streamed(void)
{
    bench b;
    open_bench(&b, 0);
    take_pass(&b, b.seq, P, P);
    take_pass(&b, b.seq, P, P);
    CHECK_OK(kvs_pager_publish_wait(b.pager));
    CHECK_OK(kvs_seq_append(b.seq, 2 * P));
    CHECK_OK(kvs_seq_commit(b.seq, 2 * P));
    CHECK_STATUS(kvs_pager_begin(b.pager, b.seq, 1), KVS_EINVAL);
    CHECK_OK(kvs_pager_truncate(b.pager, b.seq, 2 * P));
    take_pass(&b, b.seq, 1, 1);
    check_history(&b, b.seq);
    close_bench(&b);
}

static uint64_t published_rows(kvs_seq *seq, uint64_t page)
{
    kvs_page_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_seq_get_page(seq, 0, page, &info));
    return info.published_rows;
}

static void write_row(const bench *b, const kvs_page_view *view, uint32_t layer, uint64_t token)
{
    const kvs_record_info *record = &b->records[layer];
    uint8_t row[P];
    memset(row, mark(token, layer), sizeof row);
    for (uint32_t plane = 0; plane < KVS_N_PLANES; plane++) {
        const uint64_t n_bytes = record->plane_row_bytes[plane];
        const uint64_t offset = record->plane_offset_bytes[plane] + token % P * n_bytes;
        CHECK(n_bytes <= sizeof row);
        CHECK_OK(kvs_host_write_wait(view->host, kvs_page_host_offset(b->cache, view, layer) + offset, row, n_bytes));
    }
}

/* A pass as a card's kernels decode: its own rows are in history when it ends, and nothing else is. */
static void take_written_pass(const bench *b, kvs_seq *seq, uint32_t n_rows, uint32_t n_kept)
{
    const uint64_t first = tokens_of(seq);
    CHECK_OK(kvs_pager_begin(b->pager, seq, n_rows));
    CHECK_OK(play(b));
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        for (uint64_t token = first; token < first + n_rows; token++) {
            kvs_page_view view;
            CHECK_OK(kvs_seq_view_page(seq, token / P, &view));
            write_row(b, &view, layer, token);
        }
    }
    kvs_pager_note_written(b->pager);
    CHECK_OK(kvs_pager_end(b->pager, n_kept));
}

/* Behind a page that history has whole, over the end of one, and of a draft only what is kept. */
static void test_rows_that_a_pass_wrote_are_history_when_it_ends(uint32_t flags)
{
    bench b;
    open_bench(&b, flags);
    take_pass(&b, b.seq, P - 3, P - 3);
    CHECK_OK(kvs_pager_publish_wait(b.pager));
    take_written_pass(&b, b.seq, 1, 1);
    CHECK_U64(published_rows(b.seq, 0), P - 2);
    take_written_pass(&b, b.seq, 6, 5);
    CHECK_U64(published_rows(b.seq, 0), P);
    CHECK_U64(published_rows(b.seq, 1), 3);
    if ((flags & KVS_DEVICE_DEFERRED) != 0) {
        CHECK_U64(run_all_copies(&b), 0);
    }
    check_history(&b, b.seq);
    close_bench(&b);
}

/* Rows of a prompt whose copies fail while the next pass writes rows of its own behind them. */
static void test_rows_that_history_lacked_before_a_pass_are_not_of_its_writing(void)
{
    bench b;
    open_bench(&b, KVS_DEVICE_DEFERRED);
    take_pass(&b, b.seq, 10, 10);
    fault f = {.count = 1};
    CHECK_OK(kvs_device_set_hook(b.device, fail_copies, &f));
    take_written_pass(&b, b.seq, 2, 2);
    CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
    CHECK_U64(f.seen > 0, 1);
    CHECK_U64(published_rows(b.seq, 0), 0);
    check_history(&b, b.seq);
    CHECK_U64(published_rows(b.seq, 0), 12);
    close_bench(&b);
}

/* The page that an append makes has its first rows on the device only, whichever of two forks goes on. */
static void test_a_page_that_was_copied_reaches_history_whole(uint32_t flags)
{
    bench b;
    kvs_seq *child = open_fork(&b, flags);
    take_written_pass(&b, child, 2, 2);
    check_history(&b, child);
    take_written_pass(&b, b.seq, 3, 3);
    check_history(&b, b.seq);
    kvs_seq_release(child);
    CHECK_OK(kvs_seq_fork(b.seq, &child));
    take_written_pass(&b, b.seq, 1, 1);
    CHECK(published_rows(b.seq, 0) < 104);
    check_history(&b, b.seq);
    check_history(&b, child);
    kvs_seq_release(child);
    close_bench(&b);
}

int main(void)
{
    const uint32_t modes[] = {0, KVS_DEVICE_DEFERRED};
    for (int i = 0; i < 2; i++) {
        test_a_wider_pass_asks_for_its_own_pages(modes[i]);
        test_a_pass_over_two_pages_reaches_history_whole(modes[i]);
        test_a_page_loaded_behind_the_pager_is_brought_anew(modes[i]);
        test_a_page_that_an_append_replaced_stays_with_the_fork(modes[i]);
        test_rows_that_a_pass_wrote_are_history_when_it_ends(modes[i]);
        test_a_page_that_was_copied_reaches_history_whole(modes[i]);
    }
    test_a_truncation_leaves_no_copy_under_way();
    test_a_pool_is_given_back_with_no_copy_under_way();
    test_a_pass_does_not_end_before_its_pages_have_come();
    test_a_page_that_history_does_not_have_is_not_streamed();
    test_rows_that_history_lacked_before_a_pass_are_not_of_its_writing();
    return check_finish();
}
