/* Copies beside readers: run under the thread sanitizer, which sees a missing fence even where the bytes come out right. */
#include "rig.h"

#include "backends/cpu/copy_share.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/sync.h"
#include "core/ring.h"
#include "kvstream/ring.h"

#include <sched.h>

enum { RECORD = 4096, N_SLOTS = 5, N_HISTORY = 16, N_ROUNDS = 300 };

typedef struct bench {
    kvs_device *device;
    kvs_lease *lease;
    kvs_host *host;
    kvs_ring *ring;
} bench;

static void open_bench(bench *b, uint32_t n_threads, uint32_t flags)
{
    b->device = rig_device_threads(flags, 0, n_threads);
    b->lease = rig_lease(b->device, N_SLOTS * RECORD);
    CHECK_OK(kvs_host_create(b->device, N_HISTORY * RECORD, &b->host));
    for (uint8_t page = 0; page < N_HISTORY; page++) {
        rig_fill_host(b->host, (uint64_t)page * RECORD, RECORD, (uint8_t)(page + 1));
    }
    const kvs_ring_desc desc = {.struct_size = sizeof desc,
                                .n_slots = N_SLOTS,
                                .lease = b->lease,
                                .slot_bytes = RECORD,
                                .run_limit_slots = 2};
    b->ring = NULL;
    CHECK_OK(kvs_ring_create(b->device, &desc, &b->ring));
}

static void close_bench(bench *b)
{
    kvs_ring_release(b->ring);
    kvs_host_release(b->host);
    kvs_lease_release(b->lease);
    rig_close(b->device);
}

static uint64_t submit(bench *b, uint32_t first_page, uint32_t n_pages)
{
    uint64_t first = 0;
    const kvs_demand demand = {.host = b->host,
                               .host_offset_bytes = (uint64_t)first_page * RECORD,
                               .record_bytes = RECORD,
                               .n_pages = n_pages};
    CHECK_OK(kvs_ring_submit(b->ring, &demand, 1, &first));
    return first;
}

/* Readers poll and read; the owner consumes after they have all said so. */
typedef struct reader {
    bench *b;
    uint64_t begin;
    uint64_t end;
    _Atomic uint64_t n_read;
    _Atomic uint64_t n_wrong;
} reader;

static void *read_pages(void *argument)
{
    reader *r = argument;
    for (uint64_t demand = r->begin; demand < r->end; demand++) {
        while (kvs_ring_ready(r->b->ring) <= demand) {
            (void)sched_yield();
        }
        uint64_t address = 0;
        const kvs_status status = kvs_ring_page_address(r->b->ring, demand, &address);
        const uint8_t expected = (uint8_t)(demand % N_HISTORY + 1);
        if (status != KVS_OK || !rig_all_equal(rig_bytes(address), RECORD, expected)) {
            atomic_fetch_add(&r->n_wrong, 1);
        }
        atomic_fetch_add_explicit(&r->n_read, 1, memory_order_release);
    }
    return NULL;
}

static void test_readers_beside_the_copy_thread(uint32_t n_threads)
{
    bench b;
    open_bench(&b, n_threads, KVS_DEVICE_POISON_RELEASED);
    for (uint32_t round = 0; round < 20; round++) {
        const uint64_t first = submit(&b, 0, N_HISTORY);
        reader readers[2];
        pthread_t threads[2];
        for (uint32_t i = 0; i < 2; i++) {
            readers[i].b = &b;
            readers[i].begin = first;
            readers[i].end = first + N_HISTORY;
            atomic_init(&readers[i].n_read, 0);
            atomic_init(&readers[i].n_wrong, 0);
            CHECK(pthread_create(&threads[i], NULL, read_pages, &readers[i]) == 0);
        }
        for (uint64_t done = 0; done < N_HISTORY; done++) {
            CHECK_OK(kvs_ring_acquire_wait(b.ring, first + done + 1));
            for (uint32_t i = 0; i < 2; i++) {
                while (atomic_load_explicit(&readers[i].n_read, memory_order_acquire) <= done) {
                    (void)sched_yield();
                }
            }
            CHECK_OK(kvs_ring_consume(b.ring, first + done + 1));
        }
        for (uint32_t i = 0; i < 2; i++) {
            CHECK(pthread_join(threads[i], NULL) == 0);
            CHECK_U64(atomic_load(&readers[i].n_wrong), 0);
        }
    }
    close_bench(&b);
}

/* Lookahead over the ring's end and beyond its slots, consumed in waves of what can be had. */
static void test_owner_reads_while_later_pages_arrive(uint32_t n_threads)
{
    bench b;
    open_bench(&b, n_threads, 0);
    uint64_t consumed = 0;
    for (uint32_t round = 0; round < N_ROUNDS; round++) {
        const uint64_t end = submit(&b, 0, N_HISTORY) + N_HISTORY;
        while (consumed + N_SLOTS < end) {
            const uint64_t wave = kvs_ring_acquirable_end(b.ring);
            CHECK_OK(kvs_ring_acquire_wait(b.ring, wave));
            for (; consumed < wave; consumed++) {
                uint64_t address = 0;
                CHECK_OK(kvs_ring_page_address(b.ring, consumed, &address));
                CHECK(rig_all_equal(rig_bytes(address), RECORD, (uint8_t)(consumed % N_HISTORY + 1)));
            }
            CHECK_OK(kvs_ring_consume(b.ring, wave));
        }
        CHECK_OK(kvs_ring_check_integrity(b.ring));
    }
    close_bench(&b);
}

/* Cancelled at any moment, the ring is usable at once and its memory may be written by its owner. */
static void test_cancel_beside_a_running_copy(uint32_t n_threads)
{
    bench b;
    open_bench(&b, n_threads, KVS_DEVICE_POISON_RELEASED);
    for (uint32_t round = 0; round < N_ROUNDS; round++) {
        const uint64_t first = submit(&b, round % 4, 9);
        if (round % 3 == 0) {
            CHECK_OK(kvs_ring_acquire_wait(b.ring, first + 1));
        }
        CHECK_OK(kvs_ring_cancel(b.ring));
        memset(rig_bytes(kvs_lease_address(b.lease)), 0x77, N_SLOTS * RECORD);
        CHECK_OK(kvs_ring_check_integrity(b.ring));
    }
    close_bench(&b);
}

/* History is written and read by other threads through the same engine meanwhile. */
typedef struct writer {
    kvs_device *device;
    uint8_t seed;
    _Atomic uint64_t n_wrong;
} writer;

static void *write_and_read(void *argument)
{
    writer *w = argument;
    kvs_host *host = NULL;
    uint8_t page[RECORD];
    if (kvs_host_create(w->device, RECORD, &host) != KVS_OK) {
        atomic_fetch_add(&w->n_wrong, 1);
        return NULL;
    }
    for (uint32_t round = 0; round < N_ROUNDS; round++) {
        const uint8_t value = (uint8_t)(w->seed + round);
        memset(page, value, sizeof page);
        const bool is_written = kvs_host_write_wait(host, 0, page, sizeof page) == KVS_OK;
        memset(page, 0, sizeof page);
        const bool is_read = kvs_host_read_wait(host, 0, page, sizeof page) == KVS_OK;
        if (!is_written || !is_read || !rig_all_equal(page, sizeof page, value)) {
            atomic_fetch_add(&w->n_wrong, 1);
        }
    }
    kvs_host_release(host);
    return NULL;
}

static void test_threads_share_the_engine(uint32_t n_threads)
{
    bench b;
    open_bench(&b, n_threads, KVS_DEVICE_STRICT_HISTORY);
    /* The gated queue stays blocked: nobody consumes. */
    const uint64_t first = submit(&b, 0, N_HISTORY);
    writer writers[3];
    pthread_t threads[3];
    for (uint8_t i = 0; i < 3; i++) {
        writers[i].device = b.device;
        writers[i].seed = (uint8_t)(i * 50);
        atomic_init(&writers[i].n_wrong, 0);
        CHECK(pthread_create(&threads[i], NULL, write_and_read, &writers[i]) == 0);
    }
    CHECK_OK(kvs_ring_acquire_wait(b.ring, first + 2));
    for (uint32_t i = 0; i < 3; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK_U64(atomic_load(&writers[i].n_wrong), 0);
    }
    close_bench(&b);
}

/* Threads that have time move chunks of one copy with its owner. */
typedef struct helper {
    kvs_copy_share *share;
    _Atomic bool *is_over;
} helper;

static void *help(void *argument)
{
    const helper *h = argument;
    while (!atomic_load(h->is_over)) {
        if (!kvs_copy_share_help(h->share)) {
            (void)sched_yield();
        }
    }
    return NULL;
}

static void test_helpers_move_every_byte_once(void)
{
    enum { LARGEST = 400 << 10, N_HELPERS = 3 };
    kvs_copy_share share = {.number = 0};
    _Atomic bool is_over = false;
    helper h = {.share = &share, .is_over = &is_over};
    uint8_t *from = malloc(LARGEST);
    uint8_t *to = malloc(LARGEST);
    pthread_t threads[N_HELPERS];
    for (int i = 0; i < N_HELPERS; i++) {
        CHECK(pthread_create(&threads[i], NULL, help, &h) == 0);
    }
    for (uint32_t round = 0; round < 50; round++) {
        const size_t n_bytes = (round + 1) * (LARGEST / 50) - round % 7;
        memset(from, (int)(round + 1), LARGEST);
        memset(to, 0, LARGEST);
        kvs_copy_share_move(&share, to, from, n_bytes);
        CHECK(memcmp(to, from, n_bytes) == 0);
        CHECK(n_bytes == LARGEST || to[n_bytes] == 0);
    }
    atomic_store(&is_over, true);
    for (int i = 0; i < N_HELPERS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    free(from);
    free(to);
}

/* Nobody waits inside the engine: copies begin all the same. */
static void test_pages_arrive_for_a_poller(uint32_t n_threads)
{
    bench b;
    open_bench(&b, n_threads, 0);
    const uint64_t first = submit(&b, 0, N_SLOTS);
    while (kvs_ring_ready(b.ring) < first + N_SLOTS) {
        (void)sched_yield();
    }
    CHECK_OK(kvs_ring_check_integrity(b.ring));
    close_bench(&b);
}

/* With a core for the copy thread, where there are two, and without. */
int main(void)
{
    test_helpers_move_every_byte_once();
    for (uint32_t n_threads = 0; n_threads < 2; n_threads++) {
        test_readers_beside_the_copy_thread(n_threads);
        test_owner_reads_while_later_pages_arrive(n_threads);
        test_cancel_beside_a_running_copy(n_threads);
        test_threads_share_the_engine(n_threads);
        test_pages_arrive_for_a_poller(n_threads);
    }
    return check_finish();
}
