/* backend.h: how a device gets its CPU backend, and what its parts share. */
#ifndef KVS_NATIVE_CPU_BACKEND_H
#define KVS_NATIVE_CPU_BACKEND_H

#include "core/backend.h"

/* Create the backend of `device`. Writes the table, its `self`, and the thread count and isa in use. */
kvs_status kvs_cpu_backend_create(kvs_device *device, const kvs_device_desc *desc, const kvs_backend **table, void **self,
                                  uint32_t *n_threads, uint32_t *isa);

/* Highest kvs_isa that this processor and operating system can run. */
uint32_t kvs_cpu_isa_detect(void);

#endif
