/* copy_move.c: one copy, from its first byte to its last counter. */
#include "backends/cpu/copy_move.h"

#include "base/sync.h"

#include <string.h>

/* Below this a copy is over before anybody could help. */
#define SHARED_BYTES ((uint64_t)96 << 10)

static void move_pieces(const kvs_copy *copy, kvs_copy_share *share)
{
    uint8_t *host = (uint8_t *)(uintptr_t)(copy->host_base + copy->host_offset);
    uint8_t *device = (uint8_t *)(uintptr_t)copy->device_address;
    if (share != NULL && copy->n_pieces == 1 && !copy->is_out && copy->n_bytes >= SHARED_BYTES) {
        kvs_copy_share_move(share, device, host, copy->n_bytes);
        return;
    }
    for (uint32_t i = 0; i < copy->n_pieces; i++) {
        if (copy->is_out) {
            memcpy(host, device, (size_t)copy->n_bytes);
        } else {
            memcpy(device, host, (size_t)copy->n_bytes);
        }
        host += copy->host_stride_bytes;
        device += copy->device_stride_bytes;
    }
}

bool kvs_copy_host_extent(const kvs_copy *copy, uint64_t *n_bytes)
{
    uint64_t strides;
    return kvs_mul_u64(copy->n_pieces - 1, copy->host_stride_bytes, &strides) &&
           kvs_add_u64(strides, copy->n_bytes, n_bytes);
}

static kvs_status copy_now(kvs_device *device, const kvs_copy_entry *item, kvs_copy_share *share)
{
    const kvs_copy *copy = &item->copy;
    const kvs_status verdict = kvs_hook_ask(device, KVS_HOOK_COPY);
    if (verdict < 0) {
        return verdict;
    }
    uint64_t n_bytes = 0;
    if (!kvs_copy_host_extent(copy, &n_bytes)) {
        return KVS_EOVERFLOW;
    }
    if (verdict != KVS_PENDING) {
        if (!kvs_hostmap_open(item->map, copy->host_offset, n_bytes)) {
            return KVS_ENOMEM;
        }
        move_pieces(copy, share);
        kvs_hostmap_close(item->map, copy->host_offset, n_bytes);
    }
    return KVS_OK;
}

/* The entry ends whatever happened; counts and `failed` are stored first, so whoever sees `done` sees them too. Returns
 * whether the failure found no `failed` to go to. */
static bool finish(kvs_device *device, const kvs_copy *copy, kvs_status status, uint64_t spent_ns)
{
    if (status < 0) {
        kvs_device_count_failed_copy(device);
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

bool kvs_copy_carry_out(kvs_device *device, const kvs_copy_entry *item, kvs_copy_share *share)
{
    const uint64_t started_ns = kvs_clock_ns();
    const kvs_status status = copy_now(device, item, share);
    return finish(device, &item->copy, status, kvs_clock_ns() - started_ns);
}
