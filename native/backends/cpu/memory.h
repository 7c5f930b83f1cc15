/* memory.h: device memory of the CPU backend: small and middle blocks lie together in slabs of huge pages.
 *
 * A step reads every weight once. In small pages most of a matrix of a megabyte is a miss of the address translation, in a
 * virtual machine one of two levels.
 */
#ifndef KVS_NATIVE_CPU_MEMORY_H
#define KVS_NATIVE_CPU_MEMORY_H

#include "kvstream/base.h"

#include <stdbool.h>
#include <stdint.h>

/* The address sanitizer sees the ends of blocks only where each is an allocation of its own. */
#if defined(__SANITIZE_ADDRESS__)
#define KVS_MEMORY_HAS_SLABS false
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVS_MEMORY_HAS_SLABS false
#endif
#endif
#if !defined(KVS_MEMORY_HAS_SLABS)
#define KVS_MEMORY_HAS_SLABS true
#endif

typedef struct kvs_memory kvs_memory;

/* Without slabs every block is the system's. NULL without memory. own: caller, kvs_memory_destroy. */
kvs_memory *kvs_memory_create(bool has_slabs);

/* All blocks have been freed. NULL is ignored. */
void kvs_memory_destroy(kvs_memory *memory);

/* At least `bytes`, from 1, at a multiple of `alignment`, a power of two. thread: any. errors: ENOMEM; EOVERFLOW */
kvs_status kvs_memory_alloc(kvs_memory *memory, uint64_t bytes, uint64_t alignment, uint64_t *address);

/* A block that kvs_memory_alloc has given. thread: any. */
void kvs_memory_free(kvs_memory *memory, uint64_t address);

#endif
