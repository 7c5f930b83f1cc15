/* types.c: block geometry of element types, as the GGUF format fixes it. */
#include "kvstream/base.h"

typedef struct type_row {
    const char *name;
    uint32_t block_values;
    uint32_t block_bytes;
} type_row;

/* By type number; a row without a name is a number that this interface does not serve. */
static const type_row type_rows[] = {
    [KVS_TYPE_F32] = {"f32", 1, 4},           [KVS_TYPE_F16] = {"f16", 1, 2},
    [KVS_TYPE_Q4_0] = {"q4_0", 32, 18},       [KVS_TYPE_Q4_1] = {"q4_1", 32, 20},
    [KVS_TYPE_Q5_0] = {"q5_0", 32, 22},       [KVS_TYPE_Q5_1] = {"q5_1", 32, 24},
    [KVS_TYPE_Q8_0] = {"q8_0", 32, 34},       [KVS_TYPE_Q2_K] = {"q2_k", 256, 84},
    [KVS_TYPE_Q3_K] = {"q3_k", 256, 110},     [KVS_TYPE_Q4_K] = {"q4_k", 256, 144},
    [KVS_TYPE_Q5_K] = {"q5_k", 256, 176},     [KVS_TYPE_Q6_K] = {"q6_k", 256, 210},
    [KVS_TYPE_IQ2_XXS] = {"iq2_xxs", 256, 66}, [KVS_TYPE_IQ2_XS] = {"iq2_xs", 256, 74},
    [KVS_TYPE_IQ3_XXS] = {"iq3_xxs", 256, 98}, [KVS_TYPE_IQ1_S] = {"iq1_s", 256, 50},
    [KVS_TYPE_IQ4_NL] = {"iq4_nl", 32, 18},   [KVS_TYPE_IQ3_S] = {"iq3_s", 256, 110},
    [KVS_TYPE_IQ2_S] = {"iq2_s", 256, 82},    [KVS_TYPE_IQ4_XS] = {"iq4_xs", 256, 136},
    [KVS_TYPE_IQ1_M] = {"iq1_m", 256, 56},    [KVS_TYPE_BF16] = {"bf16", 1, 2},
    [KVS_TYPE_MXFP4] = {"mxfp4", 32, 17},     [KVS_TYPE_NVFP4] = {"nvfp4", 64, 36},
};

static const type_row *row_of(int type)
{
    const int n_rows = (int)(sizeof type_rows / sizeof type_rows[0]);
    if (type < 0 || type >= n_rows || type_rows[type].name == NULL) {
        return NULL;
    }
    return &type_rows[type];
}

const char *kvs_type_name(int type)
{
    const type_row *row = row_of(type);
    return row == NULL ? NULL : row->name;
}

kvs_status kvs_type_block(int type, uint32_t *block_values, uint32_t *block_bytes)
{
    const type_row *row = row_of(type);
    if (row == NULL) {
        return KVS_EUNSUPPORTED;
    }
    if (block_values == NULL || block_bytes == NULL) {
        return KVS_EINVAL;
    }
    *block_values = row->block_values;
    *block_bytes = row->block_bytes;
    return KVS_OK;
}
