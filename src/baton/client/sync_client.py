"""The synchronous client: the asynchronous one in a background thread's event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypeVar, Unpack, overload

from baton.client.async_client import CLOSED, DEFAULT_RETRIES, DEFAULT_TIMEOUT_S, AsyncClient, AsyncStream
from baton.client.request import Options, Prompt
from baton.client.types import Answered, Chunk, Generation, Instance, Model, RouteDecision
from baton.errors import BatonError, DeadlineError, UnavailableError
from baton.rpc.tls import Tls
from baton.types import Role

T = TypeVar("T")

_FORKED = "this client was used before the process was forked: make one client in each process"
_GRACE_S = 5.0
"""How much longer than its deadline a call is waited for: calls end by their deadlines, in the event loop."""
_CLOSE_S = 5.0
_LONGEST_WAIT_S = 1e8
"""Three years: a thread cannot wait much longer."""


class Portal:
    """Runs coroutines for threads that have no event loop. May be used from several threads at once.

    The thread starts with the first call and ends with :meth:`close`. It is a daemon: an open portal does not keep the
    interpreter from exiting. A portal belongs to the process it was first used in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._closed = False
        self._ending = asyncio.Event()
        self._last: Callable[[], Coroutine[Any, Any, None]] | None = None

    def call(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine to its end and return its result.

        An exception in this thread meanwhile (``KeyboardInterrupt``) cancels it.

        Args:
            work: What to run.
            timeout: Seconds after which the loop is given up; the work has a deadline of its own.

        Raises:
            UnavailableError: The portal is closed, or belongs to another process.
            DeadlineError: The event loop did not answer.
        """
        future = None
        try:
            future = self._submit(work)
            return future.result(min(timeout, _LONGEST_WAIT_S))
        except concurrent.futures.CancelledError:
            raise UnavailableError(CLOSED) from None
        except BaseException as error:
            if future is None:
                work.close()
            elif isinstance(error, TimeoutError) and not future.done():
                future.cancel()
                raise _unanswered(timeout) from error
            else:
                future.cancel()
            raise

    def take(self, items: queue.SimpleQueue[T], timeout: float) -> T:
        """Return the next item that a coroutine puts into a queue; wait as :meth:`call` does.

        Raises:
            UnavailableError: The portal belongs to another process.
            DeadlineError: The event loop did not answer.
        """
        self._check_process()
        try:
            return items.get(timeout=min(timeout, _LONGEST_WAIT_S))
        except queue.Empty as error:
            raise _unanswered(timeout) from error

    def post(self, action: Callable[[], object]) -> None:
        """Have something done in the loop and do not wait; a closed portal drops it. Safe in finalizers."""
        loop = self._loop
        if loop is not None and self._pid == os.getpid():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(action)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what runs, end the loop and wait for its thread. May be called twice and in finalizers.

        Args:
            last: Makes a coroutine that is run before.
        """
        if self._pid not in (0, os.getpid()):
            return  # after a fork there is no thread
        with self._lock:
            already, self._closed = self._closed, True
            thread = self._thread
        if thread is None:
            return
        if not already:
            self._last = last
            self.post(self._ending.set)
        if thread is not threading.current_thread():
            thread.join(2 * _CLOSE_S)

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        self._check_process()  # before the lock, which another thread may have held at the fork
        with self._lock:
            if self._closed:
                raise UnavailableError(CLOSED)
            # With the lock held: what is submitted is in the loop before close() ends it.
            return asyncio.run_coroutine_threadsafe(work, self._loop or self._start())

    def _check_process(self) -> None:
        if self._thread is threading.current_thread():
            raise RuntimeError("the synchronous client cannot be used in its own event loop")
        self._pid = self._pid or os.getpid()
        if self._pid != os.getpid():
            raise UnavailableError(_FORKED)

    def _start(self) -> asyncio.AbstractEventLoop:
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = runner.get_loop()
        # Known before it runs: an interrupt meanwhile must not leave a thread behind that nothing ends.
        self._thread = threading.Thread(target=self._run, args=(runner,), name="baton client", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system gives no thread
            self._loop = self._thread = None
            runner.close()
            raise
        return self._loop

    def _run(self, runner: asyncio.Runner) -> None:
        with runner:  # at its end it cancels the tasks that still run, whose callers are told that the client is closed
            runner.run(self._main())

    async def _main(self) -> None:
        asyncio.get_running_loop().set_exception_handler(_report)
        await self._ending.wait()
        if self._last is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._last(), _CLOSE_S)


def _unanswered(timeout: float) -> DeadlineError:
    return DeadlineError(f"the client's event loop did not answer within {timeout:g} s")


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # grpc wakes every event loop of the process through one socket; the loops that come too late to read it raise this.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


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
