"""Baton's index: events through :class:`EventApplier`, as the router's links feed it; look-ups through PrefixIndex."""

from __future__ import annotations

import time
from typing import Any

from workload import HASH, INSTANCES, Side, serve

from baton.api.v1 import events_pb2
from baton.hashing import HashChain
from baton_router.indexer.events import EventApplier
from baton_router.indexer.prefix_index import PrefixIndex

EPOCH = b"e" * 16


class Baton(Side):
    """One feed per instance."""

    def __init__(self, chains: list[bytes]) -> None:
        super().__init__(chains)
        self.index = PrefixIndex()
        self.feeds = [EventApplier(self.index, now=time.monotonic) for _ in range(INSTANCES)]
        for feed in self.feeds:
            feed.apply(events_pb2.KvEventBatch(epoch=EPOCH, sequence=0, snapshot=True))
        self.instances = {feed.slot: at for at, feed in enumerate(self.feeds)}
        self.slots = sum(1 << feed.slot for feed in self.feeds)
        self.sequences = [0] * INSTANCES

    def message(self, instance: int, chain: int, begin: int, end: int) -> bytes:
        """Return an event as it comes over the wire."""
        data = self.chains[chain]
        hashes = [data[at * HASH : (at + 1) * HASH] for at in range(begin, end)]
        parent = data[(begin - 1) * HASH : begin * HASH] if begin else b""
        stored = events_pb2.KvBlocksStored(parent_hash=parent, block_hashes=hashes, tier="device")
        self.sequences[instance] += 1
        return events_pb2.KvEventBatch(
            epoch=EPOCH, sequence=self.sequences[instance], events=[events_pb2.KvEvent(stored=stored)]
        ).SerializeToString()

    def apply(self, instance: int, message: bytes) -> None:
        self.feeds[instance].apply(events_pb2.KvEventBatch.FromString(message))

    def question(self, chain: int, blocks: int) -> object:
        return HashChain(self.chains[chain][: blocks * HASH])

    def find(self, question: Any) -> object:
        return self.index.match(question, self.slots)

    def answer(self, result: Any) -> dict[int, int]:
        """Return what was found as leading blocks per instance."""
        return {self.instances[slot]: depth for slot, depth in result.items()}


if __name__ == "__main__":
    serve(Baton)
