/* panel.h: weight matrices repacked for the CPU: panels of 16 output rows, one row to a vector lane.
 *
 * A panel holds 16 consecutive output rows over the whole reduction axis, so that a sum over that axis is one
 * accumulator to a lane, in one order, without horizontal sums. The last panel is padded with rows of zeros. Panels
 * lie one after another, each a multiple of 64 bytes.
 *
 * A quantized panel is cut along k into groups of 32 values. A group has eight quads: quad q holds k = 4q..4q+3 of
 * lanes 0..15, byte 4*lane + k%4, which is one operand of a four-way byte dot product. Codes are unsigned; what a type
 * subtracts from them (`offset`) is put right with the sums of the activation codes. Planes, in this order, each for
 * all groups before the next plane starts:
 *
 *   8 bits  512 B a group: quads 0..7
 *   4 bits  256 B a group: vector h (0..3) has quad h in the low nibbles, quad h+4 in the high ones
 *   2 bits  128 B a group: vector t (0..1) has quad 4t+i in bits 2i
 *   1 bit    64 B a group: quad q in bit q
 *   shared    8 B a group: a nibble a lane, bit i for the codes 8i..8i+7; an even group has the low nibbles of 16 B, the
 *            next group the high ones
 *   scales  one float16 a lane per group (32), or per super-block (256) beside one 8-bit integer a lane per group or
 *           half group; then the same for minima
 *
 *              8 4 2 1   offset  scales                      minima
 *   Q4_0         4       8       f16/32
 *   Q4_1         4       0       f16/32                      +f16/32
 *   Q5_0         4   1   16      f16/32
 *   Q5_1         4   1   0       f16/32                      +f16/32
 *   Q8_0       8         128     f16/32
 *   Q2_K           2     0       f16/256 x low nibble/16     -f16/256 x high nibble/16
 *   Q3_K           2 1   4       f16/256 x s8/16
 *   Q4_K         4       0       f16/256 x u8/32             -f16/256 x u8/32
 *   Q5_K         4   1   0       f16/256 x u8/32             -f16/256 x u8/32
 *   Q6_K         4 2     32      f16/256 x s8/16
 *   IQ4_NL       4       table   f16/32
 *   IQ4_XS       4       table   f16/256 x s8/32
 *   IQ1_S          2 s   table   f16/256 x odd(nibble/32) / 8
 *   IQ1_M          2 s   table   f16/256 x odd(nibble/16) / 8
 *   IQ2_XXS        2 1   table   f16/256 x odd(nibble/32) / 8
 *   IQ2_XS, _S     2 1   table   f16/256 x odd(nibble/16) / 8
 *   IQ3_XXS      4       table   f16/256 x odd(nibble/32) / 4
 *   IQ3_S        4       table   f16/256 x odd(nibble/32)
 *   MXFP4        4       table   2^(u8/32 - 128)
 *   NVFP4        4       table   ue4m3/16 / 2
 *
 * odd(n) is 2n + 1. IQ1, IQ2 and IQ3 files name entries of codebooks, 8 or 4 values at once; panels hold each value as
 * its place in the short list of levels that the codebook draws from, with its sign. That makes them larger than the
 * file, by up to a half, and spares a look-up in memory for every 4 values, which would bind a pass before the bytes do.
 *
 * F32, F16 and BF16 panels are [k][16 lanes] of the type itself.
 */
#ifndef KVS_NATIVE_CPU_PANEL_H
#define KVS_NATIVE_CPU_PANEL_H

#include "base/blocks.h"
#include "kvstream/base.h"

#include <stdbool.h>

#define KVS_PANEL_ROWS 16u

/* Panels that n output rows need. */
uint64_t kvs_panel_count(uint64_t n);

/* Bytes of one panel and of all panels of a [n][k] matrix; either pointer may be NULL.
 * errors: EUNSUPPORTED type; EINVAL k or n is zero, or k is no multiple of the type's block; EOVERFLOW */
kvs_status kvs_panel_bytes(int type, uint64_t k, uint64_t n, uint64_t *panel_bytes, uint64_t *bytes);

/* Repack output rows 16*first_panel .. of a matrix in file layout. `rows` and `panels` are the starts of the whole
 * matrix and of the whole storage (64-byte aligned); ranges of panels may be packed by different threads at once.
 * errors: as kvs_panel_bytes, and EINVAL for panels beyond the last */
kvs_status kvs_panel_pack(int type, uint64_t k, uint64_t n, const void *rows, void *panels, uint64_t first_panel,
                          uint64_t n_panels);

#endif
