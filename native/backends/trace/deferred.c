/* deferred.c: copies in the order that the device chooses, instead of the order of virtual time. The places at which it is
 * asked are those of the CPU's engine, so that one schedule runs on both. */
#include "backends/trace/state.h"

/* Copies in without a gate and copies out are one queue here: whichever was submitted first. */
static uint32_t free_stream(const kvs_trace *trace)
{
    uint64_t in = 0;
    uint64_t out = 0;
    const bool has_in = kvs_trace_first_copy(trace, KVS_TRACE_LOAD, &in);
    const bool has_out = kvs_trace_first_copy(trace, KVS_TRACE_OUT, &out);
    return has_in && (!has_out || in < out) ? KVS_TRACE_LOAD : has_out ? KVS_TRACE_OUT : KVS_TRACE_COMPUTE;
}

static uint32_t copies_offered(const kvs_trace *trace)
{
    uint64_t number;
    return (free_stream(trace) != KVS_TRACE_COMPUTE ? 1u << KVS_STREAM_FREE : 0) |
           (kvs_trace_first_copy(trace, KVS_TRACE_RING, &number) ? 1u << KVS_STREAM_GATED : 0);
}

static void run_first(kvs_trace *trace, uint32_t stream)
{
    kvs_trace_carry_out(trace, stream == KVS_STREAM_FREE ? free_stream(trace) : KVS_TRACE_RING);
}

bool kvs_trace_run_one(kvs_trace *trace)
{
    const uint32_t offered = copies_offered(trace);
    if (offered != 0) {
        run_first(trace, kvs_device_choose(trace->device, offered));
    }
    return offered != 0;
}

void kvs_trace_run_ahead(kvs_trace *trace)
{
    uint32_t offered;
    while ((offered = copies_offered(trace)) != 0) {
        const uint32_t stream = kvs_device_choose(trace->device, offered | 1u << KVS_STREAM_COMPUTE);
        if (stream == KVS_STREAM_COMPUTE) {
            return;
        }
        run_first(trace, stream);
    }
}

void kvs_trace_offer_copies(kvs_trace *trace)
{
    if (trace->is_deferred && kvs_device_has_chooser(trace->device)) {
        kvs_trace_run_ahead(trace);
    }
}
