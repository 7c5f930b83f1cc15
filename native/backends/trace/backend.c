/* backend.c: the ops table of a device that computes nothing. Its memory is address space without access rights: whoever
 * touches it for real faults at once. */
#include "backends/trace/backend.h"

#include "backends/trace/state.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE_BYTES 4096u

static void lock(kvs_trace *trace)
{
    kvs_mutex_lock(&trace->lock);
}

static void unlock(kvs_trace *trace)
{
    kvs_mutex_unlock(&trace->lock);
}

/* ---- what the other files share ---- */

bool kvs_trace_strikes(kvs_trace *trace, uint32_t fault)
{
    if (trace->fault != fault) {
        return false;
    }
    if (trace->fault_left != 0) {
        trace->fault_left--;
        return false;
    }
    trace->fault = KVS_TRACE_FAULT_NONE;
    return true;
}

/* splitmix64, as the deferred copy engine draws. */
uint64_t kvs_trace_draw_ns(kvs_trace *trace, uint64_t ns)
{
    if (trace->costs.jitter_ns == 0) {
        return ns;
    }
    uint64_t z = trace->drawn += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return ns + (z ^ (z >> 31)) % trace->costs.jitter_ns;
}

uint64_t kvs_trace_bytes_ns(uint64_t n_bytes, uint64_t bytes_per_s)
{
    return bytes_per_s == 0 ? 0 : (uint64_t)((double)n_bytes * 1e9 / (double)bytes_per_s);
}

uint32_t kvs_trace_add_step(kvs_trace *trace, const kvs_trace_step *step)
{
    if (trace->n_steps == trace->steps_capacity) {
        const uint64_t capacity = trace->steps_capacity == 0 ? 1024 : (uint64_t)trace->steps_capacity * 2;
        kvs_trace_step *steps =
            capacity > UINT32_MAX ? NULL : realloc(trace->steps, (size_t)capacity * sizeof *steps);
        if (steps == NULL) {
            trace->is_exhausted = true;
            return KVS_NO_EVENT;
        }
        trace->steps = steps;
        trace->steps_capacity = (uint32_t)capacity;
    }
    kvs_trace_step *added = &trace->steps[trace->n_steps];
    *added = *step;
    added->number = ++trace->newest[step->stream];
    return trace->n_steps++;
}

uint32_t kvs_trace_add_compute(kvs_trace *trace, kvs_trace_step step)
{
    step.stream = KVS_TRACE_COMPUTE;
    const uint32_t event = kvs_trace_add_step(trace, &step);
    trace->clock.at[KVS_TRACE_COMPUTE] = trace->newest[KVS_TRACE_COMPUTE];
    return event;
}

/* ---- memory ---- */

static kvs_status reserve(kvs_trace *trace, uint64_t n_bytes, uint64_t *address)
{
    uint64_t rounded;
    if (!kvs_align_up(n_bytes, PAGE_BYTES, &rounded) || rounded > SIZE_MAX) {
        return KVS_EOVERFLOW;
    }
    void *memory = mmap(NULL, (size_t)rounded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return kvs_fail(trace->device, KVS_ENOMEM, "no address space for %llu bytes", (kvs_ull)n_bytes);
    }
    *address = (uint64_t)(uintptr_t)memory;
    lock(trace);
    kvs_trace_add_memory(trace, *address, n_bytes);
    unlock(trace);
    return KVS_OK;
}

static uint32_t add_caller_step(kvs_trace *trace, kvs_trace_kind kind, uint64_t n_bytes)
{
    const kvs_trace_step step = {.begin_ns = trace->now_ns,
                                 .end_ns = trace->now_ns,
                                 .n_bytes = n_bytes,
                                 .layer = KVS_NONE,
                                 .kind = (uint8_t)kind};
    return kvs_trace_add_compute(trace, step);
}

static void discard(kvs_trace *trace, kvs_trace_kind kind, uint64_t address, uint64_t n_bytes)
{
    const kvs_trace_access access = {.event = add_caller_step(trace, kind, n_bytes),
                                     .clock = &trace->clock,
                                     .address = address,
                                     .n_bytes = n_bytes};
    kvs_trace_discard(trace, &access);
}

static void give_back(kvs_trace *trace, uint64_t address, uint64_t n_bytes)
{
    lock(trace);
    discard(trace, KVS_KIND_FREE, address, n_bytes);
    kvs_trace_drop_memory(trace, address, n_bytes);
    unlock(trace);
    uint64_t rounded = n_bytes;
    (void)kvs_align_up(n_bytes, PAGE_BYTES, &rounded);
    (void)munmap((void *)(uintptr_t)address, (size_t)rounded);
}

static kvs_status device_alloc(void *self, uint64_t bytes, uint64_t alignment, uint64_t *address)
{
    kvs_trace *trace = self;
    if (alignment > PAGE_BYTES) {
        return kvs_fail(trace->device, KVS_EUNSUPPORTED, "alignment of %llu bytes, at most %u", (kvs_ull)alignment,
                        PAGE_BYTES);
    }
    return reserve(trace, bytes, address);
}

static void device_free(void *self, uint64_t address, uint64_t bytes)
{
    give_back(self, address, bytes);
}

static void device_fill_nan(void *self, uint64_t address, uint64_t bytes)
{
    lock(self);
    discard(self, KVS_KIND_RELEASE, address, bytes);
    unlock(self);
}

/* The caller writes or reads bytes of the device between passes. */
static void touch(kvs_trace *trace, uint64_t address, uint64_t n_bytes, bool is_write)
{
    lock(trace);
    const kvs_trace_access access = {.event = add_caller_step(trace, is_write ? KVS_KIND_CALLER : KVS_KIND_READ, n_bytes),
                                     .clock = &trace->clock,
                                     .address = address,
                                     .n_bytes = n_bytes,
                                     .label = KVS_LABEL_STATE};
    if (is_write) {
        kvs_trace_write(trace, &access);
    } else {
        kvs_trace_read(trace, &access);
    }
    unlock(trace);
}

static kvs_status device_zero(void *self, uint64_t address, uint64_t bytes)
{
    touch(self, address, bytes, true);
    return KVS_OK;
}

static kvs_status device_move(void *self, uint64_t from, uint64_t to, uint64_t bytes)
{
    touch(self, from, bytes, false);
    touch(self, to, bytes, true);
    return KVS_OK;
}

/* There are no bytes: the caller gets zeros. */
static kvs_status device_read(void *self, uint64_t address, uint64_t bytes, void *to)
{
    touch(self, address, bytes, false);
    memset(to, 0, (size_t)bytes);
    return KVS_OK;
}

static kvs_status device_write(void *self, uint64_t address, uint64_t bytes, const void *from)
{
    (void)from;
    touch(self, address, bytes, true);
    return KVS_OK;
}

static kvs_status host_alloc(void *self, uint64_t bytes, uint64_t *host_base)
{
    return reserve(self, bytes, host_base);
}

static void host_free(void *self, uint64_t host_base, uint64_t bytes)
{
    give_back(self, host_base, bytes);
}

/* ---- copies ---- */

static kvs_status copy_submit_many(void *self, const kvs_copy *copies, uint32_t n_copies)
{
    lock(self);
    const kvs_status status = kvs_trace_submit(self, copies, n_copies);
    unlock(self);
    return status;
}

static kvs_status wait_counter(void *self, const _Atomic uint64_t *counter, uint64_t value, const _Atomic int *failed)
{
    lock(self);
    const kvs_status status = kvs_trace_wait(self, counter, value, failed);
    unlock(self);
    return status;
}

static void counter_seen(void *self, const _Atomic uint64_t *counter, uint64_t value)
{
    lock(self);
    kvs_trace_look(self, counter, value);
    unlock(self);
}

static void gate_advanced(void *self, const _Atomic uint64_t *gate, uint64_t value)
{
    (void)gate, (void)value;
    lock(self);
    kvs_trace_open_gates(self);
    unlock(self);
}

static kvs_status copy_drain(void *self)
{
    lock(self);
    const kvs_status status = kvs_trace_drain(self);
    unlock(self);
    return status;
}

static uint32_t copy_run(void *self, uint32_t limit)
{
    uint32_t n_run = 0;
    lock(self);
    while (n_run < limit && kvs_trace_run_one(self)) {
        n_run++;
    }
    unlock(self);
    return n_run;
}

static void copy_cancel(void *self, const _Atomic uint64_t *done)
{
    lock(self);
    kvs_trace_cancel(self, done);
    unlock(self);
}

/* ---- weights and operations ---- */

static kvs_status weight_bytes(void *self, int type, uint64_t k, uint64_t n, uint64_t *bytes)
{
    const kvs_trace *trace = self;
    uint32_t block_values;
    uint32_t block_bytes;
    const kvs_status status = kvs_type_block(type, &block_values, &block_bytes);
    if (status != KVS_OK || !kvs_mul_u64(k / block_values * block_bytes, n, bytes)) {
        return kvs_fail(trace->device, status == KVS_OK ? KVS_EOVERFLOW : status, "no weight of %llu x %llu values",
                        (kvs_ull)n, (kvs_ull)k);
    }
    return KVS_OK;
}

static kvs_status weight_pack(void *self, int type, uint64_t k, uint64_t n, const void *rows, uint64_t address)
{
    kvs_trace *trace = self;
    (void)rows;
    uint64_t n_bytes = 0;
    const kvs_status status = weight_bytes(self, type, k, n, &n_bytes);
    if (status == KVS_OK) {
        lock(trace);
        const kvs_trace_access access = {.event = add_caller_step(trace, KVS_KIND_CALLER, n_bytes),
                                         .clock = &trace->clock,
                                         .address = address,
                                         .n_bytes = n_bytes,
                                         .label = KVS_LABEL_VALUES};
        kvs_trace_write(trace, &access);
        unlock(trace);
    }
    return status;
}

/* Activations as bytes with a scale per 32, running sums of attention, the matrix of a recurrent head: what any backend needs
 * at least. */
static kvs_status op_scratch_bytes(void *self, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes)
{
    (void)self;
    *bytes = 0;
    if (op->code == KVS_OP_MATMUL) {
        const uint64_t k = op->weights[0]->k;
        *bytes = max_rows * (k + kvs_div_up(k, 32) * sizeof(float));
    } else if (op->code == KVS_OP_ATTEND) {
        *bytes = (uint64_t)max_rows * op->u[0] * (op->kv->head_dim_v + 2) * sizeof(float);
    } else if (op->code == KVS_OP_DELTA) {
        *bytes = (uint64_t)op->delta->head_dim * op->delta->head_dim * sizeof(float);
    }
    return KVS_OK;
}

static kvs_status run_op(void *self, const kvs_bound_op *op, const struct kvs_step *step)
{
    lock(self);
    if (op->code == KVS_OP_KV_WRITE) {
        kvs_trace_offer_copies(self);
    }
    const kvs_status status = kvs_trace_run_op(self, op, step);
    unlock(self);
    return status;
}

static kvs_status delta_fold(void *self, const kvs_delta_view *views, uint32_t layer, void *scratch)
{
    const kvs_operand none = {.output_slot = KVS_NONE};
    const kvs_bound_op op = {.code = KVS_OP_DELTA,
                             .layer = layer,
                             .in = {none, none, none},
                             .out = {none, none, none},
                             .u = {KVS_DELTA_LOGGED},
                             .delta = views[layer].layer,
                             .scratch = scratch};
    const struct kvs_step step = {.deltas = views};
    return run_op(self, &op, &step);
}

static void attend_part(kvs_trace *trace, const kvs_bound_op *op, const struct kvs_step *step, kvs_op_part part,
                        uint64_t page_begin, uint64_t page_end)
{
    lock(trace);
    if (part == KVS_PART_WAVE) {
        kvs_trace_offer_copies(trace);
    }
    kvs_trace_attend(trace, op, step, part, page_begin, page_end);
    unlock(trace);
}

static kvs_status attend_begin(void *self, const kvs_bound_op *op, const struct kvs_step *step)
{
    attend_part(self, op, step, KVS_PART_BEGIN, 0, 0);
    return KVS_OK;
}

static kvs_status attend_wave(void *self, const kvs_bound_op *op, const struct kvs_step *step, uint64_t page_begin,
                        uint64_t page_end)
{
    attend_part(self, op, step, KVS_PART_WAVE, page_begin, page_end);
    return KVS_OK;
}

static kvs_status attend_finish(void *self, const kvs_bound_op *op, const struct kvs_step *step)
{
    attend_part(self, op, step, KVS_PART_FINISH, 0, 0);
    return KVS_OK;
}

static kvs_status attend_plan(void *self, const kvs_attend_desc *desc, const kvs_kv_layer *layer, const uint64_t *pages,
                              uint64_t active_tokens, uint32_t n_query_rows)
{
    (void)desc;
    (void)n_query_rows;
    lock(self);
    kvs_trace_offer_copies(self);
    const kvs_status status = kvs_trace_attend_plan(self, layer, pages, active_tokens);
    unlock(self);
    return status;
}

static kvs_status pass_begin(void *self, struct kvs_step *step)
{
    (void)step;
    kvs_trace *trace = self;
    lock(trace);
    const uint64_t spent = kvs_trace_draw_ns(trace, trace->costs.pass_ns);
    kvs_trace_advance(trace, trace->now_ns + spent, KVS_CAUSE_HOST, offsetof(kvs_trace_report, host_ns));
    unlock(trace);
    return KVS_OK;
}

static kvs_status pass_end(void *self, bool is_whole)
{
    (void)is_whole;
    lock(self);
    kvs_trace_run_late_wave(self);
    kvs_trace_end_pass(self);
    unlock(self);
    return KVS_OK;
}

static void destroy(void *self)
{
    kvs_trace *trace = self;
    kvs_trace_free_queues(trace);
    kvs_intervals_destroy(&trace->memory);
    kvs_mutex_destroy(&trace->lock);
    free(trace->steps);
    free(trace->passes);
    free(trace);
}

static const kvs_backend TABLE = {
    .name = "trace",
    .has_no_bytes = true,
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
    .counter_seen = counter_seen,
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
    .pass_begin = pass_begin,
    .pass_end = pass_end,
    .destroy = destroy,
};

kvs_trace *kvs_trace_of(kvs_device *device)
{
    const struct kvs_device_view view = kvs_device_backend(device);
    return view.backend == &TABLE ? view.self : NULL;
}

kvs_status kvs_trace_backend_create(kvs_device *device, const kvs_device_desc *desc, const kvs_backend **table, void **self)
{
    kvs_trace *trace = calloc(1, sizeof *trace);
    if (trace == NULL || !kvs_mutex_init(&trace->lock)) {
        free(trace);
        return kvs_fail(device, KVS_ENOMEM, "no memory for a trace backend");
    }
    trace->device = device;
    trace->is_deferred = (desc->flags & KVS_DEVICE_DEFERRED) != 0;
    trace->costs.struct_size = sizeof trace->costs;
    kvs_trace_reset_measures(trace);
    *table = &TABLE;
    *self = trace;
    return KVS_OK;
}
