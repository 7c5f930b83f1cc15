/* api.h: the part of the CUDA driver interface that is used, declared here: no toolkit is needed to build, and libcuda is opened
 * when a device is made.
 *
 * Source: CUDA Driver API reference (names, argument orders, numbers of enumerators).
 */
#ifndef KVS_NATIVE_BACKENDS_CUDA_API_H
#define KVS_NATIVE_BACKENDS_CUDA_API_H

#include <stddef.h>
#include <stdint.h>

typedef int cu_result; /* 0: success */
typedef int cu_device;
typedef uint64_t cu_address;
typedef struct CUctx_st *cu_context;
typedef struct CUstream_st *cu_stream;
typedef struct CUevent_st *cu_event;
typedef struct CUmod_st *cu_module;
typedef struct CUfunc_st *cu_function;
typedef struct CUgraph_st *cu_graph;
typedef struct CUgraphExec_st *cu_graph_exec;

enum {
    CU_SUCCESS = 0,
    CU_ERROR_OUT_OF_MEMORY = 2,
    CU_ERROR_NOT_READY = 600,
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_MEM_HOST_PORTABLE = 1,
    CU_POINTER_MEMORY_TYPE = 2,
    CU_POINTER_DEVICE_ORDINAL = 9,
    CU_MEMORY_DEVICE = 2,
    CU_MEMORY_UNIFIED = 4,
    CU_ATTRIBUTE_MULTIPROCESSORS = 16,
    CU_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
    CU_ATTRIBUTE_CAPABILITY_MAJOR = 75,
    CU_ATTRIBUTE_CAPABILITY_MINOR = 76,
    CU_ATTRIBUTE_SHARED_OPTIN = 97,
    CU_CAPTURE_RELAXED = 2,
    CU_ATTRIBUTE_STREAM_WORDS = 122, /* 64-bit stream memory operations */
    CU_WORD_WAIT_AT_LEAST = 0,
    CU_WORD_WRITE_DEFAULT = 0,       /* behind everything before it in the stream, as all others see it */
    CU_FUNCTION_MAX_DYNAMIC_SHARED = 8
};

/* A copy of rows between two pitched ranges; offsets and arrays stay zero. */
typedef struct cu_copy_2d {
    size_t src_x;
    size_t src_y;
    unsigned int src_kind;
    const void *src_host;
    cu_address src_address;
    void *src_array;
    size_t src_pitch;
    size_t dst_x;
    size_t dst_y;
    unsigned int dst_kind;
    void *dst_host;
    cu_address dst_address;
    void *dst_array;
    size_t dst_pitch;
    size_t width_bytes;
    size_t height;
} cu_copy_2d;

#define CU_LAUNCH_PROGRAMMATIC 6u /* a kernel may begin while the one before it ends, and waits by itself */

/* CUlaunchAttribute. */
typedef struct cu_launch_attribute {
    unsigned int id;
    unsigned int padding;
    union {
        int is_on;
        char room[64];
    } value;
} cu_launch_attribute;

/* CUlaunchConfig. */
typedef struct cu_launch {
    unsigned int grid_x;
    unsigned int grid_y;
    unsigned int grid_z;
    unsigned int block_x;
    unsigned int block_y;
    unsigned int block_z;
    unsigned int shared_bytes;
    cu_stream stream;
    cu_launch_attribute *attributes;
    unsigned int n_attributes;
} cu_launch;

/* One line for each function: result, name in this table, name in the library, arguments.
 * None of them waits for the card without an end: the host looks, and waits.c says how often and how long. */
#define KVS_CUDA_FUNCTIONS(X)                                                                                          \
    X(init, "cuInit", (unsigned int flags))                                                                            \
    X(driver_version, "cuDriverGetVersion", (int *version))                                                            \
    X(error_name, "cuGetErrorName", (cu_result error, const char **name))                                              \
    X(error_string, "cuGetErrorString", (cu_result error, const char **text))                                          \
    X(device_count, "cuDeviceGetCount", (int *count))                                                                  \
    X(device_get, "cuDeviceGet", (cu_device *device, int ordinal))                                                     \
    X(device_name, "cuDeviceGetName", (char *name, int length, cu_device device))                                      \
    X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, cu_device device))                         \
    X(device_memory, "cuDeviceTotalMem_v2", (size_t *bytes, cu_device device))                                         \
    X(context_retain, "cuDevicePrimaryCtxRetain", (cu_context *context, cu_device device))                             \
    X(context_release, "cuDevicePrimaryCtxRelease_v2", (cu_device device))                                             \
    X(context_push, "cuCtxPushCurrent_v2", (cu_context context))                                                       \
    X(context_pop, "cuCtxPopCurrent_v2", (cu_context *context))                                                        \
    X(memory_info, "cuMemGetInfo_v2", (size_t *free_bytes, size_t *total_bytes))                                       \
    X(memory_alloc, "cuMemAlloc_v2", (cu_address *address, size_t bytes))                                              \
    X(pointer_attribute, "cuPointerGetAttribute", (void *data, int attribute, cu_address address))                     \
    X(memory_free, "cuMemFree_v2", (cu_address address))                                                               \
    X(host_alloc, "cuMemHostAlloc", (void **memory, size_t bytes, unsigned int flags))                                 \
    X(host_free, "cuMemFreeHost", (void *memory))                                                                      \
    X(host_register, "cuMemHostRegister_v2", (void *memory, size_t bytes, unsigned int flags))                         \
    X(host_unregister, "cuMemHostUnregister", (void *memory))                                                          \
    X(copy, "cuMemcpyAsync", (cu_address to, cu_address from, size_t bytes, cu_stream stream))                         \
    X(copy_2d, "cuMemcpy2DAsync_v2", (const cu_copy_2d *copy, cu_stream stream))                                       \
    X(fill, "cuMemsetD8Async", (cu_address address, unsigned char value, size_t bytes, cu_stream stream))              \
    X(stream_create, "cuStreamCreate", (cu_stream *stream, unsigned int flags))                                        \
    X(stream_destroy, "cuStreamDestroy_v2", (cu_stream stream))                                                        \
    X(stream_query, "cuStreamQuery", (cu_stream stream))                                                               \
    X(stream_after, "cuStreamWaitEvent", (cu_stream stream, cu_event event, unsigned int flags))                       \
    X(event_create, "cuEventCreate", (cu_event *event, unsigned int flags))                                            \
    X(event_destroy, "cuEventDestroy_v2", (cu_event event))                                                            \
    X(event_record, "cuEventRecord", (cu_event event, cu_stream stream))                                               \
    X(event_query, "cuEventQuery", (cu_event event))                                                                   \
    X(word_wait, "cuStreamWaitValue64_v2", (cu_stream stream, cu_address word, uint64_t value, unsigned int flags))    \
    X(word_write, "cuStreamWriteValue64_v2", (cu_stream stream, cu_address word, uint64_t value, unsigned int flags))  \
    X(capture_begin, "cuStreamBeginCapture_v2", (cu_stream stream, int mode))                                          \
    X(capture_end, "cuStreamEndCapture", (cu_stream stream, cu_graph *graph))                                          \
    X(graph_free, "cuGraphDestroy", (cu_graph graph))                                                                  \
    X(graph_make, "cuGraphInstantiateWithFlags", (cu_graph_exec *exec, cu_graph graph, unsigned long long flags))      \
    X(graph_upload, "cuGraphUpload", (cu_graph_exec exec, cu_stream stream))                                           \
    X(graph_launch, "cuGraphLaunch", (cu_graph_exec exec, cu_stream stream))                                           \
    X(graph_destroy, "cuGraphExecDestroy", (cu_graph_exec exec))                                                       \
    X(module_load, "cuModuleLoadData", (cu_module *module, const void *image))                                         \
    X(module_unload, "cuModuleUnload", (cu_module module))                                                             \
    X(module_function, "cuModuleGetFunction", (cu_function *function, cu_module module, const char *name))             \
    X(function_set, "cuFuncSetAttribute", (cu_function function, int attribute, int value))                            \
    X(launch, "cuLaunchKernelEx",                                                                                      \
      (const cu_launch *config, cu_function function, void **params, void **extra))

typedef struct kvs_cuda_api {
    void *library; /* NULL: not open */
#define KVS_CUDA_MEMBER(member, name, arguments) cu_result(*member) arguments;
    KVS_CUDA_FUNCTIONS(KVS_CUDA_MEMBER)
#undef KVS_CUDA_MEMBER
} kvs_cuda_api;

#endif
