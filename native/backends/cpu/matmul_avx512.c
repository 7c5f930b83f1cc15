/* matmul_avx512.c: the twin of matmul_reference.c for AVX-512 with VNNI: one panel to a register width, a four-way byte
 * dot product to each quad.
 *
 * Kernels are written once and compiled for each type and number of rows; what depends on the type is decided at compile
 * time. A group's codes are unpacked once for all rows of the tile.
 */
#include "backends/cpu/mathf.h"
#include "backends/cpu/matmul_kernels.h"

#include <immintrin.h>

#define LANES KVS_PANEL_ROWS
#define INLINE static inline __attribute__((always_inline))

/* The unpacked codes of one group, by quad. */
typedef struct group_codes {
    __m512i quad[8];
} group_codes;

INLINE __m512i load_vector(const uint8_t *bytes)
{
    return _mm512_load_si512((const void *)bytes);
}

typedef uint16_t words __attribute__((vector_size(64)));

/* `bits` shifted by a signed number of places within 16-bit words. */
INLINE __m512i shift_left(__m512i bits, int places)
{
    return (__m512i)(places >= 0 ? (words)bits << places : (words)bits >> -places);
}

INLINE void unpack_low(const kvs_panel_traits traits, const uint8_t *low, uint64_t g, group_codes *codes)
{
    if (traits.code_bits == 8) {
        for (int q = 0; q < 8; q++) {
            codes->quad[q] = load_vector(low + g * KVS_WIDE_BYTES + q * 64);
        }
    } else if (traits.code_bits == 4) {
        const __m512i mask = _mm512_set1_epi8(15);
        for (int h = 0; h < 4; h++) {
            __m512i both = load_vector(low + g * KVS_NIBBLE_BYTES + h * 64);
            codes->quad[h] = _mm512_and_si512(both, mask);
            codes->quad[h + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        }
    } else {
        const __m512i mask = _mm512_set1_epi8(3);
        for (int t = 0; t < 2; t++) {
            __m512i four = load_vector(low + g * KVS_CRUMB_BYTES + t * 64);
            codes->quad[4 * t] = _mm512_and_si512(four, mask);
            codes->quad[4 * t + 1] = _mm512_and_si512(_mm512_srli_epi16(four, 2), mask);
            codes->quad[4 * t + 2] = _mm512_and_si512(_mm512_srli_epi16(four, 4), mask);
            codes->quad[4 * t + 3] = _mm512_and_si512(_mm512_srli_epi16(four, 6), mask);
        }
    }
}

/* Nibble `index` of each lane, in a plane that keeps two to a byte; the other bits are arbitrary. */
INLINE __m128i load_nibbles(const uint8_t *plane, uint64_t index)
{
    const __m128i both = _mm_load_si128((const void *)(plane + index / 2 * LANES));
    return _mm_srl_epi16(both, _mm_cvtsi32_si128((int)(index % 2 * 4)));
}

/* A bit of each lane for each eight codes: as if their plane had it for every code. */
INLINE void unpack_shared(const kvs_panel_traits traits, const uint8_t *shared, uint64_t g, group_codes *codes)
{
    const __m512i mask = _mm512_set1_epi8((char)(1 << traits.code_bits));
    const __m512i lanes = _mm512_cvtepu8_epi32(load_nibbles(shared, g));
    const __m512i bits = _mm512_shuffle_epi8(lanes, _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
    for (int i = 0; i < 4; i++) {
        const __m512i bit = _mm512_and_si512(shift_left(bits, traits.code_bits - i), mask);
        codes->quad[2 * i] = _mm512_or_si512(codes->quad[2 * i], bit);
        codes->quad[2 * i + 1] = _mm512_or_si512(codes->quad[2 * i + 1], bit);
    }
}



INLINE void unpack_high(const kvs_panel_traits traits, const uint8_t *high, uint64_t g, group_codes *codes)
{
    const int at = traits.code_bits;
    if (traits.high_bits == 2) {
        const __m512i mask = _mm512_set1_epi8((char)(3 << at));
        for (int q = 0; q < 8; q++) {
            __m512i four = load_vector(high + g * KVS_CRUMB_BYTES + q / 4 * 64);
            __m512i moved = shift_left(four, at - q % 4 * 2);
            codes->quad[q] = _mm512_or_si512(codes->quad[q], _mm512_and_si512(moved, mask));
        }
    } else if (traits.high_bits == 1) {
        const __m512i mask = _mm512_set1_epi8((char)(1 << at));
        const __m512i eight = load_vector(high + g * KVS_BIT_BYTES);
        for (int q = 0; q < 8; q++) {
            __m512i moved = shift_left(eight, at - q);
            codes->quad[q] = _mm512_or_si512(codes->quad[q], _mm512_and_si512(moved, mask));
        }
    }
}

INLINE void unpack_codes(const kvs_panel_traits traits, const kvs_panel_layout *layout, const uint8_t *panel, uint64_t g,
                         group_codes *codes)
{
    unpack_low(traits, panel + layout->codes, g, codes);
    if (traits.has_shared_bit) {
        unpack_shared(traits, panel + layout->high, g, codes);
    } else {
        unpack_high(traits, panel + layout->high, g, codes);
    }
    if (traits.table != KVS_TABLE_NONE) {
        const __m512i levels = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)kvs_levels[traits.table]));
        for (int q = 0; q < 8; q++) {
            codes->quad[q] = _mm512_shuffle_epi8(levels, codes->quad[q]);
        }
    }
}

INLINE __m512 load_halves(const uint8_t *plane, uint64_t index)
{
    return _mm512_cvtph_ps(_mm256_load_si256((const void *)(plane + index * KVS_HALF_LANES_BYTES)));
}

INLINE __m128i load_bytes(const uint8_t *plane, uint64_t index)
{
    return _mm_load_si128((const void *)(plane + index * LANES));
}

INLINE __m512 float_of_u8(__m128i bytes)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}

INLINE __m512 float_of_s8(__m128i bytes)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

/* 2^(code - 128); the two smallest are subnormal. */
INLINE __m512 float_of_e8m0(__m128i bytes)
{
    const __m512i code = _mm512_cvtepu8_epi32(bytes);
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(code, _mm512_set1_epi32(1)), 23);
    const __mmask16 is_small = _mm512_cmplt_epi32_mask(code, _mm512_set1_epi32(2));
    const __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), code);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, is_small, small));
}

/* Half of a float of 4 exponent and 3 mantissa bits, by way of float16. */
INLINE __m512 float_of_ue4m3(__m128i bytes)
{
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7);
    return _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(128.0f));
}

/* (2 * nibble + 1) / 2^scale_shift */
INLINE __m512 float_of_odd(const kvs_panel_traits traits, __m128i nibbles)
{
    const __m128i low = _mm_and_si128(nibbles, _mm_set1_epi8(15));
    const __m512 odd = float_of_u8(_mm_add_epi8(_mm_add_epi8(low, low), _mm_set1_epi8(1)));
    return traits.scale_shift != 0 ? _mm512_mul_ps(odd, _mm512_set1_ps(1.0f / (float)(1 << traits.scale_shift))) : odd;
}

/* Scale of one half of a group; `half` is 0 for types with one scale to a group. */
INLINE __m512 load_scale(const kvs_panel_traits traits, const kvs_panel_layout *layout, const uint8_t *panel, uint64_t g,
                         uint32_t half)
{
    const uint8_t *sub = panel + layout->sub_scales;
    if (traits.scale == KVS_SCALE_GROUP) {
        return load_halves(panel + layout->scales, g);
    }
    if (traits.scale == KVS_SCALE_E8M0) {
        return float_of_e8m0(load_bytes(sub, g));
    }
    if (traits.scale == KVS_SCALE_UE4M3X2) {
        return float_of_ue4m3(load_bytes(sub, 2 * g + half));
    }
    const __m512 scale = load_halves(panel + layout->scales, g / KVS_SUPER_GROUPS);
    if (traits.scale == KVS_SCALE_SUPER_ODD4) {
        return _mm512_mul_ps(scale, float_of_odd(traits, load_nibbles(sub, g)));
    }
    if (traits.scale == KVS_SCALE_SUPER_ODD4X2) {
        const __m128i both = load_bytes(sub, g);
        return _mm512_mul_ps(scale, float_of_odd(traits, half == 0 ? both : _mm_srli_epi16(both, 4)));
    }
    if (traits.scale == KVS_SCALE_SUPER_U8) {
        return _mm512_mul_ps(scale, float_of_u8(load_bytes(sub, g)));
    }
    if (traits.scale == KVS_SCALE_SUPER_S8) {
        return _mm512_mul_ps(scale, float_of_s8(load_bytes(sub, g)));
    }
    const __m128i bytes = load_bytes(sub, 2 * g + half);
    if (traits.scale == KVS_SCALE_SUPER_S8X2) {
        return _mm512_mul_ps(scale, float_of_s8(bytes));
    }
    return _mm512_mul_ps(scale, float_of_u8(_mm_and_si128(bytes, _mm_set1_epi8(15))));
}

INLINE __m512 load_minimum(const kvs_panel_traits traits, const kvs_panel_layout *layout, const uint8_t *panel,
                           uint64_t g, uint32_t half)
{
    const uint8_t *minima = panel + layout->minima;
    if (traits.minimum == KVS_MINIMUM_GROUP) {
        return load_halves(minima, g);
    }
    __m128i bytes;
    if (traits.minimum == KVS_MINIMUM_SUPER_U8) {
        bytes = load_bytes(panel + layout->sub_minima, g);
    } else {
        bytes = load_bytes(panel + layout->sub_scales, 2 * g + half);
        bytes = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
    }
    /* The product is exact, so the sign may go to either factor. */
    const __m512 minimum = load_halves(minima, g / KVS_SUPER_GROUPS);
    return _mm512_mul_ps(minimum, _mm512_sub_ps(_mm512_setzero_ps(), float_of_u8(bytes)));
}

INLINE __m512i add_quads(const group_codes *codes, const int8_t *x, int first, int end, __m512i dot)
{
    for (int q = first; q < end; q++) {
        int32_t four;
        __builtin_memcpy(&four, x + 4 * q, 4);
        dot = _mm512_dpbusd_epi32(dot, codes->quad[q], _mm512_set1_epi32(four));
    }
    return dot;
}

/* What the offset of the codes takes from every lane. */
INLINE __m512i start_dot(const kvs_panel_traits traits, int32_t negative_count)
{
    return traits.offset_shift != 0 ? _mm512_slli_epi32(_mm512_set1_epi32(negative_count), traits.offset_shift)
                                    : _mm512_setzero_si512();
}

INLINE __m512 add_product(__m512 sum, __m512 scale, float dx, __m512i dot)
{
    return _mm512_fmadd_ps(_mm512_mul_ps(scale, _mm512_set1_ps(dx)), _mm512_cvtepi32_ps(dot), sum);
}

/* Scales and minima of a group, of both halves where the type has them. */
typedef struct group_scales {
    __m512 scale[2];
    __m512 minimum[2];
} group_scales;

INLINE void unpack_scales(const kvs_panel_traits traits, const kvs_panel_layout *layout, const uint8_t *panel, uint64_t g,
                          group_scales *scales)
{
    const uint32_t n = kvs_traits_is_halved(&traits) ? 2 : 1;
    for (uint32_t half = 0; half < n; half++) {
        scales->scale[half] = load_scale(traits, layout, panel, g, half);
        if (traits.minimum != KVS_MINIMUM_NONE) {
            scales->minimum[half] = load_minimum(traits, layout, panel, g, half);
        }
    }
}

INLINE __m512 add_group(const kvs_panel_traits traits, const group_codes *codes, const group_scales *scales,
                        const kvs_act_group *act, __m512 sum)
{
    if (!kvs_traits_is_halved(&traits)) {
        __m512i dot = add_quads(codes, act->codes, 0, 8, start_dot(traits, act->negative_count));
        sum = add_product(sum, scales->scale[0], act->d, dot);
        if (traits.minimum != KVS_MINIMUM_NONE) {
            sum = _mm512_fmadd_ps(scales->minimum[0], _mm512_set1_ps(act->sum), sum);
        }
        return sum;
    }
    for (int half = 0; half < 2; half++) {
        __m512i dot = start_dot(traits, act->negative_half_count[half]);
        dot = add_quads(codes, act->codes, 4 * half, 4 * half + 4, dot);
        sum = add_product(sum, scales->scale[half], act->d, dot);
        if (traits.minimum != KVS_MINIMUM_NONE) {
            sum = _mm512_fmadd_ps(scales->minimum[half], _mm512_set1_ps(act->half_sum[half]), sum);
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

/* Some rows of a tile of `stride` rows, with n_panels panels side by side. */
INLINE void sum_rows(const int type, const int n_panels, const int n_rows, const kvs_panel_run *run,
                     const uint8_t *panels, const kvs_act_group *tile, uint32_t stride, float *sums)
{
    const kvs_panel_traits traits = kvs_traits[type];
    const kvs_panel_layout *layout = run->layout;
    __m512 sum[2][KVS_TILE_ROWS];
    for (int p = 0; p < n_panels; p++) {
        for (int r = 0; r < n_rows; r++) {
            sum[p][r] = _mm512_setzero_ps();
        }
    }
    const uint64_t group_bytes = (uint64_t)n_panels * layout->panel_bytes / layout->n_groups;
    for (uint64_t g = 0; g < layout->n_groups; g++) {
        if (run->is_first) {
            fetch_ahead(panels + g * group_bytes, group_bytes);
        }
        for (int p = 0; p < n_panels; p++) {
            const uint8_t *panel = panels + (uint64_t)p * layout->panel_bytes;
            group_codes codes;
            group_scales scales;
            unpack_codes(traits, layout, panel, g, &codes);
            unpack_scales(traits, layout, panel, g, &scales);
            for (int r = 0; r < n_rows; r++) {
                sum[p][r] = add_group(traits, &codes, &scales, tile + g * stride + (uint32_t)r, sum[p][r]);
            }
        }
    }
    for (int p = 0; p < n_panels; p++) {
        for (int r = 0; r < n_rows; r++) {
            _mm512_storeu_ps(sums + ((uint32_t)p * stride + (uint32_t)r) * LANES, sum[p][r]);
        }
    }
}

/* A tile of 1 to 8 rows as runs of 8, 4, 2 and 1. Few rows take both panels at once, for more loads in flight. */
INLINE void sum_tile(const int type, const kvs_panel_run *run, const kvs_act_group *tile, uint32_t n_rows, float *sums)
{
    if (n_rows == 1 && run->n_panels == 2) {
        sum_rows(type, 2, 1, run, run->panels, tile, 1, sums);
        return;
    }
    for (uint32_t p = 0; p < run->n_panels; p++) {
        const uint8_t *panel = run->panels + p * run->layout->panel_bytes;
        float *panel_sums = sums + p * n_rows * LANES;
        uint32_t done = 0;
        if (n_rows == 8) {
            sum_rows(type, 1, 8, run, panel, tile, 8, panel_sums);
            continue;
        }
        if (n_rows & 4) {
            sum_rows(type, 1, 4, run, panel, tile, n_rows, panel_sums);
            done += 4;
        }
        if (n_rows & 2) {
            sum_rows(type, 1, 2, run, panel, tile + done, n_rows, panel_sums + done * LANES);
            done += 2;
        }
        if (n_rows & 1) {
            sum_rows(type, 1, 1, run, panel, tile + done, n_rows, panel_sums + done * LANES);
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

INLINE __m512 load_weights(const int type, const uint8_t *panel, uint64_t k)
{
    if (type == KVS_TYPE_F32) {
        return _mm512_load_ps((const void *)(panel + k * 64));
    }
    const __m256i halves = _mm256_load_si256((const void *)(panel + k * 32));
    if (type == KVS_TYPE_F16) {
        return _mm512_cvtph_ps(halves);
    }
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

INLINE void sum_float_rows(const int type, const int n_panels, const int n_rows, const kvs_panel_run *run, const float *x,
                           uint64_t x_stride, uint32_t panel_rows, float *sums)
{
    const uint64_t panel_bytes = run->layout->panel_bytes;
    const uint64_t step_bytes = (uint64_t)n_panels * (type == KVS_TYPE_F32 ? 64 : 32);
    __m512 sum[2][KVS_TILE_ROWS];
    for (int p = 0; p < n_panels; p++) {
        for (int r = 0; r < n_rows; r++) {
            sum[p][r] = _mm512_setzero_ps();
        }
    }
    for (uint64_t k = 0; k < run->layout->k; k++) {
        if (run->is_first) {
            fetch_ahead(run->panels + k * step_bytes, step_bytes);
        }
        for (int p = 0; p < n_panels; p++) {
            const __m512 weights = load_weights(type, run->panels + (uint64_t)p * panel_bytes, k);
            for (int r = 0; r < n_rows; r++) {
                sum[p][r] = _mm512_fmadd_ps(weights, _mm512_set1_ps(x[(uint32_t)r * x_stride + k]), sum[p][r]);
            }
        }
    }
    for (int p = 0; p < n_panels; p++) {
        for (int r = 0; r < n_rows; r++) {
            _mm512_storeu_ps(sums + ((uint32_t)p * panel_rows + (uint32_t)r) * LANES, sum[p][r]);
        }
    }
}

INLINE void sum_float_panels(const int type, const int n_panels, const kvs_panel_run *run, const float *x,
                             uint64_t x_stride, uint32_t n_rows, float *sums)
{
    uint32_t done = 0;
    for (; done + 4 <= n_rows; done += 4) {
        sum_float_rows(type, n_panels, 4, run, x + done * x_stride, x_stride, n_rows, sums + done * LANES);
    }
    for (; done < n_rows; done++) {
        sum_float_rows(type, n_panels, 1, run, x + done * x_stride, x_stride, n_rows, sums + done * LANES);
    }
}

INLINE void sum_float_tile(const int type, const kvs_panel_run *run, const float *x, uint64_t x_stride, uint32_t n_rows,
                           float *sums)
{
    if (run->n_panels == 2) {
        sum_float_panels(type, 2, run, x, x_stride, n_rows, sums);
    } else {
        sum_float_panels(type, 1, run, x, x_stride, n_rows, sums);
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

INLINE __m512 biased(const float *sums, const float *bias)
{
    const __m512 y = _mm512_loadu_ps(sums);
    return bias != NULL ? _mm512_add_ps(y, _mm512_loadu_ps(bias)) : y;
}

static void store(const float *sums, const float *bias, float *out)
{
    _mm512_storeu_ps(out, biased(sums, bias));
}

static void store_add(const float *sums, const float *bias, float *out)
{
    _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), biased(sums, bias)));
}

static void store_swiglu(const float *gate, const float *gate_bias, const float *up, const float *up_bias, float *out)
{
    _mm512_storeu_ps(out, _mm512_mul_ps(kvs_siluf_avx512(biased(gate, gate_bias)), biased(up, up_bias)));
}

const kvs_matmul_kernels kvs_matmul_kernels_avx512 = {
    .quantize = kvs_act_quantize_avx2,
    .quantized = quantized,
    .floats = floats,
    .store = store,
    .store_add = store_add,
    .store_swiglu = store_swiglu,
};
