/* span_script.h: span plans over one lease, made from the operands of a plan action. */
#ifndef KVS_FUZZ_SPAN_SCRIPT_H
#define KVS_FUZZ_SPAN_SCRIPT_H

#include "script.h"

#include "kvstream/span.h"

enum { MAX_SPANS = 4, MAX_PLANS = 8, MAX_PLAN_PAGES = 16 };

typedef struct made_plan {
    kvs_span_plan *plan;
    uint64_t addresses[MAX_PLAN_PAGES];
    uint32_t n_pages;
} made_plan;

typedef struct plans {
    kvs_device *device;
    kvs_lease *lease; /* borrowed */
    uint64_t lease_bytes;
    uint64_t lease_address;
    made_plan made[MAX_PLANS];
    uint32_t n;
} plans;

/* plan (n spans, pages per span by 2 bits, rows of the last page, where the records begin, defect, its operand): an exact
 * partition, spoiled in one way or none; the plan must be what it says, or refused as the header says. */
void plans_make(plans *plans, const fault *fault, const step *step);

/* Drop one of them; they check their tables first. */
void plans_release(plans *plans, uint32_t which);

void plans_check(const plans *plans);

#endif
