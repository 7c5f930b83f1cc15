/* tape.h: a model as a flat list of operations, recorded once, sealed, bound to leases, replayed for every pass.
 *
 * Life: create, add tensors and operations, seal (types, shapes, order, workspace), bind (addresses, at an arena epoch), run.
 * What changes from pass to pass is the pass description alone.
 */
#ifndef KVSTREAM_TAPE_H
#define KVSTREAM_TAPE_H

#include "kvstream/pager.h"
#include "kvstream/state.h"

KVS_API_BEGIN

/* cffi:begin */

typedef struct kvs_tape kvs_tape;
typedef struct kvs_binding kvs_binding;

/* How a weight lies on the device. */
typedef enum kvs_weight_layout {
    KVS_WEIGHT_PANELS = 0, /* repacked for matmul; device memory of its own */
    KVS_WEIGHT_ROWS = 1    /* as the file holds it; the caller's memory is borrowed while the weight lives, or copied to a device
                            * that cannot read it */
} kvs_weight_layout;

#define KVS_NONE 0xffffffffu /* no tensor, no weight */

typedef enum kvs_tensor_kind {
    KVS_TENSOR_WORK = 0,   /* float32 rows in the workspace */
    KVS_TENSOR_OUTPUT = 1, /* float32 rows in memory that each pass supplies */
    KVS_TENSOR_INPUT = 2   /* float32 rows that each pass supplies; no operation writes them. Rows are those of the pass */
} kvs_tensor_kind;

typedef enum kvs_row_kind {
    KVS_ROWS_PASS = 0,  /* one per token of the pass */
    KVS_ROWS_OUT = 1    /* one per requested output row */
} kvs_row_kind;

typedef struct kvs_tensor_desc {
    uint32_t struct_size;
    uint32_t kind; /* kvs_tensor_kind */
    uint32_t rows; /* kvs_row_kind */
    uint32_t cols; /* float32 per row */
} kvs_tensor_desc;

/* shape of a tensor below: [rows][cols] float32, row after row. n = rows of the pass. */
typedef enum kvs_op_code {
    /* out[0] = rows of weights[0] (ROWS layout) named by the pass's tokens */
    KVS_OP_EMBED = 0,
    /* out[0] = in[0] / sqrt(mean(in[0]^2) + f[0]) * weights[0], over groups of u[0] values (0: the whole row) */
    KVS_OP_NORM = 1,
    /* out[i] (op)= weights[i] (PANELS) in[0] for i < u[0] <= 4. weights[4], if any: RMS norm of in[0] first, eps f[0].
     * u[1]: 0 store, 1 add to out, 2 out[0] = silu(weights[0] in) * (weights[1] in) with u[0] == 2.
     * u[2]: 1, 2: silu(in[1]) or sigmoid(in[1]) times in[0], behind the norm, is what is multiplied; the norm is then over
     * groups of u[3] values (0: the whole row), a power of two from 32 to 512 */
    KVS_OP_MATMUL = 2,
    /* out[0] = cos and sin of each position and pair, [n][u[0] / 2][2]; u[0] rotary values, f64[0] base, f[0] factor of
     * positions; weights[0], if any: u[0] / 2 float32 divisors of the frequencies. Pair i turns by the position on axis 1 where
     * i % 3 == 1 and i < 3 * u[1], on axis 2 where i % 3 == 2 and i < 3 * u[2], else on axis 0 */
    KVS_OP_ROPE_TABLE = 3,
    /* rotate the first u[1] values of each head of u[0] values of out[0] by table in[0], another tensor; u[2]: 0 pairs
     * (2i, 2i+1), 1 pairs (i, i + u[1] / 2). weights[0], if any: RMS norm of each head first, eps f[0]. u[3], if not 0:
     * Walsh-Hadamard over blocks of u[3] values behind it, which divide the head. out[1], if any: rows that are turned alike,
     * with weights[1] for weights[0]. out[2], if any, behind out[1]: rows that only have the Walsh-Hadamard rotation, u[3] not 0 */
    KVS_OP_ROPE = 4,
    /* Walsh-Hadamard over blocks of u[0] values of out[0], in place */
    KVS_OP_HADAMARD = 5,
    /* encode k = in[0], v = in[1] into the tail pages of `layer` */
    KVS_OP_KV_WRITE = 6,
    /* out[0] = attention of q = in[0] over all pages of `layer`; u[0] query heads, f[0] score scale. u[1], if not 0: Walsh-Hadamard
     * over blocks of u[1] values behind it, which divide a head of V */
    KVS_OP_ATTEND = 7,
    /* out[0] = act(in[0]) * in[1]; u[0]: 0 silu, 1 sigmoid. in[0] may have one column, which then gates the whole row */
    KVS_OP_GLU = 8,
    /* out[0] += in[0] */
    KVS_OP_ADD = 9,
    /* out[0] (rows OUT) = the requested rows of in[0] */
    KVS_OP_GATHER = 10,
    /* out[0] = gated delta net of convolution inputs in[0] [n][C], beta in[1] and alpha in[2] [n][n_value_heads], both before
     * their activations; `layer` from kvs_tape_add_delta. u[0]: 0 row by row, into the log; 1 in chunks, into the state.
     * columns of out[0]: n_value_heads * head_dim */
    KVS_OP_DELTA = 11,
    /* out[0] = sum over the u[1] experts of largest router logit in[1] [n][u[0]] (of equal ones the lower number) of
     * w_e * down_e(silu(gate_e in[0]) * up_e in[0]); w = softmax over all logits, of the chosen ones divided by their sum (at
     * least 6.1e-5) times f[0]. weights[0], [1], [2]: gate, up, down (PANELS), one expert after another; weights[3], [4], [5], if
     * any: float32 factors of each expert's gate, up and down */
    KVS_OP_EXPERTS = 12,
    /* out[0] = what a sampler looks at of the logits in[0] (rows OUT, both), in 2 * u[0] + KVS_FRONT_TAIL words of 32 bits: numbers of
     * the u[0] best of the first u[1] columns by (value falling, number rising), those that are not minus infinity; their
     * values; and the words of kvs_front_word. Runs only in passes with KVS_PASS_FRONT, hence out[0] is an OUTPUT tensor */
    KVS_OP_FRONT = 13
} kvs_op_code;

/* Words behind the best columns of a row. */
typedef enum kvs_front_word {
    KVS_FRONT_COUNT = 0, /* best columns, as many as there are up to u[0] */
    KVS_FRONT_BAD = 1,   /* the first column that is NaN or infinite upwards, of all columns; KVS_NONE: none. Where there is one it is
                          * the first value, and all other words are 0 */
    KVS_FRONT_SUM = 2    /* float64 in two words: sum of exp(value - best value) over the first u[1] columns, in chunks and lanes:
                          * native/backends/cpu/front.h states the order */
} kvs_front_word;

#define KVS_FRONT_TAIL 4
#define KVS_FRONT_MAX_BEST 512
#define KVS_FRONT_CHUNK 8192     /* columns that are summed by themselves */
#define KVS_FRONT_LANES 256
#define KVS_FRONT_MAX_CHUNKS 128

/* What a pass wants beside its outputs. */
typedef enum kvs_pass_flag {
    KVS_PASS_FRONT = 1 /* run the front operations; else their outputs are left as they are */
} kvs_pass_flag;

/* How a delta operation ends, its u[0]. */
typedef enum kvs_delta_mode {
    KVS_DELTA_LOGGED = 0, /* row by row; rows go to the log and may be accepted in part */
    KVS_DELTA_CHUNKED = 1 /* in chunks that begin at multiples of KVS_CHUNK_TOKENS; rows go into the state */
} kvs_delta_mode;

/* Rows of an operation with KVS_OP_PROMPT are a prompt's: a device may sum them in another order than
 * rows that are decoded, one order for any number of them. */
typedef enum kvs_op_flags {
    KVS_OP_PROMPT = 1
} kvs_op_flags;

typedef struct kvs_op_desc {
    uint32_t struct_size;
    uint32_t code; /* kvs_op_code */
    uint32_t layer;
    uint32_t flags; /* kvs_op_flags */
    uint32_t in[3];      /* tensors, KVS_NONE where unused */
    uint32_t out[4];
    uint32_t weights[6]; /* numbers from kvs_tape_add_weight, KVS_NONE where unused */
    uint32_t u[4];
    float f[2];
    double f64[1];
} kvs_op_desc;

typedef struct kvs_tape_info {
    uint32_t struct_size;
    uint32_t is_sealed;
    uint32_t n_ops;
    uint32_t n_tensors;
    uint32_t n_layers;   /* cache layers that the operations name */
    uint32_t max_rows;
    uint64_t workspace_bytes;  /* of the leased workspace region: tensors by lifetime, and scratch */
    uint64_t weight_bytes;     /* read by one pass */
    uint32_t n_delta_layers;
    uint32_t is_logged;        /* its delta operations go row by row, into the log */
} kvs_tape_info;

/* Everything that differs between two passes. */
typedef struct kvs_pass_desc {
    uint32_t struct_size;
    uint32_t n_rows;
    const uint32_t *tokens;      /* [n_rows] */
    const uint32_t *positions;   /* [n_axes][n_rows] rotary positions; NULL: row numbers of the sequence */
    uint32_t n_out_rows;
    uint32_t n_outputs;
    const uint32_t *out_rows;    /* [n_out_rows] rows of the pass, rising */
    float *const *outputs;       /* [n_outputs] one per OUTPUT tensor in the order they were added, [rows][cols]. NULL, on a device
                                  * with memory of its own: the rows stay there, for kvs_binding_read_output */
    const uint32_t *cancel;      /* read between operations; nonzero stops the pass. May be NULL */
    uint32_t n_axes;             /* of positions: 1 (or 0), the same on every axis, or 3 */
    uint32_t reserved;
    kvs_state *state;            /* of the pass's sequence, for a tape with delta operations */
    const float *const *inputs;  /* [n_inputs] one per INPUT tensor in the order they were added, [n_rows][cols] */
    uint32_t n_inputs;
    uint32_t flags;              /* kvs_pass_flag */
} kvs_pass_desc;

/* Bring a weight to the device. shape: rows [n][k / block_values] blocks of `type`, row n after row.
 * own: caller. With ROWS layout `rows` is borrowed until the weight is released. With `rows` NULL the weight is declared
 * only: tapes that use it can be sealed and measured, not bound, and it takes no device memory. thread: any.
 * errors: EINVAL; EUNSUPPORTED type; ENOMEM */
kvs_status kvs_weight_create(kvs_device *device, int type, uint64_t k, uint64_t n, const void *rows, uint32_t layout,
                             kvs_weight **weight);
/* Numbers that multiply what a matmul with the weight gives, before anything is added to it: output row r is multiplied by
 * number r / (n / n_scales). shape: scales [n_scales], copied. Tapes that are bound already do not see them. thread: owner.
 * errors: EINVAL a weight of ROWS layout, n_scales that does not divide n, a number that is not finite; ENOMEM */
kvs_status kvs_weight_set_scales(kvs_weight *weight, const float *scales, uint64_t n_scales);
/* thread: any. NULL is ignored */
void kvs_weight_release(kvs_weight *weight);
/* Device bytes it takes or, declared only, would take (0 for rows that are borrowed). thread: any. errors: EINVAL */
kvs_status kvs_weight_get_bytes(kvs_weight *weight, uint64_t *bytes);

/* own: caller. `max_rows` bounds every pass, `max_out_rows` its output rows. thread: any. errors: EINVAL; ENOMEM */
kvs_status kvs_tape_create(kvs_device *device, uint32_t max_rows, uint32_t max_out_rows, kvs_tape **tape);

/* NULL is ignored. thread: owner */
void kvs_tape_release(kvs_tape *tape);

/* `id` numbers tensors, weights and layers each from 0. A weight is retained. thread: owner.
 * errors: EINVAL; EBUSY sealed; ENOMEM; kvs_record_layout's for a layer */
kvs_status kvs_tape_add_tensor(kvs_tape *tape, const kvs_tensor_desc *desc, uint32_t *id);
kvs_status kvs_tape_add_weight(kvs_tape *tape, kvs_weight *weight, uint32_t *id);
kvs_status kvs_tape_add_layer(kvs_tape *tape, const kvs_kv_layer *layer, uint32_t *id);

/* A recurrent layer; these are numbered from 0 too. Its weights are retained. thread: owner.
 * errors: EINVAL sizes or weights, by name; EBUSY sealed; ENOMEM */
kvs_status kvs_tape_add_delta(kvs_tape *tape, const kvs_delta_layer *layer, uint32_t *id);

/* thread: owner. errors: EINVAL unknown code or ids, wrong shape, each named; EBUSY sealed; ENOMEM */
kvs_status kvs_tape_add_op(kvs_tape *tape, const kvs_op_desc *desc);

/* Freeze: every tensor must be written before it is read, but for inputs, which no operation writes; every output is written;
 * a layer is written once, before it is attended to, and layers are attended to in rising order; each recurrent layer has one
 * operation, all row by row or all in chunks. Tensors get workspace by lifetime, first fit.
 * thread: owner. errors: EINVAL naming operation and tensor or layer; EOVERFLOW; ENOMEM */
kvs_status kvs_tape_seal(kvs_tape *tape);

/* thread: any. errors: EINVAL */
kvs_status kvs_tape_get_info(kvs_tape *tape, kvs_tape_info *info);

/* Give a sealed tape its addresses. `arena` is the arena of the lease; the binding holds its epoch. `pager` may be NULL for a
 * tape without attention. own: caller; retains tape and lease, borrows the pager. thread: owner.
 * errors: EINVAL not sealed, a weight declared only, or layers unlike the pager's; ENOSPACE workspace too small, with both numbers; ENOMEM */
kvs_status kvs_tape_bind(kvs_tape *tape, kvs_arena *arena, kvs_lease *workspace, kvs_pager *pager, kvs_binding **binding);

/* NULL is ignored. thread: owner */
void kvs_binding_release(kvs_binding *binding);

/* Replay every operation for one pass, which kvs_pager_begin has opened with the same n_rows. Returns when the outputs are
 * written. thread: owner of the device's work. errors: EINVAL; ESTALE the arena's epoch moved on, or the state belongs to
 * another sequence or position; EBUSY no pass open, or the state's last pass not accepted; ECANCELLED; EIO; the hook's. After
 * an error only kvs_pager_end(pager, 0) and kvs_state_accept(state, seq, 0) are legal */
kvs_status kvs_binding_run(kvs_binding *binding, const kvs_pass_desc *pass);

/* The same in two calls: the beginning gives the device all there is to do and comes back while it is at work, the end waits for
 * it. What `pass` points to, but its cancel, stays as it is until then, and no other pass of the device begins. The CPU computes
 * in the beginning. thread: owner of the device's work. errors: as kvs_binding_run; EBUSY a pass that has not ended, or none
 * that has begun. Where the beginning fails there is no end */
kvs_status kvs_binding_begin(kvs_binding *binding, const kvs_pass_desc *pass);
kvs_status kvs_binding_end(kvs_binding *binding);

/* Give up a pass that was begun, where there is one: waits for the device, and writes no outputs. As after an error of
 * kvs_binding_run, what was opened for the pass is then ended with 0 rows. thread: owner of the device's work. errors: EINVAL */
kvs_status kvs_binding_abort(kvs_binding *binding);

/* The number of the binding's newest pass, by which its outputs are read: no two passes of a device have one. 0: it failed, none
 * has been run, or the device has no memory of its own. thread: owner of the device's work. errors: EINVAL */
kvs_status kvs_binding_get_pass(kvs_binding *binding, uint64_t *pass);

/* Rows of an output of a pass, from where the device still has them: of any output, whether the pass handed it out or not.
 * own: caller. shape: to [n_rows][cols]. thread: owner of the device's work. errors: EINVAL rows or an output that the pass did
 * not have; ESTALE the device has begun another pass since; EUNSUPPORTED a device without memory of its own, whose caller has
 * all outputs; EIO */
kvs_status kvs_binding_read_output(kvs_binding *binding, uint64_t pass, uint32_t output, uint32_t first_row, uint32_t n_rows,
                                   float *to);

/* cffi:end */

KVS_API_END
#endif
