#!/usr/bin/env bash
# Install one torch build into the current Python environment.
#
#     ci/scripts/install_torch.sh VERSION [FLAVOUR]
#
# VERSION is a release (2.11.0), a pattern (2.11.*) or "newest". FLAVOUR is cpu, cu130, rocm7.1, ...: the last part
# of the address of a wheel index. The rest of that address comes from TORCH_INDEX_ROOT; the install page of PyTorch
# names it. Without FLAVOUR, or for a CUDA or CPU build without TORCH_INDEX_ROOT, pip takes the torch that its own
# configuration leads to. A ROCm build is never taken by chance: there TORCH_INDEX_ROOT must be set.
set -euo pipefail

version=${1:?"usage: install_torch.sh VERSION [FLAVOUR]"}
flavour=${2:-}

requirement="torch==$version"
if [ "$version" = newest ]; then
    requirement=torch
fi

options=()
if [ -n "$flavour" ] && [ -n "${TORCH_INDEX_ROOT:-}" ]; then
    options=(--index-url "${TORCH_INDEX_ROOT%/}/$flavour")
elif [[ $flavour == rocm* ]]; then
    echo "install_torch.sh: set TORCH_INDEX_ROOT, or pip would install a CUDA build for $flavour" >&2
    exit 2
fi

python -m pip install --upgrade "$requirement" ${options[@]+"${options[@]}"}

# What pip chose must be what was asked for: a wrong build would test the wrong vendor.
python - "$flavour" <<'PYTHON'
import sys

import torch

flavour = sys.argv[1]
built_for = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
wanted = "rocm" if flavour.startswith("rocm") else "cuda" if flavour.startswith("cu") else ""
print(f"torch {torch.__version__}, built for {built_for}")
if wanted and wanted != built_for:
    sys.exit(f"install_torch.sh: {flavour} was asked for, but this torch is built for {built_for}")
PYTHON
