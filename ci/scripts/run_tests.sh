#!/usr/bin/env bash
# Run the test suite for one vendor, with the devstream that is installed. Whatever runs the tests calls this script.
#
#     ci/scripts/run_tests.sh cpu|nvidia|amd [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."

vendor=${1:-}
case $vendor in
    cpu)
        arguments=(-m "not cuda and not rocm and not stress" -n auto --maxprocesses 4)
        # The workers share the cores; with a thread pool of its own each would ask for all of them.
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
        ;;
    nvidia)
        bash ci/scripts/gpu_report.sh nvidia
        arguments=(-m "cuda and not stress" --require cuda)
        # CUDA loads a kernel at its first launch and waits for the whole device then: behind a latch, for ever.
        export CUDA_MODULE_LOADING="${CUDA_MODULE_LOADING:-EAGER}"
        ;;
    amd)
        bash ci/scripts/gpu_report.sh amd
        arguments=(-m "rocm and not stress" --require rocm)
        ;;
    *)
        echo "usage: run_tests.sh cpu|nvidia|amd [pytest arguments]" >&2
        exit 2
        ;;
esac
shift

# A wait that never ends sits in native code, where a signal does not reach it: the timeout prints every thread's
# stack and ends the process. -P keeps the checkout off the path, so that the installed devstream is what is tested.
exec python -P -m pytest --timeout 300 --timeout-method thread "${arguments[@]}" "$@"
