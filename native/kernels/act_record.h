/* act_record.h: activations as kernels of quantized weights read them. Plain C without includes.
 *
 * Slots (rows) go in tiles of 8. A tile has one record for each group of 32 values, group after group:
 *     0  codes   for each lane 4s + t of a warp 8 bytes: slot s, values 4t .. 4t+3 and 16 + 4t .. 16 + 4t + 3
 *   256  whole   [slot pair][4]: the float32 scales of both slots, then the sums of their codes as int32
 *   320  halves  [slot pair][4]: int32 sums of codes 0..15 of both slots, then of codes 16..31
 * Records of slots that are not used hold nothing.
 */
#ifndef KVS_KERNELS_ACT_RECORD_H
#define KVS_KERNELS_ACT_RECORD_H

#define KVS_ACT_TILE 8
#define KVS_ACT_RECORD_BYTES 384
#define KVS_ACT_WHOLE_AT 256
#define KVS_ACT_HALVES_AT 320

#endif
