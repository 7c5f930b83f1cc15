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

/* `type` is quantized. */
void kvs_block_split(int type, const uint8_t *bytes, kvs_block *block);

/* The same for the types whose codes name entries of a codebook (block_grid.c). thread: any */
void kvs_block_split_grid(int type, const uint8_t *bytes, kvs_block *block);

#endif
