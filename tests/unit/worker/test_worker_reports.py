"""When instances tell routers something, and what of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.api.v1 import common_pb2, events_pb2
from baton.engine.request import EngineStats
from baton.kv_cache.events import BlocksRemoved, BlocksStored, KVEvent
from baton.types import BlockHash, Epoch, Role
from baton.worker import servicer
from baton.worker.events import GATHER_BLOCKS, KvEventLog
from baton.worker.servicer import LoadReporter, is_urgent

NO_HITS = {"prefix_hit_tokens": 0, "prefix_query_tokens": 0}
EPOCH = Epoch(b"e" * 16)
BUSY = common_pb2.LoadReport(num_running=16, num_waiting=2, blocks_active=2000, waiting_prompt_tokens=40_000)


def block(i: int) -> BlockHash:
    return BlockHash(i.to_bytes(32, "little"))


async def no_snapshot() -> tuple[int, list[KVEvent]]:
    raise AssertionError("nobody needs a snapshot")


async def batches(log: KvEventLog) -> list[events_pb2.KvEventBatch]:
    """Return what the log has numbered after batch 1."""
    stream, last = log.follow(1, EPOCH, no_snapshot), log.sequence
    return [await anext(stream) for _ in range(last)][1:]


async def test_the_news_of_many_steps_is_one_batch() -> None:
    log = KvEventLog(EPOCH, gather_s=3600)
    for i in range(50):
        log.append([BlocksStored(None, (block(i),))])
    assert log.sequence == 1  # the first had no other to wait for
    assert log.flush() == 2
    assert log.flush() == 2
    (batch,) = await batches(log)
    assert [bytes(x) for event in batch.events for x in event.stored.block_hashes] == [block(i) for i in range(1, 50)]


async def test_what_is_gathered_goes_out_by_itself() -> None:
    log = KvEventLog(EPOCH, gather_s=0.05)
    log.append([BlocksStored(None, (block(0),))])
    log.append([BlocksStored(None, (block(1),))])
    stream = log.follow(1, EPOCH, no_snapshot)
    async with asyncio.timeout(240):
        assert [(await anext(stream)).sequence for _ in range(2)] == [1, 2]


async def test_news_wait_as_long_as_the_least_patient_follower_allows() -> None:
    log = KvEventLog(EPOCH, gather_s=0.38)
    log.append([BlocksStored(None, (block(0),))])
    patient = log.follow(1, EPOCH, no_snapshot, gather_s=3600)
    async with asyncio.timeout(240):
        assert (await anext(patient)).sequence == 1
        log._flushed_at -= 1.0  # as if a second had passed
        log.append([BlocksStored(None, (block(1),))])
        log.flush_request()
        assert log.sequence == 1
        old = log.follow(1, EPOCH, no_snapshot)
        assert (await anext(old)).sequence == 1
        log.append([BlocksStored(None, (block(2),))])
        assert log.sequence == 2
        log.append([BlocksStored(None, (block(3),))])
        log.flush_request()
        assert log.sequence == 3
        await old.aclose()
        log.append([BlocksStored(None, (block(4),))])
        log.flush_request()
        assert log.sequence == 3
        assert [(await anext(patient)).sequence for _ in range(2)] == [2, 3]


async def test_many_blocks_do_not_wait() -> None:
    log = KvEventLog(EPOCH, gather_s=3600)
    log.append([BlocksStored(None, (block(0),))])
    log.append([BlocksStored(None, tuple(block(i) for i in range(1, GATHER_BLOCKS)))])
    assert log.sequence == 1
    log.append([BlocksRemoved((block(0),))])
    assert log.sequence == 2


async def test_who_asks_for_what_is_gathered_begins_a_new_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def noted(*args: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*args))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", noted)
    log = KvEventLog(EPOCH, gather_s=3600)
    for i in range(3):
        log.append([BlocksStored(None, (block(i),))])
        log.flush()
    assert [timer.cancelled() for timer in timers] == [True, True]


def test_speeds_are_those_of_the_last_seconds_in_which_work_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(servicer.time, "monotonic", lambda: now)
    reporter = LoadReporter()

    def speeds(at: float, prefill: int, decode: int) -> tuple[float, float]:
        nonlocal now
        now = at
        stats = EngineStats(*[0] * 8, prefill_tokens=prefill, decode_tokens=decode, **NO_HITS)
        report = reporter.report(stats, draining=False)
        return report.prefill_tokens_per_s, report.decode_tokens_per_s

    assert speeds(100.5, 400, 10) == (0.0, 0.0)  # too short to tell
    assert speeds(102.0, 1000, 20) == (500.0, 10.0)
    assert speeds(104.0, 1000, 60) == (500.0, 20.0)  # nothing to prefill: no news of how fast that is
    assert speeds(106.0, 1400, 60) == (200.0, 20.0)


@pytest.mark.parametrize(
    ("change", "urgent"),
    [
        ({}, False),
        ({"blocks_active": 2100, "decode_tokens_per_s": 480.0, "blocks_cached": 7, "num_preemptions": 3}, False),
        ({"num_running": 17}, False),
        ({"num_running": 19}, True),
        ({"num_waiting": 3}, False),
        ({"num_waiting": 0}, True),
        ({"num_waiting": 4}, True),
        ({"num_loading": 3}, True),
        ({"blocks_active": 1760}, False),  # an eighth is counted of what was told
        ({"blocks_active": 2300}, True),
        ({"waiting_prompt_tokens": 44_000}, False),
        ({"waiting_prompt_tokens": 34_000}, True),
        ({"draining": True}, True),
    ],
)
def test_a_report_is_urgent_where_something_that_decides_changed(change: dict[str, int], urgent: bool) -> None:
    report = common_pb2.LoadReport()
    report.CopyFrom(BUSY)
    for name, value in change.items():
        setattr(report, name, value)
    assert is_urgent(report, BUSY, Role.DECODE) is urgent


@pytest.mark.parametrize("role", list(Role))
def test_one_request_on_an_idle_instance_can_wait_but_a_long_prompt_cannot(role: Role) -> None:
    idle = common_pb2.LoadReport(blocks_total=100)
    assert not is_urgent(common_pb2.LoadReport(num_running=1, blocks_active=20, waiting_prompt_tokens=300), idle, role)
    assert is_urgent(common_pb2.LoadReport(num_running=1, blocks_active=20, waiting_prompt_tokens=8000), idle, role)
    assert is_urgent(common_pb2.LoadReport(num_running=2), idle, role)


def test_blocks_of_a_prompt_are_no_news_of_a_prefill_instance() -> None:
    """Each prompt of more than 64 was told twice, and nobody decides by it."""
    computing = common_pb2.LoadReport(num_running=1, blocks_active=90, waiting_prompt_tokens=1440)
    assert not is_urgent(computing, common_pb2.LoadReport(), Role.PREFILL)
    assert is_urgent(computing, common_pb2.LoadReport(), Role.DECODE)


@pytest.mark.parametrize("field", ["num_running", "num_waiting", "waiting_prompt_tokens", "blocks_active"])
def test_that_nothing_is_left_is_told_at_once(field: str) -> None:
    """However little it was: a router whose own request has ended took the rest for others' work for two seconds."""
    some = common_pb2.LoadReport(**{field: 1})
    assert is_urgent(common_pb2.LoadReport(), some, Role.DECODE)
    assert is_urgent(common_pb2.LoadReport(), some, Role.PREFILL) is (field != "blocks_active")
    assert not is_urgent(common_pb2.LoadReport(), common_pb2.LoadReport(), Role.DECODE)
