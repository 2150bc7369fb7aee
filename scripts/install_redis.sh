#!/bin/sh
# Sees to a redis-server for the tests of several routers: Debian's package, if this is root on such a system.
# Never fails: without it those tests are skipped, and say so.
if command -v redis-server >/dev/null 2>&1; then
    exit 0
fi
manual="tests of several routers are skipped without redis-server; as root: apt-get install redis-server"
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
    echo "$manual" >&2
    exit 0
fi
echo "installing redis-server for the tests of several routers ..." >&2
export DEBIAN_FRONTEND=noninteractive
if timeout 300 apt-get update -qq >/dev/null 2>&1 &&
    timeout 600 apt-get install -y -qq --no-install-recommends redis-server >/dev/null 2>&1; then
    exit 0
fi
echo "that did not work: $manual" >&2
