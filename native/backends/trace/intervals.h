/* intervals.h: who touched which bytes last. Disjoint intervals in address order that cover what is allocated; neighbours
 * with the same story are one. */
#ifndef KVS_NATIVE_TRACE_INTERVALS_H
#define KVS_NATIVE_TRACE_INTERVALS_H

#include "base/internal.h"
#include "kvstream/trace.h"

#define KVS_NO_EVENT UINT32_MAX

typedef enum kvs_bytes_state {
    KVS_BYTES_UNWRITTEN = 0, /* since they were allocated */
    KVS_BYTES_WRITTEN = 1,
    KVS_BYTES_RELEASED = 2   /* nobody may want them any more */
} kvs_bytes_state;

typedef struct kvs_interval {
    uint64_t begin;
    uint64_t end;
    uint64_t label;                      /* what they mean, see state.h */
    uint64_t base;                       /* where their record would begin, were they in place; 0 without one */
    uint32_t writer;                     /* event, KVS_NO_EVENT */
    uint32_t readers[KVS_TRACE_STREAMS]; /* newest event of each stream since the writer */
    uint32_t state;                      /* kvs_bytes_state */
} kvs_interval;

typedef struct kvs_leaf kvs_leaf;

/* A sorted directory of short sorted arrays: inserting moves little, and walking is linear. */
typedef struct kvs_intervals {
    kvs_leaf **leaves;
    uint64_t *firsts; /* begin of each leaf's first interval */
    uint32_t n_leaves;
    uint32_t capacity;
} kvs_intervals;

typedef void (*kvs_interval_visit)(void *user, kvs_interval *interval);

void kvs_intervals_destroy(kvs_intervals *map);

/* Put `story` over its whole range, whatever lay there; also how a range is added. errors: ENOMEM */
kvs_status kvs_intervals_assign(kvs_intervals *map, const kvs_interval *story);

/* errors: ENOMEM */
kvs_status kvs_intervals_remove(kvs_intervals *map, uint64_t begin, uint64_t end);

/* Visit what lies in the range, cut to it; the visitor may change everything but the extent. `covered` receives how many
 * bytes of the range are there. errors: ENOMEM */
kvs_status kvs_intervals_visit(kvs_intervals *map, uint64_t begin, uint64_t end, kvs_interval_visit visit, void *user,
                               uint64_t *covered);

#endif
