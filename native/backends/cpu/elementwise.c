/* elementwise.c: rows of the operations of elementwise.h spread over threads, and the two that only move or decode rows. */
#include "backends/cpu/elementwise.h"

#include "backends/cpu/elementwise_rows.h"
#include "backends/cpu/half.h"
#include "backends/cpu/mathf.h"
#include "backends/cpu/panel_layout.h"
#include "kvstream/device.h"

#include <string.h>

/* Below this many values to a call, waking threads costs more than the work. */
#define TASK_VALUES 8192u

const kvs_row_ops *kvs_row_ops_for(uint32_t isa)
{
#if defined(__x86_64__)
    if (isa >= KVS_ISA_AVX2) {
        return &kvs_row_ops_avx2;
    }
#endif
    (void)isa;
    return &kvs_row_ops_reference;
}

/* Rows of a call, cut into tasks of equal size. */
typedef struct row_run {
    const kvs_row_ops *ops;
    const void *desc;
    void (*do_row)(const struct row_run *run, uint32_t row);
    uint32_t n_rows;
    uint32_t rows_per_task;
} row_run;

static void do_rows(void *argument, uint32_t index, uint32_t worker)
{
    (void)worker;
    const row_run *run = argument;
    const uint32_t first = index * run->rows_per_task;
    const uint32_t left = run->n_rows - first;
    const uint32_t end = first + (left < run->rows_per_task ? left : run->rows_per_task);
    for (uint32_t row = first; row < end; row++) {
        run->do_row(run, row);
    }
}

static void run_rows(kvs_threads *threads, row_run *run, uint64_t row_values)
{
    const uint64_t rows = row_values < TASK_VALUES ? TASK_VALUES / (row_values + 1) + 1 : 1;
    run->rows_per_task = rows < run->n_rows ? (uint32_t)rows : run->n_rows;
    if (run->n_rows != 0) {
        uint32_t n_tasks = run->n_rows / run->rows_per_task + (run->n_rows % run->rows_per_task != 0);
        kvs_threads_run(threads, n_tasks, do_rows, run);
    }
}

static void norm_row(const row_run *run, uint32_t row)
{
    const kvs_rms_norm_desc *desc = run->desc;
    const float *x = desc->x + row * desc->x_stride;
    float *out = desc->out + row * desc->out_stride;
    for (uint64_t first = 0; first < desc->n; first += desc->group) {
        run->ops->rms_norm(x + first, desc->weight, desc->group, desc->eps, out + first);
    }
}

void kvs_rms_norm(kvs_threads *threads, uint32_t isa, const kvs_rms_norm_desc *desc)
{
    row_run run = {.ops = kvs_row_ops_for(isa), .desc = desc, .do_row = norm_row, .n_rows = desc->n_rows};
    run_rows(threads, &run, desc->n);
}

static void glu_row(const row_run *run, uint32_t row)
{
    const kvs_glu_desc *desc = run->desc;
    const kvs_binary_desc *operands = &desc->operands;
    const float *gate = operands->a + row * operands->a_stride;
    const float *up = operands->b + row * operands->b_stride;
    float *out = operands->out + row * operands->out_stride;
    const bool is_silu = desc->activation == KVS_ACTIVATION_SILU;
    if (desc->is_one_gate) {
        const float factor = is_silu ? kvs_siluf(*gate) : kvs_sigmoidf(*gate);
        for (uint64_t i = 0; i < operands->n; i++) {
            out[i] = factor * up[i];
        }
    } else if (is_silu) {
        run->ops->swiglu(gate, up, operands->n, out);
    } else {
        run->ops->sigmoid_glu(gate, up, operands->n, out);
    }
}

void kvs_glu(kvs_threads *threads, uint32_t isa, const kvs_glu_desc *desc)
{
    row_run run = {.ops = kvs_row_ops_for(isa), .desc = desc, .do_row = glu_row, .n_rows = desc->operands.n_rows};
    run_rows(threads, &run, desc->operands.n);
}

static void add_row(const row_run *run, uint32_t row)
{
    const kvs_binary_desc *desc = run->desc;
    run->ops->add(desc->a + row * desc->a_stride, desc->b + row * desc->b_stride, desc->n,
                  desc->out + row * desc->out_stride);
}

void kvs_add(kvs_threads *threads, uint32_t isa, const kvs_binary_desc *desc)
{
    row_run run = {.ops = kvs_row_ops_for(isa), .desc = desc, .do_row = add_row, .n_rows = desc->n_rows};
    run_rows(threads, &run, desc->n);
}

static void rope_row(const row_run *run, uint32_t row)
{
    const kvs_rope_desc *desc = run->desc;
    const uint32_t n_pairs = desc->n_rot / 2;
    const float *table = desc->table + (uint64_t)row * desc->n_rot;
    for (uint32_t head = 0; head < desc->n_heads; head++) {
        const float *x = desc->x + row * desc->x_stride + (uint64_t)head * desc->head_values;
        float *out = desc->out + row * desc->out_stride + (uint64_t)head * desc->head_values;
        if (desc->mode == KVS_ROPE_PAIRS) {
            run->ops->rope_pairs(x, table, n_pairs, out);
        } else {
            run->ops->rope_halves(x, table, n_pairs, out);
        }
        if (out != x) {
            memcpy(out + desc->n_rot, x + desc->n_rot, (desc->head_values - desc->n_rot) * sizeof *out);
        }
    }
}

void kvs_rope(kvs_threads *threads, uint32_t isa, const kvs_rope_desc *desc)
{
    row_run run = {.ops = kvs_row_ops_for(isa), .desc = desc, .do_row = rope_row, .n_rows = desc->n_rows};
    run_rows(threads, &run, (uint64_t)desc->n_heads * desc->head_values);
}

static float sub_scale(const kvs_panel_traits *traits, const kvs_block *block, uint32_t sub)
{
    const float scale = kvs_f16_to_f32(block->scale);
    const uint8_t code = block->sub_scales[sub];
    switch (traits->scale) {
    case KVS_SCALE_GROUP:
        return scale;
    case KVS_SCALE_SUPER_U8:
        return scale * (float)code;
    case KVS_SCALE_SUPER_U4X2:
        return scale * (float)(code & 15);
    case KVS_SCALE_SUPER_ODD4:
    case KVS_SCALE_SUPER_ODD4X2:
        return scale * (float)(2 * code + 1) / (float)(1 << traits->scale_shift);
    case KVS_SCALE_E8M0:
        return kvs_e8m0_half_to_f32(code);
    case KVS_SCALE_UE4M3X2:
        return kvs_ue4m3_half_to_f32(code);
    default:
        return scale * (float)(int8_t)code;
    }
}

static float sub_minimum(const kvs_panel_traits *traits, const kvs_block *block, uint32_t sub)
{
    const float minimum = kvs_f16_to_f32(block->minimum);
    switch (traits->minimum) {
    case KVS_MINIMUM_GROUP:
        return minimum;
    case KVS_MINIMUM_SUPER_U8:
        return -(minimum * (float)block->sub_minima[sub]);
    default:
        return -(minimum * (float)(block->sub_scales[sub] >> 4));
    }
}

/* One block. Products are exact in float32, so only the sum with the minimum rounds. */
static void decode_block(int type, const uint8_t *bytes, uint32_t n_values, float *out)
{
    const kvs_panel_traits *traits = &kvs_traits[type];
    const uint32_t sub_values = kvs_traits_is_halved(traits) ? 16 : 32;
    const int offset = kvs_traits_offset(traits);
    const uint8_t *levels = traits->table != KVS_TABLE_NONE ? kvs_levels[traits->table] : NULL;
    const bool has_minimum = traits->minimum != KVS_MINIMUM_NONE;
    kvs_block block;
    kvs_block_split(type, bytes, &block);
    for (uint32_t sub = 0; sub < n_values / sub_values; sub++) {
        const float scale = sub_scale(traits, &block, sub);
        const float minimum = has_minimum ? sub_minimum(traits, &block, sub) : 0.0f;
        for (uint32_t e = sub * sub_values; e < (sub + 1) * sub_values; e++) {
            const int code = levels != NULL ? levels[block.codes[e]] : block.codes[e];
            const float product = scale * (float)(code - offset);
            out[e] = has_minimum ? product + minimum : product;
        }
    }
}

static void decode_float(int type, const uint8_t *row, uint64_t k, float *out)
{
    if (type == KVS_TYPE_F32) {
        memcpy(out, row, k * sizeof *out);
        return;
    }
    for (uint64_t i = 0; i < k; i++) {
        uint16_t half;
        memcpy(&half, row + 2 * i, 2);
        out[i] = type == KVS_TYPE_F16 ? kvs_f16_to_f32(half) : kvs_bf16_to_f32(half);
    }
}

kvs_status kvs_embed_rows(int type, uint64_t k, uint64_t n_table_rows, const void *table, const uint32_t *ids,
                          uint32_t n_rows, float *out, uint64_t out_stride)
{
    kvs_panel_layout layout;
    uint32_t block_values, block_bytes;
    kvs_status status = kvs_panel_layout_make(type, k, &layout);
    if (status != KVS_OK) {
        return status;
    }
    kvs_type_block(type, &block_values, &block_bytes);
    for (uint32_t i = 0; i < n_rows; i++) {
        if (ids[i] >= n_table_rows) {
            return KVS_EINVAL;
        }
    }
    const uint64_t n_blocks = k / block_values;
    for (uint32_t i = 0; i < n_rows; i++) {
        const uint8_t *row = (const uint8_t *)table + ids[i] * n_blocks * block_bytes;
        if (layout.n_groups == 0) {
            decode_float(type, row, k, out + i * out_stride);
            continue;
        }
        for (uint64_t b = 0; b < n_blocks; b++) {
            decode_block(type, row + b * block_bytes, block_values, out + i * out_stride + b * block_values);
        }
    }
    return KVS_OK;
}

kvs_status kvs_gather_rows(const float *x, uint64_t x_stride, uint32_t n_x_rows, const uint32_t *indices, uint32_t n_rows,
                           uint64_t n, float *out, uint64_t out_stride)
{
    for (uint32_t i = 0; i < n_rows; i++) {
        if (indices[i] >= n_x_rows) {
            return KVS_EINVAL;
        }
    }
    for (uint32_t i = 0; i < n_rows; i++) {
        memmove(out + i * out_stride, x + indices[i] * x_stride, n * sizeof *out);
    }
    return KVS_OK;
}
