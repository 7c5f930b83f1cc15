/* kvstream.h: the one header an embedder includes.
 *
 * A long conversation whose key/value cache does not fit in device memory, run exactly: the whole history lives in
 * host memory, a bounded arena holds what fits, a ring streams the rest.
 *
 * Grammar of every declaration: a comment that states
 *   own     what the caller owns afterwards, what is borrowed and until when
 *   shape   array extents and memory order, where there are arrays
 *   units   what the numbers count, where a name does not already say it
 *   thread  which threads may call it
 *   errors  every status besides KVS_OK, with its cause
 * Lines that do not apply are left out. "any" means any thread, also concurrently; "owner" means one thread at a time
 * for the objects named. Outputs are written on success only.
 *
 * Read the parts in this order: base, device, arena, kv, span, ring, phase, pager, layer_lease, state, bank, tape,
 * kernel, interop, trace, timeline, noise, candidates.
 */
#ifndef KVSTREAM_H
#define KVSTREAM_H

#include "kvstream/base.h"
#include "kvstream/device.h"
#include "kvstream/kernel.h"
#include "kvstream/arena.h"
#include "kvstream/kv.h"
#include "kvstream/span.h"
#include "kvstream/ring.h"
#include "kvstream/phase.h"
#include "kvstream/pager.h"
#include "kvstream/layer_lease.h"
#include "kvstream/state.h"
#include "kvstream/bank.h"
#include "kvstream/tape.h"
#include "kvstream/interop.h"
#include "kvstream/trace.h"
#include "kvstream/timeline.h"
#include "kvstream/noise.h"
#include "kvstream/candidates.h"

#endif
