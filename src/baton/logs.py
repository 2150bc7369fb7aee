"""How a service logs: lines of text, or a JSON object per line."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

_NOISY = ("httpx", "urllib3", "filelock", "transformers")
_NOISY_IMPORTS = ("torchao", "torch.utils._pytree")
_AUDIT = "baton.audit"
_ACCESS = "baton.access"


class LogStyle(NamedTuple):
    """How a process logs.

    Attributes:
        name: Name of the process in every line.
        form: ``text``, or ``json``: an object per line.
    """

    name: str
    form: str


def log_style() -> LogStyle | None:
    """Return how this process logs, for those that it starts; ``None``: :func:`set_up_logging` was not called."""
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    return next((each.style for each in formatters if isinstance(each, LineFormatter | JsonFormatter)), None)


def set_up_logging(level: str, name: str, *, form: str = "text") -> None:
    """Send log lines to standard error, each with the instance's name.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        name: Name of this process in every line.
        form: ``text``, or ``json``: an object per line.
    """
    handler = logging.StreamHandler(sys.stderr)
    style = LogStyle(name, form)
    handler.setFormatter(JsonFormatter(style) if form == "json" else LineFormatter(style))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Keep warnings of transformers' imports out of the log.

    Where torchao is installed, it warns about each of its libraries that is for another device, and PyTorch about
    what torchao registers.
    """
    loggers = [logging.getLogger(name) for name in _NOISY_IMPORTS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class Absence:
    """Logs one line when a peer goes away and one when it is back, however often it is tried in between.

    Args:
        log: Logger of both lines.
        back: Format of the line that says that the peer is back.
        *args: Values for ``back``.
    """

    def __init__(self, log: logging.Logger, back: str, *args: object) -> None:
        self._log = log
        self._back = back
        self._args = args
        self._lasts = False

    def record_failure(self, message: str, *args: object, level: int = logging.WARNING) -> None:
        """Log the first failure at ``level``, those that follow it as debug messages."""
        self._log.log(logging.DEBUG if self._lasts else level, message, *args)
        self._lasts = True

    def record_return(self) -> None:
        """Log that the peer is back, if it was away."""
        if self._lasts:
            self._log.warning(self._back, *self._args)
        self._lasts = False


class LineFormatter(logging.Formatter):
    """Keeps what others wrote from looking like lines of the log: one message is one line, without escape sequences.

    Lines of a traceback are indented, so none of them begins like a message.
    """

    def __init__(self, style: LogStyle) -> None:
        line = f"%(asctime)s.%(msecs)03d %(levelname)s {style.name} %(name)s: %(message)s"
        super().__init__(line, datefmt="%Y-%m-%dT%H:%M:%S")
        self.style = style

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return a message's line."""
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Return a traceback."""
        return "\n".join(f"  {_escaped(line)}" for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, service, logger and message; of requests their id, of errors the trace."""

    def __init__(self, style: LogStyle) -> None:
        super().__init__()
        self.style = style

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's line, in ASCII."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self.style.name,
            "logger": record.name,
        }
        if record.name == _ACCESS:
            fields |= record.__dict__["fields"]
        elif record.name == _AUDIT:
            fields |= json.loads(record.getMessage())
        else:
            fields["message"] = record.getMessage()
            if "request_id" in record.__dict__:  # given as extra
                fields["request_id"] = record.__dict__["request_id"]
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _escaped(text: str) -> str:
    """Write out what is not printable: control characters, line ends, those that change the order of writing."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
