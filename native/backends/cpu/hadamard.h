/* hadamard.h: orthonormal Walsh-Hadamard rotation of consecutive blocks, in place.
 *
 * Order: butterflies of distance 1, 2, 4, ... block / 2, (a, b) -> (a + b, a - b), then one multiplication by
 * float32(1 / sqrt(block)). Every twin performs these float32 operations, so that all agree to the bit.
 */
#ifndef KVS_NATIVE_CPU_HADAMARD_H
#define KVS_NATIVE_CPU_HADAMARD_H

#include <stdint.h>

/* Rotate each `block` consecutive values of n_rows rows. n_values: per row, a multiple of block; block: a power of two
 * from 2 to 4096 (rotation_k, rotation_v of the record; 0 does nothing). Rows lie row_stride floats apart. Applying it
 * twice gives the values back up to rounding. */
void kvs_hadamard_rows(uint32_t isa, float *values, uint64_t n_rows, uint64_t row_stride,
                       uint32_t n_values, uint32_t block);

/* The twins: one block. */
void kvs_hadamard_block_reference(float *values, uint32_t block);
void kvs_hadamard_block_avx2(float *values, uint32_t block); /* block at least 8 */

#endif
