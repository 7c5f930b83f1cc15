/* attend_avx512.c: attend_body.h for this instruction set. */
#include "backends/cpu/vec_avx512.h"

#include "backends/cpu/attend_body.h"

const kvs_attend_ops *kvs_attend_ops_avx512(void)
{
    return &attend_ops;
}
