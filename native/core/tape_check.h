/* tape_check.h: shape and order rules of the operations. */
#ifndef KVS_NATIVE_CORE_TAPE_CHECK_H
#define KVS_NATIVE_CORE_TAPE_CHECK_H

#include "core/tape.h"

/* Tensors that an operation reads and writes; an in-place operand is in both. */
typedef struct kvs_op_access {
    uint32_t reads[6];
    uint32_t writes[4];
    uint32_t n_reads;
    uint32_t n_writes;
} kvs_op_access;

/* Every operand exists and has the shape that the code wants. errors: EINVAL with operation, operand and numbers */
kvs_status kvs_tape_check_op(const kvs_tape *tape, const kvs_op_desc *op);

/* The operation must have passed kvs_tape_check_op. */
void kvs_tape_op_access(const kvs_op_desc *op, kvs_op_access *access);

const char *kvs_op_name(uint32_t code);

#endif
