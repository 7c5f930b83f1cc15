/* hosts.c: host history memory. */
#include "backends/cuda/hosts.h"

#include "backends/cuda/waits.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

/* Long enough that copies at bus speed are rarely cut, short enough that the first touch of one (0.6 s a GiB) goes unnoticed. */
#define CHUNK_BYTES ((uint64_t)32 << 20)
#define PAGE_BYTES ((uint64_t)4 << 10)
/* From here on a control group's number means that it has no limit. */
#define NO_GROUP_LIMIT (UINT64_C(1) << 60)
#define TRY_BYTES ((uint64_t)64 << 20)

enum { NOT_PINNED = 0, PINNED = 1, MAPPED = 2 };

struct kvs_cuda_host {
    uint8_t *base;
    uint64_t n_bytes;
    _Atomic uint8_t pinned[]; /* by chunk; a copy thread raises it, operations look */
};

kvs_status kvs_cuda_host_create(kvs_device *device, uint64_t n_bytes, kvs_cuda_host **host)
{
    const uint64_t n_chunks = kvs_div_up(n_bytes, CHUNK_BYTES);
    if (n_bytes > SIZE_MAX / 2) {
        return kvs_fail(device, KVS_ENOMEM, "need %llu bytes of address space (host history)", (kvs_ull)n_bytes);
    }
    kvs_cuda_host *made = calloc(1, sizeof *made + (size_t)n_chunks);
    void *map = MAP_FAILED;
    if (made != NULL) {
        map = mmap(NULL, (size_t)n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    if (map == MAP_FAILED) {
        free(made);
        return kvs_fail(device, KVS_ENOMEM, "need %llu bytes of address space (host history)", (kvs_ull)n_bytes);
    }
#if defined(MADV_HUGEPAGE)
    (void)madvise(map, (size_t)n_bytes, MADV_HUGEPAGE);
#endif
    made->base = map;
    made->n_bytes = n_bytes;
    *host = made;
    return KVS_OK;
}

/* A card that is at work may still copy there, and a thread that is stuck in the driver goes on with `host` itself. */
void kvs_cuda_host_destroy(kvs_cuda_host *host, const kvs_cuda_driver *driver)
{
    if (!kvs_cuda_waits_may_free(driver, host->n_bytes)) {
        return;
    }
    for (uint64_t chunk = 0; chunk * CHUNK_BYTES < host->n_bytes; chunk++) {
        if (atomic_load(&host->pinned[chunk]) != NOT_PINNED) {
            (void)driver->api.host_unregister(host->base + chunk * CHUNK_BYTES);
        }
    }
    (void)munmap(host->base, (size_t)host->n_bytes);
    free(host);
}

uint64_t kvs_cuda_host_base(const kvs_cuda_host *host)
{
    return (uint64_t)(uintptr_t)host->base;
}

uint64_t kvs_cuda_host_bytes(const kvs_cuda_host *host)
{
    return host->n_bytes;
}

uint64_t kvs_cuda_host_chunk_end(const kvs_cuda_host *host, uint64_t offset)
{
    const uint64_t end = (offset / CHUNK_BYTES + 1) * CHUNK_BYTES;
    return end < host->n_bytes ? end : host->n_bytes;
}

/* Bytes that this process may lock, UINT64_MAX without a limit. */
static uint64_t lock_limit(void)
{
    struct rlimit limit;
    return getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY ? (uint64_t)limit.rlim_cur : UINT64_MAX;
}

/* Whether a small file of the system's has a text in it; its first line is left in `line`. */
static bool is_in_file(const char *path, const char *text, char *line, size_t room)
{
    FILE *file = fopen(path, "re");
    line[0] = '\0';
    if (file == NULL) {
        return false;
    }
    if (fgets(line, (int)room, file) == NULL) {
        line[0] = '\0';
    }
    (void)fclose(file);
    line[strcspn(line, "\n")] = '\0';
    return strstr(line, text) != NULL;
}

typedef struct limits {
    char text[256];
} limits;

/* What may stand behind a refusal: the lock limit, a control group, Windows' subsystem, which pins half of its memory at most. */
static limits find_limits(void)
{
    limits found;
    char line[128];
    const uint64_t lock = lock_limit();
    int length = lock == UINT64_MAX ? snprintf(found.text, sizeof found.text, "ulimit -l has no limit")
                                    : snprintf(found.text, sizeof found.text, "ulimit -l is %llu bytes", (kvs_ull)lock);
    static const char *const groups[] = {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"};
    for (int i = 0; i < 2 && length > 0 && (size_t)length < sizeof found.text; i++) {
        if (!is_in_file(groups[i], "max", line, sizeof line) && line[0] != '\0' && strtoull(line, NULL, 10) < NO_GROUP_LIMIT) {
            length += snprintf(found.text + length, sizeof found.text - (size_t)length,
                               "; the control group of this process or container may have %s bytes", line);
            break;
        }
    }
    if (is_in_file("/proc/sys/kernel/osrelease", "icrosoft", line, sizeof line) && (size_t)length < sizeof found.text) {
        (void)snprintf(found.text + length, sizeof found.text - (size_t)length,
                       "; WSL pins only part of its memory: raise `memory` in .wslconfig");
    }
    return found;
}

/* The driver's own interface keeps no error behind a refused registration: the next call starts afresh. */
static kvs_status refuse(kvs_device *device, const kvs_cuda_driver *driver, uint64_t n_bytes, cu_result result)
{
    const kvs_cuda_text said = kvs_cuda_error_text(&driver->api, "host_register", result);
    const limits found = find_limits();
    return kvs_fail(device, KVS_ENOMEM, "%llu more bytes of host history cannot be pinned (%s): %s", (kvs_ull)n_bytes,
                    found.text, said.text);
}

/* Whether drivers count pinned memory against the lock limit differs, so it is tried: a little more than the limit. A limit that is
 * too high to be tried in no time is left to the chunk that meets it. */
kvs_status kvs_cuda_hosts_admit(kvs_device *device, const kvs_cuda_driver *driver, uint64_t n_bytes)
{
    const uint64_t lock = lock_limit();
    const uint64_t tried = lock >= n_bytes || lock > TRY_BYTES ? PAGE_BYTES : kvs_div_up(lock, PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES;
    void *map = mmap(NULL, (size_t)tried, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) {
        return kvs_fail(device, KVS_ENOMEM, "no address space for %llu bytes", (kvs_ull)tried);
    }
    const cu_result result = driver->api.host_register(map, (size_t)tried, CU_MEM_HOST_PORTABLE);
    if (result == CU_SUCCESS) {
        (void)driver->api.host_unregister(map);
    }
    (void)munmap(map, (size_t)tried);
    if (result == CU_SUCCESS) {
        return KVS_OK;
    }
    const kvs_cuda_text said = kvs_cuda_error_text(&driver->api, "host_register", result);
    const limits found = find_limits();
    return kvs_fail(device, KVS_ENOMEM,
                    "host history needs %llu bytes of pinned memory, and already %llu cannot be pinned (%s): %s",
                    (kvs_ull)n_bytes, (kvs_ull)tried, found.text, said.text);
}

/* The attribute says so of all registered memory; a chunk of which the driver says otherwise is left to copies. */
static bool is_mapped(const kvs_cuda_driver *driver, uint8_t *memory)
{
    cu_address address = 0;
    return driver->api.host_address(&address, memory, 0) == CU_SUCCESS && address == (uint64_t)(uintptr_t)memory;
}

kvs_status kvs_cuda_host_pin(kvs_cuda_host *host, kvs_device *device, const kvs_cuda_driver *driver, uint64_t offset,
                             uint64_t n_bytes)
{
    for (uint64_t chunk = offset / CHUNK_BYTES; chunk * CHUNK_BYTES < offset + n_bytes; chunk++) {
        if (atomic_load(&host->pinned[chunk]) != NOT_PINNED) {
            continue;
        }
        const uint64_t begin = chunk * CHUNK_BYTES;
        const uint64_t bytes = kvs_cuda_host_chunk_end(host, begin) - begin;
        const unsigned int flags = CU_MEM_HOST_PORTABLE | (driver->maps_history ? CU_MEM_HOST_MAPPED : 0);
        const cu_result result = driver->api.host_register(host->base + begin, (size_t)bytes, flags);
        if (result != CU_SUCCESS) {
            return refuse(device, driver, bytes, result);
        }
        atomic_store(&host->pinned[chunk], driver->maps_history && is_mapped(driver, host->base + begin) ? MAPPED : PINNED);
    }
    return KVS_OK;
}

uint64_t kvs_cuda_host_mapped(const kvs_cuda_host *host, uint64_t offset, uint64_t n_bytes)
{
    if (n_bytes == 0 || n_bytes > host->n_bytes || offset > host->n_bytes - n_bytes) {
        return 0;
    }
    for (uint64_t chunk = offset / CHUNK_BYTES; chunk * CHUNK_BYTES < offset + n_bytes; chunk++) {
        if (atomic_load(&host->pinned[chunk]) != MAPPED) {
            return 0;
        }
    }
    return kvs_cuda_host_base(host) + offset;
}
