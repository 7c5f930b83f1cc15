/* copy_queue.c: copies that wait, in a ring buffer. */
#include "backends/cpu/copy_queue.h"

#include <stdlib.h>

static kvs_copy_entry *queue_at(const kvs_copy_queue *q, uint32_t index)
{
    return &q->entries[(q->head + index) & (q->capacity - 1)];
}

bool kvs_copy_queue_reserve(kvs_copy_queue *q, uint32_t more)
{
    if (more <= q->capacity - q->count) {
        return true;
    }
    uint64_t capacity = q->capacity == 0 ? KVS_COPY_QUEUE_FIRST : q->capacity;
    while (capacity < (uint64_t)q->count + more) {
        capacity *= 2;
    }
    if (capacity > UINT32_MAX / 2) {
        return false;
    }
    kvs_copy_entry *entries = malloc((size_t)capacity * sizeof *entries);
    if (entries == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < q->count; i++) {
        entries[i] = *queue_at(q, i);
    }
    free(q->entries);
    q->entries = entries;
    q->capacity = (uint32_t)capacity;
    q->head = 0;
    return true;
}

void kvs_copy_queue_push(kvs_copy_queue *q, const kvs_copy_entry *item)
{
    q->count++;
    *queue_at(q, q->count - 1) = *item;
}

/* The first copy that may go, or `count`. Copies of one ring share a gate and reach higher and higher, so behind a shut one
 * only those with another gate are looked at. */
static uint32_t find_open(const kvs_copy_queue *q)
{
    const _Atomic uint64_t *shut = NULL;
    for (uint32_t i = 0; i < q->count; i++) {
        const kvs_copy *copy = &queue_at(q, i)->copy;
        if (copy->gate != NULL && copy->gate == shut) {
            continue;
        }
        /* Acquire: what the readers did before they raised the gate happens before the slot is overwritten. */
        if (copy->gate == NULL || atomic_load_explicit(copy->gate, memory_order_acquire) >= copy->gate_value) {
            return i;
        }
        shut = copy->gate;
    }
    return q->count;
}

kvs_copy_entry kvs_copy_queue_pop(kvs_copy_queue *q)
{
    uint32_t index = find_open(q);
    const kvs_copy_entry item = *queue_at(q, index);
    for (; index > 0; index--) {
        *queue_at(q, index) = *queue_at(q, index - 1);
    }
    q->head = (q->head + 1) & (q->capacity - 1);
    q->count--;
    return item;
}

void kvs_copy_queue_drop(kvs_copy_queue *q, const _Atomic uint64_t *done)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < q->count; i++) {
        const kvs_copy_entry *item = queue_at(q, i);
        if (item->copy.done != done) {
            *queue_at(q, kept++) = *item;
        }
    }
    q->count = kept;
}

bool kvs_copy_queue_may_go(const kvs_copy_queue *q)
{
    return find_open(q) < q->count;
}

bool kvs_copy_queue_brings(const kvs_copy_queue *q)
{
    const uint32_t index = find_open(q);
    return index < q->count && queue_at(q, index)->copy.is_out == 0;
}

void kvs_copy_queue_free(kvs_copy_queue *q)
{
    free(q->entries);
    *q = (kvs_copy_queue){0};
}
