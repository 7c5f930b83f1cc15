/* copy_share.c: chunks are claimed by one fetch-and-add on a word that also names the copy, so that whoever comes late claims
 * nothing. The copy cannot end before a claimed chunk is counted, so what a claimer then reads of it is its own. */
#include "backends/cpu/copy_share.h"

#include <sched.h>
#include <string.h>

#define CHUNK_BYTES ((uint64_t)32 << 10) /* some microseconds: what a waiting thread can spare */
#define FIELD_BITS 16u
#define FIELD_MASK 0xffffu
#define MAX_CHUNKS (FIELD_MASK / 2u) /* claimers overshoot the last chunk by at most one each */

static uint32_t word_chunks(uint64_t word)
{
    return (uint32_t)(word >> FIELD_BITS) & FIELD_MASK;
}

static uint32_t word_next(uint64_t word)
{
    return (uint32_t)word & FIELD_MASK;
}

bool kvs_copy_share_help(kvs_copy_share *share)
{
    uint64_t word = atomic_load_explicit(&share->word, memory_order_acquire);
    if (word_next(word) >= word_chunks(word)) {
        return false;
    }
    word = atomic_fetch_add_explicit(&share->word, 1, memory_order_acq_rel);
    if (word_next(word) >= word_chunks(word)) {
        return false;
    }
    const uint64_t begin = word_next(word) * CHUNK_BYTES;
    const uint64_t left = atomic_load_explicit(&share->n_bytes, memory_order_relaxed) - begin;
    memcpy(atomic_load_explicit(&share->to, memory_order_relaxed) + begin,
           atomic_load_explicit(&share->from, memory_order_relaxed) + begin,
           (size_t)(left < CHUNK_BYTES ? left : CHUNK_BYTES));
    atomic_fetch_add_explicit(&share->n_moved, 1, memory_order_release);
    return true;
}

static void move_slice(kvs_copy_share *share, uint8_t *to, const uint8_t *from, uint64_t n_bytes)
{
    const uint64_t n_chunks = (n_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    atomic_store_explicit(&share->to, to, memory_order_relaxed);
    atomic_store_explicit(&share->from, from, memory_order_relaxed);
    atomic_store_explicit(&share->n_bytes, n_bytes, memory_order_relaxed);
    atomic_store_explicit(&share->n_moved, 0, memory_order_relaxed);
    share->number++;
    atomic_store_explicit(&share->word, (uint64_t)share->number << 2 * FIELD_BITS | n_chunks << FIELD_BITS,
                          memory_order_release);
    while (kvs_copy_share_help(share)) {
    }
    while (atomic_load_explicit(&share->n_moved, memory_order_acquire) != n_chunks) {
        sched_yield();
    }
}

void kvs_copy_share_move(kvs_copy_share *share, uint8_t *to, const uint8_t *from, uint64_t n_bytes)
{
    const uint64_t most = MAX_CHUNKS * CHUNK_BYTES;
    for (uint64_t begin = 0; begin < n_bytes; begin += most) {
        const uint64_t left = n_bytes - begin;
        move_slice(share, to + begin, from + begin, left < most ? left : most);
    }
}
