/* graphs.c: a small table of recorded passes, searched in order. */
#include "backends/cuda/graphs.h"

#include <stdlib.h>
#include <string.h>

/* Widths 1 to 8 of a target and of its head. Each graph takes memory of the card for its nodes. */
#define MAX_SHAPES 64u
#define MAX_GRAPHS 16u

struct entry {
    kvs_cuda_shape shape; /* of binding 0: free */
    cu_graph_exec exec;   /* NULL: seen once */
    uint64_t used_at;
};

struct kvs_cuda_graphs {
    kvs_device *device;
    const kvs_cuda_driver *driver;
    cu_stream stream;
    uint64_t now;
    struct entry entries[MAX_SHAPES];
};

kvs_status kvs_cuda_graphs_create(kvs_device *device, const kvs_cuda_driver *driver, cu_stream stream,
                                  kvs_cuda_graphs **graphs)
{
    kvs_cuda_graphs *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "no memory for the account of recorded passes");
    }
    made->device = device;
    made->driver = driver;
    made->stream = stream;
    *graphs = made;
    return KVS_OK;
}

static void free_entry(kvs_cuda_graphs *graphs, struct entry *entry)
{
    if (entry->exec != NULL) {
        (void)graphs->driver->api.graph_destroy(entry->exec);
    }
    *entry = (struct entry){.exec = NULL};
}

void kvs_cuda_graphs_destroy(kvs_cuda_graphs *graphs)
{
    if (graphs == NULL) {
        return;
    }
    for (uint32_t i = 0; i < MAX_SHAPES; i++) {
        free_entry(graphs, &graphs->entries[i]);
    }
    free(graphs);
}

void kvs_cuda_graphs_forget(kvs_cuda_graphs *graphs, uint64_t binding)
{
    for (uint32_t i = 0; i < MAX_SHAPES; i++) {
        if (graphs->entries[i].shape.binding == binding) {
            free_entry(graphs, &graphs->entries[i]);
        }
    }
}

static struct entry *find(kvs_cuda_graphs *graphs, const kvs_cuda_shape *shape)
{
    for (uint32_t i = 0; i < MAX_SHAPES; i++) {
        if (memcmp(&graphs->entries[i].shape, shape, sizeof *shape) == 0) {
            return &graphs->entries[i];
        }
    }
    return NULL;
}

/* Graphs of an older step block will never be launched again. */
static void drop_stale(kvs_cuda_graphs *graphs, uint64_t generation)
{
    for (uint32_t i = 0; i < MAX_SHAPES; i++) {
        if (graphs->entries[i].shape.binding != 0 && graphs->entries[i].shape.generation != generation) {
            free_entry(graphs, &graphs->entries[i]);
        }
    }
}

/* The longest unused, of those with a graph alone where `has_graph`. */
static struct entry *oldest(kvs_cuda_graphs *graphs, bool has_graph)
{
    struct entry *found = NULL;
    for (uint32_t i = 0; i < MAX_SHAPES; i++) {
        struct entry *entry = &graphs->entries[i];
        if ((!has_graph || entry->exec != NULL) && (found == NULL || entry->used_at < found->used_at)) {
            found = entry;
        }
    }
    return found;
}

kvs_cuda_turn kvs_cuda_graphs_turn(kvs_cuda_graphs *graphs, const kvs_cuda_shape *shape)
{
    struct entry *entry = find(graphs, shape);
    graphs->now++;
    if (entry != NULL) {
        entry->used_at = graphs->now;
        return entry->exec != NULL ? KVS_CUDA_REPLAY : KVS_CUDA_RECORD;
    }
    drop_stale(graphs, shape->generation);
    entry = oldest(graphs, false);
    free_entry(graphs, entry);
    *entry = (struct entry){.shape = *shape, .used_at = graphs->now};
    return KVS_CUDA_SINGLY;
}

/* Relaxed: threads that copy meanwhile do not take part. */
kvs_status kvs_cuda_graphs_begin(kvs_cuda_graphs *graphs)
{
    return KVS_CUDA_CALL(graphs->device, graphs->driver, capture_begin, graphs->stream, CU_CAPTURE_RELAXED);
}

static void make_room(kvs_cuda_graphs *graphs)
{
    uint32_t n_graphs = 0;
    for (uint32_t i = 0; i < MAX_SHAPES; i++) {
        n_graphs += graphs->entries[i].exec != NULL;
    }
    if (n_graphs >= MAX_GRAPHS) {
        free_entry(graphs, oldest(graphs, true));
    }
}

kvs_status kvs_cuda_graphs_end(kvs_cuda_graphs *graphs, const kvs_cuda_shape *shape, bool is_whole)
{
    cu_graph graph = NULL;
    cu_graph_exec exec = NULL;
    kvs_status status = KVS_CUDA_CALL(graphs->device, graphs->driver, capture_end, graphs->stream, &graph);
    if (status == KVS_OK && is_whole) {
        make_room(graphs);
        status = KVS_CUDA_CALL(graphs->device, graphs->driver, graph_make, &exec, graph, 0);
    }
    if (graph != NULL) {
        (void)graphs->driver->api.graph_free(graph);
    }
    if (exec == NULL) {
        return status;
    }
    /* A launch would do it otherwise, in the first pass that is timed. */
    status = KVS_CUDA_CALL(graphs->device, graphs->driver, graph_upload, exec, graphs->stream);
    struct entry *entry = find(graphs, shape);
    if (status != KVS_OK || entry == NULL) {
        (void)graphs->driver->api.graph_destroy(exec);
        return status;
    }
    entry->exec = exec;
    return KVS_OK;
}

kvs_status kvs_cuda_graphs_launch(kvs_cuda_graphs *graphs, const kvs_cuda_shape *shape)
{
    const struct entry *entry = find(graphs, shape);
    if (entry == NULL || entry->exec == NULL) {
        return kvs_fail(graphs->device, KVS_ENOTFOUND, "a pass of %u rows has not been recorded", shape->n_rows);
    }
    return KVS_CUDA_CALL(graphs->device, graphs->driver, graph_launch, entry->exec, graphs->stream);
}
