/* act_quantize.cu: rows of activations as records of 8-bit codes (act_record.h), where the product that reads them does not form
 * them itself (matmul.cu does).
 *
 * Kernel act_quantize(kvs_act_params). No macros.
 * Grid: (n_slots, values / 1024 rounded up). Block: 256. No dynamic shared memory. Architecture: 75.
 * Order: act_unit.cuh.
 * Twin: native/backends/cpu/act.c.
 */
#include "act_unit.cuh"
#include "grid.cuh"

extern "C" __global__ void __launch_bounds__(KVS_ACT_UNIT_THREADS) act_quantize(const kvs_act_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    const unsigned int slot = blockIdx.x;
    if (p.n_slots_used != 0 && slot >= *(const unsigned int *)p.n_slots_used) {
        return;
    }
    const unsigned int row = p.slot_rows != 0 ? ((const unsigned int *)p.slot_rows)[slot] : slot;
    if (row == KVS_NO_SLOT) {
        return;
    }
    kvs_act_unit(p, slot, row, blockIdx.y);
}
