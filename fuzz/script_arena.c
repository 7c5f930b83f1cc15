/* script_arena.c: layouts, leases and fences against a plain list of regions.
 *
 * create (-): a fence. begin (keeps). reserve (id, size 2, alignment | persistent << 2 | at << 3, offset / 64): size 65535 is the
 * largest number there is. acquire (id). claim, release (which of the held leases). retire (which, which fence).
 * advance (which fence, 0 well, 1 failed, 2 let go). close: the arena goes before its leases, and a new one comes.
 */
#include "script.h"

#include "kvstream/arena.h"

#include <string.h>

enum { CAPACITY = 8192, ALIGNMENT = 64, N_IDS = 6, MAX_LEASES = 64, MAX_FENCES = 64 };

typedef struct held_lease {
    kvs_lease *lease;
    uint64_t id;
    uint64_t epoch;
    uint64_t n_claims;
} held_lease;

typedef struct draining_lease {
    uint64_t id;
    kvs_fence *fence;
} draining_lease;

typedef struct layout {
    bool is_there[N_IDS];
    kvs_region region[N_IDS];
} layout;

typedef struct world {
    kvs_device *device;
    kvs_arena *arena;
    fault fault;
    layout committed;
    layout staged;
    bool is_building;
    bool is_stopped;
    uint64_t epoch;
    held_lease held[MAX_LEASES]; /* in order of acquisition */
    uint32_t n_held;
    draining_lease draining[MAX_LEASES];
    uint32_t n_draining;
    kvs_fence *fences[MAX_FENCES];
    uint32_t n_fences;
} world;

static bool overlaps(const layout *layout, uint64_t offset, uint64_t size)
{
    for (uint32_t i = 0; i < N_IDS; i++) {
        const kvs_region *other = &layout->region[i];
        if (layout->is_there[i] && offset < other->offset_bytes + other->size_bytes &&
            other->offset_bytes < offset + size) {
            return true;
        }
    }
    return false;
}

/* Every offset is tried, the lowest first. */
static kvs_status first_fit(const layout *layout, kvs_region *region)
{
    for (uint64_t offset = 0; region->size_bytes <= CAPACITY && offset <= CAPACITY - region->size_bytes;
         offset += region->alignment_bytes) {
        if (!overlaps(layout, offset, region->size_bytes)) {
            region->offset_bytes = offset;
            return KVS_OK;
        }
    }
    return KVS_ENOSPACE;
}

static kvs_status at_offset(const layout *layout, const kvs_region *region)
{
    if (region->offset_bytes % region->alignment_bytes != 0) {
        return KVS_EINVAL;
    }
    if (region->size_bytes > CAPACITY || region->offset_bytes > CAPACITY - region->size_bytes) {
        return KVS_ENOSPACE;
    }
    return overlaps(layout, region->offset_bytes, region->size_bytes) ? KVS_EBUSY : KVS_OK;
}

static void reserve(world *w, const step *step)
{
    static const uint64_t alignments[] = {0, 64, 128, 1024};
    const uint32_t id = step->operand[0] % N_IDS;
    const uint32_t size = step_u16(step, 1);
    const bool at = (step->operand[3] & 8) != 0;
    kvs_region made = {.struct_size = sizeof made, .id = id};
    made.size_bytes = size == UINT16_MAX ? UINT64_MAX : size;
    made.alignment_bytes = alignments[step->operand[3] % 4];
    made.flags = (step->operand[3] & 4) != 0 ? KVS_REGION_PERSISTENT : 0;
    made.offset_bytes = (uint64_t)step->operand[4] * 64;
    kvs_region expected = made;
    expected.alignment_bytes = made.alignment_bytes > ALIGNMENT ? made.alignment_bytes : ALIGNMENT;
    kvs_status status = KVS_EINVAL;
    if (w->is_building && !w->staged.is_there[id] && size != 0) {
        status = at ? at_offset(&w->staged, &expected) : first_fit(&w->staged, &expected);
    }
    if (OUTCOME(&w->fault, at ? kvs_arena_reserve_at(w->arena, &made) : kvs_arena_reserve(w->arena, &made), status)) {
        EXPECT_U64(made.offset_bytes, expected.offset_bytes);
        EXPECT_U64(made.alignment_bytes, expected.alignment_bytes);
        w->staged.is_there[id] = true;
        w->staged.region[id] = expected;
    }
}

static void begin(world *w, const step *step)
{
    const uint32_t flags = step->operand[0] % 2;
    if (!OUTCOME(&w->fault, kvs_arena_begin(w->arena, flags), w->is_building ? KVS_EBUSY : KVS_OK)) {
        return;
    }
    w->is_building = true;
    w->staged = w->committed;
    for (uint32_t i = 0; i < N_IDS; i++) {
        w->staged.is_there[i] = flags != 0 && w->committed.is_there[i] && w->committed.region[i].flags != 0;
    }
}

static bool is_same(const layout *a, const layout *b, uint64_t id)
{
    const kvs_region *old = &a->region[id];
    const kvs_region *new = &b->region[id];
    return a->is_there[id] == b->is_there[id] &&
           (!a->is_there[id] || (old->offset_bytes == new->offset_bytes && old->size_bytes == new->size_bytes));
}

static bool keeps(const world *w, uint64_t id)
{
    return is_same(&w->committed, &w->staged, id) && w->committed.region[id].flags != 0 &&
           w->staged.region[id].flags != 0;
}

static bool breaks_a_lease(const world *w)
{
    for (uint32_t i = 0; i < w->n_held; i++) {
        if (!keeps(w, w->held[i].id)) {
            return true;
        }
    }
    for (uint32_t i = 0; i < w->n_draining; i++) {
        if (!keeps(w, w->draining[i].id)) {
            return true;
        }
    }
    return false;
}

static void commit(world *w)
{
    const bool was_building = w->is_building;
    const kvs_status expected = !was_building ? KVS_EINVAL : breaks_a_lease(w) ? KVS_EBUSY : KVS_OK;
    if (OUTCOME(&w->fault, kvs_arena_commit(w->arena), expected)) {
        bool changes = false;
        for (uint32_t i = 0; i < N_IDS; i++) {
            changes = changes || !is_same(&w->committed, &w->staged, i);
        }
        w->epoch += changes ? 1 : 0;
        w->committed = w->staged;
    }
    w->is_building = false;
}

static void set_stopped(world *w, bool is_stopped)
{
    if (is_stopped) {
        EXPECT_OK(kvs_arena_quiesce(w->arena));
        w->is_stopped = true;
    } else {
        EXPECT_STATUS(kvs_arena_resume(w->arena), w->is_building ? KVS_EBUSY : KVS_OK);
        w->is_stopped = w->is_stopped && w->is_building;
    }
}

static void acquire(world *w, const step *step)
{
    const uint64_t id = step->operand[0] % N_IDS;
    if (w->n_held + w->n_draining >= MAX_LEASES) {
        return;
    }
    kvs_lease *lease = NULL;
    const kvs_status expected = w->is_stopped ? KVS_EBUSY : !w->committed.is_there[id] ? KVS_ENOTFOUND : KVS_OK;
    if (OUTCOME(&w->fault, kvs_arena_acquire(w->arena, id, &lease), expected)) {
        w->held[w->n_held++] = (held_lease){.lease = lease, .id = id, .epoch = w->epoch, .n_claims = 1};
    } else {
        EXPECT(lease == NULL);
    }
}

static held_lease *pick(world *w, const step *step)
{
    return w->n_held == 0 ? NULL : &w->held[step->operand[0] % w->n_held];
}

static void forget_held(world *w, const held_lease *gone)
{
    const size_t at = (size_t)(gone - w->held);
    memmove(&w->held[at], &w->held[at + 1], (w->n_held - at - 1) * sizeof *gone);
    w->n_held--;
}

static void claim(world *w, const step *step)
{
    held_lease *held = pick(w, step);
    if (held != NULL) {
        kvs_lease_retain(held->lease);
        held->n_claims++;
    }
}

static void release(world *w, const step *step)
{
    held_lease *held = pick(w, step);
    if (held == NULL) {
        return;
    }
    kvs_lease_release(held->lease);
    if (--held->n_claims == 0) {
        forget_held(w, held);
    }
}

static void retire(world *w, const step *step)
{
    held_lease *held = pick(w, step);
    if (held == NULL || w->n_fences == 0) {
        return;
    }
    kvs_fence *fence = w->fences[step->operand[1] % w->n_fences];
    if (OUTCOME(&w->fault, kvs_lease_retire(held->lease, fence), held->n_claims > 1 ? KVS_EBUSY : KVS_OK)) {
        w->draining[w->n_draining++] = (draining_lease){.id = held->id, .fence = fence};
        forget_held(w, held);
    }
}

static void create_fence(world *w)
{
    kvs_fence *fence = NULL;
    if (w->n_fences < MAX_FENCES && OUTCOME(&w->fault, kvs_fence_create(w->device, &fence), KVS_OK)) {
        w->fences[w->n_fences++] = fence;
    }
}

static void drop_fence(world *w, uint32_t at)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->n_draining; i++) {
        if (w->draining[i].fence != w->fences[at]) {
            w->draining[n++] = w->draining[i];
        }
    }
    w->n_draining = n;
    kvs_fence_release(w->fences[at]);
    memmove(&w->fences[at], &w->fences[at + 1], (w->n_fences - at - 1) * sizeof w->fences[0]);
    w->n_fences--;
}

static void advance(world *w, const step *step)
{
    if (w->n_fences == 0) {
        return;
    }
    const uint32_t at = step->operand[0] % w->n_fences;
    const uint32_t how = step->operand[1] % 3;
    if (how != 2) {
        EXPECT_OK(kvs_fence_signal(w->fences[at], how == 0 ? KVS_OK : KVS_EIO));
        EXPECT_STATUS(kvs_fence_signal(w->fences[at], KVS_OK), KVS_EINVAL);
    }
    drop_fence(w, at);
}

static void check_held(const held_lease *held, const layout *committed)
{
    kvs_lease_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_lease_get_info(held->lease, &info));
    EXPECT_U64(info.region_id, held->id);
    EXPECT_U64(info.epoch, held->epoch);
    EXPECT_U64(info.offset_bytes, committed->region[held->id].offset_bytes);
    EXPECT_U64(info.size_bytes, committed->region[held->id].size_bytes);
    EXPECT_U64(info.is_draining, 0);
}

/* The arena is gone already; its leases and fences follow. */
static void let_go(world *w)
{
    EXPECT_U64(script_device_info(w->device).device_bytes, w->n_held + w->n_draining != 0 ? CAPACITY : 0);
    for (; w->n_held != 0; w->n_held--) {
        held_lease *held = &w->held[w->n_held - 1];
        check_held(held, &w->committed);
        for (; held->n_claims != 0; held->n_claims--) {
            kvs_lease_release(held->lease);
        }
    }
    while (w->n_fences != 0) {
        drop_fence(w, 0);
    }
    EXPECT_U64(script_device_info(w->device).live_objects, 0);
}

static void close_arena(world *w)
{
    kvs_arena_release(w->arena);
    let_go(w);
    EXPECT_OK(kvs_device_set_hook(w->device, NULL, NULL)); /* what follows is not what was to fail */
    EXPECT_OK(kvs_arena_create(w->device, CAPACITY, ALIGNMENT, &w->arena));
    memset(&w->committed, 0, sizeof w->committed);
    w->is_building = w->is_stopped = false;
    w->epoch = 0;
}

static void act(world *w, const step *step)
{
    switch (step->action) {
    case ACTION_CREATE:
        create_fence(w);
        break;
    case ACTION_BEGIN:
        begin(w, step);
        break;
    case ACTION_RESERVE:
        reserve(w, step);
        break;
    case ACTION_COMMIT:
        commit(w);
        break;
    case ACTION_ABORT:
        EXPECT_STATUS(kvs_arena_abort(w->arena), w->is_building ? KVS_OK : KVS_EINVAL);
        w->is_building = false;
        break;
    case ACTION_STOP:
        set_stopped(w, true);
        break;
    case ACTION_GO:
        set_stopped(w, false);
        break;
    case ACTION_ACQUIRE:
        acquire(w, step);
        break;
    case ACTION_CLAIM:
        claim(w, step);
        break;
    case ACTION_RELEASE:
        release(w, step);
        break;
    case ACTION_RETIRE:
        retire(w, step);
        break;
    case ACTION_ADVANCE:
        advance(w, step);
        break;
    case ACTION_CLOSE:
        close_arena(w);
        break;
    default:
        break;
    }
}

static uint64_t check_regions(world *w, uint32_t n_regions)
{
    uint64_t used = 0;
    uint64_t end = 0;
    for (uint32_t i = 0; i < n_regions; i++) {
        kvs_region found = {.struct_size = sizeof found};
        EXPECT_OK(kvs_arena_region_at(w->arena, i, &found));
        EXPECT(found.id < N_IDS && w->committed.is_there[found.id]);
        const kvs_region *expected = &w->committed.region[found.id];
        EXPECT(found.offset_bytes >= end);
        EXPECT_U64(found.offset_bytes, expected->offset_bytes);
        EXPECT_U64(found.size_bytes, expected->size_bytes);
        EXPECT_U64(found.alignment_bytes, expected->alignment_bytes);
        EXPECT_U64(found.flags, expected->flags);
        used += found.size_bytes;
        end = found.offset_bytes + found.size_bytes;
    }
    EXPECT_STATUS(kvs_arena_region_at(w->arena, n_regions, &(kvs_region){.struct_size = sizeof(kvs_region)}),
                  KVS_ENOTFOUND);
    return used;
}

static void compare(world *w)
{
    kvs_arena_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_arena_check_integrity(w->arena));
    EXPECT_OK(kvs_arena_get_info(w->arena, &info));
    uint32_t n_regions = 0;
    for (uint32_t i = 0; i < N_IDS; i++) {
        n_regions += w->committed.is_there[i] ? 1 : 0;
    }
    const uint32_t closed = w->n_held + w->n_draining != 0 ? KVS_ARENA_DRAINING : KVS_ARENA_QUIESCENT;
    EXPECT_U64(info.state, w->is_stopped ? closed : KVS_ARENA_OPEN);
    EXPECT_U64(info.n_leases, w->n_held);
    EXPECT_U64(info.n_draining, w->n_draining);
    EXPECT_U64(info.n_regions, n_regions);
    EXPECT_U64(info.epoch, w->epoch);
    EXPECT_U64(info.is_building, w->is_building ? 1 : 0);
    EXPECT_U64(info.used_bytes, check_regions(w, n_regions));
    for (uint32_t i = 0; i < w->n_held; i++) {
        check_held(&w->held[i], &w->committed);
    }
}

void script_arena(script *script)
{
    world w = {.device = script_device(0, 0)};
    step step;
    script_open(script, &step);
    EXPECT_OK(kvs_arena_create(w.device, CAPACITY, ALIGNMENT, &w.arena));
    while (script_next(script, &step)) {
        if (step.action == ACTION_FAIL) {
            fault_arm(&w.fault, &step);
            continue;
        }
        fault_begin(&w.fault, w.device);
        act(&w, &step);
        (void)fault_end(&w.fault, w.device, false);
        compare(&w);
    }
    kvs_arena_release(w.arena);
    let_go(&w);
    script_device_close(w.device);
}
