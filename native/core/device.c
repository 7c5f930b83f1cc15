/* device.c: a device: its claims, its accounting, its failures; and the objects that hang off it.
 */
#include "core/device.h"

#include "backends/cpu/backend.h"
#include "backends/cuda/backend.h"
#include "backends/trace/backend.h"
#include "base/failures.h"
#include "core/history.h"
#include "core/hook.h"
#include "core/schedule.h"
#include "core/timeline.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct kvs_device {
    _Atomic uint64_t claims; /* the owner's and one per live object */
    uint32_t flags;
    uint32_t n_threads;
    uint32_t isa;
    uint32_t kind; /* kvs_backend_kind */
    pid_t process; /* that made it, and has its threads */
    bool is_kept;  /* a thread of the backend's may come here at any time */
    const kvs_backend *backend;
    void *backend_self;
    kvs_hooks hooks;
    kvs_failures failures;
    kvs_histories histories;
    kvs_timeline timeline;
    kvs_schedule schedule; /* deferred mode; under the backend's lock */
    _Atomic uint64_t live_objects;
    _Atomic uint64_t last_id;
    _Atomic uint64_t device_bytes;
    _Atomic uint64_t device_peak_bytes;
    _Atomic uint64_t copies;
    _Atomic uint64_t copied_bytes;
    _Atomic uint64_t loaded_bytes;
    _Atomic uint64_t load_ns;
    _Atomic uint64_t failed_copies;
};

/* What a card alone knows. */
enum { card_flags = KVS_DEVICE_NO_EARLY | KVS_DEVICE_NO_GRAPHS | KVS_DEVICE_COUNTERS };
static const uint32_t known_flags = KVS_DEVICE_DEFERRED | KVS_DEVICE_POISON_RELEASED |
                                    KVS_DEVICE_STRICT_HISTORY | KVS_DEVICE_REFERENCE_OPS | card_flags;

static uint64_t load(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

static void add(_Atomic uint64_t *counter, uint64_t value)
{
    (void)atomic_fetch_add_explicit(counter, value, memory_order_relaxed);
}

/* The parts that need no backend, in the order in which they are undone by free_parts. */
static kvs_device *alloc_parts(const kvs_device_desc *desc)
{
    kvs_device *device = calloc(1, sizeof *device);
    if (device == NULL) {
        return NULL;
    }
    device->flags = desc->flags;
    device->process = getpid();
    device->schedule.drawn = desc->schedule_seed;
    atomic_init(&device->claims, 1);
    if (!kvs_hooks_init(&device->hooks)) {
        goto no_hooks;
    }
    if (!kvs_failures_init(&device->failures)) {
        goto no_failures;
    }
    if (!kvs_histories_init(&device->histories)) {
        goto no_histories;
    }
    if (!kvs_timeline_init(&device->timeline)) {
        goto no_timeline;
    }
    return device;

no_timeline:
    kvs_histories_destroy(&device->histories);
no_histories:
    kvs_failures_destroy(&device->failures);
no_failures:
    kvs_hooks_destroy(&device->hooks);
no_hooks:
    free(device);
    return NULL;
}

static void free_parts(kvs_device *device)
{
    kvs_timeline_destroy(&device->timeline);
    kvs_histories_destroy(&device->histories);
    kvs_failures_destroy(&device->failures);
    kvs_hooks_destroy(&device->hooks);
    free(device);
}

static kvs_status create_backend(kvs_device *device, const kvs_device_desc *desc)
{
    switch (desc->backend) {
    case KVS_BACKEND_CPU:
        return kvs_cpu_backend_create(device, desc, &device->backend, &device->backend_self, &device->n_threads,
                                      &device->isa);
    case KVS_BACKEND_TRACE:
        device->n_threads = 1;
        device->isa = KVS_ISA_REFERENCE;
        return kvs_trace_backend_create(device, desc, &device->backend, &device->backend_self);
    case KVS_BACKEND_CUDA:
        device->n_threads = 1;
        device->isa = KVS_ISA_REFERENCE;
        return kvs_cuda_backend_create(device, desc, &device->backend, &device->backend_self);
    default:
        return kvs_fail(device, KVS_EUNSUPPORTED, "no backend has number %u", desc->backend);
    }
}

kvs_status kvs_device_create(const kvs_device_desc *desc, kvs_device **device)
{
    if (device == NULL || !KVS_STRUCT_OK(desc) || (desc->flags & ~known_flags) != 0 ||
        desc->isa > KVS_ISA_AVX512 || (desc->backend != KVS_BACKEND_CUDA && (desc->flags & card_flags) != 0)) {
        return KVS_EINVAL;
    }
    if (desc->failure != NULL && desc->failure_bytes != 0) {
        desc->failure[0] = '\0';
    }
    kvs_device *made = alloc_parts(desc);
    if (made == NULL) {
        return KVS_ENOMEM;
    }
    const kvs_status status = create_backend(made, desc);
    if (status != KVS_OK) {
        if (desc->failure != NULL && desc->failure_bytes != 0) {
            kvs_failures_copy(&made->failures, desc->failure, (size_t)desc->failure_bytes);
        }
        if (!made->is_kept) {
            free_parts(made);
        }
        return status;
    }
    made->kind = desc->backend;
    *device = made;
    return KVS_OK;
}

uint64_t kvs_device_next_id(kvs_device *device)
{
    return atomic_fetch_add_explicit(&device->last_id, 1, memory_order_relaxed) + 1;
}

void kvs_device_retain(kvs_device *device)
{
    add(&device->claims, 1);
}

void kvs_device_release(kvs_device *device)
{
    if (device == NULL ||
        atomic_fetch_sub_explicit(&device->claims, 1, memory_order_acq_rel) != 1) {
        return;
    }
    if (kvs_device_is_forked(device)) {
        return; /* its threads stayed behind: to join them, or to free what they sleep on, would wait for ever */
    }
    /* The threads stop first: they may still count copies and record failures. */
    device->backend->destroy(device->backend_self);
    if (!device->is_kept) {
        free_parts(device);
    }
}

void kvs_device_keep(kvs_device *device)
{
    device->is_kept = true;
}

bool kvs_device_is_forked(const kvs_device *device)
{
    return getpid() != device->process;
}

kvs_status kvs_device_last_error(kvs_device *device, char *text, size_t capacity)
{
    if (device == NULL || text == NULL || capacity == 0) {
        return KVS_EINVAL;
    }
    kvs_failures_copy(&device->failures, text, capacity);
    return KVS_OK;
}

kvs_status kvs_device_get_info(kvs_device *device, kvs_device_info *info)
{
    if (device == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_refuse(device);
    }
    info->flags = device->flags;
    info->n_threads = device->n_threads;
    info->isa = device->isa;
    info->device_bytes = load(&device->device_bytes);
    info->device_peak_bytes = load(&device->device_peak_bytes);
    kvs_histories_sum(&device->histories, &info->host_bytes, &info->host_touched_bytes);
    info->live_objects = load(&device->live_objects);
    info->copies = load(&device->copies);
    info->copied_bytes = load(&device->copied_bytes);
    info->loaded_bytes = load(&device->loaded_bytes);
    info->load_ns = load(&device->load_ns);
    info->backend = device->kind;
    info->memory_bytes = 0;
    info->memory_free_bytes = 0;
    info->arch = 0;
    info->is_lost = 0;
    info->n_left = 0;
    info->left_bytes = 0;
    memset(info->name, 0, sizeof info->name);
    memcpy(info->name, device->backend->name, strlen(device->backend->name));
    if (device->backend->describe != NULL) {
        device->backend->describe(device->backend_self, info);
    }
    return KVS_OK;
}

kvs_status kvs_device_set_hook(kvs_device *device, kvs_hook hook, void *user)
{
    if (device == NULL) {
        return KVS_EINVAL;
    }
    kvs_hooks_set(&device->hooks, hook, user);
    return KVS_OK;
}

static const char *const point_names[KVS_HOOK_POINTS] = {
    [KVS_HOOK_ALLOC] = "an allocation", [KVS_HOOK_COPY] = "a copy",          [KVS_HOOK_FENCE] = "a fence",
    [KVS_HOOK_OP] = "an operation",     [KVS_HOOK_SUBMIT] = "a submission", [KVS_HOOK_FILE] = "a file",
};

kvs_status kvs_hook_ask(kvs_device *device, int point)
{
    const int answer = kvs_hooks_ask(&device->hooks, point);
    if (answer == KVS_OK || (answer == KVS_PENDING && point == KVS_HOOK_COPY)) {
        return (kvs_status)answer;
    }
    if (answer > 0) {
        return kvs_fail(device, KVS_EINVAL, "the fault hook answered %d at %s", answer, point_names[point]);
    }
    return kvs_fail(device, (kvs_status)answer, "the fault hook made %s fail with %s", point_names[point],
                    kvs_status_name(answer));
}

kvs_status kvs_device_ask_hook(kvs_device *device, int point)
{
    if (device == NULL || point != KVS_HOOK_FILE) {
        return kvs_fail(device, KVS_EINVAL, "point %d of the fault hook is not the caller's", point);
    }
    return kvs_hook_ask(device, point);
}

kvs_status kvs_device_submit(kvs_device *device, const kvs_copy *copies, uint32_t n_copies)
{
    const kvs_status status = kvs_hook_ask(device, KVS_HOOK_SUBMIT);
    return status == KVS_OK ? device->backend->copy_submit_many(device->backend_self, copies, n_copies) : status;
}

static kvs_status require_deferred(kvs_device *device)
{
    if (!kvs_device_has(device, KVS_DEVICE_DEFERRED)) {
        return kvs_fail(device, KVS_EINVAL,
                        "copies are run by the copy thread: the device is not deferred");
    }
    return KVS_OK;
}

kvs_status kvs_device_set_chooser(kvs_device *device, kvs_chooser choose, void *user)
{
    const kvs_status status = device == NULL ? KVS_EINVAL : require_deferred(device);
    if (status == KVS_OK) {
        device->schedule.choose = choose;
        device->schedule.user = user;
    }
    return status;
}

bool kvs_device_has_chooser(const kvs_device *device)
{
    return device->schedule.choose != NULL;
}

uint32_t kvs_device_choose(kvs_device *device, uint32_t offered)
{
    return kvs_schedule_next(&device->schedule, offered);
}

kvs_status kvs_device_run_copies(kvs_device *device, uint32_t limit, uint32_t *ran)
{
    if (device == NULL || ran == NULL) {
        return kvs_refuse(device);
    }
    const kvs_status status = require_deferred(device);
    if (status != KVS_OK) {
        return status;
    }
    const uint64_t failed_before = load(&device->failed_copies);
    *ran = device->backend->copy_run(device->backend_self, limit);
    const uint64_t failed = load(&device->failed_copies) - failed_before;
    if (failed != 0) {
        return kvs_fail(device, KVS_EIO, "%llu of %u copies failed", (kvs_ull)failed, *ran);
    }
    return KVS_OK;
}

kvs_status kvs_device_drain(kvs_device *device)
{
    return device == NULL ? KVS_EINVAL : device->backend->copy_drain(device->backend_self);
}

kvs_status kvs_fail(kvs_device *device, kvs_status status, const char *format, ...)
{
    if (device != NULL) {
        va_list arguments;
        va_start(arguments, format);
        kvs_failures_keep(&device->failures, format, arguments);
        va_end(arguments);
    }
    return status;
}

void kvs_device_note_copy_failure(kvs_device *device)
{
    kvs_failures_note_copy(&device->failures);
}

kvs_status kvs_fail_copy(kvs_device *device, kvs_status status, const char *what)
{
    char why[KVS_FAILURE_BYTES];
    kvs_failures_copy_of_copy(&device->failures, why, sizeof why);
    return kvs_fail(device, status, "%s%s%s", what, why[0] == '\0' ? "" : ": ", why);
}

void *kvs_object_alloc(kvs_device *device, size_t bytes)
{
    if (kvs_hook_ask(device, KVS_HOOK_ALLOC) != KVS_OK) {
        return NULL;
    }
    void *object = calloc(1, bytes);
    if (object == NULL) {
        (void)kvs_fail(device, KVS_ENOMEM, "need %llu bytes of host memory for an object",
                       (kvs_ull)bytes);
        return NULL;
    }
    add(&device->live_objects, 1);
    kvs_device_retain(device);
    return object;
}

void kvs_object_free(kvs_device *device, void *object)
{
    free(object);
    (void)atomic_fetch_sub_explicit(&device->live_objects, 1, memory_order_relaxed);
    kvs_device_release(device);
}

struct kvs_device_view kvs_device_backend(kvs_device *device)
{
    return (struct kvs_device_view){.backend = device->backend, .self = device->backend_self};
}

uint32_t kvs_device_flags(const kvs_device *device)
{
    return device->flags;
}

kvs_histories *kvs_device_histories(kvs_device *device)
{
    return &device->histories;
}

kvs_timeline *kvs_device_timeline(kvs_device *device)
{
    return &device->timeline;
}

kvs_status kvs_device_wait_counter(kvs_device *device, const _Atomic uint64_t *counter, uint64_t value,
                                   const _Atomic int *failed)
{
    const uint64_t begin_ns = kvs_timeline_begin(device);
    const kvs_status status = device->backend->wait_counter(device->backend_self, counter, value, failed);
    kvs_timeline_end(device, begin_ns, (kvs_event){.kind = KVS_EVENT_WAIT});
    return status;
}

void kvs_device_count_bytes(kvs_device *device, int64_t delta)
{
    /* Two's complement makes a negative delta a subtraction. */
    const uint64_t step = (uint64_t)delta;
    const uint64_t now =
        atomic_fetch_add_explicit(&device->device_bytes, step, memory_order_relaxed) + step;
    uint64_t peak = load(&device->device_peak_bytes);
    while (delta > 0 && now > peak &&
           !atomic_compare_exchange_weak_explicit(&device->device_peak_bytes, &peak, now,
                                                  memory_order_relaxed, memory_order_relaxed)) {
    }
}

void kvs_device_count_copy(kvs_device *device, const kvs_copy *copy, uint64_t spent_ns)
{
    const uint64_t n_bytes = copy->n_bytes * copy->n_pieces;
    kvs_timeline_copy(device, copy, spent_ns);
    add(&device->copies, 1);
    add(&device->copied_bytes, n_bytes);
    if (copy->is_out != 0) {
        kvs_histories_touch(&device->histories, copy);
    } else {
        add(&device->loaded_bytes, n_bytes);
        add(&device->load_ns, spent_ns);
    }
}

void kvs_device_count_failed_copy(kvs_device *device)
{
    add(&device->failed_copies, 1);
}
