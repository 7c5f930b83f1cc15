/* stages.cuh: the ring of a warp, whose stages arrive from global memory while the warp works on others.
 *
 * From sm_90 on the copy engine brings them: one lane asks for each contiguous piece, a barrier tells of the whole stage. On sm_80 to
 * sm_89 all lanes ask for 16 bytes at a time; before, loads and stores bring a stage at once.
 */
#ifndef KVS_KERNELS_STAGES_CUH
#define KVS_KERNELS_STAGES_CUH

#include "bulk.cuh"

#define KVS_STAGE_WARPS 8

template <int N> struct ring {
    unsigned int at;     /* the next stage that is waited for */
    unsigned int parity; /* of its barrier */

#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
    static __device__ __forceinline__ unsigned long long *barrier(unsigned int slot)
    {
        __shared__ unsigned long long barriers[KVS_STAGE_WARPS * N];
        return barriers + threadIdx.x / 32 * N + slot;
    }
#endif

    __device__ __forceinline__ void begin()
    {
        at = parity = 0;
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
        if (threadIdx.x % 32 == 0) {
            for (unsigned int slot = 0; slot < N; slot++) {
                kvs_barrier_init(barrier(slot), 1);
            }
            kvs_barriers_made();
        }
        __syncwarp();
#endif
    }

    /* `n` of UNITS pieces of each panel, `stride` pieces apart from `unit` on, to `slot`: [panel][UNITS]. All lanes come here. */
    template <unsigned int UNITS, unsigned int UNIT_BYTES, unsigned int PANELS>
    __device__ __forceinline__ void fetch(unsigned char *to, const unsigned char *const (&panels)[PANELS], unsigned int unit,
                                          unsigned int stride, unsigned int n, unsigned int slot)
    {
        const unsigned int lane = threadIdx.x % 32;
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
        static_assert(UNITS * PANELS <= 32 && PANELS <= 2, "a lane to a piece");
        if (lane == 0) {
            kvs_barrier_expect(barrier(slot), n * PANELS * UNIT_BYTES);
        }
        const unsigned int i = lane % UNITS;
        if (lane < UNITS * PANELS && (UNITS == 1 || i < n)) {
            const unsigned char *panel = PANELS == 1 || lane < UNITS ? panels[0] : panels[PANELS - 1];
            kvs_bulk_copy_expected(to + lane * UNIT_BYTES, panel + (unsigned long long)(unit + i * stride) * UNIT_BYTES, UNIT_BYTES,
                                   barrier(slot));
        }
#else
        (void)slot;
#pragma unroll
        for (unsigned int panel = 0; panel < PANELS; panel++) {
#pragma unroll
            for (unsigned int i = 0; i < UNITS; i++) {
                const unsigned char *from = panels[panel] + (unsigned long long)(unit + i * stride) * UNIT_BYTES;
#pragma unroll
                for (unsigned int first = 0; first < UNIT_BYTES; first += 32 * 16) {
                    const unsigned int mine = first + lane * 16;
                    if (i < n && mine < UNIT_BYTES) {
                        copy(to + (panel * UNITS + i) * UNIT_BYTES + mine, from + mine);
                    }
                }
            }
        }
#endif
    }

    /* Behind each stage that was asked for, and behind each that there was none of. */
    __device__ __forceinline__ void end_stage()
    {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }

    /* The next stage has come: its slot, which is fed again before the next wait. */
    __device__ __forceinline__ unsigned int wait()
    {
        const unsigned int slot = at;
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
        kvs_barrier_wait(barrier(slot), parity);
#elif defined(__CUDACC__) && __CUDA_ARCH__ >= 800
        asm volatile("cp.async.wait_group %0;" ::"n"(N - 1) : "memory");
        __syncwarp();
#else
        __syncwarp();
#endif
        at = at + 1 < N ? at + 1 : 0;
        parity ^= at == 0;
        return slot;
    }

#if !defined(__CUDACC__) || __CUDA_ARCH__ < 900
    /* Weights are read once and go past the first-level cache. */
    static __device__ __forceinline__ void copy(unsigned char *to, const unsigned char *from)
    {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
        const unsigned int shared = (unsigned int)__cvta_generic_to_shared(to);
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
#else
        *(uint4 *)to = *(const uint4 *)from;
#endif
    }
#endif
};

#endif
