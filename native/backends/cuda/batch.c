/* batch.c: the copies of a batch, from the driver's calls to their counters. */
#include "backends/cuda/batch.h"

#include "backends/cuda/waits.h"
#include "base/sync.h"

enum { LANE_IN = 0, LANE_OUT = 1 };

static uint64_t bytes_of(const kvs_copy *copy)
{
    return copy->n_bytes * copy->n_pieces;
}

/* Move one contiguous range, cut where registrations end. */
static kvs_status move_range(kvs_cuda_lanes *lanes, const kvs_cuda_entry *entry, uint64_t host_offset, uint64_t address,
                             uint64_t n_bytes, cu_stream stream)
{
    while (n_bytes != 0) {
        const uint64_t room = kvs_cuda_host_chunk_end(entry->host, host_offset) - host_offset;
        const uint64_t now = n_bytes < room ? n_bytes : room;
        const uint64_t host = entry->copy.host_base + host_offset;
        const kvs_status status =
            entry->copy.is_out ? KVS_CUDA_CALL(lanes->device, lanes->driver, copy, host, address, (size_t)now, stream)
                               : KVS_CUDA_CALL(lanes->device, lanes->driver, copy, address, host, (size_t)now, stream);
        if (status != KVS_OK) {
            return status;
        }
        host_offset += now;
        address += now;
        n_bytes -= now;
    }
    return KVS_OK;
}

/* Pieces at equal strides that lie in one registration are one call. */
static kvs_status move_pieces(kvs_cuda_lanes *lanes, const kvs_cuda_entry *entry, cu_stream stream)
{
    const kvs_copy *copy = &entry->copy;
    const uint64_t host = copy->host_base + copy->host_offset;
    cu_copy_2d call = {.src_kind = CU_MEMORY_UNIFIED,
                       .src_address = copy->is_out ? copy->device_address : host,
                       .src_pitch = copy->is_out ? copy->device_stride_bytes : copy->host_stride_bytes,
                       .dst_kind = CU_MEMORY_UNIFIED,
                       .dst_address = copy->is_out ? host : copy->device_address,
                       .dst_pitch = copy->is_out ? copy->host_stride_bytes : copy->device_stride_bytes,
                       .width_bytes = (size_t)copy->n_bytes,
                       .height = copy->n_pieces};
    return KVS_CUDA_CALL(lanes->device, lanes->driver, copy_2d, &call, stream);
}

static uint64_t host_extent(const kvs_copy *copy)
{
    return (copy->n_pieces - 1) * copy->host_stride_bytes + copy->n_bytes;
}

static kvs_status issue_copy(kvs_cuda_lanes *lanes, const kvs_cuda_entry *entry)
{
    const kvs_copy *copy = &entry->copy;
    const cu_stream stream = lanes->streams[copy->is_out ? LANE_OUT : LANE_IN];
    kvs_status status = kvs_hook_ask(lanes->device, KVS_HOOK_COPY);
    status = status != KVS_OK ? status : kvs_cuda_waits_admit(lanes->driver);
    if (status != KVS_OK) {
        return status;
    }
    const uint64_t extent = host_extent(copy);
    kvs_mutex_lock(lanes->pinning);
    status =
        kvs_cuda_host_pin(entry->host, lanes->device, lanes->driver, copy->host_offset, extent);
    kvs_mutex_unlock(lanes->pinning);
    if (status != KVS_OK) {
        return status;
    }
    const bool is_in_one = copy->host_offset + extent <= kvs_cuda_host_chunk_end(entry->host, copy->host_offset);
    if (copy->n_pieces > 1 && is_in_one) {
        return move_pieces(lanes, entry, stream);
    }
    for (uint32_t i = 0; status == KVS_OK && i < copy->n_pieces; i++) {
        status = move_range(lanes, entry, copy->host_offset + i * copy->host_stride_bytes,
                            copy->device_address + i * copy->device_stride_bytes, copy->n_bytes, stream);
    }
    return status;
}

/* A copy into a ring goes behind the readers of its slots, and says when it is there. */
static kvs_status issue_ring_copy(kvs_cuda_lanes *lanes, const kvs_cuda_entry *entry, cu_stream stream)
{
    kvs_status status = kvs_cuda_rings_wait_slot(lanes->rings, &entry->copy, stream);
    if (status == KVS_OK) {
        status = issue_copy(lanes, entry);
    }
    if (status >= 0) {
        const kvs_status said = kvs_cuda_rings_say_ready(lanes->rings, &entry->copy, stream);
        status = said == KVS_OK ? status : said;
    }
    if (status < 0) {
        kvs_cuda_rings_fail(lanes->rings, &entry->copy);
    }
    return status;
}

/* What the hook lets through without a byte counts as done. */
void kvs_cuda_batch_issue(kvs_cuda_lanes *lanes, kvs_cuda_batch *batch)
{
    const bool is_out = batch->entries[0].copy.is_out != 0;
    const cu_stream stream = lanes->streams[is_out ? LANE_OUT : LANE_IN];
    batch->started_ns = kvs_clock_ns();
    kvs_status shared = kvs_cuda_waits_admit(lanes->driver);
    const bool has_words = lanes->rings != NULL && batch->entries[0].copy.gate != NULL;
    if (shared == KVS_OK && !is_out && !has_words) {
        shared = KVS_CUDA_CALL(lanes->device, lanes->driver, stream_after, stream, lanes->readers, 0);
    }
    for (uint32_t i = 0; i < batch->n_copies; i++) {
        batch->status[i] = shared != KVS_OK ? shared
                           : has_words      ? issue_ring_copy(lanes, &batch->entries[i], stream)
                                            : issue_copy(lanes, &batch->entries[i]);
    }
    shared = shared != KVS_OK
                 ? shared
                 : KVS_CUDA_CALL(lanes->device, lanes->driver, event_record, batch->event, stream);
    for (uint32_t i = 0; shared != KVS_OK && i < batch->n_copies; i++) {
        batch->status[i] = shared;
        if (has_words) {
            kvs_cuda_rings_fail(lanes->rings, &batch->entries[i].copy);
        }
    }
}

/* The entry ends whatever happened; counts and `failed` are stored first, so whoever sees `done` sees them too. Returns whether
 * the failure found no `failed` to go to. */
static bool finish_copy(kvs_device *device, const kvs_copy *copy, kvs_status status, uint64_t spent_ns)
{
    if (status < 0) {
        kvs_device_count_failed_copy(device);
        kvs_device_note_copy_failure(device);
    } else {
        kvs_device_count_copy(device, copy, spent_ns);
    }
    const bool is_unheard = status < 0 && copy->failed == NULL;
    if (status < 0 && copy->failed != NULL) {
        int none = 0;
        (void)atomic_compare_exchange_strong(copy->failed, &none, (int)status);
    }
    if (copy->done != NULL) {
        atomic_store_explicit(copy->done, copy->done_value, memory_order_release);
    }
    return is_unheard;
}

kvs_status kvs_cuda_batch_wait(kvs_cuda_lanes *lanes, const kvs_cuda_batch *batch)
{
    return kvs_cuda_wait_event(lanes->driver, batch->event, "%u copies of %llu bytes %s history", batch->n_copies,
                               (kvs_ull)batch->n_bytes, batch->entries[0].copy.is_out ? "to" : "from");
}

bool kvs_cuda_batch_tell_copy(const kvs_cuda_lanes *lanes, const kvs_copy *copy, kvs_status status)
{
    return finish_copy(lanes->device, copy, status, 0);
}

/* Time of a batch counts from where the one before ended, and belongs to its copies by their bytes. */
bool kvs_cuda_batch_tell(kvs_cuda_lanes *lanes, const kvs_cuda_batch *batch, kvs_status status)
{
    const uint64_t now_ns = kvs_clock_ns();
    const uint64_t from_ns = batch->started_ns > lanes->last_end_ns ? batch->started_ns : lanes->last_end_ns;
    const double ns_per_byte = (double)(now_ns - from_ns) / (double)batch->n_bytes;
    lanes->last_end_ns = now_ns;
    bool is_unheard = false;
    for (uint32_t i = 0; status != KVS_OK && lanes->rings != NULL && i < batch->n_copies; i++) {
        kvs_cuda_rings_fail(lanes->rings, &batch->entries[i].copy);
    }
    for (uint32_t i = 0; i < batch->n_copies; i++) {
        const kvs_copy *copy = &batch->entries[i].copy;
        const uint64_t spent_ns = (uint64_t)(ns_per_byte * (double)bytes_of(copy));
        is_unheard |= finish_copy(lanes->device, copy, batch->status[i] < 0 ? batch->status[i] : status, spent_ns);
    }
    return is_unheard;
}
