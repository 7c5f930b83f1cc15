/* catalogue.c: kernels as whoever compiles them, or has them in a file, sees them. */
#include "backends/cuda/backend.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/pack.h"
#include "backends/cuda/planner.h"
#include "backends/cuda/sources.h"
#include "base/digest.h"

#include <string.h>

static const char OPTIONS[] = "c++17 fma=0 ftz=0 prec_div=1 prec_sqrt=1";

/* NULL: a device that needs none. */
static kvs_cuda_kernels *kernels_of(kvs_device *device)
{
    const struct kvs_device_view view = kvs_device_backend(device);
    kvs_cuda_kernels *const kernels = kvs_cuda_backend_kernels(view);
    return kernels != NULL ? kernels : kvs_cuda_planner_kernels(view);
}

static kvs_status refuse_none(kvs_device *device)
{
    return kvs_fail(device, KVS_ENOTFOUND, "the device needs no kernels");
}

kvs_status kvs_kernel_count(kvs_device *device, uint32_t *n_needed)
{
    if (device == NULL || n_needed == NULL) {
        return kvs_refuse(device);
    }
    kvs_cuda_kernels *const kernels = kernels_of(device);
    *n_needed = kernels == NULL ? 0 : kvs_cuda_kernels_count(kernels);
    return KVS_OK;
}

kvs_status kvs_kernel_get(kvs_device *device, uint32_t index, kvs_kernel_key *key)
{
    if (device == NULL || !KVS_STRUCT_OK(key)) {
        return kvs_refuse(device);
    }
    kvs_cuda_kernels *const kernels = kernels_of(device);
    return kernels == NULL ? refuse_none(device) : kvs_cuda_kernels_get(kernels, index, key);
}

kvs_status kvs_kernel_give(kvs_device *device, uint32_t index, const void *image, uint64_t n_bytes)
{
    if (device == NULL || image == NULL || n_bytes == 0) {
        return kvs_refuse(device);
    }
    kvs_cuda_kernels *const kernels = kernels_of(device);
    return kernels == NULL ? refuse_none(device) : kvs_cuda_kernels_give(kernels, index, image);
}

kvs_status kvs_kernel_give_pack(kvs_device *device, const void *pack, uint64_t n_bytes, uint32_t *n_given)
{
    if (device == NULL || pack == NULL || n_given == NULL) {
        return kvs_refuse(device);
    }
    kvs_cuda_kernels *const kernels = kernels_of(device);
    uint8_t digest[KVS_DIGEST_BYTES];
    (void)kvs_kernel_get_digest(digest);
    return kernels == NULL ? refuse_none(device) : kvs_cuda_pack_give(device, kernels, digest, pack, n_bytes, n_given);
}

kvs_status kvs_kernel_get_digest(uint8_t *digest)
{
    if (digest == NULL) {
        return KVS_EINVAL;
    }
    kvs_digest sum;
    kvs_digest_begin(&sum);
    kvs_digest_add(&sum, OPTIONS, sizeof OPTIONS);
    for (const kvs_cuda_source *source = kvs_cuda_sources; source->name != NULL; source++) {
        kvs_digest_add(&sum, source->name, strlen(source->name) + 1);
        kvs_digest_add(&sum, source->text, strlen(source->text) + 1);
    }
    kvs_digest_end(&sum, digest);
    return KVS_OK;
}

kvs_status kvs_kernel_get_options(const char **text)
{
    if (text == NULL) {
        return KVS_EINVAL;
    }
    *text = OPTIONS;
    return KVS_OK;
}

kvs_status kvs_kernel_get_source(uint32_t index, const char **name, const char **text)
{
    if (name == NULL || text == NULL) {
        return KVS_EINVAL;
    }
    uint32_t at = 0;
    while (at < index && kvs_cuda_sources[at].name != NULL) {
        at++;
    }
    if (kvs_cuda_sources[at].name == NULL) {
        return KVS_ENOTFOUND;
    }
    *name = kvs_cuda_sources[at].name;
    *text = kvs_cuda_sources[at].text;
    return KVS_OK;
}
