/* rings.h: rings as the card sees them. Two counters of each lie in device memory: `ready`, which the copy stream writes behind a
 * run of pages, and `consumed`, which readers raise and for which the copy stream waits before it overwrites a slot.
 *
 * Both stand where the host's counters of the ring will stand when its news have arrived, and only ever rise. A copy is given to
 * the driver when the host's gate is open: what raises `consumed` as far as the copy waits for is in the compute order then, or
 * enters it at once.
 */
#ifndef KVS_NATIVE_BACKENDS_CUDA_RINGS_H
#define KVS_NATIVE_BACKENDS_CUDA_RINGS_H

#include "backends/cuda/memory.h"
#include "core/backend.h"
#include "core/step.h"
#include "kernels/step_words.h"

#include <stdatomic.h>

typedef struct kvs_cuda_rings kvs_cuda_rings;

/* `compute` and the rest are borrowed. The context is entered, here and below but for what copies tell.
 * errors: ENOMEM; EIO */
kvs_status kvs_cuda_rings_create(kvs_device *device, const kvs_cuda_driver *driver, kvs_cuda_memory *memory,
                                 cu_stream compute, kvs_cuda_rings **rings);

/* NULL is ignored. */
void kvs_cuda_rings_destroy(kvs_cuda_rings *rings);

/* As the entries of backend.h. */
kvs_status kvs_cuda_rings_join(kvs_cuda_rings *rings, const _Atomic uint64_t *gate, const _Atomic uint64_t *done,
                               uint32_t n_slots);
void kvs_cuda_rings_leave(kvs_cuda_rings *rings, const _Atomic uint64_t *gate);

/* Readers in the compute order so far have consumed so much. errors: EIO */
kvs_status kvs_cuda_rings_consumed(kvs_cuda_rings *rings, const _Atomic uint64_t *gate, uint64_t value);

/* What kernels of a pass are told of its ring. NULL gate: that there is none. */
void kvs_cuda_rings_describe(kvs_cuda_rings *rings, const kvs_stream_view *stream, kvs_step_words *words);

/* ---- what copies tell; any thread, the context entered ---- */

/* A copy that raises `done` so far has been queued. */
void kvs_cuda_rings_queued(kvs_cuda_rings *rings, const kvs_copy *copy);

/* Before and behind the bytes of a copy, in its stream. Behind one that failed nothing is said any more, and later ones fail too.
 * errors: EIO */
kvs_status kvs_cuda_rings_wait_slot(kvs_cuda_rings *rings, const kvs_copy *copy, cu_stream stream);
kvs_status kvs_cuda_rings_say_ready(kvs_cuda_rings *rings, const kvs_copy *copy, cu_stream stream);
void kvs_cuda_rings_fail(kvs_cuda_rings *rings, const kvs_copy *copy);

/* Let copies go that wait for readers which will not come, and behind the last of them begin anew: what was queued counts as
 * ready and consumed. Nothing reads the ring; where the card is lost something may, and it begins anew by kvs_cuda_rings_mend. */
void kvs_cuda_rings_let_go(kvs_cuda_rings *rings, const _Atomic uint64_t *done);
void kvs_cuda_rings_begin_anew(kvs_cuda_rings *rings, const _Atomic uint64_t *done);

/* Before a copy is queued, on a card that is not lost: begin anew where that could not be done. errors: EIO */
kvs_status kvs_cuda_rings_mend(kvs_cuda_rings *rings, const kvs_copy *copy);

/* ---- giving up ---- */

/* Before a pass begins that waits on the device: nothing has been given up. False where a ring is broken already. */
bool kvs_cuda_rings_arm(kvs_cuda_rings *rings);

/* Behind it: whether a wait of it was. */
bool kvs_cuda_rings_gave_up(kvs_cuda_rings *rings);

#endif
