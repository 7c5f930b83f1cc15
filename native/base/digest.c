/* digest.c: SHA-256. */
#include "base/digest.h"

#include <string.h>

/* The first 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t ROUNDS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t turn(uint32_t value, unsigned int by)
{
    return value >> by | value << (32 - by);
}

static void mix(uint32_t state[8], const uint8_t *block)
{
    uint32_t words[64];
    uint32_t v[8];
    for (int i = 0; i < 16; i++) {
        words[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 |
                   (uint32_t)block[4 * i + 3];
    }
    for (int i = 16; i < 64; i++) {
        const uint32_t a = words[i - 15];
        const uint32_t b = words[i - 2];
        words[i] = words[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + words[i - 7] + (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
    }
    memcpy(v, state, sizeof v);
    for (int i = 0; i < 64; i++) {
        const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
        const uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
        const uint32_t first = v[7] + (turn(v[4], 6) ^ turn(v[4], 11) ^ turn(v[4], 25)) + choice + ROUNDS[i] + words[i];
        const uint32_t second = (turn(v[0], 2) ^ turn(v[0], 13) ^ turn(v[0], 22)) + majority;
        memmove(&v[1], &v[0], 7 * sizeof *v);
        v[4] += first;
        v[0] = first + second;
    }
    for (int i = 0; i < 8; i++) {
        state[i] += v[i];
    }
}

void kvs_digest_begin(kvs_digest *digest)
{
    *digest = (kvs_digest){.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab,
                                     0x5be0cd19}};
}

void kvs_digest_add(kvs_digest *digest, const void *bytes, size_t n_bytes)
{
    const uint8_t *at = bytes;
    size_t filled = (size_t)(digest->n_bytes % 64);
    digest->n_bytes += n_bytes;
    while (n_bytes != 0) {
        if (filled == 0 && n_bytes >= 64) {
            mix(digest->state, at);
            at += 64;
            n_bytes -= 64;
            continue;
        }
        const size_t taken = n_bytes < 64 - filled ? n_bytes : 64 - filled;
        memcpy(digest->block + filled, at, taken);
        at += taken;
        n_bytes -= taken;
        filled = (filled + taken) % 64;
        if (filled == 0) {
            mix(digest->state, digest->block);
        }
    }
}

void kvs_digest_end(kvs_digest *digest, uint8_t out[KVS_DIGEST_BYTES])
{
    const uint64_t n_bits = digest->n_bytes * 8;
    uint8_t tail[72] = {0x80};
    const size_t used = (size_t)(digest->n_bytes % 64);
    const size_t n_zeros = (used < 56 ? 56 : 120) - used;
    for (size_t i = 0; i < 8; i++) {
        tail[n_zeros + i] = (uint8_t)(n_bits >> (56 - 8 * i));
    }
    kvs_digest_add(digest, tail, n_zeros + 8);
    for (size_t i = 0; i < KVS_DIGEST_BYTES; i++) {
        out[i] = (uint8_t)(digest->state[i / 4] >> (24 - 8 * (i % 4)));
    }
}
