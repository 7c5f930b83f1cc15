/* script.c: reading scripts, arming faults, failing loudly. */
#include "script.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct action_info {
    const char *name;
    uint32_t n_operands;
} action_info;

#define ACTION(name, n_operands) {#name, n_operands},
static const action_info ACTIONS[N_ACTIONS] = {
#include "alphabet.def"
};
#undef ACTION

const char *action_name(action action)
{
    return ACTIONS[action].name;
}

uint32_t action_operands(action action)
{
    return ACTIONS[action].n_operands;
}

static void print_step(const script *script, const step *step)
{
    fprintf(stderr, "%4u %s", script->n_steps, action_name(step->action));
    for (uint32_t i = 0; i < action_operands(step->action); i++) {
        fprintf(stderr, " %u", step->operand[i]);
    }
    fputc('\n', stderr);
}

bool script_next(script *script, step *step)
{
    if (script->at >= script->n_bytes || script->n_steps >= MAX_STEPS) {
        return false;
    }
    memset(step, 0, sizeof *step);
    step->action = (action)(script->bytes[script->at++] % N_ACTIONS);
    const size_t n = least(action_operands(step->action), script->n_bytes - script->at);
    if (n != 0) {
        memcpy(step->operand, script->bytes + script->at, n);
    }
    script->at += n;
    script->n_steps++;
    if (script->is_loud) {
        print_step(script, step);
    }
    return true;
}

void script_open(script *script, step *step)
{
    if (script->n_bytes != 0 && script->bytes[0] % N_ACTIONS == ACTION_CREATE) {
        script_next(script, step);
    } else {
        memset(step, 0, sizeof *step);
    }
}

uint32_t step_u16(const step *step, uint32_t at)
{
    return (uint32_t)step->operand[at] | (uint32_t)step->operand[at + 1] << 8;
}

/* ---- faults ---- */

static kvs_status fault_status(const fault *fault)
{
    return fault->point == KVS_HOOK_ALLOC ? KVS_ENOMEM : KVS_EIO;
}

int fault_strike(void *user, int point, uint64_t index)
{
    fault *fault = user;
    (void)index;
    if (point != fault->point) {
        return 0;
    }
    const uint32_t here = atomic_fetch_add(&fault->n_seen, 1);
    if (here < fault->first || here >= fault->first + fault->count) {
        return 0;
    }
    atomic_fetch_add(&fault->n_fired, 1);
    return fault_status(fault);
}

void fault_arm(fault *fault, const step *step)
{
    fault->point = step->operand[0] % (KVS_HOOK_SUBMIT + 1);
    fault->first = step->operand[1] % 16;
    fault->count = 1 + step->operand[2] % 4u;
    fault->is_armed = true;
    atomic_store(&fault->n_seen, 0);
    atomic_store(&fault->n_fired, 0);
}

void fault_begin(fault *fault, kvs_device *device)
{
    if (fault->is_armed) {
        EXPECT_OK(kvs_device_set_hook(device, fault_strike, fault));
    }
}

bool fault_end(fault *fault, kvs_device *device, bool is_deferred)
{
    if (!fault->is_armed) {
        return false;
    }
    if (!is_deferred) {
        const kvs_status status = kvs_device_drain(device);
        EXPECT(status == KVS_OK || status == KVS_EIO || status == KVS_EBUSY);
    }
    EXPECT_OK(kvs_device_set_hook(device, NULL, NULL));
    fault->is_armed = false;
    return atomic_exchange(&fault->n_fired, 0) != 0;
}

bool fault_outcome(const fault *fault, kvs_status got, kvs_status expected, const char *file, int line)
{
    if (fault->is_armed && atomic_load(&fault->n_fired) != 0 && got == fault_status(fault)) {
        return false;
    }
    expect_status(got, expected, file, line);
    return got == KVS_OK;
}

/* ---- devices ---- */

kvs_device *script_device(uint32_t flags, uint64_t seed)
{
    const kvs_device_desc desc = {
        .struct_size = sizeof desc, .flags = flags, .n_threads = 1, .schedule_seed = seed};
    kvs_device *device = NULL;
    EXPECT_OK(kvs_device_create(&desc, &device));
    return device;
}

kvs_device_info script_device_info(kvs_device *device)
{
    kvs_device_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_device_get_info(device, &info));
    return info;
}

void script_device_close(kvs_device *device)
{
    const kvs_device_info info = script_device_info(device);
    EXPECT_U64(info.live_objects, 0);
    EXPECT_U64(info.device_bytes, 0);
    EXPECT_U64(info.host_bytes, 0);
    kvs_device_release(device);
}

/* ---- checks ---- */

static void fail_at(const char *file, int line)
{
    fprintf(stderr, "%s:%d: the script failed here\n", file, line);
    abort();
}

void expect_that(bool holds, const char *file, int line, const char *text)
{
    if (!holds) {
        fprintf(stderr, "expected: %s\n", text);
        fail_at(file, line);
    }
}

void expect_status(kvs_status got, kvs_status expected, const char *file, int line)
{
    if (got != expected) {
        fprintf(stderr, "%s expected, %s got\n", kvs_status_name(expected), kvs_status_name(got));
        fail_at(file, line);
    }
}

void expect_u64(uint64_t got, uint64_t expected, const char *file, int line, const char *text)
{
    if (got != expected) {
        fprintf(stderr, "%s: %" PRIu64 " expected, %" PRIu64 " got\n", text, expected, got);
        fail_at(file, line);
    }
}
