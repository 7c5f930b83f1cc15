/* bench_form.c: what it takes to bring weights into the form that cards read (kernels/weight_form.h), type by type.
 *
 * Usage: bench_form [type number]. GB/s of a file's bytes on one thread, of as many pieces at a time as a stage of the loader
 * holds: the shortest time of each part counts.
 */
#include "backends/cuda/weight_form.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define K 5120u
#define N 4096u
#define STAGE_BYTES (2u << 20)
#define MAX_PARTS 64u
#define SECONDS 0.4

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void fill(uint8_t *bytes, uint64_t n)
{
    uint32_t state = 1;
    for (uint64_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        bytes[i] = (uint8_t)(state >> 24);
    }
}

static void measure(int type, uint32_t block_values, uint32_t block_bytes)
{
    kvs_cuda_weight_shape shape;
    if (kvs_cuda_weight_shape_make(type, K, N, &shape) != KVS_OK) {
        return;
    }
    const uint64_t n_bytes = (uint64_t)N * K / block_values * block_bytes;
    const uint64_t n_pieces = STAGE_BYTES / shape.piece_bytes + 1;
    uint8_t *rows = malloc(n_bytes), *to = malloc(n_pieces * shape.piece_bytes);
    if (rows != NULL && to != NULL) {
        double parts[MAX_PARTS], begin = now_s(), total = 0.0;
        for (uint32_t i = 0; i < MAX_PARTS; i++) {
            parts[i] = 1e9;
        }
        fill(rows, n_bytes);
        uint32_t n_parts = 0;
        do {
            n_parts = 0;
            for (uint64_t first = 0; first < shape.n_pieces && n_parts < MAX_PARTS; first += n_pieces, n_parts++) {
                const uint64_t left = shape.n_pieces - first, n = left < n_pieces ? left : n_pieces;
                const double from = now_s();
                kvs_cuda_weight_form(&shape, rows, first, n, to);
                const double spent = now_s() - from;
                parts[n_parts] = spent < parts[n_parts] ? spent : parts[n_parts];
            }
        } while (now_s() - begin < SECONDS);
        for (uint32_t i = 0; i < n_parts; i++) {
            total += parts[i];
        }
        printf("%-8s %6.2f GB/s\n", kvs_type_name(type), (double)n_bytes / total / 1e9);
    }
    free(rows);
    free(to);
}

int main(int argc, char **argv)
{
    for (int type = 0; type < 64; type++) {
        uint32_t block_values, block_bytes;
        if ((argc > 1 && atoi(argv[1]) != type) || kvs_type_block(type, &block_values, &block_bytes) != KVS_OK) {
            continue;
        }
        measure(type, block_values, block_bytes);
    }
    return 0;
}
