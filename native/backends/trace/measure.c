#include "backends/trace/state.h"

#include <stddef.h>
#include <stdlib.h>

static uint64_t *field_of(kvs_trace_report *report, size_t offset)
{
    return (uint64_t *)(void *)((char *)report + offset);
}

/* Busy time of an engine since it was asked last, up to a time by which all that had to begin has begun. */
static uint64_t busy_since(kvs_trace_engine *engine, uint64_t ns)
{
    const uint64_t beyond = engine->free_ns > ns ? engine->free_ns - ns : 0;
    const uint64_t until = engine->busy_ns - (beyond < engine->busy_ns ? beyond : engine->busy_ns);
    const uint64_t since = until > engine->counted_ns ? until - engine->counted_ns : 0;
    engine->counted_ns += since;
    return since;
}

void kvs_trace_advance(kvs_trace *trace, uint64_t to_ns, kvs_trace_cause cause, size_t field)
{
    kvs_trace_run_until(trace, to_ns);
    const uint64_t in_ns = busy_since(&trace->in, to_ns);
    trace->pass.in_busy_ns += in_ns;
    trace->pass.out_busy_ns += busy_since(&trace->out, to_ns);
    trace->pass.overlap_ns += cause == KVS_CAUSE_WORK ? in_ns : 0;
    if (to_ns > trace->now_ns) {
        *field_of(&trace->pass, field) += to_ns - trace->now_ns;
        trace->now_ns = to_ns;
    }
}

void kvs_trace_sum(kvs_trace_report *sum, const kvs_trace_report *part)
{
    for (size_t at = offsetof(kvs_trace_report, n_ops); at < sizeof *sum; at += sizeof(uint64_t)) {
        *field_of(sum, at) += *(const uint64_t *)(const void *)((const char *)part + at);
    }
    sum->end_ns = part->end_ns;
}

static void begin_pass(kvs_trace *trace)
{
    trace->pass = (kvs_trace_report){
        .struct_size = sizeof trace->pass, .n_passes = 1, .begin_ns = trace->now_ns, .end_ns = trace->now_ns};
}

void kvs_trace_end_pass(kvs_trace *trace)
{
    if (trace->n_passes == trace->passes_capacity) {
        const uint32_t capacity = trace->passes_capacity == 0 ? 64 : trace->passes_capacity * 2;
        kvs_trace_report *passes = realloc(trace->passes, capacity * sizeof *passes);
        if (passes == NULL) {
            trace->is_exhausted = true;
            return;
        }
        trace->passes = passes;
        trace->passes_capacity = capacity;
    }
    trace->pass.end_ns = trace->now_ns;
    trace->passes[trace->n_passes++] = trace->pass;
    trace->total.n_passes++;
    kvs_trace_sum(&trace->total, &trace->pass);
    begin_pass(trace);
}

void kvs_trace_reset_measures(kvs_trace *trace)
{
    trace->total = (kvs_trace_report){
        .struct_size = sizeof trace->total, .begin_ns = trace->now_ns, .end_ns = trace->now_ns};
    trace->n_passes = 0;
    begin_pass(trace);
}
