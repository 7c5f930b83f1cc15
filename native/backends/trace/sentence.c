#include "backends/trace/state.h"

#include <stdarg.h>
#include <stdio.h>

/* Text that grows and is cut where the room ends. */
struct line {
    char *text;
    size_t capacity;
    size_t length;
};

static void say(struct line *line, const char *format, ...) KVS_PRINTF(2, 3);

static void say(struct line *line, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int n = vsnprintf(line->text + line->length, line->capacity - line->length, format, arguments);
    va_end(arguments);
    const size_t end = line->length + (n < 0 ? 0 : (size_t)n);
    line->length = end < line->capacity ? end : line->capacity - 1;
}

static bool is_copy(const kvs_trace *trace, uint32_t event)
{
    return event != KVS_NO_EVENT && trace->steps[event].kind == KVS_KIND_COPY;
}

static const char *name_of(const kvs_trace_step *step)
{
    switch (step->kind) {
    case KVS_KIND_COPY:
        return step->stream == KVS_TRACE_OUT ? "copy out" : "copy in";
    case KVS_KIND_RELEASE:
        return "release";
    case KVS_KIND_FREE:
        return "free";
    case KVS_KIND_CALLER:
        return "the caller's write";
    case KVS_KIND_READ:
        return "the caller's read";
    default:
        return kvs_op_name(step->code);
    }
}

static void say_slots(struct line *line, uint32_t first, uint32_t n_slots)
{
    if (n_slots == 1) {
        say(line, "ring slot %u", first);
    } else if (n_slots > 1) {
        say(line, "ring slots %u to %u", first, first + n_slots - 1);
    }
}

static void say_pages(struct line *line, uint64_t begin, uint64_t end)
{
    if (end == begin + 1) {
        say(line, "page %llu", (kvs_ull)begin);
    } else if (end > begin) {
        say(line, "pages %llu to %llu", (kvs_ull)begin, (kvs_ull)(end - 1));
    }
}

/* "attend 17 (layer 3, pages 4 to 9, 120 to 150 ns)" */
static void say_step(struct line *line, const kvs_trace *trace, uint32_t event)
{
    const kvs_trace_step *step = &trace->steps[event];
    say(line, "%s %u (", name_of(step), step->number);
    if (step->layer != KVS_NONE) {
        const bool is_recurrent = step->kind == KVS_KIND_OP && step->code == KVS_OP_DELTA;
        say(line, "%slayer %u, ", is_recurrent ? "recurrent " : "", step->layer);
    }
    if (step->page_end > step->page_begin) {
        say_pages(line, step->page_begin, step->page_end);
        say(line, ", ");
    }
    if (step->n_slots != 0) {
        say_slots(line, step->first_slot, step->n_slots);
        say(line, ", ");
    }
    say(line, "%llu to %llu ns)", (kvs_ull)step->begin_ns, (kvs_ull)step->end_ns);
}

bool kvs_trace_find_slot(const kvs_trace *trace, uint64_t address, uint32_t *slot)
{
    for (uint32_t i = 0; i < trace->n_counters; i++) {
        const kvs_trace_counter *counter = &trace->counters[i];
        if (counter->slot_bytes != 0 && address >= counter->ring_begin && address < counter->ring_end) {
            *slot = (uint32_t)((address - counter->ring_begin) / counter->slot_bytes);
            return true;
        }
    }
    return false;
}

static void say_label(struct line *line, uint64_t label)
{
    static const char *const names[] = {[KVS_LABEL_NONE] = "bytes without a name",
                                        [KVS_LABEL_VALUES] = "values of an operation",
                                        [KVS_LABEL_SOME_PAGE] = "a page",
                                        [KVS_LABEL_STATE] = "state of a recurrent layer"};
    if (kvs_label_is_page(label)) {
        say(line, "page %llu of layer %u", (kvs_ull)(label & UINT32_MAX), kvs_label_layer(label));
    } else {
        say(line, "%s", names[label]);
    }
}

static void say_bytes(struct line *line, const kvs_trace *trace, const kvs_hazard *hazard)
{
    uint32_t slot;
    say(line, " %llu bytes at %#llx", (kvs_ull)hazard->n_bytes, (kvs_ull)hazard->address);
    if (kvs_trace_find_slot(trace, hazard->address, &slot)) {
        say(line, " in ring slot %u", slot);
    }
}

static void say_gate(struct line *line, const kvs_trace_step *copy)
{
    if (copy->has_gate) {
        say(line, "the copy in must not begin before `consumed` stands behind the last user of its slots (its gate is %llu)",
            (kvs_ull)copy->gate_value);
    } else {
        say(line, "the copy in needs a gate, or must be queued behind a wait for the last user of its place");
    }
}

static void say_fence_behind(struct line *line, const kvs_trace *trace, const kvs_hazard *hazard)
{
    const kvs_trace_step *last = &trace->steps[hazard->last];
    const bool is_other_page =
        kvs_label_is_page(hazard->label) && kvs_label_is_page(hazard->wanted) && hazard->label != hazard->wanted;
    if (last->stream == KVS_TRACE_OUT) {
        say(line, "a wait for the copy out to history (done %llu) before its %s", (kvs_ull)last->done_value,
            hazard->wrote_last ? "bytes are used" : "source is overwritten");
    } else if (is_other_page) {
        say(line, "the slot was given to ");
        say_label(line, hazard->label);
        say(line, " too early; ");
        say_gate(line, last);
    } else {
        say(line, "a wait for the copy in (%s %llu) before its bytes are %s", last->has_gate ? "`ready`" : "done",
            (kvs_ull)last->done_value, hazard->writes_now ? "overwritten" : "read");
    }
}

static void say_missing_fence(struct line *line, const kvs_trace *trace, const kvs_hazard *hazard)
{
    const kvs_trace_step *now = &trace->steps[hazard->now];
    say(line, "; missing fence: ");
    if (is_copy(trace, hazard->last) && (!is_copy(trace, hazard->now) || trace->steps[hazard->last].stream == KVS_TRACE_OUT)) {
        say_fence_behind(line, trace, hazard);
    } else if (now->stream == KVS_TRACE_OUT) {
        say(line, "the copy out must be queued behind the writer of its source");
    } else if (is_copy(trace, hazard->last) && hazard->writes_now) {
        say(line, "a wait between two copies in to the same place");
    } else {
        say_gate(line, now);
    }
}

static void say_order(struct line *line, const kvs_trace *trace, const kvs_hazard *hazard)
{
    say_step(line, trace, hazard->now);
    say(line, hazard->writes_now ? " overwrites" : " reads");
    say_bytes(line, trace, hazard);
    if (!hazard->writes_now && kvs_label_is_page(hazard->wanted)) {
        say(line, " as ");
        say_label(line, hazard->wanted);
    }
    say(line, hazard->wrote_last ? ", which " : ", which are read by ");
    say_step(line, trace, hazard->last);
    say(line, hazard->wrote_last ? " writes, and nothing orders the two" : ", and nothing orders the two");
    say_missing_fence(line, trace, hazard);
}

static void say_unwritten(struct line *line, const kvs_trace *trace, const kvs_hazard *hazard)
{
    const bool is_released = hazard->state == KVS_BYTES_RELEASED;
    say_step(line, trace, hazard->now);
    say(line, " reads");
    say_bytes(line, trace, hazard);
    if (kvs_label_is_page(hazard->wanted)) {
        say(line, " as ");
        say_label(line, hazard->wanted);
    }
    if (is_copy(trace, hazard->last)) {
        say(line, ", brought by ");
        say_step(line, trace, hazard->last);
        say(line, " from %s; missing fence: the page must be published before it is prefetched",
            is_released ? "bytes that were released" : "history that nobody has written");
    } else if (is_released) {
        say(line, ", which %s released; missing fence: `consumed` must follow the last reader, or the page must be brought again",
            hazard->last == KVS_NO_EVENT ? "were" : "have been");
    } else if (hazard->wanted == KVS_LABEL_STATE) {
        say(line, " as state of a recurrent layer, which nobody has written; rows were accepted of a pass that did not write them");
    } else {
        say(line, ", which nobody has written; missing fence: a wait for the copy in that brings them");
    }
}

static void say_content(struct line *line, const kvs_trace *trace, const kvs_hazard *hazard)
{
    say_step(line, trace, hazard->now);
    say(line, " reads");
    say_bytes(line, trace, hazard);
    say(line, " as ");
    say_label(line, hazard->wanted);
    say(line, ", but they are ");
    say_label(line, hazard->label);
    if (kvs_label_is_foreign(hazard->label, hazard->wanted)) {
        say(line, " of another cache");
    }
    if (hazard->shift != 0) {
        const bool is_up = hazard->shift > INT64_MAX;
        say(line, " %llu bytes %s their place", (kvs_ull)(is_up ? 0 - hazard->shift : hazard->shift),
            is_up ? "behind" : "before");
    }
    if (hazard->last != KVS_NO_EVENT) {
        say(line, " since ");
        say_step(line, trace, hazard->last);
    }
    say(line, "; the place was given away, or the address is of another layout");
}

void kvs_trace_say(const kvs_trace *trace, const kvs_hazard *hazard, char *text, size_t capacity)
{
    struct line line = {.text = text, .capacity = capacity};
    text[0] = '\0';
    switch (hazard->kind) {
    case KVS_HAZARD_ORDER:
        say_order(&line, trace, hazard);
        break;
    case KVS_HAZARD_UNWRITTEN:
        say_unwritten(&line, trace, hazard);
        break;
    case KVS_HAZARD_CONTENT:
        say_content(&line, trace, hazard);
        break;
    case KVS_HAZARD_OUTSIDE:
        say_step(&line, trace, hazard->now);
        say(&line, hazard->writes_now ? " writes" : " reads");
        say_bytes(&line, trace, hazard);
        say(&line, ", which are not allocated");
        break;
    default:
        say(&line, "%s", hazard->text);
    }
}
