/* block_grid.c: blocks whose codes name entries of a codebook, as places in the list of levels that the codebook draws from.
 *
 * An entry gives 8 places of 2 bits (IQ1, IQ2) or 4 of 4 bits (IQ3). IQ2 and IQ3 have a sign to each value beside it, IQ1 a
 * shift of its levels for each eight.
 */
#include "base/blocks.h"
#include "kernels/grids.h"
#include "kvstream/base.h"

#include <string.h>

#define IQ2_SIGN 4u /* bit 2 of a code */
#define IQ3_SIGN 8u /* bit 3 of a code */
#define IQ1_SHIFT 4u

static uint32_t load_u16(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8;
}

static uint32_t load_u32(const uint8_t *bytes)
{
    return load_u16(bytes) | load_u16(bytes + 2) << 16;
}

/* A 7-bit code of eight signs: the eighth makes the number of minus signs even. */
static uint32_t even_signs(uint32_t code)
{
    return code | (uint32_t)__builtin_parity(code) << 7;
}

static void store_eight(uint8_t *codes, uint64_t eight)
{
    memcpy(codes, &eight, sizeof eight);
}

/* Eight codes of an entry of 8 places; bit i of `signs` adds `mark` to code i. */
static void place_eight(uint32_t entry, uint32_t signs, uint32_t mark, uint8_t *codes)
{
    store_eight(codes, kvs_spread_crumbs(entry) | kvs_spread_bits(signs) * mark);
}

/* Eight codes of two entries of 4 places. */
static void place_two_fours(const uint16_t *grid, uint32_t first, uint32_t second, uint32_t signs, uint8_t *codes)
{
    const uint64_t eight = kvs_spread_nibbles(grid[first] | (uint32_t)grid[second] << 16) & 7 * UINT64_C(0x0101010101010101);
    store_eight(codes, eight | kvs_spread_bits(signs) * IQ3_SIGN);
}

/* 2n scales of n bytes, the low nibble of each first. */
static void split_scales(const uint8_t *bytes, uint32_t n, kvs_block *block)
{
    for (uint32_t i = 0; i < n; i++) {
        block->sub_scales[2 * i] = bytes[i] & 15;
        block->sub_scales[2 * i + 1] = bytes[i] >> 4;
    }
}

static void split_iq2_xxs(const uint8_t *bytes, kvs_block *block)
{
    for (uint32_t g = 0; g < KVS_SUPER_GROUPS; g++) {
        const uint8_t *indices = bytes + 2 + 8 * g;
        const uint32_t aux = load_u32(indices + 4);
        block->sub_scales[g] = (uint8_t)(aux >> 28);
        for (uint32_t l = 0; l < 4; l++) {
            place_eight(kvs_grid_iq2_xxs[indices[l]], even_signs(aux >> (7 * l) & 127u), IQ2_SIGN,
                        block->codes + 32 * g + 8 * l);
        }
    }
}

static void split_iq2_xs(const uint8_t *bytes, kvs_block *block)
{
    split_scales(bytes + 66, 8, block);
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t code = load_u16(bytes + 2 + 2 * i);
        place_eight(kvs_grid_iq2_xs[code & 511u], even_signs(code >> 9), IQ2_SIGN, block->codes + 8 * i);
    }
}

static void split_iq2_s(const uint8_t *bytes, kvs_block *block)
{
    split_scales(bytes + 74, 8, block);
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t high = (uint32_t)bytes[66 + i / 4] >> (2 * (i % 4)) & 3u;
        place_eight(kvs_grid_iq2_s[bytes[2 + i] | high << 8], bytes[34 + i], IQ2_SIGN, block->codes + 8 * i);
    }
}

static void split_iq3_xxs(const uint8_t *bytes, kvs_block *block)
{
    for (uint32_t g = 0; g < KVS_SUPER_GROUPS; g++) {
        const uint32_t aux = load_u32(bytes + 66 + 4 * g);
        block->sub_scales[g] = (uint8_t)(aux >> 28);
        for (uint32_t l = 0; l < 4; l++) {
            const uint8_t *pair = bytes + 2 + 8 * g + 2 * l;
            place_two_fours(kvs_grid_iq3_xxs, pair[0], pair[1], even_signs(aux >> (7 * l) & 127u),
                            block->codes + 32 * g + 8 * l);
        }
    }
}

static void split_iq3_s(const uint8_t *bytes, kvs_block *block)
{
    split_scales(bytes + 106, 4, block);
    for (uint32_t i = 0; i < 32; i++) {
        const uint8_t *pair = bytes + 2 + 2 * i;
        const uint32_t high = (uint32_t)bytes[66 + i / 4] >> (2 * (i % 4));
        place_two_fours(kvs_grid_iq3_s, pair[0] | (high & 1u) << 8, pair[1] | (high >> 1 & 1u) << 8, bytes[74 + i],
                        block->codes + 8 * i);
    }
}

static void split_iq1_s(const uint8_t *bytes, kvs_block *block)
{
    for (uint32_t g = 0; g < KVS_SUPER_GROUPS; g++) {
        const uint32_t high = load_u16(bytes + 34 + 2 * g);
        const uint32_t signs = (high >> 15) != 0 ? 0xffu : 0u;
        block->sub_scales[g] = (uint8_t)(high >> 12 & 7u);
        for (uint32_t l = 0; l < 4; l++) {
            const uint32_t index = bytes[2 + 4 * g + l] | (high >> (3 * l) & 7u) << 8;
            place_eight(kvs_grid_iq1_s[index], signs, IQ1_SHIFT, block->codes + 32 * g + 8 * l);
        }
    }
}

/* The float16 scale lies in the top nibbles of four words, which hold four 3-bit scales each below it. */
static void split_iq1_m(const uint8_t *bytes, kvs_block *block)
{
    uint32_t scale = 0;
    for (uint32_t w = 0; w < 4; w++) {
        const uint32_t word = load_u16(bytes + 48 + 2 * w);
        scale |= word >> 12 << (4 * w);
        for (uint32_t i = 0; i < 4; i++) {
            block->sub_scales[4 * w + i] = (uint8_t)(word >> (3 * i) & 7u);
        }
    }
    block->scale = (uint16_t)scale;
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t high = (uint32_t)bytes[32 + i / 2] >> (4 * (i % 2)) & 15u;
        place_eight(kvs_grid_iq1_s[bytes[i] | (high & 7u) << 8], (high & 8u) != 0 ? 0xffu : 0u, IQ1_SHIFT,
                    block->codes + 8 * i);
    }
}

void kvs_block_split_grid(int type, const uint8_t *bytes, kvs_block *block)
{
    switch (type) {
    case KVS_TYPE_IQ1_S:
        split_iq1_s(bytes, block);
        break;
    case KVS_TYPE_IQ1_M:
        split_iq1_m(bytes, block);
        break;
    case KVS_TYPE_IQ2_XXS:
        split_iq2_xxs(bytes, block);
        break;
    case KVS_TYPE_IQ2_XS:
        split_iq2_xs(bytes, block);
        break;
    case KVS_TYPE_IQ2_S:
        split_iq2_s(bytes, block);
        break;
    case KVS_TYPE_IQ3_XXS:
        split_iq3_xxs(bytes, block);
        break;
    default:
        split_iq3_s(bytes, block);
        break;
    }
}
