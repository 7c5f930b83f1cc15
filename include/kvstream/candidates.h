/* candidates.h: the best of a row of logits, in the order in which everything that chooses a token reads them. */
#ifndef KVSTREAM_CANDIDATES_H
#define KVSTREAM_CANDIDATES_H

#include "kvstream/base.h"

KVS_API_BEGIN

/* cffi:begin */

/* The `k` largest finite logits of a row and their numbers: larger ones first, of equal ones (0 and -0 are) the lower number
 * first. `n_found` receives how many there are, fewer than k where fewer are finite.
 * own: caller. shape: row[n], ids[k], logits[k]. thread: any. errors: EINVAL a NULL, or k above n */
kvs_status kvs_best_candidates(const float *row, uint64_t n, uint64_t k, int64_t *ids, double *logits, uint64_t *n_found);

/* cffi:end */

KVS_API_END
#endif
