/* matmul_kernels.h: what an instruction set provides for matmul.c. All sets give the same bits. */
#ifndef KVS_NATIVE_CPU_MATMUL_KERNELS_H
#define KVS_NATIVE_CPU_MATMUL_KERNELS_H

#include "backends/cpu/act.h"
#include "backends/cpu/panel_layout.h"

/* 1 or 2 panels that lie one after another. Panels read for the first time in a pass come from memory; the kernel then
 * fetches ahead, on the guess that the panels behind them are next. */
typedef struct kvs_panel_run {
    const kvs_panel_layout *layout;
    const uint8_t *panels;
    uint32_t n_panels;
    bool is_first;
} kvs_panel_run;

#define KVS_PANELS_AHEAD_BYTES 16384u /* into the second-level cache, which has more reads in flight than the first */

/* Sums of `n_rows` (1 to KVS_TILE_ROWS) rows with each panel: sums[panel][row][16]. */
typedef void (*kvs_quantized_kernel)(const kvs_panel_run *run, const kvs_act_group *tile, uint32_t n_rows, float *sums);
typedef void (*kvs_float_kernel)(const kvs_panel_run *run, const float *x, uint64_t x_stride, uint32_t n_rows,
                                 float *sums);

/* 16 lanes of one output row, whole. `y` are the sums with the bias added if there is one (NULL: none). */
typedef struct kvs_matmul_kernels {
    void (*quantize)(const float *x, uint64_t k, kvs_act_group *groups, uint32_t stride);
    kvs_quantized_kernel quantized;
    kvs_float_kernel floats;
    void (*store)(const float *sums, const float *bias, float *out);
    void (*store_add)(const float *sums, const float *bias, float *out);
    void (*store_swiglu)(const float *gate, const float *gate_bias, const float *up, const float *up_bias, float *out);
} kvs_matmul_kernels;

extern const kvs_matmul_kernels kvs_matmul_kernels_reference;
#if defined(__x86_64__)
extern const kvs_matmul_kernels kvs_matmul_kernels_avx2;
extern const kvs_matmul_kernels kvs_matmul_kernels_avx512;
#endif

#endif
