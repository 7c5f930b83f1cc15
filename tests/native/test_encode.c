/* test_encode.c: encoders are byte-exact to the formats, in each twin, for ordinary and hostile rows.
 *
 * The expected blocks are written here once more, from the format's formulas and by other means than the encoders: float64
 * where a product is exact, linear searches, long-hand rounding. */
#include "backends/cpu/backend.h"
#include "backends/cpu/encode.h"
#include "backends/cpu/half.h"
#include "check.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int32_t TYPES[] = {KVS_TYPE_F32,  KVS_TYPE_F16,  KVS_TYPE_BF16, KVS_TYPE_Q8_0,  KVS_TYPE_Q4_0,
                                KVS_TYPE_Q4_1, KVS_TYPE_Q5_0, KVS_TYPE_Q5_1, KVS_TYPE_IQ4_NL};
#define N_TYPES (sizeof TYPES / sizeof TYPES[0])
#define N_VALUES 96u

static const int ENTRIES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static uint32_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 32);
}

typedef struct row_planes {
    uint8_t codes[N_VALUES * 4];
    uint8_t high[N_VALUES / 8];
    uint8_t scales[N_VALUES / 8];
} row_planes;

static void encode(uint32_t isa, int32_t type, const float *x, row_planes *planes)
{
    memset(planes, 0xee, sizeof *planes);
    kvs_encode_select(isa, type)(x, N_VALUES, planes->codes, planes->high, planes->scales);
}

/* Nearest float16 by search over all of them, ties to the even pattern. */
static uint16_t half_by_search(float x)
{
    double best = INFINITY;
    uint16_t found = 0;
    if (fabs((double)x) >= 65520.0) {
        return x < 0 ? 0xfc00 : 0x7c00;
    }
    for (uint32_t h = 0; h < 0x7c00; h++) {
        const double value = ldexp(h < 1024 ? h : 1024 + h % 1024, (h < 1024 ? 0 : (int)(h / 1024) - 1) - 24);
        const double error = fabs(fabs((double)x) - value);
        if (error < best || (error == best && h % 2 == 0)) {
            best = error;
            found = (uint16_t)h;
        }
    }
    return (uint16_t)(found | (signbit(x) ? 0x8000u : 0u));
}

static void test_half_rounds_to_nearest_even(void)
{
    uint64_t state = 5;
    for (int i = 0; i < 300; i++) {
        const float x = ldexpf((float)(int32_t)next_random(&state), (int)(next_random(&state) % 50) - 60);
        CHECK_U64(kvs_f32_to_f16(x), half_by_search(x));
    }
    CHECK_U64(kvs_f32_to_f16(0x1.002p+0f), 0x3c00); /* ties */
    CHECK_U64(kvs_f32_to_f16(0x1.006p+0f), 0x3c02);
    CHECK_U64(kvs_f32_to_f16(0x1p-25f), 0);
    CHECK_U64(kvs_f32_to_f16(0x1.8p-24f), 2);
    CHECK_U64(kvs_f32_to_f16(-65519.0f), 0xfbff);
    for (uint32_t h = 0; h < 0x10000; h++) {
        const float x = kvs_f16_to_f32((uint16_t)h);
        if (!(x != x)) {
            CHECK(kvs_f32_to_f16(x) == h);
        }
    }
    CHECK_U64(kvs_f32_to_bf16(0x1.01p+0f), 0x3f80);
    CHECK_U64(kvs_f32_to_bf16(0x1.03p+0f), 0x3f82);
    CHECK_U64(kvs_f32_to_bf16(kvs_f32_from_bits(0x7f800001u)), 0x7fc0);
}

static float peak_of(const float *x)
{
    float peak = 0.0f;
    for (int i = 31; i >= 0; i--) { /* backwards, so that the first of equals is the last to be taken */
        if (fabsf(x[i]) >= fabsf(peak)) {
            peak = x[i];
        }
    }
    return peak;
}

/* Quants and scales of one block by the formulas; only for finite rows whose scale is a normal number. */
static void expect_block(int32_t type, const float *x, uint32_t *quants, float *scale, float *low)
{
    const float peak = peak_of(x);
    float top = x[0];
    *low = x[0];
    for (int i = 0; i < 32; i++) {
        *low = fminf(*low, x[i]);
        top = fmaxf(top, x[i]);
    }
    const int32_t centre = type == KVS_TYPE_Q4_0 ? 8 : 16;
    const float n_steps = type == KVS_TYPE_Q4_1 ? 15.0f : 31.0f;
    const bool has_low = type == KVS_TYPE_Q4_1 || type == KVS_TYPE_Q5_1;
    *scale = type == KVS_TYPE_Q8_0     ? fabsf(peak) / 127.0f
             : type == KVS_TYPE_IQ4_NL ? peak / -127.0f
             : has_low                 ? (top - *low) / n_steps
                                       : peak / (float)-centre;
    const float inverse = *scale != 0.0f ? 1.0f / *scale : 0.0f;
    float product = 0.0f, square = 0.0f;
    for (int i = 0; i < 32; i++) {
        const float y = has_low ? (x[i] - *low) * inverse : x[i] * inverse;
        if (type == KVS_TYPE_Q8_0) {
            quants[i] = (uint32_t)lround((double)y) & 255u;
        } else if (type == KVS_TYPE_IQ4_NL) {
            quants[i] = 0;
            for (uint32_t entry = 1; entry < 16; entry++) {
                if (fabs((double)y - ENTRIES[entry]) <= fabs((double)y - ENTRIES[quants[i]])) {
                    quants[i] = entry;
                }
            }
            const float weight = x[i] * x[i];
            product += weight * (float)ENTRIES[quants[i]] * x[i];
            square += weight * (float)ENTRIES[quants[i]] * (float)ENTRIES[quants[i]];
        } else {
            const float shifted = has_low ? y + 0.5f : y + ((float)centre + 0.5f);
            const uint32_t most = type == KVS_TYPE_Q4_0 || type == KVS_TYPE_Q4_1 ? 15 : 31;
            quants[i] = (uint32_t)shifted < most ? (uint32_t)shifted : most;
        }
    }
    *scale = type == KVS_TYPE_IQ4_NL ? product / square : *scale;
}

static void check_block(int32_t type, const float *x, const row_planes *planes, uint32_t block)
{
    uint32_t quants[32];
    float scale, low;
    expect_block(type, x, quants, &scale, &low);
    const bool has_low = type == KVS_TYPE_Q4_1 || type == KVS_TYPE_Q5_1;
    const uint8_t *codes = planes->codes + (size_t)block * (type == KVS_TYPE_Q8_0 ? 32 : 16);
    uint16_t halves[2];
    uint32_t high = 0, expected_high = 0;
    memcpy(halves, planes->scales + (size_t)block * (has_low ? 4 : 2), has_low ? 4 : 2);
    CHECK_U64(halves[0], kvs_f32_to_f16(scale));
    CHECK(!has_low || halves[1] == kvs_f32_to_f16(low));
    bool equal = true;
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t nibble = (uint32_t)codes[i % 16] >> (i < 16 ? 0 : 4) & 15u;
        const uint32_t got = type == KVS_TYPE_Q8_0 ? codes[i] : nibble;
        equal = equal && got == (type == KVS_TYPE_Q8_0 ? quants[i] : quants[i] & 15u);
        expected_high |= (quants[i] >> 4 & 1u) << i;
    }
    CHECK(equal);
    if (type == KVS_TYPE_Q5_0 || type == KVS_TYPE_Q5_1) {
        memcpy(&high, planes->high + (size_t)block * 4, 4);
        CHECK_U64(high, expected_high);
    }
}

static void ordinary_row(float *x, uint64_t *state)
{
    const int exponent = (int)(next_random(state) % 24) - 12;
    const bool coarse = next_random(state) % 3 == 0; /* many equal values and ties */
    for (uint32_t i = 0; i < N_VALUES; i++) {
        float value = (float)(int32_t)next_random(state) * 0x1p-31f;
        value = coarse ? rintf(value * 8.0f) / 8.0f + (i % 32 == 7 ? 1.5f : 0.0f) : value;
        x[i] = ldexpf(value, exponent);
    }
}

static void test_encoders_equal_the_formulas(void)
{
    uint64_t state = 1;
    float x[N_VALUES];
    row_planes planes;
    for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
        for (int round = 0; round < 1500; round++) {
            ordinary_row(x, &state);
            for (size_t t = 3; t < N_TYPES; t++) {
                encode(isa, TYPES[t], x, &planes);
                for (uint32_t block = 0; block < N_VALUES / 32; block++) {
                    check_block(TYPES[t], x + (size_t)block * 32, &planes, block);
                }
            }
        }
    }
}

/* 127 quanta of exactly 1: half quanta go away from zero, which rounding to even would not do. */
static void test_q8_0_rounds_halves_away_from_zero(void)
{
    for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
        float x[N_VALUES] = {127.0f, 0.5f, -0.5f, 1.5f, 2.5f, -2.5f, 0.49999997f, -126.5f};
        row_planes planes;
        encode(isa, KVS_TYPE_Q8_0, x, &planes);
        static const int8_t EXPECTED[] = {127, 1, -1, 2, 3, -3, 0, -127};
        CHECK(memcmp(planes.codes, EXPECTED, sizeof EXPECTED) == 0);
    }
}

static const float HOSTILE[] = {NAN,      -NAN,     INFINITY,  -INFINITY, 0.0f,     -0.0f,     FLT_MAX, -FLT_MAX,
                                FLT_MIN,  -FLT_MIN, 0x1p-149f, -0x1p-140f, 0x1p-133f, 65504.0f, 65520.0f, -7e4f,
                                0x1p-25f, 1e-30f,   -1e30f,    0.5f,      1.0f,     -1.0f,     127.0f};
#define N_HOSTILE (sizeof HOSTILE / sizeof HOSTILE[0])

/* Mixtures in which hostile values are rare, common, or everything. */
static void hostile_row(float *x, uint64_t *state)
{
    const uint32_t share = next_random(state) % 4, few = next_random(state);
    ordinary_row(x, state);
    for (uint32_t i = 0; i < N_VALUES; i++) {
        const bool strikes = share == 0 ? next_random(state) % 32 == 0 : share == 1 ? next_random(state) % 2 == 0 : true;
        if (strikes) {
            const uint32_t draw = next_random(state);
            x[i] = share == 3 ? HOSTILE[(few + draw % 2) % N_HOSTILE] : HOSTILE[draw % N_HOSTILE];
        }
        if (share == 2 && next_random(state) % 8 == 0) {
            x[i] = kvs_f32_from_bits(next_random(state));
        }
    }
}

static void test_twins_agree_on_hostile_rows(void)
{
    uint64_t state = 99;
    float x[N_VALUES], values[N_VALUES], expected_values[N_VALUES];
    row_planes planes, expected;
    for (uint32_t isa = KVS_ISA_AVX2; isa <= kvs_cpu_isa_detect(); isa++) {
        for (int round = 0; round < 6000; round++) {
            hostile_row(x, &state);
            for (size_t t = 0; t < N_TYPES; t++) {
                encode(KVS_ISA_REFERENCE, TYPES[t], x, &expected);
                encode(isa, TYPES[t], x, &planes);
                if (!CHECK(memcmp(&planes, &expected, sizeof planes) == 0)) {
                    fprintf(stderr, "  isa %u, %s, round %d\n", isa, kvs_type_name(TYPES[t]), round);
                }
                kvs_decode_select(KVS_ISA_REFERENCE, TYPES[t])(planes.codes, planes.high, planes.scales, N_VALUES,
                                                               expected_values);
                kvs_decode_select(isa, TYPES[t])(planes.codes, planes.high, planes.scales, N_VALUES, values);
                for (uint32_t i = 0; i < N_VALUES; i++) {
                    /* NaNs that arithmetic makes may differ in sign. */
                    const bool equal = kvs_f32_bits(values[i]) == kvs_f32_bits(expected_values[i]) ||
                                       (values[i] != values[i] && expected_values[i] != expected_values[i]);
                    CHECK(equal);
                }
            }
        }
    }
}

static void test_decoders_agree_on_any_bytes(void)
{
    uint64_t state = 4;
    row_planes planes;
    float values[N_VALUES], expected[N_VALUES];
    for (uint32_t isa = KVS_ISA_AVX2; isa <= kvs_cpu_isa_detect(); isa++) {
        for (int round = 0; round < 2000; round++) {
            for (size_t i = 0; i < sizeof planes; i++) {
                ((uint8_t *)&planes)[i] = (uint8_t)next_random(&state);
            }
            for (size_t t = 0; t < N_TYPES; t++) {
                kvs_decode_select(KVS_ISA_REFERENCE, TYPES[t])(planes.codes, planes.high, planes.scales, N_VALUES,
                                                               expected);
                kvs_decode_select(isa, TYPES[t])(planes.codes, planes.high, planes.scales, N_VALUES, values);
                bool equal = true;
                for (uint32_t i = 0; i < N_VALUES; i++) {
                    equal = equal && (kvs_f32_bits(values[i]) == kvs_f32_bits(expected[i]) ||
                                      (values[i] != values[i] && expected[i] != expected[i]));
                }
                CHECK(equal);
            }
        }
    }
}

/* Within half a step; a full one for what lies opposite to the peak, where the range ends a step early. */
static void test_decoding_gives_values_back_within_a_step(void)
{
    static const float STEPS[N_TYPES] = {0.0f,   0x1p-11f, 0x1p-8f, 0.5f / 127 + 1e-3f, 1.0f / 8,
                                         1.0f / 15, 1.0f / 16,  1.0f / 31, 18.0f / 127};
    uint64_t state = 21;
    float x[N_VALUES], values[N_VALUES];
    row_planes planes;
    for (size_t t = 0; t < N_TYPES; t++) {
        for (int round = 0; round < 200; round++) {
            for (uint32_t i = 0; i < N_VALUES; i++) {
                x[i] = (float)(int32_t)next_random(&state) * 0x1p-31f;
            }
            encode(kvs_cpu_isa_detect(), TYPES[t], x, &planes);
            kvs_decode_select(kvs_cpu_isa_detect(), TYPES[t])(planes.codes, planes.high, planes.scales, N_VALUES,
                                                              values);
            for (uint32_t i = 0; i < N_VALUES; i++) {
                CHECK(fabsf(values[i] - x[i]) <= STEPS[t] * 1.02f);
            }
        }
    }
}

/* Rows of a record land in the planes of their head, and blocks read back equal those of a row encoded alone. */
static void test_rows_land_in_their_planes(void)
{
    enum { HEADS = 3, STRIDE_K = HEADS * 64 + 5, STRIDE_V = HEADS * 32 + 1, ROWS = 4 };
    const kvs_kv_layer layer = {
        .n_kv_heads = HEADS, .head_dim_k = 64, .head_dim_v = 32, .type_k = KVS_TYPE_Q5_0, .type_v = KVS_TYPE_Q4_1};
    kvs_record_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_record_layout(&layer, &info));
    float k[ROWS * STRIDE_K], v[ROWS * STRIDE_V], back_k[ROWS * STRIDE_K], back_v[ROWS * STRIDE_V];
    uint64_t state = 8;
    for (size_t i = 0; i < ROWS * STRIDE_K; i++) {
        k[i] = (float)(int32_t)next_random(&state);
    }
    for (size_t i = 0; i < ROWS * STRIDE_V; i++) {
        v[i] = (float)(int32_t)next_random(&state);
    }
    uint8_t *record = malloc(info.record_bytes), *untouched = malloc(info.record_bytes);
    memset(record, 0xaa, info.record_bytes);
    const uint32_t isa = kvs_cpu_isa_detect();
    kvs_encode_rows(isa, &layer, &info, record, 252, ROWS, k, STRIDE_K, v, STRIDE_V);
    kvs_decode_rows(isa, &layer, &info, record, 252, ROWS, back_k, STRIDE_K, back_v, STRIDE_V);
    for (uint32_t head = 0; head < HEADS; head++) {
        for (uint32_t row = 0; row < ROWS; row++) {
            uint8_t codes[32], high[8], scales[4], blocks[44], expected[44];
            float alone[64];
            kvs_encode_select_reference(KVS_TYPE_Q5_0)(k + row * STRIDE_K + head * 64, 64, codes, high, scales);
            for (size_t block = 0; block < 2; block++) {
                memcpy(expected + block * 22, scales + block * 2, 2);
                memcpy(expected + block * 22 + 2, high + block * 4, 4);
                memcpy(expected + block * 22 + 6, codes + block * 16, 16);
            }
            CHECK_OK(kvs_record_unpack_rows(&layer, record, head, 0, 252 + row, 1, blocks));
            CHECK(memcmp(blocks, expected, sizeof blocks) == 0);
            kvs_decode_select_reference(KVS_TYPE_Q5_0)(codes, high, scales, 64, alone);
            CHECK(memcmp(alone, back_k + row * STRIDE_K + head * 64, sizeof alone) == 0);
        }
    }
    memset(untouched, 0xaa, info.record_bytes);
    kvs_encode_rows(isa, &layer, &info, untouched, 252, ROWS, NULL, 0, v, STRIDE_V);
    CHECK(memcmp(untouched, record, info.plane_offset_bytes[KVS_PLANE_V_CODES]) != 0);
    kvs_encode_rows(isa, &layer, &info, untouched, 252, ROWS, k, STRIDE_K, NULL, 0);
    CHECK(memcmp(untouched, record, info.record_bytes) == 0);
    free(record);
    free(untouched);
}

int main(void)
{
    test_half_rounds_to_nearest_even();
    test_encoders_equal_the_formulas();
    test_q8_0_rounds_halves_away_from_zero();
    test_twins_agree_on_hostile_rows();
    test_decoders_agree_on_any_bytes();
    test_decoding_gives_values_back_within_a_step();
    test_rows_land_in_their_planes();
    return check_finish();
}
