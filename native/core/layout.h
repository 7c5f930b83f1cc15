/* layout.h: a set of regions in address order, and where the next one goes. Metadata alone: no
 * memory, no locks. */
#ifndef KVS_NATIVE_CORE_LAYOUT_H
#define KVS_NATIVE_CORE_LAYOUT_H

#include "base/internal.h"
#include "kvstream/arena.h"

typedef struct kvs_placed {
    kvs_region region;
    uint32_t n_leases; /* live; always 0 in a staged layout */
    uint32_t n_draining; /* likewise */
} kvs_placed;

typedef struct kvs_layout {
    kvs_placed *places; /* by rising offset */
    uint32_t n_places;
    uint32_t room;
} kvs_layout;

/* What a layout must fit into. `device` keeps the texts of failures. */
typedef struct kvs_bounds {
    kvs_device *device;
    uint64_t capacity_bytes;
    uint64_t alignment_bytes;
} kvs_bounds;

/* Forget every region; the array stays for the next layout. */
void kvs_layout_clear(kvs_layout *layout);
void kvs_layout_free(kvs_layout *layout);

/* NULL when no region has this id. */
kvs_placed *kvs_layout_find(const kvs_layout *layout, uint64_t id);

/* Place at the lowest offset that fits; on success the region holds its offset and effective
 * alignment. errors: EINVAL, ENOSPACE, ENOMEM; nothing is placed then */
kvs_status kvs_layout_place(kvs_layout *layout, const kvs_bounds *bounds, kvs_region *region);

/* Place at region->offset_bytes. errors: as above, and EBUSY overlap */
kvs_status kvs_layout_place_at(kvs_layout *layout, const kvs_bounds *bounds, kvs_region *region);

/* Same id, offset and size. */
bool kvs_region_same_place(const kvs_region *a, const kvs_region *b);

/* Does any region differ between the two in id, offset or size, or stand in one alone? */
bool kvs_layout_differs(const kvs_layout *a, const kvs_layout *b);

uint64_t kvs_layout_used_bytes(const kvs_layout *layout);
uint64_t kvs_layout_end_bytes(const kvs_layout *layout);

/* Order, alignment, bounds, overlap, uniqueness of ids. `name` is that of the layout in the text.
 * errors: ECORRUPT */
kvs_status kvs_layout_check(const kvs_layout *layout, const kvs_bounds *bounds, const char *name);

#endif
