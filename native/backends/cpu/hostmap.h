/* hostmap.h: one reservation of host history: address space without access rights, opened for the copy engine alone.
 *
 * The only place that knows how the operating system maps memory. Not thread-safe: one thread opens and closes.
 */
#ifndef KVS_NATIVE_CPU_HOSTMAP_H
#define KVS_NATIVE_CPU_HOSTMAP_H

#include <stdbool.h>
#include <stdint.h>

typedef struct kvs_hostmap kvs_hostmap;

/* NULL when the address space cannot be had. Strict maps take access away again when a range is closed. */
kvs_hostmap *kvs_hostmap_create(uint64_t n_bytes, bool is_strict);
void kvs_hostmap_destroy(kvs_hostmap *map);

uint64_t kvs_hostmap_base(const kvs_hostmap *map);
uint64_t kvs_hostmap_bytes(const kvs_hostmap *map);

/* Make a range accessible. False when the system refuses the memory. */
bool kvs_hostmap_open(kvs_hostmap *map, uint64_t offset, uint64_t n_bytes);
void kvs_hostmap_close(kvs_hostmap *map, uint64_t offset, uint64_t n_bytes);

#endif
