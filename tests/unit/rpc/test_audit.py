"""The audit log: every event is told of or counted, however many come, and the file is its user's alone."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.rpc import audit as module
from baton.rpc.audit import SECONDS, AuditLog, audit, open_audit_log

EVENTS = st.tuples(st.sampled_from(["deleted", "denied"]), st.integers(0, 200), st.floats(0, 100))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def told(lines: list[str]) -> list[dict[str, Any]]:
    return [{k: v for k, v in json.loads(line).items() if k not in ("time", "service")} for line in lines]


def count(lines: list[str], event: str) -> int:
    """How many events lines stand for."""
    mine = [line for line in told(lines) if line["event"] == event]
    return sum(line.get("repeats", 0) or line.get("left_out", 0) or 1 for line in mine)


def test_what_repeats_is_counted() -> None:
    lines: list[str] = []
    clock = Clock()
    log = AuditLog(lines.append, clock)
    for _ in range(1000):
        log.record("deleted", {"peer": "a"})
    log.record("deleted", {"peer": "b"})
    assert told(lines) == [{"event": "deleted", "peer": "a"}, {"event": "deleted", "peer": "b"}]
    clock.now = SECONDS
    log.record("deleted", {"peer": "a"})
    assert told(lines[2:]) == [{"event": "deleted", "peer": "a", "repeats": 999}, {"event": "deleted", "peer": "a"}]


def test_a_flood_of_one_kind_is_bounded_and_leaves_room_for_others() -> None:
    lines: list[str] = []
    log = AuditLog(lines.append, Clock())
    for at in range(100_000):
        log.record("authentication_failed", {"peer": f"10.0.0.{at}", "method": "x" * 10_000})
    assert len(lines) <= 100
    assert max(map(len, lines)) < 1000
    log.record("deleted", {"blocks": 3})
    assert told(lines)[-1] == {"event": "deleted", "blocks": 3}
    log.flush()
    assert count(lines, "authentication_failed") == 100_000


def test_a_flood_of_one_peer_hides_no_other_peer() -> None:
    lines: list[str] = []
    log = AuditLog(lines.append, Clock())
    for at in range(1000):  # methods are the caller's to choose
        log.record("authentication_failed", {"peer": "10.0.0.1", "method": f"/x/{at}"})
    log.record("authentication_failed", {"peer": "10.0.0.2", "method": "/x/y"})
    assert told(lines)[-1] == {"event": "authentication_failed", "peer": "10.0.0.2", "method": "/x/y"}
    log.flush()
    assert count(lines, "authentication_failed") == 1001


def test_quiet_time_saves_up_no_more_than_a_burst() -> None:
    lines: list[str] = []
    clock = Clock()
    log = AuditLog(lines.append, clock)
    for peer in ("10.0.0.1", "10.0.0.2"):
        log.record("denied", {"peer": peer})
    clock.now = SECONDS - 1
    for at in range(1000):
        log.record("denied", {"peer": "10.0.0.1", "at": at})
    assert len(lines) == 2 + 20  # the rest of 60 is left to the others
    for at in range(1000):
        log.record("denied", {"peer": f"10.0.1.{at}"})
    assert len(lines) == 2 + 60


def test_memory_is_bounded_however_many_and_nobody_is_forgotten_in_it() -> None:
    lines: list[str] = []
    clock = Clock()
    log = AuditLog(lines.append, clock)
    kinds = ["authentication_failed", "denied", "admin_read", "deleted", "keys_changed", "role_changed"]
    for second in range(250):
        clock.now = second
        for kind in kinds:
            for at in range(4):
                log.record(kind, {"peer": f"{second}.{at}"})
                log.record(kind, {"peer": f"{second}.{at}"})
    assert len(log._recent) <= 1024
    assert len(log._tokens_of_peers) <= 1024
    log.flush()
    assert count(lines, "denied") <= 250 * 8  # whose repeats are told twice nobody could add up
    told_before = len(lines)
    log.flush()
    assert len(lines) == told_before


def test_what_goes_on_repeating_is_told_again_in_time() -> None:
    lines: list[str] = []
    clock = Clock()
    log = AuditLog(lines.append, clock)
    log.record("denied", {"peer": "a"})
    log.record("denied", {"peer": "a"})
    timer = log._timer
    assert timer is not None
    timer.cancel()
    log._on_time()  # a moment too early for it
    assert log._timer not in (None, timer)
    log._timer.cancel()
    clock.now = SECONDS
    log._on_time()
    assert told(lines)[1:] == [{"event": "denied", "peer": "a", "repeats": 1}]
    assert log._timer is None


@given(events=st.lists(EVENTS, max_size=400))
def test_no_event_is_lost(events: list[tuple[str, int, float]]) -> None:
    lines: list[str] = []
    clock = Clock()
    log = AuditLog(lines.append, clock)
    for event, peer, pause in events:
        clock.now += pause
        log.record(event, {"peer": str(peer)})
    log.flush()
    for event in ("deleted", "denied"):
        assert count(lines, event) == sum(each == event for each, _, _ in events)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put back what :func:`open_audit_log` changes."""
    lines = logging.getLogger("baton.audit")
    monkeypatch.setattr(module, "_log", AuditLog(lines.info))
    handlers, propagate = lines.handlers[:], lines.propagate
    yield
    for handler in lines.handlers:
        handler.close()
    lines.handlers[:], lines.propagate = handlers, propagate


@pytest.mark.usefixtures("open_umask")
def test_the_file_is_its_users_alone_and_made_anew_after_it_was_moved(fresh: None, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text("")
    path.chmod(0o644)
    open_audit_log(str(path), 'router "1" %s')
    audit("deleted", blocks=1)
    path.rename(tmp_path / "old")
    audit("deleted", blocks=2)
    for name, blocks in (("old", 1), ("audit.jsonl", 2)):
        file = tmp_path / name
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
        (line,) = map(json.loads, file.read_text().splitlines())
        assert line["time"].endswith("+00:00")
        assert (line["service"], line["event"], line["blocks"]) == ('router "1" %s', "deleted", blocks)


def test_a_file_that_cannot_be_written_is_named(fresh: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="audit log") as caught:
        open_audit_log(str(tmp_path / "none" / "log"), "x")
    assert caught.value.field == "audit_log"


def put_symlink(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def put_dangling_symlink(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("made"))


def put_fifo(path: Path, victim: Path) -> None:
    os.mkfifo(path)


READERS: list[int] = []


def put_fifo_that_is_read(path: Path, victim: Path) -> None:
    os.mkfifo(path)
    READERS.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))


def put_hard_link(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def put_file_of_another(path: Path, victim: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("gives files away")
    path.write_text("")
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    "put",
    [put_symlink, put_dangling_symlink, put_fifo, put_fifo_that_is_read, put_hard_link, put_file_of_another],
    ids=lambda put: put.__name__,
)
def test_what_others_put_in_the_files_place_is_neither_written_nor_waited_for(
    fresh: None, tmp_path: Path, put: Callable[[Path, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path, victim = tmp_path / "audit.jsonl", tmp_path / "authorized_keys"
    victim.write_text("kept")
    victim.chmod(0o640)
    put(path, victim)
    with pytest.raises(ConfigError, match="audit log") as caught:
        open_audit_log(str(path), "x")
    assert caught.value.field == "audit_log"
    path.unlink()
    open_audit_log(str(path), "x")
    path.rename(tmp_path / "old")
    put(path, victim)
    audit("deleted", blocks=1)  # told in the standard log; who asked for it is not disturbed
    assert '"blocks": 1' in caplog.text
    assert (victim.read_text(), stat.S_IMODE(victim.stat().st_mode)) == ("kept", 0o640)
    assert not victim.with_name("made").exists()
    path.unlink()
    while READERS:
        os.close(READERS.pop())
    audit("deleted", blocks=2)
    assert '"blocks": 2' in path.read_text()


def test_without_a_file_events_are_lines_of_the_standard_log(fresh: None, caplog: pytest.LogCaptureFixture) -> None:
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # as by --log-level error
    try:
        open_audit_log("", "x")
        audit("denied", account="a\nb")
    finally:
        root.setLevel(level)
    (record,) = caplog.records
    assert json.loads(record.getMessage())["account"] == "a\nb"
    assert "\n" not in record.getMessage()
