#include "backends/trace/intervals.h"

#include <stdlib.h>
#include <string.h>

#define LEAF_ITEMS 64u

struct kvs_leaf {
    uint32_t count;
    kvs_interval items[LEAF_ITEMS];
};

/* A place between intervals: before item `item` of leaf `leaf`. */
struct place {
    uint32_t leaf;
    uint32_t item;
};

void kvs_intervals_destroy(kvs_intervals *map)
{
    for (uint32_t i = 0; i < map->n_leaves; i++) {
        free(map->leaves[i]);
    }
    free(map->leaves);
    free(map->firsts);
    *map = (kvs_intervals){.n_leaves = 0};
}

/* The first interval that ends behind `address`. */
static struct place find(const kvs_intervals *map, uint64_t address)
{
    uint32_t low = 0;
    uint32_t high = map->n_leaves;
    while (low + 1 < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (map->firsts[middle] <= address) {
            low = middle;
        } else {
            high = middle;
        }
    }
    struct place at = {.leaf = low};
    if (low == map->n_leaves) {
        return at;
    }
    const kvs_leaf *leaf = map->leaves[low];
    uint32_t first = 0;
    uint32_t last = leaf->count;
    while (first < last) {
        const uint32_t middle = first + (last - first) / 2;
        if (leaf->items[middle].end <= address) {
            first = middle + 1;
        } else {
            last = middle;
        }
    }
    at.item = first;
    return at;
}

static kvs_interval *item_at(const kvs_intervals *map, struct place *at)
{
    while (at->leaf < map->n_leaves && at->item == map->leaves[at->leaf]->count) {
        at->leaf++;
        at->item = 0;
    }
    return at->leaf < map->n_leaves ? &map->leaves[at->leaf]->items[at->item] : NULL;
}

static kvs_status add_leaf(kvs_intervals *map, uint32_t index)
{
    if (map->n_leaves == map->capacity) {
        const uint32_t capacity = map->capacity == 0 ? 16 : map->capacity * 2;
        kvs_leaf **leaves = realloc(map->leaves, capacity * sizeof *leaves);
        map->leaves = leaves == NULL ? map->leaves : leaves;
        uint64_t *firsts = leaves == NULL ? NULL : realloc(map->firsts, capacity * sizeof *firsts);
        if (firsts == NULL) {
            return KVS_ENOMEM;
        }
        map->firsts = firsts;
        map->capacity = capacity;
    }
    kvs_leaf *leaf = malloc(sizeof *leaf);
    if (leaf == NULL) {
        return KVS_ENOMEM;
    }
    leaf->count = 0;
    const uint32_t after = map->n_leaves - index;
    memmove(map->leaves + index + 1, map->leaves + index, after * sizeof *map->leaves);
    memmove(map->firsts + index + 1, map->firsts + index, after * sizeof *map->firsts);
    map->leaves[index] = leaf;
    map->n_leaves++;
    return KVS_OK;
}

static void drop_leaf(kvs_intervals *map, uint32_t index)
{
    free(map->leaves[index]);
    const uint32_t after = map->n_leaves - index - 1;
    memmove(map->leaves + index, map->leaves + index + 1, after * sizeof *map->leaves);
    memmove(map->firsts + index, map->firsts + index + 1, after * sizeof *map->firsts);
    map->n_leaves--;
}

static kvs_status insert(kvs_intervals *map, struct place at, const kvs_interval *story)
{
    if (map->n_leaves == 0) {
        const kvs_status status = add_leaf(map, 0);
        if (status != KVS_OK) {
            return status;
        }
    }
    if (at.leaf == map->n_leaves) {
        at.leaf--;
        at.item = map->leaves[at.leaf]->count;
    }
    if (map->leaves[at.leaf]->count == LEAF_ITEMS) {
        const kvs_status status = add_leaf(map, at.leaf + 1);
        if (status != KVS_OK) {
            return status;
        }
        kvs_leaf *full = map->leaves[at.leaf];
        kvs_leaf *upper = map->leaves[at.leaf + 1];
        const uint32_t kept = LEAF_ITEMS / 2;
        memcpy(upper->items, full->items + kept, (LEAF_ITEMS - kept) * sizeof *full->items);
        upper->count = LEAF_ITEMS - kept;
        full->count = kept;
        map->firsts[at.leaf + 1] = upper->items[0].begin;
        if (at.item > kept) {
            at = (struct place){.leaf = at.leaf + 1, .item = at.item - kept};
        }
    }
    kvs_leaf *leaf = map->leaves[at.leaf];
    memmove(leaf->items + at.item + 1, leaf->items + at.item, (leaf->count - at.item) * sizeof *leaf->items);
    leaf->items[at.item] = *story;
    leaf->count++;
    map->firsts[at.leaf] = leaf->items[0].begin;
    return KVS_OK;
}

/* Make `address` a border. */
static kvs_status cut(kvs_intervals *map, uint64_t address)
{
    struct place at = find(map, address);
    kvs_interval *item = item_at(map, &at);
    if (item == NULL || item->begin >= address) {
        return KVS_OK;
    }
    kvs_interval upper = *item;
    upper.begin = address;
    item->end = address;
    at.item++;
    const kvs_status status = insert(map, at, &upper);
    if (status != KVS_OK) {
        item->end = upper.end;
    }
    return status;
}

static kvs_status cut_out(kvs_intervals *map, uint64_t begin, uint64_t end)
{
    const kvs_status status = cut(map, begin);
    return status == KVS_OK ? cut(map, end) : status;
}

static void erase(kvs_intervals *map, uint64_t begin, uint64_t end)
{
    struct place at = find(map, begin);
    const kvs_interval *item = item_at(map, &at);
    while (item != NULL && item->begin < end) {
        kvs_leaf *leaf = map->leaves[at.leaf];
        uint32_t behind = at.item;
        while (behind < leaf->count && leaf->items[behind].begin < end) {
            behind++;
        }
        memmove(leaf->items + at.item, leaf->items + behind, (leaf->count - behind) * sizeof *leaf->items);
        leaf->count -= behind - at.item;
        if (leaf->count == 0) {
            drop_leaf(map, at.leaf);
            at.item = 0;
        } else {
            map->firsts[at.leaf] = leaf->items[0].begin;
        }
        item = item_at(map, &at);
    }
}

static bool is_same_story(const kvs_interval *a, const kvs_interval *b)
{
    return a->end == b->begin && a->label == b->label && a->base == b->base && a->writer == b->writer && a->state == b->state &&
           memcmp(a->readers, b->readers, sizeof a->readers) == 0;
}

static void tidy(kvs_leaf *leaf)
{
    uint32_t kept = 0;
    for (uint32_t i = 1; i < leaf->count; i++) {
        if (is_same_story(&leaf->items[kept], &leaf->items[i])) {
            leaf->items[kept].end = leaf->items[i].end;
        } else {
            leaf->items[++kept] = leaf->items[i];
        }
    }
    leaf->count = kept + 1;
}

kvs_status kvs_intervals_assign(kvs_intervals *map, const kvs_interval *story)
{
    kvs_status status = cut_out(map, story->begin, story->end);
    if (status != KVS_OK) {
        return status;
    }
    erase(map, story->begin, story->end);
    status = insert(map, find(map, story->begin), story);
    if (status == KVS_OK) {
        tidy(map->leaves[find(map, story->begin).leaf]);
    }
    return status;
}

kvs_status kvs_intervals_remove(kvs_intervals *map, uint64_t begin, uint64_t end)
{
    const kvs_status status = cut_out(map, begin, end);
    if (status == KVS_OK) {
        erase(map, begin, end);
    }
    return status;
}

kvs_status kvs_intervals_visit(kvs_intervals *map, uint64_t begin, uint64_t end, kvs_interval_visit visit, void *user,
                               uint64_t *covered)
{
    *covered = 0;
    const kvs_status status = cut_out(map, begin, end);
    if (status != KVS_OK) {
        return status;
    }
    struct place at = find(map, begin);
    const uint32_t first_leaf = at.leaf;
    for (kvs_interval *item = item_at(map, &at); item != NULL && item->begin < end; item = item_at(map, &at)) {
        visit(user, item);
        *covered += item->end - item->begin;
        at.item++;
    }
    for (uint32_t leaf = first_leaf; leaf < map->n_leaves && leaf <= at.leaf; leaf++) {
        tidy(map->leaves[leaf]);
    }
    return KVS_OK;
}
