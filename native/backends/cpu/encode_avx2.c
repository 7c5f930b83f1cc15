/* encode_avx2.c: the encoders of encode_reference.c on eight lanes, with the same bytes; decoding from decode_body.h. */
#include "backends/cpu/vec_avx2.h"

#include "backends/cpu/decode_body.h"

#define BLOCK 32u
#define VECTORS 4u

typedef struct block {
    vf x[VECTORS];
} block;

static inline block load_block(const float *x)
{
    return (block){{v_load(x), v_load(x + 8), v_load(x + 16), v_load(x + 24)}};
}

static inline vf magnitude(vf x)
{
    return _mm256_andnot_ps(v_set1(-0.0f), x);
}

static inline float reduce_min(vf a)
{
    __m128 four = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_min_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)));
}

static inline float largest_magnitude(const block *b)
{
    vf best = v_zero();
    for (uint32_t i = 0; i < VECTORS; i++) {
        best = v_max(magnitude(b->x[i]), best);
    }
    return v_reduce_max(best);
}

/* The first element of largest magnitude, with its sign. */
static inline float signed_peak(const block *b, const float *x)
{
    const float amax = largest_magnitude(b);
    if (amax == 0.0f) {
        return 0.0f;
    }
    for (uint32_t i = 0; i < VECTORS; i++) {
        const vf equal = _mm256_cmp_ps(magnitude(b->x[i]), v_set1(amax), _CMP_EQ_OQ);
        const int mask = _mm256_movemask_ps(equal);
        if (mask != 0) {
            return x[i * 8 + (uint32_t)__builtin_ctz((unsigned)mask)];
        }
    }
    return 0.0f;
}

/* Truncated quants in [0, high]. Conversion makes the lowest integer of what no int32 holds. */
static inline vi quants_of(vf value, int high)
{
    const vi whole = _mm256_cvttps_epi32(value);
    return _mm256_max_epi32(_mm256_min_epi32(whole, _mm256_set1_epi32(high)), _mm256_setzero_si256());
}

/* 32 integers below 256 as bytes in order. */
static inline __m256i pack_bytes(const vi *quants)
{
    const __m256i low = _mm256_packs_epi32(quants[0], quants[1]);
    const __m256i high = _mm256_packs_epi32(quants[2], quants[3]);
    const __m256i mixed = _mm256_packs_epi16(low, high);
    return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

static inline void store_nibbles(__m256i bytes, uint8_t *codes)
{
    const __m128i mask = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(_mm256_castsi256_si128(bytes), mask);
    const __m128i high = _mm_and_si128(_mm256_extracti128_si256(bytes, 1), mask);
    _mm_storeu_si128((__m128i *)(void *)codes, _mm_or_si128(low, _mm_slli_epi16(high, 4)));
}

static inline void store_high(__m256i bytes, uint8_t *high)
{
    const int bits = _mm256_movemask_epi8(_mm256_slli_epi16(bytes, 3));
    memcpy(high, &bits, sizeof bits);
}

static void encode_f32(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    (void)high, (void)scales;
    memcpy(codes, x, n * sizeof *x);
}

static void encode_f16(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    (void)high, (void)scales;
    for (uint32_t i = 0; i < n; i += 8) {
        _mm_storeu_si128((__m128i *)(void *)(codes + 2 * i),
                         _mm256_cvtps_ph(v_load(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
}

static void encode_bf16(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    (void)high, (void)scales;
    for (uint32_t i = 0; i < n; i += 8) {
        const vf value = v_load(x + i);
        const vi bits = _mm256_castps_si256(value);
        const vi odd = v_and(v_shr(bits, 16), 1);
        const vi rounded =
            v_shr(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        const vi quiet = v_or(v_shr(bits, 16), _mm256_set1_epi32(0x40));
        const vi is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
        const vi half = _mm256_blendv_epi8(rounded, quiet, is_nan);
        const vi packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0x08);
        _mm_storeu_si128((__m128i *)(void *)(codes + 2 * i), _mm256_castsi256_si128(packed));
    }
}

/* Half away from zero; out of range, NaN included, becomes the lowest integer. */
static inline vi round_away(vf value)
{
    const vf sign = _mm256_and_ps(value, v_set1(-0.0f));
    const vf size = magnitude(value);
    const vf whole = _mm256_round_ps(size, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    const vf rest = v_sub(size, whole);
    const vf half = _mm256_round_ps(v_mul(v_set1(2.0f), rest), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    return _mm256_cvttps_epi32(_mm256_or_ps(v_add(whole, half), sign));
}

static void encode_q8_0(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    (void)high;
    for (; n != 0; n -= BLOCK, x += BLOCK, codes += 32, scales += 2) {
        const block b = load_block(x);
        const float d = largest_magnitude(&b) / 127.0f;
        const vf inverse = v_set1(kvs_inverse_scale(d));
        vi quants[VECTORS];
        for (uint32_t i = 0; i < VECTORS; i++) {
            const vf quant = v_mul(b.x[i], inverse);
            quants[i] = round_away(quant);
            /* Too large is the lowest quant as well, not the highest that saturation would make of it. */
            const vi over = _mm256_cmpgt_epi32(quants[i], _mm256_set1_epi32(127));
            quants[i] = _mm256_blendv_epi8(quants[i], _mm256_set1_epi32(-128), over);
        }
        _mm256_storeu_si256((__m256i *)(void *)codes, pack_bytes(quants));
        kvs_put_scale(scales, d);
    }
}

/* Quants of the types without a minimum: trunc(x / d + centre + 0.5). */
static inline __m256i centred_quants(const float *x, float centre, uint8_t *scales)
{
    const block b = load_block(x);
    const float d = signed_peak(&b, x) / -centre;
    const vf inverse = v_set1(kvs_inverse_scale(d));
    vi quants[VECTORS];
    for (uint32_t i = 0; i < VECTORS; i++) {
        const vf value = v_add(v_mul(b.x[i], inverse), v_set1(centre + 0.5f));
        quants[i] = quants_of(value, (int)(2.0f * centre) - 1);
    }
    kvs_put_scale(scales, d);
    return pack_bytes(quants);
}

static void encode_q4_0(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    (void)high;
    for (; n != 0; n -= BLOCK, x += BLOCK, codes += 16, scales += 2) {
        store_nibbles(centred_quants(x, 8.0f, scales), codes);
    }
}

static void encode_q5_0(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    for (; n != 0; n -= BLOCK, x += BLOCK, codes += 16, high += 4, scales += 2) {
        const __m256i quants = centred_quants(x, 16.0f, scales);
        store_nibbles(quants, codes);
        store_high(quants, high);
    }
}

/* A minimum of zero has the sign of the first zero, which lanes do not know. */
static inline float first_zero(const float *x)
{
    while (*x != 0.0f) {
        x++;
    }
    return *x;
}

/* Quants of the types with a minimum, which lie in [0, top]. */
static inline __m256i ranged_quants(const float *x, int top, uint8_t *scales)
{
    const block b = load_block(x);
    vf lows = v_set1(INFINITY), peaks = v_set1(-INFINITY);
    for (uint32_t i = 0; i < VECTORS; i++) {
        lows = _mm256_min_ps(b.x[i], lows);
        peaks = v_max(b.x[i], peaks);
    }
    float low = reduce_min(lows), peak = v_reduce_max(peaks);
    if (low == 0.0f) {
        low = first_zero(x);
        peak = peak == 0.0f ? low : peak;
    }
    const float d = (peak - low) / (float)top;
    const vf inverse = v_set1(kvs_inverse_scale(d));
    vi quants[VECTORS];
    for (uint32_t i = 0; i < VECTORS; i++) {
        const vf value = v_add(v_mul(v_sub(b.x[i], v_set1(low)), inverse), v_set1(0.5f));
        quants[i] = quants_of(value, top);
    }
    kvs_put_scale(scales, d);
    kvs_put_scale(scales + 2, low);
    return pack_bytes(quants);
}

static void encode_q4_1(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    (void)high;
    for (; n != 0; n -= BLOCK, x += BLOCK, codes += 16, scales += 4) {
        store_nibbles(ranged_quants(x, 15, scales), codes);
    }
}

static void encode_q5_1(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    for (; n != 0; n -= BLOCK, x += BLOCK, codes += 16, high += 4, scales += 4) {
        const __m256i quants = ranged_quants(x, 31, scales);
        store_nibbles(quants, codes);
        store_high(quants, high);
    }
}

static void encode_iq4_nl(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    (void)high;
    for (; n != 0; n -= BLOCK, x += BLOCK, codes += 16, scales += 2) {
        const block b = load_block(x);
        const vf inverse = v_set1(kvs_inverse_scale(signed_peak(&b, x) / -127.0f));
        uint32_t entries[BLOCK];
        vi quants[VECTORS];
        for (uint32_t i = 0; i < VECTORS; i++) {
            const vf scaled = v_mul(b.x[i], inverse);
            quants[i] = _mm256_setzero_si256();
            for (uint32_t entry = 0; entry < 15; entry++) {
                const float middle = 0.5f * (kvs_iq4_nl_values[entry] + kvs_iq4_nl_values[entry + 1]);
                const vf reached = _mm256_cmp_ps(scaled, v_set1(middle), _CMP_GE_OQ);
                quants[i] = _mm256_sub_epi32(quants[i], _mm256_castps_si256(reached));
            }
            _mm256_storeu_si256((__m256i *)(void *)(entries + 8 * i), quants[i]);
        }
        store_nibbles(pack_bytes(quants), codes);
        kvs_put_scale(scales, kvs_iq4_nl_refit(x, entries));
    }
}

kvs_encode_fn kvs_encode_select_avx2(int32_t type)
{
    switch (type) {
    case KVS_TYPE_F32:
        return encode_f32;
    case KVS_TYPE_F16:
        return encode_f16;
    case KVS_TYPE_BF16:
        return encode_bf16;
    case KVS_TYPE_Q8_0:
        return encode_q8_0;
    case KVS_TYPE_Q4_0:
        return encode_q4_0;
    case KVS_TYPE_Q4_1:
        return encode_q4_1;
    case KVS_TYPE_Q5_0:
        return encode_q5_0;
    case KVS_TYPE_Q5_1:
        return encode_q5_1;
    case KVS_TYPE_IQ4_NL:
        return encode_iq4_nl;
    default:
        return NULL;
    }
}

kvs_decode_fn kvs_decode_select_avx2(int32_t type)
{
    return decode_select(type);
}
