#!/usr/bin/env bash
# Run tests under sanitizers. Each mode has a build of its own below build/.
#
# usage: tools/sanitize.sh asan|tsan|property [pytest arguments]
#   asan      every C test under address, undefined-behaviour and leak sanitizers
#   tsan      the C tests that start threads, under the thread sanitizer
#   property  the Python property tests, with the extension under address and undefined-behaviour sanitizers; leaks are
#             left to the tests' own counters of live handles, because the interpreter itself never frees everything
# needs: meson and ninja in PATH; property also the Python environment whose python is first in PATH
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
mode=${1:?usage: tools/sanitize.sh asan|tsan|property}
shift
cd "$root"

# configure NAME OPTION...: set a build up once. Sanitizers cause warnings of their own.
configure() {
    local build=build/$1
    shift
    if [ ! -f "$build/build.ninja" ]; then
        meson setup "$build" --buildtype=debugoptimized -Doptimization=1 -Dwerror=false -Db_lundef=false "$@"
    fi
}

# A kernel with much address space randomization leaves old runtimes of the thread sanitizer no room for their shadow.
without_aslr() {
    if setarch "$(uname -m)" -R true 2>/dev/null; then
        setarch "$(uname -m)" -R "$@"
    else
        "$@"
    fi
}

case $mode in
asan)
    configure asan -Db_sanitize=address,undefined -Dnative_tests=true -Dpython=false
    meson compile -C build/asan
    ASAN_OPTIONS=detect_leaks=1:halt_on_error=1:allocator_may_return_null=1:strict_string_checks=1:detect_stack_use_after_return=1 \
        UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
        meson test -C build/asan --no-rebuild --print-errorlogs --num-processes 2 --timeout-multiplier 4
    ;;
tsan)
    configure tsan -Db_sanitize=thread -Dnative_tests=true -Dpython=false
    meson compile -C build/tsan
    tests=$(meson test -C build/tsan --list | sed 's/.*\(test_threads_[a-z_0-9]*\).*/\1/' | grep '^test_threads_')
    # shellcheck disable=SC2086  # a list of names
    TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 \
        without_aslr meson test -C build/tsan --no-rebuild --print-errorlogs --num-processes 2 --timeout-multiplier 8 $tests
    ;;
property)
    configure asan-extension -Db_sanitize=address,undefined
    meson compile -C build/asan-extension
    tree=build/asan-tree
    rm -rf "$tree"
    mkdir -p "$tree"
    cp -r pykvstream tests tools pyproject.toml "$tree"
    rm -f "$tree"/pykvstream/_ffi/_native*.so
    cp build/asan-extension/pykvstream/_native*.so "$tree/pykvstream/_ffi/"
    # The editable install would win over the tree.
    editable=$root/build/$(python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    cd "$tree"
    LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
        ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:allocator_may_return_null=1 \
        UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
        MESONPY_EDITABLE_SKIP=$editable PYTHONPATH=$PWD \
        python -m pytest -n 2 -m "not slow and not exhaustive" -p no:cacheprovider "${@:-tests/property}"
    ;;
*)
    echo "unknown mode: $mode" >&2
    exit 2
    ;;
esac
