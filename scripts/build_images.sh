#!/bin/sh
# Build images: usage: scripts/build_images.sh BASE TAG TARGET...    BASE: the Python image, with its digest
# BUILDER: docker, podman or buildah; default: the first that there is. BUILD_ARGS goes to it.
set -eu
base=$1 tag=$2
shift 2
cd "$(dirname "$0")/.."
builder=${BUILDER:-}
for each in docker podman buildah; do
    if [ -z "$builder" ] && command -v "$each" >/dev/null; then builder=$each; fi
done
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/baton/version.py)
revision=$(git rev-parse HEAD 2>/dev/null || true)
for target in "$@"; do
    name=baton-$target:${tag:-$version}
    set -- --target "$target" --tag "$name" --build-arg "PYTHON_IMAGE=$base" --build-arg "VERSION=$version" --build-arg "REVISION=$revision"
    # Health checks are known to images in Docker's form alone.
    # shellcheck disable=SC2086
    case $builder in
        docker) docker build "$@" ${BUILD_ARGS:-} . ;;
        podman) podman build --format docker "$@" ${BUILD_ARGS:-} . ;;
        buildah) buildah bud --format docker "$@" ${BUILD_ARGS:-} . ;;
        *) echo "no docker, podman or buildah on the path" >&2; exit 1 ;;
    esac
    echo "built $name"
done
