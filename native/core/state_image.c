/* state_image.c: a state's bytes, to another state or to the caller.
 *
 * An image: header | geometry of each layer | of each layer matrix, convolution tail, pending log rows | checksum of all
 * before it. Numbers are little endian. Loading checks all of it before it touches anything.
 */
#include "core/delta.h"
#include "core/device.h"
#include "core/state_sides.h"

#include <string.h>

#define IMAGE_VERSION 1u

static const char MAGIC[8] = {'K', 'V', 'S', 'S', 'T', 'A', 'T', 'E'};

typedef struct image_header {
    char magic[8];
    uint32_t version;
    uint32_t n_layers;
    uint64_t n_bytes;
    uint64_t n_folded;
    uint32_t n_pending;
    uint32_t reserved;
} image_header;

typedef struct image_layer {
    uint32_t n_key_heads;
    uint32_t n_value_heads;
    uint32_t head_dim;
    uint32_t conv_width;
    float norm_eps;
    uint32_t reserved;
} image_layer;

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "images are written as they lie in memory, which must be little endian"
#endif

static image_layer describe(const kvs_delta_layer *layer)
{
    return (image_layer){.n_key_heads = layer->n_key_heads,
                         .n_value_heads = layer->n_value_heads,
                         .head_dim = layer->head_dim,
                         .conv_width = layer->conv_width,
                         .norm_eps = layer->norm_eps};
}

/* Each step is a bijection of the sum and of the word, so that no change of one word goes unseen. */
static uint64_t checksum(const uint8_t *bytes, uint64_t n_bytes)
{
    uint64_t sum = n_bytes;
    for (uint64_t at = 0; at < n_bytes; at += sizeof sum) {
        const uint64_t left = n_bytes - at;
        uint64_t word = 0;
        memcpy(&word, bytes + at, left < sizeof word ? (size_t)left : sizeof word);
        sum = (sum ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        sum = sum << 29 | sum >> 35;
    }
    return sum;
}

/* ---- the parts of a layer ---- */

typedef struct part {
    uint64_t offset; /* in the state's memory */
    uint64_t n_bytes;
} part;

enum { N_PARTS = 3 };

static void parts_of(const kvs_state_layer *layer, uint32_t bank, uint32_t log, uint32_t n_pending, part parts[N_PARTS])
{
    parts[0] = (part){layer->matrix[bank], kvs_delta_matrix_values(&layer->layer) * sizeof(float)};
    parts[1] = (part){layer->conv[bank], kvs_delta_conv_values(&layer->layer) * sizeof(float)};
    parts[2] = (part){layer->log[log], n_pending * kvs_delta_log_values(&layer->layer) * sizeof(float)};
}

/* Asks the hook before each transfer; *skips: it wants success without a byte. */
static kvs_status ask_copy(kvs_state *state, bool *skips)
{
    const kvs_status status = kvs_hook_ask(state->device, KVS_HOOK_COPY);
    *skips = status == KVS_PENDING;
    return status >= 0 ? KVS_OK : kvs_fail(state->device, status, "injected fault at a copy of a state");
}

/* Every part of the state in the given sides, in the order of an image: into an image, or from one. The other is NULL. */
static kvs_status move_parts(kvs_state *state, uint32_t side_flip, uint32_t n_pending, uint8_t *into, const uint8_t *from)
{
    const struct kvs_device_view backend = kvs_device_backend(state->device);
    uint64_t at = 0;
    for (uint32_t i = 0; i < state->n_layers; i++) {
        part parts[N_PARTS];
        parts_of(&state->layers[i], state->bank ^ side_flip, state->log ^ side_flip, n_pending, parts);
        for (uint32_t j = 0; j < N_PARTS && parts[j].n_bytes != 0; j++) {
            const uint64_t address = state->address + parts[j].offset, n_bytes = parts[j].n_bytes;
            bool skips;
            kvs_status status = ask_copy(state, &skips);
            if (status == KVS_OK && !skips) {
                status = into != NULL ? backend.backend->device_read(backend.self, address, n_bytes, into + at)
                                      : backend.backend->device_write(backend.self, address, n_bytes, from + at);
            }
            if (status != KVS_OK) {
                return status;
            }
            at += n_bytes;
        }
    }
    return KVS_OK;
}

/* ---- from state to state ---- */

kvs_status kvs_state_copy(kvs_state *from, kvs_state *to)
{
    if (from == NULL || to == NULL || from == to) {
        return kvs_fail(from != NULL ? from->device : to != NULL ? to->device : NULL, KVS_EINVAL, "copy of a state: two are needed");
    }
    if (from->device != to->device || from->n_layers != to->n_layers || from->log_rows != to->log_rows) {
        return kvs_fail(to->device, KVS_EINVAL, "a state of %u layers and %u log rows cannot be copied to %u and %u",
                        from->n_layers, from->log_rows, to->n_layers, to->log_rows);
    }
    for (uint32_t i = 0; i < from->n_layers; i++) {
        if (!kvs_delta_layer_equal(&from->layers[i].layer, &to->layers[i].layer)) {
            return kvs_fail(to->device, KVS_EINVAL, "recurrent layer %u differs", i);
        }
    }
    kvs_status status = kvs_state_check_idle(from);
    if (status == KVS_OK) {
        status = kvs_state_check_idle(to);
    }
    const struct kvs_device_view backend = kvs_device_backend(to->device);
    for (uint32_t i = 0; status == KVS_OK && i < from->n_layers; i++) {
        part sources[N_PARTS], targets[N_PARTS];
        parts_of(&from->layers[i], from->bank, from->log, from->n_pending, sources);
        parts_of(&to->layers[i], to->bank ^ 1, to->log ^ 1, from->n_pending, targets);
        for (uint32_t j = 0; status == KVS_OK && j < N_PARTS && sources[j].n_bytes != 0; j++) {
            bool skips = false;
            status = ask_copy(to, &skips);
            if (status == KVS_OK && !skips) {
                status = backend.backend->device_move(backend.self, from->address + sources[j].offset,
                                                      to->address + targets[j].offset, sources[j].n_bytes);
            }
        }
    }
    if (status == KVS_OK) {
        to->log ^= 1;
        kvs_state_turn(to, from->n_folded, from->n_pending);
    }
    return status;
}

/* ---- images ---- */

static uint64_t image_bytes(const kvs_state *state, uint32_t n_pending)
{
    uint64_t n_bytes = sizeof(image_header) + state->n_layers * sizeof(image_layer) + sizeof(uint64_t);
    for (uint32_t i = 0; i < state->n_layers; i++) {
        part parts[N_PARTS];
        parts_of(&state->layers[i], 0, 0, n_pending, parts);
        n_bytes += parts[0].n_bytes + parts[1].n_bytes + parts[2].n_bytes;
    }
    return n_bytes;
}

kvs_status kvs_state_get_info(kvs_state *state, kvs_state_info *info)
{
    if (state == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_fail(state == NULL ? NULL : state->device, KVS_EINVAL, "state: no place for what is asked");
    }
    *info = (kvs_state_info){.struct_size = info->struct_size,
                             .n_layers = state->n_layers,
                             .log_rows = state->log_rows,
                             .pending_rows = state->n_pending,
                             .open_rows = state->n_open,
                             .position = state->n_folded + state->n_pending,
                             .folded_tokens = state->n_folded,
                             .seq_id = state->seq_id,
                             .generation = state->generation,
                             .device_bytes = state->n_bytes,
                             .image_bytes = image_bytes(state, state->n_pending)};
    return KVS_OK;
}

kvs_status kvs_state_save(kvs_state *state, void *bytes, uint64_t n_bytes)
{
    if (state == NULL || bytes == NULL) {
        return kvs_fail(state == NULL ? NULL : state->device, KVS_EINVAL, "image of a state: no state, or no bytes");
    }
    kvs_status status = kvs_state_check_idle(state);
    const uint64_t needed = image_bytes(state, state->n_pending);
    if (status == KVS_OK && n_bytes != needed) {
        status = kvs_fail(state->device, KVS_EINVAL, "the image has %llu bytes, not %llu", (kvs_ull)needed, (kvs_ull)n_bytes);
    }
    if (status != KVS_OK) {
        return status;
    }
    image_header header = {.version = IMAGE_VERSION,
                           .n_layers = state->n_layers,
                           .n_bytes = n_bytes,
                           .n_folded = state->n_folded,
                           .n_pending = state->n_pending};
    memcpy(header.magic, MAGIC, sizeof MAGIC);
    uint8_t *at = bytes;
    memcpy(at, &header, sizeof header);
    at += sizeof header;
    for (uint32_t i = 0; i < state->n_layers; i++, at += sizeof(image_layer)) {
        const image_layer layer = describe(&state->layers[i].layer);
        memcpy(at, &layer, sizeof layer);
    }
    status = move_parts(state, 0, state->n_pending, at, NULL);
    if (status == KVS_OK) {
        const uint64_t sum = checksum(bytes, n_bytes - sizeof sum);
        memcpy((uint8_t *)bytes + n_bytes - sizeof sum, &sum, sizeof sum);
    }
    return status;
}

static kvs_status refuse(kvs_state *state, const char *what)
{
    return kvs_fail(state->device, KVS_EFORMAT, "the image of a state is refused: %s", what);
}

/* Header, length and checksum; then what it is an image of. */
static kvs_status check_image(kvs_state *state, const uint8_t *bytes, uint64_t n_bytes, image_header *header)
{
    uint64_t sum;
    if (n_bytes < sizeof *header + sizeof sum) {
        return refuse(state, "it is too short");
    }
    memcpy(header, bytes, sizeof *header);
    memcpy(&sum, bytes + n_bytes - sizeof sum, sizeof sum);
    if (memcmp(header->magic, MAGIC, sizeof MAGIC) != 0) {
        return refuse(state, "it is none");
    }
    if (header->version != IMAGE_VERSION) {
        return refuse(state, "it is of another version");
    }
    if (header->n_bytes != n_bytes || sum != checksum(bytes, n_bytes - sizeof sum)) {
        return refuse(state, "it is damaged");
    }
    if (header->n_layers != state->n_layers || header->n_pending > KVS_STATE_MAX_LOG_ROWS ||
        n_bytes != image_bytes(state, header->n_pending)) {
        return refuse(state, "it is of another geometry");
    }
    for (uint32_t i = 0; i < state->n_layers; i++) {
        const image_layer layer = describe(&state->layers[i].layer);
        if (memcmp(bytes + sizeof *header + i * sizeof layer, &layer, sizeof layer) != 0) {
            return refuse(state, "it is of another geometry");
        }
    }
    return header->n_folded <= UINT64_MAX - header->n_pending ? KVS_OK : refuse(state, "its position is out of range");
}

kvs_status kvs_state_load(kvs_state *state, const void *bytes, uint64_t n_bytes)
{
    if (state == NULL || bytes == NULL) {
        return kvs_fail(state == NULL ? NULL : state->device, KVS_EINVAL, "image of a state: no state, or no bytes");
    }
    image_header header;
    kvs_status status = kvs_state_check_idle(state);
    if (status == KVS_OK) {
        status = check_image(state, bytes, n_bytes, &header);
    }
    if (status == KVS_OK && header.n_pending > state->log_rows) {
        status = kvs_fail(state->device, KVS_ENOSPACE, "%u pending rows, the log holds %u", header.n_pending, state->log_rows);
    }
    if (status != KVS_OK) {
        return status;
    }
    const uint8_t *at = (const uint8_t *)bytes + sizeof header + state->n_layers * sizeof(image_layer);
    status = move_parts(state, 1, header.n_pending, NULL, at);
    if (status == KVS_OK) {
        state->log ^= 1;
        kvs_state_turn(state, header.n_folded, header.n_pending);
    }
    return status;
}

/* ---- images of some of the layers ---- */

static kvs_delta_layer sizes_of(const image_layer *layer)
{
    return (kvs_delta_layer){.n_key_heads = layer->n_key_heads,
                             .n_value_heads = layer->n_value_heads,
                             .head_dim = layer->head_dim,
                             .conv_width = layer->conv_width,
                             .norm_eps = layer->norm_eps};
}

/* Bytes of a layer whose sizes are in range. */
static uint64_t layer_bytes(const image_layer *layer, uint32_t n_pending)
{
    const kvs_delta_layer sizes = sizes_of(layer);
    return sizeof(float) * (kvs_delta_matrix_values(&sizes) + kvs_delta_conv_values(&sizes) +
                            n_pending * kvs_delta_log_values(&sizes));
}

/* Header and layers of an image that is whole: its length follows from them, and its checksum is right. */
static kvs_status read_image(const uint8_t *bytes, uint64_t n_bytes, image_header *header)
{
    uint64_t sum;
    if (n_bytes < sizeof *header + sizeof sum) {
        return KVS_EFORMAT;
    }
    memcpy(header, bytes, sizeof *header);
    memcpy(&sum, bytes + n_bytes - sizeof sum, sizeof sum);
    const uint64_t n_left = n_bytes - sizeof *header - sizeof sum;
    if (memcmp(header->magic, MAGIC, sizeof MAGIC) != 0 || header->version != IMAGE_VERSION || header->n_bytes != n_bytes ||
        header->n_pending > KVS_STATE_MAX_LOG_ROWS || header->n_layers > n_left / sizeof(image_layer) ||
        sum != checksum(bytes, n_bytes - sizeof sum)) {
        return KVS_EFORMAT;
    }
    uint64_t n_needed = header->n_layers * sizeof(image_layer);
    for (uint32_t i = 0; i < header->n_layers; i++) {
        image_layer layer;
        memcpy(&layer, bytes + sizeof *header + i * sizeof layer, sizeof layer);
        const kvs_delta_layer sizes = sizes_of(&layer);
        if (kvs_delta_layer_check_sizes(NULL, &sizes, i) != KVS_OK) {
            return KVS_EFORMAT;
        }
        n_needed += layer_bytes(&layer, header->n_pending);
    }
    return n_needed == n_left ? KVS_OK : KVS_EFORMAT;
}

/* Where the bytes of a layer begin, in an image that was read; of the one behind the last, where they end. */
static uint64_t layer_offset(const uint8_t *bytes, const image_header *header, uint32_t n_before)
{
    uint64_t offset = sizeof *header + header->n_layers * sizeof(image_layer);
    for (uint32_t i = 0; i < n_before; i++) {
        image_layer layer;
        memcpy(&layer, bytes + sizeof *header + i * sizeof layer, sizeof layer);
        offset += layer_bytes(&layer, header->n_pending);
    }
    return offset;
}

static void finish_image(uint8_t *bytes, image_header header, uint32_t n_layers, uint64_t n_bytes)
{
    header.n_layers = n_layers;
    header.n_bytes = n_bytes;
    memcpy(bytes, &header, sizeof header);
    const uint64_t sum = checksum(bytes, n_bytes - sizeof sum);
    memcpy(bytes + n_bytes - sizeof sum, &sum, sizeof sum);
}

kvs_status kvs_state_image_cut(const void *image, uint64_t n_bytes, uint32_t first_layer, uint32_t n_layers, void *part,
                               uint64_t *part_bytes)
{
    image_header header;
    if (image == NULL || part_bytes == NULL || n_layers == 0) {
        return KVS_EINVAL;
    }
    const kvs_status status = read_image(image, n_bytes, &header);
    if (status != KVS_OK) {
        return status;
    }
    if (first_layer > header.n_layers || n_layers > header.n_layers - first_layer) {
        return KVS_EINVAL;
    }
    const uint8_t *from = image;
    const uint64_t begin = layer_offset(from, &header, first_layer);
    const uint64_t n_data = layer_offset(from, &header, first_layer + n_layers) - begin;
    const uint64_t n_part = sizeof header + n_layers * sizeof(image_layer) + n_data + sizeof(uint64_t);
    if (part != NULL) {
        if (*part_bytes != n_part) {
            return KVS_EINVAL;
        }
        uint8_t *into = part;
        memcpy(into + sizeof header, from + sizeof header + first_layer * sizeof(image_layer), n_layers * sizeof(image_layer));
        memcpy(into + sizeof header + n_layers * sizeof(image_layer), from + begin, n_data);
        finish_image(into, header, n_layers, n_part);
    }
    *part_bytes = n_part;
    return KVS_OK;
}

kvs_status kvs_state_image_join(const void *first, uint64_t first_bytes, const void *second, uint64_t second_bytes, void *joined,
                                uint64_t *joined_bytes)
{
    image_header a, b;
    if (first == NULL || second == NULL || joined_bytes == NULL) {
        return KVS_EINVAL;
    }
    kvs_status status = read_image(first, first_bytes, &a);
    if (status == KVS_OK) {
        status = read_image(second, second_bytes, &b);
    }
    if (status != KVS_OK) {
        return status;
    }
    if (a.n_folded != b.n_folded || a.n_pending != b.n_pending) {
        return KVS_EINVAL;
    }
    const uint64_t n_joined = first_bytes + second_bytes - sizeof a - sizeof(uint64_t);
    if (joined != NULL) {
        if (*joined_bytes != n_joined) {
            return KVS_EINVAL;
        }
        const uint8_t *from[2] = {first, second};
        const image_header headers[2] = {a, b};
        uint8_t *layers = (uint8_t *)joined + sizeof a;
        uint8_t *data = layers + (a.n_layers + (uint64_t)b.n_layers) * sizeof(image_layer);
        for (uint32_t i = 0; i < 2; i++) {
            const uint64_t begin = layer_offset(from[i], &headers[i], 0);
            const uint64_t n_data = headers[i].n_bytes - begin - sizeof(uint64_t);
            memcpy(layers, from[i] + sizeof a, headers[i].n_layers * sizeof(image_layer));
            memcpy(data, from[i] + begin, n_data);
            layers += headers[i].n_layers * sizeof(image_layer);
            data += n_data;
        }
        finish_image(joined, a, a.n_layers + b.n_layers, n_joined);
    }
    *joined_bytes = n_joined;
    return KVS_OK;
}
