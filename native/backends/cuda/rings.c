/* rings.c: seats for rings, with their counters, and one word by which host and card tell each other to give up. */
#include "backends/cuda/rings.h"

#include "backends/cuda/waits.h"
#include "base/sync.h"

#include <stdlib.h>

#define MAX_RINGS 16u
/* Counters lie apart: one is written by copies, the other by readers. */
#define LINE_BYTES 128u
#define FIRST_SLOTS 256u
#define ALIGNMENT 256u

/* Device memory of a seat: ready | consumed | completed [n_room] u64 | arrivals [n_room] u32. It stays when a ring leaves. */
struct seat {
    const _Atomic uint64_t *gate; /* NULL: free */
    const _Atomic uint64_t *done;
    uint64_t address;
    uint32_t n_room; /* slots */
    _Atomic uint64_t queued;
    _Atomic int has_failed;
    _Atomic int is_stale; /* it is to begin anew once the card is well again */
};

struct kvs_cuda_rings {
    kvs_device *device;
    const kvs_cuda_driver *driver;
    kvs_cuda_memory *memory;
    cu_stream compute;
    cu_stream control; /* of its own: the compute order may be waiting for what is written here */
    volatile uint32_t *stop;
    kvs_mutex lock; /* of the list */
    struct seat seats[MAX_RINGS];
};

kvs_status kvs_cuda_rings_create(kvs_device *device, const kvs_cuda_driver *driver, kvs_cuda_memory *memory,
                                 cu_stream compute, kvs_cuda_rings **rings)
{
    kvs_cuda_rings *made = calloc(1, sizeof *made);
    if (made == NULL || !kvs_mutex_init(&made->lock)) {
        free(made);
        return kvs_fail(device, KVS_ENOMEM, "no memory for the account of rings");
    }
    made->device = device;
    made->driver = driver;
    made->memory = memory;
    made->compute = compute;
    void *stop = NULL;
    kvs_status status = KVS_CUDA_CALL(device, driver, host_alloc, &stop, sizeof *made->stop, CU_MEM_HOST_PORTABLE);
    if (status == KVS_OK) {
        made->stop = stop;
        *made->stop = 0;
        status = KVS_CUDA_CALL(device, driver, stream_create, &made->control, CU_STREAM_NON_BLOCKING);
    }
    if (status == KVS_OK) {
        kvs_cuda_waits_watch(driver, made->control, "counters of rings");
    }
    if (status != KVS_OK) {
        kvs_cuda_rings_destroy(made);
        return status;
    }
    *rings = made;
    return KVS_OK;
}

static uint64_t seat_bytes(uint32_t n_room)
{
    return 2 * LINE_BYTES + n_room * (sizeof(uint64_t) + sizeof(uint32_t));
}

static void free_seat(kvs_cuda_rings *rings, struct seat *seat)
{
    if (seat->n_room != 0) {
        kvs_cuda_memory_free(rings->memory, seat->address, seat_bytes(seat->n_room));
        kvs_device_count_bytes(rings->device, -(int64_t)seat_bytes(seat->n_room));
        seat->n_room = 0;
    }
}

void kvs_cuda_rings_destroy(kvs_cuda_rings *rings)
{
    if (rings == NULL) {
        return;
    }
    for (uint32_t i = 0; i < MAX_RINGS; i++) {
        free_seat(rings, &rings->seats[i]);
    }
    if (kvs_cuda_waits_may_free(rings->driver, rings->stop == NULL ? 0 : sizeof *rings->stop)) {
        if (rings->control != NULL) {
            kvs_cuda_waits_unwatch(rings->driver, rings->control);
            (void)rings->driver->api.stream_destroy(rings->control);
        }
        if (rings->stop != NULL) {
            (void)rings->driver->api.host_free((void *)rings->stop);
        }
    }
    kvs_mutex_destroy(&rings->lock);
    free(rings);
}

/* A seat belongs to its ring from joining to leaving, and rings outlive their copies. */
static struct seat *find(kvs_cuda_rings *rings, const _Atomic uint64_t *gate, const _Atomic uint64_t *done)
{
    struct seat *found = NULL;
    kvs_mutex_lock(&rings->lock);
    for (uint32_t i = 0; i < MAX_RINGS && found == NULL; i++) {
        struct seat *seat = &rings->seats[i];
        found = seat->gate != NULL && (seat->gate == gate || seat->done == done) ? seat : NULL;
    }
    kvs_mutex_unlock(&rings->lock);
    return found;
}

static uint64_t ready_at(const struct seat *seat)
{
    return seat->address;
}

static uint64_t consumed_at(const struct seat *seat)
{
    return seat->address + LINE_BYTES;
}

static uint64_t completed_at(const struct seat *seat)
{
    return seat->address + 2 * LINE_BYTES;
}

static uint64_t arrivals_at(const struct seat *seat)
{
    return completed_at(seat) + seat->n_room * sizeof(uint64_t);
}

static kvs_status zero(kvs_cuda_rings *rings, uint64_t address, uint64_t bytes)
{
    const kvs_status status =
        KVS_CUDA_CALL(rings->device, rings->driver, fill, address, 0, (size_t)bytes, rings->control);
    return status != KVS_OK ? status
                            : kvs_cuda_wait_stream(rings->driver, rings->control, "%llu bytes of a ring's counters to be zero",
                                                   (kvs_ull)bytes);
}

static kvs_status prepare(kvs_cuda_rings *rings, struct seat *seat, uint32_t n_slots)
{
    uint64_t n_room = seat->n_room == 0 ? FIRST_SLOTS : seat->n_room;
    while (n_room < n_slots) {
        n_room *= 2;
    }
    if (n_room != seat->n_room) {
        free_seat(rings, seat);
        const kvs_status status =
            kvs_cuda_memory_alloc(rings->memory, seat_bytes((uint32_t)n_room), ALIGNMENT, &seat->address);
        if (status != KVS_OK) {
            return status;
        }
        seat->n_room = (uint32_t)n_room;
        kvs_device_count_bytes(rings->device, (int64_t)seat_bytes(seat->n_room));
    }
    atomic_store(&seat->queued, 0);
    atomic_store(&seat->has_failed, 0);
    atomic_store(&seat->is_stale, 0);
    return zero(rings, seat->address, seat_bytes(seat->n_room));
}

kvs_status kvs_cuda_rings_join(kvs_cuda_rings *rings, const _Atomic uint64_t *gate, const _Atomic uint64_t *done,
                               uint32_t n_slots)
{
    struct seat *seat = NULL;
    kvs_mutex_lock(&rings->lock);
    /* Of the free seats the roomiest, so that memory does not grow with rings that come and go. */
    for (uint32_t i = 0; i < MAX_RINGS; i++) {
        struct seat *each = &rings->seats[i];
        seat = each->gate == NULL && (seat == NULL || each->n_room > seat->n_room) ? each : seat;
    }
    const kvs_status status = seat == NULL
                                  ? kvs_fail(rings->device, KVS_ENOSPACE, "a card has room for %u rings", MAX_RINGS)
                                  : prepare(rings, seat, n_slots);
    if (status == KVS_OK) {
        seat->gate = gate;
        seat->done = done;
    }
    kvs_mutex_unlock(&rings->lock);
    return status;
}

void kvs_cuda_rings_leave(kvs_cuda_rings *rings, const _Atomic uint64_t *gate)
{
    struct seat *seat = find(rings, gate, NULL);
    kvs_mutex_lock(&rings->lock);
    if (seat != NULL) {
        seat->gate = NULL;
        seat->done = NULL;
    }
    kvs_mutex_unlock(&rings->lock);
}

static kvs_status write_word(kvs_cuda_rings *rings, uint64_t address, uint64_t value, cu_stream stream)
{
    return KVS_CUDA_CALL(rings->device, rings->driver, word_write, stream, address, value, CU_WORD_WRITE_DEFAULT);
}

kvs_status kvs_cuda_rings_consumed(kvs_cuda_rings *rings, const _Atomic uint64_t *gate, uint64_t value)
{
    const struct seat *seat = find(rings, gate, NULL);
    return seat == NULL ? KVS_OK : write_word(rings, consumed_at(seat), value, rings->compute);
}

void kvs_cuda_rings_describe(kvs_cuda_rings *rings, const kvs_stream_view *stream, kvs_step_words *words)
{
    const struct seat *seat = stream->gate == NULL ? NULL : find(rings, stream->gate, NULL);
    words->stop = (uint64_t)(uintptr_t)rings->stop;
    if (seat != NULL) {
        words->ready = ready_at(seat);
        words->consumed = consumed_at(seat);
        words->completed = completed_at(seat);
        words->arrivals = arrivals_at(seat);
        words->base_demand = stream->base_demand;
        words->n_slots = stream->n_slots;
    }
}

/* ---- copies ---- */

static struct seat *seat_of(kvs_cuda_rings *rings, const kvs_copy *copy)
{
    return copy->gate == NULL ? NULL : find(rings, copy->gate, NULL);
}

void kvs_cuda_rings_queued(kvs_cuda_rings *rings, const kvs_copy *copy)
{
    struct seat *seat = seat_of(rings, copy);
    if (seat != NULL) {
        atomic_store(&seat->queued, copy->done_value);
    }
}

kvs_status kvs_cuda_rings_wait_slot(kvs_cuda_rings *rings, const kvs_copy *copy, cu_stream stream)
{
    const struct seat *seat = seat_of(rings, copy);
    if (seat == NULL) {
        return KVS_OK;
    }
    if (atomic_load(&seat->has_failed) != 0) {
        return kvs_fail(rings->device, KVS_EIO, "a copy before this one has failed");
    }
    return copy->gate_value == 0 ? KVS_OK
                                 : KVS_CUDA_CALL(rings->device, rings->driver, word_wait, stream, consumed_at(seat),
                                                 copy->gate_value, CU_WORD_WAIT_AT_LEAST);
}

kvs_status kvs_cuda_rings_say_ready(kvs_cuda_rings *rings, const kvs_copy *copy, cu_stream stream)
{
    const struct seat *seat = seat_of(rings, copy);
    return seat == NULL ? KVS_OK : write_word(rings, ready_at(seat), copy->done_value, stream);
}

void kvs_cuda_rings_fail(kvs_cuda_rings *rings, const kvs_copy *copy)
{
    struct seat *seat = seat_of(rings, copy);
    if (seat != NULL) {
        atomic_store(&seat->has_failed, 1);
        *rings->stop = 1;
    }
}

void kvs_cuda_rings_let_go(kvs_cuda_rings *rings, const _Atomic uint64_t *done)
{
    const struct seat *seat = find(rings, NULL, done);
    if (seat != NULL) {
        (void)write_word(rings, consumed_at(seat), atomic_load(&seat->queued), rings->control);
    }
}

/* Readers that gave up have left pages in no order, so that arrivals are of no use. */
static kvs_status begin_anew(kvs_cuda_rings *rings, struct seat *seat)
{
    const uint64_t queued = atomic_load(&seat->queued);
    kvs_status status = write_word(rings, ready_at(seat), queued, rings->control);
    if (status == KVS_OK) {
        status = write_word(rings, consumed_at(seat), queued, rings->control);
    }
    if (status == KVS_OK) {
        status = zero(rings, arrivals_at(seat), seat->n_room * sizeof(uint32_t));
    }
    atomic_store(&seat->is_stale, status == KVS_OK ? 0 : 1);
    atomic_store(&seat->has_failed, status == KVS_OK ? 0 : 1);
    return status;
}

/* Kernels of a lost card may go on later, and would find what they raise in the way. */
void kvs_cuda_rings_begin_anew(kvs_cuda_rings *rings, const _Atomic uint64_t *done)
{
    struct seat *seat = find(rings, NULL, done);
    if (seat == NULL) {
        return;
    }
    if (kvs_cuda_waits_is_lost(rings->driver)) {
        atomic_store(&seat->is_stale, 1);
        atomic_store(&seat->has_failed, 1);
        return;
    }
    (void)begin_anew(rings, seat);
}

kvs_status kvs_cuda_rings_mend(kvs_cuda_rings *rings, const kvs_copy *copy)
{
    struct seat *seat = seat_of(rings, copy);
    return seat == NULL || atomic_load(&seat->is_stale) == 0 ? KVS_OK : begin_anew(rings, seat);
}

/* ---- giving up ---- */

/* Copies fail at any time: whoever sets a seat's flag sets `stop` behind it, and here it is the other way round. */
bool kvs_cuda_rings_arm(kvs_cuda_rings *rings)
{
    *rings->stop = 0;
    atomic_thread_fence(memory_order_seq_cst);
    bool is_whole = true;
    for (uint32_t i = 0; i < MAX_RINGS; i++) {
        is_whole = is_whole && atomic_load(&rings->seats[i].has_failed) == 0;
    }
    if (!is_whole) {
        *rings->stop = 1;
    }
    return is_whole;
}

bool kvs_cuda_rings_gave_up(kvs_cuda_rings *rings)
{
    return *rings->stop != 0;
}
