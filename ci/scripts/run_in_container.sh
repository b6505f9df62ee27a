#!/usr/bin/env bash
# Build the vendor's image and run one GPU job in it.
#
#     ci/scripts/run_in_container.sh VENDOR TORCH FLAVOUR GPUS REPORTS [pytest arguments]
set -euo pipefail

vendor=${1:?vendor} torch=${2:?torch release} flavour=${3:?flavour} gpus=${4:?number of GPUs} reports=${5:?reports}
shift 5
mkdir -p "$reports"
reports=$(cd "$reports" && pwd)
cd "$(dirname "$0")/../.."

case $vendor in
    nvidia)
        # NCCL keeps its buffers in shared memory; a container's usual 64 MB are not enough.
        options=(--gpus all --shm-size 16g --env CUDA_VISIBLE_DEVICES)
        ;;
    amd)
        options=(
            --device /dev/kfd --device /dev/dri --group-add video --group-add render --ipc host
            --security-opt seccomp=unconfined --env HIP_VISIBLE_DEVICES --env ROCR_VISIBLE_DEVICES
        )
        ;;
    *)
        echo "run_in_container.sh: the vendor is nvidia or amd, not '$vendor'" >&2
        exit 2
        ;;
esac

image="devstream-ci-$vendor"
docker build --tag "$image" --file "ci/docker/$vendor.Dockerfile" ci/docker

# The container works as root on a copy. What it leaves behind is the reports, and these go back to the caller.
docker run --rm "${options[@]}" --env TORCH_INDEX_ROOT --env "OWNER=$(id -u):$(id -g)" \
    --volume "$PWD:/checkout:ro" --volume "$reports:/reports" "$image" \
    bash -c 'trap "chown -R $OWNER /reports" EXIT
             cp -R /checkout /source && bash /source/ci/scripts/gpu_job.sh "$@"' \
    gpu_job "$vendor" "$torch" "$flavour" "$gpus" /reports "$@"
