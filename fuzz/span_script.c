/* span_script.c: valid span plans, spoiled ones, and what must become of each. */
#include "span_script.h"

#include <string.h>

enum { RECORD_BYTES = 16384, N_DEFECTS = 20 };

/* One head of 16 values each: 256 rows of half precision. */
static const kvs_kv_layer LAYER = {
    .n_kv_heads = 1, .head_dim_k = 16, .head_dim_v = 16, .type_k = KVS_TYPE_F16, .type_v = KVS_TYPE_F16};

typedef struct draft {
    kvs_span spans[MAX_SPANS];
    kvs_span_desc desc;
} draft;

static uint32_t pages_of(const kvs_span *span)
{
    return (uint32_t)((span->n_tokens + KVS_PAGE_TOKENS - 1) / KVS_PAGE_TOKENS);
}

static void write_valid(draft *draft, const plans *plans, const step *step)
{
    const uint32_t n_spans = 1 + step->operand[0] % MAX_SPANS;
    uint64_t begin = 0;
    for (uint32_t i = 0; i < n_spans; i++) {
        const uint64_t n_pages = 1 + (step->operand[1] >> (2 * i)) % 4u;
        const bool is_last = i + 1 == n_spans;
        kvs_span *span = &draft->spans[i];
        memset(span, 0, sizeof *span);
        span->token_begin = begin;
        span->n_tokens = n_pages * KVS_PAGE_TOKENS - (is_last ? step->operand[2] : 0);
        span->lease = plans->lease;
        span->stride_bytes = RECORD_BYTES + (step->operand[3] % 3) * 64u;
        span->offset_bytes = (uint64_t)((step->operand[3] >> 2) + 16 * i) * 64;
        begin += span->n_tokens;
    }
    draft->desc = (kvs_span_desc){.struct_size = sizeof draft->desc,
                                  .n_spans = n_spans,
                                  .layer = &LAYER,
                                  .spans = draft->spans,
                                  .active_tokens = begin,
                                  .n_query_rows = (uint32_t)(1 + step->operand[5] % begin)};
}

/* Spoil one thing; the status that the header names for it. KVS_OK: nothing was spoiled. */
static kvs_status spoil(draft *draft, const step *step)
{
    kvs_span_desc *desc = &draft->desc;
    kvs_span *span = &draft->spans[step->operand[5] % desc->n_spans];
    switch (step->operand[4] % N_DEFECTS) {
    case 1:
        desc->n_spans = 0;
        return KVS_EINVAL;
    case 2:
        desc->active_tokens = 0;
        return KVS_EINVAL;
    case 3:
        desc->n_query_rows = (uint32_t)desc->active_tokens + 1;
        return KVS_EINVAL;
    case 4:
        desc->n_query_rows = 0;
        return KVS_EINVAL;
    case 5:
        span->executor = 1 + step->operand[5] / MAX_SPANS;
        return KVS_EUNSUPPORTED;
    case 6:
        span->n_tokens = 0;
        return KVS_EINVAL;
    case 7:
        span->token_begin += 1 + step->operand[5];
        return KVS_EINVAL;
    case 8:
        span->n_tokens += 1;
        return KVS_EINVAL;
    case 9:
        desc->active_tokens += 1;
        return KVS_EINVAL;
    case 10:
        span->lease = NULL;
        return KVS_EINVAL;
    case 11:
        span->offset_bytes += 1 + step->operand[5] % 63;
        return KVS_EINVAL;
    case 12:
        span->stride_bytes += 1 + step->operand[5] % 63;
        return KVS_EINVAL;
    case 13:
        span->stride_bytes = RECORD_BYTES - 64;
        return KVS_EINVAL;
    case 14:
        span->offset_bytes = UINT64_MAX - 63;
        return KVS_EOVERFLOW;
    case 15:
        span->stride_bytes = UINT64_MAX - 63;
        return pages_of(span) == 1 ? KVS_OK : KVS_EOVERFLOW;
    case 16:
        span->n_tokens = UINT64_MAX - KVS_PAGE_TOKENS;
        return KVS_EINVAL;
    case 17:
        desc->layer = NULL;
        return KVS_EINVAL;
    default:
        return KVS_OK;
    }
}

static kvs_status fits(const draft *draft, uint64_t lease_bytes)
{
    for (uint32_t i = 0; i < draft->desc.n_spans; i++) {
        const kvs_span *span = &draft->spans[i];
        if ((pages_of(span) - 1) * span->stride_bytes + span->offset_bytes + RECORD_BYTES > lease_bytes) {
            return KVS_ENOSPACE;
        }
    }
    return KVS_OK;
}

static void remember(plans *plans, const draft *draft, kvs_span_plan *plan)
{
    made_plan *made = &plans->made[plans->n++];
    *made = (made_plan){.plan = plan};
    for (uint32_t i = 0; i < draft->desc.n_spans; i++) {
        const kvs_span *span = &draft->spans[i];
        for (uint32_t page = 0; page < pages_of(span); page++) {
            made->addresses[made->n_pages++] = plans->lease_address + span->offset_bytes + page * span->stride_bytes;
        }
    }
    kvs_span_plan_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_span_plan_get_info(plan, &info));
    EXPECT_U64(info.n_spans, draft->desc.n_spans);
    EXPECT_U64(info.active_tokens, draft->desc.active_tokens);
    EXPECT_U64(info.n_pages, made->n_pages);
    EXPECT_U64(info.n_query_rows, draft->desc.n_query_rows);
    EXPECT_U64(info.live_bytes, made->n_pages * (uint64_t)RECORD_BYTES);
    EXPECT_U64(info.n_claims, 1);
}

void plans_make(plans *plans, const fault *fault, const step *step)
{
    if (plans->n == MAX_PLANS || plans->lease == NULL) {
        return;
    }
    draft draft;
    write_valid(&draft, plans, step);
    kvs_status expected = spoil(&draft, step);
    if (expected == KVS_OK) {
        expected = fits(&draft, plans->lease_bytes);
    }
    kvs_span_plan *plan = NULL;
    if (OUTCOME(fault, kvs_span_plan_make(plans->device, &draft.desc, &plan), expected)) {
        remember(plans, &draft, plan);
    } else {
        EXPECT(plan == NULL);
    }
}

static void check_table(const made_plan *made)
{
    uint64_t addresses[MAX_PLAN_PAGES + 1] = {0};
    EXPECT_STATUS(kvs_span_plan_page_table(made->plan, addresses, made->n_pages - 1), KVS_ENOSPACE);
    EXPECT_U64(addresses[0], 0);
    EXPECT_OK(kvs_span_plan_page_table(made->plan, addresses, made->n_pages));
    EXPECT(memcmp(addresses, made->addresses, made->n_pages * sizeof addresses[0]) == 0);
    EXPECT_U64(addresses[made->n_pages], 0);
}

void plans_release(plans *plans, uint32_t which)
{
    if (plans->n == 0) {
        return;
    }
    const uint32_t at = which % plans->n;
    check_table(&plans->made[at]);
    kvs_span_plan_release(plans->made[at].plan);
    plans->n--;
    memmove(&plans->made[at], &plans->made[at + 1], (plans->n - at) * sizeof plans->made[0]);
}

void plans_check(const plans *plans)
{
    for (uint32_t i = 0; i < plans->n; i++) {
        check_table(&plans->made[i]);
    }
}
