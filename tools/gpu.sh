#!/bin/sh
# What needs a card, in parts that each end within nine minutes and go on where they were: tools/gpu.sh --help.
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
$PYTHON -m pykvstream devices
PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} exec "$PYTHON" tools/gpu_parts.py "$@"
