/* copy_queue.h: copies that wait: of one gate first in first out, past a shut gate of another.
 *
 * thread: the caller's lock guards it. */
#ifndef KVS_NATIVE_CPU_COPY_QUEUE_H
#define KVS_NATIVE_CPU_COPY_QUEUE_H

#include "backends/cpu/copy_move.h"

/* Room that a queue begins with. */
#define KVS_COPY_QUEUE_FIRST 64U

/* Ring buffer; the capacity is a power of two. Zeroed: an empty queue without room. */
typedef struct kvs_copy_queue {
    kvs_copy_entry *entries;
    uint32_t capacity;
    uint32_t head;
    uint32_t count;
} kvs_copy_queue;

void kvs_copy_queue_free(kvs_copy_queue *q);

/* Make room for so many more; false, and nothing changed, without memory. */
bool kvs_copy_queue_reserve(kvs_copy_queue *q, uint32_t more);

/* Reserved before. */
void kvs_copy_queue_push(kvs_copy_queue *q, const kvs_copy_entry *item);

/* The first that may go; there is one. */
kvs_copy_entry kvs_copy_queue_pop(kvs_copy_queue *q);

/* Take out all with this counter. */
void kvs_copy_queue_drop(kvs_copy_queue *q, const _Atomic uint64_t *done);

/* Is there a copy whose gate is open? */
bool kvs_copy_queue_may_go(const kvs_copy_queue *q);

/* Is the first of these one to the device? */
bool kvs_copy_queue_brings(const kvs_copy_queue *q);

#endif
