"""Several connectors as one: the next goes on where the first fell short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.transport.store_engine import (
    BLOCK,
    BS,
    WAIT_S,
    Host,
    blocks_of,
    deaf_store,
    engine,
    host_gate,
    prompt,
    store,
)

from baton.errors import ConfigError
from baton.kv_cache.connector import KVConnector, LoadPlan, LoadRequest, LoadUpdate, TransferStats
from baton.kv_transfer.connector.multi import MultiConnector
from baton.types import BlockId, PrefillPath, RequestId, TokenLogprob


class LastResort(KVConnector):
    """Answers every load at once with everything and a first token: what a remote prefill looks like from here."""

    def __init__(self) -> None:
        self.started: list[tuple[RequestId, int]] = []
        self.held: list[RequestId] = []
        self._done: list[LoadUpdate] = []

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        return LoadPlan(len(request.token_ids), with_first_token=True)

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        self.started.append((request.request_id, num_local_tokens))
        total = len(request.token_ids)
        moved = total - num_local_tokens
        stats = TransferStats(PrefillPath.REMOTE, "p0", pipe="tcp", kv_bytes=5, transfer_us=6, transferred_tokens=moved)
        self._done.append(LoadUpdate(request.request_id, total, TokenLogprob(3, 0.0, 1), stats))

    def cancel_load(self, request_id: RequestId) -> None: ...

    def poll_loads(self) -> list[LoadUpdate]:
        done, self._done = self._done, []
        return done

    def blocks_computed(self, request_id: RequestId, *args: Any) -> None: ...

    def request_finished(self, request_id: RequestId) -> bool:
        self.held.append(request_id)
        return True

    def poll_releases(self) -> list[RequestId]:
        held, self.held = self.held, []
        return held

    def has_pending(self) -> bool:
        return bool(self._done or self.held)

    def close(self) -> None: ...


def test_multi_goes_on_where_the_first_fell_short(host: Host) -> None:
    with store(host) as server, engine(host, server.address) as one:
        one.save(prompt(3 * BS))
        last = LastResort()
        multi = MultiConnector([one.connector, last])
        request = prompt(6 * BS, "x")
        assert multi.plan_load(request, 0) == LoadPlan(6 * BS, with_first_token=True)
        multi.start_load(request, 0, blocks_of(request, 32))
        (update,) = one.wait(multi.poll_loads)
        assert last.started == [("x", 3 * BS)]
        assert update.num_valid_tokens == 6 * BS
        assert update.first_token is not None
        stats = update.stats
        assert (stats.path, stats.source, stats.kv_bytes) == (PrefillPath.REMOTE, "p0", 3 * BLOCK + 5)
        assert stats.transferred_tokens == 6 * BS
        assert not multi.has_pending()


def test_multi_stops_at_the_first_that_is_enough_and_when_cancelled(host: Host) -> None:
    with deaf_store() as address, engine(host, address, call_timeout_s=WAIT_S) as one:
        last = LastResort()
        request = prompt(6 * BS, "x")
        front = MultiConnector([last, one.connector])
        front.start_load(request, 0, blocks_of(request, 32))
        assert front.poll_loads()[0].num_valid_tokens == 6 * BS
        back = MultiConnector([one.connector, last])
        last.started.clear()
        back.start_load(request, 0, blocks_of(request, 32))
        back.cancel_load(request.request_id)
        (update,) = one.wait(back.poll_loads)
        assert (update.num_valid_tokens, update.error, last.started) == (0, "cancelled", [])


def test_multi_keeps_blocks_until_the_last_has_let_go(host: Host) -> None:
    request = prompt(4 * BS, "x")
    with store(host) as server, engine(host, server.address) as one:
        last = LastResort()
        multi = MultiConnector([one.connector, last])
        gate = host_gate(host)
        multi.blocks_computed(request.request_id, blocks_of(request, 0), request.hashes, 4 * BS)
        assert multi.request_finished(request.request_id)
        assert multi.poll_releases() == []  # the other has let go, the store has not pulled yet
        assert multi.has_pending()
        gate.set()
        assert one.wait(multi.poll_releases) == [request.request_id]
        assert not multi.has_pending()
        multi.close()


def test_multi_needs_somebody() -> None:
    with pytest.raises(ConfigError):
        MultiConnector([])
