/* loader.h: many bytes on their way to the device: formed piece by piece by all processors, each into pinned buffers of its own,
 * and copied from there while the next are formed. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_LOADER_H
#define KVS_NATIVE_BACKENDS_CUDA_LOADER_H

#include "backends/cuda/driver.h"

typedef struct kvs_cuda_loader kvs_cuda_loader;

/* Write pieces `first` to `first + n_pieces - 1` of `what`, one after another. thread: any, several at a time. */
typedef void (*kvs_cuda_form)(const void *what, uint64_t first, uint64_t n_pieces, uint8_t *to);

typedef struct kvs_cuda_load {
    kvs_cuda_form form;
    const void *what;
    uint64_t n_pieces;
    uint64_t piece_bytes;
    uint64_t address; /* of piece 0 on the device */
} kvs_cuda_load;

/* `stream` is the compute order; it and the driver are borrowed. Threads and buffers are had when there is something to load.
 * errors: ENOMEM */
kvs_status kvs_cuda_loader_create(kvs_device *device, const kvs_cuda_driver *driver, cu_stream stream, kvs_cuda_loader **loader);

/* NULL is ignored. The context is entered. Stays where a thread does not come back from the driver. */
void kvs_cuda_loader_destroy(kvs_cuda_loader *loader);

/* Form everything and give it to the driver in the compute order: `what` may go on return, though bytes may still be on their way.
 * The context is entered. thread: any; one at a time. errors: ENOMEM; EIO, also the card is lost */
kvs_status kvs_cuda_loader_run(kvs_cuda_loader *loader, const kvs_cuda_load *load);

/* Plain bytes, as a load. */
kvs_status kvs_cuda_loader_copy(kvs_cuda_loader *loader, uint64_t address, const void *from, uint64_t n_bytes);

/* Wait until all has arrived, and give threads and buffers back: they are had again when there is more to load. The context is
 * entered. thread: any. errors: ENOMEM; EIO a copy failed, or the card is lost */
kvs_status kvs_cuda_loader_rest(kvs_cuda_loader *loader);

#endif
