/* backend.c: the table of a CUDA device, and launches. */
#include "backends/cuda/backend.h"

#include "backends/cuda/cuda.h"
#include "backends/cuda/interop.h"
#include "backends/cuda/ops.h"
#include "backends/cuda/pass.h"
#include "backends/cuda/planner.h"
#include "backends/cuda/waits.h"

#include <stdlib.h>
#include <string.h>

/* So many bytes are worth the threads and buffers of a load. */
#define LARGE_WRITE ((uint64_t)16 << 20)
/* A kernel gives a page up after this share of the limit of a wait, so that its pass ends before the host's wait for it does. */
#define PAGE_WAIT_SHARE 3u
/* From here on a kernel may begin while the one before it ends. */
#define EARLY_ARCH 90u
#define CARD_FLAGS ((uint32_t)(KVS_DEVICE_POISON_RELEASED | KVS_DEVICE_NO_EARLY | KVS_DEVICE_NO_GRAPHS | KVS_DEVICE_COUNTERS))

static struct kvs_cuda *enter(void *self)
{
    struct kvs_cuda *cuda = self;
    kvs_cuda_enter(&cuda->driver);
    return cuda;
}

/* To begin something, which a lost card is not asked for. Left in any case. */
static struct kvs_cuda *enter_to_begin(void *self, kvs_status *status)
{
    struct kvs_cuda *cuda = enter(self);
    *status = kvs_cuda_waits_admit(&cuda->driver);
    return cuda;
}

static kvs_status leave(const struct kvs_cuda *cuda, kvs_status status)
{
    kvs_cuda_leave(&cuda->driver);
    return status;
}

/* Wait for what has just been given to the driver: so many bytes or, of a fold, a layer. */
static kvs_status wait_compute(struct kvs_cuda *cuda, kvs_status status, const char *what, uint64_t number)
{
    return status != KVS_OK ? status
                            : kvs_cuda_wait_stream(&cuda->driver, cuda->compute, "%s %llu", what, (kvs_ull)number);
}

/* ---- device memory ---- */

static kvs_status device_alloc(void *self, uint64_t bytes, uint64_t alignment, uint64_t *address)
{
    struct kvs_cuda *cuda = enter(self);
    return leave(cuda, kvs_cuda_memory_alloc(cuda->memory, bytes, alignment, address));
}

static void device_free(void *self, uint64_t address, uint64_t bytes)
{
    struct kvs_cuda *cuda = enter(self);
    kvs_cuda_memory_free(cuda->memory, address, bytes);
    kvs_cuda_leave(&cuda->driver);
}

static kvs_status fill(void *self, uint64_t address, uint8_t value, uint64_t bytes)
{
    kvs_status status;
    struct kvs_cuda *cuda = enter_to_begin(self, &status);
    if (status == KVS_OK) {
        status = KVS_CUDA_CALL(cuda->device, &cuda->driver, fill, address, value, (size_t)bytes, cuda->compute);
    }
    return leave(cuda, wait_compute(cuda, status, "bytes to be filled:", bytes));
}

static void device_fill_nan(void *self, uint64_t address, uint64_t bytes)
{
    (void)fill(self, address, 0xff, bytes);
}

static kvs_status device_zero(void *self, uint64_t address, uint64_t bytes)
{
    return fill(self, address, 0, bytes);
}

static kvs_status device_move(void *self, uint64_t from, uint64_t to, uint64_t bytes)
{
    kvs_status status;
    struct kvs_cuda *cuda = enter_to_begin(self, &status);
    if (status == KVS_OK) {
        status = KVS_CUDA_CALL(cuda->device, &cuda->driver, copy, to, from, (size_t)bytes, cuda->compute);
    }
    return leave(cuda, wait_compute(cuda, status, "bytes to be moved:", bytes));
}

static kvs_status device_read(void *self, uint64_t address, uint64_t bytes, void *to)
{
    kvs_status status;
    struct kvs_cuda *cuda = enter_to_begin(self, &status);
    return leave(cuda, status != KVS_OK ? status : kvs_cuda_memory_download(cuda->memory, to, address, bytes));
}

static kvs_status device_write(void *self, uint64_t address, uint64_t bytes, const void *from)
{
    kvs_status status;
    struct kvs_cuda *cuda = enter_to_begin(self, &status);
    if (status == KVS_OK) {
        status = bytes < LARGE_WRITE ? kvs_cuda_memory_upload(cuda->memory, address, from, bytes)
                                     : kvs_cuda_loader_copy(cuda->loader, address, from, bytes);
    }
    return leave(cuda, wait_compute(cuda, status, "bytes to be written:", bytes));
}

static bool device_may_drop(void *self, uint64_t bytes)
{
    struct kvs_cuda *cuda = enter(self);
    const bool may_drop = kvs_cuda_waits_may_free(&cuda->driver, bytes);
    (void)leave(cuda, KVS_OK);
    return may_drop;
}

/* ---- host history and copies ---- */

static kvs_status host_alloc(void *self, uint64_t bytes, uint64_t *host_base)
{
    return kvs_cuda_copies_host_alloc(((struct kvs_cuda *)self)->copies, bytes, host_base);
}

static void host_free(void *self, uint64_t host_base, uint64_t bytes)
{
    (void)bytes;
    struct kvs_cuda *cuda = enter(self);
    kvs_cuda_copies_host_free(cuda->copies, host_base);
    kvs_cuda_leave(&cuda->driver);
}

static kvs_status copy_submit_many(void *self, const kvs_copy *copies, uint32_t n_copies)
{
    return kvs_cuda_copies_submit(((struct kvs_cuda *)self)->copies, copies, n_copies);
}

static kvs_status wait_counter(void *self, const _Atomic uint64_t *counter, uint64_t value, const _Atomic int *failed)
{
    return kvs_cuda_copies_wait(((struct kvs_cuda *)self)->copies, counter, value, failed);
}

/* A counter that cannot be raised leaves copies waiting until their ring is cancelled, and passes that wait for them give up. */
static void gate_advanced(void *self, const _Atomic uint64_t *gate, uint64_t value)
{
    struct kvs_cuda *cuda = self;
    if (cuda->rings != NULL) {
        kvs_cuda_enter(&cuda->driver);
        (void)leave(cuda, kvs_cuda_rings_consumed(cuda->rings, gate, value));
    }
    kvs_cuda_copies_gate_advanced(cuda->copies);
}

static kvs_status ring_join(void *self, const _Atomic uint64_t *gate, const _Atomic uint64_t *done, uint32_t n_slots)
{
    struct kvs_cuda *cuda = enter(self);
    return leave(cuda, cuda->rings == NULL ? KVS_OK : kvs_cuda_rings_join(cuda->rings, gate, done, n_slots));
}

static void ring_leave(void *self, const _Atomic uint64_t *gate)
{
    struct kvs_cuda *cuda = self;
    if (cuda->rings != NULL) {
        kvs_cuda_rings_leave(cuda->rings, gate);
    }
}

static kvs_status copy_drain(void *self)
{
    return kvs_cuda_copies_drain(((struct kvs_cuda *)self)->copies);
}

/* Copies are never held back: the device is not deferred. */
static uint32_t copy_run(void *self, uint32_t limit)
{
    (void)self;
    (void)limit;
    return 0;
}

static void copy_cancel(void *self, const _Atomic uint64_t *done)
{
    struct kvs_cuda *cuda = enter(self);
    kvs_cuda_copies_cancel(cuda->copies, done);
    (void)leave(cuda, KVS_OK);
}

/* ---- weights and operations ---- */

static kvs_status weight_bytes(void *self, int type, uint64_t k, uint64_t n, uint64_t *bytes)
{
    struct kvs_cuda *cuda = self;
    return kvs_cuda_weight_size(&cuda->launcher, type, k, n, bytes);
}

static kvs_status weight_pack(void *self, int type, uint64_t k, uint64_t n, const void *rows, uint64_t address)
{
    kvs_status status;
    struct kvs_cuda *cuda = enter_to_begin(self, &status);
    return leave(cuda, status != KVS_OK
                           ? status
                           : kvs_cuda_weight_pack(&cuda->launcher, cuda->loader, type, k, n, rows, address));
}

static kvs_status op_scratch_bytes(void *self, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes)
{
    struct kvs_cuda *cuda = self;
    return kvs_cuda_plan_op(&cuda->launcher, op, max_rows, bytes);
}

/* A pass of no output rows has operations without rows. */
static bool has_rows(const kvs_bound_op *op, const struct kvs_step *step)
{
    const kvs_operand *shaped = op->code == KVS_OP_KV_WRITE ? &op->in[0] : &op->out[0];
    return kvs_operand_rows(shaped, step) != 0;
}

static kvs_status run_op(void *self, const kvs_bound_op *op, const struct kvs_step *step)
{
    struct kvs_cuda *cuda = self;
    return kvs_cuda_pass_launches(cuda) && has_rows(op, step) ? kvs_cuda_run_op(&cuda->launcher, op, step) : KVS_OK;
}

static kvs_status delta_fold(void *self, const kvs_delta_view *views, uint32_t layer, void *scratch)
{
    kvs_status status;
    struct kvs_cuda *cuda = enter_to_begin(self, &status);
    status = status != KVS_OK ? status : kvs_cuda_launch_delta_fold(&cuda->launcher, views, layer, scratch);
    return leave(cuda, wait_compute(cuda, status, "a fold of recurrent layer", layer));
}

static kvs_status attend_begin(void *self, const kvs_bound_op *op, const struct kvs_step *step)
{
    return kvs_cuda_launch_attend_begin(&((struct kvs_cuda *)self)->launcher, op, step);
}

/* Behind a wave its ring slots may be given back: the copy engine waits for the event before it overwrites one. A pass that is
 * recorded reads none, or says by itself what it has read. */
static kvs_status attend_wave(void *self, const kvs_bound_op *op, const struct kvs_step *step, uint64_t page_begin,
                              uint64_t page_end)
{
    struct kvs_cuda *cuda = self;
    if (!kvs_cuda_pass_launches(cuda)) {
        return KVS_OK;
    }
    const kvs_status status = kvs_cuda_launch_attend_wave(&cuda->launcher, op, step, page_begin, page_end);
    return status != KVS_OK || cuda->turn == KVS_CUDA_RECORD
               ? status
               : KVS_CUDA_CALL(cuda->device, &cuda->driver, event_record, cuda->readers, cuda->compute);
}

static kvs_status attend_finish(void *self, const kvs_bound_op *op, const struct kvs_step *step)
{
    return kvs_cuda_launch_attend_finish(&((struct kvs_cuda *)self)->launcher, op, step);
}

/* The context stays entered for the pass, whose operations one thread launches. */
static kvs_status pass_begin(void *self, struct kvs_step *step)
{
    kvs_status status;
    struct kvs_cuda *cuda = enter_to_begin(self, &status);
    status = status != KVS_OK ? status : kvs_cuda_loader_rest(cuda->loader);
    status = status != KVS_OK ? status : kvs_cuda_pass_begin(cuda, step);
    return status == KVS_OK ? KVS_OK : leave(cuda, status);
}

static kvs_status pass_end(void *self, bool is_whole)
{
    struct kvs_cuda *cuda = self;
    return leave(cuda, kvs_cuda_pass_end(cuda, is_whole));
}

static void binding_forget(void *self, uint64_t binding)
{
    struct kvs_cuda *cuda = self;
    if (cuda->graphs != NULL) {
        kvs_cuda_enter(&cuda->driver);
        kvs_cuda_graphs_forget(cuda->graphs, binding);
        kvs_cuda_leave(&cuda->driver);
    }
}

static kvs_status read_output(void *self, uint64_t number, uint32_t output, uint64_t offset, uint64_t bytes, void *to)
{
    kvs_status status;
    struct kvs_cuda *cuda = enter_to_begin(self, &status);
    return leave(cuda, status != KVS_OK ? status : kvs_cuda_steps_read(cuda->steps, number, output, offset, bytes, to));
}

/* ---- launches ---- */

kvs_status kvs_cuda_launch(kvs_cuda_launcher *launcher, const kvs_cuda_key *key, kvs_cuda_dim grid, kvs_cuda_dim block,
                           uint32_t shared_bytes, const void *params, size_t params_bytes)
{
    struct kvs_cuda *cuda = launcher->cuda;
    (void)params_bytes; /* the kernel knows how long its argument is */
    if (shared_bytes > launcher->shared_bytes) {
        return kvs_fail(launcher->device, KVS_EUNSUPPORTED, "kernel %s needs %u bytes of shared memory, a block has %u",
                        key->kernel, shared_bytes, launcher->shared_bytes);
    }
    if (launcher->is_dry) {
        return kvs_cuda_kernels_need(cuda->kernels, key);
    }
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
        return KVS_OK;
    }
    cu_function function = NULL;
    kvs_status status = kvs_cuda_kernels_find(cuda->kernels, key, shared_bytes, &function);
    if (status == KVS_OK && cuda->turn != KVS_CUDA_RECORD) { /* nothing of a recording is under way, and no event may be in it */
        status = kvs_cuda_waits_pace(&cuda->driver, cuda->compute);
    }
    if (status != KVS_OK) {
        return status;
    }
    void *arguments[] = {(void *)(uintptr_t)params};
    cu_launch_attribute early = {.id = CU_LAUNCH_PROGRAMMATIC, .value = {.is_on = 1}};
    const cu_launch config = {.grid_x = grid.x,
                              .grid_y = grid.y,
                              .grid_z = grid.z,
                              .block_x = block.x,
                              .block_y = block.y,
                              .block_z = block.z,
                              .shared_bytes = shared_bytes,
                              .stream = cuda->compute,
                              .attributes = &early,
                              .n_attributes = kvs_cuda_pass_launches_early(cuda) && key->waits ? 1 : 0};
    const cu_result result = cuda->driver.api.launch(&config, function, arguments, NULL);
    if (result == CU_SUCCESS) {
        return KVS_OK;
    }
    const kvs_cuda_text said = kvs_cuda_error_text(&cuda->driver.api, "launch", result);
    return kvs_fail(cuda->device, KVS_EIO, "kernel %s, grid %u x %u x %u, block %u x %u x %u, %u bytes of shared memory: %s",
                    key->kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes, said.text);
}

/* ---- the device ---- */

static void describe(void *self, kvs_device_info *info)
{
    struct kvs_cuda *cuda = enter(self);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    if (kvs_cuda_waits_stuck(&cuda->driver) == 0) { /* such a thread may hold what these calls need */
        (void)cuda->driver.api.memory_info(&free_bytes, &total_bytes);
        (void)cuda->driver.api.device_name(info->name, (int)sizeof info->name, cuda->driver.device);
    }
    kvs_cuda_waits_describe(&cuda->driver, info);
    info->name[sizeof info->name - 1] = '\0';
    info->arch = cuda->driver.arch;
    info->memory_bytes = total_bytes;
    info->memory_free_bytes = free_bytes;
    (void)leave(cuda, KVS_OK);
}

/* The streams, and the context where nothing of ours is at work in it: to release it would wait for that. */
static void free_streams(struct kvs_cuda *cuda)
{
    const bool may_go = kvs_cuda_waits_may_free(&cuda->driver, 0);
    if (may_go && cuda->readers != NULL) {
        (void)cuda->driver.api.event_destroy(cuda->readers);
    }
    if (may_go && cuda->compute != NULL) {
        kvs_cuda_waits_unwatch(&cuda->driver, cuda->compute);
        (void)cuda->driver.api.stream_destroy(cuda->compute);
    }
    kvs_cuda_waits_destroy(&cuda->driver);
    kvs_cuda_leave(&cuda->driver);
    if (may_go) {
        kvs_cuda_driver_close(&cuda->driver);
    }
}

/* Undoes create as far as it came. The context is entered. What the card, or a thread that does not come back from the driver, may
 * still use stays until the process ends. */
static void free_parts(struct kvs_cuda *cuda)
{
    kvs_cuda_copies_destroy(cuda->copies);
    kvs_cuda_graphs_destroy(cuda->graphs);
    kvs_cuda_steps_destroy(cuda->steps);
    kvs_cuda_rings_destroy(cuda->rings);
    kvs_cuda_kernels_destroy(cuda->kernels);
    kvs_cuda_loader_destroy(cuda->loader);
    kvs_cuda_memory_destroy(cuda->memory);
    if (cuda->driver.waits != NULL && kvs_cuda_waits_stuck(&cuda->driver) != 0) {
        kvs_device_keep(cuda->device);
        kvs_cuda_leave(&cuda->driver);
        return;
    }
    free_streams(cuda);
    free(cuda);
}

static void destroy(void *self)
{
    free_parts(enter(self));
}

static const kvs_backend TABLE = {
    .name = "cuda",
    .copies_rows = true,
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
    .ring_join = ring_join,
    .ring_leave = ring_leave,
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
    .pass_begin = pass_begin,
    .pass_end = pass_end,
    .binding_forget = binding_forget,
    .read_output = read_output,
    .describe = describe,
    .device_may_drop = device_may_drop,
    .device_adopt = kvs_cuda_adopt,
    .host_admit = kvs_cuda_host_admit,
    .stream = kvs_cuda_stream,
    .lead_stream = kvs_cuda_lead_stream,
    .place = kvs_cuda_place,
    .destroy = destroy,
};

/* Slots that are to be filled with NaN when they are released are filled by the host, which does not see kernels release one. */
static kvs_status check_counters(const struct kvs_cuda *cuda, const kvs_device_desc *desc)
{
    if ((desc->flags & KVS_DEVICE_COUNTERS) != 0 && cuda->driver.has_words == 0) {
        return kvs_fail(cuda->device, KVS_EUNSUPPORTED, "counters: the driver has no 64-bit stream memory operations on this card");
    }
    return (desc->flags & KVS_DEVICE_COUNTERS) != 0 && (desc->flags & KVS_DEVICE_POISON_RELEASED) != 0
               ? kvs_fail(cuda->device, KVS_EUNSUPPORTED, "counters: released pages are to be filled, which the host does")
               : KVS_OK;
}

static kvs_status create_parts(struct kvs_cuda *cuda, const kvs_device_desc *desc)
{
    const kvs_cuda_step_waits waits = {.limit_ns = cuda->page_limit_ns, .delay_ns = desc->delay_us * 1000};
    kvs_device *device = cuda->device;
    const kvs_cuda_driver *driver = &cuda->driver;
    kvs_status status = kvs_cuda_waits_create(device, &cuda->driver, desc->wait_limit_ns);
    if (status == KVS_OK) {
        status = KVS_CUDA_CALL(device, driver, stream_create, &cuda->compute, CU_STREAM_NON_BLOCKING);
    }
    if (status == KVS_OK) {
        kvs_cuda_waits_watch(driver, cuda->compute, "operations");
        status = KVS_CUDA_CALL(device, driver, event_create, &cuda->readers, CU_EVENT_DISABLE_TIMING);
    }
    if (status == KVS_OK) {
        status = kvs_cuda_memory_create(device, driver, cuda->compute, &cuda->memory);
    }
    if (status == KVS_OK) {
        status = kvs_cuda_loader_create(device, driver, cuda->compute, &cuda->loader);
    }
    if (status == KVS_OK) {
        status = kvs_cuda_kernels_create(device, driver, &cuda->kernels);
    }
    if (status == KVS_OK && (desc->flags & KVS_DEVICE_COUNTERS) != 0) {
        status = kvs_cuda_rings_create(device, driver, cuda->memory, cuda->compute, &cuda->rings);
    }
    if (status == KVS_OK) {
        status = kvs_cuda_steps_create(device, driver, cuda->compute, cuda->memory, cuda->rings, waits, &cuda->steps);
    }
    if (status == KVS_OK && (desc->flags & KVS_DEVICE_NO_GRAPHS) == 0) {
        status = kvs_cuda_graphs_create(device, driver, cuda->compute, &cuda->graphs);
    }
    return status == KVS_OK ? kvs_cuda_copies_create(device, driver, cuda->readers, cuda->rings, &cuda->copies) : status;
}

kvs_status kvs_cuda_backend_create(kvs_device *device, const kvs_device_desc *desc, const kvs_backend **table, void **self)
{
    if (desc->arch != 0) {
        return kvs_cuda_planner_create(device, desc, table, self);
    }
    if ((desc->flags & ~CARD_FLAGS) != 0 || desc->isa != KVS_ISA_BEST) {
        return kvs_fail(device, KVS_EUNSUPPORTED,
                        "a CUDA device has no deferred copies, strict history, reference operations or instruction sets");
    }
    struct kvs_cuda *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "no memory for a CUDA backend");
    }
    cuda->device = device;
    kvs_status status = kvs_cuda_driver_open(device, desc->ordinal, &cuda->driver);
    if (status != KVS_OK) {
        free(cuda);
        return status;
    }
    cuda->page_limit_ns = (desc->wait_limit_ns == 0 ? KVS_CUDA_WAIT_LIMIT_NS : desc->wait_limit_ns) / PAGE_WAIT_SHARE;
    cuda->is_early = cuda->driver.arch >= EARLY_ARCH && (desc->flags & KVS_DEVICE_NO_EARLY) == 0;
    cuda->launcher = (kvs_cuda_launcher){.device = device,
                                         .arch = cuda->driver.arch,
                                         .n_sm = cuda->driver.n_sm,
                                         .shared_bytes = cuda->driver.shared_bytes,
                                         .cuda = cuda};
    kvs_cuda_enter(&cuda->driver);
    status = check_counters(cuda, desc);
    if (status == KVS_OK) {
        status = create_parts(cuda, desc);
    }
    if (status != KVS_OK) {
        free_parts(cuda);
        return status;
    }
    kvs_cuda_leave(&cuda->driver);
    *table = &TABLE;
    *self = cuda;
    return KVS_OK;
}

kvs_cuda_kernels *kvs_cuda_backend_kernels(struct kvs_device_view view)
{
    return view.backend == &TABLE ? ((const struct kvs_cuda *)view.self)->kernels : NULL;
}
