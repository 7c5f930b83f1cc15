/* panel_layout.h: the table behind panel.h, and where the planes of a panel lie. For the packer and the kernels. */
#ifndef KVS_NATIVE_CPU_PANEL_LAYOUT_H
#define KVS_NATIVE_CPU_PANEL_LAYOUT_H

#include "backends/cpu/panel.h"

#include <stdbool.h>

#define KVS_SUPER_GROUPS 8u /* groups to a super-block */

/* Bytes of one group in each plane. */
#define KVS_WIDE_BYTES 512u
#define KVS_NIBBLE_BYTES 256u
#define KVS_CRUMB_BYTES 128u
#define KVS_BIT_BYTES 64u
#define KVS_HALF_LANES_BYTES 32u /* a float16 for each lane */

typedef enum kvs_scale_kind {
    KVS_SCALE_GROUP,      /* f16/32 */
    KVS_SCALE_SUPER_U8,   /* f16/256 x u8/32 */
    KVS_SCALE_SUPER_S8,   /* f16/256 x s8/32 */
    KVS_SCALE_SUPER_S8X2, /* f16/256 x s8/16 */
    KVS_SCALE_SUPER_U4X2  /* f16/256 x low nibble/16 */
} kvs_scale_kind;

typedef enum kvs_minimum_kind {
    KVS_MINIMUM_NONE,
    KVS_MINIMUM_GROUP,      /* +f16/32 */
    KVS_MINIMUM_SUPER_U8,   /* -f16/256 x u8/32 */
    KVS_MINIMUM_SUPER_U4X2  /* -f16/256 x high nibble/16, in the bytes of the scales */
} kvs_minimum_kind;

typedef struct kvs_panel_traits {
    bool is_quantized;
    uint8_t code_bits;    /* of the lowest plane: 8, 4 or 2 */
    uint8_t high_bits;    /* of the plane above it: 2, 1 or 0 */
    uint8_t offset_shift; /* the offset of codes is 1 << offset_shift, 0 if this is 0 */
    bool is_table;        /* codes name levels of kvs_iq4_levels; the offset is that of the table */
    uint8_t scale;        /* kvs_scale_kind */
    uint8_t minimum;      /* kvs_minimum_kind */
} kvs_panel_traits;

/* The sixteen levels of IQ4_NL and IQ4_XS plus 128: bytes without a sign, as the dot product wants them. */
static const uint8_t kvs_iq4_levels[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                           129, 141, 153, 166, 181, 197, 217, 241};

/* By type number, so that a kernel compiled for one type sees constants. */
static const kvs_panel_traits kvs_traits[] = {
    [KVS_TYPE_Q4_0] = {true, 4, 0, 3, false, KVS_SCALE_GROUP, KVS_MINIMUM_NONE},
    [KVS_TYPE_Q4_1] = {true, 4, 0, 0, false, KVS_SCALE_GROUP, KVS_MINIMUM_GROUP},
    [KVS_TYPE_Q5_0] = {true, 4, 1, 4, false, KVS_SCALE_GROUP, KVS_MINIMUM_NONE},
    [KVS_TYPE_Q5_1] = {true, 4, 1, 0, false, KVS_SCALE_GROUP, KVS_MINIMUM_GROUP},
    [KVS_TYPE_Q8_0] = {true, 8, 0, 7, false, KVS_SCALE_GROUP, KVS_MINIMUM_NONE},
    [KVS_TYPE_Q2_K] = {true, 2, 0, 0, false, KVS_SCALE_SUPER_U4X2, KVS_MINIMUM_SUPER_U4X2},
    [KVS_TYPE_Q3_K] = {true, 2, 1, 2, false, KVS_SCALE_SUPER_S8X2, KVS_MINIMUM_NONE},
    [KVS_TYPE_Q4_K] = {true, 4, 0, 0, false, KVS_SCALE_SUPER_U8, KVS_MINIMUM_SUPER_U8},
    [KVS_TYPE_Q5_K] = {true, 4, 1, 0, false, KVS_SCALE_SUPER_U8, KVS_MINIMUM_SUPER_U8},
    [KVS_TYPE_Q6_K] = {true, 4, 2, 5, false, KVS_SCALE_SUPER_S8X2, KVS_MINIMUM_NONE},
    [KVS_TYPE_IQ4_NL] = {true, 4, 0, 7, true, KVS_SCALE_GROUP, KVS_MINIMUM_NONE},
    [KVS_TYPE_IQ4_XS] = {true, 4, 0, 7, true, KVS_SCALE_SUPER_S8, KVS_MINIMUM_NONE},
    [KVS_TYPE_BF16] = {false, 0, 0, 0, false, KVS_SCALE_GROUP, KVS_MINIMUM_NONE},
};

/* Whether a half group has its own scale. */
static inline bool kvs_traits_is_halved(const kvs_panel_traits *traits)
{
    return traits->scale == KVS_SCALE_SUPER_S8X2 || traits->scale == KVS_SCALE_SUPER_U4X2;
}

/* Byte offsets of the planes inside a panel; a plane that the type lacks has no bytes. */
typedef struct kvs_panel_layout {
    int type;
    uint64_t k;
    uint64_t n_groups; /* 0 for float types */
    uint64_t codes;    /* the lowest plane */
    uint64_t high;     /* the plane above */
    uint64_t scales;
    uint64_t sub_scales;
    uint64_t minima;
    uint64_t sub_minima;
    uint64_t panel_bytes;
} kvs_panel_layout;

/* errors: EUNSUPPORTED type; EINVAL k is zero or no multiple of the block; EOVERFLOW */
kvs_status kvs_panel_layout_make(int type, uint64_t k, kvs_panel_layout *layout);

/* One block of a file, taken apart. For types in blocks of 32 only the first scale and minimum and 32 codes count. */
typedef struct kvs_block {
    uint8_t codes[256]; /* as panels hold them: without sign, IQ4 as indices */
    uint16_t scale;     /* f16 */
    uint16_t minimum;   /* f16 */
    uint8_t sub_scales[16];
    uint8_t sub_minima[16];
} kvs_block;

/* `type` is quantized. */
void kvs_block_split(int type, const uint8_t *bytes, kvs_block *block);

#endif
