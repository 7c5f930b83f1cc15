#include "backends/trace/state.h"

#include <stdlib.h>

/* Two waits may have seen different values: a counter never falls. */
void kvs_trace_raise_counter(_Atomic uint64_t *counter, uint64_t value)
{
    if (atomic_load_explicit(counter, memory_order_relaxed) < value) {
        atomic_store_explicit(counter, value, memory_order_release);
    }
}

kvs_trace_counter *kvs_trace_find_counter(kvs_trace *trace, const _Atomic uint64_t *done)
{
    for (uint32_t i = 0; i < trace->n_counters; i++) {
        if (trace->counters[i].done == done) {
            return &trace->counters[i];
        }
    }
    return NULL;
}

kvs_trace_counter *kvs_trace_need_counter(kvs_trace *trace, const _Atomic uint64_t *done)
{
    kvs_trace_counter *known = kvs_trace_find_counter(trace, done);
    if (known != NULL) {
        return known;
    }
    if (trace->n_counters == trace->counters_capacity) {
        const uint32_t capacity = trace->counters_capacity == 0 ? 8 : trace->counters_capacity * 2;
        kvs_trace_counter *counters = realloc(trace->counters, capacity * sizeof *counters);
        if (counters == NULL) {
            trace->is_exhausted = true;
            return NULL;
        }
        trace->counters = counters;
        trace->counters_capacity = capacity;
    }
    kvs_trace_counter *made = &trace->counters[trace->n_counters++];
    *made = (kvs_trace_counter){.done = done, .seen = atomic_load_explicit(done, memory_order_relaxed)};
    return made;
}

static void kvs_trace_drop_counter(kvs_trace *trace, const _Atomic uint64_t *done)
{
    kvs_trace_counter *counter = kvs_trace_find_counter(trace, done);
    if (counter != NULL) {
        free(counter->ended);
        *counter = trace->counters[--trace->n_counters];
    }
}

void kvs_trace_add_ended(kvs_trace *trace, const kvs_ended *ended)
{
    kvs_trace_counter *counter = kvs_trace_need_counter(trace, ended->done);
    if (counter == NULL) {
        return;
    }
    if (counter->n_ended == counter->capacity) {
        const uint32_t capacity = counter->capacity == 0 ? 16 : counter->capacity * 2;
        kvs_ended *list = realloc(counter->ended, capacity * sizeof *list);
        if (list == NULL) {
            trace->is_exhausted = true;
            return;
        }
        counter->ended = list;
        counter->capacity = capacity;
    }
    counter->ended[counter->n_ended++] = *ended;
}

/* The caller has seen the counter at `value`: every copy up to there happened before. Returns the newest of them. */
kvs_ended kvs_trace_join_ended(kvs_trace *trace, const _Atomic uint64_t *done, uint64_t value)
{
    kvs_ended newest = {.stream = KVS_TRACE_COMPUTE};
    kvs_trace_counter *counter = kvs_trace_find_counter(trace, done);
    if (counter == NULL || (value <= counter->seen && value != UINT64_MAX)) {
        return newest;
    }
    uint32_t kept = 0;
    bool is_there = false; /* the copy that took the counter to the value, or beyond it in one step */
    for (uint32_t i = 0; i < counter->n_ended; i++) {
        const kvs_ended *ended = &counter->ended[i];
        if (is_there) {
            counter->ended[kept++] = *ended;
            continue;
        }
        is_there = ended->value >= value;
        kvs_vclock_join(&trace->clock, &ended->clock);
        kvs_trace_raise_counter(ended->done, ended->value);
        newest = ended->end_ns >= newest.end_ns ? *ended : newest;
        counter->seen = ended->value > counter->seen ? ended->value : counter->seen;
    }
    counter->n_ended = kept;
    if (kept == 0 && counter->slot_bytes == 0) {
        kvs_trace_drop_counter(trace, done);
    }
    return newest;
}

bool kvs_trace_is_reached(kvs_trace *trace, const _Atomic uint64_t *done, uint64_t value)
{
    if (atomic_load_explicit(done, memory_order_acquire) >= value) {
        return true;
    }
    const kvs_trace_counter *counter = kvs_trace_find_counter(trace, done);
    return counter != NULL && counter->n_ended != 0 && counter->ended[counter->n_ended - 1].value >= value;
}
