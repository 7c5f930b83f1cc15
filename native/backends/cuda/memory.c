/* memory.c: allocations, and two pinned buffers that take turns. */
#include "backends/cuda/memory.h"

#include "backends/cuda/waits.h"
#include "base/sync.h"

#include <stdlib.h>
#include <string.h>

/* What the driver aligns every allocation to. */
#define PLAIN_ALIGNMENT 256u
#define STAGE_BYTES ((uint64_t)8 << 20)

enum { N_STAGES = 2 };

struct stage {
    void *memory;
    cu_event event; /* behind the last copy from or to it */
};

/* An allocation whose address is not the driver's. */
struct shifted {
    struct shifted *next;
    uint64_t address;
    uint64_t base;
};

struct kvs_cuda_memory {
    kvs_device *device;
    const kvs_cuda_driver *driver;
    cu_stream stream;
    kvs_mutex lock; /* of the list */
    kvs_mutex stage_lock;
    struct shifted *shifted;
    struct stage stages[N_STAGES];
};

static kvs_status create_stage(kvs_cuda_memory *memory, struct stage *stage)
{
    const kvs_status status =
        KVS_CUDA_CALL(memory->device, memory->driver, host_alloc, &stage->memory, STAGE_BYTES, CU_MEM_HOST_PORTABLE);
    return status != KVS_OK
               ? status
               : KVS_CUDA_CALL(memory->device, memory->driver, event_create, &stage->event, CU_EVENT_DISABLE_TIMING);
}

kvs_status kvs_cuda_memory_create(kvs_device *device, const kvs_cuda_driver *driver, cu_stream stream,
                                  kvs_cuda_memory **memory)
{
    kvs_cuda_memory *made = calloc(1, sizeof *made);
    if (made == NULL || !kvs_mutex_init(&made->lock)) {
        free(made);
        return kvs_fail(device, KVS_ENOMEM, "no memory for the account of device memory");
    }
    if (!kvs_mutex_init(&made->stage_lock)) {
        kvs_mutex_destroy(&made->lock);
        free(made);
        return kvs_fail(device, KVS_ENOMEM, "no lock for the account of device memory");
    }
    made->device = device;
    made->driver = driver;
    made->stream = stream;
    kvs_status status = KVS_OK;
    for (int i = 0; status == KVS_OK && i < N_STAGES; i++) {
        status = create_stage(made, &made->stages[i]);
    }
    if (status != KVS_OK) {
        kvs_cuda_memory_destroy(made);
        return status;
    }
    *memory = made;
    return KVS_OK;
}

void kvs_cuda_memory_destroy(kvs_cuda_memory *memory)
{
    if (memory == NULL) {
        return;
    }
    for (int i = 0; i < N_STAGES; i++) {
        if (memory->stages[i].event != NULL) {
            (void)memory->driver->api.event_destroy(memory->stages[i].event);
        }
        if (memory->stages[i].memory != NULL && kvs_cuda_waits_may_free(memory->driver, STAGE_BYTES)) {
            (void)memory->driver->api.host_free(memory->stages[i].memory);
        }
    }
    while (memory->shifted != NULL) {
        struct shifted *next = memory->shifted->next;
        free(memory->shifted);
        memory->shifted = next;
    }
    kvs_mutex_destroy(&memory->stage_lock);
    kvs_mutex_destroy(&memory->lock);
    free(memory);
}

/* ---- allocations ---- */

static kvs_status refuse(kvs_cuda_memory *memory, uint64_t bytes, cu_result result)
{
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    const kvs_cuda_text said = kvs_cuda_error_text(&memory->driver->api, "memory_alloc", result);
    (void)memory->driver->api.memory_info(&free_bytes, &total_bytes);
    return kvs_fail(memory->device, result == CU_ERROR_OUT_OF_MEMORY ? KVS_ENOMEM : KVS_EIO,
                    "need %llu bytes of device memory, %llu of %llu are free: %s", (kvs_ull)bytes, (kvs_ull)free_bytes,
                    (kvs_ull)total_bytes, said.text);
}

static void note_shifted(kvs_cuda_memory *memory, struct shifted *item, uint64_t base, uint64_t address)
{
    item->base = base;
    item->address = address;
    kvs_mutex_lock(&memory->lock);
    item->next = memory->shifted;
    memory->shifted = item;
    kvs_mutex_unlock(&memory->lock);
}

kvs_status kvs_cuda_memory_alloc(kvs_cuda_memory *memory, uint64_t bytes, uint64_t alignment, uint64_t *address)
{
    const kvs_status admitted = kvs_cuda_waits_admit(memory->driver);
    if (admitted != KVS_OK) {
        return admitted;
    }
    const bool is_plain = alignment <= PLAIN_ALIGNMENT;
    uint64_t taken = bytes;
    struct shifted *item = is_plain ? NULL : malloc(sizeof *item);
    if (!is_plain && (item == NULL || !kvs_add_u64(bytes, alignment, &taken))) {
        free(item);
        return kvs_fail(memory->device, item == NULL ? KVS_ENOMEM : KVS_EOVERFLOW, "need %llu bytes of device memory aligned to %llu",
                        (kvs_ull)bytes, (kvs_ull)alignment);
    }
    cu_address base = 0;
    const cu_result result = memory->driver->api.memory_alloc(&base, (size_t)taken);
    if (result != CU_SUCCESS) {
        free(item);
        return refuse(memory, taken, result);
    }
    *address = base;
    if (!is_plain) {
        (void)kvs_align_up(base, alignment, address);
        note_shifted(memory, item, base, *address);
    }
    return KVS_OK;
}

/* The driver's address of one that was given out. */
static uint64_t take_base(kvs_cuda_memory *memory, uint64_t address)
{
    uint64_t base = address;
    kvs_mutex_lock(&memory->lock);
    for (struct shifted **link = &memory->shifted; *link != NULL; link = &(*link)->next) {
        struct shifted *const item = *link;
        if (item->address == address) {
            base = item->base;
            *link = item->next;
            free(item);
            break;
        }
    }
    kvs_mutex_unlock(&memory->lock);
    return base;
}

void kvs_cuda_memory_free(kvs_cuda_memory *memory, uint64_t address, uint64_t bytes)
{
    const uint64_t base = take_base(memory, address);
    if (kvs_cuda_waits_may_free(memory->driver, bytes)) {
        (void)memory->driver->api.memory_free(base);
    }
}

/* ---- bytes ---- */

static kvs_status upload_part(kvs_cuda_memory *memory, struct stage *stage, uint64_t address, const void *from, uint64_t bytes)
{
    kvs_status status = kvs_cuda_wait_event(memory->driver, stage->event, "a pinned buffer, to send %llu bytes to %#llx",
                                            (kvs_ull)bytes, (kvs_ull)address);
    if (status != KVS_OK) {
        return status;
    }
    memcpy(stage->memory, from, (size_t)bytes);
    status = KVS_CUDA_CALL(memory->device, memory->driver, copy, address, (uint64_t)(uintptr_t)stage->memory,
                           (size_t)bytes, memory->stream);
    return status != KVS_OK
               ? status
               : KVS_CUDA_CALL(memory->device, memory->driver, event_record, stage->event, memory->stream);
}

kvs_status kvs_cuda_memory_upload(kvs_cuda_memory *memory, uint64_t address, const void *from, uint64_t bytes)
{
    kvs_status status = KVS_OK;
    uint32_t turn = 0;
    kvs_mutex_lock(&memory->stage_lock);
    for (uint64_t at = 0; status == KVS_OK && at < bytes; at += STAGE_BYTES) {
        const uint64_t left = bytes - at;
        status = upload_part(memory, &memory->stages[turn], address + at, (const uint8_t *)from + at,
                             left < STAGE_BYTES ? left : STAGE_BYTES);
        turn = (turn + 1) % N_STAGES;
    }
    kvs_mutex_unlock(&memory->stage_lock);
    return status;
}

static kvs_status begin_download(kvs_cuda_memory *memory, struct stage *stage, uint64_t address, uint64_t bytes)
{
    const kvs_status status = KVS_CUDA_CALL(memory->device, memory->driver, copy, (uint64_t)(uintptr_t)stage->memory,
                                            address, (size_t)bytes, memory->stream);
    return status != KVS_OK
               ? status
               : KVS_CUDA_CALL(memory->device, memory->driver, event_record, stage->event, memory->stream);
}

/* The next part is on its way while one is copied out. */
kvs_status kvs_cuda_memory_download(kvs_cuda_memory *memory, void *to, uint64_t address, uint64_t bytes)
{
    const uint64_t n_parts = kvs_div_up(bytes, STAGE_BYTES);
    kvs_status status = KVS_OK;
    kvs_mutex_lock(&memory->stage_lock);
    for (uint64_t part = 0; status == KVS_OK && part <= n_parts; part++) {
        const uint64_t begin = part * STAGE_BYTES;
        if (part < n_parts) {
            const uint64_t left = bytes - begin;
            status = begin_download(memory, &memory->stages[part % N_STAGES], address + begin,
                                    left < STAGE_BYTES ? left : STAGE_BYTES);
        }
        if (status == KVS_OK && part > 0) {
            const struct stage *stage = &memory->stages[(part - 1) % N_STAGES];
            const uint64_t left = bytes - (begin - STAGE_BYTES);
            status = kvs_cuda_wait_event(memory->driver, stage->event, "%llu of %llu bytes from %#llx",
                                         (kvs_ull)(left < STAGE_BYTES ? left : STAGE_BYTES), (kvs_ull)bytes, (kvs_ull)address);
            if (status == KVS_OK) {
                memcpy((uint8_t *)to + begin - STAGE_BYTES, stage->memory, (size_t)(left < STAGE_BYTES ? left : STAGE_BYTES));
            }
        }
    }
    kvs_mutex_unlock(&memory->stage_lock);
    return status;
}
