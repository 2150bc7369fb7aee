#!/bin/sh
# Install what requirements/*.txt have, every file checked by its hash: usage: scripts/install_requirements.sh PYTHON NAME...
# PIP_ARGS goes to pip. Of its output downloads and errors are shown.
set -eu
python=$1
shift
folder=$(cd "$(dirname "$0")/../requirements" && pwd)
# An environment without pip is one of an image: another Python's pip installs into it.
if "$python" -c 'import pip' 2>/dev/null; then pip() { "$python" -m pip "$@"; }; else pip() { python -m pip --python "$python" "$@"; }; fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_PROGRESS_BAR=off
show_downloads() { # COMMAND...: its lines about downloads and errors, on standard error, and its status
    status=$(mktemp)
    { code=0; "$@" 2>&1 || code=$?; echo "$code" > "$status"; } |
        sed -un -e 's/^ *Downloading \([^ ]*\/\)*\([^ ]* (.*\)/  downloading \2/p' -e '/^ *ERROR/,$p' >&2
    code=$(cat "$status")
    rm -f "$status"
    return "$code"
}
install() { show_downloads pip install --require-hashes --no-deps "$@"; }

# There are several builds of one version of torch. pip takes the best that it is offered, one without CUDA where an index
# or a folder of this machine has it; but asked for hashes it prefers what an index lists with one. So: take first, check then.
install_torch() {
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    # shellcheck disable=SC2046,SC2086
    show_downloads pip download --no-deps --only-binary :all: --dest "$wheels" ${PIP_ARGS:-} \
        $(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$folder/torch.txt")
    install --no-index --find-links "$wheels" -r "$folder/torch.txt"
    # shellcheck disable=SC2086
    if "$python" -c 'import importlib.metadata as m, sys
sys.exit(not any(each.startswith("nvidia-") for each in m.requires("torch")))'; then install ${PIP_ARGS:-} -r "$folder/cuda.txt"; fi
}

files=
for name in "$@"; do
    if [ "$name" = torch ]; then install_torch; else files="$files -r $folder/$name.txt"; fi
done
# shellcheck disable=SC2086
test -z "$files" || install ${PIP_ARGS:-} $files
