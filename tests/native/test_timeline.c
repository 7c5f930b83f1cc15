/* Events of a device: off by default, bounded, taken in order, whole while other threads add to them. */
#include "rig.h"

#include "core/timeline.h"
#include "kvstream/timeline.h"

#include <pthread.h>

enum { PAGE = 4096, N_PAGES = 8, N_THREADS = 4, N_ROUNDS = 200 };

static uint64_t take(kvs_device *device, kvs_event *events, uint64_t capacity, uint64_t *n_lost)
{
    uint64_t n_events = 0;
    CHECK_OK(kvs_timeline_take(device, events, capacity, &n_events, n_lost));
    return n_events;
}

static void nothing_is_kept_unless_asked_for(void)
{
    kvs_device *device = rig_device(0, 0);
    kvs_host *host = NULL;
    kvs_event events[4];
    uint64_t n_lost = 7;
    CHECK_OK(kvs_host_create(device, PAGE, &host));
    rig_fill_host(host, 0, PAGE, 1);
    CHECK_U64(take(device, events, 4, &n_lost), 0);
    CHECK_U64(n_lost, 0);
    CHECK_U64(kvs_timeline_begin(device), 0);
    kvs_host_release(host);
    rig_close(device);
}

static void copies_and_waits_are_kept_with_their_bytes(uint32_t flags)
{
    kvs_device *device = rig_device(flags, 0);
    kvs_host *host = NULL;
    kvs_event events[64];
    uint8_t bytes[PAGE];
    uint64_t n_lost = 0;
    CHECK_OK(kvs_host_create(device, N_PAGES * PAGE, &host));
    CHECK_OK(kvs_timeline_keep(device, 64));
    const kvs_device_info before = rig_info(device);
    for (uint64_t page = 0; page < N_PAGES; page++) {
        rig_fill_host(host, page * PAGE, PAGE, (uint8_t)page);
    }
    CHECK_OK(kvs_host_read_wait(host, PAGE, bytes, PAGE / 2));
    const kvs_device_info after = rig_info(device);
    uint64_t sums[KVS_EVENT_STORE + 1] = {0};
    uint64_t counts[KVS_EVENT_STORE + 1] = {0};
    const uint64_t n_events = take(device, events, 64, &n_lost);
    for (uint64_t i = 0; i < n_events; i++) {
        CHECK(events[i].kind <= KVS_EVENT_STORE && events[i].begin_ns <= events[i].end_ns);
        CHECK((events[i].thread != 0) == (events[i].kind == KVS_EVENT_WAIT));
        sums[events[i].kind] += events[i].n_bytes;
        counts[events[i].kind]++;
    }
    CHECK_U64(sums[KVS_EVENT_LOAD] + sums[KVS_EVENT_STORE], after.copied_bytes - before.copied_bytes);
    CHECK_U64(sums[KVS_EVENT_LOAD], after.loaded_bytes - before.loaded_bytes);
    CHECK_U64(counts[KVS_EVENT_LOAD] + counts[KVS_EVENT_STORE], after.copies - before.copies);
    CHECK_U64(counts[KVS_EVENT_WAIT], N_PAGES + 1);
    CHECK_U64(n_lost, 0);
    CHECK_U64(take(device, events, 64, &n_lost), 0);
    kvs_host_release(host);
    rig_close(device);
}

static void what_finds_no_room_is_counted(void)
{
    kvs_device *device = rig_device(0, 0);
    kvs_event events[8];
    uint64_t n_lost = 0;
    CHECK_OK(kvs_timeline_keep(device, 4));
    for (uint32_t i = 0; i < 7; i++) {
        kvs_timeline_end(device, kvs_timeline_begin(device), (kvs_event){.kind = KVS_EVENT_OPEN, .n_rows = i});
    }
    CHECK_U64(take(device, events, 3, &n_lost), 3);
    CHECK_U64(n_lost, 3);
    CHECK(events[0].n_rows == 0 && events[2].n_rows == 2);
    /* The room that was taken is there again, around the end of the buffer. */
    for (uint32_t i = 7; i < 10; i++) {
        kvs_timeline_end(device, kvs_timeline_begin(device), (kvs_event){.kind = KVS_EVENT_OPEN, .n_rows = i});
    }
    CHECK_U64(take(device, events, 8, &n_lost), 4);
    CHECK_U64(n_lost, 3);
    CHECK(events[0].n_rows == 3 && events[1].n_rows == 7 && events[3].n_rows == 9);
    /* A new buffer begins anew; none keeps nothing. */
    CHECK_OK(kvs_timeline_keep(device, 2));
    CHECK_U64(take(device, events, 8, &n_lost), 0);
    CHECK_U64(n_lost, 0);
    const uint64_t begin_ns = kvs_timeline_begin(device);
    CHECK_OK(kvs_timeline_keep(device, 0));
    kvs_timeline_end(device, begin_ns, (kvs_event){.kind = KVS_EVENT_OPEN});
    CHECK_U64(take(device, events, 8, &n_lost), 0);
    CHECK_U64(n_lost, 0);
    rig_close(device);
}

static int fail_allocations(void *user, int point, uint64_t index)
{
    (void)user;
    (void)index;
    return point == KVS_HOOK_ALLOC ? KVS_ENOMEM : 0;
}

static void what_cannot_be_had_is_refused_and_nothing_changes(void)
{
    kvs_device *device = rig_device(0, 0);
    kvs_event event;
    uint64_t n_events = 0;
    uint64_t n_lost = 0;
    CHECK_STATUS(kvs_timeline_keep(NULL, 1), KVS_EINVAL);
    CHECK_STATUS(kvs_timeline_keep(device, UINT64_MAX), KVS_EOVERFLOW);
    CHECK_STATUS(kvs_timeline_take(NULL, &event, 1, &n_events, &n_lost), KVS_EINVAL);
    CHECK_STATUS(kvs_timeline_take(device, NULL, 1, &n_events, &n_lost), KVS_EINVAL);
    CHECK_STATUS(kvs_timeline_take(device, &event, 1, NULL, &n_lost), KVS_EINVAL);
    CHECK_STATUS(kvs_timeline_take(device, &event, 1, &n_events, NULL), KVS_EINVAL);
    CHECK_OK(kvs_timeline_keep(device, 2));
    kvs_timeline_end(device, kvs_timeline_begin(device), (kvs_event){.kind = KVS_EVENT_OPEN});
    CHECK_OK(kvs_device_set_hook(device, fail_allocations, NULL));
    CHECK_STATUS(kvs_timeline_keep(device, 8), KVS_ENOMEM);
    CHECK_OK(kvs_device_set_hook(device, NULL, NULL));
    CHECK_U64(take(device, &event, 1, &n_lost), 1);
    rig_close(device);
}

static void *add_events(void *user)
{
    kvs_device *device = user;
    for (uint32_t i = 0; i < N_ROUNDS; i++) {
        kvs_timeline_end(device, kvs_timeline_begin(device), (kvs_event){.kind = KVS_EVENT_CLOSE, .n_rows = i, .first = i});
    }
    return NULL;
}

static void threads_add_while_another_takes(void)
{
    kvs_device *device = rig_device(0, 0);
    pthread_t threads[N_THREADS];
    kvs_event events[16];
    uint64_t n_lost = 0;
    uint64_t n_taken = 0;
    CHECK_OK(kvs_timeline_keep(device, 32));
    for (int i = 0; i < N_THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, add_events, device) == 0);
    }
    for (int i = 0; i < N_ROUNDS; i++) {
        const uint64_t n = take(device, events, 16, &n_lost);
        for (uint64_t j = 0; j < n; j++) {
            CHECK(events[j].kind == KVS_EVENT_CLOSE && events[j].first == events[j].n_rows);
        }
        n_taken += n;
    }
    for (int i = 0; i < N_THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    for (uint64_t n = 1; n != 0; n_taken += n) {
        n = take(device, events, 16, &n_lost);
    }
    CHECK_U64(n_taken + n_lost, N_THREADS * N_ROUNDS);
    rig_close(device);
}

int main(void)
{
    nothing_is_kept_unless_asked_for();
    copies_and_waits_are_kept_with_their_bytes(0);
    copies_and_waits_are_kept_with_their_bytes(KVS_DEVICE_DEFERRED);
    what_finds_no_room_is_counted();
    what_cannot_be_had_is_refused_and_nothing_changes();
    threads_add_while_another_takes();
    return check_finish();
}
