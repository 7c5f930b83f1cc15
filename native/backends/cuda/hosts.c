/* hosts.c: host history memory. */
#include "backends/cuda/hosts.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>

/* Long enough that copies at bus speed are rarely cut, short enough that the first touch of one (0.6 s a GiB) goes unnoticed. */
#define CHUNK_BYTES ((uint64_t)32 << 20)

struct kvs_cuda_host {
    uint8_t *base;
    uint64_t n_bytes;
    uint8_t is_pinned[]; /* by chunk */
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

void kvs_cuda_host_destroy(kvs_cuda_host *host, const kvs_cuda_driver *driver)
{
    for (uint64_t chunk = 0; chunk * CHUNK_BYTES < host->n_bytes; chunk++) {
        if (host->is_pinned[chunk]) {
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

static kvs_status refuse(kvs_device *device, const kvs_cuda_driver *driver, uint64_t n_bytes, cu_result result)
{
    const kvs_cuda_text said = kvs_cuda_error_text(&driver->api, "host_register", result);
    struct rlimit limit;
    char allowed[48] = "no limit";
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        (void)snprintf(allowed, sizeof allowed, "%llu bytes", (kvs_ull)limit.rlim_cur);
    }
    return kvs_fail(device, KVS_ENOMEM, "%llu more bytes of host history cannot be pinned (lock limit, ulimit -l: %s): %s",
                    (kvs_ull)n_bytes, allowed, said.text);
}

kvs_status kvs_cuda_host_pin(kvs_cuda_host *host, kvs_device *device, const kvs_cuda_driver *driver, uint64_t offset,
                             uint64_t n_bytes)
{
    for (uint64_t chunk = offset / CHUNK_BYTES; chunk * CHUNK_BYTES < offset + n_bytes; chunk++) {
        if (host->is_pinned[chunk]) {
            continue;
        }
        const uint64_t begin = chunk * CHUNK_BYTES;
        const uint64_t bytes = kvs_cuda_host_chunk_end(host, begin) - begin;
        const cu_result result = driver->api.host_register(host->base + begin, (size_t)bytes, CU_MEM_HOST_PORTABLE);
        if (result != CU_SUCCESS) {
            return refuse(device, driver, bytes, result);
        }
        host->is_pinned[chunk] = 1;
    }
    return KVS_OK;
}
