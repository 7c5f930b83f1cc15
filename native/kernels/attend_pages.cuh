/* attend_pages.cuh: what the lanes of a warp read of a page, and how codes become halves. Types of rows whose codes are exact as halves.
 *
 * A lane's addresses are found once; from there on rows and blocks lie at offsets that the compiler knows. With KVS_STAGED pages are
 * read out of shared memory: the same planes in the same order, but rows of codes lie a little apart, so that lanes of different rows meet
 * different banks. Warps bring their 32 rows of K themselves, V is brought by all. Architecture: sm_80.
 */
#ifndef KVS_KERNELS_ATTEND_PAGES_CUH
#define KVS_KERNELS_ATTEND_PAGES_CUH

#include "async_copy.cuh"
#include "attend_parts.cuh"
#include "mma.cuh"

#ifndef KVS_STAGED
#define KVS_STAGED 0
#endif

#define K_BLOCKS k_side::n_blocks
#define V_BLOCKS v_side::n_blocks

static_assert(!k_traits::is_float || KVS_TYPE_K == KVS_KV_F16, "K must be exact as halves");
static_assert(!v_traits::is_float || KVS_TYPE_V == KVS_KV_F16, "V must be exact as halves");

/* Bytes from one row of codes to the next, and where the planes behind them begin. */
#define K_CODES (K_BLOCKS * k_traits::codes_bytes)
#define V_CODES (V_BLOCKS * v_traits::codes_bytes)
#define K_ROW (K_CODES + (KVS_STAGED ? k_traits::codes_bytes : 0u))
#define V_ROW (V_CODES + (KVS_STAGED ? 16u : 0u))
#define K_HIGH_AT (KVS_PAGE_TOKENS * K_ROW)
#define V_HIGH_AT (KVS_PAGE_TOKENS * V_ROW)
#define K_SCALES_AT (K_HIGH_AT + KVS_PAGE_TOKENS * K_BLOCKS * k_traits::high_bytes)
#define V_SCALES_AT (V_HIGH_AT + KVS_PAGE_TOKENS * V_BLOCKS * v_traits::high_bytes)
#define K_STAGE_BYTES (K_SCALES_AT + KVS_PAGE_TOKENS * K_BLOCKS * k_traits::scales_bytes)
#define V_STAGE_BYTES (V_SCALES_AT + KVS_PAGE_TOKENS * V_BLOCKS * v_traits::scales_bytes)

/* N_ROWS rows of BYTES, together by N lanes of which this is number `lane`. */
template <kvs_u32 BYTES, kvs_u32 N_ROWS, kvs_u32 N> __device__ inline void stage_rows(kvs_u8 *to, kvs_u32 stride, const kvs_u8 *from, kvs_u32 lane)
{
    static_assert(N_ROWS * BYTES % 16 == 0 && (N_ROWS == 1 || BYTES % 16 == 0), "copies take 16 bytes");
#pragma unroll 4
    for (kvs_u32 i = lane; i < N_ROWS * BYTES / 16; i += N) {
        const kvs_u32 row = N_ROWS == 1 ? 0u : i / (BYTES / 16 + (BYTES < 16));
        kvs_copy_async(to + row * (stride - BYTES) + 16 * i, from + 16 * i);
    }
}

/* The warp's 32 rows of K. */
__device__ inline void stage_k(kvs_u8 *stage, const kvs_u8 *k)
{
    const kvs_u32 first = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
    constexpr kvs_u32 high = K_BLOCKS * k_traits::high_bytes, scales = K_BLOCKS * k_traits::scales_bytes;
    stage_rows<K_CODES, 32, 32>(stage + first * K_ROW, K_ROW, k + first * K_CODES, lane);
    stage_rows<32 * high, 1, 32>(stage + K_HIGH_AT + first * high, 0, k + k_side::high_at + first * high, lane);
    stage_rows<32 * scales, 1, 32>(stage + K_SCALES_AT + first * scales, 0, k + k_side::scales_at + first * scales, lane);
}

/* The block's page of V. */
__device__ inline void stage_v(kvs_u8 *stage, const kvs_u8 *v)
{
    constexpr kvs_u32 high = V_BLOCKS * v_traits::high_bytes, scales = V_BLOCKS * v_traits::scales_bytes;
    stage_rows<V_CODES, KVS_PAGE_TOKENS, N_THREADS>(stage, V_ROW, v, threadIdx.x);
    stage_rows<KVS_PAGE_TOKENS * high, 1, N_THREADS>(stage + V_HIGH_AT, 0, v + v_side::high_at, threadIdx.x);
    stage_rows<KVS_PAGE_TOKENS * scales, 1, N_THREADS>(stage + V_SCALES_AT, 0, v + v_side::scales_at, threadIdx.x);
}

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
    return {k + row * K_ROW + of_lane * t, k + K_HIGH_AT + block * k_traits::high_bytes, k + K_SCALES_AT + block * k_traits::scales_bytes};
}

/* Of the row `rows` behind the first. */
__device__ inline void load_k(const k_lane *mine, kvs_u32 rows, kvs_u32 block, k_words *loaded)
{
    const kvs_u64 at = (kvs_u64)rows * K_BLOCKS + block;
    const kvs_u8 *codes = mine->codes + (kvs_u64)rows * K_ROW + block * k_traits::codes_bytes;
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
    return {v + row * V_ROW + block * v_traits::codes_bytes + of_lane, v + V_HIGH_AT + at * v_traits::high_bytes,
            v + V_SCALES_AT + at * v_traits::scales_bytes};
}

__device__ inline void step_over(v_lane *mine, kvs_u32 rows)
{
    mine->codes += rows * V_ROW;
    mine->high += rows * V_BLOCKS * v_traits::high_bytes;
    mine->scales += rows * V_BLOCKS * v_traits::scales_bytes;
}

/* Of the row `rows` behind the next. */
__device__ inline v_words load_v(const v_lane *mine, kvs_u32 rows, kvs_u32 g)
{
    v_words loaded = {};
    const kvs_u64 at = (kvs_u64)rows * V_BLOCKS;
    const kvs_u8 *codes = mine->codes + (kvs_u64)rows * V_ROW, *scales = mine->scales + at * v_traits::scales_bytes;
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
