/* schedule.c: a choice that is none is not asked for, so that a schedule is written without padding. */
#include "core/schedule.h"

#define COMPUTE (1u << KVS_STREAM_COMPUTE)

/* splitmix64: every seed gives another legal order. */
static uint64_t draw(kvs_schedule *schedule)
{
    uint64_t z = schedule->drawn += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static uint32_t first_of(uint32_t offered)
{
    return (uint32_t)__builtin_ctz(offered);
}

/* Where nothing has to be copied, one choice in four is a copy: late copies find more than early ones. */
static uint32_t drawn_of(kvs_schedule *schedule, uint32_t offered)
{
    if ((offered & COMPUTE) != 0 && (draw(schedule) & 3) != 0) {
        return KVS_STREAM_COMPUTE;
    }
    const uint32_t copies = offered & ~COMPUTE;
    const uint32_t others = copies & (copies - 1);
    return first_of(others == 0 || (draw(schedule) & 1) != 0 ? copies : others);
}

uint32_t kvs_schedule_next(kvs_schedule *schedule, uint32_t offered)
{
    if ((offered & (offered - 1)) == 0) {
        return first_of(offered);
    }
    if (schedule->choose == NULL) {
        return drawn_of(schedule, offered);
    }
    const uint32_t chosen = schedule->choose(schedule->user, offered);
    return chosen < 32 && (offered >> chosen & 1) != 0 ? chosen : first_of(offered);
}
