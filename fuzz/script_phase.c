/* script_phase.c: the coordinator against the trace of callbacks that it must make.
 *
 * Each member leases one region of its own that changes size between phases; region SHARED is persistent and the same in all.
 * create (members). begin, reserve (member, size 2), commit: stage a phase and add it. phase (which): move there. fail (0, k, -):
 * callback k of the next move fails; (1, k, j): and so does undo j. cancel (k): callback k of the next move cancels it. bind
 * (which): rebuild. admit, finish (0: the admitted ticket, else another). acquire, release: claims of others.
 */
#include "script.h"

#include "kvstream/phase.h"

#include <string.h>

enum {
    CAPACITY = 1 << 16,
    SHARED = 100,
    SHARED_BYTES = 512,
    MAX_MEMBERS = 3,
    MAX_PHASES = 6,
    MAX_FOREIGN = 32,
    N_RUNS = 7, /* steps that call members */
    MAX_EVENTS = 64,
    UNDO = 100
};

static const int RUNS[N_RUNS] = {KVS_STEP_PREPARE, KVS_STEP_STOP, KVS_STEP_DRAIN,   KVS_STEP_INVALIDATE,
                                 KVS_STEP_RELEASE, KVS_STEP_BIND, KVS_STEP_ACTIVATE};

typedef struct world world;

typedef struct member {
    world *world;
    uint32_t index;
    kvs_lease *own;
} member;

/* What a move calls: step * 10 + member, + UNDO for an undo. */
typedef struct events {
    int at[MAX_EVENTS];
    uint32_t n;
} events;

struct world {
    kvs_device *device;
    kvs_arena *arena;
    kvs_coordinator *coordinator;
    member members[MAX_MEMBERS];
    uint32_t n_members;
    uint64_t sizes[MAX_PHASES][MAX_MEMBERS];
    uint64_t staged[MAX_MEMBERS];
    uint32_t n_phases;
    kvs_lease *foreign[MAX_FOREIGN];
    uint64_t foreign_ids[MAX_FOREIGN];
    uint32_t n_foreign;
    uint32_t phase; /* UINT32_MAX: none */
    bool is_poisoned;
    uint64_t ticket; /* 0: none */
    uint64_t newest_ticket;
    uint64_t transitions;
    int failed_step, failed_member, failed_status;
    /* plans for the next move */
    bool fails, undo_fails, cancels;
    uint32_t fail_at, undo_fail_at, cancel_at;
    /* the move under way */
    events seen;
    uint32_t n_undone;
    uint32_t n_run;
    uint32_t fail_now, undo_fail_now, cancel_now; /* UINT32_MAX: never */
};

static void note(world *w, int event)
{
    EXPECT(w->seen.n < MAX_EVENTS);
    w->seen.at[w->seen.n++] = event;
}

static void drop_own(member *member)
{
    kvs_lease_release(member->own);
    member->own = NULL;
}

static int take_own(member *member)
{
    EXPECT(member->own == NULL);
    return kvs_arena_acquire(member->world->arena, member->index, &member->own);
}

static void try_reentry(world *w)
{
    uint64_t ticket = 0;
    EXPECT_STATUS(kvs_coordinator_transition(w->coordinator, 0), KVS_EBUSY);
    EXPECT_STATUS(kvs_coordinator_rebuild(w->coordinator, 0), KVS_EBUSY);
    EXPECT_STATUS(kvs_coordinator_admit(w->coordinator, &ticket), KVS_EBUSY);
    EXPECT_STATUS(kvs_coordinator_finish(w->coordinator, 1), KVS_EBUSY);
    EXPECT_OK(kvs_coordinator_check_integrity(w->coordinator));
}

static int on_run(void *user, int step, uint32_t phase)
{
    member *member = user;
    world *w = member->world;
    (void)phase;
    note(w, step * 10 + (int)member->index);
    try_reentry(w);
    const uint32_t here = w->n_run++;
    if (here == w->cancel_now) {
        EXPECT_OK(kvs_coordinator_cancel(w->coordinator));
    }
    if (here == w->fail_now) {
        return KVS_ENUMERIC;
    }
    if (step == KVS_STEP_RELEASE) {
        drop_own(member);
    }
    return step == KVS_STEP_BIND ? take_own(member) : KVS_OK;
}

static int on_undo(void *user, int step, uint32_t phase)
{
    member *member = user;
    world *w = member->world;
    (void)phase;
    note(w, UNDO + step * 10 + (int)member->index);
    if (w->n_undone++ == w->undo_fail_now) {
        return KVS_EIO;
    }
    if (step == KVS_STEP_BIND) {
        drop_own(member);
    }
    return step == KVS_STEP_RELEASE && w->phase != UINT32_MAX ? take_own(member) : KVS_OK;
}

/* ---- phases ---- */

static kvs_status fits(const world *w, uint64_t *n_bytes)
{
    *n_bytes = SHARED_BYTES;
    for (uint32_t i = 0; i < w->n_members; i++) {
        if (w->staged[i] == 0) {
            return KVS_EINVAL;
        }
        *n_bytes += (w->staged[i] + 63) / 64 * 64;
    }
    return *n_bytes > CAPACITY ? KVS_ENOSPACE : KVS_OK;
}

static void add_phase(world *w)
{
    kvs_phase_region regions[MAX_MEMBERS + 1] = {
        {.id = SHARED, .size_bytes = SHARED_BYTES, .flags = KVS_REGION_PERSISTENT}};
    for (uint32_t i = 0; i < w->n_members; i++) {
        regions[i + 1] = (kvs_phase_region){.id = i, .size_bytes = w->staged[i]};
    }
    if (w->n_phases == MAX_PHASES) {
        return;
    }
    uint32_t number = 77;
    uint64_t n_bytes = 0;
    kvs_status expected = fits(w, &n_bytes);
    if (w->is_poisoned || w->ticket != 0) {
        expected = KVS_EBUSY;
    }
    EXPECT_STATUS(kvs_coordinator_add_phase(w->coordinator, regions, w->n_members + 1, &number), expected);
    if (expected == KVS_OK) {
        EXPECT_U64(number, w->n_phases);
        memcpy(w->sizes[w->n_phases++], w->staged, sizeof w->staged);
    } else {
        EXPECT_U64(number, 77);
    }
}

static void stage(world *w, const step *step)
{
    if (w->n_members != 0) {
        w->staged[step->operand[0] % w->n_members] = step_u16(step, 1);
    }
}

/* ---- moves ---- */

/* A claim of another on a region that is not persistent keeps every layout from changing. */
static bool is_held_by_others(const world *w)
{
    for (uint32_t i = 0; i < w->n_foreign; i++) {
        if (w->foreign_ids[i] != SHARED) {
            return true;
        }
    }
    return false;
}

static bool is_same_layout(const world *w, uint32_t a, uint32_t b)
{
    return a != UINT32_MAX && memcmp(w->sizes[a], w->sizes[b], w->n_members * sizeof w->sizes[0][0]) == 0;
}

static int forward(const world *w, uint32_t at)
{
    return RUNS[at / w->n_members] * 10 + (int)(at % w->n_members);
}

static void undo_all(events *expected)
{
    for (uint32_t i = expected->n; i-- > 0;) {
        expected->at[expected->n + (expected->n - 1 - i)] = UNDO + expected->at[i];
    }
    expected->n *= 2;
}

/* Where the move ends, and with what: `n_done` callbacks succeed, then the failure named here. */
typedef struct outcome {
    kvs_status status;
    uint32_t n_done;
    bool has_failed_callback;
    int step, member;
} outcome;

/* Callbacks before the layout changes: five steps. */
static uint32_t before_commit(const world *w)
{
    return 5 * w->n_members;
}

static outcome predict(const world *w)
{
    const uint32_t n = N_RUNS * w->n_members;
    uint32_t end = n;
    outcome out = {.status = KVS_OK, .n_done = n, .step = -1, .member = -1};
    if (is_held_by_others(w)) {
        out = (outcome){.status = KVS_EBUSY, .n_done = before_commit(w), .step = KVS_STEP_COMMIT, .member = -1};
        end = before_commit(w);
    }
    if (w->cancel_now < end && (w->cancel_now + 1 < n)) {
        const uint32_t next = w->cancel_now + 1;
        const bool at_commit = next == before_commit(w);
        out = (outcome){.status = KVS_ECANCELLED, .n_done = next, .member = -1, .step = KVS_STEP_COMMIT};
        if (!at_commit) {
            out.step = forward(w, next) / 10;
            out.member = forward(w, next) % 10;
        }
        end = next;
    }
    if (w->fail_now < end) {
        out = (outcome){.status = KVS_ENUMERIC, .n_done = w->fail_now, .has_failed_callback = true};
        out.step = forward(w, w->fail_now) / 10;
        out.member = forward(w, w->fail_now) % 10;
    }
    return out;
}

static events predict_events(const world *w, const outcome *out)
{
    events expected = {.n = 0};
    for (uint32_t i = 0; i < out->n_done; i++) {
        expected.at[expected.n++] = forward(w, i);
    }
    if (out->status == KVS_OK) {
        return expected;
    }
    const uint32_t n_done = expected.n;
    undo_all(&expected);
    if (out->has_failed_callback) {
        memmove(&expected.at[n_done + 1], &expected.at[n_done], n_done * sizeof expected.at[0]);
        expected.at[n_done] = forward(w, n_done);
        expected.n++;
    }
    if (w->undo_fail_now < n_done) {
        expected.n -= n_done - 1 - w->undo_fail_now;
    }
    return expected;
}

static kvs_status refusal(const world *w, uint32_t phase)
{
    return w->is_poisoned          ? KVS_EPOISONED
           : w->ticket != 0        ? KVS_EBUSY
           : phase >= w->n_phases  ? KVS_ENOTFOUND
                                   : KVS_OK;
}

static void prepare_move(world *w)
{
    const uint32_t n = N_RUNS * w->n_members;
    w->seen.n = w->n_run = w->n_undone = 0;
    w->fail_now = w->fails && n != 0 ? w->fail_at % n : UINT32_MAX;
    w->cancel_now = w->cancels && n != 0 ? w->cancel_at % n : UINT32_MAX;
    const uint32_t n_done = predict(w).n_done;
    w->undo_fail_now = w->undo_fails && n_done != 0 ? w->undo_fail_at % n_done : UINT32_MAX;
    w->fails = w->undo_fails = w->cancels = false;
}

static void check_events(const world *w, const events *expected)
{
    EXPECT_U64(w->seen.n, expected->n);
    for (uint32_t i = 0; i < expected->n; i++) {
        EXPECT_U64(w->seen.at[i], expected->at[i]);
    }
}

static void move(world *w, const step *step)
{
    const uint32_t phase = step->operand[0] % (w->n_phases + 1);
    const kvs_status refused = refusal(w, phase);
    if (refused != KVS_OK || phase == w->phase) {
        w->seen.n = 0;
        EXPECT_STATUS(kvs_coordinator_transition(w->coordinator, phase), refused);
        EXPECT_U64(w->seen.n, 0);
        return;
    }
    prepare_move(w);
    const outcome out = predict(w);
    const events expected = predict_events(w, &out);
    const bool undo_failed = out.status != KVS_OK && w->undo_fail_now < out.n_done;
    EXPECT_STATUS(kvs_coordinator_transition(w->coordinator, phase), undo_failed ? KVS_EPOISONED : out.status);
    check_events(w, &expected);
    if (out.status == KVS_OK) {
        w->transitions += is_same_layout(w, w->phase, phase) ? 0 : 1;
        w->phase = phase;
        return;
    }
    w->failed_step = out.step;
    w->failed_member = out.member;
    w->failed_status = (int)out.status;
    if (undo_failed) {
        w->is_poisoned = true;
        w->phase = UINT32_MAX;
    }
}

static bool drop_survivors(world *w)
{
    bool had = w->n_foreign != 0;
    for (uint32_t i = 0; i < w->n_members; i++) {
        had = had || w->members[i].own != NULL;
        drop_own(&w->members[i]);
    }
    return had;
}

static bool survives(const world *w)
{
    for (uint32_t i = 0; i < w->n_members; i++) {
        if (w->members[i].own != NULL) {
            return true;
        }
    }
    return w->n_foreign != 0;
}

/* Bind and activate alone; the failing callback is counted from there. */
static void rebuild(world *w, const step *step)
{
    const uint32_t phase = step->operand[0] % (w->n_phases + 1);
    w->seen.n = w->n_run = w->n_undone = 0;
    w->fail_now = w->undo_fail_now = w->cancel_now = UINT32_MAX;
    kvs_status expected = KVS_OK;
    if (!w->is_poisoned) {
        expected = w->ticket != 0 ? KVS_EBUSY : KVS_EINVAL;
    } else if (phase >= w->n_phases) {
        expected = KVS_ENOTFOUND;
    } else if (survives(w)) {
        expected = KVS_EBUSY;
    }
    if (expected == KVS_OK && w->fails && w->n_members != 0) {
        w->fail_now = w->fail_at % (2 * w->n_members);
        expected = KVS_ENUMERIC;
    }
    const kvs_status got = kvs_coordinator_rebuild(w->coordinator, phase);
    if (!w->is_poisoned) {
        EXPECT(got == KVS_EINVAL || got == KVS_EBUSY);
        return;
    }
    EXPECT_STATUS(got, expected);
    if (expected == KVS_EBUSY) {
        EXPECT_U64(w->seen.n, 0);
        EXPECT(drop_survivors(w));
    } else if (expected == KVS_OK) {
        w->is_poisoned = false;
        w->phase = phase;
    } else if (expected == KVS_ENUMERIC) {
        EXPECT_U64(w->seen.n, 2 * w->fail_now + 1);
    }
    w->fails = false;
}

/* ---- work and claims ---- */

static void admit(world *w)
{
    uint64_t ticket = 0;
    const kvs_status expected = w->is_poisoned             ? KVS_EPOISONED
                                : w->ticket != 0           ? KVS_EBUSY
                                : w->phase == UINT32_MAX   ? KVS_EINVAL
                                                           : KVS_OK;
    EXPECT_STATUS(kvs_coordinator_admit(w->coordinator, &ticket), expected);
    if (expected == KVS_OK) {
        EXPECT(ticket > w->newest_ticket);
        w->ticket = w->newest_ticket = ticket;
    } else {
        EXPECT_U64(ticket, 0);
    }
}

static void finish(world *w, const step *step)
{
    if (step->operand[0] % 4 != 0 || w->ticket == 0) {
        const uint64_t wrong = w->newest_ticket + (w->ticket != 0 ? 1 : 0);
        EXPECT_STATUS(kvs_coordinator_finish(w->coordinator, wrong), KVS_ESTALE);
        return;
    }
    EXPECT_OK(kvs_coordinator_finish(w->coordinator, w->ticket));
    w->ticket = 0;
}

static void acquire(world *w, const step *step)
{
    const uint32_t at = step->operand[0] % (w->n_members + 1);
    const uint64_t id = at == w->n_members ? SHARED : at;
    if (w->phase == UINT32_MAX || w->n_foreign == MAX_FOREIGN) {
        return;
    }
    EXPECT_OK(kvs_arena_acquire(w->arena, id, &w->foreign[w->n_foreign]));
    w->foreign_ids[w->n_foreign++] = id;
}

static void release(world *w, const step *step)
{
    if (w->n_foreign == 0) {
        return;
    }
    const uint32_t at = step->operand[0] % w->n_foreign;
    kvs_lease_release(w->foreign[at]);
    w->n_foreign--;
    memmove(&w->foreign[at], &w->foreign[at + 1], (w->n_foreign - at) * sizeof w->foreign[0]);
    memmove(&w->foreign_ids[at], &w->foreign_ids[at + 1], (w->n_foreign - at) * sizeof w->foreign_ids[0]);
}

static void act(world *w, const step *step)
{
    switch (step->action) {
    case ACTION_BEGIN:
        memset(w->staged, 0, sizeof w->staged);
        break;
    case ACTION_RESERVE:
        stage(w, step);
        break;
    case ACTION_COMMIT:
        add_phase(w);
        break;
    case ACTION_PHASE:
        move(w, step);
        break;
    case ACTION_BIND:
        rebuild(w, step);
        break;
    case ACTION_ADMIT:
        admit(w);
        break;
    case ACTION_FINISH:
        finish(w, step);
        break;
    case ACTION_ACQUIRE:
        acquire(w, step);
        break;
    case ACTION_RELEASE:
        release(w, step);
        break;
    case ACTION_CANCEL:
        EXPECT_OK(kvs_coordinator_cancel(w->coordinator)); /* nothing outside a move */
        w->cancels = true;
        w->cancel_at = step->operand[0];
        break;
    case ACTION_FAIL:
        w->fails = true;
        w->undo_fails = step->operand[0] % 2 != 0;
        w->fail_at = step->operand[1];
        w->undo_fail_at = step->operand[2];
        break;
    default:
        break;
    }
}

/* ---- what always holds ---- */

static void check_layout(world *w)
{
    for (uint32_t i = 0; i < w->n_members; i++) {
        kvs_region region = {.struct_size = sizeof region};
        const kvs_status status = kvs_arena_find_region(w->arena, i, &region);
        EXPECT_STATUS(status, w->phase == UINT32_MAX ? KVS_ENOTFOUND : KVS_OK);
        EXPECT(status != KVS_OK || region.size_bytes == w->sizes[w->phase][i]);
        EXPECT((w->members[i].own != NULL) == (w->phase != UINT32_MAX));
    }
}

static void compare(world *w)
{
    EXPECT_OK(kvs_coordinator_check_integrity(w->coordinator));
    EXPECT_OK(kvs_arena_check_integrity(w->arena));
    kvs_coordinator_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_coordinator_get_info(w->coordinator, &info));
    EXPECT_U64(info.state, w->is_poisoned    ? KVS_COORDINATOR_POISONED
                           : w->ticket != 0  ? KVS_COORDINATOR_EXECUTING
                                             : KVS_COORDINATOR_IDLE);
    EXPECT_U64(info.phase, w->phase);
    EXPECT_U64(info.n_phases, w->n_phases);
    EXPECT_U64(info.n_consumers, w->n_members);
    EXPECT_U64(info.transitions, w->transitions);
    EXPECT_U64(info.failed_step, w->failed_step);
    EXPECT_U64(info.failed_consumer, w->failed_member);
    EXPECT_U64(info.failed_status, w->failed_status);
    kvs_arena_info arena = {.struct_size = sizeof arena};
    EXPECT_OK(kvs_arena_get_info(w->arena, &arena));
    EXPECT((arena.state == KVS_ARENA_OPEN) == !w->is_poisoned);
    if (!w->is_poisoned) {
        check_layout(w);
    }
}

static void open_world(world *w, const step *step)
{
    w->device = script_device(0, 0);
    w->phase = UINT32_MAX;
    w->failed_step = w->failed_member = -1;
    w->n_members = step->operand[0] % (MAX_MEMBERS + 1);
    EXPECT_OK(kvs_arena_create(w->device, CAPACITY, 64, &w->arena));
    EXPECT_OK(kvs_coordinator_create(w->arena, &w->coordinator));
    for (uint32_t i = 0; i < w->n_members; i++) {
        w->members[i] = (member){.world = w, .index = i};
        const kvs_consumer consumer = {
            .struct_size = sizeof consumer, .user = &w->members[i], .run = on_run, .undo = on_undo};
        EXPECT_OK(kvs_coordinator_add_consumer(w->coordinator, &consumer));
    }
}

void script_phase(script *script)
{
    world w = {.device = NULL};
    step step;
    script_open(script, &step);
    open_world(&w, &step);
    while (script_next(script, &step)) {
        act(&w, &step);
        compare(&w);
    }
    while (w.n_foreign != 0) {
        kvs_lease_release(w.foreign[--w.n_foreign]);
    }
    kvs_coordinator_release(w.coordinator);
    for (uint32_t i = 0; i < w.n_members; i++) {
        drop_own(&w.members[i]);
    }
    kvs_arena_release(w.arena);
    script_device_close(w.device);
}
