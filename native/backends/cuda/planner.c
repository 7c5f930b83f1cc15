/* planner.c: the table of a CUDA device without a card. */
#include "backends/cuda/planner.h"

#include "backends/cuda/cuda.h"
#include "backends/cuda/ops.h"

#include <stdio.h>
#include <stdlib.h>

/* Shared memory that a block of an architecture may ask for; of one that is not in the list the least of all is taken, so that
 * what is planned runs.
 * Source: CUDA C++ Programming Guide, technical specifications per compute capability, less what the driver keeps. */
static const struct {
    uint32_t arch;
    uint32_t shared_kib;
} BLOCKS[] = {{75, 64},   {80, 163},  {86, 99},   {87, 163},  {89, 99},  {90, 227},
              {100, 227}, {103, 227}, {110, 227}, {120, 99}, {121, 99}};

static uint32_t shared_bytes_of(uint32_t arch)
{
    for (size_t i = 0; i < sizeof BLOCKS / sizeof *BLOCKS; i++) {
        if (BLOCKS[i].arch == arch) {
            return BLOCKS[i].shared_kib * 1024;
        }
    }
    return BLOCKS[0].shared_kib * 1024;
}

static kvs_status refuse(void *self)
{
    const struct kvs_cuda *cuda = self;
    return kvs_fail(cuda->device, KVS_EUNSUPPORTED,
                    "this device plans for sm_%u without a card: it has no memory and runs nothing", cuda->driver.arch);
}

static kvs_status device_alloc(void *self, uint64_t bytes, uint64_t alignment, uint64_t *address)
{
    (void)bytes, (void)alignment, (void)address;
    return refuse(self);
}

static kvs_status host_alloc(void *self, uint64_t bytes, uint64_t *host_base)
{
    (void)bytes, (void)host_base;
    return refuse(self);
}

static kvs_status copy_submit_many(void *self, const kvs_copy *copies, uint32_t n_copies)
{
    (void)copies, (void)n_copies;
    return refuse(self);
}

static kvs_status copy_drain(void *self)
{
    (void)self;
    return KVS_OK;
}

static kvs_status weight_bytes(void *self, int type, uint64_t k, uint64_t n, uint64_t *bytes)
{
    const struct kvs_cuda *cuda = self;
    return kvs_cuda_weight_size(&cuda->launcher, type, k, n, bytes);
}

static kvs_status weight_pack(void *self, int type, uint64_t k, uint64_t n, const void *rows, uint64_t address)
{
    (void)type, (void)k, (void)n, (void)rows, (void)address;
    return refuse(self);
}

static kvs_status op_scratch_bytes(void *self, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes)
{
    struct kvs_cuda *cuda = self;
    return kvs_cuda_plan_op(&cuda->launcher, op, max_rows, bytes);
}

static kvs_status run_op(void *self, const kvs_bound_op *op, const struct kvs_step *step)
{
    (void)op, (void)step;
    return refuse(self);
}

static kvs_status pass_begin(void *self, struct kvs_step *step)
{
    (void)step;
    return refuse(self);
}

static void describe(void *self, kvs_device_info *info)
{
    const struct kvs_cuda *cuda = self;
    info->arch = cuda->driver.arch;
    (void)snprintf(info->name, sizeof info->name, "no card, plans for sm_%u", cuda->driver.arch);
}

static void destroy(void *self)
{
    struct kvs_cuda *cuda = self;
    kvs_cuda_kernels_destroy(cuda->kernels);
    free(cuda);
}

/* Whoever has neither memory nor a pass reaches no other entry. */
static const kvs_backend TABLE = {
    .name = "cuda",
    .has_no_bytes = true,
    .copies_rows = true,
    .device_alloc = device_alloc,
    .host_alloc = host_alloc,
    .copy_submit_many = copy_submit_many,
    .copy_drain = copy_drain,
    .weight_bytes = weight_bytes,
    .weight_pack = weight_pack,
    .op_scratch_bytes = op_scratch_bytes,
    .run_op = run_op,
    .pass_begin = pass_begin,
    .describe = describe,
    .destroy = destroy,
};

kvs_status kvs_cuda_planner_create(kvs_device *device, const kvs_device_desc *desc, const kvs_backend **table, void **self)
{
    if (desc->flags != 0 || desc->isa != KVS_ISA_BEST || desc->ordinal != 0) {
        return kvs_fail(device, KVS_EUNSUPPORTED, "a device that plans without a card has no flags, instruction set or number");
    }
    if (desc->arch < KVS_CUDA_MIN_ARCH) {
        return kvs_fail(device, KVS_EUNSUPPORTED, "sm_%u is not supported, the oldest architecture is sm_%u", desc->arch,
                        KVS_CUDA_MIN_ARCH);
    }
    struct kvs_cuda *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "no memory for a CUDA backend");
    }
    cuda->device = device;
    cuda->driver.arch = desc->arch;
    cuda->driver.n_sm = 1;
    cuda->driver.shared_bytes = shared_bytes_of(desc->arch);
    cuda->launcher = (kvs_cuda_launcher){.device = device,
                                         .arch = desc->arch,
                                         .n_sm = cuda->driver.n_sm,
                                         .shared_bytes = cuda->driver.shared_bytes,
                                         .is_dry = 1,
                                         .cuda = cuda};
    const kvs_status status = kvs_cuda_kernels_create(device, &cuda->driver, &cuda->kernels);
    if (status != KVS_OK) {
        free(cuda);
        return status;
    }
    *table = &TABLE;
    *self = cuda;
    return KVS_OK;
}

kvs_cuda_kernels *kvs_cuda_planner_kernels(struct kvs_device_view view)
{
    return view.backend == &TABLE ? ((const struct kvs_cuda *)view.self)->kernels : NULL;
}
