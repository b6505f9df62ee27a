#!/usr/bin/env bash
# One GPU job from start to end, in a virtual environment of its own: install, report, test.
#
#     ci/scripts/gpu_job.sh VENDOR TORCH FLAVOUR GPUS REPORTS [pytest arguments]
#
# REPORTS is a folder; gpu-report.txt and junit.xml are written there. Works on any machine with a GPU and its driver;
# CI runs it inside the vendor's container (ci/scripts/run_in_container.sh).
set -euo pipefail

vendor=${1:?vendor} torch=${2:?torch release} flavour=${3:?flavour} gpus=${4:?number of GPUs} reports=${5:?reports}
shift 5
mkdir -p "$reports"
reports=$(cd "$reports" && pwd)
cd "$(dirname "$0")/../.."

environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
# shellcheck disable=SC1091
. "$environment/bin/activate"

bash ci/scripts/install_torch.sh "$torch" "$flavour"
python -m pip install --quiet ".[cli,plot,test]" -r ci/requirements.txt
python -m pip install --quiet --no-deps --force-reinstall ./tests/plugin_example

bash ci/scripts/gpu_report.sh "$vendor" "$gpus" | tee "$reports/gpu-report.txt"
bash ci/scripts/run_tests.sh "$vendor" --junitxml "$reports/junit.xml" "$@"
