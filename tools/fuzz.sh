#!/usr/bin/env bash
# Fuzz the C core with byte scripts, under address, undefined-behaviour and leak sanitizers.
#
# usage: tools/fuzz.sh SECONDS [TARGET...]
#   Builds every target below build/fuzz and runs each for SECONDS, from the committed corpus on. What is new goes to
#   build/fuzz/corpus, what fails to build/fuzz/artifacts; the status is 1 when anything failed.
# needs: clang with libFuzzer and compiler-rt, meson and ninja in PATH
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
seconds=${1:?usage: tools/fuzz.sh SECONDS [TARGET...]}
shift
cd "$root"
build=build/fuzz
artifacts=$build/artifacts
failed=0

command -v clang > /dev/null || { echo "need clang with libFuzzer (on Debian: clang, libclang-rt-VERSION-dev)" >&2; exit 1; }

if [ ! -f $build/build.ninja ]; then
    CC=clang meson setup $build --buildtype=debugoptimized -Doptimization=1 -Dwerror=false -Db_lundef=false \
        -Db_sanitize=address,undefined -Dpython=false -Dfuzz=true > /dev/null
fi
meson compile -C $build
mkdir -p $artifacts
if [ $# -eq 0 ]; then
    for folder in fuzz/corpus/*/; do
        set -- "$@" "$(basename "$folder")"
    done
fi

for target in "$@"; do
    mkdir -p "$build/corpus/$target"
    log=$build/$target.log
    status=0
    ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1:detect_stack_use_after_return=1 \
        UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
        "$build/fuzz/fuzz_$target" -max_total_time="$seconds" -max_len=400 -timeout=25 -rss_limit_mb=4096 \
        -artifact_prefix="$artifacts/$target-" -print_final_stats=1 \
        "$build/corpus/$target" "fuzz/corpus/$target" > "$log" 2>&1 || status=$?
    runs=$(awk '/number_of_executed_units/ { print $2 }' "$log")
    if [ "$status" -eq 0 ]; then
        echo "fuzz_$target: ${runs:-0} runs in $seconds s: ok"
    else
        failed=1
        tail -n 40 "$log"
        echo "fuzz_$target: FAILED with status $status; the script is in $artifacts, the whole log in $log"
    fi
done
exit $failed
