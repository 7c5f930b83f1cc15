/* weight.c: weights on the device: repacked panels of their own, or borrowed rows. */
#include "core/weight.h"

#include "core/device.h"

#include <math.h>
#include <string.h>

struct kvs_weight {
    kvs_device *device;
    _Atomic uint32_t claims;
    kvs_weight_view view;
    kvs_buffer *buffer; /* NULL for rows that are borrowed */
    float *scales;      /* what the view shows, unless they lie on the device */
    kvs_buffer *device_scales;
    uint64_t bytes;
};

static kvs_status check_shape(kvs_device *device, int type, uint64_t k, uint64_t n)
{
    uint32_t block_values;
    uint32_t block_bytes;
    kvs_status status = kvs_type_block(type, &block_values, &block_bytes);
    if (status != KVS_OK) {
        return kvs_fail(device, status, "weight type %d is not supported", type);
    }
    if (k == 0 || n == 0 || k > UINT32_MAX || n > UINT32_MAX) {
        return kvs_fail(device, KVS_EINVAL, "weight of %llu x %llu values is out of range", (kvs_ull)n, (kvs_ull)k);
    }
    if (k % block_values != 0) {
        return kvs_fail(device, KVS_EINVAL, "weight rows of %llu values are no multiple of %s blocks of %u", (kvs_ull)k,
                        kvs_type_name(type), block_values);
    }
    return KVS_OK;
}

static bool copies_rows(const kvs_weight *weight)
{
    return kvs_device_backend(weight->device).backend->copies_rows;
}

/* Bytes that the caller has in device memory of its own. */
static kvs_status copy_to_device(kvs_device *device, const void *from, uint64_t n_bytes, kvs_buffer **buffer)
{
    struct kvs_device_view backend = kvs_device_backend(device);
    kvs_status status = kvs_buffer_create(device, n_bytes, 64, buffer);
    if (status == KVS_OK) {
        status = backend.backend->device_write(backend.self, kvs_buffer_address(*buffer), n_bytes, from);
    }
    return status;
}

/* Rows as the file holds them: borrowed, or copied where operations cannot read the caller's memory. */
static kvs_status place_rows(kvs_weight *weight, const void *rows)
{
    kvs_weight_view *view = &weight->view;
    view->address = (uint64_t)(uintptr_t)rows;
    if (!copies_rows(weight)) {
        return KVS_OK;
    }
    uint32_t block_values = 1;
    uint32_t block_bytes = 0;
    (void)kvs_type_block(view->type, &block_values, &block_bytes);
    weight->bytes = view->n * (view->k / block_values * block_bytes);
    kvs_status status = rows == NULL ? KVS_OK : copy_to_device(weight->device, rows, weight->bytes, &weight->buffer);
    if (status == KVS_OK && rows != NULL) {
        view->address = kvs_buffer_address(weight->buffer);
    }
    return status;
}

static kvs_status size_panels(kvs_weight *weight)
{
    struct kvs_device_view backend = kvs_device_backend(weight->device);
    const kvs_weight_view *view = &weight->view;
    return backend.backend->weight_bytes(backend.self, view->type, view->k, view->n, &weight->bytes);
}

static kvs_status pack_panels(kvs_weight *weight, const void *rows)
{
    struct kvs_device_view backend = kvs_device_backend(weight->device);
    const kvs_weight_view *view = &weight->view;
    uint64_t end;
    kvs_status status = kvs_buffer_create(weight->device, weight->bytes, 64, &weight->buffer);
    if (status == KVS_OK) {
        status = kvs_buffer_get_range(weight->buffer, &weight->view.address, &end);
    }
    if (status == KVS_OK) {
        status = backend.backend->weight_pack(backend.self, view->type, view->k, view->n, rows, view->address);
    }
    return status;
}

kvs_status kvs_weight_create(kvs_device *device, int type, uint64_t k, uint64_t n, const void *rows, uint32_t layout,
                             kvs_weight **weight)
{
    if (device == NULL || weight == NULL || layout > KVS_WEIGHT_ROWS) {
        return kvs_fail(device, KVS_EINVAL, "weight needs a device, a layout and an output");
    }
    kvs_status status = check_shape(device, type, k, n);
    if (status != KVS_OK) {
        return status;
    }
    kvs_weight *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "no memory for a weight's record");
    }
    made->device = device;
    atomic_init(&made->claims, 1);
    made->view = (kvs_weight_view){.type = type, .layout = layout, .k = k, .n = n};
    if (layout == KVS_WEIGHT_ROWS) {
        status = place_rows(made, rows);
    } else {
        status = size_panels(made);
    }
    if (status == KVS_OK && layout == KVS_WEIGHT_PANELS && rows != NULL) {
        status = pack_panels(made, rows);
    }
    if (status != KVS_OK) {
        kvs_weight_release(made);
        return status;
    }
    *weight = made;
    return KVS_OK;
}

static bool are_finite(const float *values, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        if (!isfinite(values[i])) {
            return false;
        }
    }
    return true;
}

static void free_scales(kvs_weight *weight)
{
    kvs_buffer_release(weight->device_scales);
    if (weight->scales != NULL) {
        kvs_object_free(weight->device, weight->scales);
    }
}

kvs_status kvs_weight_set_scales(kvs_weight *weight, const float *scales, uint64_t n_scales)
{
    if (weight == NULL) {
        return KVS_EINVAL;
    }
    kvs_weight_view *view = &weight->view;
    if (scales == NULL || n_scales == 0 || view->n % n_scales != 0) {
        return kvs_fail(weight->device, KVS_EINVAL, "%llu scales for a weight of %llu rows", (kvs_ull)n_scales,
                        (kvs_ull)view->n);
    }
    if (view->layout != KVS_WEIGHT_PANELS) {
        return kvs_fail(weight->device, KVS_EINVAL, "only weights of matmuls have scales");
    }
    if (!are_finite(scales, n_scales)) {
        return kvs_fail(weight->device, KVS_EINVAL, "a scale of a weight is not finite");
    }
    float *copy = kvs_object_alloc(weight->device, n_scales * sizeof *copy);
    if (copy == NULL) {
        return kvs_fail(weight->device, KVS_ENOMEM, "no memory for the scales of a weight");
    }
    memcpy(copy, scales, n_scales * sizeof *copy);
    kvs_buffer *on_device = NULL;
    const kvs_status status =
        copies_rows(weight) ? copy_to_device(weight->device, copy, n_scales * sizeof *copy, &on_device) : KVS_OK;
    if (status != KVS_OK) {
        kvs_buffer_release(on_device);
        kvs_object_free(weight->device, copy);
        return status;
    }
    free_scales(weight);
    weight->scales = copy;
    weight->device_scales = on_device;
    view->scales = on_device == NULL ? copy : (const float *)(uintptr_t)kvs_buffer_address(on_device);
    view->n_scales = n_scales;
    return KVS_OK;
}

void kvs_weight_retain(kvs_weight *weight)
{
    atomic_fetch_add_explicit(&weight->claims, 1, memory_order_relaxed);
}

void kvs_weight_release(kvs_weight *weight)
{
    if (weight == NULL || atomic_fetch_sub_explicit(&weight->claims, 1, memory_order_acq_rel) != 1) {
        return;
    }
    kvs_buffer_release(weight->buffer);
    free_scales(weight);
    kvs_object_free(weight->device, weight);
}

kvs_status kvs_weight_get_bytes(kvs_weight *weight, uint64_t *bytes)
{
    if (weight == NULL || bytes == NULL) {
        return kvs_refuse(weight == NULL ? NULL : weight->device);
    }
    *bytes = weight->bytes + (weight->device_scales == NULL ? 0 : kvs_buffer_bytes(weight->device_scales));
    return KVS_OK;
}

kvs_device *kvs_weight_device(const kvs_weight *weight)
{
    return weight->device;
}

const kvs_weight_view *kvs_weight_get_view(const kvs_weight *weight)
{
    return &weight->view;
}

uint64_t kvs_weight_pass_bytes(const kvs_weight *weight)
{
    return weight->view.layout == KVS_WEIGHT_ROWS ? 0 : weight->bytes;
}
