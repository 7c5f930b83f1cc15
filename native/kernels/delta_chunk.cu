/* delta_chunk.cu: the rows of a prompt through one gated delta net layer, in chunks of 64 on the grid of absolute positions.
 *
 * Kernels: delta_chunk, what chunks are by themselves, all at once; then delta_scan, the state through them in order.
 * Argument: kvs_delta_chunk_params. Macros: KVS_DIM head size (16, 32, 64, 128), KVS_TAPS convolution taps (2 to 8).
 * delta_chunk: grid (n_value_heads, n_chunks), block 256, dynamic shared memory CHUNK_SHARED floats.
 * delta_scan: grid (n_value_heads, KVS_DIM / SLICE), block 128; a block has SLICE rows of M. No dynamic shared memory.
 * Architecture: 80.
 *
 * With G the running sum of logarithms of the decay in a chunk, L[t][s] = exp(G[t] - G[s]) for s <= t, K, Q, V its rows and b its betas:
 *     A = strictly lower part of b K K^T L,  T = (I + A)^-1,  U = T b V,  W = T b exp(G) K,  P = lower part of Q K^T L
 *     V' = U - W M^T,  out = exp(G) Q M^T + P V',  M = exp(G[n]) M + V'^T (exp(G[n] - G) K)
 * Source: the chunked form of the gated delta rule. Rows that a chunk lacks are zeros with a decay of one.
 * Order: G is a chain in float64. T is formed by blocks of 16: those of the diagonal by columns downwards, the others by rows, chains of
 * fused multiply-adds. Products are of float32 numbers as sums of two of 11 bits, the smallest of the four products left out, 8 values of
 * the inner axis at a time. Operands in scratch have its values 2t and 2t + 1 where a fragment's columns t and t + 4 are, so that
 * sums are operands as they are.
 * Holds: a row takes nothing from later ones, and a chunk that ends early gives its rows the same bits.
 * Twin: native/backends/cpu/delta_chunk.c; delta.cu, row by row.
 */
#include "delta_input.cuh"
#include "mma.cuh"

#define CHUNK 64u
#define DIM ((unsigned int)KVS_DIM)
#define STRIDE (DIM + 8)
#define SLICE (DIM < 32 ? DIM : 32u)
#define SLICE_STRIDE (SLICE + 4)
#define STEPS (DIM / 8)
#define SCORE_STRIDE (CHUNK + 4) /* strides are such that a warp's fragments meet no bank twice */
#define BLOCK 16u                /* of scores, inverted by itself */
#define CHUNK_WARPS 8u
#define SCAN_WARPS 4u

/* Floats of a chunk and head in scratch: W, exp(G) Q and P as left operands, keys as right ones, U as sums, exp(G[n]). */
#define W_AT 0u
#define Q_AT (CHUNK * DIM)
#define K_AT (2 * CHUNK * DIM)
#define U_AT (3 * CHUNK * DIM)
#define P_AT (4 * CHUNK * DIM)
#define END_AT (P_AT + CHUNK * CHUNK)
#define CHUNK_FLOATS (END_AT + 32)

typedef kvs_delta_chunk_params params_t;

#ifdef __CUDACC__
extern __shared__ uint4 dynamic_shared[];
#endif

struct gates_t {
    double sums[CHUNK];
    float beta[CHUNK];
    float log_decay[CHUNK];
    float from_start[CHUNK];
    float to_end[CHUNK];
};

/* The rows of a chunk, first and number. */
struct span {
    unsigned int begin;
    unsigned int n;
};

static __device__ span rows_of(const params_t &p, unsigned int chunk)
{
    span rows = {chunk == 0 ? 0 : p.first_rows + (chunk - 1) * CHUNK, chunk == 0 ? p.first_rows : CHUNK};
    const unsigned int left = p.pass.n_rows - rows.begin;
    rows.n = rows.n < left ? rows.n : left;
    return rows;
}

static __device__ float *scratch_of(const params_t &p, unsigned int chunk)
{
    return (float *)p.chunks + ((unsigned long long)chunk * p.pass.n_value_heads + blockIdx.x) * CHUNK_FLOATS;
}

/* c += a b of float32 numbers: 16 x 8 by 8 x 8. */
struct tf32_pair {
    kvs_u32 high[4];
    kvs_u32 low[4];
};

template <int N> static __device__ __forceinline__ void split(const float (&x)[N], tf32_pair &parts)
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        parts.high[i] = __float_as_uint(x[i]) & 0xffffe000u;
        parts.low[i] = __float_as_uint(x[i] - __uint_as_float(parts.high[i]));
    }
}

static __device__ __forceinline__ void multiply(float (&c)[4], const tf32_pair &a, const tf32_pair &b)
{
    kvs_mma_tf32(c, a.low, b.high);
    kvs_mma_tf32(c, a.high, b.low);
    kvs_mma_tf32(c, a.high, b.high);
}

/* The same where few sums are under way: small products have a chain of their own. */
static __device__ __forceinline__ void multiply_apart(float (&c)[4], float (&small)[2][4], const tf32_pair &a, const tf32_pair &b)
{
    kvs_mma_tf32(small[0], a.low, b.high);
    kvs_mma_tf32(small[1], a.high, b.low);
    kvs_mma_tf32(c, a.high, b.high);
}

static __device__ __forceinline__ void join(float (&c)[4], const float (&small)[2][4])
{
#pragma unroll
    for (unsigned int i = 0; i < 4; i++) {
        c[i] = __fadd_rn(c[i], __fadd_rn(small[0][i], small[1][i]));
    }
}

/* ---- chunks by themselves ---- */

/* Rows of q (part 0), k or v of the chunk, [64][STRIDE], before they are normed. Threads share a column by runs of rows. */
static __device__ __forceinline__ void convolve(const params_t &p, const span &rows, unsigned int part, float *to)
{
    constexpr unsigned int RUN = CHUNK * DIM / (CHUNK_WARPS * 32);
    const unsigned int column = threadIdx.x % DIM, begin = threadIdx.x / DIM * RUN;
    const unsigned int channel = kvs_delta_part_channel(p.pass, blockIdx.x, part) + column;
    const int first = (int)(p.pass.n_pending + rows.begin + begin);
    kvs_delta_window window;
    if (begin < rows.n) {
        window.begin(p.pass, channel, first);
    }
    const float *inputs = kvs_delta_input_row(p.pass, first) + channel;
#pragma unroll 16
    for (unsigned int t = begin; t < begin + RUN; t++) {
        const float input = t < rows.n ? inputs[(unsigned long long)(t - begin) * kvs_delta_channels(p.pass)] : 0.0f;
        const float value = window.take(input);
        to[t * STRIDE + column] = t < rows.n ? value : 0.0f;
    }
}

/* A warp's row: x *= 1 / sqrt(sum x^2 + eps) * scale. */
static __device__ void normalise(float *x, float eps, float scale)
{
    const unsigned int lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (unsigned int i = lane; i < DIM; i += 32) {
        sum = __fmaf_rn(x[i], x[i], sum);
    }
    const float factor = __fmul_rn(__fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(kvs_warp_sum(sum), eps))), scale);
    for (unsigned int i = lane; i < DIM; i += 32) {
        x[i] = __fmul_rn(x[i], factor);
    }
}

static __device__ void find_gates(const params_t &p, const span &rows, gates_t &gates)
{
    const unsigned int t = threadIdx.x;
    if (t < CHUNK) {
        gates.beta[t] = gates.log_decay[t] = 0.0f;
        if (t < rows.n) {
            const unsigned long long at = (unsigned long long)(rows.begin + t) * p.pass.n_value_heads + blockIdx.x;
            const float rate = kvs_softplus(__fadd_rn(((const float *)p.pass.alpha)[at], ((const float *)p.pass.dt_bias)[blockIdx.x]));
            gates.beta[t] = kvs_sigmoid(((const float *)p.pass.beta)[at]);
            gates.log_decay[t] = __fmul_rn(((const float *)p.pass.decay)[blockIdx.x], rate);
        }
    }
    __syncthreads();
    if (t == 0) {
        double sum = 0.0;
        for (unsigned int s = 0; s < CHUNK; s++) {
            sum += (double)gates.log_decay[s];
            gates.sums[s] = sum;
        }
    }
    __syncthreads();
    if (t < CHUNK) {
        gates.from_start[t] = kvs_exp((float)gates.sums[t]);
        gates.to_end[t] = kvs_exp((float)(gates.sums[CHUNK - 1] - gates.sums[t]));
    }
}

/* Words of a left operand from rows in shared memory, values 2t and 2t + 1 of the inner axis. */
static __device__ __forceinline__ void left_pairs(const float *rows, unsigned int row, unsigned int step, tf32_pair &parts)
{
    const unsigned int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float *at = rows + (row + g) * STRIDE + 8 * step + 2 * t;
    const float2 first = *(const float2 *)at, second = *(const float2 *)(at + 8 * STRIDE);
    const float x[4] = {first.x, second.x, first.y, second.y};
    split(x, parts);
}

/* Of a right operand whose columns are such rows. */
static __device__ __forceinline__ void right_pairs(const float *rows, unsigned int row, unsigned int step, tf32_pair &parts)
{
    const unsigned int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float2 two = *(const float2 *)(rows + (row + g) * STRIDE + 8 * step + 2 * t);
    const float x[2] = {two.x, two.y};
    split(x, parts);
}

/* Sums as a left operand of 8 of the inner axis. */
static __device__ __forceinline__ void store_left(float *words, unsigned int tile, unsigned int step, unsigned int n_steps,
                                                  const float (&sums)[4])
{
    const float4 four = {sums[0], sums[2], sums[1], sums[3]};
    *(float4 *)(words + ((tile * n_steps + step) * 32 + threadIdx.x % 32) * 4) = four;
}

/* A into shared memory, [64][SCORE_STRIDE], and P into scratch. A job is 16 rows by 8 columns of one of both. */
static __device__ void score_rows(const float *q, const float *k, const gates_t &gates, float *scores, float *scratch)
{
    const unsigned int g = threadIdx.x % 32 / 4, lane_column = threadIdx.x % 4 * 2;
#pragma unroll 1
    for (unsigned int job = threadIdx.x / 32; job < 2 * 32; job += CHUNK_WARPS) {
        const bool is_output = job >= 32;
        const unsigned int row = job % 4 * 16, column = job % 32 / 4 * 8;
        float sums[4] = {}, small[2][4] = {};
#pragma unroll 4
        for (unsigned int step = 0; column < row + 16 && step < STEPS; step++) {
            tf32_pair a, b;
            left_pairs(is_output ? q : k, row, step, a);
            right_pairs(k, column, step, b);
            multiply_apart(sums, small, a, b);
        }
        join(sums, small);
#pragma unroll
        for (unsigned int i = 0; i < 4; i++) {
            const unsigned int t = row + g + i / 2 * 8, s = column + lane_column + i % 2;
            const bool is_seen = s < t || (is_output && s == t);
            const float decay = kvs_exp((float)(gates.sums[t] - gates.sums[is_seen ? s : t]));
            sums[i] = is_seen ? __fmul_rn(sums[i], decay) : 0.0f;
            if (!is_output) {
                scores[t * SCORE_STRIDE + s] = __fmul_rn(gates.beta[t], sums[i]);
            }
        }
        if (is_output) {
            store_left(scratch + P_AT, row / 16, column / 8, CHUNK / 8, sums);
        }
    }
}

/* Blocks of the diagonal of I + A become their inverses, a thread to a column. */
static __device__ __forceinline__ void invert_diagonal(float *scores)
{
    const unsigned int column = threadIdx.x % BLOCK;
    float *block = scores + threadIdx.x / BLOCK * (BLOCK * SCORE_STRIDE + BLOCK);
    float x[BLOCK];
#pragma unroll
    for (unsigned int t = 0; t < BLOCK && threadIdx.x < CHUNK; t++) {
        float sum = 0.0f;
#pragma unroll
        for (unsigned int s = 0; s < t; s++) {
            sum = __fmaf_rn(block[t * SCORE_STRIDE + s], x[s], sum);
        }
        x[t] = t == column ? 1.0f : -sum;
    }
    __syncthreads();
#pragma unroll
    for (unsigned int t = 0; t < BLOCK && threadIdx.x < CHUNK; t++) {
        block[t * SCORE_STRIDE + column] = t < column ? 0.0f : x[t];
    }
    __syncthreads();
}

/* The other blocks, a row of them after another: of row i, block j is -T[i][i] times the sum of A[i][k] T[k][j]. A thread has an element of
 * each block, and every step is read by all before it is overwritten. */
static __device__ __forceinline__ void invert_rest(float *scores)
{
    const unsigned int t = threadIdx.x / BLOCK, s = threadIdx.x % BLOCK;
#pragma unroll 1
    for (unsigned int i = 1; i < CHUNK / BLOCK; i++) {
        float *row = scores + (i * BLOCK + t) * SCORE_STRIDE;
        float sums[CHUNK / BLOCK - 1] = {};
#pragma unroll
        for (unsigned int j = 0; j < CHUNK / BLOCK - 1; j++) {
            for (unsigned int k = j * BLOCK; j < i && k < i * BLOCK; k++) {
                sums[j] = __fmaf_rn(row[k], scores[k * SCORE_STRIDE + j * BLOCK + s], sums[j]);
            }
        }
        __syncthreads();
#pragma unroll
        for (unsigned int j = 0; j < CHUNK / BLOCK - 1; j++) {
            if (j < i) {
                row[j * BLOCK + s] = sums[j];
            }
        }
        __syncthreads();
#pragma unroll
        for (unsigned int j = 0; j < CHUNK / BLOCK - 1; j++) {
            sums[j] = 0.0f;
            for (unsigned int k = 0; j < i && k < BLOCK; k++) {
                sums[j] = __fmaf_rn(row[i * BLOCK + k], scores[(i * BLOCK + k) * SCORE_STRIDE + j * BLOCK + s], sums[j]);
            }
        }
        __syncthreads();
#pragma unroll
        for (unsigned int j = 0; j < CHUNK / BLOCK - 1; j++) {
            if (j < i) {
                row[j * BLOCK + s] = -sums[j];
            }
        }
        __syncthreads();
    }
}

/* exp(G) Q as a left operand, keys that decay to the chunk's end as a right one. */
static __device__ void store_rows(const float *q, const float *k, const gates_t &gates, float *scratch)
{
    for (unsigned int i = threadIdx.x; i < CHUNK * DIM; i += CHUNK_WARPS * 32) {
        const unsigned int word = i % 4, lane = i / 4 % 32, step = i / 128 % STEPS, t = i / 128 / STEPS * 16 + lane / 4 + word % 2 * 8;
        scratch[Q_AT + i] = __fmul_rn(gates.from_start[t], q[t * STRIDE + 8 * step + lane % 4 * 2 + word / 2]);
    }
    for (unsigned int i = threadIdx.x; i < CHUNK * DIM; i += CHUNK_WARPS * 32) {
        const unsigned int word = i % 2, lane = i / 2 % 32, column = i / 64 % STEPS * 8 + lane / 4;
        const unsigned int t = i / 64 / STEPS * 8 + lane % 4 * 2 + word;
        scratch[K_AT + i] = __fmul_rn(gates.to_end[t], k[t * STRIDE + column]);
    }
    if (threadIdx.x == 0) {
        scratch[END_AT] = gates.from_start[CHUNK - 1];
    }
}

/* beta V and beta exp(G) K, in place. */
static __device__ void weigh_rows(float *v, float *k, const gates_t &gates)
{
    for (unsigned int i = threadIdx.x; i < CHUNK * DIM; i += CHUNK_WARPS * 32) {
        const unsigned int t = i / DIM, at = t * STRIDE + i % DIM;
        v[at] = __fmul_rn(gates.beta[t], v[at]);
        k[at] = __fmul_rn(gates.beta[t], __fmul_rn(gates.from_start[t], k[at]));
    }
}

/* U as sums and W as a left operand: T, whose rows lie in shared memory, times what weigh_rows left. */
static __device__ void solve_rows(const float *inverse, const float *v, const float *k, float *scratch)
{
    const unsigned int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
    for (unsigned int job = threadIdx.x / 32; job < 4 * 2 * STEPS; job += CHUNK_WARPS) {
        const unsigned int tile = job % 4, column = job / 4 % STEPS;
        const bool is_key = job >= 4 * STEPS;
        const float *right = (is_key ? k : v) + t * STRIDE + 8 * column + g;
        const float *left = inverse + (16 * tile + g) * SCORE_STRIDE + t;
        float sums[4] = {}, small[2][4] = {};
#pragma unroll 2
        for (unsigned int step = 0; step < 2 * tile + 2; step++) { /* later rows count for nothing */
            const float *at = left + 8 * step;
            const float x[4] = {at[0], at[8 * SCORE_STRIDE], at[4], at[8 * SCORE_STRIDE + 4]};
            const float y[2] = {right[8 * step * STRIDE], right[(8 * step + 4) * STRIDE]};
            tf32_pair a, b;
            split(x, a);
            split(y, b);
            multiply_apart(sums, small, a, b);
        }
        join(sums, small);
        if (is_key) {
            store_left(scratch + W_AT, tile, column, STEPS, sums);
        } else {
            const float4 four = {sums[0], sums[1], sums[2], sums[3]};
            *(float4 *)(scratch + U_AT + ((tile * STEPS + column) * 32 + threadIdx.x % 32) * 4) = four;
        }
    }
}

/* The convolution tail behind the last row; q and k belong to the first value head of their key head. */
static __device__ void leave_tail(const params_t &p)
{
    for (unsigned int i = threadIdx.x; i < 3 * DIM; i += CHUNK_WARPS * 32) {
        const unsigned int part = i / DIM, channel = kvs_delta_part_channel(p.pass, blockIdx.x, part) + i % DIM;
        for (int tap = 0; tap < KVS_TAPS - 1 && (part == 2 || blockIdx.x < p.pass.n_key_heads); tap++) {
            const int row = (int)(p.pass.n_pending + p.pass.n_rows) - KVS_TAPS + 1 + tap;
            ((float *)p.pass.conv_out)[(unsigned long long)tap * kvs_delta_channels(p.pass) + channel] =
                kvs_delta_input_row(p.pass, row)[channel];
        }
    }
}

extern "C" __global__ void __launch_bounds__(CHUNK_WARPS * 32, 2) delta_chunk(const kvs_delta_chunk_params p)
{
    __shared__ gates_t gates;
    float *q = (float *)dynamic_shared, *k = q + CHUNK * STRIDE, *scores = k + CHUNK * STRIDE;
    const span rows = rows_of(p, blockIdx.y);
    float *scratch = scratch_of(p, blockIdx.y);
    convolve(p, rows, 0, q);
    convolve(p, rows, 1, k);
    find_gates(p, rows, gates);
    __syncthreads();
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn((float)KVS_DIM));
    for (unsigned int t = threadIdx.x / 32; t < rows.n; t += CHUNK_WARPS) {
        normalise(q + t * STRIDE, p.pass.norm_eps, scale);
        normalise(k + t * STRIDE, p.pass.norm_eps, 1.0f);
    }
    __syncthreads();
    score_rows(q, k, gates, scores, scratch);
    store_rows(q, k, gates, scratch);
    __syncthreads();
    convolve(p, rows, 2, q); /* nobody needs q any more */
    invert_diagonal(scores);
    weigh_rows(q, k, gates);
    invert_rest(scores);
    solve_rows(scores, q, k, scratch);
    if (blockIdx.y == gridDim.y - 1) {
        leave_tail(p);
    }
}

/* ---- the state through chunks ---- */

/* Fragments of this block's tiles of 8 values. */
typedef float tiles_t[SLICE / 8][4];

struct state_t {
    float m[SLICE * STRIDE];
    float updates[CHUNK * SLICE_STRIDE];
};

static __device__ __forceinline__ float4 load_left(const float *words, unsigned int tile, unsigned int step, unsigned int n_steps)
{
    return *(const float4 *)(words + ((tile * n_steps + step) * 32 + threadIdx.x % 32) * 4);
}

static __device__ __forceinline__ void split_left(const float4 &four, tf32_pair &parts)
{
    const float x[4] = {four.x, four.y, four.z, four.w};
    split(x, parts);
}

/* Words of a right operand whose inner axis are rows of updates. */
static __device__ __forceinline__ void right_columns(const float *rows, unsigned int column, unsigned int step, tf32_pair &parts)
{
    const unsigned int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float *at = rows + (8 * step + 2 * t) * SLICE_STRIDE + column + g;
    const float x[2] = {at[0], at[SLICE_STRIDE]};
    split(x, parts);
}

/* W M^T and exp(G) Q M^T of the warp's 16 rows. Operands of some steps are asked for at once: one after another they would cost
 * a trip to memory each. */
static __device__ __forceinline__ void read_state(const float *scratch, const state_t &state, tiles_t &w, tiles_t &out)
{
    constexpr unsigned int AHEAD = STEPS < 8 ? STEPS : 8u;
    const unsigned int warp = threadIdx.x / 32;
#pragma unroll 1
    for (unsigned int first = 0; first < STEPS; first += AHEAD) {
        float4 of_w[AHEAD], of_q[AHEAD];
#pragma unroll
        for (unsigned int i = 0; i < AHEAD; i++) {
            of_w[i] = load_left(scratch + W_AT, warp, first + i, STEPS);
            of_q[i] = load_left(scratch + Q_AT, warp, first + i, STEPS);
        }
#pragma unroll
        for (unsigned int i = 0; i < AHEAD; i++) {
            tf32_pair left_w, left_q;
            split_left(of_w[i], left_w);
            split_left(of_q[i], left_q);
#pragma unroll
            for (unsigned int n = 0; n < SLICE / 8; n++) {
                tf32_pair b;
                right_pairs(state.m, 8 * n, first + i, b);
                multiply(w[n], left_w, b);
                multiply(out[n], left_q, b);
            }
        }
    }
}

/* V' of the warp's rows, into shared memory. */
static __device__ __forceinline__ void store_updates(const float *scratch, const tiles_t &w, state_t &state)
{
    const unsigned int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (unsigned int n = 0; n < SLICE / 8; n++) {
        const unsigned int tile = blockIdx.y * (SLICE / 8) + n;
        const float4 u = *(const float4 *)(scratch + U_AT + ((warp * STEPS + tile) * 32 + threadIdx.x % 32) * 4);
        float *to = state.updates + (warp * 16 + g) * SLICE_STRIDE + 8 * n + 2 * t;
        to[0] = __fsub_rn(u.x, w[n][0]);
        to[1] = __fsub_rn(u.y, w[n][1]);
        to[8 * SLICE_STRIDE] = __fsub_rn(u.z, w[n][2]);
        to[8 * SLICE_STRIDE + 1] = __fsub_rn(u.w, w[n][3]);
    }
}

static __device__ __forceinline__ void add_updates(const float *scratch, const state_t &state, tiles_t &out)
{
    const unsigned int warp = threadIdx.x / 32;
    float4 of_p[CHUNK / 8];
#pragma unroll
    for (unsigned int step = 0; step < CHUNK / 8; step++) {
        of_p[step] = load_left(scratch + P_AT, warp, step, CHUNK / 8);
    }
#pragma unroll
    for (unsigned int step = 0; step < CHUNK / 8; step++) {
        if (step >= 2 * warp + 2) { /* later rows are not seen */
            break;
        }
        tf32_pair a;
        split_left(of_p[step], a);
#pragma unroll
        for (unsigned int n = 0; n < SLICE / 8; n++) {
            tf32_pair b;
            right_columns(state.updates, 8 * n, step, b);
            multiply(out[n], a, b);
        }
    }
}

static __device__ __forceinline__ void store_out(const params_t &p, const span &rows, const tiles_t &out)
{
    const unsigned int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const unsigned int first = blockIdx.x * DIM + blockIdx.y * SLICE + 2 * t;
#pragma unroll
    for (unsigned int i = 0; i < SLICE / 8 * 2; i++) {
        const unsigned int n = i / 2, row = warp * 16 + g + i % 2 * 8;
        if (row < rows.n) {
            float *to = (float *)p.pass.out + (unsigned long long)(rows.begin + row) * p.pass.n_value_heads * DIM + first + 8 * n;
            to[0] = out[n][i % 2 * 2];
            to[1] = out[n][i % 2 * 2 + 1];
        }
    }
}

/* M = decay M + V'^T K. A warp has a quarter of the keys. */
static __device__ __forceinline__ void advance(const float *scratch, state_t &state)
{
    const unsigned int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float decay = scratch[END_AT];
    for (unsigned int tile = warp; tile < STEPS; tile += SCAN_WARPS) {
        float sums[SLICE / 16][4], small[SLICE / 16][2][4] = {};
#pragma unroll
        for (unsigned int i = 0; i < SLICE / 16 * 4; i++) {
            const unsigned int row = i / 4 * 16 + g + i % 4 / 2 * 8;
            sums[i / 4][i % 4] = __fmul_rn(decay, state.m[row * STRIDE + 8 * tile + 2 * t + i % 2]);
        }
        float2 of_k[CHUNK / 8];
#pragma unroll
        for (unsigned int step = 0; step < CHUNK / 8; step++) {
            of_k[step] = *(const float2 *)(scratch + K_AT + ((step * STEPS + tile) * 32 + threadIdx.x % 32) * 2);
        }
#pragma unroll
        for (unsigned int step = 0; step < CHUNK / 8; step++) {
            const float keys[2] = {of_k[step].x, of_k[step].y};
            tf32_pair b;
            split(keys, b);
#pragma unroll
            for (unsigned int m = 0; m < SLICE / 16; m++) {
                const float *at = state.updates + (8 * step + 2 * t) * SLICE_STRIDE + 16 * m + g;
                const float x[4] = {at[0], at[8], at[SLICE_STRIDE], at[SLICE_STRIDE + 8]};
                tf32_pair a;
                split(x, a);
                multiply_apart(sums[m], small[m], a, b);
            }
        }
#pragma unroll
        for (unsigned int m = 0; m < SLICE / 16; m++) {
            join(sums[m], small[m]);
        }
#pragma unroll
        for (unsigned int i = 0; i < SLICE / 16 * 4; i++) {
            const unsigned int row = i / 4 * 16 + g + i % 4 / 2 * 8;
            state.m[row * STRIDE + 8 * tile + 2 * t + i % 2] = sums[i / 4][i % 4];
        }
    }
}

/* Between a head's matrix and this block's rows of it. */
static __device__ unsigned long long matrix_at(unsigned int i)
{
    return ((unsigned long long)blockIdx.x * DIM + blockIdx.y * SLICE) * DIM + i;
}

extern "C" __global__ void __launch_bounds__(SCAN_WARPS * 32) delta_scan(const kvs_delta_chunk_params p)
{
    __shared__ state_t state;
    for (unsigned int i = threadIdx.x; i < SLICE * DIM; i += SCAN_WARPS * 32) {
        state.m[i / DIM * STRIDE + i % DIM] = ((const float *)p.pass.matrix_in)[matrix_at(i)];
    }
    for (unsigned int chunk = 0; chunk < p.n_chunks; chunk++) {
        const float *scratch = scratch_of(p, chunk);
        tiles_t w = {}, out = {};
        __syncthreads();
        read_state(scratch, state, w, out);
        store_updates(scratch, w, state);
        __syncthreads();
        add_updates(scratch, state, out);
        store_out(p, rows_of(p, chunk), out);
        advance(scratch, state);
    }
    __syncthreads();
    for (unsigned int i = threadIdx.x; i < SLICE * DIM; i += SCAN_WARPS * 32) {
        ((float *)p.pass.matrix_out)[matrix_at(i)] = state.m[i / DIM * STRIDE + i % DIM];
    }
}
