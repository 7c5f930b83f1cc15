/* panel.c: from blocks of a file to panels. */
#include "backends/cpu/panel_layout.h"

#include "base/internal.h"

#include <string.h>

#define LANE_BYTES 4u /* of a quad */
#define QUAD_BYTES 64u

/* Bytes of all planes of one panel, laid one after another from `at`. */
static bool place_plane(uint64_t *at, uint64_t count, uint64_t bytes, uint64_t *offset)
{
    uint64_t plane_bytes;
    *offset = *at;
    return kvs_mul_u64(count, bytes, &plane_bytes) && kvs_add_u64(*at, plane_bytes, at);
}

/* Bytes of the integers and small floats that scale one group. */
static uint64_t sub_scale_bytes(const kvs_panel_traits *traits)
{
    const uint64_t lanes = kvs_traits_is_halved(traits) ? 2 * KVS_PANEL_ROWS : KVS_PANEL_ROWS;
    return traits->scale == KVS_SCALE_GROUP ? 0 : kvs_traits_has_nibble_scales(traits) ? lanes / 2 : lanes;
}

static bool place_planes(const kvs_panel_traits *traits, kvs_panel_layout *layout)
{
    static const uint64_t code_bytes[] = {[8] = KVS_WIDE_BYTES, [4] = KVS_NIBBLE_BYTES, [2] = KVS_CRUMB_BYTES};
    static const uint64_t high_bytes[] = {[0] = 0, [1] = KVS_BIT_BYTES, [2] = KVS_CRUMB_BYTES};
    const uint64_t n = layout->n_groups;
    const uint64_t n_super = n / KVS_SUPER_GROUPS;
    const uint64_t n_scales = kvs_traits_is_super(traits) ? n_super : kvs_traits_is_small_float(traits) ? 0 : n;
    const uint64_t n_minima = traits->minimum == KVS_MINIMUM_NONE ? 0 : n_scales;
    const uint64_t high = traits->has_shared_bit ? KVS_SHARED_BIT_BYTES : high_bytes[traits->high_bits];
    const uint64_t n_sub_minima = traits->minimum == KVS_MINIMUM_SUPER_U8 ? n : 0;
    uint64_t at = 0;
    return place_plane(&at, n, code_bytes[traits->code_bits], &layout->codes) &&
           place_plane(&at, n, high, &layout->high) &&
           place_plane(&at, n_scales, KVS_HALF_LANES_BYTES, &layout->scales) &&
           place_plane(&at, n, sub_scale_bytes(traits), &layout->sub_scales) &&
           place_plane(&at, n_minima, KVS_HALF_LANES_BYTES, &layout->minima) &&
           place_plane(&at, n_sub_minima, KVS_PANEL_ROWS, &layout->sub_minima) &&
           kvs_align_up(at, 64, &layout->panel_bytes);
}

kvs_status kvs_panel_layout_make(int type, uint64_t k, kvs_panel_layout *layout)
{
    uint32_t block_values, block_bytes;
    kvs_status status = kvs_type_block(type, &block_values, &block_bytes);
    if (status != KVS_OK) {
        return status;
    }
    if (k == 0 || k % block_values != 0) {
        return KVS_EINVAL;
    }
    kvs_panel_layout made = {.type = type, .k = k};
    bool fits;
    if (kvs_traits[type].is_quantized) {
        made.n_groups = k / KVS_GROUP;
        fits = place_planes(&kvs_traits[type], &made);
    } else {
        uint64_t bytes;
        fits = kvs_mul_u64(k, (uint64_t)block_bytes * KVS_PANEL_ROWS, &bytes) &&
               kvs_align_up(bytes, 64, &made.panel_bytes);
    }
    if (!fits) {
        return KVS_EOVERFLOW;
    }
    *layout = made;
    return KVS_OK;
}

uint64_t kvs_panel_count(uint64_t n)
{
    return kvs_div_up(n, KVS_PANEL_ROWS);
}

kvs_status kvs_panel_bytes(int type, uint64_t k, uint64_t n, uint64_t *panel_bytes, uint64_t *bytes)
{
    kvs_panel_layout layout;
    kvs_status status = kvs_panel_layout_make(type, k, &layout);
    if (status != KVS_OK) {
        return status;
    }
    uint64_t total;
    if (n == 0) {
        return KVS_EINVAL;
    }
    if (!kvs_mul_u64(layout.panel_bytes, kvs_panel_count(n), &total)) {
        return KVS_EOVERFLOW;
    }
    if (panel_bytes != NULL) {
        *panel_bytes = layout.panel_bytes;
    }
    if (bytes != NULL) {
        *bytes = total;
    }
    return KVS_OK;
}

/* The codes of one lane and group as eight quads, one to a word. */
static void load_quads(const uint8_t *codes, uint32_t quads[8])
{
    memcpy(quads, codes, KVS_GROUP);
}

static void store_quad(uint8_t *group, uint32_t vector, uint32_t lane, uint32_t quad)
{
    memcpy(group + vector * QUAD_BYTES + lane * LANE_BYTES, &quad, LANE_BYTES);
}

static void place_crumbs(uint8_t *group, uint32_t lane, const uint32_t quads[8], uint32_t shift)
{
    for (uint32_t t = 0; t < 2; t++) {
        uint32_t packed = 0;
        for (uint32_t i = 0; i < 4; i++) {
            packed |= (quads[4 * t + i] >> shift & 0x03030303u) << (2 * i);
        }
        store_quad(group, t, lane, packed);
    }
}

static void place_bits(uint8_t *group, uint32_t lane, const uint32_t quads[8], uint32_t shift)
{
    uint32_t packed = 0;
    for (uint32_t q = 0; q < 8; q++) {
        packed |= (quads[q] >> shift & 0x01010101u) << q;
    }
    store_quad(group, 0, lane, packed);
}

/* Nibble `index` of a plane that keeps two to a byte. The panel is zero where nothing is placed yet. */
static void place_nibble(uint8_t *plane, uint64_t index, uint32_t lane, uint32_t nibble)
{
    plane[index / 2 * KVS_PANEL_ROWS + lane] |= (uint8_t)(nibble << (4 * (index % 2)));
}

/* Bit 2 of the first of every eight codes, which all eight share. */
static uint32_t shared_bits(const uint8_t *codes)
{
    return (uint32_t)(codes[0] >> 2 & 1) | (uint32_t)(codes[8] >> 2 & 1) << 1 | (uint32_t)(codes[16] >> 2 & 1) << 2 |
           (uint32_t)(codes[24] >> 2 & 1) << 3;
}

static void place_codes(const kvs_panel_layout *layout, uint8_t *panel, uint32_t lane, uint64_t group,
                        const uint8_t *codes)
{
    const kvs_panel_traits *traits = &kvs_traits[layout->type];
    uint8_t *low = panel + layout->codes;
    uint8_t *high = panel + layout->high;
    uint32_t quads[8];
    load_quads(codes, quads);
    if (traits->code_bits == 8) {
        for (uint32_t q = 0; q < 8; q++) {
            store_quad(low + group * KVS_WIDE_BYTES, q, lane, quads[q]);
        }
    } else if (traits->code_bits == 4) {
        for (uint32_t h = 0; h < 4; h++) {
            uint32_t packed = (quads[h] & 0x0f0f0f0fu) | (quads[h + 4] & 0x0f0f0f0fu) << 4;
            store_quad(low + group * KVS_NIBBLE_BYTES, h, lane, packed);
        }
    } else {
        place_crumbs(low + group * KVS_CRUMB_BYTES, lane, quads, 0);
    }
    if (traits->has_shared_bit) {
        place_nibble(high, group, lane, shared_bits(codes));
    } else if (traits->high_bits == 2) {
        place_crumbs(high + group * KVS_CRUMB_BYTES, lane, quads, traits->code_bits);
    } else if (traits->high_bits == 1) {
        place_bits(high + group * KVS_BIT_BYTES, lane, quads, traits->code_bits);
    }
}

static void place_half(uint8_t *plane, uint64_t index, uint32_t lane, uint16_t half)
{
    memcpy(plane + index * KVS_HALF_LANES_BYTES + 2 * lane, &half, 2);
}

/* Block `index` of an output row, of `n_groups` groups, into its lane. */
static void place_block(const kvs_panel_layout *layout, uint8_t *panel, uint32_t lane, uint64_t index,
                        uint32_t n_groups, const kvs_block *block)
{
    const kvs_panel_traits *traits = &kvs_traits[layout->type];
    const uint32_t n_sub = kvs_traits_is_halved(traits) ? 2 * n_groups : n_groups;
    for (uint32_t g = 0; g < n_groups; g++) {
        place_codes(layout, panel, lane, index * n_groups + g, block->codes + g * KVS_GROUP);
    }
    if (!kvs_traits_is_small_float(traits)) {
        place_half(panel + layout->scales, index, lane, block->scale);
    }
    if (traits->minimum != KVS_MINIMUM_NONE) {
        place_half(panel + layout->minima, index, lane, block->minimum);
    }
    for (uint32_t s = 0; traits->scale != KVS_SCALE_GROUP && s < n_sub; s++) {
        if (kvs_traits_has_nibble_scales(traits)) {
            place_nibble(panel + layout->sub_scales, index * n_sub + s, lane, block->sub_scales[s]);
        } else {
            panel[layout->sub_scales + (index * n_sub + s) * KVS_PANEL_ROWS + lane] = block->sub_scales[s];
        }
    }
    for (uint32_t s = 0; traits->minimum == KVS_MINIMUM_SUPER_U8 && s < n_sub; s++) {
        panel[layout->sub_minima + (index * n_sub + s) * KVS_PANEL_ROWS + lane] = block->sub_minima[s];
    }
}

static void pack_float_row(const uint8_t *row, uint64_t k, uint32_t value_bytes, uint32_t lane, uint8_t *panel)
{
    for (uint64_t i = 0; i < k; i++) {
        memcpy(panel + (i * KVS_PANEL_ROWS + lane) * value_bytes, row + i * value_bytes, value_bytes);
    }
}

static void pack_panel(const kvs_panel_layout *layout, uint64_t n, const uint8_t *rows, uint64_t index, uint8_t *panel)
{
    uint32_t block_values, block_bytes;
    kvs_type_block(layout->type, &block_values, &block_bytes);
    const uint64_t n_blocks = layout->k / block_values;
    const uint64_t first = index * KVS_PANEL_ROWS;
    memset(panel, 0, layout->panel_bytes);
    for (uint32_t lane = 0; lane < KVS_PANEL_ROWS && first + lane < n; lane++) {
        const uint8_t *row = rows + (first + lane) * n_blocks * block_bytes;
        if (!kvs_traits[layout->type].is_quantized) {
            pack_float_row(row, layout->k, block_bytes, lane, panel);
            continue;
        }
        for (uint64_t b = 0; b < n_blocks; b++) {
            kvs_block block;
            kvs_block_split(layout->type, row + b * block_bytes, &block);
            place_block(layout, panel, lane, b, block_values / KVS_GROUP, &block);
        }
    }
}

kvs_status kvs_panel_pack(int type, uint64_t k, uint64_t n, const void *rows, void *panels, uint64_t first_panel,
                          uint64_t n_panels)
{
    kvs_panel_layout layout;
    kvs_status status = kvs_panel_layout_make(type, k, &layout);
    if (status != KVS_OK) {
        return status;
    }
    uint64_t end;
    if (!kvs_add_u64(first_panel, n_panels, &end) || end > kvs_panel_count(n)) {
        return KVS_EINVAL;
    }
    for (uint64_t i = first_panel; i < end; i++) {
        pack_panel(&layout, n, rows, i, (uint8_t *)panels + i * layout.panel_bytes);
    }
    return KVS_OK;
}
