/* footprint.h: which bytes an operation reads and writes. Built on the operand table that sealing a tape uses, so what
 * gives tensors their places and what checks schedules cannot differ. */
#ifndef KVS_NATIVE_CORE_FOOTPRINT_H
#define KVS_NATIVE_CORE_FOOTPRINT_H

#include "core/backend.h"
#include "core/step.h"
#include "core/tape_check.h"

typedef enum kvs_access_kind {
    KVS_ACCESS_TENSOR = 0,  /* rows in the workspace */
    KVS_ACCESS_SCRATCH = 1, /* of one operation */
    KVS_ACCESS_WEIGHT = 2,
    KVS_ACCESS_PAGE = 3,
    KVS_ACCESS_CALLER = 4,  /* memory of the caller: inputs, outputs and borrowed rows */
    KVS_ACCESS_STATE = 5    /* of a sequence: recurrent layers */
} kvs_access_kind;

typedef struct kvs_access {
    uint64_t address;
    uint64_t n_bytes;
    uint64_t page;   /* absolute number, for PAGE */
    uint64_t record; /* address of the page's record, for PAGE */
    uint32_t kind; /* kvs_access_kind */
    bool is_write;
} kvs_access;

/* Attention is four: its state outlives a wave. */
typedef enum kvs_op_part {
    KVS_PART_WHOLE = 0,
    KVS_PART_BEGIN = 1,
    KVS_PART_WAVE = 2,
    KVS_PART_FINISH = 3
} kvs_op_part;

typedef struct kvs_footprint_desc {
    struct kvs_device_view backend; /* asked for the bytes of weights and scratch */
    const kvs_bound_op *op;
    const struct kvs_step *step;
    kvs_op_part part;
    uint64_t page_begin; /* of a wave */
    uint64_t page_end;
} kvs_footprint_desc;

typedef void (*kvs_access_visit)(void *user, const kvs_access *access);

/* Every read first, then every write. errors: those of the backend's sizes */
kvs_status kvs_op_footprint(const kvs_footprint_desc *desc, kvs_access_visit visit, void *user);

/* The same for pages that are read outside a tape: whole ones, the last by its rows. */
void kvs_pages_footprint(const kvs_kv_layer *layer, const kvs_record_info *record, const uint64_t *table,
                         uint64_t page_begin, uint64_t page_end, uint64_t active_tokens, kvs_access_visit visit,
                         void *user);

#endif
