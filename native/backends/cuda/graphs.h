/* graphs.h: passes that have been recorded, to be launched again as one. A shape is recorded when it comes for the second time:
 * the widths of prompts' ends rarely do. The longest unused goes when there are too many. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_GRAPHS_H
#define KVS_NATIVE_BACKENDS_CUDA_GRAPHS_H

#include "backends/cuda/driver.h"

typedef struct kvs_cuda_graphs kvs_cuda_graphs;

/* What a recorded pass holds for. Zeroed before it is filled. */
typedef struct kvs_cuda_shape {
    uint64_t binding;
    uint64_t generation; /* of the step block */
    uint64_t table_pages;
    uint32_t n_rows;
    uint32_t n_out_rows;
    uint32_t n_axes;
    uint32_t has_positions;
    uint32_t has_front;
    uint32_t is_streamed;
    uint32_t is_tight;
    uint32_t reserved;
} kvs_cuda_shape;

typedef enum kvs_cuda_turn {
    KVS_CUDA_SINGLY, /* launch by launch */
    KVS_CUDA_RECORD,
    KVS_CUDA_REPLAY
} kvs_cuda_turn;

/* The driver and the stream are borrowed. errors: ENOMEM */
kvs_status kvs_cuda_graphs_create(kvs_device *device, const kvs_cuda_driver *driver, cu_stream stream,
                                  kvs_cuda_graphs **graphs);

/* The context is entered, here and below. NULL is ignored. */
void kvs_cuda_graphs_destroy(kvs_cuda_graphs *graphs);

/* How a pass of this shape is to run. */
kvs_cuda_turn kvs_cuda_graphs_turn(kvs_cuda_graphs *graphs, const kvs_cuda_shape *shape);

/* Record what is launched between the two, which runs nothing, and keep it for the shape. Where `is_whole` is false, or the driver
 * refuses, nothing is kept. errors: ENOMEM; EIO */
kvs_status kvs_cuda_graphs_begin(kvs_cuda_graphs *graphs);
kvs_status kvs_cuda_graphs_end(kvs_cuda_graphs *graphs, const kvs_cuda_shape *shape, bool is_whole);

/* Put the recorded pass of a shape into the compute order. errors: ENOTFOUND; EIO */
kvs_status kvs_cuda_graphs_launch(kvs_cuda_graphs *graphs, const kvs_cuda_shape *shape);

/* Let go of what belongs to a binding. */
void kvs_cuda_graphs_forget(kvs_cuda_graphs *graphs, uint64_t binding);

#endif
