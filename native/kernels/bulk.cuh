/* bulk.cuh: copies from global to shared memory that the copy engine carries out and that arrive at a barrier there. Architecture: sm_90
 * and later; before, the file is empty.
 */
#ifndef KVS_KERNELS_BULK_CUH
#define KVS_KERNELS_BULK_CUH

#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ unsigned int kvs_shared_address(const void *at)
{
    return (unsigned int)__cvta_generic_to_shared(at);
}

__device__ __forceinline__ void kvs_barrier_init(unsigned long long *barrier, unsigned int n_arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(kvs_shared_address(barrier)), "r"(n_arrivals) : "memory");
}

/* Barriers that one thread has initialised are there for the copy engine too; a __syncthreads follows. */
__device__ __forceinline__ void kvs_barriers_made()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void kvs_barrier_arrive(unsigned long long *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(kvs_shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void kvs_barrier_wait(unsigned long long *barrier, unsigned int parity)
{
    unsigned int is_done = 0;
    while (is_done == 0) {
        asm volatile("{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
                     : "=r"(is_done)
                     : "r"(kvs_shared_address(barrier)), "r"(parity)
                     : "memory");
    }
}

/* One arrival, and n_bytes that the barrier's phase waits for besides. */
__device__ __forceinline__ void kvs_barrier_expect(unsigned long long *barrier, unsigned int n_bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(kvs_shared_address(barrier)), "r"(n_bytes)
                 : "memory");
}

/* n_bytes, a multiple of 16, which somebody has told or will tell the barrier to expect. */
__device__ __forceinline__ void kvs_bulk_copy_expected(void *to, const void *from, unsigned int n_bytes, unsigned long long *barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     kvs_shared_address(to)),
                 "l"(from), "r"(n_bytes), "r"(kvs_shared_address(barrier))
                 : "memory");
}

/* n_bytes, a multiple of 16, which the barrier's phase waits for beside one arrival: this one. */
__device__ __forceinline__ void kvs_bulk_copy(void *to, const void *from, unsigned int n_bytes, unsigned long long *barrier)
{
    kvs_barrier_expect(barrier, n_bytes);
    kvs_bulk_copy_expected(to, from, n_bytes, barrier);
}

#endif

#endif
