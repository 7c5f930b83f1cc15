/* launch_attend.c: the kernels that write and read page records.
 *
 * Scratch of attention: parts of the group that has begun | parts of the result | slots, each [query]. A run of pages is cut into
 * launches of as many slots as there is room for. A slot is a page where few blocks would be under way otherwise, else a group;
 * either gives the same bits.
 */
#include "backends/cuda/launcher.h"
#include "kernels/attend_params.h"

#define PART_HEAD 4u
/* Architecture from which on matrix products of halves are used, and the queries that share a page there: as many as one product takes,
 * or, where a block's shared memory has room, six rows of up to six query heads to a KV head. */
#define PRODUCTS_ARCH 80u
#define FEW_QUERIES 8u
#define MANY_QUERIES 40u
#define FEWER_QUERIES 32u
#define STATIC_BYTES 160u /* of shared memory for each query, at most, beside what a launch asks for */
#define MAX_HEAD_VALUES 256u
#define HEAD_GRAIN 32u
#define SLOTS_MOST 128u
#define SLOT_BYTES (UINT64_C(8) << 20)
#define PROMPT_SLOT_BYTES (UINT64_C(50) << 20)
/* Where four warps multiply together: queries of a prompt that share a page, and what head sizes are multiples of. */
#define GROUPS_ARCH 90u
#define PROMPT_QUERIES 128u
#define PROMPT_GRAIN 64u
#define THREADS 256u

static uint64_t address_of(const kvs_operand *operand, const struct kvs_step *step)
{
    return (uint64_t)(uintptr_t)kvs_operand_data(operand, step);
}

static kvs_status check_head(kvs_cuda_launcher *launcher, const kvs_kv_layer *layer)
{
    const uint32_t k = layer->head_dim_k, v = layer->head_dim_v;
    if (k % HEAD_GRAIN != 0 || k > MAX_HEAD_VALUES || v % HEAD_GRAIN != 0 || v > MAX_HEAD_VALUES) {
        return kvs_fail(launcher->device, KVS_EUNSUPPORTED,
                        "head sizes %u and %u: attention on CUDA needs multiples of %u up to %u", k, v, HEAD_GRAIN,
                        MAX_HEAD_VALUES);
    }
    return KVS_OK;
}

static kvs_cuda_key record_key(const char *source, const char *kernel, const kvs_kv_layer *layer)
{
    return (kvs_cuda_key){.source = source,
                          .kernel = kernel,
                          .waits = true,
                          .n_macros = 4,
                          .macros = {{"KVS_TYPE_K", layer->type_k},
                                     {"KVS_TYPE_V", layer->type_v},
                                     {"KVS_DIM_K", (int32_t)layer->head_dim_k},
                                     {"KVS_DIM_V", (int32_t)layer->head_dim_v}}};
}

/* Bytes of one slot for a pass of n_rows rows: a part for each query. */
static uint64_t slot_bytes(const kvs_bound_op *op, uint32_t n_rows)
{
    return (uint64_t)n_rows * op->u[0] * (PART_HEAD + op->kv->head_dim_v) * sizeof(float);
}

/* Bytes that slots may take, where more than one fits. */
static uint64_t slot_room(const kvs_bound_op *op)
{
    return (op->flags & KVS_OP_PROMPT) != 0 ? PROMPT_SLOT_BYTES : SLOT_BYTES;
}

/* At least one. What they take never falls as rows are added, so that the scratch of a larger pass serves a smaller one. */
static uint64_t slots_of(const kvs_bound_op *op, uint32_t n_rows)
{
    const uint64_t fit = slot_room(op) / slot_bytes(op, n_rows);
    return fit == 0 ? 1 : fit < SLOTS_MOST ? fit : SLOTS_MOST;
}

kvs_status kvs_cuda_scratch_attend(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes)
{
    const kvs_status status = check_head(launcher, op->kv);
    if (status != KVS_OK) {
        return status;
    }
    const uint64_t slot = slot_bytes(op, max_rows == 0 ? 1 : max_rows), most = SLOTS_MOST * slot;
    const uint64_t room = slot > slot_room(op) ? slot : slot_room(op);
    *bytes = 2 * slot + (most < room ? most : room);
    return KVS_OK;
}

/* The wave from page 0 on tells its kernels that nothing has been folded yet. */
kvs_status kvs_cuda_launch_attend_begin(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    (void)launcher, (void)op, (void)step;
    return KVS_OK;
}

static kvs_attend_params params_of(const kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    const uint64_t scratch = (uint64_t)(uintptr_t)op->scratch, slot = slot_bytes(op, step->n_rows);
    return (kvs_attend_params){.q = address_of(&op->in[0], step),
                               .out = address_of(&op->out[0], step),
                               .page_table = (uint64_t)(uintptr_t)step->page_tables[op->layer],
                               .slots = scratch + 2 * slot,
                               .groups = scratch,
                               .results = scratch + slot,
                               .first_token = step->first_token,
                               .step = launcher->places.words,
                               .q_stride = op->in[0].cols,
                               .out_stride = op->out[0].cols,
                               .n_rows = step->n_rows,
                               .n_query_heads = op->u[0],
                               .n_kv_heads = op->kv->n_kv_heads,
                               .scale = op->f[0],
                               .block = op->u[1],
                               .block_scale = kvs_cuda_hadamard_scale(op->u[1])};
}

/* Codes of all but these types are exact as halves. */
static bool is_exact_as_half(int32_t type)
{
    return type != KVS_TYPE_F32 && type != KVS_TYPE_BF16;
}

/* Where the kernels of attention come from, the queries that share a page in a block, and the block's shared memory. */
typedef struct attend_kernels {
    kvs_cuda_key leaf;
    kvs_cuda_key fold;
    uint32_t tile_queries;
    uint32_t shared_bytes;
    uint32_t sm_blocks; /* that a multiprocessor takes */
    bool is_tiled;      /* slots are of groups, always */
} attend_kernels;

/* Runs of tokens that warps share: V_SPLITS of attend_mma.cu. */
static uint32_t value_splits(uint32_t n_blocks)
{
    return n_blocks == 1 ? 8 : n_blocks == 2 ? 4 : n_blocks <= 4 ? 2 : 1;
}

/* Whether rows are a prompt's, and attend_tile.cu has the layer. */
static bool is_tiled(const kvs_cuda_launcher *launcher, const kvs_bound_op *op)
{
    const kvs_kv_layer *layer = op->kv;
    const uint32_t v = layer->head_dim_v;
    return (op->flags & KVS_OP_PROMPT) != 0 && launcher->arch == GROUPS_ARCH && is_exact_as_half(layer->type_k) && is_exact_as_half(layer->type_v) &&
           layer->head_dim_k % PROMPT_GRAIN == 0 && (v == 64 || v == 128 || v == 256);
}

/* Shared memory of attend_mma.cu that a launch asks for, for each query of a tile. */
static uint32_t products_bytes(const kvs_kv_layer *layer)
{
    const uint32_t k_blocks = layer->head_dim_k / HEAD_GRAIN, v_blocks = layer->head_dim_v / HEAD_GRAIN;
    return 64 * (2 * k_blocks + 16) + 128 * (value_splits(v_blocks) - 1) * v_blocks;
}

/* And for a page, where it is staged: with rows of K's codes a block of them apart and of V's 16 bytes. */
static uint32_t stage_bytes(const kvs_kv_layer *layer)
{
    kvs_record_info record = {.struct_size = sizeof record};
    if (kvs_record_layout(layer, &record) != KVS_OK) {
        return UINT32_MAX;
    }
    const uint32_t block_codes = record.plane_row_bytes[KVS_PLANE_K_CODES] / (layer->head_dim_k / HEAD_GRAIN);
    return (uint32_t)record.head_bytes + KVS_PAGE_TOKENS * (block_codes + 16);
}

static attend_kernels kernels_of(const kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t n_head_queries)
{
    const kvs_kv_layer *layer = op->kv;
    if (is_tiled(launcher, op)) {
        return (attend_kernels){record_key("attend_tile", "attend_leaf", layer), record_key("attend_tile", "attend_fold", layer),
                                PROMPT_QUERIES, 384 * layer->head_dim_k + 128 * layer->head_dim_v + 1024, 1, true};
    }
    if (launcher->arch < PRODUCTS_ARCH || !is_exact_as_half(layer->type_k) || !is_exact_as_half(layer->type_v)) {
        return (attend_kernels){record_key("attend", "attend_leaf", layer), record_key("attend", "attend_fold", layer),
                                KVS_CUDA_TILE_QUERIES, 0, 2, false};
    }
    const uint32_t of_query = products_bytes(layer);
    const uint32_t many = MANY_QUERIES * (of_query + STATIC_BYTES) <= launcher->shared_bytes ? MANY_QUERIES : FEWER_QUERIES;
    const uint32_t tile = n_head_queries <= FEW_QUERIES ? FEW_QUERIES : many, stage = stage_bytes(layer);
    const bool is_staged = (uint64_t)tile * (of_query + STATIC_BYTES) + stage <= launcher->shared_bytes;
    const kvs_cuda_macro tiles = {"KVS_TILES", (int32_t)(tile / FEW_QUERIES)}, staged = {"KVS_STAGED", is_staged};
    attend_kernels kernels = {record_key("attend_mma", "attend_leaf", layer), record_key("attend_mma", "attend_fold", layer),
                              tile, tile * of_query + (is_staged ? stage : 0), is_staged || tile > FEW_QUERIES ? 1 : 2, false};
    kernels.leaf.macros[kernels.leaf.n_macros++] = tiles;
    kernels.leaf.macros[kernels.leaf.n_macros++] = staged;
    kernels.fold.macros[kernels.fold.n_macros++] = tiles;
    kernels.fold.macros[kernels.fold.n_macros++] = staged;
    return kernels;
}

/* Slots of a launch, of which fit are there, where one launch does not take all: few blocks should wait for others to end. `at_once`:
 * blocks that the card takes. */
static uint32_t even_slots(uint32_t at_once, uint32_t of_slot, uint32_t fit)
{
    uint32_t best = 1;
    uint64_t best_blocks = 0, best_rounds = 1;
    for (uint32_t n = 1; n <= fit; n++) {
        const uint64_t blocks = (uint64_t)n * of_slot, rounds = kvs_div_up(blocks, at_once);
        if (blocks * best_rounds > best_blocks * rounds) {
            best = n;
            best_blocks = blocks;
            best_rounds = rounds;
        }
    }
    return best;
}

/* Pages from params->page_begin on that one launch takes, at most to `end`, in how many slots. */
static uint32_t cut_launch(const kvs_cuda_launcher *launcher, const kvs_bound_op *op, const attend_kernels *kernels, uint32_t n_tiles,
                           uint32_t end, kvs_attend_params *params)
{
    const uint32_t fit = (uint32_t)slots_of(op, params->n_rows), of_slot = n_tiles * params->n_kv_heads;
    const uint32_t first_group = params->page_begin / KVS_CUDA_GROUP_PAGES;
    const uint32_t n_groups = (uint32_t)kvs_div_up(end, KVS_CUDA_GROUP_PAGES) - first_group;
    const uint32_t at_once = kernels->sm_blocks * (launcher->n_sm == 0 ? 1 : launcher->n_sm);
    const bool are_all = n_groups <= fit && !kernels->is_tiled;
    const uint32_t room = are_all ? n_groups : even_slots(at_once, of_slot, fit);
    const uint32_t grouped_slots = n_groups < room ? n_groups : room;
    params->is_grouped = kernels->is_tiled || (uint64_t)grouped_slots * of_slot * 4 >= 3 * (uint64_t)at_once;
    if (params->is_grouped) {
        const uint32_t stop = (first_group + grouped_slots) * KVS_CUDA_GROUP_PAGES;
        params->page_end = stop < end ? stop : end;
        return grouped_slots;
    }
    const uint32_t left = end - params->page_begin;
    const uint32_t n_slots = left < fit ? left : fit;
    params->page_end = params->page_begin + n_slots;
    return n_slots;
}

/* Launches of a recorded pass are for any pass of the shape, over all pages that its tables have room for: kernels find out how
 * many there are. */
kvs_status kvs_cuda_launch_attend_wave(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step,
                                       uint64_t page_begin, uint64_t page_end)
{
    const uint32_t n_head_queries = step->n_rows * (op->u[0] / op->kv->n_kv_heads);
    const attend_kernels kernels = kernels_of(launcher, op, n_head_queries);
    const bool is_recorded = launcher->places.words != 0;
    const uint64_t reached = (step->first_token + step->n_rows - 1) / KVS_PAGE_TOKENS + 1;
    const uint64_t n_pages = is_recorded ? launcher->places.table_pages : reached;
    const uint64_t end = !is_recorded && page_end < n_pages ? page_end : n_pages;
    const uint32_t n_tiles = (uint32_t)kvs_div_up(n_head_queries, kernels.tile_queries);
    kvs_attend_params params = params_of(launcher, op, step);
    for (uint64_t begin = page_begin; begin < end; begin = params.page_end) {
        params.page_begin = (uint32_t)begin;
        const uint32_t n_slots = cut_launch(launcher, op, &kernels, n_tiles, (uint32_t)end, &params);
        params.is_first = begin == 0;
        params.is_last = params.page_end == n_pages;
        kvs_status status =
            kvs_cuda_launch(launcher, &kernels.leaf, (kvs_cuda_dim){n_tiles, op->kv->n_kv_heads, n_slots},
                            (kvs_cuda_dim){THREADS, 1, 1}, kernels.shared_bytes, &params, sizeof params);
        if (status == KVS_OK) {
            status = kvs_cuda_launch(launcher, &kernels.fold, (kvs_cuda_dim){step->n_rows * op->u[0], 1, 1},
                                     (kvs_cuda_dim){op->kv->head_dim_v, 1, 1}, 0, &params, sizeof params);
        }
        if (status != KVS_OK) {
            return status;
        }
    }
    return KVS_OK;
}

/* The wave with the last page has written the result. */
kvs_status kvs_cuda_launch_attend_finish(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    (void)launcher, (void)op, (void)step;
    return KVS_OK;
}

kvs_status kvs_cuda_launch_kv_write(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step)
{
    const kvs_status status = check_head(launcher, op->kv);
    if (status != KVS_OK) {
        return status;
    }
    const uint64_t records = launcher->places.records;
    const kvs_cuda_key key = record_key("kv_write", "kv_write", op->kv);
    const kvs_kv_write_params params = {.k = address_of(&op->in[0], step),
                                        .v = address_of(&op->in[1], step),
                                        .page_table = (uint64_t)(uintptr_t)step->page_tables[op->layer],
                                        .first_token = step->first_token,
                                        .step = launcher->places.words,
                                        .record = records == 0 ? 0 : records + op->layer * sizeof(kvs_step_record),
                                        .k_stride = op->in[0].cols,
                                        .v_stride = op->in[1].cols,
                                        .n_rows = step->n_rows,
                                        .n_kv_heads = op->kv->n_kv_heads};
    return kvs_cuda_launch(launcher, &key, (kvs_cuda_dim){step->n_rows, op->kv->n_kv_heads, 1},
                           (kvs_cuda_dim){THREADS, 1, 1}, 0, &params, sizeof params);
}
