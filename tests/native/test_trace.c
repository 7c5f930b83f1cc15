/* test_trace.c: the interval map against a list of bytes, and a ring on a trace device from C. */
#include "backends/trace/intervals.h"
#include "core/ring.h"
#include "rig.h"

#include <stdlib.h>

#define N_BYTES 512u

static uint64_t state = 1;

static uint32_t draw(uint32_t below)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(state >> 33) % below;
}

/* What each byte should tell. */
struct model {
    bool is_there[N_BYTES];
    uint32_t writer[N_BYTES];
    uint32_t reader[N_BYTES];
};

struct reading {
    const struct model *model;
    uint32_t event;
    uint64_t next;
    bool is_right;
};

static void check_interval(void *user, kvs_interval *item)
{
    struct reading *r = user;
    r->is_right &= item->begin >= r->next && item->begin < item->end;
    r->next = item->end;
    for (uint64_t at = item->begin; at < item->end; at++) {
        r->is_right &= r->model->is_there[at] && r->model->writer[at] == item->writer &&
                       r->model->reader[at] == item->readers[0];
    }
    item->readers[0] = r->event;
}

static void change(kvs_intervals *map, struct model *model, uint32_t event)
{
    const uint32_t begin = draw(N_BYTES);
    const uint32_t end = begin + 1 + draw(N_BYTES - begin);
    const uint32_t action = draw(8);
    if (action == 0) {
        CHECK_OK(kvs_intervals_remove(map, begin, end));
        memset(model->is_there + begin, 0, end - begin);
    } else if (action < 4) {
        const kvs_interval story = {.begin = begin, .end = end, .writer = event};
        CHECK_OK(kvs_intervals_assign(map, &story));
        for (uint32_t at = begin; at < end; at++) {
            model->is_there[at] = true;
            model->writer[at] = event;
            model->reader[at] = 0;
        }
    } else {
        struct reading r = {.model = model, .event = event, .next = begin, .is_right = true};
        uint64_t covered = 0;
        uint64_t expected = 0;
        CHECK_OK(kvs_intervals_visit(map, begin, end, check_interval, &r, &covered));
        for (uint32_t at = begin; at < end; at++) {
            expected += model->is_there[at];
            model->reader[at] = event;
        }
        CHECK(r.is_right);
        CHECK_U64(covered, expected);
    }
}

static void test_intervals_agree_with_bytes(void)
{
    for (uint32_t round = 0; round < 40; round++) {
        static struct model model;
        memset(&model, 0, sizeof model);
        kvs_intervals map = {.n_leaves = 0};
        for (uint32_t event = 1; event < 1500; event++) {
            change(&map, &model, event);
        }
        kvs_intervals_destroy(&map);
    }
}

static void test_many_short_intervals_split_leaves(void)
{
    kvs_intervals map = {.n_leaves = 0};
    for (uint64_t i = 0; i < 20000; i++) {
        const uint64_t at = i * 7919 % 20000;
        const kvs_interval story = {.begin = at * 4, .end = at * 4 + 4, .writer = (uint32_t)at};
        CHECK_OK(kvs_intervals_assign(&map, &story));
    }
    CHECK(map.n_leaves > 100);
    const kvs_interval whole = {.begin = 0, .end = 80000};
    CHECK_OK(kvs_intervals_assign(&map, &whole));
    CHECK_U64(map.n_leaves, 1);
    kvs_intervals_destroy(&map);
}

static kvs_device *trace_device(void)
{
    const kvs_device_desc desc = {
        .struct_size = sizeof desc, .flags = KVS_DEVICE_POISON_RELEASED, .backend = KVS_BACKEND_TRACE};
    kvs_device *device = NULL;
    CHECK_OK(kvs_device_create(&desc, &device));
    return device;
}

/* Pages go by in the order of demand; the fault is planted behind `good` copies. */
static uint64_t stream_pages(uint32_t fault)
{
    kvs_device *device = trace_device();
    kvs_trace_costs costs = {.struct_size = sizeof costs, .copy_in_bytes_per_s = 1000000, .copy_ns = 10};
    CHECK_OK(kvs_trace_set_costs(device, &costs));
    kvs_lease *lease = rig_lease(device, 4 * 64);
    kvs_host *host = NULL;
    CHECK_OK(kvs_host_create(device, 64 * 64, &host));
    CHECK_OK(kvs_trace_mark_history(host, 0, 64 * 64));
    kvs_ring *ring = NULL;
    const kvs_ring_desc desc = {.struct_size = sizeof desc, .n_slots = 4, .lease = lease, .slot_bytes = 64, .run_limit_slots = 1};
    CHECK_OK(kvs_ring_create(device, &desc, &ring));
    CHECK_OK(kvs_trace_plant(device, fault, 0));
    const kvs_demand demand = {.host = host, .record_bytes = 64, .n_pages = 64};
    uint64_t first = 0;
    CHECK_OK(kvs_ring_submit(ring, &demand, 1, &first));
    for (uint64_t end = 1; end <= 64; end++) {
        if (kvs_ring_acquire_wait(ring, end) != KVS_OK) {
            break;
        }
        CHECK_OK(kvs_ring_consume(ring, end));
    }
    kvs_trace_report report = {.struct_size = sizeof report};
    CHECK_OK(kvs_trace_get_report(device, &report));
    char text[1024];
    uint64_t n_said = 0;
    while (kvs_trace_next_hazard(device, text, sizeof text) == KVS_OK) {
        n_said += strlen(text) > 20;
    }
    CHECK_U64(n_said, report.n_hazards);
    kvs_ring_release(ring);
    kvs_host_release(host);
    kvs_lease_release(lease);
    rig_close(device);
    return report.n_hazards;
}

static void test_ring_on_a_trace_device(void)
{
    CHECK_U64(stream_pages(KVS_TRACE_FAULT_NONE), 0);
    CHECK(stream_pages(KVS_TRACE_DROP_GATE) > 0);
    CHECK(stream_pages(KVS_TRACE_DROP_WAIT) > 0);
    CHECK(stream_pages(KVS_TRACE_EARLY_DONE) > 0);
}

static void test_trace_functions_refuse_other_devices(void)
{
    kvs_device *device = rig_device(0, 0);
    kvs_trace_report report = {.struct_size = sizeof report};
    char text[16];
    CHECK_STATUS(kvs_trace_get_report(device, &report), KVS_EUNSUPPORTED);
    CHECK_STATUS(kvs_trace_next_hazard(device, text, sizeof text), KVS_EUNSUPPORTED);
    CHECK_STATUS(kvs_trace_plant(device, KVS_TRACE_DROP_WAIT, 0), KVS_EUNSUPPORTED);
    CHECK_STATUS(kvs_trace_reset(device), KVS_EUNSUPPORTED);
    CHECK_STATUS(kvs_trace_reset(NULL), KVS_EINVAL);
    rig_close(device);
}

int main(void)
{
    test_intervals_agree_with_bytes();
    test_many_short_intervals_split_leaves();
    test_ring_on_a_trace_device();
    test_trace_functions_refuse_other_devices();
    return check_finish();
}
