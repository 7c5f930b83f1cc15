/* launch_front.c: the sampling front: chunks of all rows at once, then what they found row by row. */
#include "backends/cuda/launcher.h"
#include "kernels/front_params.h"

_Static_assert(KVS_CARD_FRONT_CHUNK == KVS_FRONT_CHUNK && KVS_CARD_FRONT_LANES == KVS_FRONT_LANES &&
                   KVS_CARD_FRONT_CHUNKS == KVS_FRONT_MAX_CHUNKS && KVS_CARD_FRONT_TAIL == KVS_FRONT_TAIL &&
                   KVS_NO_COLUMN == KVS_NONE,
               "the kernels' numbers are those of the operation");

/* Parts first, then keys. */
static uint64_t parts_bytes(const kvs_bound_op *op, uint64_t n_rows)
{
    return n_rows * kvs_div_up(op->in[0].cols, KVS_FRONT_CHUNK) * sizeof(kvs_front_part);
}

kvs_status kvs_cuda_scratch_front(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes)
{
    if (op->u[0] > KVS_CARD_FRONT_BEST) {
        return kvs_fail(launcher->device, KVS_EUNSUPPORTED, "a sampling front of %u columns: a card finds the best %u", op->u[0],
                        KVS_CARD_FRONT_BEST);
    }
    const uint64_t n_chunks = kvs_div_up(op->in[0].cols, KVS_FRONT_CHUNK);
    *bytes = parts_bytes(op, max_rows) + max_rows * n_chunks * op->u[0] * sizeof(uint64_t);
    return KVS_OK;
}

kvs_status kvs_cuda_launch_front(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    const kvs_cuda_key chunk = {.source = "front", .kernel = "front_chunk", .waits = true};
    const kvs_cuda_key merge = {.source = "front", .kernel = "front_merge", .waits = true};
    const uint64_t scratch = (uint64_t)(uintptr_t)op->scratch;
    const uint32_t n_rows = kvs_operand_rows(&op->in[0], step);
    const kvs_front_params params = {.rows = (uint64_t)(uintptr_t)kvs_operand_data(&op->in[0], step),
                                     .parts = scratch,
                                     .keys = scratch + parts_bytes(op, n_rows),
                                     .out = (uint64_t)(uintptr_t)kvs_operand_data(&op->out[0], step),
                                     .n_cols = op->in[0].cols,
                                     .n_tokens = op->u[1],
                                     .n_best = op->u[0],
                                     .n_chunks = (uint32_t)kvs_div_up(op->in[0].cols, KVS_FRONT_CHUNK)};
    if (n_rows > UINT16_MAX) {
        return kvs_fail(launcher->device, KVS_EOVERFLOW, "%u rows of a sampling front are too many", n_rows);
    }
    const kvs_cuda_dim chunks = {params.n_chunks, n_rows, 1};
    const kvs_status status = kvs_cuda_launch(launcher, &chunk, chunks, (kvs_cuda_dim){KVS_CARD_FRONT_LANES, 1, 1}, 0, &params,
                                              sizeof params);
    return status != KVS_OK ? status
                            : kvs_cuda_launch(launcher, &merge, (kvs_cuda_dim){n_rows, 1, 1},
                                              (kvs_cuda_dim){KVS_CARD_FRONT_MERGERS, 1, 1}, 0, &params, sizeof params);
}
