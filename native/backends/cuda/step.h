/* step.h: what changes from pass to pass, on the device: tokens, positions, output rows, page tables, outputs, and the words that
 * kernels of a recorded pass read (kernels/step_words.h). */
#ifndef KVS_NATIVE_BACKENDS_CUDA_STEP_H
#define KVS_NATIVE_BACKENDS_CUDA_STEP_H

#include "backends/cuda/launcher.h"
#include "backends/cuda/memory.h"
#include "backends/cuda/rings.h"
#include "core/step.h"

typedef struct kvs_cuda_steps kvs_cuda_steps;

/* How long kernels wait for a page, and how late tests let them come. */
typedef struct kvs_cuda_step_waits {
    uint64_t limit_ns;
    uint32_t delay_ns;
} kvs_cuda_step_waits;

/* Everything is borrowed; `rings` is NULL where no kernel waits. errors: ENOMEM */
kvs_status kvs_cuda_steps_create(kvs_device *device, const kvs_cuda_driver *driver, cu_stream stream,
                                 kvs_cuda_memory *memory, kvs_cuda_rings *rings, kvs_cuda_step_waits waits,
                                 kvs_cuda_steps **steps);

/* The context is entered, here and below. NULL is ignored. */
void kvs_cuda_steps_destroy(kvs_cuda_steps *steps);

/* Bring a step to the device, in the compute order, and let it name what lies there. Its arrays are valid until the next one.
 * errors: ENOMEM; EIO */
kvs_status kvs_cuda_steps_begin(kvs_cuda_steps *steps, struct kvs_step *step);

/* Of the last step that was brought; and a number that rises when addresses of a shape change. */
kvs_cuda_places kvs_cuda_steps_places(const kvs_cuda_steps *steps);
uint64_t kvs_cuda_steps_generation(const kvs_cuda_steps *steps);

/* Wait for all operations. A whole pass's outputs are where the caller's step had them; those that it had nowhere, and those of
 * front operations that did not run, stay where they are. errors: EIO */
kvs_status kvs_cuda_steps_end(kvs_cuda_steps *steps, bool is_whole);

/* Bytes of an output of a whole pass, by its number. errors: ESTALE another pass has begun; EIO */
kvs_status kvs_cuda_steps_read(kvs_cuda_steps *steps, uint64_t number, uint32_t output, uint64_t offset, uint64_t bytes, void *to);

/* What readers of the last pass have told. shape: [n_layers]; NULL without rings */
const kvs_step_note *kvs_cuda_steps_notes(const kvs_cuda_steps *steps);

#endif
