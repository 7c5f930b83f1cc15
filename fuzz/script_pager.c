/* script_pager.c: passes, faults, forks, truncations and placements in any order, against lists of tokens.
 *
 * create (context 2; first: bit 0 deferred, ring slots - 1, schedule seed): a sequence; the first has 1,500 tokens of context.
 * begin (who, rows 2), run, commit (-, rows 2): a pass; what did not run commits nothing. cancel (k): the next run is cancelled
 * before it begins (0) or in its k-th operation. truncate (who, tokens 2). fork (who, 1: history first). release (who, 1: the
 * pager is told). place (pages of each layer - 1, ring slots, widest pass 2). bind, unbind (0 detach, 1 forget). advance
 * (copies - 1, 0: run the queue of a deferred device, 1: wait for history). read: all history. close (order): end.
 */
#include "pager_rig.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_SEQS = 5, N_OPS = 10 };

typedef struct history {
    kvs_seq *seq;
    uint64_t ctx;
    uint32_t n_tokens;
    uint32_t tokens[MAX_CTX + MAX_ROWS];
} history;

typedef struct placement {
    uint32_t pages[N_LAYERS];
    uint32_t ring_slots;
    uint32_t max_rows;
} placement;

typedef struct pass {
    history *history;
    uint32_t n_rows;
    kvs_pass_forecast forecast;
    kvs_pager_info before;
    bool has_run;
    bool has_failed;
    bool lacks_copies; /* some failed since it began: whoever waits for them hears of it */
} pass;

typedef struct world {
    rig rig;
    fault fault;
    bool is_deferred;
    bool is_attached;
    placement placement;
    history *live[MAX_SEQS];
    uint32_t n_live;
    bool is_in_pass;
    pass pass;
    uint32_t random;
    bool cancels;
    uint32_t cancel_at;
    uint32_t cancel_flag;
    uint32_t n_ops; /* of the run under way */
} world;

static history *pick(world *w, const step *step)
{
    return w->n_live == 0 ? NULL : w->live[step->operand[0] % w->n_live];
}

static kvs_pager_info pager_info(world *w)
{
    kvs_pager_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_pager_get_info(w->rig.pager, &info));
    return info;
}

static uint32_t pages_of(uint64_t n_tokens)
{
    return (uint32_t)((n_tokens + KVS_PAGE_TOKENS - 1) / KVS_PAGE_TOKENS);
}

/* ---- sequences ---- */

static history *new_history(const world *w)
{
    history *made = w->n_live == MAX_SEQS ? NULL : calloc(1, sizeof *made);
    EXPECT(made != NULL || w->n_live == MAX_SEQS);
    return made;
}

static void create(world *w, uint64_t ctx)
{
    history *made = new_history(w);
    if (made == NULL) {
        return;
    }
    made->ctx = ctx % (MAX_CTX + 1);
    if (OUTCOME(&w->fault, kvs_seq_create(w->rig.cache, made->ctx, &made->seq), made->ctx == 0 ? KVS_EINVAL : KVS_OK)) {
        w->live[w->n_live++] = made;
    } else {
        free(made);
    }
}

static bool is_of_pass(const world *w, const history *h)
{
    return w->is_in_pass && w->pass.history == h;
}

static void fork_seq(world *w, const step *step)
{
    history *h = pick(w, step);
    history *made = h == NULL ? NULL : new_history(w);
    if (made == NULL) {
        return;
    }
    kvs_status expected = is_of_pass(w, h) ? KVS_EBUSY : KVS_OK;
    const bool waits = step->operand[1] % 2 != 0 && !w->is_in_pass;
    *made = *h;
    made->seq = NULL;
    if ((!waits || OUTCOME(&w->fault, kvs_pager_publish_wait(w->rig.pager), KVS_OK)) &&
        OUTCOME(&w->fault, kvs_seq_fork(h->seq, &made->seq), expected)) {
        w->live[w->n_live++] = made;
    } else {
        free(made);
    }
}

static void truncate_seq(world *w, const step *step)
{
    history *h = pick(w, step);
    if (h == NULL) {
        return;
    }
    if (!w->is_in_pass) {
        (void)OUTCOME(&w->fault, kvs_pager_truncate(w->rig.pager, h->seq, h->n_tokens + 1u), KVS_EINVAL);
    }
    const uint32_t n_tokens = step_u16(step, 1) % (h->n_tokens + 1);
    const kvs_status expected = w->is_in_pass ? KVS_EBUSY : KVS_OK;
    if (OUTCOME(&w->fault, kvs_pager_truncate(w->rig.pager, h->seq, n_tokens), expected)) {
        h->n_tokens = n_tokens;
    }
}

static void release(world *w, const step *step)
{
    history *h = pick(w, step);
    if (h == NULL) {
        return;
    }
    if (is_of_pass(w, h)) {
        EXPECT_STATUS(kvs_pager_drop(w->rig.pager, h->seq), KVS_EBUSY);
        return;
    }
    const kvs_status busy = w->is_in_pass ? KVS_EBUSY : KVS_OK;
    if (step->operand[1] % 2 != 0) {
        const kvs_status got = kvs_pager_drop(w->rig.pager, h->seq);
        EXPECT(got == KVS_OK || got == busy || (got == KVS_EIO && w->fault.n_fired != 0));
    }
    kvs_seq_release(h->seq);
    free(h);
    w->n_live--;
    const uint32_t at = step->operand[0] % (w->n_live + 1);
    memmove(&w->live[at], &w->live[at + 1], (w->n_live - at) * sizeof w->live[0]);
}

/* ---- passes ---- */

/* What a pass over this many rows is refused with, all but its forecast considered. */
static kvs_status refusal(const world *w, const history *h, uint32_t n_rows)
{
    if (w->is_in_pass || !w->is_attached) {
        return KVS_EBUSY;
    }
    if (n_rows > w->placement.max_rows || n_rows == 0) {
        return KVS_EINVAL;
    }
    const uint32_t active = pages_of(h->n_tokens + (uint64_t)n_rows);
    const uint32_t tail_pages = pages_of(w->placement.max_rows) + 1;
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        if (active > w->placement.pages[layer] && w->placement.pages[layer] < tail_pages) {
            return KVS_ENOSPACE;
        }
    }
    return h->n_tokens + (uint64_t)n_rows > h->ctx ? KVS_ECONTEXT : KVS_OK;
}

static void draw_tokens(world *w, history *h, uint32_t n_rows)
{
    for (uint32_t i = 0; i < n_rows; i++) {
        w->random = w->random * 1664525u + 1013904223u;
        h->tokens[h->n_tokens + i] = (w->random >> 20) % N_VOCAB;
    }
}

static void begin(world *w, const step *step)
{
    history *h = pick(w, step);
    if (h == NULL) {
        return;
    }
    const uint32_t n_rows = step_u16(step, 1) % (MAX_ROWS + 1);
    kvs_pass_forecast forecast = {.struct_size = sizeof forecast};
    kvs_status expected = refusal(w, h, n_rows);
    if (expected == KVS_OK) {
        EXPECT_OK(kvs_pager_forecast(w->rig.pager, h->seq, n_rows, &forecast));
        expected = forecast.streamed_pages != 0 && w->placement.ring_slots == 0 ? KVS_ENOSPACE : KVS_OK;
    }
    const kvs_pager_info before = pager_info(w);
    if (OUTCOME(&w->fault, kvs_pager_begin(w->rig.pager, h->seq, n_rows), expected)) {
        draw_tokens(w, h, n_rows);
        w->pass = (pass){.history = h, .n_rows = n_rows, .forecast = forecast, .before = before};
        w->is_in_pass = true;
    }
}

static int cancel_on_op(void *user, int point, uint64_t index)
{
    world *w = user;
    (void)index;
    if (point == KVS_HOOK_OP && ++w->n_ops == w->cancel_at) {
        w->cancel_flag = 1;
    }
    return 0;
}

static void check_run(world *w)
{
    const pass *pass = &w->pass;
    const kvs_pager_info after = pager_info(w);
    rig_check_outputs(&w->rig, pass->history->tokens, pass->history->n_tokens, pass->n_rows);
    EXPECT_U64(after.streamed_pages - pass->before.streamed_pages, pass->forecast.streamed_pages);
    EXPECT_U64(after.streamed_bytes - pass->before.streamed_bytes, pass->forecast.streamed_bytes);
    EXPECT(after.resident_pages >= pass->forecast.resident_pages);
}

static kvs_status replay(world *w)
{
    float *outputs[N_LAYERS] = {w->rig.outputs[0], w->rig.outputs[1]};
    const kvs_pass_desc desc = {.struct_size = sizeof desc,
                                .n_rows = w->pass.n_rows,
                                .tokens = w->pass.history->tokens + w->pass.history->n_tokens,
                                .n_outputs = N_LAYERS,
                                .outputs = outputs,
                                .cancel = &w->cancel_flag};
    memset(w->rig.outputs, 0xff, sizeof w->rig.outputs);
    return kvs_binding_run(w->rig.binding, &desc);
}

static void run_cancelled(world *w)
{
    w->cancel_flag = w->cancel_at == 0 ? 1 : 0;
    w->n_ops = 0;
    EXPECT_OK(kvs_device_set_hook(w->rig.device, cancel_on_op, w));
    const kvs_status got = replay(w);
    EXPECT_OK(kvs_device_set_hook(w->rig.device, NULL, NULL));
    w->cancel_flag = 0;
    w->cancels = false;
    if (w->cancel_at >= N_OPS && got == KVS_OK) {
        w->pass.has_run = true; /* asked for in the last operation or never */
        check_run(w);
        return;
    }
    EXPECT(got == KVS_ECANCELLED || (w->pass.lacks_copies && got == KVS_EIO));
    w->pass.has_failed = true;
}

static void run(world *w)
{
    if (!w->is_in_pass) {
        const uint32_t token = 0;
        float *outputs[N_LAYERS] = {w->rig.outputs[0], w->rig.outputs[1]};
        const kvs_pass_desc desc = {
            .struct_size = sizeof desc, .n_rows = 1, .tokens = &token, .n_outputs = N_LAYERS, .outputs = outputs};
        EXPECT_STATUS(kvs_binding_run(w->rig.binding, &desc), KVS_EBUSY);
        return;
    }
    if (w->pass.has_run || w->pass.has_failed) {
        return;
    }
    if (w->cancels) {
        run_cancelled(w);
        return;
    }
    const kvs_status got = replay(w);
    if (w->pass.lacks_copies && got == KVS_EIO) {
        w->pass.has_failed = true;
    } else if (OUTCOME(&w->fault, got, KVS_OK)) {
        w->pass.has_run = true;
        check_run(w);
    } else {
        w->pass.has_failed = true;
    }
}

static void end(world *w, uint32_t n_rows)
{
    if (!w->is_in_pass) {
        EXPECT_STATUS(kvs_pager_end(w->rig.pager, n_rows), KVS_EBUSY);
        return;
    }
    EXPECT_STATUS(kvs_pager_end(w->rig.pager, w->pass.n_rows + 1), KVS_EINVAL);
    const uint32_t n_kept = w->pass.has_run ? n_rows % (w->pass.n_rows + 1) : 0;
    /* Whatever becomes of the copies, the rows are committed. */
    (void)OUTCOME(&w->fault, kvs_pager_end(w->rig.pager, n_kept), KVS_OK);
    w->pass.history->n_tokens += n_kept;
    w->is_in_pass = false;
}

/* ---- the pool ---- */

static kvs_placement describe(const placement *placement)
{
    return (kvs_placement){.struct_size = sizeof(kvs_placement),
                           .n_layers = N_LAYERS,
                           .resident_pages = placement->pages,
                           .ring_slots = placement->ring_slots,
                           .max_rows = placement->max_rows};
}

static void place(world *w, const step *step)
{
    const placement wanted = {.pages = {1 + step->operand[0] % 11u, 1 + step->operand[1] % 11u},
                              .ring_slots = step->operand[2] % 5u,
                              .max_rows = 1 + (step_u16(step, 3) - 1u) % MAX_ROWS};
    const kvs_placement desc = describe(&wanted);
    const uint32_t n_slots = wanted.ring_slots + wanted.pages[0] + wanted.pages[1];
    const uint32_t fewest = wanted.pages[0] < wanted.pages[1] ? wanted.pages[0] : wanted.pages[1];
    const kvs_status expected = w->is_in_pass || !w->is_attached           ? KVS_EBUSY
                                : n_slots > N_SLOTS                        ? KVS_ENOSPACE
                                : wanted.max_rows > fewest * KVS_PAGE_TOKENS ? KVS_EINVAL
                                                                           : KVS_OK;
    if (OUTCOME(&w->fault, kvs_pager_place(w->rig.pager, &desc), expected)) {
        w->placement = wanted;
    }
}

static void bind(world *w)
{
    const kvs_placement desc = describe(&w->placement);
    const kvs_status expected = w->is_attached ? KVS_EBUSY : KVS_OK;
    if (OUTCOME(&w->fault, kvs_pager_attach(w->rig.pager, w->rig.pool, &desc), expected)) {
        w->is_attached = true;
    }
}

static void unbind(world *w, const step *step)
{
    const kvs_status expected = w->is_in_pass ? KVS_EBUSY : KVS_OK;
    if (step->operand[0] % 2 != 0) {
        (void)OUTCOME(&w->fault, kvs_pager_forget(w->rig.pager), expected);
    } else if (OUTCOME(&w->fault, kvs_pager_detach(w->rig.pager), expected)) {
        w->is_attached = false;
    }
}

static void advance(world *w, const step *step)
{
    uint32_t ran = 0;
    const uint32_t limit = 1 + step->operand[0] % 9u;
    if (step->operand[1] % 2 != 0) {
        (void)OUTCOME(&w->fault, kvs_pager_publish_wait(w->rig.pager), KVS_OK);
    } else if (w->is_deferred) {
        (void)OUTCOME(&w->fault, kvs_device_run_copies(w->rig.device, limit, &ran), KVS_OK);
        EXPECT(ran <= limit);
    }
}

/* ---- what always holds ---- */

static void check_page(world *w, const history *h, uint32_t page)
{
    const uint32_t first = page * KVS_PAGE_TOKENS;
    const uint64_t n_tokens = least(h->n_tokens - first, KVS_PAGE_TOKENS);
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        kvs_page_info info = {.struct_size = sizeof info};
        EXPECT_OK(kvs_seq_get_page(h->seq, layer, page, &info));
        EXPECT(w->is_in_pass || info.published_rows >= n_tokens);
        const uint64_t rows = least(info.published_rows, n_tokens);
        if (rows != 0) {
            rig_check_page(&w->rig, h->seq, layer, page, h->tokens + first, (uint32_t)rows);
        }
    }
}

/* What counts as published is what the tokens say. */
static void read_all(world *w)
{
    if (!w->is_in_pass) {
        EXPECT_OK(kvs_pager_publish_wait(w->rig.pager));
    }
    for (uint32_t i = 0; i < w->n_live; i++) {
        for (uint32_t page = 0; page < pages_of(w->live[i]->n_tokens); page++) {
            check_page(w, w->live[i], page);
        }
    }
}

static void compare(world *w)
{
    EXPECT_OK(kvs_arena_check_integrity(w->rig.arena));
    EXPECT_OK(kvs_cache_check_integrity(w->rig.cache));
    EXPECT_OK(kvs_pager_check_integrity(w->rig.pager));
    for (uint32_t i = 0; i < w->n_live; i++) {
        kvs_seq_info info = {.struct_size = sizeof info};
        EXPECT_OK(kvs_seq_get_info(w->live[i]->seq, &info));
        EXPECT_U64(info.committed_tokens, w->live[i]->n_tokens);
        EXPECT_U64(info.ctx_tokens, w->live[i]->ctx);
    }
    const kvs_pager_info info = pager_info(w);
    EXPECT_U64(info.is_in_pass, w->is_in_pass ? 1 : 0);
    EXPECT_U64(info.is_attached, w->is_attached ? 1 : 0);
}

static void act(world *w, const step *step)
{
    switch (step->action) {
    case ACTION_CREATE:
        create(w, step_u16(step, 0));
        break;
    case ACTION_FORK:
        fork_seq(w, step);
        break;
    case ACTION_TRUNCATE:
        truncate_seq(w, step);
        break;
    case ACTION_RELEASE:
        release(w, step);
        break;
    case ACTION_BEGIN:
        begin(w, step);
        break;
    case ACTION_CANCEL:
        w->cancels = true;
        w->cancel_at = step->operand[0] % (N_OPS + 2);
        break;
    case ACTION_RUN:
        run(w);
        break;
    case ACTION_COMMIT:
        end(w, step_u16(step, 1));
        break;
    case ACTION_PLACE:
        place(w, step);
        break;
    case ACTION_BIND:
        bind(w);
        break;
    case ACTION_UNBIND:
        unbind(w, step);
        break;
    case ACTION_ADVANCE:
        advance(w, step);
        break;
    default:
        break;
    }
}

/* ---- life ---- */

static void open_world(world *w, const step *step)
{
    w->is_deferred = step->operand[0] % 2 != 0;
    rig_open(&w->rig, w->is_deferred, step->operand[2]);
    w->random = step->operand[2];
    w->placement = (placement){.pages = {3, 4}, .ring_slots = 1 + step->operand[1] % 4u, .max_rows = 512};
    bind(w);
    create(w, MAX_CTX);
}

static void close_world(world *w, uint32_t order)
{
    kvs_seq *seqs[MAX_SEQS];
    if (w->is_in_pass) {
        end(w, 0);
    }
    read_all(w);
    for (uint32_t i = 0; i < w->n_live; i++) {
        seqs[i] = w->live[i]->seq;
        free(w->live[i]);
    }
    rig_close(&w->rig, seqs, w->n_live, order);
    free(w);
}

void script_pager(script *script)
{
    world *w = calloc(1, sizeof *w);
    EXPECT(w != NULL);
    step step;
    script_open(script, &step);
    open_world(w, &step);
    while (script_next(script, &step) && step.action != ACTION_CLOSE) {
        if (step.action == ACTION_FAIL) {
            fault_arm(&w->fault, &step);
            continue;
        }
        if (step.action == ACTION_READ) {
            read_all(w); /* has waits of its own, which no fault may spoil */
            continue;
        }
        fault_begin(&w->fault, w->rig.device);
        act(w, &step);
        const bool has_struck = fault_end(&w->fault, w->rig.device, w->is_deferred);
        w->pass.lacks_copies = w->pass.lacks_copies || (has_struck && w->fault.point == KVS_HOOK_COPY);
        compare(w);
    }
    close_world(w, step.action == ACTION_CLOSE ? step.operand[0] : 0);
}
