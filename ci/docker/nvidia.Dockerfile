# What a GPU job on NVIDIA needs around torch: Python, git for the version, a compiler for Inductor and Triton.
# torch brings its own CUDA libraries; the driver comes from the host. See ci/runners/nvidia.md.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        g++ git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The checkout is copied in as root, from a folder of another user.
RUN git config --global --add safe.directory '*'
