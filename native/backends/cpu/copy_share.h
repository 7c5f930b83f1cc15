/* copy_share.h: a large copy whose bytes several threads move: the copy thread, and compute threads that would otherwise wait.
 *
 * Where compute threads take every core, the copy thread runs in the place of one of them, and the others wait for that one at
 * the end of the operation. While they wait they move chunks too, so that a copy costs all cores its share and not one
 * core the whole.
 */
#ifndef KVS_NATIVE_CPU_COPY_SHARE_H
#define KVS_NATIVE_CPU_COPY_SHARE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct kvs_copy_share {
    _Atomic uint64_t word; /* number of the copy in 32 bits, its chunks in 16, the next chunk in 16 */
    _Atomic(uint8_t *) to;
    _Atomic(const uint8_t *) from;
    _Atomic uint64_t n_bytes;
    _Atomic uint32_t n_moved; /* chunks */
    uint32_t number;          /* of the newest copy; its owner's */
} kvs_copy_share;

/* Move the bytes with whoever helps; returns when the last one has arrived. One owner at a time. */
void kvs_copy_share_move(kvs_copy_share *share, uint8_t *to, const uint8_t *from, uint64_t n_bytes);

/* Move one chunk of the copy under way; false when there is none to be had. thread: any */
bool kvs_copy_share_help(kvs_copy_share *share);

#endif
