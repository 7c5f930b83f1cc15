/* script.h: byte scripts, and what every world that acts them out shares.
 *
 * A script is a sequence of actions: an opcode byte, then as many operand bytes as the action has (alphabet.def). Every byte
 * string is a script: opcodes and operands are taken modulo what there is, operands that are missing are 0. A world holds
 * real objects and a plain model of them; after each action the two must agree, or the process aborts.
 */
#ifndef KVS_FUZZ_SCRIPT_H
#define KVS_FUZZ_SCRIPT_H

#include "kvstream/device.h"

#include <stdatomic.h>
#include <stdbool.h>

enum { MAX_OPERANDS = 10, MAX_STEPS = 1000 };

#define ACTION(name, n_operands) ACTION_##name,
typedef enum action {
#include "alphabet.def"
    N_ACTIONS
} action;
#undef ACTION

typedef struct step {
    action action;
    uint8_t operand[MAX_OPERANDS];
} step;

typedef struct script {
    const uint8_t *bytes;
    size_t n_bytes;
    size_t at;
    uint32_t n_steps;
    bool is_loud; /* prints each step */
} script;

/* Name and operand count of an action. */
const char *action_name(action action);
uint32_t action_operands(action action);

/* The next action; false at the end. */
bool script_next(script *script, step *step);

/* The create with which a script opens its world; all operands 0 where it begins with something else. */
void script_open(script *script, step *step);

/* Operands `at` and `at` + 1 as one number. */
uint32_t step_u16(const step *step, uint32_t at);

/* ---- worlds: act a script out, close everything, check that nothing is left ---- */

void script_arena(script *script);
void script_cache(script *script);
void script_lease(script *script);
void script_pager(script *script);
void script_phase(script *script);
void script_ring(script *script);
void script_tape(script *script);

/* ---- faults ---- */

/* One armed fault: calls `first` to `first + count - 1` at `point` fail while the next action runs. */
typedef struct fault {
    int point; /* kvs_hook_point */
    uint32_t first;
    uint32_t count;
    bool is_armed;
    _Atomic uint32_t n_seen;
    _Atomic uint32_t n_fired;
} fault;

void fault_arm(fault *fault, const step *step);

/* The hook itself; `user` is the fault. */
int fault_strike(void *user, int point, uint64_t index);

/* Around an action. Copies under way meet the fault before it goes, except on a deferred device. At the end: did it strike? */
void fault_begin(fault *fault, kvs_device *device);
bool fault_end(fault *fault, kvs_device *device, bool is_deferred);

/* Did the action do what the model says? False: the fault kept it from happening, so nothing may have changed. Any other
 * status than the expected one aborts. */
bool fault_outcome(const fault *fault, kvs_status got, kvs_status expected, const char *file, int line);

#define OUTCOME(fault, call, expected) fault_outcome((fault), (call), (expected), __FILE__, __LINE__)

/* ---- devices ---- */

kvs_device *script_device(uint32_t flags, uint64_t seed);
kvs_device_info script_device_info(kvs_device *device);

/* The device goes, and nothing made on it is left. */
void script_device_close(kvs_device *device);

/* ---- checks that abort ---- */

void expect_that(bool holds, const char *file, int line, const char *text);
void expect_status(kvs_status got, kvs_status expected, const char *file, int line);
void expect_u64(uint64_t got, uint64_t expected, const char *file, int line, const char *text);

#define EXPECT(condition) expect_that((condition), __FILE__, __LINE__, #condition)
#define EXPECT_STATUS(call, expected) expect_status((call), (expected), __FILE__, __LINE__)
#define EXPECT_OK(call) EXPECT_STATUS(call, KVS_OK)
#define EXPECT_U64(got, expected) expect_u64((uint64_t)(got), (uint64_t)(expected), __FILE__, __LINE__, #got)

static inline uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

#endif
