/* delta.h: geometry and weights of a gated delta net layer. */
#ifndef KVS_NATIVE_CORE_DELTA_H
#define KVS_NATIVE_CORE_DELTA_H

#include "base/internal.h"
#include "core/step.h"

/* Sizes in range, weights F32 rows of the right shape on this device (declared only will do). errors: EINVAL naming layer
 * `index` and what is wrong with it */
kvs_status kvs_delta_layer_check(kvs_device *device, const kvs_delta_layer *layer, uint32_t index);

/* Sizes alone. errors: as kvs_delta_layer_check */
kvs_status kvs_delta_layer_check_sizes(kvs_device *device, const kvs_delta_layer *layer, uint32_t index);

/* Its three weights. */
void kvs_delta_layer_retain(const kvs_delta_layer *layer);
void kvs_delta_layer_release(const kvs_delta_layer *layer);

/* Same sizes and the same weights. */
bool kvs_delta_layer_equal(const kvs_delta_layer *a, const kvs_delta_layer *b);

#endif
