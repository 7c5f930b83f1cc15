/* isa.c: what this processor can do and this operating system lets it do. */
#include "backends/cpu/backend.h"

#if defined(__x86_64__)

#include <cpuid.h>

#define LEAF1_ECX_FMA (1u << 12)
#define LEAF1_ECX_OSXSAVE (1u << 27)
#define LEAF1_ECX_AVX (1u << 28)
#define LEAF1_ECX_F16C (1u << 29)
#define LEAF1_ECX_AVX2_BASE (LEAF1_ECX_FMA | LEAF1_ECX_OSXSAVE | LEAF1_ECX_AVX | LEAF1_ECX_F16C)

#define LEAF7_EBX_AVX2 (1u << 5)
#define LEAF7_EBX_AVX512F (1u << 16)
#define LEAF7_EBX_AVX512DQ (1u << 17)
#define LEAF7_EBX_AVX512BW (1u << 30)
#define LEAF7_EBX_AVX512VL (1u << 31)
#define LEAF7_EBX_AVX512 (LEAF7_EBX_AVX512F | LEAF7_EBX_AVX512DQ | LEAF7_EBX_AVX512BW | LEAF7_EBX_AVX512VL)
#define LEAF7_ECX_VNNI (1u << 11)

#define STATE_YMM 0x06u    /* SSE and AVX registers are saved across context switches */
#define STATE_ZMM 0xe6u    /* and the AVX-512 ones */

static uint64_t saved_state(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

uint32_t kvs_cpu_isa_detect(void)
{
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & LEAF1_ECX_AVX2_BASE) != LEAF1_ECX_AVX2_BASE) {
        return KVS_ISA_REFERENCE;
    }
    uint64_t state = saved_state();
    if ((state & STATE_YMM) != STATE_YMM || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) ||
        !(ebx & LEAF7_EBX_AVX2)) {
        return KVS_ISA_REFERENCE;
    }
    bool has_avx512 = (state & STATE_ZMM) == STATE_ZMM && (ebx & LEAF7_EBX_AVX512) == LEAF7_EBX_AVX512 &&
                      (ecx & LEAF7_ECX_VNNI) != 0;
    return has_avx512 ? KVS_ISA_AVX512 : KVS_ISA_AVX2;
}

#else

uint32_t kvs_cpu_isa_detect(void)
{
    return KVS_ISA_REFERENCE;
}

#endif
