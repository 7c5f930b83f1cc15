/* failures.h: the texts of the newest failures of a device, one per thread.
 *
 * Bounded: when more threads fail than the table has rows, the thread that failed longest ago loses
 * its text.
 */
#ifndef KVS_NATIVE_BASE_FAILURES_H
#define KVS_NATIVE_BASE_FAILURES_H

#include "base/sync.h"

#include <stdarg.h>
#include <stddef.h>

enum { KVS_FAILURE_ROWS = 32, KVS_FAILURE_BYTES = 384 };

typedef struct kvs_failure_row {
    uint64_t thread; /* kvs_thread_number, 0 for a free row */
    uint64_t order; /* rises with each failure */
    char text[KVS_FAILURE_BYTES];
} kvs_failure_row;

typedef struct kvs_failures {
    kvs_mutex mutex;
    uint64_t newest_order;
    char of_copy[KVS_FAILURE_BYTES]; /* why the newest copy failed that its engine told of */
    kvs_failure_row rows[KVS_FAILURE_ROWS];
} kvs_failures;

bool kvs_failures_init(kvs_failures *failures);
void kvs_failures_destroy(kvs_failures *failures);

/* Keep a text for the calling thread, cut to KVS_FAILURE_BYTES. */
void kvs_failures_keep(kvs_failures *failures, const char *format, va_list arguments);

/* The calling thread's text says why a copy failed, of which another thread will hear. */
void kvs_failures_note_copy(kvs_failures *failures);
void kvs_failures_copy_of_copy(kvs_failures *failures, char *text, size_t capacity);

/* Copy the calling thread's text, or an empty one. `capacity` at least 1. */
void kvs_failures_copy(kvs_failures *failures, char *text, size_t capacity);

#endif
