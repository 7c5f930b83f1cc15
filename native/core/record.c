/* record.c: geometry of page records, and blocks of the file formats moved in and out of them.
 *
 * Order: a block of the file format is scales, high bits, codes for every cache type, so one table of three sizes
 * describes both layouts and packing is three copies per block.
 */
#include "core/device.h"
#include "kvstream/kv.h"

#include <string.h>

/* Float rows are read in vectors of this many values. */
#define FLOAT_GRAIN 16u
#define ROTATION_GRAIN 64u
#define N_SIDE_PLANES 3u

/* Bytes per block of each plane. */
typedef struct block_parts {
    uint32_t values;
    uint32_t codes;
    uint32_t high;
    uint32_t scales;
} block_parts;

static bool block_parts_of(int32_t type, block_parts *parts)
{
    switch (type) {
    case KVS_TYPE_F32:
        *parts = (block_parts){1, 4, 0, 0};
        return true;
    case KVS_TYPE_F16:
    case KVS_TYPE_BF16:
        *parts = (block_parts){1, 2, 0, 0};
        return true;
    case KVS_TYPE_Q8_0:
        *parts = (block_parts){32, 32, 0, 2};
        return true;
    case KVS_TYPE_Q4_0:
    case KVS_TYPE_IQ4_NL:
        *parts = (block_parts){32, 16, 0, 2};
        return true;
    case KVS_TYPE_Q4_1:
        *parts = (block_parts){32, 16, 0, 4};
        return true;
    case KVS_TYPE_Q5_0:
        *parts = (block_parts){32, 16, 4, 2};
        return true;
    case KVS_TYPE_Q5_1:
        *parts = (block_parts){32, 16, 4, 4};
        return true;
    default:
        return false;
    }
}

static kvs_status side_rows(char side, int32_t type, uint32_t head_dim, uint32_t row_bytes[N_SIDE_PLANES])
{
    block_parts parts;
    const char *name = kvs_type_name(type);
    if (!block_parts_of(type, &parts)) {
        return kvs_fail(NULL, KVS_EUNSUPPORTED, "type %d (%s) of %c is no cache type", type,
                        name == NULL ? "unknown" : name, side);
    }
    const uint32_t grain = parts.values == 1 ? FLOAT_GRAIN : parts.values;
    if (head_dim % grain != 0) {
        return kvs_fail(NULL, KVS_EUNSUPPORTED, "%s cannot hold a head size of %u for %c: need a multiple of %u", name,
                        head_dim, side, grain);
    }
    const uint64_t n_blocks = head_dim / parts.values;
    if (n_blocks * parts.codes > UINT32_MAX) {
        return kvs_fail(NULL, KVS_EOVERFLOW, "a %c row of %u values does not fit", side, head_dim);
    }
    row_bytes[0] = (uint32_t)n_blocks * parts.codes;
    row_bytes[1] = (uint32_t)n_blocks * parts.high;
    row_bytes[2] = (uint32_t)n_blocks * parts.scales;
    return KVS_OK;
}

static kvs_status rotation_of(char side, uint32_t head_dim, bool is_rotated)
{
    if (is_rotated && head_dim % ROTATION_GRAIN != 0) {
        return kvs_fail(NULL, KVS_EUNSUPPORTED, "rotation of %c needs a head size that is a multiple of %u, have %u",
                        side, ROTATION_GRAIN, head_dim);
    }
    return KVS_OK;
}

kvs_status kvs_record_layout(const kvs_kv_layer *layer, kvs_record_info *info)
{
    if (layer == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_fail(NULL, KVS_EINVAL, "record layout needs a layer and a sized info");
    }
    if (layer->n_kv_heads == 0 || layer->head_dim_k == 0 || layer->head_dim_v == 0) {
        return kvs_fail(NULL, KVS_EINVAL, "a layer needs heads and head sizes, have %u heads of %u and %u",
                        layer->n_kv_heads, layer->head_dim_k, layer->head_dim_v);
    }
    if ((layer->flags & ~(uint32_t)(KVS_KV_ROTATE_K | KVS_KV_ROTATE_V)) != 0) {
        return kvs_fail(NULL, KVS_EINVAL, "unknown layer flags 0x%x", layer->flags);
    }
    const bool rotates_k = (layer->flags & KVS_KV_ROTATE_K) != 0;
    const bool rotates_v = (layer->flags & KVS_KV_ROTATE_V) != 0;
    kvs_record_info result = {.struct_size = info->struct_size, .version = KVS_RECORD_VERSION};
    kvs_status status = side_rows('K', layer->type_k, layer->head_dim_k, &result.plane_row_bytes[KVS_PLANE_K_CODES]);
    if (status == KVS_OK) {
        status = side_rows('V', layer->type_v, layer->head_dim_v, &result.plane_row_bytes[KVS_PLANE_V_CODES]);
    }
    if (status == KVS_OK) {
        status = rotation_of('K', layer->head_dim_k, rotates_k);
    }
    if (status == KVS_OK) {
        status = rotation_of('V', layer->head_dim_v, rotates_v);
    }
    if (status != KVS_OK) {
        return status;
    }
    /* A plane has 256 rows, so every plane starts on a multiple of 256 bytes without padding. */
    for (uint32_t plane = 0; plane < KVS_N_PLANES; plane++) {
        result.plane_offset_bytes[plane] = result.head_bytes;
        result.head_bytes += (uint64_t)result.plane_row_bytes[plane] * KVS_PAGE_TOKENS;
    }
    if (!kvs_mul_u64(result.head_bytes, layer->n_kv_heads, &result.record_bytes)) {
        return kvs_fail(NULL, KVS_EOVERFLOW, "%u heads of %llu bytes do not fit", layer->n_kv_heads,
                        (kvs_ull)result.head_bytes);
    }
    result.rotation_k = rotates_k ? layer->head_dim_k & (~layer->head_dim_k + 1) : 0;
    result.rotation_v = rotates_v ? ROTATION_GRAIN : 0;
    *info = result;
    return KVS_OK;
}

/* One side of one head, ready to walk. */
typedef struct side_view {
    block_parts parts;
    uint32_t n_blocks; /* per row */
    uint64_t offset[N_SIDE_PLANES];
    uint32_t row_bytes[N_SIDE_PLANES];
} side_view;

static kvs_status side_of(const kvs_kv_layer *layer, const void *record, uint32_t head, uint32_t side,
                          uint32_t first_row, uint32_t n_rows, const void *blocks, side_view *view)
{
    kvs_record_info info = {.struct_size = sizeof info};
    kvs_status status = kvs_record_layout(layer, &info);
    if (status != KVS_OK) {
        return status;
    }
    if (record == NULL || blocks == NULL || head >= layer->n_kv_heads || side > 1) {
        return kvs_fail(NULL, KVS_EINVAL, "head %u of %u, side %u of 2, or no memory", head, layer->n_kv_heads, side);
    }
    if (first_row > KVS_PAGE_TOKENS || n_rows > KVS_PAGE_TOKENS - first_row) {
        return kvs_fail(NULL, KVS_ENOSPACE, "rows %u and %u more, a page has %u", first_row, n_rows, KVS_PAGE_TOKENS);
    }
    const uint32_t first_plane = side == 0 ? KVS_PLANE_K_CODES : KVS_PLANE_V_CODES;
    (void)block_parts_of(side == 0 ? layer->type_k : layer->type_v, &view->parts);
    view->n_blocks = (side == 0 ? layer->head_dim_k : layer->head_dim_v) / view->parts.values;
    for (uint32_t part = 0; part < N_SIDE_PLANES; part++) {
        view->offset[part] = head * info.head_bytes + info.plane_offset_bytes[first_plane + part];
        view->row_bytes[part] = info.plane_row_bytes[first_plane + part];
    }
    return KVS_OK;
}

static uint64_t part_at(const side_view *view, uint32_t part, uint32_t row)
{
    return view->offset[part] + (uint64_t)row * view->row_bytes[part];
}

static void unpack_row(const side_view *view, const uint8_t *record, uint32_t row, uint8_t *block)
{
    const uint8_t *codes = record + part_at(view, 0, row);
    const uint8_t *high = record + part_at(view, 1, row);
    const uint8_t *scales = record + part_at(view, 2, row);
    for (uint32_t i = 0; i < view->n_blocks; i++) {
        memcpy(block, scales + (size_t)i * view->parts.scales, view->parts.scales);
        block += view->parts.scales;
        memcpy(block, high + (size_t)i * view->parts.high, view->parts.high);
        block += view->parts.high;
        memcpy(block, codes + (size_t)i * view->parts.codes, view->parts.codes);
        block += view->parts.codes;
    }
}

static void pack_row(const side_view *view, uint8_t *record, uint32_t row, const uint8_t *block)
{
    uint8_t *codes = record + part_at(view, 0, row);
    uint8_t *high = record + part_at(view, 1, row);
    uint8_t *scales = record + part_at(view, 2, row);
    for (uint32_t i = 0; i < view->n_blocks; i++) {
        memcpy(scales + (size_t)i * view->parts.scales, block, view->parts.scales);
        block += view->parts.scales;
        memcpy(high + (size_t)i * view->parts.high, block, view->parts.high);
        block += view->parts.high;
        memcpy(codes + (size_t)i * view->parts.codes, block, view->parts.codes);
        block += view->parts.codes;
    }
}

static size_t row_of_blocks_bytes(const side_view *view)
{
    return (size_t)view->row_bytes[0] + view->row_bytes[1] + view->row_bytes[2];
}

kvs_status kvs_record_unpack_rows(const kvs_kv_layer *layer, const void *record, uint32_t head, uint32_t side,
                                  uint32_t first_row, uint32_t n_rows, void *blocks)
{
    side_view view;
    kvs_status status = side_of(layer, record, head, side, first_row, n_rows, blocks, &view);
    for (uint32_t row = 0; status == KVS_OK && row < n_rows; row++) {
        unpack_row(&view, record, first_row + row, (uint8_t *)blocks + row * row_of_blocks_bytes(&view));
    }
    return status;
}

kvs_status kvs_record_pack_rows(const kvs_kv_layer *layer, void *record, uint32_t head, uint32_t side,
                                uint32_t first_row, uint32_t n_rows, const void *blocks)
{
    side_view view;
    kvs_status status = side_of(layer, record, head, side, first_row, n_rows, blocks, &view);
    for (uint32_t row = 0; status == KVS_OK && row < n_rows; row++) {
        pack_row(&view, record, first_row + row, (const uint8_t *)blocks + row * row_of_blocks_bytes(&view));
    }
    return status;
}
