/* weight_form.h: how quantized weights lie on the device. Plain C without includes, for the packer and for kernels.
 *
 * A panel is 16 output rows over the whole reduction axis, cut into units: 256 values of k for types with super-blocks, else 64
 * (the last unit of a row may be half a unit of zeros). A unit is one record, read by one warp; its planes, in this order:
 *
 *   codes    for each group of 32 values what a warp's integer matrix product wants of 16 rows: lane 4r + t has rows r and r + 8,
 *            k = 4t .. 4t+3 and 16 + 4t ..; that is four registers of four codes: (r, low k), (r + 8, low k), (r, high k),
 *            (r + 8, high k). A lane has 16 bytes at a time:
 *            8 bits: one group, the registers themselves, signed
 *            4 bits: two groups of two words: registers 0 and 2 in the low and the high nibbles of the bytes, 1 and 3 likewise;
 *                    types with a table: register 0 in nibbles 0..3, 2 in nibbles 4..7, 1 and 3 likewise
 *            2 bits: four groups of one word: register i in bits 2i of each byte
 *   high     2 bits: as codes of 2 bits. 1 bit: a word for two groups: register i of the even group in bit i of each byte, of
 *            the odd group in bit 4 + i. Shared: rows r and r + 8 one word each, [r][2]; bit 4g + i for codes 8i .. 8i+7 of group g
 *   scales   float16 [r][2][n]: n = 2 groups, or 1 for the super-block
 *   minima   likewise
 *   subs     8-bit numbers [r][2][n]: n = 8 or 16 of a super-block, 2 or 4 of a unit of 64 values
 *   subminima  [r][2][8]
 *
 * Version: KVS_WEIGHT_FORM. Nothing on disk has this form.
 */
#ifndef KVS_NATIVE_KERNELS_WEIGHT_FORM_H
#define KVS_NATIVE_KERNELS_WEIGHT_FORM_H

#ifdef __CUDACC__
#define KVS_FORM __device__ constexpr inline
#elif defined(__cplusplus)
#define KVS_FORM constexpr inline
#else
#define KVS_FORM static inline
#endif

#define KVS_WEIGHT_FORM 1
#define KVS_FORM_ROWS 16
#define KVS_FORM_GROUP_VALUES 32

/* Types by number, as kvs_type in kvstream/base.h. */
#define KVS_W_F32 0
#define KVS_W_F16 1
#define KVS_W_Q4_0 2
#define KVS_W_Q4_1 3
#define KVS_W_Q5_0 6
#define KVS_W_Q5_1 7
#define KVS_W_Q8_0 8
#define KVS_W_Q2_K 10
#define KVS_W_Q3_K 11
#define KVS_W_Q4_K 12
#define KVS_W_Q5_K 13
#define KVS_W_Q6_K 14
#define KVS_W_IQ2_XXS 16
#define KVS_W_IQ2_XS 17
#define KVS_W_IQ3_XXS 18
#define KVS_W_IQ1_S 19
#define KVS_W_IQ4_NL 20
#define KVS_W_IQ3_S 21
#define KVS_W_IQ2_S 22
#define KVS_W_IQ4_XS 23
#define KVS_W_IQ1_M 29
#define KVS_W_BF16 30
#define KVS_W_MXFP4 39
#define KVS_W_NVFP4 40

enum kvs_form_scale {
    KVS_FORM_HALF,    /* f16 to a group */
    KVS_FORM_SUB,     /* f16 to a super-block, times a signed number to a group */
    KVS_FORM_SUB_U,   /* the same, without sign */
    KVS_FORM_SUB2,    /* times a signed number to 16 values */
    KVS_FORM_NIBBLE2, /* times the low nibble of a number to 16 values */
    KVS_FORM_E8M0,    /* 2^(number - 128) to a group */
    KVS_FORM_UE4M3    /* half a small float to 16 values */
};

enum kvs_form_minimum {
    KVS_FORM_NO_MINIMUM,
    KVS_FORM_HALF_MINIMUM,   /* +f16 to a group */
    KVS_FORM_SUB_MINIMUM,    /* -f16 to a super-block times a number to a group */
    KVS_FORM_NIBBLE2_MINIMUM /* -f16 to a super-block times the high nibble of a number to 16 values */
};

enum kvs_form_table {
    KVS_FORM_NO_TABLE,
    KVS_FORM_IQ4,
    KVS_FORM_FP4,
    KVS_FORM_IQ1,
    KVS_FORM_IQ2,
    KVS_FORM_IQ3,
    KVS_FORM_IQ3_ODD
};

KVS_FORM int kvs_form_is_float(int type)
{
    return type == KVS_W_F32 || type == KVS_W_F16 || type == KVS_W_BF16;
}

KVS_FORM int kvs_form_table(int type)
{
    return type == KVS_W_IQ4_NL || type == KVS_W_IQ4_XS                            ? KVS_FORM_IQ4
           : type == KVS_W_MXFP4 || type == KVS_W_NVFP4                            ? KVS_FORM_FP4
           : type == KVS_W_IQ1_S || type == KVS_W_IQ1_M                            ? KVS_FORM_IQ1
           : type == KVS_W_IQ2_XXS || type == KVS_W_IQ2_XS || type == KVS_W_IQ2_S  ? KVS_FORM_IQ2
           : type == KVS_W_IQ3_XXS                                                 ? KVS_FORM_IQ3
           : type == KVS_W_IQ3_S                                                   ? KVS_FORM_IQ3_ODD
                                                                                   : KVS_FORM_NO_TABLE;
}

KVS_FORM int kvs_form_code_bits(int type)
{
    return type == KVS_W_Q8_0 ? 8
           : type == KVS_W_Q2_K || type == KVS_W_Q3_K || kvs_form_table(type) == KVS_FORM_IQ1 ||
                   kvs_form_table(type) == KVS_FORM_IQ2
               ? 2
               : 4;
}

KVS_FORM int kvs_form_has_shared_bit(int type)
{
    return kvs_form_table(type) == KVS_FORM_IQ1;
}

KVS_FORM int kvs_form_high_bits(int type)
{
    return type == KVS_W_Q6_K ? 2
           : type == KVS_W_Q5_0 || type == KVS_W_Q5_1 || type == KVS_W_Q3_K || type == KVS_W_Q5_K ||
                   kvs_form_table(type) == KVS_FORM_IQ2
               ? 1
               : 0;
}

/* What codes count as zero. */
KVS_FORM int kvs_form_offset(int type)
{
    return type == KVS_W_Q4_0 ? 8 : type == KVS_W_Q5_0 ? 16 : type == KVS_W_Q3_K ? 4 : type == KVS_W_Q6_K ? 32 : 0;
}

KVS_FORM int kvs_form_scale(int type)
{
    return type == KVS_W_Q4_K || type == KVS_W_Q5_K ? KVS_FORM_SUB_U
           : type == KVS_W_IQ4_XS || type == KVS_W_IQ1_S || type == KVS_W_IQ2_XXS || type == KVS_W_IQ3_XXS ||
                   type == KVS_W_IQ3_S
               ? KVS_FORM_SUB
           : type == KVS_W_Q3_K || type == KVS_W_Q6_K || type == KVS_W_IQ1_M || type == KVS_W_IQ2_XS || type == KVS_W_IQ2_S
               ? KVS_FORM_SUB2
           : type == KVS_W_Q2_K  ? KVS_FORM_NIBBLE2
           : type == KVS_W_MXFP4 ? KVS_FORM_E8M0
           : type == KVS_W_NVFP4 ? KVS_FORM_UE4M3
                                 : KVS_FORM_HALF;
}

/* Numbers of subs are 2n + 1 for files' n, and the scale is halved this often. */
KVS_FORM int kvs_form_has_odd_subs(int type)
{
    return kvs_form_table(type) >= KVS_FORM_IQ1;
}

KVS_FORM int kvs_form_scale_shift(int type)
{
    return kvs_form_table(type) == KVS_FORM_IQ1 || kvs_form_table(type) == KVS_FORM_IQ2 ? 3
           : kvs_form_table(type) == KVS_FORM_IQ3                                       ? 2
                                                                                        : 0;
}

KVS_FORM int kvs_form_minimum(int type)
{
    return type == KVS_W_Q4_1 || type == KVS_W_Q5_1   ? KVS_FORM_HALF_MINIMUM
           : type == KVS_W_Q4_K || type == KVS_W_Q5_K ? KVS_FORM_SUB_MINIMUM
           : type == KVS_W_Q2_K                       ? KVS_FORM_NIBBLE2_MINIMUM
                                                      : KVS_FORM_NO_MINIMUM;
}

/* Whether 16 values have a scale of their own. */
KVS_FORM int kvs_form_is_halved(int type)
{
    return kvs_form_scale(type) == KVS_FORM_SUB2 || kvs_form_scale(type) == KVS_FORM_NIBBLE2 ||
           kvs_form_scale(type) == KVS_FORM_UE4M3;
}

/* Whether groups share a float16 by eights. */
KVS_FORM int kvs_form_is_super(int type)
{
    return kvs_form_scale(type) >= KVS_FORM_SUB && kvs_form_scale(type) <= KVS_FORM_NIBBLE2;
}

KVS_FORM unsigned int kvs_form_unit_groups(int type)
{
    return kvs_form_is_super(type) ? 8 : 2;
}

/* Halves to a row in the plane of scales, and in that of minima. */
KVS_FORM unsigned int kvs_form_halves(int type)
{
    return kvs_form_is_super(type) ? 1 : kvs_form_scale(type) == KVS_FORM_HALF ? 2 : 0;
}

/* Numbers to a row in the plane of subs. */
KVS_FORM unsigned int kvs_form_subs(int type)
{
    return kvs_form_scale(type) == KVS_FORM_HALF ? 0 : kvs_form_unit_groups(type) * (kvs_form_is_halved(type) ? 2 : 1);
}

/* Bytes of the planes of a unit before this one: where it begins. */
KVS_FORM unsigned int kvs_form_high_at(int type)
{
    return (unsigned int)kvs_form_code_bits(type) * 64 * kvs_form_unit_groups(type);
}

KVS_FORM unsigned int kvs_form_scales_at(int type)
{
    return kvs_form_high_at(type) + (kvs_form_has_shared_bit(type) ? 8u : (unsigned int)kvs_form_high_bits(type) * 64) *
                                        kvs_form_unit_groups(type);
}

KVS_FORM unsigned int kvs_form_minima_at(int type)
{
    return kvs_form_scales_at(type) + 2 * KVS_FORM_ROWS * kvs_form_halves(type);
}

KVS_FORM unsigned int kvs_form_subs_at(int type)
{
    return kvs_form_minima_at(type) +
           (kvs_form_minimum(type) != KVS_FORM_NO_MINIMUM ? 2 * KVS_FORM_ROWS * kvs_form_halves(type) : 0);
}

KVS_FORM unsigned int kvs_form_subminima_at(int type)
{
    return kvs_form_subs_at(type) + KVS_FORM_ROWS * kvs_form_subs(type);
}

/* A multiple of 32. */
KVS_FORM unsigned int kvs_form_unit_bytes(int type)
{
    return kvs_form_subminima_at(type) + (kvs_form_minimum(type) == KVS_FORM_SUB_MINIMUM ? KVS_FORM_ROWS * 8 : 0);
}

#endif
