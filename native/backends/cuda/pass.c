/* pass.c: how a pass runs. Passes of decoding whose pages are all resident are recorded and launched again as one graph: kernels read
 * what changes from the step block (kernels/step_words.h), which is copied before the graph is launched, so that nothing is patched.
 * The host goes over the operations of such a pass as of any other one, so that pages are waited for, a pass can be cancelled and a
 * fault injected between two of them; nothing has been launched until the end.
 */
#include "backends/cuda/pass.h"

#include <string.h>

/* From this driver on a recorded kernel may begin while the one before it ends. */
#define EARLY_GRAPHS 12030u

static bool may_record(const struct kvs_cuda *cuda, const struct kvs_step *step)
{
    return cuda->graphs != NULL && step->binding != 0 && step->is_resident && step->n_rows <= KVS_CUDA_DECODE_ROWS;
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
    shape.has_records = kvs_cuda_steps_places(cuda->steps).records != 0;
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
    if (cuda->is_under_way) {
        return kvs_fail(cuda->device, KVS_EBUSY, "a pass of this card has been begun and has not ended");
    }
    cuda->turn = KVS_CUDA_SINGLY;
    cuda->n_recorded = 0;
    cuda->launcher.places = (kvs_cuda_places){.words = 0};
    const kvs_status status = kvs_cuda_steps_begin(cuda->steps, cuda->copies, step);
    cuda->launcher.places.records = kvs_cuda_steps_places(cuda->steps).records;
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
    if (turn != KVS_CUDA_SINGLY) {
        cuda->launcher.places = kvs_cuda_steps_places(cuda->steps);
    }
    return KVS_OK;
}

kvs_status kvs_cuda_pass_submit(struct kvs_cuda *cuda, bool is_whole)
{
    const kvs_cuda_turn turn = cuda->turn;
    kvs_status status = KVS_OK;
    cuda->turn = KVS_CUDA_SINGLY;
    cuda->launcher.places = (kvs_cuda_places){.words = 0};
    if (turn == KVS_CUDA_RECORD) {
        status = kvs_cuda_graphs_end(cuda->graphs, &cuda->shape, is_whole);
    }
    if (turn != KVS_CUDA_SINGLY && is_whole && status == KVS_OK) {
        status = kvs_cuda_graphs_launch(cuda->graphs, &cuda->shape);
    }
    if (status == KVS_OK && is_whole) {
        status = kvs_cuda_steps_fetch(cuda->steps);
    }
    cuda->is_under_way = status == KVS_OK && is_whole;
    return status;
}

kvs_status kvs_cuda_pass_end(struct kvs_cuda *cuda, bool is_whole)
{
    cuda->is_under_way = false;
    return kvs_cuda_steps_end(cuda->steps, is_whole);
}
