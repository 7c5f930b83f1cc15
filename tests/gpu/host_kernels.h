/* host_kernels.h: enough of a GPU to run a kernel's source on the host, block after block, for its arithmetic alone.
 *
 * A thread of a block is a coroutine. It runs until it waits for its block or warp, or ends; whoever arrives last lets the others go on. A warp
 * goes as far as it can before the next one does.
 */
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__

struct dim3 {
    unsigned x, y, z;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};

inline uint2 make_uint2(unsigned x, unsigned y)
{
    return {x, y};
}

static dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace host
{
constexpr size_t STACK_BYTES = 64 << 10;

struct meeting {
    unsigned n_here, n_members, round;
};

/* Begun once and used by every block. Only the first switch to it is a context's: those ask the system for signals each time. */
struct thread {
    jmp_buf at;
    ucontext_t first;
    char *stack;
    const meeting *waits_for;
    unsigned round;
    bool is_done;
};

static thread threads[1024];
static jmp_buf scheduler;
static unsigned current;
static meeting block, warps[32];
static void (*body)(const void *);
static const void *argument;

inline void end_round(meeting *m)
{
    if (m->n_members != 0 && m->n_here == m->n_members) {
        m->n_here = 0;
        m->round++;
    }
}

inline void leave()
{
    if (_setjmp(threads[current].at) == 0) {
        _longjmp(scheduler, 1);
    }
}

/* Returns which round it was. Whoever has its number has met all others since the round before. */
inline unsigned meet(meeting *m)
{
    thread *mine = &threads[current];
    const unsigned round = m->round;
    m->n_here++;
    end_round(m);
    if (m->round == round) {
        mine->waits_for = m;
        mine->round = round;
        leave();
        mine->waits_for = nullptr;
    }
    return round;
}

/* Copies of 16 bytes that a thread has asked for. They come when it waits for them, at the last moment; until then garbage lies there. */
struct copies {
    struct {
        unsigned char *to;
        const unsigned char *from;
        unsigned group;
    } all[256];
    unsigned n, group;
};

static copies queues[1024];

inline void copy_later(unsigned char *to, const unsigned char *from)
{
    copies *mine = &queues[current];
    if (mine->n == sizeof mine->all / sizeof *mine->all) {
        fprintf(stderr, "a thread asks for more copies than can be under way here\n");
        abort();
    }
    memset(to, 0xff, 16);
    mine->all[mine->n++] = {to, from, mine->group};
}

inline void end_copies()
{
    queues[current].group++;
}

inline void wait_copies(unsigned n_left)
{
    copies *mine = &queues[current];
    unsigned n = 0;
    for (unsigned i = 0; i < mine->n; i++) {
        if (mine->all[i].group + n_left < mine->group) {
            memcpy(mine->all[i].to, mine->all[i].from, 16);
        } else {
            mine->all[n++] = mine->all[i];
        }
    }
    mine->n = n;
}

inline void enter()
{
    for (;;) {
        queues[current].group = 0;
        body(argument);
        if (queues[current].n != 0) {
            fprintf(stderr, "a thread ends while its copies are under way\n");
            abort();
        }
        threads[current].is_done = true;
        block.n_members--;
        warps[current / 32].n_members--;
        end_round(&block);
        end_round(&warps[current / 32]);
        leave();
    }
}

inline void resume(thread *t)
{
    if (_setjmp(scheduler) != 0) {
        return;
    }
    if (t->stack != nullptr) {
        _longjmp(t->at, 1);
    }
    t->stack = (char *)malloc(STACK_BYTES);
    getcontext(&t->first);
    t->first.uc_stack.ss_sp = t->stack;
    t->first.uc_stack.ss_size = STACK_BYTES;
    makecontext(&t->first, enter, 0);
    setcontext(&t->first);
}

inline bool can_go_on(const thread *t)
{
    return !t->is_done && (t->waits_for == nullptr || t->waits_for->round != t->round);
}

/* Whether one of its threads could. Goes on until none can. */
inline bool run_warp(unsigned first, unsigned end)
{
    bool has_run = false;
    for (bool again = true; again;) {
        again = false;
        for (unsigned i = first; i < end; i++) {
            if (can_go_on(&threads[i])) {
                current = i;
                threadIdx = {i, 0, 0};
                resume(&threads[i]);
                again = has_run = true;
            }
        }
    }
    return has_run;
}

inline void run_block(unsigned n_threads)
{
    block = {0, n_threads, 0};
    for (unsigned i = 0; i < n_threads; i++) {
        threads[i].is_done = false;
        threads[i].waits_for = nullptr;
        if (i % 32 == 0) {
            warps[i / 32] = {0, n_threads - i < 32 ? n_threads - i : 32, 0};
        }
    }
    while (block.n_members != 0) {
        bool has_run = false;
        for (unsigned i = 0; i < n_threads; i += 32) {
            has_run |= run_warp(i, n_threads - i < 32 ? n_threads : i + 32);
        }
        if (!has_run) {
            fprintf(stderr, "a block waits for threads that went another way\n");
            abort();
        }
    }
}

/* What every thread of a warp has brought. Two rounds have two places: nobody is two rounds ahead of one who reads still. */
template <class T> struct exchange {
    T of[2][1024];

    const T *operator()(const T &mine)
    {
        meeting *warp = &warps[current / 32];
        of[warp->round % 2][current] = mine;
        return &of[meet(warp) % 2][current / 32 * 32];
    }
};

template <class T> T shuffle(T value, unsigned from_lane)
{
    static exchange<T> values;
    return values(value)[from_lane];
}
} // namespace host

inline void __syncthreads()
{
    host::meet(&host::block);
}

template <class T> T __shfl_sync(unsigned, T value, unsigned lane)
{
    return host::shuffle(value, lane % 32);
}

template <class T> T __shfl_xor_sync(unsigned, T value, unsigned distance)
{
    return host::shuffle(value, host::current % 32 ^ distance);
}

inline unsigned __ballot_sync(unsigned, bool is_set)
{
    static host::exchange<bool> all;
    const bool *of = all(is_set);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        bits |= (unsigned)of[lane] << lane;
    }
    return bits;
}

template <class To, class From> To host_bits(From from)
{
    To to;
    static_assert(sizeof to == sizeof from, "the same bits");
    memcpy(&to, &from, sizeof to);
    return to;
}

inline unsigned __float_as_uint(float value)
{
    return host_bits<unsigned>(value);
}

inline float __uint_as_float(unsigned bits)
{
    return host_bits<float>(bits);
}

inline long long __double_as_longlong(double value)
{
    return host_bits<long long>(value);
}

inline float __int_as_float(int bits)
{
    return host_bits<float>(bits);
}

inline double __longlong_as_double(long long bits)
{
    return host_bits<double>(bits);
}

template <class T> T __ldg(const T *from)
{
    return *from;
}

inline float __fadd_rn(float a, float b)
{
    return a + b;
}

inline float __fsub_rn(float a, float b)
{
    return a - b;
}

inline float __fmul_rn(float a, float b)
{
    return a * b;
}

inline float __fdiv_rn(float a, float b)
{
    return a / b;
}

inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}

inline float __fsqrt_rn(float a)
{
    return sqrtf(a);
}

inline int __float2int_rn(float value)
{
    return (int)rintf(value);
}

inline void __syncwarp()
{
    host::meet(&host::warps[host::current / 32]);
}

/* c += a b of a warp: 16 rows by n_halves * 16 values by 8 columns of bytes, fragments as the integer matrix products have them. */
inline void host_product(int (&c)[4], const unsigned *a, const unsigned *b, unsigned n_halves)
{
    struct fragment {
        unsigned a[4], b[2];
    };
    static host::exchange<fragment> fragments;
    fragment mine = {};
    memcpy(mine.a, a, 2 * n_halves * sizeof *a);
    memcpy(mine.b, b, n_halves * sizeof *b);
    const fragment *of = fragments(mine);
    const unsigned lane = host::current % 32;
    for (unsigned half = 0; half < n_halves; half++) {
        for (unsigned t = 0; t < 4; t++) {
            const fragment &left = of[lane / 4 * 4 + t];
            const unsigned rows[2] = {left.a[2 * half], left.a[2 * half + 1]};
            const unsigned columns[2] = {of[lane % 4 * 8 + t].b[half], of[lane % 4 * 8 + 4 + t].b[half]};
            for (unsigned i = 0; i < 4; i++) {
                for (unsigned byte = 0; byte < 32; byte += 8) {
                    c[i] += (int8_t)(rows[i / 2] >> byte) * (int8_t)(columns[i % 2] >> byte);
                }
            }
        }
    }
}

inline int __popc(unsigned bits)
{
    return __builtin_popcount(bits);
}

inline int __ffs(unsigned bits)
{
    return __builtin_ffs((int)bits);
}

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector)
{
    const uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; i++) {
        result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    }
    return result;
}

/* The instruction: selectors of 8 and more give the sign of their byte. */
inline unsigned host_permute(unsigned low, unsigned high, unsigned selector)
{
    const unsigned bytes = __byte_perm(low, high, selector);
    unsigned result = 0;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned byte = bytes >> 8 * i & 0xff;
        result |= (selector >> (4 * i + 3) & 1 ? (byte >> 7) * 0xff : byte) << 8 * i;
    }
    return result;
}

/* Blocks follow one another. */
inline unsigned atomicAdd(unsigned *to, unsigned value)
{
    const unsigned before = *to;
    *to += value;
    return before;
}

inline void __threadfence()
{
}

static uint4 dynamic_shared[227 << 6];

namespace host
{
inline double decode_half(unsigned half)
{
    const unsigned exponent = half >> 10 & 31, mantissa = half & 1023;
    const double sign = half & 0x8000 ? -1.0 : 1.0;
    if (exponent == 31) {
        return mantissa != 0 ? (double)NAN : sign * INFINITY;
    }
    return sign * (exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, (int)exponent - 25));
}

inline double half_value(unsigned half)
{
    static double values[1 << 16];
    static bool is_filled;
    if (!is_filled) {
        for (unsigned i = 0; i < 1 << 16; i++) {
            values[i] = decode_half(i);
        }
        is_filled = true;
    }
    return values[half];
}

/* Round to nearest even, once. */
inline unsigned half_bits(double value)
{
    const unsigned sign = signbit(value) ? 0x8000u : 0u;
    const double magnitude = fabs(value);
    if (!(magnitude < 65520.0)) {
        return magnitude != magnitude ? 0x7fffu : sign | 0x7c00u;
    }
    if (magnitude < 0x1p-14) {
        return sign | (unsigned)nearbyint(magnitude * 0x1p24);
    }
    uint64_t bits;
    memcpy(&bits, &magnitude, sizeof bits);
    bits += (UINT64_C(1) << 41) - 1 + (bits >> 42 & 1);
    return sign | (unsigned)((bits >> 42) - (UINT64_C(1023 - 15) << 10));
}

template <class F> unsigned on_halves(F f)
{
    return half_bits(f(0)) | half_bits(f(16)) << 16;
}
} // namespace host

inline unsigned kvs_pack_halves(float low, float high)
{
    return host::half_bits(low) | host::half_bits(high) << 16;
}

inline unsigned kvs_halves_add(unsigned a, unsigned b)
{
    return host::on_halves([=](int i) { return host::half_value(a >> i & 0xffff) + host::half_value(b >> i & 0xffff); });
}

inline unsigned kvs_halves_mul(unsigned a, unsigned b)
{
    return host::on_halves([=](int i) { return host::half_value(a >> i & 0xffff) * host::half_value(b >> i & 0xffff); });
}

inline unsigned kvs_halves_sub(unsigned a, unsigned b)
{
    return kvs_halves_add(a, b ^ 0x80008000u);
}

inline unsigned kvs_halves_fms(unsigned a, unsigned b, unsigned c)
{
    return host::on_halves([=](int i) {
        const double of_a = host::half_value(a >> i & 0xffff), of_b = host::half_value(b >> i & 0xffff);
        return fma(of_a, of_b, -host::half_value(c >> i & 0xffff));
    });
}

inline unsigned kvs_transpose(unsigned halves)
{
    const unsigned g = host::current % 32 / 4, t = host::current % 4;
    const unsigned first = host::shuffle(halves, 8 * t + g / 2) >> 16 * (g % 2) & 0xffff;
    const unsigned second = host::shuffle(halves, 8 * t + 4 + g / 2) >> 16 * (g % 2) & 0xffff;
    return first | second << 16;
}

/* Products of halves are exact in double; sums round there, once to float. */
template <class Value> void host_mma(Value value, float *c, const unsigned *a, unsigned b0, unsigned b1)
{
    struct fragment {
        double left[8], right[4];
    };
    static host::exchange<fragment> fragments;
    fragment mine;
    for (unsigned i = 0; i < 8; i++) {
        mine.left[i] = value(a[i / 2] >> 16 * (i % 2) & 0xffff);
        mine.right[i % 4] = value((i % 4 < 2 ? b0 : b1) >> 16 * (i % 2) & 0xffff);
    }
    const fragment *of = fragments(mine);
    const unsigned g = host::current % 32 / 4, t = host::current % 4;
    for (unsigned i = 0; i < 4; i++) {
        double sum = c[i];
        for (unsigned k = 0; k < 16; k++) {
            const unsigned of_k = k % 8 / 2, column = 2 * t + i % 2;
            sum += of[4 * g + of_k].left[k / 8 * 4 + i / 2 * 2 + k % 2] * of[4 * column + of_k].right[k / 8 * 2 + k % 2];
        }
        c[i] = (float)sum;
    }
}

inline void kvs_mma(float *c, const unsigned *a, unsigned b0, unsigned b1)
{
    host_mma(host::half_value, c, a, b0, b1);
}

inline void kvs_mma_bf16(float *c, const unsigned *a, unsigned b0, unsigned b1)
{
    host_mma([](unsigned bits) { return (double)__uint_as_float(bits << 16); }, c, a, b0, b1);
}

/* Products of 11 bits are exact in double. */
inline void kvs_mma_tf32(float *c, const unsigned *a, const unsigned *b)
{
    struct fragment {
        float left[4], right[2];
    };
    static host::exchange<fragment> fragments;
    fragment mine;
    for (unsigned i = 0; i < 4; i++) {
        mine.left[i] = __uint_as_float(a[i] & 0xffffe000u);
        mine.right[i % 2] = __uint_as_float(b[i % 2] & 0xffffe000u);
    }
    const fragment *of = fragments(mine);
    const unsigned g = host::current % 32 / 4, t = host::current % 4;
    for (unsigned i = 0; i < 4; i++) {
        double sum = c[i];
        for (unsigned k = 0; k < 8; k++) {
            const unsigned column = 2 * t + i % 2;
            sum += (double)of[4 * g + k % 4].left[k / 4 * 2 + i / 2] * (double)of[4 * column + k % 4].right[k / 4];
        }
        c[i] = (float)sum;
    }
}

template <class Params, void (*KERNEL)(Params)> void host_call(const void *params)
{
    KERNEL(*(const Params *)params);
}

inline void host_launch(void (*body)(const void *), const void *params, const unsigned *grid, unsigned n_threads)
{
    host::body = body;
    host::argument = params;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {n_threads, 1, 1};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; blockIdx.z++) {
        for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++) {
            for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++) {
                host::run_block(n_threads);
            }
        }
    }
}
