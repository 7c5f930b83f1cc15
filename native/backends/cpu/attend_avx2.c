/* attend_avx2.c: attend_body.h for this instruction set. */
#include "backends/cpu/vec_avx2.h"

#include "backends/cpu/attend_body.h"

const kvs_attend_ops *kvs_attend_ops_avx2(void)
{
    return &attend_ops;
}
