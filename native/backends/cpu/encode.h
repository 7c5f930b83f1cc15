/* encode.h: float rows to page-record planes and back.
 *
 * Values follow the file formats: the scale is stored as float16, quants are taken from the unrounded float32 scale,
 * Q8_0 rounds halves away from zero. Decoded values are exact products of a float16 scale and a small integer (plus one
 * rounding for the minimum of Q4_1 and Q5_1), so that every twin decodes to the same bits.
 *
 * Hostile rows have one result too: a NaN never wins a maximum or minimum, and a quotient that is no integer in range
 * (NaN, infinite) is stored as the type's lowest quant. kvs_encode_rows then gives the block a scale that is NaN: a
 * broken value is never read back as a number.
 */
#ifndef KVS_NATIVE_CPU_ENCODE_H
#define KVS_NATIVE_CPU_ENCODE_H

#include "kvstream/kv.h"

/* Encode rows first_row.. of all heads of a record. k rows are k_stride floats apart, each holding
 * n_kv_heads * head_dim_k values; v likewise. NULL leaves that side alone. `info` comes from kvs_record_layout.
 * Disjoint row ranges may be encoded by different threads at once. */
void kvs_encode_rows(uint32_t isa, const kvs_kv_layer *layer, const kvs_record_info *info,
                     void *record, uint32_t first_row, uint32_t n_rows, const float *k,
                     uint64_t k_stride, const float *v, uint64_t v_stride);

/* The inverse: float values of the stored codes. */
void kvs_decode_rows(uint32_t isa, const kvs_kv_layer *layer, const kvs_record_info *info,
                     const void *record, uint32_t first_row, uint32_t n_rows, float *k,
                     uint64_t k_stride, float *v, uint64_t v_stride);

/* One row of one head and side. Planes that the type lacks are ignored. n_values: as kvs_record_layout accepts. */
typedef void (*kvs_encode_fn)(const float *values, uint32_t n_values, uint8_t *codes, uint8_t *high,
                              uint8_t *scales);
typedef void (*kvs_decode_fn)(const uint8_t *codes, const uint8_t *high, const uint8_t *scales,
                              uint32_t n_values, float *values);

/* NULL for a type that is no cache type. */
kvs_encode_fn kvs_encode_select(uint32_t isa, int32_t type);
kvs_decode_fn kvs_decode_select(uint32_t isa, int32_t type);

/* The twins that kvs_encode_select and kvs_decode_select choose from; NULL where the twin has none. */
kvs_encode_fn kvs_encode_select_reference(int32_t type);
kvs_decode_fn kvs_decode_select_reference(int32_t type);
kvs_encode_fn kvs_encode_select_avx2(int32_t type);
kvs_decode_fn kvs_decode_select_avx2(int32_t type);

#endif
