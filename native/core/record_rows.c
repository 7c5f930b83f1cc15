/* record_rows.c: float rows into and out of one record, for callers outside a tape, by the codec of the device. */
#include "core/backend.h"
#include "kvstream/kv.h"

/* Checks of both directions, and the layout. `is_supported`: the backend has this direction. */
static kvs_status open_rows(kvs_device *device, const kvs_kv_layer *layer, const void *record, uint32_t first_row,
                            uint32_t n_rows, bool is_supported, kvs_record_info *info)
{
    const kvs_status status = kvs_record_layout(layer, info);
    if (status != KVS_OK) {
        return layer == NULL ? kvs_fail(device, status, "no geometry of the record")
                             : kvs_fail(device, status, "no record holds %u heads of %u and %u values as types %d and %d",
                                        layer->n_kv_heads, layer->head_dim_k, layer->head_dim_v, (int)layer->type_k,
                                        (int)layer->type_v);
    }
    if (record == NULL) {
        return kvs_fail(device, KVS_EINVAL, "no record");
    }
    if (first_row > KVS_PAGE_TOKENS || n_rows > KVS_PAGE_TOKENS - first_row) {
        return kvs_fail(device, KVS_ENOSPACE, "rows %u and %u more, a page has %u", first_row, n_rows,
                        KVS_PAGE_TOKENS);
    }
    if (!is_supported) {
        return kvs_fail(device, KVS_EUNSUPPORTED, "the %s backend has no codec of records",
                        kvs_device_backend(device).backend->name);
    }
    return KVS_OK;
}

kvs_status kvs_record_encode_rows(kvs_device *device, const kvs_kv_layer *layer, void *record, uint32_t first_row,
                                  uint32_t n_rows, const float *k, const float *v)
{
    if (device == NULL) {
        return KVS_EINVAL;
    }
    const struct kvs_device_view view = kvs_device_backend(device);
    kvs_record_info info = {.struct_size = sizeof info};
    kvs_status status =
        open_rows(device, layer, record, first_row, n_rows, view.backend->record_encode != NULL, &info);
    if (status == KVS_OK && (k == NULL || v == NULL)) {
        status = kvs_fail(device, KVS_EINVAL, "no rows to encode");
    }
    if (status == KVS_OK) {
        view.backend->record_encode(view.self, layer, &info, record, first_row, n_rows, k, v);
    }
    return status;
}

kvs_status kvs_record_decode_rows(kvs_device *device, const kvs_kv_layer *layer, const void *record,
                                  uint32_t first_row, uint32_t n_rows, float *k, float *v)
{
    if (device == NULL) {
        return KVS_EINVAL;
    }
    const struct kvs_device_view view = kvs_device_backend(device);
    kvs_record_info info = {.struct_size = sizeof info};
    kvs_status status =
        open_rows(device, layer, record, first_row, n_rows, view.backend->record_decode != NULL, &info);
    if (status == KVS_OK && (k == NULL || v == NULL)) {
        status = kvs_fail(device, KVS_EINVAL, "no room to decode into");
    }
    if (status == KVS_OK) {
        view.backend->record_decode(view.self, layer, &info, record, first_row, n_rows, k, v);
    }
    return status;
}
