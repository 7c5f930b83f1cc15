/* delta_input.cuh: what rows of a recurrent layer bring: convolution inputs and gates, of the log, the tail or the pass. */
#ifndef KVS_KERNELS_DELTA_INPUT_CUH
#define KVS_KERNELS_DELTA_INPUT_CUH

#include "weight_math.cuh"
#include "weight_params.h"

static __device__ unsigned int kvs_delta_channels(const kvs_delta_params &p)
{
    return KVS_DIM * (2 * p.n_key_heads + p.n_value_heads);
}

static __device__ unsigned int kvs_delta_log_values(const kvs_delta_params &p)
{
    return kvs_delta_channels(p) + 2 * p.n_value_heads;
}

/* Inputs of a row; those before the first pending one are the convolution tail. */
static __device__ const float *kvs_delta_input_row(const kvs_delta_params &p, int row)
{
    if (row < 0) {
        return (const float *)p.conv_in + (unsigned long long)(row + KVS_TAPS - 1) * kvs_delta_channels(p);
    }
    if (row < (int)p.n_pending) {
        return (const float *)p.log_in + (unsigned long long)row * kvs_delta_log_values(p);
    }
    return (const float *)p.inputs + (unsigned long long)(row - (int)p.n_pending) * kvs_delta_channels(p);
}

/* First channel of the head's q (part 0), k or v. */
static __device__ unsigned int kvs_delta_part_channel(const kvs_delta_params &p, unsigned int head, unsigned int part)
{
    return (part * p.n_key_heads + (part == 2 ? head : head % p.n_key_heads)) * KVS_DIM;
}

/* Inputs of a channel under the taps of one row, which the next row shifts by one. */
struct kvs_delta_window {
    float weights[KVS_TAPS];
    float inputs[KVS_TAPS];
    unsigned int channel;

    __device__ void begin(const kvs_delta_params &p, unsigned int of_channel, int row)
    {
        begin_weights(p, of_channel);
        begin_inputs(p, row);
    }

    __device__ void begin_weights(const kvs_delta_params &p, unsigned int of_channel)
    {
        channel = of_channel;
#pragma unroll
        for (int tap = 0; tap < KVS_TAPS; tap++) {
            weights[tap] = ((const float *)p.conv)[(unsigned long long)channel * KVS_TAPS + tap];
        }
    }

    /* What lies before `row`, which is taken next. */
    __device__ void begin_inputs(const kvs_delta_params &p, int row)
    {
#pragma unroll
        for (int tap = 0; tap < KVS_TAPS; tap++) {
            inputs[tap] = tap == 0 ? 0.0f : kvs_delta_input_row(p, row - KVS_TAPS + tap)[channel];
        }
    }

    /* The row's own input comes in; its value comes out. */
    __device__ float take(float input)
    {
#pragma unroll
        for (int tap = 0; tap + 1 < KVS_TAPS; tap++) {
            inputs[tap] = inputs[tap + 1];
        }
        inputs[KVS_TAPS - 1] = input;
        float sum = __fmul_rn(weights[0], inputs[0]);
#pragma unroll
        for (int tap = 1; tap < KVS_TAPS; tap++) {
            sum = __fmaf_rn(weights[tap], inputs[tap], sum);
        }
        return kvs_silu(sum);
    }
};

#endif
