/* step.c: the step block: a pinned picture in host memory and the same bytes on the device.
 *
 * Layout: words, recurrent layers, what rings need, tokens, positions, output rows, then a page table for each layer, all of one
 * length. Tables
 * rarely change between two passes of a resident conversation, so they are sent only when they do. */
#include "backends/cuda/step.h"

#include "backends/cuda/waits.h"
#include "core/backend.h"

#include <stdlib.h>
#include <string.h>

/* Sizes grow in steps of this, so that a growing conversation rarely allocates. */
#define GRAIN ((uint64_t)64 << 10)
#define TABLE_GRAIN 64u
#define ALIGNMENT 256u
/* Cells before the tickets: one word in a line of its own. */
#define FIRST_TICKET 64u

/* Device memory that only grows. */
struct area {
    uint64_t address;
    uint64_t bytes;
};

struct kvs_cuda_steps {
    kvs_device *device;
    const kvs_cuda_driver *driver;
    cu_stream stream;
    kvs_cuda_memory *memory;
    kvs_cuda_rings *rings;
    kvs_cuda_step_waits waits;
    kvs_step_note *notes; /* pinned, [notes_capacity] */
    uint32_t notes_capacity;
    struct area block;
    uint8_t *picture; /* pinned, block.bytes */
    uint64_t sent_at;    /* where tables of the last pass began, and how many bytes they had */
    uint64_t sent_bytes;
    struct area outputs;
    struct area inputs;
    uint64_t generation; /* rises when an area moves */
    kvs_cuda_places places;
    /* Of the pass under way. */
    const uint64_t **tables;
    uint32_t tables_capacity;
    float **out;          /* on the device */
    float *const *caller; /* where they go */
    uint64_t *out_bytes;  /* of each that goes there */
    uint32_t out_capacity;
    uint32_t n_outputs;
    uint64_t n_passes;    /* begun so far: the number of the newest one */
    const float **in; /* on the device */
    uint32_t in_capacity;
    uint32_t n_rows;
    uint64_t first_token;
};

kvs_status kvs_cuda_steps_create(kvs_device *device, const kvs_cuda_driver *driver, cu_stream stream,
                                 kvs_cuda_memory *memory, kvs_cuda_rings *rings, kvs_cuda_step_waits waits,
                                 kvs_cuda_steps **steps)
{
    kvs_cuda_steps *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "no memory for a step block");
    }
    made->device = device;
    made->driver = driver;
    made->stream = stream;
    made->memory = memory;
    made->rings = rings;
    made->waits = waits;
    *steps = made;
    return KVS_OK;
}

static void free_area(kvs_cuda_steps *steps, struct area *area)
{
    if (area->bytes != 0) {
        kvs_cuda_memory_free(steps->memory, area->address, area->bytes);
        kvs_device_count_bytes(steps->device, -(int64_t)area->bytes);
        *area = (struct area){0};
    }
}

/* Before the block, whose size it has. */
static void free_picture(kvs_cuda_steps *steps)
{
    if (steps->picture != NULL && kvs_cuda_waits_may_free(steps->driver, steps->block.bytes)) {
        (void)steps->driver->api.host_free(steps->picture);
    }
    steps->picture = NULL;
}

static void free_notes(kvs_cuda_steps *steps)
{
    if (steps->notes != NULL && kvs_cuda_waits_may_free(steps->driver, steps->notes_capacity * sizeof *steps->notes)) {
        (void)steps->driver->api.host_free(steps->notes);
    }
    steps->notes = NULL;
    steps->notes_capacity = 0;
}

void kvs_cuda_steps_destroy(kvs_cuda_steps *steps)
{
    if (steps == NULL) {
        return;
    }
    free_picture(steps);
    free_notes(steps);
    free_area(steps, &steps->block);
    free_area(steps, &steps->outputs);
    free_area(steps, &steps->inputs);
    free(steps->tables);
    free(steps->out);
    free(steps->out_bytes);
    free(steps->in);
    free(steps);
}

/* Nothing is under way between two passes, so what is there may go. */
static kvs_status grow_area(kvs_cuda_steps *steps, struct area *area, uint64_t bytes)
{
    if (bytes <= area->bytes) {
        return KVS_OK;
    }
    const uint64_t wanted = kvs_div_up(bytes, GRAIN) * GRAIN;
    free_area(steps, area);
    steps->generation++;
    const kvs_status status = kvs_cuda_memory_alloc(steps->memory, wanted, ALIGNMENT, &area->address);
    if (status != KVS_OK) {
        return status;
    }
    area->bytes = wanted;
    kvs_device_count_bytes(steps->device, (int64_t)wanted);
    return KVS_OK;
}

static kvs_status grow_block(kvs_cuda_steps *steps, uint64_t bytes)
{
    if (bytes <= steps->block.bytes) {
        return KVS_OK;
    }
    free_picture(steps);
    steps->sent_bytes = 0;
    kvs_status status = grow_area(steps, &steps->block, bytes);
    if (status == KVS_OK) {
        void *memory = NULL;
        status = KVS_CUDA_CALL(steps->device, steps->driver, host_alloc, &memory, (size_t)steps->block.bytes,
                               CU_MEM_HOST_PORTABLE);
        steps->picture = memory;
    }
    if (status != KVS_OK) {
        free_area(steps, &steps->block);
    }
    return status;
}

static bool grow_arrays(kvs_cuda_steps *steps, const struct kvs_step *step)
{
    if (step->n_layers > steps->tables_capacity) {
        const uint64_t **tables = realloc(steps->tables, step->n_layers * sizeof *tables);
        if (tables == NULL) {
            return false;
        }
        steps->tables = tables;
        steps->tables_capacity = step->n_layers;
    }
    if (step->n_outputs > steps->out_capacity) {
        float **out = realloc(steps->out, step->n_outputs * sizeof *out);
        steps->out = out == NULL ? steps->out : out;
        uint64_t *out_bytes = realloc(steps->out_bytes, step->n_outputs * sizeof *out_bytes);
        steps->out_bytes = out_bytes == NULL ? steps->out_bytes : out_bytes;
        if (out == NULL || out_bytes == NULL) {
            return false;
        }
        steps->out_capacity = step->n_outputs;
    }
    if (step->n_inputs > steps->in_capacity) {
        const float **in = realloc(steps->in, step->n_inputs * sizeof *in);
        if (in == NULL) {
            return false;
        }
        steps->in = in;
        steps->in_capacity = step->n_inputs;
    }
    return true;
}

/* Put words into the picture; returns where they lie on the device. */
static const uint32_t *put_words(kvs_cuda_steps *steps, uint64_t *at, const uint32_t *words, uint64_t n_words)
{
    if (words == NULL) {
        return NULL;
    }
    const uint64_t address = steps->block.address + *at;
    memcpy(steps->picture + *at, words, (size_t)n_words * sizeof *words);
    *at += kvs_div_up(n_words * sizeof *words, 16) * 16;
    return (const uint32_t *)(uintptr_t)address;
}

/* Whether anything was new. */
static bool put_tables(kvs_cuda_steps *steps, const struct kvs_step *step, uint64_t at, uint64_t table_pages)
{
    const uint64_t table_bytes = table_pages * sizeof(uint64_t);
    const uint64_t used_bytes = step->active_pages * sizeof(uint64_t);
    bool is_new = steps->sent_at != at || steps->sent_bytes != step->n_layers * table_bytes;
    for (uint32_t layer = 0; layer < step->n_layers; layer++) {
        uint8_t *to = steps->picture + at + layer * table_bytes;
        if (is_new || memcmp(to, step->page_tables[layer], (size_t)used_bytes) != 0) {
            memcpy(to, step->page_tables[layer], (size_t)used_bytes);
            is_new = true;
        }
        steps->tables[layer] = (const uint64_t *)(uintptr_t)(steps->block.address + at + layer * table_bytes);
    }
    return is_new;
}

static uint64_t bytes_of(const kvs_rows_shape *shape, const struct kvs_step *step)
{
    const uint64_t rows = shape->rows == KVS_ROWS_OUT ? step->n_out_rows : step->n_rows;
    return rows * shape->cols * sizeof(float);
}

/* What the caller brings: sent before anything reads it, in the compute order. */
static kvs_status send_inputs(kvs_cuda_steps *steps, const struct kvs_step *step)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < step->n_inputs; i++) {
        end += kvs_div_up(bytes_of(&step->input_shapes[i], step), ALIGNMENT) * ALIGNMENT;
    }
    kvs_status status = grow_area(steps, &steps->inputs, end);
    uint64_t at = steps->inputs.address;
    for (uint32_t i = 0; status == KVS_OK && i < step->n_inputs; i++) {
        const uint64_t n_bytes = bytes_of(&step->input_shapes[i], step);
        steps->in[i] = (const float *)(uintptr_t)at;
        status = kvs_cuda_memory_upload(steps->memory, at, step->inputs[i], n_bytes);
        at += kvs_div_up(n_bytes, ALIGNMENT) * ALIGNMENT;
    }
    return status;
}

static kvs_status place_outputs(kvs_cuda_steps *steps, const struct kvs_step *step)
{
    uint64_t end = 0;
    steps->n_outputs = step->n_outputs;
    steps->caller = step->outputs;
    for (uint32_t i = 0; i < step->n_outputs; i++) {
        end += kvs_div_up(bytes_of(&step->output_shapes[i], step), ALIGNMENT) * ALIGNMENT;
    }
    const kvs_status status = grow_area(steps, &steps->outputs, end);
    uint64_t at = steps->outputs.address;
    for (uint32_t i = 0; i < step->n_outputs; i++) {
        const uint64_t n_bytes = bytes_of(&step->output_shapes[i], step);
        const bool is_written = !step->output_shapes[i].is_front || step->has_front;
        steps->out[i] = (float *)(uintptr_t)at;
        steps->out_bytes[i] = is_written && step->outputs[i] != NULL ? n_bytes : 0;
        at += kvs_div_up(n_bytes, ALIGNMENT) * ALIGNMENT;
    }
    return status;
}

static uint64_t reserve(uint64_t *end, uint64_t bytes)
{
    const uint64_t at = *end;
    *end += kvs_div_up(bytes, 16) * 16;
    return at;
}

static uint64_t number_of(const float *address)
{
    return (uint64_t)(uintptr_t)address;
}

static void put_deltas(kvs_cuda_steps *steps, const struct kvs_step *step, uint64_t at)
{
    kvs_step_delta *deltas = (kvs_step_delta *)(void *)(steps->picture + at);
    for (uint32_t i = 0; i < step->n_deltas; i++) {
        const kvs_delta_view *of = &step->deltas[i];
        deltas[i] = (kvs_step_delta){.matrix_in = number_of(of->matrix_in),
                                     .conv_in = number_of(of->conv_in),
                                     .log_in = number_of(of->log_in),
                                     .matrix_out = number_of(of->matrix_out),
                                     .conv_out = number_of(of->conv_out),
                                     .log_out = number_of(of->log_out),
                                     .n_pending = of->n_pending};
    }
}

static kvs_status grow_notes(kvs_cuda_steps *steps, uint32_t n_layers)
{
    if (steps->rings == NULL || n_layers <= steps->notes_capacity) {
        return KVS_OK;
    }
    free_notes(steps);
    void *memory = NULL;
    const kvs_status status = KVS_CUDA_CALL(steps->device, steps->driver, host_alloc, &memory,
                                            n_layers * sizeof *steps->notes, CU_MEM_HOST_PORTABLE);
    if (status == KVS_OK) {
        memset(memory, 0, n_layers * sizeof *steps->notes);
        steps->notes = memory;
        steps->notes_capacity = n_layers;
    }
    return status;
}

/* Where a pass's parts lie in the picture. */
struct places_at {
    uint64_t deltas;
    uint64_t layers;
    uint64_t cells; /* zeros: whether the pass is given up, in a line of its own, then tickets */
};

static void put_stream(kvs_cuda_steps *steps, const struct kvs_step *step, const struct places_at *at, uint64_t n_cells,
                       kvs_step_words *words)
{
    kvs_step_layer *layers = (kvs_step_layer *)(void *)(steps->picture + at->layers);
    for (uint32_t i = 0; i < step->n_layers; i++) {
        const kvs_stream_layer *of = &step->stream.layers[i];
        layers[i] = (kvs_step_layer){.first_demand = of->first_demand,
                                     .note = (uint64_t)(uintptr_t)&steps->notes[i],
                                     .first_page = of->first_page,
                                     .end_page = of->end_page};
    }
    memset(steps->picture + at->cells, 0, (size_t)n_cells * sizeof(uint32_t));
    words->given_up = steps->block.address + at->cells;
    words->limit_ns = steps->waits.limit_ns;
    kvs_cuda_rings_describe(steps->rings, &step->stream, words);
}

static kvs_status make_room(kvs_cuda_steps *steps, const struct kvs_step *step, uint64_t bytes)
{
    steps->n_rows = step->n_rows;
    steps->first_token = step->first_token;
    if (!grow_arrays(steps, step)) {
        return kvs_fail(steps->device, KVS_ENOMEM, "no memory for the step of %u layers", step->n_layers);
    }
    kvs_status status = grow_block(steps, bytes);
    if (status == KVS_OK) {
        status = grow_notes(steps, step->n_layers);
    }
    if (status == KVS_OK) {
        status = place_outputs(steps, step);
    }
    return status == KVS_OK ? send_inputs(steps, step) : status;
}

kvs_status kvs_cuda_steps_begin(kvs_cuda_steps *steps, struct kvs_step *step)
{
    step->number = ++steps->n_passes;
    const uint64_t n_positions = (uint64_t)step->n_axes * step->n_rows;
    const uint64_t table_pages = kvs_div_up(step->active_pages, TABLE_GRAIN) * TABLE_GRAIN;
    const uint64_t tables_bytes = step->n_layers * table_pages * sizeof(uint64_t);
    uint64_t end = 0;
    (void)reserve(&end, sizeof(kvs_step_words));
    const bool is_streamed = steps->rings != NULL && !step->is_resident;
    const uint64_t n_cells = is_streamed ? FIRST_TICKET + step->n_layers * table_pages : 0;
    struct places_at places;
    places.deltas = reserve(&end, step->n_deltas * sizeof(kvs_step_delta));
    places.layers = reserve(&end, is_streamed ? step->n_layers * sizeof(kvs_step_layer) : 0);
    places.cells = reserve(&end, n_cells * sizeof(uint32_t));
    uint64_t at = end;
    (void)reserve(&end, step->n_rows * sizeof(uint32_t));
    (void)reserve(&end, n_positions * sizeof(uint32_t));
    (void)reserve(&end, step->n_out_rows * sizeof(uint32_t));
    const uint64_t tables_at = kvs_div_up(end, ALIGNMENT) * ALIGNMENT;
    kvs_status status = make_room(steps, step, tables_at + tables_bytes);
    if (status != KVS_OK) {
        return status;
    }
    kvs_step_words *words = (kvs_step_words *)(void *)steps->picture;
    *words = (kvs_step_words){.first_token = step->first_token, .delay_ns = steps->waits.delay_ns};
    put_deltas(steps, step, places.deltas);
    if (is_streamed) {
        put_stream(steps, step, &places, n_cells, words);
    }
    step->tokens = put_words(steps, &at, step->tokens, step->n_rows);
    step->positions = put_words(steps, &at, step->positions, n_positions);
    step->out_rows = put_words(steps, &at, step->out_rows, step->n_out_rows);
    const bool is_new = put_tables(steps, step, tables_at, table_pages);
    step->page_tables = steps->tables;
    step->outputs = steps->out;
    step->inputs = steps->in;
    steps->places = (kvs_cuda_places){.words = steps->block.address,
                                      .deltas = steps->block.address + places.deltas,
                                      .layers = is_streamed ? steps->block.address + places.layers : 0,
                                      .tickets = steps->block.address + places.cells + FIRST_TICKET * sizeof(uint32_t),
                                      .table_pages = table_pages};
    /* Unknown until the copy has been given to the driver. */
    steps->sent_bytes = 0;
    status = KVS_CUDA_CALL(steps->device, steps->driver, copy, steps->block.address, (uint64_t)(uintptr_t)steps->picture,
                           (size_t)(is_new ? tables_at + tables_bytes : at), steps->stream);
    steps->sent_at = tables_at;
    steps->sent_bytes = status == KVS_OK ? tables_bytes : 0;
    return status;
}

kvs_cuda_places kvs_cuda_steps_places(const kvs_cuda_steps *steps)
{
    return steps->places;
}

uint64_t kvs_cuda_steps_generation(const kvs_cuda_steps *steps)
{
    return steps->generation;
}

kvs_status kvs_cuda_steps_end(kvs_cuda_steps *steps, bool is_whole)
{
    kvs_status status = kvs_cuda_wait_stream(steps->driver, steps->stream, "the end of a pass of %u rows behind %llu tokens",
                                             steps->n_rows, (kvs_ull)steps->first_token);
    for (uint32_t i = 0; is_whole && status == KVS_OK && i < steps->n_outputs; i++) {
        if (steps->out_bytes[i] != 0) {
            status = kvs_cuda_memory_download(steps->memory, steps->caller[i], (uint64_t)(uintptr_t)steps->out[i],
                                              steps->out_bytes[i]);
        }
    }
    return status;
}

kvs_status kvs_cuda_steps_read(kvs_cuda_steps *steps, uint64_t number, uint32_t output, uint64_t offset, uint64_t bytes, void *to)
{
    if (number != steps->n_passes) {
        return kvs_fail(steps->device, KVS_ESTALE, "outputs of pass %llu of the device: pass %llu has overwritten them",
                        (kvs_ull)number, (kvs_ull)steps->n_passes);
    }
    return bytes == 0 ? KVS_OK
                      : kvs_cuda_memory_download(steps->memory, to, (uint64_t)(uintptr_t)steps->out[output] + offset, bytes);
}

const kvs_step_note *kvs_cuda_steps_notes(const kvs_cuda_steps *steps)
{
    return steps->notes;
}
