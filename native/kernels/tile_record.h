/* tile_record.h: activations as matmul_tile.cu reads them. Plain C without includes.
 *
 * Values are bfloat16. Blocks of 64 values of the reduction axis follow one another; a block has an atom of 1,024 bytes for every 8 slots
 * (rows). A slot's 128 bytes of an atom lie at 128 * (slot % 8) in eight pieces of 16 bytes; piece c lies where c ^ (slot % 8) says, as matrix
 * products read shared memory without conflicts of banks. A piece holds eight values of a step of 16, in the order in which a step's
 * fragments have them: position 2t + i holds value 4t + i of the step, position 2t + 8 + i value 4t + 2 + i (t < 4, i < 2).
 * Atoms of slots beyond the last hold nothing.
 */
#ifndef KVS_KERNELS_TILE_RECORD_H
#define KVS_KERNELS_TILE_RECORD_H

#define KVS_TILE_VALUES 64
#define KVS_TILE_SLOTS 8
#define KVS_TILE_ATOM_BYTES 1024
#define KVS_TILE_FEATURES 128 /* output values of a block: eight panels */

#endif
