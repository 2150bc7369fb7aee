"""Starts a deployment's processes in order, restarts those that die, and ends them all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

import grpc.aio

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.background import keep_running
from baton.child_process import ChildProcess, RunningProcess, start_python
from baton.errors import ConfigError, UnavailableError
from baton.rpc.channel import check_health, open_channel
from baton.rpc.errors import readable
from baton.rpc.server import require_free_port
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls

FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 15.0
STABLE_S = 60.0
"""Seconds after which a running process is stable: its next restart waits only ``FIRST_BACKOFF_S``."""
HEALTH_INTERVAL_S = 0.05
_INVALID_CONFIGURATION = 2
"""Exit status of a service whose configuration cannot work."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to run.

    Attributes:
        name: Name of the process, the prefix of its log lines.
        module: Python module to run.
        args: Command line.
        health_address: gRPC address of the health check that shows that the process is ready.
        role: ``router``, ``prefill``, ``decode`` or ``kvstore``.
        listens: Addresses by kind, for the table.
        env: Additional environment variables, for values that must not be seen in the command line.
    """

    name: str
    module: str
    args: tuple[str, ...]
    health_address: str
    role: str
    listens: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class DeploymentPlan:
    """Processes of a deployment in the order of their start: each group is ready before the next one starts."""

    kvstore: ProcessSpec | None
    router: ProcessSpec
    workers: tuple[ProcessSpec, ...]
    http_address: str
    grpc_address: str
    scheme: str = "http"
    """Scheme of the OpenAI API: ``http`` or ``https``."""
    scaling_metrics_port: int = 0
    """Port for the metrics of an autoscaler beside the processes."""
    worker: Callable[[str, str, ProcessSpec | None], ProcessSpec] | None = None
    """Returns the specification of a further instance by role and name; it reuses the ports of the one it replaces."""

    @property
    def groups(self) -> list[tuple[ProcessSpec, ...]]:
        """Groups in the order of start."""
        first = () if self.kvstore is None else (self.kvstore,)
        return [group for group in (first, (self.router,), self.workers) if group]


StartProcess = Callable[[ProcessSpec, dict[str, str]], RunningProcess]
"""Starts the process of a specification in an environment, with its output in a pipe."""


def start_process(spec: ProcessSpec, env: dict[str, str]) -> RunningProcess:
    """Start the Python process of a specification; see :func:`baton.child_process.start_python`."""
    return start_python(spec.module, spec.args, env=env, end_with_thread=True, output=subprocess.PIPE)


class ManagedProcess(ChildProcess):
    """A supervised process, started in the running event loop.

    Args:
        spec: Specification of the process.
        emit: Called in the event loop with ``(name, line)`` for each line of the process's output.
        env: Environment, to which the specification's variables are added.
        tls: Certificates, if the services use them.
        start: Starts the process.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        emit: Callable[[str, str], None],
        env: Mapping[str, str],
        *,
        tls: Tls | None = None,
        start: StartProcess = start_process,
    ) -> None:
        self.spec = spec
        self._tls = tls
        self._emit = emit
        loop = asyncio.get_running_loop()

        def emit_in_loop(line: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the log is no longer shown
                loop.call_soon_threadsafe(emit, spec.name, line)

        super().__init__(start(spec, {**env, **dict(spec.env)}), emit_in_loop)

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the health check answers SERVING.

        Raises:
            UnavailableError: The process ended, or was not ready in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    ready = await check_health(self.spec.health_address, timeout_s=1.0, tls=self._tls)
                    if ready or self.returncode is not None:
                        break
                    await asyncio.sleep(HEALTH_INTERVAL_S)
        except TimeoutError:
            raise UnavailableError(f"{self.spec.name} was not ready within {timeout_s:g} s") from None
        if self.returncode is not None:  # another process answers at its address
            code = await self.wait_closed()
            detail = f": {self.last_line}" if self.last_line else ""
            raise UnavailableError(f"{self.spec.name} ended with status {code} before it was ready{detail}")

    async def end(self, grace_s: float) -> None:
        """Ask the process to drain; kill it after ``grace_s`` seconds."""
        if self.returncode is not None:
            return
        self.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait_closed()
        except TimeoutError:
            self._emit(self.spec.name, f"did not end within {grace_s:g} s and is killed")
            self.send_signal(signal.SIGKILL)
            await self.wait_closed()


class Supervisor:
    """Runs a deployment plan.

    Args:
        plan: Plan of the processes.
        emit: Called with ``(name, line)`` for each log line.
        restart: Whether a process that dies after it was ready is restarted; else :meth:`wait` returns.
        token: Shared token, if the services use one.
        tls: Certificates, if the services use them.
        ready_timeout_s: Longest time in seconds until a process is ready.
        grace_s: Longest time in seconds that a process may drain.
        backoff_s: Seconds before the first restart of a process, and longest pause if it dies repeatedly.

    Attributes:
        spawn: Starts a process; may be replaced before :meth:`start`.
        on_state: Called with ``(name, state)`` when a process ``starts`` and when it is ``ready``; may be replaced,
            too.
    """

    def __init__(
        self,
        plan: DeploymentPlan,
        emit: Callable[[str, str], None],
        *,
        restart: bool = True,
        token: Token | None = None,
        tls: Tls | None = None,
        ready_timeout_s: float = 300.0,
        grace_s: float = 40.0,
        backoff_s: tuple[float, float] = (FIRST_BACKOFF_S, LAST_BACKOFF_S),
    ) -> None:
        self.plan = plan
        self.spawn: StartProcess = start_process
        self.on_state: Callable[[str, str], None] = lambda name, state: None
        self._emit = emit
        self._restart = restart
        self._token = token
        self._tls = tls
        self._ready_timeout_s = ready_timeout_s
        self._grace_s = grace_s
        self._first_backoff_s, self._last_backoff_s = backoff_s
        self._env = dict(os.environ)
        self.processes: dict[str, ManagedProcess] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start every group after the one before it is ready, then wait until the router sees all instances.

        Raises:
            ConfigError: A port is in use, or a process ended because its configuration cannot work (status 2).
            UnavailableError: A process ended or was not ready in time, the router refuses an instance, or the model's
                tokenizer cannot be loaded.
        """
        _require_free_ports(self.plan)
        for group in self.plan.groups:
            for spec in group:
                self._launch(spec)
            waits = [asyncio.ensure_future(self._wait_ready(spec.name)) for spec in group]
            try:
                await asyncio.gather(*waits)
            except UnavailableError as error:
                if any(self.processes[spec.name].returncode == _INVALID_CONFIGURATION for spec in group):
                    raise ConfigError(error.message) from error
                raise
            finally:
                for wait in waits:
                    wait.cancel()
        await self._wait_registered()
        await self._try_text()
        for name in list(self.processes):
            self._watchers[name] = keep_running(partial(self._watch, name), "watch", detail=name)

    async def wait(self) -> str:
        """Wait until a process has died and is not restarted; returns the reason."""
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """End the router first so that no new requests arrive, then decode, prefill and store."""
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        for role in ("router", "decode", "prefill", "kvstore"):
            members = [p for p in self.processes.values() if p.spec.role == role]
            await asyncio.gather(*(member.end(self._grace_s) for member in members))

    async def add(self, spec: ProcessSpec) -> None:
        """Start a further process, and watch it like those of the plan.

        Raises:
            UnavailableError: The process ended, or was not ready in time; it is removed again.
        """
        self._launch(spec)
        process = self.processes[spec.name]
        try:
            await self._wait_ready(spec.name)
        except BaseException:
            await process.end(1.0)
            del self.processes[spec.name]
            raise
        self._watchers[spec.name] = keep_running(partial(self._watch, spec.name), "watch", detail=spec.name)

    def redefine(self, spec: ProcessSpec) -> None:
        """Set the specification by which a running process is restarted if it dies."""
        self.processes[spec.name].spec = spec

    async def remove(self, name: str) -> None:
        """Drain and end a process for good."""
        watcher = self._watchers.pop(name)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await self.processes[name].end(self._grace_s)
        del self.processes[name]

    def hurry(self) -> None:
        """SIGKILL all processes, so that :meth:`stop` does not wait for their drain."""
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)

    def kill(self, name: str) -> None:
        """SIGKILL a process, as a fault would."""
        self.processes[name].send_signal(signal.SIGKILL)

    def _launch(self, spec: ProcessSpec) -> None:
        process = ManagedProcess(spec, self._emit, self._env, tls=self._tls, start=self.spawn)
        self.processes[spec.name] = process
        self.on_state(spec.name, "starts")

    async def _wait_ready(self, name: str) -> None:
        await self.processes[name].wait_ready(self._ready_timeout_s)
        self.on_state(name, "ready")

    async def _wait_registered(self) -> None:
        expected = {spec.name for spec in self.plan.workers}
        names = {spec.health_address: spec.name for spec in self.plan.workers}
        seen: set[str] = set()
        try:
            async with (
                asyncio.timeout(self._ready_timeout_s),
                open_channel(self.plan.grpc_address, token=self._token, tls=self._tls) as channel,
            ):
                stub = router_pb2_grpc.RouterServiceStub(channel)
                while not expected <= seen:
                    # No timeout per call: while everything starts on one machine, an answer may take seconds.
                    answer = readable(await stub.ListInstances(router_pb2.ListInstancesRequest()))
                    for item in answer.instances:
                        if item.refused:
                            name = names.get(item.address, item.instance_id)
                            raise UnavailableError(f"the router refuses {name}: {item.refused}")
                    seen = {item.instance_id for item in answer.instances if item.healthy}
                    await asyncio.sleep(0.02)
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            missing = ", ".join(sorted(expected - seen))
            why = error.details() if isinstance(error, grpc.aio.AioRpcError) else "time is up"
            raise UnavailableError(f"the router does not see {missing}: {why}") from None

    async def _try_text(self) -> None:
        """Have the router load tokenizer and chat template now, so that an unreadable one fails the start.

        Raises:
            UnavailableError: They cannot be loaded.
        """
        async with open_channel(self.plan.grpc_address, token=self._token, tls=self._tls) as channel:
            request = router_pb2.RouteRequest(text="a")
            try:
                await router_pb2_grpc.RouterServiceStub(channel).Route(request, timeout=self._ready_timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    return  # the router has API keys, and it is not for us to know one
                raise UnavailableError(f"the router cannot tokenize: {error.details()}") from None

    async def _watch(self, name: str) -> None:
        """Restart a process each time it dies, with growing pauses."""
        backoff = self._first_backoff_s
        while True:
            process = self.processes[name]
            started = time.monotonic()
            code = await process.wait_closed()
            self._emit(name, f"ended with status {code}")
            if not self._restart:
                if not self._ended.done():
                    self._ended.set_result(f"{name} ended with status {code}")
                return
            if time.monotonic() - started > STABLE_S:
                backoff = self._first_backoff_s
            self._emit(name, f"restarting in {backoff:g} s")
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, self._last_backoff_s)
            self._launch(process.spec)
            try:
                await self._wait_ready(name)
            except UnavailableError as error:
                self._emit(name, error.message)
                await self.processes[name].end(1.0)


def _require_free_ports(plan: DeploymentPlan) -> None:
    """Refuse ports in use: another deployment on them would answer the health checks.

    Raises:
        ConfigError: Names the process and the address.
    """
    for spec in (spec for group in plan.groups for spec in group):
        for _, address in spec.listens:
            host, _, port = address.partition("/")[0].rpartition(":")
            try:
                require_free_port(host, int(port))
            except ConfigError as error:
                hint = "; is another baton up running? --port and --grpc-port take others, 0 free ones"
                told = f"{spec.name} {error.message}{hint if spec is plan.router else ''}"
                raise ConfigError(told, field=error.field) from error
