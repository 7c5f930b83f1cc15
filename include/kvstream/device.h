/* device.h: a device, its memory, its host history memory, its fences.
 *
 * Everything hangs off a kvs_device; there are no globals. Children keep their device alive: releasing the device
 * first is legal, it goes away with its last child.
 */
#ifndef KVSTREAM_DEVICE_H
#define KVSTREAM_DEVICE_H

#include "kvstream/base.h"

KVS_API_BEGIN

/* cffi:begin */

typedef struct kvs_device kvs_device;
typedef struct kvs_buffer kvs_buffer;
typedef struct kvs_host kvs_host;
typedef struct kvs_fence kvs_fence;

typedef enum kvs_backend_kind {
    KVS_BACKEND_CPU = 0,
    KVS_BACKEND_TRACE = 1, /* computes nothing and checks the order of everything; see trace.h */
    KVS_BACKEND_CUDA = 2   /* a card of sm_75 or later, through the driver's library; takes POISON_RELEASED and the flags behind REFERENCE_OPS */
} kvs_backend_kind;

typedef enum kvs_device_flag {
    /* Copies do not run on the copy thread: they wait until a reader needs them or kvs_device_run_copies is called,
     * in an order drawn from `schedule_seed` or stated by a chooser. For tests of every legal order. */
    KVS_DEVICE_DEFERRED = 1,
    /* Device pages are filled with NaN when released, so that a read after release cannot pass unnoticed. */
    KVS_DEVICE_POISON_RELEASED = 2,
    /* Host history has no access rights except while a copy runs. */
    KVS_DEVICE_STRICT_HISTORY = 4,
    /* Plain reference operations instead of vectorised ones. Same bits, slower. */
    KVS_DEVICE_REFERENCE_OPS = 8,
    /* No kernel of a card begins before the one before it has ended. Same bits, slower. */
    KVS_DEVICE_NO_EARLY = 16,
    /* A card's passes are launched operation by operation, none is recorded. Same bits, slower. */
    KVS_DEVICE_NO_GRAPHS = 32,
    /* Copies of pages and those who read them are ordered by counters in device memory, which kernels wait for, instead of by events
     * between launches: passes that stream are recorded too. Same bits. Slower, where it was measured (docs/cuda.md). */
    KVS_DEVICE_COUNTERS = 64
} kvs_device_flag;

typedef struct kvs_device_desc {
    uint32_t struct_size;
    uint32_t flags;         /* kvs_device_flag, or-ed */
    uint32_t backend;       /* kvs_backend_kind */
    uint32_t n_threads;     /* compute threads including the caller's; 0 = one per usable core. Of the CPU backend alone */
    uint64_t schedule_seed; /* order of deferred copies */
    uint32_t isa;           /* highest instruction set to use: 0 = best, else kvs_isa */
    uint32_t ordinal;       /* of the CUDA backend: the driver's number of the card */
    char *failure;          /* receives why no device was made, NUL-terminated and cut to capacity; NULL: nobody asks */
    uint64_t failure_bytes;
    uint32_t arch;          /* of the CUDA backend: 0 = a card; else no card and no driver: the device seals tapes for cards of this
                             * architecture (90 for sm_90), lists the kernels that they need, and has no memory */
    uint32_t delay_us;      /* of a card with counters, for tests: kernels that read and write pages come up to so much late, at random */
    uint64_t wait_limit_ns; /* of the CUDA backend: how long any wait for the card may take; 0 = 60 s. Past it the card is
                             * lost: the call fails with KVS_EIO and says what it waited for, every later one is refused at
                             * once with KVS_EIO until the card is found to have finished, and memory that would be freed
                             * meanwhile is left to it for good. Kernels that wait for a page give up after a third of it */
} kvs_device_desc;

/* Instruction sets of the CPU backend, in rising order. */
typedef enum kvs_isa {
    KVS_ISA_BEST = 0,
    KVS_ISA_REFERENCE = 1,
    KVS_ISA_AVX2 = 2,  /* AVX2, FMA, F16C */
    KVS_ISA_AVX512 = 3 /* AVX-512 F BW DQ VL VNNI */
} kvs_isa;

/* What a deferred device can go on with. */
typedef enum kvs_stream {
    KVS_STREAM_COMPUTE = 0, /* the caller's next step */
    KVS_STREAM_FREE = 1,    /* the oldest of the queued copies without a gate */
    KVS_STREAM_GATED = 2    /* the oldest of those with one */
} kvs_stream;

/* One choice of a schedule: `offered` holds 1 << kvs_stream for each stream that may go on, two at least; returns the
 * kvs_stream that does. An answer that was not offered means the first one that was. */
typedef uint32_t (*kvs_chooser)(void *user, uint32_t offered);

/* Points at which an injected fault can strike. */
typedef enum kvs_hook_point {
    KVS_HOOK_ALLOC = 0,       /* device or host memory is about to be allocated */
    KVS_HOOK_COPY = 1,        /* a copy between host history and device is about to run */
    KVS_HOOK_FENCE = 2,       /* a fence is about to be created */
    KVS_HOOK_OP = 3,          /* an operation of a tape is about to run */
    KVS_HOOK_SUBMIT = 4,      /* copies are about to be queued */
    KVS_HOOK_FILE = 5         /* a caller is about to read from a file: kvs_device_ask_hook */
} kvs_hook_point;

/* Answer of a hook: 0 to go on, a negative kvs_status to fail there, KVS_PENDING (copies only) to report success
 * without copying a byte: the fault that a test suite must notice. `index` counts calls at this point while a hook is
 * installed; without one nothing is counted. */
typedef int (*kvs_hook)(void *user, int point, uint64_t index);

typedef struct kvs_device_info {
    uint32_t struct_size;
    uint32_t flags;
    uint32_t n_threads;
    uint32_t isa;                /* kvs_isa in use */
    uint64_t device_bytes;       /* live device allocations, arena and weights together */
    uint64_t device_peak_bytes;  /* their highest sum */
    uint64_t host_bytes;         /* address space reserved for host history */
    uint64_t host_touched_bytes; /* the part of it that copies have written */
    uint64_t live_objects;       /* objects of every kind that still exist, the device not counted */
    uint64_t copies;             /* finished copies of both directions */
    uint64_t copied_bytes;       /* their payload */
    uint64_t loaded_bytes;       /* the part that went from history to the device */
    uint64_t load_ns;            /* time the copy engine spent on it */
    uint64_t memory_bytes;       /* of the card; 0 where the device shares the host's */
    uint64_t memory_free_bytes;  /* now */
    uint32_t backend;            /* kvs_backend_kind */
    uint32_t arch;               /* of the card, 90 for sm_90; else 0 */
    char name[64];
    uint32_t is_lost;            /* a wait for the card has found no end, and it has not been found to have finished since */
    uint32_t reserved;
    uint64_t n_left;             /* pieces of memory that were not freed because a lost card may still use them */
    uint64_t left_bytes;         /* their bytes, device and pinned host memory together */
} kvs_device_info;

/* Create a device with its worker threads and copy thread.
 * own: caller, until kvs_device_release. thread: any.
 * errors: EINVAL bad field or struct_size; EUNSUPPORTED backend or isa not available on this machine; ENOTFOUND no such card;
 * ENOMEM; EIO no thread could be started, or the driver's */
kvs_status kvs_device_create(const kvs_device_desc *desc, kvs_device **device);

/* Give up the caller's claim. Threads stop when the last child has gone. NULL is ignored. thread: any */
void kvs_device_release(kvs_device *device);

/* Copy the text of the newest failure on this device, made by the calling thread, into `text` (NUL-terminated, cut to
 * capacity). An empty string means that this thread has seen none. thread: any. errors: EINVAL */
kvs_status kvs_device_last_error(kvs_device *device, char *text, size_t capacity);

/* thread: any. errors: EINVAL */
kvs_status kvs_device_get_info(kvs_device *device, kvs_device_info *info);

/* Install or remove (NULL) the fault hook. The hook runs on the thread that reached the point and must not call back
 * into this library. thread: any, while no step runs. errors: EINVAL */
kvs_status kvs_device_set_hook(kvs_device *device, kvs_hook hook, void *user);

/* Ask the hook at a point of the caller's, KVS_HOOK_FILE, before doing what can fail there. thread: any.
 * errors: EINVAL another point; the hook's */
kvs_status kvs_device_ask_hook(kvs_device *device, int point);

/* Deferred mode: run up to `limit` queued copies whose dependencies are met, in schedule order; `ran` receives how many
 * did. thread: owner of the device's work. errors: EINVAL not a deferred device; EIO a copy failed */
kvs_status kvs_device_run_copies(kvs_device *device, uint32_t limit, uint32_t *ran);

/* Deferred mode: let `choose` (NULL: the seed again) state the order of copies. It is asked where more than one thing can
 * happen next: behind each submission and each rise of a gate, before each operation that touches pages, when a wait needs a
 * copy and when it has ended. The same choices give the same schedule. It must not call back into this library.
 * own: `user` is borrowed until it is replaced. thread: owner of the device's work. errors: EINVAL not a deferred device */
kvs_status kvs_device_set_chooser(kvs_device *device, kvs_chooser choose, void *user);

/* Wait until both copy queues are empty. thread: any. errors: EIO a copy failed; EBUSY a queued copy can never run
 * because the ring slot it needs is not consumed */
kvs_status kvs_device_drain(kvs_device *device);

/* Device memory of its own. own: caller. shape: bytes, aligned to `alignment` (power of two, at least 64).
 * thread: any. errors: EINVAL; ENOMEM */
kvs_status kvs_buffer_create(kvs_device *device, uint64_t bytes, uint64_t alignment, kvs_buffer **buffer);

/* A sub-range that keeps its root alive. Views of views re-base onto the root, so depth is one.
 * own: caller. thread: any. errors: EINVAL zero or misaligned (64); ENOSPACE outside the parent; EOVERFLOW; ENOMEM */
kvs_status kvs_buffer_view(kvs_buffer *parent, uint64_t offset, uint64_t bytes, kvs_buffer **view);

/* One more claim on the same object. NULL is ignored. thread: any */
void kvs_buffer_retain(kvs_buffer *buffer);

/* Drop one claim; memory goes with the last claim of root and views. NULL is ignored. thread: any */
void kvs_buffer_release(kvs_buffer *buffer);

/* own: `address` is borrowed, valid until the buffer is released. Of a CPU device the CPU can read and write it.
 * thread: any. errors: EINVAL */
kvs_status kvs_buffer_get_range(kvs_buffer *buffer, uint64_t *address, uint64_t *bytes);

/* Reserve host history memory: address space only, touched when written by a copy, never mapped for anything else.
 * own: caller. thread: any. errors: EINVAL; ENOMEM */
kvs_status kvs_host_create(kvs_device *device, uint64_t bytes, kvs_host **host);

/* thread: any. NULL is ignored */
void kvs_host_release(kvs_host *host);

/* Could `bytes` of history be had at all, before any is: what has to be registered with a driver is tried with a little more than
 * this process may lock, where that is less than `bytes`. thread: any. errors: EINVAL; ENOMEM with the limits that were found */
kvs_status kvs_host_admit(kvs_device *device, uint64_t bytes);

/* Move bytes between caller memory and host history through the copy engine, and wait. For saving, loading and tests.
 * thread: any. errors: EINVAL; ENOSPACE range outside; EIO */
kvs_status kvs_host_read_wait(kvs_host *host, uint64_t offset, void *bytes, uint64_t n_bytes);
kvs_status kvs_host_write_wait(kvs_host *host, uint64_t offset, const void *bytes, uint64_t n_bytes);

/* A fence that the caller signals. Fences made by the library (ring, stream) are signalled by it.
 * own: caller. thread: any. errors: ENOMEM; EINVAL; the hook's */
kvs_status kvs_fence_create(kvs_device *device, kvs_fence **fence);

/* A fence that loses its last claim before it is signalled completes with KVS_ECANCELLED: nobody is left who could do it.
 * thread: any. NULL is ignored */
void kvs_fence_retain(kvs_fence *fence);
void kvs_fence_release(kvs_fence *fence);

/* Mark it complete with `status` (KVS_OK or a negative one). A fence completes once.
 * thread: any. errors: EINVAL already complete, or status positive */
kvs_status kvs_fence_signal(kvs_fence *fence, int status);

/* KVS_OK complete, KVS_PENDING not yet, or the negative status it completed with. thread: any. errors: EINVAL; that
 * status */
kvs_status kvs_fence_query(kvs_fence *fence);

/* Wait up to timeout_ns. Returns as kvs_fence_query does. thread: any. errors: as kvs_fence_query */
kvs_status kvs_fence_wait(kvs_fence *fence, uint64_t timeout_ns);

/* cffi:end */

KVS_API_END
#endif
