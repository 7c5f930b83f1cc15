/* test_record.c: the geometry of page records, and blocks of files in and out of them. */
#include "check.h"
#include "kvstream/kv.h"

#include <stdlib.h>
#include <string.h>

static const int32_t TYPES[] = {KVS_TYPE_F32,  KVS_TYPE_F16,  KVS_TYPE_BF16, KVS_TYPE_Q8_0,  KVS_TYPE_Q4_0,
                                KVS_TYPE_Q4_1, KVS_TYPE_Q5_0, KVS_TYPE_Q5_1, KVS_TYPE_IQ4_NL};
#define N_TYPES (sizeof TYPES / sizeof TYPES[0])

static kvs_record_info info_of(const kvs_kv_layer *layer)
{
    kvs_record_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_record_layout(layer, &info));
    return info;
}

static void test_layout_of_q8_0_and_q4_0_is_as_published(void)
{
    const kvs_kv_layer layer = {
        .n_kv_heads = 4, .head_dim_k = 256, .head_dim_v = 256, .type_k = KVS_TYPE_Q8_0, .type_v = KVS_TYPE_Q4_0};
    const kvs_record_info info = info_of(&layer);
    CHECK_U64(info.record_bytes, 425984);
    CHECK_U64(info.head_bytes, 106496);
    CHECK_U64(info.version, KVS_RECORD_VERSION);
    static const uint64_t OFFSETS[] = {0, 65536, 65536, 69632, 102400, 102400};
    static const uint32_t ROWS[] = {256, 0, 16, 128, 0, 16};
    CHECK(memcmp(info.plane_offset_bytes, OFFSETS, sizeof OFFSETS) == 0);
    CHECK(memcmp(info.plane_row_bytes, ROWS, sizeof ROWS) == 0);
    CHECK(info.rotation_k == 0 && info.rotation_v == 0);
}

/* A record holds as many bytes as the blocks would, and every plane is aligned. */
static void test_layout_equals_block_bytes_for_every_pair(void)
{
    for (size_t k = 0; k < N_TYPES; k++) {
        for (size_t v = 0; v < N_TYPES; v++) {
            const kvs_kv_layer layer = {
                .n_kv_heads = 3, .head_dim_k = 96, .head_dim_v = 64, .type_k = TYPES[k], .type_v = TYPES[v]};
            const kvs_record_info info = info_of(&layer);
            uint32_t values_k, bytes_k, values_v, bytes_v;
            CHECK_OK(kvs_type_block(TYPES[k], &values_k, &bytes_k));
            CHECK_OK(kvs_type_block(TYPES[v], &values_v, &bytes_v));
            CHECK_U64(info.record_bytes, 3u * 256u * (96u / values_k * bytes_k + 64u / values_v * bytes_v));
            CHECK(info.record_bytes % 64 == 0 && info.head_bytes % 64 == 0);
            for (int plane = 0; plane < KVS_N_PLANES; plane++) {
                CHECK(info.plane_offset_bytes[plane] % 16 == 0);
            }
        }
    }
}

static void test_rotation_blocks_follow_the_head_size(void)
{
    static const uint32_t EXPECTED[][2] = {{64, 64}, {128, 128}, {192, 64}, {256, 256}, {320, 64}, {384, 128}};
    for (size_t i = 0; i < sizeof EXPECTED / sizeof EXPECTED[0]; i++) {
        const kvs_kv_layer layer = {.n_kv_heads = 1,
                                    .head_dim_k = EXPECTED[i][0],
                                    .head_dim_v = EXPECTED[i][0],
                                    .flags = KVS_KV_ROTATE_K | KVS_KV_ROTATE_V,
                                    .type_k = KVS_TYPE_Q8_0,
                                    .type_v = KVS_TYPE_Q8_0};
        const kvs_record_info info = info_of(&layer);
        CHECK_U64(info.rotation_k, EXPECTED[i][1]);
        CHECK_U64(info.rotation_v, 64);
    }
    const kvs_kv_layer one_side = {.n_kv_heads = 1,
                                   .head_dim_k = 96,
                                   .head_dim_v = 64,
                                   .flags = KVS_KV_ROTATE_V,
                                   .type_k = KVS_TYPE_F16,
                                   .type_v = KVS_TYPE_Q4_0};
    CHECK(info_of(&one_side).rotation_k == 0 && info_of(&one_side).rotation_v == 64);
}

static void refuse(kvs_kv_layer layer, kvs_status expected)
{
    kvs_record_info info = {.struct_size = sizeof info, .record_bytes = 7};
    CHECK_STATUS(kvs_record_layout(&layer, &info), expected);
    CHECK_U64(info.record_bytes, 7);
}

static void test_layout_refuses_what_a_type_cannot_hold(void)
{
    const kvs_kv_layer good = {
        .n_kv_heads = 2, .head_dim_k = 64, .head_dim_v = 64, .type_k = KVS_TYPE_Q8_0, .type_v = KVS_TYPE_F16};
    kvs_kv_layer layer = good;
    refuse((layer.n_kv_heads = 0, layer), KVS_EINVAL);
    layer = good;
    refuse((layer.head_dim_v = 0, layer), KVS_EINVAL);
    layer = good;
    refuse((layer.flags = 4, layer), KVS_EINVAL);
    layer = good;
    refuse((layer.head_dim_k = 80, layer), KVS_EUNSUPPORTED); /* 80 is no multiple of 32 */
    layer = good;
    refuse((layer.head_dim_v = 72, layer), KVS_EUNSUPPORTED); /* 72 is no multiple of 16 */
    layer = good;
    refuse((layer.type_k = KVS_TYPE_Q4_K, layer), KVS_EUNSUPPORTED);
    layer = good;
    refuse((layer.type_v = 4711, layer), KVS_EUNSUPPORTED);
    layer = good;
    refuse((layer.head_dim_k = 96, layer.flags = KVS_KV_ROTATE_K, layer), KVS_EUNSUPPORTED);
    layer = good;
    refuse((layer.head_dim_v = 0x80000000u, layer.type_v = KVS_TYPE_F32, layer), KVS_EOVERFLOW);
    layer = good;
    refuse((layer.n_kv_heads = UINT32_MAX, layer.head_dim_v = 0x7ffffff0u, layer), KVS_EOVERFLOW);
    kvs_record_info info = {.struct_size = 8};
    CHECK_STATUS(kvs_record_layout(&good, &info), KVS_EINVAL);
    CHECK_STATUS(kvs_record_layout(NULL, &info), KVS_EINVAL);
    info.struct_size = sizeof info;
    layer = good;
    layer.head_dim_v = 80;
    CHECK_OK(kvs_record_layout(&layer, &info)); /* F16 holds 80 */
}

static void fill(uint8_t *bytes, size_t n_bytes, uint32_t seed)
{
    for (size_t i = 0; i < n_bytes; i++) {
        seed = seed * 1664525u + 1013904223u;
        bytes[i] = (uint8_t)(seed >> 24);
    }
}

/* Pack then unpack gives the blocks back, touches only its own rows, and filling all sides fills the record. */
static void test_pack_and_unpack_are_inverse(void)
{
    for (size_t k = 0; k < N_TYPES; k++) {
        const kvs_kv_layer layer = {
            .n_kv_heads = 2, .head_dim_k = 96, .head_dim_v = 64, .type_k = TYPES[k], .type_v = TYPES[(k + 4) % N_TYPES]};
        const kvs_record_info info = info_of(&layer);
        uint8_t *record = calloc(1, info.record_bytes), *again = calloc(1, info.record_bytes);
        uint8_t *blocks = malloc(info.record_bytes), *got = malloc(info.record_bytes);
        fill(record, info.record_bytes, (uint32_t)k);
        for (uint32_t head = 0; head < 2; head++) {
            for (uint32_t side = 0; side < 2; side++) {
                CHECK_OK(kvs_record_unpack_rows(&layer, record, head, side, 0, 256, blocks));
                CHECK_OK(kvs_record_pack_rows(&layer, again, head, side, 0, 256, blocks));
                CHECK_OK(kvs_record_unpack_rows(&layer, record, head, side, 17, 3, got));
                const uint32_t *rows = &info.plane_row_bytes[side == 0 ? 0 : 3];
                const size_t row_bytes = (size_t)rows[0] + rows[1] + rows[2];
                CHECK(memcmp(got, blocks + 17 * row_bytes, 3 * row_bytes) == 0);
            }
        }
        CHECK(memcmp(record, again, info.record_bytes) == 0);
        memset(blocks, 0, info.record_bytes);
        CHECK_OK(kvs_record_pack_rows(&layer, again, 1, 1, 255, 1, blocks));
        CHECK_OK(kvs_record_unpack_rows(&layer, record, 1, 1, 255, 1, got));
        CHECK_OK(kvs_record_pack_rows(&layer, again, 1, 1, 255, 1, got));
        CHECK(memcmp(record, again, info.record_bytes) == 0);
        free(record);
        free(again);
        free(blocks);
        free(got);
    }
}

/* The first block of a row, byte for byte as a file holds it. */
static void test_unpacked_block_is_scale_high_codes(void)
{
    const kvs_kv_layer layer = {
        .n_kv_heads = 1, .head_dim_k = 32, .head_dim_v = 32, .type_k = KVS_TYPE_Q5_1, .type_v = KVS_TYPE_Q8_0};
    const kvs_record_info info = info_of(&layer);
    uint8_t *record = malloc(info.record_bytes);
    uint8_t block[24], expected[24];
    fill(record, info.record_bytes, 3);
    memcpy(expected, record + info.plane_offset_bytes[KVS_PLANE_K_SCALES] + 5 * 4, 4);
    memcpy(expected + 4, record + info.plane_offset_bytes[KVS_PLANE_K_HIGH] + 5 * 4, 4);
    memcpy(expected + 8, record + info.plane_offset_bytes[KVS_PLANE_K_CODES] + 5 * 16, 16);
    CHECK_OK(kvs_record_unpack_rows(&layer, record, 0, 0, 5, 1, block));
    CHECK(memcmp(block, expected, sizeof block) == 0);
    free(record);
}

static void test_rows_outside_the_page_are_refused(void)
{
    const kvs_kv_layer layer = {
        .n_kv_heads = 1, .head_dim_k = 32, .head_dim_v = 32, .type_k = KVS_TYPE_Q8_0, .type_v = KVS_TYPE_Q8_0};
    uint8_t record[1], blocks[1];
    CHECK_STATUS(kvs_record_pack_rows(&layer, record, 0, 0, 256, 1, blocks), KVS_ENOSPACE);
    CHECK_STATUS(kvs_record_unpack_rows(&layer, record, 0, 0, 1, 256, blocks), KVS_ENOSPACE);
    CHECK_STATUS(kvs_record_unpack_rows(&layer, record, 0, 0, UINT32_MAX, 2, blocks), KVS_ENOSPACE);
    CHECK_STATUS(kvs_record_unpack_rows(&layer, record, 1, 0, 0, 1, blocks), KVS_EINVAL);
    CHECK_STATUS(kvs_record_unpack_rows(&layer, record, 0, 2, 0, 1, blocks), KVS_EINVAL);
    CHECK_STATUS(kvs_record_unpack_rows(&layer, NULL, 0, 0, 0, 1, blocks), KVS_EINVAL);
    CHECK_OK(kvs_record_unpack_rows(&layer, record, 0, 0, 256, 0, blocks));
}

static void test_float_rows_are_refused_by_name(void)
{
    const kvs_kv_layer layer = {
        .n_kv_heads = 1, .head_dim_k = 32, .head_dim_v = 32, .type_k = KVS_TYPE_Q8_0, .type_v = KVS_TYPE_Q8_0};
    const float rows[32] = {0.0f};
    uint8_t record[1];
    char text[200];
    for (uint32_t backend = KVS_BACKEND_CPU; backend <= KVS_BACKEND_TRACE; backend++) {
        const kvs_device_desc desc = {.struct_size = sizeof desc, .backend = backend, .n_threads = 1};
        kvs_device *device = NULL;
        CHECK_OK(kvs_device_create(&desc, &device));
        CHECK_STATUS(kvs_record_encode_rows(device, &layer, NULL, 0, 1, rows, rows), KVS_EINVAL);
        CHECK_STATUS(kvs_record_encode_rows(device, &layer, record, 255, 2, rows, rows), KVS_ENOSPACE);
        CHECK_OK(kvs_device_last_error(device, text, sizeof text));
        CHECK(strcmp(text, "rows 255 and 2 more, a page has 256") == 0);
        const bool has_bytes = backend == KVS_BACKEND_CPU;
        CHECK_STATUS(kvs_record_encode_rows(device, &layer, record, 0, 1, rows, NULL),
                     has_bytes ? KVS_EINVAL : KVS_EUNSUPPORTED);
        CHECK_STATUS(kvs_record_decode_rows(device, &layer, record, 0, 1, NULL, NULL),
                     has_bytes ? KVS_EINVAL : KVS_EUNSUPPORTED);
        kvs_device_release(device);
    }
    CHECK_STATUS(kvs_record_encode_rows(NULL, &layer, record, 0, 1, rows, rows), KVS_EINVAL);
}

int main(void)
{
    test_layout_of_q8_0_and_q4_0_is_as_published();
    test_layout_equals_block_bytes_for_every_pair();
    test_rotation_blocks_follow_the_head_size();
    test_layout_refuses_what_a_type_cannot_hold();
    test_pack_and_unpack_are_inverse();
    test_unpacked_block_is_scale_high_codes();
    test_rows_outside_the_page_are_refused();
    test_float_rows_are_refused_by_name();
    return check_finish();
}
