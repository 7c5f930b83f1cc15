/* tape_side.h: one of two devices that record and run the same tape: vector code here, reference code there. */
#ifndef KVS_FUZZ_TAPE_SIDE_H
#define KVS_FUZZ_TAPE_SIDE_H

#include "script.h"

#include "kvstream/tape.h"

enum { N_LAYERS = 2, N_WEIGHTS = 13, FIRST_VECTOR = 6, MAX_TENSORS = 12, MAX_ROWS = 5, CTX = 600, N_VOCAB = 8, WIDEST = 64 };

enum { MAX_DELTAS = 2, N_DELTA_WEIGHTS = 3 };

typedef struct side {
    kvs_device *device;
    kvs_cache *cache;
    kvs_seq *seq;
    kvs_pager *pager;
    kvs_lease *pool;
    kvs_weight *weights[N_WEIGHTS];
    kvs_weight *delta_weights[N_DELTA_WEIGHTS]; /* of every recurrent layer */
    kvs_state *state;                           /* of the sequence, on tapes with recurrent layers */
    kvs_tape *tape;
    kvs_arena *arena; /* of the workspace, exactly as large as the tape wants it */
    kvs_lease *workspace;
    kvs_binding *binding;
    fault fault;
    float *outputs[MAX_TENSORS]; /* each as large as the pass makes it, so that a write beyond is seen */
} side;

void side_open(side *side, uint32_t flags, uint32_t max_out_rows);
void side_close(side *side, uint32_t order);

/* One more recurrent layer. errors: kvs_tape_add_delta's */
kvs_status side_add_delta(side *side, uint32_t *id);

/* The state of the sequence, which is still empty, for so many layers. No fault strikes. */
void side_open_state(side *side, uint32_t n_deltas);

/* Bind the tape to a workspace of its own. `n_missing` bytes are lacking. errors: kvs_tape_bind's */
kvs_status side_bind(side *side, uint64_t n_missing);
void side_unbind(side *side);

#endif
