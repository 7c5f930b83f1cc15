/* tile_weights.cuh: groups of a unit (weight_unit.cuh) as left operands of products of bfloat16. Architecture: 80.
 *
 * Shapes: a step is 16 values of k by the 16 rows of a panel, fragments as mma.cuh has them of its a; which value stands where
 * is tile_record.h's order. A weight is scale * code (+ minimum) in float32, rounded once.
 */
#ifndef KVS_KERNELS_TILE_WEIGHTS_CUH
#define KVS_KERNELS_TILE_WEIGHTS_CUH

#include "weight_unit.cuh"

#ifdef __CUDACC__
__device__ __forceinline__ unsigned int kvs_pack_bf16(float low, float high)
{
    unsigned int packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
#else
inline unsigned int kvs_pack_bf16(float low, float high)
{
    return (unsigned int)kvs_f32_to_bf16(low) | (unsigned int)kvs_f32_to_bf16(high) << 16;
}
#endif

/* Four codes of a row as two words of bfloat16. */
template <int TYPE>
__device__ __forceinline__ void kvs_tile_quad(unsigned int codes, float scale, float minimum, unsigned int &first, unsigned int &second)
{
    constexpr bool IS_SIGNED = kvs_form_code_bits(TYPE) == 8 || kvs_form_table(TYPE) != KVS_FORM_NO_TABLE;
    float values[4];
    kvs_bytes_to_f32(IS_SIGNED ? codes ^ 0x80808080u : codes, IS_SIGNED ? 128.0f : (float)kvs_form_offset(TYPE), values);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        values[i] = kvs_form_minimum(TYPE) != KVS_FORM_NO_MINIMUM ? __fmaf_rn(scale, values[i], minimum) : __fmul_rn(scale, values[i]);
    }
    first = kvs_pack_bf16(values[0], values[1]);
    second = kvs_pack_bf16(values[2], values[3]);
}

/* Both steps of group j. */
template <int TYPE>
__device__ __forceinline__ void kvs_tile_group(const kvs_unit<TYPE> &unit, int j, unsigned int lane, unsigned int (&steps)[2][4])
{
    unsigned int codes[4];
    kvs_unit_group<TYPE>(unit, j, lane, codes);
#pragma unroll
    for (int row = 0; row < 2; row++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float scale = kvs_unit_scale<TYPE>(unit, j, half, row);
            float minimum = 0.0f;
            if constexpr (kvs_form_minimum(TYPE) != KVS_FORM_NO_MINIMUM) {
                minimum = kvs_unit_minimum<TYPE>(unit, j, half, row);
            }
            kvs_tile_quad<TYPE>(codes[2 * half + row], scale, minimum, steps[half][row], steps[half][row + 2]);
        }
    }
}

#endif
