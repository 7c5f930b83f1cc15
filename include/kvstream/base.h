/* base.h: status codes, numeric types of tensors, version. */
#ifndef KVSTREAM_BASE_H
#define KVSTREAM_BASE_H

#include <stddef.h>
#include <stdint.h>

/* Around every declaration: C linkage, and visible in libkvstream.so, which is built with everything else hidden. */
#ifdef __cplusplus
#define KVS_C_BEGIN extern "C" {
#define KVS_C_END }
#else
#define KVS_C_BEGIN
#define KVS_C_END
#endif
#if defined(__GNUC__) || defined(__clang__)
#define KVS_API_BEGIN KVS_C_BEGIN _Pragma("GCC visibility push(default)")
#define KVS_API_END _Pragma("GCC visibility pop") KVS_C_END
#else
#define KVS_API_BEGIN KVS_C_BEGIN
#define KVS_API_END KVS_C_END
#endif

KVS_API_BEGIN

/* cffi:begin */

/* Result of every call that can fail. Zero or negative, except for the one named non-error. */
typedef enum kvs_status {
    KVS_OK = 0,
    KVS_PENDING = 1,        /* not finished yet; no error */
    KVS_EINVAL = -1,        /* argument out of its documented range */
    KVS_ENOMEM = -2,        /* host memory */
    KVS_EOVERFLOW = -3,     /* a size does not fit its type */
    KVS_ENOSPACE = -4,      /* a bounded region cannot hold it */
    KVS_EBUSY = -5,         /* a lease, fence or operation still holds it */
    KVS_ESTALE = -6,        /* an epoch or generation moved on */
    KVS_ECLOSED = -7,       /* released; waits for its last holder */
    KVS_EPOISONED = -8,     /* device state unknown; rebuild from host history */
    KVS_ECANCELLED = -9,    /* cancelled between two operations */
    KVS_EUNSUPPORTED = -10, /* refused by name */
    KVS_ENOTFOUND = -11,    /* no object has this id */
    KVS_EIO = -12,          /* copy, launch or system call failed */
    KVS_ENUMERIC = -13,     /* NaN or infinity where a number is needed */
    KVS_ECONTEXT = -14,     /* the sequence is full */
    KVS_EFORMAT = -15,      /* malformed file */
    KVS_ECORRUPT = -16      /* an integrity check failed */
} kvs_status;

/* Element types, numbered as in the GGUF format. */
typedef enum kvs_type {
    KVS_TYPE_F32 = 0,
    KVS_TYPE_F16 = 1,
    KVS_TYPE_Q4_0 = 2,
    KVS_TYPE_Q4_1 = 3,
    KVS_TYPE_Q5_0 = 6,
    KVS_TYPE_Q5_1 = 7,
    KVS_TYPE_Q8_0 = 8,
    KVS_TYPE_Q2_K = 10,
    KVS_TYPE_Q3_K = 11,
    KVS_TYPE_Q4_K = 12,
    KVS_TYPE_Q5_K = 13,
    KVS_TYPE_Q6_K = 14,
    KVS_TYPE_IQ2_XXS = 16,
    KVS_TYPE_IQ2_XS = 17,
    KVS_TYPE_IQ3_XXS = 18,
    KVS_TYPE_IQ1_S = 19,
    KVS_TYPE_IQ4_NL = 20,
    KVS_TYPE_IQ3_S = 21,
    KVS_TYPE_IQ2_S = 22,
    KVS_TYPE_IQ4_XS = 23,
    KVS_TYPE_IQ1_M = 29,
    KVS_TYPE_BF16 = 30,
    KVS_TYPE_MXFP4 = 39,
    KVS_TYPE_NVFP4 = 40
} kvs_type;

/* Version of this interface: major << 16 | minor. A library serves callers of the same major number.
 * thread: any */
uint32_t kvs_abi_version(void);

/* Name of a status, "KVS_EBUSY". own: static text. thread: any */
const char *kvs_status_name(int status);

/* Name of a type, "q8_0"; NULL for a number that names none. own: static text. thread: any */
const char *kvs_type_name(int type);

/* Block geometry of a type: values per block and bytes per block, as files hold them.
 * thread: any. errors: KVS_EUNSUPPORTED for an unknown type */
kvs_status kvs_type_block(int type, uint32_t *block_values, uint32_t *block_bytes);

/* cffi:end */

KVS_API_END
#endif
