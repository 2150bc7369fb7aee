"""The settings that NCCL, which sums over GPUs, reads from the environment when it starts."""

from __future__ import annotations

import os
from collections.abc import MutableMapping


def set_nccl_environment(*, env: MutableMapping[str, str] | None = None) -> None:
    """Have NCCL listen on loopback alone, if nothing else is set: ranks are on one host, and it checks nobody.

    Args:
        env: Where to; default: the process's environment.
    """
    (os.environ if env is None else env).setdefault("NCCL_SOCKET_IFNAME", "lo")
