/* batch.h: copies of one direction that end with one event. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_BATCH_H
#define KVS_NATIVE_BACKENDS_CUDA_BATCH_H

#include "backends/cuda/queue.h"
#include "backends/cuda/rings.h"
#include "base/sync.h"

#define KVS_CUDA_BATCH_COPIES 64u
#define KVS_CUDA_LANES 2

typedef struct kvs_cuda_batch {
    kvs_cuda_entry entries[KVS_CUDA_BATCH_COPIES];
    kvs_status status[KVS_CUDA_BATCH_COPIES];
    uint32_t n_copies;
    uint64_t n_bytes;
    uint64_t started_ns;
    cu_event event;
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

/* Give the copies of a batch to the driver. The context is entered. */
void kvs_cuda_batch_issue(kvs_cuda_lanes *lanes, kvs_cuda_batch *batch);

/* Wait for its end, and tell whoever waits for its copies. Whether one has failed that nobody is told of. */
bool kvs_cuda_batch_finish(kvs_cuda_lanes *lanes, kvs_cuda_batch *batch);

#endif
