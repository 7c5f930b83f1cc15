/* step_words.h: what changes from pass to pass, in device memory where kernels read it, so that a recorded pass is replayed
 * without patching. Addresses are the device's. No includes: compiled by the host's compiler and by NVRTC.
 */
#ifndef KVS_KERNELS_STEP_WORDS_H
#define KVS_KERNELS_STEP_WORDS_H

/* One pass. */
typedef struct kvs_step_words {
    unsigned long long first_token; /* row r of the pass is token first_token + r */
    unsigned long long reserved;
} kvs_step_words;

/* One attention layer: where host history has the records of the first and the second page that the pass writes to; 0: rows of that
 * page go there by copies. */
typedef struct kvs_step_record {
    unsigned long long host[2];
} kvs_step_record;

/* One recurrent layer: the part of kvs_delta_view that changes. */
typedef struct kvs_step_delta {
    unsigned long long matrix_in;
    unsigned long long conv_in;
    unsigned long long log_in;
    unsigned long long matrix_out;
    unsigned long long conv_out;
    unsigned long long log_out;
    unsigned int n_pending;
    unsigned int reserved;
} kvs_step_delta;

#endif
