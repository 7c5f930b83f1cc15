#!/usr/bin/env bash
# Measure which lines of the core the tests reach: a build for gcov below build/, the C tests, the Python tests that drive
# the core, and a report per file. Fails below the percentage that tools/coverage_report.py asks for.
#
# usage: tools/coverage.sh [pytest arguments]
# needs: meson, ninja, gcc and its gcov in PATH, and the Python environment whose python is first in PATH
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
tests=("$@")
if [ $# -eq 0 ]; then
    # Those that reach the core's corners; the others walk the same lines with more seeds.
    tests=(tests/unit/test_nothing_given.py tests/unit/test_fence.py tests/oracle/test_ops.py
        tests/property/test_trace_faults.py tests/property/test_fault_injection.py tests/property/test_failed_pass.py)
fi
build=build/coverage
tree=build/coverage-tree

# Vector code needs some optimization to finish in time; lines keep their places at -O1.
if [ ! -f $build/build.ninja ]; then
    meson setup $build --buildtype=debugoptimized -Doptimization=1 -Dwerror=false -Db_coverage=true -Dnative_tests=true
fi
meson compile -C $build
find $build -name '*.gcda' -delete
meson test -C $build --no-rebuild --print-errorlogs --num-processes 2 --timeout-multiplier 4

rm -rf $tree
mkdir -p $tree
cp -r include pykvstream tests pyproject.toml $tree
rm -f $tree/pykvstream/_ffi/_native*.so
cp $build/pykvstream/_native*.so $tree/pykvstream/_ffi/
# The editable install would win over the tree.
editable=$root/build/$(python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
(
    cd $tree
    MESONPY_EDITABLE_SKIP=$editable PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} \
        python -m pytest -n 2 -m "not slow" -p no:cacheprovider "${tests[@]}"
)
python tools/coverage_report.py $build native/core
