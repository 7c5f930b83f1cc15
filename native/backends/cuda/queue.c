/* queue.c: copies that wait, in an array that is moved down when its end is reached. */
#include "backends/cuda/queue.h"

#include <stdlib.h>
#include <string.h>

#define FIRST_CAPACITY 256u

bool kvs_cuda_queue_reserve(kvs_cuda_queue *queue, uint32_t more)
{
    const uint32_t count = queue->end - queue->begin;
    if (more <= queue->capacity - queue->end) {
        return true;
    }
    uint64_t capacity = queue->capacity == 0 ? FIRST_CAPACITY : queue->capacity;
    while (capacity < 2 * ((uint64_t)count + more)) {
        capacity *= 2;
    }
    if (capacity > UINT32_MAX / 2) {
        return false;
    }
    kvs_cuda_entry *entries = queue->entries;
    if (capacity > queue->capacity) {
        entries = malloc((size_t)capacity * sizeof *entries);
        if (entries == NULL) {
            return false;
        }
    }
    if (count != 0) {
        memmove(entries, queue->entries + queue->begin, count * sizeof *entries);
    }
    if (entries != queue->entries) {
        free(queue->entries);
        queue->entries = entries;
        queue->capacity = (uint32_t)capacity;
    }
    queue->begin = 0;
    queue->end = count;
    return true;
}

void kvs_cuda_queue_push(kvs_cuda_queue *queue, const kvs_cuda_entry *entry)
{
    queue->entries[queue->end++] = *entry;
}

static bool is_open(const kvs_cuda_queue *queue, const kvs_copy *copy)
{
    return copy->gate == NULL ||
           (atomic_load_explicit(copy->gate, memory_order_acquire) >= copy->gate_value &&
            (copy->gate != queue->held_gate || copy->gate_value <= queue->held_value));
}

/* Copies of one ring share a gate and reach higher and higher, so behind a shut one only those with another gate are looked at.
 * Acquire: what the readers did before they raised the gate happens before the slot is overwritten. */
static uint32_t find_open(const kvs_cuda_queue *queue)
{
    const _Atomic uint64_t *shut = NULL;
    for (uint32_t i = queue->begin; i < queue->end; i++) {
        const kvs_copy *copy = &queue->entries[i].copy;
        if (copy->gate != NULL && copy->gate == shut) {
            continue;
        }
        if (is_open(queue, copy)) {
            return i;
        }
        shut = copy->gate;
    }
    return queue->end;
}

const kvs_cuda_entry *kvs_cuda_queue_first(const kvs_cuda_queue *queue)
{
    const uint32_t at = find_open(queue);
    return at == queue->end ? NULL : &queue->entries[at];
}

kvs_cuda_entry kvs_cuda_queue_pop(kvs_cuda_queue *queue)
{
    const uint32_t at = find_open(queue);
    const kvs_cuda_entry entry = queue->entries[at];
    memmove(queue->entries + queue->begin + 1, queue->entries + queue->begin, (at - queue->begin) * sizeof entry);
    queue->begin++;
    return entry;
}

void kvs_cuda_queue_drop(kvs_cuda_queue *queue, const _Atomic uint64_t *done)
{
    uint32_t kept = queue->begin;
    for (uint32_t i = queue->begin; i < queue->end; i++) {
        if (queue->entries[i].copy.done != done) {
            queue->entries[kept++] = queue->entries[i];
        }
    }
    queue->end = kept;
}
