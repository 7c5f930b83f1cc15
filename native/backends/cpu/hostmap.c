#include "backends/cpu/hostmap.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Rights change by chunks: a multiple of every page size in use, large enough that a history of gigabytes costs few
 * system calls, small enough that a strict map opens little beside what it copies. */
#define CHUNK_BYTES ((uint64_t)64 * 1024)

struct kvs_hostmap {
    uint8_t *base;
    uint64_t n_bytes;
    uint64_t mapped_bytes;
    bool is_strict;
    uint8_t is_open[]; /* by chunk */
};

kvs_hostmap *kvs_hostmap_create(uint64_t n_bytes, bool is_strict)
{
    if (n_bytes == 0 || n_bytes > UINT64_MAX / 2) {
        return NULL;
    }
    const uint64_t n_chunks = (n_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    const uint64_t mapped_bytes = n_chunks * CHUNK_BYTES;
    if (mapped_bytes > SIZE_MAX / 2) {
        return NULL;
    }
    kvs_hostmap *map = calloc(1, sizeof *map + (size_t)n_chunks);
    if (map == NULL) {
        return NULL;
    }
    void *base = mmap(NULL, (size_t)mapped_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        free(map);
        return NULL;
    }
    map->base = base;
    map->n_bytes = n_bytes;
    map->mapped_bytes = mapped_bytes;
    map->is_strict = is_strict;
    return map;
}

void kvs_hostmap_destroy(kvs_hostmap *map)
{
    if (map != NULL) {
        (void)munmap(map->base, (size_t)map->mapped_bytes);
        free(map);
    }
}

uint64_t kvs_hostmap_base(const kvs_hostmap *map)
{
    return (uint64_t)(uintptr_t)map->base;
}

uint64_t kvs_hostmap_bytes(const kvs_hostmap *map)
{
    return map->n_bytes;
}

static bool set_rights(kvs_hostmap *map, uint64_t first, uint64_t end, int rights)
{
    return mprotect(map->base + first * CHUNK_BYTES, (size_t)((end - first) * CHUNK_BYTES), rights) == 0;
}

bool kvs_hostmap_open(kvs_hostmap *map, uint64_t offset, uint64_t n_bytes)
{
    const uint64_t first = offset / CHUNK_BYTES;
    const uint64_t end = (offset + n_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    if (memchr(map->is_open + first, 0, (size_t)(end - first)) == NULL) {
        return true;
    }
    if (!set_rights(map, first, end, PROT_READ | PROT_WRITE)) {
        return false;
    }
    memset(map->is_open + first, 1, (size_t)(end - first));
    return true;
}

void kvs_hostmap_close(kvs_hostmap *map, uint64_t offset, uint64_t n_bytes)
{
    if (!map->is_strict) {
        return;
    }
    const uint64_t first = offset / CHUNK_BYTES;
    const uint64_t end = (offset + n_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    /* The system may refuse to split the mapping: then the range stays open, and the flags say so. */
    if (set_rights(map, first, end, PROT_NONE)) {
        memset(map->is_open + first, 0, (size_t)(end - first));
    }
}
