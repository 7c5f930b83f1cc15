/* kernel.h: kernels of a device that runs compiled ones: which are needed, what they are made of, and where they come from.
 *
 * A kernel's image is made of one source, macros and an architecture. Sealing a tape finds out which images its operations need;
 * whoever can compile them, or has them in a file, gives them before the tape runs. A missing one is refused by name, never
 * replaced by something slower. Devices that compile nothing need none.
 */
#ifndef KVSTREAM_KERNEL_H
#define KVSTREAM_KERNEL_H

#include "kvstream/device.h"

KVS_API_BEGIN

/* cffi:begin */

#define KVS_KERNEL_MAX_MACROS 8

/* What an image is made of: a source of this library, compiled with -Dname=value for each macro. */
typedef struct kvs_kernel_key {
    uint32_t struct_size;
    uint32_t n_macros;
    uint32_t arch;          /* 90 for sm_90 */
    uint32_t has_image;     /* it has been given */
    char source[32];        /* NUL-terminated */
    char names[8][24];
    int32_t values[8];
} kvs_kernel_key;

/* Images that sealed tapes of this device need, in the order in which they were met. thread: any. errors: EINVAL */
kvs_status kvs_kernel_count(kvs_device *device, uint32_t *n_needed);

/* thread: any. errors: EINVAL; ENOTFOUND no such number */
kvs_status kvs_kernel_get(kvs_device *device, uint32_t index, kvs_kernel_key *key);

/* Load the image of a needed kernel, a cubin of its architecture. A second one is ignored.
 * own: the bytes may go on return. thread: any, while no pass runs. errors: EINVAL; ENOTFOUND nobody needs this number; EIO the
 * driver refuses it; ENOMEM */
kvs_status kvs_kernel_give(kvs_device *device, uint32_t index, const void *image, uint64_t n_bytes);

/* Sources of kernels in this library, without includes, numbered from 0: a name, and a text in C++.
 * own: both texts are static. thread: any. errors: EINVAL; ENOTFOUND no such number */
kvs_status kvs_kernel_get_source(uint32_t index, const char **name, const char **text);

/* cffi:end */

KVS_API_END
#endif
