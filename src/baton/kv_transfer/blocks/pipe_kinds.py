"""Kinds of pipe for KV: which there are, what ``auto`` means on this machine, and why one cannot work on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.config.pipes import AUTO, check_pipes
from baton.config.ucx import INFINIBAND, infiniband_ports
from baton.errors import ConfigError
from baton.kv_transfer.pipes.gloo import gloo_obstacle
from baton.kv_transfer.pipes.nixl_agent import nixl_obstacle


def resolve_kinds(
    kinds: Sequence[str] | str, *, memory: bool = False, tls: bool = False, infiniband: Path = INFINIBAND
) -> tuple[str, ...]:
    """Return kinds in order of preference, ``auto`` replaced by what suits this machine.

    ``auto`` is ``shm``, which reaches the same host; then ``nixl``, if this machine has InfiniBand or RoCE and NIXL is
    installed; then ``tcp``. With certificates it is ``shm``, then ``tls``. Each source is reached over the first that
    gets there.

    Args:
        kinds: Names, or one name.
        memory: Whether there is a network for the ``memory`` kind, which ``auto`` then begins with.
        tls: Whether there are certificates, and KV is to be encrypted on its way.
        infiniband: Where the kernel lists InfiniBand devices.

    Raises:
        ConfigError: None, an unknown one, one twice, or one that was named and cannot work here; says why.
    """
    named = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    check_pipes(named)
    for kind in named:
        reason = kind_obstacle(kind)
        if kind == "tls" and not tls:
            reason = "the tls pipe needs --tls-cert, and no --clear-kv"
        if reason:
            raise ConfigError(reason, field="pipes")
    found: dict[str, None] = {}
    for kind in named:
        found.update(dict.fromkeys(_auto(memory, tls, infiniband) if kind == AUTO else (kind,)))
    return tuple(found)


def kind_obstacle(kind: str) -> str:
    """Say why a kind of pipe cannot work in this process, and what to install; empty: it can."""
    if kind == "nixl":
        return nixl_obstacle()
    return gloo_obstacle() if kind == "gloo" else ""


def _auto(memory: bool, tls: bool, infiniband: Path) -> tuple[str, ...]:
    rdma = not tls and bool(infiniband_ports(infiniband)) and not nixl_obstacle()
    return (*(["memory"] if memory else []), "shm", *(["nixl"] if rdma else []), "tls" if tls else "tcp")
