"""The asynchronous client, which the synchronous one drives too."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc
import grpc.aio

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.client.call_state import CLOSED, DEFAULT_RETRIES, DEFAULT_TIMEOUT_S, Answer, Budget, Settings
from baton.client.direct import DirectCall, DirectLinks
from baton.client.request import Options, Prompt, build_generate, build_route
from baton.client.types import (
    Chunk,
    Generation,
    Instance,
    Model,
    RouteDecision,
    Trace,
    read_decision,
    read_instance,
    read_model,
)
from baton.errors import UnavailableError
from baton.rpc.errors import from_rpc_error
from baton.rpc.tls import Tls


class AsyncClient:
    """Speaks to a Baton router over gRPC, from one event loop.

    Args, time-outs, retries and errors are those of :class:`baton.Client`. The connection is made with the first call.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:8001",
        *,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
        direct: bool = False,
        tokenizer: str = "",
        tls: Tls | None = None,
    ) -> None:
        self._settings = Settings(address, token, timeout, retries, tls)
        self._is_direct, self._tokenizer = direct, tokenizer
        self._direct: DirectLinks | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()
        self._closed = False

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
        answer = AsyncStream(self._open_generate(request), request.sampling.n, self._settings.budget(timeout))
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
        self._closed = True
        for stream in list(self._streams):
            stream.abort()
        if self._direct is not None:
            await self._direct.close()
        if self._channel is not None:
            await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _open_generate(self, request: router_pb2.RouterGenerateRequest) -> Callable[[float], Any]:
        if not self._is_direct:
            return self._open("Generate", request)

        def call(timeout: float) -> DirectCall:
            stub = self._connected()
            if self._direct is None:
                self._direct = DirectLinks(self._settings, stub, self._tokenizer)
            return DirectCall(self._direct, request, timeout)

        return call

    def _open(self, name: str, request: Any) -> Callable[[float], Any]:
        def call(timeout: float) -> Any:
            return getattr(self._connected(), name)(request, timeout=timeout, metadata=self._settings.metadata)

        return call

    def _connected(self) -> Any:
        if self._closed:
            raise UnavailableError(CLOSED)
        if self._channel is None:  # not in the constructor: a channel belongs to the loop it was made in
            self._channel = self._settings.channel(self._settings.address)
            self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        return self._stub

    async def _unary(self, name: str, request: Any, timeout: float | None) -> Any:
        budget, call = self._settings.budget(timeout), self._open(name, request)
        while True:
            try:
                return await call(budget.remaining())
            except grpc.RpcError as error:
                await asyncio.sleep(budget.after(error))
            except asyncio.CancelledError:
                if _task_is_cancelled():
                    raise
                raise UnavailableError(CLOSED) from None


def _task_is_cancelled() -> bool:
    """Whether this task was cancelled; grpc reports a call that was cancelled in the same way."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncStream(AsyncIterator[Chunk]):
    """An answer as it comes: iterate over its chunks with ``async for``.

    Leaving it before its end (``cancel``, the end of an ``async with`` block, cancelling the task that reads, dropping
    the last reference) cancels the request on the server.

    Attributes:
        reader: The task that reads it for a synchronous :class:`baton.client.Stream`.
    """

    reader: asyncio.Task[None] | None = None

    def __init__(self, open_call: Callable[[float], Any], n: int, budget: Budget) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._done = False
        self._call: Any = None
        self._open_call, self._budget = open_call, budget
        self._answer = Answer(n)
        self._pending: deque[Chunk] = deque()
        self._call = open_call(budget.remaining())

    async def __anext__(self) -> Chunk:
        while not self._pending:
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
        if self._done or self._stopped.is_set():
            return None
        try:
            message = await self._call.read()
        except asyncio.CancelledError:
            if self._stopped.is_set() and not _task_is_cancelled():
                return None
            self.cancel()
            if _task_is_cancelled():
                raise
            raise UnavailableError(CLOSED) from None
        except grpc.RpcError as error:
            if self._answer.started:
                self._done = True
                raise from_rpc_error(error) from error
            await self._try_again(error)
            return []
        if message is not grpc.aio.EOF:  # type: ignore[attr-defined]
            return self._answer.feed(message)
        self._done = True
        self._answer.require_complete()
        return None

    @property
    def request_id(self) -> str:
        """The request's id, once the first message has come."""
        return self._answer.request_id

    @property
    def trace(self) -> Trace | None:
        """How the request came to its KV; complete at the end of the stream."""
        return self._answer.trace

    @property
    def decision(self) -> RouteDecision | None:
        """Where the request runs."""
        return self._answer.decision

    async def collect(self) -> Generation:
        """Read to the end and return everything that came, chunks taken before included."""
        async with self:
            async for _ in self:
                pass
        return self.result()

    def result(self) -> Generation:
        """Return what has come so far."""
        return self._answer.result()

    def cancel(self) -> None:
        """End the request; the iteration stops."""
        self._stopped.set()
        self.abort()

    def abort(self) -> None:
        """End the request because the client is closed, as who reads is told."""
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
        if self._call is not None and not self._done and not self._stopped.is_set():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its calls are
                self._loop.call_soon_threadsafe(self._call.cancel)

    async def _try_again(self, error: grpc.RpcError) -> None:
        try:
            delay = self._budget.after(error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), delay)
            if not self._stopped.is_set():
                self._call = self._open_call(self._budget.remaining())
        except BaseException:
            self._done = True
            raise
