/* digest.h: SHA-256, for files whose damage must be noticed.
 *
 * Source: FIPS 180-4. */
#ifndef KVS_NATIVE_BASE_DIGEST_H
#define KVS_NATIVE_BASE_DIGEST_H

#include <stddef.h>
#include <stdint.h>

#define KVS_DIGEST_BYTES 32u

typedef struct kvs_digest {
    uint32_t state[8];
    uint8_t block[64];
    uint64_t n_bytes;
} kvs_digest;

void kvs_digest_begin(kvs_digest *digest);
void kvs_digest_add(kvs_digest *digest, const void *bytes, size_t n_bytes);
void kvs_digest_end(kvs_digest *digest, uint8_t out[KVS_DIGEST_BYTES]);

#endif
