/* sources.h: the sources of kernels, made by native/kernels/amalgamate.py when the library is built. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_SOURCES_H
#define KVS_NATIVE_BACKENDS_CUDA_SOURCES_H

#include <stddef.h>

typedef struct kvs_cuda_source {
    const char *name;
    const char *text;
} kvs_cuda_source;

/* The last one has no name. */
extern const kvs_cuda_source kvs_cuda_sources[];

#endif
