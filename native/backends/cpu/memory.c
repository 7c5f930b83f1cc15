/* memory.c: slabs of huge pages, each a list of used and free spans in the order of their addresses, first fit. */
#include "backends/cpu/memory.h"

#include "base/internal.h"
#include "base/sync.h"

#include <stdlib.h>
#include <sys/mman.h>

#define HUGE_PAGE_BYTES ((uint64_t)2 << 20)
#define SLAB_BYTES ((uint64_t)64 << 20)
#define SMALL_BYTES UINT64_C(4096) /* below, the system's allocator does as well */

/* The spans of a slab leave no gap; two free ones are never neighbours. */
typedef struct span {
    struct span *next;
    uint64_t begin;
    uint64_t bytes;
    bool is_used;
} span;

typedef struct slab {
    struct slab *next;
    void *map;
    uint64_t map_bytes;
    uint64_t begin; /* the first huge page in the map */
    uint64_t bytes;
    span *spans;
} slab;

struct kvs_memory {
    bool has_slabs;
    kvs_mutex lock;
    slab *slabs;
};

kvs_memory *kvs_memory_create(bool has_slabs)
{
    kvs_memory *memory = calloc(1, sizeof *memory);
    if (memory != NULL && !kvs_mutex_init(&memory->lock)) {
        free(memory);
        return NULL;
    }
    if (memory != NULL) {
        memory->has_slabs = has_slabs;
    }
    return memory;
}

static void free_slab(slab *old)
{
    for (span *each = old->spans; each != NULL;) {
        span *next = each->next;
        free(each);
        each = next;
    }
    (void)munmap(old->map, (size_t)old->map_bytes);
    free(old);
}

void kvs_memory_destroy(kvs_memory *memory)
{
    if (memory == NULL) {
        return;
    }
    for (slab *each = memory->slabs; each != NULL;) {
        slab *next = each->next;
        free_slab(each);
        each = next;
    }
    kvs_mutex_destroy(&memory->lock);
    free(memory);
}

/* Untouched pages take no memory, so a slab may be larger than what is asked for. */
static slab *make_slab(uint64_t bytes)
{
    slab *made = calloc(1, sizeof *made);
    span *all = calloc(1, sizeof *all);
    void *map = MAP_FAILED;
    if (made != NULL && all != NULL) {
        map = mmap(NULL, (size_t)(bytes + HUGE_PAGE_BYTES), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    if (map == MAP_FAILED) {
        free(made);
        free(all);
        return NULL;
    }
    const uint64_t begin = ((uint64_t)(uintptr_t)map + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    *all = (span){.begin = begin, .bytes = bytes};
    *made = (slab){.map = map, .map_bytes = bytes + HUGE_PAGE_BYTES, .begin = begin, .bytes = bytes, .spans = all};
#if defined(MADV_HUGEPAGE)
    (void)madvise((void *)(uintptr_t)begin, (size_t)bytes, MADV_HUGEPAGE);
#endif
    return made;
}

/* Cut `bytes` off the end of a span; NULL, and nothing has changed, without memory. */
static span *cut(span *whole, uint64_t bytes)
{
    span *rest = malloc(sizeof *rest);
    if (rest != NULL) {
        *rest = (span){.next = whole->next, .begin = whole->begin + whole->bytes - bytes, .bytes = bytes};
        whole->bytes -= bytes;
        whole->next = rest;
    }
    return rest;
}

/* A free span that holds so much at an aligned address, cut to size; NULL when there is none, or no memory. */
static span *take_span(slab *from, uint64_t bytes, uint64_t alignment)
{
    for (span *each = from->spans; each != NULL; each = each->next) {
        const uint64_t skipped = -each->begin & (alignment - 1);
        if (each->is_used || each->bytes < skipped || each->bytes - skipped < bytes) {
            continue;
        }
        span *taken = skipped == 0 ? each : cut(each, each->bytes - skipped);
        if (taken == NULL || (taken->bytes > bytes && cut(taken, taken->bytes - bytes) == NULL)) {
            return NULL;
        }
        taken->is_used = true;
        return taken;
    }
    return NULL;
}

static void absorb_next(span *into)
{
    span *next = into->next;
    if (next != NULL && !next->is_used && !into->is_used) {
        into->bytes += next->bytes;
        into->next = next->next;
        free(next);
    }
}

static span *find_span(kvs_memory *memory, uint64_t bytes, uint64_t alignment)
{
    span *found = NULL;
    for (slab *each = memory->slabs; each != NULL && found == NULL; each = each->next) {
        found = take_span(each, bytes, alignment);
    }
    if (found != NULL) {
        return found;
    }
    const uint64_t least = (bytes + alignment + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    slab *made = make_slab(least < SLAB_BYTES ? SLAB_BYTES : least);
    made = made == NULL && least < SLAB_BYTES ? make_slab(least) : made;
    if (made == NULL) {
        return NULL;
    }
    made->next = memory->slabs;
    memory->slabs = made;
    return take_span(made, bytes, alignment);
}

kvs_status kvs_memory_alloc(kvs_memory *memory, uint64_t bytes, uint64_t alignment, uint64_t *address)
{
    uint64_t rounded;
    if (!kvs_align_up(bytes, alignment, &rounded)) {
        return KVS_EOVERFLOW;
    }
    if (rounded > SIZE_MAX / 4) {
        return KVS_ENOMEM;
    }
    if (!memory->has_slabs || rounded < SMALL_BYTES) {
        void *block = NULL;
        if (posix_memalign(&block, (size_t)alignment, (size_t)rounded) != 0) {
            return KVS_ENOMEM;
        }
        *address = (uint64_t)(uintptr_t)block;
        return KVS_OK;
    }
    kvs_mutex_lock(&memory->lock);
    const span *found = find_span(memory, rounded, alignment);
    if (found != NULL) {
        *address = found->begin;
    }
    kvs_mutex_unlock(&memory->lock);
    return found == NULL ? KVS_ENOMEM : KVS_OK;
}

/* False when the address is in no slab. */
static bool free_in_slab(kvs_memory *memory, uint64_t address)
{
    slab **link = &memory->slabs;
    while (*link != NULL && address - (*link)->begin >= (*link)->bytes) {
        link = &(*link)->next;
    }
    slab *owner = *link;
    if (owner == NULL) {
        return false;
    }
    span *before = NULL;
    span *each = owner->spans;
    while (each->begin != address || !each->is_used) {
        before = each;
        each = each->next;
    }
    each->is_used = false;
    absorb_next(each);
    if (before != NULL) {
        absorb_next(before);
    }
    if (!owner->spans->is_used && owner->spans->next == NULL) {
        *link = owner->next;
        free_slab(owner);
    }
    return true;
}

void kvs_memory_free(kvs_memory *memory, uint64_t address)
{
    kvs_mutex_lock(&memory->lock);
    const bool is_in_slab = free_in_slab(memory, address);
    kvs_mutex_unlock(&memory->lock);
    if (!is_in_slab) {
        free((void *)(uintptr_t)address);
    }
}
