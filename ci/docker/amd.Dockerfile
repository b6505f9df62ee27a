# What a GPU job on AMD needs around torch: Python, git for the version, a compiler for Inductor and Triton, and
# rocminfo or amd-smi for the report. torch brings its own ROCm libraries; the kernel driver comes from the host.
# See ci/runners/amd.md.
ARG BASE=rocm/dev-ubuntu-24.04:7.1
FROM ${BASE}

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        g++ git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The checkout is copied in as root, from a folder of another user.
RUN git config --global --add safe.directory '*'
