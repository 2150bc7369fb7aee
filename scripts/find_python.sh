#!/bin/sh
# Print the Python that the environment is to be made with: python3, unless that was built without optimisation (as
# version managers do) while the system has a fit one of its own. Distributions' builds are optimised: a request takes a
# router a tenth fewer instructions with them.
fit() { "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; }
optimised() {
    "$1" -c 'import sys, sysconfig
sys.exit("--enable-optimizations" not in (sysconfig.get_config_var("CONFIG_ARGS") or ""))' 2> /dev/null
}
if fit python3 && ! optimised python3 && fit /usr/bin/python3; then
    echo /usr/bin/python3
else
    echo python3
fi
