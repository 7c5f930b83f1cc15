/* blocks.c: blocks of numbers, taken apart. Files are little endian, and so are the machines this is built for. */
#include "base/blocks.h"

#include "kvstream/base.h"

#include <string.h>

static uint16_t load_u16(const uint8_t *bytes)
{
    return (uint16_t)(bytes[0] | bytes[1] << 8);
}

/* Sixteen codes as one value: what is done to each is done at once. Whoever places codes reads as many, so that what was just stored
 * is found. */
typedef uint64_t sixteen __attribute__((vector_size(16)));

#define EACH UINT64_C(0x0101010101010101)

static inline sixteen load_sixteen(const uint8_t *from)
{
    sixteen codes;
    memcpy(&codes, from, sizeof codes);
    return codes;
}

static inline void store_sixteen(uint8_t *to, sixteen codes)
{
    memcpy(to, &codes, sizeof codes);
}

/* 2n codes from n bytes, a multiple of 16: low nibbles, then high ones. */
static inline void split_nibbles(const uint8_t *bytes, uint32_t n, uint8_t *codes)
{
    for (uint32_t i = 0; i < n; i += 16) {
        const sixteen pairs = load_sixteen(bytes + i);
        store_sixteen(codes + i, pairs & 15 * EACH);
        store_sixteen(codes + n + i, pairs >> 4 & 15 * EACH);
    }
}

/* Sixteen codes of eight bytes. */
static inline void split_eight_nibbles(const uint8_t *bytes, uint8_t *codes)
{
    uint64_t pairs;
    memcpy(&pairs, bytes, sizeof pairs);
    store_sixteen(codes, (sixteen){pairs & 15 * EACH, pairs >> 4 & 15 * EACH});
}

/* Bit e of a little-endian word becomes bit 4 of code e. */
static inline void add_fifth_bits(const uint8_t *bytes, uint8_t *codes)
{
    for (uint32_t i = 0; i < KVS_GROUP / 16; i++) {
        const sixteen bits = {kvs_spread_bits(bytes[2 * i]), kvs_spread_bits(bytes[2 * i + 1])};
        store_sixteen(codes + 16 * i, load_sixteen(codes + 16 * i) | bits << 4);
    }
}

static inline void flip_signs(const uint8_t *bytes, uint8_t *codes)
{
    for (uint32_t i = 0; i < KVS_GROUP; i += 16) {
        store_sixteen(codes + i, load_sixteen(bytes + i) ^ 128 * EACH);
    }
}

/* Half `i` of run `run` of the 256 two-bit codes of 64 bytes: halves of 32 bytes, each giving four runs of 32. */
static inline sixteen some_crumbs(const uint8_t *bytes, uint32_t run, uint32_t i)
{
    return load_sixteen(bytes + run / 4 * 32 + 16 * i) >> (2 * (run % 4)) & 3 * EACH;
}

static inline void split_crumbs(const uint8_t *bytes, uint8_t *codes)
{
    for (uint32_t run = 0; run < 8; run++) {
        for (uint32_t i = 0; i < 2; i++) {
            store_sixteen(codes + 32 * run + 16 * i, some_crumbs(bytes, run, i));
        }
    }
}

static inline void add_crumbs(const uint8_t *bytes, uint32_t shift, uint8_t *codes)
{
    for (uint32_t run = 0; run < 8; run++) {
        for (uint32_t i = 0; i < 2; i++) {
            uint8_t *to = codes + 32 * run + 16 * i;
            store_sixteen(to, load_sixteen(to) | some_crumbs(bytes, run, i) << shift);
        }
    }
}

/* One bit more of 256 codes from 32 bytes: run after run of 32 codes takes the next bit of all of them. */
static inline void add_high_bits(const uint8_t *bytes, uint32_t shift, uint8_t *codes)
{
    for (uint32_t run = 0; run < 8; run++) {
        for (uint32_t i = 0; i < 2; i++) {
            uint8_t *to = codes + 32 * run + 16 * i;
            store_sixteen(to, load_sixteen(to) | (load_sixteen(bytes + 16 * i) >> run & EACH) << shift);
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
    split_crumbs(bytes + 16, block->codes);
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
    split_crumbs(bytes + 32, block->codes);
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
    add_crumbs(bytes + 128, 4, block->codes);
}

/* Eight 6-bit numbers less 32, of which none takes from its neighbour. */
static inline uint64_t less_32(uint64_t numbers)
{
    return ((numbers | 128 * EACH) - 32 * EACH) ^ 128 * EACH;
}

static void split_iq4_xs(const uint8_t *bytes, kvs_block *block)
{
    const uint32_t low = load_u16(bytes + 4) | (uint32_t)load_u16(bytes + 6) << 16;
    const uint64_t numbers = kvs_spread_nibbles(low) | kvs_spread_crumbs(load_u16(bytes + 2)) << 4;
    const uint64_t scales = less_32(numbers);
    block->scale = load_u16(bytes);
    memcpy(block->sub_scales, &scales, sizeof scales);
    for (uint32_t b = 0; b < 8; b++) {
        split_nibbles(bytes + 8 + 16 * b, 16, block->codes + 32 * b);
    }
}

/* Four scales of 16 values. Of the two codes for "no number" the one without the top bit is a zero; the other counts as
 * 480, and the top bit is otherwise ignored. */
static void split_nvfp4(const uint8_t *bytes, kvs_block *block)
{
    for (uint32_t s = 0; s < 4; s++) {
        block->sub_scales[s] = bytes[s] == 0x7f ? 0 : bytes[s] & 0x7f;
        split_eight_nibbles(bytes + 4 + 8 * s, block->codes + 16 * s);
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
        flip_signs(bytes + 2, block->codes);
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
