/* attend_reference.c: attention as attend.h states it, one token and one query at a time. */
#include "backends/cpu/attend_ops.h"
#include "backends/cpu/encode.h"
#include "backends/cpu/mathf.h"

#define LANES 16u

static const float *decode_row(const kvs_attend_leaf *leaf, uint32_t plane, uint32_t token)
{
    const kvs_attend_planes planes = kvs_attend_planes_of(leaf, plane);
    const int is_k = plane == KVS_PLANE_K_CODES;
    kvs_decode_select_reference(is_k ? leaf->layer->type_k : leaf->layer->type_v)(
        planes.codes + (size_t)token * planes.codes_bytes, planes.high + (size_t)token * planes.high_bytes,
        planes.scales + (size_t)token * planes.scales_bytes, is_k ? leaf->layer->head_dim_k : leaf->layer->head_dim_v,
        leaf->strip);
    return leaf->strip;
}

static void score_tokens(const kvs_attend_leaf *leaf)
{
    const uint32_t n_values = leaf->layer->head_dim_k;
    const uint32_t n_tokens = kvs_attend_visible(leaf, leaf->n_queries - 1);
    for (uint32_t token = 0; token < n_tokens; token++) {
        const float *k = decode_row(leaf, KVS_PLANE_K_CODES, token);
        for (uint32_t i = 0; i < leaf->n_queries; i++) {
            const float *q = leaf->q + (size_t)i * n_values;
            float dot = 0.0f;
            for (uint32_t d = 0; d < n_values; d++) {
                dot = fmaf(q[d], k[d], dot);
            }
            leaf->scores[(size_t)i * KVS_PAGE_TOKENS + token] = dot * leaf->scale;
        }
    }
}

/* Scores become weights. */
static void weigh_tokens(float *scores, uint32_t n_tokens, float *part)
{
    float m = -INFINITY, lanes[LANES] = {0};
    for (uint32_t t = 0; t < n_tokens; t++) {
        m = scores[t] > m ? scores[t] : m;
    }
    for (uint32_t t = 0; t < n_tokens; t++) {
        scores[t] = kvs_expf(scores[t] - m);
        lanes[t % LANES] += scores[t];
    }
    for (uint32_t width = LANES / 2; width != 0; width /= 2) {
        for (uint32_t lane = 0; lane < width; lane++) {
            lanes[lane] += lanes[lane + width];
        }
    }
    part[0] = m;
    part[1] = lanes[0];
}

static void gather_values(const kvs_attend_leaf *leaf)
{
    const uint32_t n_values = leaf->layer->head_dim_v;
    const uint32_t n_tokens = kvs_attend_visible(leaf, leaf->n_queries - 1);
    for (uint32_t token = 0; token < n_tokens; token++) {
        const float *v = decode_row(leaf, KVS_PLANE_V_CODES, token);
        for (uint32_t i = 0; i < leaf->n_queries; i++) {
            if (token >= kvs_attend_visible(leaf, i)) {
                continue;
            }
            const float p = leaf->scores[(size_t)i * KVS_PAGE_TOKENS + token];
            float *acc = leaf->parts + (size_t)i * kvs_attend_part_floats(leaf->layer) + KVS_ATTEND_PART_HEAD;
            for (uint32_t d = 0; d < n_values; d++) {
                acc[d] = fmaf(p, v[d], acc[d]);
            }
        }
    }
}

static void attend_leaf(const kvs_attend_leaf *leaf)
{
    const uint32_t part_floats = kvs_attend_part_floats(leaf->layer);
    score_tokens(leaf);
    for (uint32_t i = 0; i < leaf->n_queries; i++) {
        float *part = leaf->parts + (size_t)i * part_floats;
        memset(part, 0, part_floats * sizeof *part);
        weigh_tokens(leaf->scores + (size_t)i * KVS_PAGE_TOKENS, kvs_attend_visible(leaf, i), part);
    }
    gather_values(leaf);
}

static void attend_fold(float *into, const float *part, uint32_t head_dim_v)
{
    const float m = part[0] > into[0] ? part[0] : into[0];
    const float keep = kvs_expf(into[0] - m), add = kvs_expf(part[0] - m);
    into[0] = m;
    into[1] = fmaf(part[1], add, into[1] * keep);
    for (uint32_t d = KVS_ATTEND_PART_HEAD; d < KVS_ATTEND_PART_HEAD + head_dim_v; d++) {
        into[d] = fmaf(part[d], add, into[d] * keep);
    }
}

static void attend_finish(const float *part, float *out, uint32_t head_dim_v)
{
    const float inverse = 1.0f / part[1];
    for (uint32_t d = 0; d < head_dim_v; d++) {
        const float value = part[KVS_ATTEND_PART_HEAD + d] * inverse;
        out[d] = value != value ? NAN : value;
    }
}

const kvs_attend_ops *kvs_attend_ops_reference(void)
{
    static const kvs_attend_ops ops = {attend_leaf, attend_fold, attend_finish};
    return &ops;
}
