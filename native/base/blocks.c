/* blocks.c: blocks of numbers, taken apart. Files are little endian, and so are the machines this is built for. */
#include "base/blocks.h"

#include "kvstream/base.h"

#include <string.h>

static uint16_t load_u16(const uint8_t *bytes)
{
    return (uint16_t)(bytes[0] | bytes[1] << 8);
}

/* 2n codes from n bytes: low nibbles, then high ones. */
static void split_nibbles(const uint8_t *bytes, uint32_t n, uint8_t *codes)
{
    for (uint32_t i = 0; i < n; i++) {
        codes[i] = bytes[i] & 15;
        codes[n + i] = bytes[i] >> 4;
    }
}

/* Bit e of a little-endian word becomes bit 4 of code e. */
static void add_fifth_bits(const uint8_t *bytes, uint8_t *codes)
{
    for (uint32_t e = 0; e < KVS_GROUP; e++) {
        codes[e] |= (uint8_t)((bytes[e / 8] >> (e % 8) & 1) << 4);
    }
}

/* 256 two-bit codes of 64 bytes: halves of 32 bytes, each giving four runs of 32 codes. A run is one loop over neighbours, which
 * compilers turn into vectors. */
static void split_crumbs(const uint8_t *restrict bytes, uint32_t shift, uint8_t *restrict codes)
{
    for (uint32_t run = 0; run < 8; run++) {
        for (uint32_t e = 0; e < 32; e++) {
            codes[32 * run + e] |= (uint8_t)((bytes[run / 4 * 32 + e] >> (2 * (run % 4)) & 3) << shift);
        }
    }
}

/* One bit more of 256 codes from 32 bytes: run after run of 32 codes takes the next bit of all of them. */
static void add_high_bits(const uint8_t *restrict bytes, uint32_t shift, uint8_t *restrict codes)
{
    for (uint32_t run = 0; run < 8; run++) {
        for (uint32_t e = 0; e < 32; e++) {
            codes[32 * run + e] |= (uint8_t)((bytes[e] >> run & 1) << shift);
        }
    }
}

/* The eight 6-bit scales and minima of Q4_K and Q5_K. */
static void split_six_bits(const uint8_t *packed, kvs_block *block)
{
    for (uint32_t b = 0; b < 4; b++) {
        block->sub_scales[b] = packed[b] & 63;
        block->sub_minima[b] = packed[b + 4] & 63;
        block->sub_scales[b + 4] = (uint8_t)((packed[b + 8] & 15) | packed[b] >> 6 << 4);
        block->sub_minima[b + 4] = (uint8_t)(packed[b + 8] >> 4 | packed[b + 4] >> 6 << 4);
    }
}

static void split_q2_k(const uint8_t *bytes, kvs_block *block)
{
    block->scale = load_u16(bytes + 80);
    block->minimum = load_u16(bytes + 82);
    memcpy(block->sub_scales, bytes, 16);
    memset(block->codes, 0, sizeof block->codes);
    split_crumbs(bytes + 16, 0, block->codes);
}

static void split_q3_k(const uint8_t *bytes, kvs_block *block)
{
    const uint8_t *packed = bytes + 96;
    block->scale = load_u16(bytes + 108);
    for (uint32_t s = 0; s < 16; s++) {
        int low = s < 8 ? packed[s] & 15 : packed[s - 8] >> 4;
        int high = packed[8 + s % 4] >> (2 * (s / 4)) & 3;
        block->sub_scales[s] = (uint8_t)((low | high << 4) - 32);
    }
    memset(block->codes, 0, sizeof block->codes);
    split_crumbs(bytes + 32, 0, block->codes);
    add_high_bits(bytes, 2, block->codes);
}

static void split_q4_k(const uint8_t *bytes, kvs_block *block)
{
    block->scale = load_u16(bytes);
    block->minimum = load_u16(bytes + 2);
    split_six_bits(bytes + 4, block);
    for (uint32_t pair = 0; pair < 4; pair++) {
        split_nibbles(bytes + 16 + 32 * pair, 32, block->codes + 64 * pair);
    }
}

static void split_q5_k(const uint8_t *bytes, kvs_block *block)
{
    block->scale = load_u16(bytes);
    block->minimum = load_u16(bytes + 2);
    split_six_bits(bytes + 4, block);
    for (uint32_t pair = 0; pair < 4; pair++) {
        split_nibbles(bytes + 48 + 32 * pair, 32, block->codes + 64 * pair);
    }
    add_high_bits(bytes + 16, 4, block->codes);
}

static void split_q6_k(const uint8_t *bytes, kvs_block *block)
{
    block->scale = load_u16(bytes + 208);
    memcpy(block->sub_scales, bytes + 192, 16);
    split_nibbles(bytes, 64, block->codes);
    split_nibbles(bytes + 64, 64, block->codes + 128);
    split_crumbs(bytes + 128, 4, block->codes);
}

static void split_iq4_xs(const uint8_t *bytes, kvs_block *block)
{
    uint32_t high = load_u16(bytes + 2);
    block->scale = load_u16(bytes);
    for (uint32_t b = 0; b < 8; b++) {
        uint32_t low = (uint32_t)bytes[4 + b / 2] >> (4 * (b % 2)) & 15u;
        block->sub_scales[b] = (uint8_t)((low | (high >> (2 * b) & 3u) << 4) - 32u);
        split_nibbles(bytes + 8 + 16 * b, 16, block->codes + 32 * b);
    }
}

/* Four scales of 16 values. Of the two codes for "no number" the one without the top bit is a zero; the other counts as
 * 480, and the top bit is otherwise ignored. */
static void split_nvfp4(const uint8_t *bytes, kvs_block *block)
{
    for (uint32_t s = 0; s < 4; s++) {
        block->sub_scales[s] = bytes[s] == 0x7f ? 0 : bytes[s] & 0x7f;
        split_nibbles(bytes + 4 + 8 * s, 8, block->codes + 16 * s);
    }
}

void kvs_block_split(int type, const uint8_t *bytes, kvs_block *block)
{
    block->scale = load_u16(bytes);
    switch (type) {
    case KVS_TYPE_Q4_0:
    case KVS_TYPE_IQ4_NL:
        split_nibbles(bytes + 2, 16, block->codes);
        break;
    case KVS_TYPE_Q4_1:
        block->minimum = load_u16(bytes + 2);
        split_nibbles(bytes + 4, 16, block->codes);
        break;
    case KVS_TYPE_Q5_0:
        split_nibbles(bytes + 6, 16, block->codes);
        add_fifth_bits(bytes + 2, block->codes);
        break;
    case KVS_TYPE_Q5_1:
        block->minimum = load_u16(bytes + 2);
        split_nibbles(bytes + 8, 16, block->codes);
        add_fifth_bits(bytes + 4, block->codes);
        break;
    case KVS_TYPE_Q8_0:
        for (uint32_t e = 0; e < KVS_GROUP; e++) {
            block->codes[e] = bytes[2 + e] ^ 0x80;
        }
        break;
    case KVS_TYPE_Q2_K:
        split_q2_k(bytes, block);
        break;
    case KVS_TYPE_Q3_K:
        split_q3_k(bytes, block);
        break;
    case KVS_TYPE_Q4_K:
        split_q4_k(bytes, block);
        break;
    case KVS_TYPE_Q5_K:
        split_q5_k(bytes, block);
        break;
    case KVS_TYPE_Q6_K:
        split_q6_k(bytes, block);
        break;
    case KVS_TYPE_IQ4_XS:
        split_iq4_xs(bytes, block);
        break;
    case KVS_TYPE_MXFP4:
        block->sub_scales[0] = bytes[0];
        split_nibbles(bytes + 1, 16, block->codes);
        break;
    case KVS_TYPE_NVFP4:
        split_nvfp4(bytes, block);
        break;
    default:
        kvs_block_split_grid(type, bytes, block);
        break;
    }
}
