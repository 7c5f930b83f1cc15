/* matmul_wide.cu: matmul.cu for many rows: a block takes eight panels by 64 rows, so that activations are fetched once for 128
 * outputs. The bits are those of matmul.cu.
 *
 * Kernel matmul_wide(kvs_matmul_params). Macros: KVS_T0 .. KVS_T3 as there, KVS_SWIGLU 1: gate and up; KVS_SPLIT 1: blocks take one
 * slice each, and matmul_fold.cu adds them up.
 * Grid: x: n_row_tiles (of 64 rows) * eights of panels of all parts (with KVS_SWIGLU of part 0), row tiles fastest; y: slices
 * with KVS_SPLIT, else 1. Block: 256, a warp to a panel. No dynamic shared memory. Architecture: 75; from 80 on activations
 * arrive while the block computes.
 * Order: that of weight_product.cuh: a warp takes one slice after another.
 * Twin: native/backends/cpu/matmul_reference.c, whose sum is one chain.
 */
#include "act_record.h"
#include "weight_params.h"
#include "weight_product.cuh"
#include "weight_unit.cuh"

#define WARPS 8
#define ROWS 16 /* of a panel */
#define TILES 8 /* of 8 rows */
#define STAGE_GROUPS 8
#define STAGE_TILE_BYTES (STAGE_GROUPS * KVS_ACT_RECORD_BYTES)
#define STAGE_BYTES (TILES * STAGE_TILE_BYTES)
#define CHUNK 16 /* bytes that a thread copies at a time */

typedef float sums_t[TILES][4];
struct alignas(16) stage_t {
    unsigned char bytes[STAGE_BYTES];
};

/* What a block works on. */
struct place {
    unsigned int part;
    unsigned int panel; /* of this warp; may lie behind the last */
    unsigned int first_row;
    unsigned int n_rows; /* from first_row on */
};

static __device__ __forceinline__ void copy_chunk(unsigned char *to, const unsigned char *from)
{
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from));
#else
    *(uint4 *)to = *(const uint4 *)from;
#endif
}

/* Wait for what this thread has asked for. */
static __device__ __forceinline__ void end_copies()
{
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

/* Stages of a slice hold STAGE_GROUPS / GROUPS units that follow one another in it. */
template <int GROUPS> struct stages {
    static constexpr unsigned int UNITS = STAGE_GROUPS / GROUPS;
    unsigned int n_units;

    __device__ unsigned int unit(unsigned int slice, unsigned int stage, unsigned int i) const
    {
        return slice + KVS_SLICES * (stage * UNITS + i);
    }

    /* Of a slice; none where it has no unit. */
    __device__ unsigned int count(unsigned int slice) const
    {
        const unsigned int n = n_units > slice ? (n_units - slice + KVS_SLICES - 1) / KVS_SLICES : 0;
        return (n + UNITS - 1) / UNITS;
    }

    /* On to the next stage of slices before `end`; false behind the last. */
    __device__ bool advance(unsigned int &slice, unsigned int &stage, unsigned int end) const
    {
        stage++;
        while (stage >= count(slice)) {
            stage = 0;
            if (++slice >= end) {
                return false;
            }
        }
        return true;
    }
};

template <int GROUPS>
static __device__ __forceinline__ void fetch(const stages<GROUPS> &s, unsigned int slice, unsigned int stage,
                                             const unsigned char *records, unsigned int n_groups, unsigned int n_rows, stage_t &to)
{
    for (unsigned int chunk = threadIdx.x; chunk < STAGE_BYTES / CHUNK; chunk += WARPS * 32) {
        const unsigned int tile = chunk / (STAGE_TILE_BYTES / CHUNK), in_tile = chunk % (STAGE_TILE_BYTES / CHUNK);
        const unsigned int group = in_tile / (KVS_ACT_RECORD_BYTES / CHUNK), piece = in_tile % (KVS_ACT_RECORD_BYTES / CHUNK);
        const unsigned int unit = s.unit(slice, stage, group / GROUPS);
        if (tile * KVS_ACT_TILE < n_rows && unit < s.n_units) {
            const unsigned long long record = (unsigned long long)tile * n_groups + unit * GROUPS + group % GROUPS;
            copy_chunk(to.bytes + chunk * CHUNK, records + record * KVS_ACT_RECORD_BYTES + piece * CHUNK);
        }
    }
}

template <int TYPE>
static __device__ __forceinline__ void add_stage(sums_t &sums, const stages<kvs_unit<TYPE>::GROUPS> &s, unsigned int slice,
                                                 unsigned int stage, const unsigned char *panel, const stage_t &records,
                                                 unsigned int n_rows)
{
    constexpr int GROUPS = kvs_unit<TYPE>::GROUPS;
    const unsigned int lane = threadIdx.x % 32;
#pragma unroll 1
    for (unsigned int i = 0; i < STAGE_GROUPS / GROUPS; i++) {
        const unsigned int u = s.unit(slice, stage, i);
        if (u >= s.n_units) {
            return;
        }
        kvs_unit<TYPE> unit;
        kvs_load_unit<TYPE>(unit, panel + (unsigned long long)u * kvs_form_unit_bytes(TYPE), lane);
        const unsigned char *record = records.bytes + i * GROUPS * KVS_ACT_RECORD_BYTES;
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            unsigned int a[4];
            kvs_unit_group<TYPE>(unit, j, lane, a);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                if (tile * KVS_ACT_TILE < n_rows) {
                    kvs_add_group<TYPE>(sums[tile], unit, j, a, record + tile * STAGE_TILE_BYTES + j * KVS_ACT_RECORD_BYTES, lane, true);
                }
            }
        }
    }
}

/* Slices of this warp's panel in order: all of them, or the one of this block. */
template <int TYPE>
static __device__ __forceinline__ void sum_panel(sums_t &total, const unsigned char *panel, bool has_panel,
                                                 const unsigned char *records, unsigned int n_groups, unsigned int n_rows,
                                                 stage_t (&staged)[2])
{
    constexpr int GROUPS = kvs_unit<TYPE>::GROUPS;
    const stages<GROUPS> s = {(n_groups + GROUPS - 1) / GROUPS};
    const unsigned int first = KVS_SPLIT ? blockIdx.y : 0, end = KVS_SPLIT ? blockIdx.y + 1 : KVS_SLICES;
    unsigned int next_slice = first, next_stage = 0, buffer = 0;
    fetch(s, first, 0, records, n_groups, n_rows, staged[0]);
    end_copies();
    __syncthreads();
#pragma unroll 1
    for (unsigned int slice = first; slice < end; slice++) {
        sums_t sums = {};
        const unsigned int n_stages = s.count(slice);
#pragma unroll 1
        for (unsigned int stage = 0; stage < n_stages; stage++) {
            if (s.advance(next_slice, next_stage, end)) {
                fetch(s, next_slice, next_stage, records, n_groups, n_rows, staged[buffer ^ 1]);
            }
            if (has_panel) {
                add_stage<TYPE>(sums, s, slice, stage, panel, staged[buffer], n_rows);
            }
            end_copies();
            __syncthreads();
            buffer ^= 1;
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                total[tile][i] = slice == first ? sums[tile][i] : __fadd_rn(total[tile][i], sums[tile][i]);
            }
        }
    }
}

static __device__ unsigned int panel_bytes(unsigned int part, unsigned int n_groups)
{
    const int type = part == 0 ? KVS_T0 : part == 1 ? KVS_T1 : part == 2 ? KVS_T2 : KVS_T3;
    const unsigned int unit_groups = kvs_form_unit_groups(type);
    return (n_groups + unit_groups - 1) / unit_groups * kvs_form_unit_bytes(type);
}

/* Parts of one type share its code. */
static __device__ __forceinline__ void sum_part(sums_t &total, const kvs_matmul_params &p, const place &at, unsigned int part,
                                                const unsigned char *records, stage_t (&staged)[2])
{
    const bool has_panel = at.panel < p.part[part].n_panels;
    const unsigned char *panel = (const unsigned char *)p.part[part].panels + (unsigned long long)at.panel * panel_bytes(part, p.n_groups);
    if (part == 0 || (part == 1 && KVS_T1 == KVS_T0) || (part == 2 && KVS_T2 == KVS_T0) || (part == 3 && KVS_T3 == KVS_T0)) {
        sum_panel<KVS_T0>(total, panel, has_panel, records, p.n_groups, at.n_rows, staged);
    } else if (part == 1 || (part == 2 && KVS_T2 == KVS_T1) || (part == 3 && KVS_T3 == KVS_T1)) {
        sum_panel<KVS_T1>(total, panel, has_panel, records, p.n_groups, at.n_rows, staged);
    } else if (part == 3 && KVS_T3 != KVS_T2) {
        sum_panel<KVS_T3>(total, panel, has_panel, records, p.n_groups, at.n_rows, staged);
    } else {
        sum_panel<KVS_T2>(total, panel, has_panel, records, p.n_groups, at.n_rows, staged);
    }
}

static __device__ float scaled(const kvs_matmul_part_params &part, unsigned int column, float sum)
{
    return part.scales == 0 ? sum : __fmul_rn(sum, ((const float *)part.scales)[column / part.scale_run]);
}

/* A sum where its row and column say. With swiglu the first pass leaves scaled gates in `out`, the second finds them there. */
static __device__ __forceinline__ void store_sum(const kvs_matmul_params &p, unsigned int part, unsigned int row, unsigned int column,
                                                 float sum)
{
    const kvs_matmul_part_params &target = p.part[KVS_SWIGLU ? 0 : part];
    float *out = (float *)target.out + (unsigned long long)row * target.out_stride + column;
    float y = scaled(p.part[part], column, sum);
    if (KVS_SWIGLU && part == 1) {
        y = __fmul_rn(kvs_silu(*out), y);
    } else if (p.epilogue == KVS_STORE_ADD) {
        y = __fadd_rn(*out, y);
    }
    *out = y;
}

static __device__ void store(const kvs_matmul_params &p, const place &at, unsigned int part, const sums_t &total)
{
    const unsigned int lane = threadIdx.x % 32;
    unsigned int first_column = 0, n_columns = 0; /* of the partial sums: padded, parts side by side */
    for (unsigned int i = 0; i < p.n_parts; i++) {
        first_column += i < part ? p.part[i].n_panels * ROWS : 0;
        n_columns += p.part[i].n_panels * ROWS;
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned int row = tile * KVS_ACT_TILE + lane % 4 * 2 + i % 2;
            const unsigned int column = at.panel * ROWS + lane / 4 + i / 2 * 8;
            if (row >= at.n_rows || column >= p.part[part].n) {
                continue;
            }
            if (KVS_SPLIT) {
                const unsigned long long at_row = (unsigned long long)blockIdx.y * p.n_rows + at.first_row + row;
                ((float *)p.partials)[at_row * n_columns + first_column + column] = total[tile][i];
            } else {
                store_sum(p, part, at.first_row + row, column, total[tile][i]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) matmul_wide(const kvs_matmul_params p)
{
    __shared__ stage_t staged[2];
    const unsigned int eight = blockIdx.x / p.n_row_tiles, row_tile = blockIdx.x % p.n_row_tiles;
    place at = {0, eight * WARPS, row_tile * TILES * KVS_ACT_TILE, 0};
    at.n_rows = p.n_rows - at.first_row;
    while (!KVS_SWIGLU && at.panel >= (p.part[at.part].n_panels + WARPS - 1) / WARPS * WARPS) {
        at.panel -= (p.part[at.part].n_panels + WARPS - 1) / WARPS * WARPS;
        at.part++;
    }
    at.panel += threadIdx.x / 32;
    const unsigned char *records = (const unsigned char *)p.records +
                                   (unsigned long long)row_tile * TILES * p.n_groups * KVS_ACT_RECORD_BYTES;
    sums_t total;
    sum_part(total, p, at, at.part, records, staged);
    store(p, at, at.part, total);
#if KVS_SWIGLU
    sum_part(total, p, at, 1, records, staged);
    store(p, at, 1, total);
#endif
}
