/* async_copy.cuh: copies from global to shared memory that go on while the thread that asked for them does something else.
 * Architecture: sm_80.
 *
 * Order: a thread's copies form groups, ended one after another. A wait is for those of this thread; others see them behind a barrier.
 */
#ifndef KVS_KERNELS_ASYNC_COPY_CUH
#define KVS_KERNELS_ASYNC_COPY_CUH

/* 16 bytes, both aligned to 16, past the first-level cache. */
__device__ __forceinline__ void kvs_copy_async(unsigned char *to, const unsigned char *from)
{
#ifdef __CUDACC__
    const unsigned int shared = (unsigned int)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
#else
    host::copy_later(to, from);
#endif
}

/* The copies since the last group are one, even if there are none. */
__device__ __forceinline__ void kvs_copies_end()
{
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    host::end_copies();
#endif
}

/* All groups but the last N_LEFT have arrived. */
template <int N_LEFT> __device__ __forceinline__ void kvs_copies_wait()
{
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;" ::"n"(N_LEFT) : "memory");
#else
    host::wait_copies(N_LEFT);
#endif
}

#endif
