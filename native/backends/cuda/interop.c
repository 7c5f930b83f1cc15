/* interop.c: memory and streams of a card that are shared with other libraries: all of them use its primary context. */
#include "backends/cuda/interop.h"

#include "backends/cuda/cuda.h"
#include "backends/cuda/hosts.h"
#include "backends/cuda/waits.h"

static struct kvs_cuda *enter(void *self)
{
    struct kvs_cuda *cuda = self;
    kvs_cuda_enter(&cuda->driver);
    return cuda;
}

static kvs_status leave(const struct kvs_cuda *cuda, kvs_status status)
{
    kvs_cuda_leave(&cuda->driver);
    return status;
}

/* The first and the last byte are asked about: an allocation is one piece. */
kvs_status kvs_cuda_adopt(void *self, uint64_t address, uint64_t bytes)
{
    struct kvs_cuda *cuda = enter(self);
    const cu_address ends[] = {address, address + bytes - 1};
    for (int i = 0; i < 2; i++) {
        int type = 0, ordinal = -1;
        const kvs_cuda_api *api = &cuda->driver.api;
        if (api->pointer_attribute(&type, CU_POINTER_MEMORY_TYPE, ends[i]) != CU_SUCCESS || (type & 3) != CU_MEMORY_DEVICE ||
            api->pointer_attribute(&ordinal, CU_POINTER_DEVICE_ORDINAL, ends[i]) != CU_SUCCESS ||
            ordinal != cuda->driver.device) {
            return leave(cuda, kvs_fail(cuda->device, KVS_EUNSUPPORTED, "%llu bytes at %#llx are no memory of card %d",
                                        (kvs_ull)bytes, (kvs_ull)address, cuda->driver.device));
        }
    }
    return leave(cuda, KVS_OK);
}

kvs_status kvs_cuda_host_admit(void *self, uint64_t bytes)
{
    struct kvs_cuda *cuda = enter(self);
    const kvs_status status = kvs_cuda_waits_admit(&cuda->driver);
    return leave(cuda, status != KVS_OK ? status : kvs_cuda_hosts_admit(cuda->device, &cuda->driver, bytes));
}

uint64_t kvs_cuda_stream(void *self)
{
    return (uint64_t)(uintptr_t)((const struct kvs_cuda *)self)->compute;
}

kvs_status kvs_cuda_lead_stream(void *self, uint64_t stream)
{
    struct kvs_cuda *cuda = enter(self);
    cu_event event = NULL;
    kvs_status status = kvs_cuda_waits_admit(&cuda->driver);
    if (status == KVS_OK) {
        status = KVS_CUDA_CALL(cuda->device, &cuda->driver, event_create, &event, CU_EVENT_DISABLE_TIMING);
    }
    if (status != KVS_OK) {
        return leave(cuda, status);
    }
    status = KVS_CUDA_CALL(cuda->device, &cuda->driver, event_record, event, cuda->compute);
    if (status == KVS_OK) {
        status = KVS_CUDA_CALL(cuda->device, &cuda->driver, stream_after, (cu_stream)(uintptr_t)stream, event, 0);
    }
    /* The driver keeps an event until whoever waits for it has been served. */
    (void)cuda->driver.api.event_destroy(event);
    return leave(cuda, status);
}

int32_t kvs_cuda_place(void *self)
{
    return ((const struct kvs_cuda *)self)->driver.device;
}
