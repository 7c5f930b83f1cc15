/* test_state.c: the laws of state.h that need no arithmetic: refusals, what belongs to whom, which side is read and written,
 * memory that runs out, the trace device. Passes are opened by hand. */
#include "state_scene.h"

#include "kvstream/trace.h"

/* ---- creation ---- */

static void test_creation_refuses(void)
{
    scene *s = open_scene(rig_device(0, 0));
    kvs_state *state = NULL;
    uint64_t bytes;
    CHECK_STATUS(kvs_state_create(NULL, &s->desc, &state), KVS_EINVAL);
    CHECK_STATUS(kvs_state_create(s->device, &s->desc, NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_state_create(s->device, NULL, &state), KVS_EINVAL);
    CHECK_STATUS(kvs_state_bytes(NULL, &s->desc, &bytes), KVS_EINVAL);
    CHECK_STATUS(kvs_state_bytes(s->device, &s->desc, NULL), KVS_EINVAL);
    const kvs_state_desc good = s->desc;
    const uint32_t bad_rows[] = {0, 65537}, bad_layers[] = {0, 4097};
    for (int i = 0; i < 2; i++) {
        s->desc.log_rows = bad_rows[i];
        CHECK_STATUS(kvs_state_bytes(s->device, &s->desc, &bytes), KVS_EINVAL);
        s->desc = good;
        s->desc.n_layers = bad_layers[i];
        CHECK_STATUS(kvs_state_bytes(s->device, &s->desc, &bytes), KVS_EINVAL);
        s->desc = good;
    }
    const kvs_delta_layer layer = s->layers[1];
    uint32_t *sizes[] = {&s->layers[1].n_key_heads, &s->layers[1].n_value_heads, &s->layers[1].head_dim,
                         &s->layers[1].conv_width};
    for (int i = 0; i < 4; i++) {
        *sizes[i] = 3;
        CHECK_STATUS(kvs_state_create(s->device, &s->desc, &state), KVS_EINVAL);
        s->layers[1] = layer;
    }
    s->layers[1].norm_eps = 0.0f;
    CHECK_STATUS(kvs_state_create(s->device, &s->desc, &state), KVS_EINVAL);
    s->layers[1] = layer;
    s->layers[1].conv = NULL;
    CHECK_STATUS(kvs_state_create(s->device, &s->desc, &state), KVS_EINVAL);
    s->layers[1].conv = s->weights[1];
    CHECK_STATUS(kvs_state_create(s->device, &s->desc, &state), KVS_EINVAL);
    s->layers[1] = layer;
    kvs_state_release(NULL);
    close_scene(s);
}

static void test_a_declared_weight_can_be_measured_but_not_run(void)
{
    scene *s = open_scene(rig_device(0, 0));
    kvs_weight *declared = rows_of(s->device, NULL, HEADS, 1);
    kvs_state *state = NULL;
    uint64_t bytes = 0;
    s->layers[1].decay = declared;
    CHECK_OK(kvs_state_bytes(s->device, &s->desc, &bytes));
    CHECK_U64(bytes, info_of(s->state).device_bytes);
    CHECK_STATUS(kvs_state_create(s->device, &s->desc, &state), KVS_EINVAL);
    kvs_weight_release(declared);
    close_scene(s);
}

static int refuse_at(void *user, int point, uint64_t index)
{
    (void)index;
    uint64_t *left = user;
    return point == KVS_HOOK_ALLOC && (*left)-- == 0 ? KVS_ENOMEM : 0;
}

static void test_without_memory_nothing_is_left(void)
{
    scene *s = open_scene(rig_device(0, 0));
    kvs_state *state = NULL;
    const kvs_device_info before = rig_info(s->device);
    uint64_t n_failures = 0;
    for (uint64_t at = 0; state == NULL && at < 10; at++) {
        uint64_t left = at;
        CHECK_OK(kvs_device_set_hook(s->device, refuse_at, &left));
        const kvs_status status = kvs_state_create(s->device, &s->desc, &state);
        CHECK_OK(kvs_device_set_hook(s->device, NULL, NULL));
        if (state == NULL) {
            CHECK_STATUS(status, KVS_ENOMEM);
            CHECK_U64(rig_info(s->device).live_objects, before.live_objects);
            CHECK_U64(rig_info(s->device).device_bytes, before.device_bytes);
            n_failures++;
        }
    }
    CHECK(n_failures >= 2);
    kvs_state_release(state);
    CHECK_U64(rig_info(s->device).device_bytes, before.device_bytes);
    close_scene(s);
}

static void test_a_state_takes_the_bytes_it_says(void)
{
    scene *s = open_scene(rig_device(0, 0));
    const uint64_t before = rig_info(s->device).device_bytes;
    kvs_state *state = NULL;
    uint64_t bytes = 0;
    CHECK_OK(kvs_state_bytes(s->device, &s->desc, &bytes));
    CHECK_OK(kvs_state_create(s->device, &s->desc, &state));
    CHECK_U64(rig_info(s->device).device_bytes - before, bytes);
    const kvs_state_info info = info_of(state);
    CHECK(info.n_layers == LAYERS && info.log_rows == LOG_ROWS && info.position == 0 && info.seq_id == 0);
    const uint64_t row = sizeof(float) * (CHANNELS + 2 * HEADS);
    const uint64_t side = sizeof(float) * (HEADS * DIM * DIM + CHANNELS * (TAPS - 1)) + LOG_ROWS * row;
    CHECK(bytes >= 2 * LAYERS * side);
    kvs_state_release(state);
    close_scene(s);
}

/* ---- passes ---- */

static void test_a_pass_never_writes_what_it_reads(void)
{
    scene *s = open_scene(rig_device(0, 0));
    const float *matrix = NULL, *log = NULL;
    for (uint32_t i = 0; i < 6; i++) {
        const kvs_delta_view *views = NULL;
        CHECK_OK(open_pass(s, 3, true, &views));
        CHECK(views[1].matrix_in != views[1].matrix_out && views[1].conv_in != views[1].conv_out);
        CHECK(views[1].log_in != views[1].log_out);
        CHECK(i == 0 || (views[1].matrix_in == matrix && views[1].log_in == log));
        const bool is_kept = i % 2 == 0;
        matrix = is_kept ? views[1].matrix_out : views[1].matrix_in;
        log = is_kept ? views[1].log_out : views[1].log_in;
        commit(s, 3, is_kept ? 2 : 0);
        CHECK_OK(kvs_state_accept(s->state, s->seq, is_kept ? 2 : 0));
        const kvs_state_info info = info_of(s->state);
        CHECK(info.pending_rows == 2 && info.position == 2 * (i / 2 + 1) && info.folded_tokens == info.position - 2);
    }
    close_scene(s);
}

static void test_chunks_fold_what_is_pending(void)
{
    scene *s = open_scene(rig_device(0, 0));
    take(s, 4, true, 3, 0.0f);
    take(s, 500, false, 500, 0.0f);
    const kvs_state_info info = info_of(s->state);
    CHECK(info.position == 503 && info.folded_tokens == 503 && info.pending_rows == 0);
    CHECK_OK(kvs_state_check_integrity(s->state));
    close_scene(s);
}

static void test_opening_refuses(void)
{
    scene *s = open_scene(rig_device(0, 0));
    const kvs_delta_view *views = NULL;
    const kvs_pass_view pass = pass_of(s, 2);
    CHECK_STATUS(kvs_state_open_pass(s->state, &pass, s->layers, 1, true, &views), KVS_EINVAL);
    kvs_delta_layer layers[LAYERS] = {s->layers[0], s->layers[1]};
    layers[1].norm_eps = 2e-6f;
    CHECK_STATUS(kvs_state_open_pass(s->state, &pass, layers, LAYERS, true, &views), KVS_EINVAL);
    CHECK_STATUS(open_pass(s, LOG_ROWS + 1, true, &views), KVS_EINVAL);
    kvs_pass_view foreign = pass;
    foreign.seq_id++;
    CHECK_STATUS(kvs_state_open_pass(s->state, &foreign, s->layers, LAYERS, true, &views), KVS_ESTALE);
    foreign = pass;
    foreign.first_token++;
    CHECK_STATUS(kvs_state_open_pass(s->state, &foreign, s->layers, LAYERS, true, &views), KVS_ESTALE);
    foreign = pass;
    foreign.n_rewrites++;
    CHECK_STATUS(kvs_state_open_pass(s->state, &foreign, s->layers, LAYERS, true, &views), KVS_ESTALE);
    CHECK(views == NULL && info_of(s->state).open_rows == 0);
    CHECK_OK(open_pass(s, LOG_ROWS, true, &views));
    CHECK_U64(info_of(s->state).open_rows, LOG_ROWS);
    CHECK_STATUS(open_pass(s, 1, true, &views), KVS_EBUSY);
    CHECK_STATUS(kvs_state_attach(s->state, s->seq), KVS_EBUSY);
    CHECK_STATUS(kvs_state_truncate(s->state, s->seq, 0), KVS_EBUSY);
    CHECK_STATUS(kvs_state_fold(s->state), KVS_EBUSY);
    CHECK_STATUS(kvs_state_accept(s->state, s->other, 0), KVS_ESTALE);
    CHECK_U64(info_of(s->state).open_rows, LOG_ROWS);
    CHECK_OK(kvs_state_accept(s->state, s->seq, 0));
    close_scene(s);
}

static void test_accepting_refuses_and_gives_the_pass_up(void)
{
    scene *s = open_scene(rig_device(0, 0));
    const kvs_delta_view *views = NULL;
    const uint64_t generation = info_of(s->state).generation;
    CHECK_STATUS(kvs_state_accept(NULL, s->seq, 0), KVS_EINVAL);
    CHECK_STATUS(kvs_state_accept(s->state, NULL, 0), KVS_EINVAL);
    CHECK_OK(kvs_state_accept(s->state, s->other, 0)); /* nothing is open */
    CHECK_STATUS(kvs_state_accept(s->state, s->seq, 1), KVS_EBUSY);
    const struct {
        uint32_t n_rows, n_accepted;
        bool is_logged;
    } wrong[] = {{3, 4, true}, {3, 2, false}, {3, 3, true}, {3, 3, false}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK_OK(open_pass(s, wrong[i].n_rows, wrong[i].is_logged, &views));
        CHECK_STATUS(kvs_state_accept(s->state, s->seq, wrong[i].n_accepted), KVS_EINVAL); /* nothing was committed */
        CHECK(info_of(s->state).open_rows == 0 && info_of(s->state).position == 0);
    }
    CHECK_OK(open_pass(s, 3, true, &views));
    commit(s, 3, 2);
    CHECK_OK(kvs_state_accept(s->state, s->seq, 0)); /* given up, though the sequence has gone on alone */
    CHECK_STATUS(open_pass(s, 1, true, &views), KVS_ESTALE);
    CHECK_OK(kvs_seq_truncate(s->seq, 0));
    CHECK_OK(kvs_state_truncate(s->state, s->seq, 0));
    CHECK_OK(open_pass(s, 1, true, &views));
    CHECK_OK(kvs_state_accept(s->state, s->seq, 0));
    CHECK_U64(info_of(s->state).generation, generation + 1); /* of the truncation alone */
    close_scene(s);
}

static void test_truncation_reaches_the_log_and_no_further(void)
{
    scene *s = open_scene(rig_device(0, 0));
    take(s, 5, true, 5, 0.0f);
    take(s, 6, true, 4, 0.0f); /* 5 folded, 4 pending */
    CHECK_STATUS(kvs_state_truncate(s->state, s->seq, 8), KVS_EINVAL); /* the sequence still has 9 */
    CHECK_STATUS(kvs_state_truncate(s->state, s->other, 0), KVS_ESTALE);
    CHECK_OK(kvs_seq_truncate(s->seq, 6));
    const kvs_delta_view *views = NULL;
    CHECK_STATUS(open_pass(s, 1, true, &views), KVS_ESTALE); /* truncated without its state */
    CHECK_OK(kvs_state_truncate(s->state, s->seq, 6));
    CHECK(info_of(s->state).position == 6 && info_of(s->state).pending_rows == 1);
    CHECK_OK(open_pass(s, 1, true, &views));
    CHECK(views[0].n_pending == 1);
    CHECK_OK(kvs_state_accept(s->state, s->seq, 0));
    CHECK_OK(kvs_seq_truncate(s->seq, 4));
    const kvs_state_info before = info_of(s->state);
    CHECK_STATUS(kvs_state_truncate(s->state, s->seq, 4), KVS_ENOTFOUND);
    const kvs_state_info after = info_of(s->state);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    CHECK_OK(kvs_state_clear(s->state));
    CHECK_STATUS(kvs_state_attach(s->state, s->seq), KVS_EINVAL); /* position 0, 4 tokens */
    CHECK_OK(kvs_seq_truncate(s->seq, 0));
    CHECK_OK(kvs_state_attach(s->state, s->seq));
    close_scene(s);
}

static void test_clearing_leaves_zeros_of_no_sequence(void)
{
    scene *s = open_scene(rig_device(0, 0));
    const kvs_delta_view *views = NULL;
    uint64_t n_bytes;
    uint8_t *fresh = save(s->state, &n_bytes);
    take(s, 3, true, 3, 1.5f);
    CHECK(!saves(s->state, fresh, n_bytes));
    CHECK_OK(open_pass(s, 2, true, &views));
    CHECK_OK(kvs_state_clear(s->state));
    CHECK(saves(s->state, fresh, n_bytes));
    CHECK(info_of(s->state).seq_id == 0 && info_of(s->state).open_rows == 0);
    CHECK_STATUS(kvs_state_clear(NULL), KVS_EINVAL);
    free(fresh);
    close_scene(s);
}

/* ---- integrity, trace ---- */

static void test_integrity_finds_what_cannot_be(void)
{
    scene *s = open_scene(rig_device(0, 0));
    take(s, 2, true, 2, 0.0f);
    CHECK_OK(kvs_state_check_integrity(s->state));
    const kvs_state good = *s->state;
    s->state->n_pending = LOG_ROWS + 1;
    CHECK_STATUS(kvs_state_check_integrity(s->state), KVS_ECORRUPT);
    *s->state = good;
    s->state->bank = 2;
    CHECK_STATUS(kvs_state_check_integrity(s->state), KVS_ECORRUPT);
    *s->state = good;
    s->state->seq_id = 0;
    s->state->n_open = 1;
    CHECK_STATUS(kvs_state_check_integrity(s->state), KVS_ECORRUPT);
    *s->state = good;
    s->state->address += 64;
    CHECK_STATUS(kvs_state_check_integrity(s->state), KVS_ECORRUPT);
    *s->state = good;
    s->state->layers[1].log[1] += 64;
    CHECK_STATUS(kvs_state_check_integrity(s->state), KVS_ECORRUPT);
    s->state->layers[1].log[1] -= 64;
    CHECK_STATUS(kvs_state_check_integrity(NULL), KVS_EINVAL);
    close_scene(s);
}

static void test_states_work_where_there_are_no_bytes(void)
{
    const kvs_device_desc desc = {.struct_size = sizeof desc, .backend = KVS_BACKEND_TRACE};
    kvs_device *device = NULL;
    CHECK_OK(kvs_device_create(&desc, &device));
    scene *s = open_scene(device);
    kvs_state *to = NULL;
    CHECK_OK(kvs_state_create(device, &s->desc, &to));
    uint64_t n_bytes;
    uint8_t *image = save(s->state, &n_bytes);
    CHECK_OK(kvs_state_load(to, image, n_bytes));
    CHECK_OK(kvs_state_copy(s->state, to));
    CHECK_OK(kvs_state_clear(to));
    kvs_trace_report report = {.struct_size = sizeof report};
    CHECK_OK(kvs_trace_get_report(device, &report));
    CHECK_U64(report.n_hazards, 0);
    /* Rows that were accepted without a pass having written them: folding reads what nobody has written. */
    take(s, 2, true, 2, 0.0f);
    CHECK_OK(kvs_state_fold(s->state));
    CHECK_OK(kvs_trace_get_report(device, &report));
    CHECK(report.n_hazards != 0);
    char text[1024];
    CHECK_OK(kvs_trace_next_hazard(device, text, sizeof text));
    CHECK(strstr(text, "delta") != NULL && strstr(text, "recurrent layer 0") != NULL);
    CHECK(strstr(text, "as state of a recurrent layer, which nobody has written") != NULL);
    free(image);
    kvs_state_release(to);
    close_scene(s);
}

int main(void)
{
    test_creation_refuses();
    test_a_declared_weight_can_be_measured_but_not_run();
    test_without_memory_nothing_is_left();
    test_a_state_takes_the_bytes_it_says();
    test_a_pass_never_writes_what_it_reads();
    test_chunks_fold_what_is_pending();
    test_opening_refuses();
    test_accepting_refuses_and_gives_the_pass_up();
    test_truncation_reaches_the_log_and_no_further();
    test_clearing_leaves_zeros_of_no_sequence();
    test_integrity_finds_what_cannot_be();
    test_states_work_where_there_are_no_bytes();
    return check_finish();
}
