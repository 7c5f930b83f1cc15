/* attend_pages.cuh: what the lanes of a warp read of a page, and how codes become halves. Types of rows whose codes are exact as halves.
 *
 * A lane's addresses are found once; from there on rows and blocks lie at offsets that the compiler knows. Architecture: sm_80.
 */
#ifndef KVS_KERNELS_ATTEND_PAGES_CUH
#define KVS_KERNELS_ATTEND_PAGES_CUH

#include "attend_parts.cuh"
#include "mma.cuh"

#define K_BLOCKS k_side::n_blocks
#define V_BLOCKS v_side::n_blocks

static_assert(!k_traits::is_float || KVS_TYPE_K == KVS_KV_F16, "K must be exact as halves");
static_assert(!v_traits::is_float || KVS_TYPE_V == KVS_KV_F16, "V must be exact as halves");

/* Where a lane's codes, high bits and scales of its first row of K begin, at block 0. */
struct k_lane {
    const kvs_u8 *codes;
    const kvs_u8 *high;
    const kvs_u8 *scales;
};

/* What a lane reads of a K row's block. */
struct k_words {
    kvs_u32 words[k_traits::is_float ? 4 : k_traits::is_nibbles ? 1 : 2];
    kvs_u32 high;
    kvs_kv_scale scale;
};

__device__ inline k_lane lane_of_k(const kvs_u8 *k, kvs_u32 row, kvs_u32 t)
{
    constexpr kvs_u32 of_lane = sizeof(((k_words *)0)->words);
    const kvs_u32 block = row * K_BLOCKS;
    return {k + block * k_traits::codes_bytes + of_lane * t, k + k_side::high_at + block * k_traits::high_bytes,
            k + k_side::scales_at + block * k_traits::scales_bytes};
}

/* Of the row `rows` behind the first. */
__device__ inline void load_k(const k_lane *mine, kvs_u32 rows, kvs_u32 block, k_words *loaded)
{
    const kvs_u64 at = (kvs_u64)rows * K_BLOCKS + block;
    const kvs_u8 *codes = mine->codes + at * k_traits::codes_bytes;
    constexpr kvs_u32 n_words = sizeof loaded->words / 4;
    if (n_words == 4) {
        const uint4 four = *(const uint4 *)codes;
        loaded->words[0] = four.x, loaded->words[1 % n_words] = four.y;
        loaded->words[2 % n_words] = four.z, loaded->words[3 % n_words] = four.w;
    } else if (n_words == 2) {
        const uint2 two = *(const uint2 *)codes;
        loaded->words[0] = two.x, loaded->words[1 % n_words] = two.y;
    } else {
        loaded->words[0] = *(const kvs_u32 *)codes;
    }
    loaded->high = k_traits::has_high ? *(const kvs_u32 *)(mine->high + at * k_traits::high_bytes) : 0u;
    loaded->scale = kvs_kv_scale_at<KVS_TYPE_K>(mine->scales + at * k_traits::scales_bytes);
}

/* The four codes of step s as two words of halves. */
__device__ inline void k_halves(const k_words *loaded, kvs_u32 s, kvs_u32 t, kvs_u32 *first, kvs_u32 *second)
{
    constexpr kvs_u32 n_words = sizeof loaded->words / 4;
    if (k_traits::is_float) {
        *first = loaded->words[2 * s % n_words];
        *second = loaded->words[(2 * s + 1) % n_words];
        return;
    }
    kvs_u32 bytes[2];
    kvs_kv_octet_bytes<KVS_TYPE_K>(loaded->words[0], loaded->words[n_words - 1], loaded->high, t, bytes);
    *first = kvs_bytes_to_halves<k_traits::offset, false>(bytes[s]);
    *second = kvs_bytes_to_halves<k_traits::offset, true>(bytes[s]);
}

/* Where a lane's codes, high bits and scales of its next row of V begin, in the warp's block. */
struct v_lane {
    const kvs_u8 *codes;
    const kvs_u8 *high;
    const kvs_u8 *scales;
};

/* What a lane reads of a V row's block: the codes of values 4g .. 4g + 3. */
struct v_words {
    kvs_u32 words[v_traits::is_float ? 2 : 1];
    kvs_u32 scales; /* scale, and minimum above it */
};

__device__ inline v_lane lane_of_v(const kvs_u8 *v, kvs_u32 row, kvs_u32 block, kvs_u32 g)
{
    const kvs_u32 at = row * V_BLOCKS + block, of_lane = v_traits::is_float ? 8 * g : v_traits::is_nibbles ? 4 * (g % 4) : 4 * g;
    return {v + at * v_traits::codes_bytes + of_lane, v + v_side::high_at + at * v_traits::high_bytes,
            v + v_side::scales_at + at * v_traits::scales_bytes};
}

__device__ inline void step_over(v_lane *mine, kvs_u32 rows)
{
    mine->codes += rows * V_BLOCKS * v_traits::codes_bytes;
    mine->high += rows * V_BLOCKS * v_traits::high_bytes;
    mine->scales += rows * V_BLOCKS * v_traits::scales_bytes;
}

/* Of the row `rows` behind the next. */
__device__ inline v_words load_v(const v_lane *mine, kvs_u32 rows, kvs_u32 g)
{
    v_words loaded = {};
    const kvs_u64 at = (kvs_u64)rows * V_BLOCKS;
    const kvs_u8 *codes = mine->codes + at * v_traits::codes_bytes, *scales = mine->scales + at * v_traits::scales_bytes;
    if (v_traits::is_float) {
        const uint2 two = *(const uint2 *)codes;
        loaded.words[0] = two.x, loaded.words[sizeof loaded.words / 4 - 1] = two.y;
    } else if (v_traits::is_nibbles) {
        const kvs_u32 high = v_traits::has_high ? *(const kvs_u32 *)(mine->high + at * v_traits::high_bytes) : 0u;
        loaded.words[0] = kvs_kv_quad_bytes<KVS_TYPE_V>(*(const kvs_u32 *)codes, high, g);
    } else {
        loaded.words[0] = *(const kvs_u32 *)codes ^ 0x80808080u;
    }
    if (v_traits::has_minimum) {
        loaded.scales = *(const kvs_u32 *)scales;
    } else if (!v_traits::is_float) {
        loaded.scales = *(const kvs_u16 *)scales;
    }
    return loaded;
}

/* Codes times scale plus minimum of two tokens, as sums of two halves. The product and the rest of the sum are exact. */
__device__ inline kvs_split scaled_pair(kvs_u32 codes, kvs_u32 scales, kvs_u32 minima)
{
    kvs_split split;
    split.high = kvs_halves_mul(codes, scales);
    split.low = kvs_halves_fms(codes, scales, split.high);
    if (v_traits::has_minimum) {
        const kvs_u32 product = split.high, sum = kvs_halves_add(product, minima);
        const kvs_u32 of_minimum = kvs_halves_sub(sum, product);
        const kvs_u32 of_product = kvs_halves_sub(sum, of_minimum);
        const kvs_u32 rest = kvs_halves_add(kvs_halves_sub(product, of_product), kvs_halves_sub(minima, of_minimum));
        split.high = sum;
        split.low = kvs_halves_add(split.low, rest);
    }
    return split;
}

/* Values 4g .. 4g + 3 of two tokens, a pair each. `kept`: ones where a token counts. */
__device__ inline void v_pairs(const v_words *a, const v_words *b, kvs_u32 kept, kvs_split *pairs)
{
    if (v_traits::is_float) {
        constexpr kvs_u32 last = sizeof a->words / 4 - 1;
        pairs[0].high = __byte_perm(a->words[0], b->words[0], 0x5410u) & kept;
        pairs[1].high = __byte_perm(a->words[0], b->words[0], 0x7632u) & kept;
        pairs[2].high = __byte_perm(a->words[last], b->words[last], 0x5410u) & kept;
        pairs[3].high = __byte_perm(a->words[last], b->words[last], 0x7632u) & kept;
        return;
    }
    const kvs_u32 begin = __byte_perm(a->words[0], b->words[0], 0x5140u);
    const kvs_u32 end = __byte_perm(a->words[0], b->words[0], 0x7362u);
    const kvs_u32 scales = __byte_perm(a->scales, b->scales, 0x5410u);
    const kvs_u32 minima = __byte_perm(a->scales, b->scales, 0x7632u);
    pairs[0] = scaled_pair(kvs_bytes_to_halves<v_traits::offset, false>(begin), scales, minima);
    pairs[1] = scaled_pair(kvs_bytes_to_halves<v_traits::offset, true>(begin), scales, minima);
    pairs[2] = scaled_pair(kvs_bytes_to_halves<v_traits::offset, false>(end), scales, minima);
    pairs[3] = scaled_pair(kvs_bytes_to_halves<v_traits::offset, true>(end), scales, minima);
#pragma unroll
    for (kvs_u32 i = 0; i < 4; i++) {
        pairs[i].high &= kept;
        pairs[i].low &= kept;
    }
}

#endif
