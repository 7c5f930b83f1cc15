/* weight_form.c: from blocks of a file to units of panels. */
#include "backends/cuda/weight_form.h"

#include "base/blocks.h"

#include <string.h>

/* Everything below is written once for a constant type and inlined. */
#define INLINE static inline __attribute__((always_inline))
#define FLOAT_ROW_VALUES 8u /* rows begin at 16 bytes, so that a lane may load as many */
#define LANE_BYTES 16u      /* of codes at a time */
#define VECTOR_BYTES 512u   /* a warp's */
#define AHEAD 2u            /* units: sixteen rows at once are more than a processor follows by itself */

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

/* Sixteen codes of half a group: word t has codes 4t .. 4t + 3, which are a register of lane 4r + t. What is done to one code is done
 * to all. The library runs on little-endian machines alone. */
typedef uint32_t words __attribute__((vector_size(16)));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (words){__VA_ARGS__})
#endif

INLINE words load_words(const uint8_t *codes)
{
    words made;
    memcpy(&made, codes, sizeof made);
    return made;
}

INLINE void store_words(uint8_t *to, words from)
{
    memcpy(to, &from, sizeof from);
}

/* Word t of each goes to lane t: 16 bytes of four lanes. */
INLINE void store_lanes(uint8_t *to, words a, words b, words c, words d)
{
    const words ab_low = SHUFFLE(a, b, 0, 4, 1, 5), ab_high = SHUFFLE(a, b, 2, 6, 3, 7);
    const words cd_low = SHUFFLE(c, d, 0, 4, 1, 5), cd_high = SHUFFLE(c, d, 2, 6, 3, 7);
    store_words(to, SHUFFLE(ab_low, cd_low, 0, 1, 4, 5));
    store_words(to + LANE_BYTES, SHUFFLE(ab_low, cd_low, 2, 3, 6, 7));
    store_words(to + 2 * LANE_BYTES, SHUFFLE(ab_high, cd_high, 0, 1, 4, 5));
    store_words(to + 3 * LANE_BYTES, SHUFFLE(ab_high, cd_high, 2, 3, 6, 7));
}

/* A group of two rows of a panel, r and r + 8: the four registers of a lane, by the number that kernels/weight_form.h gives them. */
typedef struct registers {
    words at[4];
} registers;

/* What a unit has of rows r and r + 8: one super-block each, or two groups that are blocks of their own, or share one. */
typedef struct unit_rows {
    kvs_block low[2];
    kvs_block high[2];
} unit_rows;

INLINE registers load_registers(const unit_rows *rows, uint32_t block_groups, uint32_t group)
{
    const uint32_t at = group % block_groups * KVS_GROUP;
    const uint8_t *low = rows->low[group / block_groups].codes + at, *high = rows->high[group / block_groups].codes + at;
    return (registers){{load_words(low), load_words(high), load_words(low + 16), load_words(high + 16)}};
}

/* Some bits of each code at another place of its byte. */
INLINE words bits_of(words codes, uint32_t mask, uint32_t shift, uint32_t at)
{
    return (codes >> shift & 0x01010101u * mask) << at;
}

/* Neighbours of four nibbles, each in a byte of its own, side by side: two bytes. */
INLINE words join_nibbles(words codes)
{
    const words pairs = (codes | codes >> 4) & 0x00ff00ffu;
    return (pairs | pairs >> 8) & 0xffffu;
}

/* Registers 0 and 2, or 1 and 3, of 4-bit codes. */
INLINE words pair_nibbles(words low, words high, bool has_table)
{
    const words first = bits_of(low, 15, 0, 0), second = bits_of(high, 15, 0, 0);
    return has_table ? join_nibbles(first) | join_nibbles(second) << 16 : first | second << 4;
}

/* Two bits of all four registers. */
INLINE words join_crumbs(registers regs, uint32_t shift)
{
    return bits_of(regs.at[0], 3, shift, 0) | bits_of(regs.at[1], 3, shift, 2) | bits_of(regs.at[2], 3, shift, 4) |
           bits_of(regs.at[3], 3, shift, 6);
}

/* One bit of all four registers of two groups. */
INLINE words join_bits(registers even, registers odd, uint32_t shift)
{
    words made = {0};
    for (uint32_t reg = 0; reg < 4; reg++) {
        made |= bits_of(even.at[reg], 1, shift, reg) | bits_of(odd.at[reg], 1, shift, 4 + reg);
    }
    return made;
}

/* Codes of rows r and r + 8: vector after vector of a unit, of which the lane has 16 bytes. */
INLINE void place_codes(int type, uint32_t block_groups, const unit_rows *rows, uint8_t *lanes)
{
    const uint32_t bits = (uint32_t)kvs_form_code_bits(type), vector_groups = LANE_BYTES / (2 * bits);
    const bool has_table = kvs_form_table(type) != KVS_FORM_NO_TABLE;
    for (uint32_t group = 0; group < kvs_form_unit_groups(type); group += vector_groups) {
        uint8_t *to = lanes + group / vector_groups * VECTOR_BYTES;
        const registers first = load_registers(rows, block_groups, group);
        if (bits == 8) {
            const words sign = {0x80808080u, 0x80808080u, 0x80808080u, 0x80808080u};
            store_lanes(to, first.at[0] ^ sign, first.at[1] ^ sign, first.at[2] ^ sign, first.at[3] ^ sign);
            continue;
        }
        const registers second = load_registers(rows, block_groups, group + 1);
        if (bits == 4) {
            store_lanes(to, pair_nibbles(first.at[0], first.at[2], has_table), pair_nibbles(first.at[1], first.at[3], has_table),
                        pair_nibbles(second.at[0], second.at[2], has_table), pair_nibbles(second.at[1], second.at[3], has_table));
            continue;
        }
        store_lanes(to, join_crumbs(first, 0), join_crumbs(second, 0), join_crumbs(load_registers(rows, block_groups, group + 2), 0),
                    join_crumbs(load_registers(rows, block_groups, group + 3), 0));
    }
}

/* High bits of two groups. */
INLINE words high_pair(uint32_t block_groups, const unit_rows *rows, uint32_t group, uint32_t shift)
{
    return join_bits(load_registers(rows, block_groups, group), load_registers(rows, block_groups, group + 1), shift);
}

/* High bits of rows r and r + 8; `lane`: 4r. */
INLINE void place_high(int type, uint32_t block_groups, const unit_rows *rows, uint32_t lane, uint8_t *plane)
{
    const uint32_t shift = (uint32_t)kvs_form_code_bits(type), n_groups = kvs_form_unit_groups(type);
    if (kvs_form_high_bits(type) == 2) {
        for (uint32_t group = 0; group < n_groups; group += 4) {
            store_lanes(plane + group / 4 * VECTOR_BYTES + lane * LANE_BYTES,
                        join_crumbs(load_registers(rows, block_groups, group), shift),
                        join_crumbs(load_registers(rows, block_groups, group + 1), shift),
                        join_crumbs(load_registers(rows, block_groups, group + 2), shift),
                        join_crumbs(load_registers(rows, block_groups, group + 3), shift));
        }
    } else if (kvs_form_high_bits(type) == 1 && n_groups == 8) {
        store_lanes(plane + lane * LANE_BYTES, high_pair(block_groups, rows, 0, shift), high_pair(block_groups, rows, 2, shift),
                    high_pair(block_groups, rows, 4, shift), high_pair(block_groups, rows, 6, shift));
    } else if (kvs_form_high_bits(type) == 1) {
        store_words(plane + lane * sizeof(uint32_t), high_pair(block_groups, rows, 0, shift));
    }
}

/* The bit that eight codes share, of a row. */
INLINE void place_shared_bits(int type, const uint8_t *codes, uint32_t row, uint8_t *plane)
{
    for (uint32_t pair = 0; pair < kvs_form_unit_groups(type) / 2; pair++) {
        uint32_t bits = 0;
        for (uint32_t octet = 0; octet < 8; octet++) {
            bits |= (codes[64 * pair + 8 * octet] >> 2 & 1u) << octet;
        }
        plane[row * 4 + pair] = (uint8_t)bits;
    }
}

/* All codes that a unit has of rows r and r + 8. */
INLINE void place_rows(int type, uint32_t block_groups, const unit_rows *rows, uint32_t r, uint8_t *unit)
{
    uint8_t *plane = unit + kvs_form_high_at(type);
    place_codes(type, block_groups, rows, unit + 4 * r * LANE_BYTES);
    place_high(type, block_groups, rows, 4 * r, plane);
    if (kvs_form_has_shared_bit(type)) {
        place_shared_bits(type, rows->low[0].codes, 2 * r, plane);
        place_shared_bits(type, rows->high[0].codes, 2 * r + 1, plane);
    }
}

/* Scales and minima of a block whose first group is `group` of the unit. `row`: 2 r, or 2 r + 1 for row r + 8. */
INLINE void place_scales(int type, uint32_t row, uint32_t group, uint32_t block_groups, const kvs_block *block, uint8_t *unit)
{
    const uint32_t n_halves = kvs_form_halves(type), n_subs = kvs_form_subs(type);
    const uint32_t half_at = 2 * (row * n_halves + (n_halves > 1 ? group : 0));
    if (n_halves != 0) {
        memcpy(unit + kvs_form_scales_at(type) + half_at, &block->scale, 2);
    }
    if (n_halves != 0 && kvs_form_minimum(type) != KVS_FORM_NO_MINIMUM) {
        memcpy(unit + kvs_form_minima_at(type) + half_at, &block->minimum, 2);
    }
    const uint32_t group_subs = n_subs / kvs_form_unit_groups(type);
    uint8_t *subs = unit + kvs_form_subs_at(type) + row * n_subs + group * group_subs;
    for (uint32_t i = 0; i < block_groups * group_subs; i++) {
        subs[i] = kvs_form_has_odd_subs(type) ? (uint8_t)(2 * block->sub_scales[i] + 1) : block->sub_scales[i];
    }
    if (kvs_form_minimum(type) == KVS_FORM_SUB_MINIMUM) {
        memcpy(unit + kvs_form_subminima_at(type) + row * KVS_SUPER_GROUPS, block->sub_minima, KVS_SUPER_GROUPS);
    }
}

/* Rows of a panel, in file layout. */
typedef struct panel_rows {
    const uint8_t *first;
    uint64_t row_bytes;
    uint32_t n_rows;
    uint64_t n_blocks; /* of a row */
} panel_rows;

/* Blocks of one row of a unit, and their scales; what there is not of rows and blocks is zeros. */
INLINE void take_row(int type, uint32_t block_bytes, uint32_t block_groups, const panel_rows *rows, uint32_t lane_row,
                     uint64_t first_block, kvs_block *blocks, uint8_t *unit)
{
    const uint32_t n_blocks = kvs_form_unit_groups(type) / block_groups;
    const uintptr_t ahead = (uintptr_t)rows->first + lane_row * rows->row_bytes + (first_block + AHEAD * n_blocks) * block_bytes;
    for (uint32_t at = 0; at < n_blocks * block_bytes; at += 64) {
        __builtin_prefetch((const void *)(ahead + at)); /* behind the last row too, which does no harm */
    }
    for (uint32_t i = 0; i < n_blocks; i++) {
        if (lane_row < rows->n_rows && first_block + i < rows->n_blocks) {
            kvs_block_split(type, rows->first + lane_row * rows->row_bytes + (first_block + i) * block_bytes, &blocks[i]);
            place_scales(type, lane_row % 8 * 2 + lane_row / 8, i * block_groups, block_groups, &blocks[i], unit);
        } else {
            memset(blocks[i].codes, kvs_form_code_bits(type) == 8 ? 0x80 : 0, block_groups * KVS_GROUP);
        }
    }
}

/* Unit by unit, so that what is written lies near. */
INLINE void form_panel(int type, uint32_t block_bytes, uint32_t block_groups, const panel_rows *rows, uint64_t n_units, uint8_t *panel)
{
    const uint64_t unit_bytes = kvs_form_unit_bytes(type), unit_blocks = kvs_form_unit_groups(type) / block_groups;
    for (uint64_t u = 0; u < n_units; u++) {
        uint8_t *unit = panel + u * unit_bytes;
        if (rows->n_rows < KVS_FORM_ROWS || (u + 1) * unit_blocks > rows->n_blocks) {
            memset(unit, 0, unit_bytes);
        }
        for (uint32_t r = 0; r < KVS_FORM_ROWS / 2; r++) {
            unit_rows taken;
            take_row(type, block_bytes, block_groups, rows, r, u * unit_blocks, taken.low, unit);
            take_row(type, block_bytes, block_groups, rows, r + 8, u * unit_blocks, taken.high, unit);
            place_rows(type, block_groups, &taken, r, unit);
        }
    }
}

#define FORM_CASE(name)                                                                                                \
    case KVS_TYPE_##name:                                                                                              \
        form_panel(KVS_TYPE_##name, block_bytes, block_groups, rows, shape->n_units, panel);                           \
        break;

static void form_any_panel(const kvs_cuda_weight_shape *shape, const panel_rows *rows, uint8_t *panel)
{
    uint32_t block_values = 0, block_bytes = 0;
    (void)kvs_type_block(shape->type, &block_values, &block_bytes);
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
        form_panel(KVS_TYPE_NVFP4, block_bytes, block_groups, rows, shape->n_units, panel);
        break;
    }
}

void kvs_cuda_weight_form(const kvs_cuda_weight_shape *shape, const void *rows, uint64_t first, uint64_t n_pieces, uint8_t *to)
{
    uint32_t block_values = 0, block_bytes = 0;
    (void)kvs_type_block(shape->type, &block_values, &block_bytes);
    const uint64_t row_bytes = shape->k / block_values * block_bytes;
    for (uint64_t i = 0; i < n_pieces; i++) {
        uint8_t *piece = to + i * shape->piece_bytes;
        if (kvs_form_is_float(shape->type)) {
            memcpy(piece, (const uint8_t *)rows + (first + i) * row_bytes, row_bytes);
            memset(piece + row_bytes, 0, shape->piece_bytes - row_bytes);
            continue;
        }
        const uint64_t row = (first + i) * KVS_FORM_ROWS, left = shape->n - row;
        const panel_rows panel = {.first = (const uint8_t *)rows + row * row_bytes,
                                  .row_bytes = row_bytes,
                                  .n_rows = left < KVS_FORM_ROWS ? (uint32_t)left : KVS_FORM_ROWS,
                                  .n_blocks = shape->k / block_values};
        form_any_panel(shape, &panel, piece);
    }
}
