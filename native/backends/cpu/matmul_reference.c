/* matmul_reference.c: the definition of every sum of a matmul, in plain C.
 *
 * Order: see matmul.h. Products dw * dx are rounded once; dw itself (float16 times an integer of at most 8 bits) is exact.
 */
#include "backends/cpu/half.h"
#include "backends/cpu/mathf.h"
#include "backends/cpu/matmul_kernels.h"

#include <math.h>
#include <string.h>

#define LANES KVS_PANEL_ROWS

/* One group of a panel, unpacked. */
typedef struct unpacked_group {
    int16_t values[KVS_GROUP][LANES]; /* codes less their offset */
    float scale[2][LANES];            /* of each half; both the same for types with one scale to a group */
    float minimum[2][LANES];
} unpacked_group;

/* Nibble `index` of a lane, in a plane that keeps two to a byte. */
static uint32_t load_nibble(const uint8_t *plane, uint64_t index, uint32_t lane)
{
    return (uint32_t)plane[index / 2 * LANES + lane] >> (4 * (index % 2)) & 15u;
}

static uint32_t load_code(const kvs_panel_layout *layout, const uint8_t *panel, uint64_t group, uint32_t e,
                          uint32_t lane)
{
    const kvs_panel_traits *traits = &kvs_traits[layout->type];
    const uint32_t quad = e / 4;
    const uint32_t byte = 4 * lane + e % 4; /* in a vector of 64 */
    const uint8_t *low = panel + layout->codes;
    const uint8_t *high = panel + layout->high;
    uint32_t code;
    if (traits->code_bits == 8) {
        code = low[group * KVS_WIDE_BYTES + quad * 64 + byte];
    } else if (traits->code_bits == 4) {
        code = low[group * KVS_NIBBLE_BYTES + quad % 4 * 64 + byte] >> (quad / 4 * 4) & 15u;
    } else {
        code = low[group * KVS_CRUMB_BYTES + quad / 4 * 64 + byte] >> (quad % 4 * 2) & 3u;
    }
    if (traits->has_shared_bit) {
        code |= (load_nibble(high, group, lane) >> (quad / 2) & 1u) << traits->code_bits;
    } else if (traits->high_bits == 2) {
        code |= (high[group * KVS_CRUMB_BYTES + quad / 4 * 64 + byte] >> (quad % 4 * 2) & 3u) << traits->code_bits;
    } else if (traits->high_bits == 1) {
        code |= (high[group * KVS_BIT_BYTES + byte] >> quad & 1u) << traits->code_bits;
    }
    return code;
}

static float load_half(const uint8_t *plane, uint64_t index, uint32_t lane)
{
    uint16_t half;
    memcpy(&half, plane + index * KVS_HALF_LANES_BYTES + 2 * lane, 2);
    return kvs_f16_to_f32(half);
}

static float odd_over(const kvs_panel_traits *traits, uint32_t nibble)
{
    return (float)(2 * nibble + 1) / (float)(1 << traits->scale_shift);
}

static float load_scale(const kvs_panel_layout *layout, const uint8_t *panel, uint64_t group, uint32_t half,
                        uint32_t lane)
{
    const uint8_t *scales = panel + layout->scales;
    const uint8_t *sub = panel + layout->sub_scales;
    const uint8_t *one = sub + group * LANES + lane;
    const uint8_t *two = sub + (2 * group + half) * LANES + lane;
    const uint64_t super = group / KVS_SUPER_GROUPS;
    const kvs_panel_traits *traits = &kvs_traits[layout->type];
    switch (traits->scale) {
    case KVS_SCALE_GROUP:
        return load_half(scales, group, lane);
    case KVS_SCALE_SUPER_U8:
        return load_half(scales, super, lane) * (float)*one;
    case KVS_SCALE_SUPER_S8:
        return load_half(scales, super, lane) * (float)(int8_t)*one;
    case KVS_SCALE_SUPER_S8X2:
        return load_half(scales, super, lane) * (float)(int8_t)*two;
    case KVS_SCALE_SUPER_ODD4:
        return load_half(scales, super, lane) * odd_over(traits, load_nibble(sub, group, lane));
    case KVS_SCALE_SUPER_ODD4X2:
        return load_half(scales, super, lane) * odd_over(traits, load_nibble(sub, 2 * group + half, lane));
    case KVS_SCALE_E8M0:
        return kvs_e8m0_half_to_f32(*one);
    case KVS_SCALE_UE4M3X2:
        return kvs_ue4m3_half_to_f32(*two);
    default:
        return load_half(scales, super, lane) * (float)(*two & 15);
    }
}

static float load_minimum(const kvs_panel_layout *layout, const uint8_t *panel, uint64_t group, uint32_t half,
                          uint32_t lane)
{
    const uint8_t *minima = panel + layout->minima;
    const uint64_t super = group / KVS_SUPER_GROUPS;
    switch (kvs_traits[layout->type].minimum) {
    case KVS_MINIMUM_NONE:
        return 0.0f;
    case KVS_MINIMUM_GROUP:
        return load_half(minima, group, lane);
    case KVS_MINIMUM_SUPER_U8:
        return -(load_half(minima, super, lane) * (float)panel[layout->sub_minima + group * LANES + lane]);
    default:
        return -(load_half(minima, super, lane) *
                 (float)(panel[layout->sub_scales + (2 * group + half) * LANES + lane] >> 4));
    }
}

static void unpack_group(const kvs_panel_layout *layout, const uint8_t *panel, uint64_t group, unpacked_group *unpacked)
{
    const kvs_panel_traits *traits = &kvs_traits[layout->type];
    const int offset = kvs_traits_offset(traits);
    const uint8_t *levels = traits->table != KVS_TABLE_NONE ? kvs_levels[traits->table] : NULL;
    for (uint32_t e = 0; e < KVS_GROUP; e++) {
        for (uint32_t lane = 0; lane < LANES; lane++) {
            uint32_t code = load_code(layout, panel, group, e, lane);
            int value = levels != NULL ? levels[code] : (int)code;
            unpacked->values[e][lane] = (int16_t)(value - offset);
        }
    }
    for (uint32_t half = 0; half < 2; half++) {
        for (uint32_t lane = 0; lane < LANES; lane++) {
            unpacked->scale[half][lane] = load_scale(layout, panel, group, half, lane);
            unpacked->minimum[half][lane] = load_minimum(layout, panel, group, half, lane);
        }
    }
}

static void dot_lanes(const unpacked_group *group, const int8_t *codes, uint32_t first, uint32_t end,
                      int32_t dot[LANES])
{
    memset(dot, 0, LANES * sizeof *dot);
    for (uint32_t e = first; e < end; e++) {
        for (uint32_t lane = 0; lane < LANES; lane++) {
            dot[lane] += group->values[e][lane] * codes[e];
        }
    }
}

static void add_products(const float scale[LANES], const float *minimum, float dx, float sum, const int32_t dot[LANES],
                         float sums[LANES])
{
    for (uint32_t lane = 0; lane < LANES; lane++) {
        sums[lane] = fmaf(scale[lane] * dx, (float)dot[lane], sums[lane]);
        if (minimum != NULL) {
            sums[lane] = fmaf(minimum[lane], sum, sums[lane]);
        }
    }
}

static void add_group(const kvs_panel_traits *traits, const unpacked_group *group, const kvs_act_group *act,
                      float sums[LANES])
{
    const bool has_minimum = traits->minimum != KVS_MINIMUM_NONE;
    int32_t dot[LANES];
    if (!kvs_traits_is_halved(traits)) {
        dot_lanes(group, act->codes, 0, 32, dot);
        add_products(group->scale[0], has_minimum ? group->minimum[0] : NULL, act->d, act->sum, dot, sums);
        return;
    }
    for (uint32_t half = 0; half < 2; half++) {
        dot_lanes(group, act->codes, 16 * half, 16 * half + 16, dot);
        add_products(group->scale[half], has_minimum ? group->minimum[half] : NULL, act->d, act->half_sum[half], dot,
                     sums);
    }
}

static void quantized(const kvs_panel_run *run, const kvs_act_group *tile, uint32_t n_rows, float *sums)
{
    const kvs_panel_layout *layout = run->layout;
    const kvs_panel_traits *traits = &kvs_traits[layout->type];
    memset(sums, 0, (size_t)run->n_panels * n_rows * LANES * sizeof *sums);
    for (uint32_t p = 0; p < run->n_panels; p++) {
        for (uint64_t g = 0; g < layout->n_groups; g++) {
            unpacked_group group;
            unpack_group(layout, run->panels + p * layout->panel_bytes, g, &group);
            for (uint32_t r = 0; r < n_rows; r++) {
                add_group(traits, &group, tile + g * n_rows + r, sums + (p * n_rows + r) * LANES);
            }
        }
    }
}

static float load_float(int type, const uint8_t *panel, uint64_t index)
{
    if (type == KVS_TYPE_F32) {
        float value;
        memcpy(&value, panel + 4 * index, 4);
        return value;
    }
    uint16_t half;
    memcpy(&half, panel + 2 * index, 2);
    return type == KVS_TYPE_F16 ? kvs_f16_to_f32(half) : kvs_bf16_to_f32(half);
}

static void floats(const kvs_panel_run *run, const float *x, uint64_t x_stride, uint32_t n_rows, float *sums)
{
    const kvs_panel_layout *layout = run->layout;
    memset(sums, 0, (size_t)run->n_panels * n_rows * LANES * sizeof *sums);
    for (uint32_t p = 0; p < run->n_panels; p++) {
        const uint8_t *panel = run->panels + p * layout->panel_bytes;
        for (uint64_t i = 0; i < layout->k; i++) {
            float weights[LANES];
            for (uint32_t lane = 0; lane < LANES; lane++) {
                weights[lane] = load_float(layout->type, panel, i * LANES + lane);
            }
            for (uint32_t r = 0; r < n_rows; r++) {
                float *row = sums + (p * n_rows + r) * LANES;
                for (uint32_t lane = 0; lane < LANES; lane++) {
                    row[lane] = fmaf(weights[lane], x[r * x_stride + i], row[lane]);
                }
            }
        }
    }
}

static float biased(const float *sums, const float *bias, uint32_t lane)
{
    return bias != NULL ? sums[lane] + bias[lane] : sums[lane];
}

static void store(const float *sums, const float *bias, float *out)
{
    for (uint32_t lane = 0; lane < LANES; lane++) {
        out[lane] = biased(sums, bias, lane);
    }
}

static void store_add(const float *sums, const float *bias, float *out)
{
    for (uint32_t lane = 0; lane < LANES; lane++) {
        out[lane] = out[lane] + biased(sums, bias, lane);
    }
}

static void store_swiglu(const float *gate, const float *gate_bias, const float *up, const float *up_bias, float *out)
{
    for (uint32_t lane = 0; lane < LANES; lane++) {
        out[lane] = kvs_siluf(biased(gate, gate_bias, lane)) * biased(up, up_bias, lane);
    }
}

const kvs_matmul_kernels kvs_matmul_kernels_reference = {
    .quantize = kvs_act_quantize_reference,
    .quantized = quantized,
    .floats = floats,
    .store = store,
    .store_add = store_add,
    .store_swiglu = store_swiglu,
};
