/* delta.cu: one gated delta net layer: rows that are pending first, then the rows of the pass, one after another.
 *
 * Kernel delta(kvs_delta_params). Macros: KVS_DIM head size (16, 32, 64, 128), KVS_TAPS convolution taps (2 to 8).
 * Grid: (n_value_heads, KVS_DIM / 16). Block: 128; a warp takes four rows of M through all rows of the pass, in registers, a
 * thread some channels of q, k and v through the convolution. No dynamic shared memory. Architecture: 75.
 * Order, however rows were cut into passes and whenever they were folded: sums over a head: lane l takes values
 * l * KVS_DIM / 32 and on, by fused multiply-add (of 16 values lanes 0 to 15 take one), then the tree of kvs_warp_sum. With
 * s = M k a row does d = beta (v - decay s), M = decay M + d k^T, and its output is M q.
 * Holds: chunked passes run the same rows in the same order, so both modes give the same bits.
 * A block has little to compute and much to wait for: all that it reads of a stretch is asked for before any of it is used, what
 * it leaves behind is copied when all of that is near, and the matrix and earlier inputs are brought near before the kernel ahead has
 * ended.
 * Twin: native/backends/cpu/delta.c, delta_reference.c.
 */
#include "delta_input.cuh"
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
#define COLUMNS (2 * KVS_DIM + BLOCK_ROWS) /* channels of a block: q, k, its own of v */
#define THREAD_COLUMNS ((COLUMNS + THREADS - 1) / THREADS)

#define GATES_FIRST (THREADS - 32)     /* of the threads that find gates, a row each: their warp has the fewest columns */

typedef kvs_delta_params params_t;

/* Numbers of a head by which gates are made. */
struct head_numbers {
    float dt_bias;
    float decay;
};

struct stretch_t {
    float rows[STRETCH][COLUMNS]; /* q, k, v */
    float beta[STRETCH];
    float decay[STRETCH];
};

/* The channel of a block's column. */
static __device__ unsigned int channel_of(const params_t &p, unsigned int column)
{
    const unsigned int part = column / KVS_DIM < 2 ? column / KVS_DIM : 2;
    return kvs_delta_part_channel(p, blockIdx.x, part) + column - part * KVS_DIM + (part == 2 ? blockIdx.y * BLOCK_ROWS : 0);
}

static __device__ void gates_of(const params_t &p, unsigned int head, unsigned int row, float &beta, float &alpha)
{
    if (row < p.n_pending) {
        const float *gates = kvs_delta_input_row(p, (int)row) + kvs_delta_channels(p);
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

/* A row of M: 16 bytes at a time where a lane has as many. */
static __device__ __forceinline__ void load_row(float (&to)[VALUES], const float *from)
{
#if KVS_DIM == 128
    const float4 values = ((const float4 *)from)[threadIdx.x % 32];
    to[0] = values.x;
    to[1] = values.y;
    to[2] = values.z;
    to[3] = values.w;
#else
    load_lane(to, from);
#endif
}

static __device__ __forceinline__ void store_row(float *to, const float (&from)[VALUES])
{
#if KVS_DIM == 128
    ((float4 *)to)[threadIdx.x % 32] = {from[0], from[1], from[2], from[3]};
#else
    store_lane(to, from);
#endif
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
static __device__ void prepare(const params_t &p, const head_numbers &numbers, kvs_delta_window (&windows)[THREAD_COLUMNS],
                               stretch_t &stretch, unsigned int begin, unsigned int n)
{
    const unsigned int gate = threadIdx.x - GATES_FIRST; /* far beyond all rows in other warps */
    float inputs[THREAD_COLUMNS][STRETCH] = {}, beta = 0.0f, alpha = 0.0f;
    /* A pass of one row leaves both loops in one jump: a warp's instructions are most of what a block costs. */
#pragma unroll
    for (int t = 0; t < STRETCH; t++) {
        if (t >= (int)n) {
            break;
        }
        const float *row = kvs_delta_input_row(p, (int)(begin + t));
#pragma unroll
        for (int c = 0; c < THREAD_COLUMNS; c++) {
            inputs[c][t] = row[windows[c].channel];
        }
    }
    if (gate < n) {
        gates_of(p, blockIdx.x, begin + gate, beta, alpha);
    }
#pragma unroll
    for (int t = 0; t < STRETCH; t++) {
        if (t >= (int)n) {
            break;
        }
#pragma unroll
        for (int c = 0; c < THREAD_COLUMNS; c++) {
            if (threadIdx.x + c * THREADS < COLUMNS) {
                stretch.rows[t][threadIdx.x + c * THREADS] = inputs[c][t];
            }
        }
    }
    /* One copy of this code: a pass of one row must not jump over those of seven others. */
#pragma unroll 1
    for (unsigned int t = 0; t < n; t++) {
#pragma unroll
        for (int c = 0; c < THREAD_COLUMNS; c++) {
            if (threadIdx.x + c * THREADS < COLUMNS) {
                float &value = stretch.rows[t][threadIdx.x + c * THREADS];
                value = windows[c].take(value);
            }
        }
    }
    if (gate < n) {
        const float rate = kvs_softplus(__fadd_rn(alpha, numbers.dt_bias));
        stretch.beta[gate] = kvs_sigmoid(beta);
        stretch.decay[gate] = kvs_exp(__fmul_rn(numbers.decay, rate));
    }
    __syncthreads();
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn((float)KVS_DIM));
#pragma unroll 1
    for (unsigned int at = threadIdx.x / 32; at < 2 * n; at += WARPS) {
        const unsigned int t = at / 2, is_key = at % 2;
        if (is_key || begin + t >= p.n_pending) {
            normalise(stretch.rows[t] + is_key * KVS_DIM, p.norm_eps, is_key ? 1.0f : scale);
        }
    }
    __syncthreads();
}

/* Row t of the stretch through the rows of M of this warp; its outputs where it has some. */
static __device__ __forceinline__ void step(const stretch_t &stretch, unsigned int t, float (&m)[WARP_ROWS][VALUES], float *out)
{
    const unsigned int first = threadIdx.x / 32 * WARP_ROWS;
    const float beta = stretch.beta[t], decay = stretch.decay[t];
    float k[VALUES], q[VALUES], dots[WARP_ROWS];
    load_lane(q, stretch.rows[t]);
    load_lane(k, stretch.rows[t] + KVS_DIM);
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        dots[r] = kvs_warp_sum(lane_dot(m[r], k));
    }
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        const float d = __fmul_rn(beta, __fmaf_rn(-decay, dots[r], stretch.rows[t][2 * KVS_DIM + first + r]));
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
        store_row(matrix_row(p, p.matrix_out, r), m[r]);
    }
}

/* Rows of the pass through the matrix `m` that they find. */
static __device__ void run_rows(const params_t &p, const head_numbers &numbers, kvs_delta_window (&windows)[THREAD_COLUMNS],
                                float (&m)[WARP_ROWS][VALUES], unsigned int n_total, unsigned int n_fold)
{
    __shared__ stretch_t stretch;
    const unsigned int stride = p.n_value_heads * KVS_DIM;
    float *outs = (float *)p.out + (unsigned long long)blockIdx.x * KVS_DIM + blockIdx.y * BLOCK_ROWS;
#pragma unroll 1
    for (unsigned int begin = 0; begin < n_total; begin += STRETCH) {
        const unsigned int n = n_total - begin < STRETCH ? n_total - begin : STRETCH;
        prepare(p, numbers, windows, stretch, begin, n);
#pragma unroll 1
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

/* Sixteen channels of each part of the head, of N rows from `first` on (up to one that the caller does not want); q and k belong to the first
 * value head of their key head. All are read before the first is written. */
template <int N, class Wanted, class Target>
static __device__ void copy_rows(const params_t &p, int first, Wanted is_wanted, Target target)
{
    const unsigned int part = threadIdx.x / BLOCK_ROWS, i = threadIdx.x % BLOCK_ROWS;
    if (part >= 3 || (part < 2 && blockIdx.x >= p.n_key_heads)) {
        return;
    }
    const unsigned int channel = kvs_delta_part_channel(p, blockIdx.x, part) + blockIdx.y * BLOCK_ROWS + i;
    float values[N] = {};
#pragma unroll
    for (int row = 0; row < N; row++) {
        if (!is_wanted(row)) {
            break;
        }
        values[row] = kvs_delta_input_row(p, first + row)[channel];
    }
#pragma unroll
    for (int row = 0; row < N; row++) {
        if (!is_wanted(row)) {
            break;
        }
        target(row)[channel] = values[row];
    }
}

/* Convolution inputs before row `end`, and the rows of a logged pass. */
static __device__ void leave_behind(const params_t &p, unsigned int end)
{
    const unsigned long long channels = kvs_delta_channels(p), values = kvs_delta_log_values(p);
    float *conv = (float *)p.conv_out, *log = (float *)p.log_out;
    copy_rows<KVS_TAPS - 1>(
        p, (int)end - KVS_TAPS + 1, [](int) { return true; }, [=](int row) { return conv + row * channels; });
    if (!p.is_logged) {
        return;
    }
#pragma unroll 1
    for (unsigned int begin = 0; begin < p.n_rows; begin += STRETCH) {
        copy_rows<STRETCH>(
            p, (int)(p.n_pending + begin), [&](int row) { return begin + row < p.n_rows; },
            [=](int row) { return log + (begin + row) * values; });
    }
    if (blockIdx.y == 0) {
        for (unsigned int row = threadIdx.x; row < p.n_rows; row += THREADS) {
            float *gates = log + row * values + channels;
            gates_of(p, blockIdx.x, p.n_pending + row, gates[blockIdx.x], gates[p.n_value_heads + blockIdx.x]);
        }
    }
}

/* What a launch of a recorded pass finds in the picture of its pass, which is on the device before the first kernel of a recording
 * begins: no wait is needed. */
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

/* Nothing is read: what an earlier pass may still write is right wherever it lies when it is read. */
static __device__ void bring_near(const float *values)
{
#ifdef __CUDACC__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(values));
#else
    (void)values;
#endif
}

/* A warp's rows of the matrix, and inputs of the block's channels under the first taps: of the tail, and of pending rows the first. */
static __device__ void bring_state_near(const params_t &p)
{
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        if (threadIdx.x % 32 * 8 < KVS_DIM) {
            bring_near(matrix_row(p, p.matrix_in, r) + threadIdx.x % 32 * 8);
        }
    }
    for (unsigned int at = threadIdx.x; at < KVS_TAPS * (COLUMNS / 16); at += THREADS) {
        const int row = (int)(at / (COLUMNS / 16)) - (KVS_TAPS - 1);
        if (row < 0 || p.n_pending != 0) {
            bring_near(kvs_delta_input_row(p, row) + channel_of(p, at % (COLUMNS / 16) * 16));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) delta(const kvs_delta_params given)
{
    kvs_let_next_begin();
    const params_t p = params_of_pass(given);
    bring_state_near(p);
    const head_numbers numbers = {((const float *)p.dt_bias)[blockIdx.x], ((const float *)p.decay)[blockIdx.x]};
    kvs_delta_window windows[THREAD_COLUMNS];
#pragma unroll
    for (int c = 0; c < THREAD_COLUMNS; c++) {
        const unsigned int column = threadIdx.x + c * THREADS;
        windows[c].begin_weights(p, channel_of(p, column < COLUMNS ? column : 0));
    }
    kvs_wait_for_previous();
    float m[WARP_ROWS][VALUES];
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        load_row(m[r], matrix_row(p, p.matrix_in, r));
    }
#pragma unroll
    for (int c = 0; c < THREAD_COLUMNS; c++) {
        windows[c].begin_inputs(p, 0);
    }
    const unsigned int n_total = p.n_pending + p.n_rows;
    const unsigned int n_fold = p.is_logged ? p.n_pending : n_total;
    run_rows(p, numbers, windows, m, n_total, n_fold);
    leave_behind(p, n_fold);
}
