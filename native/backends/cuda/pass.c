/* pass.c: how a pass runs. Recorded ones read what changes from the step block (kernels/step_words.h), so that nothing is patched.
 *
 * Forward progress of passes that wait on the device. Before such a pass is launched all copies that it needs are queued and their
 * gates are open, every queued copy without a gate has been given to the driver, and all host memory that copies reach is
 * registered; while it runs nothing allocates, registers or loads. Its kernels take work in the order of pages
 * (kernels/page_gate.cuh), waits are bounded, and a copy that fails ends them.
 */
#include "backends/cuda/pass.h"

#include "kernels/attend_params.h"

/* Wider passes are prompts: few, long, and of widths that do not come again. */
#define MAX_ROWS 64u
/* Of rows times pages: launches of attention grow with both. */
#define MAX_WORK 16384u

static bool may_record(const struct kvs_cuda *cuda, const struct kvs_step *step)
{
    return cuda->has_graphs && step->binding != 0 && step->n_rows <= MAX_ROWS &&
           step->n_rows * cuda->launcher.places.table_pages <= MAX_WORK &&
           (cuda->rings != NULL || step->stream.gate == NULL);
}

/* A block may wait for the last page of its group while it holds the others: their slots, and those of the run that brings the page,
 * must not be the same. */
static bool is_tight(const kvs_stream_view *stream)
{
    return stream->gate != NULL && stream->n_slots - stream->run_slots < KVS_CUDA_GROUP_PAGES - 1;
}

static kvs_cuda_shape shape_of(const struct kvs_cuda *cuda, const struct kvs_step *step)
{
    return (kvs_cuda_shape){.binding = step->binding,
                            .generation = kvs_cuda_steps_generation(cuda->steps),
                            .table_pages = cuda->launcher.places.table_pages,
                            .n_rows = step->n_rows,
                            .n_out_rows = step->n_out_rows,
                            .n_axes = step->n_axes,
                            .has_positions = step->positions != NULL,
                            .is_tight = is_tight(&step->stream)};
}

static kvs_status begin_record(struct kvs_cuda *cuda)
{
    const kvs_status status = kvs_cuda_graphs_begin(cuda->graphs);
    if (status != KVS_OK) {
        return status;
    }
    const kvs_step_load_params params = kvs_cuda_steps_load(cuda->steps);
    const kvs_status launched = kvs_cuda_launch_step_load(&cuda->launcher, &params);
    if (launched != KVS_OK) {
        (void)kvs_cuda_graphs_end(cuda->graphs, &cuda->shape, false);
    }
    return launched;
}

kvs_status kvs_cuda_pass_begin(struct kvs_cuda *cuda, struct kvs_step *step)
{
    kvs_cuda_launcher *launcher = &cuda->launcher;
    cuda->turn = KVS_CUDA_SINGLY;
    launcher->is_recorded = 0;
    launcher->is_tight = 0;
    const kvs_status status = kvs_cuda_steps_begin(cuda->steps, step);
    if (status != KVS_OK) {
        return status;
    }
    launcher->places = kvs_cuda_steps_places(cuda->steps);
    if (may_record(cuda, step)) {
        cuda->shape = shape_of(cuda, step);
        cuda->turn = kvs_cuda_graphs_turn(cuda->graphs, &cuda->shape);
    }
    if (cuda->turn == KVS_CUDA_SINGLY) {
        return kvs_cuda_steps_send(cuda->steps);
    }
    step->takes_whole_layers = 1;
    step->notes = (const kvs_stream_note *)(const void *)kvs_cuda_steps_notes(cuda->steps);
    launcher->is_recorded = 1;
    launcher->is_tight = cuda->shape.is_tight;
    return cuda->turn == KVS_CUDA_RECORD ? begin_record(cuda) : KVS_OK;
}

static kvs_status launch_pass(struct kvs_cuda *cuda)
{
    kvs_status status = kvs_cuda_copies_be_quiet(cuda->copies);
    if (status == KVS_OK && cuda->rings != NULL && !kvs_cuda_rings_arm(cuda->rings)) {
        status = kvs_fail(cuda->device, KVS_EIO, "a copy of pages that the pass waits for has failed");
    }
    if (status == KVS_OK) {
        kvs_cuda_copies_gate_advanced(cuda->copies);
        status = kvs_cuda_graphs_launch(cuda->graphs, &cuda->shape);
    }
    return status;
}

kvs_status kvs_cuda_pass_end(struct kvs_cuda *cuda, bool is_whole)
{
    const bool is_launch = cuda->turn != KVS_CUDA_SINGLY && is_whole;
    kvs_status status = KVS_OK;
    if (cuda->turn == KVS_CUDA_RECORD) {
        status = kvs_cuda_graphs_end(cuda->graphs, &cuda->shape, is_whole);
    }
    if (status == KVS_OK && is_launch) {
        status = launch_pass(cuda);
    }
    const kvs_status ended = kvs_cuda_steps_end(cuda->steps, is_whole && status == KVS_OK);
    status = status == KVS_OK ? ended : status;
    if (status == KVS_OK && is_launch && cuda->rings != NULL && kvs_cuda_rings_gave_up(cuda->rings)) {
        status = kvs_fail(cuda->device, KVS_EIO, "the pass gave up: a page that it waited for did not arrive within %llu ms, or its "
                                                 "copy failed", (kvs_ull)(cuda->wait_limit_ns / 1000000));
    }
    return status;
}
