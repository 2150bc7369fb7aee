"""The process of a service: flags, logging, request to stop, metrics, export of spans, and end."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import gc
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
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.allocator import MemoryTrimmer
from baton.background import FAILURES, BackgroundThread, report_uncaught
from baton.child_process import end_with_parent
from baton.config import add_flags, from_flags
from baton.config.cluster_file import ROLES, ClusterFile
from baton.config.environment import traces_endpoint
from baton.config.flags import Placed, ServiceConfig
from baton.config.secrets import flags_with_passwords
from baton.errors import BatonError, ConfigError
from baton.interrupts import end_at_interrupt
from baton.logs import set_up_logging
from baton.rpc.audit import open_audit_log
from baton.rpc.auth import HostRule
from baton.version import __version__

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from baton.otlp import OtlpExporter

log = logging.getLogger(__name__)

_PASSWORD_HINT = "give it as @FILE, or by its BATON_... variable"
_MOST_DESCRIPTORS = 1 << 20
_FEW_DESCRIPTORS = 4096
_LEAST_DESCRIPTORS = 64
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
        name: Name of the service; its command is ``baton-<name>``.
        description: Description for ``--help``.
        configs: Dataclasses that define the flags; the first one is a :class:`ServiceConfig`.
        serve: Gets an instance of each dataclass and serves until the process is asked to stop; returns the exit
            status.
        argv: Command line; ``None``: the process's own.
        loop_factory: Creates the event loop; ``None``: asyncio's default.

    Returns:
        The exit status: that of ``serve``, 2 for an invalid configuration, 1 for any other failure. With the process's
        own command line it does not return: the process ends with that status.
    """
    if argv is None:  # until there is a StopRequest
        end_at_interrupt()
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
        service: ServiceConfig = given[0]
        log_name = getattr(service, "instance_id", "") or name
        set_up_logging(service.log_level, log_name, form=service.log_format)
        open_audit_log(service.audit_log, log_name)
        for flag in flags_with_passwords(sys.argv[1:] if argv is None else argv):
            log.warning("all users of this host can read the password in %s (ps): %s", flag, _PASSWORD_HINT)
        if argv is None:  # this process is the service's own: its limits may be changed
            if not service.core_dumps:
                forbid_core_dumps()
            raise_descriptor_limit()
            watch_thread_starts()
            report_uncaught()
            end_with_parent()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            code = runner.run(serve(*given))
    except BatonError as error:
        invalid = isinstance(error, ConfigError)
        print(f"{command}: {'error' if invalid else 'failed'}: {error.message}", file=sys.stderr)  # noqa: T201
        code = 2 if invalid else 1
    if argv is None:
        end_process(code)
    return code


def add_config_flags(parser: argparse.ArgumentParser, service: str) -> None:
    """Add the flags that name a configuration file, and for an instance its pool there."""
    text = "file of a deployment (YAML), as baton up -f reads it; the environment and flags go before it"
    parser.add_argument("--config", default="", metavar="FILE", help=text)
    if service in ROLES:
        parser.add_argument("--pool", default=service, help="the file's pool to which this instance belongs")


def file_values(args: argparse.Namespace, service: str, configs: Sequence[type]) -> dict[str, Placed]:
    """Return a service's values in the file that ``--config`` names, by field.

    Raises:
        ConfigError: The file cannot be read or is invalid, or the pool is another role's.
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
    """Prevent a crash of this process, and of its children, from writing its memory to disk.

    Programs that get dumps through a pipe (``core_pattern``) ignore the limit, so those dumps are made without memory.
    Other processes of the same user may still read this one (``PR_SET_DUMPABLE`` is kept): NIXL's copies within a host
    and profilers do.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        Path("/proc/self/coredump_filter").write_text("0", encoding="ascii")
    except OSError as error:
        log.debug("core dumps that go to a program have memory in them: %s", error)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files and connections to the hard limit, and log it.

    Returns:
        The limit now.

    Raises:
        ConfigError: It is too low for any service.
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
    if 0 <= now < _LEAST_DESCRIPTORS:
        why = f"at most {now} files and connections may be open, and {_LEAST_DESCRIPTORS} are the least"
        raise ConfigError(f"{why}: raise the hard limit (ulimit -Hn)", field="ulimit")
    if 0 <= now < _FEW_DESCRIPTORS:
        log.warning("at most %d files and connections may be open: raise the hard limit (ulimit -Hn)", now)
    return now


def watch_thread_starts(interval_s: float = _THREAD_START_S) -> None:
    """End this process, with status 1, when one of its threads fails to start.

    ``Thread.start`` waits without limit if the new thread finds no memory for its first frame (seen with CPython 3.11).
    Then, for example, a server accepts no connection although health checks are answered; a new process does serve.

    Args:
        interval_s: Seconds after which a start has failed; it is noticed within twice that time.
    """

    def watch() -> None:
        starting: set[threading.Thread] = set()
        while True:
            time.sleep(interval_s)
            with suppress(MemoryError):  # the next round will have memory
                before = starting
                starting = {thread for thread in threading.enumerate() if thread.ident is None}
                if lost := before & starting:
                    try:
                        names = ", ".join(sorted(thread.name for thread in lost))
                        log.critical("no memory to start %s, and what waits for that hangs: this process ends", names)
                    finally:
                        os._exit(1)

    BackgroundThread("baton-thread-starts", watch).start()


class StopRequest:
    """Waits for SIGTERM or SIGINT; a second signal ends the process at once. Create it in the running event loop.

    Attributes:
        exit_code: Exit status that the process should end with.
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
        """Request a stop with exit status 1."""
        self.exit_code = 1
        self._event.set()

    async def wait(self) -> None:
        """Wait for a signal or :meth:`fail`; until then the process's memory is tidied, see :class:`MemoryTrimmer`."""
        gc.collect()
        gc.freeze()  # the service is up, and what is here now stays: no collection needs to look at it again
        trimmer = MemoryTrimmer()
        trimmer.start()
        try:
            await self._event.wait()
        finally:
            await trimmer.close()


class ServiceMetrics(CollectorRegistry):
    """Registry with the metrics of every service: those of the process, build, spans, and background failures.

    Each service has its own registry, so that several can run in one process.

    Args:
        service: Kind of service, for ``baton_build_info``.

    Attributes:
        spans: Counter of the spans of traced requests, by outcome.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        ProcessCollector(registry=self)
        build = Gauge("baton_build_info", "Version of this service; 1", ["service", "version"], registry=self)
        build.labels(service, __version__).set(1)
        self.spans = Counter("baton_trace_spans", "Spans of traced requests, by outcome", ["outcome"], registry=self)
        self.register(_BackgroundFailures())


class _BackgroundFailures(Collector):
    """Failures of this process's long-lived threads and tasks."""

    def collect(self) -> Iterable[Metric]:
        """Yield the counts by name and outcome."""
        failures = CounterMetricFamily(
            "baton_background_failures",
            "Failures of long-lived threads and tasks, by name and outcome: restarted or ended",
            labels=["name", "outcome"],
        )
        for (name, outcome), count in FAILURES.snapshot().items():
            failures.add_metric([name, outcome], count)
        yield failures


def serve_metrics(
    host: str, port: int, registry: CollectorRegistry, *, allowed_hosts: Sequence[str] = ()
) -> Callable[[], None]:
    """Serve ``/metrics`` in a thread.

    A connection has ``_SCRAPE_S`` seconds for its request. Of more than ``_MAX_SCRAPES`` connections the oldest are
    closed, so that silent clients block neither threads nor scrapes. Foreign ``Host`` headers get 403, by
    :class:`HostRule`.

    Returns:
        A function that ends the server; it blocks for up to half a second.

    Raises:
        ConfigError: The address cannot be bound.
    """
    app = make_wsgi_app(registry)
    rule = HostRule.of_server(host, allowed_hosts, keyed=False)
    if rule is not None:
        app = _only_own_hosts(app, rule)
    kind: type[WSGIServer] = (
        type("Server", (_MetricsServer,), {"address_family": socket.AF_INET6}) if ":" in host else _MetricsServer
    )
    try:
        server: WSGIServer = make_server(host.strip("[]"), port, app, kind, _MetricsHandler)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror}", field="metrics_port") from error
    closing = threading.Event()
    thread = BackgroundThread("baton-metrics", server.serve_forever, is_closing=closing.is_set)
    thread.start()

    def close() -> None:
        closing.set()
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
        """Override: scrapes are not logged."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """A server with a thread per connection, for a bounded number of connections."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *args: Any) -> None:
        self._lock = threading.Lock()
        self._open: dict[Any, None] = {}
        super().__init__(*args)

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:  # usually out of descriptors: do not retry at once
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; if there are too many, the oldest is closed."""
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > _MAX_SCRAPES else None
            self._open.pop(oldest, None)
        if oldest is not None:
            with suppress(OSError):  # its thread wakes, and closes it
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Override: broken connections are logged at debug level."""
        log.debug("a scrape from %s failed", client_address, exc_info=True)


def open_span_exporter(
    endpoint: str, service: str, instance: str, metrics: ServiceMetrics, sample_rate: float | None = None
) -> OtlpExporter | None:
    """Return an exporter of spans, to be closed at the end; ``None``: tracing is off.

    Args:
        endpoint: Value of ``--otlp-traces-endpoint``; empty: the endpoint in OpenTelemetry's variables, if any.
        service: Kind of service: ``router``, ``prefill``, ``decode`` or ``kvstore``.
        instance: Name of the process.
        metrics: Metrics in which exported and dropped spans are counted.
        sample_rate: Share of the traces started here that are sampled, 0 to 1; ``None``: by OpenTelemetry's variables.

    Raises:
        ConfigError: The ``otel`` extra is not installed although the flag is given, or the endpoint is malformed.
    """
    collector = endpoint or traces_endpoint()
    if not collector:
        return None
    try:
        from baton.otlp import OtlpExporter
    except ImportError as error:
        message = f"traces need an extra: pip install 'baton-serve[otel]' ({error})"
        if endpoint:
            raise ConfigError(message, field="otlp_traces_endpoint") from error
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but %s", message)
        return None

    def count_spans(outcome: str, spans: int) -> None:
        metrics.spans.labels(outcome).inc(spans)

    try:
        return OtlpExporter(
            collector, service=f"baton-{service}", instance=instance, sample_rate=sample_rate, count=count_spans
        )
    except ValueError as error:
        raise ConfigError(f"no traces can go to {collector!r}: {error}", field="otlp_traces_endpoint") from error


def end_process(code: int) -> NoReturn:
    """End this process without finalizing the interpreter.

    Exit handlers run and output is flushed; the kernel frees the rest. Python would free torch and transformers module
    by module, which takes 1.5 s of a processor whenever an instance ends; after use of TLS, gRPC would wait for 2 s.

    Args:
        code: Exit status.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
