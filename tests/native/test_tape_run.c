/* Tapes without Python: binding, passes, epochs, release orders. */
#include "tape_scene.h"

#include <math.h>

/* A runnable tape: row = 2 * table[token], then the requested rows. */
typedef struct player {
    kvs_device *device;
    kvs_arena *arena;
    kvs_lease *lease;
    kvs_weight *weight;
    kvs_tape *tape;
    kvs_binding *binding;
    uint64_t workspace_bytes;
} player;

static kvs_arena *make_arena(kvs_device *device, uint64_t bytes)
{
    kvs_arena *arena = NULL;
    kvs_region region = {.struct_size = sizeof region, .flags = KVS_REGION_PERSISTENT, .id = WORKSPACE, .size_bytes = bytes};
    CHECK_OK(kvs_arena_create(device, bytes + 4096, 64, &arena));
    CHECK_OK(kvs_arena_begin(arena, 0));
    CHECK_OK(kvs_arena_reserve(arena, &region));
    CHECK_OK(kvs_arena_commit(arena));
    return arena;
}

static void open_player(player *p)
{
    *p = (player){.device = rig_device(0, 0)};
    p->weight = rows_weight(p->device);
    CHECK_OK(kvs_tape_create(p->device, MAX_ROWS, 2, &p->tape));
    uint32_t id;
    CHECK_OK(kvs_tape_add_weight(p->tape, p->weight, &id));
    const uint32_t a = work(p->tape);
    const uint32_t sum = work(p->tape);
    const uint32_t out = tensor(p->tape, KVS_TENSOR_OUTPUT, KVS_ROWS_OUT, COLS);
    add_embed(p->tape, a);
    add_embed(p->tape, sum);
    add_binary(p->tape, KVS_OP_ADD, a, sum);
    add_binary(p->tape, KVS_OP_GATHER, sum, out);
    CHECK_OK(kvs_tape_seal(p->tape));
    kvs_tape_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_tape_get_info(p->tape, &info));
    p->workspace_bytes = info.workspace_bytes;
    p->arena = make_arena(p->device, info.workspace_bytes);
    CHECK_OK(kvs_arena_acquire(p->arena, WORKSPACE, &p->lease));
    CHECK_OK(kvs_tape_bind(p->tape, p->arena, p->lease, NULL, &p->binding));
}

static void close_player(player *p)
{
    kvs_binding_release(p->binding);
    kvs_lease_release(p->lease);
    kvs_arena_release(p->arena);
    kvs_tape_release(p->tape);
    kvs_weight_release(p->weight);
    rig_close(p->device);
}

static const uint32_t tokens[] = {3, 0, 7, 1, 2};
static const uint32_t wanted[] = {0, 2};
static float result[2 * COLS];
static float *const outputs[] = {result};

static kvs_pass_desc pass_of(uint32_t n_rows, uint32_t n_out_rows)
{
    return (kvs_pass_desc){.struct_size = sizeof(kvs_pass_desc),
                           .n_rows = n_rows,
                           .tokens = tokens,
                           .n_out_rows = n_out_rows,
                           .n_outputs = 1,
                           .out_rows = wanted,
                           .outputs = outputs};
}

static void test_a_pass_gives_the_rows_that_were_asked_for(void)
{
    player p;
    open_player(&p);
    const kvs_pass_desc pass = pass_of(3, 2);
    memset(result, 0xff, sizeof result);
    CHECK_OK(kvs_binding_run(p.binding, &pass));
    for (uint32_t col = 0; col < COLS; col++) {
        CHECK(result[col] == 2.0F * table[3 * COLS + col]);
        CHECK(result[COLS + col] == 2.0F * table[7 * COLS + col]);
    }
    close_player(&p);
}

static void test_a_pass_begins_and_ends_in_two_calls(void)
{
    player p;
    open_player(&p);
    const kvs_pass_desc pass = pass_of(3, 2);
    memset(result, 0xff, sizeof result);
    CHECK(kvs_binding_end(p.binding) == KVS_EBUSY);
    CHECK_OK(kvs_binding_abort(p.binding));
    CHECK_OK(kvs_binding_begin(p.binding, &pass));
    CHECK(kvs_binding_begin(p.binding, &pass) == KVS_EBUSY);
    CHECK(kvs_binding_run(p.binding, &pass) == KVS_EBUSY);
    CHECK_OK(kvs_binding_end(p.binding));
    CHECK(result[0] == 2.0F * table[3 * COLS] && result[COLS] == 2.0F * table[7 * COLS]);
    CHECK(kvs_binding_end(p.binding) == KVS_EBUSY);
    /* One that is given up may be begun again, and where the beginning fails there is no end. */
    CHECK_OK(kvs_binding_begin(p.binding, &pass));
    CHECK_OK(kvs_binding_abort(p.binding));
    CHECK_OK(kvs_binding_abort(p.binding));
    const kvs_pass_desc wide = pass_of(MAX_ROWS + 1, 2);
    CHECK(kvs_binding_begin(p.binding, &wide) == KVS_EINVAL);
    CHECK(kvs_binding_end(p.binding) == KVS_EBUSY);
    CHECK_OK(kvs_binding_run(p.binding, &pass));
    CHECK(kvs_binding_begin(NULL, &pass) == KVS_EINVAL && kvs_binding_begin(p.binding, NULL) == KVS_EINVAL);
    CHECK(kvs_binding_end(NULL) == KVS_EINVAL && kvs_binding_abort(NULL) == KVS_EINVAL);
    CHECK_OK(kvs_binding_begin(p.binding, &pass)); /* and released so */
    close_player(&p);
}

static int refuse_operation(void *user, int point, uint64_t index)
{
    (void)index;
    (void)user;
    return point == KVS_HOOK_OP ? KVS_EIO : 0;
}

static void test_a_pass_refuses(void)
{
    player p;
    open_player(&p);
    kvs_pass_desc pass = pass_of(3, 2);
    CHECK_STATUS(kvs_binding_run(NULL, &pass), KVS_EINVAL);
    CHECK_STATUS(kvs_binding_run(p.binding, NULL), KVS_EINVAL);
    float row[1];
    uint64_t number = 7;
    CHECK_STATUS(kvs_binding_get_pass(NULL, &number), KVS_EINVAL);
    CHECK_STATUS(kvs_binding_get_pass(p.binding, NULL), KVS_EINVAL);
    CHECK_OK(kvs_binding_get_pass(p.binding, &number));
    CHECK(number == 0);
    CHECK_STATUS(kvs_binding_read_output(NULL, 1, 0, 0, 1, row), KVS_EINVAL);
    CHECK_STATUS(kvs_binding_read_output(p.binding, 1, 0, 0, 1, NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_binding_read_output(p.binding, 1, 0, 0, 1, row), KVS_EUNSUPPORTED); /* the caller has all outputs */
    pass.struct_size = 8;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    const struct {
        uint32_t rows, out_rows;
    } sizes[] = {{0, 0}, {MAX_ROWS + 1, 0}, {3, 3}, {2, 2}};
    for (int i = 0; i < 4; i++) {
        pass = pass_of(sizes[i].rows, sizes[i].out_rows);
        CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    }
    pass = pass_of(3, 2);
    pass.tokens = NULL;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    pass = pass_of(3, 2);
    pass.out_rows = NULL;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    const uint32_t falling[] = {2, 0};
    pass.out_rows = falling;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    pass = pass_of(3, 2);
    pass.outputs = NULL;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    pass = pass_of(3, 2);
    pass.n_outputs = 2;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    const uint32_t foreign[] = {0, N_VOCAB, 0};
    pass = pass_of(3, 2);
    pass.tokens = foreign;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    const uint32_t stop = 1;
    pass = pass_of(3, 2);
    pass.cancel = &stop;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_ECANCELLED);
    pass.cancel = NULL;
    CHECK_OK(kvs_device_set_hook(p.device, refuse_operation, NULL));
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EIO);
    CHECK_OK(kvs_device_set_hook(p.device, NULL, NULL));
    CHECK_OK(kvs_binding_run(p.binding, &pass));
    close_player(&p);
}

/* out = table[token] + the row that the pass brings */
static void test_a_pass_reads_the_rows_that_it_is_given(void)
{
    player p = {.device = rig_device(0, 0)};
    p.weight = rows_weight(p.device);
    CHECK_OK(kvs_tape_create(p.device, MAX_ROWS, 0, &p.tape));
    uint32_t id;
    CHECK_OK(kvs_tape_add_weight(p.tape, p.weight, &id));
    const uint32_t given = tensor(p.tape, KVS_TENSOR_INPUT, KVS_ROWS_PASS, COLS);
    const uint32_t out = tensor(p.tape, KVS_TENSOR_OUTPUT, KVS_ROWS_PASS, COLS);
    const kvs_tensor_desc wanted_rows = {
        .struct_size = sizeof wanted_rows, .kind = KVS_TENSOR_INPUT, .rows = KVS_ROWS_OUT, .cols = COLS};
    CHECK_STATUS(kvs_tape_add_tensor(p.tape, &wanted_rows, &id), KVS_EINVAL);
    add_embed(p.tape, out);
    add_binary(p.tape, KVS_OP_ADD, given, out);
    CHECK_OK(kvs_tape_seal(p.tape));
    kvs_tape_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_tape_get_info(p.tape, &info));
    p.arena = make_arena(p.device, info.workspace_bytes + 64);
    CHECK_OK(kvs_arena_acquire(p.arena, WORKSPACE, &p.lease));
    CHECK_OK(kvs_tape_bind(p.tape, p.arena, p.lease, NULL, &p.binding));
    float rows[2 * COLS];
    for (uint32_t i = 0; i < 2 * COLS; i++) {
        rows[i] = 1000.0F + (float)i;
    }
    const float *inputs[] = {rows};
    kvs_pass_desc pass = pass_of(2, 0);
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL); /* none given */
    pass.n_inputs = 1;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    pass.inputs = inputs;
    CHECK_OK(kvs_binding_run(p.binding, &pass));
    for (uint32_t col = 0; col < COLS; col++) {
        CHECK(result[col] == table[3 * COLS + col] + rows[col]);
        CHECK(result[COLS + col] == table[col] + rows[COLS + col]);
    }
    inputs[0] = NULL;
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_EINVAL);
    close_player(&p);
}

static void test_an_input_is_not_written(void)
{
    kvs_device *device = rig_device(0, 0);
    kvs_weight *weight = rows_weight(device);
    kvs_tape *tape = NULL;
    CHECK_OK(kvs_tape_create(device, MAX_ROWS, 0, &tape));
    uint32_t id;
    CHECK_OK(kvs_tape_add_weight(tape, weight, &id));
    const uint32_t given = tensor(tape, KVS_TENSOR_INPUT, KVS_ROWS_PASS, COLS);
    const uint32_t a = work(tape);
    add_embed(tape, a);
    add_binary(tape, KVS_OP_ADD, a, given);
    CHECK_STATUS(kvs_tape_seal(tape), KVS_EINVAL);
    kvs_tape_release(tape);
    kvs_weight_release(weight);
    rig_close(device);
}

static void test_a_binding_of_an_old_epoch_is_stale(void)
{
    player p;
    open_player(&p);
    const kvs_pass_desc pass = pass_of(3, 2);
    kvs_region region = {.struct_size = sizeof region, .id = OTHER, .size_bytes = 64};
    CHECK_OK(kvs_arena_begin(p.arena, KVS_BEGIN_KEEP_PERSISTENT));
    CHECK_OK(kvs_arena_reserve(p.arena, &region));
    CHECK_OK(kvs_binding_run(p.binding, &pass)); /* staged is not committed */
    CHECK_OK(kvs_arena_commit(p.arena));
    CHECK_STATUS(kvs_binding_run(p.binding, &pass), KVS_ESTALE);
    kvs_binding_release(p.binding);
    CHECK_OK(kvs_tape_bind(p.tape, p.arena, p.lease, NULL, &p.binding));
    CHECK_OK(kvs_binding_run(p.binding, &pass));
    close_player(&p);
}

static void test_bind_refuses(void)
{
    player p;
    open_player(&p);
    kvs_binding *binding = NULL;
    CHECK_STATUS(kvs_tape_bind(NULL, p.arena, p.lease, NULL, &binding), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_bind(p.tape, NULL, p.lease, NULL, &binding), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_bind(p.tape, p.arena, NULL, NULL, &binding), KVS_EINVAL);
    CHECK_STATUS(kvs_tape_bind(p.tape, p.arena, p.lease, NULL, NULL), KVS_EINVAL);
    kvs_arena *small = make_arena(p.device, p.workspace_bytes - 64);
    kvs_lease *lease = NULL;
    CHECK_OK(kvs_arena_acquire(small, WORKSPACE, &lease));
    CHECK_STATUS(kvs_tape_bind(p.tape, p.arena, lease, NULL, &binding), KVS_EINVAL); /* another arena's */
    CHECK_STATUS(kvs_tape_bind(p.tape, small, lease, NULL, &binding), KVS_ENOSPACE);
    kvs_lease_release(lease);
    kvs_arena_release(small);
    kvs_device *device = rig_device(0, 0);
    kvs_arena *foreign = make_arena(device, p.workspace_bytes);
    CHECK_OK(kvs_arena_acquire(foreign, WORKSPACE, &lease));
    CHECK_STATUS(kvs_tape_bind(p.tape, foreign, lease, NULL, &binding), KVS_EINVAL);
    kvs_lease_release(lease);
    kvs_arena_release(foreign);
    rig_close(device);
    kvs_tape *other = NULL;
    CHECK_OK(kvs_tape_create(p.device, 1, 1, &other));
    CHECK_STATUS(kvs_tape_bind(other, p.arena, p.lease, NULL, &binding), KVS_EINVAL); /* not sealed */
    for (uint32_t layout = KVS_WEIGHT_PANELS; layout <= KVS_WEIGHT_ROWS; layout++) {
        kvs_weight *declared = NULL;
        uint32_t id;
        CHECK_OK(kvs_weight_create(p.device, KVS_TYPE_F32, COLS, N_VOCAB, NULL, layout, &declared));
        CHECK_OK(kvs_tape_add_weight(other, declared, &id));
        kvs_weight_release(declared);
    }
    kvs_op_desc op = op_of(KVS_OP_EMBED);
    op.weights[0] = 1;
    op.out[0] = work(other);
    CHECK_OK(kvs_tape_add_op(other, &op));
    CHECK_OK(kvs_tape_seal(other));
    CHECK_STATUS(kvs_tape_bind(other, p.arena, p.lease, NULL, &binding), KVS_EINVAL); /* declared only */
    kvs_tape_release(other);
    uint64_t left = 0;
    const uint64_t before = rig_info(p.device).live_objects;
    CHECK_OK(kvs_device_set_hook(p.device, refuse_allocation, &left));
    CHECK_STATUS(kvs_tape_bind(p.tape, p.arena, p.lease, NULL, &binding), KVS_ENOMEM);
    CHECK_OK(kvs_device_set_hook(p.device, NULL, NULL));
    CHECK_U64(rig_info(p.device).live_objects, before);
    close_player(&p);
}

static void test_attention_wants_a_pager_of_its_layers(void)
{
    bench b;
    open_bench(&b);
    add_embed(b.tape, b.a);
    add_embed(b.tape, b.b);
    add_layer_op(b.tape, KVS_OP_KV_WRITE, 0, b.a, b.b);
    CHECK_OK(kvs_tape_seal(b.tape));
    kvs_tape_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_tape_get_info(b.tape, &info));
    kvs_arena *arena = make_arena(b.device, info.workspace_bytes);
    kvs_lease *lease = NULL;
    kvs_binding *binding = NULL;
    CHECK_OK(kvs_arena_acquire(arena, WORKSPACE, &lease));
    CHECK_STATUS(kvs_tape_bind(b.tape, arena, lease, NULL, &binding), KVS_EINVAL);
    kvs_kv_layer others[] = {kv, kv};
    others[0].head_dim_k = 16;
    for (uint32_t i = 0; i < 2; i++) { /* another geometry; another number */
        others[0] = i == 0 ? others[0] : kv;
        kvs_cache *cache = NULL;
        kvs_pager *pager = NULL;
        CHECK_OK(kvs_cache_create(b.device, others, i + 1, &cache));
        CHECK_OK(kvs_pager_create(cache, &pager));
        CHECK_STATUS(kvs_tape_bind(b.tape, arena, lease, pager, &binding), KVS_EINVAL);
        kvs_pager_release(pager);
        kvs_cache_release(cache);
    }
    kvs_lease_release(lease);
    kvs_arena_release(arena);
    close_bench(&b);
}

static void release_one(player *p, int which)
{
    switch (which) {
    case 0: kvs_weight_release(p->weight); break;
    case 1: kvs_tape_release(p->tape); break;
    case 2: kvs_lease_release(p->lease); break;
    case 3: kvs_arena_release(p->arena); break;
    default: kvs_binding_release(p->binding); break;
    }
}

static void test_any_order_of_release_is_safe(void)
{
    for (int code = 0; code < 3125; code++) {
        int order[5];
        unsigned seen = 0;
        for (int i = 0, rest = code; i < 5; i++, rest /= 5) {
            order[i] = rest % 5;
            seen |= 1U << order[i];
        }
        if (seen != 31U) {
            continue;
        }
        player p;
        open_player(&p);
        bool runs = true;
        for (int i = 0; i < 5; i++) {
            release_one(&p, order[i]);
            runs = runs && order[i] != 4;
            if (runs) {
                const kvs_pass_desc pass = pass_of(3, 2);
                CHECK_OK(kvs_binding_run(p.binding, &pass));
            }
        }
        rig_close(p.device);
    }
}

int main(void)
{
    test_a_pass_gives_the_rows_that_were_asked_for();
    test_a_pass_begins_and_ends_in_two_calls();
    test_a_pass_refuses();
    test_a_pass_reads_the_rows_that_it_is_given();
    test_an_input_is_not_written();
    test_a_binding_of_an_old_epoch_is_stale();
    test_bind_refuses();
    test_attention_wants_a_pager_of_its_layers();
    test_any_order_of_release_is_safe();
    return check_finish();
}
