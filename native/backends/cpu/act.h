/* act.h: activations as 8-bit codes, for matmuls with quantized weights.
 *
 * Shapes: rows go in tiles of KVS_TILE_ROWS; a tile of r rows holds, for each group of 32 values, r records of 64 bytes, so
 * that a kernel reaches a row of its tile by a constant displacement.
 * Order: amax = largest magnitude of the 32 values; d = amax / 127; code = round to nearest even (x * (127 / amax)).
 * A group whose amax is below KVS_ACT_LEAST counts as zeros; one with a value that is not finite has a NaN for d and
 * zero codes, so that every output of the row is a NaN.
 */
#ifndef KVS_NATIVE_CPU_ACT_H
#define KVS_NATIVE_CPU_ACT_H

#include <stdint.h>

#define KVS_TILE_ROWS 8u
#define KVS_ACT_LEAST 1e-30f /* 127 / amax stays finite, and d far from the denormals */
#define KVS_FLOAT_INF_BITS 0x7f800000u

typedef struct kvs_act_group {
    _Alignas(64) int8_t codes[32];
    float d;
    float sum;         /* d * sum of the codes, one rounding */
    float half_sum[2]; /* the same for values 0..15 and 16..31 */
    int32_t negative_count;         /* minus the sum of the codes */
    int32_t negative_half_count[2];
    int32_t padding;
} kvs_act_group;

/* Quantize one row of k (multiple of 32) values; consecutive groups are `stride` records apart. */
void kvs_act_quantize_reference(const float *x, uint64_t k, kvs_act_group *groups, uint32_t stride);
void kvs_act_quantize_avx2(const float *x, uint64_t k, kvs_act_group *groups, uint32_t stride);

#endif
