/* delta.h: geometry and weights of a gated delta net layer. */
#ifndef KVS_NATIVE_CORE_DELTA_H
#define KVS_NATIVE_CORE_DELTA_H

#include "base/internal.h"
#include "kvstream/state.h"

/* Sizes in range, weights F32 rows of the right shape on this device (declared only will do). errors: EINVAL naming layer
 * `index` and what is wrong with it */
kvs_status kvs_delta_layer_check(kvs_device *device, const kvs_delta_layer *layer, uint32_t index);

/* Its three weights. */
void kvs_delta_layer_retain(const kvs_delta_layer *layer);
void kvs_delta_layer_release(const kvs_delta_layer *layer);

/* Same sizes and the same weights. */
bool kvs_delta_layer_equal(const kvs_delta_layer *a, const kvs_delta_layer *b);

/* Convolution channels. The layer has been checked. */
static inline uint64_t kvs_delta_channels(const kvs_delta_layer *layer)
{
    return (uint64_t)layer->head_dim * (2 * (uint64_t)layer->n_key_heads + layer->n_value_heads);
}

/* Float32 values of a matrix set, of the convolution tail, of one log row. */
static inline uint64_t kvs_delta_matrix_values(const kvs_delta_layer *layer)
{
    return (uint64_t)layer->n_value_heads * layer->head_dim * layer->head_dim;
}

static inline uint64_t kvs_delta_conv_values(const kvs_delta_layer *layer)
{
    return kvs_delta_channels(layer) * (layer->conv_width - 1);
}

static inline uint64_t kvs_delta_log_values(const kvs_delta_layer *layer)
{
    return kvs_delta_channels(layer) + 2 * (uint64_t)layer->n_value_heads;
}

#endif
