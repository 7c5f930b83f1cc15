#include "core/state.h"
kvs_status kvs_state_open_pass(kvs_state *state, const kvs_pass_view *pass, const kvs_delta_layer *layers, uint32_t n_layers,
                               bool is_logged, const kvs_delta_view **views)
{ (void)state;(void)pass;(void)layers;(void)n_layers;(void)is_logged;(void)views; return KVS_EUNSUPPORTED; }
