/* driver.c: opening libcuda, finding a device, saying what went wrong. */
#include "backends/cuda/driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define LIBRARY "libcuda.so.1"

/* The name of a function in the library. */
static const char *name_of(const char *function)
{
#define KVS_CUDA_NAME(member, name, arguments)                                                                         \
    if (strcmp(function, #member) == 0) {                                                                              \
        return name;                                                                                                   \
    }
    KVS_CUDA_FUNCTIONS(KVS_CUDA_NAME)
#undef KVS_CUDA_NAME
    return function;
}

kvs_cuda_text kvs_cuda_error_text(const kvs_cuda_api *api, const char *call, cu_result result)
{
    const char *name = NULL;
    const char *said = NULL;
    kvs_cuda_text made;
    if (api->error_name(result, &name) != CU_SUCCESS || name == NULL) {
        name = "an error without a name";
    }
    if (api->error_string(result, &said) != CU_SUCCESS || said == NULL) {
        said = "no description";
    }
    (void)snprintf(made.text, sizeof made.text, "%s: %s (%d), %s", name_of(call), name, result, said);
    return made;
}

kvs_status kvs_cuda_fail(kvs_device *device, const kvs_cuda_driver *driver, const char *call, cu_result result)
{
    const kvs_cuda_text said = kvs_cuda_error_text(&driver->api, call, result);
    return kvs_fail(device, result == CU_ERROR_OUT_OF_MEMORY ? KVS_ENOMEM : KVS_EIO, "%s", said.text);
}

kvs_status kvs_cuda_check(kvs_device *device, const kvs_cuda_driver *driver, const char *function, cu_result result)
{
    return result == CU_SUCCESS ? KVS_OK : kvs_cuda_fail(device, driver, function, result);
}

void kvs_cuda_enter(const kvs_cuda_driver *driver)
{
    (void)driver->api.context_push(driver->context);
}

void kvs_cuda_leave(const kvs_cuda_driver *driver)
{
    cu_context popped;
    (void)driver->api.context_pop(&popped);
}

/* ---- the library ---- */

static void close_library(kvs_cuda_api *api)
{
    if (api->library != NULL) {
        (void)dlclose(api->library);
        api->library = NULL;
    }
}

/* A pointer to an object becomes one to a function the way POSIX says. */
static bool find(void *library, const char *name, void *slot, size_t slot_bytes)
{
    void *const found = dlsym(library, name);
    memcpy(slot, &found, slot_bytes);
    return found != NULL;
}

static kvs_status open_library(kvs_device *device, kvs_cuda_api *api)
{
    memset(api, 0, sizeof *api);
    api->library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (api->library == NULL) {
        const char *const why = dlerror();
        return kvs_fail(device, KVS_EUNSUPPORTED, "no CUDA driver: %s", why == NULL ? LIBRARY " cannot be opened" : why);
    }
    const char *missing = NULL;
#define KVS_CUDA_FIND(member, name, arguments)                                                                         \
    if (!find(api->library, name, &api->member, sizeof api->member) && missing == NULL) {                              \
        missing = name;                                                                                                \
    }
    KVS_CUDA_FUNCTIONS(KVS_CUDA_FIND)
#undef KVS_CUDA_FIND
    if (missing != NULL) {
        close_library(api);
        return kvs_fail(device, KVS_EUNSUPPORTED, "the CUDA driver is too old: " LIBRARY " has no %s", missing);
    }
    const cu_result result = api->init(0);
    if (result != CU_SUCCESS) {
        const kvs_cuda_text said = kvs_cuda_error_text(api, "init", result);
        close_library(api);
        return kvs_fail(device, KVS_EUNSUPPORTED, "the CUDA driver finds no device: %s", said.text);
    }
    return KVS_OK;
}

/* ---- a device ---- */

static kvs_status read_attribute(kvs_device *device, const kvs_cuda_driver *driver, int attribute, uint32_t *value)
{
    int found = 0;
    const kvs_status status =
        KVS_CUDA_CALL(device, driver, device_attribute, &found, attribute, driver->device);
    *value = found < 0 ? 0 : (uint32_t)found;
    return status;
}

static kvs_status describe(kvs_device *device, kvs_cuda_driver *driver)
{
    uint32_t major = 0;
    uint32_t minor = 0;
    uint32_t is_unified = 0;
    const struct {
        int attribute;
        uint32_t *value;
    } wanted[] = {{CU_ATTRIBUTE_CAPABILITY_MAJOR, &major},
                  {CU_ATTRIBUTE_CAPABILITY_MINOR, &minor},
                  {CU_ATTRIBUTE_UNIFIED_ADDRESSING, &is_unified},
                  {CU_ATTRIBUTE_MULTIPROCESSORS, &driver->n_sm},
                  {CU_ATTRIBUTE_SHARED_OPTIN, &driver->shared_bytes},
                  {CU_ATTRIBUTE_STREAM_WORDS, &driver->has_words}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        const kvs_status status = read_attribute(device, driver, wanted[i].attribute, wanted[i].value);
        if (status != KVS_OK) {
            return status;
        }
    }
    driver->arch = major * 10 + minor;
    if (driver->arch < KVS_CUDA_MIN_ARCH) {
        return kvs_fail(device, KVS_EUNSUPPORTED, "the card is an sm_%u, the oldest that is supported is sm_%u", driver->arch,
                        KVS_CUDA_MIN_ARCH);
    }
    return is_unified != 0 ? KVS_OK
                           : kvs_fail(device, KVS_EUNSUPPORTED, "the card shares no address space with the host");
}

static kvs_status find_device(kvs_device *device, uint32_t ordinal, kvs_cuda_driver *driver)
{
    int n_devices = 0;
    kvs_status status = KVS_CUDA_CALL(device, driver, device_count, &n_devices);
    if (status != KVS_OK) {
        return status;
    }
    if (n_devices <= 0 || ordinal >= (uint32_t)n_devices) {
        return kvs_fail(device, KVS_ENOTFOUND, "no CUDA device %u, the driver has %d", ordinal, n_devices);
    }
    int version = 0;
    status = KVS_CUDA_CALL(device, driver, driver_version, &version);
    driver->version = version < 0 ? 0 : (uint32_t)version;
    if (status == KVS_OK) {
        status = KVS_CUDA_CALL(device, driver, device_get, &driver->device, (int)ordinal);
    }
    return status == KVS_OK ? describe(device, driver) : status;
}

kvs_status kvs_cuda_driver_open(kvs_device *device, uint32_t ordinal, kvs_cuda_driver *driver)
{
    memset(driver, 0, sizeof *driver);
    kvs_status status = open_library(device, &driver->api);
    if (status != KVS_OK) {
        return status;
    }
    status = find_device(device, ordinal, driver);
    if (status == KVS_OK) {
        status = KVS_CUDA_CALL(device, driver, context_retain, &driver->context, driver->device);
    }
    if (status != KVS_OK) {
        close_library(&driver->api);
    }
    return status;
}

void kvs_cuda_driver_close(kvs_cuda_driver *driver)
{
    (void)driver->api.context_release(driver->device);
    close_library(&driver->api);
}
