"""The asynchronous client, which the synchronous one drives too."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc
import grpc.aio

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.client import forks
from baton.client.direct import DirectCall, DirectLinks
from baton.client.request import Options, Prompt, build_generate, build_metadata, build_route
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
from baton.errors import DeadlineError, InvalidRequestError, UnavailableError
from baton.rpc.auth import HEADER
from baton.rpc.channel import Backoff, open_channel
from baton.rpc.errors import from_rpc_error, readable
from baton.rpc.service_token import read_token
from baton.rpc.tls import Tls

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

    address: str
    token: str | None
    timeout: float
    retries: int

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise InvalidRequestError(f"address must be host:port, got {self.address!r}", field="address")
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
        address: str = "127.0.0.1:8001",
        *,
        token: str | None = None,
        token_file: str = "",
        timeout: float = DEFAULT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
        direct: bool = False,
        tokenizer: str = "",
        tls: Tls | None = None,
    ) -> None:
        self._settings = Settings(address, token, timeout, retries)
        if token is not None and token_file:
            raise InvalidRequestError("token is an API key: give it or token_file", field="token_file")
        self._service_token = read_token(token_file)
        self._tls, self._is_direct, self._tokenizer = tls, direct, tokenizer
        self._direct: DirectLinks | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
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

    async def close(self) -> None:
        """End every call and the connection."""
        self._closing.set()
        for stream in list(self._streams):
            stream.abort()
        if self._direct is not None:
            await self._direct.close()
        if self._channel is not None:
            await self._channel.close(None)
        # gRPC keeps what it shares between event loops while channels are referred to: see _connected.
        self._direct = self._channel = self._stub = None
        forks.closed(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _open_generate(
        self, request: router_pb2.RouterGenerateRequest, metadata: tuple[tuple[str, str], ...]
    ) -> Callable[[float], Any]:
        if not self._is_direct:
            return self._open("Generate", request, metadata)

        def call(timeout: float) -> DirectCall:
            stub = self._connected()
            if self._direct is None:
                self._direct = DirectLinks(stub, self._open_instance, self._settings.metadata, self._tokenizer)
            return DirectCall(self._direct, request, timeout, metadata)

        return call

    def _open(self, name: str, request: Any, more: tuple[tuple[str, str], ...] = ()) -> Callable[[float], Any]:
        metadata = self._settings.metadata + more

        def call(timeout: float) -> Any:
            return getattr(self._connected(), name)(request, timeout=timeout, metadata=metadata)

        return call

    def _connected(self) -> Any:
        if self._closing.is_set():
            raise UnavailableError(CLOSED)
        forks.check()
        if self._channel is None:  # not in the constructor: a channel belongs to the loop it was made in
            forks.opened(self)
            self._channel = open_channel(self._settings.address, token=self._service_token, tls=self._tls)
            self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        return self._stub

    def _open_instance(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, tls=self._tls)  # the ticket stands for the services' token

    async def _unary(self, name: str, request: Any, timeout: float | None) -> Any:
        budget, call = self._settings.budget(timeout), self._open(name, request)
        while True:
            try:
                return readable(await call(budget.remaining()))
            except grpc.RpcError as error:
                await _wait(self._closing, budget.after(error))
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

    def __init__(
        self, open_call: Callable[[float], Any], n: int, budget: Budget, parse: AnswerParser | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._cancelled, self._aborted = asyncio.Event(), asyncio.Event()
        self._done = False
        self._call: Any = None
        self._open_call, self._budget = open_call, budget
        self.answer = Answer(n, parse)
        self._pending: deque[Chunk] = deque()
        self._call = open_call(budget.remaining())

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
            if self.answer.started:
                self._done = True
                raise from_rpc_error(error) from error
            await self._try_again(error)
            return []
        if message is not grpc.aio.EOF:  # type: ignore[attr-defined]
            return self.answer.feed(message)
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
            await _wait(self._aborted, self._budget.after(error))
            if not self._cancelled.is_set():
                self._call = self._open_call(self._budget.remaining())
        except BaseException:
            self._done = True
            raise
