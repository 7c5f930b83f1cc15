/* backend.c: the CPU as a device: a memory range of its own for the arena, a copy engine, compute threads. */
#if defined(__linux__)
#define _GNU_SOURCE /* sched_getaffinity */
#endif
#include "backends/cpu/backend.h"

#include "backends/cpu/attend.h"
#include "backends/cpu/copy.h"
#include "backends/cpu/delta.h"
#include "backends/cpu/encode.h"
#include "backends/cpu/memory.h"
#include "backends/cpu/ops.h"
#include "backends/cpu/panel.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_THREADS 256u
/* Packing splits a weight over tasks of this many panels: large enough to amortise a claim, small enough to balance. */
#define PACK_PANELS 8u

struct cpu {
    kvs_cpu_compute compute;
    kvs_copy_engine *copies;
    kvs_memory *memory;
};

static kvs_status device_alloc(void *self, uint64_t bytes, uint64_t alignment, uint64_t *address)
{
    return kvs_memory_alloc(((struct cpu *)self)->memory, bytes, alignment, address);
}

static void device_free(void *self, uint64_t address, uint64_t bytes)
{
    (void)bytes;
    kvs_memory_free(((struct cpu *)self)->memory, address);
}

static void device_fill_nan(void *self, uint64_t address, uint64_t bytes)
{
    (void)self;
    memset((void *)(uintptr_t)address, 0xff, (size_t)bytes);
}

static kvs_status device_zero(void *self, uint64_t address, uint64_t bytes)
{
    (void)self;
    memset((void *)(uintptr_t)address, 0, (size_t)bytes);
    return KVS_OK;
}

static kvs_status device_move(void *self, uint64_t from, uint64_t to, uint64_t bytes)
{
    (void)self;
    memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, (size_t)bytes);
    return KVS_OK;
}

static kvs_status device_read(void *self, uint64_t address, uint64_t bytes, void *to)
{
    (void)self;
    memcpy(to, (const void *)(uintptr_t)address, (size_t)bytes);
    return KVS_OK;
}

static kvs_status device_write(void *self, uint64_t address, uint64_t bytes, const void *from)
{
    (void)self;
    memcpy((void *)(uintptr_t)address, from, (size_t)bytes);
    return KVS_OK;
}

static kvs_status host_alloc(void *self, uint64_t bytes, uint64_t *host_base)
{
    return kvs_copy_engine_host_alloc(((struct cpu *)self)->copies, bytes, host_base);
}

static void host_free(void *self, uint64_t host_base, uint64_t bytes)
{
    kvs_copy_engine_host_free(((struct cpu *)self)->copies, host_base, bytes);
}

static kvs_status copy_submit_many(void *self, const kvs_copy *copies, uint32_t n_copies)
{
    return kvs_copy_engine_submit_many(((struct cpu *)self)->copies, copies, n_copies);
}

static kvs_status wait_counter(void *self, const _Atomic uint64_t *counter, uint64_t value, const _Atomic int *failed)
{
    return kvs_copy_engine_wait_counter(((struct cpu *)self)->copies, counter, value, failed);
}

static void gate_advanced(void *self, const _Atomic uint64_t *gate, uint64_t value)
{
    (void)gate, (void)value;
    kvs_copy_engine_gate_advanced(((struct cpu *)self)->copies);
}

static kvs_status copy_drain(void *self)
{
    return kvs_copy_engine_drain(((struct cpu *)self)->copies);
}

static uint32_t copy_run(void *self, uint32_t limit)
{
    return kvs_copy_engine_run(((struct cpu *)self)->copies, limit);
}

static void copy_cancel(void *self, const _Atomic uint64_t *done)
{
    kvs_copy_engine_cancel(((struct cpu *)self)->copies, done);
}

static kvs_status weight_bytes(void *self, int type, uint64_t k, uint64_t n, uint64_t *bytes)
{
    const struct cpu *cpu = self;
    kvs_status status = kvs_panel_bytes(type, k, n, NULL, bytes);
    return status == KVS_OK ? KVS_OK
                            : kvs_fail(cpu->compute.device, status, "no panels for a %s weight of %llu x %llu",
                                       kvs_type_name(type), (kvs_ull)n, (kvs_ull)k);
}

struct pack_job {
    int type;
    uint64_t k;
    uint64_t n;
    const void *rows;
    void *panels;
    _Atomic int status;
};

static void pack_task(void *argument, uint32_t index, uint32_t worker)
{
    (void)worker;
    struct pack_job *job = argument;
    uint64_t first = (uint64_t)index * PACK_PANELS;
    uint64_t left = kvs_panel_count(job->n) - first;
    kvs_status status = kvs_panel_pack(job->type, job->k, job->n, job->rows, job->panels, first,
                                       left < PACK_PANELS ? left : PACK_PANELS);
    if (status != KVS_OK) {
        atomic_store(&job->status, status);
    }
}

static kvs_status weight_pack(void *self, int type, uint64_t k, uint64_t n, const void *rows, uint64_t address)
{
    const struct cpu *cpu = self;
    struct pack_job job = {.type = type, .k = k, .n = n, .rows = rows, .panels = (void *)(uintptr_t)address};
    kvs_threads_run(cpu->compute.threads, (uint32_t)kvs_div_up(kvs_panel_count(n), PACK_PANELS), pack_task, &job);
    return (kvs_status)atomic_load(&job.status);
}

static kvs_status op_scratch_bytes(void *self, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes)
{
    return kvs_cpu_op_scratch_bytes(&((struct cpu *)self)->compute, op, max_rows, bytes);
}

static kvs_status run_op(void *self, const kvs_bound_op *op, const struct kvs_step *step)
{
    if (op->code == KVS_OP_KV_WRITE) {
        kvs_copy_engine_before_pages(((struct cpu *)self)->copies);
    }
    return kvs_cpu_run_op(&((struct cpu *)self)->compute, op, step);
}

static kvs_status delta_fold(void *self, const kvs_delta_view *views, uint32_t layer, void *scratch)
{
    const kvs_cpu_compute *compute = &((struct cpu *)self)->compute;
    const kvs_delta_job job = {.view = &views[layer], .mode = KVS_DELTA_LOGGED, .scratch = scratch};
    kvs_delta_run(compute->threads, compute->isa, &job);
    return KVS_OK;
}

static kvs_status attend_begin(void *self, const kvs_bound_op *op, const struct kvs_step *step)
{
    (void)self;
    kvs_cpu_attend_begin(op, step);
    return KVS_OK;
}

static kvs_status attend_wave(void *self, const kvs_bound_op *op, const struct kvs_step *step, uint64_t page_begin,
                        uint64_t page_end)
{
    kvs_copy_engine_before_pages(((struct cpu *)self)->copies);
    kvs_cpu_attend_wave(&((struct cpu *)self)->compute, op, step, page_begin, page_end);
    return KVS_OK;
}

static kvs_status attend_finish(void *self, const kvs_bound_op *op, const struct kvs_step *step)
{
    kvs_cpu_attend_finish(&((struct cpu *)self)->compute, op, step);
    return KVS_OK;
}

static kvs_status attend_plan(void *self, const kvs_attend_desc *desc, const kvs_kv_layer *layer, const uint64_t *pages,
                              uint64_t active_tokens, uint32_t n_query_rows)
{
    const struct cpu *cpu = self;
    kvs_copy_engine_before_pages(cpu->copies);
    return kvs_cpu_attend_plan(cpu->compute.device, cpu->compute.threads, cpu->compute.isa, desc, layer, pages,
                               active_tokens, n_query_rows);
}

static void record_encode(void *self, const kvs_kv_layer *layer, const kvs_record_info *record, void *bytes,
                          uint32_t first_row, uint32_t n_rows, const float *k, const float *v)
{
    kvs_encode_rows(((struct cpu *)self)->compute.isa, layer, record, bytes, first_row, n_rows, k,
                    (uint64_t)layer->n_kv_heads * layer->head_dim_k, v, (uint64_t)layer->n_kv_heads * layer->head_dim_v);
}

static void record_decode(void *self, const kvs_kv_layer *layer, const kvs_record_info *record, const void *bytes,
                          uint32_t first_row, uint32_t n_rows, float *k, float *v)
{
    kvs_decode_rows(((struct cpu *)self)->compute.isa, layer, record, bytes, first_row, n_rows, k,
                    (uint64_t)layer->n_kv_heads * layer->head_dim_k, v, (uint64_t)layer->n_kv_heads * layer->head_dim_v);
}

static kvs_status pass_begin(void *self, struct kvs_step *step)
{
    (void)step;
    kvs_threads_begin(((struct cpu *)self)->compute.threads);
    return KVS_OK;
}

static kvs_status pass_end(void *self, bool is_whole)
{
    (void)is_whole;
    kvs_threads_end(((struct cpu *)self)->compute.threads);
    return KVS_OK;
}

static bool help_copy(void *self)
{
    return kvs_copy_engine_help(((struct cpu *)self)->copies);
}

/* Compute threads end first: they may be helping with a copy. */
static void destroy(void *self)
{
    struct cpu *cpu = self;
    kvs_threads_destroy(cpu->compute.threads);
    kvs_copy_engine_destroy(cpu->copies);
    kvs_memory_destroy(cpu->memory);
    free(cpu);
}

static const kvs_backend TABLE = {
    .name = "cpu",
    .device_alloc = device_alloc,
    .device_free = device_free,
    .device_fill_nan = device_fill_nan,
    .device_zero = device_zero,
    .device_move = device_move,
    .device_read = device_read,
    .device_write = device_write,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .copy_submit_many = copy_submit_many,
    .wait_counter = wait_counter,
    .gate_advanced = gate_advanced,
    .copy_drain = copy_drain,
    .copy_run = copy_run,
    .copy_cancel = copy_cancel,
    .weight_bytes = weight_bytes,
    .weight_pack = weight_pack,
    .op_scratch_bytes = op_scratch_bytes,
    .run_op = run_op,
    .delta_fold = delta_fold,
    .attend_begin = attend_begin,
    .attend_wave = attend_wave,
    .attend_finish = attend_finish,
    .attend_plan = attend_plan,
    .record_encode = record_encode,
    .record_decode = record_decode,
    .pass_begin = pass_begin,
    .pass_end = pass_end,
    .destroy = destroy,
};

/* Those that this process may run on, where the system says so: a container sees all cores of its host. */
static uint32_t usable_cores(void)
{
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
        return (uint32_t)CPU_COUNT(&allowed);
    }
#endif
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : (uint32_t)n;
}

static kvs_status choose_isa(kvs_device *device, const kvs_device_desc *desc, uint32_t *isa)
{
    uint32_t best = kvs_cpu_isa_detect();
    *isa = desc->isa == KVS_ISA_BEST ? best : desc->isa;
    if ((desc->flags & KVS_DEVICE_REFERENCE_OPS) != 0) {
        *isa = KVS_ISA_REFERENCE;
    }
    if (*isa > best) {
        return kvs_fail(device, KVS_EUNSUPPORTED, "instruction set %u is not available, the highest here is %u", *isa, best);
    }
    return KVS_OK;
}

kvs_status kvs_cpu_backend_create(kvs_device *device, const kvs_device_desc *desc, const kvs_backend **table, void **self,
                                  uint32_t *n_threads, uint32_t *isa)
{
    uint32_t threads = desc->n_threads == 0 ? usable_cores() : desc->n_threads;
    if (threads > MAX_THREADS) {
        return kvs_fail(device, KVS_EINVAL, "%u threads, at most %u", threads, MAX_THREADS);
    }
    kvs_status status = choose_isa(device, desc, isa);
    if (status != KVS_OK) {
        return status;
    }
    struct cpu *cpu = calloc(1, sizeof *cpu);
    if (cpu == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "no memory for a CPU backend");
    }
    cpu->compute = (kvs_cpu_compute){
        .device = device, .threads = kvs_threads_create(threads), .n_threads = threads, .isa = *isa};
    cpu->memory = kvs_memory_create(KVS_MEMORY_HAS_SLABS);
    if (cpu->memory == NULL) {
        status = kvs_fail(device, KVS_ENOMEM, "no memory for a CPU backend");
    } else if (cpu->compute.threads == NULL) {
        status = kvs_fail(device, KVS_EIO, "cannot start %u compute threads", threads);
    } else {
        status = kvs_copy_engine_create(device, desc->flags, threads < usable_cores(), &cpu->copies);
    }
    if (status != KVS_OK) {
        kvs_memory_destroy(cpu->memory);
        kvs_threads_destroy(cpu->compute.threads);
        free(cpu);
        return status;
    }
    kvs_threads_set_idle(cpu->compute.threads, help_copy, cpu);
    *table = &TABLE;
    *self = cpu;
    *n_threads = threads;
    return KVS_OK;
}
