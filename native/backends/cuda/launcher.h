/* launcher.h: what an operation of the CUDA backend needs to launch its kernels, and the table of those operations.
 *
 * A launcher function fills the parameters of a kernel from a bound operation and the step, and calls kvs_cuda_launch, once or
 * more. The step that it sees is the device's: `tokens`, `positions`, `out_rows`, what `outputs[i]` and `page_tables[layer]` point to,
 * and all data of operands, weights (borrowed rows, norm weights and `scales` too), `scratch` and delta views are device
 * addresses, never read by the host; the arrays `outputs`, `page_tables` and `deltas` themselves are host memory.
 *
 * The same function also runs dry, when a tape is sealed: with addresses of no meaning and every number of rows that counts, so that
 * kvs_cuda_launch learns which kernels are needed. It must not depend on an address, must reach each kernel it can ever
 * launch, and keeps no state of its own.
 */
#ifndef KVS_NATIVE_BACKENDS_CUDA_LAUNCHER_H
#define KVS_NATIVE_BACKENDS_CUDA_LAUNCHER_H

#include "core/backend.h"
#include "core/step.h"
#include "kernels/step_words.h"

#include <math.h>

#define KVS_CUDA_MAX_MACROS 8u

typedef struct kvs_cuda_macro {
    const char *name; /* at most 23 letters */
    int32_t value;
} kvs_cuda_macro;

/* One kernel: the file native/kernels/<source>.cu compiled with -Dname=value for each macro, and the extern "C" function
 * <kernel> in it. Kernels of one source and equal macros, in the same order, come from one compiled image. Files are compiled as
 * C++17 with -fmad=false, exact division and square root, no flush to zero; `#include "name.h"` of files beside them is resolved
 * when the library is built, nothing else can be included. */
typedef struct kvs_cuda_key {
    const char *source; /* at most 31 letters */
    const char *kernel;
    bool waits; /* the kernel waits by itself for those before it (kernels/grid.cuh), so that it may begin while they end */
    uint32_t n_macros;
    kvs_cuda_macro macros[KVS_CUDA_MAX_MACROS];
} kvs_cuda_key;

typedef struct kvs_cuda_dim {
    uint32_t x;
    uint32_t y;
    uint32_t z;
} kvs_cuda_dim;

/* Where kernels of a recorded pass find what changes from pass to pass (kernels/step_words.h): device addresses, the same for all
 * passes of a shape. All 0: the pass is launched by itself, and parameters say it. */
typedef struct kvs_cuda_places {
    uint64_t words;       /* kvs_step_words */
    uint64_t deltas;      /* [n_deltas] kvs_step_delta */
    uint64_t layers;      /* [n_layers] kvs_step_layer; 0: no page comes through a ring */
    uint64_t tickets;     /* [n_layers][table_pages] unsigned int */
    uint64_t is_tight;    /* the ring is too small for blocks that read several pages (kernels/page_gate.cuh) */
    uint64_t table_pages; /* of each page table: at least the pages of the pass */
} kvs_cuda_places;

/* What launchers may read. */
typedef struct kvs_cuda_launcher {
    kvs_device *device;     /* for kvs_fail */
    uint32_t arch;          /* 75, 80, 86, 89, 90, 120, ...: the newest one that kernels may use here */
    uint32_t n_sm;          /* multiprocessors */
    uint32_t shared_bytes;  /* of one block, at most, opted in */
    uint32_t is_dry;        /* kernels are noted, nothing runs */
    kvs_cuda_places places; /* of the pass under way */
    struct kvs_cuda *cuda;
} kvs_cuda_launcher;

/* Put a kernel in the compute order. `params` is copied: it is the kernel's only argument, by value. A launch with an empty grid
 * does nothing. Shared memory is asked for here.
 * errors: EUNSUPPORTED no image of the kernel, by name; EIO the driver's, with its call */
kvs_status kvs_cuda_launch(kvs_cuda_launcher *launcher, const kvs_cuda_key *key, kvs_cuda_dim grid, kvs_cuda_dim block,
                           uint32_t shared_bytes, const void *params, size_t params_bytes);

/* What a Walsh-Hadamard rotation of blocks is multiplied by; 1 for no rotation, a block of 0. */
static inline float kvs_cuda_hadamard_scale(uint32_t block)
{
    return block == 0 ? 1.0f : (float)(1.0 / sqrt((double)block));
}

/* Attention side. Waves of one operation follow one another; what they hand on lies in op->scratch. */
kvs_status kvs_cuda_scratch_attend(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes);
kvs_status kvs_cuda_launch_attend_begin(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);
kvs_status kvs_cuda_launch_attend_wave(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step,
                                       uint64_t page_begin, uint64_t page_end);
kvs_status kvs_cuda_launch_attend_finish(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);
kvs_status kvs_cuda_launch_kv_write(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);
kvs_status kvs_cuda_launch_hadamard(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);
kvs_status kvs_cuda_launch_rope_table(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);
kvs_status kvs_cuda_launch_rope(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);
kvs_status kvs_cuda_launch_norm(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);
kvs_status kvs_cuda_launch_glu(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);
kvs_status kvs_cuda_launch_add(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);
kvs_status kvs_cuda_launch_gather(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);
kvs_status kvs_cuda_scratch_front(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes);
kvs_status kvs_cuda_launch_front(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);

/* Weight side. A dry delta operation asks for the kernels of kvs_cuda_launch_delta_fold too. */
kvs_status kvs_cuda_scratch_matmul(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes);
kvs_status kvs_cuda_scratch_experts(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes);
kvs_status kvs_cuda_scratch_delta(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes);
kvs_status kvs_cuda_launch_embed(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);
kvs_status kvs_cuda_launch_matmul(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);
kvs_status kvs_cuda_launch_experts(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);
kvs_status kvs_cuda_launch_delta(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);
kvs_status kvs_cuda_launch_delta_fold(kvs_cuda_launcher *launcher, const kvs_delta_view *views, uint32_t layer, void *scratch);

/* The device form of PANELS weights. Borrowed rows (embedding table, norm weights, small tables) are copied as files hold them. */
kvs_status kvs_cuda_weight_bytes(int type, uint64_t k, uint64_t n, uint64_t *bytes);
/* The same, and the text of a refusal. */
kvs_status kvs_cuda_weight_size(const kvs_cuda_launcher *launcher, int type, uint64_t k, uint64_t n, uint64_t *bytes);
/* In the compute order: bytes may be on their way on return. */
struct kvs_cuda_loader;
kvs_status kvs_cuda_weight_pack(const kvs_cuda_launcher *launcher, struct kvs_cuda_loader *loader, int type, uint64_t k,
                                uint64_t n, const void *rows, uint64_t address);

#endif
