#include "backends/trace/state.h"

#include <stddef.h>

/* The bytes of one operation by what they cost. */
struct tally {
    kvs_trace *trace;
    uint64_t cache_id;
    kvs_trace_access access;
    uint32_t layer;
    uint64_t weight_bytes;
    uint64_t page_bytes;
    uint64_t work_bytes;
};

static void count(struct tally *t, const kvs_access *access)
{
    if (access->kind == KVS_ACCESS_WEIGHT) {
        t->weight_bytes += access->n_bytes;
    } else if (access->kind == KVS_ACCESS_PAGE) {
        t->page_bytes += access->n_bytes;
    } else {
        t->work_bytes += access->n_bytes;
    }
}

static void visit(void *user, const kvs_access *access)
{
    struct tally *t = user;
    count(t, access);
    if (access->kind == KVS_ACCESS_CALLER) {
        return;
    }
    t->access.address = access->address;
    t->access.n_bytes = access->n_bytes;
    t->access.label = KVS_LABEL_VALUES;
    t->access.base = access->record;
    if (access->kind == KVS_ACCESS_STATE) {
        t->access.label = KVS_LABEL_STATE;
    } else if (access->kind == KVS_ACCESS_PAGE) {
        t->access.label = t->layer == KVS_NONE ? KVS_LABEL_SOME_PAGE : kvs_label_page(t->cache_id, t->layer, access->page);
    }
    if (access->is_write) {
        kvs_trace_write(t->trace, &t->access);
    } else {
        kvs_trace_read(t->trace, &t->access);
    }
}

/* The stream moves on by what the bytes and the operation itself take. */
static void spend(struct tally *t, uint64_t latency_ns)
{
    kvs_trace *trace = t->trace;
    const uint64_t rate = trace->costs.device_bytes_per_s;
    const struct {
        uint64_t ns;
        size_t field;
    } parts[] = {{kvs_trace_draw_ns(trace, latency_ns), offsetof(kvs_trace_report, latency_ns)},
                 {kvs_trace_bytes_ns(t->weight_bytes, rate), offsetof(kvs_trace_report, weight_ns)},
                 {kvs_trace_bytes_ns(t->page_bytes, rate), offsetof(kvs_trace_report, page_ns)},
                 {kvs_trace_bytes_ns(t->work_bytes, rate), offsetof(kvs_trace_report, work_ns)}};
    for (uint32_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        kvs_trace_advance(trace, trace->now_ns + parts[i].ns, KVS_CAUSE_WORK, parts[i].field);
    }
    if (t->access.event != KVS_NO_EVENT) {
        trace->steps[t->access.event].end_ns = trace->now_ns;
        trace->steps[t->access.event].n_bytes = t->weight_bytes + t->page_bytes + t->work_bytes;
    }
}

static bool names_layer(const kvs_bound_op *op)
{
    return op->code == KVS_OP_KV_WRITE || op->code == KVS_OP_ATTEND || op->code == KVS_OP_DELTA;
}

static kvs_status run_part(kvs_trace *trace, const kvs_footprint_desc *desc, uint64_t latency_ns)
{
    const kvs_bound_op *op = desc->op;
    kvs_trace_step step = {.begin_ns = trace->now_ns,
                           .end_ns = trace->now_ns,
                           .page_begin = desc->page_begin,
                           .page_end = desc->page_end,
                           .layer = names_layer(op) ? op->layer : KVS_NONE,
                           .kind = desc->part == KVS_PART_WAVE ? KVS_KIND_WAVE : KVS_KIND_OP,
                           .code = (uint8_t)op->code};
    if (op->code == KVS_OP_KV_WRITE) {
        step.page_begin = desc->step->first_token / KVS_PAGE_TOKENS;
        step.page_end = kvs_div_up(desc->step->first_token + desc->step->n_rows, KVS_PAGE_TOKENS);
    }
    struct tally t = {.trace = trace, .layer = step.layer, .cache_id = desc->step->cache_id};
    t.access.event = kvs_trace_add_compute(trace, step);
    t.access.clock = &trace->clock;
    const kvs_status status = kvs_op_footprint(desc, visit, &t);
    spend(&t, latency_ns);
    return trace->is_exhausted ? kvs_fail(trace->device, KVS_ENOMEM, "no memory to keep account of bytes") : status;
}

static struct kvs_device_view view_of(kvs_trace *trace)
{
    return kvs_device_backend(trace->device);
}

kvs_status kvs_trace_run_op(kvs_trace *trace, const kvs_bound_op *op, const struct kvs_step *step)
{
    const kvs_footprint_desc desc = {.backend = view_of(trace), .op = op, .step = step};
    trace->pass.n_ops++;
    return run_part(trace, &desc, trace->costs.op_ns);
}

static void run_wave(kvs_trace *trace, const kvs_bound_op *op, const struct kvs_step *step, uint64_t page_begin,
                     uint64_t page_end)
{
    const kvs_footprint_desc desc = {.backend = view_of(trace),
                                     .op = op,
                                     .step = step,
                                     .part = KVS_PART_WAVE,
                                     .page_begin = page_begin,
                                     .page_end = page_end};
    (void)run_part(trace, &desc, trace->costs.wave_ns);
}

void kvs_trace_attend(kvs_trace *trace, const kvs_bound_op *op, const struct kvs_step *step, kvs_op_part part,
                      uint64_t page_begin, uint64_t page_end)
{
    if (part == KVS_PART_WAVE) {
        trace->pass.n_waves++;
        if (kvs_trace_strikes(trace, KVS_TRACE_LATE_READ)) {
            trace->late = (kvs_late_wave){
                .is_set = true, .op = *op, .step = *step, .page_begin = page_begin, .page_end = page_end};
            return;
        }
        run_wave(trace, op, step, page_begin, page_end);
        return;
    }
    trace->pass.n_ops += part == KVS_PART_BEGIN;
    const kvs_footprint_desc desc = {.backend = view_of(trace), .op = op, .step = step, .part = part};
    (void)run_part(trace, &desc, part == KVS_PART_BEGIN ? trace->costs.op_ns : 0);
}

void kvs_trace_run_late_wave(kvs_trace *trace)
{
    if (trace->late.is_set) {
        trace->late.is_set = false;
        run_wave(trace, &trace->late.op, &trace->late.step, trace->late.page_begin, trace->late.page_end);
    }
}

kvs_status kvs_trace_attend_plan(kvs_trace *trace, const kvs_kv_layer *layer, const uint64_t *pages,
                                 uint64_t active_tokens)
{
    kvs_record_info record = {.struct_size = sizeof record};
    const kvs_status status = kvs_record_layout(layer, &record);
    if (status != KVS_OK) {
        return kvs_fail(trace->device, status, "attention: the layer's types cannot hold its head sizes");
    }
    const uint64_t n_pages = kvs_div_up(active_tokens, KVS_PAGE_TOKENS);
    const kvs_trace_step step = {.begin_ns = trace->now_ns,
                                 .end_ns = trace->now_ns,
                                 .page_end = n_pages,
                                 .layer = KVS_NONE,
                                 .kind = KVS_KIND_WAVE,
                                 .code = KVS_OP_ATTEND};
    struct tally t = {.trace = trace, .layer = KVS_NONE};
    t.access.event = kvs_trace_add_compute(trace, step);
    t.access.clock = &trace->clock;
    kvs_pages_footprint(layer, &record, pages, 0, n_pages, active_tokens, visit, &t);
    spend(&t, trace->costs.op_ns);
    return KVS_OK;
}
