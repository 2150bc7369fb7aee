"""Names of the pipes that KV may travel over."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import ConfigError

AUTO = "auto"
PIPE_KINDS = ("memory", "shm", "vm", "nixl", "tls", "tcp", "gloo")
CLEAR_KINDS = frozenset({"nixl", "tcp", "gloo"})
"""Those that carry KV over a network for everybody on it to read."""
PIPES_HELP = "pipes for KV, in order of preference: auto, or some of shm, vm, nixl, tls, tcp, gloo"


def check_pipes(names: Sequence[str], *, without: frozenset[str] = frozenset()) -> None:
    """Refuse a list of pipes that makes no sense.

    Args:
        names: What was asked for.
        without: Kinds that this service has no use for.

    Raises:
        ConfigError: None, an unknown one, or one twice.
    """
    kinds = (AUTO, *(kind for kind in PIPE_KINDS if kind not in without))
    if not names or set(names) - set(kinds) or len(set(names)) != len(names):
        raise ConfigError(
            f"pipes must be some of {', '.join(kinds)}, each once; got {','.join(names) or 'none'}", field="pipes"
        )
