/* weight_ring.h: how matmul.cu brings weights to a warp, and what it keeps of one row of activations. Plain C without includes, behind
 * weight_form.h, for the host, which asks for the shared memory, and for the kernel.
 *
 * A warp has a ring of stages in shared memory. A stage holds, of each of some panels, units that follow one another in the
 * warp's slice. A pass of one row keeps that row whole, a block once: group after group codes, whole, then, where one of the types has
 * halves, halves. More rows are as many bytes as weights: they are read through the first-level cache, which keeps them.
 */
#ifndef KVS_NATIVE_KERNELS_WEIGHT_RING_H
#define KVS_NATIVE_KERNELS_WEIGHT_RING_H

/* Units of a panel to a stage: about two kilobytes. */
KVS_FORM unsigned int kvs_stage_units(int type)
{
    return kvs_form_unit_groups(type) == 8 ? 1 : kvs_form_code_bits(type) == 8 ? 2 : 4;
}

KVS_FORM unsigned int kvs_stage_bytes(int type, unsigned int panels)
{
    return panels * kvs_stage_units(type) * kvs_form_unit_bytes(type);
}

/* Bytes that a block keeps of a group of the one row. */
KVS_FORM unsigned int kvs_row_group_bytes(int has_halves)
{
    return has_halves ? 64 : 48;
}

#endif
