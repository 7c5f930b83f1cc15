/* internal.h: what every translation unit of the core may use: failing with a text, checked structs and
 * arithmetic, atomics.
 *
 * Failing: `return kvs_fail(device, KVS_ENOSPACE, "need %llu bytes, have %llu (ring)", ...)`. The text is kept per
 * device and thread.
 */
#ifndef KVS_NATIVE_BASE_INTERNAL_H
#define KVS_NATIVE_BASE_INTERNAL_H

#include "kvstream/device.h"

#include <stdatomic.h>
#include <stdbool.h>

#if defined(__GNUC__) || defined(__clang__)
#define KVS_PRINTF(a, b) __attribute__((format(printf, a, b)))
#else
#define KVS_PRINTF(a, b)
#endif

typedef unsigned long long kvs_ull; /* what %llu prints */

/* A struct that the caller fills or receives: present and at least as long as this library knows it. */
#define KVS_STRUCT_OK(pointer) ((pointer) != NULL && (pointer)->struct_size >= (uint32_t)sizeof *(pointer))

/* Record the text of a failure for this device and thread; returns `status`. `device` may be NULL. */
kvs_status kvs_fail(kvs_device *device, kvs_status status, const char *format, ...) KVS_PRINTF(3, 4);

/* What a public function answers that was given nothing where it needs something. */
#define kvs_refuse(device)                                                                                             \
    kvs_fail((device), KVS_EINVAL, "%s: a pointer is NULL, or a struct says that it is smaller than it is", __func__)

static inline bool kvs_add_u64(uint64_t a, uint64_t b, uint64_t *sum)
{
    return !__builtin_add_overflow(a, b, sum);
}

static inline bool kvs_mul_u64(uint64_t a, uint64_t b, uint64_t *product)
{
    return !__builtin_mul_overflow(a, b, product);
}

static inline bool kvs_is_power_of_two(uint64_t value)
{
    return value != 0 && (value & (value - 1)) == 0;
}

/* Round up to a power-of-two alignment; false on overflow. */
static inline bool kvs_align_up(uint64_t value, uint64_t alignment, uint64_t *aligned)
{
    uint64_t sum;
    if (!kvs_add_u64(value, alignment - 1, &sum)) {
        return false;
    }
    *aligned = sum & ~(alignment - 1);
    return true;
}

static inline uint64_t kvs_div_up(uint64_t value, uint64_t divisor)
{
    return value / divisor + (value % divisor != 0);
}

/* Host allocations of bookkeeping objects, zeroed, counted as live objects of the device, subject to its hook at
 * KVS_HOOK_ALLOC. The object holds a claim on the device until kvs_object_free. */
void *kvs_object_alloc(kvs_device *device, size_t bytes);
void kvs_object_free(kvs_device *device, void *object);

/* Uncounted arrays that belong to an object, zeroed; subject to the hook like objects. `device` may be NULL: no hook. */
void *kvs_array_alloc(kvs_device *device, size_t count, size_t item_bytes);
void kvs_array_free(void *array);

/* Ask the hook: KVS_OK, KVS_PENDING (copies only) or the status to fail with. One predictable branch without a hook. */
kvs_status kvs_hook_ask(kvs_device *device, int point);

#endif
