/* The copy engine: bytes, order, gates, deferred schedules, failures, strict history. */
#include "rig.h"

#include <unistd.h>

enum { PAGE = 256, N_PAGES = 8 };

typedef struct bench {
    kvs_device *device;
    struct kvs_device_view view;
    kvs_host *host;
    kvs_buffer *buffer;
    uint8_t *bytes;
    _Atomic uint64_t done;
    _Atomic uint64_t gate;
    _Atomic int failed;
} bench;

static void open_bench(bench *b, uint32_t flags, uint64_t seed)
{
    memset(b, 0, sizeof *b);
    b->device = rig_device(flags, seed);
    b->view = kvs_device_backend(b->device);
    CHECK_OK(kvs_host_create(b->device, N_PAGES * PAGE, &b->host));
    CHECK_OK(kvs_buffer_create(b->device, N_PAGES * PAGE, 64, &b->buffer));
    b->bytes = rig_bytes(kvs_buffer_address(b->buffer));
    memset(b->bytes, 0, N_PAGES * PAGE);
    for (uint8_t page = 0; page < N_PAGES; page++) {
        rig_fill_host(b->host, (uint64_t)page * PAGE, PAGE, (uint8_t)(page + 1));
    }
}

static void close_bench(bench *b)
{
    kvs_buffer_release(b->buffer);
    kvs_host_release(b->host);
    rig_close(b->device);
}

static kvs_copy copy_in(bench *b, uint64_t host_page, uint64_t device_page)
{
    return (kvs_copy){
        .host_base = kvs_host_base(b->host),
        .host_offset = host_page * PAGE,
        .device_address = kvs_buffer_address(b->buffer) + device_page * PAGE,
        .n_bytes = PAGE,
        .n_pieces = 1,
    };
}

static kvs_status submit(bench *b, const kvs_copy *copy)
{
    return b->view.backend->copy_submit_many(b->view.self, copy, 1);
}

static kvs_status wait(bench *b, const _Atomic uint64_t *counter, uint64_t value, const _Atomic int *failed)
{
    return b->view.backend->wait_counter(b->view.self, counter, value, failed);
}

static bool page_is(const bench *b, uint64_t page, uint8_t value)
{
    return rig_all_equal(b->bytes + page * PAGE, PAGE, value);
}

/* Every byte of every piece arrives, and no other byte changes. */
static void test_pieces_keep_their_strides(uint32_t flags)
{
    bench b;
    open_bench(&b, flags, 1);
    kvs_copy copy = copy_in(&b, 1, 0);
    copy.n_bytes = 64;
    copy.n_pieces = 3;
    copy.host_stride_bytes = 2 * PAGE;
    copy.device_stride_bytes = 128;
    copy.done = &b.done;
    copy.done_value = 1;
    CHECK_OK(submit(&b, &copy));
    CHECK_OK(wait(&b, &b.done, 1, NULL));
    for (uint64_t at = 0; at < 512; at += 64) {
        const uint8_t expected = at % 128 == 0 && at < 384 ? (uint8_t)(2 + at / 64) : 0;
        CHECK(rig_all_equal(b.bytes + at, 64, expected));
    }
    close_bench(&b);
}

/* Long copies may be moved by several threads, in chunks of which the last is short. */
static void test_a_long_copy_arrives_whole(uint32_t flags)
{
    enum { LONG = (1 << 20) + 4096 + 8 };
    static uint8_t expected[LONG];
    kvs_device *device = rig_device(flags, 4);
    const struct kvs_device_view view = kvs_device_backend(device);
    kvs_host *host = NULL;
    kvs_buffer *buffer = NULL;
    CHECK_OK(kvs_host_create(device, LONG, &host));
    CHECK_OK(kvs_buffer_create(device, LONG, 64, &buffer));
    for (uint32_t i = 0; i < LONG; i++) {
        expected[i] = (uint8_t)(i % 251);
    }
    CHECK_OK(kvs_host_write_wait(host, 0, expected, LONG));
    _Atomic uint64_t done = 0;
    const kvs_copy copy = {.host_base = kvs_host_base(host),
                           .device_address = kvs_buffer_address(buffer),
                           .n_bytes = LONG,
                           .n_pieces = 1,
                           .done = &done,
                           .done_value = 1};
    CHECK_OK(view.backend->copy_submit_many(view.self, &copy, 1));
    CHECK_OK(view.backend->wait_counter(view.self, &done, 1, NULL));
    CHECK(memcmp(rig_bytes(kvs_buffer_address(buffer)), expected, LONG) == 0);
    kvs_buffer_release(buffer);
    kvs_host_release(host);
    rig_close(device);
}

static void test_out_then_in_returns_the_bytes(uint32_t flags)
{
    bench b;
    open_bench(&b, flags, 2);
    memset(b.bytes, 0x5a, PAGE);
    kvs_copy out = copy_in(&b, 3, 0);
    out.is_out = 1;
    out.done = &b.done;
    out.done_value = 1;
    kvs_copy in = copy_in(&b, 3, 1);
    in.done = &b.done;
    in.done_value = 2;
    const kvs_copy both[] = {out, in};
    CHECK_OK(b.view.backend->copy_submit_many(b.view.self, both, 2));
    CHECK_OK(wait(&b, &b.done, 2, NULL));
    CHECK(page_is(&b, 1, 0x5a));
    close_bench(&b);
}

/* An ungated copy passes a gated one that waits; the gated one moves nothing before its gate opens. */
static void test_gate_holds_one_queue_only(uint32_t flags)
{
    bench b;
    open_bench(&b, flags, 3);
    _Atomic uint64_t passed = 0;
    kvs_copy gated = copy_in(&b, 0, 0);
    gated.gate = &b.gate;
    gated.gate_value = 7;
    gated.done = &b.done;
    gated.done_value = 1;
    kvs_copy passing = copy_in(&b, 1, 1);
    passing.done = &passed;
    passing.done_value = 1;
    CHECK_OK(submit(&b, &gated));
    CHECK_OK(submit(&b, &passing));
    CHECK_OK(wait(&b, &passed, 1, NULL));
    CHECK(page_is(&b, 1, 2));
    CHECK(page_is(&b, 0, 0));
    CHECK_U64(atomic_load(&b.done), 0);
    CHECK_STATUS(kvs_device_drain(b.device), KVS_EBUSY);
    atomic_store(&b.gate, 7);
    b.view.backend->gate_advanced(b.view.self, NULL, 0);
    CHECK_OK(wait(&b, &b.done, 1, NULL));
    CHECK(page_is(&b, 0, 1));
    CHECK_OK(kvs_device_drain(b.device));
    close_bench(&b);
}

/* More copies than the queue began with, each over the last: the newest wins, and `done` passes every value in order. */
static void test_queue_is_first_in_first_out(uint32_t flags)
{
    bench b;
    open_bench(&b, flags, 4);
    const uint64_t n_copies = 500;
    for (uint64_t i = 0; i < n_copies; i++) {
        kvs_copy copy = copy_in(&b, i % N_PAGES, 0);
        copy.gate = &b.gate;
        copy.gate_value = 1;
        copy.done = &b.done;
        copy.done_value = i + 1;
        CHECK_OK(submit(&b, &copy));
    }
    atomic_store(&b.gate, 1);
    b.view.backend->gate_advanced(b.view.self, NULL, 0);
    CHECK_OK(wait(&b, &b.done, n_copies, NULL));
    CHECK(page_is(&b, 0, (uint8_t)((n_copies - 1) % N_PAGES + 1)));
    close_bench(&b);
}

static void test_cancel_drops_one_counter(uint32_t flags)
{
    bench b;
    open_bench(&b, flags, 5);
    _Atomic uint64_t other = 0;
    for (uint64_t i = 0; i < 6; i++) {
        kvs_copy copy = copy_in(&b, i, i);
        copy.gate = &b.gate;
        copy.gate_value = 1;
        copy.done = i % 2 == 0 ? &b.done : &other;
        copy.done_value = i + 1;
        CHECK_OK(submit(&b, &copy));
    }
    b.view.backend->copy_cancel(b.view.self, &b.done);
    atomic_store(&b.gate, 1);
    b.view.backend->gate_advanced(b.view.self, NULL, 0);
    CHECK_OK(wait(&b, &other, 6, NULL));
    for (uint64_t i = 0; i < 6; i++) {
        CHECK(page_is(&b, i, i % 2 == 0 ? 0 : (uint8_t)(i + 1)));
    }
    CHECK_U64(atomic_load(&b.done), 0);
    CHECK_STATUS(wait(&b, &b.done, 1, NULL), KVS_EIO);
    close_bench(&b);
}

static void test_submit_refuses_ranges_it_does_not_know(uint32_t flags)
{
    bench b;
    open_bench(&b, flags, 6);
    kvs_copy good = copy_in(&b, 0, 0);
    kvs_copy bad = copy_in(&b, N_PAGES - 1, 1);
    bad.n_bytes = PAGE + 1;
    CHECK_STATUS(submit(&b, &bad), KVS_ENOSPACE);
    const kvs_copy both[] = {good, bad};
    CHECK_STATUS(b.view.backend->copy_submit_many(b.view.self, both, 2), KVS_ENOSPACE);
    bad = copy_in(&b, 0, 0);
    bad.host_base++;
    CHECK_STATUS(submit(&b, &bad), KVS_EINVAL);
    bad = copy_in(&b, 0, 0);
    bad.n_pieces = 0;
    CHECK_STATUS(submit(&b, &bad), KVS_EINVAL);
    bad = copy_in(&b, 0, 0);
    bad.n_pieces = 3;
    bad.host_stride_bytes = UINT64_MAX / 2;
    CHECK_STATUS(submit(&b, &bad), KVS_EOVERFLOW);
    CHECK_OK(kvs_device_drain(b.device));
    CHECK(page_is(&b, 0, 0));
    close_bench(&b);
}

typedef struct verdict {
    uint64_t at;
    int answer;
} verdict;

static int judge(void *user, int point, uint64_t index)
{
    const verdict *v = user;
    return point == KVS_HOOK_COPY && index == v->at ? v->answer : 0;
}

static void test_failing_copy_ends_its_entry(uint32_t flags)
{
    bench b;
    open_bench(&b, flags, 7);
    verdict v = {.at = 0, .answer = KVS_EIO};
    CHECK_OK(kvs_device_set_hook(b.device, judge, &v));
    kvs_copy copy = copy_in(&b, 0, 0);
    copy.done = &b.done;
    copy.done_value = 1;
    copy.failed = &b.failed;
    CHECK_OK(submit(&b, &copy));
    CHECK_OK(wait(&b, &b.done, 1, NULL));
    CHECK_STATUS(atomic_load(&b.failed), KVS_EIO);
    CHECK_STATUS(wait(&b, &b.done, 1, &b.failed), KVS_EIO);
    CHECK(page_is(&b, 0, 0));
    CHECK_OK(kvs_device_drain(b.device));
    v.at++;
    copy.done = NULL;
    copy.failed = NULL;
    CHECK_OK(submit(&b, &copy));
    CHECK_STATUS(kvs_device_drain(b.device), KVS_EIO);
    CHECK_OK(kvs_device_drain(b.device));
    CHECK_U64(rig_info(b.device).copies, N_PAGES);
    CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
    close_bench(&b);
}

static void test_skipped_copy_reports_success_and_moves_nothing(uint32_t flags)
{
    bench b;
    open_bench(&b, flags, 8);
    verdict v = {.at = 0, .answer = KVS_PENDING};
    CHECK_OK(kvs_device_set_hook(b.device, judge, &v));
    kvs_copy copy = copy_in(&b, 0, 0);
    copy.done = &b.done;
    copy.done_value = 1;
    copy.failed = &b.failed;
    CHECK_OK(submit(&b, &copy));
    CHECK_OK(wait(&b, &b.done, 1, &b.failed));
    CHECK(page_is(&b, 0, 0));
    CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
    close_bench(&b);
}

static void test_deferred_copy_waits_for_a_reader(void)
{
    bench b;
    open_bench(&b, KVS_DEVICE_DEFERRED, 9);
    uint32_t ran = 0;
    for (uint64_t i = 0; i < 3; i++) {
        kvs_copy copy = copy_in(&b, i, i);
        copy.done = &b.done;
        copy.done_value = i + 1;
        CHECK_OK(submit(&b, &copy));
    }
    CHECK(page_is(&b, 0, 0));
    CHECK_OK(kvs_device_run_copies(b.device, 1, &ran));
    CHECK_U64(ran, 1);
    CHECK(page_is(&b, 0, 1) && page_is(&b, 1, 0));
    CHECK_OK(wait(&b, &b.done, 2, NULL));
    CHECK(page_is(&b, 1, 2));
    CHECK_OK(kvs_device_drain(b.device));
    CHECK(page_is(&b, 2, 3));
    kvs_copy gated = copy_in(&b, 4, 4);
    gated.gate = &b.gate;
    gated.gate_value = 1;
    gated.done = &b.done;
    gated.done_value = 9;
    CHECK_OK(submit(&b, &gated));
    CHECK_OK(kvs_device_run_copies(b.device, 5, &ran));
    CHECK_U64(ran, 0);
    CHECK_STATUS(wait(&b, &b.done, 9, NULL), KVS_EBUSY);
    b.view.backend->copy_cancel(b.view.self, &b.done);
    CHECK_STATUS(wait(&b, &b.done, 9, NULL), KVS_EIO);
    close_bench(&b);
}

/* Heads of both queues may go: over the seeds, each is the last to write. */
static void test_deferred_seeds_draw_both_orders(void)
{
    bool gated_last = false;
    bool free_last = false;
    for (uint64_t seed = 0; seed < 16; seed++) {
        bench b;
        open_bench(&b, KVS_DEVICE_DEFERRED, seed);
        kvs_copy gated = copy_in(&b, 0, 0);
        gated.gate = &b.gate;
        const kvs_copy passing = copy_in(&b, 1, 0);
        CHECK_OK(submit(&b, &gated));
        CHECK_OK(submit(&b, &passing));
        CHECK_OK(kvs_device_drain(b.device));
        gated_last |= page_is(&b, 0, 1);
        free_last |= page_is(&b, 0, 2);
        close_bench(&b);
    }
    CHECK(gated_last && free_last);
}

/* The system call, unlike a load, answers where there are no access rights. */
static bool can_read(int pipe_end, uint64_t address)
{
    return write(pipe_end, rig_bytes(address), 1) == 1;
}

static void test_history_is_closed_to_everybody_else(void)
{
    /* More than the machine has; the thread sanitizer leaves little more than this unbroken. */
    const uint64_t wide_bytes = (uint64_t)1 << 36;
    int ends[2];
    CHECK(pipe(ends) == 0);
    bench b;
    open_bench(&b, KVS_DEVICE_STRICT_HISTORY, 10);
    CHECK(!can_read(ends[1], kvs_host_base(b.host)));
    uint8_t page[PAGE];
    CHECK_OK(kvs_host_read_wait(b.host, PAGE, page, sizeof page));
    CHECK(rig_all_equal(page, sizeof page, 2));
    CHECK(!can_read(ends[1], kvs_host_base(b.host) + PAGE));
    close_bench(&b);
    kvs_device *device = rig_device(0, 0);
    kvs_host *host = NULL;
    CHECK_OK(kvs_host_create(device, wide_bytes, &host));
    CHECK(!can_read(ends[1], kvs_host_base(host)));
    CHECK_U64(rig_info(device).host_touched_bytes, 0);
    rig_fill_host(host, wide_bytes - PAGE, PAGE, 3);
    CHECK(!can_read(ends[1], kvs_host_base(host)));
    kvs_host_release(host);
    rig_close(device);
    (void)close(ends[0]);
    (void)close(ends[1]);
}

int main(void)
{
    const uint32_t modes[] = {0, KVS_DEVICE_DEFERRED, KVS_DEVICE_STRICT_HISTORY,
                              KVS_DEVICE_DEFERRED | KVS_DEVICE_STRICT_HISTORY};
    for (uint32_t i = 0; i < 4; i++) {
        test_pieces_keep_their_strides(modes[i]);
        test_a_long_copy_arrives_whole(modes[i]);
        test_out_then_in_returns_the_bytes(modes[i]);
        test_gate_holds_one_queue_only(modes[i]);
        test_queue_is_first_in_first_out(modes[i]);
        test_cancel_drops_one_counter(modes[i]);
        test_submit_refuses_ranges_it_does_not_know(modes[i]);
        test_failing_copy_ends_its_entry(modes[i]);
        test_skipped_copy_reports_success_and_moves_nothing(modes[i]);
    }
    test_deferred_copy_waits_for_a_reader();
    test_deferred_seeds_draw_both_orders();
    test_history_is_closed_to_everybody_else();
    return check_finish();
}
