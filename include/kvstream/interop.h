/* interop.h: device memory and the device's stream, shared with other libraries of the process.
 *
 * Who keeps memory alive, in three cases:
 *     own                 kvs_buffer_create: the buffer's memory is this library's and goes with its last claim
 *     borrow, kept alive  kvs_buffer_adopt with `drop`, and kvs_buffer_take: the memory is another's, who is told when the last
 *                         claim on the buffer and its views has gone
 *     borrow              kvs_buffer_adopt without `drop`: the caller answers for the memory until the last claim has gone
 * Memory of a buffer is lent the other way by kvs_buffer_lend: the receiver holds a claim. Adopted bytes do not count as
 * allocations of the device.
 *
 * Exchange structs are those of DLPack (github.com/dmlc/dlpack, DLManagedTensor of version 0.x, which every library reads).
 */
#ifndef KVSTREAM_INTEROP_H
#define KVSTREAM_INTEROP_H

#include "kvstream/device.h"

KVS_API_BEGIN

/* cffi:begin */

/* The owner of adopted memory is told that it may go. Runs once, on the thread that drops the last claim; never where a lost card
 * may still use the memory (kvs_device_info.is_lost). */
typedef void (*kvs_drop)(void *user);

/* A buffer over memory of another's on this device: an arena can lie in it, and views of it are buffers. What the owner has under
 * way there must be ordered before its use here: kvs_device_get_stream.
 * own: caller; the memory as stated above. shape: `bytes` at `address`, a multiple of 64. thread: any.
 * errors: EINVAL NULL, 0 or misaligned; EUNSUPPORTED not memory of this device, or the device's addresses have no memory; ENOMEM.
 * After an error `drop` is not called */
kvs_status kvs_buffer_adopt(kvs_device *device, uint64_t address, uint64_t bytes, kvs_drop drop, void *user, kvs_buffer **buffer);

/* The same of a DLManagedTensor: contiguous, on this device. On success its deleter is called when the last claim goes.
 * own: caller; on success `managed` too. thread: any. errors: as kvs_buffer_adopt, and EINVAL not contiguous */
kvs_status kvs_buffer_take(kvs_device *device, void *managed, kvs_buffer **buffer);

/* Elements of a lent tensor, as DLPack counts them. */
typedef enum kvs_element_kind {
    KVS_ELEMENT_INT = 0,
    KVS_ELEMENT_UINT = 1,
    KVS_ELEMENT_FLOAT = 2,
    KVS_ELEMENT_BFLOAT = 4
} kvs_element_kind;

#define KVS_LEND_MAX_DIMS 8

typedef struct kvs_lend_desc {
    uint32_t struct_size;
    uint32_t kind;        /* kvs_element_kind */
    uint32_t bits;        /* of one element: 8, 16, 32 or 64 */
    uint32_t n_dims;
    uint64_t shape[8];
    uint64_t offset;      /* bytes from the buffer's start, a multiple of the element's */
} kvs_lend_desc;

/* Lend a contiguous part of a buffer as a DLManagedTensor. own: `managed`, until its deleter is called, from any thread; it holds a
 * claim on the buffer. thread: any. errors: EINVAL; ENOSPACE the buffer is smaller; EUNSUPPORTED addresses have no memory; ENOMEM */
kvs_status kvs_buffer_lend(kvs_buffer *buffer, const kvs_lend_desc *desc, void **managed);

/* Give back what kvs_buffer_lend lent and nobody took. thread: any. NULL is ignored */
void kvs_lent_release(void *managed);

/* Move bytes between the caller and a buffer, behind whatever the device has been given, and wait.
 * thread: any. errors: EINVAL; ENOSPACE range outside; EUNSUPPORTED addresses have no memory; EIO */
kvs_status kvs_buffer_read_wait(kvs_buffer *buffer, uint64_t offset, void *bytes, uint64_t n_bytes);
kvs_status kvs_buffer_write_wait(kvs_buffer *buffer, uint64_t offset, const void *bytes, uint64_t n_bytes);

/* The device's type and number as DLPack has them: 1 and 0 of the CPU, 2 and the driver's number of a card.
 * thread: any. errors: EINVAL; EUNSUPPORTED addresses have no memory */
kvs_status kvs_device_get_place(kvs_device *device, int32_t *type, int32_t *number);

/* The stream in which a card runs operations, a CUstream of its primary context.
 * own: borrowed, valid while the device lives. thread: any. errors: EINVAL; EUNSUPPORTED a device without streams */
kvs_status kvs_device_get_stream(kvs_device *device, uint64_t *stream);

/* Let whatever is put into `stream` from now on, a CUstream of the same context, begin behind what the device has been given so far.
 * Waits for nothing. thread: any. errors: EINVAL; EUNSUPPORTED a device without streams; EIO */
kvs_status kvs_device_lead_stream(kvs_device *device, uint64_t stream);

/* cffi:end */

KVS_API_END
#endif
