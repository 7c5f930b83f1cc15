/* weight_form.c: from blocks of a file to units of panels. */
#include "backends/cuda/weight_form.h"

#include "base/blocks.h"

#include <string.h>

/* Everything below is written once for a constant type and inlined. */
#define INLINE static inline __attribute__((always_inline))
#define FLOAT_ROW_VALUES 8u /* rows begin at 16 bytes, so that a lane may load as many */
#define LANE_BYTES 16u      /* of codes at a time */
#define VECTOR_BYTES 512u   /* a warp's */

_Static_assert(KVS_FORM_GROUP_VALUES == KVS_GROUP, "one size of groups");
_Static_assert(KVS_W_F32 == KVS_TYPE_F32 && KVS_W_F16 == KVS_TYPE_F16 && KVS_W_BF16 == KVS_TYPE_BF16, "float types");
_Static_assert(KVS_W_Q4_0 == KVS_TYPE_Q4_0 && KVS_W_Q4_1 == KVS_TYPE_Q4_1 && KVS_W_Q5_0 == KVS_TYPE_Q5_0, "types");
_Static_assert(KVS_W_Q5_1 == KVS_TYPE_Q5_1 && KVS_W_Q8_0 == KVS_TYPE_Q8_0 && KVS_W_Q2_K == KVS_TYPE_Q2_K, "types");
_Static_assert(KVS_W_Q3_K == KVS_TYPE_Q3_K && KVS_W_Q4_K == KVS_TYPE_Q4_K && KVS_W_Q5_K == KVS_TYPE_Q5_K, "types");
_Static_assert(KVS_W_Q6_K == KVS_TYPE_Q6_K && KVS_W_IQ2_XXS == KVS_TYPE_IQ2_XXS && KVS_W_IQ2_XS == KVS_TYPE_IQ2_XS, "types");
_Static_assert(KVS_W_IQ3_XXS == KVS_TYPE_IQ3_XXS && KVS_W_IQ1_S == KVS_TYPE_IQ1_S && KVS_W_IQ4_NL == KVS_TYPE_IQ4_NL, "types");
_Static_assert(KVS_W_IQ3_S == KVS_TYPE_IQ3_S && KVS_W_IQ2_S == KVS_TYPE_IQ2_S && KVS_W_IQ4_XS == KVS_TYPE_IQ4_XS, "types");
_Static_assert(KVS_W_IQ1_M == KVS_TYPE_IQ1_M && KVS_W_MXFP4 == KVS_TYPE_MXFP4 && KVS_W_NVFP4 == KVS_TYPE_NVFP4, "types");

static kvs_status shape_pieces(kvs_cuda_weight_shape *shape, uint32_t block_bytes)
{
    bool fits;
    if (kvs_form_is_float(shape->type)) {
        shape->n_pieces = shape->n;
        fits = kvs_align_up(shape->k, FLOAT_ROW_VALUES, &shape->row_values) &&
               kvs_mul_u64(shape->row_values, block_bytes, &shape->piece_bytes);
    } else {
        shape->n_pieces = kvs_div_up(shape->n, KVS_FORM_ROWS);
        shape->n_units = kvs_div_up(shape->k / KVS_GROUP, kvs_form_unit_groups(shape->type));
        shape->n_groups = kvs_div_up(shape->k / KVS_GROUP, 2) * 2;
        fits = kvs_mul_u64(shape->n_units, kvs_form_unit_bytes(shape->type), &shape->piece_bytes);
    }
    return fits && kvs_mul_u64(shape->piece_bytes, shape->n_pieces, &shape->bytes) ? KVS_OK : KVS_EOVERFLOW;
}

kvs_status kvs_cuda_weight_shape_make(int type, uint64_t k, uint64_t n, kvs_cuda_weight_shape *shape)
{
    uint32_t block_values, block_bytes;
    kvs_status status = kvs_type_block(type, &block_values, &block_bytes);
    if (status != KVS_OK) {
        return status;
    }
    if (k == 0 || n == 0 || k % block_values != 0) {
        return KVS_EINVAL;
    }
    kvs_cuda_weight_shape made = {.type = type, .k = k, .n = n};
    status = shape_pieces(&made, block_bytes);
    if (status == KVS_OK) {
        *shape = made;
    }
    return status;
}

/* Where one row of a panel goes in a unit. */
typedef struct place {
    int type;
    uint32_t row;  /* 0..7 */
    uint32_t is_high; /* of the panel's rows 8..15 */
    uint8_t *unit;
} place;

/* Four codes, or four bytes of a lane, as one word: what is done to each of them is done at once. The library runs on
 * little-endian machines alone. */
INLINE uint32_t load_four(const uint8_t *from)
{
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

INLINE void store_four(uint8_t *to, uint32_t word)
{
    memcpy(to, &word, sizeof word);
}

/* Two bits of four codes for bits 2 * reg of four bytes. */
INLINE uint32_t crumbs_of(uint32_t codes, uint32_t shift, uint32_t reg)
{
    return (codes >> shift & 0x03030303u) << (2 * reg);
}

/* Neighbours of four nibbles, each in a byte of its own, side by side: two bytes. */
INLINE uint32_t join_nibbles(uint32_t codes)
{
    const uint32_t pairs = (codes | codes >> 4) & 0x00ff00ffu;
    return (pairs | pairs >> 8) & 0xffffu;
}

INLINE void place_low_codes(const place *p, uint32_t group, uint32_t lane, uint32_t low, uint32_t high)
{
    const uint32_t bits = (uint32_t)kvs_form_code_bits(p->type);
    const uint32_t vector_groups = LANE_BYTES / (2 * bits);
    const uint32_t nibbles = 0x0f0f0f0fu;
    uint8_t *to = p->unit + group / vector_groups * VECTOR_BYTES + lane * LANE_BYTES + group % vector_groups * 2 * bits;
    if (bits == 8) {
        store_four(to + 4 * p->is_high, low ^ 0x80808080u);
        store_four(to + 4 * (p->is_high + 2), high ^ 0x80808080u);
    } else if (bits == 4 && kvs_form_table(p->type) == KVS_FORM_NO_TABLE) {
        store_four(to + 4 * p->is_high, (low & nibbles) | (high & nibbles) << 4);
    } else if (bits == 4) {
        store_four(to + 4 * p->is_high, join_nibbles(low & nibbles) | join_nibbles(high & nibbles) << 16);
    } else if (bits == 2) {
        store_four(to, load_four(to) | crumbs_of(low, 0, p->is_high) | crumbs_of(high, 0, p->is_high + 2));
    }
}

INLINE void place_high_codes(const place *p, uint32_t group, uint32_t lane, uint32_t low, uint32_t high)
{
    const uint32_t code_bits = (uint32_t)kvs_form_code_bits(p->type);
    uint8_t *plane = p->unit + kvs_form_high_at(p->type);
    if (kvs_form_high_bits(p->type) == 2) {
        uint8_t *to = plane + group / 4 * VECTOR_BYTES + lane * LANE_BYTES + group % 4 * 4;
        store_four(to, load_four(to) | crumbs_of(low, code_bits, p->is_high) | crumbs_of(high, code_bits, p->is_high + 2));
    } else if (kvs_form_high_bits(p->type) == 1) {
        uint8_t *to = plane + lane * 2 * kvs_form_unit_groups(p->type) + group / 2 * 4;
        const uint32_t bits =
            (low >> code_bits & 0x01010101u) << p->is_high | (high >> code_bits & 0x01010101u) << (p->is_high + 2);
        store_four(to, load_four(to) | bits << (4 * (group % 2)));
    }
}

INLINE void place_shared_bits(const place *p, uint32_t group, const uint8_t *codes)
{
    uint8_t *to = p->unit + kvs_form_high_at(p->type) + (2 * p->row + p->is_high) * 4 + group / 2;
    for (uint32_t octet = 0; octet < 4; octet++) {
        *to |= (uint8_t)((codes[8 * octet] >> 2 & 1u) << (4 * (group % 2) + octet));
    }
}

INLINE void place_group(const place *p, uint32_t group, const uint8_t *codes)
{
    for (uint32_t t = 0; t < 4; t++) {
        const uint32_t low = load_four(codes + 4 * t), high = load_four(codes + 16 + 4 * t);
        place_low_codes(p, group, 4 * p->row + t, low, high);
        place_high_codes(p, group, 4 * p->row + t, low, high);
    }
    if (kvs_form_has_shared_bit(p->type)) {
        place_shared_bits(p, group, codes);
    }
}

/* Scales and minima of a block whose first group is `group` of the unit. */
INLINE void place_scales(const place *p, uint32_t group, uint32_t block_groups, const kvs_block *block)
{
    const uint32_t row = 2 * p->row + p->is_high;
    const uint32_t n_halves = kvs_form_halves(p->type), n_subs = kvs_form_subs(p->type);
    const uint32_t half_at = 2 * (row * n_halves + (n_halves > 1 ? group : 0));
    if (n_halves != 0) {
        memcpy(p->unit + kvs_form_scales_at(p->type) + half_at, &block->scale, 2);
    }
    if (n_halves != 0 && kvs_form_minimum(p->type) != KVS_FORM_NO_MINIMUM) {
        memcpy(p->unit + kvs_form_minima_at(p->type) + half_at, &block->minimum, 2);
    }
    const uint32_t group_subs = n_subs / kvs_form_unit_groups(p->type);
    uint8_t *subs = p->unit + kvs_form_subs_at(p->type) + row * n_subs + group * group_subs;
    for (uint32_t i = 0; i < block_groups * group_subs; i++) {
        subs[i] = kvs_form_has_odd_subs(p->type) ? (uint8_t)(2 * block->sub_scales[i] + 1) : block->sub_scales[i];
    }
    if (kvs_form_minimum(p->type) == KVS_FORM_SUB_MINIMUM) {
        memcpy(p->unit + kvs_form_subminima_at(p->type) + row * KVS_SUPER_GROUPS, block->sub_minima, KVS_SUPER_GROUPS);
    }
}

/* One row of a panel from its blocks, of block_bytes and block_groups * 32 values. */
INLINE void form_row(int type, uint64_t n_blocks, uint32_t block_bytes, uint32_t block_groups, const uint8_t *row,
                     uint32_t lane_row, uint8_t *panel)
{
    const uint32_t unit_groups = kvs_form_unit_groups(type);
    const uint64_t unit_bytes = kvs_form_unit_bytes(type);
    for (uint64_t b = 0; b < n_blocks; b++) {
        kvs_block block;
        kvs_block_split(type, row + b * block_bytes, &block);
        const uint64_t first = b * block_groups;
        const place p = {.type = type,
                         .row = lane_row % 8,
                         .is_high = lane_row / 8,
                         .unit = panel + first / unit_groups * unit_bytes};
        const uint32_t group = (uint32_t)(first % unit_groups);
        for (uint32_t g = 0; g < block_groups; g++) {
            place_group(&p, group + g, block.codes + g * KVS_GROUP);
        }
        place_scales(&p, group, block_groups, &block);
    }
}

#define FORM_CASE(name)                                                                                                \
    case KVS_TYPE_##name:                                                                                              \
        form_row(KVS_TYPE_##name, n_blocks, block_bytes, block_groups, row, lane_row, panel);                          \
        break;

static void form_panel_row(const kvs_cuda_weight_shape *shape, const uint8_t *row, uint32_t lane_row, uint8_t *panel)
{
    uint32_t block_values = 0, block_bytes = 0;
    (void)kvs_type_block(shape->type, &block_values, &block_bytes);
    const uint64_t n_blocks = shape->k / block_values;
    const uint32_t block_groups = block_values / KVS_GROUP;
    switch (shape->type) {
        FORM_CASE(Q4_0)
        FORM_CASE(Q4_1)
        FORM_CASE(Q5_0)
        FORM_CASE(Q5_1)
        FORM_CASE(Q8_0)
        FORM_CASE(Q2_K)
        FORM_CASE(Q3_K)
        FORM_CASE(Q4_K)
        FORM_CASE(Q5_K)
        FORM_CASE(Q6_K)
        FORM_CASE(IQ2_XXS)
        FORM_CASE(IQ2_XS)
        FORM_CASE(IQ3_XXS)
        FORM_CASE(IQ1_S)
        FORM_CASE(IQ4_NL)
        FORM_CASE(IQ3_S)
        FORM_CASE(IQ2_S)
        FORM_CASE(IQ4_XS)
        FORM_CASE(IQ1_M)
        FORM_CASE(MXFP4)
    default:
        form_row(KVS_TYPE_NVFP4, n_blocks, block_bytes, block_groups, row, lane_row, panel);
        break;
    }
}

void kvs_cuda_weight_form(const kvs_cuda_weight_shape *shape, const void *rows, uint64_t first, uint64_t n_pieces, uint8_t *to)
{
    uint32_t block_values = 0, block_bytes = 0;
    (void)kvs_type_block(shape->type, &block_values, &block_bytes);
    const uint64_t row_bytes = shape->k / block_values * block_bytes;
    memset(to, 0, n_pieces * shape->piece_bytes);
    for (uint64_t i = 0; i < n_pieces; i++) {
        uint8_t *piece = to + i * shape->piece_bytes;
        if (kvs_form_is_float(shape->type)) {
            memcpy(piece, (const uint8_t *)rows + (first + i) * row_bytes, row_bytes);
            continue;
        }
        for (uint32_t r = 0; r < KVS_FORM_ROWS && (first + i) * KVS_FORM_ROWS + r < shape->n; r++) {
            form_panel_row(shape, (const uint8_t *)rows + ((first + i) * KVS_FORM_ROWS + r) * row_bytes, r, piece);
        }
    }
}
