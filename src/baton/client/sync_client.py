"""The synchronous client: the asynchronous one in a background thread's event loop."""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypeVar, Unpack, overload

from baton.client.async_client import AsyncClient
from baton.client.async_stream import AsyncStream
from baton.client.portal import Portal
from baton.client.request import Options, Prompt
from baton.client.scaling import Switch
from baton.client.settings import CLOSED, DEFAULT_RETRIES, DEFAULT_TIMEOUT_S
from baton.client.types import Answered, Chunk, Generation, Instance, Model, RouteDecision, Stats
from baton.errors import BatonError, UnavailableError
from baton.rpc.tls import Tls
from baton.types import Role

T = TypeVar("T")

_GRACE_S = 5.0
"""How much longer than its deadline a call is waited for: calls end by their deadlines, in the event loop."""
_LONGEST_SCALE_S = 86400.0


class Client:
    """Speaks to a Baton router over gRPC.

    May be used from several threads, which share one background thread and its connection. Close it, or use it as a
    context manager. A client that was used does not survive a fork: make one in each process.

    Args:
        address: ``host:port`` of the router's gRPC server, or those of several routers of the same instances: when one
            is out of reach the next is asked, and goes on with answers that have begun.
        token: API key, if the router wants one.
        token_file: File with the services' token, for a service: both ends prove it to each other, it is not sent.
        timeout: Seconds that a call may take if it names no time-out of its own.
        retries: Tries after the first where no instance was available and no token has come yet.
        direct: Have tokens from decode instances themselves; the router only places, and signs a ticket. If the
            instance's stream breaks, the router goes on with it.
        tokenizer: With ``direct``: directory with the model's tokenizer; empty: the path that the instance names.
        tls: Certificates, where the services use some: ``baton.rpc.tls.Tls(cert, key, ca)``.

    Raises:
        InvalidRequestError: An argument cannot work; names it.
        ConfigError: The token file cannot be read, or is open to others.
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
        self._core = AsyncClient(
            address,
            token=token,
            token_file=token_file,
            timeout=timeout,
            retries=retries,
            direct=direct,
            tokenizer=tokenizer,
            tls=tls,
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
        if not stream:
            return self._call(self._core.generate(prompt, model=model, timeout=timeout, **options), timeout)
        opening = self._core.generate(prompt, model=model, timeout=timeout, stream=True, **options)
        messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        try:
            core = self._call(_open_stream(opening, messages, self._portal), timeout)
        except BaseException:
            del messages  # which ends the request: the traceback would keep it
            raise
        return Stream(self, core, messages, timeout)

    def route(
        self, prompt: Prompt, *, model: str = "", cache_salt: str = "", timeout: float | None = None
    ) -> RouteDecision:
        """Ask where a prompt would go, and why; nothing is reserved."""
        return self._call(self._core.route(prompt, model=model, cache_salt=cache_salt, timeout=timeout), timeout)

    def list_instances(self, *, timeout: float | None = None) -> list[Instance]:
        """Return every instance that the router knows."""
        return self._call(self._core.list_instances(timeout=timeout), timeout)

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the models that requests can name."""
        return self._call(self._core.models(timeout=timeout), timeout)

    def stats(self, *, window: float = 60.0, timeout: float | None = None) -> Stats:
        """Return how requests fared in the last ``window`` seconds (at most 180): rates, percentiles, the queue.

        Raises:
            BatonError: Nobody answers, or the API key is not an administrator's.
        """
        return self._call(self._core.stats(window=window, timeout=timeout), timeout)

    def explain(self, request_id: str, *, timeout: float | None = None) -> dict[str, Any]:
        """Return why a request went where it went, and how it fared: what ``baton explain --json`` prints.

        Args:
            request_id: The answer's ``request_id``, or the ``id`` or ``x-request-id`` of an answer over HTTP.
            timeout: Seconds; ``None``: the client's.

        Raises:
            NotFoundError: The router does not remember it: the latest requests alone are kept, by the router that
                placed them.
        """
        return self._call(self._core.explain(request_id, timeout=timeout), timeout)

    def health(self, *, timeout: float = 2.0) -> dict[str, bool]:
        """Return, by address, which of the client's routers serve; one that does not answer in time does not.

        Args:
            timeout: Seconds to wait for each.

        Raises:
            UnavailableError: The client is closed.
        """
        return self._call(self._core.health(timeout=timeout), timeout)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Answer a conversation: ``generate`` with messages; ``answer.message`` is what to append to them.

        Raises:
            InvalidRequestError: ``messages`` are no messages with role and content.
            BatonError: See :meth:`generate`.
        """
        return self._call(self._core.chat(messages, model=model, timeout=timeout, **options), timeout)

    def map(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = 16,
        keep_errors: bool = False,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Iterator[Generation | BatonError]:
        """Answer many prompts, some at a time, and yield the answers in the order of the prompts.

        Args:
            prompts: Taken as they are needed, in the client's thread: an iterator may be endless.
            concurrency: Requests at a time.
            keep_errors: Yield an error in the place of an answer instead of raising it.
            model: See :meth:`generate`.
            timeout: Seconds for each.
            **options: See :class:`baton.client.Options`.

        Raises:
            BatonError: A request failed; those that run are cancelled.
        """
        answers = self._core.map(
            prompts, concurrency=concurrency, keep_errors=keep_errors, model=model, timeout=timeout, **options
        )
        try:
            while (answer := self._call(_next(answers), timeout)) is not None:
                yield answer
        finally:
            self._call(_close(answers), timeout)

    def drain(self, instance: str, *, wait: float = 60.0, migrate: bool = False) -> int:
        """Have an instance take no new requests, and wait for those that run.

        Args:
            instance: Its id.
            wait: Seconds; 0: only stop admission.
            migrate: When they are over, routers go on elsewhere with what still runs.

        Returns:
            Requests that still run.

        Raises:
            NotFoundError: The router knows no such instance.
            BatonError: Nobody answers, or ``token_file`` is missing.
        """
        return self._call(self._core.drain(instance, wait=wait, migrate=migrate), wait + self._timeout)

    def set_role(self, instance: str, role: Role) -> None:
        """Make an idle instance one of the other role, with its caches; a drained one takes requests again.

        Raises:
            BusyError: It is not idle: drain it first.
            NotFoundError: The router knows no such instance.
            BatonError: Nobody answers, or ``token_file`` is missing.
        """
        self._call(self._core.set_role(instance, role), None)

    def scale(
        self, *, prefill: int | None = None, decode: int | None = None, wait: float = 30.0, dry_run: bool = False
    ) -> list[Switch]:
        """Change the ratio while requests run: the least busy instances of the role that has too many change theirs.

        Args:
            prefill: Instances wanted; ``None``: what is left.
            decode: Likewise; at least one.
            wait: Seconds in which requests may end on an instance, before they go on elsewhere.
            dry_run: Only say which instances would change.

        Returns:
            Those that changed, in order.

        Raises:
            ConfigError: The numbers do not add up to the instances that there are.
            BatonError: Somebody does not answer, or an instance stayed busy.
        """
        work = self._core.scale(prefill=prefill, decode=decode, wait=wait, dry_run=dry_run)
        return self._portal.call(work, _LONGEST_SCALE_S)

    def close(self) -> None:
        """End every call, the connection and the background thread."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, T], timeout: float | None) -> T:
        return self._portal.call(work, self._patience(timeout))

    def _patience(self, timeout: float | None) -> float:
        return (self._timeout if timeout is None else timeout) + _GRACE_S


async def _next(answers: AsyncIterator[T]) -> T | None:
    return await anext(answers, None)


async def _close(answers: Any) -> None:
    await answers.aclose()


_Message: TypeAlias = Chunk | Exception | None
"""What the event loop hands to a stream: a chunk, the error that ended it, or ``None`` at its end."""


async def _open_stream(
    opening: Coroutine[Any, Any, AsyncStream], messages: queue.SimpleQueue[_Message], portal: Portal
) -> AsyncStream:
    core = await opening
    # The request lives as long as its queue: the caller may be interrupted before it has a stream.
    weakref.finalize(messages, portal.post, core.cancel).atexit = False
    core.reader = asyncio.create_task(_read(core, weakref.ref(messages)))
    return core


async def _read(core: AsyncStream, messages: weakref.ref[queue.SimpleQueue[_Message]]) -> None:
    """Put what comes into a queue: a waiting thread takes it without a turn of the event loop per chunk."""

    def put(message: _Message) -> None:
        known = messages()
        if known is not None:
            known.put(message)

    try:
        while (chunks := await core.next_chunks()) is not None:
            for chunk in chunks:
                put(chunk)
        put(None)
    except asyncio.CancelledError:
        put(UnavailableError(CLOSED))
        raise
    except Exception as error:
        put(error)  # for the thread that reads


class Stream(Answered, Iterator[Chunk]):
    """An answer as it comes: iterate over its chunks.

    Leaving it before its end (``cancel``, the end of a ``with`` block, dropping the last reference) cancels the
    request on the server. ``cancel`` may be called from another thread. What comes is read ahead of the iteration, at
    most one answer.
    """

    def __init__(
        self, client: Client, core: AsyncStream, messages: queue.SimpleQueue[_Message], timeout: float | None
    ) -> None:
        self._client, self._core, self._messages, self._timeout = client, core, messages, timeout
        self.answer = core.answer
        self._ended = False

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        message = self._client._portal.take(self._messages, self._client._patience(self._timeout))
        cancelled, self._ended = self._ended, self._ended or not isinstance(message, Chunk)
        if isinstance(message, Chunk) and not cancelled:
            return message
        self._messages.put(None)  # for other threads that read
        if isinstance(message, Exception) and not cancelled:
            raise message
        raise StopIteration

    def collect(self) -> Generation:
        """Read to the end and return everything that came, chunks taken before included."""
        with self:
            for _ in self:
                pass
        return self.answer.result()

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
