/* panel_layout.h: the table behind panel.h, and where the planes of a panel lie. For the packer and the kernels. */
#ifndef KVS_NATIVE_CPU_PANEL_LAYOUT_H
#define KVS_NATIVE_CPU_PANEL_LAYOUT_H

#include "backends/cpu/panel.h"

#include <stdbool.h>

/* Bytes of one group in each plane. */
#define KVS_WIDE_BYTES 512u
#define KVS_NIBBLE_BYTES 256u
#define KVS_CRUMB_BYTES 128u
#define KVS_BIT_BYTES 64u
#define KVS_SHARED_BIT_BYTES 8u  /* a nibble for each lane */
#define KVS_HALF_LANES_BYTES 32u /* a float16 for each lane */

typedef enum kvs_scale_kind {
    KVS_SCALE_GROUP,      /* f16/32 */
    KVS_SCALE_SUPER_U8,   /* f16/256 x u8/32 */
    KVS_SCALE_SUPER_S8,   /* f16/256 x s8/32 */
    KVS_SCALE_SUPER_S8X2, /* f16/256 x s8/16 */
    KVS_SCALE_SUPER_U4X2, /* f16/256 x low nibble/16 */
    KVS_SCALE_SUPER_ODD4, /* f16/256 x odd(nibble/32): two groups to a byte, the even one low */
    KVS_SCALE_SUPER_ODD4X2, /* f16/256 x odd(nibble/16): a group to a byte, its first half low */
    KVS_SCALE_E8M0,         /* 2^(u8/32 - 128) */
    KVS_SCALE_UE4M3X2       /* half an unsigned 4-bit-exponent float/16 */
} kvs_scale_kind;

/* What codes stand for where it is not a number: levels plus the offset, bytes without a sign as the dot product wants
 * them. */
typedef enum kvs_table_kind {
    KVS_TABLE_NONE,
    KVS_TABLE_IQ4,
    KVS_TABLE_FP4,
    KVS_TABLE_IQ1,    /* 8 * (place - 1) + 1, or - 1 where bit 2 is set */
    KVS_TABLE_IQ2,    /* bit 2 is the sign */
    KVS_TABLE_IQ3,    /* bit 3 is the sign */
    KVS_TABLE_IQ3_ODD /* the same */
} kvs_table_kind;

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
    uint8_t table;        /* kvs_table_kind */
    uint8_t scale;        /* kvs_scale_kind */
    uint8_t minimum;      /* kvs_minimum_kind */
    bool has_shared_bit;  /* instead of a plane above: bit 2 of codes, one bit for eight of them */
    uint8_t scale_shift;  /* scales are halved this often */
} kvs_panel_traits;

static const uint8_t kvs_levels[][16] = {
    [KVS_TABLE_IQ4] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    [KVS_TABLE_FP4] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4},
    [KVS_TABLE_IQ1] = {9, 17, 25, 16, 7, 15, 23, 16, 16, 16, 16, 16, 16, 16, 16, 16},
    [KVS_TABLE_IQ2] = {72, 89, 107, 64, 56, 39, 21, 64, 64, 64, 64, 64, 64, 64, 64, 64},
    [KVS_TABLE_IQ3] = {68, 76, 84, 92, 100, 108, 116, 126, 60, 52, 44, 36, 28, 20, 12, 2},
    [KVS_TABLE_IQ3_ODD] = {17, 19, 21, 23, 25, 27, 29, 31, 15, 13, 11, 9, 7, 5, 3, 1},
};

/* By type number, so that a kernel compiled for one type sees constants. */
static const kvs_panel_traits kvs_traits[] = {
    [KVS_TYPE_Q4_0] = {.is_quantized = true, .code_bits = 4, .offset_shift = 3},
    [KVS_TYPE_Q4_1] = {.is_quantized = true, .code_bits = 4, .minimum = KVS_MINIMUM_GROUP},
    [KVS_TYPE_Q5_0] = {.is_quantized = true, .code_bits = 4, .high_bits = 1, .offset_shift = 4},
    [KVS_TYPE_Q5_1] = {.is_quantized = true, .code_bits = 4, .high_bits = 1, .minimum = KVS_MINIMUM_GROUP},
    [KVS_TYPE_Q8_0] = {.is_quantized = true, .code_bits = 8, .offset_shift = 7},
    [KVS_TYPE_Q2_K] = {.is_quantized = true,
                       .code_bits = 2,
                       .scale = KVS_SCALE_SUPER_U4X2,
                       .minimum = KVS_MINIMUM_SUPER_U4X2},
    [KVS_TYPE_Q3_K] = {.is_quantized = true,
                       .code_bits = 2,
                       .high_bits = 1,
                       .offset_shift = 2,
                       .scale = KVS_SCALE_SUPER_S8X2},
    [KVS_TYPE_Q4_K] = {.is_quantized = true,
                       .code_bits = 4,
                       .scale = KVS_SCALE_SUPER_U8,
                       .minimum = KVS_MINIMUM_SUPER_U8},
    [KVS_TYPE_Q5_K] = {.is_quantized = true,
                       .code_bits = 4,
                       .high_bits = 1,
                       .scale = KVS_SCALE_SUPER_U8,
                       .minimum = KVS_MINIMUM_SUPER_U8},
    [KVS_TYPE_Q6_K] = {.is_quantized = true,
                       .code_bits = 4,
                       .high_bits = 2,
                       .offset_shift = 5,
                       .scale = KVS_SCALE_SUPER_S8X2},
    [KVS_TYPE_IQ1_S] = {.is_quantized = true,
                        .code_bits = 2,
                        .has_shared_bit = true,
                        .offset_shift = 4,
                        .table = KVS_TABLE_IQ1,
                        .scale = KVS_SCALE_SUPER_ODD4,
                        .scale_shift = 3},
    [KVS_TYPE_IQ1_M] = {.is_quantized = true,
                        .code_bits = 2,
                        .has_shared_bit = true,
                        .offset_shift = 4,
                        .table = KVS_TABLE_IQ1,
                        .scale = KVS_SCALE_SUPER_ODD4X2,
                        .scale_shift = 3},
    [KVS_TYPE_IQ2_XXS] = {.is_quantized = true,
                          .code_bits = 2,
                          .high_bits = 1,
                          .offset_shift = 6,
                          .table = KVS_TABLE_IQ2,
                          .scale = KVS_SCALE_SUPER_ODD4,
                          .scale_shift = 3},
    [KVS_TYPE_IQ2_XS] = {.is_quantized = true,
                         .code_bits = 2,
                         .high_bits = 1,
                         .offset_shift = 6,
                         .table = KVS_TABLE_IQ2,
                         .scale = KVS_SCALE_SUPER_ODD4X2,
                         .scale_shift = 3},
    [KVS_TYPE_IQ2_S] = {.is_quantized = true,
                        .code_bits = 2,
                        .high_bits = 1,
                        .offset_shift = 6,
                        .table = KVS_TABLE_IQ2,
                        .scale = KVS_SCALE_SUPER_ODD4X2,
                        .scale_shift = 3},
    [KVS_TYPE_IQ3_XXS] = {.is_quantized = true,
                          .code_bits = 4,
                          .offset_shift = 6,
                          .table = KVS_TABLE_IQ3,
                          .scale = KVS_SCALE_SUPER_ODD4,
                          .scale_shift = 2},
    [KVS_TYPE_IQ3_S] = {.is_quantized = true,
                        .code_bits = 4,
                        .offset_shift = 4,
                        .table = KVS_TABLE_IQ3_ODD,
                        .scale = KVS_SCALE_SUPER_ODD4},
    [KVS_TYPE_IQ4_NL] = {.is_quantized = true, .code_bits = 4, .offset_shift = 7, .table = KVS_TABLE_IQ4},
    [KVS_TYPE_IQ4_XS] = {.is_quantized = true,
                         .code_bits = 4,
                         .offset_shift = 7,
                         .table = KVS_TABLE_IQ4,
                         .scale = KVS_SCALE_SUPER_S8},
    [KVS_TYPE_MXFP4] = {.is_quantized = true,
                        .code_bits = 4,
                        .offset_shift = 4,
                        .table = KVS_TABLE_FP4,
                        .scale = KVS_SCALE_E8M0},
    [KVS_TYPE_NVFP4] = {.is_quantized = true,
                        .code_bits = 4,
                        .offset_shift = 4,
                        .table = KVS_TABLE_FP4,
                        .scale = KVS_SCALE_UE4M3X2},
};

/* Whether a half group has its own scale. */
static inline bool kvs_traits_is_halved(const kvs_panel_traits *traits)
{
    return traits->scale == KVS_SCALE_SUPER_S8X2 || traits->scale == KVS_SCALE_SUPER_U4X2 ||
           traits->scale == KVS_SCALE_SUPER_ODD4X2 || traits->scale == KVS_SCALE_UE4M3X2;
}

/* Whether groups share a float16 scale by eights. */
static inline bool kvs_traits_is_super(const kvs_panel_traits *traits)
{
    return traits->scale != KVS_SCALE_GROUP && traits->scale != KVS_SCALE_E8M0 && traits->scale != KVS_SCALE_UE4M3X2;
}

/* Whether scales are sub_scales alone. */
static inline bool kvs_traits_is_small_float(const kvs_panel_traits *traits)
{
    return traits->scale == KVS_SCALE_E8M0 || traits->scale == KVS_SCALE_UE4M3X2;
}

/* Whether scales of 4 bits share bytes: number s of a lane in nibble s. */
static inline bool kvs_traits_has_nibble_scales(const kvs_panel_traits *traits)
{
    return traits->scale == KVS_SCALE_SUPER_ODD4 || traits->scale == KVS_SCALE_SUPER_ODD4X2;
}

/* What codes count as zero. */
static inline int kvs_traits_offset(const kvs_panel_traits *traits)
{
    return traits->offset_shift != 0 ? 1 << traits->offset_shift : 0;
}

/* Largest byte that a code of the type becomes in a dot product. */
static inline int kvs_traits_largest(const kvs_panel_traits *traits)
{
    switch (traits->table) {
    case KVS_TABLE_NONE:
        return (1 << (traits->code_bits + traits->high_bits)) - 1;
    case KVS_TABLE_IQ4:
        return 241;
    case KVS_TABLE_FP4:
        return 28;
    case KVS_TABLE_IQ1:
        return 25;
    case KVS_TABLE_IQ2:
        return 107;
    case KVS_TABLE_IQ3:
        return 126;
    default:
        return 31;
    }
}

/* Byte offsets of the planes inside a panel; a plane that the type lacks has no bytes. */
typedef struct kvs_panel_layout {
    int type;
    uint64_t k;
    uint64_t n_groups; /* 0 for float types */
    uint64_t codes;    /* the lowest plane */
    uint64_t high;     /* the plane above, or the shared bits */
    uint64_t scales;
    uint64_t sub_scales;
    uint64_t minima;
    uint64_t sub_minima;
    uint64_t panel_bytes;
} kvs_panel_layout;

/* errors: EUNSUPPORTED type; EINVAL k is zero or no multiple of the block; EOVERFLOW */
kvs_status kvs_panel_layout_make(int type, uint64_t k, kvs_panel_layout *layout);

#endif
