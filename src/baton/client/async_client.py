"""The asynchronous client, which the synchronous one drives too."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc
import grpc.aio

from baton.api.v1 import router_pb2
from baton.client import admin, forks
from baton.client.direct import DirectCall, DirectLinks
from baton.client.mapping import map_bounded
from baton.client.request import Options, Prompt, build_generate, build_metadata, build_route, check_messages
from baton.client.resume import Rest, rest_of
from baton.client.routers import Opening, Routers
from baton.client.structured import AnswerParser, read_structured
from baton.client.types import (
    Answer,
    Answered,
    Chunk,
    Generation,
    Instance,
    Model,
    RouteDecision,
    read_decision,
    read_instance,
    read_model,
)
from baton.errors import BatonError, DeadlineError, InvalidRequestError, UnavailableError
from baton.rpc.auth import HEADER
from baton.rpc.channel import Backoff, open_channel
from baton.rpc.errors import from_rpc_error, readable
from baton.rpc.service_token import read_token
from baton.rpc.tls import Tls
from baton.types import Role

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_RETRIES = 2
CLOSED = "this client is closed"
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
_LONGEST_TIMEOUT_S = 1e8
"""Three years: clocks of Python and gRPC cannot count much farther."""
_RNG = random.Random()


@dataclass(frozen=True, slots=True)
class Settings:
    """What a client was connected with.

    Raises:
        InvalidRequestError: Names the field.
    """

    addresses: tuple[str, ...]
    token: str | None
    timeout: float
    retries: int

    def __post_init__(self) -> None:
        if not self.addresses:
            raise InvalidRequestError("address must name a router", field="address")
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit():
                raise InvalidRequestError(f"address must be host:port, got {address!r}", field="address")
        check_timeout(self.timeout)
        if self.retries < 0:
            raise InvalidRequestError(f"retries must be at least 0, got {self.retries}", field="retries")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Goes with every call."""
        return () if self.token is None else ((HEADER, f"Bearer {self.token}"),)

    def budget(self, timeout: float | None) -> Budget:
        """Start the clock of a call that may take ``timeout`` seconds (``None``: the client's)."""
        if timeout is not None:
            check_timeout(timeout)
        return Budget(self.timeout if timeout is None else timeout, self.retries)


def check_timeout(timeout: float) -> None:
    """Raise ``InvalidRequestError`` unless a timeout (seconds) is positive and finite."""
    if not 0.0 < timeout < float("inf"):
        raise InvalidRequestError(f"timeout must be positive and finite, got {timeout}", field="timeout")


class Budget:
    """Time and tries that a call has left."""

    def __init__(self, timeout: float, retries: int) -> None:
        self._timeout = timeout
        self._ends_at = time.monotonic() + min(timeout, _LONGEST_TIMEOUT_S)
        self._retries = retries
        self._backoff = Backoff(_LONGEST_DELAY_S, _RNG, _FIRST_DELAY_S)

    def remaining(self) -> float:
        """Seconds left.

        Raises:
            DeadlineError: None.
        """
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"no answer within {self._timeout:g} s")
        return left

    def after(self, error: grpc.RpcError) -> float:
        """Return the seconds to wait before the next try, or raise what the failure means.

        Only UNAVAILABLE is tried again; waits double, with jitter, and respect what the server asked for.

        Raises:
            BatonError: There will be no other try.
        """
        known = from_rpc_error(error)
        delay = max(known.retry_after_s or 0.0, self._backoff.next_s())
        last = error.code() is not grpc.StatusCode.UNAVAILABLE or self._retries <= 0
        if last or delay >= self._ends_at - time.monotonic():
            raise known from error
        self._retries -= 1
        return delay


class AsyncClient:
    """Speaks to a Baton router over gRPC, from one event loop.

    Args, time-outs, retries and errors are those of :class:`baton.Client`. The connection is made with the first call.
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
        self._tls, self._is_direct, self._tokenizer = tls, direct, tokenizer
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
        """Generate from a prompt; see :meth:`baton.Client.generate`.

        With ``stream=True`` the awaited result is an asynchronous iterator of chunks.
        """
        request = build_generate(prompt, model, options)
        if self._routers.several and not request.sampling.HasField("seed"):
            request.sampling.seed = _RNG.getrandbits(32)  # so that another router can go on with what was drawn
        opening = self._open_generate(request, build_metadata(options))
        _, parse = read_structured(options)
        answer = AsyncStream(opening, request.sampling.n, self._settings.budget(timeout), parse)
        self._streams.add(answer)
        return answer if stream else await answer.collect()

    async def route(
        self, prompt: Prompt, *, model: str = "", cache_salt: str = "", timeout: float | None = None
    ) -> RouteDecision:
        """Ask where a prompt would go, and why; nothing is reserved."""
        request = build_route(prompt, model, cache_salt)
        return read_decision((await self._unary("Route", request, timeout)).decision)

    async def list_instances(self, *, timeout: float | None = None) -> list[Instance]:
        """Return every instance that the router knows."""
        response = await self._unary("ListInstances", router_pb2.ListInstancesRequest(), timeout)
        return [read_instance(item) for item in response.instances]

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the models that requests can name."""
        response = await self._unary("ListModels", router_pb2.ListModelsRequest(), timeout)
        return [read_model(item) for item in response.models]

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Answer a conversation; see :meth:`baton.Client.chat`."""
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
        """Answer many prompts, some at a time; see :meth:`baton.Client.map`. An asynchronous iterator."""

        async def ask(prompt: Prompt) -> Generation:
            return await self.generate(prompt, model=model, timeout=timeout, **options)

        async with contextlib.aclosing(map_bounded(ask, prompts, concurrency, keep_errors=keep_errors)) as answers:
            async for answer in answers:
                yield answer

    async def drain(self, instance: str, *, wait: float = 60.0, migrate: bool = False) -> int:
        """Have an instance take no new requests; see :meth:`baton.Client.drain`."""
        found = admin.find(await self.list_instances(), instance)
        return await admin.drain(self._open_instance, found.address, wait, migrate=migrate)

    async def set_role(self, instance: str, role: Role) -> None:
        """Make an idle instance one of another role; see :meth:`baton.Client.set_role`."""
        found = admin.find(await self.list_instances(), instance)
        await admin.set_role(self._open_instance, found.address, Role(role))

    async def close(self) -> None:
        """End every call and the connection."""
        self._closing.set()
        for stream in list(self._streams):
            stream.abort()
        if self._direct is not None:
            await self._direct.close()
        await self._routers.close()
        # gRPC keeps what it shares between event loops while channels are referred to: see _connect.
        self._direct = None
        forks.closed(self)

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

        def call(stub: Callable[[], Any], request: Any, timeout: float) -> DirectCall:
            self._connect()
            if self._direct is None:
                self._direct = DirectLinks(stub(), self._open_ticketed, self._settings.metadata, self._tokenizer)
            self._direct.router = stub()
            return DirectCall(self._direct, request, timeout, metadata)

        return Opening(self._routers, call, request)

    def _opening(self, name: str, request: Any, more: tuple[tuple[str, str], ...] = ()) -> Opening:
        metadata = self._settings.metadata + more

        def call(stub: Callable[[], Any], request: Any, timeout: float) -> Any:
            self._connect()
            return getattr(stub(), name)(request, timeout=timeout, metadata=metadata)

        return Opening(self._routers, call, request)

    def _connect(self) -> None:
        if self._closing.is_set():
            raise UnavailableError(CLOSED)
        forks.check()
        if not self._is_connected:  # not in the constructor: channels belong to the loop they were made in
            self._is_connected = True
            forks.opened(self)

    def _open_ticketed(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, tls=self._tls)  # the ticket stands for the services' token

    def _open_instance(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, token=self._service_token, tls=self._tls)

    async def _unary(self, name: str, request: Any, timeout: float | None) -> Any:
        budget, opening = self._settings.budget(timeout), self._opening(name, request)
        while True:
            try:
                return readable(await opening.open(budget.remaining()))
            except grpc.RpcError as error:
                delay = budget.after(error)
                opening.failed()
                await _wait(self._closing, delay)
            except asyncio.CancelledError:
                if _task_is_cancelled():
                    raise
                raise UnavailableError(CLOSED) from None


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event for so long at most."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


def _task_is_cancelled() -> bool:
    """Whether this task was cancelled; grpc reports a call that was cancelled in the same way."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncStream(Answered, AsyncIterator[Chunk]):
    """An answer as it comes: iterate over its chunks with ``async for``.

    Leaving it before its end (``cancel``, the end of an ``async with`` block, cancelling the task that reads, dropping
    the last reference) cancels the request on the server.

    Attributes:
        reader: The task that reads it for a synchronous :class:`baton.client.Stream`.
    """

    reader: asyncio.Task[None] | None = None

    def __init__(self, opening: Opening, n: int, budget: Budget, parse: AnswerParser | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._cancelled, self._aborted = asyncio.Event(), asyncio.Event()
        self._done = False
        self._call: Any = None
        self._opening, self._budget = opening, budget
        self._rest: Rest | None = None
        self.answer = Answer(n, parse)
        self._pending: deque[Chunk] = deque()
        self._call = opening.open(budget.remaining())

    async def __anext__(self) -> Chunk:
        while self._cancelled.is_set() or not self._pending:
            chunks = await self.next_chunks()
            if chunks is None:
                raise StopAsyncIteration
            self._pending.extend(chunks)
        return self._pending.popleft()

    async def next_chunks(self) -> list[Chunk] | None:
        """Return what the next message brings, which may be nothing; ``None`` at the end.

        Raises:
            BatonError: See :meth:`baton.Client.generate`.
        """
        if self._done or self._cancelled.is_set():
            return None
        try:
            message = readable(await self._call.read())
        except asyncio.CancelledError:
            if self._cancelled.is_set() and not _task_is_cancelled():
                return None
            self.cancel()
            if _task_is_cancelled():
                raise
            raise UnavailableError(CLOSED) from None
        except grpc.RpcError as error:
            if self.answer.started and not self._opening.resumes:
                self._done = True
                raise from_rpc_error(error) from error
            await self._try_again(error)
            return []
        if message is not grpc.aio.EOF:  # type: ignore[attr-defined]
            if self._rest is None:
                return self.answer.feed(message)
            chunks = self.answer.feed_rest(message, self._rest.index, self._rest.repeated)
            self._rest = replace(self._rest, repeated=0) if chunks else self._rest
            return chunks
        if self._rest is not None and not self.answer.complete:  # another sequence's turn
            self._go_on()
            return []
        self._done = True
        self.answer.require_complete()
        return None

    async def collect(self) -> Generation:
        """Read to the end and return everything that came, chunks taken before included."""
        async with self:
            async for _ in self:
                pass
        return self.result()

    def result(self) -> Generation:
        """Return what has come so far."""
        return self.answer.result()

    def cancel(self) -> None:
        """End the request; the iteration stops."""
        self._cancelled.set()
        self.abort()

    def abort(self) -> None:
        """End the request because the client is closed, as who reads is told."""
        self._aborted.set()
        if self._call is not None and not self._done:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # Whatever thread drops the last reference, calls are cancelled in their loop.
        if self._call is not None and not (self._done or self._cancelled.is_set()):
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its calls are
                self._loop.call_soon_threadsafe(self._call.cancel)

    async def _try_again(self, error: grpc.RpcError) -> None:
        try:
            delay = self._budget.after(error)
            self._opening.failed()
            await _wait(self._aborted, delay)
            if not self._cancelled.is_set():
                self._go_on()
        except BaseException:
            self._done = True
            raise

    def _go_on(self) -> None:
        """Ask again: from the beginning, or, once tokens have come, for what is missing of a sequence."""
        self._rest = rest_of(self._opening.request, self.answer) if self.answer.started else None
        rest = None if self._rest is None else self._rest.request
        self._call = self._opening.open(self._budget.remaining(), rest)
