/* noise.c: each operation here stands for one rounding, in the order in which it is written; the compiler fuses none
 * (-ffp-contract=off) and reorders none. */
#include "kvstream/noise.h"

#include <math.h>
#include <string.h>

#define LOG2_E 0x1.71547652b82fep+0
/* ln(2) in two parts: the first has 21 trailing zero bits, so that its product with any exponent is exact. */
#define LN2_HIGH 0x1.62e42fee00000p-1
#define LN2_LOW 0x1.a39ef35793c76p-33
#define SQRT_HALF_BITS 0x3FE6A09E667F3BCD
/* Below this the result would be subnormal, where some processors flush to zero and others do not. */
#define EXP_LOWEST (-708.0)

enum { ROUNDS = 10 };

static const double exp_terms[14] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                     1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                                     1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        1.0 / 2.0,
                                     1.0,                1.0};
static const double log_terms[9] = {1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0,
                                    1.0 / 9.0,  1.0 / 7.0,  1.0 / 5.0,  1.0 / 3.0};

static double as_double(int64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int64_t bits_of(double value)
{
    int64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static double exact_exp(double x)
{
    const double bounded = x > EXP_LOWEST ? x : EXP_LOWEST;
    const double exponent = rint(bounded * LOG2_E);
    double rest = bounded - exponent * LN2_HIGH;
    rest -= exponent * LN2_LOW;
    double result = rest * exp_terms[0];
    for (int i = 1; i < 13; i++) {
        result += exp_terms[i];
        result *= rest;
    }
    result += exp_terms[13];
    result *= as_double(((int64_t)exponent + 1023) << 52);
    return x < EXP_LOWEST ? 0.0 : result;
}

static double exact_log(double x)
{
    const int64_t bits = bits_of(x);
    const int64_t exponent = (bits - SQRT_HALF_BITS) >> 52;
    const double fraction = as_double(bits - exponent * ((int64_t)1 << 52)) - 1.0;
    double ratio = fraction / (fraction + 2.0);
    const double square = ratio * ratio;
    double series = square * log_terms[0];
    for (int i = 1; i < 9; i++) {
        series += log_terms[i];
        series *= square;
    }
    const double power = (double)exponent;
    ratio += ratio;
    series *= ratio;
    series += power * LN2_LOW;
    series += ratio;
    series += power * LN2_HIGH;
    return series;
}

static void philox(uint64_t seed, uint64_t number, uint32_t stream, int64_t token, uint32_t words[4])
{
    uint32_t a = (uint32_t)token;
    uint32_t b = (uint32_t)number;
    uint32_t c = (uint32_t)(number >> 32);
    uint32_t d = stream;
    uint32_t key_a = (uint32_t)seed;
    uint32_t key_b = (uint32_t)(seed >> 32);
    for (int i = 0; i < ROUNDS; i++) {
        const uint64_t from_a = UINT64_C(0xD2511F53) * a;
        const uint64_t from_c = UINT64_C(0xCD9E8D57) * c;
        a = (uint32_t)(from_c >> 32) ^ b ^ key_a;
        b = (uint32_t)from_c;
        c = (uint32_t)(from_a >> 32) ^ d ^ key_b;
        d = (uint32_t)from_a;
        key_a += UINT32_C(0x9E3779B9);
        key_b += UINT32_C(0xBB67AE85);
    }
    words[0] = a;
    words[1] = b;
    words[2] = c;
    words[3] = d;
}

static double uniform(uint64_t seed, uint64_t number, uint32_t stream, int64_t token)
{
    uint32_t words[4];
    philox(seed, number, stream, token, words);
    const uint64_t r = (uint64_t)(words[0] >> 6) << 26 | words[1] >> 6;
    return ((double)r + 0.5) * 0x1p-52;
}

void kvs_noise_words(uint64_t seed, uint64_t number, uint32_t stream, const int64_t *tokens, uint64_t n, uint32_t *words)
{
    for (uint64_t i = 0; i < n; i++) {
        philox(seed, number, stream, tokens[i], words + 4 * i);
    }
}

void kvs_noise_uniform(uint64_t seed, uint64_t number, uint32_t stream, const int64_t *tokens, uint64_t n, double *out)
{
    for (uint64_t i = 0; i < n; i++) {
        out[i] = uniform(seed, number, stream, tokens[i]);
    }
}

void kvs_noise_gumbel(uint64_t seed, uint64_t number, uint32_t stream, const int64_t *tokens, uint64_t n, double *out)
{
    for (uint64_t i = 0; i < n; i++) {
        out[i] = -exact_log(-exact_log(uniform(seed, number, stream, tokens[i])));
    }
}

void kvs_exact_exp(const double *x, uint64_t n, double *out)
{
    for (uint64_t i = 0; i < n; i++) {
        out[i] = exact_exp(x[i]);
    }
}

void kvs_exact_log(const double *x, uint64_t n, double *out)
{
    for (uint64_t i = 0; i < n; i++) {
        out[i] = exact_log(x[i]);
    }
}
