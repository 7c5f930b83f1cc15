/* check.h: the whole test framework of the native tests.
 *
 * CHECK counts; a failure prints its place and the test goes on. `return check_finish();` ends main
 * with the closing line and the exit code. Checks may run on any thread.
 */
#ifndef KVS_TESTS_CHECK_H
#define KVS_TESTS_CHECK_H

#include "kvstream/base.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>

static _Atomic unsigned long check_passed;
static _Atomic unsigned long check_failed;

static inline bool check_that(bool holds, const char *file, int line, const char *text)
{
    if (holds) {
        atomic_fetch_add_explicit(&check_passed, 1, memory_order_relaxed);
    } else {
        atomic_fetch_add_explicit(&check_failed, 1, memory_order_relaxed);
        fprintf(stderr, "%s:%d: failed: %s\n", file, line, text);
    }
    return holds;
}

static inline bool check_status(int got, int expected, const char *file, int line, const char *text)
{
    if (got == expected) {
        return check_that(true, file, line, text);
    }
    fprintf(stderr, "%s:%d: %s expected, %s got\n", file, line, kvs_status_name(expected),
            kvs_status_name(got));
    return check_that(false, file, line, text);
}

static inline bool check_u64(uint64_t got, uint64_t expected, const char *file, int line,
                             const char *text)
{
    if (got == expected) {
        return check_that(true, file, line, text);
    }
    fprintf(stderr, "%s:%d: %" PRIu64 " expected, %" PRIu64 " got\n", file, line, expected, got);
    return check_that(false, file, line, text);
}

#define CHECK(condition) check_that((condition), __FILE__, __LINE__, #condition)
#define CHECK_STATUS(expression, expected)                                                         \
    check_status((int)(expression), (int)(expected), __FILE__, __LINE__, #expression)
#define CHECK_OK(expression) CHECK_STATUS(expression, KVS_OK)
#define CHECK_U64(expression, expected)                                                            \
    check_u64((uint64_t)(expression), (uint64_t)(expected), __FILE__, __LINE__, #expression)

static inline int check_finish(void)
{
    const unsigned long passed = atomic_load(&check_passed);
    const unsigned long failed = atomic_load(&check_failed);
    printf("%lu passed, %lu failed\n", passed, failed);
    return failed == 0 && passed != 0 ? 0 : 1;
}

#endif
