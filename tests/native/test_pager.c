/* Pagers without Python: a life of passes over a streaming history, and every refusal that the header names. */
#include "pager_scene.h"

static void test_a_life_reads_what_it_wrote(uint32_t flags)
{
    bench b;
    open_bench(&b, flags);
    const uint32_t rows[] = {P, P, 100, 156, P - 1, 1, 1, 1, 200};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        take_pass(&b, b.seq, rows[i], rows[i]);
    }
    CHECK(info_of(&b).streamed_pages > 0);
    check_history(&b, b.seq);
    take_pass(&b, b.seq, 100, 3);
    CHECK_OK(kvs_pager_truncate(b.pager, b.seq, 2 * P + 17));
    take_pass(&b, b.seq, 5, 5);
    kvs_seq *child = NULL;
    CHECK_OK(kvs_pager_publish_wait(b.pager));
    CHECK_OK(kvs_seq_fork(b.seq, &child));
    take_pass(&b, child, 30, 30);
    take_pass(&b, b.seq, 1, 1);
    take_pass(&b, child, 1, 1);
    const uint32_t others[] = {3, 2};
    const kvs_placement placement = placement_of(others, 1, 3);
    CHECK_OK(kvs_pager_place(b.pager, &placement));
    take_pass(&b, b.seq, 2, 2);
    CHECK_OK(kvs_pager_forget(b.pager));
    CHECK_U64(info_of(&b).resident_pages, 0);
    take_pass(&b, b.seq, 2, 2);
    CHECK_OK(kvs_pager_detach(b.pager));
    CHECK_OK(kvs_pager_detach(b.pager)); /* nothing left to give back */
    CHECK_OK(kvs_pager_attach(b.pager, b.lease, &placement));
    take_pass(&b, b.seq, 1, 1);
    check_history(&b, b.seq);
    check_history(&b, child);
    CHECK_OK(kvs_pager_drop(b.pager, child));
    kvs_seq_release(child);
    take_pass(&b, b.seq, 1, 1);
    check_history(&b, b.seq);
    close_bench(&b);
}

static void test_create_refuses(void)
{
    bench b;
    open_bench(&b, 0);
    kvs_pager *pager = NULL;
    CHECK_STATUS(kvs_pager_create(NULL, &pager), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_create(b.cache, NULL), KVS_EINVAL);
    kvs_pager_release(NULL);
    kvs_pager_info info = {.struct_size = sizeof info};
    CHECK_STATUS(kvs_pager_get_info(NULL, &info), KVS_EINVAL);
    info.struct_size = 4;
    CHECK_STATUS(kvs_pager_get_info(b.pager, &info), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_check_integrity(NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_publish_wait(NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_detach(NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_forget(NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_drop(b.pager, NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_truncate(b.pager, NULL, 0), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_begin(b.pager, NULL, 1), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_end(NULL, 0), KVS_EINVAL);
    close_bench(&b);
}

static void test_placements_are_counted_or_refused(void)
{
    uint64_t n_slots = 0;
    kvs_placement placement = placement_of(shares, 2, P);
    CHECK_OK(kvs_placement_slots(&placement, CTX, &n_slots));
    CHECK_U64(n_slots, 7);
    CHECK_STATUS(kvs_placement_slots(NULL, CTX, &n_slots), KVS_EINVAL);
    CHECK_STATUS(kvs_placement_slots(&placement, CTX, NULL), KVS_EINVAL);
    placement.max_rows = P + 1; /* three tail pages, layer 0 has two */
    CHECK_STATUS(kvs_placement_slots(&placement, CTX, &n_slots), KVS_EINVAL);
    CHECK_OK(kvs_placement_slots(&placement, 2 * P, &n_slots)); /* no context reaches them */
    placement.max_rows = 0;
    CHECK_STATUS(kvs_placement_slots(&placement, CTX, &n_slots), KVS_EINVAL);
    placement = placement_of(shares, 0, P);
    CHECK_STATUS(kvs_placement_slots(&placement, CTX, &n_slots), KVS_EINVAL); /* no ring, and something streams */
    CHECK_OK(kvs_placement_slots(&placement, 2 * P, &n_slots));
    const uint32_t many[] = {UINT32_MAX, UINT32_MAX};
    placement = placement_of(many, 1, 1);
    CHECK_STATUS(kvs_placement_slots(&placement, CTX, &n_slots), KVS_EOVERFLOW);
    placement.n_layers = 0;
    CHECK_STATUS(kvs_placement_slots(&placement, CTX, &n_slots), KVS_EINVAL);
}

static int refuse_allocation(void *user, int point, uint64_t index)
{
    (void)index;
    uint64_t *left = user;
    if (point != KVS_HOOK_ALLOC) {
        return 0;
    }
    return (*left)-- == 0 ? KVS_ENOMEM : 0;
}

static void test_attach_and_place_refuse_and_change_nothing(void)
{
    bench b;
    open_bench(&b, 0);
    take_pass(&b, b.seq, 100, 100);
    const kvs_placement fits = placement_of(shares, 2, P);
    CHECK_STATUS(kvs_pager_attach(b.pager, b.lease, &fits), KVS_EBUSY);
    CHECK_STATUS(kvs_pager_attach(NULL, b.lease, &fits), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_attach(b.pager, NULL, &fits), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_place(NULL, &fits), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_place(b.pager, NULL), KVS_EINVAL);
    kvs_placement bad = fits;
    bad.n_layers = 1;
    CHECK_STATUS(kvs_pager_place(b.pager, &bad), KVS_EINVAL);
    const uint32_t none[] = {0, 3};
    bad = placement_of(none, 2, P);
    CHECK_STATUS(kvs_pager_place(b.pager, &bad), KVS_EINVAL);
    const uint32_t many[] = {5, 5};
    bad = placement_of(many, 1, P);
    CHECK_STATUS(kvs_pager_place(b.pager, &bad), KVS_ENOSPACE);
    uint64_t left = 0;
    CHECK_OK(kvs_device_set_hook(b.device, refuse_allocation, &left));
    CHECK_STATUS(kvs_pager_place(b.pager, &fits), KVS_ENOMEM);
    CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
    CHECK_U64(info_of(&b).n_slots, 7);
    take_pass(&b, b.seq, 200, 200);
    CHECK_OK(kvs_pager_detach(b.pager));
    CHECK_STATUS(kvs_pager_place(b.pager, &fits), KVS_EBUSY);
    kvs_device *device = rig_device(0, 0);
    kvs_lease *foreign = rig_lease(device, N_SLOTS * b.slot_bytes);
    CHECK_STATUS(kvs_pager_attach(b.pager, foreign, &fits), KVS_EINVAL);
    kvs_lease_release(foreign);
    rig_close(device);
    CHECK_STATUS(kvs_pager_attach(b.pager, b.lease, &bad), KVS_ENOSPACE);
    CHECK_OK(kvs_pager_attach(b.pager, b.lease, &fits));
    take_pass(&b, b.seq, 1, 1);
    check_history(&b, b.seq);
    close_bench(&b);
}

static void test_begin_and_end_refuse_and_change_nothing(void)
{
    bench b;
    open_bench(&b, 0);
    kvs_pass_forecast forecast = {.struct_size = sizeof forecast};
    CHECK_STATUS(kvs_pager_end(b.pager, 0), KVS_EBUSY);
    CHECK_STATUS(kvs_pager_begin(b.pager, b.seq, 0), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_begin(b.pager, b.seq, P + 1), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_forecast(b.pager, b.seq, P + 1, &forecast), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_forecast(b.pager, b.seq, 0, &forecast), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_forecast(b.pager, b.seq, 1, NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_forecast(NULL, b.seq, 1, &forecast), KVS_EINVAL);
    kvs_cache *cache = NULL;
    kvs_seq *foreign = NULL;
    CHECK_OK(kvs_cache_create(b.device, layers, N_LAYERS, &cache));
    CHECK_OK(kvs_seq_create(cache, CTX, &foreign));
    CHECK_STATUS(kvs_pager_begin(b.pager, foreign, 1), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_forecast(b.pager, foreign, 1, &forecast), KVS_EINVAL);
    kvs_seq_release(foreign);
    kvs_cache_release(cache);
    for (int i = 0; i < 6; i++) {
        take_pass(&b, b.seq, P, P);
    }
    CHECK_STATUS(kvs_pager_begin(b.pager, b.seq, 1), KVS_ECONTEXT);
    CHECK_OK(kvs_pager_truncate(b.pager, b.seq, 5 * P));
    CHECK_STATUS(kvs_pager_truncate(b.pager, b.seq, 5 * P + 1), KVS_EINVAL);
    const kvs_placement wide = placement_of(shares, 2, P + 1);
    CHECK_OK(kvs_pager_place(b.pager, &wide)); /* serves short sequences only */
    CHECK_STATUS(kvs_pager_begin(b.pager, b.seq, 1), KVS_ENOSPACE);
    CHECK_STATUS(kvs_pager_forecast(b.pager, b.seq, 1, &forecast), KVS_ENOSPACE);
    const kvs_placement no_ring = placement_of(shares, 0, P);
    CHECK_OK(kvs_pager_place(b.pager, &no_ring));
    CHECK_STATUS(kvs_pager_begin(b.pager, b.seq, 1), KVS_ENOSPACE);
    CHECK_U64(tokens_of(b.seq), 5 * P);
    const kvs_placement fits = placement_of(shares, 2, P);
    CHECK_OK(kvs_pager_place(b.pager, &fits));

    CHECK_OK(kvs_pager_begin(b.pager, b.seq, 4));
    CHECK_STATUS(kvs_pager_begin(b.pager, b.seq, 4), KVS_EBUSY);
    CHECK_STATUS(kvs_pager_place(b.pager, &fits), KVS_EBUSY);
    CHECK_STATUS(kvs_pager_detach(b.pager), KVS_EBUSY);
    CHECK_STATUS(kvs_pager_forget(b.pager), KVS_EBUSY);
    CHECK_STATUS(kvs_pager_truncate(b.pager, b.seq, 1), KVS_EBUSY);
    CHECK_STATUS(kvs_pager_drop(b.pager, b.seq), KVS_EBUSY);
    CHECK_STATUS(kvs_pager_end(b.pager, 5), KVS_EINVAL);
    CHECK_OK(kvs_pager_end(b.pager, 0));
    CHECK_OK(kvs_pager_detach(b.pager));
    CHECK_STATUS(kvs_pager_begin(b.pager, b.seq, 4), KVS_EBUSY);
    CHECK_STATUS(kvs_pager_forecast(b.pager, b.seq, 4, &forecast), KVS_EBUSY);
    CHECK_OK(kvs_pager_attach(b.pager, b.lease, &fits));
    take_pass(&b, b.seq, 4, 4);
    check_history(&b, b.seq);
    close_bench(&b);
}

static void test_waves_come_in_order_and_once(void)
{
    bench b;
    open_bench(&b, 0);
    uint64_t end = 0;
    kvs_pass_view view;
    CHECK_STATUS(kvs_pager_acquire_wave(b.pager, 0, 0, &end), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_view_pass(b.pager, &view), KVS_EBUSY);
    for (int i = 0; i < 5; i++) {
        take_pass(&b, b.seq, P, P);
    }
    CHECK_OK(kvs_pager_begin(b.pager, b.seq, 1));
    CHECK_STATUS(kvs_pager_acquire_wave(b.pager, N_LAYERS, 0, &end), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_acquire_wave(b.pager, 0, 6, &end), KVS_EINVAL);
    CHECK_STATUS(kvs_pager_acquire_wave(b.pager, 1, 3, &end), KVS_EINVAL); /* layer 0 comes first */
    CHECK_OK(play(&b));
    CHECK_STATUS(kvs_pager_acquire_wave(b.pager, 0, 3, &end), KVS_EINVAL); /* read and gone */
    CHECK_OK(kvs_pager_end(b.pager, 1));
    check_history(&b, b.seq);
    close_bench(&b);
}

/* Copies of history to the device that fail end the pass, and the next one finds everything. */
static void test_a_failed_copy_ends_the_pass_and_loses_nothing(uint32_t flags)
{
    bench b;
    open_bench(&b, flags);
    for (int i = 0; i < 5; i++) {
        take_pass(&b, b.seq, P, P);
    }
    bool strikes = true;
    for (uint64_t at = 0; strikes; at++) {
        CHECK_OK(kvs_pager_publish_wait(b.pager));
        CHECK_OK(kvs_pager_forget(b.pager));
        fault f = {.first = at, .count = 1};
        CHECK_OK(kvs_device_set_hook(b.device, fail_copies, &f));
        kvs_status status = kvs_pager_begin(b.pager, b.seq, 3);
        if (status == KVS_OK) {
            status = play(&b);
            CHECK_OK(kvs_pager_end(b.pager, 0));
        }
        CHECK(status == KVS_OK || status == KVS_EIO);
        CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
        strikes = f.seen > at;
        CHECK(at < 100);
        (void)info_of(&b);
        take_pass(&b, b.seq, 3, 3);
        CHECK_OK(kvs_pager_truncate(b.pager, b.seq, 5 * P));
    }
    check_history(&b, b.seq);
    close_bench(&b);
}

static void test_rows_wait_on_the_device_until_history_takes_them(uint32_t flags)
{
    bench b;
    open_bench(&b, flags);
    take_pass(&b, b.seq, P, P);
    CHECK_OK(kvs_pager_publish_wait(b.pager));
    fault f = {.count = UINT64_MAX};
    CHECK_OK(kvs_device_set_hook(b.device, fail_copies, &f));
    CHECK_OK(kvs_pager_begin(b.pager, b.seq, 100));
    CHECK_OK(play(&b));
    CHECK_OK(kvs_pager_end(b.pager, 100));
    const kvs_placement fits = placement_of(shares, 2, P);
    for (int i = 0; i < 3; i++) {
        CHECK_STATUS(kvs_pager_publish_wait(b.pager), KVS_EIO);
        CHECK_STATUS(kvs_pager_begin(b.pager, b.seq, 1), KVS_EIO);
        CHECK_STATUS(kvs_pager_truncate(b.pager, b.seq, 1), KVS_EIO);
        CHECK_STATUS(kvs_pager_place(b.pager, &fits), KVS_EIO);
        CHECK_STATUS(kvs_pager_forget(b.pager), KVS_EIO);
        CHECK_STATUS(kvs_pager_detach(b.pager), KVS_EIO);
    }
    CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
    CHECK_OK(kvs_pager_forget(b.pager)); /* writes them first */
    check_history(&b, b.seq);
    take_pass(&b, b.seq, 1, 1);
    CHECK_OK(kvs_pager_publish_wait(b.pager));
    CHECK_OK(kvs_device_set_hook(b.device, fail_copies, &f));
    CHECK_OK(kvs_pager_begin(b.pager, b.seq, 1));
    CHECK_OK(play(&b));
    CHECK_OK(kvs_pager_end(b.pager, 1));
    CHECK_STATUS(kvs_pager_drop(b.pager, b.seq), KVS_EIO);
    kvs_pager_release(b.pager); /* gives all back though nothing can be written */
    b.pager = NULL;
    CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
    close_bench(&b);
}

static uint64_t published_rows(const bench *b, uint64_t page)
{
    kvs_page_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_seq_get_page(b->seq, 0, page, &info));
    return info.published_rows;
}

/* Only a pass in another page waits for the rows of the last one; what fails meanwhile is written with the next. */
static void test_a_pass_begins_while_rows_are_on_their_way(void)
{
    bench b;
    open_bench(&b, KVS_DEVICE_DEFERRED);
    take_pass(&b, b.seq, 3, 3);
    CHECK_OK(kvs_pager_begin(b.pager, b.seq, 2));
    CHECK_U64(published_rows(&b, 0), 0);
    CHECK_OK(kvs_pager_end(b.pager, 0));
    CHECK_U64(published_rows(&b, 0), 0);
    take_pass(&b, b.seq, 2, 2);
    CHECK_U64(published_rows(&b, 0), 3);
    fault f = {.count = 1};
    CHECK_OK(kvs_device_set_hook(b.device, fail_copies, &f));
    take_pass(&b, b.seq, 2, 2);
    CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
    CHECK_U64(f.seen > 0, 1);
    CHECK_U64(published_rows(&b, 0), 3);
    check_history(&b, b.seq);
    CHECK_U64(published_rows(&b, 0), 7);
    take_pass(&b, b.seq, 1, 1);
    kvs_seq *fork;
    CHECK_OK(kvs_seq_fork(b.seq, &fork));
    CHECK_OK(kvs_pager_begin(b.pager, b.seq, 1)); /* into a copy of the page */
    CHECK_U64(tokens_of(fork), 8);
    CHECK_OK(play(&b));
    CHECK_OK(kvs_pager_end(b.pager, 1));
    check_history(&b, b.seq);
    kvs_seq_release(fork);
    take_pass(&b, b.seq, 1, 1);
    CHECK_OK(kvs_pager_begin(b.pager, b.seq, P)); /* reaches another page */
    CHECK_U64(published_rows(&b, 0), 10);
    CHECK_OK(kvs_pager_end(b.pager, 0));
    close_bench(&b);
}

static void test_any_order_of_release_is_safe(void)
{
    for (int code = 0; code < 256; code++) {
        bench b;
        open_bench(&b, 0);
        take_pass(&b, b.seq, 100, 100);
        if (code % 2 != 0) {
            CHECK_OK(kvs_pager_begin(b.pager, b.seq, 2)); /* even in the middle of a pass */
        }
        bool is_gone[4] = {false, false, false, false};
        for (int left = 4, rest = code; left > 0; left--, rest /= 4) {
            int which = rest % 4;
            while (is_gone[which]) {
                which = (which + 1) % 4;
            }
            is_gone[which] = true;
            switch (which) {
            case 0: kvs_seq_release(b.seq); break;
            case 1: kvs_pager_release(b.pager); break;
            case 2: kvs_lease_release(b.lease); break;
            default: kvs_cache_release(b.cache); break;
            }
        }
        rig_close(b.device);
    }
}

static void test_a_sequence_that_is_gone_is_no_longer_looked_at(void)
{
    bench b;
    open_bench(&b, 0);
    take_pass(&b, b.seq, 100, 100);
    kvs_seq_release(b.seq); /* without telling the pager, rows on their way */
    CHECK_OK(kvs_seq_create(b.cache, CTX, &b.seq));
    take_pass(&b, b.seq, 30, 30);
    check_history(&b, b.seq);
    kvs_cache_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_cache_get_info(b.cache, &info));
    CHECK_U64(info.n_sequences, 1);
    close_bench(&b);
}

int main(void)
{
    const uint32_t modes[] = {0, KVS_DEVICE_DEFERRED};
    for (int i = 0; i < 2; i++) {
        test_a_life_reads_what_it_wrote(modes[i]);
        test_a_failed_copy_ends_the_pass_and_loses_nothing(modes[i]);
        test_rows_wait_on_the_device_until_history_takes_them(modes[i]);
    }
    test_create_refuses();
    test_placements_are_counted_or_refused();
    test_attach_and_place_refuse_and_change_nothing();
    test_begin_and_end_refuse_and_change_nothing();
    test_waves_come_in_order_and_once();
    test_a_pass_begins_while_rows_are_on_their_way();
    test_any_order_of_release_is_safe();
    test_a_sequence_that_is_gone_is_no_longer_looked_at();
    return check_finish();
}
