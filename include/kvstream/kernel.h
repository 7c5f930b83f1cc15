/* kernel.h: kernels of a device that runs compiled ones: which are needed, what they are made of, and where they come from.
 *
 * A kernel's image is made of one source, macros and an architecture. Sealing a tape finds out which images its operations need;
 * whoever can compile them, or has them in a file, gives them before the tape runs. A missing one is refused by name, never
 * replaced by something slower. Devices that compile nothing need none.
 *
 * A pack is a file of images, little-endian:
 *     header    "KVSKPACK", u32 version 1, u32 images, u64 bytes of the file, u64 0, the digest of the library's kernels [32],
 *               SHA-256 [32] of the 64 bytes before it and the table
 *     table     for each image: source [32], names of macros [8][24], values i32 [8], u32 macros, u32 architecture, u64 offset in
 *               the file, u64 bytes, SHA-256 of the image [32]
 *     images    each at a multiple of 64 bytes
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

/* Load every image that is needed, has not been given and is in a pack of `n_bytes` bytes; `n_given` receives how many were. What
 * the pack lacks stays needed. A pack that is damaged, cut, no pack, or of other kernels than this library's, older or newer, is
 * refused as a whole: the table is checked, and all images to be loaded, before the first one is.
 * own: the bytes may go on return. thread: any, while no pass runs. errors: EINVAL; EFORMAT with what is wrong; EIO the driver
 * refuses an image, those before it stay; ENOMEM */
kvs_status kvs_kernel_give_pack(kvs_device *device, const void *pack, uint64_t n_bytes, uint32_t *n_given);

/* What tells this library's kernels from another's: SHA-256 of all sources, their names, and the options that they are compiled
 * with. shape: 32 bytes. thread: any. errors: EINVAL */
kvs_status kvs_kernel_get_digest(uint8_t *digest);

/* Options of the compiler, "c++17 fma=0 ...": one order of rounding on every card. own: static. thread: any. errors: EINVAL */
kvs_status kvs_kernel_get_options(const char **text);

/* Sources of kernels in this library, without includes, numbered from 0: a name, and a text in C++.
 * own: both texts are static. thread: any. errors: EINVAL; ENOTFOUND no such number */
kvs_status kvs_kernel_get_source(uint32_t index, const char **name, const char **text);

/* cffi:end */

KVS_API_END
#endif
