/* executor.c: binding a tape to addresses and replaying it. Between two operations a pass can be cancelled or an injected
 * fault can strike; inside one it cannot, so that a device is never left in the middle of an operation. */
#include "core/device.h"
#include "core/pager.h"
#include "core/state.h"
#include "core/tape.h"
#include "core/timeline.h"
#include "core/weight.h"

struct kvs_binding {
    kvs_device *device;
    kvs_tape *tape;
    kvs_arena *arena;
    kvs_lease *workspace;
    kvs_pager *pager; /* borrowed; NULL for a tape without attention */
    uint64_t epoch;
    uint64_t id; /* for backends; 0: passes of a prompt */
    kvs_bound_op *ops;
    kvs_rows_shape *outputs;
    kvs_rows_shape *inputs; /* behind the outputs */
    uint64_t pass;          /* number of the newest pass, 0 where none has succeeded; its rows */
    uint32_t n_rows;
    uint32_t n_out_rows;
    uint32_t had_front;
};

static void bind_operand(const kvs_tape *tape, uint32_t id, uint64_t workspace, kvs_operand *operand)
{
    if (id < tape->n_tensors && operand->output_slot == KVS_NONE) {
        operand->data = (float *)(uintptr_t)(workspace + tape->tensors[id].offset_bytes);
    }
}

static void bind_ops(kvs_binding *binding, uint64_t workspace)
{
    const kvs_tape *tape = binding->tape;
    for (uint32_t i = 0; i < tape->n_ops; i++) {
        kvs_bound_op *op = &binding->ops[i];
        kvs_tape_describe_op(tape, i, op);
        for (uint32_t j = 0; j < 3; j++) {
            bind_operand(tape, tape->ops[i].in[j], workspace, &op->in[j]);
        }
        for (uint32_t j = 0; j < 4; j++) {
            bind_operand(tape, tape->ops[i].out[j], workspace, &op->out[j]);
        }
        op->scratch = (void *)(uintptr_t)(workspace + tape->scratch_offset_bytes);
    }
}

static void bind_shapes(kvs_binding *binding)
{
    const kvs_tape *tape = binding->tape;
    for (uint32_t i = 0; i < tape->n_tensors; i++) {
        const kvs_tape_tensor *tensor = &tape->tensors[i];
        if (tensor->output_slot != KVS_NONE) {
            kvs_rows_shape *shapes = tensor->kind == KVS_TENSOR_INPUT ? binding->inputs : binding->outputs;
            shapes[tensor->output_slot] = (kvs_rows_shape){.cols = tensor->cols, .rows = tensor->rows};
        }
    }
    for (uint32_t i = 0; i < tape->n_ops; i++) {
        const kvs_bound_op *op = &binding->ops[i];
        if (op->code == KVS_OP_FRONT) {
            binding->outputs[op->out[0].output_slot].is_front = 1;
        }
    }
}

/* Passes of a prompt are wide, few, and each cut otherwise. */
static bool is_prompt(const kvs_tape *tape, const kvs_bound_op *ops)
{
    for (uint32_t i = 0; i < tape->n_ops; i++) {
        const bool is_chunked = ops[i].code == KVS_OP_DELTA && ops[i].u[0] == KVS_DELTA_CHUNKED;
        if (is_chunked || (ops[i].flags & KVS_OP_PROMPT) != 0) {
            return true;
        }
    }
    return false;
}

static kvs_status check_bind(kvs_tape *tape, kvs_arena *arena, kvs_lease *workspace, kvs_pager *pager)
{
    if (!tape->is_sealed) {
        return kvs_fail(tape->device, KVS_EINVAL, "a tape must be sealed before it is bound");
    }
    for (uint32_t i = 0; i < tape->n_weights; i++) {
        if (kvs_weight_get_view(tape->weights[i])->address == 0) {
            return kvs_fail(tape->device, KVS_EINVAL, "weight %u is declared only", i);
        }
    }
    if (kvs_lease_arena(workspace) != arena) {
        return kvs_fail(tape->device, KVS_EINVAL, "the workspace lease belongs to another arena");
    }
    if (kvs_lease_device(workspace) != tape->device) {
        return kvs_fail(tape->device, KVS_EINVAL, "the workspace lies on another device");
    }
    if (kvs_lease_bytes(workspace) < tape->workspace_bytes) {
        return kvs_fail(tape->device, KVS_ENOSPACE, "workspace: need %llu bytes, have %llu", (kvs_ull)tape->workspace_bytes,
                        (kvs_ull)kvs_lease_bytes(workspace));
    }
    if (tape->n_layers != 0 && pager == NULL) {
        return kvs_fail(tape->device, KVS_EINVAL, "a tape with attention needs a pager");
    }
    if (tape->n_layers != 0 && kvs_pager_device(pager) != tape->device) {
        return kvs_fail(tape->device, KVS_EINVAL, "the pager belongs to another device");
    }
    for (uint32_t i = 0; i < tape->n_layers; i++) {
        kvs_status status = kvs_pager_check_layers(pager, &tape->layers[i].kv, i, tape->n_layers);
        if (status != KVS_OK) {
            return status;
        }
    }
    return KVS_OK;
}

kvs_status kvs_tape_bind(kvs_tape *tape, kvs_arena *arena, kvs_lease *workspace, kvs_pager *pager, kvs_binding **binding)
{
    if (tape == NULL || arena == NULL || workspace == NULL || binding == NULL) {
        return kvs_refuse(tape == NULL ? NULL : tape->device);
    }
    kvs_status status = check_bind(tape, arena, workspace, pager);
    if (status != KVS_OK) {
        return status;
    }
    kvs_binding *made = kvs_object_alloc(tape->device, sizeof *made);
    kvs_bound_op *ops = made == NULL ? NULL : kvs_array_alloc(tape->device, tape->n_ops, sizeof *ops);
    const size_t n_shapes = (size_t)tape->n_outputs + tape->n_inputs + 1;
    kvs_rows_shape *outputs = ops == NULL ? NULL : kvs_array_alloc(tape->device, n_shapes, sizeof *outputs);
    if (outputs == NULL) {
        kvs_array_free(ops);
        if (made != NULL) {
            kvs_object_free(tape->device, made);
        }
        return kvs_fail(tape->device, KVS_ENOMEM, "no memory to bind %u operations", tape->n_ops);
    }
    kvs_tape_retain(tape);
    kvs_lease_retain(workspace);
    *made = (kvs_binding){.device = tape->device,
                          .tape = tape,
                          .arena = arena,
                          .workspace = workspace,
                          .pager = tape->n_layers == 0 ? NULL : pager,
                          .epoch = kvs_arena_epoch(arena),
                          .ops = ops,
                          .outputs = outputs,
                          .inputs = outputs + tape->n_outputs};
    bind_ops(made, kvs_lease_address(workspace));
    bind_shapes(made);
    made->id = is_prompt(tape, ops) ? 0 : kvs_device_next_id(tape->device);
    *binding = made;
    return KVS_OK;
}

void kvs_binding_release(kvs_binding *binding)
{
    if (binding == NULL) {
        return;
    }
    kvs_device *device = binding->device;
    struct kvs_device_view backend = kvs_device_backend(device);
    if (backend.backend->binding_forget != NULL && binding->id != 0) {
        backend.backend->binding_forget(backend.self, binding->id);
    }
    kvs_array_free(binding->ops);
    kvs_array_free(binding->outputs);
    kvs_lease_release(binding->workspace);
    kvs_tape_release(binding->tape);
    kvs_object_free(device, binding);
}

static kvs_status check_tokens(const kvs_binding *binding, const kvs_pass_desc *pass)
{
    for (uint32_t i = 0; i < binding->tape->n_ops; i++) {
        const kvs_bound_op *op = &binding->ops[i];
        if (op->code != KVS_OP_EMBED) {
            continue;
        }
        for (uint32_t row = 0; row < pass->n_rows; row++) {
            if (pass->tokens[row] >= op->weights[0]->n) {
                return kvs_fail(binding->device, KVS_EINVAL, "token %u of row %u is outside the vocabulary of %llu",
                                pass->tokens[row], row, (kvs_ull)op->weights[0]->n);
            }
        }
    }
    return KVS_OK;
}

static kvs_status check_pass(const kvs_binding *binding, const kvs_pass_desc *pass)
{
    const kvs_tape *tape = binding->tape;
    if (!KVS_STRUCT_OK(pass) || pass->tokens == NULL || pass->n_rows == 0 || pass->n_rows > tape->max_rows) {
        return kvs_fail(binding->device, KVS_EINVAL, "a pass needs tokens for 1 to %u rows", tape->max_rows);
    }
    if ((pass->flags & ~(uint32_t)KVS_PASS_FRONT) != 0) {
        return kvs_fail(binding->device, KVS_EINVAL, "flags %u of a pass are unknown", pass->flags);
    }
    if (pass->n_out_rows > tape->max_out_rows || (pass->n_out_rows != 0 && pass->out_rows == NULL)) {
        return kvs_fail(binding->device, KVS_EINVAL, "%u output rows, at most %u, with their numbers", pass->n_out_rows,
                        tape->max_out_rows);
    }
    if (pass->n_axes != 0 && pass->n_axes != 1 && pass->n_axes != 3) {
        return kvs_fail(binding->device, KVS_EINVAL, "positions have 1 or 3 axes, not %u", pass->n_axes);
    }
    for (uint32_t i = 0; i < pass->n_out_rows; i++) {
        bool rises = i == 0 || pass->out_rows[i] > pass->out_rows[i - 1];
        if (pass->out_rows[i] >= pass->n_rows || !rises) {
            return kvs_fail(binding->device, KVS_EINVAL, "output row %u is outside the pass or out of order", i);
        }
    }
    if (pass->n_outputs != tape->n_outputs || (tape->n_outputs != 0 && pass->outputs == NULL)) {
        return kvs_fail(binding->device, KVS_EINVAL, "%u outputs given, the tape has %u", pass->n_outputs, tape->n_outputs);
    }
    const bool has_own_memory = kvs_device_backend(binding->device).backend->read_output != NULL;
    for (uint32_t i = 0; i < pass->n_outputs; i++) {
        if (pass->outputs[i] == NULL && !has_own_memory) {
            return kvs_fail(binding->device, KVS_EINVAL, "output %u has no memory", i);
        }
    }
    if (pass->n_inputs != tape->n_inputs || (tape->n_inputs != 0 && pass->inputs == NULL)) {
        return kvs_fail(binding->device, KVS_EINVAL, "%u inputs given, the tape has %u", pass->n_inputs, tape->n_inputs);
    }
    for (uint32_t i = 0; i < pass->n_inputs; i++) {
        if (pass->inputs[i] == NULL) {
            return kvs_fail(binding->device, KVS_EINVAL, "input %u has no memory", i);
        }
    }
    if (kvs_arena_epoch(binding->arena) != binding->epoch) {
        return kvs_fail(binding->device, KVS_ESTALE, "bound at epoch %llu, the arena is at %llu", (kvs_ull)binding->epoch,
                        (kvs_ull)kvs_arena_epoch(binding->arena));
    }
    return check_tokens(binding, pass);
}

/* Attention pulls its pages wave by wave, so that it starts on the first pages while later ones are still under way. */
static kvs_status run_attend(const kvs_binding *binding, const kvs_bound_op *op, const struct kvs_step *step,
                             uint64_t active_pages)
{
    struct kvs_device_view backend = kvs_device_backend(binding->device);
    kvs_status status = backend.backend->attend_begin(backend.self, op, step);
    if (status == KVS_OK && step->takes_whole_layers) {
        status = backend.backend->attend_wave(backend.self, op, step, 0, active_pages);
        return status == KVS_OK ? backend.backend->attend_finish(backend.self, op, step) : status;
    }
    for (uint64_t begin = 0; status == KVS_OK && begin < active_pages;) {
        uint64_t end = begin;
        status = kvs_pager_acquire_wave(binding->pager, op->layer, begin, &end);
        if (status == KVS_OK) {
            status = backend.backend->attend_wave(backend.self, op, step, begin, end);
        }
        if (status == KVS_OK) {
            status = kvs_pager_release_wave(binding->pager, op->layer, begin, end);
        }
        begin = end;
    }
    return status == KVS_OK ? backend.backend->attend_finish(backend.self, op, step) : status;
}

static bool is_cancelled(const kvs_pass_desc *pass)
{
    return pass->cancel != NULL && __atomic_load_n(pass->cancel, __ATOMIC_RELAXED) != 0;
}

static kvs_status run_ops(const kvs_binding *binding, const kvs_pass_desc *pass, const struct kvs_step *step,
                          uint64_t active_pages)
{
    struct kvs_device_view backend = kvs_device_backend(binding->device);
    for (uint32_t i = 0; i < binding->tape->n_ops; i++) {
        if (is_cancelled(pass)) {
            return kvs_fail(binding->device, KVS_ECANCELLED, "cancelled before operation %u", i);
        }
        kvs_status status = kvs_hook_ask(binding->device, KVS_HOOK_OP);
        if (status != KVS_OK) {
            return kvs_fail(binding->device, status, "injected fault at operation %u", i);
        }
        const kvs_bound_op *op = &binding->ops[i];
        if (op->code == KVS_OP_FRONT && (pass->flags & KVS_PASS_FRONT) == 0) {
            continue;
        }
        status = op->code == KVS_OP_ATTEND ? run_attend(binding, op, step, active_pages)
                                           : backend.backend->run_op(backend.self, op, step);
        if (status != KVS_OK) {
            return status;
        }
    }
    return KVS_OK;
}

static kvs_status replay(kvs_binding *binding, const kvs_pass_desc *pass, struct kvs_step *step, uint64_t active_pages)
{
    struct kvs_device_view backend = kvs_device_backend(binding->device);
    binding->pass = 0;
    kvs_status status = backend.backend->pass_begin(backend.self, step);
    if (status != KVS_OK) {
        return status;
    }
    status = run_ops(binding, pass, step, active_pages);
    const bool takes_layers = step->takes_whole_layers && binding->pager != NULL;
    if (status == KVS_OK && takes_layers) {
        status = kvs_pager_open_layers(binding->pager);
    }
    const kvs_status ended = backend.backend->pass_end(backend.self, status == KVS_OK);
    status = status == KVS_OK ? ended : status;
    if (status == KVS_OK && takes_layers) {
        status = kvs_pager_close_layers(binding->pager, step->notes);
    }
    if (status == KVS_OK) {
        binding->pass = step->number;
        binding->n_rows = step->n_rows;
        binding->n_out_rows = step->n_out_rows;
        binding->had_front = step->has_front;
    }
    return status;
}

static kvs_status open_state(const kvs_binding *binding, const kvs_pass_desc *pass, const kvs_pass_view *view,
                             const kvs_delta_view **deltas)
{
    const kvs_tape *tape = binding->tape;
    if (tape->n_deltas == 0) {
        return pass->state == NULL ? KVS_OK
                                   : kvs_fail(binding->device, KVS_EINVAL, "a state for a tape without recurrent layers");
    }
    if (pass->state == NULL || binding->pager == NULL) {
        return kvs_fail(binding->device, KVS_EINVAL, "a tape with recurrent layers needs a pager and the sequence's state");
    }
    return kvs_state_open_pass(pass->state, view, tape->deltas, tape->n_deltas, tape->is_logged, deltas);
}

kvs_status kvs_binding_run(kvs_binding *binding, const kvs_pass_desc *pass)
{
    if (binding == NULL || pass == NULL) {
        return kvs_refuse(binding == NULL ? NULL : binding->device);
    }
    kvs_status status = check_pass(binding, pass);
    if (status != KVS_OK) {
        return status;
    }
    kvs_pass_view view = {.n_rows = pass->n_rows, .is_resident = true};
    if (binding->pager != NULL) {
        status = kvs_pager_view_pass(binding->pager, &view);
    }
    if (status == KVS_OK && view.n_rows != pass->n_rows) {
        status = kvs_fail(binding->device, KVS_EINVAL, "the open pass has %u rows, this one %u", view.n_rows, pass->n_rows);
    }
    if (status != KVS_OK) {
        return status;
    }
    const kvs_delta_view *deltas = NULL;
    status = open_state(binding, pass, &view, &deltas);
    if (status != KVS_OK) {
        return status;
    }
    struct kvs_step step = {.n_rows = pass->n_rows,
                            .n_out_rows = pass->n_out_rows,
                            .tokens = pass->tokens,
                            .positions = pass->positions,
                            .n_axes = pass->n_axes == 0 ? 1 : pass->n_axes,
                            .deltas = deltas,
                            .n_deltas = binding->tape->n_deltas,
                            .is_resident = view.is_resident,
                            .stream = view.stream,
                            .binding = binding->id,
                            .out_rows = pass->out_rows,
                            .outputs = pass->outputs,
                            .inputs = pass->inputs,
                            .output_shapes = binding->outputs,
                            .input_shapes = binding->inputs,
                            .n_outputs = pass->n_outputs,
                            .n_inputs = pass->n_inputs,
                            .has_front = (pass->flags & KVS_PASS_FRONT) != 0,
                            .n_layers = view.n_layers,
                            .active_pages = view.active_pages,
                            .first_token = view.first_token,
                            .cache_id = view.cache_id,
                            .page_tables = view.page_tables};
    const uint64_t begin_ns = kvs_timeline_begin(binding->device);
    status = replay(binding, pass, &step, view.active_pages);
    kvs_timeline_end(binding->device, begin_ns,
                     (kvs_event){.kind = KVS_EVENT_REPLAY, .first = view.first_token, .n_rows = pass->n_rows});
    return status;
}

kvs_status kvs_binding_get_pass(kvs_binding *binding, uint64_t *pass)
{
    if (binding == NULL || pass == NULL) {
        return kvs_refuse(binding == NULL ? NULL : binding->device);
    }
    *pass = binding->pass;
    return KVS_OK;
}

kvs_status kvs_binding_read_output(kvs_binding *binding, uint64_t pass, uint32_t output, uint32_t first_row, uint32_t n_rows,
                                   float *to)
{
    if (binding == NULL || to == NULL) {
        return kvs_refuse(binding == NULL ? NULL : binding->device);
    }
    struct kvs_device_view backend = kvs_device_backend(binding->device);
    if (backend.backend->read_output == NULL) {
        return kvs_fail(binding->device, KVS_EUNSUPPORTED, "outputs stay on no device but a card: the caller has all of them");
    }
    if (output >= binding->tape->n_outputs) {
        return kvs_fail(binding->device, KVS_EINVAL, "output %u of %u", output, binding->tape->n_outputs);
    }
    if (pass == 0 || pass != binding->pass) {
        return kvs_fail(binding->device, KVS_ESTALE, "outputs of pass %llu, the newest one of this binding is %llu", (kvs_ull)pass,
                        (kvs_ull)binding->pass);
    }
    const kvs_rows_shape *shape = &binding->outputs[output];
    const uint32_t of_pass = shape->rows == KVS_ROWS_OUT ? binding->n_out_rows : binding->n_rows;
    const uint32_t have = shape->is_front && !binding->had_front ? 0 : of_pass;
    if (n_rows > have || first_row > have - n_rows) {
        return kvs_fail(binding->device, KVS_EINVAL, "%u rows from row %u on of an output of %u rows", n_rows, first_row, have);
    }
    const uint64_t row_bytes = shape->cols * sizeof(float);
    return backend.backend->read_output(backend.self, pass, output, first_row * row_bytes, n_rows * row_bytes, to);
}
