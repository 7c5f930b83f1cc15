#include "backends/trace/state.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_CAPACITY 64u

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* ---- queues ---- */

static kvs_queued *queue_at(const kvs_trace_queue *queue, uint32_t index)
{
    return &queue->entries[(queue->head + index) & (queue->capacity - 1)];
}

static bool queue_grow(kvs_trace_queue *queue, uint32_t more)
{
    uint64_t capacity = queue->capacity == 0 ? FIRST_CAPACITY : queue->capacity;
    while (capacity < (uint64_t)queue->count + more) {
        capacity *= 2;
    }
    if (capacity == queue->capacity) {
        return true;
    }
    kvs_queued *entries = capacity > UINT32_MAX / 2 ? NULL : malloc((size_t)capacity * sizeof *entries);
    if (entries == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < queue->count; i++) {
        entries[i] = *queue_at(queue, i);
    }
    free(queue->entries);
    queue->entries = entries;
    queue->capacity = (uint32_t)capacity;
    queue->head = 0;
    return true;
}

static uint32_t stream_of(const kvs_trace *trace, const kvs_copy *copy)
{
    if (copy->is_out) {
        return KVS_TRACE_OUT;
    }
    const bool shares = (trace->costs.flags & KVS_TRACE_ONE_IN_QUEUE) != 0;
    return copy->gate != NULL || shares ? KVS_TRACE_RING : KVS_TRACE_LOAD;
}

static bool is_open(const kvs_copy *copy)
{
    return copy->gate == NULL || atomic_load_explicit(copy->gate, memory_order_acquire) >= copy->gate_value;
}

/* Which slots a copy behind a gate fills. The first copy of a ring fills it from slot 0. */
static void note_ring(kvs_trace *trace, kvs_queued *entry)
{
    const kvs_copy *copy = &entry->copy;
    if (copy->gate == NULL || copy->done == NULL || copy->device_stride_bytes == 0) {
        return;
    }
    kvs_trace_counter *counter = kvs_trace_need_counter(trace, copy->done);
    if (counter == NULL) {
        return;
    }
    entry->n_slots = copy->n_pieces > 1 ? copy->n_pieces : (uint32_t)kvs_div_up(copy->n_bytes, copy->device_stride_bytes);
    const uint64_t end = copy->device_address + entry->n_slots * copy->device_stride_bytes;
    if (counter->slot_bytes != copy->device_stride_bytes || copy->done_value == entry->n_slots) {
        counter->slot_bytes = copy->device_stride_bytes;
        counter->seen = copy->done_value - entry->n_slots;
        counter->ring_begin = copy->device_address;
        counter->ring_end = end;
    }
    counter->ring_begin = copy->device_address < counter->ring_begin ? copy->device_address : counter->ring_begin;
    counter->ring_end = max_u64(end, counter->ring_end);
    entry->first_slot = (uint32_t)((copy->device_address - counter->ring_begin) / counter->slot_bytes);
}

static void plant(kvs_trace *trace, kvs_queued *entry)
{
    kvs_copy *copy = &entry->copy;
    if (!entry->is_open && kvs_trace_strikes(trace, KVS_TRACE_DROP_GATE)) {
        entry->is_open = true;
    }
    if (!entry->is_open && kvs_trace_strikes(trace, KVS_TRACE_EARLY_GATE)) {
        copy->gate_value--;
        entry->is_open = is_open(copy);
    }
    if (copy->gate != NULL && kvs_trace_strikes(trace, KVS_TRACE_MISPLACE_COPY)) {
        copy->device_address += copy->device_stride_bytes;
    }
    if (copy->done != NULL && kvs_trace_strikes(trace, KVS_TRACE_EARLY_DONE)) {
        entry->says_done_early = true;
    }
    if (kvs_trace_strikes(trace, KVS_TRACE_EARLY_COPY)) {
        entry->after = (kvs_vclock){.at = {0}};
    }
}

kvs_status kvs_trace_submit(kvs_trace *trace, const kvs_copy *copies, uint32_t n_copies)
{
    for (uint32_t stream = KVS_TRACE_LOAD; stream < KVS_TRACE_STREAMS; stream++) {
        if (!queue_grow(&trace->queues[stream], n_copies)) {
            return kvs_fail(trace->device, KVS_ENOMEM, "no memory for %u queued copies", n_copies);
        }
    }
    for (uint32_t i = 0; i < n_copies; i++) {
        kvs_queued entry = {
            .copy = copies[i], .after = trace->clock, .ready_ns = trace->now_ns,
            .number = ++trace->n_submitted, .is_open = is_open(&copies[i])};
        note_ring(trace, &entry);
        plant(trace, &entry);
        kvs_trace_queue *queue = &trace->queues[stream_of(trace, &copies[i])];
        queue->count++;
        *queue_at(queue, queue->count - 1) = entry;
    }
    kvs_trace_run_until(trace, trace->now_ns);
    kvs_trace_offer_copies(trace);
    return KVS_OK;
}

void kvs_trace_open_gates(kvs_trace *trace)
{
    if (!kvs_trace_strikes(trace, KVS_TRACE_DROP_ADVANCE)) {
        for (uint32_t stream = KVS_TRACE_LOAD; stream < KVS_TRACE_STREAMS; stream++) {
            const kvs_trace_queue *queue = &trace->queues[stream];
            for (uint32_t i = 0; i < queue->count; i++) {
                kvs_queued *entry = queue_at(queue, i);
                if (!entry->is_open && is_open(&entry->copy)) {
                    entry->is_open = true;
                    kvs_vclock_join(&entry->after, &trace->clock);
                    entry->ready_ns = max_u64(entry->ready_ns, trace->now_ns);
                }
            }
        }
    }
    kvs_trace_run_until(trace, trace->now_ns);
    kvs_trace_offer_copies(trace);
    kvs_trace_run_late_wave(trace);
}

void kvs_trace_free_queues(kvs_trace *trace)
{
    for (uint32_t stream = 0; stream < KVS_TRACE_STREAMS; stream++) {
        free(trace->queues[stream].entries);
    }
    for (uint32_t i = 0; i < trace->n_counters; i++) {
        free(trace->counters[i].ended);
    }
    free(trace->counters);
}

/* ---- virtual time ---- */

static kvs_trace_engine *engine_of(kvs_trace *trace, uint32_t stream)
{
    return stream == KVS_TRACE_OUT ? &trace->out : &trace->in;
}

/* The copy that may go first; `count` where none may. Copies of a ring keep their order, and those of another do not wait for
 * its gates, unless all copies in stand in one queue. */
static uint32_t first_open(const kvs_trace *trace, const kvs_trace_queue *queue)
{
    const bool is_strict = (trace->costs.flags & KVS_TRACE_ONE_IN_QUEUE) != 0;
    for (uint32_t i = 0; i < queue->count && (i == 0 || !is_strict); i++) {
        const kvs_queued *entry = queue_at(queue, i);
        uint32_t before = 0;
        while (entry->is_open && before < i && queue_at(queue, before)->copy.done != entry->copy.done) {
            before++;
        }
        if (entry->is_open && before == i) {
            return i;
        }
    }
    return queue->count;
}

static kvs_queued take_entry(kvs_trace_queue *queue, uint32_t index)
{
    const kvs_queued taken = *queue_at(queue, index);
    for (; index > 0; index--) {
        *queue_at(queue, index) = *queue_at(queue, index - 1);
    }
    queue->head = (queue->head + 1) & (queue->capacity - 1);
    queue->count--;
    return taken;
}

/* When the first copy of a stream can begin on its engine. */
static uint64_t start_ns(kvs_trace *trace, uint32_t stream)
{
    const kvs_trace_queue *queue = &trace->queues[stream];
    const kvs_trace_engine *engine = engine_of(trace, stream);
    const uint32_t first = engine->is_running ? queue->count : first_open(trace, queue);
    return first == queue->count ? KVS_NEVER : max_u64(queue_at(queue, first)->ready_ns, engine->free_ns);
}

static void touch(kvs_trace *trace, const kvs_trace_engine *engine)
{
    const kvs_copy *copy = &engine->entry.copy;
    for (uint32_t i = 0; i < copy->n_pieces; i++) {
        const uint64_t host = copy->host_base + copy->host_offset + i * copy->host_stride_bytes;
        const uint64_t device = copy->device_address + i * copy->device_stride_bytes;
        const kvs_trace_access from = {.event = engine->event,
                                       .clock = &engine->clock,
                                       .address = copy->is_out ? device : host,
                                       .n_bytes = copy->n_bytes};
        kvs_trace_copy(trace, &from, copy->is_out ? host : device);
    }
}

static void count_copy(kvs_trace *trace, const kvs_copy *copy)
{
    const uint64_t n_bytes = copy->n_bytes * copy->n_pieces;
    *(copy->is_out ? &trace->pass.copies_out : &trace->pass.copies_in) += 1;
    *(copy->is_out ? &trace->pass.bytes_out : &trace->pass.bytes_in) += n_bytes;
}

static void begin_copy(kvs_trace *trace, uint32_t stream, uint64_t ns)
{
    kvs_trace_queue *queue = &trace->queues[stream];
    kvs_trace_engine *engine = engine_of(trace, stream);
    engine->entry = take_entry(queue, first_open(trace, queue));
    const kvs_copy *copy = &engine->entry.copy;
    const uint64_t n_bytes = copy->n_bytes * copy->n_pieces;
    const uint64_t rate = copy->is_out ? trace->costs.copy_out_bytes_per_s : trace->costs.copy_in_bytes_per_s;
    const uint64_t spent = kvs_trace_draw_ns(trace, trace->costs.copy_ns) + kvs_trace_bytes_ns(n_bytes, rate);
    const kvs_trace_step step = {.begin_ns = ns,
                                 .end_ns = ns + spent,
                                 .n_bytes = n_bytes,
                                 .done_value = copy->done_value,
                                 .gate_value = copy->gate_value,
                                 .layer = KVS_NONE,
                                 .first_slot = engine->entry.first_slot,
                                 .n_slots = engine->entry.n_slots,
                                 .stream = (uint8_t)stream,
                                 .kind = KVS_KIND_COPY,
                                 .has_gate = copy->gate != NULL};
    engine->event = kvs_trace_add_step(trace, &step);
    engine->clock = queue->clock;
    kvs_vclock_join(&engine->clock, &engine->entry.after);
    const kvs_vclock before = engine->clock;
    engine->clock.at[stream] = trace->newest[stream];
    queue->clock = engine->clock;
    engine->is_running = true;
    engine->stream = stream;
    engine->spent_ns = spent;
    engine->free_ns = ns + spent;
    engine->busy_ns += spent;
    engine->status = kvs_hook_ask(trace->device, KVS_HOOK_COPY);
    if (engine->status == KVS_OK) {
        touch(trace, engine);
    }
    if (engine->entry.says_done_early) {
        kvs_trace_add_ended(trace, &(kvs_ended){copy->done_value, ns, before, copy->done, stream});
    }
    count_copy(trace, copy);
}

static void end_copy(kvs_trace *trace, kvs_trace_engine *engine)
{
    const kvs_copy *copy = &engine->entry.copy;
    engine->is_running = false;
    if (engine->status < 0) {
        kvs_device_count_failed_copy(trace->device);
        int none = 0;
        engine->has_failed |= copy->failed == NULL;
        if (copy->failed != NULL) {
            (void)atomic_compare_exchange_strong(copy->failed, &none, (int)engine->status);
        }
    } else {
        kvs_device_count_copy(trace->device, copy, engine->spent_ns);
    }
    if (copy->done == NULL) {
        return;
    }
    if (!engine->entry.says_done_early) {
        kvs_trace_add_ended(trace, &(kvs_ended){copy->done_value, engine->free_ns, engine->clock, copy->done, engine->stream});
    }
    /* Readers of a ring look at its counter and say so. Others only wait: their counters rise when they do, so that no one
     * can rely on one that he has not asked for. In a stated schedule they rise at once, as they would on the CPU. */
    if (copy->gate != NULL || trace->is_deferred) {
        kvs_trace_raise_counter(copy->done, copy->done_value);
    }
}

/* The stream whose copy begins next, or the engine whose copy ends next. */
static uint64_t next_ns(kvs_trace *trace, uint32_t *stream, kvs_trace_engine **ending)
{
    uint64_t first = KVS_NEVER;
    kvs_trace_engine *engines[2] = {&trace->in, &trace->out};
    *ending = NULL;
    for (uint32_t i = 0; i < 2; i++) {
        if (engines[i]->is_running && engines[i]->free_ns < first) {
            first = engines[i]->free_ns;
            *ending = engines[i];
        }
    }
    for (uint32_t i = KVS_TRACE_LOAD; i < KVS_TRACE_STREAMS; i++) {
        const uint64_t ns = start_ns(trace, i);
        if (ns < first) {
            first = ns;
            *stream = i;
            *ending = NULL;
        }
    }
    return first;
}

static uint64_t run_next(kvs_trace *trace, uint64_t limit_ns)
{
    uint32_t stream = 0;
    kvs_trace_engine *ending;
    const uint64_t ns = next_ns(trace, &stream, &ending);
    if (ns == KVS_NEVER || ns > limit_ns) {
        return KVS_NEVER;
    }
    if (ending != NULL) {
        end_copy(trace, ending);
    } else {
        begin_copy(trace, stream, ns);
    }
    return ns;
}

void kvs_trace_run_until(kvs_trace *trace, uint64_t ns)
{
    while (!trace->is_deferred && run_next(trace, ns) != KVS_NEVER) {
    }
}

bool kvs_trace_first_copy(const kvs_trace *trace, uint32_t stream, uint64_t *number)
{
    const kvs_trace_queue *queue = &trace->queues[stream];
    const uint32_t first = first_open(trace, queue);
    if (first == queue->count) {
        return false;
    }
    *number = queue_at(queue, first)->number;
    return true;
}

void kvs_trace_carry_out(kvs_trace *trace, uint32_t stream)
{
    kvs_trace_engine *engine = engine_of(trace, stream);
    begin_copy(trace, stream, max_u64(trace->now_ns, engine->free_ns));
    end_copy(trace, engine);
}

/* What a wait does while it has to: false when no copy can go. */
static bool make_progress(kvs_trace *trace)
{
    return trace->is_deferred ? kvs_trace_run_one(trace) : run_next(trace, KVS_NEVER - 1) != KVS_NEVER;
}

/* ---- waiting ---- */

static const size_t WAIT_FIELDS[KVS_TRACE_STREAMS] = {
    offsetof(kvs_trace_report, host_ns), offsetof(kvs_trace_report, load_wait_ns),
    offsetof(kvs_trace_report, ring_wait_ns), offsetof(kvs_trace_report, out_wait_ns)};

static bool is_empty(const kvs_trace *trace)
{
    uint32_t n_queued = 0;
    for (uint32_t stream = KVS_TRACE_LOAD; stream < KVS_TRACE_STREAMS; stream++) {
        n_queued += trace->queues[stream].count;
    }
    return n_queued == 0;
}

static const kvs_queued *first_blocked(const kvs_trace *trace)
{
    for (uint32_t stream = KVS_TRACE_LOAD; stream < KVS_TRACE_STREAMS; stream++) {
        if (trace->queues[stream].count != 0) {
            return queue_at(&trace->queues[stream], 0);
        }
    }
    return NULL;
}

static void say_stuck(kvs_trace *trace, const _Atomic uint64_t *counter, uint64_t value)
{
    kvs_hazard hazard = {.kind = KVS_HAZARD_STUCK, .now = KVS_NO_EVENT, .last = KVS_NO_EVENT};
    const kvs_ull have = atomic_load(counter);
    const kvs_queued *blocked = first_blocked(trace);
    int n = snprintf(hazard.text, sizeof hazard.text,
                     "no progress at %llu ns: the compute stream waits until a counter reaches %llu, it stands at %llu, ",
                     (kvs_ull)trace->now_ns, (kvs_ull)value, have);
    char *rest = hazard.text + n;
    const size_t room = sizeof hazard.text - (size_t)n;
    if (blocked == NULL) {
        (void)snprintf(rest, room, "and no copy is queued that would raise it");
    } else {
        const kvs_ull gate = atomic_load(blocked->copy.gate);
        const bool is_untold = gate >= blocked->copy.gate_value;
        (void)snprintf(rest, room,
                       "and the copy in to ring slots %u to %u at the head of its queue waits for %llu consumed, %llu are%s",
                       blocked->first_slot, blocked->first_slot + (blocked->n_slots == 0 ? 0 : blocked->n_slots - 1),
                       (kvs_ull)blocked->copy.gate_value, gate,
                       is_untold ? ": missing fence: nobody told the copy stream that its gate has risen" : "");
    }
    (void)kvs_trace_add_hazard(trace, &hazard);
}

static _Atomic uint64_t *writable(kvs_trace *trace, const _Atomic uint64_t *counter)
{
    kvs_trace_engine *engines[2] = {&trace->in, &trace->out};
    for (uint32_t i = 0; i < 2; i++) {
        if (engines[i]->is_running && engines[i]->entry.copy.done == counter) {
            return engines[i]->entry.copy.done;
        }
    }
    for (uint32_t stream = KVS_TRACE_LOAD; stream < KVS_TRACE_STREAMS; stream++) {
        for (uint32_t i = 0; i < trace->queues[stream].count; i++) {
            if (queue_at(&trace->queues[stream], i)->copy.done == counter) {
                return queue_at(&trace->queues[stream], i)->copy.done;
            }
        }
    }
    const kvs_trace_counter *known = kvs_trace_find_counter(trace, counter);
    return known != NULL && known->n_ended != 0 ? known->ended[0].done : NULL;
}

static kvs_status verdict(const _Atomic int *failed)
{
    const int status = failed == NULL ? KVS_OK : atomic_load_explicit(failed, memory_order_acquire);
    return status < 0 ? (kvs_status)status : KVS_OK;
}

kvs_status kvs_trace_wait(kvs_trace *trace, const _Atomic uint64_t *counter, uint64_t value, const _Atomic int *failed)
{
    _Atomic uint64_t *done = writable(trace, counter);
    if (done != NULL && kvs_trace_strikes(trace, KVS_TRACE_DROP_WAIT)) {
        kvs_trace_raise_counter(done, value);
        return KVS_OK;
    }
    while (!kvs_trace_is_reached(trace, counter, value) && verdict(failed) == KVS_OK) {
        if (!make_progress(trace)) {
            say_stuck(trace, counter, value);
            return kvs_fail(trace->device, is_empty(trace) ? KVS_EIO : KVS_EBUSY,
                            "a wait for %llu stands at %llu: no copy that can run gets there", (kvs_ull)value,
                            (kvs_ull)atomic_load(counter));
        }
    }
    const kvs_ended newest = kvs_trace_join_ended(trace, counter, value);
    kvs_trace_advance(trace, max_u64(trace->now_ns, newest.end_ns), KVS_CAUSE_WAIT, WAIT_FIELDS[newest.stream]);
    if (trace->is_deferred) {
        kvs_trace_run_ahead(trace);
    }
    return verdict(failed);
}

void kvs_trace_look(kvs_trace *trace, const _Atomic uint64_t *counter, uint64_t value)
{
    const kvs_trace_counter *known = kvs_trace_find_counter(trace, counter);
    const bool tells = known != NULL && known->n_ended != 0 && value > known->seen;
    if (tells && !kvs_trace_strikes(trace, KVS_TRACE_DROP_LOOK)) {
        (void)kvs_trace_join_ended(trace, counter, value);
    }
}

static void wait_engine(kvs_trace *trace, kvs_trace_engine *engine)
{
    const uint64_t ns = engine->free_ns;
    if (engine->is_running) {
        kvs_trace_advance(trace, max_u64(trace->now_ns, ns), KVS_CAUSE_WAIT, WAIT_FIELDS[engine->stream]);
    }
}

void kvs_trace_cancel(kvs_trace *trace, const _Atomic uint64_t *done)
{
    for (uint32_t stream = KVS_TRACE_LOAD; stream < KVS_TRACE_STREAMS; stream++) {
        kvs_trace_queue *queue = &trace->queues[stream];
        uint32_t kept = 0;
        for (uint32_t i = 0; i < queue->count; i++) {
            if (queue_at(queue, i)->copy.done != done) {
                *queue_at(queue, kept++) = *queue_at(queue, i);
            }
        }
        queue->count = kept;
    }
    if (trace->in.is_running && trace->in.entry.copy.done == done) {
        wait_engine(trace, &trace->in);
    }
    if (trace->out.is_running && trace->out.entry.copy.done == done) {
        wait_engine(trace, &trace->out);
    }
    (void)kvs_trace_join_ended(trace, done, UINT64_MAX);
    kvs_trace_run_until(trace, trace->now_ns);
}

kvs_status kvs_trace_drain(kvs_trace *trace)
{
    while (make_progress(trace)) {
    }
    const uint64_t end_ns = max_u64(trace->in.free_ns, trace->out.free_ns);
    kvs_trace_advance(trace, max_u64(trace->now_ns, end_ns), KVS_CAUSE_WAIT, WAIT_FIELDS[KVS_TRACE_OUT]);
    for (uint32_t i = trace->n_counters; i-- > 0;) {
        (void)kvs_trace_join_ended(trace, trace->counters[i].done, UINT64_MAX);
    }
    const bool has_failed = trace->in.has_failed || trace->out.has_failed;
    trace->in.has_failed = false;
    trace->out.has_failed = false;
    if (has_failed) {
        return kvs_fail(trace->device, KVS_EIO, "a copy has failed");
    }
    if (!is_empty(trace)) {
        return kvs_fail(trace->device, KVS_EBUSY, "queued copies wait for ring slots that are not consumed");
    }
    return KVS_OK;
}
