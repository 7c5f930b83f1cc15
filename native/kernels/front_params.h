/* front_params.h: arguments of front.cu, filled by the host and passed by value. Addresses are the device's. No includes: compiled by
 * the host's compiler and by NVRTC.
 */
#ifndef KVS_KERNELS_FRONT_PARAMS_H
#define KVS_KERNELS_FRONT_PARAMS_H

/* Of a row on a card; the product asks for as many. */
#define KVS_CARD_FRONT_BEST 128u
/* As tape.h has them. */
#define KVS_CARD_FRONT_CHUNK 8192u
#define KVS_CARD_FRONT_LANES 256u
#define KVS_CARD_FRONT_CHUNKS 128u
#define KVS_CARD_FRONT_TAIL 4u
/* Threads that share the best columns of all chunks of a row. */
#define KVS_CARD_FRONT_MERGERS 512u

/* What is known of a chunk of a row beside its best columns. */
typedef struct kvs_front_part {
    double sum;       /* of the exponentials of its tokens, relative to the largest; 0: all are minus infinity */
    float largest;
    unsigned int bad; /* the first column that is NaN or infinite upwards, KVS_NO_COLUMN where none is */
} kvs_front_part;

#define KVS_NO_COLUMN 0xffffffffu

typedef struct kvs_front_params {
    unsigned long long rows;  /* [n_rows][n_cols] float32 */
    unsigned long long parts; /* [n_rows][n_chunks] kvs_front_part */
    unsigned long long keys;  /* [n_rows][n_chunks][n_best] u64: a chunk's best columns, largest first, 0 behind the last one */
    unsigned long long out;   /* [n_rows][2 * n_best + KVS_CARD_FRONT_TAIL] words, as KVS_OP_FRONT has them */
    unsigned int n_cols;
    unsigned int n_tokens;    /* of the columns; those behind are looked at for what is no number alone */
    unsigned int n_best;
    unsigned int n_chunks;    /* of all columns */
} kvs_front_params;

#endif
