/* pass.c: how a pass runs. Passes of decoding are recorded and launched again as one graph: kernels read what changes from the step
 * block (kernels/step_words.h), which is copied before the graph is launched, so that nothing is patched. The host goes over the
 * operations of such a pass as of any other one, so that a pass can be cancelled and a fault injected between two of them; nothing
 * has been launched until the end. A pass whose pages come through a ring is recorded only where counters order it with the copies.
 *
 * Forward progress of passes that wait on the device. While such a pass is made, no copy is begun that waits for it
 * (kvs_cuda_copies_hold). Before it is launched all copies that it needs are queued and their gates are open, every queued copy
 * without a gate has been given to the driver, and all host memory that copies reach is registered; while it runs nothing allocates,
 * registers or loads, and the copy thread gives copies to the driver, never more than a stream's queue takes. Its kernels take work in
 * the order of pages (kernels/page_gate.cuh), waits are bounded, and a copy that fails ends them.
 */
#include "backends/cuda/pass.h"

#include "kernels/attend_params.h"

#include <string.h>

/* Wider passes are prompts or rare. */
#define MAX_ROWS 64u
/* Of rows times pages that stream: launches of attention grow with both. */
#define MAX_WORK 16384u
/* From this driver on a recorded kernel may begin while the one before it ends. */
#define EARLY_GRAPHS 12030u

static bool may_record(const struct kvs_cuda *cuda, const struct kvs_step *step)
{
    const uint64_t work = step->n_rows * kvs_cuda_steps_places(cuda->steps).table_pages;
    const bool may_stream = step->is_resident || (cuda->rings != NULL && work <= MAX_WORK);
    return cuda->graphs != NULL && step->binding != 0 && may_stream && step->n_rows <= MAX_ROWS;
}

/* A block may wait for the last page of its run while it holds the others: their slots, and those of the copy that brings the page,
 * must not be the same. */
static bool is_tight(const kvs_stream_view *stream)
{
    return stream->gate != NULL && stream->n_slots < stream->run_slots + KVS_CUDA_GROUP_PAGES - 1;
}

static kvs_cuda_shape shape_of(const struct kvs_cuda *cuda, const struct kvs_step *step)
{
    kvs_cuda_shape shape;
    memset(&shape, 0, sizeof shape); /* shapes are compared as bytes */
    shape.binding = step->binding;
    shape.generation = kvs_cuda_steps_generation(cuda->steps);
    shape.table_pages = kvs_cuda_steps_places(cuda->steps).table_pages;
    shape.n_rows = step->n_rows;
    shape.n_out_rows = step->n_out_rows;
    shape.n_axes = step->n_axes;
    shape.has_positions = step->positions != NULL;
    shape.has_front = step->has_front;
    shape.is_streamed = !step->is_resident;
    shape.is_tight = is_tight(&step->stream);
    return shape;
}

/* Before the first kernel of a recording there is none in it. */
bool kvs_cuda_pass_launches_early(struct kvs_cuda *cuda)
{
    if (cuda->turn != KVS_CUDA_RECORD) {
        return cuda->is_early;
    }
    const bool is_first = cuda->n_recorded++ == 0;
    return cuda->is_early && !is_first && cuda->driver.version >= EARLY_GRAPHS;
}

kvs_status kvs_cuda_pass_begin(struct kvs_cuda *cuda, struct kvs_step *step)
{
    cuda->turn = KVS_CUDA_SINGLY;
    cuda->n_recorded = 0;
    cuda->launcher.places = (kvs_cuda_places){.words = 0};
    const kvs_status status = kvs_cuda_steps_begin(cuda->steps, step);
    if (status != KVS_OK || !may_record(cuda, step)) {
        return status;
    }
    cuda->shape = shape_of(cuda, step);
    const kvs_cuda_turn turn = kvs_cuda_graphs_turn(cuda->graphs, &cuda->shape);
    if (turn == KVS_CUDA_RECORD) {
        const kvs_status begun = kvs_cuda_graphs_begin(cuda->graphs);
        if (begun != KVS_OK) {
            return begun;
        }
    }
    cuda->turn = turn;
    if (turn != KVS_CUDA_SINGLY && cuda->shape.is_streamed) {
        kvs_cuda_copies_hold(cuda->copies, step->stream.gate);
    }
    if (turn != KVS_CUDA_SINGLY) {
        cuda->launcher.places = kvs_cuda_steps_places(cuda->steps);
        cuda->launcher.places.is_tight = cuda->shape.is_tight;
        step->takes_whole_layers = !step->is_resident;
        step->notes = (const kvs_stream_note *)(const void *)kvs_cuda_steps_notes(cuda->steps);
    }
    return KVS_OK;
}

static kvs_status launch_pass(struct kvs_cuda *cuda)
{
    kvs_status status = KVS_OK;
    if (cuda->shape.is_streamed) {
        status = kvs_cuda_copies_be_quiet(cuda->copies);
        if (status == KVS_OK && !kvs_cuda_rings_arm(cuda->rings)) {
            status = kvs_fail(cuda->device, KVS_EIO, "a copy of pages that the pass waits for has failed");
        }
    }
    return status == KVS_OK ? kvs_cuda_graphs_launch(cuda->graphs, &cuda->shape) : status;
}

kvs_status kvs_cuda_pass_end(struct kvs_cuda *cuda, bool is_whole)
{
    const kvs_cuda_turn turn = cuda->turn;
    kvs_status status = KVS_OK;
    cuda->turn = KVS_CUDA_SINGLY;
    cuda->launcher.places = (kvs_cuda_places){.words = 0};
    if (turn == KVS_CUDA_RECORD) {
        status = kvs_cuda_graphs_end(cuda->graphs, &cuda->shape, is_whole);
    }
    const bool is_launched = turn != KVS_CUDA_SINGLY && is_whole && status == KVS_OK;
    if (is_launched) {
        status = launch_pass(cuda);
    }
    if (turn != KVS_CUDA_SINGLY && cuda->shape.is_streamed) {
        kvs_cuda_copies_hold(cuda->copies, NULL);
    }
    const kvs_status ended = kvs_cuda_steps_end(cuda->steps, is_whole && status == KVS_OK);
    status = status == KVS_OK ? ended : status;
    if (status == KVS_OK && is_launched && cuda->shape.is_streamed && kvs_cuda_rings_gave_up(cuda->rings)) {
        status = kvs_fail(cuda->device, KVS_EIO,
                          "the pass gave up: a page that it waited for did not arrive within %llu ms, or its copy failed",
                          (kvs_ull)(cuda->page_limit_ns / 1000000));
    }
    return status;
}
