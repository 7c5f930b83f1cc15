/* copy_ahead.cuh: 16 bytes from global to shared memory that arrive while the thread goes on; before sm_80 it waits for them. */
#ifndef KVS_KERNELS_COPY_AHEAD_CUH
#define KVS_KERNELS_COPY_AHEAD_CUH

#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
#define KVS_COPIES_AHEAD 1
#else
#define KVS_COPIES_AHEAD 0
#endif

__device__ __forceinline__ void kvs_copy_ahead(unsigned char *to, const unsigned char *from)
{
#if KVS_COPIES_AHEAD
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
#else
    *(uint4 *)to = *(const uint4 *)from;
#endif
}

/* What this thread has asked for since the last call is one batch. */
__device__ __forceinline__ void kvs_end_batch()
{
#if KVS_COPIES_AHEAD
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Wait for all batches of this thread but the newest LEFT. */
template <int LEFT> __device__ __forceinline__ void kvs_wait_batches()
{
#if KVS_COPIES_AHEAD
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

#endif
