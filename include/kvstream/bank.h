/* bank.h: snapshots of recurrent states in host memory, for branches, checkpoints and reuse of a prompt's beginning.
 *
 * A bank has slots of equal size, one snapshot each. A capture copies layer i of a folded state to stage slot i mod 2 on the
 * device and from there, by the copy engine, to host memory; the state may be used again as soon as the call returns, while
 * the last layers are still under way. Published, a slot holds its snapshot until it is captured to again or dropped. A
 * restore goes the other way, into the side of the state that nobody reads: it succeeds whole or changes nothing.
 *
 *     idle -> capturing -> idle        a restore begins and ends idle
 *
 * A snapshot is named by its slot and its capture number, which never comes again; whoever asks for another one than the
 * slot holds is refused.
 */
#ifndef KVSTREAM_BANK_H
#define KVSTREAM_BANK_H

#include "kvstream/state.h"

KVS_API_BEGIN

/* cffi:begin */

typedef struct kvs_bank kvs_bank;

typedef struct kvs_bank_desc {
    uint32_t struct_size;
    uint32_t n_layers;
    const kvs_delta_layer *layers; /* [n_layers]: sizes are copied, weights are not looked at */
    uint32_t n_slots;
    uint32_t reserved;
} kvs_bank_desc;

typedef struct kvs_bank_info {
    uint32_t struct_size;
    uint32_t n_slots;
    uint32_t n_valid;       /* slots that hold a snapshot */
    uint32_t is_capturing;
    uint64_t slot_bytes;    /* host memory of one snapshot */
    uint64_t host_bytes;    /* of all slots; touched when first captured to */
    uint64_t device_bytes;  /* two stage slots */
    uint64_t n_captures;    /* published */
    uint64_t n_restores;
} kvs_bank_info;

typedef struct kvs_snapshot_info {
    uint32_t struct_size;
    uint32_t is_valid;
    uint64_t capture;    /* number of the capture, from 1 */
    uint64_t seq_id;     /* of the sequence that the state belonged to */
    uint64_t generation; /* of the state then */
    uint64_t n_tokens;   /* position */
} kvs_snapshot_info;

/* Host bytes of one slot. Metadata only. thread: any. errors: EINVAL sizes out of range; EOVERFLOW */
kvs_status kvs_bank_slot_bytes(kvs_device *device, const kvs_bank_desc *desc, uint64_t *bytes);

/* own: caller. thread: any. errors: as kvs_bank_slot_bytes; ENOMEM */
kvs_status kvs_bank_create(kvs_device *device, const kvs_bank_desc *desc, kvs_bank **bank);

/* Cancels what is under way. NULL is ignored. thread: owner */
void kvs_bank_release(kvs_bank *bank);

/* thread: owner. errors: EINVAL */
kvs_status kvs_bank_get_info(kvs_bank *bank, kvs_bank_info *info);

/* thread: owner. errors: EINVAL slot */
kvs_status kvs_bank_get_snapshot(kvs_bank *bank, uint32_t slot, kvs_snapshot_info *info);

/* Begin a capture; what the slot held is gone. Waits until the copies of all layers but the last two are done.
 * thread: owner of the device's work. errors: EINVAL slot, or a state of other sizes; EBUSY a capture is not published, the state
 * has pending rows (fold first) or an open pass; EIO; the hook's. After a copy that
 * failed the slot is empty, after any other error it is as before; the state is as it was */
kvs_status kvs_bank_capture_wait(kvs_bank *bank, uint32_t slot, kvs_state *state);

/* End the capture: its slot is valid. Without one nothing happens. thread: owner. errors: EIO a copy failed (the slot is empty) */
kvs_status kvs_bank_publish_wait(kvs_bank *bank);

/* Give the capture up: its slot is empty. thread: owner. errors: EINVAL no bank */
kvs_status kvs_bank_cancel(kvs_bank *bank);

/* Forget a snapshot. thread: owner. errors: EINVAL slot; EBUSY it is being captured */
kvs_status kvs_bank_drop(kvs_bank *bank, uint32_t slot);

/* Bring a snapshot into a state, which then stands at its position and belongs to no sequence. thread: owner of the device's
 * work. errors: EINVAL slot, or a state of other sizes; ENOTFOUND the slot is empty; ESTALE it holds another capture, or that
 * of another sequence; EBUSY a capture is not published, or the state has an open pass; EIO; the hook's. On any error the state is as
 * before */
kvs_status kvs_bank_restore_wait(kvs_bank *bank, uint32_t slot, uint64_t capture, uint64_t seq_id, kvs_state *state);

/* thread: owner. errors: ECORRUPT */
kvs_status kvs_bank_check_integrity(kvs_bank *bank);

/* cffi:end */

KVS_API_END
#endif
