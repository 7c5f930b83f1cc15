/* control.c: costs, faults, reports: what a test says to a trace device and hears from it. */
#include "backends/trace/state.h"

static kvs_status refuse(kvs_device *device)
{
    return kvs_fail(device, KVS_EUNSUPPORTED, "the device has no trace backend");
}

kvs_status kvs_trace_set_costs(kvs_device *device, const kvs_trace_costs *costs)
{
    kvs_trace *trace = device == NULL ? NULL : kvs_trace_of(device);
    if (device == NULL || !KVS_STRUCT_OK(costs) || (costs->flags & ~(uint32_t)KVS_TRACE_ONE_IN_QUEUE) != 0) {
        return kvs_fail(device, KVS_EINVAL, "costs: none, of another version, or with unknown flags");
    }
    if (trace == NULL) {
        return refuse(device);
    }
    trace->costs = *costs;
    trace->drawn = costs->seed;
    return KVS_OK;
}

kvs_status kvs_trace_plant(kvs_device *device, uint32_t fault, uint64_t index)
{
    kvs_trace *trace = device == NULL ? NULL : kvs_trace_of(device);
    if (device == NULL || fault > KVS_TRACE_EARLY_COPY) {
        return kvs_fail(device, KVS_EINVAL, "there is no fault %u", fault);
    }
    if (trace == NULL) {
        return refuse(device);
    }
    trace->fault = fault;
    trace->fault_left = index;
    return KVS_OK;
}

kvs_status kvs_trace_get_report(kvs_device *device, kvs_trace_report *report)
{
    kvs_trace *trace = device == NULL ? NULL : kvs_trace_of(device);
    if (device == NULL || !KVS_STRUCT_OK(report)) {
        return kvs_fail(device, KVS_EINVAL, "no place for a report");
    }
    if (trace == NULL) {
        return refuse(device);
    }
    const uint32_t struct_size = report->struct_size;
    *report = trace->total;
    report->struct_size = struct_size;
    report->n_hazards = trace->n_hazards;
    return KVS_OK;
}

kvs_status kvs_trace_get_pass(kvs_device *device, uint64_t index, kvs_trace_report *report)
{
    kvs_trace *trace = device == NULL ? NULL : kvs_trace_of(device);
    if (device == NULL || !KVS_STRUCT_OK(report)) {
        return kvs_fail(device, KVS_EINVAL, "no place for a report");
    }
    if (trace == NULL) {
        return refuse(device);
    }
    if (index >= trace->n_passes) {
        return kvs_fail(device, KVS_ENOTFOUND, "pass %llu, there are %u", (kvs_ull)index, trace->n_passes);
    }
    const uint32_t struct_size = report->struct_size;
    *report = trace->passes[index];
    report->struct_size = struct_size;
    return KVS_OK;
}

kvs_status kvs_trace_next_hazard(kvs_device *device, char *text, size_t capacity)
{
    kvs_trace *trace = device == NULL ? NULL : kvs_trace_of(device);
    if (device == NULL || text == NULL || capacity == 0) {
        return kvs_fail(device, KVS_EINVAL, "no place for a sentence");
    }
    if (trace == NULL) {
        return refuse(device);
    }
    if (trace->hazard_count == 0) {
        return kvs_fail(device, KVS_ENOTFOUND, "no hazard is left");
    }
    kvs_trace_say(trace, &trace->hazards[trace->hazard_head], text, capacity);
    trace->hazard_head = (trace->hazard_head + 1) % KVS_MAX_HAZARDS;
    trace->hazard_count--;
    return KVS_OK;
}

static const char *event_name(const kvs_trace_step *step)
{
    static const char *const NAMES[] = {[KVS_KIND_WAVE] = "attend wave", [KVS_KIND_COPY] = "copy",
                                        [KVS_KIND_RELEASE] = "release",  [KVS_KIND_FREE] = "free",
                                        [KVS_KIND_CALLER] = "caller",   [KVS_KIND_READ] = "caller"};
    return step->kind == KVS_KIND_OP ? kvs_op_name(step->code) : NAMES[step->kind];
}

kvs_status kvs_trace_get_event(kvs_device *device, uint64_t index, kvs_trace_event *event)
{
    kvs_trace *trace = device == NULL ? NULL : kvs_trace_of(device);
    if (device == NULL || !KVS_STRUCT_OK(event)) {
        return kvs_fail(device, KVS_EINVAL, "no place for an event");
    }
    if (trace == NULL) {
        return refuse(device);
    }
    if (index >= trace->n_steps - trace->first_step) {
        return kvs_fail(device, KVS_ENOTFOUND, "event %llu, there are %u", (kvs_ull)index,
                        trace->n_steps - trace->first_step);
    }
    const kvs_trace_step *step = &trace->steps[trace->first_step + index];
    *event = (kvs_trace_event){.struct_size = event->struct_size,
                               .stream = step->stream,
                               .begin_ns = step->begin_ns,
                               .end_ns = step->end_ns,
                               .n_bytes = step->n_bytes,
                               .layer = step->layer,
                               .n_slots = step->n_slots,
                               .page_begin = step->page_begin,
                               .page_end = step->page_end,
                               .first_slot = step->first_slot,
                               .name = event_name(step)};
    return KVS_OK;
}

kvs_status kvs_trace_reset(kvs_device *device)
{
    kvs_trace *trace = device == NULL ? NULL : kvs_trace_of(device);
    if (device == NULL) {
        return KVS_EINVAL;
    }
    if (trace == NULL) {
        return refuse(device);
    }
    trace->hazard_count = 0;
    trace->n_hazards = 0;
    trace->first_step = trace->n_steps;
    kvs_trace_reset_measures(trace);
    return KVS_OK;
}

kvs_status kvs_trace_mark_history(kvs_host *host, uint64_t offset, uint64_t n_bytes)
{
    kvs_device *device = host == NULL ? NULL : kvs_host_device(host);
    kvs_trace *trace = device == NULL ? NULL : kvs_trace_of(device);
    if (host == NULL || n_bytes == 0) {
        return kvs_fail(device, KVS_EINVAL, "no history, or no bytes of it");
    }
    if (trace == NULL) {
        return refuse(device);
    }
    if (offset > kvs_host_bytes(host) || n_bytes > kvs_host_bytes(host) - offset) {
        return kvs_fail(device, KVS_ENOSPACE, "need %llu bytes at offset %llu, have %llu (host history)", (kvs_ull)n_bytes,
                        (kvs_ull)offset, (kvs_ull)kvs_host_bytes(host));
    }
    const kvs_trace_step step = {.begin_ns = trace->now_ns,
                                 .end_ns = trace->now_ns,
                                 .n_bytes = n_bytes,
                                 .layer = KVS_NONE,
                                 .kind = KVS_KIND_CALLER};
    const kvs_trace_access access = {.event = kvs_trace_add_compute(trace, step),
                                     .clock = &trace->clock,
                                     .address = kvs_host_base(host) + offset,
                                     .n_bytes = n_bytes};
    kvs_trace_write(trace, &access);
    return KVS_OK;
}
