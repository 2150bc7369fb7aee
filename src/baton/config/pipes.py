"""Kinds of pipe that KV may travel over: their names, their modules, and which ones ``auto`` may choose.

A kind of another package is found by its entry point in the group ``baton.pipes``::

    [project.entry-points."baton.pipes"]
    files = "my_package.file_pipe:FileKind"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from baton.errors import ConfigError
from baton.plugins import PluginGroup, installed_plugins

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class PipeEntry:
    """A kind of pipe.

    Attributes:
        target: ``module:class`` of the :class:`baton.kv_transfer.pipes.base.PipeKind`, imported when it is needed.
        auto: Whether ``auto`` may choose this kind, in the order of the table.
        clear: Whether KV goes over the network unencrypted.
        needs: Packages that the module needs beside Baton, and how to install them.
    """

    target: str
    auto: bool = False
    clear: bool = True
    needs: str = ""


_PIPES = "baton.kv_transfer.pipes"
BUILT_IN: Mapping[str, PipeEntry] = MappingProxyType(
    {
        "memory": PipeEntry(f"{_PIPES}.memory:MemoryKind", auto=True, clear=False),
        "shm": PipeEntry(f"{_PIPES}.shm:ShmKind", auto=True, clear=False),
        "cuda_ipc": PipeEntry(f"{_PIPES}.cuda_ipc:CudaIpcKind", auto=True, clear=False),
        "nixl": PipeEntry(f"{_PIPES}.nixl:NixlKind", auto=True),
        "tls": PipeEntry(f"{_PIPES}.tcp:TlsKind", auto=True, clear=False),
        "tcp": PipeEntry(f"{_PIPES}.tcp:TcpKind", auto=True),
        "gloo": PipeEntry(
            f"{_PIPES}.torch_distributed:GlooKind", needs="torch, built with gloo: pip install 'baton-serve[engine]'"
        ),
    }
)
PIPES = PluginGroup("pipes", "baton.pipes", {name: entry.target for name, entry in BUILT_IN.items()})
PIPES_HELP = "pipes for KV, in order of preference: auto, or some of " + ", ".join(
    name for name in BUILT_IN if name != "memory"
)
_REMOVED = {"vm": "the vm pipe is gone, since every pool can be shared: use shm"}


def find_pipe(name: str) -> PipeEntry | None:
    """Return a built-in or installed kind by its name; ``None``: there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    target = PIPES.find(name)
    return None if target is None else PipeEntry(target)


def check_pipes(names: Sequence[str], *, without: frozenset[str] = frozenset()) -> None:
    """Check a list of pipe kinds.

    Args:
        names: Names given for ``--pipes``.
        without: Kinds that this service does not support.

    Raises:
        ConfigError: The list is empty, or has an unknown name or a name twice.
    """
    kinds = [AUTO, *(kind for kind in BUILT_IN if kind not in without)]
    shown = [kind for kind in kinds if kind != "memory"]  # as in PIPES_HELP: it is for instances in one process
    if set(names) - set(kinds):
        plugins = [name for name in installed_plugins(PIPES.entry_point_group) if name not in BUILT_IN]
        kinds += plugins
        shown += plugins
    for name in names:
        if name in _REMOVED and name not in kinds:
            raise ConfigError(_REMOVED[name], field="pipes")
    if not names or set(names) - set(kinds) or len(set(names)) != len(names):
        raise ConfigError(
            f"pipes must be some of {', '.join(shown)}, each once; got {','.join(names) or 'none'}", field="pipes"
        )


def clear_pipes(names: Sequence[str]) -> list[str]:
    """Return those of the named kinds that carry KV over a network in the clear."""
    return [name for name in names if (entry := find_pipe(name)) is not None and entry.clear]
