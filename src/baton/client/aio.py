"""The asynchronous client: the synchronous one's twin on asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc
import grpc.aio

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.client.call_state import DEFAULT_RETRIES, DEFAULT_TIMEOUT_S, Answer, Budget, Settings
from baton.client.direct_aio import AsyncDirectCall, AsyncDirectLinks
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
        self._direct: AsyncDirectLinks | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
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

        def call(timeout: float) -> AsyncDirectCall:
            stub = self._connected()
            if self._direct is None:
                self._direct = AsyncDirectLinks(self._settings, stub, self._tokenizer)
            return AsyncDirectCall(self._direct, request, timeout)

        return call

    def _open(self, name: str, request: Any) -> Callable[[float], Any]:
        def call(timeout: float) -> Any:
            return getattr(self._connected(), name)(request, timeout=timeout, metadata=self._settings.metadata)

        return call

    def _connected(self) -> Any:
        if self._closed:
            raise UnavailableError("this client is closed")
        if self._channel is None:  # not in the constructor: a channel belongs to the loop it was made in
            self._channel = self._settings.aio_channel(self._settings.address)
            self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        return self._stub

    async def _unary(self, name: str, request: Any, timeout: float | None) -> Any:
        budget, call = self._settings.budget(timeout), self._open(name, request)
        while True:
            try:
                return await call(budget.remaining())
            except grpc.RpcError as error:
                await asyncio.sleep(budget.after(error))


class AsyncStream(AsyncIterator[Chunk]):
    """An answer as it comes: iterate over its chunks with ``async for``.

    Leaving it before its end (``cancel``, the end of an ``async with`` block, cancelling the task that reads, dropping
    the last reference) cancels the request on the server.
    """

    def __init__(self, open_call: Callable[[float], Any], n: int, budget: Budget) -> None:
        self._stopped = False
        self._done = False
        self._call: Any = None
        self._open_call, self._budget = open_call, budget
        self._answer = Answer(n)
        self._pending: deque[Chunk] = deque()
        self._call = open_call(budget.remaining())

    async def __anext__(self) -> Chunk:
        while not self._pending:
            if self._done or self._stopped:
                raise StopAsyncIteration
            await self._pull()
        return self._pending.popleft()

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
        return self._answer.result()

    def cancel(self) -> None:
        """End the request; the iteration stops."""
        self._stopped = True
        if self._call is not None and not self._done:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if not self._done:
            self.cancel()

    async def _pull(self) -> None:
        try:
            message = await self._call.read()
        except asyncio.CancelledError:
            # grpc reports a call that was cancelled here in the same way as a task that was.
            task = asyncio.current_task()
            if self._stopped and not (task and task.cancelling()):
                return
            self.cancel()
            raise
        except grpc.RpcError as error:
            if self._answer.started:
                self._done = True
                raise from_rpc_error(error) from error
            await self._try_again(error)
            return
        if message is not grpc.aio.EOF:  # type: ignore[attr-defined]
            self._pending.extend(self._answer.feed(message))
            return
        self._done = True
        self._answer.require_complete()

    async def _try_again(self, error: grpc.RpcError) -> None:
        try:
            await asyncio.sleep(self._budget.after(error))
            if not self._stopped:
                self._call = self._open_call(self._budget.remaining())
        except BaseException:
            self._done = True
            raise
