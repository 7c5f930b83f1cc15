/* state.h: a state as the executor sees it. */
#ifndef KVS_NATIVE_CORE_STATE_H
#define KVS_NATIVE_CORE_STATE_H

#include "core/pager.h"
#include "core/step.h"
#include "kvstream/state.h"

/* Open a pass of n_rows: checks that the state belongs to the pass's sequence, at its position and with no truncation since,
 * and that its layers are these; gives views that hold until kvs_state_accept. The state itself has not changed before then.
 * errors: EINVAL layers, or a logged pass wider than the log; EBUSY the last pass was not accepted; ESTALE */
kvs_status kvs_state_open_pass(kvs_state *state, const kvs_pass_view *pass, const kvs_delta_layer *layers, uint32_t n_layers,
                               bool is_logged, const kvs_delta_view **views);

#endif
