#include "backends/trace/state.h"

#include <stdlib.h>

/* One access on its way over the intervals. */
struct visit {
    kvs_trace *trace;
    const kvs_trace_access *access;
    bool is_write;
    bool checks_content; /* reads of copies do not */
};

static bool is_before(const kvs_trace *trace, uint32_t event, const kvs_vclock *clock)
{
    const kvs_trace_step *step = &trace->steps[event];
    return step->number <= clock->at[step->stream];
}

static bool is_same(const kvs_hazard *a, const kvs_hazard *b)
{
    return a->kind != KVS_HAZARD_STUCK && a->kind == b->kind && a->now == b->now && a->last == b->last &&
           a->label == b->label && a->wanted == b->wanted;
}

kvs_hazard *kvs_trace_add_hazard(kvs_trace *trace, const kvs_hazard *hazard)
{
    for (uint32_t i = 0; i < trace->hazard_count; i++) {
        kvs_hazard *known = &trace->hazards[(trace->hazard_head + i) % KVS_MAX_HAZARDS];
        if (is_same(known, hazard)) {
            known->n_bytes += hazard->n_bytes;
            return NULL;
        }
    }
    trace->n_hazards++;
    if (trace->hazard_count == KVS_MAX_HAZARDS) {
        return NULL;
    }
    kvs_hazard *added = &trace->hazards[(trace->hazard_head + trace->hazard_count) % KVS_MAX_HAZARDS];
    *added = *hazard;
    trace->hazard_count++;
    return added;
}

static void find_hazard(const struct visit *v, const kvs_interval *item, uint32_t kind, uint32_t last, bool wrote_last)
{
    const kvs_hazard hazard = {.kind = kind,
                               .now = v->access->event,
                               .last = last,
                               .writes_now = v->is_write,
                               .wrote_last = wrote_last,
                               .state = item->state,
                               .address = item->begin,
                               .n_bytes = item->end - item->begin,
                               .label = item->label,
                               .wanted = v->access->label,
                               .shift = item->base == 0 || v->access->base == 0 ? 0 : v->access->base - item->base};
    (void)kvs_trace_add_hazard(v->trace, &hazard);
}

static bool is_wanted(uint64_t label, uint64_t wanted)
{
    return label == KVS_LABEL_NONE || wanted == KVS_LABEL_NONE || label == wanted ||
           (wanted == KVS_LABEL_SOME_PAGE && kvs_label_is_page(label));
}

/* Rows that a copy has shifted within their record are as wrong as those of another page. */
static bool is_in_place(uint64_t base, uint64_t wanted)
{
    return base == 0 || wanted == 0 || base == wanted;
}

static void check_content(const struct visit *v, const kvs_interval *item)
{
    if (item->state != KVS_BYTES_WRITTEN) {
        find_hazard(v, item, KVS_HAZARD_UNWRITTEN, item->writer, true);
    } else if (!is_wanted(item->label, v->access->label) || !is_in_place(item->base, v->access->base)) {
        find_hazard(v, item, KVS_HAZARD_CONTENT, item->writer, true);
    }
}

static void visit_read(void *user, kvs_interval *item)
{
    const struct visit *v = user;
    const kvs_trace *trace = v->trace;
    if (item->writer != KVS_NO_EVENT && !is_before(trace, item->writer, v->access->clock)) {
        find_hazard(v, item, KVS_HAZARD_ORDER, item->writer, true);
    } else if (v->checks_content) {
        check_content(v, item);
    }
    item->readers[trace->steps[v->access->event].stream] = v->access->event;
}

static void visit_write(void *user, kvs_interval *item)
{
    const struct visit *v = user;
    const kvs_trace *trace = v->trace;
    for (uint32_t i = 0; i < KVS_TRACE_STREAMS; i++) {
        const uint32_t reader = item->readers[i];
        if (reader != KVS_NO_EVENT && !is_before(trace, reader, v->access->clock)) {
            find_hazard(v, item, KVS_HAZARD_ORDER, reader, false);
            return;
        }
    }
    if (item->writer != KVS_NO_EVENT && !is_before(trace, item->writer, v->access->clock)) {
        find_hazard(v, item, KVS_HAZARD_ORDER, item->writer, true);
    }
}

static void walk(struct visit *v, kvs_interval_visit visit)
{
    const kvs_trace_access *access = v->access;
    uint64_t covered = 0;
    if (kvs_intervals_visit(&v->trace->memory, access->address, access->address + access->n_bytes, visit, v, &covered) !=
        KVS_OK) {
        v->trace->is_exhausted = true;
    } else if (covered != access->n_bytes) {
        const kvs_interval gap = {.begin = access->address, .end = access->address + access->n_bytes - covered};
        find_hazard(v, &gap, KVS_HAZARD_OUTSIDE, KVS_NO_EVENT, false);
    }
}

/* What bytes mean after they were written. */
struct meaning {
    uint64_t label;
    uint64_t base;
    uint32_t state;
};

static void assign(kvs_trace *trace, uint64_t begin, uint64_t end, uint32_t writer, struct meaning meaning)
{
    const kvs_interval story = {.begin = begin,
                                .end = end,
                                .label = meaning.label,
                                .base = meaning.base,
                                .writer = writer,
                                .readers = {KVS_NO_EVENT, KVS_NO_EVENT, KVS_NO_EVENT, KVS_NO_EVENT},
                                .state = meaning.state};
    if (kvs_intervals_assign(&trace->memory, &story) != KVS_OK) {
        trace->is_exhausted = true;
    }
}

void kvs_trace_read(kvs_trace *trace, const kvs_trace_access *access)
{
    if (access->event != KVS_NO_EVENT && access->n_bytes != 0) {
        struct visit v = {.trace = trace, .access = access, .checks_content = true};
        walk(&v, visit_read);
    }
}

void kvs_trace_write(kvs_trace *trace, const kvs_trace_access *access)
{
    if (access->event != KVS_NO_EVENT && access->n_bytes != 0) {
        struct visit v = {.trace = trace, .access = access, .is_write = true};
        walk(&v, visit_write);
        assign(trace, access->address, access->address + access->n_bytes, access->event,
               (struct meaning){.label = access->label, .base = access->base, .state = KVS_BYTES_WRITTEN});
    }
}

/* The readers stay on record: whoever overwrites the bytes too early is told about them, not about their release. */
static void visit_discard(void *user, kvs_interval *item)
{
    const struct visit *v = user;
    visit_write(user, item);
    item->writer = v->access->event;
    item->label = KVS_LABEL_NONE;
    item->base = 0;
    item->state = KVS_BYTES_RELEASED;
}

void kvs_trace_discard(kvs_trace *trace, const kvs_trace_access *access)
{
    if (access->event != KVS_NO_EVENT && access->n_bytes != 0) {
        struct visit v = {.trace = trace, .access = access, .is_write = true};
        walk(&v, visit_discard);
    }
}

/* A run of source bytes of one meaning. */
struct segment {
    uint64_t n_bytes;
    struct meaning meaning; /* at the source */
};

struct gather {
    struct visit v; /* first, so that visit_read finds it */
    struct segment *segments;
    uint32_t count;
    uint32_t capacity;
};

static void visit_source(void *user, kvs_interval *item)
{
    struct gather *g = user;
    visit_read(&g->v, item);
    struct segment *last = g->count == 0 ? NULL : &g->segments[g->count - 1];
    const uint64_t n_bytes = item->end - item->begin;
    const struct meaning meaning = {.label = item->label, .base = item->base, .state = item->state};
    if (last != NULL && last->meaning.label == meaning.label && last->meaning.base == meaning.base &&
        last->meaning.state == meaning.state) {
        last->n_bytes += n_bytes;
        return;
    }
    if (g->count == g->capacity) {
        const uint32_t capacity = g->capacity == 0 ? 16 : g->capacity * 2;
        struct segment *segments = realloc(g->segments, capacity * sizeof *segments);
        if (segments == NULL) {
            g->v.trace->is_exhausted = true;
            return;
        }
        g->segments = segments;
        g->capacity = capacity;
    }
    g->segments[g->count++] = (struct segment){.n_bytes = n_bytes, .meaning = meaning};
}

static void note_pages(kvs_trace *trace, uint32_t event, const struct segment *segment)
{
    kvs_trace_step *step = &trace->steps[event];
    if (!kvs_label_is_page(segment->meaning.label)) {
        return;
    }
    const uint64_t page = segment->meaning.label & UINT32_MAX;
    if (step->page_end == 0) {
        step->layer = kvs_label_layer(segment->meaning.label);
        step->page_begin = page;
        step->page_end = page + 1;
    } else if (step->page_end <= page) {
        step->page_end = page + 1;
    }
}

void kvs_trace_copy(kvs_trace *trace, const kvs_trace_access *from, uint64_t to)
{
    if (from->event == KVS_NO_EVENT) {
        return;
    }
    struct gather g = {.v = {.trace = trace, .access = from}};
    walk(&g.v, visit_source);
    for (uint32_t i = 0; i < g.count; i++) {
        note_pages(trace, from->event, &g.segments[i]);
    }
    kvs_trace_access access = *from;
    access.address = to;
    struct visit v = {.trace = trace, .access = &access, .is_write = true};
    walk(&v, visit_write);
    const uint64_t moved = to - from->address;
    for (uint32_t i = 0; i < g.count; i++) {
        const struct segment *segment = &g.segments[i];
        struct meaning meaning = segment->meaning;
        meaning.base = meaning.base == 0 ? 0 : meaning.base + moved;
        assign(trace, to, to + segment->n_bytes, from->event, meaning);
        to += segment->n_bytes;
    }
    free(g.segments);
}

void kvs_trace_add_memory(kvs_trace *trace, uint64_t address, uint64_t n_bytes)
{
    assign(trace, address, address + n_bytes, KVS_NO_EVENT, (struct meaning){.state = KVS_BYTES_UNWRITTEN});
}

void kvs_trace_drop_memory(kvs_trace *trace, uint64_t address, uint64_t n_bytes)
{
    if (kvs_intervals_remove(&trace->memory, address, address + n_bytes) != KVS_OK) {
        trace->is_exhausted = true;
    }
}
