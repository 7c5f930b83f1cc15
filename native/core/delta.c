/* delta.c: what may be a recurrent layer. */
#include "core/delta.h"

#include "core/weight.h"

#define MAX_HEADS 1024u
#define MIN_TAPS 2u
#define MAX_TAPS 8u

struct check {
    kvs_device *device;
    const kvs_delta_layer *layer;
    uint32_t index;
};

static kvs_status refuse(const struct check *c, const char *what, uint64_t have)
{
    return kvs_fail(c->device, KVS_EINVAL, "recurrent layer %u: %s %llu", c->index, what, (kvs_ull)have);
}

static kvs_status check_sizes(const struct check *c)
{
    const kvs_delta_layer *layer = c->layer;
    if (layer->n_key_heads == 0 || layer->n_key_heads > MAX_HEADS) {
        return refuse(c, "key heads must be 1 to 1024, got", layer->n_key_heads);
    }
    if (layer->n_value_heads == 0 || layer->n_value_heads > MAX_HEADS || layer->n_value_heads % layer->n_key_heads != 0) {
        return refuse(c, "value heads must be a multiple of the key heads, at most 1024, got", layer->n_value_heads);
    }
    if (layer->head_dim != 16 && layer->head_dim != 32 && layer->head_dim != 64 && layer->head_dim != 128) {
        return refuse(c, "the head size must be 16, 32, 64 or 128, got", layer->head_dim);
    }
    if (layer->conv_width < MIN_TAPS || layer->conv_width > MAX_TAPS) {
        return refuse(c, "convolution taps must be 2 to 8, got", layer->conv_width);
    }
    if (!(layer->norm_eps > 0.0f && layer->norm_eps < 1.0f)) {
        return kvs_fail(c->device, KVS_EINVAL, "recurrent layer %u: norm_eps must lie between 0 and 1", c->index);
    }
    return KVS_OK;
}

static kvs_status check_weight(const struct check *c, kvs_weight *weight, const char *what, uint64_t k, uint64_t n)
{
    if (weight == NULL || kvs_weight_device(weight) != c->device) {
        return kvs_fail(c->device, KVS_EINVAL, "recurrent layer %u: %s is missing or belongs to another device", c->index, what);
    }
    const kvs_weight_view *view = kvs_weight_get_view(weight);
    if (view->type != KVS_TYPE_F32 || view->layout != KVS_WEIGHT_ROWS || view->k != k || view->n != n) {
        return kvs_fail(c->device, KVS_EINVAL, "recurrent layer %u: %s must be f32 rows [%llu][%llu], got [%llu][%llu]", c->index,
                        what, (kvs_ull)n, (kvs_ull)k, (kvs_ull)view->n, (kvs_ull)view->k);
    }
    return KVS_OK;
}

kvs_status kvs_delta_layer_check_sizes(kvs_device *device, const kvs_delta_layer *layer, uint32_t index)
{
    const struct check c = {.device = device, .layer = layer, .index = index};
    return check_sizes(&c);
}

kvs_status kvs_delta_layer_check(kvs_device *device, const kvs_delta_layer *layer, uint32_t index)
{
    const struct check c = {.device = device, .layer = layer, .index = index};
    kvs_status status = check_sizes(&c);
    if (status == KVS_OK) {
        status = check_weight(&c, layer->conv, "the convolution", layer->conv_width, kvs_delta_channels(layer));
    }
    if (status == KVS_OK) {
        status = check_weight(&c, layer->dt_bias, "the bias of alpha", layer->n_value_heads, 1);
    }
    if (status == KVS_OK) {
        status = check_weight(&c, layer->decay, "the decay", layer->n_value_heads, 1);
    }
    return status;
}

void kvs_delta_layer_retain(const kvs_delta_layer *layer)
{
    kvs_weight_retain(layer->conv);
    kvs_weight_retain(layer->dt_bias);
    kvs_weight_retain(layer->decay);
}

void kvs_delta_layer_release(const kvs_delta_layer *layer)
{
    kvs_weight_release(layer->conv);
    kvs_weight_release(layer->dt_bias);
    kvs_weight_release(layer->decay);
}

bool kvs_delta_layer_equal(const kvs_delta_layer *a, const kvs_delta_layer *b)
{
    return a->n_key_heads == b->n_key_heads && a->n_value_heads == b->n_value_heads && a->head_dim == b->head_dim &&
           a->conv_width == b->conv_width && a->norm_eps == b->norm_eps && a->conv == b->conv &&
           a->dt_bias == b->dt_bias && a->decay == b->decay;
}
