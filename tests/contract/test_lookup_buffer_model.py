"""The lookup buffer against a plain model: random calls, every entry accounted for after each."""

from __future__ import annotations

import asyncio
import itertools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from baton.errors import (
    QueueFullError,
)
from baton.kv_transfer.lookup_buffer import LookupBuffer
from baton.types import RequestId

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


class Model(RuleBasedStateMachine):
    """Random calls on one thread's event loop against a plain list; time stands still unless told to move."""

    keys = st.sampled_from([A, B, C])
    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.values = itertools.count()
        self.loop = asyncio.new_event_loop()
        self.dropped: list[int] = []
        self.buffer: LookupBuffer[int] = LookupBuffer(
            100, max_entries=4, on_drop=lambda key, value: self.dropped.append(value), clock=lambda: self.now
        )
        self.inserted: set[int] = set()
        self.consumed: list[int] = []
        self.withdrawn: list[int] = []
        self.inserts: dict[int, asyncio.Task[None]] = {}
        self.queries: list[asyncio.Task[int]] = []

    def turn(self) -> None:
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))
        for task in [t for t in self.queries if t.done()]:
            self.queries.remove(task)
            if not task.cancelled() and task.exception() is None:
                self.consumed.append(task.result())
        for value, task in list(self.inserts.items()):
            if task.done():
                del self.inserts[value]
                if task.cancelled() or task.exception() is not None:
                    self.inserted.discard(value)

    @rule(key=keys, tokens=st.lists(st.integers(0, 1), max_size=3), nbytes=st.integers(0, 100), lease=st.integers(1, 5))
    def insert(self, key: RequestId, tokens: list[int], nbytes: int, lease: int) -> None:
        value = next(self.values)
        self.inserted.add(value)
        call = self.buffer.insert_when_room(key, tokens, None, value, nbytes, lease_s=lease, deadline=1e9)
        self.inserts[value] = self.loop.create_task(call)
        self.turn()

    @rule(key=keys)
    def take_by_key(self, key: RequestId) -> None:
        self.queries.append(self.loop.create_task(self.buffer.drop_select(key, deadline=1e9)))
        self.turn()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def take_by_tokens(self, tokens: list[int]) -> None:
        self.queries.append(self.loop.create_task(self.buffer.drop_select(tokens, deadline=1e9)))
        self.turn()

    @rule(which=st.integers(0, 10), late=st.booleans(), key=keys)
    def cancel_a_query(self, which: int, late: bool, key: RequestId) -> None:
        if not self.queries:
            return
        task = self.queries[which % len(self.queries)]
        if late:  # an entry may be claimed for it before it sees that it was cancelled
            value = next(self.values)
            self.inserted.add(value)
            try:
                self.buffer.insert(key, [0, 1], None, value, 10, lease_s=3)
            except QueueFullError:
                self.inserted.discard(value)
        task.cancel()
        self.turn()

    @rule(which=st.integers(0, 10))
    def cancel_an_insert(self, which: int) -> None:
        if self.inserts:
            list(self.inserts.values())[which % len(self.inserts)].cancel()
            self.turn()

    @rule(key=keys)
    def withdraw(self, key: RequestId) -> None:
        self.withdrawn += self.buffer.withdraw(key)
        self.turn()

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        with self.buffer._locked():
            self.buffer._admit()  # what every waiting insert does when a lease ends
        self.turn()

    @rule()
    def drop_expired(self) -> None:
        self.buffer.drop_expired()
        self.turn()

    @invariant()
    def books_agree(self) -> None:
        self.buffer.check_integrity()
        assert len(self.consumed) == len(set(self.consumed)), "an entry was consumed twice"
        lost = set(self.dropped) | set(self.withdrawn)
        assert not lost & set(self.consumed), "an entry was consumed and dropped"
        waiting = set(self.inserts)
        held = self.inserted - set(self.consumed) - lost - waiting
        assert len(self.buffer) == len(held), "an entry was lost"

    def teardown(self) -> None:
        self.buffer.close()
        self.turn()
        assert not self.queries
        assert not self.inserts
        assert self.buffer.num_bytes == 0
        self.loop.close()


TestModel = Model.TestCase


TestModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
