/* test_state_image.c: the laws of images and copies of a state: taken back whole, refused whole, and a transfer that fails
 * leaves the old state. */
#include "state_scene.h"

static void test_an_image_is_taken_back_by_any_log_it_fits(void)
{
    scene *s = open_scene(rig_device(0, 0));
    take(s, 4, true, 4, 0.5f);
    take(s, 4, true, 2, 0.25f);
    uint64_t n_bytes;
    uint8_t *image = save(s->state, &n_bytes);
    const uint32_t log_rows[] = {1, 2, 50};
    for (int i = 0; i < 3; i++) {
        kvs_state *other = NULL;
        s->desc.log_rows = log_rows[i];
        CHECK_OK(kvs_state_create(s->device, &s->desc, &other));
        CHECK_STATUS(kvs_state_load(other, image, n_bytes), log_rows[i] < 2 ? KVS_ENOSPACE : KVS_OK);
        CHECK_U64(info_of(other).position, log_rows[i] < 2 ? 0 : 6);
        CHECK(log_rows[i] < 2 || saves(other, image, n_bytes));
        CHECK_STATUS(kvs_state_copy(s->state, other), KVS_EINVAL);
        kvs_state_release(other);
    }
    free(image);
    close_scene(s);
}

static void test_every_damaged_byte_is_refused(void)
{
    scene *s = open_scene(rig_device(0, 0));
    take(s, 1, true, 1, 0.5f);
    uint64_t n_bytes;
    uint8_t *image = save(s->state, &n_bytes);
    const uint64_t generation = info_of(s->state).generation;
    uint64_t n_refused = 0;
    for (uint64_t at = 0; at < n_bytes; at++) {
        image[at] ^= 0x10;
        n_refused += kvs_state_load(s->state, image, n_bytes) == KVS_EFORMAT;
        image[at] ^= 0x10;
    }
    CHECK_U64(n_refused, n_bytes);
    for (uint64_t length = 0; length < n_bytes; length += 97) {
        CHECK_STATUS(kvs_state_load(s->state, image, length), KVS_EFORMAT);
    }
    CHECK_U64(info_of(s->state).generation, generation);
    CHECK(saves(s->state, image, n_bytes));
    CHECK_STATUS(kvs_state_load(NULL, image, n_bytes), KVS_EINVAL);
    CHECK_STATUS(kvs_state_load(s->state, NULL, n_bytes), KVS_EINVAL);
    CHECK_STATUS(kvs_state_save(s->state, image, n_bytes - 1), KVS_EINVAL);
    free(image);
    close_scene(s);
}

static void test_an_image_of_another_geometry_is_refused(void)
{
    scene *s = open_scene(rig_device(0, 0));
    uint64_t n_bytes;
    uint8_t *image = save(s->state, &n_bytes);
    kvs_state *other = NULL;
    s->layers[1].norm_eps = 1e-5f;
    CHECK_OK(kvs_state_create(s->device, &s->desc, &other));
    CHECK_STATUS(kvs_state_load(other, image, n_bytes), KVS_EFORMAT);
    CHECK_STATUS(kvs_state_copy(s->state, other), KVS_EINVAL);
    kvs_state_release(other);
    s->desc.n_layers = 1;
    CHECK_OK(kvs_state_create(s->device, &s->desc, &other));
    CHECK_STATUS(kvs_state_load(other, image, n_bytes), KVS_EFORMAT);
    CHECK_STATUS(kvs_state_copy(s->state, other), KVS_EINVAL);
    CHECK_STATUS(kvs_state_copy(s->state, s->state), KVS_EINVAL);
    kvs_state_release(other);
    free(image);
    close_scene(s);
}

static int fail_copy(void *user, int point, uint64_t index)
{
    (void)index;
    uint64_t *left = user;
    return point == KVS_HOOK_COPY && (*left)-- == 0 ? KVS_EIO : 0;
}

static void test_a_copy_that_fails_anywhere_leaves_the_old_state(void)
{
    scene *s = open_scene(rig_device(0, 0));
    kvs_state *to = NULL;
    CHECK_OK(kvs_state_create(s->device, &s->desc, &to));
    take(s, 4, true, 4, 0.5f);
    take(s, 4, true, 3, 0.75f);
    uint64_t n_bytes, n_old;
    uint8_t *image = save(s->state, &n_bytes), *old = save(to, &n_old);
    for (uint64_t at = 0; at < 3 * LAYERS; at++) {
        for (int loads = 0; loads < 2; loads++) {
            uint64_t left = at;
            CHECK_OK(kvs_device_set_hook(s->device, fail_copy, &left));
            CHECK_STATUS(loads ? kvs_state_load(to, image, n_bytes) : kvs_state_copy(s->state, to), KVS_EIO);
            CHECK_OK(kvs_device_set_hook(s->device, NULL, NULL));
            CHECK(saves(to, old, n_old) && saves(s->state, image, n_bytes));
        }
    }
    CHECK_OK(kvs_state_copy(s->state, to));
    CHECK(saves(to, image, n_bytes) && info_of(to).seq_id == 0);
    CHECK_OK(kvs_state_check_integrity(to));
    free(image);
    free(old);
    kvs_state_release(to);
    close_scene(s);
}

static void test_an_image_is_cut_and_joined_to_what_it_was(void)
{
    scene *s = open_scene(rig_device(0, 0));
    take(s, 4, true, 4, 0.5f);
    take(s, 4, true, 3, 0.75f);
    uint64_t n_bytes, n_first = 0, n_second = 0, n_joined = 0;
    uint8_t *image = save(s->state, &n_bytes);
    CHECK_OK(kvs_state_image_cut(image, n_bytes, 0, 1, NULL, &n_first));
    CHECK_OK(kvs_state_image_cut(image, n_bytes, 1, LAYERS - 1, NULL, &n_second));
    uint8_t *first = malloc(n_first), *second = malloc(n_second);
    CHECK_OK(kvs_state_image_cut(image, n_bytes, 0, 1, first, &n_first));
    CHECK_OK(kvs_state_image_cut(image, n_bytes, 1, LAYERS - 1, second, &n_second));

    /* A state of the first layer alone takes its part, and not the other one's layers after it. */
    kvs_state *one = NULL;
    s->desc.n_layers = 1;
    CHECK_OK(kvs_state_create(s->device, &s->desc, &one));
    CHECK_OK(kvs_state_load(one, first, n_first));
    CHECK_U64(info_of(one).position, info_of(s->state).position);
    CHECK(saves(one, first, n_first));
    kvs_state_release(one);

    CHECK_OK(kvs_state_image_join(first, n_first, second, n_second, NULL, &n_joined));
    CHECK_U64(n_joined, n_bytes);
    uint8_t *joined = malloc(n_joined);
    CHECK_OK(kvs_state_image_join(first, n_first, second, n_second, joined, &n_joined));
    CHECK(memcmp(joined, image, n_bytes) == 0);
    uint64_t n_wrong = n_joined - 1;
    CHECK_STATUS(kvs_state_image_join(first, n_first, second, n_second, joined, &n_wrong), KVS_EINVAL);
    CHECK_STATUS(kvs_state_image_cut(image, n_bytes, 0, 1, joined, &n_wrong), KVS_EINVAL);
    CHECK_STATUS(kvs_state_image_cut(image, n_bytes, 1, LAYERS, NULL, &n_wrong), KVS_EINVAL);
    CHECK_STATUS(kvs_state_image_cut(image, n_bytes, 0, 0, NULL, &n_wrong), KVS_EINVAL);
    CHECK_STATUS(kvs_state_image_cut(NULL, n_bytes, 0, 1, NULL, &n_wrong), KVS_EINVAL);
    CHECK_STATUS(kvs_state_image_join(first, n_first, NULL, n_second, NULL, &n_wrong), KVS_EINVAL);

    /* Parts at different tokens do not belong together. */
    take(s, 4, true, 1, 0.25f);
    uint64_t n_later, n_later_part = 0;
    uint8_t *later = save(s->state, &n_later);
    CHECK_OK(kvs_state_image_cut(later, n_later, 1, LAYERS - 1, NULL, &n_later_part));
    uint8_t *later_part = malloc(n_later_part);
    CHECK_OK(kvs_state_image_cut(later, n_later, 1, LAYERS - 1, later_part, &n_later_part));
    CHECK_STATUS(kvs_state_image_join(first, n_first, later_part, n_later_part, NULL, &n_joined), KVS_EINVAL);

    uint64_t n_refused = 0;
    for (uint64_t at = 0; at < n_first; at++) {
        first[at] ^= 0x10;
        n_refused += kvs_state_image_cut(first, n_first, 0, 1, NULL, &n_wrong) == KVS_EFORMAT;
        n_refused += kvs_state_image_join(second, n_second, first, n_first, NULL, &n_wrong) == KVS_EFORMAT;
        first[at] ^= 0x10;
    }
    CHECK_U64(n_refused, 2 * n_first);
    for (uint64_t length = 0; length < n_bytes; length += 97) {
        CHECK_STATUS(kvs_state_image_cut(image, length, 0, 1, NULL, &n_wrong), KVS_EFORMAT);
    }
    free(later_part);
    free(later);
    free(joined);
    free(second);
    free(first);
    free(image);
    close_scene(s);
}

int main(void)
{
    test_an_image_is_taken_back_by_any_log_it_fits();
    test_every_damaged_byte_is_refused();
    test_an_image_of_another_geometry_is_refused();
    test_a_copy_that_fails_anywhere_leaves_the_old_state();
    test_an_image_is_cut_and_joined_to_what_it_was();
    return check_finish();
}
