/* state_sides.h: what the files of a state share.
 *
 *     state.c        life, passes, folding
 *     state_image.c  copies, save and load
 *
 * Matrices and convolution tails have two sides, and so has the log; they turn over independently, for a pass may be folded
 * without being logged. Whatever is in the making is written to the sides that nobody reads: a failure needs no undoing.
 */
#ifndef KVS_NATIVE_CORE_STATE_SIDES_H
#define KVS_NATIVE_CORE_STATE_SIDES_H

#include "core/backend.h"
#include "core/state.h"

#define KVS_STATE_MAX_LOG_ROWS 65536u

typedef struct kvs_state_layer {
    kvs_delta_layer layer;
    uint64_t matrix[2]; /* offsets in the state's memory */
    uint64_t conv[2];
    uint64_t log[2];
} kvs_state_layer;

struct kvs_state {
    kvs_device *device;
    kvs_buffer *memory;
    uint64_t address;
    uint64_t n_bytes;
    uint64_t scratch; /* offset, for folding */
    kvs_state_layer *layers;
    kvs_delta_view *views; /* of the open pass */
    uint32_t n_layers;
    uint32_t log_rows;
    uint32_t bank; /* side of matrices and tails that is in use */
    uint32_t log;  /* side of the log that holds pending rows */
    uint32_t n_pending;
    uint32_t n_open;
    bool is_open_logged;
    uint64_t n_folded; /* tokens */
    uint64_t seq_id;
    uint64_t n_rewrites; /* of the sequence, when it was last followed */
    uint64_t generation;
};

/* errors: EBUSY a pass waits to be accepted */
kvs_status kvs_state_check_idle(kvs_state *state);

/* Matrices and tails of the other side are in use from now on; folded tokens and pending rows as given, of no sequence. */
void kvs_state_turn(kvs_state *state, uint64_t n_folded, uint32_t n_pending);

#endif
