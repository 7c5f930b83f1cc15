/* layout.c: first fit over a sorted array. A layout has tens of regions, so linear search is the
 * fastest that is simple. */
#include "core/layout.h"

#include <string.h>

enum { FIRST_ROOM = 8 };

void kvs_layout_clear(kvs_layout *layout)
{
    layout->n_places = 0;
}

void kvs_layout_free(kvs_layout *layout)
{
    kvs_array_free(layout->places);
    *layout = (kvs_layout){0};
}

kvs_placed *kvs_layout_find(const kvs_layout *layout, uint64_t id)
{
    for (uint32_t i = 0; i < layout->n_places; i++) {
        if (layout->places[i].region.id == id) {
            return &layout->places[i];
        }
    }
    return NULL;
}

static uint64_t end_of(const kvs_region *region)
{
    return region->offset_bytes + region->size_bytes;
}

static kvs_status make_room(kvs_layout *layout, kvs_device *device)
{
    if (layout->n_places < layout->room) {
        return KVS_OK;
    }
    const uint32_t room = layout->room == 0 ? FIRST_ROOM : layout->room * 2;
    kvs_placed *places = kvs_array_alloc(device, room, sizeof *places);
    if (places == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "need room for %u regions", room);
    }
    if (layout->n_places != 0) {
        memcpy(places, layout->places, layout->n_places * sizeof *places);
    }
    kvs_array_free(layout->places);
    layout->places = places;
    layout->room = room;
    return KVS_OK;
}

/* Everything that does not depend on the offset; `made` receives the region as it will be stored.
 */
static kvs_status prepare(kvs_layout *layout, const kvs_bounds *bounds, const kvs_region *region,
                          kvs_region *made)
{
    const kvs_ull id = (kvs_ull)region->id;
    if (region->size_bytes == 0) {
        return kvs_fail(bounds->device, KVS_EINVAL, "region %llu has 0 bytes", id);
    }
    if ((region->flags & ~(uint32_t)KVS_REGION_PERSISTENT) != 0) {
        return kvs_fail(bounds->device, KVS_EINVAL, "region %llu has unknown flags 0x%x", id,
                        region->flags);
    }
    if (region->alignment_bytes != 0 && !kvs_is_power_of_two(region->alignment_bytes)) {
        return kvs_fail(bounds->device, KVS_EINVAL,
                        "region %llu: alignment %llu is not a power of two", id,
                        (kvs_ull)region->alignment_bytes);
    }
    if (kvs_layout_find(layout, region->id) != NULL) {
        return kvs_fail(bounds->device, KVS_EINVAL, "region %llu is in the layout already", id);
    }
    *made = *region;
    made->struct_size = (uint32_t)sizeof *made;
    if (made->alignment_bytes < bounds->alignment_bytes) {
        made->alignment_bytes = bounds->alignment_bytes;
    }
    return make_room(layout, bounds->device);
}

static void insert(kvs_layout *layout, uint32_t index, const kvs_region *made)
{
    kvs_placed *place = &layout->places[index];
    memmove(place + 1, place, (layout->n_places - index) * sizeof *place);
    *place = (kvs_placed){.region = *made};
    layout->n_places++;
}

/* Bytes that a region aligned to `alignment` finds between `start` and `end`, and where. */
static uint64_t hole_bytes(uint64_t start, uint64_t end, uint64_t alignment, uint64_t *aligned)
{
    return kvs_align_up(start, alignment, aligned) && *aligned < end ? end - *aligned : 0;
}

kvs_status kvs_layout_place(kvs_layout *layout, const kvs_bounds *bounds, kvs_region *region)
{
    kvs_region made = {.struct_size = 0};
    const kvs_status status = prepare(layout, bounds, region, &made);
    if (status != KVS_OK) {
        return status;
    }
    uint64_t start = 0;
    uint64_t largest = 0;
    for (uint32_t i = 0; i <= layout->n_places; i++) {
        const bool is_last = i == layout->n_places;
        const uint64_t end =
            is_last ? bounds->capacity_bytes : layout->places[i].region.offset_bytes;
        const uint64_t hole = hole_bytes(start, end, made.alignment_bytes, &made.offset_bytes);
        if (hole >= made.size_bytes) {
            insert(layout, i, &made);
            region->offset_bytes = made.offset_bytes;
            region->alignment_bytes = made.alignment_bytes;
            return KVS_OK;
        }
        largest = hole > largest ? hole : largest;
        start = is_last ? end : end_of(&layout->places[i].region);
    }
    return kvs_fail(
        bounds->device, KVS_ENOSPACE,
        "region %llu: need %llu bytes aligned to %llu, have %llu in the largest hole of %llu",
        (kvs_ull)made.id, (kvs_ull)made.size_bytes, (kvs_ull)made.alignment_bytes, (kvs_ull)largest,
        (kvs_ull)bounds->capacity_bytes);
}

kvs_status kvs_layout_place_at(kvs_layout *layout, const kvs_bounds *bounds, kvs_region *region)
{
    kvs_region made = {.struct_size = 0};
    const kvs_status status = prepare(layout, bounds, region, &made);
    if (status != KVS_OK) {
        return status;
    }
    if (made.offset_bytes % made.alignment_bytes != 0) {
        return kvs_fail(bounds->device, KVS_EINVAL,
                        "region %llu: offset %llu is not aligned to %llu", (kvs_ull)made.id,
                        (kvs_ull)made.offset_bytes, (kvs_ull)made.alignment_bytes);
    }
    if (made.offset_bytes > bounds->capacity_bytes ||
        made.size_bytes > bounds->capacity_bytes - made.offset_bytes) {
        return kvs_fail(bounds->device, KVS_ENOSPACE,
                        "region %llu: need %llu bytes at offset %llu, have %llu", (kvs_ull)made.id,
                        (kvs_ull)made.size_bytes, (kvs_ull)made.offset_bytes,
                        (kvs_ull)bounds->capacity_bytes);
    }
    uint32_t index = 0;
    while (index < layout->n_places && end_of(&layout->places[index].region) <= made.offset_bytes) {
        index++;
    }
    if (index < layout->n_places && layout->places[index].region.offset_bytes < end_of(&made)) {
        return kvs_fail(bounds->device, KVS_EBUSY,
                        "region %llu at offset %llu overlaps region %llu", (kvs_ull)made.id,
                        (kvs_ull)made.offset_bytes, (kvs_ull)layout->places[index].region.id);
    }
    insert(layout, index, &made);
    region->alignment_bytes = made.alignment_bytes;
    return KVS_OK;
}

bool kvs_region_same_place(const kvs_region *a, const kvs_region *b)
{
    return a->id == b->id && a->offset_bytes == b->offset_bytes && a->size_bytes == b->size_bytes;
}

bool kvs_layout_differs(const kvs_layout *a, const kvs_layout *b)
{
    if (a->n_places != b->n_places) {
        return true;
    }
    for (uint32_t i = 0; i < a->n_places; i++) {
        if (!kvs_region_same_place(&a->places[i].region, &b->places[i].region)) {
            return true;
        }
    }
    return false;
}

uint64_t kvs_layout_used_bytes(const kvs_layout *layout)
{
    uint64_t used = 0;
    for (uint32_t i = 0; i < layout->n_places; i++) {
        used += layout->places[i].region.size_bytes;
    }
    return used;
}

uint64_t kvs_layout_end_bytes(const kvs_layout *layout)
{
    return layout->n_places == 0 ? 0 : end_of(&layout->places[layout->n_places - 1].region);
}

kvs_status kvs_layout_check(const kvs_layout *layout, const kvs_bounds *bounds, const char *name)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < layout->n_places; i++) {
        const kvs_region *region = &layout->places[i].region;
        const kvs_ull id = (kvs_ull)region->id;
        if (region->size_bytes == 0 || region->offset_bytes < end) {
            return kvs_fail(bounds->device, KVS_ECORRUPT, "%s region %llu is empty or overlaps",
                            name, id);
        }
        if (region->alignment_bytes < bounds->alignment_bytes ||
            !kvs_is_power_of_two(region->alignment_bytes) ||
            region->offset_bytes % region->alignment_bytes != 0) {
            return kvs_fail(bounds->device, KVS_ECORRUPT, "%s region %llu is misaligned", name, id);
        }
        if (region->offset_bytes > bounds->capacity_bytes ||
            region->size_bytes > bounds->capacity_bytes - region->offset_bytes) {
            return kvs_fail(bounds->device, KVS_ECORRUPT, "%s region %llu leaves the arena", name,
                            id);
        }
        if (kvs_layout_find(layout, region->id) != &layout->places[i]) {
            return kvs_fail(bounds->device, KVS_ECORRUPT, "%s region %llu stands twice", name, id);
        }
        end = end_of(region);
    }
    return KVS_OK;
}
