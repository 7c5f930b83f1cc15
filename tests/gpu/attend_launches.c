/* attend_launches.c: what the launcher of attention asks for, noted instead of launched. */
#include "backends/cuda/launcher.h"
#include "kernels/attend_params.h"

#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST 4096u

/* One pass of one layer. */
typedef struct flat_pass {
    uint32_t n_kv_heads;
    uint32_t head_dim_k;
    uint32_t head_dim_v;
    int32_t type_k;
    int32_t type_v;
    uint32_t n_query_heads;
    uint32_t n_rows;
    uint32_t arch;
    uint32_t n_sm;
    uint32_t shared_bytes; /* of a block, at most */
    uint32_t flags; /* kvs_op_flags */
    uint64_t first_token;
    uint64_t scratch;
    uint64_t table_pages; /* of a recorded pass, or 0 */
} flat_pass;

typedef struct noted_launch {
    kvs_attend_params params;
    uint32_t grid[3];
    uint32_t block;
    uint32_t shared_bytes;
    uint32_t is_products;
    uint32_t is_fold;
    int32_t tiles; /* KVS_TILES, 0 without */
    int32_t is_staged;
    uint32_t is_prompt;
} noted_launch;

static noted_launch *noted;
static uint32_t n_noted;

kvs_status kvs_fail(kvs_device *device, kvs_status status, const char *format, ...)
{
    (void)device;
    (void)format;
    return status;
}

kvs_status kvs_cuda_launch(kvs_cuda_launcher *launcher, const kvs_cuda_key *key, kvs_cuda_dim grid, kvs_cuda_dim block,
                           uint32_t shared_bytes, const void *params, size_t params_bytes)
{
    (void)launcher;
    if (params_bytes != sizeof(kvs_attend_params) || n_noted == MOST) {
        return KVS_EINVAL;
    }
    noted_launch *at = &noted[n_noted++];
    *at = (noted_launch){.grid = {grid.x, grid.y, grid.z},
                         .block = block.x,
                         .shared_bytes = shared_bytes,
                         .is_products = strcmp(key->source, "attend_mma") == 0,
                         .is_fold = strcmp(key->kernel, "attend_fold") == 0,
                         .is_prompt = strcmp(key->source, "attend_tile") == 0};
    memcpy(&at->params, params, sizeof at->params);
    for (uint32_t i = 0; i < key->n_macros; i++) {
        at->is_staged = strcmp(key->macros[i].name, "KVS_STAGED") == 0 ? key->macros[i].value : at->is_staged;
        at->tiles = strcmp(key->macros[i].name, "KVS_TILES") == 0 ? key->macros[i].value : at->tiles;
    }
    return KVS_OK;
}

typedef struct bound_pass {
    kvs_cuda_launcher launcher;
    kvs_kv_layer layer;
    kvs_bound_op op;
} bound_pass;

static bound_pass *bind(const flat_pass *pass, bound_pass *bound)
{
    bound->launcher = (kvs_cuda_launcher){.arch = pass->arch,
                                          .n_sm = pass->n_sm,
                                          .shared_bytes = pass->shared_bytes,
                                          .places = {.words = pass->table_pages == 0 ? 0 : 1, .table_pages = pass->table_pages}};
    bound->layer = (kvs_kv_layer){.n_kv_heads = pass->n_kv_heads,
                                  .head_dim_k = pass->head_dim_k,
                                  .head_dim_v = pass->head_dim_v,
                                  .type_k = pass->type_k,
                                  .type_v = pass->type_v};
    bound->op = (kvs_bound_op){.code = KVS_OP_ATTEND,
                               .flags = pass->flags,
                               .in = {{.cols = pass->n_query_heads * pass->head_dim_k, .output_slot = KVS_NONE}},
                               .out = {{.cols = pass->n_query_heads * pass->head_dim_v, .output_slot = KVS_NONE}},
                               .u = {pass->n_query_heads},
                               .f = {0.125f},
                               .kv = &bound->layer,
                               .scratch = (void *)(uintptr_t)pass->scratch};
    return bound;
}

/* Bytes of scratch for passes of up to n_rows rows; 0 when refused. */
EXPORT uint64_t scratch_bytes(const flat_pass *pass)
{
    bound_pass bound;
    uint64_t bytes = 0;
    (void)bind(pass, &bound);
    return kvs_cuda_scratch_attend(&bound.launcher, &bound.op, pass->n_rows, &bytes) == KVS_OK ? bytes : 0;
}

/* Launches of all waves into notes [MOST]; their number, or -1. shape: ends [n_waves] pages, rising. */
EXPORT int32_t note_launches(const flat_pass *pass, const uint64_t *ends, uint32_t n_waves, noted_launch *notes)
{
    bound_pass bound;
    const uint64_t *tables[1] = {NULL};
    const struct kvs_step step = {.n_rows = pass->n_rows, .first_token = pass->first_token, .page_tables = tables};
    (void)bind(pass, &bound);
    noted = notes;
    n_noted = 0;
    kvs_status status = kvs_cuda_launch_attend_begin(&bound.launcher, &bound.op, &step);
    for (uint32_t i = 0; i < n_waves && status == KVS_OK; i++) {
        status = kvs_cuda_launch_attend_wave(&bound.launcher, &bound.op, &step, i == 0 ? 0 : ends[i - 1], ends[i]);
    }
    if (status == KVS_OK) {
        status = kvs_cuda_launch_attend_finish(&bound.launcher, &bound.op, &step);
    }
    return status == KVS_OK ? (int32_t)n_noted : -1;
}
