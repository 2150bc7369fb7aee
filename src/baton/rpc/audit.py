"""The audit log: rejected callers, reads of all tenants' data, deletions, and changes of keys, certificates and roles.

One JSON line per event, in a file (``--audit-log``) or in the standard log. Lines contain names, addresses, methods and
counts; never keys, tokens, prompts or KV. Their volume is bounded: events that repeat within minutes are counted
instead, and each kind of event has a rate of its own, so that a flood of one kind leaves room for the others.
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote

from baton.errors import ConfigError

log = logging.getLogger(__name__)
_lines = logging.getLogger("baton.audit")
_lines.setLevel(logging.INFO)  # whatever --log-level is

Event: TypeAlias = Literal[
    "authentication_failed", "denied", "admin_read", "deleted", "keys_changed", "certificates_changed", "role_changed"
]
SECONDS = 300.0
"""Seconds within which a repeated event is counted instead of written."""
_PER_SECOND = 1.0
_BURST = 60.0
_PER_SECOND_OF_PEER = 0.1
_BURST_OF_PEER = 20.0
_MAX_PEERS = 1024
_MAX_RECENT = 1024
_MAX_CHARS = 200
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class AuditLog:
    """Decides which events become lines. Thread-safe.

    Args:
        write: Writes a line.
        clock: Monotonic clock, in seconds.

    Attributes:
        service: Name of this process in every line.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.service = ""
        self._write = write
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: OrderedDict[tuple[Any, ...], tuple[float, dict[str, Any]]] = OrderedDict()
        self._repeats: Counter[tuple[Any, ...]] = Counter()
        self._left_out: Counter[str] = Counter()
        self._tokens: dict[str, tuple[float, float]] = {}
        self._tokens_of_peers: dict[tuple[str, str], tuple[float, float]] = {}
        self._timer: threading.Timer | None = None

    def record(self, event: str, fields: dict[str, Any]) -> None:
        """Write an event, or count it."""
        fields = {name: value[:_MAX_CHARS] if isinstance(value, str) else value for name, value in fields.items()}
        key = (event, *sorted(fields.items()))
        with self._lock:
            now = self._clock()
            self._write_repeats(now - SECONDS)
            if key in self._recent:
                self._repeats[key] += 1
                self._start_timer()
            elif self._has_room(event, str(fields.get("peer", "")), now):
                self._write_line({"event": event, **fields})
                self._recent[key] = now, fields
                if len(self._recent) > _MAX_RECENT:
                    self._forget(next(iter(self._recent)))
            else:
                self._left_out[event] += 1
                self._start_timer()

    def flush(self) -> None:
        """Write the counts up to now."""
        with self._lock:
            self._write_repeats(self._clock())
            self._write_left_out()

    def _write_repeats(self, before: float) -> None:
        while self._recent and next(iter(self._recent.values()))[0] <= before:
            self._forget(next(iter(self._recent)))

    def _forget(self, key: tuple[Any, ...]) -> None:
        _, fields = self._recent.pop(key)
        if repeats := self._repeats.pop(key, 0):
            self._write_line({"event": key[0], **fields, "repeats": repeats})

    def _has_room(self, event: str, peer: str, now: float) -> bool:
        """Whether the rates of the event's kind and of its peer allow another line."""
        tokens, at = self._tokens.get(event, (_BURST, now))
        tokens = min(_BURST, tokens + _PER_SECOND * (now - at))
        room = tokens >= 1.0
        of_peer = _BURST_OF_PEER
        if peer:
            of_peer, at = self._tokens_of_peers.pop((event, peer), (of_peer, now))
            of_peer = min(_BURST_OF_PEER, of_peer + _PER_SECOND_OF_PEER * (now - at))
            room = room and of_peer >= 1.0
            self._tokens_of_peers[event, peer] = of_peer - room, now
            if len(self._tokens_of_peers) > _MAX_PEERS:
                del self._tokens_of_peers[next(iter(self._tokens_of_peers))]
        self._tokens[event] = tokens - room, now
        return room

    def _write_left_out(self) -> None:
        for event, count in self._left_out.items():
            self._write_line({"event": event, "left_out": count})
        self._left_out.clear()

    def _write_line(self, fields: dict[str, Any]) -> None:
        head = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "service": self.service}
        self._write(json.dumps(head | fields))

    def _start_timer(self) -> None:
        """Have counts written in time even if no other event follows."""
        if self._timer is None:
            self._timer = threading.Timer(SECONDS, self._on_time)
            self._timer.daemon = True
            self._timer.start()

    def _on_time(self) -> None:
        with self._lock:
            self._timer = None
            self._write_repeats(self._clock() - SECONDS)
            self._write_left_out()
            if self._repeats:
                self._start_timer()


class _AuditFile(WatchedFileHandler):
    """Appends to a file that only its user can read; creates it again after it was moved away (logrotate).

    Other users that can write to the folder could have replaced the file. A link would have this process write into
    another file of its user's, a pipe would block it, and a file of theirs would be readable by them: all are refused.
    """

    def _open(self) -> TextIOWrapper:
        fd = os.open(self.baseFilename, _FLAGS, 0o600)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            if status.st_uid != os.geteuid() or status.st_nlink > 1:
                raise OSError(errno.EPERM, "it belongs to another user, or has another name too")
            os.fchmod(fd, 0o600)
            return open(fd, "a", encoding="utf-8")
        except OSError:
            os.close(fd)
            raise

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; failures are logged and never raised to the caller that recorded the event."""
        try:
            super().emit(record)
        except OSError:  # the file could not be opened again
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Write the line to the standard log instead."""
        log.error("the audit log %s cannot be written: %s", self.baseFilename, record.getMessage())


_log = AuditLog(_lines.info)
atexit.register(_log.flush)


def open_audit_log(path: str, service: str) -> None:
    """Direct this process's events to a file.

    Args:
        path: File, which several processes of one host may share; empty: the standard log.
        service: Name of this process in every line.

    Raises:
        ConfigError: The file cannot be written.
    """
    _log.service = service
    if not path:
        return
    try:
        handler = _AuditFile(path)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ConfigError(f"cannot write the audit log {path}: {why}", field="audit_log") from error
    handler.setFormatter(logging.Formatter())
    _lines.handlers[:] = [handler]
    _lines.propagate = False


def audit(event: Event, **fields: str | int) -> None:
    """Record an event.

    Args:
        event: Kind of event.
        fields: Details such as ``account``, ``peer`` or ``method``; never keys, tokens or user content.
    """
    _log.record(event, fields)


def peer_of(context: Any) -> str:
    """Return the address of a gRPC call's client, without the port, which differs for each connection.

    A handler must call this before it waits for anything: when the client has gone, gRPC reads from a null pointer.
    """
    return unquote(str(context.peer()).rpartition(":")[0])
