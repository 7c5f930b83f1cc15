/* rope_table.c: cosines and sines of rotary position angles.
 *
 * Order: the angle is one float64 product; n = nearest integer to angle * 2/pi; r = angle - n * pi/2 with pi/2 in two
 * parts by fused multiply-add (good to 1e-16 for every position below 2^40); Taylor series of r, |r| <= pi/4, whose
 * truncation is below 1e-16. Everything is float64, rounded to float32 at the end.
 */
#include "backends/cpu/elementwise.h"

#include <math.h>
#include <string.h>

#define TWO_OVER_PI 0.63661977236758134308
#define HALF_PI_HIGH 1.57079632679489655800
#define HALF_PI_LOW 6.12323399573676603587e-17
#define SHIFT 6755399441055744.0 /* 1.5 * 2^52: adding it rounds to integers */

static double series_sin(double r)
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

static double series_cos(double r)
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

static void cos_sin(double angle, double *cosine, double *sine)
{
    const double shifted = angle * TWO_OVER_PI + SHIFT;
    const double n = shifted - SHIFT;
    const double r = fma(-n, HALF_PI_LOW, fma(-n, HALF_PI_HIGH, angle));
    const double c = series_cos(r);
    const double s = series_sin(r);
    /* The quadrant stands in the lowest bits of what was rounded. A conversion would not do: divisors come from files, and
     * one of zero makes an angle that no integer can hold. */
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    switch (bits & 3u) {
    case 0:
        *cosine = c;
        *sine = s;
        break;
    case 1:
        *cosine = -s;
        *sine = c;
        break;
    case 2:
        *cosine = -c;
        *sine = -s;
        break;
    default:
        *cosine = s;
        *sine = -c;
        break;
    }
}

static uint64_t position_of(const kvs_rope_table_desc *desc, uint32_t axis, uint32_t row)
{
    return desc->positions == NULL ? desc->first_position + row
                                   : desc->positions[(uint64_t)axis * desc->n_rows + row];
}

void kvs_rope_table(const kvs_rope_table_desc *desc, float *table)
{
    for (uint32_t row = 0; row < desc->n_rows; row++) {
        for (uint32_t i = 0; i < desc->n_pairs; i++) {
            double cosine, sine;
            cos_sin((double)position_of(desc, desc->axes[i], row) * desc->inv_freq[i], &cosine, &sine);
            float *entry = table + ((uint64_t)row * desc->n_pairs + i) * 2;
            entry[0] = (float)cosine;
            entry[1] = (float)sine;
        }
    }
}
