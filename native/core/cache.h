/* cache.h: page columns, extents and sequences from within.
 *
 *     kvs_seq --pages[]--> kvs_page (column: one page of every layer) --slot--> kvs_extent --> kvs_host
 *
 * A column counts the sequences that hold it and, apart, those that only wait to have its rows brought over. An extent is
 * one reservation of [layer][slot] records for the pages of a sequence from `first_page` to the end of its context; it goes
 * with its last column and the sequence that fills it. Page p lies in slot p - first_page, so that the pages of a layer lie
 * one behind another; where that slot still belongs to a fork, the sequence goes on in a new extent.
 */
#ifndef KVS_NATIVE_CORE_CACHE_H
#define KVS_NATIVE_CORE_CACHE_H

#include "base/internal.h"
#include "kvstream/kv.h"

/* ---- for the stream ---- */

/* Where a page column lies. Borrowed: valid until the sequence changes. */
typedef struct kvs_page_view {
    uint64_t page_id;
    uint64_t extent_id;
    uint64_t slot;           /* columns in adjacent slots of one extent are adjacent in every layer */
    uint64_t published_rows; /* as this sequence sees them */
    kvs_host *host;
    uint64_t host_slots;     /* slots of the extent */
    uint32_t n_holders;
} kvs_page_view;

kvs_device *kvs_cache_device(const kvs_cache *cache);

/* Above 0, unique on the device. */
uint64_t kvs_cache_identity(const kvs_cache *cache);
const kvs_kv_layer *kvs_cache_layer(const kvs_cache *cache, uint32_t layer);
const kvs_record_info *kvs_cache_record(const kvs_cache *cache, uint32_t layer);

kvs_cache *kvs_seq_cache(const kvs_seq *seq);
uint64_t kvs_seq_committed(const kvs_seq *seq);
uint64_t kvs_seq_generation(const kvs_seq *seq);
uint64_t kvs_seq_identity(const kvs_seq *seq);
uint64_t kvs_seq_rewrites(const kvs_seq *seq);
kvs_device *kvs_seq_device(const kvs_seq *seq);
uint64_t kvs_seq_pages(const kvs_seq *seq);

/* One more claim, which kvs_seq_release drops. */
void kvs_seq_retain(kvs_seq *seq);

/* errors: ENOTFOUND */
kvs_status kvs_seq_view_page(const kvs_seq *seq, uint64_t page, kvs_page_view *view);

/* Offset of one layer's record of the column in view->host. */
uint64_t kvs_page_host_offset(const kvs_cache *cache, const kvs_page_view *view, uint32_t layer);

/* Is a replaced page waiting for its rows? Then: which page of the sequence, the column that has its first `rows` rows.
 * The old column stays as it is until kvs_seq_copy_done. Outputs may be NULL. */
bool kvs_seq_copy_source(const kvs_seq *seq, uint64_t *page, kvs_page_view *source, uint64_t *rows);

/* The rows are where they belong: the old column is let go. */
void kvs_seq_copy_done(kvs_seq *seq);

/* Host history now holds the first `rows` rows of the page in every layer.
 * errors: ENOTFOUND; EINVAL more rows than appended; EBUSY fewer than before on a shared page */
kvs_status kvs_page_set_published(kvs_seq *seq, uint64_t page, uint64_t rows);

/* ---- between cache.c and seq.c ---- */

typedef struct kvs_extent {
    struct kvs_extent *next;
    struct kvs_extent *previous;
    kvs_host *host;
    uint64_t id;
    uint64_t first_page;
    uint64_t n_slots;
    uint64_t n_columns; /* occupied slots */
    bool is_owned;      /* a sequence still fills it */
    struct kvs_page *slots[];
} kvs_extent;

typedef struct kvs_page {
    struct kvs_page *next;
    struct kvs_page *previous;
    kvs_extent *extent;
    uint64_t slot;
    uint64_t id;
    uint64_t published_rows;
    uint64_t loading_rows;  /* while a saved column is written layer by layer */
    uint32_t n_holders;     /* sequences whose page it is */
    uint32_t n_waiting;     /* sequences that wait for its rows */
    uint32_t n_loaded;      /* layers written so far */
    uint32_t n_seen;        /* scratch of the integrity check */
    uint8_t is_loaded[];    /* by layer */
} kvs_page;

struct kvs_cache {
    kvs_device *device;
    uint64_t identity;
    _Atomic uint64_t n_claims;
    kvs_seq *sequences;
    kvs_page *columns;
    kvs_extent *extents;
    uint64_t n_columns;
    uint64_t next_page_id;
    uint64_t next_extent_id;
    uint64_t max_record_bytes;
    uint64_t column_bytes;
    uint32_t n_sequences;
    uint32_t n_layers;
    kvs_kv_layer *layers;
    kvs_record_info *records;
    uint64_t *layer_offsets; /* bytes of all earlier layers in one column */
};

struct kvs_seq {
    kvs_seq *next;
    kvs_seq *previous;
    kvs_cache *cache;
    uint64_t claims;    /* the caller's and a pager's */
    kvs_extent *extent; /* where new columns go; NULL until one is needed */
    kvs_page **pages;
    uint64_t n_pages;
    uint64_t ctx_tokens;
    uint64_t committed;
    uint64_t appended;
    uint64_t generation;
    uint64_t identity;
    uint64_t n_rewrites;
    kvs_page *source;   /* column whose rows page `source_page` waits for, or NULL */
    uint64_t source_page;
    uint64_t source_rows;
};

void kvs_cache_retain(kvs_cache *cache);

/* Rows of a page that lie below `tokens`. */
static inline uint64_t kvs_rows_below(uint64_t page, uint64_t tokens)
{
    const uint64_t begin = page * KVS_PAGE_TOKENS;
    const uint64_t rows = tokens <= begin ? 0 : tokens - begin;
    return rows < KVS_PAGE_TOKENS ? rows : KVS_PAGE_TOKENS;
}

/* Another sequence holds the column, or waits for its rows. */
static inline bool kvs_page_is_shared(const kvs_page *page)
{
    return page->n_holders + page->n_waiting > 1;
}

/* A reservation of n_slots columns, owned by the caller's sequence. errors: EOVERFLOW; ENOMEM; the hook's */
kvs_status kvs_extent_create(kvs_cache *cache, uint64_t first_page, uint64_t n_slots, kvs_extent **extent);

/* The sequence will put no more columns into it. */
void kvs_extent_disown(kvs_cache *cache, kvs_extent *extent);

/* A column with one holder in a free slot; NULL without memory. */
kvs_page *kvs_page_create(kvs_cache *cache, kvs_extent *extent, uint64_t slot);

/* A holder or a waiter less is to be noted by the caller; then this frees the column that nobody needs. */
void kvs_page_collect(kvs_cache *cache, kvs_page *page);

#endif
