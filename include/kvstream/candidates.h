/* candidates.h: the best of a row of logits, in the order in which everything that chooses a token reads them, and the sum that
 * log probabilities are relative to. */
#ifndef KVSTREAM_CANDIDATES_H
#define KVSTREAM_CANDIDATES_H

#include "kvstream/base.h"

KVS_API_BEGIN

/* cffi:begin */

/* The `k` largest finite logits of a row and their numbers: larger ones first, of equal ones (0 and -0 are) the lower number
 * first. `n_found` receives how many there are, fewer than k where fewer are finite.
 * own: caller. shape: row[n], ids[k], logits[k]. thread: any. errors: EINVAL a NULL, or k above n */
kvs_status kvs_best_candidates(const float *row, uint64_t n, uint64_t k, int64_t *ids, double *logits, uint64_t *n_found);

/* The largest logit of a row and the sum of exp(logit - largest) over all of them, with the bits that KVS_OP_FRONT finds
 * (native/backends/cpu/front.h states the order). `isa`: KVS_ISA_BEST, KVS_ISA_REFERENCE or KVS_ISA_AVX2, which change no bit.
 * own: caller, outputs are written only on success. shape: row[n]. thread: any. errors: EINVAL a NULL, another instruction set,
 * a logit that is NaN or infinite upwards, or none that is finite; EUNSUPPORTED this processor has no AVX2 */
kvs_status kvs_sum_exps(const float *row, uint64_t n, uint32_t isa, float *largest, double *sum);

/* cffi:end */

KVS_API_END
#endif
