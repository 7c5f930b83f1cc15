/* interop.c: device memory lent to other libraries and taken from them. */
#include "kvstream/interop.h"

#include "core/device.h"

#include <string.h>

/* DLPack 0.x, as its header has it. */
typedef struct dl_tensor {
    void *data;
    int32_t device_type;
    int32_t device_number;
    int32_t n_dims;
    uint8_t kind;
    uint8_t bits;
    uint16_t lanes;
    int64_t *shape;
    int64_t *strides; /* of elements; NULL: contiguous */
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *self);
} dl_managed;

enum { PLACE_CPU = 1, PLACE_CUDA = 2, BITS_PER_BYTE = 8 };

/* What a lent tensor holds. */
struct lent {
    dl_managed managed;
    kvs_buffer *buffer;
    kvs_device *device;
    int64_t shape[KVS_LEND_MAX_DIMS];
};

static kvs_status require_memory(kvs_device *device)
{
    const kvs_backend *backend = kvs_device_backend(device).backend;
    return backend->has_no_bytes
               ? kvs_fail(device, KVS_EUNSUPPORTED, "the addresses of a %s device of this kind have no memory", backend->name)
               : KVS_OK;
}

kvs_status kvs_device_get_place(kvs_device *device, int32_t *type, int32_t *number)
{
    if (device == NULL || type == NULL || number == NULL) {
        return kvs_refuse(device);
    }
    const kvs_status status = require_memory(device);
    if (status != KVS_OK) {
        return status;
    }
    const struct kvs_device_view view = kvs_device_backend(device);
    *type = view.backend->place == NULL ? PLACE_CPU : PLACE_CUDA;
    *number = view.backend->place == NULL ? 0 : view.backend->place(view.self);
    return KVS_OK;
}

/* ---- streams ---- */

static kvs_status require_streams(kvs_device *device)
{
    const kvs_backend *backend = kvs_device_backend(device).backend;
    return backend->stream != NULL ? KVS_OK
                                   : kvs_fail(device, KVS_EUNSUPPORTED, "a %s device of this kind has no streams", backend->name);
}

kvs_status kvs_device_get_stream(kvs_device *device, uint64_t *stream)
{
    if (device == NULL || stream == NULL) {
        return kvs_refuse(device);
    }
    const kvs_status status = require_streams(device);
    if (status == KVS_OK) {
        const struct kvs_device_view view = kvs_device_backend(device);
        *stream = view.backend->stream(view.self);
    }
    return status;
}

kvs_status kvs_device_lead_stream(kvs_device *device, uint64_t stream)
{
    if (device == NULL) {
        return kvs_refuse(device);
    }
    const kvs_status status = require_streams(device);
    const struct kvs_device_view view = kvs_device_backend(device);
    return status == KVS_OK ? view.backend->lead_stream(view.self, stream) : status;
}

kvs_status kvs_host_admit(kvs_device *device, uint64_t bytes)
{
    if (device == NULL) {
        return kvs_refuse(device);
    }
    const struct kvs_device_view view = kvs_device_backend(device);
    return view.backend->host_admit == NULL || bytes == 0 ? KVS_OK : view.backend->host_admit(view.self, bytes);
}

/* ---- bytes ---- */

static kvs_status check_range(kvs_buffer *buffer, uint64_t offset, const void *bytes, uint64_t n_bytes)
{
    kvs_device *const device = kvs_buffer_device(buffer);
    if (bytes == NULL && n_bytes != 0) {
        return kvs_fail(device, KVS_EINVAL, "no caller memory for %llu bytes", (kvs_ull)n_bytes);
    }
    const uint64_t have = kvs_buffer_bytes(buffer);
    if (offset > have || n_bytes > have - offset) {
        return kvs_fail(device, KVS_ENOSPACE, "need %llu bytes at offset %llu, the buffer has %llu", (kvs_ull)n_bytes,
                        (kvs_ull)offset, (kvs_ull)have);
    }
    return require_memory(device);
}

kvs_status kvs_buffer_read_wait(kvs_buffer *buffer, uint64_t offset, void *bytes, uint64_t n_bytes)
{
    if (buffer == NULL) {
        return KVS_EINVAL;
    }
    const kvs_status status = check_range(buffer, offset, bytes, n_bytes);
    const struct kvs_device_view view = kvs_device_backend(kvs_buffer_device(buffer));
    return status != KVS_OK || n_bytes == 0
               ? status
               : view.backend->device_read(view.self, kvs_buffer_address(buffer) + offset, n_bytes, bytes);
}

kvs_status kvs_buffer_write_wait(kvs_buffer *buffer, uint64_t offset, const void *bytes, uint64_t n_bytes)
{
    if (buffer == NULL) {
        return KVS_EINVAL;
    }
    const kvs_status status = check_range(buffer, offset, bytes, n_bytes);
    const struct kvs_device_view view = kvs_device_backend(kvs_buffer_device(buffer));
    return status != KVS_OK || n_bytes == 0
               ? status
               : view.backend->device_write(view.self, kvs_buffer_address(buffer) + offset, n_bytes, bytes);
}

/* ---- lending ---- */

static void drop_lent(dl_managed *managed)
{
    struct lent *const lent = managed->context;
    kvs_buffer *const buffer = lent->buffer;
    kvs_object_free(lent->device, lent);
    kvs_buffer_release(buffer);
}

void kvs_lent_release(void *managed)
{
    if (managed != NULL) {
        drop_lent(managed);
    }
}

/* Bytes of a contiguous tensor; false where they cannot be counted. */
static bool count_bytes(const kvs_lend_desc *desc, uint64_t *bytes)
{
    uint64_t n = desc->bits / BITS_PER_BYTE;
    for (uint32_t i = 0; i < desc->n_dims; i++) {
        if (desc->shape[i] > INT64_MAX || !kvs_mul_u64(n, desc->shape[i], &n)) {
            return false;
        }
    }
    *bytes = n;
    return true;
}

static bool is_element(const kvs_lend_desc *desc)
{
    const bool is_known = desc->kind <= KVS_ELEMENT_FLOAT || desc->kind == KVS_ELEMENT_BFLOAT;
    const uint32_t least = desc->kind <= KVS_ELEMENT_UINT ? 8 : 16;
    return is_known && desc->bits >= least && desc->bits <= 64 && kvs_is_power_of_two(desc->bits);
}

kvs_status kvs_buffer_lend(kvs_buffer *buffer, const kvs_lend_desc *desc, void **managed)
{
    if (buffer == NULL || !KVS_STRUCT_OK(desc) || managed == NULL) {
        return kvs_refuse(buffer == NULL ? NULL : kvs_buffer_device(buffer));
    }
    kvs_device *const device = kvs_buffer_device(buffer);
    uint64_t n_bytes, end;
    if (!is_element(desc) || desc->n_dims > KVS_LEND_MAX_DIMS || desc->offset % (desc->bits / BITS_PER_BYTE) != 0 ||
        !count_bytes(desc, &n_bytes) || !kvs_add_u64(desc->offset, n_bytes, &end)) {
        return kvs_fail(device, KVS_EINVAL, "a tensor of %u dimensions with elements of kind %u and %u bits at offset %llu",
                        desc->n_dims, desc->kind, desc->bits, (kvs_ull)desc->offset);
    }
    if (end > kvs_buffer_bytes(buffer)) {
        return kvs_fail(device, KVS_ENOSPACE, "a tensor needs %llu bytes, the buffer has %llu", (kvs_ull)end,
                        (kvs_ull)kvs_buffer_bytes(buffer));
    }
    int32_t type, number;
    const kvs_status status = kvs_device_get_place(device, &type, &number);
    if (status != KVS_OK) {
        return status;
    }
    struct lent *lent = kvs_object_alloc(device, sizeof *lent);
    if (lent == NULL) {
        return KVS_ENOMEM;
    }
    for (uint32_t i = 0; i < desc->n_dims; i++) {
        lent->shape[i] = (int64_t)desc->shape[i];
    }
    kvs_buffer_retain(buffer);
    lent->buffer = buffer;
    lent->device = device;
    lent->managed = (dl_managed){.tensor = {.data = (void *)(uintptr_t)kvs_buffer_address(buffer),
                                            .device_type = type,
                                            .device_number = number,
                                            .n_dims = (int32_t)desc->n_dims,
                                            .kind = (uint8_t)desc->kind,
                                            .bits = (uint8_t)desc->bits,
                                            .lanes = 1,
                                            .shape = lent->shape,
                                            .byte_offset = desc->offset},
                                 .context = lent,
                                 .deleter = drop_lent};
    *managed = &lent->managed;
    return KVS_OK;
}

/* ---- taking ---- */

static bool is_contiguous(const dl_tensor *tensor)
{
    int64_t expected = 1;
    for (int32_t i = tensor->n_dims; tensor->strides != NULL && i-- > 0;) {
        if (tensor->shape[i] != 1 && tensor->strides[i] != expected) {
            return false;
        }
        expected *= tensor->shape[i];
    }
    return true;
}

static bool tensor_bytes(const dl_tensor *tensor, uint64_t *bytes)
{
    uint64_t n = kvs_div_up((uint64_t)tensor->bits * tensor->lanes, BITS_PER_BYTE);
    for (int32_t i = 0; i < tensor->n_dims; i++) {
        if (tensor->shape[i] < 0 || !kvs_mul_u64(n, (uint64_t)tensor->shape[i], &n)) {
            return false;
        }
    }
    *bytes = n;
    return true;
}

static void drop_taken(void *user)
{
    dl_managed *const managed = user;
    if (managed->deleter != NULL) {
        managed->deleter(managed);
    }
}

kvs_status kvs_buffer_take(kvs_device *device, void *managed, kvs_buffer **buffer)
{
    if (device == NULL || managed == NULL || buffer == NULL) {
        return kvs_refuse(device);
    }
    const dl_tensor *const tensor = &((const dl_managed *)managed)->tensor;
    int32_t type, number;
    const kvs_status status = kvs_device_get_place(device, &type, &number);
    if (status != KVS_OK) {
        return status;
    }
    if (tensor->device_type != type || tensor->device_number != number) {
        return kvs_fail(device, KVS_EUNSUPPORTED, "the tensor lies on device %d:%d of DLPack, this device is %d:%d",
                        tensor->device_type, tensor->device_number, type, number);
    }
    uint64_t n_bytes;
    if (!is_contiguous(tensor) || !tensor_bytes(tensor, &n_bytes)) {
        return kvs_fail(device, KVS_EINVAL, "a tensor of %d dimensions is not contiguous", tensor->n_dims);
    }
    return kvs_buffer_adopt(device, (uint64_t)(uintptr_t)tensor->data + tensor->byte_offset, n_bytes, drop_taken, managed, buffer);
}
