/* failures.c: a small table behind a mutex, searched by thread: failing is rare, and never on a
 * path that is timed. */
#include "base/failures.h"

#include <stdio.h>
#include <string.h>

bool kvs_failures_init(kvs_failures *failures)
{
    memset(failures, 0, sizeof *failures);
    return kvs_mutex_init(&failures->mutex);
}

void kvs_failures_destroy(kvs_failures *failures)
{
    kvs_mutex_destroy(&failures->mutex);
}

static kvs_failure_row *row_of(kvs_failures *failures, uint64_t thread)
{
    for (size_t i = 0; i < KVS_FAILURE_ROWS; i++) {
        if (failures->rows[i].thread == thread) {
            return &failures->rows[i];
        }
    }
    return NULL;
}

static kvs_failure_row *oldest_row(kvs_failures *failures)
{
    kvs_failure_row *oldest = &failures->rows[0];
    for (size_t i = 1; i < KVS_FAILURE_ROWS; i++) {
        if (failures->rows[i].order < oldest->order) {
            oldest = &failures->rows[i];
        }
    }
    return oldest;
}

void kvs_failures_keep(kvs_failures *failures, const char *format, va_list arguments)
{
    /* Formatted apart, because an argument may be text that the table holds. */
    char text[KVS_FAILURE_BYTES];
    if (vsnprintf(text, sizeof text, format, arguments) < 0) {
        text[0] = '\0';
    }
    const uint64_t thread = kvs_thread_number();
    kvs_mutex_lock(&failures->mutex);
    kvs_failure_row *row = row_of(failures, thread);
    if (row == NULL) {
        row = oldest_row(failures);
    }
    row->thread = thread;
    row->order = ++failures->newest_order;
    memcpy(row->text, text, sizeof text);
    kvs_mutex_unlock(&failures->mutex);
}

void kvs_failures_copy(kvs_failures *failures, char *text, size_t capacity)
{
    kvs_mutex_lock(&failures->mutex);
    const kvs_failure_row *row = row_of(failures, kvs_thread_number());
    (void)snprintf(text, capacity, "%s", row == NULL ? "" : row->text);
    kvs_mutex_unlock(&failures->mutex);
}

void kvs_failures_note_copy(kvs_failures *failures)
{
    kvs_mutex_lock(&failures->mutex);
    const kvs_failure_row *row = row_of(failures, kvs_thread_number());
    if (row != NULL) {
        memcpy(failures->of_copy, row->text, sizeof failures->of_copy);
    }
    kvs_mutex_unlock(&failures->mutex);
}

void kvs_failures_copy_of_copy(kvs_failures *failures, char *text, size_t capacity)
{
    kvs_mutex_lock(&failures->mutex);
    (void)snprintf(text, capacity, "%s", failures->of_copy);
    kvs_mutex_unlock(&failures->mutex);
}
