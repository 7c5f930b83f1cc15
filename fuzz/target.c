/* target.c: one libFuzzer target; SCRIPT_TARGET is the world that acts its inputs out. */
#include "script.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    script script = {.bytes = bytes, .n_bytes = n_bytes};
    SCRIPT_TARGET(&script);
    return 0;
}
