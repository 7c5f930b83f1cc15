/* span.h: what a frozen span plan says to those who execute it. Everything is valid while the plan is. */
#ifndef KVS_NATIVE_CORE_SPAN_H
#define KVS_NATIVE_CORE_SPAN_H

#include "base/internal.h"
#include "kvstream/span.h"

kvs_device *kvs_span_plan_device(const kvs_span_plan *plan);
const kvs_kv_layer *kvs_span_plan_layer(const kvs_span_plan *plan);
const kvs_record_info *kvs_span_plan_record(const kvs_span_plan *plan);
uint64_t kvs_span_plan_active_tokens(const kvs_span_plan *plan);
uint64_t kvs_span_plan_pages(const kvs_span_plan *plan);
uint32_t kvs_span_plan_query_rows(const kvs_span_plan *plan);

#endif
