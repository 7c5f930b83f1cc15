#include "core/footprint.h"

/* What one walk carries. */
struct walk {
    const kvs_footprint_desc *desc;
    kvs_access_visit visit;
    void *user;
};

static void report(const struct walk *w, uint32_t kind, uint64_t address, uint64_t n_bytes, bool is_write)
{
    const kvs_access access = {.address = address, .n_bytes = n_bytes, .kind = kind, .is_write = is_write};
    if (n_bytes != 0) {
        w->visit(w->user, &access);
    }
}

/* Operands by the numbers that operand_desc gives them: inputs first, then outputs. One that is not there has no columns. */
static const kvs_operand *operand_of(const kvs_bound_op *op, uint32_t id)
{
    return id < 3 ? &op->in[id] : &op->out[id - 3];
}

static kvs_op_desc operand_desc(const kvs_bound_op *op)
{
    kvs_op_desc desc = {.code = op->code, .in = {0, 1, 2}, .u = {op->u[0], op->u[1], op->u[2], op->u[3]}};
    for (uint32_t i = 0; i < 4; i++) {
        desc.out[i] = op->out[i].cols == 0 ? KVS_NONE : 3 + i;
    }
    return desc;
}

/* None where a fold of recurrent layers, which is no pass, has no result. */
static void report_tensor(const struct walk *w, uint32_t id, bool is_write)
{
    if (id == KVS_NONE) {
        return;
    }
    const kvs_operand *operand = operand_of(w->desc->op, id);
    const uint64_t n_bytes = (uint64_t)kvs_operand_rows(operand, w->desc->step) * operand->cols * sizeof(float);
    const bool is_callers = operand->output_slot != KVS_NONE;
    report(w, is_callers ? KVS_ACCESS_CALLER : KVS_ACCESS_TENSOR,
           (uint64_t)(uintptr_t)kvs_operand_data(operand, w->desc->step), n_bytes, is_write);
}

static uint64_t row_bytes(const kvs_weight_view *weight)
{
    uint32_t block_values = 1;
    uint32_t block_bytes = 0;
    (void)kvs_type_block(weight->type, &block_values, &block_bytes);
    return weight->k / block_values * block_bytes;
}

static kvs_status report_weight(const struct walk *w, const kvs_weight_view *weight)
{
    if (weight->layout == KVS_WEIGHT_ROWS) {
        /* Of a table only the rows of the pass's tokens, whichever they are; a vector as a whole. */
        const bool is_table = w->desc->op->code == KVS_OP_EMBED;
        const uint64_t n_rows = is_table ? w->desc->step->n_rows : weight->n;
        report(w, KVS_ACCESS_CALLER, weight->address, n_rows * row_bytes(weight), false);
        return KVS_OK;
    }
    uint64_t n_bytes = 0;
    const struct kvs_device_view *view = &w->desc->backend;
    const kvs_status status = view->backend->weight_bytes(view->self, weight->type, weight->k, weight->n, &n_bytes);
    report(w, KVS_ACCESS_WEIGHT, weight->address, n_bytes, false);
    return status;
}

static void report_page(const struct walk *w, uint64_t page, uint64_t record, uint64_t offset, uint64_t n_bytes,
                        bool is_write)
{
    const kvs_access access = {.address = record + offset,
                               .n_bytes = n_bytes,
                               .page = page,
                               .record = record,
                               .kind = KVS_ACCESS_PAGE,
                               .is_write = is_write};
    w->visit(w->user, &access);
}

/* Rows [first, end) of one page: a piece per head and plane, or the whole record. */
static void report_rows(const struct walk *w, const kvs_kv_layer *layer, const kvs_record_info *record, uint64_t page,
                        uint64_t address, uint64_t first, uint64_t end, bool is_write)
{
    if (first == 0 && end == KVS_PAGE_TOKENS) {
        report_page(w, page, address, 0, record->record_bytes, is_write);
        return;
    }
    for (uint32_t head = 0; head < layer->n_kv_heads; head++) {
        for (uint32_t plane = 0; plane < KVS_N_PLANES; plane++) {
            const uint64_t bytes = record->plane_row_bytes[plane];
            if (bytes != 0) {
                report_page(w, page, address, head * record->head_bytes + record->plane_offset_bytes[plane] + first * bytes,
                            (end - first) * bytes, is_write);
            }
        }
    }
}

static void walk_pages(const struct walk *w, const kvs_kv_layer *layer, const kvs_record_info *record,
                       const uint64_t *table, uint64_t page_begin, uint64_t page_end, uint64_t active_tokens)
{
    for (uint64_t page = page_begin; page < page_end; page++) {
        const uint64_t left = active_tokens - page * KVS_PAGE_TOKENS;
        report_rows(w, layer, record, page, table[page], 0, left < KVS_PAGE_TOKENS ? left : KVS_PAGE_TOKENS, false);
    }
}

void kvs_pages_footprint(const kvs_kv_layer *layer, const kvs_record_info *record, const uint64_t *table,
                         uint64_t page_begin, uint64_t page_end, uint64_t active_tokens, kvs_access_visit visit,
                         void *user)
{
    const struct walk w = {.visit = visit, .user = user};
    walk_pages(&w, layer, record, table, page_begin, page_end, active_tokens);
}

static void write_pages(const struct walk *w)
{
    const kvs_bound_op *op = w->desc->op;
    const struct kvs_step *step = w->desc->step;
    const uint64_t end = step->first_token + step->n_rows;
    for (uint64_t token = step->first_token; token < end;) {
        const uint64_t page = token / KVS_PAGE_TOKENS;
        const uint64_t page_end = (page + 1) * KVS_PAGE_TOKENS < end ? (page + 1) * KVS_PAGE_TOKENS : end;
        report_rows(w, op->kv, op->record, page, step->page_tables[op->layer][page], token - page * KVS_PAGE_TOKENS,
                    page_end - page * KVS_PAGE_TOKENS, true);
        token = page_end;
    }
}

static kvs_status scratch_bytes(const struct walk *w, uint64_t *n_bytes)
{
    const struct kvs_device_view *view = &w->desc->backend;
    const kvs_bound_op *op = w->desc->op;
    *n_bytes = 0;
    if (op->code == KVS_OP_KV_WRITE) {
        return KVS_OK;
    }
    const uint32_t n_rows = kvs_operand_rows(&op->out[0], w->desc->step);
    return n_rows == 0 ? KVS_OK : view->backend->op_scratch_bytes(view->self, op, n_rows, n_bytes);
}

static void report_values(const struct walk *w, const float *values, uint64_t n_values, bool is_write)
{
    report(w, KVS_ACCESS_STATE, (uint64_t)(uintptr_t)values, n_values * sizeof(float), is_write);
}

/* Both sides of a recurrent layer's state, and its weights. */
static void report_state(const struct walk *w)
{
    const kvs_bound_op *op = w->desc->op;
    const kvs_delta_view *view = &w->desc->step->deltas[op->layer];
    const kvs_delta_layer *layer = view->layer;
    const bool is_logged = op->u[0] == KVS_DELTA_LOGGED;
    (void)report_weight(w, view->conv);
    (void)report_weight(w, view->dt_bias);
    (void)report_weight(w, view->decay);
    report_values(w, view->matrix_in, kvs_delta_matrix_values(layer), false);
    report_values(w, view->conv_in, kvs_delta_conv_values(layer), false);
    report_values(w, view->log_in, view->n_pending * kvs_delta_log_values(layer), false);
    report_values(w, view->matrix_out, kvs_delta_matrix_values(layer), true);
    report_values(w, view->conv_out, kvs_delta_conv_values(layer), true);
    report_values(w, view->log_out, is_logged ? w->desc->step->n_rows * kvs_delta_log_values(layer) : 0, true);
}

static kvs_status walk_whole(const struct walk *w)
{
    const kvs_bound_op *op = w->desc->op;
    const kvs_op_desc operands = operand_desc(op);
    kvs_op_access access;
    kvs_tape_op_access(&operands, &access);
    uint64_t scratch = 0;
    kvs_status status = scratch_bytes(w, &scratch);
    for (uint32_t i = 0; i < access.n_reads; i++) {
        report_tensor(w, access.reads[i], false);
    }
    for (uint32_t i = 0; status == KVS_OK && i < 6; i++) {
        status = op->weights[i] == NULL ? KVS_OK : report_weight(w, op->weights[i]);
    }
    report(w, KVS_ACCESS_SCRATCH, (uint64_t)(uintptr_t)op->scratch, scratch, true);
    if (op->code == KVS_OP_KV_WRITE) {
        write_pages(w);
    }
    if (op->code == KVS_OP_DELTA) {
        report_state(w);
    }
    for (uint32_t i = 0; i < access.n_writes; i++) {
        report_tensor(w, access.writes[i], true);
    }
    return status;
}

static kvs_status walk_attend(const struct walk *w)
{
    const kvs_footprint_desc *desc = w->desc;
    const kvs_bound_op *op = desc->op;
    uint64_t scratch = 0;
    const kvs_status status = scratch_bytes(w, &scratch);
    const uint64_t state = (uint64_t)(uintptr_t)op->scratch;
    if (desc->part != KVS_PART_BEGIN) {
        report(w, KVS_ACCESS_SCRATCH, state, scratch, false);
    }
    if (desc->part == KVS_PART_WAVE) {
        report_tensor(w, 0, false);
        walk_pages(w, op->kv, op->record, desc->step->page_tables[op->layer], desc->page_begin, desc->page_end,
                   desc->step->first_token + desc->step->n_rows);
    }
    if (desc->part == KVS_PART_FINISH) {
        report_tensor(w, 3, true);
    } else {
        report(w, KVS_ACCESS_SCRATCH, state, scratch, true);
    }
    return status;
}

kvs_status kvs_op_footprint(const kvs_footprint_desc *desc, kvs_access_visit visit, void *user)
{
    const struct walk w = {.desc = desc, .visit = visit, .user = user};
    return desc->part == KVS_PART_WHOLE ? walk_whole(&w) : walk_attend(&w);
}
