"""Log lines as JSON objects."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from baton.logs import log_style, set_up_logging
from baton.rpc import audit as audit_module
from baton.rpc.audit import AuditLog, audit


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    root, stream = logging.getLogger(), io.StringIO()
    before, level = root.handlers[:], root.level
    monkeypatch.setattr(sys, "stderr", stream)
    root.handlers.clear()
    set_up_logging("info", "decode-0", form="json")
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def test_every_line_is_an_object_whatever_clients_send(written: io.StringIO) -> None:
    log = logging.getLogger("baton.test")
    log.warning("request %s failed", "x\r\n\u2028}", extra={"request_id": "r\n1"})
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("of no request")
    log.debug("too little")
    text = written.getvalue()
    assert text.isascii()
    first, second = (json.loads(line) for line in text.splitlines())
    assert {key: first[key] for key in ("level", "service", "logger", "message", "request_id")} == {
        "level": "warning",
        "service": "decode-0",
        "logger": "baton.test",
        "message": "request x\r\n\u2028} failed",
        "request_id": "r\n1",
    }
    assert first["time"].endswith("+00:00")
    assert second["exception"].endswith("ValueError: two\nlines")
    assert "request_id" not in second


def test_events_of_the_audit_log_keep_their_fields(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    # A log of its own: other tests of this process may have used up what may be written of such events.
    monkeypatch.setattr(audit_module, "_log", AuditLog(logging.getLogger("baton.audit").info))
    audit("denied", over="grpc", method="Generate", reason="a test's own", peer="192.0.2.7")
    (line,) = (json.loads(line) for line in written.getvalue().splitlines())
    assert (line["logger"], line["event"], line["peer"]) == ("baton.audit", "denied", "192.0.2.7")


def test_those_that_a_process_starts_log_as_it_does(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", written)  # pytest has put another one there since
    style = log_style()
    assert style == ("decode-0", "json")
    set_up_logging("warning", f"{style[0]} rank 1", form=style[1])
    logging.getLogger("baton.test").warning("a follower's")
    (line,) = (json.loads(line) for line in written.getvalue().splitlines())
    assert (line["service"], line["message"]) == ("decode-0 rank 1", "a follower's")
