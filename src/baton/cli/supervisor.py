"""Starts a deployment's processes in order, restarts what dies, ends everything it started."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Self

import grpc.aio

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.cli.plan import DeploymentPlan
from baton.cli.process import ManagedProcess, ProcessSpec, Start, start_python
from baton.errors import ConfigError, UnavailableError
from baton.rpc.channel import open_channel
from baton.rpc.tls import Tls

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 15.0
STABLE_S = 60.0
"""A process that ran this long begins again with the first back-off."""


class Supervisor:
    """Runs a plan.

    Args:
        plan: The processes.
        emit: Gets ``(name, line)`` for each log line.
        restart: Whether a process that dies after it was ready is started again; else the whole ends.
        token: Shared token, if the services use one.
        tls: Certificates, if they use some.
        ready_timeout_s: How long a process may take to become ready.
        grace_s: How long a process may take to drain.
        backoff_s: Pause before the first restart of a process, and the longest pause when it dies again and again.

    Attributes:
        spawn: How a process is started; may be replaced before any is.
    """

    def __init__(
        self,
        plan: DeploymentPlan,
        emit: Callable[[str, str], None],
        *,
        restart: bool = True,
        token: str | None = None,
        tls: Tls | None = None,
        ready_timeout_s: float = 300.0,
        grace_s: float = 40.0,
        backoff_s: tuple[float, float] = (FIRST_BACKOFF_S, LAST_BACKOFF_S),
    ) -> None:
        self.plan = plan
        self.spawn: Start = start_python
        self._emit = emit
        self._restart, self._token, self._tls = restart, token, tls
        self._ready_timeout_s, self._grace_s = ready_timeout_s, grace_s
        self._first_backoff_s, self._last_backoff_s = backoff_s
        self._env = dict(os.environ)
        self.processes: dict[str, ManagedProcess] = {}
        self._watchers: list[asyncio.Task[None]] = []
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
            ConfigError: A port is in use.
            UnavailableError: A process ended or was not ready in time, or the model's tokenizer cannot be loaded.
        """
        _require_free_ports(self.plan)
        for group in self.plan.groups:
            await asyncio.gather(*(self._launch(spec) for spec in group))
            waits = [asyncio.ensure_future(self._wait_ready(self.processes[spec.name])) for spec in group]
            try:
                await asyncio.gather(*waits)
            finally:
                for wait in waits:
                    wait.cancel()
        await self._wait_registered()
        await self._try_text()
        for process in list(self.processes.values()):
            self._watchers.append(asyncio.create_task(self._watch(process.spec)))

    async def wait(self) -> str:
        """Wait until a process died that is not restarted; returns why."""
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """End the router first so that nothing new comes in, then decode, prefill, store."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        order = ("router", "decode", "prefill", "kvstore")
        for role in order:
            members = [p for p in self.processes.values() if p.spec.role == role]
            await asyncio.gather(*(member.end(self._grace_s) for member in members))

    def hurry(self) -> None:
        """SIGKILL everything: whoever waits for :meth:`stop` wants no drain any more."""
        for process in self.processes.values():
            process.send(signal.SIGKILL)

    def kill(self, name: str) -> None:
        """SIGKILL a process, as a fault would."""
        self.processes[name].send(signal.SIGKILL)

    async def _launch(self, spec: ProcessSpec) -> None:
        process = ManagedProcess(spec, self._emit, tls=self._tls, start=self.spawn)
        await process.start(self._env)
        self.processes[spec.name] = process

    async def _wait_ready(self, process: ManagedProcess) -> None:
        await process.wait_ready(self._ready_timeout_s)

    async def _wait_registered(self) -> None:
        expected = {spec.name for spec in self.plan.workers}
        seen: set[str] = set()
        try:
            async with (
                asyncio.timeout(self._ready_timeout_s),
                open_channel(self.plan.grpc_address, token=self._token, tls=self._tls) as channel,
            ):
                stub = router_pb2_grpc.RouterServiceStub(channel)
                while not expected <= seen:
                    answer = await stub.ListInstances(router_pb2.ListInstancesRequest(), timeout=5.0)
                    seen = {item.instance_id for item in answer.instances if item.healthy}
                    await asyncio.sleep(0.02)
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            missing = ", ".join(sorted(expected - seen))
            raise UnavailableError(f"the router does not see {missing}: {error or 'time is up'}") from None

    async def _try_text(self) -> None:
        """Have the router load tokenizer and chat template now: one that cannot be read shall not wait for a request.

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

    async def _watch(self, spec: ProcessSpec) -> None:
        """Restart a process as often as it dies, more slowly each time."""
        backoff = self._first_backoff_s
        while True:
            process = self.processes[spec.name]
            started = time.monotonic()
            code = await process.wait()
            self._emit(spec.name, f"ended with status {code}")
            if not self._restart:
                if not self._ended.done():
                    self._ended.set_result(f"{spec.name} ended with status {code}")
                return
            if time.monotonic() - started > STABLE_S:
                backoff = self._first_backoff_s
            self._emit(spec.name, f"restarting in {backoff:g} s")
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, self._last_backoff_s)
            await self._launch(spec)
            try:
                await self._wait_ready(self.processes[spec.name])
            except UnavailableError as error:
                self._emit(spec.name, error.message)
                await self.processes[spec.name].end(1.0)


def _require_free_ports(plan: DeploymentPlan) -> None:
    """Refuse ports that somebody has: another deployment on them would answer our health checks as if it were ours.

    Raises:
        ConfigError: Names the process and the address.
    """
    for spec in (spec for group in plan.groups for spec in group):
        for _, address in spec.listens:
            host, _, port = address.partition("/")[0].rpartition(":")
            with socket.socket() as item:
                item.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    item.bind((host, int(port)))
                except OSError as error:
                    raise ConfigError(
                        f"{spec.name} cannot listen on {host}:{port}: {error.strerror}", field="port"
                    ) from error
