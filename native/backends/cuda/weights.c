/* weights.c: weights of matmuls on their way to the device. */
#include "backends/cuda/launcher.h"
#include "backends/cuda/loader.h"
#include "backends/cuda/weight_form.h"

kvs_status kvs_cuda_weight_bytes(int type, uint64_t k, uint64_t n, uint64_t *bytes)
{
    kvs_cuda_weight_shape shape;
    kvs_status status = kvs_cuda_weight_shape_make(type, k, n, &shape);
    if (status == KVS_OK) {
        *bytes = shape.bytes;
    }
    return status;
}

kvs_status kvs_cuda_weight_size(const kvs_cuda_launcher *launcher, int type, uint64_t k, uint64_t n, uint64_t *bytes)
{
    const kvs_status status = kvs_cuda_weight_bytes(type, k, n, bytes);
    return status == KVS_OK ? KVS_OK
                            : kvs_fail(launcher->device, status, "no device form of a %s weight of %llu x %llu",
                                       kvs_type_name(type), (kvs_ull)n, (kvs_ull)k);
}

/* A weight in file layout. */
struct rows {
    const kvs_cuda_weight_shape *shape;
    const void *bytes;
};

static void form(const void *what, uint64_t first, uint64_t n_pieces, uint8_t *to)
{
    const struct rows *rows = what;
    kvs_cuda_weight_form(rows->shape, rows->bytes, first, n_pieces, to);
}

kvs_status kvs_cuda_weight_pack(const kvs_cuda_launcher *launcher, struct kvs_cuda_loader *loader, int type, uint64_t k,
                                uint64_t n, const void *rows, uint64_t address)
{
    kvs_cuda_weight_shape shape;
    const kvs_status status = kvs_cuda_weight_shape_make(type, k, n, &shape);
    if (status != KVS_OK) {
        return kvs_fail(launcher->device, status, "a weight of %llu x %llu values of type %d", (kvs_ull)n, (kvs_ull)k, type);
    }
    const struct rows what = {&shape, rows};
    const kvs_cuda_load load = {form, &what, shape.n_pieces, shape.piece_bytes, address};
    return kvs_cuda_loader_run(loader, &load);
}
