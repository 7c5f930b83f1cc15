/* queue.h: copies that wait: of one gate first in first out, past a shut gate of another. The caller's lock guards it. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_QUEUE_H
#define KVS_NATIVE_BACKENDS_CUDA_QUEUE_H

#include "backends/cuda/hosts.h"
#include "core/backend.h"

typedef struct kvs_cuda_entry {
    kvs_copy copy;
    kvs_cuda_host *host;
} kvs_cuda_entry;

/* A list in the order of submission. Zeroed: empty, without room. */
typedef struct kvs_cuda_queue {
    kvs_cuda_entry *entries;
    uint32_t capacity;
    uint32_t begin; /* entries [begin, end) wait */
    uint32_t end;
    const _Atomic uint64_t *held_gate; /* NULL, or counts as open no further than held_value */
    uint64_t held_value;
} kvs_cuda_queue;

/* Make room for so many more; false, and nothing changed, without memory. */
bool kvs_cuda_queue_reserve(kvs_cuda_queue *queue, uint32_t more);

/* Reserved before. */
void kvs_cuda_queue_push(kvs_cuda_queue *queue, const kvs_cuda_entry *entry);

/* The first whose gate is open, NULL when there is none. Valid until the queue changes. */
const kvs_cuda_entry *kvs_cuda_queue_first(const kvs_cuda_queue *queue);

/* Take the first whose gate is open; there is one. */
kvs_cuda_entry kvs_cuda_queue_pop(kvs_cuda_queue *queue);

/* Take out all with this counter. */
void kvs_cuda_queue_drop(kvs_cuda_queue *queue, const _Atomic uint64_t *done);

#endif
