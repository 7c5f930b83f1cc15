/* step_words.h: what changes from pass to pass, in device memory where kernels read it, so that a recorded pass is replayed
 * without patching. Addresses are the device's. No includes: compiled by the host's compiler and by NVRTC.
 */
#ifndef KVS_KERNELS_STEP_WORDS_H
#define KVS_KERNELS_STEP_WORDS_H

/* One pass. Demands number the pages that go through a ring; demand d lies in slot (d - base_demand) % n_slots. */
typedef struct kvs_step_words {
    unsigned long long first_token; /* row r of the pass is token first_token + r */
    unsigned long long ready;       /* address: demands below the value have arrived. 0: nothing goes through a ring */
    unsigned long long consumed;    /* address: every reader has left the demands below the value */
    unsigned long long arrivals;    /* [n_slots] unsigned int: readers that have left the run of pages that begins in a slot */
    unsigned long long completed;   /* [n_slots] unsigned long long: behind the last demand of the run that all have left */
    unsigned long long base_demand;
    unsigned long long given_up;    /* address of an unsigned int: no wait of this pass can end */
    unsigned long long stop;        /* address of an unsigned int in host memory: the host says so, or is told */
    unsigned long long limit_ns;    /* of one wait */
    unsigned int n_slots;
    unsigned int delay_ns;          /* tests: readers and writers of pages come up to so much late */
} kvs_step_words;

/* One attention layer: pages [first_page, end_page) go through the ring, the first of them as demand first_demand. */
typedef struct kvs_step_layer {
    unsigned long long first_demand;
    unsigned long long note; /* address of a kvs_step_note in host memory */
    unsigned int first_page;
    unsigned int end_page;
} kvs_step_layer;

/* What readers of a layer tell the host, for its policy. */
typedef struct kvs_step_note {
    unsigned long long wanted_ns; /* when the first page of the ring was wanted */
    unsigned long long left_ns;   /* when the last one was left */
    unsigned long long n_lying;   /* pages that lay there when it was wanted; 0: it was waited for */
    unsigned long long reserved;
} kvs_step_note;

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
