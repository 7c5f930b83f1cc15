/* blocks.h: blocks of quantized types as files hold them, taken apart for whoever repacks them. */
#ifndef KVS_NATIVE_BASE_BLOCKS_H
#define KVS_NATIVE_BASE_BLOCKS_H

#include <stdint.h>

#define KVS_GROUP 32u       /* values of k to a group */
#define KVS_SUPER_GROUPS 8u /* groups to a super-block */

/* One block of a file, taken apart: as many codes as it has values, and what its type has of the rest. */
typedef struct kvs_block {
    uint8_t codes[256]; /* without sign, places in a table where the type has one */
    uint16_t scale;     /* f16 */
    uint16_t minimum;   /* f16 */
    uint8_t sub_scales[16]; /* one number to a byte */
    uint8_t sub_minima[16];
} kvs_block;

/* Bit i of the lowest eight becomes byte i, which is 0 or 1. */
static inline uint64_t kvs_spread_bits(uint32_t bits)
{
    uint64_t eight = ((bits & 255u) | (uint64_t)(bits & 255u) << 28) & UINT64_C(0x0000000f0000000f);
    eight = (eight | eight << 14) & UINT64_C(0x0003000300030003);
    return (eight | eight << 7) & UINT64_C(0x0101010101010101);
}

/* Two bits of the lowest sixteen to a byte. */
static inline uint64_t kvs_spread_crumbs(uint32_t crumbs)
{
    uint64_t eight = ((crumbs & 0xffffu) | (uint64_t)(crumbs & 0xffffu) << 24) & UINT64_C(0x000000ff000000ff);
    eight = (eight | eight << 12) & UINT64_C(0x000f000f000f000f);
    return (eight | eight << 6) & UINT64_C(0x0303030303030303);
}

/* Four bits to a byte. */
static inline uint64_t kvs_spread_nibbles(uint32_t nibbles)
{
    uint64_t eight = (nibbles | (uint64_t)nibbles << 16) & UINT64_C(0x0000ffff0000ffff);
    eight = (eight | eight << 8) & UINT64_C(0x00ff00ff00ff00ff);
    return (eight | eight << 4) & UINT64_C(0x0f0f0f0f0f0f0f0f);
}

/* `type` is quantized. */
void kvs_block_split(int type, const uint8_t *bytes, kvs_block *block);

/* The same for the types whose codes name entries of a codebook (block_grid.c). thread: any */
void kvs_block_split_grid(int type, const uint8_t *bytes, kvs_block *block);

#endif
