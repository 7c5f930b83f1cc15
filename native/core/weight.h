/* weight.h: the core's view of a weight. */
#ifndef KVS_NATIVE_CORE_WEIGHT_H
#define KVS_NATIVE_CORE_WEIGHT_H

#include "base/internal.h"
#include "core/step.h"

void kvs_weight_retain(kvs_weight *weight);
kvs_device *kvs_weight_device(const kvs_weight *weight);
/* Borrowed while the weight lives. */
const kvs_weight_view *kvs_weight_get_view(const kvs_weight *weight);
/* Bytes that a pass reads: the whole device form for panels, nothing worth counting for rows. */
uint64_t kvs_weight_pass_bytes(const kvs_weight *weight);

#endif
