/* ops.h: operations of a tape on the CPU: from bound operands to the kernels of this folder. */
#ifndef KVS_NATIVE_CPU_OPS_H
#define KVS_NATIVE_CPU_OPS_H

#include "backends/cpu/threads.h"
#include "base/internal.h"
#include "core/step.h"

typedef struct kvs_cpu_compute {
    kvs_device *device;
    kvs_threads *threads;
    uint32_t n_threads;
    uint32_t isa; /* never KVS_ISA_BEST */
} kvs_cpu_compute;

kvs_status kvs_cpu_op_scratch_bytes(const kvs_cpu_compute *cpu, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes);
kvs_status kvs_cpu_run_op(const kvs_cpu_compute *cpu, const kvs_bound_op *op, const struct kvs_step *step);
void kvs_cpu_attend_begin(const kvs_bound_op *op, const struct kvs_step *step);
void kvs_cpu_attend_wave(const kvs_cpu_compute *cpu, const kvs_bound_op *op, const struct kvs_step *step,
                         uint64_t page_begin, uint64_t page_end);
void kvs_cpu_attend_finish(const kvs_cpu_compute *cpu, const kvs_bound_op *op, const struct kvs_step *step);

#endif
