/* step_load.cu: bring the picture of a pass from pinned host memory to the device. The copy engine would make it wait behind a
 * run of pages.
 *
 * Kernel: step_load. Argument: kvs_step_load_params. Grid: any, block 256. Architecture: sm_75. No macros.
 */
#include "step_words.h"

extern "C" __global__ void __launch_bounds__(256) step_load(const kvs_step_load_params p)
{
    const unsigned int thread = blockIdx.x * 256 + threadIdx.x, n_threads = gridDim.x * 256;
    const unsigned long long n = ((const kvs_step_header *)p.from)->n_bytes / 16;
    const uint4 *from = (const uint4 *)(p.from + sizeof(kvs_step_header));
    uint4 *to = (uint4 *)p.to;
    for (unsigned long long i = thread; i < n; i += n_threads) {
        to[i] = from[i];
    }
    for (unsigned int i = thread; i < p.n_zeros; i += n_threads) {
        ((unsigned int *)p.zeros)[i] = 0;
    }
}
