"""The disk tier's formats, log and thread, on a real file system."""

from __future__ import annotations

import os
import queue
import random
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.transport.named_blocks import buffers, name_of

from baton.errors import ConfigError
from baton.types import BlockHash
from baton_kvstore.tiers.disk.directory import (
    CheckpointBlock,
    CheckpointSegment,
    Directory,
    decode_checkpoint,
    decode_store,
    encode_checkpoint,
    encode_store,
)
from baton_kvstore.tiers.disk.log import DiskLog
from baton_kvstore.tiers.disk.segment import (
    Record,
    RecordType,
    decode_record,
    decode_segment,
    encode_record,
    encode_segment,
)
from baton_kvstore.tiers.disk.tier import DiskTier
from baton_kvstore.types import PAGE, KvFormat

BLOCK = 8192
KIND = KvFormat(b"k" * 32, b"c" * 32, BLOCK)
OTHER = KvFormat(b"o" * 32, b"c" * 32, BLOCK)
ODD = KvFormat(b"d" * 32, b"c" * 32, 5000)
SECRET = 77
PLACE = (3, 2 * PAGE)
RECORD = Record(RecordType.BLOCK, 9, BlockHash(b"h" * 32), BLOCK, b"d" * 16)
CHECKPOINT = encode_checkpoint(
    12,
    [
        (1, CheckpointSegment(PAGE, [])),
        (2, CheckpointSegment(9 * PAGE, [CheckpointBlock(PAGE, 3, BlockHash(b"h" * 32), b"d" * 16)])),
    ],
    SECRET,
)
MAX_BYTES = 1 << 20


def content(kind: KvFormat, label: int) -> bytes:
    return np.random.default_rng([label, kind.key[0]]).bytes(kind.block_bytes)


def write(log: DiskLog, *labels: int, kind: KvFormat = KIND) -> list[bool]:
    views = buffers(len(labels), kind)
    for view, label in zip(views, labels, strict=True):
        view[:] = content(kind, label)
    return log.write(kind, [name_of(label) for label in labels], views, set())


def read(log: DiskLog, *labels: int, kind: KvFormat = KIND) -> list[bool]:
    views = buffers(len(labels), kind)
    results = log.index.read(kind, [name_of(label) for label in labels], views)
    for view, label, there in zip(views, labels, results, strict=True):
        assert not there or bytes(view) == content(kind, label)
    return results


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "kv")


class Opened:
    """Opens logs and closes what a test left open."""

    def __init__(self, path: str) -> None:
        self.path, self.log = path, None

    def __call__(self, *, max_bytes: int = MAX_BYTES, segment_bytes: int = MAX_BYTES) -> DiskLog:
        self.close()
        self.log = DiskLog(self.path, max_bytes=max_bytes, segment_bytes=segment_bytes)
        return self.log

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
        self.log = None


@pytest.fixture
def opened(path: str) -> Iterator[Any]:
    made = Opened(path)
    yield made
    made.close()


def segments(path: str) -> list[Path]:
    return sorted(Path(path).glob("segment-*"))


# Formats


def test_what_was_encoded_is_decoded() -> None:
    assert decode_store(encode_store(SECRET)) == (1, SECRET)
    assert decode_segment(encode_segment(KIND, 3, SECRET), 3, SECRET) == KIND
    assert decode_record(encode_record(RECORD, KIND, PLACE, SECRET), KIND, PLACE, SECRET) == RECORD
    found = decode_checkpoint(CHECKPOINT, SECRET)
    assert found is not None
    assert (found[0], found[1][2].blocks[0].sequence) == (12, 3)


def test_a_header_of_another_place_store_or_kind_is_none() -> None:
    page = encode_record(RECORD, KIND, PLACE, SECRET)
    assert decode_record(page, KIND, (4, 2 * PAGE), SECRET) is None
    assert decode_record(page, KIND, (3, 3 * PAGE), SECRET) is None
    assert decode_record(page, KIND, PLACE, SECRET + 1) is None
    assert decode_record(page, OTHER, PLACE, SECRET) is None
    assert decode_segment(encode_segment(KIND, 3, SECRET), 4, SECRET) is None


@given(data=st.binary(max_size=2 * PAGE))
def test_random_bytes_are_never_taken_for_anything(data: bytes) -> None:
    assert decode_store(data) is None
    assert decode_segment(data, 3, SECRET) is None
    assert decode_record(data, KIND, PLACE, SECRET) is None
    assert decode_checkpoint(data, SECRET) is None


@given(data=st.data())
def test_cut_or_flipped_encodings_are_never_taken_for_something_else(data: st.DataObject) -> None:
    for encoded, decode in (
        (encode_store(SECRET), decode_store),
        (encode_segment(KIND, 3, SECRET), lambda raw: decode_segment(raw, 3, SECRET)),
        (encode_record(RECORD, KIND, PLACE, SECRET), lambda raw: decode_record(raw, KIND, PLACE, SECRET)),
        (CHECKPOINT, lambda raw: decode_checkpoint(raw, SECRET)),
    ):
        size = len(encoded.rstrip(b"\0"))
        at = data.draw(st.integers(0, size - 1))
        flipped = bytearray(encoded)
        flipped[at] ^= 1 << data.draw(st.integers(0, 7))
        assert decode(bytes(flipped)) is None  # type: ignore[operator]
        assert decode(encoded[:at]) is None  # type: ignore[operator]


# Log


@pytest.mark.parametrize("kind", [KIND, ODD])
def test_a_restart_finds_what_was_written(opened: Any, kind: KvFormat) -> None:
    log = opened()
    assert write(log, 1, 2, 3, kind=kind) == [True] * 3
    assert read(log, 1, 2, 3, 4, kind=kind) == [True, True, True, False]
    assert read(log, 1, kind=OTHER) == [False]
    log.sync()
    assert read(opened(), 3, 1, 2, kind=kind) == [True] * 3  # from headers
    opened.log.checkpoint()
    write(opened.log, 4, kind=kind)
    assert read(opened(), 1, 2, 3, 4, kind=kind) == [True] * 4  # from the checkpoint and headers after it


def test_deleted_blocks_stay_away_after_a_restart_and_compaction(opened: Any) -> None:
    log = opened(segment_bytes=16 * PAGE)
    write(log, *range(20))
    gone = [name_of(i) for i in range(18)]
    assert len(log.index.hide(KIND, gone, [])) == 18
    log.append_tombstones(KIND, gone)
    files = len(segments(opened.path))
    while log.compact():
        pass
    assert len(segments(opened.path)) < files
    assert log.index.counters.compactions > 0
    log.sync()
    log = opened(segment_bytes=16 * PAGE)
    assert read(log, *range(20)) == [False] * 18 + [True] * 2
    assert write(log, 0) == [True]
    log.sync()
    assert read(opened(), 0, 1) == [True, False]


def test_compaction_of_deletions_ends(opened: Any) -> None:
    """Tombstones are needed as long as an older segment of their kind is there: to write them again frees nothing."""
    log = opened(max_bytes=4 * MAX_BYTES, segment_bytes=32 * PAGE)
    write(log, *range(10))
    for label in range(100, 200):
        write(log, label)
        log.index.hide(KIND, [name_of(label)], [])
        log.append_tombstones(KIND, [name_of(label)])
    assert any(not log.compact() for _ in range(50))
    log.sync()
    assert len(segments(opened.path)) <= 2 + 100 // 31
    log = opened(max_bytes=4 * MAX_BYTES, segment_bytes=32 * PAGE)
    assert any(not log.compact() for _ in range(50))
    assert read(log, *range(10), *range(100, 200)) == [True] * 10 + [False] * 100


def test_a_block_that_a_deletion_names_twice_is_hidden_once(opened: Any) -> None:
    log = opened()
    write(log, 1, 2, 3)
    heard: list[Any] = []
    log.index.listen(lambda kind, hashes, tier, present: None if present else heard.extend(hashes))
    assert log.index.hide(KIND, [name_of(1), name_of(2), name_of(1)], []) == [name_of(1), name_of(2)]
    assert heard == [name_of(1), name_of(2)]
    assert log._segments[1].live_bytes == PAGE + BLOCK


def test_clear_drops_a_kinds_files_and_no_others(opened: Any) -> None:
    log = opened()
    write(log, 1, 2)
    write(log, 1, kind=OTHER)
    log.index.hide(KIND, None, [])
    log.clear(KIND)
    log.sync()
    assert len(segments(opened.path)) == 1
    log = opened()
    assert read(log, 1, 2) == [False, False]
    assert read(log, 1, kind=OTHER) == [True]


@pytest.mark.parametrize("starts", [1, 2])
def test_what_was_written_after_a_deletion_and_a_crash_survives_another_one(opened: Any, starts: int) -> None:
    """The checkpoint of before the deletion is still there: a new segment must not be taken for one that it knows."""
    log = opened()
    write(log, *range(10))
    log.sync()
    log.checkpoint()
    log.index.hide(KIND, None, [])
    log.clear(KIND)
    for _ in range(starts):
        log = opened()  # without another checkpoint: as after a crash
        assert len(log.index) == 0
    write(log, *range(100, 140))
    log.sync()
    log = opened()
    assert read(log, *range(100, 140)) == [True] * 40
    assert read(log, *range(10)) == [False] * 10
    assert len(log.index) == 40


def test_no_segment_takes_the_number_of_one_that_a_checkpoint_knows(opened: Any) -> None:
    """Also not when the checkpoint fits the other segments no more, or another kind has the newest."""
    log = opened()
    write(log, 1, kind=OTHER)
    write(log, 1, 2)
    log.sync()
    log.checkpoint()
    log.index.hide(KIND, None, [])
    log.clear(KIND)
    (file,) = segments(opened.path)
    opened.close()
    os.truncate(file, PAGE)
    log = opened()
    write(log, 3)
    log.sync()
    assert [path.name[-1] for path in segments(opened.path)] == ["1", "3"]
    assert read(opened(), 1, 2, 3) == [False, False, True]


def test_size_is_bounded_and_what_was_read_outlives_what_was_not(opened: Any) -> None:
    log = opened(max_bytes=64 * 3 * PAGE, segment_bytes=8 * 3 * PAGE)
    for label in range(200):
        assert write(log, label) == [True]
        assert read(log, 0) == [True]
        assert log.used_bytes <= 64 * 3 * PAGE
        assert sum(file.stat().st_size for file in segments(opened.path)) <= 64 * 3 * PAGE
    assert read(log, 1, 2, 199) == [False, False, True]
    assert log.index.counters.evictions > 0
    log.sync()
    assert read(opened(), 0, 199) == [True, True]


def test_a_damaged_payload_is_never_served_and_a_damaged_header_costs_one_block(opened: Any) -> None:
    log = opened()
    write(log, 1, 2, 3, 4)
    log.sync()
    (file,) = segments(opened.path)
    with file.open("r+b") as raw:
        raw.seek(PAGE + PAGE + 100)  # block 1's payload
        raw.write(b"x")
        raw.seek(PAGE + (PAGE + BLOCK) + 5)  # block 2's header
        raw.write(b"x")
    assert read(log, 1, 2) == [False, True]
    assert log.index.forget_damaged() == [(KIND, name_of(1))]
    log = opened()
    assert read(log, 1, 2, 3, 4) == [False, False, True, True]
    assert log.index.counters.checksum_failures == 1


def test_a_torn_end_is_cut(opened: Any) -> None:
    log = opened()
    write(log, 1)
    log.sync()
    synced = log._segments[1].synced
    write(log, 2, 3)
    (file,) = segments(opened.path)
    opened.close()
    with file.open("r+b") as raw:
        raw.truncate(synced + PAGE + PAGE + BLOCK + 2 * PAGE)
    log = opened()
    assert read(log, 1, 2, 3) == [True, True, False]
    assert log.index.counters.cut_bytes == 2 * PAGE
    assert write(log, 3) == [True]
    assert read(opened(), 1, 2, 3) == [True] * 3


@pytest.mark.parametrize("damage", [b"", b"x", random.Random(0).randbytes(5000)])
def test_a_damaged_checkpoint_is_read_around(opened: Any, damage: bytes) -> None:
    log = opened()
    write(log, 1, 2)
    log.sync()
    log.checkpoint()
    (Path(opened.path) / "index").write_bytes(damage)
    assert read(opened(), 1, 2) == [True, True]


def test_a_segment_without_a_header_is_dropped_and_foreign_files_are_left_alone(opened: Any) -> None:
    opened()
    opened.close()
    torn, foreign = Path(opened.path) / "segment-00000000000000ff", Path(opened.path) / "notes.txt"
    torn.write_bytes(b"\0" * 100)
    foreign.write_text("mine")
    assert len(opened().index) == 0
    assert not torn.exists()
    assert foreign.read_text() == "mine"


@pytest.mark.usefixtures("open_umask")
def test_a_directory_is_for_one_process_private_and_a_stores_own(opened: Any, tmp_path: Path) -> None:
    log = opened()
    write(log, 1)
    log.checkpoint()
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in Path(opened.path).iterdir())
    assert stat.S_IMODE(Path(opened.path).stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="another process"):
        DiskLog(opened.path, max_bytes=MAX_BYTES, segment_bytes=MAX_BYTES)
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o755)
    (tmp_path / "home" / "letter").write_text("dear")
    with pytest.raises(ConfigError, match="neither empty"):
        DiskLog(str(tmp_path / "home"), max_bytes=MAX_BYTES, segment_bytes=MAX_BYTES)
    opened.close()
    (Path(opened.path) / "store").write_bytes(b"?")
    with pytest.raises(ConfigError, match="damaged"):
        DiskLog(opened.path, max_bytes=MAX_BYTES, segment_bytes=MAX_BYTES)


# Thread


def test_the_queue_is_bounded_and_a_block_deleted_on_its_way_is_not_found(path: str) -> None:
    log = DiskLog(path, max_bytes=MAX_BYTES, segment_bytes=MAX_BYTES)
    tier = DiskTier(log, queue_bytes=2 * BLOCK, sync_interval_s=60.0, checkpoint_interval_s=60.0)
    answers: queue.Queue[Any] = queue.Queue()
    gate: queue.Queue[Any] = queue.Queue()
    views = buffers(1, KIND)
    views[0][:] = content(KIND, 1)
    held = threading.Event()
    tier.sync(lambda done: held.set() or gate.get(timeout=240))  # holds the thread
    assert held.wait(240)
    assert tier.write(KIND, [name_of(1)], views, answers.put)
    assert tier.write(KIND, [name_of(2)], views, answers.put)
    assert not tier.write(KIND, [name_of(3)], views, answers.put)
    assert tier.delete(KIND, [name_of(1)], answers.put) == []
    gate.put(None)
    assert [answers.get(timeout=240) for _ in range(3)] == [[False], [True], True]
    assert not tier.holds(KIND, name_of(1))
    tier.close()
    log = DiskLog(path, max_bytes=MAX_BYTES, segment_bytes=MAX_BYTES)
    assert log.index.find(KIND, name_of(1)) is None
    assert log.index.find(KIND, name_of(2)) is not None
    log.close()


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.mkdir()
    for mode in (0o777, 0o1777, 0o702):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=rf"{path} \(mode {mode:04o}\): chmod 700") as caught:
            Directory(str(path))
        assert caught.value.field == "disk_path"
        assert not list(path.iterdir())
    path.chmod(0o755)
    Directory(str(path)).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders away")
def test_a_folder_that_another_user_made_first_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.mkdir(mode=0o777)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="another user") as caught:
        Directory(str(path))
    assert caught.value.field == "disk_path"
    assert not list(path.iterdir())
