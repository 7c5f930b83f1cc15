/* test_attend.c: attention equals a plain softmax, and has the same bits however it is cut. */
#include "attend_scene.h"
#include "backends/cpu/mathf.h"
#include "check.h"

static const int32_t TYPES[] = {KVS_TYPE_F32,  KVS_TYPE_F16,  KVS_TYPE_BF16, KVS_TYPE_Q8_0,  KVS_TYPE_Q4_0,
                                KVS_TYPE_Q4_1, KVS_TYPE_Q5_0, KVS_TYPE_Q5_1, KVS_TYPE_IQ4_NL};
#define N_TYPES (sizeof TYPES / sizeof TYPES[0])

/* Relative to values of about 1: chains of some hundred float32 additions. */
#define TOLERANCE 2e-5

static kvs_kv_layer layer_of(uint32_t n_kv_heads, uint32_t head_dim, int32_t type_k, int32_t type_v)
{
    return (kvs_kv_layer){
        .n_kv_heads = n_kv_heads, .head_dim_k = head_dim, .head_dim_v = head_dim, .type_k = type_k, .type_v = type_v};
}

static float *room(const scene *s)
{
    return scene_alloc(s->n_rows * scene_out_row(s) * sizeof(float));
}

static bool same(const scene *s, const float *a, const float *b, uint32_t n_rows)
{
    return memcmp(a, b, n_rows * scene_out_row(s) * sizeof *a) == 0;
}

static void check_against_softmax(const scene *s, const float *out, uint32_t row)
{
    const uint32_t n_values = s->layer.head_dim_v;
    double expected[1024], worst = 0.0;
    for (uint32_t head = 0; head < s->n_query_heads; head += s->n_query_heads > 4 ? 3 : 1) {
        scene_expect(s, row, head, expected);
        for (uint32_t d = 0; d < n_values; d++) {
            const double got = (double)out[row * scene_out_row(s) + (size_t)head * n_values + d];
            const double error = fabs(got - expected[d]);
            worst = error <= worst ? worst : error; /* a NaN stays */
        }
    }
    if (!CHECK(worst <= TOLERANCE)) {
        fprintf(stderr, "  error %g: types %d %d, head %u, %u query heads, row %u of %u, %llu tokens\n", worst,
                s->layer.type_k, s->layer.type_v, n_values, s->n_query_heads, row, s->n_rows,
                (unsigned long long)s->n_tokens);
    }
}

/* Every twin of the machine: equal to each other, and close to the softmax in the first and last row. */
static void check_twins(kvs_threads *threads, kvs_kv_layer layer, uint32_t group, uint32_t n_rows, uint64_t n_tokens)
{
    scene s = scene_make(layer, group, n_rows, n_tokens);
    float *expected = room(&s), *out = room(&s);
    const uint64_t work = s.n_query_heads * n_rows * n_tokens * layer.head_dim_k;
    const uint32_t last = kvs_cpu_isa_detect();
    uint32_t first = work < 6000000 ? KVS_ISA_REFERENCE : last < KVS_ISA_AVX2 ? last : KVS_ISA_AVX2;
    scene_run(&s, threads, first, 0, n_rows, expected);
    for (uint32_t isa = first + 1; isa <= last; isa++) {
        scene_run(&s, threads, isa, 0, n_rows, out);
        if (!CHECK(same(&s, out, expected, n_rows))) {
            fprintf(stderr, "  isa %u: types %d %d, head %u, group %u, %u rows, %llu tokens\n", isa, layer.type_k,
                    layer.type_v, layer.head_dim_k, group, n_rows, (unsigned long long)n_tokens);
        }
    }
    check_against_softmax(&s, expected, 0);
    check_against_softmax(&s, expected, n_rows - 1);
    free(expected);
    free(out);
    scene_free(&s);
}

static void test_attend_equals_softmax_for_every_type_pair(kvs_threads *threads)
{
    for (size_t k = 0; k < N_TYPES; k++) {
        for (size_t v = 0; v < N_TYPES; v++) {
            check_twins(threads, layer_of(2, 64, TYPES[k], TYPES[v]), 3, 2, 300);
        }
    }
}

static void test_attend_equals_softmax_for_every_shape(kvs_threads *threads)
{
    static const uint32_t HEADS[] = {64, 96, 128, 256};
    static const uint32_t GROUPS[] = {1, 3, 4, 6, 8, 16};
    static const uint32_t ROWS[] = {1, 2, 3, 5, 8, 17, 64};
    static const uint64_t TOKENS[] = {1, 63, 255, 256, 257, 513, 1017, 4097, 4353};
    uint32_t turn = 0;
    for (size_t h = 0; h < 4; h++) {
        for (size_t t = 0; t < 9; t++) {
            for (size_t r = 0; r < 7; r++, turn++) {
                if (ROWS[r] > TOKENS[t] || (TOKENS[t] > 4000 && (turn % 3 != 0 || HEADS[h] == 256))) {
                    continue;
                }
                /* Types and groups take turns: 7 rows, 6 groups and 9 types have no common factor but 3. */
                const int32_t type_k = TYPES[(turn + turn / 9) % N_TYPES], type_v = TYPES[turn * 4 % N_TYPES];
                check_twins(threads, layer_of(turn % 2 + 1, HEADS[h], type_k, type_v), GROUPS[turn % 6], ROWS[r],
                            TOKENS[t]);
            }
        }
    }
}

static void test_attend_serves_unequal_and_odd_head_sizes(kvs_threads *threads)
{
    kvs_kv_layer layer = layer_of(1, 80, KVS_TYPE_F16, KVS_TYPE_BF16);
    check_twins(threads, layer, 5, 3, 270);
    layer = layer_of(2, 16, KVS_TYPE_F32, KVS_TYPE_F16);
    check_twins(threads, layer, 2, 9, 31);
    layer = layer_of(2, 32, KVS_TYPE_Q8_0, KVS_TYPE_Q4_0);
    layer.head_dim_v = 112;
    layer.type_v = KVS_TYPE_F16;
    check_twins(threads, layer, 2, 4, 600);
    layer = layer_of(1, 32, KVS_TYPE_Q5_1, KVS_TYPE_Q5_0);
    layer.head_dim_k = 160;
    check_twins(threads, layer, 7, 20, 530);
}

/* One to seven queries on a page, in one row and in several: the widths at which the vector code changes its ways. */
static void test_attend_equals_softmax_for_every_small_width(kvs_threads *threads)
{
    for (size_t t = 0; t < N_TYPES; t++) {
        for (uint32_t width = 1; width <= 7; width++) {
            const kvs_kv_layer layer = layer_of(1, width % 2 == 0 ? 96 : 64, TYPES[t], TYPES[(t + 1) % N_TYPES]);
            check_twins(threads, layer, width, 1, 290);
            check_twins(threads, layer, 1, width, 258);
        }
        check_twins(threads, layer_of(1, 64, TYPES[t], TYPES[t]), 2, 3, 257);
        check_twins(threads, layer_of(1, 64, TYPES[t], TYPES[t]), 3, 2, 33);
    }
}

#define ORDER_VALUES 32u

typedef struct part {
    float m, s, acc[ORDER_VALUES];
} part;

/* Fold b into a, as attend.h states it. */
static void fold(part *a, const part *b)
{
    if (a->s == 0.0f) {
        *a = *b;
        return;
    }
    const float m = b->m > a->m ? b->m : a->m, fa = kvs_expf(a->m - m), fb = kvs_expf(b->m - m);
    a->m = m;
    a->s = fmaf(b->s, fb, a->s * fa);
    for (uint32_t d = 0; d < ORDER_VALUES; d++) {
        a->acc[d] = fmaf(b->acc[d], fb, a->acc[d] * fa);
    }
}

/* The leaf of tokens [0, n_tokens) of a page of decoded rows. */
static part leaf_part(const float *q, const float *k, const float *v, uint64_t n_tokens, float scale)
{
    part leaf = {.m = -INFINITY};
    float weights[KVS_PAGE_TOKENS], lanes[16] = {0};
    for (uint64_t t = 0; t < n_tokens; t++) {
        float dot = 0.0f;
        for (uint32_t d = 0; d < ORDER_VALUES; d++) {
            dot = fmaf(q[d], k[t * ORDER_VALUES + d], dot);
        }
        weights[t] = dot * scale;
        leaf.m = weights[t] > leaf.m ? weights[t] : leaf.m;
    }
    for (uint64_t t = 0; t < n_tokens; t++) {
        const float weight = kvs_expf(weights[t] - leaf.m);
        lanes[t % 16] += weight;
        for (uint32_t d = 0; d < ORDER_VALUES; d++) {
            leaf.acc[d] = fmaf(weight, v[t * ORDER_VALUES + d], leaf.acc[d]);
        }
    }
    for (uint32_t width = 8; width != 0; width /= 2) {
        for (uint32_t lane = 0; lane < width; lane++) {
            lanes[lane] += lanes[lane + width];
        }
    }
    leaf.s = lanes[0];
    return leaf;
}

/* One query over 36 pages, written down once more: pages into groups of 16, groups into the result. */
static void test_attend_follows_the_stated_order(kvs_threads *threads)
{
    scene s = scene_make(layer_of(1, ORDER_VALUES, KVS_TYPE_Q8_0, KVS_TYPE_Q4_1), 1, 1, 35 * 256 + 100);
    float k[KVS_PAGE_TOKENS * ORDER_VALUES], v[KVS_PAGE_TOKENS * ORDER_VALUES];
    float out[ORDER_VALUES], expected[ORDER_VALUES];
    part result = {0}, group = {0};
    for (uint64_t page = 0; page < s.n_pages; page++) {
        const uint64_t left = s.n_tokens - page * KVS_PAGE_TOKENS;
        kvs_decode_rows(KVS_ISA_REFERENCE, &s.layer, &s.record, (const void *)(uintptr_t)s.table[page], 0,
                        KVS_PAGE_TOKENS, k, ORDER_VALUES, v, ORDER_VALUES);
        const part leaf = leaf_part(s.q, k, v, left < KVS_PAGE_TOKENS ? left : KVS_PAGE_TOKENS, s.scale);
        fold(&group, &leaf);
        if (page % 16 == 15 || page + 1 == s.n_pages) {
            fold(&result, &group);
            group = (part){0};
        }
    }
    for (uint32_t d = 0; d < ORDER_VALUES; d++) {
        expected[d] = result.acc[d] * (1.0f / result.s);
    }
    for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
        scene_run(&s, threads, isa, 0, 1, out);
        CHECK(memcmp(out, expected, sizeof out) == 0);
    }
    scene_free(&s);
}

/* Waves as a small ring would bring them: each page copied into a slot, the table empty everywhere else. */
static void run_through_slots(const scene *s, kvs_threads *threads, uint32_t isa, uint32_t n_slots, uint64_t *seed,
                              float *out)
{
    uint64_t *table = scene_alloc(s->n_pages * sizeof *table);
    uint8_t *slots = scene_alloc(n_slots * s->record.record_bytes);
    kvs_attend_job job = scene_job(s, threads, 0, s->n_rows, out);
    memset(table, 0, s->n_pages * sizeof *table);
    job.page_table = table;
    kvs_attend_begin(&job);
    for (uint64_t page = 0; page < s->n_pages;) {
        uint64_t n = 1 + scene_random(seed) % n_slots;
        n = n < s->n_pages - page ? n : s->n_pages - page;
        memset(slots, 0xff, n_slots * s->record.record_bytes);
        for (uint64_t i = 0; i < n; i++) {
            uint8_t *slot = slots + (n - 1 - i) * s->record.record_bytes;
            memcpy(slot, (const void *)(uintptr_t)s->table[page + i], s->record.record_bytes);
            table[page + i] = (uint64_t)(uintptr_t)slot;
        }
        kvs_attend_wave(threads, isa, &job, page, page + n);
        memset(table, 0, s->n_pages * sizeof *table);
        page += n;
    }
    kvs_attend_finish(threads, isa, &job);
    free(job.state);
    free(slots);
    free(table);
}

static void test_attend_has_the_same_bits_for_every_cut_and_placement(kvs_threads *threads)
{
    static const uint32_t ROWS[] = {1, 5, 40};
    const uint32_t isa = kvs_cpu_isa_detect();
    uint64_t seed = 11;
    for (size_t r = 0; r < 3; r++) {
        scene s = scene_make(layer_of(3, 64, KVS_TYPE_Q8_0, KVS_TYPE_Q4_0), 3, ROWS[r], 40 * 256 + 77);
        float *expected = room(&s), *out = room(&s);
        scene_run(&s, threads, isa, 0, s.n_rows, expected);
        for (uint32_t n_slots = 1; n_slots <= 33; n_slots += n_slots < 4 ? 1 : 7) {
            run_through_slots(&s, threads, isa, n_slots, &seed, out);
            CHECK(same(&s, out, expected, s.n_rows));
        }
        free(expected);
        free(out);
        scene_free(&s);
    }
}

static void test_attend_row_does_not_depend_on_its_neighbours(kvs_threads *threads)
{
    static const uint32_t WIDTHS[] = {1, 2, 3, 5, 8, 16, 17, 33, 64, 100};
    const uint32_t isa = kvs_cpu_isa_detect();
    scene s = scene_make(layer_of(2, 64, KVS_TYPE_Q8_0, KVS_TYPE_Q5_1), 3, 300, 1100);
    float *expected = room(&s), *out = room(&s);
    scene_run(&s, threads, isa, 0, s.n_rows, expected);
    for (size_t w = 0; w < sizeof WIDTHS / sizeof WIDTHS[0]; w++) {
        for (uint32_t row = 0, n; row < s.n_rows; row += n) {
            n = s.n_rows - row < WIDTHS[w] ? s.n_rows - row : WIDTHS[w];
            scene_run(&s, threads, isa, row, n, out + row * scene_out_row(&s));
        }
        CHECK(same(&s, out, expected, s.n_rows));
        memset(out, 0, s.n_rows * scene_out_row(&s) * sizeof *out);
    }
    free(expected);
    free(out);
    scene_free(&s);
}

static void test_attend_has_the_same_bits_for_every_number_of_threads(kvs_threads *threads)
{
    static const uint32_t ROWS[] = {1, 6, 70};
    const uint32_t isa = kvs_cpu_isa_detect();
    for (size_t r = 0; r < 3; r++) {
        scene s = scene_make(layer_of(2, 128, KVS_TYPE_F16, KVS_TYPE_Q8_0), 4, ROWS[r], 3000);
        float *expected = room(&s), *out = room(&s);
        scene_run(&s, threads, isa, 0, s.n_rows, expected);
        for (uint32_t n_threads = 1; n_threads <= 4; n_threads++) {
            kvs_threads *others = kvs_threads_create(n_threads);
            scene_run(&s, others, isa, 0, s.n_rows, out);
            CHECK(same(&s, out, expected, s.n_rows));
            kvs_threads_destroy(others);
        }
        free(expected);
        free(out);
        scene_free(&s);
    }
}

/* A NaN in a token that only later rows see leaves earlier rows alone, and is one canonical NaN where it is seen. */
static void test_attend_keeps_an_unseen_nan_out(kvs_threads *threads)
{
    static const float CANONICAL = NAN;
    for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
        scene s = scene_make(layer_of(1, 64, KVS_TYPE_F16, KVS_TYPE_F32), 2, 24, 280);
        const uint32_t row_bytes = s.record.plane_row_bytes[KVS_PLANE_V_CODES];
        float *expected = room(&s), *out = room(&s);
        scene_run(&s, threads, isa, 0, s.n_rows, expected);
        memset(s.pages + s.record.record_bytes + s.record.plane_offset_bytes[KVS_PLANE_V_CODES] + 10 * row_bytes, 0xff,
               row_bytes); /* token 266, first seen by row 10 */
        scene_run(&s, threads, isa, 0, s.n_rows, out);
        CHECK(same(&s, out, expected, 10));
        bool canonical = true;
        for (size_t i = 10 * scene_out_row(&s); i < 24 * scene_out_row(&s); i++) {
            canonical = canonical && memcmp(&out[i], &CANONICAL, sizeof CANONICAL) == 0;
        }
        CHECK(canonical);
        free(expected);
        free(out);
        scene_free(&s);
    }
}

static void test_attend_plan_equals_waves(kvs_threads *threads)
{
    const uint32_t isa = kvs_cpu_isa_detect();
    scene s = scene_make(layer_of(2, 64, KVS_TYPE_Q8_0, KVS_TYPE_Q8_0), 3, 5, 700);
    float *expected = room(&s), *out = room(&s);
    kvs_attend_desc desc = {
        .struct_size = sizeof desc, .n_query_heads = s.n_query_heads, .q = s.q, .out = out, .scale = s.scale};
    scene_run(&s, threads, isa, 0, s.n_rows, expected);
    CHECK_OK(kvs_cpu_attend_plan(NULL, threads, isa, &desc, &s.layer, s.table, s.n_tokens, s.n_rows));
    CHECK(same(&s, out, expected, s.n_rows));
    CHECK_STATUS(kvs_cpu_attend_plan(NULL, threads, isa, &desc, &s.layer, s.table, 4, 5), KVS_EINVAL);
    desc.n_query_heads = 5;
    CHECK_STATUS(kvs_cpu_attend_plan(NULL, threads, isa, &desc, &s.layer, s.table, s.n_tokens, s.n_rows), KVS_EINVAL);
    free(expected);
    free(out);
    scene_free(&s);
}

static void test_attend_workspace_grows_with_rows(void)
{
    const kvs_kv_layer layer = layer_of(4, 256, KVS_TYPE_Q8_0, KVS_TYPE_Q4_0);
    uint64_t before = 0;
    for (uint32_t n_rows = 1; n_rows <= 600; n_rows++) {
        const uint64_t bytes = kvs_attend_state_bytes(&layer, 24, n_rows, 3);
        CHECK(bytes >= before && bytes != 0);
        before = bytes;
    }
    CHECK_U64(kvs_attend_state_bytes(&layer, 24, UINT32_MAX, 3), 0);
}

int main(void)
{
    kvs_threads *threads = kvs_threads_create(2);
    if (threads == NULL) {
        return 1;
    }
    test_attend_equals_softmax_for_every_type_pair(threads);
    test_attend_equals_softmax_for_every_shape(threads);
    test_attend_serves_unequal_and_odd_head_sizes(threads);
    test_attend_equals_softmax_for_every_small_width(threads);
    test_attend_follows_the_stated_order(threads);
    test_attend_has_the_same_bits_for_every_cut_and_placement(threads);
    test_attend_row_does_not_depend_on_its_neighbours(threads);
    test_attend_has_the_same_bits_for_every_number_of_threads(threads);
    test_attend_keeps_an_unseen_nan_out(threads);
    test_attend_plan_equals_waves(threads);
    test_attend_workspace_grows_with_rows();
    kvs_threads_destroy(threads);
    return check_finish();
}
