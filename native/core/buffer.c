/* buffer.c: device memory and views of it.
 *
 * A view holds one claim on its root, never on another view: how deep views were nested leaves no
 * trace.
 */
#include "core/device.h"
#include "kvstream/interop.h"

enum { MIN_ALIGNMENT = 64 };

struct kvs_buffer {
    _Atomic uint64_t claims; /* callers', and on a root one per view */
    kvs_device *device;
    kvs_buffer *root; /* NULL for a root */
    uint64_t address;
    uint64_t bytes;
    bool is_adopted; /* a root whose memory is another's */
    kvs_drop drop;   /* NULL: nobody is told */
    void *user;
};

static kvs_status alloc_memory(kvs_buffer *buffer, uint64_t alignment)
{
    const kvs_status status = kvs_hook_ask(buffer->device, KVS_HOOK_ALLOC);
    if (status != KVS_OK) {
        return status;
    }
    const struct kvs_device_view view = kvs_device_backend(buffer->device);
    const kvs_status made = view.backend->device_alloc(view.self, buffer->bytes, alignment, &buffer->address);
    /* Of memory of its own a backend says what is free. */
    if (made < 0 && !view.backend->copies_rows) {
        return kvs_fail(buffer->device, made, "need %llu bytes of device memory aligned to %llu: %s",
                        (kvs_ull)buffer->bytes, (kvs_ull)alignment,
                        made == KVS_EOVERFLOW ? "more than an address can count" : "the system has no such block free");
    }
    return made;
}

kvs_status kvs_buffer_create(kvs_device *device, uint64_t bytes, uint64_t alignment,
                             kvs_buffer **buffer)
{
    if (device == NULL || buffer == NULL) {
        return kvs_refuse(device);
    }
    if (bytes == 0 || alignment < MIN_ALIGNMENT || !kvs_is_power_of_two(alignment)) {
        return kvs_fail(
            device, KVS_EINVAL,
            "a buffer of %llu bytes aligned to %llu: need bytes and a power of two of at least %d",
            (kvs_ull)bytes, (kvs_ull)alignment, MIN_ALIGNMENT);
    }
    kvs_buffer *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return KVS_ENOMEM;
    }
    atomic_init(&made->claims, 1);
    made->device = device;
    made->bytes = bytes;
    const kvs_status status = alloc_memory(made, alignment);
    if (status != KVS_OK) {
        kvs_object_free(device, made);
        return status;
    }
    kvs_device_count_bytes(device, (int64_t)bytes);
    *buffer = made;
    return KVS_OK;
}

kvs_status kvs_buffer_adopt(kvs_device *device, uint64_t address, uint64_t bytes, kvs_drop drop,
                            void *user, kvs_buffer **buffer)
{
    if (device == NULL || buffer == NULL) {
        return kvs_refuse(device);
    }
    if (address == 0 || address % MIN_ALIGNMENT != 0 || bytes == 0) {
        return kvs_fail(device, KVS_EINVAL,
                        "memory to adopt, %llu bytes at %#llx: need bytes, and an address that is a multiple of %d",
                        (kvs_ull)bytes, (kvs_ull)address, MIN_ALIGNMENT);
    }
    const struct kvs_device_view view = kvs_device_backend(device);
    if (view.backend->has_no_bytes) {
        return kvs_fail(device, KVS_EUNSUPPORTED, "a %s device without memory adopts none",
                        view.backend->name);
    }
    if (view.backend->device_adopt != NULL) {
        const kvs_status status = view.backend->device_adopt(view.self, address, bytes);
        if (status != KVS_OK) {
            return status;
        }
    }
    kvs_buffer *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return KVS_ENOMEM;
    }
    atomic_init(&made->claims, 1);
    made->device = device;
    made->address = address;
    made->bytes = bytes;
    made->is_adopted = true;
    made->drop = drop;
    made->user = user;
    *buffer = made;
    return KVS_OK;
}

kvs_status kvs_buffer_view(kvs_buffer *parent, uint64_t offset, uint64_t bytes, kvs_buffer **view)
{
    if (parent == NULL || view == NULL) {
        return kvs_refuse(parent == NULL ? NULL : parent->device);
    }
    uint64_t end;
    if (bytes == 0 || offset % MIN_ALIGNMENT != 0) {
        return kvs_fail(parent->device, KVS_EINVAL,
                        "a view of %llu bytes at offset %llu: need bytes and %d-byte steps",
                        (kvs_ull)bytes, (kvs_ull)offset, MIN_ALIGNMENT);
    }
    if (!kvs_add_u64(offset, bytes, &end)) {
        return kvs_fail(parent->device, KVS_EOVERFLOW, "a view of %llu bytes at offset %llu",
                        (kvs_ull)bytes, (kvs_ull)offset);
    }
    if (end > parent->bytes) {
        return kvs_fail(parent->device, KVS_ENOSPACE,
                        "a view needs %llu bytes, its parent has %llu", (kvs_ull)end,
                        (kvs_ull)parent->bytes);
    }
    kvs_buffer *made = kvs_object_alloc(parent->device, sizeof *made);
    if (made == NULL) {
        return KVS_ENOMEM;
    }
    atomic_init(&made->claims, 1);
    made->device = parent->device;
    made->root = parent->root == NULL ? parent : parent->root;
    made->address = parent->address + offset;
    made->bytes = bytes;
    kvs_buffer_retain(made->root);
    *view = made;
    return KVS_OK;
}

void kvs_buffer_retain(kvs_buffer *buffer)
{
    if (buffer != NULL) {
        (void)atomic_fetch_add_explicit(&buffer->claims, 1, memory_order_relaxed);
    }
}

void kvs_buffer_release(kvs_buffer *buffer)
{
    if (buffer == NULL ||
        atomic_fetch_sub_explicit(&buffer->claims, 1, memory_order_acq_rel) != 1) {
        return;
    }
    kvs_buffer *root = buffer->root;
    const struct kvs_device_view view = kvs_device_backend(buffer->device);
    if (root == NULL && buffer->is_adopted) {
        const bool may_drop = buffer->drop != NULL && (view.backend->device_may_drop == NULL ||
                                                       view.backend->device_may_drop(view.self, buffer->bytes));
        if (may_drop) {
            buffer->drop(buffer->user);
        }
    } else if (root == NULL) {
        view.backend->device_free(view.self, buffer->address, buffer->bytes);
        kvs_device_count_bytes(buffer->device, -(int64_t)buffer->bytes);
    }
    kvs_object_free(buffer->device, buffer);
    kvs_buffer_release(root);
}

kvs_status kvs_buffer_get_range(kvs_buffer *buffer, uint64_t *address, uint64_t *bytes)
{
    if (buffer == NULL || address == NULL || bytes == NULL) {
        return kvs_refuse(buffer == NULL ? NULL : buffer->device);
    }
    *address = buffer->address;
    *bytes = buffer->bytes;
    return KVS_OK;
}

kvs_device *kvs_buffer_device(const kvs_buffer *buffer)
{
    return buffer->device;
}

uint64_t kvs_buffer_address(const kvs_buffer *buffer)
{
    return buffer->address;
}

uint64_t kvs_buffer_bytes(const kvs_buffer *buffer)
{
    return buffer->bytes;
}
