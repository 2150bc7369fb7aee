#!/bin/sh
# The last step of an image's environment, in the Dockerfile: Baton's own wheel, a look whether everything fits together,
# the demo model's place, and what is in it (CycloneDX).
set -eu
pip() { python -m pip --disable-pip-version-check --python /opt/baton/bin/python "$@"; }
pip install --quiet --no-cache-dir --no-deps /wheels/*.whl
pip check
ln -s "$(/opt/baton/bin/python -c 'import baton; print(baton.__path__[0])')/_models" /opt/baton/models
/opt/tools/bin/python scripts/sbom.py --cyclonedx /opt/tools/bin/cyclonedx-py --python /opt/baton/bin/python /opt/baton/baton.cdx.json
