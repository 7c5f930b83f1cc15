/* Weights in the form of the CUDA device (kernels/weight_form.h), read back value by value as its comment says, against rows decoded
 * from the file. No device is needed. */
#include "backends/cpu/elementwise.h"
#include "backends/cuda/weight_form.h"
#include "base/blocks.h"
#include "check.h"
#include "cpu_weights.h"

#include <math.h>
#include <string.h>

typedef struct reader {
    int type;
    const uint8_t *unit;
    uint32_t pair; /* row of a panel modulo 8 */
    uint32_t is_high;
    uint32_t group; /* of the unit */
} reader;

static uint32_t word_at(const uint8_t *bytes)
{
    uint32_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

static float half_at(const uint8_t *bytes)
{
    uint16_t half;
    memcpy(&half, bytes, sizeof half);
    return kvs_f16_to_f32(half);
}

/* Code e of the group, without what it counts from. */
static uint32_t read_code(const reader *r, uint32_t e)
{
    const uint32_t bits = (uint32_t)kvs_form_code_bits(r->type);
    const uint32_t lane = 4 * r->pair + e % 16 / 4, byte = e % 4;
    const uint32_t reg = r->is_high + (e >= 16 ? 2 : 0);
    const uint32_t at_once = 16 / (2 * bits); /* groups to a vector */
    const uint8_t *codes = r->unit + r->group / at_once * 512 + lane * 16 + r->group % at_once * 2 * bits;
    const uint8_t *high = r->unit + kvs_form_high_at(r->type);
    uint32_t code;
    if (bits == 8) {
        code = codes[4 * reg + byte];
    } else if (bits == 4 && kvs_form_table(r->type) == KVS_FORM_NO_TABLE) {
        code = codes[4 * (reg % 2) + byte] >> (reg / 2 * 4) & 15u;
    } else if (bits == 4) {
        code = word_at(codes + 4 * (reg % 2)) >> (4 * (byte + (reg >= 2 ? 4 : 0))) & 15u;
    } else {
        code = codes[byte] >> (2 * reg) & 3u;
    }
    if (kvs_form_high_bits(r->type) == 2) {
        code |= (high[r->group / 4 * 512 + lane * 16 + r->group % 4 * 4 + byte] >> (2 * reg) & 3u) << bits;
    } else if (kvs_form_high_bits(r->type) == 1) {
        const uint8_t *to = high + lane * 2 * kvs_form_unit_groups(r->type) + r->group / 2 * 4;
        code |= (uint32_t)(to[byte] >> (4 * (r->group % 2) + reg) & 1) << bits;
    } else if (kvs_form_has_shared_bit(r->type)) {
        code |= (word_at(high + 4 * (2 * r->pair + r->is_high)) >> (4 * r->group + e / 8) & 1u) << bits;
    }
    return code;
}

static int read_value(const reader *r, uint32_t e)
{
    static const int8_t levels[][16] = {
        [KVS_FORM_IQ4] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
        [KVS_FORM_FP4] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
        [KVS_FORM_IQ1] = {-7, 1, 9, 0, -9, -1, 7, 0},
        [KVS_FORM_IQ2] = {8, 25, 43, 0, -8, -25, -43, 0},
        [KVS_FORM_IQ3] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62},
        [KVS_FORM_IQ3_ODD] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15},
    };
    const uint32_t code = read_code(r, e);
    if (kvs_form_code_bits(r->type) == 8) {
        return (int8_t)code;
    }
    return kvs_form_table(r->type) != KVS_FORM_NO_TABLE ? levels[kvs_form_table(r->type)][code]
                                                        : (int)code - kvs_form_offset(r->type);
}

static uint32_t read_sub(const reader *r, uint32_t e)
{
    const uint32_t n = kvs_form_subs(r->type), row = 2 * r->pair + r->is_high;
    const uint32_t i = kvs_form_is_halved(r->type) ? 2 * r->group + e / 16 : r->group;
    return r->unit[kvs_form_subs_at(r->type) + row * n + i];
}

static float read_scale(const reader *r, uint32_t e)
{
    const uint32_t n = kvs_form_halves(r->type), row = 2 * r->pair + r->is_high;
    const uint8_t *halves = r->unit + kvs_form_scales_at(r->type);
    switch (kvs_form_scale(r->type)) {
    case KVS_FORM_HALF:
        return half_at(halves + 2 * (row * n + r->group));
    case KVS_FORM_SUB_U:
        return half_at(halves + 2 * row) * (float)read_sub(r, e);
    case KVS_FORM_NIBBLE2:
        return half_at(halves + 2 * row) * (float)(read_sub(r, e) & 15u);
    case KVS_FORM_E8M0:
        return kvs_e8m0_half_to_f32((uint8_t)read_sub(r, e));
    case KVS_FORM_UE4M3:
        return kvs_ue4m3_half_to_f32((uint8_t)read_sub(r, e));
    default:
        return half_at(halves + 2 * row) * (float)(int8_t)read_sub(r, e) / (float)(1 << kvs_form_scale_shift(r->type));
    }
}

static float read_minimum(const reader *r, uint32_t e)
{
    const uint32_t n = kvs_form_halves(r->type), row = 2 * r->pair + r->is_high;
    const uint8_t *minima = r->unit + kvs_form_minima_at(r->type);
    switch (kvs_form_minimum(r->type)) {
    case KVS_FORM_HALF_MINIMUM:
        return half_at(minima + 2 * (row * n + r->group));
    case KVS_FORM_SUB_MINIMUM:
        return -(half_at(minima + 2 * row) * (float)r->unit[kvs_form_subminima_at(r->type) + 8 * row + r->group]);
    default:
        return -(half_at(minima + 2 * row) * (float)(read_sub(r, e) >> 4));
    }
}

static float read_weight(const kvs_cuda_weight_shape *shape, const uint8_t *formed, uint64_t row, uint64_t i)
{
    const uint32_t unit_values = kvs_form_unit_groups(shape->type) * KVS_GROUP;
    const reader r = {.type = shape->type,
                      .unit = formed + row / KVS_FORM_ROWS * shape->piece_bytes + i / unit_values * kvs_form_unit_bytes(shape->type),
                      .pair = (uint32_t)(row % 8),
                      .is_high = (uint32_t)(row / 8 % 2),
                      .group = (uint32_t)(i % unit_values / KVS_GROUP)};
    const uint32_t e = (uint32_t)(i % KVS_GROUP);
    const float product = read_scale(&r, e) * (float)read_value(&r, e);
    return kvs_form_minimum(shape->type) == KVS_FORM_NO_MINIMUM ? product : product + read_minimum(&r, e);
}

static void check_matrix(int type, uint64_t k, uint64_t n)
{
    uint8_t *rows = random_weights(type, k, n, (uint64_t)type * 7 + k);
    float *decoded = malloc(n * k * sizeof *decoded);
    uint32_t *ids = malloc(n * sizeof *ids);
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = i;
    }
    CHECK_OK(kvs_embed_rows(type, k, n, rows, ids, (uint32_t)n, decoded, k));
    kvs_cuda_weight_shape shape;
    CHECK_OK(kvs_cuda_weight_shape_make(type, k, n, &shape));
    uint8_t *formed = malloc(shape.bytes);
    memset(formed, 0xff, shape.bytes);
    /* In two runs of pieces, as a bounded staging buffer cuts them. */
    const uint64_t first = shape.n_pieces / 2;
    kvs_cuda_weight_form(&shape, rows, 0, first, formed);
    kvs_cuda_weight_form(&shape, rows, first, shape.n_pieces - first, formed + first * shape.piece_bytes);
    uint64_t n_wrong = 0;
    for (uint64_t row = 0; row < n; row++) {
        for (uint64_t i = 0; i < k; i++) {
            n_wrong += read_weight(&shape, formed, row, i) != decoded[row * k + i];
        }
    }
    if (!CHECK(n_wrong == 0)) {
        fprintf(stderr, "%s: %llu of %llu values\n", kvs_type_name(type), (unsigned long long)n_wrong, (unsigned long long)(n * k));
    }
    free(formed);
    free(ids);
    free(decoded);
    free(rows);
}

static void test_every_quantized_type_is_read_back_as_the_file_decodes(void)
{
    for (size_t t = 0; t < N_WEIGHT_TYPES; t++) {
        uint32_t block_values, block_bytes;
        kvs_type_block(weight_types[t], &block_values, &block_bytes);
        if (block_values != 1) {
            check_matrix(weight_types[t], block_values * 3, 16);
            check_matrix(weight_types[t], block_values * 4, 43);
        }
    }
}

static void test_float_rows_are_padded_with_zeros(void)
{
    static const int types[] = {KVS_TYPE_F32, KVS_TYPE_F16, KVS_TYPE_BF16};
    for (size_t t = 0; t < 3; t++) {
        kvs_cuda_weight_shape shape;
        CHECK_OK(kvs_cuda_weight_shape_make(types[t], 37, 5, &shape));
        const uint64_t value_bytes = types[t] == KVS_TYPE_F32 ? 4 : 2;
        uint8_t *rows = random_weights(types[t], 37, 5, t), *formed = malloc(shape.bytes);
        kvs_cuda_weight_form(&shape, rows, 0, 5, formed);
        CHECK(shape.row_values == 40 && shape.bytes == 5 * 40 * value_bytes);
        static const uint8_t zeros[12];
        for (uint64_t row = 0; row < 5; row++) {
            const uint8_t *to = formed + row * 40 * value_bytes;
            CHECK(memcmp(to, rows + row * 37 * value_bytes, 37 * value_bytes) == 0);
            CHECK(memcmp(to + 37 * value_bytes, zeros, 3 * value_bytes) == 0);
        }
        free(formed);
        free(rows);
    }
}

static void test_sizes_out_of_range_are_refused(void)
{
    kvs_cuda_weight_shape shape;
    CHECK(kvs_cuda_weight_shape_make(9999, 32, 1, &shape) == KVS_EUNSUPPORTED);
    CHECK(kvs_cuda_weight_shape_make(KVS_TYPE_Q4_0, 0, 1, &shape) == KVS_EINVAL);
    CHECK(kvs_cuda_weight_shape_make(KVS_TYPE_Q4_0, 48, 1, &shape) == KVS_EINVAL);
    CHECK(kvs_cuda_weight_shape_make(KVS_TYPE_Q4_K, 256, 0, &shape) == KVS_EINVAL);
    CHECK(kvs_cuda_weight_shape_make(KVS_TYPE_Q8_0, UINT64_C(1) << 40, UINT64_C(1) << 40, &shape) == KVS_EOVERFLOW);
}

/* Vector loads of kernels need it. */
static void test_units_begin_at_multiples_of_32_bytes(void)
{
    for (size_t t = 0; t < N_WEIGHT_TYPES; t++) {
        if (!kvs_form_is_float(weight_types[t])) {
            CHECK(kvs_form_unit_bytes(weight_types[t]) % 32 == 0);
            CHECK(kvs_form_high_at(weight_types[t]) % 16 == 0 && kvs_form_scales_at(weight_types[t]) % 16 == 0);
            CHECK(kvs_form_subs_at(weight_types[t]) % 16 == 0 && kvs_form_subminima_at(weight_types[t]) % 16 == 0);
        }
    }
}

int main(void)
{
    test_every_quantized_type_is_read_back_as_the_file_decodes();
    test_float_rows_are_padded_with_zeros();
    test_sizes_out_of_range_are_refused();
    test_units_begin_at_multiples_of_32_bytes();
    return check_finish();
}
