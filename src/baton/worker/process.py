"""The process of a service: its flags, how it logs, is asked to stop, shows its metrics and ends."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry, start_http_server

from baton.config import add_flags, from_flags
from baton.errors import BatonError, ConfigError
from baton.version import __version__

log = logging.getLogger(__name__)


def run_service(
    name: str,
    description: str,
    configs: Sequence[type],
    serve: Callable[..., Coroutine[Any, Any, int]],
    argv: Sequence[str] | None,
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Run the process of a service from its flags to its end.

    Args:
        name: Of the service; its command is ``baton-<name>``.
        description: For ``--help``.
        configs: Dataclasses that its flags are made of; the first one has ``log_level``.
        serve: Gets one of each and serves until it is told to end; returns the exit status.
        argv: Command line; ``None``: the process's.
        loop_factory: Makes the event loop.

    Returns:
        The exit status: what ``serve`` returned, 2 for a configuration that cannot work, 1 for any other failure. With
        the process's own command line it does not return: the process ends with that status.
    """
    command = f"baton-{name}"
    parser = argparse.ArgumentParser(prog=command, description=description)
    parser.add_argument("--version", action="version", version=__version__)
    for config in configs:
        add_flags(parser, config)
    args = parser.parse_args(argv)
    try:
        given: list[Any] = [from_flags(config, args) for config in configs]
        set_up_logging(given[0].log_level, getattr(given[0], "instance_id", "") or name)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            code = runner.run(serve(*given))
    except BatonError as error:
        unusable = isinstance(error, ConfigError)
        print(f"{command}: {'error' if unusable else 'failed'}: {error.message}", file=sys.stderr)  # noqa: T201
        code = 2 if unusable else 1
    if argv is None:
        leave(code)
    return code


def set_up_logging(level: str, name: str) -> None:
    """Send log lines to standard error, each with the instance's name.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        name: What to call this process in every line.
    """
    handler = logging.StreamHandler(sys.stderr)
    form = f"%(asctime)s.%(msecs)03d %(levelname)s {name} %(name)s: %(message)s"
    handler.setFormatter(LineFormatter(form, datefmt="%Y-%m-%dT%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "urllib3", "filelock", "transformers"):
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


def _escaped(text: str) -> str:
    """Write out what is not printable: control characters, line ends, those that change the order of writing."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class StopRequest:
    """SIGTERM and SIGINT ask for a drain; the second one ends the process at once. Made in the running event loop.

    Attributes:
        exit_code: What the process should end with.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.exit_code = 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._event.is_set():
            log.warning("second signal: ending at once")
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._event.set()

    def fail(self) -> None:
        """Ask for an end with an error."""
        self.exit_code = 1
        self._event.set()

    async def wait(self) -> None:
        """Wait for the request."""
        await self._event.wait()


def serve_metrics(host: str, port: int, registry: CollectorRegistry) -> Callable[[], None]:
    """Serve ``/metrics`` in a thread; returns what ends that, which blocks for up to half a second.

    Raises:
        ConfigError: The port cannot be had.
    """
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror}", field="metrics_port") from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5.0)

    return close


def leave(code: int) -> NoReturn:
    """End this process without taking the interpreter apart.

    What was registered for the end runs and what was printed is written. Then the kernel takes everything back. Python
    would free torch and transformers module by module, 1.5 s of a processor whenever an instance ends; and once gRPC
    has used TLS it would wait for 2 s.

    Args:
        code: The exit status.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
