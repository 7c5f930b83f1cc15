/* delta.cu: one gated delta net layer: rows that are pending first, then the rows of the pass, one after another.
 *
 * Kernel delta(kvs_delta_params). Macros: KVS_DIM head size (16, 32, 64, 128), KVS_TAPS convolution taps (2 to 8).
 * Grid: (n_value_heads, KVS_DIM / 16). Block: 128; a warp takes four rows of M through all rows of the pass, in registers.
 * No dynamic shared memory. Architecture: 75.
 * Order, however rows were cut into passes and whenever they were folded: sums over a head: lane l takes values
 * l * KVS_DIM / 32 and on, by fused multiply-add (of 16 values lanes 0 to 15 take one), then the tree of kvs_warp_sum. With
 * s = M k a row does d = beta (v - decay s), M = decay M + d k^T, and its output is M q.
 * Holds: chunked passes run the same rows in the same order, so both modes give the same bits.
 * Twin: native/backends/cpu/delta.c, delta_reference.c.
 */
#include "grid.cuh"
#include "step_words.h"
#include "weight_math.cuh"
#include "weight_params.h"

#define THREADS 128
#define WARPS 4
#define WARP_ROWS 4                    /* of M */
#define BLOCK_ROWS (WARPS * WARP_ROWS) /* of M */
#define STRETCH 8                      /* rows of the pass whose q, k and v are held at a time */
#define VALUES (KVS_DIM >= 32 ? KVS_DIM / 32 : 1)

typedef kvs_delta_params params_t;

struct stretch_t {
    float q[STRETCH][KVS_DIM];
    float k[STRETCH][KVS_DIM];
    float v[STRETCH][BLOCK_ROWS];
    float beta[STRETCH];
    float decay[STRETCH];
};

static __device__ unsigned int channels(const params_t &p)
{
    return KVS_DIM * (2 * p.n_key_heads + p.n_value_heads);
}

static __device__ unsigned int log_values(const params_t &p)
{
    return channels(p) + 2 * p.n_value_heads;
}

/* Inputs of a row; those before the first pending one are the convolution tail. */
static __device__ const float *input_row(const params_t &p, int row)
{
    if (row < 0) {
        return (const float *)p.conv_in + (unsigned long long)(row + KVS_TAPS - 1) * channels(p);
    }
    if (row < (int)p.n_pending) {
        return (const float *)p.log_in + (unsigned long long)row * log_values(p);
    }
    return (const float *)p.inputs + (unsigned long long)(row - (int)p.n_pending) * channels(p);
}

/* First channel of the head's q (part 0), k or v. */
static __device__ unsigned int part_channel(const params_t &p, unsigned int head, unsigned int part)
{
    return (part * p.n_key_heads + (part == 2 ? head : head % p.n_key_heads)) * KVS_DIM;
}

static __device__ float convolve(const params_t &p, int row, unsigned int channel)
{
    const float *weights = (const float *)p.conv + (unsigned long long)channel * KVS_TAPS;
    float sum = __fmul_rn(weights[0], input_row(p, row - KVS_TAPS + 1)[channel]);
#pragma unroll
    for (int tap = 1; tap < KVS_TAPS; tap++) {
        sum = __fmaf_rn(weights[tap], input_row(p, row - KVS_TAPS + 1 + tap)[channel], sum);
    }
    return kvs_silu(sum);
}

static __device__ void gates_of(const params_t &p, unsigned int head, unsigned int row, float &beta, float &alpha)
{
    if (row < p.n_pending) {
        const float *gates = input_row(p, (int)row) + channels(p);
        beta = gates[head];
        alpha = gates[p.n_value_heads + head];
        return;
    }
    const unsigned long long at = (unsigned long long)(row - p.n_pending) * p.n_value_heads + head;
    beta = ((const float *)p.beta)[at];
    alpha = ((const float *)p.alpha)[at];
}

/* Dot product over a head, of the values of this lane. */
static __device__ __forceinline__ float lane_dot(const float (&a)[VALUES], const float (&b)[VALUES])
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        sum = __fmaf_rn(a[i], b[i], sum);
    }
    return sum;
}

static __device__ __forceinline__ void load_lane(float (&to)[VALUES], const float *from)
{
    const unsigned int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        to[i] = lane * VALUES < KVS_DIM ? from[lane * VALUES + i] : 0.0f;
    }
}

static __device__ __forceinline__ void store_lane(float *to, const float (&from)[VALUES])
{
    const unsigned int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        if (lane * VALUES < KVS_DIM) {
            to[lane * VALUES + i] = from[i];
        }
    }
}

/* A warp's: x *= 1 / sqrt(sum x^2 + eps) * scale. */
static __device__ void normalise(float *x, float eps, float scale)
{
    float values[VALUES];
    load_lane(values, x);
    const float sum = kvs_warp_sum(lane_dot(values, values));
    const float factor = __fmul_rn(__fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(sum, eps))), scale);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        values[i] = __fmul_rn(values[i], factor);
    }
    store_lane(x, values);
}

/* What the recurrence takes of rows begin to begin + n - 1; q of rows with an output alone. */
static __device__ void prepare(const params_t &p, stretch_t &stretch, unsigned int begin, unsigned int n)
{
    const unsigned int head = blockIdx.x;
    const unsigned int width = 2 * KVS_DIM + BLOCK_ROWS;
    for (unsigned int at = threadIdx.x; at < n * width; at += THREADS) {
        const unsigned int t = at / width, column = at % width;
        const unsigned int part = column < KVS_DIM ? 0 : column < 2 * KVS_DIM ? 1 : 2;
        const unsigned int i = part == 2 ? column - 2 * KVS_DIM : column % KVS_DIM;
        if (part == 0 && begin + t < p.n_pending) {
            stretch.q[t][i] = 0.0f;
            continue;
        }
        const unsigned int channel = part_channel(p, head, part) + i + (part == 2 ? blockIdx.y * BLOCK_ROWS : 0);
        const float value = convolve(p, (int)(begin + t), channel);
        *(part == 0 ? &stretch.q[t][i] : part == 1 ? &stretch.k[t][i] : &stretch.v[t][i]) = value;
    }
    if (threadIdx.x < n) {
        float beta, alpha;
        gates_of(p, head, begin + threadIdx.x, beta, alpha);
        const float rate = kvs_softplus(__fadd_rn(alpha, ((const float *)p.dt_bias)[head]));
        stretch.beta[threadIdx.x] = kvs_sigmoid(beta);
        stretch.decay[threadIdx.x] = kvs_exp(__fmul_rn(((const float *)p.decay)[head], rate));
    }
    __syncthreads();
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn((float)KVS_DIM));
    for (unsigned int t = threadIdx.x / 32; t < n; t += WARPS) {
        normalise(stretch.q[t], p.norm_eps, scale);
        normalise(stretch.k[t], p.norm_eps, 1.0f);
    }
    __syncthreads();
}

/* Row t of the stretch through the rows of M of this warp; its outputs where it has some. */
static __device__ __forceinline__ void step(const stretch_t &stretch, unsigned int t, float (&m)[WARP_ROWS][VALUES], float *out)
{
    const unsigned int first = threadIdx.x / 32 * WARP_ROWS;
    const float beta = stretch.beta[t], decay = stretch.decay[t];
    float k[VALUES], q[VALUES], dots[WARP_ROWS];
    load_lane(k, stretch.k[t]);
    load_lane(q, stretch.q[t]);
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        dots[r] = kvs_warp_sum(lane_dot(m[r], k));
    }
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        const float d = __fmul_rn(beta, __fmaf_rn(-decay, dots[r], stretch.v[t][first + r]));
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            m[r][i] = __fmaf_rn(d, k[i], __fmul_rn(decay, m[r][i]));
        }
    }
    if (out == 0) {
        return;
    }
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        dots[r] = kvs_warp_sum(lane_dot(m[r], q));
    }
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) {
            out[first + r] = dots[r];
        }
    }
}

static __device__ float *matrix_row(const params_t &p, kvs_u64 matrices, unsigned int r)
{
    const unsigned int row = blockIdx.y * BLOCK_ROWS + threadIdx.x / 32 * WARP_ROWS + r;
    return (float *)matrices + ((unsigned long long)blockIdx.x * KVS_DIM + row) * KVS_DIM;
}

static __device__ void write_matrix(const params_t &p, const float (&m)[WARP_ROWS][VALUES])
{
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        store_lane(matrix_row(p, p.matrix_out, r), m[r]);
    }
}

static __device__ void run_rows(const params_t &p, stretch_t &stretch, unsigned int n_total, unsigned int n_fold)
{
    const unsigned int stride = p.n_value_heads * KVS_DIM;
    float *outs = (float *)p.out + (unsigned long long)blockIdx.x * KVS_DIM + blockIdx.y * BLOCK_ROWS;
    float m[WARP_ROWS][VALUES];
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        load_lane(m[r], matrix_row(p, p.matrix_in, r));
    }
    for (unsigned int begin = 0; begin < n_total; begin += STRETCH) {
        const unsigned int n = n_total - begin < STRETCH ? n_total - begin : STRETCH;
        prepare(p, stretch, begin, n);
        for (unsigned int t = 0; t < n; t++) {
            const unsigned int row = begin + t;
            if (row == n_fold) {
                write_matrix(p, m);
            }
            step(stretch, t, m, row < p.n_pending ? 0 : outs + (unsigned long long)(row - p.n_pending) * stride);
        }
        __syncthreads();
    }
    if (n_fold == n_total) {
        write_matrix(p, m);
    }
}

/* Sixteen channels of each part of the head; q and k belong to the first value head of their key head. */
static __device__ void copy_channels(const params_t &p, const float *from, float *to)
{
    const unsigned int part = threadIdx.x / BLOCK_ROWS, i = threadIdx.x % BLOCK_ROWS;
    if (part < 3 && (part == 2 || blockIdx.x < p.n_key_heads)) {
        const unsigned int channel = part_channel(p, blockIdx.x, part) + blockIdx.y * BLOCK_ROWS + i;
        to[channel] = from[channel];
    }
}

/* Convolution inputs before row `end`, and the rows of a logged pass. */
static __device__ void leave_behind(const params_t &p, unsigned int end)
{
    for (int i = 0; i < KVS_TAPS - 1; i++) {
        copy_channels(p, input_row(p, (int)end - KVS_TAPS + 1 + i), (float *)p.conv_out + (unsigned long long)i * channels(p));
    }
    for (unsigned int row = 0; p.is_logged && row < p.n_rows; row++) {
        float *to = (float *)p.log_out + (unsigned long long)row * log_values(p);
        copy_channels(p, input_row(p, (int)(p.n_pending + row)), to);
        if (threadIdx.x == 0 && blockIdx.y == 0) {
            float *gates = to + channels(p);
            gates_of(p, blockIdx.x, p.n_pending + row, gates[blockIdx.x], gates[p.n_value_heads + blockIdx.x]);
        }
    }
}

/* What a launch of a recorded pass finds in the picture of its pass. */
static __device__ __forceinline__ params_t params_of_pass(params_t p)
{
    if (p.step != 0) {
        const kvs_step_delta *of = (const kvs_step_delta *)p.step;
        p.matrix_in = of->matrix_in;
        p.conv_in = of->conv_in;
        p.log_in = of->log_in;
        p.matrix_out = of->matrix_out;
        p.conv_out = of->conv_out;
        p.log_out = of->log_out;
        p.n_pending = of->n_pending;
    }
    return p;
}

extern "C" __global__ void __launch_bounds__(THREADS) delta(const kvs_delta_params given)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    const params_t p = params_of_pass(given);
    __shared__ stretch_t stretch;
    const unsigned int n_total = p.n_pending + p.n_rows;
    const unsigned int n_fold = p.is_logged ? p.n_pending : n_total;
    run_rows(p, stretch, n_total, n_fold);
    leave_behind(p, n_fold);
}
