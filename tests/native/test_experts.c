/* test_experts.c: the laws of experts.h: near float64, one result for every row count, thread count and instruction set, the
 * order of equal logits, factors, refusals. */
#include "check.h"
#include "cpu_weights.h"

#include "backends/cpu/backend.h"
#include "backends/cpu/experts.h"

#include <math.h>

enum { N_EXPERTS = 6, N_CHOSEN = 3, N_EMBD = 256, N_FF = 512, N_ROWS = 37, MAX_POOL = 3 };

typedef struct mixture {
    int type;
    uint8_t *rows[3]; /* gate, up, down in file layout */
    void *panels[3];
    float x[N_ROWS * N_EMBD];
    float router[N_ROWS * N_EXPERTS];
    float scales[3][N_EXPERTS];
} mixture;

static kvs_threads *pools[MAX_POOL + 1];
static mixture m;
static float out[N_ROWS * N_EMBD], expected[N_ROWS * N_EMBD];

static void make_mixture(int type)
{
    static const uint64_t k[3] = {N_EMBD, N_EMBD, N_FF};
    static const uint64_t n[3] = {N_EXPERTS * N_FF, N_EXPERTS * N_FF, N_EXPERTS * N_EMBD};
    m.type = type;
    for (uint64_t i = 0; i < 3; i++) {
        uint64_t bytes;
        m.rows[i] = random_weights(type, k[i], n[i], 77 + i);
        CHECK_OK(kvs_panel_bytes(type, k[i], n[i], NULL, &bytes));
        m.panels[i] = aligned_alloc(64, bytes);
        CHECK_OK(kvs_panel_pack(type, k[i], n[i], m.rows[i], m.panels[i], 0, kvs_panel_count(n[i])));
        fill_floats(m.scales[i], N_EXPERTS, 900 + i);
    }
    fill_floats(m.x, N_ROWS * N_EMBD, 5);
    fill_floats(m.router, N_ROWS * N_EXPERTS, 6);
}

static void free_mixture(void)
{
    for (int i = 0; i < 3; i++) {
        free(m.rows[i]);
        free(m.panels[i]);
    }
}

static kvs_expert_matrix matrix(int i, bool has_scales)
{
    return (kvs_expert_matrix){.type = m.type, .panels = m.panels[i], .scales = has_scales ? m.scales[i] : NULL};
}

static void run(uint32_t isa, uint32_t n_threads, uint32_t first_row, uint32_t n_rows, bool has_scales, float *to)
{
    kvs_experts_desc desc = {.gate = matrix(0, has_scales),
                             .up = matrix(1, has_scales),
                             .down = matrix(2, has_scales),
                             .n_experts = N_EXPERTS,
                             .n_chosen = N_CHOSEN,
                             .n_rows = n_rows,
                             .factor = 1.25f,
                             .n_embd = N_EMBD,
                             .n_ff = N_FF,
                             .x = m.x + first_row * N_EMBD,
                             .router = m.router + first_row * N_EXPERTS,
                             .out = to + first_row * N_EMBD};
    uint64_t bytes = 0;
    CHECK_OK(kvs_experts_workspace_bytes(&desc, &bytes));
    desc.workspace = aligned_alloc(64, bytes);
    CHECK_OK(kvs_experts_run(pools[n_threads], isa, &desc));
    free(desc.workspace);
}

/* ---- float64 ---- */

static double dot(const float *row, const double *x, uint64_t n)
{
    double sum = 0;
    for (uint64_t i = 0; i < n; i++) {
        sum += (double)row[i] * x[i];
    }
    return sum;
}

static void feed_forward64(uint32_t expert, const float *x, bool has_scales, double weight, double *sum)
{
    const float *gate = (const float *)(const void *)m.rows[0] + (size_t)expert * N_FF * N_EMBD;
    const float *up = (const float *)(const void *)m.rows[1] + (size_t)expert * N_FF * N_EMBD;
    const float *down = (const float *)(const void *)m.rows[2] + (size_t)expert * N_EMBD * N_FF;
    double scale[3], input[N_EMBD], hidden[N_FF];
    for (int i = 0; i < 3; i++) {
        scale[i] = has_scales ? (double)m.scales[i][expert] : 1.0;
    }
    for (int i = 0; i < N_EMBD; i++) {
        input[i] = (double)x[i];
    }
    for (int i = 0; i < N_FF; i++) {
        const double g = scale[0] * dot(gate + i * N_EMBD, input, N_EMBD);
        hidden[i] = g / (1.0 + exp(-g)) * scale[1] * dot(up + i * N_EMBD, input, N_EMBD);
    }
    for (int i = 0; i < N_EMBD; i++) {
        sum[i] += weight * scale[2] * dot(down + i * N_FF, hidden, N_FF);
    }
}

/* Picks the largest one after another, which is another way to choose than the code's. */
static void row64(uint32_t row, bool has_scales, double *sum)
{
    const float *logits = m.router + row * N_EXPERTS;
    bool is_taken[N_EXPERTS] = {false};
    uint32_t chosen[N_CHOSEN];
    double total = 0;
    for (int i = 0; i < N_CHOSEN; i++) {
        uint32_t best = N_EXPERTS;
        for (uint32_t e = 0; e < N_EXPERTS; e++) {
            if (!is_taken[e] && (best == N_EXPERTS || logits[e] > logits[best])) {
                best = e;
            }
        }
        is_taken[best] = true;
        chosen[i] = best;
        total += exp((double)logits[best]);
    }
    for (int i = 0; i < N_EMBD; i++) {
        sum[i] = 0;
    }
    for (int i = 0; i < N_CHOSEN; i++) {
        feed_forward64(chosen[i], m.x + row * N_EMBD, has_scales, 1.25 * exp((double)logits[chosen[i]]) / total, sum);
    }
}

static void test_near_float64(void)
{
    make_mixture(KVS_TYPE_F32);
    for (int with = 0; with < 2; with++) {
        run(kvs_cpu_isa_detect(), 2, 0, N_ROWS, with != 0, out);
        for (uint32_t row = 0; row < N_ROWS; row += 6) {
            double sum[N_EMBD], worst = 0, largest = 0;
            row64(row, with != 0, sum);
            for (uint32_t i = 0; i < N_EMBD; i++) {
                worst = fmax(worst, fabs(sum[i] - (double)out[row * N_EMBD + i]));
                largest = fmax(largest, fabs(sum[i]));
            }
            CHECK(largest > 0 && worst < 2e-6 * largest);
        }
    }
    free_mixture();
}

/* ---- bits ---- */

static bool equal_bits(void)
{
    return memcmp(out, expected, sizeof out) == 0;
}

static void test_bits_do_not_depend_on_rows_threads_or_twin(void)
{
    static const int types[] = {KVS_TYPE_F32, KVS_TYPE_Q4_K, KVS_TYPE_Q8_0};
    for (size_t t = 0; t < sizeof types / sizeof types[0]; t++) {
        make_mixture(types[t]);
        for (int with = 0; with < 2; with++) {
            run(KVS_ISA_REFERENCE, 1, 0, N_ROWS, with != 0, expected);
            for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
                for (uint32_t n_threads = 1; n_threads <= MAX_POOL; n_threads++) {
                    memset(out, 0xff, sizeof out);
                    run(isa, n_threads, 0, N_ROWS, with != 0, out);
                    CHECK(equal_bits());
                }
            }
            memset(out, 0xff, sizeof out);
            for (uint32_t row = 0; row < N_ROWS; row += 1 + row % 5) {
                const uint32_t left = N_ROWS - row;
                run(kvs_cpu_isa_detect(), 2, row, left < 1 + row % 5 ? left : 1 + row % 5, with != 0, out);
            }
            CHECK(equal_bits());
        }
        free_mixture();
    }
}

/* Beyond a block nothing changes: the same row again and again gives the same result. */
static void test_rows_beyond_a_block(void)
{
    enum { MANY = 300 };
    make_mixture(KVS_TYPE_Q8_0);
    float *x = malloc(MANY * N_EMBD * sizeof *x), *router = malloc(MANY * N_EXPERTS * sizeof *router);
    float *many = malloc(MANY * N_EMBD * sizeof *many);
    for (size_t row = 0; row < MANY; row++) {
        memcpy(x + row * N_EMBD, m.x + row % 7 * N_EMBD, N_EMBD * sizeof *x);
        memcpy(router + row * N_EXPERTS, m.router + row % 7 * N_EXPERTS, N_EXPERTS * sizeof *router);
    }
    run(kvs_cpu_isa_detect(), 1, 0, 7, false, expected);
    kvs_experts_desc desc = {.gate = matrix(0, false), .up = matrix(1, false), .down = matrix(2, false),
                             .n_experts = N_EXPERTS, .n_chosen = N_CHOSEN, .n_rows = MANY, .factor = 1.25f,
                             .n_embd = N_EMBD, .n_ff = N_FF, .x = x, .router = router, .out = many};
    uint64_t bytes = 0;
    CHECK_OK(kvs_experts_workspace_bytes(&desc, &bytes));
    desc.workspace = aligned_alloc(64, bytes);
    CHECK_OK(kvs_experts_run(pools[2], kvs_cpu_isa_detect(), &desc));
    for (size_t row = 0; row < MANY; row++) {
        CHECK(memcmp(many + row * N_EMBD, expected + row % 7 * N_EMBD, N_EMBD * sizeof *many) == 0);
    }
    free(desc.workspace);
    free(many);
    free(router);
    free(x);
    free_mixture();
}

static void test_equal_logits_take_the_lower_number(void)
{
    make_mixture(KVS_TYPE_Q8_0);
    for (int i = 0; i < N_EXPERTS; i++) {
        m.router[i] = 0.5f;
        m.router[N_EXPERTS + i] = i < N_CHOSEN ? 0.5f : -90.0f;
    }
    memcpy(m.x + N_EMBD, m.x, N_EMBD * sizeof m.x[0]);
    run(kvs_cpu_isa_detect(), 1, 0, 2, false, out);
    double worst = 0;
    for (int i = 0; i < N_EMBD; i++) {
        worst = fmax(worst, fabs((double)out[i] - (double)out[N_EMBD + i]));
    }
    CHECK(worst < 1e-6);
    free_mixture();
}

static void test_a_logit_that_is_no_number_reaches_the_output(void)
{
    make_mixture(KVS_TYPE_Q8_0);
    m.router[4] = NAN;
    run(kvs_cpu_isa_detect(), 1, 0, 2, false, out);
    CHECK(isnan(out[0]) && !isnan(out[N_EMBD]));
    free_mixture();
}

static void test_refusals(void)
{
    uint64_t bytes = 0;
    kvs_experts_desc desc = {.gate = {.type = KVS_TYPE_F32}, .up = {.type = KVS_TYPE_F32}, .down = {.type = KVS_TYPE_F32},
                             .n_experts = 4, .n_chosen = 2, .n_rows = 1, .n_embd = 32, .n_ff = 24};
    CHECK_STATUS(kvs_experts_workspace_bytes(&desc, &bytes), KVS_EUNSUPPORTED);
    desc.n_ff = 32;
    CHECK_OK(kvs_experts_workspace_bytes(&desc, &bytes));
    desc.n_chosen = 5;
    CHECK_STATUS(kvs_experts_workspace_bytes(&desc, &bytes), KVS_EINVAL);
    desc.n_chosen = 2;
    desc.n_experts = KVS_EXPERTS_MAX + 1;
    CHECK_STATUS(kvs_experts_workspace_bytes(&desc, &bytes), KVS_EINVAL);
}

int main(void)
{
    for (uint32_t i = 1; i <= MAX_POOL; i++) {
        pools[i] = kvs_threads_create(i);
    }
    test_near_float64();
    test_bits_do_not_depend_on_rows_threads_or_twin();
    test_rows_beyond_a_block();
    test_equal_logits_take_the_lower_number();
    test_a_logit_that_is_no_number_reaches_the_output();
    test_refusals();
    for (uint32_t i = 1; i <= MAX_POOL; i++) {
        kvs_threads_destroy(pools[i]);
    }
    return check_finish();
}
