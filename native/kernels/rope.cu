/* rope.cu: rotate the first values of each head by the table of its row, in place.
 *
 * Kernel: rope. Argument: kvs_rope_params. Architecture: sm_75. No macros. A thread a pair: grid (rows, heads * pairs / 256 rounded
 * up), block 256.
 */
#include "attend_params.h"
#include "grid.cuh"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(256) rope(const kvs_rope_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    const kvs_u32 n_pairs = p.n_rotary / 2, i = blockIdx.y * 256 + threadIdx.x, row = blockIdx.x;
    if (i >= p.n_heads * n_pairs) {
        return;
    }
    const kvs_u32 head = i / n_pairs, pair = i % n_pairs;
    const float *turn = (const float *)p.table + ((kvs_u64)row * n_pairs + pair) * 2;
    float *values = (float *)p.values + ((kvs_u64)row * p.n_heads + head) * p.head_values;
    float *first = values + (p.is_halves ? pair : 2 * pair), *second = first + (p.is_halves ? n_pairs : 1);
    const float a = *first, b = *second, cosine = turn[0], sine = turn[1];
    *first = fmaf(a, cosine, -(b * sine));
    *second = fmaf(a, sine, b * cosine);
}
