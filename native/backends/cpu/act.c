/* act.c: the reference of act.h. */
#include "backends/cpu/act.h"

#include "backends/cpu/half.h"

#include <math.h>

static void quantize_group(const float *x, kvs_act_group *group)
{
    uint32_t largest = 0; /* magnitudes order as their bits do, with infinity and NaN on top */
    for (uint32_t i = 0; i < 32; i++) {
        uint32_t bits = kvs_f32_bits(x[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    float amax = kvs_f32_from_bits(largest);
    float d = 0.0f;
    float inverse = 0.0f;
    if (largest >= KVS_FLOAT_INF_BITS) {
        d = kvs_f32_from_bits(0x7fc00000u);
    } else if (amax >= KVS_ACT_LEAST) {
        d = amax / 127.0f;
        inverse = 127.0f / amax;
    }
    int32_t count[2] = {0, 0};
    for (uint32_t i = 0; i < 32; i++) {
        int code = inverse != 0.0f ? (int)rintf(x[i] * inverse) : 0;
        group->codes[i] = (int8_t)code;
        count[i / 16] += code;
    }
    group->d = d;
    group->sum = d * (float)(count[0] + count[1]);
    group->half_sum[0] = d * (float)count[0];
    group->half_sum[1] = d * (float)count[1];
    group->negative_count = -(count[0] + count[1]);
    group->negative_half_count[0] = -count[0];
    group->negative_half_count[1] = -count[1];
    group->padding = 0;
}

void kvs_act_quantize_reference(const float *x, uint64_t k, kvs_act_group *groups, uint32_t stride)
{
    for (uint64_t g = 0; g < k / 32; g++) {
        quantize_group(x + g * 32, groups + g * stride);
    }
}
