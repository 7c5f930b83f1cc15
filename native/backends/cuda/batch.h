/* batch.h: copies of one direction that end with one event. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_BATCH_H
#define KVS_NATIVE_BACKENDS_CUDA_BATCH_H

#include "backends/cuda/queue.h"
#include "backends/cuda/rings.h"
#include "base/sync.h"

#define KVS_CUDA_BATCH_COPIES 64u
#define KVS_CUDA_LANES 2

/* Who hears of a batch's end hears of it once. */
typedef enum kvs_cuda_telling { KVS_CUDA_UNTOLD = 0, KVS_CUDA_TELLING, KVS_CUDA_TOLD } kvs_cuda_telling;

typedef struct kvs_cuda_batch {
    kvs_cuda_entry entries[KVS_CUDA_BATCH_COPIES];
    kvs_status status[KVS_CUDA_BATCH_COPIES];
    uint32_t n_copies;
    uint64_t n_bytes;
    uint64_t started_ns;
    cu_event event;
    kvs_cuda_telling telling; /* under the engine's lock */
} kvs_cuda_batch;

/* What batches run on: a stream to the device and one from it, which copies without a gate alone need. */
typedef struct kvs_cuda_lanes {
    kvs_device *device;
    const kvs_cuda_driver *driver;
    cu_event readers; /* behind the last operation that read pages */
    kvs_cuda_rings *rings; /* instead, for copies with a gate; NULL: events alone */
    kvs_mutex *pinning;    /* of host history */
    cu_stream streams[KVS_CUDA_LANES];
    uint64_t last_end_ns;
} kvs_cuda_lanes;

/* Give the copies of a batch to the driver, none to a lost card. The context is entered. */
void kvs_cuda_batch_issue(kvs_cuda_lanes *lanes, kvs_cuda_batch *batch);

/* Wait for its end, with an end. The context is entered. errors: EIO, also the card is lost */
kvs_status kvs_cuda_batch_wait(kvs_cuda_lanes *lanes, const kvs_cuda_batch *batch);

/* Tell whoever waits for its copies how it ended; this thread's newest failure says why. Whether one has failed that
 * nobody is told of. */
bool kvs_cuda_batch_tell(kvs_cuda_lanes *lanes, const kvs_cuda_batch *batch, kvs_status status);

/* The same of a copy that never began. */
bool kvs_cuda_batch_tell_copy(const kvs_cuda_lanes *lanes, const kvs_copy *copy, kvs_status status);

#endif
