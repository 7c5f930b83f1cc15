/* test_elementwise.c: the laws of elementwise.h and mathf.h: equal bits in every twin, row count and thread count; near
 * float64; refusals by name. */
#include "check.h"
#include "cpu_weights.h"

#include "backends/cpu/backend.h"
#include "backends/cpu/elementwise.h"
#include "backends/cpu/mathf.h"

#include <math.h>

#define MAX_THREADS 3u
#define ROWS 37u
#define STRIDE 1100u

static kvs_threads *pools[MAX_THREADS + 1];

static float a[ROWS * STRIDE], b[ROWS * STRIDE], expected[ROWS * STRIDE], out[ROWS * STRIDE];

/* Equal bits, or both NaN. */
static bool same_values(const float *first, const float *second, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        if (kvs_f32_bits(first[i]) != kvs_f32_bits(second[i]) && !(isnan(first[i]) && isnan(second[i]))) {
            fprintf(stderr, "value %llu: %a, %a\n", (unsigned long long)i, (double)first[i], (double)second[i]);
            return false;
        }
    }
    return true;
}

static void fill_inputs(uint64_t seed)
{
    static const float hostile[] = {INFINITY, -INFINITY, NAN, 0.0f, -0.0f, 1e-41f, 3e38f, -3e38f};
    for (uint64_t i = 0; i < ROWS * STRIDE; i++) {
        a[i] = random_float(&seed) * 20.0f;
        b[i] = random_float(&seed) * 20.0f;
        expected[i] = out[i] = 7.0f;
    }
    for (uint64_t i = 0; i < 8; i++) {
        a[(2 * i + 1) * STRIDE + i] = hostile[i];
        b[(2 * i + 1) * STRIDE + i] = hostile[7 - i];
    }
}

static void test_exp_is_within_one_ulp(void)
{
    double worst = 0;
    for (float x = -87.0f; x < 88.7f; x += 0.00117f) {
        const double truth = exp((double)x);
        const double ulp = (double)nextafterf((float)truth, INFINITY) - (double)(float)truth;
        worst = fmax(worst, fabs((double)kvs_expf(x) - truth) / ulp);
    }
    CHECK(worst < 1.0);
}

static void test_exp_at_its_ends(void)
{
    CHECK(kvs_expf(0.0f) == 1.0f);
    CHECK(kvs_expf(-0.0f) == 1.0f);
    CHECK(kvs_expf(-INFINITY) == 0.0f);
    CHECK(kvs_expf(-1000.0f) == 0.0f);
    CHECK(kvs_expf(INFINITY) == INFINITY);
    CHECK(kvs_expf(88.8f) == INFINITY);
    CHECK(isnan(kvs_expf(NAN)));
    CHECK(fabs((double)kvs_expf(-100.0f) - exp(-100.0)) <= 0x1p-149);
}

static void test_silu_at_its_ends(void)
{
    CHECK(kvs_siluf(0.0f) == 0.0f);
    CHECK(kvs_siluf(200.0f) == 200.0f);
    CHECK(kvs_siluf(-200.0f) == 0.0f);
    CHECK(kvs_siluf(-1e38f) == 0.0f);
}

static void test_rms_norm_twins_are_equal(void)
{
    static const uint64_t groups[][2] = {{576, 576}, {576, 64}, {1, 1}, {39, 13}, {1100, 1100}, {96, 24}};
    float weight[STRIDE];
    fill_inputs(1);
    fill_floats(weight, STRIDE, 2);
    for (size_t g = 0; g < sizeof groups / sizeof groups[0]; g++) {
        for (int weighted = 0; weighted < 2; weighted++) {
            kvs_rms_norm_desc desc = {.x = a, .x_stride = STRIDE, .out = expected, .out_stride = STRIDE,
                                      .weight = weighted ? weight : NULL, .n = groups[g][0], .group = groups[g][1],
                                      .n_rows = ROWS, .eps = 1e-5f};
            kvs_rms_norm(pools[1], KVS_ISA_REFERENCE, &desc);
            for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
                desc.out = out;
                kvs_rms_norm(pools[isa], isa, &desc);
                CHECK(same_values(out, expected, ROWS * STRIDE));
            }
        }
    }
}

static void test_rms_norm_is_near_float64(void)
{
    enum { N = 1000 };
    fill_inputs(3);
    kvs_rms_norm_desc desc = {.x = a, .x_stride = STRIDE, .out = out, .out_stride = STRIDE, .weight = b, .n = N,
                              .group = N, .n_rows = 1, .eps = 1e-5f};
    kvs_rms_norm(pools[1], kvs_cpu_isa_detect(), &desc);
    double sum = 0;
    for (int i = 0; i < N; i++) {
        sum += (double)a[i] * (double)a[i];
    }
    for (int i = 0; i < N; i++) {
        const double truth = (double)a[i] / sqrt(sum / N + 1e-5) * (double)b[i];
        CHECK(fabs((double)out[i] - truth) <= 1e-6 * fabs(truth));
    }
}

static void silu_glu(kvs_threads *threads, uint32_t isa, const kvs_binary_desc *desc)
{
    const kvs_glu_desc glu = {.operands = *desc, .activation = KVS_ACTIVATION_SILU};
    kvs_glu(threads, isa, &glu);
}

static void sigmoid_glu(kvs_threads *threads, uint32_t isa, const kvs_binary_desc *desc)
{
    const kvs_glu_desc glu = {.operands = *desc, .activation = KVS_ACTIVATION_SIGMOID};
    kvs_glu(threads, isa, &glu);
}

static void test_binary_twins_are_equal(void)
{
    static const uint64_t widths[] = {1, 7, 8, 15, 16, 1100};
    for (size_t w = 0; w < sizeof widths / sizeof widths[0]; w++) {
        for (int op = 0; op < 3; op++) {
            void (*const calls[])(kvs_threads *, uint32_t, const kvs_binary_desc *) = {kvs_add, silu_glu, sigmoid_glu};
            void (*call)(kvs_threads *, uint32_t, const kvs_binary_desc *) = calls[op];
            fill_inputs(4 + w);
            kvs_binary_desc desc = {.a = a, .a_stride = STRIDE, .b = b, .b_stride = STRIDE, .out = expected,
                                    .out_stride = STRIDE, .n = widths[w], .n_rows = ROWS};
            call(pools[1], KVS_ISA_REFERENCE, &desc);
            const float wanted[] = {a[0] + b[0], kvs_siluf(a[0]) * b[0], kvs_sigmoidf(a[0]) * b[0]};
            CHECK(expected[0] == wanted[op]);
            for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
                desc.out = out;
                call(pools[isa], isa, &desc);
                CHECK(same_values(out, expected, ROWS * STRIDE));
            }
        }
    }
}

static void test_binary_in_place_equals_apart(void)
{
    fill_inputs(11);
    kvs_binary_desc desc = {.a = a, .a_stride = STRIDE, .b = b, .b_stride = STRIDE, .out = expected,
                            .out_stride = STRIDE, .n = 1000, .n_rows = ROWS};
    silu_glu(pools[2], kvs_cpu_isa_detect(), &desc);
    desc.out = a;
    silu_glu(pools[2], kvs_cpu_isa_detect(), &desc);
    for (uint32_t row = 0; row < ROWS; row++) {
        CHECK(same_values(a + row * STRIDE, expected + row * STRIDE, 1000));
    }
}

static void test_one_gate_serves_its_row(void)
{
    for (uint32_t activation = KVS_ACTIVATION_SILU; activation <= KVS_ACTIVATION_SIGMOID; activation++) {
        fill_inputs(12 + activation);
        kvs_glu_desc desc = {.operands = {.a = a, .a_stride = 1, .b = b, .b_stride = STRIDE, .out = out,
                                          .out_stride = STRIDE, .n = 100, .n_rows = ROWS},
                             .activation = activation,
                             .is_one_gate = true};
        kvs_glu(pools[2], kvs_cpu_isa_detect(), &desc);
        for (uint32_t row = 0; row < ROWS; row++) {
            const float factor = activation == KVS_ACTIVATION_SILU ? kvs_siluf(a[row]) : kvs_sigmoidf(a[row]);
            for (uint32_t i = 0; i < 100; i++) {
                expected[i] = factor * b[row * STRIDE + i];
            }
            CHECK(same_values(out + row * STRIDE, expected, 100));
        }
    }
}

static void test_sigmoid_and_softplus_are_near_float64(void)
{
    double worst = 0;
    for (float x = -60.0f; x < 60.0f; x += 0.00731f) {
        const double softplus = x > 20.0f ? (double)x : log1p(exp((double)x));
        const double sigmoid = 1.0 / (1.0 + exp(-(double)x));
        worst = fmax(worst, fabs((double)kvs_softplusf(x) - softplus) / softplus);
        worst = fmax(worst, fabs((double)kvs_sigmoidf(x) - sigmoid) / sigmoid);
    }
    CHECK(worst < 2e-7);
    CHECK(kvs_softplusf(INFINITY) == INFINITY && kvs_softplusf(-INFINITY) == 0.0f && isnan(kvs_softplusf(NAN)));
    CHECK(kvs_sigmoidf(INFINITY) == 1.0f && kvs_sigmoidf(-INFINITY) == 0.0f && isnan(kvs_sigmoidf(NAN)));
}

/* One axis for all pairs: positions count on from the first one, or are given. */
static void plain_table(const uint32_t *positions, uint32_t n_rows, const double *inv_freq, uint32_t n_pairs, float *table)
{
    static const uint8_t axes[64];
    const kvs_rope_table_desc desc = {
        .inv_freq = inv_freq, .axes = axes, .positions = positions, .n_rows = n_rows, .n_pairs = n_pairs};
    kvs_rope_table(&desc, table);
}

static void test_rope_table_turns_each_pair_by_its_axis(void)
{
    static const uint32_t positions[3][2] = {{7, 262143}, {40, 41}, {1000, 0}};
    static const uint8_t axes[3] = {2, 0, 1};
    static const double inv_freq[3] = {1.0, 0.5, 0.25};
    float table[2][3][2], alone[2];
    const kvs_rope_table_desc desc = {
        .inv_freq = inv_freq, .axes = axes, .positions = positions[0], .n_rows = 2, .n_pairs = 3};
    kvs_rope_table(&desc, table[0][0]);
    for (int row = 0; row < 2; row++) {
        for (int i = 0; i < 3; i++) {
            plain_table(&positions[axes[i]][row], 1, &inv_freq[i], 1, alone);
            CHECK(same_values(alone, table[row][i], 2));
        }
    }
}

static void test_rope_table_is_right_at_far_positions(void)
{
    enum { PAIRS = 32 };
    static const uint32_t positions[] = {0, 1, 2, 255, 8191, 65537, 262143, 1000003};
    double inv_freq[PAIRS];
    float table[8 * PAIRS * 2];
    for (int i = 0; i < PAIRS; i++) {
        inv_freq[i] = pow(10000.0, -2.0 * i / (2.0 * PAIRS));
    }
    plain_table(positions, 8, inv_freq, PAIRS, table);
    for (int row = 0; row < 8; row++) {
        for (int i = 0; i < PAIRS; i++) {
            const double angle = (double)positions[row] * inv_freq[i];
            const float *entry = table + (row * PAIRS + i) * 2;
            CHECK(fabs((double)entry[0] - cos(angle)) < 6e-8);
            CHECK(fabs((double)entry[1] - sin(angle)) < 6e-8);
        }
    }
    CHECK(table[0] == 1.0f && table[1] == 0.0f);
}

static void test_rope_table_row_does_not_depend_on_its_neighbours(void)
{
    const uint32_t positions[3] = {5, 99999, 17};
    const double inv_freq[2] = {1.0, 0.01};
    float all[12], one[4];
    plain_table(positions, 3, inv_freq, 2, all);
    for (int row = 0; row < 3; row++) {
        plain_table(positions + row, 1, inv_freq, 2, one);
        CHECK(memcmp(one, all + 4 * row, sizeof one) == 0);
    }
}

static kvs_rope_desc rope_shape(const float *table, uint32_t n_rot, uint32_t mode, float *to)
{
    return (kvs_rope_desc){.x = a, .x_stride = STRIDE, .out = to, .out_stride = STRIDE, .table = table, .n_rows = ROWS,
                           .n_heads = 5, .head_values = 64, .n_rot = n_rot, .mode = mode};
}

static void test_rope_twins_are_equal_and_rotate(void)
{
    static const uint32_t widths[] = {64, 32, 22, 2};
    static float table[ROWS * 64];
    uint32_t positions[ROWS];
    double inv_freq[32];
    for (uint32_t i = 0; i < ROWS; i++) {
        positions[i] = i * 1777;
    }
    for (uint32_t i = 0; i < 32; i++) {
        inv_freq[i] = pow(1e6, -(double)i / 32);
    }
    for (uint32_t w = 0; w < 4; w++) {
        for (uint32_t mode = KVS_ROPE_PAIRS; mode <= KVS_ROPE_HALVES; mode++) {
            const uint32_t half = widths[w] / 2;
            fill_inputs(20 + w);
            plain_table(positions, ROWS, inv_freq, half, table);
            kvs_rope_desc desc = rope_shape(table, widths[w], mode, expected);
            kvs_rope(pools[1], KVS_ISA_REFERENCE, &desc);
            for (uint32_t i = 0; i < half; i++) {
                const uint32_t first = mode == KVS_ROPE_PAIRS ? 2 * i : i;
                const uint32_t second = mode == KVS_ROPE_PAIRS ? 2 * i + 1 : i + half;
                const float *x = a + 2 * STRIDE + 64; /* row 2, head 1 */
                const float *y = expected + 2 * STRIDE + 64;
                const double angle = (double)positions[2] * inv_freq[i];
                CHECK(fabs((double)y[first] - ((double)x[first] * cos(angle) - (double)x[second] * sin(angle))) < 4e-6);
                CHECK(fabs((double)y[second] - ((double)x[first] * sin(angle) + (double)x[second] * cos(angle))) < 4e-6);
            }
            CHECK(same_values(expected + widths[w], a + widths[w], 64 - widths[w]));
            for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
                desc.out = out;
                kvs_rope(pools[isa], isa, &desc);
                CHECK(same_values(out, expected, ROWS * STRIDE));
            }
            desc.out = a;
            kvs_rope(pools[2], kvs_cpu_isa_detect(), &desc);
            CHECK(same_values(a + 3 * STRIDE, expected + 3 * STRIDE, 320));
        }
    }
}

static void test_embed_rows_of_floats_are_exact(void)
{
    float table[6] = {1.5f, -2.25f, 3.0f, 1e-40f, INFINITY, 65504.0f};
    uint16_t halves[6], brains[6];
    const uint32_t ids[3] = {1, 0, 1};
    float rows[9];
    for (int i = 0; i < 6; i++) {
        halves[i] = kvs_f32_to_f16(table[i]);
        brains[i] = kvs_f32_to_bf16(table[i]);
    }
    CHECK_OK(kvs_embed_rows(KVS_TYPE_F32, 3, 2, table, ids, 3, rows, 3));
    CHECK(same_values(rows, table + 3, 3) && same_values(rows + 3, table, 3) && same_values(rows + 6, table + 3, 3));
    CHECK_OK(kvs_embed_rows(KVS_TYPE_F16, 3, 2, halves, ids, 3, rows, 3));
    CHECK(rows[3] == 1.5f && rows[2] == 65504.0f && rows[0] == 0.0f);
    CHECK_OK(kvs_embed_rows(KVS_TYPE_BF16, 3, 2, brains, ids, 3, rows, 3));
    CHECK(rows[4] == -2.25f && rows[1] == INFINITY);
}

/* One hand-made block of each kind of scale; the other layouts are compared with the file reader's decoder in Python. */
static void test_embed_rows_decode_blocks(void)
{
    uint8_t q4_1[20], q8_0[34];
    const uint32_t id = 0;
    float row[32];
    put_half(q4_1, 0.5f);
    put_half(q4_1 + 2, -1.25f);
    put_half(q8_0, 0.25f);
    for (uint32_t i = 0; i < 16; i++) {
        q4_1[4 + i] = (uint8_t)(i | (15 - i) << 4);
    }
    for (uint32_t i = 0; i < 32; i++) {
        q8_0[2 + i] = (uint8_t)(i * 8 - 128);
    }
    CHECK_OK(kvs_embed_rows(KVS_TYPE_Q4_1, 32, 1, q4_1, &id, 1, row, 32));
    for (uint32_t i = 0; i < 16; i++) {
        CHECK(row[i] == 0.5f * (float)i - 1.25f);
        CHECK(row[16 + i] == 0.5f * (float)(15 - i) - 1.25f);
    }
    CHECK_OK(kvs_embed_rows(KVS_TYPE_Q8_0, 32, 1, q8_0, &id, 1, row, 32));
    for (uint32_t i = 0; i < 32; i++) {
        CHECK(row[i] == 0.25f * ((float)i * 8 - 128));
    }
}

static void test_row_refusals_write_nothing(void)
{
    float table[4] = {1, 2, 3, 4}, row[2] = {7, 7};
    const uint32_t beyond[2] = {0, 2};
    CHECK_STATUS(kvs_embed_rows(KVS_TYPE_F32, 2, 2, table, beyond, 2, row, 2), KVS_EINVAL);
    CHECK_STATUS(kvs_embed_rows(KVS_TYPE_Q8_0, 2, 2, table, beyond, 1, row, 2), KVS_EINVAL);
    CHECK_STATUS(kvs_embed_rows(99, 2, 2, table, beyond, 1, row, 2), KVS_EUNSUPPORTED);
    CHECK_STATUS(kvs_gather_rows(table, 2, 2, beyond, 2, 2, row, 2), KVS_EINVAL);
    CHECK(row[0] == 7 && row[1] == 7);
}

static void test_gather_rows_moves_rows(void)
{
    const float x[6] = {1, 2, 3, 4, 5, 6};
    const uint32_t indices[2] = {2, 0};
    float rows[4];
    CHECK_OK(kvs_gather_rows(x, 2, 3, indices, 2, 2, rows, 2));
    CHECK(rows[0] == 5 && rows[1] == 6 && rows[2] == 1 && rows[3] == 2);
}

int main(void)
{
    for (uint32_t n = 1; n <= MAX_THREADS; n++) {
        pools[n] = kvs_threads_create(n);
    }
    test_exp_is_within_one_ulp();
    test_exp_at_its_ends();
    test_silu_at_its_ends();
    test_rms_norm_twins_are_equal();
    test_rms_norm_is_near_float64();
    test_binary_twins_are_equal();
    test_binary_in_place_equals_apart();
    test_one_gate_serves_its_row();
    test_sigmoid_and_softplus_are_near_float64();
    test_rope_table_turns_each_pair_by_its_axis();
    test_rope_table_is_right_at_far_positions();
    test_rope_table_row_does_not_depend_on_its_neighbours();
    test_rope_twins_are_equal_and_rotate();
    test_embed_rows_of_floats_are_exact();
    test_embed_rows_decode_blocks();
    test_row_refusals_write_nothing();
    test_gather_rows_moves_rows();
    for (uint32_t n = 1; n <= MAX_THREADS; n++) {
        kvs_threads_destroy(pools[n]);
    }
    return check_finish();
}
