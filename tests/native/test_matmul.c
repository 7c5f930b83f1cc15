/* test_matmul.c: the laws of matmul.h and panel.h: one result for every row count, thread count and instruction set, near a
 * float64 sum, and refusals by name. */
#include "check.h"
#include "cpu_weights.h"

#include "backends/cpu/backend.h"
#include "backends/cpu/elementwise.h"
#include "backends/cpu/matmul.h"

#include <math.h>

#define MAX_ROWS 64u
#define MAX_THREADS 3u
#define EPS 1e-5f

typedef struct matrix {
    int type;
    uint64_t k;
    uint64_t n;
    uint8_t *rows;
    void *panels;
} matrix;

static kvs_threads *pools[MAX_THREADS + 1];
static void *workspace;
static const uint64_t workspace_bytes = 4u << 20;

static matrix make_matrix(int type, uint64_t k, uint64_t n, uint64_t seed)
{
    matrix made = {.type = type, .k = k, .n = n, .rows = random_weights(type, k, n, seed)};
    uint64_t bytes;
    CHECK_OK(kvs_panel_bytes(type, k, n, NULL, &bytes));
    made.panels = aligned_alloc(64, bytes);
    CHECK_OK(kvs_panel_pack(type, k, n, made.rows, made.panels, 0, kvs_panel_count(n)));
    return made;
}

static void free_matrix(matrix *matrix)
{
    free(matrix->rows);
    free(matrix->panels);
}

static kvs_matmul_desc describe(const matrix *w, const float *x, uint32_t n_rows, float *out)
{
    return (kvs_matmul_desc){
        .part = {{.type = w->type, .n = w->n, .panels = w->panels, .out = out, .out_stride = w->n}},
        .n_parts = 1,
        .n_rows = n_rows,
        .k = w->k,
        .x = x,
        .x_stride = w->k,
        .norm_eps = EPS,
        .workspace = workspace,
        .workspace_bytes = workspace_bytes,
    };
}

/* Equal bits, or both NaN. */
static bool same_values(const float *a, const float *b, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        if (kvs_f32_bits(a[i]) != kvs_f32_bits(b[i]) && !(isnan(a[i]) && isnan(b[i]))) {
            fprintf(stderr, "value %llu: %a, %a\n", (unsigned long long)i, (double)a[i], (double)b[i]);
            return false;
        }
    }
    return true;
}

/* Rows one at a time on one thread by the reference: what everything else must equal. */
static void reference_rows(kvs_matmul_desc desc, const float *residual, float *out)
{
    const uint64_t n = desc.part[0].n;
    const uint32_t n_rows = desc.n_rows;
    const float *x = desc.x;
    for (uint32_t r = 0; r < n_rows; r++) {
        desc.n_rows = 1;
        desc.x = x + r * desc.k;
        desc.part[0].out = out + r * n;
        if (residual != NULL) {
            memcpy(desc.part[0].out, residual + r * n, n * sizeof *out);
        }
        CHECK_OK(kvs_matmul_run(pools[1], KVS_ISA_REFERENCE, &desc));
    }
}

/* `desc` has MAX_ROWS rows and one output; `residual` is what an adding epilogue finds there. */
static void check_every_way(kvs_matmul_desc desc, const float *residual, const char *what)
{
    static const uint32_t row_counts[] = {1, 2, 3, 5, 8, 17, 64};
    const uint64_t n = desc.part[0].n;
    float *expected = malloc(MAX_ROWS * n * sizeof *expected);
    float *out = malloc(MAX_ROWS * n * sizeof *out);
    reference_rows(desc, residual, expected);
    for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
        for (size_t i = 0; i < sizeof row_counts / sizeof row_counts[0]; i++) {
            const uint32_t n_threads = isa == KVS_ISA_REFERENCE ? 2 : 1 + (uint32_t)i % MAX_THREADS;
            desc.n_rows = row_counts[i];
            desc.part[0].out = out;
            for (uint64_t v = 0; v < desc.n_rows * n; v++) {
                out[v] = residual != NULL ? residual[v] : NAN;
            }
            CHECK_OK(kvs_matmul_run(pools[n_threads], isa, &desc));
            if (!CHECK(same_values(out, expected, desc.n_rows * n))) {
                fprintf(stderr, "%s: isa %u, %u rows, %u threads\n", what, isa, desc.n_rows, n_threads);
            }
        }
    }
    free(expected);
    free(out);
}

static void test_matmul_bits_do_not_depend_on_rows_threads_or_isa(void)
{
    static const uint64_t depths[] = {1, 3, 4};
    static const uint64_t widths[] = {1, 17, 75};
    for (size_t t = 0; t < N_WEIGHT_TYPES; t++) {
        uint32_t block_values, block_bytes;
        kvs_type_block(weight_types[t], &block_values, &block_bytes);
        for (size_t i = 0; i < 3; i++) {
            const uint64_t k = depths[i] * (block_values == 1 ? 37 : block_values);
            matrix w = make_matrix(weight_types[t], k, widths[i], 11 * t + i);
            float *x = malloc(MAX_ROWS * k * sizeof *x);
            fill_floats(x, MAX_ROWS * k, t + i);
            float *out = malloc(MAX_ROWS * w.n * sizeof *out);
            check_every_way(describe(&w, x, MAX_ROWS, out), NULL, kvs_type_name(w.type));
            free(out);
            free(x);
            free_matrix(&w);
        }
    }
}

static void test_matmul_fused_steps_keep_the_bits(void)
{
    const uint64_t k = 288, n = 41;
    matrix gate = make_matrix(KVS_TYPE_Q4_1, k, n, 1);
    matrix up = make_matrix(KVS_TYPE_F16, k, n, 2);
    float *x = malloc(MAX_ROWS * k * sizeof *x);
    float *residual = malloc(MAX_ROWS * n * sizeof *residual);
    float weight[288], bias[41], other_bias[41];
    fill_floats(x, MAX_ROWS * k, 3);
    fill_floats(residual, MAX_ROWS * n, 4);
    fill_floats(weight, k, 5);
    fill_floats(bias, n, 6);
    fill_floats(other_bias, n, 7);
    kvs_matmul_desc desc = describe(&gate, x, MAX_ROWS, NULL);
    desc.norm_weight = weight;
    check_every_way(desc, NULL, "norm");
    desc.part[0].bias = bias;
    check_every_way(desc, NULL, "bias");
    desc.epilogue = KVS_EPILOGUE_ADD;
    check_every_way(desc, residual, "add");
    desc.epilogue = KVS_EPILOGUE_SWIGLU;
    desc.n_parts = 2;
    desc.part[1] = (kvs_matmul_part){.type = up.type, .n = n, .panels = up.panels, .bias = other_bias};
    check_every_way(desc, NULL, "swiglu");
    free(x);
    free(residual);
    free_matrix(&gate);
    free_matrix(&up);
}

/* Runs of 14 outputs have a scale each, so they end inside panels. */
static void test_matmul_scales_multiply_sums_before_the_bias(void)
{
    enum { K = 288, N = 42 };
    static const float scales[3] = {0.3f, -1.7f, 1e-3f};
    matrix gate = make_matrix(KVS_TYPE_Q4_1, K, N, 1);
    matrix up = make_matrix(KVS_TYPE_Q8_0, K, N, 2);
    float x[3 * K], bias[N], plain[3 * N], out[3 * N], expected[3 * N], up_out[3 * N];
    fill_floats(x, 3 * K, 3);
    fill_floats(bias, N, 6);
    kvs_matmul_desc desc = describe(&gate, x, 3, plain);
    CHECK_OK(kvs_matmul_run(pools[2], KVS_ISA_REFERENCE, &desc));
    kvs_matmul_desc up_desc = describe(&up, x, 3, up_out);
    CHECK_OK(kvs_matmul_run(pools[2], KVS_ISA_REFERENCE, &up_desc));
    desc.part[0].out = out;
    desc.part[0].bias = bias;
    desc.part[0].scales = scales;
    desc.part[0].n_scales = 3;
    for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
        CHECK_OK(kvs_matmul_run(pools[2], isa, &desc));
        for (uint32_t i = 0; i < 3 * N; i++) {
            const float scaled = plain[i] * scales[i % N / 14];
            expected[i] = scaled + bias[i % N];
        }
        CHECK(same_values(out, expected, 3 * N));
    }
    desc.part[0].bias = NULL;
    desc.part[1] = (kvs_matmul_part){.type = up.type, .n = N, .panels = up.panels, .scales = scales, .n_scales = 1};
    desc.n_parts = 2;
    desc.epilogue = KVS_EPILOGUE_SWIGLU;
    for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
        CHECK_OK(kvs_matmul_run(pools[2], isa, &desc));
        for (uint32_t i = 0; i < 3 * N; i++) {
            const double y = (double)plain[i] * (double)scales[i % N / 14];
            const double product = y / (1 + exp(-y)) * (double)up_out[i] * (double)scales[0];
            CHECK(fabs((double)out[i] - product) <= 1e-6 * fabs(product));
        }
    }
    desc.part[0].n_scales = 4;
    CHECK_STATUS(kvs_matmul_run(pools[1], KVS_ISA_REFERENCE, &desc), KVS_EINVAL);
    free_matrix(&gate);
    free_matrix(&up);
}

static void test_matmul_parts_equal_separate_matmuls(void)
{
    const uint64_t k = 256;
    static const uint64_t widths[3] = {50, 16, 31};
    static const int types[3] = {KVS_TYPE_Q4_K, KVS_TYPE_BF16, KVS_TYPE_Q6_K};
    float x[9 * 256], apart[9 * 50], together[3][9 * 50];
    matrix w[3];
    fill_floats(x, 9 * k, 8);
    for (uint32_t i = 0; i < 3; i++) {
        w[i] = make_matrix(types[i], k, widths[i], 20 + i);
    }
    for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
        kvs_matmul_desc all = describe(&w[0], x, 9, together[0]);
        all.n_parts = 3;
        for (uint32_t i = 1; i < 3; i++) {
            all.part[i] = describe(&w[i], x, 9, together[i]).part[0];
        }
        CHECK_OK(kvs_matmul_run(pools[3], isa, &all));
        for (uint32_t i = 0; i < 3; i++) {
            kvs_matmul_desc one = describe(&w[i], x, 9, apart);
            CHECK_OK(kvs_matmul_run(pools[2], isa, &one));
            CHECK(same_values(together[i], apart, 9 * widths[i]));
        }
    }
    for (uint32_t i = 0; i < 3; i++) {
        free_matrix(&w[i]);
    }
}

/* The quantization of activations is restated here: nearest of 127 steps of the largest magnitude. */
static void rounded_activations(const float *x, uint64_t k, bool is_quantized, double *rounded)
{
    for (uint64_t first = 0; first < k; first += 32) {
        double largest = 0;
        for (uint64_t i = first; is_quantized && i < first + 32; i++) {
            largest = fabs((double)x[i]) > largest ? fabs((double)x[i]) : largest;
        }
        for (uint64_t i = first; i < first + 32 && i < k; i++) {
            double step = (double)((float)largest / 127.0f);
            rounded[i] = is_quantized ? step * rint((double)x[i] / step) : (double)x[i];
        }
    }
}

/* float32 sums of n terms err by at most n * 2^-24 of the sum of magnitudes; a code on the edge between two steps may round
 * the other way, which moves one term by a step. */
static void test_matmul_is_near_the_float64_sum(void)
{
    enum { K = 1024, N = 19 };
    static float x[K], weights[N * K], out[N];
    static double rounded[K];
    uint32_t ids[N];
    fill_floats(x, K, 31);
    for (uint32_t i = 0; i < N; i++) {
        ids[i] = i;
    }
    for (size_t t = 0; t < N_WEIGHT_TYPES; t++) {
        const int type = weight_types[t];
        const bool is_float = type == KVS_TYPE_F32 || type == KVS_TYPE_F16 || type == KVS_TYPE_BF16;
        matrix w = make_matrix(type, K, N, 40 + t);
        CHECK_OK(kvs_embed_rows(type, K, N, w.rows, ids, N, weights, K));
        rounded_activations(x, K, !is_float, rounded);
        kvs_matmul_desc desc = describe(&w, x, 1, out);
        CHECK_OK(kvs_matmul_run(pools[1], kvs_cpu_isa_detect(), &desc));
        for (uint32_t i = 0; i < N; i++) {
            double sum = 0, magnitude = 0, largest = 0;
            for (uint32_t j = 0; j < K; j++) {
                double term = (double)weights[i * K + j] * rounded[j];
                sum += term;
                magnitude += fabs(term);
                largest = fmax(largest, fabs((double)weights[i * K + j]));
            }
            double bound = magnitude * 4e-6 + (is_float ? 0 : largest / 127);
            CHECK(fabs((double)out[i] - sum) <= bound);
        }
        free_matrix(&w);
    }
}

/* Infinities, NaNs and subnormals in scales and activations: the same value in every twin. */
static void test_matmul_hostile_values_are_equal_everywhere(void)
{
    static const uint16_t halves[] = {0x7c00, 0xfc00, 0x7e00, 0x0001, 0x83ff, 0x7bff, 0x0000, 0x8000};
    static const uint8_t bytes[] = {0x00, 0x01, 0x02, 0x7f, 0x80, 0x81, 0xfe, 0xff}; /* the same of 8-bit scales */
    static const float values[] = {INFINITY, -INFINITY, NAN, 1e-42f, 3.4e38f, -0.0f, 1e-31f, 1e30f};
    const uint64_t k = 512, n = 24;
    float *x = malloc(MAX_ROWS * k * sizeof *x);
    for (size_t t = 0; t < N_WEIGHT_TYPES; t++) {
        const int type = weight_types[t];
        uint32_t block_values, block_bytes;
        int scale, minimum;
        kvs_type_block(type, &block_values, &block_bytes);
        half_places(type, &scale, &minimum);
        matrix w = make_matrix(type, k, n, 60 + t);
        for (uint64_t b = 0; block_values > 1 && b < n * k / block_values; b += 3) {
            put_scale(type, w.rows + b * block_bytes, halves[b % 8]);
            if (type == KVS_TYPE_MXFP4 || type == KVS_TYPE_NVFP4) {
                w.rows[b * block_bytes] = bytes[b % 8];
            }
            if (minimum >= 0) {
                memcpy(w.rows + b * block_bytes + minimum, &halves[(b / 8) % 8], 2);
            }
        }
        for (uint64_t i = 0; block_values == 1 && i < 2; i++) {
            memcpy(w.rows + 600 * i * block_bytes, i == 0 ? (const void *)&values[2] : &values[0], block_bytes);
        }
        CHECK_OK(kvs_panel_pack(type, k, n, w.rows, w.panels, 0, kvs_panel_count(n)));
        fill_floats(x, MAX_ROWS * k, t);
        for (uint64_t i = 0; i < MAX_ROWS; i += 2) {
            x[i * k + i * 7] = values[i / 2 % 8];
        }
        check_every_way(describe(&w, x, MAX_ROWS, NULL), NULL, kvs_type_name(type));
        free_matrix(&w);
    }
    free(x);
}

static void test_matmul_row_that_is_not_finite_gives_only_nan(void)
{
    enum { K = 64, N = 16 };
    static const float values[] = {INFINITY, -INFINITY, NAN};
    float x[K], out[N];
    matrix w = make_matrix(KVS_TYPE_Q8_0, K, N, 70);
    for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
        for (uint32_t v = 0; v < 3; v++) {
            fill_floats(x, K, 71);
            x[40] = values[v];
            kvs_matmul_desc desc = describe(&w, x, 1, out);
            CHECK_OK(kvs_matmul_run(pools[1], isa, &desc));
            for (uint32_t i = 0; i < N; i++) {
                CHECK(isnan(out[i]));
            }
        }
    }
    free_matrix(&w);
}

static void test_panel_pack_in_pieces_equals_pack_at_once(void)
{
    for (size_t t = 0; t < N_WEIGHT_TYPES; t++) {
        const uint64_t k = 512, n = 55;
        matrix w = make_matrix(weight_types[t], k, n, 80 + t);
        uint64_t panel_bytes, bytes;
        CHECK_OK(kvs_panel_bytes(w.type, k, n, &panel_bytes, &bytes));
        CHECK_U64(bytes, panel_bytes * 4);
        CHECK(panel_bytes % 64 == 0);
        uint8_t *pieces = aligned_alloc(64, bytes);
        for (uint64_t i = 0; i < 4; i++) {
            CHECK_OK(kvs_panel_pack(w.type, k, n, w.rows, pieces, 3 - i, 1));
        }
        CHECK(memcmp(pieces, w.panels, bytes) == 0);
        free(pieces);
        free_matrix(&w);
    }
}

/* Bits a value that panels of codebook types take; 0: as many as the file. */
static double panel_bits(int type)
{
    switch (type) {
    case KVS_TYPE_IQ1_S:
        return 2 + (16 + 8 * 4 + 32) / 256.0;
    case KVS_TYPE_IQ1_M:
        return 2 + (16 + 16 * 4 + 32) / 256.0;
    case KVS_TYPE_IQ2_XXS:
        return 3 + (16 + 8 * 4) / 256.0;
    case KVS_TYPE_IQ2_XS:
    case KVS_TYPE_IQ2_S:
        return 3 + (16 + 16 * 4) / 256.0;
    case KVS_TYPE_IQ3_XXS:
    case KVS_TYPE_IQ3_S:
        return 4 + (16 + 8 * 4) / 256.0;
    default:
        return 0;
    }
}

/* Panels are read instead of the file, so their size is the price of a token. Those of codebook types hold levels, not
 * indices. */
static void test_panels_stay_as_small_as_files(void)
{
    for (size_t t = 0; t < N_WEIGHT_TYPES; t++) {
        uint32_t block_values, block_bytes;
        uint64_t bytes;
        kvs_type_block(weight_types[t], &block_values, &block_bytes);
        CHECK_OK(kvs_panel_bytes(weight_types[t], 4096, 160, NULL, &bytes));
        const uint64_t file_bytes = 160 * 4096 / block_values * block_bytes;
        const double bits = panel_bits(weight_types[t]);
        if (bits > 0) {
            CHECK_U64(bytes, (uint64_t)(160 * 4096 / 8 * bits));
        } else {
            CHECK(bytes <= file_bytes + file_bytes / 26);
        }
    }
}

static void test_panel_refusals(void)
{
    uint64_t bytes;
    CHECK_STATUS(kvs_panel_bytes(15, 256, 1, NULL, &bytes), KVS_EUNSUPPORTED);
    CHECK_STATUS(kvs_panel_bytes(-1, 256, 1, NULL, &bytes), KVS_EUNSUPPORTED);
    CHECK_STATUS(kvs_panel_bytes(KVS_TYPE_Q8_0, 33, 1, NULL, &bytes), KVS_EINVAL);
    CHECK_STATUS(kvs_panel_bytes(KVS_TYPE_Q4_K, 288, 1, NULL, &bytes), KVS_EINVAL);
    CHECK_STATUS(kvs_panel_bytes(KVS_TYPE_F32, 0, 1, NULL, &bytes), KVS_EINVAL);
    CHECK_STATUS(kvs_panel_bytes(KVS_TYPE_F32, 1, 0, NULL, &bytes), KVS_EINVAL);
    CHECK_STATUS(kvs_panel_bytes(KVS_TYPE_F32, UINT64_MAX, 1, NULL, &bytes), KVS_EOVERFLOW);
    CHECK_STATUS(kvs_panel_bytes(KVS_TYPE_Q8_0, UINT64_C(1) << 63, 1, NULL, &bytes), KVS_EOVERFLOW);
    CHECK_STATUS(kvs_panel_bytes(KVS_TYPE_F32, 1u << 30, UINT64_MAX, NULL, &bytes), KVS_EOVERFLOW);
    CHECK_STATUS(kvs_panel_pack(KVS_TYPE_F32, 1, 16, &bytes, &bytes, 1, 1), KVS_EINVAL);
    CHECK_STATUS(kvs_panel_pack(KVS_TYPE_F32, 1, 16, &bytes, &bytes, 1, UINT64_MAX), KVS_EINVAL);
}

static void test_matmul_refusals(void)
{
    float x[32] = {0}, out[16];
    uint64_t bytes;
    matrix w = make_matrix(KVS_TYPE_Q8_0, 32, 16, 90);
    kvs_matmul_desc desc = describe(&w, x, 1, out);
    CHECK_STATUS(kvs_matmul_workspace_bytes(32, 0, &bytes), KVS_EINVAL);
    CHECK_STATUS(kvs_matmul_workspace_bytes(32, KVS_MATMUL_ROWS + 1, &bytes), KVS_EINVAL);
    CHECK_STATUS(kvs_matmul_workspace_bytes(UINT64_MAX - 3, 1, &bytes), KVS_EOVERFLOW);
    CHECK_OK(kvs_matmul_workspace_bytes(32, 1, &bytes));
    desc.workspace_bytes = bytes - 1;
    CHECK_STATUS(kvs_matmul_run(pools[1], KVS_ISA_REFERENCE, &desc), KVS_ENOSPACE);
    desc.workspace_bytes = bytes;
    CHECK_OK(kvs_matmul_run(pools[1], KVS_ISA_REFERENCE, &desc));
    desc.n_rows = 0;
    CHECK_STATUS(kvs_matmul_run(pools[1], KVS_ISA_REFERENCE, &desc), KVS_EINVAL);
    desc = describe(&w, x, 1, out);
    desc.n_parts = 4;
    CHECK_STATUS(kvs_matmul_run(pools[1], KVS_ISA_REFERENCE, &desc), KVS_EINVAL);
    desc.n_parts = 1;
    desc.epilogue = KVS_EPILOGUE_SWIGLU;
    CHECK_STATUS(kvs_matmul_run(pools[1], KVS_ISA_REFERENCE, &desc), KVS_EINVAL);
    desc.epilogue = KVS_EPILOGUE_NONE;
    desc.part[0].type = 9;
    CHECK_STATUS(kvs_matmul_run(pools[1], KVS_ISA_REFERENCE, &desc), KVS_EUNSUPPORTED);
    free_matrix(&w);
}

int main(void)
{
    for (uint32_t n = 1; n <= MAX_THREADS; n++) {
        pools[n] = kvs_threads_create(n);
    }
    workspace = aligned_alloc(64, workspace_bytes);
    test_matmul_bits_do_not_depend_on_rows_threads_or_isa();
    test_matmul_fused_steps_keep_the_bits();
    test_matmul_scales_multiply_sums_before_the_bias();
    test_matmul_parts_equal_separate_matmuls();
    test_matmul_is_near_the_float64_sum();
    test_matmul_hostile_values_are_equal_everywhere();
    test_matmul_row_that_is_not_finite_gives_only_nan();
    test_panel_pack_in_pieces_equals_pack_at_once();
    test_panels_stay_as_small_as_files();
    test_panel_refusals();
    test_matmul_refusals();
    free(workspace);
    for (uint32_t n = 1; n <= MAX_THREADS; n++) {
        kvs_threads_destroy(pools[n]);
    }
    return check_finish();
}
