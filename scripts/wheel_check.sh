#!/usr/bin/env bash
# Proves that the wheel works outside of the checkout: usage: scripts/wheel_check.sh [FOLDER]
# Builds it, installs it in two fresh environments in a new folder, and runs
#   - router, KV store and SDK without torch, telling how much disk that takes;
#   - `baton demo` with site-packages and HOME read-only, no compiler on the path, and as another user if this one is root.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(scripts/find_python.sh)} # which other users can run too, if this one is root
folder=${1:-$(mktemp -d /var/tmp/baton-wheel.XXXXXX)}
mkdir -p "$folder/home"
chmod 755 "$folder" && chmod 555 "$folder/home"
echo "in $folder"

"$python" -m venv "$folder/light"
"$python" -m venv "$folder/build"
scripts/install_requirements.sh "$folder/build/bin/python" build
"$folder/build/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w "$folder/dist" .
wheel=$(ls "$folder"/dist/baton_serve-*.whl)
echo "wheel: $(basename "$wheel"), $(du -k "$wheel" | cut -f1) KiB"
for kind in light engine; do
    test -d "$folder/$kind" || "$python" -m venv "$folder/$kind"
    scripts/install_requirements.sh "$folder/$kind/bin/python" base $([ $kind = engine ] && echo engine torch)
    "$folder/$kind/bin/pip" install --quiet --disable-pip-version-check --no-deps "$wheel"
    "$folder/$kind/bin/pip" check
    chmod -R a-w "$folder/$kind"
    echo "$kind: $(du -sm "$folder/$kind" | cut -f1) MiB"
done

alone() { # in an empty environment, where nothing can be written but what is temporary
    local as=()
    if [ "$(id -u)" = 0 ]; then as=(setpriv --reuid=65534 --regid=65534 --clear-groups); fi
    (cd / && "${as[@]}" env -i PATH="$1" HOME="$folder/home" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "${@:2}")
}

bin=$folder/light/bin
alone "$bin" python -c 'import importlib.util as u; assert not any(map(u.find_spec, ("torch", "transformers", "nixl_cu12")))
import baton.client, baton_router.app, baton_kvstore.main'
alone "$bin" baton-router --help > /dev/null
alone "$bin" baton-kvstore --help > /dev/null
if message=$(alone "$bin" baton demo 2>&1); then echo "baton demo ran without torch?" >&2; exit 1; fi
case $message in *"baton-serve[engine]"*) ;; *) echo "not clear: $message" >&2; exit 1 ;; esac

bin=$folder/engine/bin
alone "$bin" baton demo
find "$folder/home" -mindepth 1 | { ! grep .; } # nothing was written there
echo "the wheel works; $folder can be removed"
