/* rope_table.cu: cosines and sines of rotary position angles.
 *
 * Kernel: rope_table. Argument: kvs_rope_table_params. Architecture: sm_75. No macros. A thread a pair: grid (rows, pairs / 64
 * rounded up), block 64.
 *
 * Order: frequencies, angles and their reduction in float64, so that the angle of position 262,143 is right; series as
 * native/backends/cpu/rope_table.c states them; rounded to float32 at the end.
 */
#include "attend_params.h"
#include "grid.cuh"
#include "numeric.cuh"
#include "step_words.h"

__device__ inline double series_sin(double r)
{
    const double s = r * r;
    double p = -1.0 / 1307674368000.0;
    p = p * s + 1.0 / 6227020800.0;
    p = p * s - 1.0 / 39916800.0;
    p = p * s + 1.0 / 362880.0;
    p = p * s - 1.0 / 5040.0;
    p = p * s + 1.0 / 120.0;
    p = p * s - 1.0 / 6.0;
    return r + r * s * p;
}

__device__ inline double series_cos(double r)
{
    const double s = r * r;
    double p = 1.0 / 20922789888000.0;
    p = p * s - 1.0 / 87178291200.0;
    p = p * s + 1.0 / 479001600.0;
    p = p * s - 1.0 / 3628800.0;
    p = p * s + 1.0 / 40320.0;
    p = p * s - 1.0 / 720.0;
    p = p * s + 1.0 / 24.0;
    p = p * s - 0.5;
    return 1.0 + s * p;
}

/* The axis of positions that turns a pair: sections interleave, and pairs behind the last of one follow axis 0. */
__device__ inline kvs_u32 pair_axis(const kvs_rope_table_params *p, kvs_u32 pair)
{
    const kvs_u32 axis = p->n_axes == 3 ? pair % 3 : 0;
    return axis != 0 && pair < 3 * (kvs_u64)p->section[axis] ? axis : 0;
}

extern "C" __global__ void __launch_bounds__(64) rope_table(const kvs_rope_table_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    const kvs_u32 pair = blockIdx.y * 64 + threadIdx.x, row = blockIdx.x;
    if (pair >= p.n_rotary / 2) {
        return;
    }
    const kvs_u32 *positions = (const kvs_u32 *)p.positions;
    const float *divisors = (const float *)p.divisors;
    const kvs_u64 first_token = p.step == 0 ? p.first_token : ((const kvs_step_words *)p.step)->first_token;
    const kvs_u64 position =
        positions == nullptr ? first_token + row : positions[(kvs_u64)pair_axis(&p, pair) * p.n_rows + row];
    const double divisor = divisors == nullptr ? 1.0 : (double)divisors[pair];
    const double angle = (double)position * (pow(p.base, -2.0 * pair / p.n_rotary) / divisor * p.factor);
    const double shifted = angle * 0.63661977236758134308 + 6755399441055744.0;
    const double n = shifted - 6755399441055744.0;
    const double r = fma(-n, 6.12323399573676603587e-17, fma(-n, 1.57079632679489655800, angle));
    const double c = series_cos(r), s = series_sin(r);
    /* The quadrant stands in the lowest bits of what was rounded; no integer holds an angle that is not finite. */
    const kvs_u32 quadrant = (kvs_u32)__double_as_longlong(shifted) & 3u;
    const double cosine = quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s;
    const double sine = quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c;
    float *entry = (float *)p.table + ((kvs_u64)row * (p.n_rotary / 2) + pair) * 2;
    entry[0] = (float)cosine;
    entry[1] = (float)sine;
}
