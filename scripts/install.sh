#!/usr/bin/env bash
# Make an environment that serves: usage: scripts/install.sh PYTHON VENV
# The CPU operators are compiled for this processor while pip downloads and unpacks. `make test` adds what tests need.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
venv=$2
say() { echo "[$SECONDS s] $*"; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Baton needs Python 3.11 or newer; try make PYTHON=python3.11" >&2
    exit 1
}
say "making $venv: pip installs about 70 packages, the largest is torch; the C++ operators are compiled beside it."
say "This takes one to two minutes, once."
builder=
if "$python" scripts/build_native.py --has-compilers; then
    "$python" scripts/build_native.py --progress &
    builder=$!
    trap 'kill "$builder" 2>/dev/null || true' EXIT
fi
test -x "$venv/bin/python" || "$python" -m venv "$venv" || {
    echo "no venv module; as root: apt-get install python3-venv" >&2
    exit 1
}
# Modules are compiled when they are first imported: pip would compile thousands that nothing imports.
export PIP_NO_COMPILE=1
scripts/install_requirements.sh "$venv/bin/python" torch &
torch=$!
scripts/install_requirements.sh "$venv/bin/python" base otel engine hatchling
say "packages are installed, except torch"
wait "$torch"
say "torch is installed"
if [ -n "$builder" ]; then
    wait "$builder"
    trap - EXIT
else
    say "no C++ compiler on this machine: one comes from the package index"
    scripts/install_requirements.sh "$venv/bin/python" build
    "$venv/bin/python" scripts/build_native.py --progress
fi
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
say "Baton is installed"
