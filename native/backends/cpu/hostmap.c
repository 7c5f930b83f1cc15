#include "backends/cpu/hostmap.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Rights change by chunks: a multiple of every page size in use. A strict map opens little beside what it copies; another
 * one opens whole huge pages, so that copies do not spend their time on address translation. */
#define SMALL_CHUNK_BYTES ((uint64_t)64 * 1024)
#define HUGE_CHUNK_BYTES ((uint64_t)2 << 20)

struct kvs_hostmap {
    void *map;
    uint64_t map_bytes;
    uint8_t *base; /* the first whole chunk in the map */
    uint64_t chunk_bytes;
    uint64_t n_bytes;
    bool is_strict;
    uint8_t is_open[]; /* by chunk */
};

kvs_hostmap *kvs_hostmap_create(uint64_t n_bytes, bool is_strict)
{
    if (n_bytes == 0 || n_bytes > UINT64_MAX / 2) {
        return NULL;
    }
    const uint64_t chunk_bytes = is_strict || n_bytes < HUGE_CHUNK_BYTES ? SMALL_CHUNK_BYTES : HUGE_CHUNK_BYTES;
    const uint64_t n_chunks = (n_bytes + chunk_bytes - 1) / chunk_bytes;
    const uint64_t map_bytes = (n_chunks + 1) * chunk_bytes;
    if (map_bytes > SIZE_MAX / 2) {
        return NULL;
    }
    kvs_hostmap *made = calloc(1, sizeof *made + (size_t)n_chunks);
    if (made == NULL) {
        return NULL;
    }
    void *map = mmap(NULL, (size_t)map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) {
        free(made);
        return NULL;
    }
    made->map = map;
    made->map_bytes = map_bytes;
    made->base = (uint8_t *)map + (-(uint64_t)(uintptr_t)map & (chunk_bytes - 1));
    made->chunk_bytes = chunk_bytes;
    made->n_bytes = n_bytes;
    made->is_strict = is_strict;
#if defined(MADV_HUGEPAGE)
    if (chunk_bytes == HUGE_CHUNK_BYTES) {
        (void)madvise(made->base, (size_t)(n_chunks * chunk_bytes), MADV_HUGEPAGE);
    }
#endif
    return made;
}

void kvs_hostmap_destroy(kvs_hostmap *map)
{
    if (map != NULL) {
        (void)munmap(map->map, (size_t)map->map_bytes);
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
    return mprotect(map->base + first * map->chunk_bytes, (size_t)((end - first) * map->chunk_bytes), rights) == 0;
}

bool kvs_hostmap_open(kvs_hostmap *map, uint64_t offset, uint64_t n_bytes)
{
    const uint64_t first = offset / map->chunk_bytes;
    const uint64_t end = (offset + n_bytes + map->chunk_bytes - 1) / map->chunk_bytes;
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
    const uint64_t first = offset / map->chunk_bytes;
    const uint64_t end = (offset + n_bytes + map->chunk_bytes - 1) / map->chunk_bytes;
    /* The system may refuse to split the mapping: then the range stays open, and the flags say so. */
    if (set_rights(map, first, end, PROT_NONE)) {
        memset(map->is_open + first, 0, (size_t)(end - first));
    }
}
