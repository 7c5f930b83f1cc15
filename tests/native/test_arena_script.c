/* test_arena_script.c: random scripts of arena calls against a plain model. */
#include "arena_scene.h"

#include <string.h>

/* A model of one region, and a script of random calls. */
enum { N_IDS = 6, MAX_LEASES = 24, STEPS = 4000 };

typedef struct model_region {
    bool is_there;
    kvs_region region;
    uint32_t n_leases;
} model_region;

typedef struct script {
    uint64_t random;
    kvs_arena *arena;
    kvs_fence *fence;
    model_region committed[N_IDS];
    model_region staged[N_IDS];
    bool is_building;
    bool is_quiesced;
    uint64_t epoch;
    kvs_lease *leases[MAX_LEASES];
    uint64_t lease_ids[MAX_LEASES];
    uint64_t draining[N_IDS];
} script;

static uint64_t draw(script *script, uint64_t below)
{
    script->random ^= script->random << 13;
    script->random ^= script->random >> 7;
    script->random ^= script->random << 17;
    return script->random % below;
}

static bool model_overlaps(const model_region *regions, uint64_t offset, uint64_t size)
{
    for (size_t i = 0; i < N_IDS; i++) {
        const kvs_region *other = &regions[i].region;
        if (regions[i].is_there && offset < other->offset_bytes + other->size_bytes &&
            other->offset_bytes < offset + size) {
            return true;
        }
    }
    return false;
}

static void script_reserve(script *script)
{
    const uint64_t id = draw(script, N_IDS);
    kvs_region made = region(id, 1 + draw(script, 1500), (uint32_t)draw(script, 2));
    made.alignment_bytes = (uint64_t)64 << draw(script, 3);
    uint64_t offset = 0;
    while (offset + made.size_bytes <= CAPACITY &&
           model_overlaps(script->staged, offset, made.size_bytes)) {
        offset += made.alignment_bytes;
    }
    const bool fits = offset + made.size_bytes <= CAPACITY;
    const kvs_status expected = !script->is_building || script->staged[id].is_there ? KVS_EINVAL
                                : fits                                              ? KVS_OK
                                                                                    : KVS_ENOSPACE;
    CHECK_STATUS(kvs_arena_reserve(script->arena, &made), expected);
    if (expected == KVS_OK) {
        CHECK_U64(made.offset_bytes, offset);
        script->staged[id] = (model_region){.is_there = true, .region = made};
    }
}

static void script_begin(script *script)
{
    const uint32_t flags = (uint32_t)draw(script, 2);
    CHECK_STATUS(kvs_arena_begin(script->arena, flags), script->is_building ? KVS_EBUSY : KVS_OK);
    if (script->is_building) {
        return;
    }
    script->is_building = true;
    memset(script->staged, 0, sizeof script->staged);
    for (size_t i = 0; flags != 0 && i < N_IDS; i++) {
        if (script->committed[i].is_there && script->committed[i].region.flags != 0) {
            script->staged[i] = script->committed[i];
            script->staged[i].n_leases = 0;
        }
    }
}

static void script_commit(script *script)
{
    bool changes = false;
    bool refused = false;
    for (size_t i = 0; i < N_IDS; i++) {
        const model_region *old = &script->committed[i];
        const model_region *new = &script->staged[i];
        const bool same =
            old->is_there == new->is_there &&
            (!old->is_there || (old->region.offset_bytes == new->region.offset_bytes &&
                                old->region.size_bytes == new->region.size_bytes));
        changes = changes || !same;
        const bool is_kept = same && old->region.flags != 0 && new->region.flags != 0;
        refused = refused || (old->n_leases + script->draining[i] != 0 && !is_kept);
    }
    const kvs_status expected = !script->is_building ? KVS_EINVAL : refused ? KVS_EBUSY : KVS_OK;
    CHECK_STATUS(kvs_arena_commit(script->arena), expected);
    if (expected == KVS_OK) {
        for (size_t i = 0; i < N_IDS; i++) {
            const uint32_t n_leases = script->committed[i].n_leases;
            script->committed[i] = script->staged[i];
            script->committed[i].n_leases = n_leases;
        }
        script->epoch += changes ? 1 : 0;
    }
    script->is_building = false;
}

static void script_acquire(script *script)
{
    const uint64_t id = draw(script, N_IDS);
    const uint64_t slot = draw(script, MAX_LEASES);
    if (script->leases[slot] != NULL) {
        return;
    }
    const kvs_status expected = script->is_quiesced               ? KVS_EBUSY
                                : !script->committed[id].is_there ? KVS_ENOTFOUND
                                                                  : KVS_OK;
    CHECK_STATUS(kvs_arena_acquire(script->arena, id, &script->leases[slot]), expected);
    if (expected == KVS_OK) {
        script->lease_ids[slot] = id;
        script->committed[id].n_leases++;
    }
}

static void script_end_lease(script *script, bool retires)
{
    const uint64_t slot = draw(script, MAX_LEASES);
    if (script->leases[slot] == NULL) {
        return;
    }
    const uint64_t id = script->lease_ids[slot];
    if (retires) {
        CHECK_OK(kvs_lease_retire(script->leases[slot], script->fence));
        script->draining[id]++;
    } else {
        kvs_lease_release(script->leases[slot]);
    }
    script->leases[slot] = NULL;
    script->committed[id].n_leases--;
}

static void script_signal(script *script, kvs_device *device)
{
    CHECK_OK(kvs_fence_signal(script->fence, KVS_OK));
    kvs_fence_release(script->fence);
    CHECK_OK(kvs_fence_create(device, &script->fence));
    memset(script->draining, 0, sizeof script->draining);
}

static void script_compare(script *script)
{
    const kvs_arena_info info = info_of(script->arena);
    uint64_t n_leases = 0;
    uint64_t n_draining = 0;
    uint64_t n_regions = 0;
    for (uint64_t i = 0; i < N_IDS; i++) {
        n_leases += script->committed[i].n_leases;
        n_draining += script->draining[i];
        n_regions += script->committed[i].is_there ? 1 : 0;
    }
    CHECK_U64(info.n_leases, n_leases);
    CHECK_U64(info.n_draining, n_draining);
    CHECK_U64(info.n_regions, n_regions);
    CHECK_U64(info.epoch, script->epoch);
    CHECK_U64(info.is_building, script->is_building ? 1 : 0);
}

static void random_scripts_follow_the_model(uint64_t seed)
{
    kvs_device *device = make_device();
    script script = {.random = seed, .arena = make_arena(device)};
    CHECK_OK(kvs_fence_create(device, &script.fence));
    for (int step = 0; step < STEPS; step++) {
        switch (draw(&script, 12)) {
        case 0:
            script_begin(&script);
            break;
        case 1:
        case 2:
        case 3:
            script_reserve(&script);
            break;
        case 4:
            script_commit(&script);
            break;
        case 5:
            if (draw(&script, 4) == 0) {
                CHECK_STATUS(kvs_arena_abort(script.arena),
                             script.is_building ? KVS_OK : KVS_EINVAL);
                script.is_building = false;
            }
            break;
        case 6:
        case 7:
            script_acquire(&script);
            break;
        case 8:
        case 9:
            script_end_lease(&script, false);
            break;
        case 10:
            script_end_lease(&script, true);
            break;
        default:
            if (draw(&script, 3) == 0) {
                script_signal(&script, device);
            } else if (script.is_quiesced) {
                const bool resumes = !script.is_building;
                CHECK_STATUS(kvs_arena_resume(script.arena), resumes ? KVS_OK : KVS_EBUSY);
                script.is_quiesced = !resumes;
            } else {
                CHECK_OK(kvs_arena_quiesce(script.arena));
                script.is_quiesced = true;
            }
        }
        script_compare(&script);
    }
    kvs_arena_release(script.arena);
    for (size_t i = 0; i < MAX_LEASES; i++) {
        kvs_lease_release(script.leases[i]);
    }
    kvs_fence_release(script.fence);
    CHECK_U64(device_info(device).live_objects, 0);
    CHECK_U64(device_info(device).device_bytes, 0);
    kvs_device_release(device);
}

int main(void)
{
    for (uint64_t seed = 1; seed <= 8; seed++) {
        random_scripts_follow_the_model(seed * 0x9e3779b97f4a7c15u);
    }
    return check_finish();
}
