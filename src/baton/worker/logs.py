"""How a service logs: lines of text, or a JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

_NOISY = ("httpx", "urllib3", "filelock", "transformers")
_OWN_FIELDS = ("request_id", "trace_id")
"""What a call of the log may give as ``extra``: what a JSON line has as fields of its own."""
AUDIT = "baton.audit"
ACCESS = "baton.access"


def set_up_logging(level: str, name: str, *, form: str = "text") -> None:
    """Send log lines to standard error, each with the instance's name.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        name: What to call this process in every line.
        form: ``text``, or ``json``: an object per line.
    """
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s.%(msecs)03d %(levelname)s {name} %(name)s: %(message)s"
    text = LineFormatter(line, datefmt="%Y-%m-%dT%H:%M:%S")
    handler.setFormatter(JsonFormatter(name) if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)


class LineFormatter(logging.Formatter):
    """Keeps what others wrote from looking like lines of the log: one message is one line, without escape sequences.

    Lines of a traceback are indented, so none of them begins like a message.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return a message's line."""
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Return a traceback."""
        return "\n".join(f"  {_escaped(line)}" for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, service, logger and message; of requests their id, of errors the trace.

    Args:
        service: What every line calls this process.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's line, in ASCII."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
        }
        if record.name in (AUDIT, ACCESS):  # lines of these are JSON already, or become it here
            fields |= record.__dict__.get("fields") or json.loads(record.getMessage())
        else:
            fields["message"] = record.getMessage()
            fields |= {name: record.__dict__[name] for name in _OWN_FIELDS if name in record.__dict__}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _escaped(text: str) -> str:
    """Write out what is not printable: control characters, line ends, those that change the order of writing."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
