"""The process of a service: its flags, how it logs, is asked to stop, shows its metrics and ends."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, NoReturn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, make_wsgi_app

from baton.config import add_flags, from_flags
from baton.config.cluster_file import ROLES, ClusterFile
from baton.config.flags import Placed
from baton.config.secrets import flags_with_passwords
from baton.errors import BatonError, ConfigError
from baton.logs import set_up_logging
from baton.rpc.audit import open_audit_log
from baton.rpc.auth import HostRule
from baton.version import __version__
from baton.worker.parent import end_with_parent

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

_INSTEAD = "give it as @FILE, or by its BATON_... variable"
_MOST_DESCRIPTORS = 1 << 20
_FEW_DESCRIPTORS = 4096
_MAX_SCRAPES = 16
_SCRAPE_S = 5.0
_THREAD_START_S = 5.0


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
        configs: Dataclasses that its flags are made of; the first one has ``log_level`` and ``log_format``.
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
    add_config_flags(parser, name)
    for config in configs:
        add_flags(parser, config)
    args = parser.parse_args(argv)
    try:
        file = file_values(args, name, configs)
        given: list[Any] = [from_flags(config, args, file=file) for config in configs]
        shown = getattr(given[0], "instance_id", "") or name
        set_up_logging(given[0].log_level, shown, form=given[0].log_format)
        open_audit_log(given[0].audit_log, shown)
        for flag in flags_with_passwords(sys.argv[1:] if argv is None else argv):
            log.warning("everybody on this host can read the password in %s (ps): %s", flag, _INSTEAD)
        if argv is None:  # this process is the service: its limits may change, those of a caller's process may not
            if not given[0].core_dumps:
                forbid_core_dumps()
            raise_descriptor_limit()
            watch_thread_starts()
            end_with_parent()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            code = runner.run(serve(*given))
    except BatonError as error:
        unusable = isinstance(error, ConfigError)
        print(f"{command}: {'error' if unusable else 'failed'}: {error.message}", file=sys.stderr)  # noqa: T201
        code = 2 if unusable else 1
    if argv is None:
        leave(code)
    return code


def add_config_flags(parser: argparse.ArgumentParser, service: str) -> None:
    """Add the flags that name a configuration file, and for an instance its pool there."""
    text = "file of a deployment (YAML), as baton up -f reads it; the environment and flags go before it"
    parser.add_argument("--config", default="", metavar="FILE", help=text)
    if service in ROLES:
        parser.add_argument("--pool", default=service, help="the file's pool to which this instance belongs")


def file_values(args: argparse.Namespace, service: str, configs: Sequence[type]) -> dict[str, Placed]:
    """Return what the file says that ``--config`` names, by field.

    Raises:
        ConfigError: It cannot be read, or something in it is wrong, or the pool is another role's.
    """
    if not args.config:
        return {}
    file = ClusterFile(args.config, {"worker" if service in ROLES else service: configs})
    if service not in ROLES:
        return file.values(service)
    if file.pool(args.pool).role != service:
        raise ConfigError(f"{args.config}: {args.pool} is no pool of {service} instances", field="pool")
    return file.values(args.pool)


def forbid_core_dumps() -> None:
    """Have a crash of this process, and of those that it starts, leave nothing of its memory on disk.

    Programs that the kernel hands dumps to (``core_pattern`` with a pipe) are not bound by the limit, so what they get
    has no memory in it. The process stays one that others of its user may look into (``PR_SET_DUMPABLE``): NIXL's
    copies within a host do, and whoever runs a profiler.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        Path("/proc/self/coredump_filter").write_text("0", encoding="ascii")
    except OSError as error:
        log.debug("core dumps that go to a program have memory in them: %s", error)


def raise_descriptor_limit() -> int:
    """Let this process open as many files and connections as the hard limit allows, and say so in the log.

    Returns:
        How many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    now = soft
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            now = wanted
        except (OSError, ValueError) as error:
            log.warning("the limit of open files stays at %d: %s", soft, error)
        else:
            log.info("open files and connections: at most %d (the limit was %d)", now, soft)
    if 0 <= now < _FEW_DESCRIPTORS:
        log.warning("at most %d files and connections may be open: raise the hard limit (ulimit -Hn)", now)
    return now


def watch_thread_starts(interval_s: float = _THREAD_START_S) -> None:
    """End this process, with status 1, when one of its threads does not come to life.

    ``Thread.start`` waits for ever where the new thread finds no memory for its first frame (seen with CPython 3.11).
    Then a server accepts nothing any more, say, while health checks are answered; a process started anew serves.

    Args:
        interval_s: A start that takes longer has failed; twice that passes at most.
    """

    def watch() -> None:
        starting: set[threading.Thread] = set()
        while True:
            time.sleep(interval_s)
            with suppress(MemoryError):  # another look will have some
                before, starting = starting, {thread for thread in threading.enumerate() if thread.ident is None}
                if lost := before & starting:
                    try:
                        names = ", ".join(sorted(thread.name for thread in lost))
                        log.critical("no memory to start %s, and what waits for that hangs: this process ends", names)
                    finally:
                        os._exit(1)

    threading.Thread(target=watch, name="baton-thread-starts", daemon=True).start()


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


class ServiceMetrics(CollectorRegistry):
    """What every service tells of itself: ``process_*``, ``baton_build_info``, what became of its spans.

    Each has its own, so that several services can live in one process.

    Args:
        service: Which.

    Attributes:
        spans: Spans of traced requests, by outcome.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        ProcessCollector(registry=self)
        build = Gauge("baton_build_info", "Version of this service; 1", ["service", "version"], registry=self)
        build.labels(service, __version__).set(1)
        self.spans = Counter("baton_trace_spans", "Spans of traced requests, by outcome", ["outcome"], registry=self)


def serve_metrics(
    host: str, port: int, registry: CollectorRegistry, *, allowed_hosts: Sequence[str] = ()
) -> Callable[[], None]:
    """Serve ``/metrics`` in a thread; returns what ends that, which blocks for up to half a second.

    A connection has a few seconds for its request. Of more than some at once the oldest are closed, so that those that
    say nothing keep neither threads nor scrapes. Foreign ``Host`` headers get 403, where :class:`HostRule` says so.

    Raises:
        ConfigError: The port cannot be had.
    """
    app, rule = make_wsgi_app(registry), HostRule.of_server(host, allowed_hosts, keyed=False)
    if rule is not None:
        app = _only_own_hosts(app, rule)
    kind: type[WSGIServer] = (
        type("Server", (_MetricsServer,), {"address_family": socket.AF_INET6}) if ":" in host else _MetricsServer
    )
    try:
        server: WSGIServer = make_server(host.strip("[]"), port, app, kind, _MetricsHandler)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror}", field="metrics_port") from error
    thread = threading.Thread(target=server.serve_forever, name="baton-metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5.0)

    return close


def _only_own_hosts(app: WSGIApplication, rule: HostRule) -> WSGIApplication:
    def checked(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        named = environ.get("HTTP_HOST")
        if named is None or rule.admits(named):
            return app(environ, start_response)
        start_response("403 Forbidden", [("content-type", "text/plain")])
        return [b"these metrics are not for this host\n"]

    return checked


class _MetricsHandler(WSGIRequestHandler):
    timeout = _SCRAPE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing about scrapes."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """A thread per connection, for a bounded number of them."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *args: Any) -> None:
        self._lock = threading.Lock()
        self._open: dict[Any, None] = {}
        super().__init__(*args)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection."""
        try:
            return super().get_request()
        except OSError:  # out of descriptors, as a rule: not in a hurry then
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; the oldest gives way if there are too many."""
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > _MAX_SCRAPES else None
            self._open.pop(oldest, None)
        if oldest is not None:
            with suppress(OSError):  # its thread wakes, and closes it
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say little of a connection that broke off."""
        log.debug("a scrape from %s failed", client_address, exc_info=True)


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
