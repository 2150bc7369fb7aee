"""The side whose blocks are read: arenas full of the pattern behind one block server per kind of pipe."""

from __future__ import annotations

import logging
from collections.abc import Callable

import psutil

from baton.bench.kv.bare import BareServer
from baton.bench.kv.messages import MessageService, Messenger
from baton.bench.kv.pattern import shard_patterns
from baton.bench.kv.specs import SourceFacts, SourceSpec, sequence_numbers
from baton.errors import BatonError, ConfigError
from baton.kv_transfer.blocks import BlockServer
from baton.types import InstanceId

log = logging.getLogger(__name__)
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
        self._services: dict[str, MessageService] = {}
        self._refused: dict[str, str] = {}
        self._messenger = Messenger(host, token)
        self._shards.primary.generations[:] = sequence_numbers(spec.num_blocks)
        for arena, pattern in zip(self._shards.arenas, shard_patterns(spec.seed, spec.shape), strict=True):
            pattern.fill(arena.blocks, spec.index)
        self._bare = BareServer(self._shards.primary.blocks.reshape(-1), host, token)
        for kind in spec.kinds:
            self._offer(kind, host, token)
        if "tcp" not in self._services:  # pipes without messages of their own are told of progress over it
            self._serve_messages("tcp")

    def facts(self) -> SourceFacts:
        """Return what targets need to know."""
        endpoints = tuple((e.kind, e.address) for server in self._servers.values() for e in server.endpoints)
        return SourceFacts(
            index=self._spec.index,
            epoch=self._shards.primary.epoch.hex(),
            num_blocks=self._spec.num_blocks,
            shape=self._spec.shape,
            endpoints=endpoints,
            messages=tuple((kind, service.address) for kind, service in self._services.items()),
            bare=self._bare.address,
            refused=tuple(self._refused.items()),
        )

    def close(self) -> None:
        """Close everything."""
        for service in self._services.values():
            service.close()
        for server in self._servers.values():
            server.close()
        self._messenger.close()
        self._bare.close()
        self._shards.close()

    def _offer(self, kind: str, host: str, token: str | None) -> None:
        fingerprint = self._spec.shape.fingerprint()

        def serve_blocks() -> None:
            self._servers[kind] = BlockServer(
                self._shards,
                fingerprint,
                InstanceId(f"source-{self._spec.index}-{kind}"),
                kinds=(kind,),
                host=host,
                token=token,
            )

        if reason := _attempt(serve_blocks):
            self._refused[kind] = reason
        if reason := _attempt(lambda: self._serve_messages(kind)):
            log.info("no messages over %s: %s", kind, reason)

    def _serve_messages(self, kind: str) -> None:
        advance = self._shards.primary.progress.advance
        self._services[kind] = MessageService(self._messenger.listen(kind), advance)


def _attempt(what: Callable[[], None]) -> str:
    """Do something; returns why it could not be done, empty if it was."""
    try:
        what()
    except BatonError as error:
        return error.message
    return ""


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
