"""The side whose blocks are read: arenas full of the pattern behind one block server per kind of pipe."""

from __future__ import annotations

import psutil

from baton.bench.kv.messages import MAX_MESSAGE_BYTES, MessageService
from baton.bench.kv.methods import BareServer
from baton.bench.kv.pattern import shard_patterns
from baton.bench.kv.specs import SourceFacts, SourceSpec, sequence_numbers
from baton.errors import BatonError, ConfigError
from baton.kv_transfer.blocks import BlockServer
from baton.kv_transfer.pipes.messages import MessageListener
from baton.types import InstanceId

_MEMORY_SHARE = 0.85
"""Share of the free memory that one arena may take."""


class Source:
    """An open source.

    Args:
        spec: What to open.
        host: Address that its sockets bind to.
        token: Shared token.

    Raises:
        ConfigError: Not enough memory.
    """

    def __init__(self, spec: SourceSpec, host: str, token: str | None) -> None:
        self._spec = spec
        require_memory(spec.shape.memory(spec.num_blocks))
        self._shards = spec.shape.new_shards(spec.num_blocks)
        self._servers: dict[str, BlockServer] = {}
        self._refused: dict[str, str] = {}
        self._shards.primary.generations[:] = sequence_numbers(spec.num_blocks)
        for arena, pattern in zip(self._shards.arenas, shard_patterns(spec.seed, spec.shape), strict=True):
            pattern.fill(arena.blocks, spec.index)
        self._bare = BareServer(self._shards.primary.blocks.reshape(-1), host, token)
        for kind in spec.kinds:
            self._offer(kind, host, token)
        listener = MessageListener(host, token=token, max_message_bytes=MAX_MESSAGE_BYTES)
        self._messages = MessageService(listener, self._shards.primary.progress.advance)

    def facts(self) -> SourceFacts:
        """Return what targets need to know."""
        endpoints = tuple((e.kind, e.address) for server in self._servers.values() for e in server.endpoints)
        return SourceFacts(
            index=self._spec.index,
            epoch=self._shards.primary.epoch.hex(),
            num_blocks=self._spec.num_blocks,
            shape=self._spec.shape,
            endpoints=endpoints,
            messages=self._messages.address,
            bare=self._bare.address,
            refused=tuple(self._refused.items()),
        )

    def close(self) -> None:
        """Close everything."""
        self._messages.close()
        for server in self._servers.values():
            server.close()
        self._bare.close()
        self._shards.close()

    def _offer(self, kind: str, host: str, token: str | None) -> None:
        fingerprint = self._spec.shape.fingerprint()

        name = InstanceId(f"source-{self._spec.index}-{kind}")
        try:
            self._servers[kind] = BlockServer(self._shards, fingerprint, name, kinds=(kind,), host=host, token=token)
        except BatonError as error:
            self._refused[kind] = error.message


def require_memory(size: int) -> None:
    """Refuse what the machine has no room for.

    Raises:
        ConfigError: Says how much there is.
    """
    free = psutil.virtual_memory().available
    if size > free * _MEMORY_SHARE:
        raise ConfigError(
            f"this needs {size / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are free: take a smaller --isl, "
            "--bytes or geometry",
            field="isl",
        )
