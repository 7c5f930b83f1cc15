/* status.c: names of status codes, version of the interface. */
#include "kvstream/base.h"

enum { KVS_ABI_MAJOR = 1, KVS_ABI_MINOR = 0 };

uint32_t kvs_abi_version(void)
{
    return (uint32_t)KVS_ABI_MAJOR << 16 | (uint32_t)KVS_ABI_MINOR;
}

#define KVS_NAME_OF(status)                                                                        \
    case status:                                                                                   \
        return #status

const char *kvs_status_name(int status)
{
    switch (status) {
        KVS_NAME_OF(KVS_OK);
        KVS_NAME_OF(KVS_PENDING);
        KVS_NAME_OF(KVS_EINVAL);
        KVS_NAME_OF(KVS_ENOMEM);
        KVS_NAME_OF(KVS_EOVERFLOW);
        KVS_NAME_OF(KVS_ENOSPACE);
        KVS_NAME_OF(KVS_EBUSY);
        KVS_NAME_OF(KVS_ESTALE);
        KVS_NAME_OF(KVS_ECLOSED);
        KVS_NAME_OF(KVS_EPOISONED);
        KVS_NAME_OF(KVS_ECANCELLED);
        KVS_NAME_OF(KVS_EUNSUPPORTED);
        KVS_NAME_OF(KVS_ENOTFOUND);
        KVS_NAME_OF(KVS_EIO);
        KVS_NAME_OF(KVS_ENUMERIC);
        KVS_NAME_OF(KVS_ECONTEXT);
        KVS_NAME_OF(KVS_EFORMAT);
        KVS_NAME_OF(KVS_ECORRUPT);
    default:
        return "KVS_UNKNOWN";
    }
}
