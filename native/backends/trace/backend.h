/* backend.h: how a device gets its trace backend. */
#ifndef KVS_NATIVE_TRACE_BACKEND_H
#define KVS_NATIVE_TRACE_BACKEND_H

#include "core/backend.h"

/* Create the backend of `device`. Writes the table and its `self`. errors: EUNSUPPORTED a flag by name; ENOMEM */
kvs_status kvs_trace_backend_create(kvs_device *device, const kvs_device_desc *desc, const kvs_backend **table, void **self);

#endif
