"""The asynchronous client.

``sync_client.py`` is generated from it: run ``scripts/gen_sync_client.py`` after changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import grpc
import grpc.aio
import msgspec

from baton.api.v1 import router_pb2, worker_pb2, worker_pb2_grpc
from baton.background import is_cancelled
from baton.client.async_stream import AsyncStream, wait_for_event
from baton.client.direct import DirectCall, DirectLinks
from baton.client.request import (
    Options,
    Prompt,
    build_generate,
    build_metadata,
    build_route,
    check_messages,
    read_structured,
)
from baton.client.scaling import Switch, plan_switches, switch_role
from baton.client.settings import (
    CLOSED,
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT_S,
    RNG,
    Opening,
    Routers,
    Settings,
    check_timeout,
)
from baton.client.types import (
    Generation,
    Instance,
    Model,
    RouteDecision,
    Stats,
    read_decision,
    read_instance,
    read_model,
    read_stats,
)
from baton.errors import BatonError, InternalError, InvalidRequestError, NotFoundError, UnavailableError, shown
from baton.rpc.channel import check_health, open_channel
from baton.rpc.convert import role_to_pb
from baton.rpc.errors import from_rpc_error, readable
from baton.rpc.service_token import read_token
from baton.rpc.tls import Tls
from baton.types import Role

P = TypeVar("P")
R = TypeVar("R")

_MAX_WAIT_S = 86400.0
_INSTANCE_TIMEOUT_S = 10.0
_AHEAD = 2
"""Answers of :meth:`AsyncClient.map` that may be ready or running, per concurrent request."""


class AsyncClient:
    """Asynchronous client of a Baton router, over gRPC.

    Belongs to the event loop of its first call, which connects it. Close it, or use it as a context manager::

        async with baton.AsyncClient("127.0.0.1:8001") as client:
            answer = await client.generate("def main():", max_tokens=32)
            print(answer.text)

    Args:
        address: ``host:port`` of the router's gRPC server, or the addresses of several routers of the same instances.
            If one is out of reach, the next one is asked and continues answers that have begun.
        token: API key, if the router requires one.
        token_file: File with the services' shared token, for services. Client and router prove it to each other; it
            is not sent. Excludes ``token``.
        timeout: Deadline of calls that have no ``timeout`` of their own, in seconds. Above 0.
        retries: Retries of a call that failed because no router or instance was available, before its first token.
        direct: Receive tokens from the decode instances. The router only places the request and signs a ticket; it
            continues the answer if the instance's stream breaks.
        tokenizer: With ``direct``, the directory of the model's tokenizer; default: the path that the instance names.
        tls: Certificates, if the services use TLS: ``baton.rpc.tls.Tls(cert, key, ca)``.

    Raises:
        InvalidRequestError: An argument is invalid; names it.
        ConfigError: The token file cannot be read, or other users can read it.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:8001",
        *,
        token: str | None = None,
        token_file: str = "",
        timeout: float = DEFAULT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
        direct: bool = False,
        tokenizer: str = "",
        tls: Tls | None = None,
    ) -> None:
        addresses = (address,) if isinstance(address, str) else tuple(address)
        self._settings = Settings(addresses, token, timeout, retries)
        if token is not None and token_file:
            raise InvalidRequestError("token is an API key: give it or token_file", field="token_file")
        self._service_token = read_token(token_file)
        self._tls = tls
        self._is_direct = direct
        self._tokenizer = tokenizer
        self._direct: DirectLinks | None = None
        self._routers = Routers(addresses, self._service_token, tls)
        self._is_connected = False
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()
        self._closing = asyncio.Event()

    @overload
    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        stream: Literal[False] = False,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        stream: Literal[True],
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream: ...

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        stream: bool = False,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Generation | AsyncStream:
        """Generate an answer to a prompt.

        Args:
            prompt: Text, token ids, or chat messages (``{"role": ..., "content": ...}``).
            model: Name of the model; empty: the model that the router serves.
            stream: Return a stream of chunks instead of the whole answer.
            timeout: Deadline of the whole call, in seconds; default: the client's.
            **options: Sampling parameters and other fields of the request; see :class:`baton.client.Options`.

        Returns:
            The answer, or with ``stream=True`` an iterator over its chunks.

        Raises:
            InvalidRequestError: An argument is invalid; names the field.
            QueueFullError: All instances are full; ``retry_after_s`` says when to retry.
            UnavailableError: No router or instance is available.
            DeadlineError: The answer was not complete within ``timeout``.
            BatonError: Other errors; see :mod:`baton.errors`. With ``stream=True`` most are raised by the iteration.
        """
        request = build_generate(prompt, model, options)
        if self._routers.several and not request.sampling.HasField("seed"):
            request.sampling.seed = RNG.getrandbits(32)  # so that another router can continue the answer
        opening = self._open_generate(request, build_metadata(options))
        _, parse = read_structured(options)
        answer = AsyncStream(opening, self._settings.budget(timeout), parse)
        self._streams.add(answer)
        return answer if stream else await answer.collect()

    async def route(
        self, prompt: Prompt, *, model: str = "", cache_salt: str = "", timeout: float | None = None
    ) -> RouteDecision:
        """Return where the router would place a prompt now, and why. Nothing is reserved.

        Args:
            prompt: Text, token ids, or chat messages.
            model: Name of the model; empty: the model that the router serves.
            cache_salt: Cache salt of the request.
            timeout: Deadline in seconds; default: the client's.

        Raises:
            UnavailableError: No router or instance is available.
        """
        request = build_route(prompt, model, cache_salt)
        return read_decision((await self._unary("Route", request, timeout)).decision)

    async def list_instances(self, *, timeout: float | None = None) -> list[Instance]:
        """Return all instances that the router knows, healthy or not.

        Args:
            timeout: Deadline in seconds; default: the client's.
        """
        response = await self._unary("ListInstances", router_pb2.ListInstancesRequest(), timeout)
        return [read_instance(item) for item in response.instances]

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the models that requests can name.

        Args:
            timeout: Deadline in seconds; default: the client's.
        """
        response = await self._unary("ListModels", router_pb2.ListModelsRequest(), timeout)
        return [read_model(item) for item in response.models]

    async def stats(self, *, window: float = 60.0, timeout: float | None = None) -> Stats:
        """Return rates and latencies of the router's recent requests, and its queue.

        Args:
            window: Length of the period in seconds, at most 180.
            timeout: Deadline in seconds; default: the client's.

        Raises:
            PermissionDeniedError: The API key is not an administrator's.
        """
        return read_stats(await self._unary("GetStats", router_pb2.GetStatsRequest(window_s=window), timeout))

    async def explain(self, request_id: str, *, timeout: float | None = None) -> dict[str, Any]:
        """Return how a request was placed and how it went: what ``baton explain --json`` prints.

        Args:
            request_id: ``request_id`` of an answer, or ``id`` or ``x-request-id`` of an answer over HTTP.
            timeout: Deadline in seconds; default: the client's.

        Raises:
            NotFoundError: The router does not know the request. Each router remembers only the latest requests that
                it placed itself.
            InternalError: What the router answers is no JSON object.
        """
        answer = await self._unary("Explain", router_pb2.ExplainRequest(request_id=request_id), timeout)
        try:
            return msgspec.json.decode(answer.json, type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            raise InternalError(f"the router's explanation is no JSON object: {shown(str(error))}") from error

    async def health(self, *, timeout: float = 2.0) -> dict[str, bool]:
        """Return, by address, whether each of the client's routers is serving.

        Args:
            timeout: Seconds to wait for each router; one that does not answer in time is not serving.

        Raises:
            UnavailableError: The client is closed.
        """
        check_timeout(timeout)
        self._connect()
        addresses = self._settings.addresses
        serving = await asyncio.gather(*(check_health(x, timeout_s=timeout, tls=self._tls) for x in addresses))
        return dict(zip(addresses, serving, strict=True))

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Generate the next message of a conversation: ``generate`` with messages.

        Args:
            messages: Messages with ``role`` and ``content``. Append ``answer.message`` to continue.
            model: Name of the model; empty: the model that the router serves.
            timeout: Deadline in seconds; default: the client's.
            **options: See :class:`baton.client.Options`.

        Raises:
            InvalidRequestError: ``messages`` are not messages with role and content.
            BatonError: See :meth:`generate`.
        """
        return await self.generate(check_messages(messages), model=model, timeout=timeout, **options)

    async def map(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = 16,
        keep_errors: bool = False,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Generation | BatonError, None]:
        """Generate answers to many prompts, some at a time; yields them in the order of the prompts.

        Args:
            prompts: The prompts; read only as far as needed, so that they may be endless.
            concurrency: Number of concurrent requests, at least 1.
            keep_errors: Yield the error of a failed request in place of its answer, instead of raising it.
            model: Name of the model; empty: the model that the router serves.
            timeout: Deadline of each request, in seconds; default: the client's.
            **options: See :class:`baton.client.Options`.

        Raises:
            InvalidRequestError: ``concurrency`` is below 1.
            BatonError: A request failed; the other ones are cancelled.
        """

        async def ask(prompt: Prompt) -> Generation:
            return await self.generate(prompt, model=model, timeout=timeout, **options)

        async with contextlib.aclosing(map_bounded(ask, prompts, concurrency, keep_errors=keep_errors)) as answers:
            async for answer in answers:
                yield answer

    async def drain(self, instance: str, *, wait: float = 60.0, migrate: bool = False) -> int:
        """Stop new requests to an instance, and wait for its running ones.

        Args:
            instance: Identifier of the instance.
            wait: Seconds to wait, at most one day; 0 only stops new requests.
            migrate: After ``wait``, have the routers continue the remaining requests on other instances.

        Returns:
            Number of requests that still run.

        Raises:
            NotFoundError: The router does not know the instance.
            BatonError: The instance does not answer, or ``token_file`` is missing.
        """
        if not 0.0 <= wait <= _MAX_WAIT_S:
            raise InvalidRequestError(f"wait must be between 0 and {_MAX_WAIT_S:g} s, got {wait}", field="wait")
        request = worker_pb2.DrainRequest(timeout_ms=round(1000 * wait), migrate=migrate)
        answer = await self._call_instance(instance, "Drain", request, wait + _INSTANCE_TIMEOUT_S)
        return int(answer.num_unfinished)

    async def set_role(self, instance: str, role: Role) -> None:
        """Change the role of an idle instance, which keeps its caches. A drained instance takes requests again.

        Args:
            instance: Identifier of the instance.
            role: The new role.

        Raises:
            BusyError: The instance is not idle: drain it first.
            NotFoundError: The router does not know the instance.
            BatonError: The instance does not answer, or ``token_file`` is missing.
        """
        request = worker_pb2.SetRoleRequest(role=role_to_pb(Role(role)))
        await self._call_instance(instance, "SetRole", request, _INSTANCE_TIMEOUT_S)

    async def scale(
        self, *, prefill: int | None = None, decode: int | None = None, wait: float = 30.0, dry_run: bool = False
    ) -> list[Switch]:
        """Change the numbers of prefill and decode instances while requests run, by switching roles.

        The least busy instances of the role with too many are drained and get the other role.

        Args:
            prefill: Number of prefill instances; default: all that are not decode instances.
            decode: Number of decode instances, at least 1; default likewise.
            wait: Seconds for the requests on an instance to end, before they continue elsewhere.
            dry_run: Only return the instances that would switch.

        Returns:
            The switches, in their order.

        Raises:
            ConfigError: The numbers do not add up to the number of instances.
            BatonError: An instance does not answer, or stayed busy.
        """
        given = {Role.PREFILL: prefill, Role.DECODE: decode}
        targets = {role: count for role, count in given.items() if count is not None}
        switches = plan_switches(await self.list_instances(), targets)
        for each in () if dry_run else switches:
            await switch_role(self, each, wait)
        return switches

    async def close(self) -> None:
        """Cancel all calls and close the connections. The client cannot be used any more."""
        self._closing.set()
        for stream in list(self._streams):
            stream.abort()
        if self._direct is not None:
            await self._direct.close()
        await self._routers.close()
        # gRPC keeps resources that event loops share while channels are referenced: see _await_grpc_end.
        self._direct = None
        _open_clients.discard(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _open_generate(
        self, request: router_pb2.RouterGenerateRequest, metadata: tuple[tuple[str, str], ...]
    ) -> Opening:
        if not self._is_direct:
            return self._opening("Generate", request, metadata)

        def call(request: Any, timeout: float) -> DirectCall:
            self._connect()
            router = self._routers.stub()
            if self._direct is None:
                self._direct = DirectLinks(router, self._open_ticketed, self._settings.metadata, self._tokenizer)
            self._direct.router = router
            return DirectCall(self._direct, request, timeout, metadata)

        return Opening(self._routers, call, request)

    def _opening(self, name: str, request: Any, more: tuple[tuple[str, str], ...] = ()) -> Opening:
        metadata = self._settings.metadata + more

        def call(request: Any, timeout: float) -> Any:
            self._connect()
            return getattr(self._routers.stub(), name)(request, timeout=timeout, metadata=metadata)

        return Opening(self._routers, call, request)

    def _connect(self) -> None:
        if self._closing.is_set():
            raise UnavailableError(CLOSED)
        _check_fork()
        if not self._is_connected:  # not in the constructor: channels belong to the loop that they were made in
            self._is_connected = True
            _register_client(self)

    def _open_ticketed(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, tls=self._tls)  # the ticket replaces the services' token

    async def _call_instance(self, instance: str, method: str, request: Any, timeout_s: float) -> Any:
        instances = await self.list_instances()
        address = next((each.address for each in instances if each.instance_id == instance), None)
        if address is None:
            known = ", ".join(sorted(each.instance_id for each in instances)) or "none"
            raise NotFoundError(f"the router knows no instance {instance!r}; there are {known}", field="instance")
        async with open_channel(address, token=self._service_token, tls=self._tls) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            try:
                return readable(await getattr(stub, method)(request, timeout=timeout_s))
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error

    async def _unary(self, name: str, request: Any, timeout: float | None) -> Any:
        budget = self._settings.budget(timeout)
        opening = self._opening(name, request)
        while True:
            try:
                return readable(await opening.open(budget.remaining()))
            except grpc.RpcError as error:
                delay = budget.delay_after(error)
                opening.report_failure()
                await wait_for_event(self._closing, delay)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                raise UnavailableError(CLOSED) from None


async def map_bounded(
    ask: Callable[[P], Coroutine[Any, Any, R]], prompts: Iterable[P], concurrency: int, *, keep_errors: bool
) -> AsyncGenerator[R | BatonError, None]:
    """Yield the answers to prompts in their order, with bounded concurrency.

    Args:
        ask: Answers one prompt.
        prompts: The prompts; read only as far as needed.
        concurrency: Number of concurrent requests, at least 1.
        keep_errors: Yield a Baton error in place of its answer instead of raising it.

    Raises:
        InvalidRequestError: ``concurrency`` is below 1.
        BatonError: A request failed; the other ones are cancelled.
    """
    if concurrency < 1:
        raise InvalidRequestError(f"concurrency must be at least 1, got {concurrency}", field="concurrency")
    slots = asyncio.Semaphore(concurrency)

    async def ask_bounded(prompt: P) -> R:
        async with slots:
            return await ask(prompt)

    tasks: deque[asyncio.Task[R]] = deque()
    remaining = iter(prompts)
    exhausted = False
    try:
        while True:
            while not exhausted and len(tasks) < _AHEAD * concurrency:
                try:
                    tasks.append(asyncio.create_task(ask_bounded(next(remaining))))
                except StopIteration:
                    exhausted = True
            if not tasks:
                return
            try:
                answer: R | BatonError = await tasks[0]
            except BatonError as error:
                if not keep_errors:
                    raise
                answer = error
            tasks.popleft()
            yield answer
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- forks: a forked child inherits gRPC's locks and sockets, but none of its threads ---

_FORKED = "the process was forked while it had an open client: close clients before, or start processes by spawn"
_GRPC_THREADS = ("event_engine", "lifeguard", "grpc_", "timer_manager", "default-exec", "resolver-exec")
_THREADS = Path("/proc/self/task")
_GRPC_END_S = 5.0
_POLL_S = 0.001

_open_clients: weakref.WeakSet[AsyncClient] = weakref.WeakSet()
_grpc_may_run = False
"""Whether the next fork waits for gRPC's threads to end."""
_forked_while_open = False


def _check_fork() -> None:
    """Refuse a client in a child that was forked while the parent had an open one.

    Raises:
        UnavailableError: The process is such a child. gRPC's channels of all event loops share one socket, so that the
            child would receive what is sent to its parent.
    """
    if _forked_while_open:
        raise UnavailableError(_FORKED)


def _register_client(client: AsyncClient) -> None:
    global _grpc_may_run
    _grpc_may_run = True
    _open_clients.add(client)


def _await_grpc_end() -> None:
    # gRPC's threads end some milliseconds after the last channel, without a notification. A child that was forked
    # before would wait forever for threads that it does not have.
    global _grpc_may_run
    if _grpc_may_run and not _open_clients:
        deadline = time.monotonic() + _GRPC_END_S
        while _grpc_threads_run() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        _grpc_may_run = False


def _mark_child() -> None:
    global _forked_while_open
    _forked_while_open = _forked_while_open or bool(_open_clients)


def _grpc_threads_run() -> bool:
    """Whether gRPC has threads; ``False`` on systems without ``/proc``."""
    with contextlib.suppress(OSError):
        for task in _THREADS.iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                if (task / "comm").read_text().startswith(_GRPC_THREADS):
                    return True
    return False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_await_grpc_end, after_in_child=_mark_child)
