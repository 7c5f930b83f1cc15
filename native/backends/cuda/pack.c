/* pack.c: reading a file of images. Nothing of it is believed before its digest has been seen to be right, and offsets not even
 * then: who makes a file also makes its digest. */
#include "backends/cuda/pack.h"

#include <stdlib.h>
#include <string.h>

#define VERSION 1u
#define IMAGE_ALIGNMENT 64u

static const char MAGIC[8] = {'K', 'V', 'S', 'K', 'P', 'A', 'C', 'K'};

/* As they lie in the file: no field needs padding, and the library runs on little-endian machines alone. */
typedef struct header {
    char magic[8];
    uint32_t version;
    uint32_t n_images;
    uint64_t n_bytes;
    uint64_t zero;
    uint8_t kernels[KVS_DIGEST_BYTES];
    uint8_t digest[KVS_DIGEST_BYTES];
} header;

typedef struct entry {
    char source[32];
    char names[KVS_KERNEL_MAX_MACROS][24];
    int32_t values[KVS_KERNEL_MAX_MACROS];
    uint32_t n_macros;
    uint32_t arch;
    uint64_t offset;
    uint64_t n_bytes;
    uint8_t digest[KVS_DIGEST_BYTES];
} entry;

_Static_assert(sizeof(header) == 96 && sizeof(entry) == 312, "a pack has no padding");

static void digest_of(const void *bytes, size_t n_bytes, const void *more, size_t n_more, uint8_t out[KVS_DIGEST_BYTES])
{
    kvs_digest digest;
    kvs_digest_begin(&digest);
    kvs_digest_add(&digest, bytes, n_bytes);
    kvs_digest_add(&digest, more, n_more);
    kvs_digest_end(&digest, out);
}

static kvs_status check_header(kvs_device *device, const header *head, const uint8_t kernels[KVS_DIGEST_BYTES],
                               const void *pack, uint64_t n_bytes)
{
    if (memcmp(head->magic, MAGIC, sizeof MAGIC) != 0) {
        return kvs_fail(device, KVS_EFORMAT, "this is no pack of kernels: it does not begin with KVSKPACK");
    }
    if (head->version != VERSION) {
        return kvs_fail(device, KVS_EFORMAT, "the pack has version %u of the format, this library reads version %u",
                        head->version, VERSION);
    }
    if (head->n_bytes != n_bytes || head->n_images > (n_bytes - sizeof *head) / sizeof(entry)) {
        return kvs_fail(device, KVS_EFORMAT, "the pack says %llu bytes with %u kernels, the file has %llu",
                        (kvs_ull)head->n_bytes, head->n_images, (kvs_ull)n_bytes);
    }
    uint8_t digest[KVS_DIGEST_BYTES];
    digest_of(pack, offsetof(header, digest), (const uint8_t *)pack + sizeof *head, head->n_images * sizeof(entry), digest);
    if (memcmp(digest, head->digest, sizeof digest) != 0) {
        return kvs_fail(device, KVS_EFORMAT, "the pack is damaged: its table of %u kernels does not match its digest",
                        head->n_images);
    }
    if (memcmp(head->kernels, kernels, KVS_DIGEST_BYTES) != 0) {
        return kvs_fail(device, KVS_EFORMAT,
                        "the pack was made of other kernels, of an older or newer version: make it anew with this one");
    }
    return KVS_OK;
}

static bool is_text(const char *characters, size_t room)
{
    return memchr(characters, '\0', room) != NULL;
}

static bool is_sound(const entry *item, uint64_t table_end, uint64_t n_bytes)
{
    uint64_t end;
    bool is_good = item->n_macros <= KVS_KERNEL_MAX_MACROS && is_text(item->source, sizeof item->source) &&
                   item->n_bytes != 0 && item->offset >= table_end && item->offset % IMAGE_ALIGNMENT == 0 &&
                   kvs_add_u64(item->offset, item->n_bytes, &end) && end <= n_bytes;
    for (uint32_t i = 0; is_good && i < item->n_macros; i++) {
        is_good = is_text(item->names[i], sizeof item->names[i]);
    }
    return is_good;
}

static bool is_of(const entry *item, const kvs_kernel_key *key)
{
    if (item->arch != key->arch || item->n_macros != key->n_macros || strcmp(item->source, key->source) != 0) {
        return false;
    }
    for (uint32_t i = 0; i < key->n_macros; i++) {
        if (item->values[i] != key->values[i] || strcmp(item->names[i], key->names[i]) != 0) {
            return false;
        }
    }
    return true;
}

/* Entries of a table, whose bytes need not be aligned. */
static entry entry_at(const uint8_t *table, uint32_t index)
{
    entry item;
    memcpy(&item, table + index * sizeof item, sizeof item);
    return item;
}

/* The images to load, by number of the needed kernel; the offset 0 is no image. */
static kvs_status choose(kvs_device *device, kvs_cuda_kernels *kernels, const header *head, const uint8_t *pack,
                         uint32_t n_needed, uint64_t *offsets)
{
    const uint8_t *const table = pack + sizeof *head;
    const uint64_t table_end = sizeof *head + (uint64_t)head->n_images * sizeof(entry);
    for (uint32_t i = 0; i < head->n_images; i++) {
        const entry item = entry_at(table, i);
        if (!is_sound(&item, table_end, head->n_bytes)) {
            return kvs_fail(device, KVS_EFORMAT, "the pack is damaged: entry %u of its table lies outside of it", i);
        }
        for (uint32_t at = 0; at < n_needed; at++) {
            kvs_kernel_key key = {.struct_size = sizeof key};
            const kvs_status status = kvs_cuda_kernels_get(kernels, at, &key);
            if (status != KVS_OK) {
                return status;
            }
            if (key.has_image != 0 || offsets[at] != 0 || !is_of(&item, &key)) {
                continue;
            }
            uint8_t digest[KVS_DIGEST_BYTES];
            digest_of(pack + item.offset, (size_t)item.n_bytes, NULL, 0, digest);
            if (memcmp(digest, item.digest, sizeof digest) != 0) {
                return kvs_fail(device, KVS_EFORMAT, "the pack is damaged: its image of %s, %llu bytes, does not match its digest",
                                item.source, (kvs_ull)item.n_bytes);
            }
            offsets[at] = item.offset;
        }
    }
    return KVS_OK;
}

kvs_status kvs_cuda_pack_give(kvs_device *device, kvs_cuda_kernels *kernels, const uint8_t digest[KVS_DIGEST_BYTES],
                              const void *pack, uint64_t n_bytes, uint32_t *n_given)
{
    header head;
    if (n_bytes < sizeof head) {
        return kvs_fail(device, KVS_EFORMAT, "this is no pack of kernels: it has %llu bytes", (kvs_ull)n_bytes);
    }
    memcpy(&head, pack, sizeof head);
    kvs_status status = check_header(device, &head, digest, pack, n_bytes);
    if (status != KVS_OK) {
        return status;
    }
    const uint32_t n_needed = kvs_cuda_kernels_count(kernels);
    uint64_t *offsets = calloc((size_t)n_needed + 1, sizeof *offsets);
    if (offsets == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "no memory for a list of %u kernels", n_needed);
    }
    uint32_t n_loaded = 0;
    status = choose(device, kernels, &head, pack, n_needed, offsets);
    for (uint32_t at = 0; status == KVS_OK && at < n_needed; at++) {
        if (offsets[at] != 0) {
            status = kvs_cuda_kernels_give(kernels, at, (const uint8_t *)pack + offsets[at]);
            n_loaded += status == KVS_OK;
        }
    }
    free(offsets);
    if (status == KVS_OK) {
        *n_given = n_loaded;
    }
    return status;
}
