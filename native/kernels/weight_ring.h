/* weight_ring.h: how matmul.cu brings weights to a warp, and one row of activations. Plain C without includes, behind
 * weight_form.h, for the host, which asks for the shared memory, and for the kernel.
 *
 * A warp has a ring of stages in shared memory. A stage holds, of each of some panels, units that follow one another in the
 * warp's slice. For a pass of one row it also holds what the records of those units have of that row, group after group: codes,
 * whole, then, where the type has halves, halves. More rows are as many bytes as weights: they are read through the first-level
 * cache, which keeps them.
 */
#ifndef KVS_NATIVE_KERNELS_WEIGHT_RING_H
#define KVS_NATIVE_KERNELS_WEIGHT_RING_H

/* Units of a panel to a stage: about two kilobytes. */
KVS_FORM unsigned int kvs_stage_units(int type)
{
    return kvs_form_unit_groups(type) == 8 ? 1 : kvs_form_code_bits(type) == 8 ? 2 : 4;
}

/* 16 bytes each: what a stage keeps of a record. */
KVS_FORM unsigned int kvs_stage_record_chunks(int type)
{
    return kvs_form_is_halved(type) ? 4 : 3;
}

KVS_FORM unsigned int kvs_stage_weight_bytes(int type, unsigned int panels)
{
    return panels * kvs_stage_units(type) * kvs_form_unit_bytes(type);
}

/* Bytes of a stage, for a pass of one row or of more. */
KVS_FORM unsigned int kvs_stage_bytes(int type, unsigned int panels, int is_one_row)
{
    const unsigned int n_groups = kvs_stage_units(type) * kvs_form_unit_groups(type);
    return kvs_stage_weight_bytes(type, panels) + (is_one_row ? n_groups * 16 * kvs_stage_record_chunks(type) : 0);
}

#endif
