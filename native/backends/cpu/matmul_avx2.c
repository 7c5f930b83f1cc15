/* matmul_avx2.c: the twin of matmul_reference.c for AVX2: half a panel to a register width.
 *
 * Kernels are written once and compiled for each type and number of rows; what depends on the type is decided at compile
 * time. Pairs of byte products are summed in 16 bits without saturating: codes of up to 6 bits are added up as long as
 * their largest sum fits, codes of 8 bits are multiplied by magnitude and the sign goes to the activation.
 */
#include "backends/cpu/mathf.h"
#include "backends/cpu/matmul_kernels.h"

#include <immintrin.h>

#define LANES KVS_PANEL_ROWS
#define WIDTH 8u       /* lanes of a register: half a panel */
#define HALF_BYTES 32u /* of a vector of codes */
#define RUN_ROWS 4u    /* rows that share an unpacked group: 16 registers hold no more */
#define INLINE static inline __attribute__((always_inline))

/* The unpacked codes of one group and eight lanes, by quad; where they are wide, their values. */
typedef struct group_codes {
    __m256i quad[8];
} group_codes;

INLINE __m256i load_vector(const uint8_t *bytes)
{
    return _mm256_load_si256((const void *)bytes);
}

typedef uint16_t words __attribute__((vector_size(32)));

/* `bits` shifted by a signed number of places within 16-bit words. */
INLINE __m256i shift_left(__m256i bits, int places)
{
    return (__m256i)(places >= 0 ? (words)bits << places : (words)bits >> -places);
}

/* From a code to its value, less 128. */
INLINE __m256i flip_signs(__m256i codes)
{
    return _mm256_xor_si256(codes, _mm256_set1_epi8((char)0x80));
}

/* Quads whose 16-bit sums of pairs fit together: 2 * 127 * largest code each, in 32767. Not even one fits if it is wide. */
INLINE int quads_per_sum(const kvs_panel_traits traits)
{
    return 32767 / (2 * 127 * kvs_traits_largest(&traits));
}

INLINE bool is_wide(const kvs_panel_traits traits)
{
    return quads_per_sum(traits) == 0;
}

INLINE void unpack_low(const kvs_panel_traits traits, const uint8_t *low, uint64_t g, group_codes *codes)
{
    if (traits.code_bits == 8) {
        for (int q = 0; q < 8; q++) {
            codes->quad[q] = flip_signs(load_vector(low + g * KVS_WIDE_BYTES + q * 64));
        }
    } else if (traits.code_bits == 4) {
        const __m256i mask = _mm256_set1_epi8(15);
        for (int h = 0; h < 4; h++) {
            __m256i both = load_vector(low + g * KVS_NIBBLE_BYTES + h * 64);
            codes->quad[h] = _mm256_and_si256(both, mask);
            codes->quad[h + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
        }
    } else {
        const __m256i mask = _mm256_set1_epi8(3);
        for (int t = 0; t < 2; t++) {
            __m256i four = load_vector(low + g * KVS_CRUMB_BYTES + t * 64);
            codes->quad[4 * t] = _mm256_and_si256(four, mask);
            codes->quad[4 * t + 1] = _mm256_and_si256(_mm256_srli_epi16(four, 2), mask);
            codes->quad[4 * t + 2] = _mm256_and_si256(_mm256_srli_epi16(four, 4), mask);
            codes->quad[4 * t + 3] = _mm256_and_si256(_mm256_srli_epi16(four, 6), mask);
        }
    }
}

INLINE void unpack_high(const kvs_panel_traits traits, const uint8_t *high, uint64_t g, group_codes *codes)
{
    const int at = traits.code_bits;
    if (traits.high_bits == 2) {
        const __m256i mask = _mm256_set1_epi8((char)(3 << at));
        for (int q = 0; q < 8; q++) {
            __m256i four = load_vector(high + g * KVS_CRUMB_BYTES + q / 4 * 64);
            __m256i moved = shift_left(four, at - q % 4 * 2);
            codes->quad[q] = _mm256_or_si256(codes->quad[q], _mm256_and_si256(moved, mask));
        }
    } else if (traits.high_bits == 1) {
        const __m256i mask = _mm256_set1_epi8((char)(1 << at));
        const __m256i eight = load_vector(high + g * KVS_BIT_BYTES);
        for (int q = 0; q < 8; q++) {
            __m256i moved = shift_left(eight, at - q);
            codes->quad[q] = _mm256_or_si256(codes->quad[q], _mm256_and_si256(moved, mask));
        }
    }
}

/* Nibble `index` of each lane of a side, in a plane that keeps two to a byte; the other bits are arbitrary. */
INLINE __m128i load_nibbles(const uint8_t *plane, uint64_t index, uint32_t side)
{
    const __m128i both = _mm_loadl_epi64((const void *)(plane + index / 2 * LANES + side * WIDTH));
    return _mm_srl_epi16(both, _mm_cvtsi32_si128((int)(index % 2 * 4)));
}

/* A bit of each lane for each eight codes: as if their plane had it for every code. */
INLINE void unpack_shared(const kvs_panel_traits traits, const uint8_t *shared, uint64_t g, uint32_t side,
                          group_codes *codes)
{
    const __m256i mask = _mm256_set1_epi8((char)(1 << traits.code_bits));
    const __m256i lanes = _mm256_cvtepu8_epi32(load_nibbles(shared, g, side));
    const __m256i bits = _mm256_shuffle_epi8(
        lanes, _mm256_broadcastsi128_si256(_mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0)));
    for (int i = 0; i < 4; i++) {
        const __m256i bit = _mm256_and_si256(shift_left(bits, traits.code_bits - i), mask);
        codes->quad[2 * i] = _mm256_or_si256(codes->quad[2 * i], bit);
        codes->quad[2 * i + 1] = _mm256_or_si256(codes->quad[2 * i + 1], bit);
    }
}

/* Of the lanes of `side`: 0 is the first half of the panel. */
INLINE void unpack_codes(const kvs_panel_traits traits, const kvs_panel_layout *layout, const uint8_t *panel, uint64_t g,
                         uint32_t side, group_codes *codes)
{
    const uint8_t *half_panel = panel + side * HALF_BYTES;
    unpack_low(traits, half_panel + layout->codes, g, codes);
    if (traits.has_shared_bit) {
        unpack_shared(traits, panel + layout->high, g, side, codes);
    } else {
        unpack_high(traits, half_panel + layout->high, g, codes);
    }
    if (traits.table != KVS_TABLE_NONE) {
        const __m128i table = _mm_loadu_si128((const void *)kvs_levels[traits.table]);
        __m256i levels = _mm256_broadcastsi128_si256(table);
        levels = is_wide(traits) ? flip_signs(levels) : levels;
        for (int q = 0; q < 8; q++) {
            codes->quad[q] = _mm256_shuffle_epi8(levels, codes->quad[q]);
        }
    }
}

/* Places of the lanes of `side` (0 or 1) are those of the panel plus side * HALF_BYTES in planes of codes, and so on. */
INLINE __m256 load_halves(const uint8_t *plane, uint64_t index, uint32_t side)
{
    const uint8_t *halves = plane + index * KVS_HALF_LANES_BYTES + side * WIDTH * 2;
    return _mm256_cvtph_ps(_mm_load_si128((const void *)halves));
}

INLINE __m128i load_bytes(const uint8_t *plane, uint64_t index, uint32_t side)
{
    return _mm_loadl_epi64((const void *)(plane + index * LANES + side * WIDTH));
}

INLINE __m256 float_of_u8(__m128i bytes)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
}

INLINE __m256 float_of_s8(__m128i bytes)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

/* 2^(code - 128); the two smallest are subnormal. */
INLINE __m256 float_of_e8m0(__m128i bytes)
{
    const __m256i code = _mm256_cvtepu8_epi32(bytes);
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(code, _mm256_set1_epi32(1)), 23);
    const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), code);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), code);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, is_small));
}

/* Half of a float of 4 exponent and 3 mantissa bits, by way of float16. */
INLINE __m256 float_of_ue4m3(__m128i bytes)
{
    const __m128i halves = _mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7);
    return _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(128.0f));
}

/* (2 * nibble + 1) / 2^scale_shift */
INLINE __m256 float_of_odd(const kvs_panel_traits traits, __m128i nibbles)
{
    const __m128i low = _mm_and_si128(nibbles, _mm_set1_epi8(15));
    const __m256 odd = float_of_u8(_mm_add_epi8(_mm_add_epi8(low, low), _mm_set1_epi8(1)));
    return traits.scale_shift != 0 ? _mm256_mul_ps(odd, _mm256_set1_ps(1.0f / (float)(1 << traits.scale_shift))) : odd;
}

/* What eight groups of the lanes of a side share. */
typedef struct super_scales {
    __m256 scale;
    __m256 negative_minimum;
} super_scales;

INLINE bool has_super_minimum(const kvs_panel_traits traits)
{
    return traits.minimum == KVS_MINIMUM_SUPER_U8 || traits.minimum == KVS_MINIMUM_SUPER_U4X2;
}

INLINE void load_super(const kvs_panel_traits traits, const kvs_panel_layout *layout, const uint8_t *panel, uint64_t s,
                       uint32_t side, super_scales *super)
{
    super->scale = load_halves(panel + layout->scales, s, side);
    if (has_super_minimum(traits)) {
        const __m256 minimum = load_halves(panel + layout->minima, s, side);
        super->negative_minimum = _mm256_xor_ps(minimum, _mm256_set1_ps(-0.0f));
    }
}

/* Scale of one half of a group; `half` is 0 for types with one scale to a group. */
INLINE __m256 load_scale(const kvs_panel_traits traits, const kvs_panel_layout *layout, const uint8_t *panel, uint64_t g,
                         uint32_t half, uint32_t side, const super_scales *super)
{
    const uint8_t *sub = panel + layout->sub_scales;
    if (traits.scale == KVS_SCALE_GROUP) {
        return load_halves(panel + layout->scales, g, side);
    }
    if (traits.scale == KVS_SCALE_E8M0) {
        return float_of_e8m0(load_bytes(sub, g, side));
    }
    if (traits.scale == KVS_SCALE_UE4M3X2) {
        return float_of_ue4m3(load_bytes(sub, 2 * g + half, side));
    }
    const __m256 scale = super->scale;
    if (traits.scale == KVS_SCALE_SUPER_ODD4) {
        return _mm256_mul_ps(scale, float_of_odd(traits, load_nibbles(sub, g, side)));
    }
    if (traits.scale == KVS_SCALE_SUPER_ODD4X2) {
        const __m128i both = load_bytes(sub, g, side);
        return _mm256_mul_ps(scale, float_of_odd(traits, half == 0 ? both : _mm_srli_epi16(both, 4)));
    }
    if (traits.scale == KVS_SCALE_SUPER_U8) {
        return _mm256_mul_ps(scale, float_of_u8(load_bytes(sub, g, side)));
    }
    if (traits.scale == KVS_SCALE_SUPER_S8) {
        return _mm256_mul_ps(scale, float_of_s8(load_bytes(sub, g, side)));
    }
    const __m128i bytes = load_bytes(sub, 2 * g + half, side);
    if (traits.scale == KVS_SCALE_SUPER_S8X2) {
        return _mm256_mul_ps(scale, float_of_s8(bytes));
    }
    return _mm256_mul_ps(scale, float_of_u8(_mm_and_si128(bytes, _mm_set1_epi8(15))));
}

INLINE __m256 load_minimum(const kvs_panel_traits traits, const kvs_panel_layout *layout, const uint8_t *panel,
                           uint64_t g, uint32_t half, uint32_t side, const super_scales *super)
{
    if (traits.minimum == KVS_MINIMUM_GROUP) {
        return load_halves(panel + layout->minima, g, side);
    }
    __m128i bytes;
    if (traits.minimum == KVS_MINIMUM_SUPER_U8) {
        bytes = load_bytes(panel + layout->sub_minima, g, side);
    } else {
        bytes = load_bytes(panel + layout->sub_scales, 2 * g + half, side);
        bytes = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
    }
    /* The product is exact, so the sign may go to either factor. */
    return _mm256_mul_ps(super->negative_minimum, float_of_u8(bytes));
}

INLINE __m256i broadcast_quad(const int8_t *x, int q)
{
    int32_t four;
    __builtin_memcpy(&four, x + 4 * q, 4);
    return _mm256_set1_epi32(four);
}

INLINE __m256i add_small_quads(const kvs_panel_traits traits, const group_codes *codes, const int8_t *x, int first,
                               int end, __m256i dot)
{
    const int n_together = quads_per_sum(traits);
#pragma GCC unroll 8
    for (int q = first; q < end;) {
        __m256i pairs = _mm256_maddubs_epi16(codes->quad[q], broadcast_quad(x, q));
        q++;
        for (int i = 1; i < n_together && q < end; i++, q++) {
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes->quad[q], broadcast_quad(x, q)));
        }
        dot = _mm256_add_epi32(dot, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return dot;
}

/* Unpacked as values, at most 128 in magnitude, and 2 * 128 * 127 fits in 16 bits. */
INLINE __m256i add_wide_quads(const group_codes *codes, const int8_t *x, __m256i dot)
{
    for (int q = 0; q < 8; q++) {
        const __m256i signed_x = _mm256_sign_epi8(broadcast_quad(x, q), codes->quad[q]);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes->quad[q]), signed_x);
        dot = _mm256_add_epi32(dot, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return dot;
}

/* What the offset of the codes takes from every lane; wide codes lose theirs before the products. */
INLINE __m256i start_dot(const kvs_panel_traits traits, int32_t negative_count)
{
    return traits.offset_shift != 0 && !is_wide(traits)
               ? _mm256_slli_epi32(_mm256_set1_epi32(negative_count), traits.offset_shift)
               : _mm256_setzero_si256();
}

INLINE __m256 add_product(__m256 sum, __m256 scale, float dx, __m256i dot)
{
    return _mm256_fmadd_ps(_mm256_mul_ps(scale, _mm256_set1_ps(dx)), _mm256_cvtepi32_ps(dot), sum);
}

/* Scales and minima of a group, of both halves where the type has them. */
typedef struct group_scales {
    __m256 scale[2];
    __m256 minimum[2];
} group_scales;

INLINE void unpack_scales(const kvs_panel_traits traits, const kvs_panel_layout *layout, const uint8_t *panel, uint64_t g,
                          uint32_t side, const super_scales *super, group_scales *scales)
{
    const uint32_t n = kvs_traits_is_halved(&traits) ? 2 : 1;
    for (uint32_t half = 0; half < n; half++) {
        scales->scale[half] = load_scale(traits, layout, panel, g, half, side, super);
        if (traits.minimum != KVS_MINIMUM_NONE) {
            scales->minimum[half] = load_minimum(traits, layout, panel, g, half, side, super);
        }
    }
}

INLINE __m256 add_group(const kvs_panel_traits traits, const group_codes *codes, const group_scales *scales,
                        const kvs_act_group *act, __m256 sum)
{
    if (!kvs_traits_is_halved(&traits)) {
        __m256i dot = start_dot(traits, act->negative_count);
        dot = is_wide(traits) ? add_wide_quads(codes, act->codes, dot)
                              : add_small_quads(traits, codes, act->codes, 0, 8, dot);
        sum = add_product(sum, scales->scale[0], act->d, dot);
        if (traits.minimum != KVS_MINIMUM_NONE) {
            sum = _mm256_fmadd_ps(scales->minimum[0], _mm256_set1_ps(act->sum), sum);
        }
        return sum;
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m256i dot = start_dot(traits, act->negative_half_count[half]);
        dot = add_small_quads(traits, codes, act->codes, 4 * half, 4 * half + 4, dot);
        sum = add_product(sum, scales->scale[half], act->d, dot);
        if (traits.minimum != KVS_MINIMUM_NONE) {
            sum = _mm256_fmadd_ps(scales->minimum[half], _mm256_set1_ps(act->half_sum[half]), sum);
        }
    }
    return sum;
}

INLINE void fetch_ahead(const uint8_t *bytes, uint64_t n)
{
    for (uint64_t at = 0; at < n; at += 64) {
        _mm_prefetch((const void *)(bytes + KVS_PANELS_AHEAD_BYTES + at), _MM_HINT_T1);
    }
}

/* Some rows of a tile of `stride` rows with one panel. */
INLINE void sum_rows(const int type, const int n_rows, const kvs_panel_run *run, const uint8_t *panel,
                     const kvs_act_group *tile, uint32_t stride, float *sums)
{
    const kvs_panel_traits traits = kvs_traits[type];
    const kvs_panel_layout *layout = run->layout;
    const uint64_t group_bytes = layout->panel_bytes / layout->n_groups;
    super_scales super[2] = {0};
    __m256 sum[2][RUN_ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; r++) {
        sum[0][r] = _mm256_setzero_ps();
        sum[1][r] = _mm256_setzero_ps();
    }
    for (uint64_t g = 0; g < layout->n_groups; g++) {
        if (kvs_traits_is_super(&traits) && g % KVS_SUPER_GROUPS == 0) {
            load_super(traits, layout, panel, g / KVS_SUPER_GROUPS, 0, &super[0]);
            load_super(traits, layout, panel, g / KVS_SUPER_GROUPS, 1, &super[1]);
        }
        if (run->is_first) {
            fetch_ahead(panel + g * group_bytes, group_bytes);
        }
#pragma GCC unroll 2
        for (uint32_t side = 0; side < 2; side++) {
            group_codes codes;
            group_scales scales;
            unpack_codes(traits, layout, panel, g, side, &codes);
            unpack_scales(traits, layout, panel, g, side, &super[side], &scales);
#pragma GCC unroll 4
            for (int r = 0; r < n_rows; r++) {
                sum[side][r] = add_group(traits, &codes, &scales, tile + g * stride + (uint32_t)r, sum[side][r]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; r++) {
        _mm256_storeu_ps(sums + (uint32_t)r * LANES, sum[0][r]);
        _mm256_storeu_ps(sums + (uint32_t)r * LANES + WIDTH, sum[1][r]);
    }
}

INLINE void sum_tile(const int type, const kvs_panel_run *run, const kvs_act_group *tile, uint32_t n_rows, float *sums)
{
    for (uint32_t p = 0; p < run->n_panels; p++) {
        const uint8_t *panel = run->panels + p * run->layout->panel_bytes;
        float *panel_sums = sums + p * n_rows * LANES;
        uint32_t done = 0;
        for (; done + RUN_ROWS <= n_rows; done += RUN_ROWS) {
            sum_rows(type, RUN_ROWS, run, panel, tile + done, n_rows, panel_sums + done * LANES);
        }
        if (n_rows & 2) {
            sum_rows(type, 2, run, panel, tile + done, n_rows, panel_sums + done * LANES);
            done += 2;
        }
        if (n_rows & 1) {
            sum_rows(type, 1, run, panel, tile + done, n_rows, panel_sums + done * LANES);
        }
    }
}

#define DEFINE_KERNEL(name, type)                                                                                      \
    static void name(const kvs_panel_run *run, const kvs_act_group *tile, uint32_t n_rows, float *sums)                \
    {                                                                                                                  \
        sum_tile(type, run, tile, n_rows, sums);                                                                       \
    }

DEFINE_KERNEL(sum_q4_0, KVS_TYPE_Q4_0)
DEFINE_KERNEL(sum_q4_1, KVS_TYPE_Q4_1)
DEFINE_KERNEL(sum_q5_0, KVS_TYPE_Q5_0)
DEFINE_KERNEL(sum_q5_1, KVS_TYPE_Q5_1)
DEFINE_KERNEL(sum_q8_0, KVS_TYPE_Q8_0)
DEFINE_KERNEL(sum_q2_k, KVS_TYPE_Q2_K)
DEFINE_KERNEL(sum_q3_k, KVS_TYPE_Q3_K)
DEFINE_KERNEL(sum_q4_k, KVS_TYPE_Q4_K)
DEFINE_KERNEL(sum_q5_k, KVS_TYPE_Q5_K)
DEFINE_KERNEL(sum_q6_k, KVS_TYPE_Q6_K)
DEFINE_KERNEL(sum_iq1_s, KVS_TYPE_IQ1_S)
DEFINE_KERNEL(sum_iq1_m, KVS_TYPE_IQ1_M)
DEFINE_KERNEL(sum_iq2_xxs, KVS_TYPE_IQ2_XXS)
DEFINE_KERNEL(sum_iq2_xs, KVS_TYPE_IQ2_XS)
DEFINE_KERNEL(sum_iq2_s, KVS_TYPE_IQ2_S)
DEFINE_KERNEL(sum_iq3_xxs, KVS_TYPE_IQ3_XXS)
DEFINE_KERNEL(sum_iq3_s, KVS_TYPE_IQ3_S)
DEFINE_KERNEL(sum_mxfp4, KVS_TYPE_MXFP4)
DEFINE_KERNEL(sum_nvfp4, KVS_TYPE_NVFP4)
DEFINE_KERNEL(sum_iq4_nl, KVS_TYPE_IQ4_NL)
DEFINE_KERNEL(sum_iq4_xs, KVS_TYPE_IQ4_XS)

static const kvs_quantized_kernel kernels[] = {
    [KVS_TYPE_Q4_0] = sum_q4_0, [KVS_TYPE_Q4_1] = sum_q4_1, [KVS_TYPE_Q5_0] = sum_q5_0,
    [KVS_TYPE_Q5_1] = sum_q5_1, [KVS_TYPE_Q8_0] = sum_q8_0, [KVS_TYPE_Q2_K] = sum_q2_k,
    [KVS_TYPE_Q3_K] = sum_q3_k, [KVS_TYPE_Q4_K] = sum_q4_k, [KVS_TYPE_Q5_K] = sum_q5_k,
    [KVS_TYPE_Q6_K] = sum_q6_k, [KVS_TYPE_IQ1_S] = sum_iq1_s, [KVS_TYPE_IQ1_M] = sum_iq1_m,
    [KVS_TYPE_IQ2_XXS] = sum_iq2_xxs, [KVS_TYPE_IQ2_XS] = sum_iq2_xs, [KVS_TYPE_IQ2_S] = sum_iq2_s,
    [KVS_TYPE_IQ3_XXS] = sum_iq3_xxs, [KVS_TYPE_IQ3_S] = sum_iq3_s, [KVS_TYPE_MXFP4] = sum_mxfp4,
    [KVS_TYPE_NVFP4] = sum_nvfp4, [KVS_TYPE_IQ4_NL] = sum_iq4_nl, [KVS_TYPE_IQ4_XS] = sum_iq4_xs,
};

static void quantized(const kvs_panel_run *run, const kvs_act_group *tile, uint32_t n_rows, float *sums)
{
    kernels[run->layout->type](run, tile, n_rows, sums);
}

INLINE __m256 load_weights(const int type, const uint8_t *panel, uint64_t k, uint32_t side)
{
    if (type == KVS_TYPE_F32) {
        return _mm256_load_ps((const void *)(panel + k * 64 + side * 32));
    }
    const __m128i halves = _mm_load_si128((const void *)(panel + k * 32 + side * 16));
    if (type == KVS_TYPE_F16) {
        return _mm256_cvtph_ps(halves);
    }
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

INLINE void sum_float_rows(const int type, const int n_rows, const kvs_panel_run *run, const uint8_t *panel,
                           const float *x, uint64_t x_stride, float *sums)
{
    const uint64_t step_bytes = type == KVS_TYPE_F32 ? 64 : 32;
    __m256 sum[2][RUN_ROWS];
    for (int r = 0; r < n_rows; r++) {
        sum[0][r] = _mm256_setzero_ps();
        sum[1][r] = _mm256_setzero_ps();
    }
    for (uint64_t k = 0; k < run->layout->k; k++) {
        if (run->is_first) {
            fetch_ahead(panel + k * step_bytes, step_bytes);
        }
        const __m256 low = load_weights(type, panel, k, 0);
        const __m256 high = load_weights(type, panel, k, 1);
        for (int r = 0; r < n_rows; r++) {
            const __m256 value = _mm256_set1_ps(x[(uint32_t)r * x_stride + k]);
            sum[0][r] = _mm256_fmadd_ps(low, value, sum[0][r]);
            sum[1][r] = _mm256_fmadd_ps(high, value, sum[1][r]);
        }
    }
    for (int r = 0; r < n_rows; r++) {
        _mm256_storeu_ps(sums + (uint32_t)r * LANES, sum[0][r]);
        _mm256_storeu_ps(sums + (uint32_t)r * LANES + WIDTH, sum[1][r]);
    }
}

INLINE void sum_float_tile(const int type, const kvs_panel_run *run, const float *x, uint64_t x_stride, uint32_t n_rows,
                           float *sums)
{
    for (uint32_t p = 0; p < run->n_panels; p++) {
        const uint8_t *panel = run->panels + p * run->layout->panel_bytes;
        float *panel_sums = sums + p * n_rows * LANES;
        uint32_t done = 0;
        for (; done + RUN_ROWS <= n_rows; done += RUN_ROWS) {
            sum_float_rows(type, RUN_ROWS, run, panel, x + done * x_stride, x_stride, panel_sums + done * LANES);
        }
        for (; done < n_rows; done++) {
            sum_float_rows(type, 1, run, panel, x + done * x_stride, x_stride, panel_sums + done * LANES);
        }
    }
}

static void floats(const kvs_panel_run *run, const float *x, uint64_t x_stride, uint32_t n_rows, float *sums)
{
    if (run->layout->type == KVS_TYPE_F32) {
        sum_float_tile(KVS_TYPE_F32, run, x, x_stride, n_rows, sums);
    } else if (run->layout->type == KVS_TYPE_F16) {
        sum_float_tile(KVS_TYPE_F16, run, x, x_stride, n_rows, sums);
    } else {
        sum_float_tile(KVS_TYPE_BF16, run, x, x_stride, n_rows, sums);
    }
}

INLINE __m256 biased(const float *sums, const float *bias, uint32_t first)
{
    const __m256 y = _mm256_loadu_ps(sums + first);
    return bias != NULL ? _mm256_add_ps(y, _mm256_loadu_ps(bias + first)) : y;
}

static void store(const float *sums, const float *bias, float *out)
{
    for (uint32_t i = 0; i < LANES; i += WIDTH) {
        _mm256_storeu_ps(out + i, biased(sums, bias, i));
    }
}

static void store_add(const float *sums, const float *bias, float *out)
{
    for (uint32_t i = 0; i < LANES; i += WIDTH) {
        _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(out + i), biased(sums, bias, i)));
    }
}

static void store_swiglu(const float *gate, const float *gate_bias, const float *up, const float *up_bias, float *out)
{
    for (uint32_t i = 0; i < LANES; i += WIDTH) {
        __m256 activated = kvs_siluf_avx2(biased(gate, gate_bias, i));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(activated, biased(up, up_bias, i)));
    }
}

const kvs_matmul_kernels kvs_matmul_kernels_avx2 = {
    .quantize = kvs_act_quantize_avx2,
    .quantized = quantized,
    .floats = floats,
    .store = store,
    .store_add = store_add,
    .store_swiglu = store_swiglu,
};
