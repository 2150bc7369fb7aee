"""The synchronous client."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.client.call_state import DEFAULT_RETRIES, DEFAULT_TIMEOUT_S, Answer, Budget, Settings
from baton.client.direct_sync import DirectCall, DirectLinks
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


class Client:
    """Speaks to a Baton router over gRPC.

    May be used from several threads. Close it, or use it as a context manager.

    Args:
        address: ``host:port`` of the router's gRPC server.
        token: API key or shared token, if the router wants one.
        timeout: Seconds that a call may take if it names no time-out of its own.
        retries: Tries after the first where no instance was available and no token has come yet.
        direct: Have tokens from decode instances themselves; the router only places, and signs a ticket. If the
            instance's stream breaks, the router goes on with it.
        tokenizer: With ``direct``: directory with the model's tokenizer; empty: the path that the instance names.
        tls: Certificates, where the services use some: ``baton.rpc.tls.Tls(cert, key, ca)``.

    Raises:
        InvalidRequestError: An argument cannot work; names it.
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
        self._channel = self._settings.channel(address)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._direct = DirectLinks(self._settings, self._stub, tokenizer) if direct else None
        self._closed = False

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        stream: Literal[False] = False,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        stream: Literal[True],
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Stream: ...

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        stream: bool = False,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Generation | Stream:
        """Generate from a prompt.

        Args:
            prompt: Text, token ids, or chat messages (``{"role": ..., "content": ...}``).
            model: Name of the model; empty: the one that is served.
            stream: Return an iterator of chunks instead of the whole answer.
            timeout: Seconds for the whole call; ``None``: the client's.
            **options: See :class:`baton.client.Options`.

        Raises:
            BatonError: See :mod:`baton.errors`. With ``stream=True`` most come from the iteration.
        """
        request = build_generate(prompt, model, options)
        answer = Stream(self._open_generate(request), request.sampling.n, self._settings.budget(timeout))
        return answer if stream else answer.collect()

    def route(
        self, prompt: Prompt, *, model: str = "", cache_salt: str = "", timeout: float | None = None
    ) -> RouteDecision:
        """Ask where a prompt would go, and why; nothing is reserved."""
        request = build_route(prompt, model, cache_salt)
        return read_decision(self._unary(self._stub.Route, request, timeout).decision)

    def list_instances(self, *, timeout: float | None = None) -> list[Instance]:
        """Return every instance that the router knows."""
        response = self._unary(self._stub.ListInstances, router_pb2.ListInstancesRequest(), timeout)
        return [read_instance(item) for item in response.instances]

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the models that requests can name."""
        response = self._unary(self._stub.ListModels, router_pb2.ListModelsRequest(), timeout)
        return [read_model(item) for item in response.models]

    def close(self) -> None:
        """End every call and the connection."""
        self._closed = True
        if self._direct is not None:
            self._direct.close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open_generate(self, request: router_pb2.RouterGenerateRequest) -> Callable[[float], Any]:
        links = self._direct
        if links is None:
            return self._open(self._stub.Generate, request)

        def call(timeout: float) -> DirectCall:
            if self._closed:
                raise UnavailableError("this client is closed")
            return DirectCall(links, request, timeout)

        return call

    def _open(self, method: Any, request: Any) -> Callable[[float], Any]:
        def call(timeout: float) -> Any:
            if self._closed:
                raise UnavailableError("this client is closed")
            return method(request, timeout=timeout, metadata=self._settings.metadata)

        return call

    def _unary(self, method: Any, request: Any, timeout: float | None) -> Any:
        budget, call = self._settings.budget(timeout), self._open(method, request)
        while True:
            try:
                return call(budget.remaining())
            except grpc.RpcError as error:
                time.sleep(budget.after(error))


class Stream(Iterator[Chunk]):
    """An answer as it comes: iterate over its chunks.

    Leaving it before its end (``cancel``, the end of a ``with`` block, dropping the last reference) cancels the
    request on the server. ``cancel`` may be called from another thread.
    """

    def __init__(self, open_call: Callable[[float], Any], n: int, budget: Budget) -> None:
        self._stopped = threading.Event()
        self._done = False
        self._call: Any = None
        self._open_call, self._budget = open_call, budget
        self._answer = Answer(n)
        self._pending: deque[Chunk] = deque()
        self._open()

    def __next__(self) -> Chunk:
        while not self._pending:
            if self._done or self._stopped.is_set():
                raise StopIteration
            self._pull()
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

    def collect(self) -> Generation:
        """Read to the end and return everything that came, chunks taken before included."""
        with self:
            for _ in self:
                pass
        return self._answer.result()

    def cancel(self) -> None:
        """End the request; the iteration stops."""
        self._stopped.set()
        if self._call is not None and not self._done:
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if not self._done:
            self.cancel()

    def _open(self) -> None:
        self._call = self._open_call(self._budget.remaining())
        if self._stopped.is_set():  # cancelled by another thread while it was opened
            self._call.cancel()

    def _pull(self) -> None:
        try:
            self._pending.extend(self._answer.feed(next(self._call)))
        except StopIteration:
            self._done = True
            self._answer.require_complete()
        except grpc.RpcError as error:
            if self._stopped.is_set():
                self._done = True
                return
            if self._answer.started:
                self._done = True
                raise from_rpc_error(error) from error
            self._try_again(error)

    def _try_again(self, error: grpc.RpcError) -> None:
        try:
            if not self._stopped.wait(self._budget.after(error)):
                self._open()
        except BaseException:
            self._done = True
            raise
