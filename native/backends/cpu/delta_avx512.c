/* delta_avx512.c: delta_body.h for this instruction set. */
#include "backends/cpu/vec_avx512.h"

#include "backends/cpu/delta_body.h"

const kvs_delta_ops *kvs_delta_ops_avx512(void)
{
    return &delta_ops;
}
