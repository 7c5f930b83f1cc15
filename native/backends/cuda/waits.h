/* waits.h: waits of the host for a card. Each has an end, past which the card counts as lost.
 *
 * While it does, nothing is begun and nothing is waited for: every call is refused at once, with the text of the
 * wait that had no end. Once all streams of the device are found to have finished, the card is well again and goes
 * on.
 *
 * Calls of the driver that wait by themselves, without an end, are kept from doing it. What frees, unregisters or
 * unloads does so only behind kvs_cuda_waits_may_free; what may not be freed is left to the card, on purpose, and
 * counted. A launch waits where the queue of its stream is full: kvs_cuda_waits_pace keeps it from filling up.
 * Calls that allocate, register or load are made while no wait has failed, and are the driver's to end; one that
 * does not come back to a thread of ours is waited for with an end too, and keeps what that thread uses (`stuck`). */
#ifndef KVS_NATIVE_BACKENDS_CUDA_WAITS_H
#define KVS_NATIVE_BACKENDS_CUDA_WAITS_H

#include "backends/cuda/driver.h"

/* Far longer than any pass takes, so that only a card that stands still gets there. */
#define KVS_CUDA_WAIT_LIMIT_NS (UINT64_C(60) * 1000000000)

typedef struct kvs_cuda_waits kvs_cuda_waits;

/* Make the waits of a device; they become driver->waits. `limit_ns` of 0: KVS_CUDA_WAIT_LIMIT_NS. The context is
 * entered. errors: ENOMEM; EIO */
kvs_status kvs_cuda_waits_create(kvs_device *device, kvs_cuda_driver *driver, uint64_t limit_ns);

/* The context is entered, nobody waits any more, and no thread is stuck. A lost card keeps its events. */
void kvs_cuda_waits_destroy(kvs_cuda_driver *driver);

/* A stream of the device, borrowed, and what goes into it, static text. At most 8. thread: while the device is made */
void kvs_cuda_waits_watch(const kvs_cuda_driver *driver, cu_stream stream, const char *what);
/* One that is about to be destroyed, watched or not. thread: while the device goes */
void kvs_cuda_waits_unwatch(const kvs_cuda_driver *driver, cu_stream stream);

/* Whether something may be begun: one load where the card is not lost. thread: any. errors: EIO the card is lost */
kvs_status kvs_cuda_waits_admit(const kvs_cuda_driver *driver);
bool kvs_cuda_waits_is_lost(const kvs_cuda_driver *driver);

/* Wait for all of a stream, or for an event, which counts as come where it was never recorded; `format` says what
 * for, with numbers, and is read only when the wait fails. What is there is found at once, of a lost card too. The
 * context is entered. thread: any. errors: EIO the driver's, or past the limit, which loses the card */
kvs_status kvs_cuda_wait_stream(const kvs_cuda_driver *driver, cu_stream stream, const char *format, ...)
    KVS_PRINTF(3, 4);
kvs_status kvs_cuda_wait_event(const kvs_cuda_driver *driver, cu_event event, const char *format, ...)
    KVS_PRINTF(3, 4);

/* Whether the card has finished with everything, so that so many bytes may go; else they stay, and are counted as
 * one piece (0: nothing to count). A wait like the others. The context is entered. thread: any */
bool kvs_cuda_waits_may_free(const kvs_cuda_driver *driver, uint64_t n_bytes);

/* Before a launch: wait until fewer are under way than a queue holds. The context is entered. thread: the one that
 * launches. errors: as of a wait */
kvs_status kvs_cuda_waits_pace(const kvs_cuda_driver *driver, cu_stream stream);

/* Threads that wait for another one of ours, which waits with the limit itself, wait so long for it: its error
 * comes first. */
uint64_t kvs_cuda_waits_patience_ns(const kvs_cuda_driver *driver);

/* A thread has not come back from the driver in that time: the card is lost, and cannot be well again before the
 * thread has come back. Returns KVS_EIO. thread: any */
kvs_status kvs_cuda_waits_give_up(const kvs_cuda_driver *driver, const char *format, ...) KVS_PRINTF(2, 3);
void kvs_cuda_waits_came_back(const kvs_cuda_driver *driver);
/* The thread is left behind: even if it comes back it uses the device's parts, so they stay. thread: while the device goes */
void kvs_cuda_waits_leave_thread(const kvs_cuda_driver *driver);
/* Threads that have not come back, or are left behind: what they use must stay. */
uint32_t kvs_cuda_waits_stuck(const kvs_cuda_driver *driver);

/* Whether the card is lost, and what was left to it. */
void kvs_cuda_waits_describe(const kvs_cuda_driver *driver, kvs_device_info *info);

#endif
