/* interop.h: what other libraries on the same card need. `self` is a struct kvs_cuda; core/backend.h says what each does. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_INTEROP_H
#define KVS_NATIVE_BACKENDS_CUDA_INTEROP_H

#include "kvstream/base.h"

kvs_status kvs_cuda_adopt(void *self, uint64_t address, uint64_t bytes);
kvs_status kvs_cuda_host_admit(void *self, uint64_t bytes);
uint64_t kvs_cuda_stream(void *self);
kvs_status kvs_cuda_lead_stream(void *self, uint64_t stream);
int32_t kvs_cuda_place(void *self);

#endif
