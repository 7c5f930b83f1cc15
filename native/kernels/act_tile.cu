/* act_tile.cu: rows of activations, normed and gated if so wished, as bfloat16 in the atoms of tile_record.h.
 *
 * Kernel act_tile(kvs_act_params); `records` are atoms, n_groups is of 32 values and even. No macros.
 * Grid: n_slots. Block: 1024. No dynamic shared memory. Architecture: 75.
 * Order: that of act_unit.cuh.
 * Twin: none; matmul_tile.cu says what products of such values may differ by.
 */
#include "act_values.cuh"
#include "grid.cuh"
#include "tile_record.h"

#define THREADS KVS_ACT_THREADS

/* Where value i of a slot lies in its atoms, in values. */
static __device__ unsigned long long place_of(unsigned int i, unsigned int slot, unsigned int n_atoms)
{
    const unsigned int in_block = i % KVS_TILE_VALUES, in_step = in_block % 16;
    const unsigned int position = in_step / 4 * 2 + in_step % 4 / 2 * 8 + in_step % 2;
    const unsigned int piece = (in_block / 16 * 2 + position / 8) ^ (slot % KVS_TILE_SLOTS);
    const unsigned long long atom = (unsigned long long)(i / KVS_TILE_VALUES) * n_atoms + slot / KVS_TILE_SLOTS;
    return atom * (KVS_TILE_ATOM_BYTES / 2) + slot % KVS_TILE_SLOTS * KVS_TILE_VALUES + piece * 8 + position % 8;
}

extern "C" __global__ void __launch_bounds__(THREADS) act_tile(const kvs_act_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    const unsigned int slot = blockIdx.x, n_atoms = (p.n_slots + KVS_TILE_SLOTS - 1) / KVS_TILE_SLOTS;
    const float *x = (const float *)p.x + (unsigned long long)slot * p.x_stride;
    const float *gate = p.gate != 0 ? (const float *)p.gate + (unsigned long long)slot * p.x_stride : 0;
    float *normed = (float *)p.normed + (unsigned long long)slot * p.k;
    kvs_u16 *atoms = (kvs_u16 *)p.records;
    const bool has_groups = p.norm != 0 && p.group != 0;
    float factor = p.norm == 0 || has_groups ? 1.0f : row_factor(p, x);
    for (unsigned int first = 0; first < p.n_groups * 32; first += THREADS) {
        if (has_groups) {
            factor = group_factor(p, x, first);
        }
        const unsigned int i = first + threadIdx.x;
        const float value = i < p.k ? value_of(p, x, gate, factor, i) : 0.0f;
        if (p.normed != 0 && i < p.k) {
            normed[i] = value;
        }
        if (atoms != 0 && i < p.n_groups * 32) {
            atoms[place_of(i, slot, n_atoms)] = kvs_f32_to_bf16(value);
        }
    }
}
