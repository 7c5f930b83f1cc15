/* attend_tiles.h: the matrix product of attention, in register tiles; included after vec_avx2.h or vec_avx512.h.
 *
 * Order: each output is one fmaf chain in rising n, held in a register; a tile of up to 6 queries by V_PANEL vectors
 * shares the loads of B.
 */
#ifndef KVS_NATIVE_CPU_ATTEND_TILES_H
#define KVS_NATIVE_CPU_ATTEND_TILES_H

#include "backends/cpu/decode_body.h"

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

#endif
