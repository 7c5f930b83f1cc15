/* script_lease.c: leases of a head's layer beside a trunk that lends ring slots, in any order of calls, against lists of tokens.
 *
 * create (first: bit 0 deferred, ring slots of the trunk - 1, schedule seed, pages and ring of the head). begin (who, rows 2;
 * who 255: the trunk) opens and runs a pass, commit (-, rows 2) keeps rows of it; the trunk's pass is whole, and that of the
 * head, too, where no commit follows. truncate (who, tokens 2; who from 128 on: past the pager). fork (who). release (who).
 * lease (who; 0 nobody, 1 the head's ring, 2 the trunk's lends; tokens more 2). give_back (0: and ask it once more). plan (rows).
 * place (0 the trunk: ring slots - 1; 1 the head: pages and ring). advance (copies - 1): run the queue of a deferred device.
 * read: all history. close (order): end. A fail strikes in the lease that follows it.
 */
#include "pager_rig.h"

#include "kvstream/layer_lease.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_HEADS = 3, HEAD_SLOTS = 8, TRUNK_SLOTS = 12, WIDEST = 256, TRUNK_WHO = 255, N_LENDERS = 3 };

typedef struct talk {
    kvs_seq *seq;
    uint32_t n_tokens;
    uint32_t tokens[MAX_CTX + WIDEST];
} talk;

typedef struct world {
    kvs_device *device;
    rig trunk;
    rig head;
    fault fault;
    bool is_deferred;
    uint32_t random;
    uint32_t trunk_ring;
    uint32_t head_pages;
    uint32_t head_ring;
    talk said;
    talk *live[MAX_HEADS];
    uint32_t n_live;
    talk *open; /* whose pass has run and waits for its end */
    uint32_t open_rows;
    kvs_layer_lease *lease;
    talk *leased;
    uint64_t reserved;
    uint32_t lender;
    uint32_t n_held;
    bool is_stale;
} world;

static uint32_t pages_of(uint64_t n_tokens)
{
    return (uint32_t)((n_tokens + KVS_PAGE_TOKENS - 1) / KVS_PAGE_TOKENS);
}

static kvs_seq_info seq_info(kvs_seq *seq)
{
    kvs_seq_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_seq_get_info(seq, &info));
    return info;
}

static kvs_pager_info pager_info(const rig *rig)
{
    kvs_pager_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_pager_get_info(rig->pager, &info));
    return info;
}

static kvs_layer_lease_info lease_info(const world *w)
{
    kvs_layer_lease_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_layer_lease_get_info(w->lease, &info));
    return info;
}

static bool lends_trunk(const world *w)
{
    return w->lease != NULL && w->lender == 2 && w->n_held != 0;
}

static talk *pick(const world *w, uint32_t who)
{
    return w->live[who % w->n_live];
}

static talk *new_talk(world *w)
{
    talk *made = calloc(1, sizeof *made);
    EXPECT(made != NULL);
    w->live[w->n_live++] = made;
    return made;
}

/* ---- passes ---- */

static void draw_tokens(world *w, talk *t, uint32_t n_rows)
{
    for (uint32_t i = 0; i < n_rows; i++) {
        w->random = w->random * 1664525u + 1013904223u;
        t->tokens[t->n_tokens + i] = (w->random >> 20) % N_VOCAB;
    }
}

static void run(rig *rig, talk *t, uint32_t n_rows)
{
    float *outputs[N_LAYERS] = {rig->outputs[0], rig->outputs[1]};
    const kvs_pass_desc desc = {.struct_size = sizeof desc,
                                .n_rows = n_rows,
                                .tokens = t->tokens + t->n_tokens,
                                .n_outputs = rig->n_layers,
                                .outputs = outputs};
    EXPECT_OK(kvs_binding_run(rig->binding, &desc));
    rig_check_outputs(rig, t->tokens, t->n_tokens, n_rows);
}

static void end_open(world *w, uint32_t n_kept)
{
    if (w->open != NULL) {
        EXPECT_OK(kvs_pager_end(w->head.pager, n_kept));
        w->open->n_tokens += n_kept;
        w->open = NULL;
    }
}

static void pass_trunk(world *w, uint32_t n_rows)
{
    const kvs_status expected = lends_trunk(w)                          ? KVS_EBUSY
                                : w->said.n_tokens + n_rows > MAX_CTX ? KVS_ECONTEXT
                                                                      : KVS_OK;
    EXPECT_STATUS(kvs_pager_begin(w->trunk.pager, w->said.seq, n_rows), expected);
    if (expected == KVS_OK) {
        draw_tokens(w, &w->said, n_rows);
        run(&w->trunk, &w->said, n_rows);
        EXPECT_OK(kvs_pager_end(w->trunk.pager, n_rows));
        w->said.n_tokens += n_rows;
    }
}

static kvs_status refusal(const world *w, const talk *t, uint32_t n_rows)
{
    if (w->lease != NULL && w->leased != t) {
        return KVS_EBUSY;
    }
    if (w->lease != NULL && w->is_stale) {
        return KVS_ESTALE;
    }
    if (w->lease != NULL && t->n_tokens + n_rows > w->reserved) {
        return KVS_ENOSPACE;
    }
    return t->n_tokens + n_rows > MAX_CTX ? KVS_ECONTEXT : KVS_OK;
}

static void pass_head(world *w, const step *step, uint32_t n_rows)
{
    talk *t = pick(w, step->operand[0]);
    const kvs_seq_info seq = seq_info(t->seq);
    const kvs_pager_info before = pager_info(&w->head);
    const kvs_status expected = refusal(w, t, n_rows);
    EXPECT_STATUS(kvs_pager_begin(w->head.pager, t->seq, n_rows), expected);
    if (expected != KVS_OK) {
        EXPECT_U64(seq_info(t->seq).generation, seq.generation);
        return;
    }
    draw_tokens(w, t, n_rows);
    run(&w->head, t, n_rows);
    w->open = t;
    w->open_rows = n_rows;
    if (w->lease != NULL) {
        kvs_span_plan *plan = NULL;
        const kvs_pager_info after = pager_info(&w->head);
        /* The last page of a fork is all that a pass may bring. */
        EXPECT(after.copies - before.copies <= (seq.n_shared_pages != 0 ? 1 : 0));
        EXPECT_U64(after.streamed_pages, before.streamed_pages);
        EXPECT_STATUS(kvs_layer_lease_plan(w->lease, seq.generation, 1, &plan), KVS_EBUSY);
        EXPECT_STATUS(kvs_layer_lease_return_wait(w->lease), KVS_EBUSY);
    }
}

/* ---- sequences ---- */

static void truncate_talk(world *w, const step *step)
{
    talk *t = pick(w, step->operand[0] % 128);
    const bool is_past = step->operand[0] >= 128;
    const uint32_t n_tokens = step_u16(step, 1) % (t->n_tokens + 1);
    const uint64_t generation = seq_info(t->seq).generation;
    const kvs_pager_info before = pager_info(&w->head);
    if (is_past) {
        EXPECT_OK(kvs_pager_publish_wait(w->head.pager));
        EXPECT_OK(kvs_seq_truncate(t->seq, n_tokens));
    } else {
        EXPECT_OK(kvs_pager_truncate(w->head.pager, t->seq, n_tokens));
    }
    t->n_tokens = n_tokens;
    EXPECT_U64(pager_info(&w->head).copies, before.copies);
    if (w->leased == t && seq_info(t->seq).generation != generation) {
        kvs_span_plan *plan = NULL;
        w->is_stale = w->is_stale || is_past;
        EXPECT_STATUS(kvs_layer_lease_plan(w->lease, generation, 1, &plan), KVS_ESTALE);
    }
}

static void fork_talk(world *w, const step *step)
{
    if (w->n_live == MAX_HEADS) {
        return;
    }
    const talk *parent = pick(w, step->operand[0]);
    EXPECT_OK(kvs_pager_publish_wait(w->head.pager));
    talk *child = new_talk(w);
    *child = *parent;
    EXPECT_OK(kvs_seq_fork(parent->seq, &child->seq));
}

static void release_talk(world *w, const step *step)
{
    const uint32_t at = step->operand[0] % w->n_live;
    talk *t = w->live[at];
    if (w->leased == t) {
        EXPECT_STATUS(kvs_pager_drop(w->head.pager, t->seq), KVS_EBUSY);
        return;
    }
    if (w->n_live == 1) {
        return;
    }
    EXPECT_OK(kvs_pager_drop(w->head.pager, t->seq));
    kvs_seq_release(t->seq);
    free(t);
    w->n_live--;
    memmove(&w->live[at], &w->live[at + 1], (w->n_live - at) * sizeof w->live[0]);
}

/* ---- leases ---- */

static uint32_t ring_of(const world *w, uint32_t lender)
{
    return lender == 1 ? w->head_ring : lender == 2 ? w->trunk_ring : 1;
}

static kvs_status lease_refusal(const world *w, const talk *t, uint64_t reserved, uint32_t lender, uint32_t n_missing)
{
    if (w->lease != NULL) {
        return KVS_EBUSY;
    }
    if (reserved == 0 || reserved - t->n_tokens > WIDEST) {
        return KVS_EINVAL;
    }
    if (reserved > MAX_CTX) {
        return KVS_ECONTEXT;
    }
    return n_missing > ring_of(w, lender) - 1 ? KVS_ENOSPACE : KVS_OK;
}

static void check_population(const world *w, const kvs_pager_info *before)
{
    const kvs_layer_lease_info info = lease_info(w);
    const kvs_pager_info after = pager_info(&w->head);
    EXPECT(info.is_held == 1);
    EXPECT_U64(info.reserved_tokens, w->reserved);
    EXPECT_U64(info.n_held_slots, w->n_held);
    EXPECT_U64(info.first_held_slot, w->n_held == 0 ? 0 : ring_of(w, w->lender) - w->n_held);
    EXPECT_U64(info.populated_pages, after.loaded_pages - before->loaded_pages);
    EXPECT_U64(info.populated_bytes, after.loaded_bytes - before->loaded_bytes);
    EXPECT_U64(info.reused_pages + info.populated_pages, pages_of(w->leased->n_tokens));
    EXPECT_U64(info.later_pages + info.later_bytes, 0);
}

static void acquire(world *w, const step *step)
{
    talk *t = pick(w, step->operand[0]);
    const uint32_t lender = step->operand[1] % N_LENDERS;
    const uint64_t reserved = t->n_tokens + step_u16(step, 2) % (WIDEST + 2);
    const uint32_t n_pages = pages_of(reserved);
    const uint32_t n_missing = n_pages <= w->head_pages ? 0 : n_pages - w->head_pages;
    const kvs_status expected = lease_refusal(w, t, reserved, lender, n_missing);
    kvs_layer_lease_desc desc = {.struct_size = sizeof desc,
                                 .pager = w->head.pager,
                                 .lender = lender == 1   ? w->head.pager
                                           : lender == 2 ? w->trunk.pager
                                                         : NULL,
                                 .seq = t->seq,
                                 .generation = seq_info(t->seq).generation + 1,
                                 .reserved_tokens = reserved};
    kvs_layer_lease *made = NULL;
    uint64_t n_slots = 0;
    EXPECT_OK(kvs_layer_lease_slots(w->head.pager, reserved, &n_slots));
    EXPECT_U64(n_slots, n_missing);
    EXPECT_STATUS(kvs_layer_lease_acquire_populated(&desc, &made), w->lease != NULL ? KVS_EBUSY : KVS_ESTALE);
    desc.generation--;
    const kvs_pager_info before = pager_info(&w->head);
    if (!OUTCOME(&w->fault, kvs_layer_lease_acquire_populated(&desc, &made), expected)) {
        EXPECT(made == NULL);
        EXPECT_U64(pager_info(&w->head).n_slots, before.n_slots);
        return;
    }
    w->lease = made;
    w->leased = t;
    w->reserved = reserved;
    w->lender = lender;
    w->n_held = n_missing;
    w->is_stale = false;
    check_population(w, &before);
}

static void give_back(world *w, bool asks_again)
{
    if (w->lease == NULL) {
        return;
    }
    if (asks_again) {
        kvs_span_plan *plan = NULL;
        EXPECT_OK(kvs_layer_lease_return_wait(w->lease));
        EXPECT_OK(kvs_layer_lease_return_wait(w->lease));
        EXPECT_STATUS(kvs_layer_lease_plan(w->lease, 1, 1, &plan), KVS_ECLOSED);
        EXPECT_OK(kvs_layer_lease_check_integrity(w->lease));
    }
    kvs_layer_lease_release(w->lease);
    w->lease = NULL;
    w->leased = NULL;
    w->n_held = 0;
}

static void plan(world *w, const step *step)
{
    if (w->lease == NULL || w->is_stale || w->leased->n_tokens == 0) {
        return;
    }
    const uint32_t n_rows = (uint32_t)least(1 + step->operand[0] % 3u, w->leased->n_tokens);
    const uint32_t n_pages = pages_of(w->leased->n_tokens);
    uint64_t addresses[MAX_CTX / KVS_PAGE_TOKENS + 1];
    kvs_span_plan *made = NULL;
    EXPECT_OK(kvs_layer_lease_plan(w->lease, lease_info(w).generation, n_rows, &made));
    EXPECT_OK(kvs_span_plan_page_table(made, addresses, n_pages));
    for (uint32_t i = 0; i < n_pages; i++) {
        for (uint32_t j = i + 1; j < n_pages; j++) {
            EXPECT(addresses[i] != addresses[j]);
        }
    }
    kvs_span_plan_release(made);
}

/* ---- pools ---- */

static void place(world *w, const step *step)
{
    const bool is_head = step->operand[0] % 2 != 0;
    const uint32_t choice = step->operand[1] % 9u;
    const uint32_t ring = is_head ? 1 + choice / 3 : 1 + step->operand[1] % 8u;
    const uint32_t pages[] = {is_head ? 2 + choice % 3 : 2, 2};
    const rig *rig = is_head ? &w->head : &w->trunk;
    const kvs_placement wanted = {.struct_size = sizeof wanted,
                                  .n_layers = rig->n_layers,
                                  .resident_pages = pages,
                                  .ring_slots = ring,
                                  .max_rows = WIDEST};
    const bool is_held = is_head ? w->lease != NULL : lends_trunk(w);
    const kvs_status expected = is_held ? KVS_EBUSY : KVS_OK;
    if (is_held) {
        EXPECT_STATUS(kvs_pager_detach(rig->pager), KVS_EBUSY);
    }
    EXPECT_STATUS(kvs_pager_place(rig->pager, &wanted), expected);
    if (is_held) {
        return;
    }
    if (is_head) {
        w->head_pages = pages[0];
        w->head_ring = ring;
    } else {
        w->trunk_ring = ring;
    }
}

/* ---- what always holds ---- */

static void read_talk(rig *rig, const talk *t)
{
    EXPECT_OK(kvs_pager_publish_wait(rig->pager));
    for (uint32_t page = 0; page < pages_of(t->n_tokens); page++) {
        const uint32_t first = page * KVS_PAGE_TOKENS;
        for (uint32_t layer = 0; layer < rig->n_layers; layer++) {
            rig_check_page(rig, t->seq, layer, page, t->tokens + first, (uint32_t)least(t->n_tokens - first, KVS_PAGE_TOKENS));
        }
    }
}

static void read_all(world *w)
{
    read_talk(&w->trunk, &w->said);
    for (uint32_t i = 0; i < w->n_live; i++) {
        read_talk(&w->head, w->live[i]);
    }
}

static void compare(world *w)
{
    const rig *sides[] = {&w->trunk, &w->head};
    for (uint32_t i = 0; i < 2; i++) {
        EXPECT_OK(kvs_arena_check_integrity(sides[i]->arena));
        EXPECT_OK(kvs_cache_check_integrity(sides[i]->cache));
        EXPECT_OK(kvs_pager_check_integrity(sides[i]->pager));
    }
    if (w->lease != NULL) {
        EXPECT_OK(kvs_layer_lease_check_integrity(w->lease));
        EXPECT_U64(lease_info(w).n_held_slots, w->n_held);
    }
    EXPECT_U64(seq_info(w->said.seq).committed_tokens, w->said.n_tokens);
    for (uint32_t i = 0; i < w->n_live; i++) {
        EXPECT_U64(seq_info(w->live[i]->seq).committed_tokens, w->live[i]->n_tokens);
    }
}

static void act(world *w, const step *step)
{
    uint32_t ran = 0;
    switch (step->action) {
    case ACTION_BEGIN:
        if (step->operand[0] == TRUNK_WHO) {
            pass_trunk(w, 1 + (step_u16(step, 1) - 1u) % WIDEST);
        } else {
            pass_head(w, step, 1 + (step_u16(step, 1) - 1u) % WIDEST);
        }
        break;
    case ACTION_TRUNCATE:
        truncate_talk(w, step);
        break;
    case ACTION_FORK:
        fork_talk(w, step);
        break;
    case ACTION_RELEASE:
        release_talk(w, step);
        break;
    case ACTION_LEASE:
        acquire(w, step);
        break;
    case ACTION_GIVE_BACK:
        give_back(w, step->operand[0] % 2 == 0);
        break;
    case ACTION_PLAN:
        plan(w, step);
        break;
    case ACTION_PLACE:
        place(w, step);
        break;
    case ACTION_READ:
        read_all(w);
        break;
    case ACTION_ADVANCE:
        if (w->is_deferred) {
            EXPECT_OK(kvs_device_run_copies(w->device, 1 + step->operand[0] % 9u, &ran));
        }
        break;
    default:
        break;
    }
}

/* ---- life ---- */

static void attach(const rig *rig, const uint32_t *pages, uint32_t ring)
{
    const kvs_placement placement = {.struct_size = sizeof placement,
                                     .n_layers = rig->n_layers,
                                     .resident_pages = pages,
                                     .ring_slots = ring,
                                     .max_rows = WIDEST};
    EXPECT_OK(kvs_pager_attach(rig->pager, rig->pool, &placement));
}

static void open_world(world *w, const step *step)
{
    const uint32_t head = step->operand[3] % 9u;
    w->is_deferred = step->operand[0] % 2 != 0;
    w->random = step->operand[2];
    w->trunk_ring = 1 + step->operand[1] % 8u;
    w->head_pages = 2 + head % 3;
    w->head_ring = 1 + head / 3;
    w->device = script_device(KVS_DEVICE_POISON_RELEASED | KVS_DEVICE_STRICT_HISTORY |
                                  (w->is_deferred ? KVS_DEVICE_DEFERRED : 0u), step->operand[2]);
    rig_open_beside(&w->trunk, w->device, N_LAYERS, TRUNK_SLOTS);
    rig_open_beside(&w->head, w->device, 1, HEAD_SLOTS);
    const uint32_t trunk[] = {2, 2};
    attach(&w->trunk, trunk, w->trunk_ring);
    attach(&w->head, &w->head_pages, w->head_ring);
    EXPECT_OK(kvs_seq_create(w->trunk.cache, MAX_CTX, &w->said.seq));
    EXPECT_OK(kvs_seq_create(w->head.cache, MAX_CTX, &new_talk(w)->seq));
}

/* The lease goes first, between the two, or last. */
static void close_world(world *w, uint32_t order)
{
    kvs_seq *seqs[MAX_HEADS];
    end_open(w, 0);
    read_all(w);
    for (uint32_t i = 0; i < w->n_live; i++) {
        seqs[i] = w->live[i]->seq;
        free(w->live[i]);
    }
    w->leased = NULL;
    if (order % 3 == 0) {
        give_back(w, false);
    }
    if (order % 2 == 0) {
        rig_release(&w->trunk, &w->said.seq, 1, order);
    } else {
        rig_release(&w->head, seqs, w->n_live, order);
    }
    if (order % 3 == 1) {
        give_back(w, false);
    }
    if (order % 2 == 0) {
        rig_release(&w->head, seqs, w->n_live, order);
    } else {
        rig_release(&w->trunk, &w->said.seq, 1, order);
    }
    give_back(w, false);
    script_device_close(w->device);
    free(w);
}

void script_lease(script *script)
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
        if (w->open != NULL) {
            end_open(w, step.action == ACTION_COMMIT ? (uint32_t)least(step_u16(&step, 1), w->open_rows) : w->open_rows);
        }
        const bool strikes = step.action == ACTION_LEASE;
        if (strikes) {
            fault_begin(&w->fault, w->device);
        }
        act(w, &step);
        if (strikes) {
            (void)fault_end(&w->fault, w->device, w->is_deferred);
        }
        compare(w);
    }
    close_world(w, step.action == ACTION_CLOSE ? step.operand[0] : 0);
}
