#!/bin/sh
# What needs a card, in parts that each end within nine minutes. Usage: tools/gpu.sh [PART...]; without parts all of them.
#   promises  placement, streaming, width and repetition change no bit; card against CPU
#   kernels   every kernel against float64 and against itself
#   memcheck  compute-sanitizer over a short answer (skipped where the tool is missing)
#   speed     attention alone, and passes over layers as wide as those of a 27B model
set -u
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
TESTS="-m pytest -q -p no:cacheprovider --tb=short"
failed=""

part() {
    echo "== $1"
    case $1 in
    promises) $PYTHON $TESTS tests/gpu/test_cuda_promises.py ;;
    kernels) $PYTHON $TESTS tests/gpu --ignore tests/gpu/test_cuda_promises.py -n "${JOBS:-8}" -rf ;;
    memcheck)
        if command -v compute-sanitizer > /dev/null; then
            compute-sanitizer --error-exitcode 1 --tool memcheck \
                "$PYTHON" -m pykvstream generate demo-hybrid --device cuda --wait-limit 600 --raw -p "Once upon a time" -n 4 --temp 0
        else
            echo "skipped: no compute-sanitizer here"
        fi
        ;;
    speed) $PYTHON -m tests.bench.cuda_attend && $PYTHON -m tests.bench.cuda_decode ;;
    *)
        echo "no part is named $1" >&2
        return 2
        ;;
    esac
}

$PYTHON -m pykvstream devices
for name in ${*:-promises kernels memcheck speed}; do
    part "$name" || failed="$failed $name"
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
