#!/bin/sh
# Sees to a promtool for the tests of alerts: usage: scripts/install_promtool.sh FOLDER. Takes it alone out of Debian's
# package of Prometheus (19 MB), so that no server is installed or started; needs no root.
# Never fails: without it those tests are skipped, and say so.
folder=$1
if command -v promtool >/dev/null 2>&1 || [ -x "$folder/promtool" ]; then
    exit 0
fi
manual="the tests of alerts are skipped without promtool; put it into $folder or on PATH (Debian: package prometheus)"
if ! command -v apt-get >/dev/null 2>&1 || ! command -v dpkg-deb >/dev/null 2>&1; then
    echo "$manual" >&2
    exit 0
fi
echo "fetching promtool for the tests of alerts ..." >&2
fetched=$(mktemp -d)
trap 'rm -rf "$fetched"' EXIT
download() { (cd "$fetched" && timeout 300 apt-get download -qq -o APT::Sandbox::User= prometheus); }
# A machine that was never asked for a package has no list of them; an old list names files that are gone.
if download >"$fetched/log" 2>&1 || { timeout 300 apt-get update -qq && download; } >>"$fetched/log" 2>&1; then
    if dpkg-deb --fsys-tarfile "$fetched"/prometheus_*.deb | tar -x -C "$fetched" ./usr/bin/promtool 2>>"$fetched/log" &&
        mv "$fetched/usr/bin/promtool" "$folder/.promtool" && mv "$folder/.promtool" "$folder/promtool"; then
        exit 0
    fi
fi
tail -n 3 "$fetched/log" >&2
echo "that did not work: $manual" >&2
