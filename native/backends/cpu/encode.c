/* encode.c: rows of all heads into and out of records, and which twin does it. */
#include "backends/cpu/encode.h"

#include "backends/cpu/encode_scale.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define BLOCK_VALUES 32u

#if defined(__x86_64__)
#define HAVE_AVX2 1
#else
#define HAVE_AVX2 0
#endif

kvs_encode_fn kvs_encode_select(uint32_t isa, int32_t type)
{
#if HAVE_AVX2
    if (isa >= KVS_ISA_AVX2) {
        return kvs_encode_select_avx2(type);
    }
#endif
    (void)isa;
    return kvs_encode_select_reference(type);
}

kvs_decode_fn kvs_decode_select(uint32_t isa, int32_t type)
{
#if HAVE_AVX2
    if (isa >= KVS_ISA_AVX2) {
        return kvs_decode_select_avx2(type);
    }
#endif
    (void)isa;
    return kvs_decode_select_reference(type);
}

/* Where a row of one head and side lies. */
typedef struct row_place {
    uint64_t codes;
    uint64_t high;
    uint64_t scales;
} row_place;

static row_place place_of(const kvs_record_info *info, uint32_t first_plane, uint32_t head, uint32_t row)
{
    const uint64_t *offset = &info->plane_offset_bytes[first_plane];
    const uint32_t *bytes = &info->plane_row_bytes[first_plane];
    const uint64_t base = head * info->head_bytes;
    return (row_place){base + offset[0] + (uint64_t)row * bytes[0], base + offset[1] + (uint64_t)row * bytes[1],
                       base + offset[2] + (uint64_t)row * bytes[2]};
}

/* Does a row hold a NaN or an infinity? Their exponent bits are all ones. */
static bool is_broken(const float *values, uint32_t n_values)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < n_values; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        found |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return found != 0;
}

/* Integer codes would hide a broken value: its block gets a scale that is NaN, so that whoever reads it knows. */
static void mark_broken_blocks(const float *values, uint32_t n_values, uint8_t *scales, uint32_t scale_row_bytes)
{
    const uint32_t n_blocks = n_values / BLOCK_VALUES;
    for (uint32_t block = 0; scale_row_bytes != 0 && block < n_blocks; block++) {
        if (is_broken(values + block * BLOCK_VALUES, BLOCK_VALUES)) {
            kvs_put_scale(scales + block * (scale_row_bytes / n_blocks), NAN);
        }
    }
}

static void encode_side(kvs_encode_fn encode, const kvs_record_info *info, uint32_t first_plane, uint32_t n_heads,
                        uint32_t head_dim, uint8_t *record, uint32_t first_row, uint32_t n_rows, const float *rows,
                        uint64_t stride)
{
    for (uint32_t row = 0; row < n_rows; row++) {
        const float *values = rows + row * stride;
        for (uint32_t head = 0; head < n_heads; head++, values += head_dim) {
            row_place place = place_of(info, first_plane, head, first_row + row);
            encode(values, head_dim, record + place.codes, record + place.high, record + place.scales);
            if (is_broken(values, head_dim)) {
                mark_broken_blocks(values, head_dim, record + place.scales, info->plane_row_bytes[first_plane + 2]);
            }
        }
    }
}

static void decode_side(kvs_decode_fn decode, const kvs_record_info *info, uint32_t first_plane, uint32_t n_heads,
                        uint32_t head_dim, const uint8_t *record, uint32_t first_row, uint32_t n_rows, float *rows,
                        uint64_t stride)
{
    for (uint32_t row = 0; row < n_rows; row++) {
        float *values = rows + row * stride;
        for (uint32_t head = 0; head < n_heads; head++, values += head_dim) {
            row_place place = place_of(info, first_plane, head, first_row + row);
            decode(record + place.codes, record + place.high, record + place.scales, head_dim, values);
        }
    }
}

void kvs_encode_rows(uint32_t isa, const kvs_kv_layer *layer, const kvs_record_info *info, void *record,
                     uint32_t first_row, uint32_t n_rows, const float *k, uint64_t k_stride, const float *v,
                     uint64_t v_stride)
{
    if (k != NULL) {
        encode_side(kvs_encode_select(isa, layer->type_k), info, KVS_PLANE_K_CODES, layer->n_kv_heads,
                    layer->head_dim_k, record, first_row, n_rows, k, k_stride);
    }
    if (v != NULL) {
        encode_side(kvs_encode_select(isa, layer->type_v), info, KVS_PLANE_V_CODES, layer->n_kv_heads,
                    layer->head_dim_v, record, first_row, n_rows, v, v_stride);
    }
}

void kvs_decode_rows(uint32_t isa, const kvs_kv_layer *layer, const kvs_record_info *info, const void *record,
                     uint32_t first_row, uint32_t n_rows, float *k, uint64_t k_stride, float *v, uint64_t v_stride)
{
    if (k != NULL) {
        decode_side(kvs_decode_select(isa, layer->type_k), info, KVS_PLANE_K_CODES, layer->n_kv_heads,
                    layer->head_dim_k, record, first_row, n_rows, k, k_stride);
    }
    if (v != NULL) {
        decode_side(kvs_decode_select(isa, layer->type_v), info, KVS_PLANE_V_CODES, layer->n_kv_heads,
                    layer->head_dim_v, record, first_row, n_rows, v, v_stride);
    }
}
