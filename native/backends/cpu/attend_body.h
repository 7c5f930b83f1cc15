/* attend_body.h: vectorised attention, in the order of attend.h; included after vec_avx2.h or vec_avx512.h.
 *
 * Scores and weighted sums are one matrix product each, A[queries][n] * B[n][columns] with a decoded strip of 64 tokens
 * as B: columns are tokens for K (decoded with tokens in the lanes) and values for V. Each output is one fmaf chain in
 * rising n, held in a register; a tile of up to 6 queries by V_PANEL vectors shares the loads of B.
 */
#ifndef KVS_NATIVE_CPU_ATTEND_BODY_H
#define KVS_NATIVE_CPU_ATTEND_BODY_H

#include "backends/cpu/attend_ops.h"
#include "backends/cpu/decode_body.h"

#include <stdbool.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define STRIP KVS_ATTEND_STRIP
#define MAX_TILE 6u
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

/* K of V_WIDTH tokens from `token` on, tokens in the lanes: value d of them is one vector at strip + d * STRIP. */
ALWAYS_INLINE void k_floats(int32_t type, const kvs_attend_planes *k, uint32_t token, uint32_t n_values, float *strip)
{
    const uint8_t *codes = k->codes + (size_t)token * k->codes_bytes;
    const uint32_t per_word = type == KVS_TYPE_F32 ? 1 : 2;
    vi words[4];
    for (uint32_t d = 0; d < n_values; d += 4 * per_word, codes += 16) {
        v_transpose(codes, k->codes_bytes, words);
        for (uint32_t w = 0; w < 4; w++, strip += (size_t)per_word * STRIP) {
            if (type == KVS_TYPE_F32) {
                v_store(strip, v_as_float(words[w]));
            } else if (type == KVS_TYPE_F16) {
                v_store(strip, v_low_f16(words[w]));
                v_store(strip + STRIP, v_low_f16(v_shr(words[w], 16)));
            } else {
                v_store(strip, v_as_float(v_shl(words[w], 16)));
                v_store(strip + STRIP, v_as_float(v_and(words[w], 0xffff0000u)));
            }
        }
    }
}

/* Scale, and minimum where the type has one, of block b of V_WIDTH tokens. A gather reads four bytes: past the last
 * scale of a plane without minima lie the V codes of the same record. */
ALWAYS_INLINE void k_scales(bool has_low, const kvs_attend_planes *k, uint32_t token, uint32_t block, vf out[2])
{
    const uint8_t *scales = k->scales + (size_t)token * k->scales_bytes;
    const uint32_t word_blocks = has_low || k->scales_bytes != 4 ? 1 : 2;
    const uint32_t half = word_blocks == 2 ? block % 2 : 0;
    const vi words = v_gather(scales + (size_t)(block - half) * (has_low ? 4 : 2), k->scales_bytes);
    out[0] = v_low_f16(half == 0 ? words : v_shr(words, 16));
    out[1] = v_low_f16(v_shr(words, 16));
}

ALWAYS_INLINE void k_q8_0(const kvs_attend_planes *k, uint32_t token, uint32_t n_values, float *strip)
{
    const uint8_t *codes = k->codes + (size_t)token * k->codes_bytes;
    vi words[4];
    vf scale[2];
    for (uint32_t block = 0; block < n_values / 32; block++) {
        k_scales(false, k, token, block, scale);
        for (uint32_t half = 0; half < 2; half++, codes += 16) {
            v_transpose(codes, k->codes_bytes, words);
            for (uint32_t i = 0; i < 16; i++, strip += STRIP) {
                v_store(strip, v_mul(scale[0], v_convert(v_byte(words[i / 4], i % 4))));
            }
        }
    }
}

/* Types with a table of 16 values; has_low: value = scale * entry + minimum. */
ALWAYS_INLINE void k_nibbles(const float *values, bool has_low, const kvs_attend_planes *k, uint32_t token,
                             uint32_t n_values, float *strip)
{
    const uint8_t *codes = k->codes + (size_t)token * k->codes_bytes;
    const v_table table = v_table16(values);
    vi words[4];
    vf scale[2];
    for (uint32_t block = 0; block < n_values / 32; block++, codes += 16, strip += (size_t)32 * STRIP) {
        k_scales(has_low, k, token, block, scale);
        v_transpose(codes, k->codes_bytes, words);
        for (uint32_t i = 0; i < 32; i++) {
            const vi index = v_shr(words[i % 16 / 4], 8 * (i % 4) + (i < 16 ? 0 : 4));
            const vf entry = v_lookup(&table, index);
            v_store(strip + (size_t)i * STRIP,
                    has_low ? v_fma(scale[0], entry, scale[1]) : v_mul(scale[0], entry));
        }
    }
}

ALWAYS_INLINE void k_q5(bool has_low, const kvs_attend_planes *k, uint32_t token, uint32_t n_values, float *strip)
{
    const uint8_t *codes = k->codes + (size_t)token * k->codes_bytes;
    const uint8_t *high = k->high + (size_t)token * k->high_bytes;
    const vf centre = v_set1(16.0f);
    vi words[4];
    vf scale[2];
    for (uint32_t block = 0; block < n_values / 32; block++, codes += 16, high += 4, strip += (size_t)32 * STRIP) {
        k_scales(has_low, k, token, block, scale);
        const vi bits = v_gather(high, k->high_bytes);
        v_transpose(codes, k->codes_bytes, words);
        for (uint32_t i = 0; i < 32; i++) {
            const vi low = v_and(v_shr(words[i % 16 / 4], 8 * (i % 4) + (i < 16 ? 0 : 4)), 15);
            const vi fifth = v_and(i < 4 ? v_shl(bits, 4 - i) : v_shr(bits, i - 4), 16);
            const vf quant = v_convert(v_or(low, fifth));
            v_store(strip + (size_t)i * STRIP, has_low ? v_fma(scale[0], quant, scale[1])
                                                       : v_mul(scale[0], v_sub(quant, centre)));
        }
    }
}

static void decode_k(int32_t type, const kvs_attend_planes *k, uint32_t token, uint32_t n_values, float *strip)
{
    switch (type) {
    case KVS_TYPE_F32:
        k_floats(KVS_TYPE_F32, k, token, n_values, strip);
        break;
    case KVS_TYPE_F16:
        k_floats(KVS_TYPE_F16, k, token, n_values, strip);
        break;
    case KVS_TYPE_BF16:
        k_floats(KVS_TYPE_BF16, k, token, n_values, strip);
        break;
    case KVS_TYPE_Q8_0:
        k_q8_0(k, token, n_values, strip);
        break;
    case KVS_TYPE_Q4_0:
        k_nibbles(nibble_centred, false, k, token, n_values, strip);
        break;
    case KVS_TYPE_IQ4_NL:
        k_nibbles(kvs_iq4_nl_values, false, k, token, n_values, strip);
        break;
    case KVS_TYPE_Q4_1:
        k_nibbles(nibble_plain, true, k, token, n_values, strip);
        break;
    case KVS_TYPE_Q5_0:
        k_q5(false, k, token, n_values, strip);
        break;
    default:
        k_q5(true, k, token, n_values, strip);
        break;
    }
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
        for (uint32_t row = 0; row < n_rows; row++) {
            const size_t token = begin + row;
            decode(v.codes + token * v.codes_bytes, v.high + token * v.high_bytes, v.scales + token * v.scales_bytes,
                   n_values, leaf->strip + (size_t)row * n_values);
        }
        for (uint32_t i = 0, rows; i < leaf->n_queries; i += rows) {
            rows = tile_height(leaf->n_queries - i);
            gather_tile(leaf, i, rows, begin);
        }
    }
}

static void attend_leaf(const kvs_attend_leaf *leaf)
{
    const uint32_t part_floats = kvs_attend_part_floats(leaf->layer);
    score_tokens(leaf);
    for (uint32_t i = 0; i < leaf->n_queries; i++) {
        weigh_tokens(leaf->scores + (size_t)i * KVS_PAGE_TOKENS, kvs_attend_visible(leaf, i), leaf->scale,
                     leaf->parts + (size_t)i * part_floats);
    }
    gather_values(leaf);
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
