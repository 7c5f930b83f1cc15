/* ring_model.h: what the slots of a ring must hold: pages, runs of copies, and which of them may run.
 *
 * A run ends at its demand, the ring's end, a held slot, or the limit. The engine takes runs in order; one may start when the
 * demands that held its slots are consumed.
 */
#ifndef KVS_FUZZ_RING_MODEL_H
#define KVS_FUZZ_RING_MODEL_H

#include <stdbool.h>
#include <stdint.h>

enum { SLOT_BYTES = 128, MAX_SLOTS = 7, MAX_PAGES = 2048, N_HISTORY = 40, LET_GO = 0xff, HELD = 0x33 };

typedef struct model_page {
    uint32_t page; /* of history */
    uint32_t record_bytes;
    uint32_t slot;
    bool came; /* its copy moved bytes */
} model_page;

typedef struct model_run {
    uint64_t end;
    uint64_t gate;
} model_run;

typedef struct ring_model {
    uint32_t n_slots;
    uint32_t limit;
    uint32_t n_held;
    uint64_t base; /* demand at which the newest hold began to count slots */
    uint64_t submitted, ready, consumed;
    bool is_poisoned;
    bool was_early;
    model_page pages[MAX_PAGES];
    model_run runs[MAX_PAGES];
    uint32_t n_runs;
    uint32_t next_run; /* of those that have not run */
    uint64_t copied_bytes;
    uint8_t slots[MAX_SLOTS][SLOT_BYTES];
} ring_model;

void ring_model_open(ring_model *model, uint32_t n_slots, uint32_t limit);

/* Pages first .. first + n_pages - 1 of history are demanded. */
void ring_model_submit(ring_model *model, uint32_t first, uint32_t n_pages, uint32_t record_bytes);

/* The engine runs the next copy; `answer` is the hook's. */
void ring_model_copy(ring_model *model, int answer);

void ring_model_consume(ring_model *model, uint64_t end);
void ring_model_cancel(ring_model *model);
void ring_model_hold(ring_model *model, uint32_t n_slots);

static inline uint32_t ring_model_open_slots(const ring_model *model)
{
    return model->n_slots - model->n_held;
}

/* End of the last run that may start before more is consumed. */
uint64_t ring_model_acquirable(const ring_model *model);

/* Demands to be consumed before this one's copy may start. */
uint64_t ring_model_gate(const ring_model *model, uint64_t demand);

/* Queued copies that may run now. */
uint32_t ring_model_runnable(const ring_model *model);

/* A slot with this page: what the copy does not reach stays as it was let go. */
void ring_model_fill(uint8_t *slot, uint32_t page, uint32_t record_bytes);

#endif
