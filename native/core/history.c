/* history.c: host history memory: reserved address space that only the copy engine reaches. */
#include "core/history.h"

#include "core/device.h"

#include <stdio.h>
#include <string.h>

/* Grain of the record of written pages, that of memory pages on every machine this runs on; and the
 * bytes that go through the copy engine at a time when caller memory is the other side. */
enum { TOUCH_BYTES = 4096, BOUNCE_BYTES = 1 << 20 };

struct kvs_host {
    _Atomic uint64_t claims;
    kvs_device *device;
    uint64_t base;
    uint64_t bytes;
    uint64_t *touched; /* one bit per page of TOUCH_BYTES, guarded by the device's histories */
    uint64_t touched_bytes;
    kvs_host *next;
    kvs_host **link; /* what points here */
};

bool kvs_histories_init(kvs_histories *histories)
{
    memset(histories, 0, sizeof *histories);
    return kvs_mutex_init(&histories->mutex);
}

void kvs_histories_destroy(kvs_histories *histories)
{
    kvs_mutex_destroy(&histories->mutex);
}

static void touch_range(kvs_host *host, uint64_t offset, uint64_t n_bytes)
{
    for (uint64_t page = offset / TOUCH_BYTES; page * TOUCH_BYTES < offset + n_bytes; page++) {
        const uint64_t bit = (uint64_t)1 << page % 64;
        if ((host->touched[page / 64] & bit) == 0) {
            host->touched[page / 64] |= bit;
            const uint64_t left = host->bytes - page * TOUCH_BYTES;
            host->touched_bytes += left < TOUCH_BYTES ? left : TOUCH_BYTES;
        }
    }
}

void kvs_histories_touch(kvs_histories *histories, const kvs_copy *copy)
{
    kvs_mutex_lock(&histories->mutex);
    kvs_host *host = histories->first;
    while (host != NULL && host->base != copy->host_base) {
        host = host->next;
    }
    if (host != NULL) {
        histories->touched_bytes -= host->touched_bytes;
        for (uint32_t i = 0; i < copy->n_pieces; i++) {
            touch_range(host, copy->host_offset + i * copy->host_stride_bytes, copy->n_bytes);
        }
        histories->touched_bytes += host->touched_bytes;
    }
    kvs_mutex_unlock(&histories->mutex);
}

void kvs_histories_sum(kvs_histories *histories, uint64_t *reserved_bytes, uint64_t *touched_bytes)
{
    kvs_mutex_lock(&histories->mutex);
    *reserved_bytes = histories->reserved_bytes;
    *touched_bytes = histories->touched_bytes;
    kvs_mutex_unlock(&histories->mutex);
}

static void link_host(kvs_host *host)
{
    kvs_histories *histories = kvs_device_histories(host->device);
    kvs_mutex_lock(&histories->mutex);
    host->next = histories->first;
    host->link = &histories->first;
    if (host->next != NULL) {
        host->next->link = &host->next;
    }
    histories->first = host;
    histories->reserved_bytes += host->bytes;
    kvs_mutex_unlock(&histories->mutex);
}

static void unlink_host(kvs_host *host)
{
    kvs_histories *histories = kvs_device_histories(host->device);
    kvs_mutex_lock(&histories->mutex);
    *host->link = host->next;
    if (host->next != NULL) {
        host->next->link = host->link;
    }
    histories->reserved_bytes -= host->bytes;
    histories->touched_bytes -= host->touched_bytes;
    kvs_mutex_unlock(&histories->mutex);
}

static kvs_status reserve(kvs_host *host)
{
    const kvs_status status = kvs_hook_ask(host->device, KVS_HOOK_ALLOC);
    if (status != KVS_OK) {
        return status;
    }
    const struct kvs_device_view view = kvs_device_backend(host->device);
    return view.backend->host_alloc(view.self, host->bytes, &host->base);
}

kvs_status kvs_host_create(kvs_device *device, uint64_t bytes, kvs_host **host)
{
    if (device == NULL || host == NULL) {
        return kvs_refuse(device);
    }
    if (bytes == 0) {
        return kvs_fail(device, KVS_EINVAL, "host history of 0 bytes");
    }
    kvs_host *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return KVS_ENOMEM;
    }
    atomic_init(&made->claims, 1);
    made->device = device;
    made->bytes = bytes;
    const uint64_t n_words = kvs_div_up(kvs_div_up(bytes, TOUCH_BYTES), 64);
    made->touched = kvs_array_alloc(device, (size_t)n_words, sizeof *made->touched);
    kvs_status status = KVS_ENOMEM;
    if (made->touched == NULL) {
        (void)kvs_fail(device, status, "need %llu bytes to keep account of host history",
                       (kvs_ull)(n_words * sizeof *made->touched));
    } else {
        status = reserve(made);
    }
    if (status != KVS_OK) {
        kvs_array_free(made->touched);
        kvs_object_free(device, made);
        return status;
    }
    link_host(made);
    *host = made;
    return KVS_OK;
}

void kvs_host_retain(kvs_host *host)
{
    (void)atomic_fetch_add_explicit(&host->claims, 1, memory_order_relaxed);
}

void kvs_host_release(kvs_host *host)
{
    if (host == NULL || atomic_fetch_sub_explicit(&host->claims, 1, memory_order_acq_rel) != 1) {
        return;
    }
    unlink_host(host);
    const struct kvs_device_view view = kvs_device_backend(host->device);
    view.backend->host_free(view.self, host->base, host->bytes);
    kvs_array_free(host->touched);
    kvs_object_free(host->device, host);
}

kvs_device *kvs_host_device(const kvs_host *host)
{
    return host->device;
}

uint64_t kvs_host_base(const kvs_host *host)
{
    return host->base;
}

uint64_t kvs_host_bytes(const kvs_host *host)
{
    return host->bytes;
}

/* One copy through the engine, to its end. */
static kvs_status copy_wait(kvs_host *host, uint64_t offset, uint64_t address, uint64_t n_bytes,
                            bool is_out)
{
    const struct kvs_device_view view = kvs_device_backend(host->device);
    _Atomic uint64_t done = 0;
    _Atomic int failed = KVS_OK;
    const kvs_copy copy = {
        .host_base = host->base,
        .host_offset = offset,
        .device_address = address,
        .n_bytes = n_bytes,
        .n_pieces = 1,
        .is_out = is_out ? 1 : 0,
        .done = &done,
        .done_value = 1,
        .failed = &failed,
    };
    kvs_status status = kvs_device_submit(host->device, &copy, 1);
    if (status != KVS_OK) {
        return status;
    }
    /* Without `failed`: a failing copy ends too, and until its end it writes to this frame. */
    status = kvs_device_wait_counter(host->device, &done, 1, NULL);
    if (status != KVS_OK) {
        view.backend->copy_cancel(view.self, &done);
        return kvs_fail(host->device, KVS_EIO,
                        "a copy of %llu bytes at history offset %llu cannot run", (kvs_ull)n_bytes,
                        (kvs_ull)offset);
    }
    const int failure = atomic_load_explicit(&failed, memory_order_acquire);
    if (failure < 0) {
        char what[128];
        (void)snprintf(what, sizeof what, "a copy of %llu bytes at history offset %llu failed with %s",
                       (kvs_ull)n_bytes, (kvs_ull)offset, kvs_status_name(failure));
        return kvs_fail_copy(host->device, KVS_EIO, what);
    }
    return KVS_OK;
}

static kvs_status check_range(kvs_host *host, uint64_t offset, const void *bytes, uint64_t n_bytes)
{
    if (host == NULL) {
        return KVS_EINVAL;
    }
    if (bytes == NULL && n_bytes != 0) {
        return kvs_fail(host->device, KVS_EINVAL, "no caller memory for %llu bytes",
                        (kvs_ull)n_bytes);
    }
    if (kvs_device_backend(host->device).backend->has_no_bytes) {
        return kvs_fail(host->device, KVS_EUNSUPPORTED, "history of a %s device holds no bytes",
                        kvs_device_backend(host->device).backend->name);
    }
    if (offset > host->bytes || n_bytes > host->bytes - offset) {
        return kvs_fail(host->device, KVS_ENOSPACE,
                        "need %llu bytes at offset %llu, have %llu (host history)",
                        (kvs_ull)n_bytes, (kvs_ull)offset, (kvs_ull)host->bytes);
    }
    return KVS_OK;
}

/* Exactly one of `to` and `from` is caller memory, the other is NULL. */
static kvs_status move_wait(kvs_host *host, uint64_t offset, unsigned char *to,
                            const unsigned char *from, uint64_t n_bytes)
{
    kvs_buffer *bounce = NULL;
    const uint64_t chunk_bytes = n_bytes < BOUNCE_BYTES ? n_bytes : BOUNCE_BYTES;
    kvs_status status =
        n_bytes == 0 ? KVS_OK : kvs_buffer_create(host->device, chunk_bytes, 64, &bounce);
    if (bounce == NULL) {
        return status;
    }
    const struct kvs_device_view view = kvs_device_backend(host->device);
    const uint64_t address = kvs_buffer_address(bounce);
    for (uint64_t at = 0; status == KVS_OK && at < n_bytes; at += chunk_bytes) {
        const uint64_t left = n_bytes - at;
        const uint64_t now = left < chunk_bytes ? left : chunk_bytes;
        if (from != NULL) {
            status = view.backend->device_write(view.self, address, now, from + at);
        }
        if (status == KVS_OK) {
            status = copy_wait(host, offset + at, address, now, from != NULL);
        }
        if (status == KVS_OK && to != NULL) {
            status = view.backend->device_read(view.self, address, now, to + at);
        }
    }
    kvs_buffer_release(bounce);
    return status;
}

kvs_status kvs_host_read_wait(kvs_host *host, uint64_t offset, void *bytes, uint64_t n_bytes)
{
    const kvs_status status = check_range(host, offset, bytes, n_bytes);
    return status != KVS_OK ? status : move_wait(host, offset, bytes, NULL, n_bytes);
}

kvs_status kvs_host_write_wait(kvs_host *host, uint64_t offset, const void *bytes, uint64_t n_bytes)
{
    const kvs_status status = check_range(host, offset, bytes, n_bytes);
    return status != KVS_OK ? status : move_wait(host, offset, NULL, bytes, n_bytes);
}
