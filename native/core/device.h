/* device.h: what the parts of the core share about a device, its memory, its fences and its leases.
 *
 * Every object made by kvs_object_alloc holds a claim on its device, so a getter here returns a
 * pointer that is valid as long as the object it was asked of. A backend part that lives inside the
 * device must not use kvs_object_alloc for itself: its claim would keep the device alive forever.
 */
#ifndef KVS_NATIVE_CORE_DEVICE_H
#define KVS_NATIVE_CORE_DEVICE_H

#include "core/backend.h"
#include "kvstream/arena.h"

/* Device. */
void kvs_device_retain(kvs_device *device);
/* 1, 2, 3...: never the same twice. thread: any */
uint64_t kvs_device_next_id(kvs_device *device);
uint32_t kvs_device_flags(const kvs_device *device);
static inline bool kvs_device_has(const kvs_device *device, kvs_device_flag flag)
{
    return (kvs_device_flags(device) & (uint32_t)flag) != 0;
}

/* Queue copies in order: all or none. errors: the backend's; the hook's */
kvs_status kvs_device_submit(kvs_device *device, const kvs_copy *copies, uint32_t n_copies);

/* The backend's wait_counter, told to the timeline. */
kvs_status kvs_device_wait_counter(kvs_device *device, const _Atomic uint64_t *counter, uint64_t value,
                                   const _Atomic int *failed);

/* Fail because a copy did: `what`, and why as far as its engine has told. */
kvs_status kvs_fail_copy(kvs_device *device, kvs_status status, const char *what);

/* Buffers. */
kvs_device *kvs_buffer_device(const kvs_buffer *buffer);
uint64_t kvs_buffer_address(const kvs_buffer *buffer);
uint64_t kvs_buffer_bytes(const kvs_buffer *buffer);

/* Host history: the rest is in backend.h. */
void kvs_host_retain(kvs_host *host);

/* Arenas and leases. Address and extent of a lease never change while it lives. */
kvs_device *kvs_arena_device(const kvs_arena *arena);
kvs_device *kvs_lease_device(const kvs_lease *lease);
kvs_arena *kvs_lease_arena(const kvs_lease *lease);
uint64_t kvs_lease_address(const kvs_lease *lease);
uint64_t kvs_lease_bytes(const kvs_lease *lease);
/* Epoch of the arena now. thread: any */
uint64_t kvs_arena_epoch(kvs_arena *arena);

/* Fences. */
kvs_device *kvs_fence_device(const kvs_fence *fence);

#endif
