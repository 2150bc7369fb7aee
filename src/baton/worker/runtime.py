"""A prefill or decode process from its flags to its end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import start_http_server

from baton.api.v1 import worker_pb2_grpc
from baton.config import EngineConfig, add_flags, from_flags
from baton.config.worker import WorkerConfig
from baton.engine.batch import Runner
from baton.engine.build import load_runner, make_arena
from baton.engine.core import EngineCore
from baton.errors import BatonError, ConfigError
from baton.kv.arena import KVArena
from baton.kv.connector import KVConnector
from baton.kv.events import KVEvent
from baton.rpc.auth import read_token, require_safe_bind
from baton.rpc.server import GrpcServer
from baton.transport.blocks import BlockServer
from baton.types import InstanceId, Role
from baton.version import __version__
from baton.worker.admission import Admission
from baton.worker.engine_thread import EngineThread
from baton.worker.events import KvEventLog
from baton.worker.logs import set_up_logging
from baton.worker.metrics import WorkerMetrics
from baton.worker.registration import Identity, Registration
from baton.worker.servicer import WorkerContext, WorkerServicerBase

log = logging.getLogger(__name__)
SERVICE = "baton.api.v1.WorkerService"


@dataclass(frozen=True)
class Parts:
    """What exists before the role's own parts are built."""

    config: WorkerConfig
    engine_config: EngineConfig
    runner: Runner
    arena: KVArena
    token: str | None
    loop: asyncio.AbstractEventLoop
    wake: Callable[[], None]


class RoleParts(Protocol):
    """What a role adds."""

    connector: KVConnector

    def servicer(self, context: WorkerContext) -> WorkerServicerBase:
        """Build the role's calls."""

    async def close(self) -> None:
        """Release what the role opened; the engine has stopped by then."""


def main(role: Role, build: Callable[[Parts], RoleParts], argv: Sequence[str] | None = None) -> int:
    """Run an instance until it is told to end.

    Args:
        role: Prefill or decode.
        build: Makes the role's own parts.
        argv: Command line; default: the process's.

    Returns:
        The exit status: 0 after a clean end, 2 for a configuration that cannot work, 1 for any other failure.
    """
    name = f"baton-{role}"
    parser = argparse.ArgumentParser(prog=name, description=f"Run a {role} instance.")
    parser.add_argument("--version", action="version", version=__version__)
    add_flags(parser, WorkerConfig)
    add_flags(parser, EngineConfig)
    args = parser.parse_args(argv)
    try:
        config, engine_config = from_flags(WorkerConfig, args), from_flags(EngineConfig, args)
        set_up_logging(config.log_level, config.instance_id or role)
        return asyncio.run(_run(role, config, engine_config, build))
    except ConfigError as error:
        print(f"{name}: error: {error.message}", file=sys.stderr)  # noqa: T201
        return 2
    except BatonError as error:
        print(f"{name}: failed: {error.message}", file=sys.stderr)  # noqa: T201
        return 1


async def _run(
    role: Role, config: WorkerConfig, engine_config: EngineConfig, build: Callable[[Parts], RoleParts]
) -> int:
    token = read_token(config.token_file)
    require_safe_bind(config.host, token)
    _require_free_port(config)
    stop = _StopRequest()
    runner = load_runner(engine_config)
    arena = make_arena(engine_config, runner)
    wake = _Wake()
    loop = asyncio.get_running_loop()
    role_parts = build(Parts(config, engine_config, runner, arena, token, loop, wake))
    instance_id = config.instance_id or f"{role}-{socket.gethostname()}-{config.port or arena.epoch.hex()[:8]}"
    events = KvEventLog(arena.epoch)

    def on_events(items: list[KVEvent]) -> None:
        loop.call_soon_threadsafe(events.append, items)

    core = EngineCore(engine_config, runner, arena, connector=role_parts.connector, on_events=on_events)
    engine = EngineThread(core, loop, on_failure=stop.fail)
    wake.target = engine.wake
    block_server = BlockServer(
        arena, runner.fingerprint, InstanceId(instance_id), kinds=config.pipes, host=config.host, token=token
    )
    context = WorkerContext(
        role=role,
        instance_id=InstanceId(instance_id),
        config=config,
        engine_config=engine_config,
        runner=runner,
        engine=engine,
        arena=arena,
        block_server=block_server,
        events=events,
        admission=Admission(),
        metrics=WorkerMetrics(),
    )
    context.metrics.watch(lambda: engine.stats, lambda: (engine.num_steps, engine.step_seconds))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(block_server.close)
        stack.push_async_callback(role_parts.close)
        engine.start()
        stack.push_async_callback(engine.stop)
        await _serve(context, role_parts, token, stop)
    return stop.exit_code


async def _serve(context: WorkerContext, role_parts: RoleParts, token: str | None, stop: _StopRequest) -> None:
    config = context.config
    server = GrpcServer(host=config.host, port=config.port, services=[SERVICE], token=token)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(role_parts.servicer(context), server.server)
    port = await server.start()
    if config.metrics_port:
        _serve_metrics(config, context.metrics)
    address = config.advertise or f"{config.host}:{port}"
    identity = Identity(address, context.instance_id, context.role, context.arena.epoch)
    registrations = [Registration(router, identity, token) for router in config.routers]
    await server.set_serving(True)
    for registration in registrations:
        registration.start()
    log.info(
        "%s instance %s listening on %s:%d, %d KV blocks of %d tokens, attention %s, pipes %s",
        context.role,
        context.instance_id,
        config.host,
        port,
        context.arena.num_blocks,
        context.engine_config.block_size,
        context.runner.attention_backend,
        ",".join(endpoint.kind for endpoint in context.block_server.endpoints),
    )
    await stop.wait()
    log.info("draining: %d calls in progress", context.admission.active)
    await asyncio.gather(*(registration.stop() for registration in registrations))
    await server.set_serving(False)
    if stop.exit_code == 0:
        left = await context.admission.drain(config.drain_timeout_s)
        if left:
            log.warning("%d calls did not end within %g s and are cut off", left, config.drain_timeout_s)
    await server.stop(0.5)


def _require_free_port(config: WorkerConfig) -> None:
    """Fail before the model is loaded if the port cannot be had."""
    for name in ("port", "metrics_port"):
        port = getattr(config, name)
        if port == 0:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.host, port))
            except OSError as error:
                message = f"cannot listen on {config.host}:{port}: {error.strerror}"
                raise ConfigError(message, field=name) from error


def _serve_metrics(config: WorkerConfig, metrics: WorkerMetrics) -> None:
    try:
        start_http_server(config.metrics_port, addr=config.host, registry=metrics.registry)
    except OSError as error:
        message = f"cannot serve metrics on {config.host}:{config.metrics_port}: {error.strerror}"
        raise ConfigError(message, field="metrics_port") from error


class _Wake:
    """Wakes the engine once it exists; connectors are built before it."""

    target: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.target is not None:
            self.target()


class _StopRequest:
    """SIGTERM and SIGINT ask for a drain; the second one ends the process at once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.exit_code = 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._event.is_set():
            log.warning("second signal: ending at once")
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
