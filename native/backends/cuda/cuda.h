/* cuda.h: a CUDA device as its parts see it. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_CUDA_H
#define KVS_NATIVE_BACKENDS_CUDA_CUDA_H

#include "backends/cuda/copies.h"
#include "backends/cuda/driver.h"
#include "backends/cuda/graphs.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launcher.h"
#include "backends/cuda/loader.h"
#include "backends/cuda/memory.h"
#include "backends/cuda/rings.h"
#include "backends/cuda/step.h"

struct kvs_cuda {
    kvs_device *device;
    kvs_cuda_driver driver;
    cu_stream compute;
    cu_event readers; /* behind the last operation that read pages */
    kvs_cuda_copies *copies;
    kvs_cuda_memory *memory;
    kvs_cuda_loader *loader;
    kvs_cuda_kernels *kernels;
    kvs_cuda_steps *steps;
    kvs_cuda_launcher launcher;
    bool is_early; /* kernels that wait by themselves begin while those before them end */
    kvs_cuda_graphs *graphs; /* NULL: passes are not recorded */
    kvs_cuda_rings *rings;   /* NULL: events alone order copies and readers */
    uint64_t page_limit_ns;  /* of a kernel's wait for a page */
    kvs_cuda_turn turn;      /* of the pass under way */
    uint32_t n_recorded;     /* its launches so far, where they are recorded */
    kvs_cuda_shape shape;    /* where it is not launched by itself */
};

#endif
