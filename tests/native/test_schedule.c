/* Deferred devices: who goes on is drawn, or chosen, from what is offered; the same choices give the same order on the CPU
 * and on a trace device. */
#include "core/schedule.h"
#include "kvstream/ring.h"
#include "kvstream/trace.h"
#include "rig.h"

#define SLOT 4096u
#define N_SLOTS 2u
#define N_PAGES 5u
#define ALL (1u << KVS_STREAM_COMPUTE | 1u << KVS_STREAM_FREE | 1u << KVS_STREAM_GATED)

/* Follows the bits of a number, one per question, and keeps what was offered. */
struct script {
    uint32_t bits;
    uint32_t n_asked;
    uint32_t offered[64];
};

static uint32_t follow(void *user, uint32_t offered)
{
    struct script *s = user;
    const bool second = (s->bits >> s->n_asked % 32 & 1) != 0;
    s->offered[s->n_asked++ % 64] = offered;
    const uint32_t rest = offered & (offered - 1);
    return (uint32_t)__builtin_ctz(second ? rest : offered);
}

static uint32_t answer_nonsense(void *user, uint32_t offered)
{
    (void)offered;
    return *(const uint32_t *)user;
}

static void test_one_offer_is_no_question(void)
{
    struct script s = {.n_asked = 0};
    kvs_schedule schedule = {.choose = follow, .user = &s};
    CHECK_U64(kvs_schedule_next(&schedule, 1u << KVS_STREAM_GATED), KVS_STREAM_GATED);
    CHECK_U64(kvs_schedule_next(&schedule, 1u << KVS_STREAM_COMPUTE), KVS_STREAM_COMPUTE);
    CHECK_U64(s.n_asked, 0);
    CHECK_U64(kvs_schedule_next(&schedule, ALL), KVS_STREAM_COMPUTE);
    CHECK_U64(s.n_asked, 1);
}

static void test_answer_that_is_not_offered_means_the_first(void)
{
    const uint32_t offered = 1u << KVS_STREAM_FREE | 1u << KVS_STREAM_GATED;
    const uint32_t answers[] = {KVS_STREAM_COMPUTE, 7, 32, UINT32_MAX};
    for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++) {
        uint32_t answer = answers[i];
        kvs_schedule schedule = {.choose = answer_nonsense, .user = &answer};
        CHECK_U64(kvs_schedule_next(&schedule, offered), KVS_STREAM_FREE);
    }
}

static void test_every_stream_is_drawn(void)
{
    for (uint32_t offered = 1; offered <= ALL; offered++) {
        kvs_schedule schedule = {.drawn = offered};
        uint32_t drawn = 0;
        for (int i = 0; i < 200; i++) {
            drawn |= 1u << kvs_schedule_next(&schedule, offered);
        }
        CHECK_U64(drawn, offered);
    }
}

static void test_only_deferred_devices_take_a_chooser(void)
{
    kvs_device *device = rig_device(0, 0);
    struct script s = {.n_asked = 0};
    CHECK_STATUS(kvs_device_set_chooser(NULL, follow, &s), KVS_EINVAL);
    CHECK_STATUS(kvs_device_set_chooser(device, follow, &s), KVS_EINVAL);
    rig_close(device);
}

static kvs_device *deferred_device(uint32_t backend)
{
    const kvs_device_desc desc = {
        .struct_size = sizeof desc, .flags = KVS_DEVICE_DEFERRED, .n_threads = 1, .backend = backend};
    kvs_device *device = NULL;
    CHECK_OK(kvs_device_create(&desc, &device));
    return device;
}

/* Five pages through two slots, read in order. */
static struct script run_ring(uint32_t backend, uint32_t bits)
{
    struct script s = {.bits = bits};
    kvs_device *device = deferred_device(backend);
    kvs_lease *lease = rig_lease(device, N_SLOTS * SLOT);
    kvs_host *host = NULL;
    kvs_ring *ring = NULL;
    const kvs_ring_desc desc = {
        .struct_size = sizeof desc, .n_slots = N_SLOTS, .lease = lease, .slot_bytes = SLOT, .run_limit_slots = 1};
    CHECK_OK(kvs_host_create(device, N_PAGES * SLOT, &host));
    for (uint32_t page = 0; page < N_PAGES && backend == KVS_BACKEND_CPU; page++) {
        rig_fill_host(host, page * SLOT, SLOT, (uint8_t)(page + 1));
    }
    CHECK_OK(kvs_ring_create(device, &desc, &ring));
    CHECK_OK(kvs_device_set_chooser(device, follow, &s));
    const kvs_demand demand = {.host = host, .record_bytes = SLOT, .n_pages = N_PAGES};
    uint64_t first = 0;
    CHECK_OK(kvs_ring_submit(ring, &demand, 1, &first));
    for (uint32_t page = 0; page < N_PAGES; page++) {
        uint64_t address = 0;
        CHECK_OK(kvs_ring_acquire_wait(ring, page + 1));
        CHECK_OK(kvs_ring_page_address(ring, page, &address));
        CHECK(backend != KVS_BACKEND_CPU || rig_all_equal(rig_bytes(address), SLOT, (uint8_t)(page + 1)));
        CHECK_OK(kvs_ring_consume(ring, page + 1));
    }
    CHECK_OK(kvs_device_set_chooser(device, NULL, NULL));
    kvs_ring_release(ring);
    kvs_host_release(host);
    kvs_lease_release(lease);
    rig_close(device);
    return s;
}

static void test_same_choices_give_the_same_offers_on_both_backends(void)
{
    uint32_t most = 0;
    for (uint32_t bits = 0; bits < 256; bits++) {
        const struct script cpu = run_ring(KVS_BACKEND_CPU, bits);
        const struct script trace = run_ring(KVS_BACKEND_TRACE, bits);
        CHECK_U64(cpu.n_asked, trace.n_asked);
        CHECK(memcmp(cpu.offered, trace.offered, sizeof cpu.offered) == 0);
        most = cpu.n_asked > most ? cpu.n_asked : most;
    }
    CHECK(most > 4 && most < 64);
}

static void test_copies_of_a_trace_run_when_they_are_told_to(void)
{
    kvs_device *device = deferred_device(KVS_BACKEND_TRACE);
    kvs_lease *lease = rig_lease(device, N_SLOTS * SLOT);
    kvs_host *host = NULL;
    kvs_ring *ring = NULL;
    const kvs_ring_desc desc = {
        .struct_size = sizeof desc, .n_slots = N_SLOTS, .lease = lease, .slot_bytes = SLOT, .run_limit_slots = 1};
    CHECK_OK(kvs_host_create(device, N_PAGES * SLOT, &host));
    CHECK_OK(kvs_ring_create(device, &desc, &ring));
    const kvs_demand demand = {.host = host, .record_bytes = SLOT, .n_pages = N_PAGES};
    uint64_t first = 0;
    uint32_t ran = 9;
    CHECK_OK(kvs_ring_submit(ring, &demand, 1, &first));
    CHECK_STATUS(kvs_ring_query(ring, 0), KVS_PENDING);
    CHECK_OK(kvs_device_run_copies(device, 1, &ran));
    CHECK_U64(ran, 1);
    CHECK_OK(kvs_ring_query(ring, 0));
    CHECK_STATUS(kvs_ring_query(ring, 1), KVS_PENDING);
    CHECK_OK(kvs_device_run_copies(device, 9, &ran));
    CHECK_U64(ran, 1);
    CHECK_STATUS(kvs_device_drain(device), KVS_EBUSY);
    kvs_ring_release(ring);
    kvs_host_release(host);
    kvs_lease_release(lease);
    rig_close(device);
}

int main(void)
{
    test_one_offer_is_no_question();
    test_answer_that_is_not_offered_means_the_first();
    test_every_stream_is_drawn();
    test_only_deferred_devices_take_a_chooser();
    test_same_choices_give_the_same_offers_on_both_backends();
    test_copies_of_a_trace_run_when_they_are_told_to();
    return check_finish();
}
