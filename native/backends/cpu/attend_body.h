/* attend_body.h: vectorised attention, in the order of attend.h; included after vec_avx2.h or vec_avx512.h.
 *
 * Scores and weighted sums are one matrix product each (attend_tiles.h), A[queries][n] * B[n][columns] with a decoded
 * strip of 64 tokens as B: columns are tokens for K (attend_keys.h) and values for V. With no more than V_FUSED queries
 * and F16 or a quantized type, decoded values go from register to register and no strip is written.
 */
#ifndef KVS_NATIVE_CPU_ATTEND_BODY_H
#define KVS_NATIVE_CPU_ATTEND_BODY_H

#include "backends/cpu/attend_keys.h"
#include "backends/cpu/attend_tiles.h"

#define PREFETCH_TOKENS 16u

/* Dot products with all tokens that the last query sees, rounded up to whole vectors; the surplus is ignored later. */
static void score_tokens(const kvs_attend_leaf *leaf)
{
    const uint32_t n_values = leaf->layer->head_dim_k;
    const uint32_t n_tokens = kvs_attend_visible(leaf, leaf->n_queries - 1);
    const kvs_attend_planes k = kvs_attend_planes_of(leaf, KVS_PLANE_K_CODES);
    for (uint32_t begin = 0; begin < n_tokens; begin += STRIP) {
        uint32_t n_columns = n_tokens - begin < STRIP ? n_tokens - begin : STRIP;
        n_columns = (n_columns + V_WIDTH - 1) / V_WIDTH * V_WIDTH;
        kvs_attend_prefetch(leaf, true, begin / STRIP, KVS_PAGE_TOKENS / STRIP);
        for (uint32_t column = 0; column < n_columns; column += V_WIDTH) {
            decode_k(leaf->layer->type_k, &k, begin + column, n_values, leaf->strip + column);
        }
        for (uint32_t i = 0, rows; i < leaf->n_queries; i += rows) {
            rows = tile_height(leaf->n_queries - i);
            const tile_args tile = {.a = leaf->q + (size_t)i * n_values,
                                    .b = leaf->strip,
                                    .c = leaf->scores + (size_t)i * KVS_PAGE_TOKENS + begin,
                                    .a_stride = n_values,
                                    .b_stride = STRIP,
                                    .c_stride = KVS_PAGE_TOKENS,
                                    .n = n_values};
            product_rows(tile, rows, n_columns);
        }
    }
}

/* Dot products become weights. */
static void weigh_tokens(float *scores, uint32_t n_tokens, float scale, float *part)
{
    const vf factor = v_set1(scale), none = v_set1(-INFINITY);
    vf best = none, lanes[16 / V_WIDTH];
    for (uint32_t t = 0; t < n_tokens; t += V_WIDTH) {
        vf score = v_keep(v_mul(v_load(scores + t), factor), none, n_tokens - t);
        v_store(scores + t, score);
        best = v_max(score, best);
    }
    const float m = v_reduce_max(best);
    for (uint32_t lane = 0; lane < 16 / V_WIDTH; lane++) {
        lanes[lane] = v_zero();
    }
    for (uint32_t t = 0; t < n_tokens; t += V_WIDTH) {
        /* Lanes past the end take a weight of +0, which leaves a sum as it is. */
        vf weight = v_keep(v_exp(v_sub(v_load(scores + t), v_set1(m))), v_zero(), n_tokens - t);
        v_store(scores + t, weight);
        lanes[t / V_WIDTH % (16 / V_WIDTH)] = v_add(lanes[t / V_WIDTH % (16 / V_WIDTH)], weight);
    }
    part[0] = m;
    part[1] = v_tree16(lanes);
}

/* Tokens of the strip at `begin` that query i sees. */
static inline uint32_t strip_visible(const kvs_attend_leaf *leaf, uint32_t i, uint32_t begin)
{
    const uint32_t n = kvs_attend_visible(leaf, i);
    return n <= begin ? 0 : n - begin < STRIP ? n - begin : STRIP;
}

/* Weighted V of one strip onto a tile of queries. Rows of the tile see different numbers of tokens: what all see is one
 * product, the rest goes row by row, so that no row touches a token it does not see. */
static void gather_tile(const kvs_attend_leaf *leaf, uint32_t i, uint32_t rows, uint32_t begin)
{
    const uint32_t n_values = leaf->layer->head_dim_v;
    const uint32_t part_floats = kvs_attend_part_floats(leaf->layer);
    const uint32_t common = strip_visible(leaf, i, begin);
    tile_args tile = {.a = leaf->scores + (size_t)i * KVS_PAGE_TOKENS + begin,
                      .b = leaf->strip,
                      .c = leaf->parts + (size_t)i * part_floats + KVS_ATTEND_PART_HEAD,
                      .a_stride = KVS_PAGE_TOKENS,
                      .b_stride = n_values,
                      .c_stride = part_floats,
                      .n = common,
                      .resumes = begin != 0};
    product_rows(tile, rows, n_values);
    tile.a += common;
    tile.b += (size_t)common * n_values;
    tile.resumes = 1;
    for (uint32_t row = 0; row < rows; row++) {
        tile.n = strip_visible(leaf, i + row, begin) - common;
        if (tile.n != 0) {
            product_rows(tile, 1, n_values);
        }
        tile.a += KVS_PAGE_TOKENS;
        tile.c += part_floats;
    }
}

static void gather_values(const kvs_attend_leaf *leaf)
{
    const uint32_t n_values = leaf->layer->head_dim_v;
    const uint32_t n_tokens = kvs_attend_visible(leaf, leaf->n_queries - 1);
    const kvs_attend_planes v = kvs_attend_planes_of(leaf, KVS_PLANE_V_CODES);
    const kvs_decode_fn decode = decode_select(leaf->layer->type_v);
    for (uint32_t begin = 0; begin < n_tokens; begin += STRIP) {
        const uint32_t n_rows = n_tokens - begin < STRIP ? n_tokens - begin : STRIP;
        kvs_attend_prefetch(leaf, false, begin / STRIP, KVS_PAGE_TOKENS / STRIP);
        decode(v.codes + (size_t)begin * v.codes_bytes, v.high + (size_t)begin * v.high_bytes,
               v.scales + (size_t)begin * v.scales_bytes, n_rows * n_values, leaf->strip);
        for (uint32_t i = 0, rows; i < leaf->n_queries; i += rows) {
            rows = tile_height(leaf->n_queries - i);
            gather_tile(leaf, i, rows, begin);
        }
    }
}

/* Dot products of few queries, V_GROUPS vectors of tokens at a time. A page has a whole number of those. */
ALWAYS_INLINE void score_few(int32_t type, uint32_t n_queries, const kvs_attend_leaf *leaf)
{
    const uint32_t n_values = leaf->layer->head_dim_k;
    const uint32_t n_tokens = kvs_attend_visible(leaf, n_queries - 1);
    const kvs_attend_planes k = kvs_attend_planes_of(leaf, KVS_PLANE_K_CODES);
    for (uint32_t token = 0; token < n_tokens; token += V_GROUPS * V_WIDTH) {
        k_sink sink = {.q = leaf->q, .q_stride = n_values};
        kvs_attend_prefetch(leaf, true, token / (V_GROUPS * V_WIDTH), KVS_PAGE_TOKENS / (V_GROUPS * V_WIDTH));
#pragma GCC unroll 12
        for (uint32_t i = 0; i < V_GROUPS * n_queries; i++) {
            sink.scores[i / n_queries][i % n_queries] = v_zero();
        }
        k_walk(type, V_GROUPS, n_queries, &k, token, n_values, &sink);
#pragma GCC unroll 12
        for (uint32_t i = 0; i < V_GROUPS * n_queries; i++) {
            const size_t query = i % n_queries, group = i / n_queries;
            v_store(leaf->scores + query * KVS_PAGE_TOKENS + token + group * V_WIDTH, sink.scores[group][query]);
        }
    }
}

/* Values of one token's block onto the sums of those queries that see it; all: every query does. */
ALWAYS_INLINE void gather_token(uint32_t n_queries, const kvs_attend_leaf *leaf, uint32_t token, bool all,
                                const vf *values, vf sums[V_FUSED][32 / V_WIDTH])
{
#pragma GCC unroll 6
    for (uint32_t i = 0; i < n_queries; i++) {
        if (all || token < kvs_attend_visible(leaf, i)) {
            const vf weight = v_set1(leaf->scores[(size_t)i * KVS_PAGE_TOKENS + token]);
#pragma GCC unroll 4
            for (uint32_t v = 0; v < 32 / V_WIDTH; v++) {
                sums[i][v] = v_fma(weight, values[v], sums[i][v]);
            }
        }
    }
}

/* 32 values of one token: a block of the quantized types, two of the float types. */
ALWAYS_INLINE void decode_32(int32_t type, const uint8_t *codes, const uint8_t *high, const float *scales, vf *values)
{
    const uint32_t n_scales = block_scales(type);
    const vf d = v_set1(n_scales == 0 ? 1.0f : scales[0]), low = v_set1(n_scales < 2 ? 0.0f : scales[1]);
    decode_block(type, codes, high, d, low, values);
    if (is_float(type)) {
        decode_block(type, codes + block_code_bytes(type), high, d, low, values + 16 / V_WIDTH);
    }
}

/* Weighted V of few queries, 32 values at a time over all tokens. The strip holds the page's scales. */
ALWAYS_INLINE void gather_few(int32_t type, uint32_t n_queries, const kvs_attend_leaf *leaf)
{
    const uint32_t n_blocks = leaf->layer->head_dim_v / 32, n_scales = block_scales(type);
    const uint32_t n_common = kvs_attend_visible(leaf, 0), n_tokens = kvs_attend_visible(leaf, n_queries - 1);
    const kvs_attend_planes planes = kvs_attend_planes_of(leaf, KVS_PLANE_V_CODES);
    convert_scales(planes.scales, n_tokens * n_blocks * n_scales, leaf->strip);
    for (uint32_t block = 0; block < n_blocks; block++) {
        const uint8_t *codes = planes.codes + (size_t)block * (32 / block_values(type)) * block_code_bytes(type);
        const uint8_t *high = planes.high + (size_t)block * 4;
        vf sums[V_FUSED][32 / V_WIDTH];
#pragma GCC unroll 24
        for (uint32_t i = 0; i < n_queries * (32 / V_WIDTH); i++) {
            sums[i / (32 / V_WIDTH)][i % (32 / V_WIDTH)] = v_zero();
        }
        for (uint32_t token = 0; token < n_tokens; token++) {
            const float *scales = leaf->strip + (size_t)(token * n_blocks + block) * n_scales;
            vf values[32 / V_WIDTH];
            if (token % PREFETCH_TOKENS == 0) {
                kvs_attend_prefetch(leaf, false, (block * KVS_PAGE_TOKENS + token) / PREFETCH_TOKENS,
                                    n_blocks * KVS_PAGE_TOKENS / PREFETCH_TOKENS);
            }
            decode_32(type, codes, high, scales, values);
            if (token < n_common) {
                gather_token(n_queries, leaf, token, true, values, sums);
            } else {
                gather_token(n_queries, leaf, token, false, values, sums);
            }
            codes += planes.codes_bytes;
            high += planes.high_bytes;
        }
#pragma GCC unroll 24
        for (uint32_t i = 0; i < n_queries * (32 / V_WIDTH); i++) {
            const uint32_t query = i / (32 / V_WIDTH), v = i % (32 / V_WIDTH);
            v_store(leaf->parts + (size_t)query * kvs_attend_part_floats(leaf->layer) + KVS_ATTEND_PART_HEAD +
                        (size_t)block * 32 + v * V_WIDTH,
                    sums[query][v]);
        }
    }
}

/* `call` with the number of queries as a constant. */
#define FOR_EACH_WIDTH(call, type)                                                                                     \
    switch (leaf->n_queries) {                                                                                         \
    case 1:                                                                                                            \
        call(type, 1, leaf);                                                                                           \
        break;                                                                                                         \
    case 2:                                                                                                            \
        call(type, 2, leaf);                                                                                           \
        break;                                                                                                         \
    case 3:                                                                                                            \
        call(type, 3, leaf);                                                                                           \
        break;                                                                                                         \
    V_MORE_WIDTHS(call, type)                                                                                          \
    }

#define FEW_OF(name, type)                                                                                             \
    static void score_few_##name(const kvs_attend_leaf *leaf)                                                          \
    {                                                                                                                  \
        FOR_EACH_WIDTH(score_few, type)                                                                                \
    }                                                                                                                  \
    static void gather_few_##name(const kvs_attend_leaf *leaf)                                                         \
    {                                                                                                                  \
        FOR_EACH_WIDTH(gather_few, type)                                                                               \
    }

FEW_OF(f16, KVS_TYPE_F16)
FEW_OF(q8_0, KVS_TYPE_Q8_0)
FEW_OF(q4_0, KVS_TYPE_Q4_0)
FEW_OF(q4_1, KVS_TYPE_Q4_1)
FEW_OF(q5_0, KVS_TYPE_Q5_0)
FEW_OF(q5_1, KVS_TYPE_Q5_1)
FEW_OF(iq4_nl, KVS_TYPE_IQ4_NL)

/* The two halves of a leaf. */
typedef struct leaf_steps {
    void (*score)(const kvs_attend_leaf *leaf);
    void (*gather)(const kvs_attend_leaf *leaf);
} leaf_steps;

static leaf_steps few_steps(int32_t type)
{
    switch (type) {
    case KVS_TYPE_F16:
        return (leaf_steps){score_few_f16, gather_few_f16};
    case KVS_TYPE_Q8_0:
        return (leaf_steps){score_few_q8_0, gather_few_q8_0};
    case KVS_TYPE_Q4_0:
        return (leaf_steps){score_few_q4_0, gather_few_q4_0};
    case KVS_TYPE_Q4_1:
        return (leaf_steps){score_few_q4_1, gather_few_q4_1};
    case KVS_TYPE_Q5_0:
        return (leaf_steps){score_few_q5_0, gather_few_q5_0};
    case KVS_TYPE_Q5_1:
        return (leaf_steps){score_few_q5_1, gather_few_q5_1};
    case KVS_TYPE_IQ4_NL:
        return (leaf_steps){score_few_iq4_nl, gather_few_iq4_nl};
    default:
        return (leaf_steps){score_tokens, gather_values};
    }
}

static leaf_steps steps_of(const kvs_attend_leaf *leaf, int32_t type, uint32_t head_dim)
{
    const bool is_few = leaf->n_queries <= V_FUSED && head_dim % 32 == 0;
    return is_few ? few_steps(type) : (leaf_steps){score_tokens, gather_values};
}

static void attend_leaf(const kvs_attend_leaf *leaf)
{
    const uint32_t part_floats = kvs_attend_part_floats(leaf->layer);
    steps_of(leaf, leaf->layer->type_k, leaf->layer->head_dim_k).score(leaf);
    for (uint32_t i = 0; i < leaf->n_queries; i++) {
        weigh_tokens(leaf->scores + (size_t)i * KVS_PAGE_TOKENS, kvs_attend_visible(leaf, i), leaf->scale,
                     leaf->parts + (size_t)i * part_floats);
    }
    steps_of(leaf, leaf->layer->type_v, leaf->layer->head_dim_v).gather(leaf);
}

static void attend_fold(float *into, const float *part, uint32_t head_dim_v)
{
    const float m = part[0] > into[0] ? part[0] : into[0];
    const float keep = kvs_expf(into[0] - m), add = kvs_expf(part[0] - m);
    const vf keeps = v_set1(keep), adds = v_set1(add);
    into[0] = m;
    into[1] = fmaf(part[1], add, into[1] * keep);
    for (uint32_t d = KVS_ATTEND_PART_HEAD; d < KVS_ATTEND_PART_HEAD + head_dim_v; d += V_WIDTH) {
        v_store(into + d, v_fma(v_load(part + d), adds, v_mul(v_load(into + d), keeps)));
    }
}

static void attend_finish(const float *part, float *out, uint32_t head_dim_v)
{
    const vf inverse = v_set1(1.0f / part[1]);
    for (uint32_t d = 0; d < head_dim_v; d += V_WIDTH) {
        v_store(out + d, v_canonical(v_mul(v_load(part + KVS_ATTEND_PART_HEAD + d), inverse)));
    }
}

static const kvs_attend_ops attend_ops = {attend_leaf, attend_fold, attend_finish};

#endif
