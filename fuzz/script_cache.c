/* script_cache.c: sequences, shared pages, copy on write, publication, loading, against lists of columns.
 *
 * create (context 2; first: flags, context 2): a sequence. fork (who). append (who, rows 2). commit (who, rows 2). truncate (who,
 * tokens back 2; 65535: beyond the end). release (who). write (who, page, layer, rows 2). read (who): every record. advance
 * (copies - 1): run the queue of a deferred device. close (0: the cache before its sequences).
 * The model knows nothing of extents, which are checked by what they promise: live columns never overlap, neighbours in an
 * extent are adjacent.
 */
#include "script.h"

#include "kvstream/kv.h"

#include <stdlib.h>
#include <string.h>

enum { N_LAYERS = 2, MAX_SEQS = 5, MAX_PAGES = 5, MAX_COLUMNS = 64, MAX_CTX = 1100, MAX_RECORD = 32768 };

static const kvs_kv_layer LAYERS[N_LAYERS] = {
    {.n_kv_heads = 1, .head_dim_k = 32, .head_dim_v = 32, .type_k = KVS_TYPE_Q8_0, .type_v = KVS_TYPE_Q8_0},
    {.n_kv_heads = 1, .head_dim_k = 16, .head_dim_v = 32, .type_k = KVS_TYPE_F16, .type_v = KVS_TYPE_Q8_0},
};

/* One page of every layer. In use while somebody holds it or waits for its rows. */
typedef struct column {
    uint32_t n_holders;
    uint32_t n_waiting;
    uint64_t published;
    uint64_t loading;
    uint32_t loaded;             /* by layer, one bit each */
    uint32_t content[N_LAYERS];  /* seed of the bytes */
    uint64_t seen_id;            /* page_id + 1; 0: not seen yet */
} column;

typedef struct model_seq {
    kvs_seq *seq;
    uint64_t ctx;
    uint64_t committed;
    uint64_t appended;
    column *pages[MAX_PAGES];
    uint32_t n_pages;
    column *source; /* waits to have its rows brought to page source_page */
    uint32_t source_page;
    uint64_t source_rows;
    uint64_t generation;
} model_seq;

typedef struct world {
    kvs_device *device;
    kvs_cache *cache;
    fault fault;
    bool is_deferred;
    uint64_t record_bytes[N_LAYERS];
    column columns[MAX_COLUMNS];
    model_seq seqs[MAX_SEQS];
    uint32_t n_seqs;
    uint32_t n_seeds;
    uint8_t wanted[MAX_RECORD];
    uint8_t found[MAX_RECORD];
} world;

/* ---- the model ---- */

static bool is_used(const column *column)
{
    return column->n_holders + column->n_waiting != 0;
}

static column *new_column(world *w)
{
    for (uint32_t i = 0; i < MAX_COLUMNS; i++) {
        if (!is_used(&w->columns[i])) {
            w->columns[i] = (column){.n_holders = 1};
            return &w->columns[i];
        }
    }
    abort();
}

static bool is_shared(const column *column)
{
    return column->n_holders + column->n_waiting > 1;
}

static uint64_t rows_in(uint64_t page, uint64_t tokens)
{
    const uint64_t begin = page * KVS_PAGE_TOKENS;
    return tokens <= begin ? 0 : least(tokens - begin, KVS_PAGE_TOKENS);
}

static void drop_source(model_seq *s)
{
    if (s->source != NULL) {
        s->source->n_waiting--;
        s->source = NULL;
    }
}

/* Rows that are about to be written are not those that history holds. */
static void forget_rows(model_seq *s)
{
    if (s->n_pages != 0 && !is_shared(s->pages[s->n_pages - 1])) {
        column *last = s->pages[s->n_pages - 1];
        last->published = least(last->published, rows_in(s->n_pages - 1, s->committed));
    }
}

static void model_append(world *w, model_seq *s, uint64_t n_tokens)
{
    forget_rows(s);
    const uint64_t rows = s->committed % KVS_PAGE_TOKENS;
    if (rows != 0 && is_shared(s->pages[s->n_pages - 1])) {
        column *old = s->pages[s->n_pages - 1];
        old->n_holders--;
        old->n_waiting++;
        s->pages[s->n_pages - 1] = new_column(w);
        s->source = old;
        s->source_page = s->n_pages - 1;
        s->source_rows = rows;
    }
    s->appended = s->committed + n_tokens;
    while (s->n_pages * (uint64_t)KVS_PAGE_TOKENS < s->appended) {
        s->pages[s->n_pages++] = new_column(w);
    }
}

static void model_end_at(model_seq *s, uint64_t n_tokens)
{
    s->committed = s->appended = n_tokens;
    while (s->n_pages != 0 && (s->n_pages - 1) * (uint64_t)KVS_PAGE_TOKENS >= n_tokens) {
        s->pages[--s->n_pages]->n_holders--;
    }
    if (s->source != NULL && s->source_page >= s->n_pages) {
        drop_source(s);
    } else if (s->source != NULL && rows_in(s->source_page, n_tokens) <= s->source_rows) {
        s->pages[s->source_page]->n_holders--;
        s->pages[s->source_page] = s->source;
        s->source->n_holders++;
        drop_source(s);
    }
    forget_rows(s);
}

static model_seq *pick(world *w, const step *step)
{
    return &w->seqs[step->operand[0] % w->n_seqs];
}

/* ---- actions ---- */

static void create(world *w, uint32_t ctx)
{
    ctx = ctx % (MAX_CTX + 1);
    if (w->n_seqs == MAX_SEQS) {
        return;
    }
    kvs_seq *seq = NULL;
    if (OUTCOME(&w->fault, kvs_seq_create(w->cache, ctx, &seq), ctx == 0 ? KVS_EINVAL : KVS_OK)) {
        w->seqs[w->n_seqs++] = (model_seq){.seq = seq, .ctx = ctx};
    }
}

static void fork_seq(world *w, const step *step)
{
    model_seq *s = pick(w, step);
    const bool is_open = s->appended != s->committed || s->source != NULL;
    if (!is_open && w->n_seqs == MAX_SEQS) {
        return;
    }
    kvs_seq *made = NULL;
    if (OUTCOME(&w->fault, kvs_seq_fork(s->seq, &made), is_open ? KVS_EBUSY : KVS_OK)) {
        model_seq *child = &w->seqs[w->n_seqs++];
        *child = *s;
        child->seq = made;
        child->generation = 0;
        for (uint32_t i = 0; i < child->n_pages; i++) {
            child->pages[i]->n_holders++;
        }
    }
}

static void append(world *w, const step *step)
{
    model_seq *s = pick(w, step);
    const uint64_t n_tokens = step_u16(step, 1) % (MAX_CTX + 1);
    const kvs_status expected = n_tokens == 0                        ? KVS_EINVAL
                                : s->appended != s->committed        ? KVS_EBUSY
                                : s->committed + n_tokens > s->ctx   ? KVS_ECONTEXT
                                                                     : KVS_OK;
    if (OUTCOME(&w->fault, kvs_seq_append(s->seq, n_tokens), expected)) {
        model_append(w, s, n_tokens);
    }
}

static void commit(world *w, const step *step)
{
    model_seq *s = pick(w, step);
    uint64_t n_tokens = step_u16(step, 1);
    const uint64_t n_open = s->appended - s->committed;
    if (n_tokens > n_open) {
        EXPECT_STATUS(kvs_seq_commit(s->seq, n_tokens), KVS_EINVAL);
        n_tokens = n_open;
    }
    EXPECT_OK(kvs_seq_commit(s->seq, n_tokens));
    model_end_at(s, s->committed + n_tokens);
}

static void truncate_seq(world *w, const step *step)
{
    model_seq *s = pick(w, step);
    const uint64_t back = step_u16(step, 1);
    if (back == UINT16_MAX) {
        EXPECT_STATUS(kvs_seq_truncate(s->seq, s->committed + 1), KVS_EINVAL);
        return;
    }
    const uint64_t n_tokens = s->committed > back ? s->committed - back : 0;
    EXPECT_OK(kvs_seq_truncate(s->seq, n_tokens));
    model_end_at(s, n_tokens);
}

static void release(world *w, const step *step)
{
    if (w->n_seqs <= 1) {
        return;
    }
    model_seq *s = pick(w, step);
    kvs_seq_release(s->seq);
    model_end_at(s, 0);
    drop_source(s);
    w->n_seqs--;
    memmove(s, s + 1, (size_t)(&w->seqs[w->n_seqs] - s) * sizeof *s);
}

static void fill(uint8_t *bytes, uint32_t layer, uint32_t seed, uint64_t n_bytes)
{
    uint32_t state = seed * 2654435761u + layer + 1;
    for (uint64_t i = 0; i < n_bytes; i++) {
        state = state * 1664525u + 1013904223u;
        bytes[i] = (uint8_t)(state >> 24);
    }
}

/* A column whose bytes change is another one, and counts for nothing until all its layers are there. */
static void begin_loading(column *c, uint32_t layer, uint64_t rows)
{
    if (c->loaded == 0) {
        c->seen_id = 0;
    }
    c->published = 0;
    if (c->loading != rows) {
        c->loaded = 0;
    }
    c->loading = rows;
    c->loaded &= ~(1u << layer);
}

static void finish_loading(model_seq *s, uint32_t page, uint32_t layer, uint32_t seed)
{
    column *c = s->pages[page];
    c->content[layer] = seed;
    c->loaded |= 1u << layer;
    if (c->loaded == (1u << N_LAYERS) - 1) {
        c->published = c->loading;
        c->loaded = 0;
        if (s->source != NULL && s->source_page == page) {
            drop_source(s);
        }
    }
}

static void write_page(world *w, const step *step)
{
    model_seq *s = pick(w, step);
    if (s->n_pages == 0) {
        return;
    }
    const uint32_t page = step->operand[1] % s->n_pages;
    const uint32_t layer = step->operand[2] % N_LAYERS;
    const uint64_t rows = step_u16(step, 3) % (KVS_PAGE_TOKENS + 45);
    const bool is_outside = rows == 0 || rows > rows_in(page, s->committed);
    const uint32_t seed = ++w->n_seeds;
    fill(w->wanted, layer, seed, w->record_bytes[layer]);
    const kvs_status expected = is_outside ? KVS_EINVAL : is_shared(s->pages[page]) ? KVS_EBUSY : KVS_OK;
    const bool is_done = OUTCOME(&w->fault, kvs_seq_write_page_wait(s->seq, layer, page, w->wanted, rows), expected);
    if (expected == KVS_OK) {
        begin_loading(s->pages[page], layer, rows);
    }
    if (is_done) {
        finish_loading(s, page, layer, seed);
    }
}

static void read_page(world *w, const model_seq *s, uint32_t page, uint32_t layer)
{
    const column *c = s->pages[page];
    const bool is_there = least(c->published, rows_in(page, s->appended)) != 0;
    const kvs_status expected = is_there ? KVS_OK : KVS_ENOTFOUND;
    if (OUTCOME(&w->fault, kvs_seq_read_page_wait(s->seq, layer, page, w->found), expected)) {
        fill(w->wanted, layer, c->content[layer], w->record_bytes[layer]);
        EXPECT(memcmp(w->found, w->wanted, w->record_bytes[layer]) == 0);
    }
}

static void read_all(world *w, const step *step)
{
    const model_seq *s = pick(w, step);
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        EXPECT_STATUS(kvs_seq_read_page_wait(s->seq, layer, s->n_pages, w->found), KVS_ENOTFOUND);
        for (uint32_t page = 0; page < s->n_pages; page++) {
            read_page(w, s, page, layer);
        }
    }
}

static void advance(world *w, const step *step)
{
    uint32_t ran = 0;
    const kvs_status got = kvs_device_run_copies(w->device, 1 + step->operand[0] % 6u, &ran);
    EXPECT_STATUS(got, w->is_deferred ? KVS_OK : KVS_EINVAL);
    EXPECT_U64(ran, 0); /* every copy is waited for */
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
    case ACTION_APPEND:
        append(w, step);
        break;
    case ACTION_COMMIT:
        commit(w, step);
        break;
    case ACTION_TRUNCATE:
        truncate_seq(w, step);
        break;
    case ACTION_RELEASE:
        release(w, step);
        break;
    case ACTION_WRITE:
        write_page(w, step);
        break;
    case ACTION_READ:
        read_all(w, step);
        break;
    case ACTION_ADVANCE:
        advance(w, step);
        break;
    default:
        break;
    }
}

/* ---- what always holds ---- */

static uint64_t count_columns(const world *w)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < MAX_COLUMNS; i++) {
        n += is_used(&w->columns[i]) ? 1 : 0;
    }
    return n;
}

/* No two columns have one number, and a column keeps its own. */
static void check_id(world *w, column *c, uint64_t id)
{
    if (c->seen_id == 0) {
        for (uint32_t i = 0; i < MAX_COLUMNS; i++) {
            EXPECT(!is_used(&w->columns[i]) || w->columns[i].seen_id != id + 1);
        }
        c->seen_id = id + 1;
    }
    EXPECT_U64(id + 1, c->seen_id);
}

static void check_seq_pages(world *w, model_seq *s)
{
    kvs_page_info before = {.extent_id = UINT64_MAX};
    for (uint32_t page = 0; page < s->n_pages; page++) {
        for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
            kvs_page_info info = {.struct_size = sizeof info};
            EXPECT_OK(kvs_seq_get_page(s->seq, layer, page, &info));
            EXPECT_U64(info.n_holders, s->pages[page]->n_holders);
            EXPECT_U64(info.published_rows, least(s->pages[page]->published, rows_in(page, s->appended)));
            check_id(w, s->pages[page], info.page_id);
            if (layer == 0) {
                EXPECT(info.extent_id != before.extent_id ||
                       info.host_offset_bytes == before.host_offset_bytes + w->record_bytes[0]);
                before = info;
            }
        }
    }
}

static void check_seq(model_seq *s)
{
    kvs_seq_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_seq_get_info(s->seq, &info));
    uint32_t n_shared = 0;
    for (uint32_t i = 0; i < s->n_pages; i++) {
        n_shared += s->pages[i]->n_holders > 1 ? 1 : 0;
    }
    EXPECT_U64(info.ctx_tokens, s->ctx);
    EXPECT_U64(info.committed_tokens, s->committed);
    EXPECT_U64(info.appended_tokens, s->appended);
    EXPECT_U64(info.n_pages, s->n_pages);
    EXPECT_U64(info.n_shared_pages, n_shared);
    EXPECT(info.generation >= s->generation);
    s->generation = info.generation;
}

static void compare(world *w)
{
    EXPECT_OK(kvs_cache_check_integrity(w->cache));
    kvs_cache_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_cache_get_info(w->cache, &info));
    EXPECT_U64(info.n_sequences, w->n_seqs);
    EXPECT_U64(info.n_pages, count_columns(w));
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        check_seq(&w->seqs[i]);
        check_seq_pages(w, &w->seqs[i]);
    }
}

/* ---- life ---- */

static void open_world(world *w, const step *step)
{
    static const uint32_t flags[] = {0, KVS_DEVICE_DEFERRED, KVS_DEVICE_STRICT_HISTORY};
    w->is_deferred = step->operand[0] % 3 == 1;
    w->device = script_device(flags[step->operand[0] % 3], 0);
    EXPECT_OK(kvs_cache_create(w->device, LAYERS, N_LAYERS, &w->cache));
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        kvs_record_info info = {.struct_size = sizeof info};
        EXPECT_OK(kvs_record_layout(&LAYERS[layer], &info));
        EXPECT(info.record_bytes <= MAX_RECORD);
        w->record_bytes[layer] = info.record_bytes;
    }
    const uint32_t ctx = step_u16(step, 1);
    create(w, ctx % (MAX_CTX + 1) == 0 ? MAX_CTX : ctx);
}

void script_cache(script *script)
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
        fault_begin(&w->fault, w->device);
        act(w, &step);
        (void)fault_end(&w->fault, w->device, w->is_deferred);
        compare(w);
    }
    const bool is_cache_first = step.action == ACTION_CLOSE && step.operand[0] % 2 == 0;
    if (is_cache_first) {
        kvs_cache_release(w->cache);
    }
    while (w->n_seqs != 0) {
        kvs_seq_release(w->seqs[--w->n_seqs].seq);
    }
    if (!is_cache_first) {
        kvs_cache_release(w->cache);
    }
    script_device_close(w->device);
    free(w);
}
