#!/usr/bin/env bash
# Print what this machine and its torch see of one vendor's GPUs; fail if they see fewer than MINIMUM.
#
#     ci/scripts/gpu_report.sh nvidia|amd [MINIMUM]
#
# The lines "vendor:" and "devices:" are read by ci/scripts/check_started.py.
set -euo pipefail

vendor=${1:-}
minimum=${2:-1}

case $vendor in
    nvidia)
        nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv
        ;;
    amd)
        if command -v amd-smi >/dev/null; then
            amd-smi static --asic --driver
        else
            rocminfo | grep -E 'Marketing Name|^  Name: +gfx'
        fi
        ;;
    *)
        echo "usage: gpu_report.sh nvidia|amd [MINIMUM]" >&2
        exit 2
        ;;
esac

for name in CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL; do
    echo "$name=${!name-(unset)}"
done

python - "$vendor" "$minimum" <<'PYTHON'
import platform
import sys

import torch

vendor, minimum = sys.argv[1], int(sys.argv[2])
built_for = "amd" if torch.version.hip else "nvidia" if torch.version.cuda else "no GPU"
count = torch.cuda.device_count()
print(f"python: {platform.python_version()}")
print(f"torch: {torch.__version__}, built for {built_for}")
for index in range(count):
    properties = torch.cuda.get_device_properties(index)
    arch = properties.gcnArchName if torch.version.hip else f"sm{properties.major}{properties.minor}"
    print(f"device {index}: {properties.name}, {arch}")
if built_for != vendor:
    sys.exit(f"gpu_report.sh: this torch is built for {built_for}, not for {vendor}")
if count < minimum:
    sys.exit(f"gpu_report.sh: {minimum} devices are needed, torch sees {count}")
print(f"vendor: {vendor}")
print(f"devices: {count}")
PYTHON
