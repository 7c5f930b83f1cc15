/* state.h: what the files of the trace backend share.
 *
 *     backend.c    the ops table, memory
 *     compute.c    operations and waves of attention
 *     counter.c    what copies have raised, and who has seen it
 *     queue.c      copies in virtual time, gates, waits
 *     deferred.c   copies in a stated order
 *     access.c     who touched which bytes last, and was it in order
 *     sentence.c   a hazard in words
 *     measure.c    where the time goes
 *     control.c    the public functions
 */
#ifndef KVS_NATIVE_TRACE_STATE_H
#define KVS_NATIVE_TRACE_STATE_H

#include "backends/trace/intervals.h"
#include "base/sync.h"
#include "core/backend.h"
#include "core/footprint.h"
#include "kvstream/trace.h"

#define KVS_MAX_HAZARDS 256u
#define KVS_NEVER UINT64_MAX

/* What has happened before: the newest event of each stream. */
typedef struct kvs_vclock {
    uint32_t at[KVS_TRACE_STREAMS];
} kvs_vclock;

static inline void kvs_vclock_join(kvs_vclock *clock, const kvs_vclock *other)
{
    for (uint32_t i = 0; i < KVS_TRACE_STREAMS; i++) {
        clock->at[i] = other->at[i] > clock->at[i] ? other->at[i] : clock->at[i];
    }
}

typedef enum kvs_trace_kind {
    KVS_KIND_OP = 0,
    KVS_KIND_WAVE = 1,
    KVS_KIND_COPY = 2,
    KVS_KIND_RELEASE = 3, /* bytes that nobody may want any more */
    KVS_KIND_FREE = 4,
    KVS_KIND_CALLER = 5,  /* packing a weight, writing a state, or history by decree */
    KVS_KIND_READ = 6     /* the caller reads a state */
} kvs_trace_kind;

/* An operation, wave or copy. */
typedef struct kvs_trace_step {
    uint64_t begin_ns;
    uint64_t end_ns;
    uint64_t n_bytes;
    uint64_t done_value; /* of a copy */
    uint64_t gate_value;
    uint64_t page_begin;
    uint64_t page_end;
    uint32_t layer;
    uint32_t first_slot;
    uint32_t n_slots;
    uint32_t number; /* in its stream, from 1 */
    uint8_t stream;
    uint8_t kind; /* kvs_trace_kind */
    uint8_t code; /* kvs_op_code */
    bool has_gate;
} kvs_trace_step;

typedef enum kvs_hazard_kind {
    KVS_HAZARD_ORDER = 0,     /* two accesses, one of them a write, and nothing orders them */
    KVS_HAZARD_UNWRITTEN = 1, /* bytes that nobody wrote, or that were released */
    KVS_HAZARD_CONTENT = 2,   /* bytes that mean something else than the reader wants */
    KVS_HAZARD_OUTSIDE = 3,   /* bytes that are not allocated */
    KVS_HAZARD_STUCK = 4      /* a wait that nothing can end */
} kvs_hazard_kind;

typedef struct kvs_hazard {
    uint32_t kind;
    uint32_t now;  /* event that found it */
    uint32_t last; /* event that it collides with, or that put the bytes there */
    bool writes_now;
    bool wrote_last;
    uint32_t state; /* kvs_bytes_state */
    uint64_t address;
    uint64_t n_bytes;
    uint64_t label;  /* found */
    uint64_t wanted; /* label */
    uint64_t shift;  /* bytes that they lie off their place in the record, two's complement */
    char text[384];  /* of a wait */
} kvs_hazard;

/* A copy that has ended, for whoever waits on its counter. */
typedef struct kvs_ended {
    uint64_t value;
    uint64_t end_ns;
    kvs_vclock clock;
    _Atomic uint64_t *done;
    uint32_t stream;
} kvs_ended;

/* A counter that copies raise, and the ring that goes with it, as far as its copies have shown it. */
typedef struct kvs_trace_counter {
    const _Atomic uint64_t *done;
    kvs_ended *ended; /* not waited for yet, values rising */
    uint32_t n_ended;
    uint32_t capacity;
    uint64_t seen; /* the value up to which the compute stream has waited or looked */
    uint64_t ring_begin;
    uint64_t ring_end;
    uint64_t slot_bytes;
} kvs_trace_counter;

typedef struct kvs_queued {
    kvs_copy copy;
    kvs_vclock after; /* submission, and the gate when it opens */
    uint64_t ready_ns;
    uint64_t number; /* in the order of submission, of all queues */
    uint32_t first_slot;
    uint32_t n_slots;
    bool is_open;
    bool says_done_early;
} kvs_queued;

typedef struct kvs_trace_queue {
    kvs_queued *entries; /* ring buffer, capacity a power of two */
    uint32_t capacity;
    uint32_t head;
    uint32_t count;
    kvs_vclock clock; /* of its newest copy */
} kvs_trace_queue;

/* One direction of the bus: one copy at a time. */
typedef struct kvs_trace_engine {
    bool is_running;
    bool has_failed; /* a copy without `failed` */
    kvs_status status;
    uint32_t stream;
    uint32_t event;
    kvs_queued entry;
    kvs_vclock clock;
    uint64_t spent_ns; /* of the copy under way */
    uint64_t free_ns;
    uint64_t busy_ns;    /* of all copies that have begun, to their ends */
    uint64_t counted_ns; /* of it, already in a report */
} kvs_trace_engine;

typedef struct kvs_late_wave {
    bool is_set;
    kvs_bound_op op;
    struct kvs_step step;
    uint64_t page_begin;
    uint64_t page_end;
} kvs_late_wave;

typedef enum kvs_trace_cause { KVS_CAUSE_WORK, KVS_CAUSE_WAIT, KVS_CAUSE_HOST } kvs_trace_cause;

typedef struct kvs_trace {
    kvs_device *device;
    kvs_mutex lock; /* memory may be allocated from any thread */
    bool is_deferred; /* copies are chosen, not timed */
    kvs_trace_costs costs;
    uint64_t drawn;
    uint64_t now_ns;  /* of the compute stream */
    kvs_vclock clock; /* of the compute stream */
    kvs_trace_queue queues[KVS_TRACE_STREAMS]; /* that of compute stays empty */
    uint64_t n_submitted;
    kvs_trace_engine in;
    kvs_trace_engine out;
    kvs_trace_counter *counters;
    uint32_t n_counters;
    uint32_t counters_capacity;
    kvs_intervals memory;
    kvs_trace_step *steps;
    uint32_t n_steps;
    uint32_t steps_capacity;
    uint32_t first_step;                  /* since the reset */
    uint32_t newest[KVS_TRACE_STREAMS];   /* event numbers given out */
    kvs_hazard hazards[KVS_MAX_HAZARDS];
    uint32_t hazard_head;
    uint32_t hazard_count;
    uint64_t n_hazards;
    kvs_trace_report total;
    kvs_trace_report pass; /* the one that is open */
    kvs_trace_report *passes;
    uint32_t n_passes;
    uint32_t passes_capacity;
    uint32_t fault;
    uint64_t fault_left; /* candidates before the one that it strikes */
    kvs_late_wave late;
    bool is_exhausted; /* memory for the books ran out */
} kvs_trace;

/* What bytes mean: a page of a layer, values of operations, or what nobody has said. */
#define KVS_LABEL_NONE UINT64_C(0)
#define KVS_LABEL_VALUES UINT64_C(1)
#define KVS_LABEL_STATE UINT64_C(3) /* of recurrent layers */
#define KVS_LABEL_SOME_PAGE UINT64_C(2) /* wanted by a reader that does not know its layer */
static inline uint64_t kvs_label_page(uint64_t cache_id, uint32_t layer, uint64_t page)
{
    return (cache_id & UINT16_MAX) << 48 | (((uint64_t)layer + 1) & UINT16_MAX) << 32 | (page & UINT32_MAX);
}
static inline bool kvs_label_is_page(uint64_t label)
{
    return label >> 32 != 0;
}
/* Pages of two caches, such as a trunk's and its head's. */
static inline bool kvs_label_is_foreign(uint64_t label, uint64_t other)
{
    return kvs_label_is_page(label) && kvs_label_is_page(other) && label >> 48 != other >> 48;
}
static inline uint32_t kvs_label_layer(uint64_t label)
{
    return ((uint32_t)(label >> 32) & UINT16_MAX) - 1;
}

/* backend.c */
/* NULL where the device has another backend. */
kvs_trace *kvs_trace_of(kvs_device *device);
/* Does the planted fault of this kind strike here? */
bool kvs_trace_strikes(kvs_trace *trace, uint32_t fault);
/* A time with its jitter. */
uint64_t kvs_trace_draw_ns(kvs_trace *trace, uint64_t ns);
uint64_t kvs_trace_bytes_ns(uint64_t n_bytes, uint64_t bytes_per_s);
/* A new event of a stream; `step->number` is filled. KVS_NO_EVENT when memory has run out. */
uint32_t kvs_trace_add_step(kvs_trace *trace, const kvs_trace_step *step);
/* A new event of the compute stream, which goes into its clock. */
uint32_t kvs_trace_add_compute(kvs_trace *trace, kvs_trace_step step);

/* access.c */
typedef struct kvs_trace_access {
    uint32_t event;
    const kvs_vclock *clock;
    uint64_t address;
    uint64_t n_bytes;
    uint64_t label; /* wanted by a read, left by a write */
    uint64_t base;  /* of the record, 0 without one */
} kvs_trace_access;
void kvs_trace_read(kvs_trace *trace, const kvs_trace_access *access);
void kvs_trace_write(kvs_trace *trace, const kvs_trace_access *access);
/* Like a write, but leaves bytes that nobody may read. */
void kvs_trace_discard(kvs_trace *trace, const kvs_trace_access *access);
/* What is not written is copied as not written: the reader of the copy is the one who errs. */
void kvs_trace_copy(kvs_trace *trace, const kvs_trace_access *from, uint64_t to);
void kvs_trace_add_memory(kvs_trace *trace, uint64_t address, uint64_t n_bytes);
void kvs_trace_drop_memory(kvs_trace *trace, uint64_t address, uint64_t n_bytes);
/* Room for a hazard; NULL when the same is known, or all room is taken. */
kvs_hazard *kvs_trace_add_hazard(kvs_trace *trace, const kvs_hazard *hazard);

/* sentence.c */
void kvs_trace_say(const kvs_trace *trace, const kvs_hazard *hazard, char *text, size_t capacity);
/* Which slot of which ring an address is in; false where it is in none. */
bool kvs_trace_find_slot(const kvs_trace *trace, uint64_t address, uint32_t *slot);

/* counter.c */
void kvs_trace_raise_counter(_Atomic uint64_t *counter, uint64_t value);
kvs_trace_counter *kvs_trace_find_counter(kvs_trace *trace, const _Atomic uint64_t *done);
kvs_trace_counter *kvs_trace_need_counter(kvs_trace *trace, const _Atomic uint64_t *done);
void kvs_trace_add_ended(kvs_trace *trace, const kvs_ended *ended);
/* The caller has seen the counter at `value`: every copy up to there happened before. Returns the newest of them. */
kvs_ended kvs_trace_join_ended(kvs_trace *trace, const _Atomic uint64_t *done, uint64_t value);
bool kvs_trace_is_reached(kvs_trace *trace, const _Atomic uint64_t *done, uint64_t value);

/* queue.c */
kvs_status kvs_trace_submit(kvs_trace *trace, const kvs_copy *copies, uint32_t n_copies);
kvs_status kvs_trace_wait(kvs_trace *trace, const _Atomic uint64_t *counter, uint64_t value, const _Atomic int *failed);
void kvs_trace_look(kvs_trace *trace, const _Atomic uint64_t *counter, uint64_t value);
void kvs_trace_open_gates(kvs_trace *trace);
void kvs_trace_cancel(kvs_trace *trace, const _Atomic uint64_t *done);
kvs_status kvs_trace_drain(kvs_trace *trace);
/* Begin and end every copy that does so up to a time. */
void kvs_trace_run_until(kvs_trace *trace, uint64_t ns);
void kvs_trace_free_queues(kvs_trace *trace);
/* Whether the first copy of a stream may go, and which it is in the order of submission. */
bool kvs_trace_first_copy(const kvs_trace *trace, uint32_t stream, uint64_t *number);
/* Begin and end the first copy of a stream, which may go. */
void kvs_trace_carry_out(kvs_trace *trace, uint32_t stream);

/* deferred.c */
/* One copy; false when none may go. */
bool kvs_trace_run_one(kvs_trace *trace);
/* Those that are chosen before the compute stream goes on. */
void kvs_trace_run_ahead(kvs_trace *trace);
/* The same where nobody waits: only a stated schedule runs copies there. */
void kvs_trace_offer_copies(kvs_trace *trace);

/* measure.c */
/* The compute stream moves on: what runs beside it is counted with it. `field` is a member of kvs_trace_report. */
void kvs_trace_advance(kvs_trace *trace, uint64_t to_ns, kvs_trace_cause cause, size_t field);
void kvs_trace_end_pass(kvs_trace *trace);
void kvs_trace_reset_measures(kvs_trace *trace);
void kvs_trace_sum(kvs_trace_report *sum, const kvs_trace_report *part);

/* compute.c */
kvs_status kvs_trace_run_op(kvs_trace *trace, const kvs_bound_op *op, const struct kvs_step *step);
void kvs_trace_attend(kvs_trace *trace, const kvs_bound_op *op, const struct kvs_step *step, kvs_op_part part,
                      uint64_t page_begin, uint64_t page_end);
kvs_status kvs_trace_attend_plan(kvs_trace *trace, const kvs_kv_layer *layer, const uint64_t *pages,
                                 uint64_t active_tokens);
/* The reads that a planted fault has put off. */
void kvs_trace_run_late_wave(kvs_trace *trace);

#endif
