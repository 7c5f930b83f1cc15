/* kv.h: what a page is, and which pages a sequence has.
 *
 * A page holds KVS_PAGE_TOKENS token positions of one layer as one contiguous record. Per KV head, in this order, each
 * plane 16-byte aligned and holding its rows one after another:
 *     K codes | K high bits | K scales | V codes | V high bits | V scales
 * Codes and scales of a row equal those of the file format's blocks, in the same order, only apart. Planes that a type
 * does not have are empty. Types: F32 F16 BF16 (codes only), Q8_0 (codes, scales), Q4_0 IQ4_NL (nibbles, scales),
 * Q4_1 (nibbles, scale and minimum), Q5_0 Q5_1 (nibbles, u32 of high bits per 32 values, scales).
 *
 * The history of a sequence is a list of pages in host memory; pages are shared between forks and copied on write.
 */
#ifndef KVSTREAM_KV_H
#define KVSTREAM_KV_H

#include "kvstream/device.h"

KVS_API_BEGIN

/* cffi:begin */

#define KVS_PAGE_TOKENS 256
#define KVS_RECORD_VERSION 1

typedef enum kvs_kv_flag {
    KVS_KV_ROTATE_K = 1, /* Hadamard rotation of q and k over the largest power of two that divides the head size */
    KVS_KV_ROTATE_V = 2  /* of v and the attention output, over each 64 values */
} kvs_kv_flag;

/* Geometry of one layer's cache. */
typedef struct kvs_kv_layer {
    uint32_t n_kv_heads;
    uint32_t head_dim_k;
    uint32_t head_dim_v;
    uint32_t flags; /* kvs_kv_flag */
    int32_t type_k; /* kvs_type */
    int32_t type_v;
} kvs_kv_layer;

typedef enum kvs_plane {
    KVS_PLANE_K_CODES = 0,
    KVS_PLANE_K_HIGH = 1,
    KVS_PLANE_K_SCALES = 2,
    KVS_PLANE_V_CODES = 3,
    KVS_PLANE_V_HIGH = 4,
    KVS_PLANE_V_SCALES = 5
} kvs_plane;

#define KVS_N_PLANES 6

typedef struct kvs_record_info {
    uint32_t struct_size;
    uint32_t version;                       /* KVS_RECORD_VERSION */
    uint64_t record_bytes;                  /* n_kv_heads * head_bytes, a multiple of 64 */
    uint64_t head_bytes;
    uint64_t plane_offset_bytes[6];         /* from the head's first byte */
    uint32_t plane_row_bytes[6];            /* per token row; 0 where the plane is absent */
    uint32_t rotation_k;                    /* values per rotation block, 0 none */
    uint32_t rotation_v;
} kvs_record_info;

/* Compute the record of a layer. Metadata only. thread: any.
 * errors: EINVAL zero heads or head size; EUNSUPPORTED a type that cannot hold this head size, or is no cache type, or
 * rotation of a head size that is not a multiple of 64, each by name; EOVERFLOW */
kvs_status kvs_record_layout(const kvs_kv_layer *layer, kvs_record_info *info);

/* Encode float rows of all heads into a record, with the vector code of the device (or its reference).
 * shape: k [n_rows][n_kv_heads * head_dim_k], v [n_rows][n_kv_heads * head_dim_v]; rows first_row.. of the record.
 * Values are encoded as given: rotation is a separate operation. thread: any. errors: EINVAL; ENOSPACE rows outside;
 * EUNSUPPORTED a device without bytes */
kvs_status kvs_record_encode_rows(kvs_device *device, const kvs_kv_layer *layer, void *record, uint32_t first_row,
                                  uint32_t n_rows, const float *k, const float *v);

/* The inverse; float values of the stored codes. thread, errors: as kvs_record_encode_rows */
kvs_status kvs_record_decode_rows(kvs_device *device, const kvs_kv_layer *layer, const void *record,
                                  uint32_t first_row, uint32_t n_rows, float *k, float *v);

/* Rows of one head and side as the blocks that files hold, and back. shape: blocks [n_rows][head_dim / block_values]
 * blocks. side: 0 K, 1 V. thread: any. errors: EINVAL; ENOSPACE */
kvs_status kvs_record_unpack_rows(const kvs_kv_layer *layer, const void *record, uint32_t head, uint32_t side,
                                  uint32_t first_row, uint32_t n_rows, void *blocks);
kvs_status kvs_record_pack_rows(const kvs_kv_layer *layer, void *record, uint32_t head, uint32_t side,
                                uint32_t first_row, uint32_t n_rows, const void *blocks);

typedef struct kvs_cache kvs_cache;
typedef struct kvs_seq kvs_seq;

typedef struct kvs_cache_info {
    uint32_t struct_size;
    uint32_t n_layers;
    uint64_t max_record_bytes; /* largest record of any layer: the slot size of pool and ring */
    uint64_t column_bytes;     /* one page of every layer */
    uint64_t n_pages;          /* live page columns of all sequences, shared ones once */
    uint32_t n_sequences;
    uint32_t reserved;
} kvs_cache_info;

typedef struct kvs_seq_info {
    uint32_t struct_size;
    uint32_t reserved;
    uint64_t ctx_tokens;
    uint64_t committed_tokens;
    uint64_t appended_tokens;   /* committed and uncommitted rows */
    uint64_t generation;        /* rises with every append, commit, truncate, and written page */
    uint64_t n_pages;           /* that cover the appended tokens */
    uint64_t n_shared_pages;    /* of these, held by another sequence too */
    uint64_t reserved_host_bytes; /* address space of this sequence's own extent */
    uint64_t seq_id;            /* above 0, unique on the device, never used again */
    uint64_t n_rewrites;        /* truncations that dropped committed rows, and pages written */
} kvs_seq_info;

/* One page column: the same page of every layer. */
typedef struct kvs_page_info {
    uint32_t struct_size;
    uint32_t n_holders;       /* sequences that hold it */
    uint64_t page_id;         /* unique in the cache, never used again */
    uint64_t published_rows;  /* rows whose bytes the host history holds */
    uint64_t host_offset_bytes; /* of the queried layer's record, in its extent */
    uint64_t extent_id;       /* runs of pages are contiguous only within one extent */
} kvs_page_info;

/* A cache for layers of the given geometry. own: caller. shape: layers [n_layers], copied. thread: any.
 * errors: EINVAL; those of kvs_record_layout with the layer's number; ENOMEM */
kvs_status kvs_cache_create(kvs_device *device, const kvs_kv_layer *layers, uint32_t n_layers, kvs_cache **cache);

/* Sequences keep the cache alive. NULL is ignored. thread: any */
void kvs_cache_release(kvs_cache *cache);

/* thread: owner of the cache. errors: EINVAL */
kvs_status kvs_cache_get_info(kvs_cache *cache, kvs_cache_info *info);

/* An empty sequence with address space for ctx_tokens. own: caller. thread: owner of the cache.
 * errors: EINVAL ctx_tokens 0; ENOMEM; EOVERFLOW */
kvs_status kvs_seq_create(kvs_cache *cache, uint64_t ctx_tokens, kvs_seq **seq);

/* NULL is ignored. thread: owner of the cache */
void kvs_seq_release(kvs_seq *seq);

/* A new sequence with the same committed tokens; pages are shared. own: caller. thread: owner of the cache.
 * errors: EBUSY uncommitted rows exist, or a replaced page still waits for its rows; ENOMEM */
kvs_status kvs_seq_fork(kvs_seq *seq, kvs_seq **child);

/* Open n_tokens uncommitted rows at the end; makes pages. A shared, partly filled last page is replaced by a private one;
 * the old one stays alive until the pager has brought its rows over, or a written page replaces them.
 * thread: owner of the cache. errors: EINVAL 0 rows; EBUSY uncommitted rows exist; ECONTEXT does not fit, with both numbers; ENOMEM */
kvs_status kvs_seq_append(kvs_seq *seq, uint64_t n_tokens);

/* Commit the first n_tokens of the uncommitted rows and drop the others. 0 drops all.
 * thread: owner of the cache. errors: EINVAL more than are open */
kvs_status kvs_seq_commit(kvs_seq *seq, uint64_t n_tokens);

/* Keep the first n_tokens committed tokens, drop everything after. thread: owner of the cache. errors: EINVAL more than
 * are committed */
kvs_status kvs_seq_truncate(kvs_seq *seq, uint64_t n_tokens);

/* thread: owner of the cache. errors: EINVAL */
kvs_status kvs_seq_get_info(kvs_seq *seq, kvs_seq_info *info);

/* thread: owner of the cache. errors: EINVAL layer; ENOTFOUND page */
kvs_status kvs_seq_get_page(kvs_seq *seq, uint32_t layer, uint64_t page, kvs_page_info *info);

/* Copy published rows of one layer's page out of the host history, decoded or not, through the copy engine: the bytes of
 * the whole record. shape: record [record_bytes]. thread: owner of the cache.
 * errors: ENOTFOUND no such page, or none of its rows is published; EINVAL layer; EIO */
kvs_status kvs_seq_read_page_wait(kvs_seq *seq, uint32_t layer, uint64_t page, void *record);

/* Write a whole record into the history and mark `rows` of its page column as published once every layer has been written.
 * For loading a saved sequence: the pages must be appended and committed. Another number of rows begins the column anew.
 * thread: owner of the cache. errors: ENOTFOUND; EINVAL layer, or rows not committed; EBUSY shared page; EIO */
kvs_status kvs_seq_write_page_wait(kvs_seq *seq, uint32_t layer, uint64_t page, const void *record, uint64_t rows);

/* thread: owner of the cache. errors: ECORRUPT */
kvs_status kvs_cache_check_integrity(kvs_cache *cache);

/* cffi:end */

KVS_API_END
#endif
