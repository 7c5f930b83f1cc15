/* mma.cuh: matrix products of half precision in registers, and pairs of halves in words. Architecture: sm_80.
 *
 * Shapes: c [16][8] += a [16][16] b [16][8]. Lane 4g + t holds of a the words (row g, columns 2t and 2t + 1), (row g + 8, the same),
 * (row g, columns 2t + 8 and 2t + 9), (row g + 8, the same); of b (rows 2t and 2t + 1, column g), (rows 2t + 8 and 2t + 9,
 * column g); of c (row g, columns 2t and 2t + 1), (row g + 8, the same).
 */
#ifndef KVS_KERNELS_MMA_CUH
#define KVS_KERNELS_MMA_CUH

#include "numeric.cuh"

#ifdef __CUDACC__
__device__ inline void kvs_mma(float *c, const kvs_u32 *a, kvs_u32 b0, kvs_u32 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The same of bfloat16. */
__device__ inline void kvs_mma_bf16(float *c, const kvs_u32 *a, kvs_u32 b0, kvs_u32 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* c [16][8] += a [16][8] b [8][8] of float32 whose last 13 bits do not count. Lane 4g + t holds of a (row g, column t), (row g + 8, t),
 * (g, t + 4), (g + 8, t + 4); of b (row t, column g), (t + 4, g); of c as above. */
__device__ inline void kvs_mma_tf32(float *c, const kvs_u32 *a, const kvs_u32 *b)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Of an 8 x 8 matrix of halves, lane 4g + t holds row g, columns 2t and 2t + 1; the same of the transposed comes back. */
__device__ inline kvs_u32 kvs_transpose(kvs_u32 halves)
{
    kvs_u32 transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(halves));
    return transposed;
}

__device__ inline kvs_u32 kvs_pack_halves(float low, float high)
{
    kvs_u32 halves;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
    return halves;
}

__device__ inline kvs_u32 kvs_halves_add(kvs_u32 a, kvs_u32 b)
{
    kvs_u32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

__device__ inline kvs_u32 kvs_halves_mul(kvs_u32 a, kvs_u32 b)
{
    kvs_u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

/* a * b - c */
__device__ inline kvs_u32 kvs_halves_fms(kvs_u32 a, kvs_u32 b, kvs_u32 c)
{
    kvs_u32 rest;
    asm("{ .reg .b32 n; neg.f16x2 n, %3; fma.rn.f16x2 %0, %1, %2, n; }" : "=r"(rest) : "r"(a), "r"(b), "r"(c));
    return rest;
}

__device__ inline kvs_u32 kvs_halves_sub(kvs_u32 a, kvs_u32 b)
{
    kvs_u32 rest;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(rest) : "r"(a), "r"(b));
    return rest;
}
#endif

/* Bytes 0 and 1 (SECOND: 2 and 3) as halves, less `offset`: 1024 + byte is an exact half whose low bits are the byte. */
template <int OFFSET, bool SECOND> __device__ inline kvs_u32 kvs_bytes_to_halves(kvs_u32 bytes)
{
    constexpr kvs_u32 base = 0xe400u | (kvs_u32)OFFSET; /* -(1024 + offset) */
    static_assert(OFFSET >= 0 && OFFSET < 1024, "one step is one there");
    return kvs_halves_add(__byte_perm(bytes, 0x64646464u, SECOND ? 0x4342u : 0x4140u), base | base << 16);
}

/* A number as the sum of two halves: the rest that the first leaves, rounded. */
struct kvs_split {
    kvs_u32 high;
    kvs_u32 low;
};

__device__ inline kvs_split kvs_split_floats(float a, float b)
{
    kvs_split split;
    split.high = kvs_pack_halves(a, b);
    split.low = kvs_pack_halves(a - kvs_f16_to_f32(split.high & 0xffffu), b - kvs_f16_to_f32(split.high >> 16));
    return split;
}

#endif
