/* pager_scene.h: a pager over two layers whose rows say which token they are of, for the tests of pagers. */
#ifndef KVS_TESTS_PAGER_SCENE_H
#define KVS_TESTS_PAGER_SCENE_H

#include "rig.h"

#include "core/pager.h"
#include "kvstream/pager.h"

enum { P = KVS_PAGE_TOKENS, N_LAYERS = 2, N_SLOTS = 10, CTX = 6 * P };

static const kvs_kv_layer layers[] = {
    {.n_kv_heads = 1, .head_dim_k = 16, .head_dim_v = 16, .type_k = KVS_TYPE_F32, .type_v = KVS_TYPE_F32},
    {.n_kv_heads = 1, .head_dim_k = 16, .head_dim_v = 16, .type_k = KVS_TYPE_F16, .type_v = KVS_TYPE_F16},
};

typedef struct bench {
    kvs_device *device;
    kvs_cache *cache;
    kvs_seq *seq;
    kvs_pager *pager;
    kvs_lease *lease;
    uint64_t slot_bytes;
    kvs_record_info records[N_LAYERS];
} bench;

static const uint32_t shares[] = {2, 3};

static inline kvs_placement placement_of(const uint32_t *pages, uint32_t ring_slots, uint32_t max_rows)
{
    return (kvs_placement){.struct_size = sizeof(kvs_placement),
                           .n_layers = N_LAYERS,
                           .resident_pages = pages,
                           .ring_slots = ring_slots,
                           .max_rows = max_rows};
}

static inline void open_bench(bench *b, uint32_t flags)
{
    *b = (bench){.device = rig_device(flags | KVS_DEVICE_POISON_RELEASED | KVS_DEVICE_STRICT_HISTORY, 7)};
    CHECK_OK(kvs_cache_create(b->device, layers, N_LAYERS, &b->cache));
    kvs_cache_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_cache_get_info(b->cache, &info));
    b->slot_bytes = info.max_record_bytes;
    for (uint32_t i = 0; i < N_LAYERS; i++) {
        b->records[i].struct_size = sizeof b->records[i];
        CHECK_OK(kvs_record_layout(&layers[i], &b->records[i]));
    }
    b->lease = rig_lease(b->device, N_SLOTS * b->slot_bytes);
    CHECK_OK(kvs_seq_create(b->cache, CTX, &b->seq));
    CHECK_OK(kvs_pager_create(b->cache, &b->pager));
    const kvs_placement placement = placement_of(shares, 2, P);
    CHECK_OK(kvs_pager_attach(b->pager, b->lease, &placement));
}

static inline void close_bench(bench *b)
{
    kvs_seq_release(b->seq);
    kvs_pager_release(b->pager);
    kvs_lease_release(b->lease);
    kvs_cache_release(b->cache);
    rig_close(b->device);
}

static inline kvs_pager_info info_of(const bench *b)
{
    kvs_pager_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_pager_get_info(b->pager, &info));
    CHECK_OK(kvs_pager_check_integrity(b->pager));
    CHECK_OK(kvs_cache_check_integrity(b->cache));
    return info;
}

static inline uint64_t tokens_of(kvs_seq *seq)
{
    kvs_seq_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_seq_get_info(seq, &info));
    return info.committed_tokens;
}

/* Every byte of a row says which token and layer it is of. */
static inline uint8_t mark(uint64_t token, uint32_t layer)
{
    return (uint8_t)(token * 7 + layer * 3 + token / P + 1);
}

/* Each plane of the one head has its rows one behind another. */
static inline void touch_row(const bench *b, uint64_t record, uint32_t layer, uint64_t token, bool writes)
{
    const kvs_record_info *info = &b->records[layer];
    for (uint32_t plane = 0; plane < KVS_N_PLANES; plane++) {
        const uint64_t n_bytes = info->plane_row_bytes[plane];
        uint8_t *row = rig_bytes(record + info->plane_offset_bytes[plane] + token % P * n_bytes);
        if (writes) {
            memset(row, mark(token, layer), (size_t)n_bytes);
        } else {
            CHECK(rig_all_equal(row, n_bytes, mark(token, layer)));
        }
    }
}

/* What operations do: write the new rows, then read every token of every layer, wave by wave. */
static inline kvs_status play(const bench *b)
{
    kvs_pass_view view;
    CHECK_OK(kvs_pager_view_pass(b->pager, &view));
    const uint64_t end = view.first_token + view.n_rows;
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        for (uint64_t token = view.first_token; token < end; token++) {
            touch_row(b, view.page_tables[layer][token / P], layer, token, true);
        }
        for (uint64_t page = 0; page < view.active_pages;) {
            uint64_t page_end = page;
            kvs_status status = kvs_pager_acquire_wave(b->pager, layer, page, &page_end);
            if (status != KVS_OK) {
                return status;
            }
            for (uint64_t token = page * P; token < page_end * P && token < end; token++) {
                touch_row(b, view.page_tables[layer][token / P], layer, token, false);
            }
            /* A later copy may have failed meanwhile. */
            status = kvs_pager_release_wave(b->pager, layer, page, page_end);
            if (status != KVS_OK) {
                return status;
            }
            page = page_end;
        }
    }
    return KVS_OK;
}

static inline void take_pass(const bench *b, kvs_seq *seq, uint32_t n_rows, uint32_t n_kept)
{
    const uint64_t before = tokens_of(seq);
    kvs_pass_forecast forecast = {.struct_size = sizeof forecast};
    const kvs_pager_info start = info_of(b);
    CHECK_OK(kvs_pager_forecast(b->pager, seq, n_rows, &forecast));
    CHECK_OK(kvs_pager_begin(b->pager, seq, n_rows));
    CHECK_OK(play(b));
    CHECK_U64(info_of(b).streamed_pages - start.streamed_pages, forecast.streamed_pages);
    CHECK_OK(kvs_pager_end(b->pager, n_kept));
    CHECK_U64(tokens_of(seq), before + n_kept);
    (void)info_of(b);
}

static inline void check_history(const bench *b, kvs_seq *seq)
{
    static uint8_t record[P * 256];
    CHECK_OK(kvs_pager_publish_wait(b->pager));
    const uint64_t end = tokens_of(seq);
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        for (uint64_t page = 0; page * P < end; page++) {
            CHECK_OK(kvs_seq_read_page_wait(seq, layer, page, record));
            for (uint64_t token = page * P; token < (page + 1) * P && token < end; token++) {
                touch_row(b, (uint64_t)(uintptr_t)record, layer, token, false);
            }
        }
    }
}

typedef struct fault {
    uint64_t first, count, seen;
} fault;

static inline int fail_copies(void *user, int point, uint64_t index)
{
    (void)index;
    fault *f = user;
    if (point != KVS_HOOK_COPY) {
        return 0;
    }
    const uint64_t here = f->seen++;
    return here >= f->first && here - f->first < f->count ? KVS_EIO : 0;
}

#endif
