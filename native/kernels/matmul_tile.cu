/* matmul_tile.cu: rows of a prompt by quantized weights, on tensor cores: weights become bfloat16 in registers, activations come as such.
 *
 * Kernel matmul_tile(kvs_matmul_params); `records` are the atoms of tile_record.h. Macros: KVS_T0 .. KVS_T3 types of the parts (of
 * those that are not there: any), KVS_SWIGLU, KVS_ROWS rows of a block (64, 128; with sm_90a also 176, 256).
 * Grid: n_row_tiles (of KVS_ROWS) * tiles of 128 output values of all parts, row tiles fastest; with KVS_SWIGLU tiles of 64 of both parts.
 * Block: 256, a warp to a panel of 16. Dynamic shared memory: KVS_ROWS * 640 + 1,024 bytes.
 * Architecture: 80; sm_90a has products of its own.
 * Order: one chain along k, 16 values at a time, as the matrix product adds them. A row's bits depend on nothing but the row, the
 * weight and the architecture: not on KVS_ROWS, nor on its neighbours.
 * Twin: matmul.cu, which quantizes activations: what both give differs by what 8-bit codes and bfloat16 cost.
 */
#include "mma.cuh"
#include "tile_record.h"
#include "tile_weights.cuh"
#include "weight_params.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WARPGROUPS 1
#define KVS_STAGES 5
#include "bulk.cuh"
#include "wgmma.cuh"
#else
#define HAS_WARPGROUPS 0
#define KVS_STAGES 4
#endif

#define WARPS 8
#define GROUP_WARPS 4 /* that multiply together */
#define ROWS 16       /* of a panel */
#define TILES (KVS_ROWS / 8)
#define STAGE_BYTES (TILES * KVS_TILE_ATOM_BYTES)
#define CHUNK 16 /* bytes that a thread copies at a time */

typedef float sums_t[TILES][4];
typedef unsigned int block_t[2][2][4]; /* groups of a block of 64 values, steps of a group, words */

#ifdef __CUDACC__
extern __shared__ uint4 dynamic_shared[];
#endif

/* What a block works on. */
struct place {
    unsigned int part;
    unsigned int panel;        /* of this warp; may lie behind the last */
    unsigned int first_column; /* of the block, in its part */
    unsigned int first_row;
    unsigned int n_rows; /* from first_row on */
};

/* Atoms of the block's rows: those of a block of values follow one another. */
struct source {
    const unsigned char *atoms;
    unsigned int n_bytes;      /* of a block of values */
    unsigned int stride_bytes; /* from one to the next */
    unsigned int n_blocks;
};

static __device__ __forceinline__ unsigned char *stage_at(unsigned int stage)
{
#ifdef __CUDACC__
    const unsigned int address = (unsigned int)__cvta_generic_to_shared(dynamic_shared);
    return (unsigned char *)dynamic_shared + (0u - address) % KVS_TILE_ATOM_BYTES + stage * STAGE_BYTES;
#else
    return (unsigned char *)dynamic_shared + stage * STAGE_BYTES;
#endif
}

#if HAS_WARPGROUPS
/* Stages are filled by the copy engine as one thread asks it to, two blocks of values behind the one that all have read. */
struct pipeline {
    unsigned long long *full;  /* [KVS_STAGES] */
    unsigned long long *empty; /* [KVS_STAGES] */
    source from;
    unsigned int stage;
    unsigned int round; /* how often stages have been gone through */
    unsigned int block;

    __device__ __forceinline__ void fetch(unsigned int next, unsigned int to)
    {
        kvs_bulk_copy(stage_at(to), from.atoms + (unsigned long long)next * from.stride_bytes, from.n_bytes, full + to);
    }

    __device__ void begin()
    {
        if (threadIdx.x == 0) {
            for (unsigned int i = 0; i < KVS_STAGES; i++) {
                kvs_barrier_init(full + i, 1);
                kvs_barrier_init(empty + i, WARPS);
            }
            kvs_barriers_made();
        }
        __syncthreads();
        stage = round = block = 0;
        for (unsigned int i = 0; threadIdx.x == 0 && i < KVS_STAGES - 2 && i < from.n_blocks; i++) {
            fetch(i, i);
        }
        __syncwarp();
    }

    /* Ask for a later block. */
    __device__ __forceinline__ void ask()
    {
        const unsigned int next = block + KVS_STAGES - 2;
        if (threadIdx.x == 0 && next < from.n_blocks) {
            const bool is_ahead = stage + KVS_STAGES - 2 < KVS_STAGES;
            const unsigned int to = is_ahead ? stage + KVS_STAGES - 2 : stage - 2;
            if (next >= KVS_STAGES) {
                kvs_barrier_wait(empty + to, (is_ahead ? round - 1 : round) & 1u);
            }
            fetch(next, to);
        }
        __syncwarp();
    }

    /* The products go on until end_products; until then neither sums nor weights may be touched. */
    __device__ __forceinline__ void begin_products(sums_t &sums, const block_t &weights)
    {
        kvs_barrier_wait(full + stage, round & 1u);
        const unsigned long long b = kvs_wgmma_operand(kvs_shared_address(stage_at(stage)));
        kvs_wgmma_begin();
#pragma unroll
        for (unsigned int step = 0; step < 4; step++) {
            kvs_wgmma_bf16(sums, weights[step / 2][step % 2], b + 2 * step);
        }
        kvs_wgmma_commit();
    }

    __device__ __forceinline__ void end_products()
    {
        kvs_wgmma_wait();
        if (threadIdx.x % 32 == 0) {
            kvs_barrier_arrive(empty + stage);
        }
        block++;
        stage++;
        if (stage == KVS_STAGES) {
            stage = 0;
            round++;
        }
    }
};
#else
/* Stages are filled by all threads. */
struct pipeline {
    source from;
    unsigned int stage;
    unsigned int block;

    __device__ __forceinline__ void fetch(unsigned int next, unsigned int to)
    {
        const unsigned char *atoms = from.atoms + (unsigned long long)next * from.stride_bytes;
        for (unsigned int at = threadIdx.x * CHUNK; next < from.n_blocks && at < from.n_bytes; at += WARPS * 32 * CHUNK) {
#ifdef __CUDACC__
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned int)__cvta_generic_to_shared(stage_at(to) + at)),
                         "l"(atoms + at));
#else
            *(uint4 *)(stage_at(to) + at) = *(const uint4 *)(atoms + at);
#endif
        }
#ifdef __CUDACC__
        asm volatile("cp.async.commit_group;");
#endif
    }

    __device__ void begin()
    {
        stage = block = 0;
        for (unsigned int i = 0; i < KVS_STAGES - 1; i++) {
            fetch(i, i);
        }
    }

    /* All have read the block before, so its stage takes another. */
    __device__ __forceinline__ void ask()
    {
#ifdef __CUDACC__
        asm volatile("cp.async.wait_group 2;" ::: "memory");
#endif
        __syncthreads();
        fetch(block + KVS_STAGES - 1, (stage + KVS_STAGES - 1) % KVS_STAGES);
    }

    /* Both steps of a group of one tile of 8 rows. */
    static __device__ __forceinline__ void load_group(const unsigned char *atom, unsigned int group, unsigned int (&b)[4])
    {
        const unsigned int lane = threadIdx.x % 32;
#ifdef __CUDACC__
        const unsigned int row = lane % 8, piece = (4 * group + lane / 8) ^ row;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"((unsigned int)__cvta_generic_to_shared(atom + row * 128 + piece * 16)));
#else
        for (unsigned int i = 0; i < 4; i++) {
            b[i] = *(const unsigned int *)(atom + lane / 4 * 128 + ((4 * group + i) ^ lane / 4) * 16 + lane % 4 * 4);
        }
#endif
    }

    __device__ __forceinline__ void multiply(sums_t &sums, const block_t &weights)
    {
#pragma unroll
        for (unsigned int tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (unsigned int group = 0; group < 2; group++) {
                unsigned int b[4];
                load_group(stage_at(stage) + tile * KVS_TILE_ATOM_BYTES, group, b);
                kvs_mma_bf16(sums[tile], weights[group][0], b[0], b[1]);
                kvs_mma_bf16(sums[tile], weights[group][1], b[2], b[3]);
            }
        }
        block++;
        stage = (stage + 1) % KVS_STAGES;
    }
};
#endif

template <int TYPE>
static __device__ __forceinline__ void decode_block(const kvs_unit<TYPE> &unit, unsigned int block, block_t &weights)
{
    const unsigned int lane = threadIdx.x % 32;
    kvs_tile_group<TYPE>(unit, 2 * block, lane, weights[0]);
    kvs_tile_group<TYPE>(unit, 2 * block + 1, lane, weights[1]);
}

/* Behind the last unit it comes again: nobody multiplies by it. */
template <int TYPE>
static __device__ __forceinline__ void load_unit(kvs_unit<TYPE> &unit, const unsigned char *panel, unsigned int index, unsigned int n_units)
{
    const unsigned int last = n_units - 1;
    kvs_load_unit<TYPE>(unit, panel + (unsigned long long)(index < last ? index : last) * kvs_form_unit_bytes(TYPE), threadIdx.x % 32);
}

#if HAS_WARPGROUPS
/* While the products of a block are under way the next one is decoded, and the unit behind it asked for. Two sets of weights take turns,
 * which must be told apart when this is compiled. */
template <int TYPE> static __device__ __forceinline__ void sum_panel(sums_t &sums, const unsigned char *panel, pipeline &rows)
{
    constexpr unsigned int BLOCKS = kvs_unit<TYPE>::GROUPS / 2, TURN = BLOCKS == 1 ? 2 : BLOCKS;
    const unsigned int n_blocks = rows.from.n_blocks, n_units = n_blocks / BLOCKS;
    kvs_unit<TYPE> unit;
    block_t weights[2];
    load_unit<TYPE>(unit, panel, 0, n_units);
    decode_block<TYPE>(unit, 0, weights[0]);
    if (BLOCKS == 1) {
        load_unit<TYPE>(unit, panel, 1, n_units);
    }
#pragma unroll 1
    for (unsigned int first = 0; first < n_blocks; first += TURN) {
#pragma unroll
        for (unsigned int i = 0; i < TURN; i++) {
            const unsigned int next = (i + 1) % BLOCKS;
            if (BLOCKS == 1 && first + i >= n_blocks) {
                break;
            }
            rows.ask();
            rows.begin_products(sums, weights[i % 2]);
            decode_block<TYPE>(unit, next, weights[(i + 1) % 2]);
            if (next == BLOCKS - 1) {
                load_unit<TYPE>(unit, panel, (first + i + 1) / BLOCKS + 1, n_units);
            }
            rows.end_products();
        }
    }
    kvs_wgmma_done(sums);
}
#else
/* A unit is loaded before the products of the last one's end. */
template <int TYPE> static __device__ __forceinline__ void sum_panel(sums_t &sums, const unsigned char *panel, pipeline &rows)
{
    constexpr unsigned int BLOCKS = kvs_unit<TYPE>::GROUPS / 2;
    const unsigned int n_units = rows.from.n_blocks / BLOCKS;
    kvs_unit<TYPE> unit;
    load_unit<TYPE>(unit, panel, 0, n_units);
#pragma unroll 1
    for (unsigned int u = 0; u < n_units; u++) {
#pragma unroll
        for (unsigned int block = 0; block < BLOCKS; block++) {
            block_t weights;
            rows.ask();
            decode_block<TYPE>(unit, block, weights);
            if (block == BLOCKS - 1) {
                load_unit<TYPE>(unit, panel, u + 1, n_units);
            }
            rows.multiply(sums, weights);
        }
    }
}
#endif

static __device__ unsigned int panel_bytes(unsigned int part, unsigned int n_groups)
{
    const int type = part == 0 ? KVS_T0 : part == 1 ? KVS_T1 : part == 2 ? KVS_T2 : KVS_T3;
    return n_groups / kvs_form_unit_groups(type) * kvs_form_unit_bytes(type);
}

/* Parts of one type share its code. A warp behind the last panel goes over the last one: its group multiplies together. */
static __device__ __forceinline__ void sum_part(sums_t &sums, const kvs_matmul_params &p, const place &at, pipeline &rows)
{
    const unsigned int last = p.part[at.part].n_panels - 1, index = at.panel < last ? at.panel : last;
    const unsigned char *panel = (const unsigned char *)p.part[at.part].panels + (unsigned long long)index * panel_bytes(at.part, p.n_groups);
    if (at.part == 0 || (at.part == 1 && KVS_T1 == KVS_T0) || (at.part == 2 && KVS_T2 == KVS_T0) || (at.part == 3 && KVS_T3 == KVS_T0)) {
        sum_panel<KVS_T0>(sums, panel, rows);
    } else if (at.part == 1 || (at.part == 2 && KVS_T2 == KVS_T1) || (at.part == 3 && KVS_T3 == KVS_T1)) {
        sum_panel<KVS_T1>(sums, panel, rows);
    } else if (at.part == 3 && KVS_T3 != KVS_T2) {
        sum_panel<KVS_T3>(sums, panel, rows);
    } else {
        sum_panel<KVS_T2>(sums, panel, rows);
    }
}

/* Sums go to shared memory, [row][128 output values and a gap], so that rows leave it whole. All blocks of values have been read. */
#define SUM_STRIDE (KVS_TILE_FEATURES + 4)

static __device__ __forceinline__ float *shared_sums()
{
    return (float *)stage_at(0);
}

static __device__ __forceinline__ void share_sums(const sums_t &sums)
{
    const unsigned int lane = threadIdx.x % 32;
    float *to = shared_sums() + lane % 4 * 2 * SUM_STRIDE + threadIdx.x / 32 * ROWS + lane / 4;
    __syncthreads();
#pragma unroll
    for (unsigned int i = 0; i < 4 * TILES; i++) {
        to[(i / 4 * KVS_TILE_SLOTS + i % 2) * SUM_STRIDE + i % 4 / 2 * 8] = sums[i / 4][i % 4];
    }
    __syncthreads();
}

static __device__ __forceinline__ float factor_of(const kvs_matmul_part_params &part, unsigned int column)
{
    return part.scales == 0 ? 1.0f : ((const float *)part.scales)[column / part.scale_run];
}

/* Thread t has output value t % 128 of the block, of every second row; with swiglu t % 64, of every fourth. */
static __device__ __forceinline__ void store(const kvs_matmul_params &p, const place &at)
{
    constexpr unsigned int WIDTH = KVS_SWIGLU ? KVS_TILE_FEATURES / 2 : KVS_TILE_FEATURES;
    const kvs_matmul_part_params &part = p.part[KVS_SWIGLU ? 0 : at.part];
    const unsigned int in_block = threadIdx.x % WIDTH, column = at.first_column + in_block;
    if (column >= part.n) {
        return;
    }
    const float factor = factor_of(part, column), up_factor = KVS_SWIGLU ? factor_of(p.part[1], column) : 1.0f;
    for (unsigned int row = threadIdx.x / WIDTH; row < at.n_rows; row += WARPS * 32 / WIDTH) {
        const float *sum = shared_sums() + row * SUM_STRIDE + in_block;
        float *out = (float *)part.out + (unsigned long long)(at.first_row + row) * part.out_stride + column;
        float y = __fmul_rn(*sum, factor);
        if (KVS_SWIGLU) {
            y = __fmul_rn(kvs_silu(y), __fmul_rn(sum[WIDTH], up_factor));
        } else if (p.epilogue == KVS_STORE_ADD) {
            y = __fadd_rn(*out, y);
        }
        *out = y;
    }
}

static __device__ __forceinline__ place find_place(const kvs_matmul_params &p)
{
    const unsigned int tile = blockIdx.x / p.n_row_tiles, warp = threadIdx.x / 32;
    place at = {0, tile * WARPS, 0, blockIdx.x % p.n_row_tiles * KVS_ROWS, 0};
    const unsigned int left = p.n_rows - at.first_row;
    at.n_rows = left < KVS_ROWS ? left : KVS_ROWS;
    if (KVS_SWIGLU) {
        at.part = warp / GROUP_WARPS;
        at.panel = tile * GROUP_WARPS + warp % GROUP_WARPS;
        at.first_column = tile * GROUP_WARPS * ROWS;
        return at;
    }
    while (at.panel >= (p.part[at.part].n_panels + WARPS - 1) / WARPS * WARPS) {
        at.panel -= (p.part[at.part].n_panels + WARPS - 1) / WARPS * WARPS;
        at.part++;
    }
    at.first_column = at.panel * ROWS;
    at.panel += warp;
    return at;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) matmul_tile(const kvs_matmul_params p)
{
    const place at = find_place(p);
    const unsigned int n_atoms = (p.n_rows + KVS_TILE_SLOTS - 1) / KVS_TILE_SLOTS;
    pipeline rows;
#if HAS_WARPGROUPS
    __shared__ unsigned long long barriers[2 * KVS_STAGES];
    rows.full = barriers;
    rows.empty = barriers + KVS_STAGES;
#endif
    rows.from.atoms = (const unsigned char *)p.records + (unsigned long long)(at.first_row / KVS_TILE_SLOTS) * KVS_TILE_ATOM_BYTES;
    rows.from.n_bytes = (at.n_rows + KVS_TILE_SLOTS - 1) / KVS_TILE_SLOTS * KVS_TILE_ATOM_BYTES;
    rows.from.stride_bytes = n_atoms * KVS_TILE_ATOM_BYTES;
    rows.from.n_blocks = p.n_groups / 2;
    rows.begin();
    sums_t sums = {};
    sum_part(sums, p, at, rows);
    share_sums(sums);
    store(p, at);
}
