/* grid.cuh: kernels that begin while the one before them ends.
 *
 * A kernel that is launched so (kvs_cuda_key.waits) may run before what comes before it in the stream has ended. It reads nothing
 * that an operation wrote, and writes nothing, before kvs_wait_for_previous; weights it may read, and the picture of a pass: the words of a
 * recorded one (step_words.h) and page tables, which are copied before its first kernel, which follows in order. Bytes that may yet be
 * written it may bring near, to the second-level cache. Every thread that goes on calls it, so
 * that the end of a kernel means the end of all before it.
 */
#ifndef KVS_KERNELS_GRID_CUH
#define KVS_KERNELS_GRID_CUH

/* The next kernel may take what room this one leaves. */
__device__ __forceinline__ void kvs_let_next_begin()
{
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* What earlier kernels have written is there. */
__device__ __forceinline__ void kvs_wait_for_previous()
{
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif
