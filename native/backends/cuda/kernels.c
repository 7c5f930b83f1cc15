/* kernels.c: a list of images by key, and their functions. Keys are few and lookups many, so both have a table by hash. */
#include "backends/cuda/kernels.h"

#include "backends/cuda/waits.h"
#include "base/sync.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_CAPACITY 64u

struct image {
    kvs_kernel_key key;
    uint64_t hash;
    cu_module module; /* NULL: not given */
};

struct entry {
    uint64_t hash; /* of image and function; 0: free */
    char name[32];
    cu_function function;
    uint32_t shared_bytes;
};

struct kvs_cuda_kernels {
    kvs_device *device;
    const kvs_cuda_driver *driver;
    kvs_mutex lock;
    struct image *images;
    uint32_t n_images;
    uint32_t images_capacity;
    struct entry *entries; /* a power of two, at most half full */
    uint32_t n_entries;
    uint32_t entries_capacity;
};

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t n_bytes)
{
    const uint8_t *at = bytes;
    for (size_t i = 0; i < n_bytes; i++) {
        hash = (hash ^ at[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static uint64_t hash_key(const kvs_cuda_key *key)
{
    uint64_t hash = hash_bytes(UINT64_C(0xcbf29ce484222325), key->source, strlen(key->source) + 1);
    for (uint32_t i = 0; i < key->n_macros; i++) {
        hash = hash_bytes(hash, key->macros[i].name, strlen(key->macros[i].name) + 1);
        hash = hash_bytes(hash, &key->macros[i].value, sizeof key->macros[i].value);
    }
    return hash;
}

static bool is_same(const kvs_kernel_key *have, const kvs_cuda_key *key)
{
    if (have->n_macros != key->n_macros || strcmp(have->source, key->source) != 0) {
        return false;
    }
    for (uint32_t i = 0; i < key->n_macros; i++) {
        if (have->values[i] != key->macros[i].value || strcmp(have->names[i], key->macros[i].name) != 0) {
            return false;
        }
    }
    return true;
}

static struct image *find_image(const kvs_cuda_kernels *kernels, const kvs_cuda_key *key, uint64_t hash)
{
    for (uint32_t i = 0; i < kernels->n_images; i++) {
        if (kernels->images[i].hash == hash && is_same(&kernels->images[i].key, key)) {
            return &kernels->images[i];
        }
    }
    return NULL;
}

/* ---- life ---- */

kvs_status kvs_cuda_kernels_create(kvs_device *device, const kvs_cuda_driver *driver, kvs_cuda_kernels **kernels)
{
    kvs_cuda_kernels *made = calloc(1, sizeof *made);
    struct entry *entries = calloc(FIRST_CAPACITY, sizeof *entries);
    if (made == NULL || entries == NULL || !kvs_mutex_init(&made->lock)) {
        free(entries);
        free(made);
        return kvs_fail(device, KVS_ENOMEM, "no memory for a list of kernels");
    }
    made->device = device;
    made->driver = driver;
    made->entries = entries;
    made->entries_capacity = FIRST_CAPACITY;
    *kernels = made;
    return KVS_OK;
}

void kvs_cuda_kernels_destroy(kvs_cuda_kernels *kernels)
{
    if (kernels == NULL) {
        return;
    }
    for (uint32_t i = 0; i < kernels->n_images; i++) {
        if (kernels->images[i].module != NULL && kvs_cuda_waits_may_free(kernels->driver, 0)) {
            (void)kernels->driver->api.module_unload(kernels->images[i].module);
        }
    }
    free(kernels->images);
    free(kernels->entries);
    kvs_mutex_destroy(&kernels->lock);
    free(kernels);
}

/* ---- what is needed ---- */

static bool copy_name(char *to, size_t capacity, const char *from)
{
    const int length = snprintf(to, capacity, "%s", from);
    return length > 0 && (size_t)length < capacity;
}

static bool describe(const kvs_cuda_key *key, uint32_t arch, kvs_kernel_key *made)
{
    *made = (kvs_kernel_key){.struct_size = sizeof *made, .n_macros = key->n_macros, .arch = arch};
    if (key->n_macros > KVS_CUDA_MAX_MACROS || !copy_name(made->source, sizeof made->source, key->source)) {
        return false;
    }
    for (uint32_t i = 0; i < key->n_macros; i++) {
        made->values[i] = key->macros[i].value;
        if (!copy_name(made->names[i], sizeof made->names[i], key->macros[i].name)) {
            return false;
        }
    }
    return true;
}

static kvs_status add_image(kvs_cuda_kernels *kernels, const kvs_cuda_key *key, uint64_t hash)
{
    if (kernels->n_images == kernels->images_capacity) {
        const uint32_t capacity = kernels->images_capacity == 0 ? FIRST_CAPACITY : kernels->images_capacity * 2;
        struct image *images = realloc(kernels->images, capacity * sizeof *images);
        if (images == NULL) {
            return kvs_fail(kernels->device, KVS_ENOMEM, "no memory for a list of %u kernels", capacity);
        }
        kernels->images = images;
        kernels->images_capacity = capacity;
    }
    struct image *image = &kernels->images[kernels->n_images];
    if (!describe(key, kernels->driver->arch, &image->key)) {
        return kvs_fail(kernels->device, KVS_EINVAL, "kernel %s: too many macros, or a name that is too long", key->source);
    }
    image->hash = hash;
    image->module = NULL;
    kernels->n_images++;
    return KVS_OK;
}

kvs_status kvs_cuda_kernels_need(kvs_cuda_kernels *kernels, const kvs_cuda_key *key)
{
    const uint64_t hash = hash_key(key);
    kvs_mutex_lock(&kernels->lock);
    const kvs_status status = find_image(kernels, key, hash) != NULL ? KVS_OK : add_image(kernels, key, hash);
    kvs_mutex_unlock(&kernels->lock);
    return status;
}

uint32_t kvs_cuda_kernels_count(kvs_cuda_kernels *kernels)
{
    kvs_mutex_lock(&kernels->lock);
    const uint32_t count = kernels->n_images;
    kvs_mutex_unlock(&kernels->lock);
    return count;
}

kvs_status kvs_cuda_kernels_get(kvs_cuda_kernels *kernels, uint32_t index, kvs_kernel_key *key)
{
    const uint32_t struct_size = key->struct_size;
    kvs_mutex_lock(&kernels->lock);
    const bool is_there = index < kernels->n_images;
    if (is_there) {
        *key = kernels->images[index].key;
        key->has_image = kernels->images[index].module != NULL ? 1 : 0;
        key->struct_size = struct_size;
    }
    kvs_mutex_unlock(&kernels->lock);
    return is_there ? KVS_OK : kvs_fail(kernels->device, KVS_ENOTFOUND, "no needed kernel has number %u", index);
}

kvs_status kvs_cuda_kernels_give(kvs_cuda_kernels *kernels, uint32_t index, const void *image)
{
    kvs_status status = KVS_OK;
    kvs_mutex_lock(&kernels->lock);
    if (index >= kernels->n_images) {
        status = kvs_fail(kernels->device, KVS_ENOTFOUND, "no needed kernel has number %u", index);
    } else if (kernels->driver->api.library == NULL) {
        status = kvs_fail(kernels->device, KVS_EUNSUPPORTED, "this device plans without a card, and loads no kernel");
    } else if (kernels->images[index].module == NULL) {
        cu_module module = NULL;
        kvs_cuda_enter(kernels->driver);
        status = kvs_cuda_waits_admit(kernels->driver);
        status = status != KVS_OK ? status
                                  : KVS_CUDA_CALL(kernels->device, kernels->driver, module_load, &module, image);
        kvs_cuda_leave(kernels->driver);
        kernels->images[index].module = status == KVS_OK ? module : NULL;
    }
    kvs_mutex_unlock(&kernels->lock);
    return status;
}

/* ---- functions ---- */

static struct entry *place(struct entry *entries, uint32_t capacity, uint64_t hash, const char *name)
{
    uint32_t at = (uint32_t)hash & (capacity - 1);
    while (entries[at].hash != 0 && (entries[at].hash != hash || strcmp(entries[at].name, name) != 0)) {
        at = (at + 1) & (capacity - 1);
    }
    return &entries[at];
}

static bool grow_entries(kvs_cuda_kernels *kernels)
{
    if (kernels->n_entries < kernels->entries_capacity / 2) {
        return true;
    }
    const uint32_t capacity = kernels->entries_capacity * 2;
    struct entry *entries = calloc(capacity, sizeof *entries);
    if (entries == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < kernels->entries_capacity; i++) {
        if (kernels->entries[i].hash != 0) {
            *place(entries, capacity, kernels->entries[i].hash, kernels->entries[i].name) = kernels->entries[i];
        }
    }
    free(kernels->entries);
    kernels->entries = entries;
    kernels->entries_capacity = capacity;
    return true;
}

/* "attend with K=8 V=2" */
static kvs_status refuse_missing(const kvs_cuda_kernels *kernels, const kvs_cuda_key *key)
{
    char text[256];
    size_t at = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < key->n_macros && at < sizeof text; i++) {
        at += (size_t)snprintf(text + at, sizeof text - at, " %s=%d", key->macros[i].name, key->macros[i].value);
    }
    return kvs_fail(kernels->device, KVS_EUNSUPPORTED, "no image of kernel %s in %s with%s for sm_%u was given: it must be compiled, or come from a pack, before a pass",
                    key->kernel, key->source, text, kernels->driver->arch);
}

static kvs_status load_function(kvs_cuda_kernels *kernels, const kvs_cuda_key *key, uint64_t hash, struct entry *entry)
{
    const struct image *image = find_image(kernels, key, hash_key(key));
    if (image == NULL || image->module == NULL) {
        return refuse_missing(kernels, key);
    }
    cu_function function = NULL;
    const kvs_status status =
        KVS_CUDA_CALL(kernels->device, kernels->driver, module_function, &function, image->module, key->kernel);
    if (status == KVS_OK && copy_name(entry->name, sizeof entry->name, key->kernel)) {
        entry->function = function;
        entry->hash = hash;
        kernels->n_entries++;
        return KVS_OK;
    }
    return status != KVS_OK ? status
                            : kvs_fail(kernels->device, KVS_EINVAL, "the name of kernel %s is too long", key->kernel);
}

static kvs_status find_locked(kvs_cuda_kernels *kernels, const kvs_cuda_key *key, uint32_t shared_bytes,
                              cu_function *function)
{
    const uint64_t hash = hash_bytes(hash_key(key), key->kernel, strlen(key->kernel)) | 1;
    if (!grow_entries(kernels)) {
        return kvs_fail(kernels->device, KVS_ENOMEM, "no memory for a table of kernels");
    }
    struct entry *entry = place(kernels->entries, kernels->entries_capacity, hash, key->kernel);
    kvs_status status = entry->hash != 0 ? KVS_OK : load_function(kernels, key, hash, entry);
    /* What a block has without being asked for counts what the kernel declares too, so all is asked for. */
    if (status == KVS_OK && shared_bytes > entry->shared_bytes) {
        status = KVS_CUDA_CALL(kernels->device, kernels->driver, function_set, entry->function,
                               CU_FUNCTION_MAX_DYNAMIC_SHARED, (int)shared_bytes);
        entry->shared_bytes = status == KVS_OK ? shared_bytes : entry->shared_bytes;
    }
    *function = entry->function;
    return status;
}

kvs_status kvs_cuda_kernels_find(kvs_cuda_kernels *kernels, const kvs_cuda_key *key, uint32_t shared_bytes,
                                 cu_function *function)
{
    kvs_mutex_lock(&kernels->lock);
    const kvs_status status = find_locked(kernels, key, shared_bytes, function);
    kvs_mutex_unlock(&kernels->lock);
    return status;
}
