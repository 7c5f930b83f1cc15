/* test_memory.c: the laws of memory.h: blocks never overlap, lie where they must, keep what is written, and leave nothing. */
#include "check.h"

#include "backends/cpu/memory.h"

#include <stdlib.h>
#include <string.h>

#define MAX_BLOCKS 64u
#define STEPS 4000u
#define HUGE ((uint64_t)2 << 20)

typedef struct block {
    uint64_t address;
    uint64_t bytes;
    uint8_t mark;
} block;

static uint32_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

static uint8_t *bytes_at(uint64_t address)
{
    return (uint8_t *)(uintptr_t)address;
}

/* Both ends and the middle: whole blocks would take minutes. */
static void mark_block(const block *b)
{
    const uint64_t edge = b->bytes < 64 ? b->bytes : 64;
    memset(bytes_at(b->address), b->mark, edge);
    memset(bytes_at(b->address + b->bytes - edge), b->mark, edge);
    bytes_at(b->address)[b->bytes / 2] = b->mark;
}

static bool is_marked(const block *b)
{
    return bytes_at(b->address)[0] == b->mark && bytes_at(b->address)[b->bytes / 2] == b->mark &&
           bytes_at(b->address + b->bytes)[-1] == b->mark;
}

static bool overlaps(const block *a, const block *b)
{
    return a->address < b->address + b->bytes && b->address < a->address + a->bytes;
}

static uint64_t draw_bytes(uint64_t *state)
{
    const uint64_t limit = draw(state) % 20 == 0 ? 40 * HUGE : draw(state) % 3 == 0 ? 3 * HUGE : 100000;
    return 1 + draw(state) % limit;
}

static void check_new(const block *blocks, uint32_t n_blocks, const block *made, uint64_t alignment)
{
    CHECK_U64(made->address % alignment, 0);
    for (uint32_t i = 0; i < n_blocks; i++) {
        CHECK(!overlaps(&blocks[i], made));
    }
}

static void test_blocks_of_any_size_in_any_order(bool has_slabs, uint64_t seed)
{
    kvs_memory *memory = kvs_memory_create(has_slabs);
    block blocks[MAX_BLOCKS];
    uint32_t n_blocks = 0;
    uint64_t state = seed;
    for (uint32_t step = 0; step < STEPS; step++) {
        if (n_blocks < MAX_BLOCKS && draw(&state) % 5 < 3) {
            const uint64_t alignment = UINT64_C(1) << (6 + draw(&state) % 8);
            block made = {.bytes = draw_bytes(&state), .mark = (uint8_t)draw(&state)};
            CHECK_OK(kvs_memory_alloc(memory, made.bytes, alignment, &made.address));
            check_new(blocks, n_blocks, &made, alignment);
            mark_block(&made);
            blocks[n_blocks++] = made;
        } else if (n_blocks > 0) {
            const uint32_t which = draw(&state) % n_blocks;
            CHECK(is_marked(&blocks[which]));
            kvs_memory_free(memory, blocks[which].address);
            blocks[which] = blocks[--n_blocks];
        }
    }
    while (n_blocks > 0) {
        CHECK(is_marked(&blocks[--n_blocks]));
        kvs_memory_free(memory, blocks[n_blocks].address);
    }
    kvs_memory_destroy(memory);
}

/* What was freed is found again, also by a block as large as several that were its neighbours. */
static void test_free_neighbours_are_one(void)
{
    enum { N = 8 };
    kvs_memory *memory = kvs_memory_create(true);
    uint64_t address[N + 1];
    for (int i = 0; i < N + 1; i++) {
        CHECK_OK(kvs_memory_alloc(memory, HUGE, 64, &address[i]));
    }
    CHECK_U64(address[0] % HUGE, 0);
    const int order[N] = {3, 1, 2, 0, 7, 5, 6, 4};
    for (int i = 0; i < N; i++) {
        kvs_memory_free(memory, address[order[i]]);
    }
    uint64_t whole;
    CHECK_OK(kvs_memory_alloc(memory, N * HUGE, 64, &whole));
    CHECK_U64(whole, address[0]);
    kvs_memory_free(memory, whole);
    kvs_memory_free(memory, address[N]);
    kvs_memory_destroy(memory);
}

static void test_what_cannot_be_had_is_refused(void)
{
    kvs_memory *memory = kvs_memory_create(true);
    uint64_t address = 7;
    CHECK_STATUS(kvs_memory_alloc(memory, UINT64_MAX, 64, &address), KVS_EOVERFLOW);
    CHECK_STATUS(kvs_memory_alloc(memory, UINT64_C(1) << 62, 64, &address), KVS_ENOMEM);
    CHECK_U64(address, 7);
    CHECK_OK(kvs_memory_alloc(memory, 1, 64, &address));
    kvs_memory_free(memory, address);
    kvs_memory_destroy(memory);
    kvs_memory_destroy(NULL);
}

int main(void)
{
    for (uint64_t seed = 1; seed <= 4; seed++) {
        test_blocks_of_any_size_in_any_order(true, seed);
    }
    test_blocks_of_any_size_in_any_order(false, 5);
    test_free_neighbours_are_one();
    test_what_cannot_be_had_is_refused();
    return check_finish();
}
