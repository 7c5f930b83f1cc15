/* state.h: the recurrent state of one sequence on models with gated delta net layers, with exact rollback.
 *
 * Per layer a state holds the matrix M of each value head, the last conv_width - 1 convolution inputs, and a log: for each
 * row of the newest pass what the recurrence consumed (convolution input, beta and alpha before their activations). Rows of
 * the log that were accepted are pending: they belong to the sequence and are not in M yet. A pass folds them first.
 *
 * Everything exists twice. A pass reads one side and writes the other; accepting it swaps them, so a pass that fails, is
 * cancelled or accepted with no row leaves the state as it was, to the bit. A logged pass (decode, verify) may be accepted
 * in part: M then takes the accepted rows in the next pass, in the order in which plain decoding would have. A chunked pass
 * (prefill) is accepted whole or not at all.
 *
 *     position = folded_tokens + pending_rows = tokens of the sequence
 *
 * A state belongs to one sequence. It refuses to run beside another one, beside one that was truncated without it, or at
 * another position: the arithmetic of KV and state would not belong together.
 */
#ifndef KVSTREAM_STATE_H
#define KVSTREAM_STATE_H

#include "kvstream/kv.h"

KVS_API_BEGIN

/* cffi:begin */

typedef struct kvs_weight kvs_weight;
typedef struct kvs_state kvs_state;

#define KVS_CHUNK_TOKENS 64 /* chunks of the chunked form begin at multiples of this, in absolute positions */

/* One gated delta net layer. C = head_dim * (2 * n_key_heads + n_value_heads) convolution channels: queries, keys, values.
 * Value head p uses key head p % n_key_heads. Weights are F32 in ROWS layout. */
typedef struct kvs_delta_layer {
    uint32_t n_key_heads;
    uint32_t n_value_heads; /* a multiple of n_key_heads */
    uint32_t head_dim;      /* of keys and values: 16, 32, 64 or 128 */
    uint32_t conv_width;    /* taps, 2 to 8; the last one is the current token's */
    float norm_eps;         /* of the norm of queries and keys, added to the sum of squares */
    uint32_t reserved;
    kvs_weight *conv;       /* [C][conv_width] */
    kvs_weight *dt_bias;    /* [1][n_value_heads] */
    kvs_weight *decay;      /* [1][n_value_heads], -exp(A_log) */
} kvs_delta_layer;

typedef struct kvs_state_desc {
    uint32_t struct_size;
    uint32_t n_layers;
    const kvs_delta_layer *layers; /* [n_layers], copied; weights are retained */
    uint32_t log_rows;             /* widest logged pass */
    uint32_t reserved;
} kvs_state_desc;

typedef struct kvs_state_info {
    uint32_t struct_size;
    uint32_t n_layers;
    uint32_t log_rows;
    uint32_t pending_rows;   /* accepted rows of the log that are not folded */
    uint32_t open_rows;      /* of a pass that has run and waits to be accepted, 0 none */
    uint32_t reserved;
    uint64_t position;       /* folded_tokens + pending_rows */
    uint64_t folded_tokens;
    uint64_t seq_id;         /* of the sequence it belongs to, 0 none */
    uint64_t generation;     /* rises with every accept, fold, truncate, clear, copy and load */
    uint64_t device_bytes;
    uint64_t image_bytes;    /* what kvs_state_save writes */
} kvs_state_info;

/* Device bytes of a state, outside any arena. Metadata only. thread: any. errors: EINVAL sizes out of range, with the layer's
 * number; EOVERFLOW */
kvs_status kvs_state_bytes(kvs_device *device, const kvs_state_desc *desc, uint64_t *bytes);

/* A state at position 0 that belongs to no sequence. own: caller. thread: any.
 * errors: as kvs_state_bytes; EINVAL a weight of the wrong shape, declared only or of another device; ENOMEM */
kvs_status kvs_state_create(kvs_device *device, const kvs_state_desc *desc, kvs_state **state);

/* NULL is ignored. thread: owner */
void kvs_state_release(kvs_state *state);

/* thread: owner. errors: EINVAL */
kvs_status kvs_state_get_info(kvs_state *state, kvs_state_info *info);

/* From now on the state belongs to this sequence, which is not retained. thread: owner.
 * errors: EBUSY a pass waits to be accepted; EINVAL the sequence's committed tokens differ from the position, or another device */
kvs_status kvs_state_attach(kvs_state *state, kvs_seq *seq);

/* End the pass that has run: its first n_rows rows are accepted. Called after kvs_pager_end with the same number. 0 gives the
 * pass up, also one that failed in the middle, whatever the sequence holds. A chunked pass takes all its rows or none. thread: owner.
 * errors: EINVAL more rows than the pass has, part of a chunked pass, or another number than the sequence has committed (the
 * pass is given up); EBUSY no pass has run and n_rows is not 0; ESTALE another sequence */
kvs_status kvs_state_accept(kvs_state *state, kvs_seq *seq, uint32_t n_rows);

/* Follow the sequence, which has been truncated to n_tokens: drop accepted rows at the end of the log. On any error nothing
 * has changed. thread: owner. errors: ENOTFOUND n_tokens lies before folded_tokens: restore a snapshot or clear; EINVAL beyond the
 * position, or not what the sequence holds; EBUSY a pass waits to be accepted; ESTALE another sequence */
kvs_status kvs_state_truncate(kvs_state *state, kvs_seq *seq, uint64_t n_tokens);

/* Fold pending rows into M now. The bits are those of folding in the next pass. thread: owner of the device's work.
 * errors: EBUSY a pass waits to be accepted; EIO; the hook's. On any error the state is as before */
kvs_status kvs_state_fold(kvs_state *state);

/* Back to position 0 of no sequence, whatever was open. thread: owner. errors: EINVAL; EIO */
kvs_status kvs_state_clear(kvs_state *state);

/* Make `to` equal to `from`, pending rows too; `to` belongs to no sequence then. Layers and log_rows must agree. thread: owner of the
 * device's work. errors: EINVAL; EBUSY a pass of either waits to be accepted; EIO; the hook's */
kvs_status kvs_state_copy(kvs_state *from, kvs_state *to);

/* The folded state and the pending log rows as bytes, in a layout with a version of its own: a state of the same geometry
 * takes them back, whatever its log_rows, where the pending rows fit. shape: bytes [image_bytes]. thread: owner.
 * errors: EINVAL; EBUSY; EIO; the hook's; for load also EFORMAT, which leaves the state as it was, and ENOSPACE pending rows. A state that
 * has loaded belongs to no sequence */
kvs_status kvs_state_save(kvs_state *state, void *bytes, uint64_t n_bytes);
kvs_status kvs_state_load(kvs_state *state, const void *bytes, uint64_t n_bytes);

/* The image of some layers out of one of more: of n_layers from first_layer on. part NULL asks for the size alone.
 * shape: image [n_bytes], part [*part_bytes], which must be the size. thread: any. errors: EFORMAT the image is damaged; EINVAL layers that it
 * has not, or another size */
kvs_status kvs_state_image_cut(const void *image, uint64_t n_bytes, uint32_t first_layer, uint32_t n_layers, void *part,
                               uint64_t *part_bytes);

/* One image of the layers of two, those of the first before those of the second. joined NULL asks for the size alone.
 * shape: images [first_bytes] and [second_bytes], joined [*joined_bytes], which must be the size. thread: any. errors: EFORMAT an image is
 * damaged; EINVAL they differ in folded tokens or pending rows, or another size */
kvs_status kvs_state_image_join(const void *first, uint64_t first_bytes, const void *second, uint64_t second_bytes, void *joined,
                                uint64_t *joined_bytes);

/* thread: owner. errors: ECORRUPT */
kvs_status kvs_state_check_integrity(kvs_state *state);

/* cffi:end */

KVS_API_END
#endif
