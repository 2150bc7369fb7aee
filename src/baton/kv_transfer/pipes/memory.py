"""Reads inside one process: for tests, and for instances that share a process."""

from __future__ import annotations

import json
from typing import ClassVar

from baton.errors import ConfigError, PipeClosedError
from baton.kv_transfer.copy.block_copy import BlockReader
from baton.kv_transfer.copy.dtype_cast import BlockCaster, Cast
from baton.kv_transfer.pipes.base import CastingReadPipe, PipeKind, PipeServer
from baton.kv_transfer.pipes.options import MemoryNetwork, PipeOptions, Served
from baton.kv_transfer.protocol.deadline import TICK_S, Wait
from baton.kv_transfer.protocol.handshake import Facts
from baton.kv_transfer.types import BlockReads, Bytes, Valid


class MemoryReadPipe(CastingReadPipe):
    """Copies out of an arena of the same process."""

    kind: ClassVar[str] = "memory"
    group_bytes: ClassVar[int] = 0

    def __init__(self, network: MemoryNetwork, address: str, facts: Facts) -> None:
        theirs, shards = network.find(address)
        facts.require(json.loads(json.dumps(theirs.to_fields())), who="source")
        self._network, self._address = network, address
        self._readers = [BlockReader(arena.blocks, shards.primary.generations) for arena in shards.arenas]

    def read(self, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        """Copy blocks; see :meth:`ReadPipe.read`."""
        readers = self._readers
        if not readers:
            raise PipeClosedError("the pipe was closed")
        self._network.find(self._address)
        valid = readers[reads.source_shard].read(local, reads, wait)
        self._network.find(self._address)
        return valid

    def read_cast(self, reads: BlockReads, local: Bytes, caster: BlockCaster, wait: Wait) -> Cast:
        """Convert blocks; see :meth:`CastingReadPipe.read_cast`."""
        if not self._readers:
            raise PipeClosedError("the pipe was closed")
        _, shards = self._network.find(self._address)
        remote = shards.arenas[reads.source_shard].blocks
        cast = caster.read(local, remote, shards.primary.generations, reads, wait)
        self._network.find(self._address)
        return cast

    def wait_ready(self, value: int, wait: Wait) -> int:
        """Wait for the source's progress; see :meth:`ReadPipe.wait_ready`."""
        while True:
            _, shards = self._network.find(self._address)
            if (now := shards.primary.progress.wait(value, TICK_S)) >= value:
                return now
            wait.check("waiting for the computation")

    def alive(self) -> bool:
        """Whether the arena is still published."""
        if not self._readers:
            return False
        try:
            self._network.find(self._address)
        except PipeClosedError:
            return False
        return True

    def close(self) -> None:
        """Close."""
        self._readers = []


class MemoryServer(PipeServer):
    """Publishes arenas in a network."""

    def __init__(self, network: MemoryNetwork, served: Served) -> None:
        self._network = network
        self.address = network.publish(served.facts, served.shards)

    def close(self) -> None:
        """Withdraw the arenas."""
        self._network.withdraw(self.address)


class MemoryKind(PipeKind):
    """Pipes inside one process."""

    name: ClassVar[str] = "memory"

    @classmethod
    def suits(cls, options: PipeOptions) -> bool:
        """Whether there is a network of this process."""
        return options.memory is not None

    def connect(self, address: str, facts: Facts, wait: Wait) -> MemoryReadPipe:
        """Open a pipe; see :meth:`PipeKind.connect`."""
        return MemoryReadPipe(self._network(), address, facts)

    def listen(self, served: Served) -> MemoryServer:
        """Begin to serve; see :meth:`PipeKind.listen`."""
        return MemoryServer(self._network(), served)

    def _network(self) -> MemoryNetwork:
        if self.options.memory is None:
            raise ConfigError("the memory pipe needs a network", field="pipes")
        return self.options.memory
