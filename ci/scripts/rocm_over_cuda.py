"""Run pytest on an NVIDIA GPU with the ROCm backend chosen and torch saying that it was built for ROCm.

    python ci/scripts/rocm_over_cuda.py [pytest arguments]

No AMD hardware is needed, and none is tested: it shows that nothing outside the two backends' files asks for CUDA.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

if __name__ == "__main__":
    # On a build that says HIP torch would ask AMD's library for the device and for the number of devices.
    torch.cuda.init()
    torch.cuda._device_count_amdsmi = lambda: -1
    torch.version.hip = "7.2.0"
    os.environ["DEVSTREAM_BACKEND"] = "rocm"
    raise SystemExit(pytest.main(["-m", "rocm", "--require", "rocm", *sys.argv[1:]]))
