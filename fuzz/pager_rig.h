/* pager_rig.h: a tape that writes and attends to table rows of its tokens, and the pager and pool under it. */
#ifndef KVS_FUZZ_PAGER_RIG_H
#define KVS_FUZZ_PAGER_RIG_H

#include "script.h"

#include "kvstream/tape.h"

enum { N_LAYERS = 2, N_VOCAB = 64, MAX_ROWS = 600, N_SLOTS = 24, MAX_CTX = 1500, MAX_COLS = 32, N_WEIGHTS = 6 };

/* Which table of a layer. */
enum { TABLE_K, TABLE_V, TABLE_Q };

typedef struct rig {
    kvs_device *device;
    uint32_t n_layers; /* the first of them */
    kvs_cache *cache;
    kvs_arena *arena;
    kvs_lease *pool;
    kvs_lease *workspace;
    kvs_pager *pager;
    kvs_tape *tape;
    kvs_binding *binding;
    kvs_weight *weights[N_WEIGHTS];
    float tables[N_WEIGHTS][N_VOCAB * MAX_COLS]; /* [3 * layer + table][token][cols] */
    float outputs[N_LAYERS][MAX_ROWS * MAX_COLS];
    uint8_t record[1 << 16];
} rig;

const kvs_kv_layer *rig_layer(uint32_t layer);
uint32_t rig_cols(uint32_t layer);

void rig_open(rig *rig, bool is_deferred, uint64_t seed);

/* The same over a device that is there, with fewer layers or slots. */
void rig_open_beside(rig *rig, kvs_device *device, uint32_t n_layers, uint32_t n_slots);

/* Everything goes, in an order drawn from `order`; `seqs` with it. */
void rig_close(rig *rig, kvs_seq **seqs, uint32_t n_seqs, uint32_t order);

/* The same, and the device stays. */
void rig_release(rig *rig, kvs_seq **seqs, uint32_t n_seqs, uint32_t order);

/* Attention of rows at `first` and behind, as the newest run left it, is that of the tokens before. */
void rig_check_outputs(const rig *rig, const uint32_t *tokens, uint64_t first, uint32_t n_rows);

/* The first `n_rows` rows of a page of history are those of its tokens. */
void rig_check_page(rig *rig, kvs_seq *seq, uint32_t layer, uint64_t page, const uint32_t *tokens, uint32_t n_rows);

#endif
