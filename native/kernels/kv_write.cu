/* kv_write.cu: encode rows of k and v into the page records of their tokens, to the byte as the host encodes them.
 *
 * Kernel: kv_write. Argument: kvs_kv_write_params. Architecture: sm_75.
 * Macros: KVS_TYPE_K, KVS_TYPE_V (numbers of kvs_type), KVS_DIM_K, KVS_DIM_V (multiples of 32).
 * Grid (rows, KV heads), block 256, no dynamic shared memory. A warp encodes a block of 32 values, a lane each.
 *
 * Order: a maximum or minimum keeps the first of equal values and never takes a NaN; products and sums are separate float32
 * operations; the refit of IQ4_NL sums over values 0, 1, ... 31. A block that holds a NaN or an infinity gets a scale that is NaN.
 * Source: native/backends/cpu/encode_reference.c.
 */
#include "attend_params.h"
#include "grid.cuh"
#include "kv_types.cuh"
#include "page_gate.cuh"

#define N_WARPS 8u

__device__ inline float lane_value(float value, kvs_u32 lane)
{
    return __shfl_sync(KVS_FULL_WARP, value, lane);
}

/* Of the lanes that hold `best`, the value of the first; `none` where no lane does. */
__device__ inline float first_of(float value, bool is_best, float none)
{
    const kvs_u32 found = __ballot_sync(KVS_FULL_WARP, is_best);
    const float first = lane_value(value, found == 0 ? 0 : __ffs(found) - 1);
    return found == 0 ? none : first;
}

__device__ inline float warp_maximum(float value)
{
    for (kvs_u32 distance = 16; distance != 0; distance /= 2) {
        const float other = __shfl_xor_sync(KVS_FULL_WARP, value, distance);
        value = other > value ? other : value;
    }
    return value;
}

/* The element of largest magnitude, with its sign. */
__device__ inline float signed_peak(float x)
{
    const float magnitude = fabsf(x);
    const float largest = warp_maximum(magnitude > 0.0f ? magnitude : 0.0f);
    return first_of(x, magnitude > 0.0f && magnitude == largest, 0.0f);
}

__device__ inline float inverse_scale(float scale)
{
    const float inverse = 1.0f / scale, largest = __uint_as_float(0x7f7fffffu);
    return inverse > largest || inverse < -largest ? 0.0f : inverse;
}

/* Truncate to an integer of [0, high]; what no int32 holds, NaN included, is the lowest quant. */
__device__ inline kvs_u32 quant_of(float value, kvs_u32 high)
{
    if (!(value >= 0.0f && value < 2147483648.0f)) {
        return 0;
    }
    const kvs_u32 quant = (kvs_u32)value;
    return quant < high ? quant : high;
}

/* Half away from zero, without the double rounding of adding 0.5. */
__device__ inline float round_away(float value)
{
    const float magnitude = fabsf(value);
    float whole = truncf(magnitude);
    whole += truncf(2.0f * (magnitude - whole));
    return copysignf(whole, value);
}

__device__ inline kvs_u16 scale_bits(float scale)
{
    return scale != scale ? (kvs_u16)0x7e00u : kvs_f32_to_f16(scale);
}

__device__ inline float iq4_nl_entry(kvs_u32 quant)
{
    return (float)((int)(kvs_iq4_nl_lookup(quant) & 0xffu) - 128);
}

/* The number of midpoints at or below the value. */
__device__ inline kvs_u32 iq4_nl_quant(float scaled)
{
    kvs_u32 quant = 0;
    for (kvs_u32 entry = 0; entry < 15; entry++) {
        quant += scaled >= 0.5f * (iq4_nl_entry(entry) + iq4_nl_entry(entry + 1));
    }
    return quant;
}

__device__ inline float iq4_nl_refit(float x, kvs_u32 quant)
{
    const float entry = iq4_nl_entry(quant);
    const float weighted = x * x * entry;
    const float of_product = weighted * x, of_square = weighted * entry;
    float product = 0.0f, square = 0.0f;
    for (kvs_u32 lane = 0; lane < 32; lane++) {
        product += lane_value(of_product, lane);
        square += lane_value(of_square, lane);
    }
    return square == 0.0f ? 0.0f : product / square;
}

/* What a block of integers is stored as. */
struct block_codes {
    kvs_u32 quant; /* of this lane */
    float scale;
    float minimum;
};

template <int TYPE> __device__ inline block_codes quantize(float x)
{
    constexpr bool is_five_bits = TYPE == KVS_KV_Q5_0 || TYPE == KVS_KV_Q5_1;
    block_codes codes = {0, 0.0f, 0.0f};
    if (TYPE == KVS_KV_Q8_0) {
        codes.scale = fabsf(signed_peak(x)) / 127.0f;
        const float quant = round_away(x * inverse_scale(codes.scale));
        codes.quant = quant >= -128.0f && quant <= 127.0f ? (kvs_u32)(int)quant & 0xffu : 0x80u;
    } else if (TYPE == KVS_KV_IQ4_NL) {
        codes.quant = iq4_nl_quant(x * inverse_scale(signed_peak(x) / -127.0f));
        codes.scale = iq4_nl_refit(x, codes.quant);
    } else if (kvs_kv_traits<TYPE>::has_minimum) {
        const float infinity = __uint_as_float(KVS_INFINITY_BITS);
        const float largest = warp_maximum(x == x ? x : -infinity), smallest = -warp_maximum(x == x ? -x : -infinity);
        const float peak = first_of(x, x == largest, -infinity);
        codes.minimum = first_of(x, x == smallest, infinity);
        codes.scale = (peak - codes.minimum) / (is_five_bits ? 31.0f : 15.0f);
        codes.quant = quant_of((x - codes.minimum) * inverse_scale(codes.scale) + 0.5f, is_five_bits ? 31 : 15);
    } else {
        codes.scale = signed_peak(x) / (is_five_bits ? -16.0f : -8.0f);
        codes.quant = quant_of(x * inverse_scale(codes.scale) + (is_five_bits ? 16.5f : 8.5f), is_five_bits ? 31 : 15);
    }
    return codes;
}

template <int TYPE> __device__ inline void store_integers(float x, kvs_u8 *codes, kvs_u8 *high, kvs_u8 *scales)
{
    typedef kvs_kv_traits<TYPE> traits;
    const kvs_u32 lane = threadIdx.x % 32;
    const block_codes block = quantize<TYPE>(x);
    const bool is_broken =
        __ballot_sync(KVS_FULL_WARP, (__float_as_uint(x) & KVS_INFINITY_BITS) == KVS_INFINITY_BITS) != 0;
    const kvs_u32 high_bits = __ballot_sync(KVS_FULL_WARP, (block.quant >> 4 & 1u) != 0);
    const kvs_u32 above = __shfl_sync(KVS_FULL_WARP, block.quant, lane + 16 & 31u);
    if (!traits::is_nibbles) {
        codes[lane] = (kvs_u8)block.quant;
    } else if (lane < 16) {
        codes[lane] = (kvs_u8)((block.quant & 15u) | (above & 15u) << 4);
    }
    if (lane == 0) {
        *(kvs_u16 *)scales = is_broken ? (kvs_u16)0x7e00u : scale_bits(block.scale);
        if (traits::has_minimum) {
            *(kvs_u16 *)(scales + 2) = scale_bits(block.minimum);
        }
        if (traits::has_high) {
            *(kvs_u32 *)high = high_bits;
        }
    }
}

/* `side` is the side's first byte in the head. */
template <int TYPE, kvs_u32 DIM> __device__ inline void store_block(float x, kvs_u8 *side, kvs_u32 row, kvs_u32 block)
{
    typedef kvs_kv_traits<TYPE> traits;
    typedef kvs_kv_side<TYPE, DIM> layout;
    const kvs_u32 lane = threadIdx.x % 32, at = row * layout::n_blocks + block;
    kvs_u8 *codes = side + at * traits::codes_bytes;
    if (TYPE == KVS_KV_F32) {
        ((float *)codes)[lane] = x;
    } else if (TYPE == KVS_KV_F16) {
        ((kvs_u16 *)codes)[lane] = kvs_f32_to_f16(x);
    } else if (TYPE == KVS_KV_BF16) {
        ((kvs_u16 *)codes)[lane] = kvs_f32_to_bf16(x);
    } else {
        store_integers<TYPE>(x, codes, side + layout::high_at + at * 4, side + layout::scales_at + at * traits::scales_bytes);
    }
}

extern "C" __global__ void __launch_bounds__(N_WARPS * 32) kv_write(const kvs_kv_write_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    typedef kvs_kv_side<KVS_TYPE_K, KVS_DIM_K> k_side;
    typedef kvs_kv_side<KVS_TYPE_V, KVS_DIM_V> v_side;
    const kvs_u32 row = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 32;
    come_late((const kvs_step_words *)p.step);
    const kvs_u64 token = (p.step == 0 ? p.first_token : ((const kvs_step_words *)p.step)->first_token) + row;
    kvs_u8 *record = (kvs_u8 *)((const kvs_u64 *)p.page_table)[token / KVS_PAGE_TOKENS] +
                     (kvs_u64)head * (k_side::bytes + v_side::bytes);
    const kvs_u32 page_row = (kvs_u32)(token % KVS_PAGE_TOKENS);
    const float *k = (const float *)p.k + (kvs_u64)row * p.k_stride + head * KVS_DIM_K;
    const float *v = (const float *)p.v + (kvs_u64)row * p.v_stride + head * KVS_DIM_V;
    for (kvs_u32 i = threadIdx.x / 32; i < k_side::n_blocks + v_side::n_blocks; i += N_WARPS) {
        if (i < k_side::n_blocks) {
            store_block<KVS_TYPE_K, KVS_DIM_K>(k[i * 32 + lane], record, page_row, i);
        } else {
            const kvs_u32 block = i - k_side::n_blocks;
            store_block<KVS_TYPE_V, KVS_DIM_V>(v[block * 32 + lane], record + k_side::bytes, page_row, block);
        }
    }
}
