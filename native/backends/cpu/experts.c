#include "backends/cpu/experts.h"

#include "backends/cpu/elementwise_rows.h"
#include "backends/cpu/mathf.h"
#include "base/internal.h"

#include <string.h>

#define BLOCK_ROWS 256u
#define MIN_WEIGHT_SUM 6.1e-5f
#define ALIGNMENT 64u

/* One row's use of one expert. */
typedef struct choice {
    uint32_t expert;
    uint32_t place; /* row of `results` */
    float weight;
} choice;

typedef struct experts_run {
    const kvs_experts_desc *desc;
    kvs_threads *threads;
    uint32_t isa;
    uint32_t first_row; /* of the block */
    uint32_t n_rows;
    choice *choices;    /* [n_rows][n_chosen] */
    uint32_t *counts;   /* [n_experts] rows of each, then where its results end */
    float *inputs;      /* [block][n_embd] */
    float *hidden;      /* [block][n_ff] */
    float *up;          /* [block][n_ff], where gate or up have factors */
    float *results;     /* [block * n_chosen][n_embd] */
    void *matmul;
    uint64_t matmul_bytes;
} experts_run;

/* Offsets in the workspace, in the order of experts_run. */
typedef struct layout {
    uint64_t counts, inputs, hidden, up, results, matmul, bytes;
    uint64_t matmul_bytes;
} layout;

static bool has_factors(const kvs_experts_desc *desc)
{
    return desc->gate.scales != NULL || desc->up.scales != NULL;
}

static bool put(uint64_t *end, uint64_t n, uint64_t item_bytes, uint64_t *offset)
{
    uint64_t bytes;
    *offset = *end;
    return kvs_mul_u64(n, item_bytes, &bytes) && kvs_add_u64(*end, bytes, &bytes) && kvs_align_up(bytes, ALIGNMENT, end);
}

static kvs_status check(const kvs_experts_desc *desc)
{
    if (desc->n_experts == 0 || desc->n_experts > KVS_EXPERTS_MAX || desc->n_chosen == 0 ||
        desc->n_chosen > desc->n_experts || desc->n_embd == 0 || desc->n_ff == 0) {
        return KVS_EINVAL;
    }
    return desc->n_ff % KVS_PANEL_ROWS == 0 && desc->n_embd % KVS_PANEL_ROWS == 0 ? KVS_OK : KVS_EUNSUPPORTED;
}

static kvs_status lay_out(const kvs_experts_desc *desc, layout *made)
{
    kvs_status status = check(desc);
    if (status != KVS_OK) {
        return status;
    }
    const uint32_t rows = desc->n_rows < BLOCK_ROWS ? desc->n_rows : BLOCK_ROWS;
    const uint64_t k = desc->n_embd > desc->n_ff ? desc->n_embd : desc->n_ff;
    status = kvs_matmul_workspace_bytes(k, rows, &made->matmul_bytes);
    if (status != KVS_OK) {
        return status;
    }
    uint64_t end = 0;
    uint64_t choices;
    const uint64_t up_rows = has_factors(desc) ? rows : 0;
    const bool fits = put(&end, (uint64_t)rows * desc->n_chosen, sizeof(choice), &choices) &&
                      put(&end, desc->n_experts, sizeof(uint32_t), &made->counts) &&
                      put(&end, rows * desc->n_embd, sizeof(float), &made->inputs) &&
                      put(&end, rows * desc->n_ff, sizeof(float), &made->hidden) &&
                      put(&end, up_rows * desc->n_ff, sizeof(float), &made->up) &&
                      put(&end, (uint64_t)rows * desc->n_chosen * desc->n_embd, sizeof(float), &made->results) &&
                      put(&end, made->matmul_bytes, 1, &made->matmul);
    made->bytes = end;
    return fits ? KVS_OK : KVS_EOVERFLOW;
}

kvs_status kvs_experts_workspace_bytes(const kvs_experts_desc *desc, uint64_t *bytes)
{
    layout made;
    const kvs_status status = lay_out(desc, &made);
    if (status == KVS_OK) {
        *bytes = made.bytes;
    }
    return status;
}

static const float *router_row(const experts_run *run, uint32_t row)
{
    return run->desc->router + (uint64_t)(run->first_row + row) * run->desc->n_experts;
}

/* A logit that is no number counts as the largest, so that it reaches the output instead of hiding. */
static bool is_larger(float a, float b)
{
    return a > b || (a != a && b == b);
}

/* Experts of the n_chosen largest logits in falling order. */
static void choose(const float *logits, uint32_t n_experts, uint32_t n_chosen, choice *choices)
{
    uint32_t n = 0;
    for (uint32_t expert = 0; expert < n_experts; expert++) {
        if (n == n_chosen && !is_larger(logits[expert], logits[choices[n - 1].expert])) {
            continue;
        }
        uint32_t place = n < n_chosen ? n++ : n - 1;
        for (; place > 0 && is_larger(logits[expert], logits[choices[place - 1].expert]); place--) {
            choices[place] = choices[place - 1];
        }
        choices[place] = (choice){.expert = expert};
    }
}

/* Shares of the softmax over all experts, divided by the sum of the chosen ones. */
static void weigh(const float *logits, uint32_t n_experts, uint32_t n_chosen, float factor, choice *choices)
{
    const float largest = logits[choices[0].expert];
    float all = 0.0f;
    for (uint32_t expert = 0; expert < n_experts; expert++) {
        all += kvs_expf(logits[expert] - largest);
    }
    float sum = 0.0f;
    for (uint32_t i = 0; i < n_chosen; i++) {
        choices[i].weight = kvs_expf(logits[choices[i].expert] - largest) / all;
        sum += choices[i].weight;
    }
    const float divisor = sum < MIN_WEIGHT_SUM ? MIN_WEIGHT_SUM : sum;
    for (uint32_t i = 0; i < n_chosen; i++) {
        choices[i].weight = choices[i].weight / divisor * factor;
    }
}

static void route(const experts_run *run)
{
    const kvs_experts_desc *desc = run->desc;
    memset(run->counts, 0, desc->n_experts * sizeof *run->counts);
    for (uint32_t row = 0; row < run->n_rows; row++) {
        choice *choices = run->choices + (uint64_t)row * desc->n_chosen;
        choose(router_row(run, row), desc->n_experts, desc->n_chosen, choices);
        weigh(router_row(run, row), desc->n_experts, desc->n_chosen, desc->factor, choices);
        for (uint32_t i = 0; i < desc->n_chosen; i++) {
            run->counts[choices[i].expert]++;
        }
    }
}

/* Counts become the places at which each expert's results begin; giving a place moves it on, so that they end as ends. */
static void give_places(const experts_run *run)
{
    uint32_t begin = 0;
    for (uint32_t expert = 0; expert < run->desc->n_experts; expert++) {
        const uint32_t n = run->counts[expert];
        run->counts[expert] = begin;
        begin += n;
    }
    for (uint64_t i = 0; i < (uint64_t)run->n_rows * run->desc->n_chosen; i++) {
        run->choices[i].place = run->counts[run->choices[i].expert]++;
    }
}

/* Rows that chose the expert, side by side. */
static void collect_inputs(const experts_run *run, uint32_t expert)
{
    const kvs_experts_desc *desc = run->desc;
    uint64_t n = 0;
    for (uint32_t row = 0; row < run->n_rows; row++) {
        for (uint32_t i = 0; i < desc->n_chosen; i++) {
            if (run->choices[(uint64_t)row * desc->n_chosen + i].expert == expert) {
                memcpy(run->inputs + n++ * desc->n_embd, desc->x + (run->first_row + row) * desc->n_embd,
                       desc->n_embd * sizeof(float));
            }
        }
    }
}

static kvs_matmul_part part_of(const kvs_expert_matrix *matrix, uint32_t expert, uint64_t k, uint64_t n, float *out)
{
    uint64_t panel_bytes = 0;
    (void)kvs_panel_bytes(matrix->type, k, n, &panel_bytes, NULL);
    return (kvs_matmul_part){.type = matrix->type,
                             .n = n,
                             .panels = (const uint8_t *)matrix->panels + expert * kvs_panel_count(n) * panel_bytes,
                             .out = out,
                             .out_stride = n};
}

static void multiply(float *values, uint64_t n, const float *factor)
{
    for (uint64_t i = 0; factor != NULL && i < n; i++) {
        values[i] *= *factor;
    }
}

static const float *factor_of(const kvs_expert_matrix *matrix, uint32_t expert)
{
    return matrix->scales == NULL ? NULL : matrix->scales + expert;
}

static kvs_status run_gate_and_up(const experts_run *run, uint32_t expert, uint32_t n_rows)
{
    const kvs_experts_desc *desc = run->desc;
    const bool is_apart = has_factors(desc);
    const uint64_t n = n_rows * desc->n_ff;
    const kvs_matmul_desc matmul = {
        .part = {part_of(&desc->gate, expert, desc->n_embd, desc->n_ff, run->hidden),
                 part_of(&desc->up, expert, desc->n_embd, desc->n_ff, is_apart ? run->up : NULL)},
        .n_parts = 2,
        .n_rows = n_rows,
        .epilogue = is_apart ? KVS_EPILOGUE_NONE : KVS_EPILOGUE_SWIGLU,
        .k = desc->n_embd,
        .x = run->inputs,
        .x_stride = desc->n_embd,
        .workspace = run->matmul,
        .workspace_bytes = run->matmul_bytes};
    const kvs_status status = kvs_matmul_run(run->threads, run->isa, &matmul);
    if (status == KVS_OK && is_apart) {
        multiply(run->hidden, n, factor_of(&desc->gate, expert));
        multiply(run->up, n, factor_of(&desc->up, expert));
        kvs_row_ops_for(run->isa)->swiglu(run->hidden, run->up, n, run->hidden);
    }
    return status;
}

static kvs_status run_expert(const experts_run *run, uint32_t expert)
{
    const kvs_experts_desc *desc = run->desc;
    const uint32_t begin = expert == 0 ? 0 : run->counts[expert - 1];
    const uint32_t n_rows = run->counts[expert] - begin;
    if (n_rows == 0) {
        return KVS_OK;
    }
    collect_inputs(run, expert);
    kvs_status status = run_gate_and_up(run, expert, n_rows);
    if (status != KVS_OK) {
        return status;
    }
    float *results = run->results + begin * desc->n_embd;
    const kvs_matmul_desc matmul = {.part = {part_of(&desc->down, expert, desc->n_ff, desc->n_embd, results)},
                                    .n_parts = 1,
                                    .n_rows = n_rows,
                                    .k = desc->n_ff,
                                    .x = run->hidden,
                                    .x_stride = desc->n_ff,
                                    .workspace = run->matmul,
                                    .workspace_bytes = run->matmul_bytes};
    status = kvs_matmul_run(run->threads, run->isa, &matmul);
    multiply(results, n_rows * desc->n_embd, factor_of(&desc->down, expert));
    return status;
}

/* Task: one row. */
static void combine_row(void *argument, uint32_t row, uint32_t worker)
{
    (void)worker;
    const experts_run *run = argument;
    const kvs_experts_desc *desc = run->desc;
    float *out = desc->out + (uint64_t)(run->first_row + row) * desc->n_embd;
    for (uint32_t i = 0; i < desc->n_chosen; i++) {
        const choice *one = &run->choices[(uint64_t)row * desc->n_chosen + i];
        const float *result = run->results + one->place * desc->n_embd;
        for (uint64_t j = 0; j < desc->n_embd; j++) {
            const float term = one->weight * result[j];
            out[j] = i == 0 ? term : out[j] + term;
        }
    }
}

static kvs_status run_block(experts_run *run)
{
    route(run);
    give_places(run);
    kvs_status status = KVS_OK;
    for (uint32_t expert = 0; status == KVS_OK && expert < run->desc->n_experts; expert++) {
        status = run_expert(run, expert);
    }
    if (status == KVS_OK) {
        kvs_threads_run(run->threads, run->n_rows, combine_row, run);
    }
    return status;
}

kvs_status kvs_experts_run(kvs_threads *threads, uint32_t isa, const kvs_experts_desc *desc)
{
    layout offsets;
    kvs_status status = lay_out(desc, &offsets);
    if (status != KVS_OK) {
        return status;
    }
    uint8_t *workspace = desc->workspace;
    experts_run run = {.desc = desc,
                       .threads = threads,
                       .isa = isa,
                       .choices = (choice *)(void *)workspace,
                       .counts = (uint32_t *)(void *)(workspace + offsets.counts),
                       .inputs = (float *)(void *)(workspace + offsets.inputs),
                       .hidden = (float *)(void *)(workspace + offsets.hidden),
                       .up = (float *)(void *)(workspace + offsets.up),
                       .results = (float *)(void *)(workspace + offsets.results),
                       .matmul = workspace + offsets.matmul,
                       .matmul_bytes = offsets.matmul_bytes};
    for (uint32_t first = 0; status == KVS_OK && first < desc->n_rows; first += BLOCK_ROWS) {
        const uint32_t left = desc->n_rows - first;
        run.first_row = first;
        run.n_rows = left < BLOCK_ROWS ? left : BLOCK_ROWS;
        status = run_block(&run);
    }
    return status;
}
