"""Instances that chains of blocks are pending on, on a clock of the test's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from baton.api.v1 import events_pb2
from baton.hashing import HashChain, hash_chain, root_hash
from baton.types import Epoch, InstanceId
from baton_router.indexer.events import EventApplier
from baton_router.indexer.prefix_index import PendingChain, PrefixIndex
from baton_router.replication.pending_sync import PendingPublisher, RemotePending
from baton_router.replication.wire import (
    Expected,
)

NAMES = ("p0", "d0")


def chain(prompt: list[int]) -> HashChain:
    return hash_chain(prompt, 1, root_hash(b"k"))


class Fleet:
    """The part of a registry that matters here: instances by name, each with a feed, on a clock of the test's."""

    def __init__(self, decision_ttl_s: float = 0.0) -> None:
        self.clock = 100.0
        self.index = PrefixIndex(1000)
        self.count = Counter("told", "", registry=CollectorRegistry())
        self.feeds: dict[str, EventApplier] = {}
        self.epochs = dict.fromkeys(NAMES, Epoch(b"0"))
        for name in NAMES:
            self.feeds[name] = EventApplier(self.index, now=self.now, decision_ttl_s=decision_ttl_s)
            self.feeds[name].restarted(self.epochs[name])

    def now(self) -> float:
        return self.clock

    def instances(self) -> list[Any]:
        return [
            SimpleNamespace(instance_id=InstanceId(name), events=feed, info=SimpleNamespace(epoch=self.epochs[name]))
            for name, feed in self.feeds.items()
        ]

    def restart(self, name: str) -> None:
        self.epochs[name] = Epoch(self.epochs[name] + b"+")
        self.feeds[name].restarted(self.epochs[name])

    def snapshot(self, name: str, hashes: HashChain) -> None:
        """The instance tells that it holds just this."""
        event = events_pb2.KvEvent(stored=events_pb2.KvBlocksStored(block_hashes=list(hashes)))
        batch = events_pb2.KvEventBatch(epoch=self.epochs[name], sequence=1, events=[event], snapshot=True)
        self.feeds[name].apply(batch)

    def place(self, name: str, hashes: HashChain) -> PendingChain:
        expectation = self.feeds[name].add_pending(hashes)
        assert expectation is not None
        return expectation

    def match(self, name: str, prompt: list[int]) -> int:
        slot = self.feeds[name].slot
        return self.index.match(chain(prompt), 1 << slot).get(slot, 0)

    def publisher(self) -> PendingPublisher:
        publisher = PendingPublisher(self, self.count, self.now)  # type: ignore[arg-type]
        publisher.start()
        return publisher

    def remote_pending(self) -> RemotePending:
        return RemotePending(self, self.now)  # type: ignore[arg-type]

    def is_empty(self) -> bool:
        return not self.index._pending._root.children and not self.index._pending._bytes


def told(number: int, name: str, prompt: list[int], epoch: bytes = b"0") -> Expected:
    return Expected(number, InstanceId(name), Epoch(epoch), chain(prompt).data)
