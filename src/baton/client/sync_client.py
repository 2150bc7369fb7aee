"""The synchronous client: the asynchronous one behind a :class:`~baton.client.portal.Portal`."""

from __future__ import annotations

import asyncio
import functools
import queue
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypeVar, Unpack, overload

from baton.client.async_client import AsyncClient, AsyncStream
from baton.client.call_state import CLOSED, DEFAULT_RETRIES, DEFAULT_TIMEOUT_S
from baton.client.portal import Portal
from baton.client.request import Options, Prompt
from baton.client.types import Chunk, Generation, Instance, Model, RouteDecision, Trace
from baton.errors import UnavailableError
from baton.rpc.tls import Tls

T = TypeVar("T")

_GRACE_S = 5.0
"""How much longer than its deadline a call is waited for: calls end by their deadlines, in the event loop."""


class Client:
    """Speaks to a Baton router over gRPC.

    May be used from several threads, which share one background thread and its connection. Close it, or use it as a
    context manager. A client that was used does not survive a fork: make one in each process.

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
        self._core = AsyncClient(
            address, token=token, timeout=timeout, retries=retries, direct=direct, tokenizer=tokenizer, tls=tls
        )
        self._timeout = timeout
        self._portal = Portal()
        # Ends the thread of a client that is dropped, and of one that is open when the interpreter exits.
        self._finalizer = weakref.finalize(self, self._portal.close, self._core.close)

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
        generate: Any = functools.partial(self._core.generate, prompt, model=model, timeout=timeout, **options)
        if not stream:
            answer: Generation = self._call(generate, timeout)
            return answer
        messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        core = self._call(functools.partial(_open_stream, generate, messages), timeout)
        return Stream(self, core, messages, timeout)

    def route(
        self, prompt: Prompt, *, model: str = "", cache_salt: str = "", timeout: float | None = None
    ) -> RouteDecision:
        """Ask where a prompt would go, and why; nothing is reserved."""
        route = functools.partial(self._core.route, prompt, model=model, cache_salt=cache_salt, timeout=timeout)
        return self._call(route, timeout)

    def list_instances(self, *, timeout: float | None = None) -> list[Instance]:
        """Return every instance that the router knows."""
        return self._call(functools.partial(self._core.list_instances, timeout=timeout), timeout)

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the models that requests can name."""
        return self._call(functools.partial(self._core.models, timeout=timeout), timeout)

    def close(self) -> None:
        """End every call, the connection and the background thread."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None) -> T:
        return self._portal.call(work, self._patience(timeout))

    def _patience(self, timeout: float | None) -> float:
        return (self._timeout if timeout is None else timeout) + _GRACE_S


_Message: TypeAlias = list[Chunk] | Exception | None
"""What the event loop hands to a stream: chunks, the error that ended it, or ``None`` at its end."""


async def _open_stream(
    generate: Callable[..., Coroutine[Any, Any, AsyncStream]], messages: queue.SimpleQueue[_Message]
) -> AsyncStream:
    core = await generate(stream=True)
    core.reader = asyncio.create_task(_read(core, messages))
    return core


async def _read(core: AsyncStream, messages: queue.SimpleQueue[_Message]) -> None:
    """Put what comes into a queue: a waiting thread takes it without a turn of the event loop per chunk."""
    try:
        while (chunks := await core.next_chunks()) is not None:
            messages.put(chunks)
        messages.put(None)
    except asyncio.CancelledError:
        messages.put(UnavailableError(CLOSED))
        raise
    except Exception as error:
        messages.put(error)  # for the thread that reads


class Stream(Iterator[Chunk]):
    """An answer as it comes: iterate over its chunks.

    Leaving it before its end (``cancel``, the end of a ``with`` block, dropping the last reference) cancels the
    request on the server. ``cancel`` may be called from another thread. What comes is read ahead of the iteration, at
    most one answer.
    """

    def __init__(
        self, client: Client, core: AsyncStream, messages: queue.SimpleQueue[_Message], timeout: float | None
    ) -> None:
        self._client, self._core, self._messages, self._timeout = client, core, messages, timeout
        self._pending: deque[Chunk] = deque()
        self._ended = False

    def __next__(self) -> Chunk:
        while not self._pending:
            if self._ended:
                raise StopIteration
            message = self._client._portal.take(self._messages, self._client._patience(self._timeout))
            if isinstance(message, list):
                self._pending.extend(message)
                continue
            self._ended = True
            if message is not None:
                raise message
        return self._pending.popleft()

    @property
    def request_id(self) -> str:
        """The request's id, once the first message has come."""
        return self._core.request_id

    @property
    def trace(self) -> Trace | None:
        """How the request came to its KV; complete at the end of the stream."""
        return self._core.trace

    @property
    def decision(self) -> RouteDecision | None:
        """Where the request runs."""
        return self._core.decision

    def collect(self) -> Generation:
        """Read to the end and return everything that came, chunks taken before included."""
        with self:
            for _ in self:
                pass
        return self._core.result()

    def cancel(self) -> None:
        """End the request; the iteration stops."""
        self._ended = True
        self._client._portal.post(self._core.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()
