#!/usr/bin/env bash
# Build the files of a release into dist/, check that they carry the tag's version, and test the wheel on the CPU.
#
#     ci/scripts/build_release.sh v1.2.3
set -euo pipefail
cd "$(dirname "$0")/../.."

tag=${1:?"usage: build_release.sh v1.2.3"}
version=${tag#v}

python -m pip install --quiet build tox twine
rm -rf dist
python -m build
for file in "dist/devstream-$version-py3-none-any.whl" "dist/devstream-$version.tar.gz"; do
    if [ ! -f "$file" ]; then
        echo "build_release.sh: $file was not built; is the tag on this commit, and the tree clean?" >&2
        exit 1
    fi
done
python -m twine check --strict dist/*
python ci/scripts/release_notes.py "$tag" >/dev/null
python -m tox run -e cpu --installpkg "dist/devstream-$version-py3-none-any.whl"
