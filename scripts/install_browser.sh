#!/bin/sh
# Sees to a Chromium and its driver for the console's tests: Debian's packages, if this is root on such a system.
# Never fails: without a browser those tests are skipped, and say so.
have() {
    for name in "$@"; do
        command -v "$name" >/dev/null 2>&1 && return 0
    done
    return 1
}

if have chromium chromium-browser google-chrome && have chromedriver chromium.chromedriver; then
    exit 0
fi
manual="the console's browser tests are skipped without Chromium; as root: apt-get install chromium chromium-driver"
if ! have apt-get || [ "$(id -u)" != 0 ]; then
    echo "$manual" >&2
    exit 0
fi
echo "installing chromium and chromium-driver for the console's browser tests ..." >&2
export DEBIAN_FRONTEND=noninteractive
if timeout 300 apt-get update -qq >/dev/null 2>&1 &&
    timeout 900 apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null 2>&1; then
    exit 0
fi
echo "that did not work: $manual" >&2
