/* driver.h: libcuda, opened; its errors as texts; a device and its primary context. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_DRIVER_H
#define KVS_NATIVE_BACKENDS_CUDA_DRIVER_H

#include "backends/cuda/api.h"
#include "base/internal.h"

/* The oldest cards that kernels are written for. */
#define KVS_CUDA_MIN_ARCH 75u

/* What a failing call of the driver says: "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY, out of memory". */
typedef struct kvs_cuda_text {
    char text[192];
} kvs_cuda_text;

kvs_cuda_text kvs_cuda_error_text(const kvs_cuda_api *api, const char *call, cu_result result);

/* A device's primary context, retained. */
typedef struct kvs_cuda_driver {
    kvs_cuda_api api;
    cu_device device;
    cu_context context;
    uint32_t arch;
    uint32_t n_sm;
    uint32_t shared_bytes;
    uint32_t has_words; /* streams write and wait for 64-bit words */
    uint32_t version; /* of CUDA, 12030 for 12.3 */
    struct kvs_cuda_waits *waits; /* waits.h; NULL: none are made yet, or there is no card */
} kvs_cuda_driver;

/* Open the library, find the device, retain its context. Nothing is left behind on failure. The text of a failure is kept for `device`.
 * errors: EUNSUPPORTED no library, no driver or too old a card; ENOTFOUND no device of this number; EIO */
kvs_status kvs_cuda_driver_open(kvs_device *device, uint32_t ordinal, kvs_cuda_driver *driver);

/* No context of the driver may be in use any more. */
void kvs_cuda_driver_close(kvs_cuda_driver *driver);

/* Fail with what a call said. */
kvs_status kvs_cuda_fail(kvs_device *device, const kvs_cuda_driver *driver, const char *call, cu_result result);

/* Call a function of the driver; KVS_OK, or KVS_EIO (ENOMEM out of memory) with the call's name and text. */
#define KVS_CUDA_CALL(device, driver, function, ...)                                                                   \
    kvs_cuda_check((device), (driver), #function, (driver)->api.function(__VA_ARGS__))

kvs_status kvs_cuda_check(kvs_device *device, const kvs_cuda_driver *driver, const char *function, cu_result result);

/* The calling thread's current context becomes the driver's, and what it was before. */
void kvs_cuda_enter(const kvs_cuda_driver *driver);
void kvs_cuda_leave(const kvs_cuda_driver *driver);

#endif
