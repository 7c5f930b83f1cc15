/* wgmma.cuh: matrix products of a warpgroup. Architecture: sm_90a alone.
 *
 * Shapes: c [64][N] += a [64][16] b [16][N]. Warp w of the group has rows 16w .. 16w + 15 of a and c, as mma.cuh has fragments; c by tiles of
 * 8 columns. b: columns of 64 values of k in atoms of 8 columns (tile_record.h); its word is kvs_wgmma_operand's.
 */
#ifndef KVS_KERNELS_WGMMA_CUH
#define KVS_KERNELS_WGMMA_CUH

#define KVS_SUMS_4(c, j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define KVS_SUMS_16(c, j) KVS_SUMS_4(c, j), KVS_SUMS_4(c, (j) + 1), KVS_SUMS_4(c, (j) + 2), KVS_SUMS_4(c, (j) + 3)

__device__ __forceinline__ void kvs_wgmma_bf16(float (&c)[8][4], const unsigned int (&a)[4], unsigned long long b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
                 : KVS_SUMS_16(c, 0), KVS_SUMS_16(c, 4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void kvs_wgmma_bf16(float (&c)[16][4], const unsigned int (&a)[4], unsigned long long b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
                 : KVS_SUMS_16(c, 0), KVS_SUMS_16(c, 4), KVS_SUMS_16(c, 8), KVS_SUMS_16(c, 12)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void kvs_wgmma_bf16(float (&c)[32][4], const unsigned int (&a)[4], unsigned long long b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                 "{%128, %129, %130, %131}, %132, 1, 1, 1, 0;"
                 : KVS_SUMS_16(c, 0), KVS_SUMS_16(c, 4), KVS_SUMS_16(c, 8), KVS_SUMS_16(c, 12),
                   KVS_SUMS_16(c, 16), KVS_SUMS_16(c, 20), KVS_SUMS_16(c, 24), KVS_SUMS_16(c, 28)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void kvs_wgmma_bf16(float (&c)[22][4], const unsigned int (&a)[4], unsigned long long b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87}, "
                 "{%88, %89, %90, %91}, %92, 1, 1, 1, 0;"
                 : KVS_SUMS_16(c, 0), KVS_SUMS_16(c, 4), KVS_SUMS_16(c, 8), KVS_SUMS_16(c, 12),
                   KVS_SUMS_16(c, 16), KVS_SUMS_4(c, 20), KVS_SUMS_4(c, 21)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* Of halves: b [16][N] whose rows, 64 columns of them, are the atoms' rows: tokens of V. */
__device__ __forceinline__ void kvs_wgmma_columns(float (&c)[8][4], const unsigned int (&a)[4], unsigned long long b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : KVS_SUMS_16(c, 0), KVS_SUMS_16(c, 4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void kvs_wgmma_columns(float (&c)[16][4], const unsigned int (&a)[4], unsigned long long b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : KVS_SUMS_16(c, 0), KVS_SUMS_16(c, 4), KVS_SUMS_16(c, 8), KVS_SUMS_16(c, 12)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void kvs_wgmma_columns(float (&c)[32][4], const unsigned int (&a)[4], unsigned long long b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                 "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : KVS_SUMS_16(c, 0), KVS_SUMS_16(c, 4), KVS_SUMS_16(c, 8), KVS_SUMS_16(c, 12),
                   KVS_SUMS_16(c, 16), KVS_SUMS_16(c, 20), KVS_SUMS_16(c, 24), KVS_SUMS_16(c, 28)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* Of halves: a in shared memory as b is; c begins anew with IS_FIRST. */
template <bool IS_FIRST>
__device__ __forceinline__ void kvs_wgmma_shared(float (&c)[8][4], unsigned long long a, unsigned long long b)
{
    if constexpr (IS_FIRST) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                     "%32, %33, 0, 1, 1, 0, 0;"
                     : KVS_SUMS_16(c, 0), KVS_SUMS_16(c, 4)
                     : "l"(a), "l"(b));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                     "%32, %33, 1, 1, 1, 0, 0;"
                     : KVS_SUMS_16(c, 0), KVS_SUMS_16(c, 4)
                     : "l"(a), "l"(b));
    }
}

/* Rows of 64 columns, atoms of 8 rows one after another; the next 64 columns lie `next` bytes further on. */
__device__ __forceinline__ unsigned long long kvs_wgmma_columns_operand(unsigned int shared_address, unsigned int next)
{
    return (unsigned long long)((shared_address & 0x3ffffu) >> 4) | (unsigned long long)(next >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

/* What this thread has written to shared memory is there for products; a barrier follows. */
__device__ __forceinline__ void kvs_shared_written()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Sums are read or changed behind a wait, not before it. */
template <int N> __device__ __forceinline__ void kvs_wgmma_done(float (&c)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
    }
}

/* Rows of 128 bytes, swizzled, atoms of 1,024 bytes one after another. A step of 16 values is 32 bytes, two units, further on. */
__device__ __forceinline__ unsigned long long kvs_wgmma_operand(unsigned int shared_address)
{
    return (unsigned long long)((shared_address & 0x3ffffu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

/* Registers that products read or add to were written by other instructions. */
__device__ __forceinline__ void kvs_wgmma_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void kvs_wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void kvs_wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#endif
