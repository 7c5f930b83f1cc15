/* embed.c: kvstream without Python. Attention over a history of which only part lies on the device.
 *
 * Five pages of one layer: pages 0 and 1 and the unfinished last one are resident, pages 2 and 3 wait in host history and
 * come through a ring of two slots. The result is checked against a plain double loop, then everything is released in
 * the wrong order.
 *
 *     cc embed.c $(pkg-config --cflags --libs kvstream) -o embed && ./embed
 */
#include <kvstream.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    KV_HEADS = 2,
    QUERY_HEADS = 4,
    HEAD_DIM = 64,
    KV_WIDTH = KV_HEADS * HEAD_DIM,
    ROWS = 3,
    N_PAGES = 5,
    RESIDENT = 2, /* pages 0 and 1 */
    STREAMED = 2, /* pages 2 and 3 */
    TOKENS = (N_PAGES - 1) * KVS_PAGE_TOKENS + 77,
    POOL_REGION = 1,
    RING_REGION = 2
};

static const kvs_kv_layer layer = {.n_kv_heads = KV_HEADS,
                                   .head_dim_k = HEAD_DIM,
                                   .head_dim_v = HEAD_DIM,
                                   .type_k = KVS_TYPE_Q8_0,
                                   .type_v = KVS_TYPE_Q4_0};

static float keys[N_PAGES * KVS_PAGE_TOKENS][KV_WIDTH];
static float values[N_PAGES * KVS_PAGE_TOKENS][KV_WIDTH];
static float queries[ROWS][QUERY_HEADS][HEAD_DIM];
static float result[ROWS][QUERY_HEADS][HEAD_DIM];
static float again[ROWS][QUERY_HEADS][HEAD_DIM];

static void must(kvs_device *device, kvs_status status, const char *what)
{
    char text[512] = "";
    if (status == KVS_OK) {
        return;
    }
    if (device != NULL) {
        kvs_device_last_error(device, text, sizeof text);
    }
    fprintf(stderr, "%s: %s: %s\n", what, kvs_status_name(status), text);
    exit(1);
}

static float noise(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (float)(1 << 23) - 1.0f;
}

static void fill(float *data, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        data[i] = noise();
    }
}

/* One arena of two regions: a pool for resident pages, and the ring. The arena keeps the leases' storage. */
static void make_arena(kvs_device *device, uint64_t record_bytes, kvs_arena **arena, kvs_lease **pool,
                       kvs_lease **slots)
{
    kvs_region region = {
        .struct_size = sizeof region, .id = POOL_REGION, .size_bytes = (RESIDENT + 1) * record_bytes};
    must(device, kvs_arena_create(device, 8 * record_bytes, 64, arena), "arena");
    must(device, kvs_arena_begin(*arena, 0), "begin");
    must(device, kvs_arena_reserve(*arena, &region), "reserve pool");
    region = (kvs_region){
        .struct_size = sizeof region, .id = RING_REGION, .size_bytes = STREAMED * record_bytes};
    must(device, kvs_arena_reserve(*arena, &region), "reserve ring");
    must(device, kvs_arena_commit(*arena), "commit");
    must(device, kvs_arena_acquire(*arena, POOL_REGION, pool), "lease of the pool");
    must(device, kvs_arena_acquire(*arena, RING_REGION, slots), "lease of the ring");
}

static kvs_lease_info look(kvs_device *device, kvs_lease *lease)
{
    kvs_lease_info info = {.struct_size = sizeof info};
    must(device, kvs_lease_get_info(lease, &info), "lease");
    return info;
}

/* Encode every page; keep what the codes mean in `keys` and `values`, for the check. */
static void store_history(kvs_device *device, uint64_t record_bytes, kvs_host *host, kvs_lease *pool)
{
    uint8_t *device_pool = (uint8_t *)(uintptr_t)look(device, pool).address;
    uint8_t *record = calloc(1, record_bytes);
    if (record == NULL) {
        exit(1);
    }
    for (uint32_t page = 0; page < N_PAGES; page++) {
        float *k = keys[page * KVS_PAGE_TOKENS];
        float *v = values[page * KVS_PAGE_TOKENS];
        must(device, kvs_record_encode_rows(device, &layer, record, 0, KVS_PAGE_TOKENS, k, v), "encode");
        must(device, kvs_record_decode_rows(device, &layer, record, 0, KVS_PAGE_TOKENS, k, v), "decode");
        must(device, kvs_host_write_wait(host, page * record_bytes, record, record_bytes), "history");
        const int is_tail = page == N_PAGES - 1;
        if (page < RESIDENT || is_tail) {
            const uint64_t slot = is_tail ? RESIDENT : page;
            memcpy(device_pool + slot * record_bytes, record, record_bytes);
        }
    }
    free(record);
}

/* Pages 0 and 1, then two ring slots, then the tail: an exact partition of all tokens. */
static kvs_span_plan *make_plan(kvs_device *device, uint64_t record_bytes, kvs_lease *pool, kvs_lease *slots,
                                uint64_t ring_address)
{
    const kvs_span spans[3] = {
        {.token_begin = 0,
         .n_tokens = RESIDENT * KVS_PAGE_TOKENS,
         .lease = pool,
         .offset_bytes = 0,
         .stride_bytes = record_bytes},
        {.token_begin = RESIDENT * KVS_PAGE_TOKENS,
         .n_tokens = STREAMED * KVS_PAGE_TOKENS,
         .lease = slots,
         .offset_bytes = ring_address - look(device, slots).address,
         .stride_bytes = record_bytes},
        {.token_begin = (N_PAGES - 1) * KVS_PAGE_TOKENS,
         .n_tokens = TOKENS % KVS_PAGE_TOKENS,
         .lease = pool,
         .offset_bytes = RESIDENT * record_bytes,
         .stride_bytes = record_bytes},
    };
    const kvs_span_desc desc = {.struct_size = sizeof desc,
                                .n_spans = 3,
                                .layer = &layer,
                                .spans = spans,
                                .active_tokens = TOKENS,
                                .n_query_rows = ROWS};
    kvs_span_plan *plan = NULL;
    must(device, kvs_span_plan_make(device, &desc, &plan), "span plan");
    return plan;
}

static void attend(kvs_device *device, kvs_span_plan *plan, float *out)
{
    const kvs_attend_desc desc = {.struct_size = sizeof desc,
                                  .n_query_heads = QUERY_HEADS,
                                  .plan = plan,
                                  .q = &queries[0][0][0],
                                  .out = out,
                                  .scale = 0.125f}; /* 1 / sqrt(HEAD_DIM) */
    must(device, kvs_attend_run(device, &desc), "attention");
}

/* e^x as its series, so that nothing but libkvstream is linked. Scores here lie within 8. */
static double exponential(double x)
{
    double term = 1;
    double sum = 1;
    for (int n = 1; n < 60; n++) {
        term *= x / n;
        sum += term;
    }
    return sum;
}

/* The same by the book, in double precision: the largest difference over all outputs. */
static double largest_error(void)
{
    static double weight[TOKENS];
    double worst = 0;
    for (uint32_t row = 0; row < ROWS; row++) {
        for (uint32_t head = 0; head < QUERY_HEADS; head++) {
            const uint32_t at = head / (QUERY_HEADS / KV_HEADS) * HEAD_DIM;
            const uint32_t n_seen = TOKENS - ROWS + row + 1;
            double sum = 0;
            for (uint32_t token = 0; token < n_seen; token++) {
                double score = 0;
                for (uint32_t i = 0; i < HEAD_DIM; i++) {
                    score += (double)queries[row][head][i] * (double)keys[token][at + i];
                }
                sum += weight[token] = exponential(score * 0.125);
            }
            for (uint32_t i = 0; i < HEAD_DIM; i++) {
                double expected = 0;
                for (uint32_t token = 0; token < n_seen; token++) {
                    expected += weight[token] / sum * (double)values[token][at + i];
                }
                const double error = expected - (double)result[row][head][i];
                worst = error > worst ? error : -error > worst ? -error : worst;
            }
        }
    }
    return worst;
}

int main(void)
{
    const kvs_device_desc wanted = {.struct_size = sizeof wanted, .backend = KVS_BACKEND_CPU, .n_threads = 2};
    kvs_device *device = NULL;
    must(NULL, kvs_device_create(&wanted, &device), "device");

    kvs_record_info record = {.struct_size = sizeof record};
    must(device, kvs_record_layout(&layer, &record), "record");
    const uint64_t record_bytes = record.record_bytes;

    kvs_arena *arena = NULL;
    kvs_lease *pool = NULL;
    kvs_lease *slots = NULL;
    kvs_host *host = NULL;
    make_arena(device, record_bytes, &arena, &pool, &slots);
    must(device, kvs_host_create(device, N_PAGES * record_bytes, &host), "host history");
    fill(&keys[0][0], sizeof keys / sizeof(float));
    fill(&values[0][0], sizeof values / sizeof(float));
    fill(&queries[0][0][0], sizeof queries / sizeof(float));
    store_history(device, record_bytes, host, pool);
    printf("history: %d tokens in %d pages of %" PRIu64 " bytes; %d resident, %d streamed\n", TOKENS, N_PAGES,
           record_bytes, RESIDENT + 1, STREAMED);

    const kvs_ring_desc ring_desc = {
        .struct_size = sizeof ring_desc, .n_slots = STREAMED, .lease = slots, .slot_bytes = record_bytes};
    const kvs_demand demand = {.host = host,
                               .host_offset_bytes = RESIDENT * record_bytes,
                               .record_bytes = record_bytes,
                               .n_pages = STREAMED};
    kvs_ring *ring = NULL;
    uint64_t first = 0;
    uint64_t ring_address = 0;
    must(device, kvs_ring_create(device, &ring_desc, &ring), "ring");
    must(device, kvs_ring_submit(ring, &demand, 1, &first), "submit");
    must(device, kvs_ring_acquire_wait(ring, first + STREAMED), "wait for copies");
    must(device, kvs_ring_page_address(ring, first, &ring_address), "page address");

    kvs_span_plan *plan = make_plan(device, record_bytes, pool, slots, ring_address);
    attend(device, plan, &result[0][0][0]);
    const double worst = largest_error();
    const int is_right = worst < 1e-5;
    printf("attention: largest difference from a plain double loop %.1e: %s\n", worst,
           is_right ? "right" : "WRONG");

    /* The arena goes while leases and plan still need it: it becomes a zombie. They stay valid, new claims do not. */
    kvs_lease *late = NULL;
    kvs_arena_release(arena);
    const kvs_status refused = kvs_arena_acquire(arena, POOL_REGION, &late);
    attend(device, plan, &again[0][0][0]);
    const int is_same = memcmp(result, again, sizeof result) == 0;
    printf("after the arena's release: a new lease gets %s, attention gives %s bits\n", kvs_status_name(refused),
           is_same ? "the same" : "OTHER");

    /* Device first, then the leases, then what uses them: each keeps alive what it needs. */
    kvs_device_release(device);
    kvs_lease_release(pool);
    kvs_lease_release(slots);
    kvs_host_release(host);
    const kvs_status consumed = kvs_ring_consume(ring, first + STREAMED);
    kvs_ring_release(ring);
    kvs_span_plan_release(plan);
    printf("released device, leases, history, ring and plan in the wrong order: safe\n");
    return is_right && is_same && refused == KVS_ECLOSED && consumed == KVS_OK ? 0 : 1;
}
