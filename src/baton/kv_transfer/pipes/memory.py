"""Reads inside one process: for tests, and for instances that share a process."""

from __future__ import annotations

import json
from typing import ClassVar

import numpy as np

from baton.errors import ConfigError, PipeClosedError
from baton.kv_transfer.native_copy import BlockReader, Cast, fence, read_casting
from baton.kv_transfer.pipes.base import (
    CastingReadPipe,
    MemoryNetwork,
    PipeKind,
    PipeOptions,
    PipeServer,
    ReadPipe,
    Served,
)
from baton.kv_transfer.streams import TICK_S, Wait
from baton.kv_transfer.types import BlockReads, Bytes, Valid, block_spans, current
from baton.kv_transfer.wire import Facts


class MemoryReadPipe(ReadPipe):
    """Copies out of an arena of the same process that the host cannot address.

    Attributes:
        shards: The source's arenas.
    """

    kind: ClassVar[str] = "memory"
    group_bytes: ClassVar[int] = 0

    def __init__(self, network: MemoryNetwork, address: str, facts: Facts) -> None:
        theirs, self.shards = network.find(address)
        facts.require(json.loads(json.dumps(theirs.to_fields())), who="source")
        self._network = network
        self._address = address
        self._closed = False

    def read(self, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        """Copy blocks, each by way of a buffer; see :meth:`ReadPipe.read`."""
        self.check_open()
        arena = self.shards.arenas[reads.source_shard]
        segments = reads.segments_of(local.shape[1])
        valid = current(self.shards.primary, reads)
        buffer = np.empty(int(segments[:, 2].sum()), np.uint8)
        for at in np.flatnonzero(valid).tolist():
            wait.record_progress()
            wait.check("copying blocks")
            arena.read_into(buffer, block_spans(reads.remote_ids[at : at + 1], segments[:, 0], segments[:, 2]))
            row = local[reads.local_ids[at]]
            begin = 0
            for _, target, size in segments.tolist():
                row[target : target + size] = buffer[begin : begin + size]
                begin += size
        fence()
        valid &= current(self.shards.primary, reads)
        self.check_open()
        return valid

    def wait_ready(self, value: int, wait: Wait) -> int:
        while True:
            self.check_open()
            if (now := self.shards.primary.progress.wait(value, TICK_S)) >= value:
                return now
            wait.check("waiting for the computation")

    def alive(self) -> bool:
        """Whether the arena is still published."""
        try:
            self.check_open()
        except PipeClosedError:
            return False
        return True

    def close(self) -> None:
        self._closed = True

    def check_open(self) -> None:
        """Refuse to go on with a pipe that was closed, or a source that is gone.

        Raises:
            PipeClosedError: It is one of both.
        """
        if self._closed:
            raise PipeClosedError("the pipe was closed")
        self._network.find(self._address)


class MappedMemoryReadPipe(MemoryReadPipe, CastingReadPipe):
    """Copies out of an arena of the same process."""

    def __init__(self, network: MemoryNetwork, address: str, facts: Facts) -> None:
        super().__init__(network, address, facts)
        generations = self.shards.primary.generations
        self._readers = [BlockReader(arena.blocks, generations) for arena in self.shards.arenas]

    def read(self, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        self.check_open()
        valid = self._readers[reads.source_shard].read(local, reads, wait)
        self.check_open()
        return valid

    def read_cast(self, reads: BlockReads, local: Bytes, wait: Wait) -> Cast:
        self.check_open()
        remote = self.shards.arenas[reads.source_shard].blocks
        cast = read_casting(local, remote, self.shards.primary.generations, reads, wait)
        self.check_open()
        return cast


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
        network = self._network()
        if all(arena.mapped for arena in network.find(address)[1].arenas):
            return MappedMemoryReadPipe(network, address, facts)
        return MemoryReadPipe(network, address, facts)

    def listen(self, served: Served) -> MemoryServer:
        return MemoryServer(self._network(), served)

    def _network(self) -> MemoryNetwork:
        if self.options.memory is None:
            raise ConfigError("the memory pipe needs a network", field="pipes")
        return self.options.memory
