"""The disk tier on disks that are full or fail: no block is promised that is not there, and the tier goes on."""

from __future__ import annotations

import ctypes
import errno
import logging
import multiprocessing
import os
import queue
import resource
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.support.transport.disk_crash_writer import BLOCK, KINDS, content, name_of

from baton.background import FAILURES
from baton_kvstore.tiers.chain import copies_of
from baton_kvstore.tiers.disk.log import DiskLog
from baton_kvstore.tiers.disk.segment import Segment
from baton_kvstore.tiers.disk.tier import DiskTier

KIND = KINDS[0]
WAIT_S = 240.0


def open_tier(folder: Path, *, max_bytes: int = 64 << 20) -> DiskTier:
    log = DiskLog(str(folder / "kv"), max_bytes=max_bytes, segment_bytes=1 << 20)
    return DiskTier(log, queue_bytes=8 << 20, sync_interval_s=60.0, checkpoint_interval_s=60.0)


def write(tier: DiskTier, *labels: int) -> list[bool]:
    names = [name_of(label) for label in labels]
    views = copies_of(KIND, [memoryview(content(KIND, name)) for name in names])
    answers: queue.Queue[Any] = queue.Queue()
    assert tier.write(KIND, names, views, answers.put)
    found: list[bool] = answers.get(timeout=WAIT_S)
    return found


def synced(tier: DiskTier) -> bool:
    answers: queue.Queue[bool] = queue.Queue()
    tier.sync(answers.put)
    return answers.get(timeout=WAIT_S)


def read(tier: DiskTier, *labels: int) -> list[bool]:
    """Read blocks; what is there must be right."""
    names = [name_of(label) for label in labels]
    views = copies_of(KIND, [memoryview(bytes(BLOCK)) for _ in names])
    results = tier.read(KIND, names, views)
    for name, view, there in zip(names, views, results, strict=True):
        assert not there or bytes(view) == content(KIND, name)
    return results


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what an operator reads."""
    return [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]


def fill(tier: DiskTier, labels: Iterator[int]) -> list[int]:
    """Write until something was refused; return what was taken."""
    taken: list[int] = []
    while True:
        batch = [next(labels) for _ in range(8)]
        results = write(tier, *batch)
        assert [tier.holds(KIND, name_of(label)) for label in batch] == results
        taken += [label for label, ok in zip(batch, results, strict=True) if ok]
        if not all(results):
            return taken


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = tmp_path / "small"
    folder.mkdir()
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, b"size=4m"):
        pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield folder
    assert libc.umount2(bytes(folder), 0) == 0


def test_a_full_disk_drops_its_oldest_and_is_used_whole_again_when_there_is_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2 << 20))
    tier = open_tier(small_disk)
    for first in range(0, 2000, 8):
        assert write(tier, *range(first, first + 8)) == [True] * 8
        assert synced(tier)
    assert tier.stats().resting
    assert not tier.resting  # it takes what comes
    assert tier.counters.write_errors > 0
    assert tier.counters.evictions > 1000
    newest = [*range(1950, 2000)]
    assert read(tier, *newest) == [True] * 50
    assert read(tier, 0) == [False]
    assert len(lines(caplog)) == 1, lines(caplog)
    assert "full" in lines(caplog)[0]
    held = len(tier._log.index)
    ballast.unlink()
    for first in range(2000, 2128, 8):
        assert write(tier, *range(first, first + 8)) == [True] * 8
    assert not tier.stats().resting
    assert len(tier._log.index) > held + 100
    assert len(lines(caplog)) == 2
    tier.close()
    tier = open_tier(small_disk)
    assert read(tier, *newest, *range(2000, 2128)) == [True] * (50 + 128)
    tier.close()


def test_a_full_disk_on_which_there_is_nothing_to_drop_keeps_what_it_has(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(3500 << 10))
    tier = open_tier(small_disk)
    labels = iter(range(10_000))
    taken = fill(tier, labels)
    assert len(taken) < 60
    for _ in range(100):
        fill(tier, labels)
    assert read(tier, *taken) == [True] * len(taken)
    assert tier.resting
    assert tier.stats().resting
    assert tier.counters.write_errors > 100
    assert len(lines(caplog)) == 1, lines(caplog)
    ballast.unlink()
    assert write(tier, 20_000) == [True]
    assert synced(tier)
    assert not tier.stats().resting
    assert len(lines(caplog)) == 2, lines(caplog)
    tier.close()
    tier = open_tier(small_disk)
    assert read(tier, *taken, 20_000) == [True] * (len(taken) + 1)
    tier.close()


def test_deletions_on_a_full_disk_are_promised_and_free_room(small_disk: Path) -> None:
    tier = open_tier(small_disk)
    for first in range(0, 1000, 8):
        assert write(tier, *range(first, first + 8)) == [True] * 8
    answers: queue.Queue[bool] = queue.Queue()
    tier.delete(KIND, [name_of(999)], answers.put)
    assert answers.get(timeout=WAIT_S)
    assert read(tier, 999, 998) == [False, True]
    tier.close()
    tier = open_tier(small_disk)
    assert read(tier, 999, 998) == [False, True]
    tier.delete(KIND, None, answers.put)
    assert answers.get(timeout=WAIT_S)
    assert write(tier, 20_000) == [True]
    tier.close()
    tier = open_tier(small_disk)
    assert read(tier, 20_000, *range(1000)) == [True] + [False] * 1000
    tier.close()


def test_a_disk_that_fails_says_so_once_and_once_that_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(tmp_path)
    assert write(tier, 1, 2, 3, 4) == [True] * 4
    assert synced(tier)

    def fails(*args: Any) -> int:
        raise OSError(errno.EIO, "gone")

    with monkeypatch.context() as patch:
        for call in ("pwritev", "preadv", "fdatasync"):
            patch.setattr(os, call, fails)
        for label in range(100, 200):
            assert write(tier, label) == [False]
        for label in (1, 2, 3):
            assert read(tier, label) == [False]
        assert tier.resting
        assert tier.stats().errors >= 103
    assert len(lines(caplog)) == 2, lines(caplog)  # of writing and of reading
    for label in range(200, 210):
        assert write(tier, label) == [True]
        assert synced(tier)
    assert not tier.stats().resting
    assert len(lines(caplog)) == 3, lines(caplog)
    tier.close()


def _limited(folder: str, news: Connection) -> None:
    """In a process of its own whose files may not grow beyond half a segment: writes there fail with EFBIG."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))
    tier = open_tier(Path(folder))
    taken = fill(tier, iter(range(1000)))
    news.send((taken, read(tier, *taken), tier.counters.write_errors, synced(tier)))
    tier.close()


def test_files_that_may_not_grow_cost_blocks_and_nothing_else(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    news, end = context.Pipe(duplex=False)
    process = context.Process(target=_limited, args=(str(tmp_path), end))
    process.start()
    end.close()
    assert news.poll(WAIT_S)
    taken, found, errors, promised = news.recv()
    process.join(WAIT_S)
    assert process.exitcode == 0
    assert len(taken) > 20
    assert found == [True] * len(taken)
    assert errors > 0
    tier = open_tier(tmp_path)
    if promised:
        assert read(tier, *taken) == [True] * len(taken)
    tier.close()


def test_what_a_failed_sync_may_have_lost_is_not_promised_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a lost page once: a second sync of the same file says that all is well, though it is not."""
    tier = open_tier(tmp_path)
    assert write(tier, 1) == [True]
    assert synced(tier)
    assert write(tier, 2, 4) == [True, True]
    right, failed = os.fdatasync, []

    def fails(fd: int) -> None:
        if not failed:
            failed.append(fd)
            raise OSError(errno.EIO, "lost a page")
        right(fd)

    monkeypatch.setattr(os, "fdatasync", fails)
    assert not synced(tier)
    assert read(tier, 1, 2, 4) == [True, False, False]
    answers: queue.Queue[bool] = queue.Queue()
    tier.delete(KIND, [name_of(4)], answers.put)
    assert answers.get(timeout=WAIT_S)
    assert synced(tier)
    assert write(tier, 2, 3) == [True, True]
    assert synced(tier)
    tier.close()
    tier = open_tier(tmp_path)
    assert read(tier, 1, 2, 3, 4) == [True] * 3 + [False]
    tier.close()


def test_a_read_that_fails_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    assert write(tier, 1, 2) == [True, True]
    right, failed = os.preadv, []

    def fails(fd: int, *args: Any) -> int:
        if not failed:
            failed.append(fd)
            raise OSError(errno.EIO, "a bad sector")
        return right(fd, *args)

    monkeypatch.setattr(os, "preadv", fails)
    assert read(tier, 1) == [False]
    assert read(tier, 1, 2) == [False, True]
    assert tier.counters.read_errors == 1
    assert write(tier, 1) == [True]
    assert read(tier, 1) == [True]
    tier.close()


def test_a_segment_that_cannot_be_read_makes_room_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path, max_bytes=1 << 20)
    labels = iter(range(10_000))
    first = [next(labels) for _ in range(4)]
    assert write(tier, *first) == [True] * 4
    assert read(tier, *first) == [True] * 4  # worth being kept
    right = Segment.read

    def fails(segment: Segment, *args: Any) -> None:
        if segment.segment_id == 1:
            raise OSError(errno.EIO, "a bad sector")
        right(segment, *args)

    monkeypatch.setattr(Segment, "read", fails)
    while tier.holds(KIND, name_of(first[0])):
        assert write(tier, next(labels)) == [True]
    assert tier.counters.read_errors == 4
    tier.close()


def test_segments_that_could_not_be_begun_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert [write(tier, 1) for _ in range(3)] == [[False]] * 3
    assert not list((tmp_path / "kv").glob("segment-*"))
    assert write(tier, 1) == [True]
    tier.close()


def test_a_deletion_that_comes_too_late_is_not_promised(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    assert write(tier, 1) == [True]
    tier.close()
    answers: queue.Queue[bool] = queue.Queue()
    tier.delete(KIND, [name_of(1)], answers.put)
    assert not answers.get(timeout=WAIT_S)


def test_an_error_of_no_file_answers_the_waiting_opens_the_breaker_and_the_writer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a bug would raise it, or memory that has run out: the thread that writes must not be gone for good."""
    tier = open_tier(tmp_path)
    name = "kvstore disk"
    before = FAILURES.snapshot().get((name, "restarted"), 0)
    try:
        with monkeypatch.context() as patch:

            def fail(*_: object) -> list[bool]:
                raise MemoryError("no memory for a batch")

            patch.setattr(DiskLog, "write", fail)
            assert write(tier, 1, 2) == [False, False]
            assert tier.breaker.tripped
            assert tier.stats().resting
            assert FAILURES.snapshot()[name, "restarted"] == before + 1
            assert tier.stats().queued_bytes == 0
        assert write(tier, 3) == [True]
        assert synced(tier)
        assert not tier.stats().resting
        assert read(tier, 1, 3) == [False, True]
    finally:
        tier.close()


def test_deletions_that_wait_are_answered_when_syncing_fails_with_no_error_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    try:
        with monkeypatch.context() as patch:

            def fail(*_: object) -> None:
                raise RuntimeError("a bug")

            patch.setattr(DiskLog, "sync", fail)
            assert synced(tier) is False
        assert synced(tier) is True
    finally:
        tier.close()
