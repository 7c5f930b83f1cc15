/* latch.cuh: blocks of one launch that wait for what some of them do first.
 *
 * A latch is zero before a launch and after it; launches that share one follow one another. Who has done a part of the work opens it by
 * one; the others look at it until it is open as wide as there are parts. Parts wait for nothing and are those of the first blocks, which
 * begin first: so all of them are done, wherever the other blocks are.
 */
#ifndef KVS_KERNELS_LATCH_CUH
#define KVS_KERNELS_LATCH_CUH

typedef struct kvs_latch {
    unsigned int n_done; /* parts */
    unsigned int n_left; /* blocks that wait no more */
} kvs_latch;

/* What the whole block has written is there for who sees the latch open. All threads come here. */
__device__ __forceinline__ void kvs_latch_open(kvs_latch *latch)
{
    __syncthreads();
    if (threadIdx.x == 0) {
#ifdef __CUDACC__
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(&latch->n_done) : "memory");
#else
        latch->n_done++;
#endif
    }
}

/* Until n_parts are done. The last block that has seen it closes the latch. All threads come here. */
__device__ __forceinline__ void kvs_latch_wait(kvs_latch *latch, unsigned int n_parts)
{
    if (threadIdx.x == 0) {
#ifdef __CUDACC__
        unsigned int n_done = 0, n_left = 0;
        for (;;) {
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(n_done) : "l"(&latch->n_done) : "memory");
            if (n_done >= n_parts) {
                break;
            }
            __nanosleep(64); /* so that looks do not stand in the way of those who open */
        }
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(n_left) : "l"(&latch->n_left) : "memory");
#else
        const unsigned int n_left = latch->n_left++;
#endif
        if (n_left == gridDim.x - 1) {
            latch->n_done = 0;
            latch->n_left = 0;
        }
    }
    __syncthreads();
}

#endif
