/* attend_body.h: vectorised attention, in the order of attend.h; included after vec_avx2.h or vec_avx512.h.
 *
 * Scores and weighted sums are one matrix product each, A[queries][n] * B[n][columns] with a decoded strip of 64 tokens
 * as B: columns are tokens for K (decoded with tokens in the lanes) and values for V. Each output is one fmaf chain in
 * rising n, held in a register; a tile of up to 6 queries by V_PANEL vectors shares the loads of B. With no more than
 * V_FUSED queries and F16 or a quantized type, decoded values go from register to register and no strip is written.
 */
#ifndef KVS_NATIVE_CPU_ATTEND_BODY_H
#define KVS_NATIVE_CPU_ATTEND_BODY_H

#include "backends/cpu/attend_ops.h"
#include "backends/cpu/decode_body.h"

#define STRIP KVS_ATTEND_STRIP
#define MAX_TILE 6u
#define PREFETCH_TOKENS 16u
#define MAX_VECTORS 4u

/* C (+)= A * B for one register tile. */
typedef struct tile_args {
    const float *a;
    const float *b;
    float *c;
    size_t a_stride;
    size_t b_stride;
    size_t c_stride;
    uint32_t n;       /* length of the chains */
    uint32_t resumes; /* the chains go on from C */
} tile_args;

ALWAYS_INLINE void tile_product(const tile_args *t, uint32_t rows, uint32_t vectors)
{
    vf acc[MAX_TILE][MAX_VECTORS];
#pragma GCC unroll 6
    for (uint32_t r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (uint32_t v = 0; v < vectors; v++) {
            acc[r][v] = t->resumes ? v_load(t->c + r * t->c_stride + v * V_WIDTH) : v_zero();
        }
    }
    const float *a = t->a, *b = t->b;
    const size_t a_stride = t->a_stride;
    for (uint32_t k = 0; k < t->n; k++, b += t->b_stride) {
        vf line[MAX_VECTORS];
#pragma GCC unroll 4
        for (uint32_t v = 0; v < vectors; v++) {
            line[v] = v_load(b + v * V_WIDTH);
        }
#pragma GCC unroll 6
        for (uint32_t r = 0; r < rows; r++) {
            const vf value = v_set1(a[r * a_stride + k]);
#pragma GCC unroll 4
            for (uint32_t v = 0; v < vectors; v++) {
                acc[r][v] = v_fma(value, line[v], acc[r][v]);
            }
        }
    }
#pragma GCC unroll 6
    for (uint32_t r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (uint32_t v = 0; v < vectors; v++) {
            v_store(t->c + r * t->c_stride + v * V_WIDTH, acc[r][v]);
        }
    }
}

#define TILE_CASES(vectors)                                                                                            \
    static void tile_rows_##vectors(const tile_args *t, uint32_t rows)                                                 \
    {                                                                                                                  \
        switch (rows) {                                                                                                \
        case 1:                                                                                                        \
            tile_product(t, 1, vectors);                                                                               \
            break;                                                                                                     \
        case 2:                                                                                                        \
            tile_product(t, 2, vectors);                                                                               \
            break;                                                                                                     \
        case 3:                                                                                                        \
            tile_product(t, 3, vectors);                                                                               \
            break;                                                                                                     \
        case 4:                                                                                                        \
            tile_product(t, 4, vectors);                                                                               \
            break;                                                                                                     \
        case 5:                                                                                                        \
            tile_product(t, 5, vectors);                                                                               \
            break;                                                                                                     \
        default:                                                                                                       \
            tile_product(t, 6, vectors);                                                                               \
            break;                                                                                                     \
        }                                                                                                              \
    }

TILE_CASES(1)
TILE_CASES(2)
TILE_CASES(4)

/* All columns of up to MAX_TILE rows. n_columns is a multiple of V_WIDTH. */
static void product_rows(tile_args t, uint32_t rows, uint32_t n_columns)
{
    while (n_columns != 0) {
        uint32_t vectors = n_columns / V_WIDTH;
        if (V_PANEL >= 4 && vectors >= 4) {
            vectors = 4;
            tile_rows_4(&t, rows);
        } else if (vectors >= 2) {
            vectors = 2;
            tile_rows_2(&t, rows);
        } else {
            tile_rows_1(&t, rows);
        }
        t.b += vectors * V_WIDTH;
        t.c += vectors * V_WIDTH;
        n_columns -= vectors * V_WIDTH;
    }
}

/* Rows of the next tile, so that tiles are about equally high. */
static inline uint32_t tile_height(uint32_t rows_left)
{
    const uint32_t n_tiles = (rows_left + MAX_TILE - 1) / MAX_TILE;
    return (rows_left + n_tiles - 1) / n_tiles;
}

/* What becomes of decoded K, V_GROUPS vectors of tokens wide: stored to a strip (n_queries 0), or multiplied into the
 * scores of up to V_FUSED queries. */
typedef struct k_sink {
    float *strip; /* value d of token vector g at strip + d * STRIP + g * V_WIDTH */
    const float *q;
    size_t q_stride;
    vf scores[V_GROUPS][V_FUSED];
} k_sink;

ALWAYS_INLINE void k_take(k_sink *sink, uint32_t n_queries, uint32_t group, uint32_t d, vf value)
{
    if (n_queries == 0) {
        v_store(sink->strip + (size_t)d * STRIP + group * V_WIDTH, value);
    }
#pragma GCC unroll 6
    for (uint32_t i = 0; i < n_queries; i++) {
        sink->scores[group][i] = v_fma(v_set1(sink->q[i * sink->q_stride + d]), value, sink->scores[group][i]);
    }
}

/* Scale, and minimum where the type has one, of one block of V_WIDTH tokens. A gather reads four bytes: past the last
 * scale of a plane without minima lie the V codes of the same record. */
ALWAYS_INLINE void k_scales(int32_t type, const kvs_attend_planes *k, uint32_t token, uint32_t block, vf out[2])
{
    const uint8_t *scales = k->scales + (size_t)token * k->scales_bytes;
    const uint32_t half = !has_low(type) && k->scales_bytes == 4 ? block % 2 : 0;
    const vi words = v_gather(scales + (size_t)(block - half) * (has_low(type) ? 4 : 2), k->scales_bytes);
    out[0] = v_low_f16(half == 0 ? words : v_shr(words, 16));
    out[1] = v_low_f16(v_shr(words, 16));
}

/* Values d.. that one dword of codes holds, of V_WIDTH tokens. */
ALWAYS_INLINE void k_take_floats(int32_t type, k_sink *sink, uint32_t n_queries, uint32_t group, uint32_t d, vi word)
{
    if (type == KVS_TYPE_F32) {
        k_take(sink, n_queries, group, d, v_as_float(word));
    } else if (type == KVS_TYPE_F16) {
        k_take(sink, n_queries, group, d, v_low_f16(word));
        k_take(sink, n_queries, group, d + 1, v_low_f16(v_shr(word, 16)));
    } else {
        k_take(sink, n_queries, group, d, v_as_float(v_shl(word, 16)));
        k_take(sink, n_queries, group, d + 1, v_as_float(v_and(word, 0xffff0000u)));
    }
}

ALWAYS_INLINE void k_walk_floats(int32_t type, uint32_t n_groups, uint32_t n_queries, const kvs_attend_planes *k,
                                 uint32_t token, uint32_t n_values, k_sink *sink)
{
    const uint8_t *codes = k->codes + (size_t)token * k->codes_bytes;
    const uint32_t per_word = type == KVS_TYPE_F32 ? 1 : 2;
    for (uint32_t d = 0; d < n_values; d += 4 * per_word, codes += 16) {
        vi words[V_GROUPS][4];
#pragma GCC unroll 2
        for (uint32_t g = 0; g < n_groups; g++) {
            v_transpose(codes + (size_t)g * V_WIDTH * k->codes_bytes, k->codes_bytes, words[g]);
        }
#pragma GCC unroll 4
        for (uint32_t w = 0; w < 4; w++) {
#pragma GCC unroll 2
            for (uint32_t g = 0; g < n_groups; g++) {
                k_take_floats(type, sink, n_queries, g, d + w * per_word, words[g][w]);
            }
        }
    }
}

/* Value `place` of a block, its codes being byte `i` of `word`; `upper` takes the high nibble. */
ALWAYS_INLINE vf k_value(int32_t type, vi word, vi bits, const vf scale[2], uint32_t i, bool upper, uint32_t place)
{
    if (type == KVS_TYPE_Q8_0) {
        return v_mul(scale[0], v_convert(v_byte(word, i)));
    }
    const vi quant = v_shr(word, 8 * i + (upper ? 4 : 0));
    if (has_high(type)) {
        const vi fifth = v_and(v_shl(v_shr(bits, place), 4), 16);
        return scaled(type, five_bits(type, v_or(v_and(quant, 15), fifth)), scale[0], scale[1]);
    }
    return scaled(type, nibble_value(type, quant), scale[0], scale[1]);
}

/* 16 bytes of codes: values d + 0..15 of a block, or all 32 of a block of nibbles. */
ALWAYS_INLINE void k_walk_unit(int32_t type, uint32_t n_groups, uint32_t n_queries, vi words[V_GROUPS][4],
                               const vi *bits, vf scale[V_GROUPS][2], uint32_t d, k_sink *sink)
{
    const uint32_t n_uppers = type == KVS_TYPE_Q8_0 ? 1 : 2;
#pragma GCC unroll 2
    for (uint32_t upper = 0; upper < n_uppers; upper++) {
        for (uint32_t w = 0; w < 4; w++) {
#pragma GCC unroll 4
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t place = 16 * upper + 4 * w + i;
#pragma GCC unroll 2
                for (uint32_t g = 0; g < n_groups; g++) {
                    k_take(sink, n_queries, g, d + place,
                           k_value(type, words[g][w], bits[g], scale[g], i, upper != 0, place));
                }
            }
        }
    }
}

ALWAYS_INLINE void k_walk_blocks(int32_t type, uint32_t n_groups, uint32_t n_queries, const kvs_attend_planes *k,
                                 uint32_t token, uint32_t n_values, k_sink *sink)
{
    const uint8_t *codes = k->codes + (size_t)token * k->codes_bytes;
    const uint8_t *high = k->high + (size_t)token * k->high_bytes;
    vf scale[V_GROUPS][2];
    vi bits[V_GROUPS], words[V_GROUPS][4];
    for (uint32_t block = 0; block < n_values / 32; block++) {
#pragma GCC unroll 2
        for (uint32_t g = 0; g < n_groups; g++) {
            const uint8_t *row_high = high + (size_t)g * V_WIDTH * k->high_bytes + (size_t)block * 4;
            k_scales(type, k, token + g * V_WIDTH, block, scale[g]);
            bits[g] = has_high(type) ? v_gather(row_high, k->high_bytes) : v_as_int(v_zero());
        }
#pragma GCC unroll 2
        for (uint32_t half = 0; half < block_code_bytes(type) / 16; half++, codes += 16) {
#pragma GCC unroll 2
            for (uint32_t g = 0; g < n_groups; g++) {
                v_transpose(codes + (size_t)g * V_WIDTH * k->codes_bytes, k->codes_bytes, words[g]);
            }
            k_walk_unit(type, n_groups, n_queries, words, bits, scale, 32 * block + 16 * half, sink);
        }
    }
}

ALWAYS_INLINE void k_walk(int32_t type, uint32_t n_groups, uint32_t n_queries, const kvs_attend_planes *k,
                          uint32_t token, uint32_t n_values, k_sink *sink)
{
    if (is_float(type)) {
        k_walk_floats(type, n_groups, n_queries, k, token, n_values, sink);
    } else {
        k_walk_blocks(type, n_groups, n_queries, k, token, n_values, sink);
    }
}

/* Do `call(TYPE)` for the constant that equals `type`. */
#define FOR_EACH_TYPE(type, call)                                                                                      \
    switch (type) {                                                                                                    \
    case KVS_TYPE_F32:                                                                                                 \
        call(KVS_TYPE_F32);                                                                                            \
        break;                                                                                                         \
    case KVS_TYPE_F16:                                                                                                 \
        call(KVS_TYPE_F16);                                                                                            \
        break;                                                                                                         \
    case KVS_TYPE_BF16:                                                                                                \
        call(KVS_TYPE_BF16);                                                                                           \
        break;                                                                                                         \
    case KVS_TYPE_Q8_0:                                                                                                \
        call(KVS_TYPE_Q8_0);                                                                                           \
        break;                                                                                                         \
    case KVS_TYPE_Q4_0:                                                                                                \
        call(KVS_TYPE_Q4_0);                                                                                           \
        break;                                                                                                         \
    case KVS_TYPE_Q4_1:                                                                                                \
        call(KVS_TYPE_Q4_1);                                                                                           \
        break;                                                                                                         \
    case KVS_TYPE_Q5_0:                                                                                                \
        call(KVS_TYPE_Q5_0);                                                                                           \
        break;                                                                                                         \
    case KVS_TYPE_Q5_1:                                                                                                \
        call(KVS_TYPE_Q5_1);                                                                                           \
        break;                                                                                                         \
    default:                                                                                                           \
        call(KVS_TYPE_IQ4_NL);                                                                                         \
        break;                                                                                                         \
    }

/* K of V_WIDTH tokens from `token` on, tokens in the lanes: value d of them is one vector at strip + d * STRIP. */
static void decode_k(int32_t type, const kvs_attend_planes *k, uint32_t token, uint32_t n_values, float *strip)
{
    k_sink sink = {.strip = strip};
#define DECODE_K(constant) k_walk(constant, 1, 0, k, token, n_values, &sink)
    FOR_EACH_TYPE(type, DECODE_K)
#undef DECODE_K
}

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
