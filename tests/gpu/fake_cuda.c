/* fake_cuda.c: a libcuda without a card: memory is the host's, copies are made at once, kernels do nothing. FAKE_CUDA_FAIL names a
 * function and which of its calls fails, with which number: "cuMemAlloc_v2 3 2". FAKE_CUDA_ARCH is the card's, 90 by default.
 * FAKE_CUDA_COUNT names a file that receives, when the process ends, how many kernels were launched, how many of them
 * early, how many into a recording and how many of those early, and how many recordings were made, launched and let go.
 * FAKE_CUDA_VERSION is the driver's, 13000 by default. FAKE_CUDA_WORDS=0: it has no stream memory operations. Words are written at
 * once and never waited for. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;
struct copy_2d {
    size_t src_x, src_y;
    unsigned int src_kind;
    const void *src_host;
    address src;
    void *src_array;
    size_t src_pitch, dst_x, dst_y;
    unsigned int dst_kind;
    void *dst_host;
    address dst;
    void *dst_array;
    size_t dst_pitch, width, height;
};

static int n_calls;
static int n_kernels, n_early, n_recorded, n_recorded_early, n_made, n_launched, n_destroyed, is_capturing;
static void *captured; /* the stream */

__attribute__((destructor)) static void tell(void)
{
    const char *path = getenv("FAKE_CUDA_COUNT");
    FILE *file = path == NULL ? NULL : fopen(path, "w");
    if (file != NULL) {
        fprintf(file, "%d %d %d %d %d %d %d\n", n_kernels, n_early, n_recorded, n_recorded_early, n_made, n_launched, n_destroyed);
        fclose(file);
    }
}

static int fails(const char *name)
{
    char wanted[64];
    int nth = 0, error = 0;
    const char *text = getenv("FAKE_CUDA_FAIL");
    if (text == NULL || sscanf(text, "%63s %d %d", wanted, &nth, &error) != 3 || strcmp(wanted, name) != 0) {
        return 0;
    }
    return __atomic_add_fetch(&n_calls, 1, __ATOMIC_RELAXED) == nth ? error : 0;
}

#define BEGIN                                                                                                          \
    int error = fails(__func__);                                                                                       \
    if (error != 0) {                                                                                                  \
        return error;                                                                                                  \
    }

static int arch(void)
{
    const char *text = getenv("FAKE_CUDA_ARCH");
    return text == NULL ? 90 : atoi(text);
}

int cuInit(unsigned int flags) { BEGIN (void)flags; return 0; }
int cuDriverGetVersion(int *version)
{
    const char *text = getenv("FAKE_CUDA_VERSION");
    *version = text == NULL ? 13000 : atoi(text);
    return 0;
}
int cuGetErrorName(int error, const char **name) { *name = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = error == 2 ? "out of memory" : "as was asked for"; return 0; }
int cuDeviceGetCount(int *count) { BEGIN *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { BEGIN *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int device) { (void)device; snprintf(name, (size_t)length, "Fake card"); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = (size_t)8 << 30; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { BEGIN (void)device; *context = &n_calls; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
int cuCtxPushCurrent_v2(void *context) { (void)context; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = NULL; return 0; }
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { *free_bytes = (size_t)7 << 30; *total = (size_t)8 << 30; return 0; }
int cuPointerGetAttribute(void *data, int attribute, address at) { BEGIN (void)at; *(int *)data = attribute == 2 ? 2 : 0; return 0; }
int cuMemFree_v2(address at) { free((void *)at); return 0; }
int cuMemFreeHost(void *memory) { free(memory); return 0; }
/* FAKE_CUDA_LOCK: more bytes at once than this are refused. */
int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned int flags)
{
    BEGIN
    const char *limit = getenv("FAKE_CUDA_LOCK");
    (void)memory; (void)flags;
    return limit != NULL && bytes > strtoull(limit, NULL, 10) ? 304 : 0;
}
int cuMemHostUnregister(void *memory) { (void)memory; return 0; }
int cuStreamDestroy_v2(void *stream) { free(stream); return 0; }
/* What would break a recording, or become part of it unasked. */
static int disturbs(const void *stream) { return is_capturing && stream == captured ? 900 : 0; }
int cuStreamSynchronize(void *stream) { BEGIN return disturbs(stream); }
int cuStreamWaitEvent(void *stream, void *event, unsigned int flags) { BEGIN (void)stream; (void)event; (void)flags; return 0; }
int cuEventDestroy_v2(void *event) { (void)event; return 0; }
int cuEventRecord(void *event, void *stream) { BEGIN (void)event; return disturbs(stream); }
int cuEventSynchronize(void *event) { BEGIN (void)event; return 0; }
int cuModuleUnload(void *module) { (void)module; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { (void)function; (void)attribute; (void)value; return 0; }

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    BEGIN
    (void)device;
    if (attribute == 122) {
        const char *words = getenv("FAKE_CUDA_WORDS");
        *value = words == NULL || atoi(words) != 0;
        return 0;
    }
    *value = attribute == 75 ? arch() / 10 : attribute == 76 ? arch() % 10 : attribute == 97 ? 101376 : attribute == 16 ? 8 : 1;
    return 0;
}

int cuMemAlloc_v2(address *at, size_t bytes)
{
    BEGIN
    void *memory = NULL;
    if (posix_memalign(&memory, 512, bytes) != 0) {
        return 2;
    }
    memset(memory, 0, bytes);
    *at = (address)memory;
    return 0;
}

int cuMemHostAlloc(void **memory, size_t bytes, unsigned int flags)
{
    BEGIN
    (void)flags;
    return posix_memalign(memory, 4096, bytes) == 0 ? 0 : 2;
}

int cuMemcpyAsync(address to, address from, size_t bytes, void *stream)
{
    BEGIN
    memcpy((void *)to, (const void *)from, bytes);
    return disturbs(stream);
}

int cuMemcpy2DAsync_v2(const struct copy_2d *copy, void *stream)
{
    BEGIN
    (void)stream;
    for (size_t row = 0; row < copy->height; row++) {
        memcpy((char *)copy->dst + row * copy->dst_pitch, (const char *)copy->src + row * copy->src_pitch, copy->width);
    }
    return 0;
}

int cuMemsetD8Async(address at, unsigned char value, size_t bytes, void *stream)
{
    BEGIN
    memset((void *)at, value, bytes);
    return disturbs(stream);
}

int cuStreamCreate(void **stream, unsigned int flags) { BEGIN (void)flags; *stream = malloc(1); return 0; }
int cuEventCreate(void **event, unsigned int flags) { BEGIN (void)flags; *event = &n_calls; return 0; }
int cuModuleLoadData(void **module, const void *image) { BEGIN (void)image; *module = &n_calls; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { BEGIN (void)module; (void)name; *function = &n_calls; return 0; }

struct launch {
    unsigned int grid[3], block[3], shared;
    void *stream;
    const unsigned int *attributes;
    unsigned int n_attributes;
};

/* The one attribute that is used is number 6, which is on. */
int cuLaunchKernelEx(const struct launch *config, void *function, void **params, void **extra)
{
    BEGIN
    (void)function; (void)params; (void)extra;
    const unsigned int blocks = config->grid[0] * config->grid[1] * config->grid[2];
    const unsigned int threads = config->block[0] * config->block[1] * config->block[2];
    const int is_early = config->n_attributes == 1 && config->attributes[0] == 6 && config->attributes[2] == 1;
    n_kernels++;
    n_early += is_early;
    n_recorded += is_capturing;
    n_recorded_early += is_capturing && is_early;
    return blocks == 0 || threads == 0 || threads > 1024 || config->shared > 101376 || (config->n_attributes != 0 && !is_early);
}

int cuStreamWaitValue64_v2(void *stream, address word, unsigned long long value, unsigned int flags) { BEGIN (void)word; (void)value; (void)flags; return disturbs(stream); }

int cuStreamWriteValue64_v2(void *stream, address word, unsigned long long value, unsigned int flags)
{
    BEGIN
    (void)flags;
    __atomic_store_n((unsigned long long *)word, value, __ATOMIC_RELEASE);
    return disturbs(stream);
}

/* A capture that nobody ends, or that a second one interrupts, is an error as with the real one. */
int cuStreamBeginCapture_v2(void *stream, int mode)
{
    BEGIN
    (void)mode;
    if (is_capturing) {
        return 900;
    }
    captured = stream;
    is_capturing = 1;
    return 0;
}

int cuStreamEndCapture(void *stream, void **graph)
{
    (void)stream;
    const int was_capturing = is_capturing;
    is_capturing = 0;
    *graph = NULL;
    BEGIN
    *graph = malloc(1);
    return was_capturing ? 0 : 900;
}

int cuGraphDestroy(void *graph) { free(graph); return 0; }
int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) { BEGIN (void)graph; (void)flags; *exec = malloc(1); n_made++; return 0; }
int cuGraphUpload(void *exec, void *stream) { BEGIN (void)exec; (void)stream; return 0; }
int cuGraphLaunch(void *exec, void *stream) { BEGIN (void)exec; (void)stream; n_launched++; return is_capturing ? 900 : 0; }
int cuGraphExecDestroy(void *exec) { free(exec); n_destroyed++; return 0; }

/* For a process that fails one call after another: count from 0 again; calls counted since. */
void fake_cuda_reset(void) { __atomic_store_n(&n_calls, 0, __ATOMIC_RELAXED); }
int fake_cuda_calls(void) { return __atomic_load_n(&n_calls, __ATOMIC_RELAXED); }
