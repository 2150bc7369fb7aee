"""Finds kinds of pipe by name, says what keeps one from working here, and what ``auto`` means on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from baton.config.pipes import AUTO, BUILT_IN, PIPES, check_pipes
from baton.errors import ConfigError
from baton.kv_transfer.pipes.base import PipeKind, PipeOptions


def load_kind(name: str) -> type[PipeKind]:
    """Import a kind of pipe.

    Raises:
        ConfigError: There is none of that name, or it cannot be imported; says what it needs.
    """
    try:
        kind = PIPES.load(name)
    except ConfigError as error:
        if name in BUILT_IN and BUILT_IN[name].needs:
            message = f"the {name} pipe needs {BUILT_IN[name].needs} ({error.__cause__})"
            raise ConfigError(message, field="pipes") from error
        raise
    if not (isinstance(kind, type) and issubclass(kind, PipeKind)):
        raise ConfigError(f"{PIPES.find(name)} is no kind of pipe", field="pipes")
    return kind


def obstacle(name: str, options: PipeOptions | None = None) -> str:
    """Say why a kind of pipe cannot work in this process, and what to install; empty: it can."""
    given = options or PipeOptions()
    try:
        kind = load_kind(name)
    except ConfigError as error:
        return error.message
    if kind.serves_host_memory_only and not given.host_memory:
        return f"the {name} pipe serves host memory only, and the blocks are in device memory"
    return kind.obstacle(given)


def resolve_kinds(kinds: Sequence[str] | str, options: PipeOptions | None = None) -> tuple[str, ...]:
    """Return kinds in order of preference, ``auto`` replaced by what suits this machine.

    ``auto`` is ``shm``, which reaches the same host, or ``cuda_ipc`` where the blocks are in device memory; then
    ``nixl``, if this machine has InfiniBand or RoCE and NIXL is installed; then ``tcp``. With certificates it is
    ``shm`` or ``cuda_ipc``, then ``tls``. With a network for the ``memory`` kind it begins with that. Each source is
    reached over the first that gets there.

    Args:
        kinds: Names, or one name.
        options: Options of the pipes.

    Raises:
        ConfigError: None, an unknown one, one twice, or one that was named and cannot work here; says why.
    """
    given = options or PipeOptions()
    named = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    check_pipes(named)
    for kind in named:
        if kind != AUTO and (reason := obstacle(kind, given)):
            raise ConfigError(reason, field="pipes")
    found: dict[str, None] = {}
    for kind in named:
        found.update(dict.fromkeys(_auto(given) if kind == AUTO else (kind,)))
    return tuple(found)


def _auto(options: PipeOptions) -> list[str]:
    candidates = [name for name, entry in BUILT_IN.items() if entry.auto]
    return [name for name in candidates if load_kind(name).suits(options) and not obstacle(name, options)]
