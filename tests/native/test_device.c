/* test_device.c: names and types, failures by thread, buffers and views, host history, fences, the
 * hook, accounting. */
#include "check.h"
#include "kvstream/device.h"

#include <string.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
/* A size that no machine has must be refused by the code under test, not by the sanitizer. */
const char *__asan_default_options(void);
const char *__tsan_default_options(void);

const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}

const char *__tsan_default_options(void)
{
    return "allocator_may_return_null=1";
}
#endif

static kvs_device *make_device(uint32_t flags)
{
    const kvs_device_desc desc = {.struct_size = sizeof desc, .flags = flags, .n_threads = 1};
    kvs_device *device = NULL;
    CHECK_OK(kvs_device_create(&desc, &device));
    return device;
}

static kvs_device_info info_of(kvs_device *device)
{
    kvs_device_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_device_get_info(device, &info));
    return info;
}

static void names_and_types_are_those_of_the_header(void)
{
    CHECK(strcmp(kvs_status_name(KVS_EBUSY), "KVS_EBUSY") == 0);
    CHECK(strcmp(kvs_status_name(-999), "KVS_UNKNOWN") == 0);
    CHECK(kvs_abi_version() >> 16 >= 1);
    static const struct {
        int type;
        const char *name;
        uint32_t values, bytes;
    } rows[] = {
        {KVS_TYPE_F32, "f32", 1, 4},           {KVS_TYPE_F16, "f16", 1, 2},
        {KVS_TYPE_BF16, "bf16", 1, 2},         {KVS_TYPE_Q4_0, "q4_0", 32, 18},
        {KVS_TYPE_Q4_1, "q4_1", 32, 20},       {KVS_TYPE_Q5_0, "q5_0", 32, 22},
        {KVS_TYPE_Q5_1, "q5_1", 32, 24},       {KVS_TYPE_Q8_0, "q8_0", 32, 34},
        {KVS_TYPE_Q2_K, "q2_k", 256, 84},      {KVS_TYPE_Q3_K, "q3_k", 256, 110},
        {KVS_TYPE_Q4_K, "q4_k", 256, 144},     {KVS_TYPE_Q5_K, "q5_k", 256, 176},
        {KVS_TYPE_Q6_K, "q6_k", 256, 210},     {KVS_TYPE_IQ4_NL, "iq4_nl", 32, 18},
        {KVS_TYPE_IQ4_XS, "iq4_xs", 256, 136}, {KVS_TYPE_IQ1_S, "iq1_s", 256, 50},
        {KVS_TYPE_IQ1_M, "iq1_m", 256, 56},    {KVS_TYPE_IQ2_XXS, "iq2_xxs", 256, 66},
        {KVS_TYPE_IQ2_XS, "iq2_xs", 256, 74},  {KVS_TYPE_IQ2_S, "iq2_s", 256, 82},
        {KVS_TYPE_IQ3_S, "iq3_s", 256, 110},   {KVS_TYPE_IQ3_XXS, "iq3_xxs", 256, 98},
        {KVS_TYPE_MXFP4, "mxfp4", 32, 17},     {KVS_TYPE_NVFP4, "nvfp4", 64, 36},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        uint32_t values = 0;
        uint32_t bytes = 0;
        CHECK_OK(kvs_type_block(rows[i].type, &values, &bytes));
        CHECK_U64(values, rows[i].values);
        CHECK_U64(bytes, rows[i].bytes);
        CHECK(strcmp(kvs_type_name(rows[i].type), rows[i].name) == 0);
    }
    uint32_t values = 7;
    uint32_t bytes = 7;
    static const int unknown[] = {-1, 4, 5, 9, 31, 1000, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        CHECK_STATUS(kvs_type_block(unknown[i], &values, &bytes), KVS_EUNSUPPORTED);
        CHECK(kvs_type_name(unknown[i]) == NULL);
    }
    CHECK(values == 7 && bytes == 7);
}

static void device_refuses_bad_fields(void)
{
    kvs_device *device = NULL;
    kvs_device_desc desc = {.struct_size = sizeof desc};
    CHECK_STATUS(kvs_device_create(NULL, &device), KVS_EINVAL);
    CHECK_STATUS(kvs_device_create(&desc, NULL), KVS_EINVAL);
    desc.struct_size = 4;
    CHECK_STATUS(kvs_device_create(&desc, &device), KVS_EINVAL);
    desc.struct_size = sizeof desc;
    desc.flags = 0x80000000u;
    CHECK_STATUS(kvs_device_create(&desc, &device), KVS_EINVAL);
    desc.flags = 0;
    desc.backend = 77;
    CHECK_STATUS(kvs_device_create(&desc, &device), KVS_EUNSUPPORTED);
    desc.backend = KVS_BACKEND_CPU;
    desc.isa = 99;
    CHECK_STATUS(kvs_device_create(&desc, &device), KVS_EINVAL);
    CHECK(device == NULL);
    kvs_device_release(NULL);
}

static void last_error_has_the_numbers_and_starts_empty(void)
{
    kvs_device *device = make_device(0);
    char text[200] = "x";
    CHECK_OK(kvs_device_last_error(device, text, sizeof text));
    CHECK(text[0] == '\0');
    kvs_buffer *buffer = NULL;
    CHECK_STATUS(kvs_buffer_create(device, 640, 48, &buffer), KVS_EINVAL);
    CHECK_OK(kvs_device_last_error(device, text, sizeof text));
    CHECK(strstr(text, "640") != NULL && strstr(text, "48") != NULL);
    char cut[6];
    CHECK_OK(kvs_device_last_error(device, cut, sizeof cut));
    CHECK(strlen(cut) == 5 && strncmp(cut, text, 5) == 0);
    CHECK_STATUS(kvs_device_last_error(device, text, 0), KVS_EINVAL);
    kvs_device_release(device);
}

static void buffer_refuses_bad_sizes(void)
{
    kvs_device *device = make_device(0);
    kvs_buffer *buffer = NULL;
    CHECK_STATUS(kvs_buffer_create(device, 0, 64, &buffer), KVS_EINVAL);
    CHECK_STATUS(kvs_buffer_create(device, 64, 32, &buffer), KVS_EINVAL);
    CHECK_STATUS(kvs_buffer_create(device, 64, 0, &buffer), KVS_EINVAL);
    CHECK_STATUS(kvs_buffer_create(device, UINT64_MAX / 2, 64, &buffer), KVS_ENOMEM);
    CHECK(buffer == NULL);
    CHECK_U64(info_of(device).live_objects, 0);
    CHECK_U64(info_of(device).device_bytes, 0);
    kvs_device_release(device);
}

static void views_rebase_onto_the_root_and_keep_it(void)
{
    kvs_device *device = make_device(0);
    kvs_buffer *root = NULL;
    kvs_buffer *view = NULL;
    kvs_buffer *inner = NULL;
    CHECK_OK(kvs_buffer_create(device, 4096, 256, &root));
    CHECK_OK(kvs_buffer_view(root, 1024, 2048, &view));
    CHECK_OK(kvs_buffer_view(view, 512, 1536, &inner));
    uint64_t base = 0;
    uint64_t address = 0;
    uint64_t bytes = 0;
    CHECK_OK(kvs_buffer_get_range(root, &base, &bytes));
    CHECK(base % 256 == 0 && bytes == 4096);
    CHECK_OK(kvs_buffer_get_range(inner, &address, &bytes));
    CHECK_U64(address, base + 1536);
    CHECK_U64(bytes, 1536);
    kvs_buffer *none = NULL;
    CHECK_STATUS(kvs_buffer_view(view, 0, 0, &none), KVS_EINVAL);
    CHECK_STATUS(kvs_buffer_view(view, 32, 64, &none), KVS_EINVAL);
    CHECK_STATUS(kvs_buffer_view(view, 0, 2049, &none), KVS_ENOSPACE);
    CHECK_STATUS(kvs_buffer_view(view, 64, UINT64_MAX - 63, &none), KVS_EOVERFLOW);
    CHECK(none == NULL);
    CHECK_U64(info_of(device).live_objects, 3);
    kvs_buffer_release(root);
    kvs_buffer_release(view);
    CHECK_U64(info_of(device).live_objects, 2); /* the middle view has gone, the root has not */
    CHECK_U64(info_of(device).device_bytes, 4096);
    memset((void *)(uintptr_t)address, 0x5a, (size_t)bytes);
    kvs_buffer_release(inner);
    CHECK_U64(info_of(device).live_objects, 0);
    CHECK_U64(info_of(device).device_bytes, 0);
    CHECK_U64(info_of(device).device_peak_bytes, 4096);
    kvs_device_release(device);
}

static void children_outlive_the_owner_of_the_device(void)
{
    kvs_device *device = make_device(0);
    kvs_buffer *buffer = NULL;
    kvs_host *host = NULL;
    kvs_fence *fence = NULL;
    CHECK_OK(kvs_buffer_create(device, 64, 64, &buffer));
    CHECK_OK(kvs_host_create(device, 5000, &host));
    CHECK_OK(kvs_fence_create(device, &fence));
    kvs_device_release(device);
    CHECK_U64(info_of(device).live_objects, 3);
    const char bytes[] = "written after the owner left";
    char back[sizeof bytes] = {0};
    CHECK_OK(kvs_host_write_wait(host, 100, bytes, sizeof bytes));
    CHECK_OK(kvs_host_read_wait(host, 100, back, sizeof back));
    CHECK(memcmp(bytes, back, sizeof bytes) == 0);
    CHECK_OK(kvs_fence_signal(fence, KVS_OK));
    kvs_fence_release(fence);
    kvs_host_release(host);
    kvs_buffer_release(buffer);
}

static void host_history_counts_what_copies_wrote(uint32_t flags)
{
    kvs_device *device = make_device(flags);
    kvs_host *host = NULL;
    CHECK_STATUS(kvs_host_create(device, 0, &host), KVS_EINVAL);
    CHECK_OK(kvs_host_create(device, 3 * 4096 + 100, &host));
    CHECK_U64(info_of(device).host_bytes, 3 * 4096 + 100);
    CHECK_U64(info_of(device).host_touched_bytes, 0);
    static unsigned char bytes[3 * 4096 + 100];
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = (unsigned char)(i * 7 + i / 256);
    }
    CHECK_OK(kvs_host_write_wait(host, 4000, bytes, 200)); /* over a page edge */
    CHECK_U64(info_of(device).host_touched_bytes, 2 * 4096);
    CHECK_OK(kvs_host_write_wait(host, 4000, bytes, 200)); /* again: nothing new */
    CHECK_U64(info_of(device).host_touched_bytes, 2 * 4096);
    CHECK_OK(kvs_host_write_wait(host, 0, bytes, sizeof bytes));
    CHECK_U64(info_of(device).host_touched_bytes, sizeof bytes);
    CHECK_U64(info_of(device).copies, 3);
    CHECK_U64(info_of(device).copied_bytes, 400 + sizeof bytes);
    static unsigned char back[sizeof bytes];
    CHECK_OK(kvs_host_read_wait(host, 0, back, sizeof back));
    CHECK(memcmp(bytes, back, sizeof bytes) == 0);
    CHECK_U64(info_of(device).copies, 4);
    CHECK_OK(kvs_host_read_wait(host, sizeof bytes, back, 0));
    CHECK_STATUS(kvs_host_read_wait(host, 1, back, sizeof bytes), KVS_ENOSPACE);
    CHECK_STATUS(kvs_host_write_wait(host, UINT64_MAX, bytes, 2), KVS_ENOSPACE);
    CHECK_STATUS(kvs_host_write_wait(host, 0, NULL, 2), KVS_EINVAL);
    CHECK_U64(info_of(device).device_bytes, 0);
    kvs_host_release(host);
    CHECK_U64(info_of(device).host_bytes, 0);
    CHECK_U64(info_of(device).host_touched_bytes, 0);
    CHECK_U64(info_of(device).live_objects, 0);
    kvs_device_release(device);
}

static void host_history_moves_more_than_one_bounce(void)
{
    enum { BYTES = (2 << 20) + 777 };
    static unsigned char bytes[BYTES];
    static unsigned char back[BYTES];
    for (size_t i = 0; i < BYTES; i++) {
        bytes[i] = (unsigned char)(i * 2654435761u >> 13);
    }
    kvs_device *device = make_device(0);
    kvs_host *host = NULL;
    CHECK_OK(kvs_host_create(device, BYTES, &host));
    CHECK_OK(kvs_host_write_wait(host, 0, bytes, BYTES));
    CHECK_OK(kvs_host_read_wait(host, 0, back, BYTES));
    CHECK(memcmp(bytes, back, BYTES) == 0);
    kvs_host_release(host);
    kvs_device_release(device);
}

typedef struct plan {
    int point;
    int answer;
    uint64_t left; /* calls at the point that still pass */
    uint64_t calls;
    uint64_t newest_index;
} plan;

static int follow_plan(void *user, int point, uint64_t index)
{
    plan *plan = user;
    if (point != plan->point) {
        return 0;
    }
    plan->calls++;
    plan->newest_index = index;
    if (plan->left > 0) {
        plan->left--;
        return 0;
    }
    return plan->answer;
}

static void hook_fails_allocations_and_nothing_leaks(void)
{
    kvs_device *device = make_device(0);
    for (uint64_t left = 0; left < 2; left++) {
        plan plan = {.point = KVS_HOOK_ALLOC, .answer = KVS_ENOMEM, .left = left};
        kvs_buffer *buffer = NULL;
        CHECK_OK(kvs_device_set_hook(device, follow_plan, &plan));
        CHECK_STATUS(kvs_buffer_create(device, 64, 64, &buffer), KVS_ENOMEM);
        CHECK(buffer == NULL && plan.calls == left + 1);
        plan.left = left;
        kvs_host *host = NULL;
        CHECK_STATUS(kvs_host_create(device, 64, &host), KVS_ENOMEM);
        CHECK(host == NULL);
        CHECK_OK(kvs_device_set_hook(device, NULL, NULL));
        CHECK_U64(info_of(device).live_objects, 0);
        CHECK_U64(info_of(device).device_bytes, 0);
        CHECK_U64(info_of(device).host_bytes, 0);
    }
    plan plan = {.point = KVS_HOOK_FENCE, .answer = KVS_EIO};
    kvs_fence *fence = NULL;
    CHECK_OK(kvs_device_set_hook(device, follow_plan, &plan));
    CHECK_STATUS(kvs_fence_create(device, &fence), KVS_EIO);
    CHECK_STATUS(kvs_fence_create(device, &fence), KVS_EIO);
    CHECK_U64(plan.newest_index, 1);
    plan.answer = KVS_PENDING; /* only copies may be skipped */
    CHECK_STATUS(kvs_fence_create(device, &fence), KVS_EINVAL);
    CHECK(fence == NULL);
    kvs_device_release(device);
}

static void hook_fails_or_skips_copies(uint32_t flags)
{
    kvs_device *device = make_device(flags);
    kvs_host *host = NULL;
    CHECK_OK(kvs_host_create(device, 4096, &host));
    const char old_bytes[8] = "old old";
    const char new_bytes[8] = "new new";
    char back[8];
    CHECK_OK(kvs_host_write_wait(host, 0, old_bytes, 8));
    plan plan = {.point = KVS_HOOK_COPY, .answer = KVS_EIO};
    CHECK_OK(kvs_device_set_hook(device, follow_plan, &plan));
    CHECK_STATUS(kvs_host_write_wait(host, 0, new_bytes, 8), KVS_EIO);
    plan.answer = KVS_PENDING;
    CHECK_OK(kvs_host_write_wait(host, 0, new_bytes, 8));
    CHECK_OK(kvs_device_set_hook(device, NULL, NULL));
    CHECK_OK(kvs_host_read_wait(host, 0, back, 8));
    CHECK(memcmp(back, old_bytes, 8) == 0); /* success was reported, not a byte was moved */
    CHECK_OK(kvs_host_write_wait(host, 0, new_bytes, 8));
    CHECK_OK(kvs_host_read_wait(host, 0, back, 8));
    CHECK(memcmp(back, new_bytes, 8) == 0);
    kvs_host_release(host);
    kvs_device_release(device);
}

static void run_copies_belongs_to_deferred_devices(void)
{
    uint32_t ran = 77;
    kvs_device *device = make_device(0);
    CHECK_STATUS(kvs_device_run_copies(device, 1, &ran), KVS_EINVAL);
    CHECK_U64(ran, 77);
    CHECK_OK(kvs_device_drain(device));
    kvs_device_release(device);
    device = make_device(KVS_DEVICE_DEFERRED);
    CHECK_OK(kvs_device_run_copies(device, 9, &ran));
    CHECK_U64(ran, 0);
    CHECK_OK(kvs_device_drain(device));
    kvs_device_release(device);
}

static void fence_completes_once_and_its_status_sticks(void)
{
    kvs_device *device = make_device(0);
    kvs_fence *fence = NULL;
    CHECK_OK(kvs_fence_create(device, &fence));
    CHECK_STATUS(kvs_fence_query(fence), KVS_PENDING);
    CHECK_STATUS(kvs_fence_wait(fence, 0), KVS_PENDING);
    CHECK_STATUS(kvs_fence_wait(fence, 1000), KVS_PENDING);
    CHECK_STATUS(kvs_fence_signal(fence, KVS_PENDING), KVS_EINVAL);
    CHECK_OK(kvs_fence_signal(fence, KVS_EIO));
    CHECK_STATUS(kvs_fence_signal(fence, KVS_OK), KVS_EINVAL);
    CHECK_STATUS(kvs_fence_query(fence), KVS_EIO);
    CHECK_STATUS(kvs_fence_wait(fence, UINT64_MAX), KVS_EIO);
    kvs_fence_retain(fence);
    kvs_fence_release(fence);
    CHECK_STATUS(kvs_fence_query(fence), KVS_EIO);
    kvs_fence_release(fence);
    CHECK_U64(info_of(device).live_objects, 0);
    CHECK_STATUS(kvs_fence_query(NULL), KVS_EINVAL);
    kvs_fence_release(NULL);
    kvs_device_release(device);
}

int main(void)
{
    names_and_types_are_those_of_the_header();
    device_refuses_bad_fields();
    last_error_has_the_numbers_and_starts_empty();
    buffer_refuses_bad_sizes();
    views_rebase_onto_the_root_and_keep_it();
    children_outlive_the_owner_of_the_device();
    host_history_counts_what_copies_wrote(0);
    host_history_counts_what_copies_wrote(KVS_DEVICE_DEFERRED);
    host_history_counts_what_copies_wrote(KVS_DEVICE_STRICT_HISTORY);
    host_history_moves_more_than_one_bounce();
    hook_fails_allocations_and_nothing_leaks();
    hook_fails_or_skips_copies(0);
    hook_fails_or_skips_copies(KVS_DEVICE_DEFERRED);
    run_copies_belongs_to_deferred_devices();
    fence_completes_once_and_its_status_sticks();
    return check_finish();
}
