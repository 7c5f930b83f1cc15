/* candidates.c: one look at each logit, and a heap of the best with the worst of them on top: nearly all logits of a
 * vocabulary lose against it at once. */
#include "kvstream/candidates.h"

#include <float.h>
#include <stdbool.h>

/* Ids rise as the row is read, so that of equal logits the one that came first wins. */
static bool is_worse(const double *logits, const int64_t *ids, uint64_t a, uint64_t b)
{
    return logits[a] < logits[b] || (logits[a] == logits[b] && ids[a] > ids[b]);
}

static void swap(double *logits, int64_t *ids, uint64_t a, uint64_t b)
{
    const double logit = logits[a];
    const int64_t id = ids[a];
    logits[a] = logits[b];
    ids[a] = ids[b];
    logits[b] = logit;
    ids[b] = id;
}

static void sift_down(double *logits, int64_t *ids, uint64_t at, uint64_t n)
{
    for (;;) {
        uint64_t worst = at;
        for (uint64_t child = 2 * at + 1; child < n && child <= 2 * at + 2; child++) {
            worst = is_worse(logits, ids, child, worst) ? child : worst;
        }
        if (worst == at) {
            return;
        }
        swap(logits, ids, at, worst);
        at = worst;
    }
}

static void sift_up(double *logits, int64_t *ids, uint64_t at)
{
    while (at != 0 && is_worse(logits, ids, at, (at - 1) / 2)) {
        swap(logits, ids, at, (at - 1) / 2);
        at = (at - 1) / 2;
    }
}

kvs_status kvs_best_candidates(const float *row, uint64_t n, uint64_t k, int64_t *ids, double *logits, uint64_t *n_found)
{
    if (row == NULL || ids == NULL || logits == NULL || n_found == NULL || k > n) {
        return KVS_EINVAL;
    }
    uint64_t n_kept = 0;
    for (uint64_t i = 0; i < n; i++) {
        const double logit = (double)row[i];
        if (n_kept == k ? k != 0 && logit > logits[0] : row[i] >= -FLT_MAX) {
            const uint64_t at = n_kept == k ? 0 : n_kept++;
            logits[at] = logit;
            ids[at] = (int64_t)i;
            if (at == 0) {
                sift_down(logits, ids, 0, n_kept);
            } else {
                sift_up(logits, ids, at);
            }
        }
    }
    for (uint64_t left = n_kept; left > 1; left--) {
        swap(logits, ids, 0, left - 1);
        sift_down(logits, ids, 0, left - 1);
    }
    *n_found = n_kept;
    return KVS_OK;
}
