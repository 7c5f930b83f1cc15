/* weights.c: weights of matmuls on their way to the device. */
#include "backends/cuda/launcher.h"
#include "backends/cuda/weight_form.h"

#include <stdlib.h>

#define STAGED_BYTES (8u << 20) /* formed before they are sent: at least one piece */

kvs_status kvs_cuda_weight_bytes(int type, uint64_t k, uint64_t n, uint64_t *bytes)
{
    kvs_cuda_weight_shape shape;
    kvs_status status = kvs_cuda_weight_shape_make(type, k, n, &shape);
    if (status == KVS_OK) {
        *bytes = shape.bytes;
    }
    return status;
}

kvs_status kvs_cuda_weight_pack(kvs_cuda_launcher *launcher, int type, uint64_t k, uint64_t n, const void *rows,
                                uint64_t address)
{
    kvs_cuda_weight_shape shape;
    kvs_status status = kvs_cuda_weight_shape_make(type, k, n, &shape);
    if (status != KVS_OK) {
        return kvs_fail(launcher->device, status, "a weight of %llu x %llu values of type %d", (kvs_ull)n, (kvs_ull)k, type);
    }
    const uint64_t fitting = STAGED_BYTES / shape.piece_bytes;
    const uint64_t at_once = fitting == 0 ? 1 : fitting < shape.n_pieces ? fitting : shape.n_pieces;
    uint8_t *staged = malloc(at_once * shape.piece_bytes);
    if (staged == NULL) {
        return kvs_fail(launcher->device, KVS_ENOMEM, "no memory to form a weight, %llu bytes",
                        (kvs_ull)(at_once * shape.piece_bytes));
    }
    for (uint64_t first = 0; status == KVS_OK && first < shape.n_pieces; first += at_once) {
        const uint64_t left = shape.n_pieces - first;
        const uint64_t n_pieces = left < at_once ? left : at_once;
        kvs_cuda_weight_form(&shape, rows, first, n_pieces, staged);
        status = kvs_cuda_upload(launcher, address + first * shape.piece_bytes, staged, n_pieces * shape.piece_bytes);
    }
    free(staged);
    return status;
}
