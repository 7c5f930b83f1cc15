/* noise.h: the numbers that decide tokens: random ones without state, exponentials and logarithms, the same bits on every
 * machine. They are made of IEEE 754 basic operations in a stated order, never of the platform's mathematics library.
 *
 * A random number is a function of (seed, number, stream, token) by Philox4x32-10 of Salmon, Moraes, Dror and Shaw (2011):
 * counter words are token, number (low, high), stream; key words are the seed (low, high). A uniform is (r + 1/2) / 2^52 for
 * the 52-bit r of the top 26 bits of the first two words; a Gumbel number is -log(-log(u)).
 * exp is a Taylor series of 13 terms on |r| <= ln(2)/2, log 2 atanh(f / (2 + f)): within 2 and 3 units in the last place.
 */
#ifndef KVSTREAM_NOISE_H
#define KVSTREAM_NOISE_H

#include "kvstream/base.h"

KVS_API_BEGIN

/* cffi:begin */

/* The four output words for each token, below 2^32. shape: tokens[n], the lower 32 bits of each count; words[n][4].
 * thread: any */
void kvs_noise_words(uint64_t seed, uint64_t number, uint32_t stream, const int64_t *tokens, uint64_t n, uint32_t *words);

/* Uniform numbers in (0, 1). shape: tokens[n], out[n]. thread: any */
void kvs_noise_uniform(uint64_t seed, uint64_t number, uint32_t stream, const int64_t *tokens, uint64_t n, double *out);

/* Standard Gumbel numbers. shape: tokens[n], out[n]. thread: any */
void kvs_noise_gumbel(uint64_t seed, uint64_t number, uint32_t stream, const int64_t *tokens, uint64_t n, double *out);

/* e**x for x <= 0, minus infinity included; exactly 0 below -708. shape: x[n], out[n], which may be x. thread: any */
void kvs_exact_exp(const double *x, uint64_t n, double *out);

/* Natural logarithms of positive, normal, finite values. shape: x[n], out[n], which may be x. thread: any */
void kvs_exact_log(const double *x, uint64_t n, double *out);

/* cffi:end */

KVS_API_END
#endif
