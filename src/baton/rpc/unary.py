"""Unary calls of a service without gRPC: many at a time on one connection of frames; see ``baton.rpc.frames``.

The client's frames are ``UnaryCalls``, the server's ``UnaryAnswers``. Methods, messages, deadlines, cancellation and
errors are those of the gRPC service, whose servicer does the work here too. Calls that want no answer may wait a moment
for others to travel with (:meth:`UnaryClient.post`), and are begun behind them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from baton.api.v1 import calls_pb2
from baton.errors import BatonError, DeadlineError, InvalidRequestError, UnavailableError
from baton.rpc.errors import from_status, status_code, status_details
from baton.rpc.frame_client import FrameClient
from baton.rpc.frame_server import Outlet

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_CALLS = 4096
"""Calls that a connection may have at a time, their answers that are not sent yet included."""
POST_S = 0.005
"""How long a call that wants no answer may wait for another one to travel with."""
SILENCE_S = 15.0
"""After which a host is given up that does not confirm what was sent; gRPC's channels do so too."""
_MAX_BATCH_BYTES = 4 * 2**20
_MAX_TIMEOUT_MS = 2**32 - 1
_NOBODY = None, bytes
_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Method:
    """A unary method.

    Attributes:
        parse: Reads its request.
        serve: Serves it: request, context.
    """

    parse: Callable[[bytes], Any]
    serve: Callable[[Any, Any], Awaitable[Any]]


def methods_of(servicer: object, service: ServiceDescriptor) -> dict[str, Method]:
    """Return the unary methods of a servicer by name."""
    return {
        method.name: Method(GetMessageClass(method.input_type).FromString, getattr(servicer, method.name))
        for method in service.methods
        if not (method.client_streaming or method.server_streaming)
    }


class UnaryServer:
    """Serves the calls of all connections.

    Args:
        methods: By name.
    """

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self.methods = methods
        self.tasks: set[asyncio.Task[None]] = set()
        self.stopping = False

    def connection(self, outlet: Outlet) -> UnaryConnection:
        """Return what serves a connection of a ``FrameServer``."""
        return UnaryConnection(self, outlet)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s`` seconds, then cancel them."""
        self.stopping = True
        if self.tasks and grace_s > 0:
            await asyncio.wait(self.tasks, timeout=grace_s)
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)


class UnaryConnection:
    """The calls of one connection; a ``baton.rpc.frame_server.Handler``."""

    def __init__(self, server: UnaryServer, outlet: Outlet) -> None:
        self._server, self._outlet = server, outlet
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, _Running] = {}
        self._unanswered = itertools.count(-1, -1)  # keys of calls that want no answer
        self._answers = calls_pb2.UnaryAnswers()

    def receive(self, payload: bytes) -> None:
        """Begin and cancel calls."""
        message = calls_pb2.UnaryCalls.FromString(payload)
        answered = False
        for call in message.calls:
            if call.call or not answered:
                answered = answered or bool(call.call)
                self._begin(call)
            else:  # nobody waits for it: the answers of those before it go out first
                self._loop.call_soon(self._begin, call)
        for key in message.cancels:
            running = self._running.get(key)
            if running is not None:
                running.task.cancel()

    def gather(self) -> bytes:
        """Return the answers that there are."""
        if not self._answers.answers:
            return b""
        answers, self._answers = self._answers, calls_pb2.UnaryAnswers()
        return answers.SerializeToString()

    def close(self) -> None:
        """Cancel what still runs."""
        for running in self._running.values():
            running.task.cancel()

    def _begin(self, call: calls_pb2.UnaryCall) -> None:
        server = self._server
        method = server.methods.get(call.method)
        if method is None:
            self._end(call.call, grpc.StatusCode.UNIMPLEMENTED, f"no method {call.method[:80]!r}")
        elif server.stopping:
            self._end(call.call, grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        elif call.call in self._running:
            self._end(call.call, grpc.StatusCode.ALREADY_EXISTS, f"call {call.call} is running")
        elif len(self._running) + len(self._answers.answers) >= MAX_CALLS:
            self._end(call.call, grpc.StatusCode.RESOURCE_EXHAUSTED, f"this connection has {MAX_CALLS} calls already")
        else:
            key = call.call or next(self._unanswered)
            running = _Running(call.timeout_ms / 1000 if call.timeout_ms else None)
            self._running[key] = running
            running.task = asyncio.create_task(self._run(call, method, running))
            server.tasks.add(running.task)
            running.task.add_done_callback(lambda task: self._ended(key, running, task))

    def _ended(self, key: int, running: _Running, task: asyncio.Task[None]) -> None:
        # Not the task's own last words: one that is cancelled before its first step says none.
        running.ended()
        del self._running[key]
        self._server.tasks.discard(task)

    async def _run(self, call: calls_pb2.UnaryCall, method: Method, running: _Running) -> None:
        status = grpc.StatusCode
        try:
            response = await method.serve(_parsed(call, method), running)
            if call.call:
                self._answers.answers.add(call=call.call, response=response.SerializeToString())
                self._answered()
        except BatonError as error:
            self._end(call.call, status_code(error), error.message, status_details(error))
        except asyncio.CancelledError:
            if running.expired:
                self._end(call.call, status.DEADLINE_EXCEEDED, f"{call.method} took longer than its deadline")
            else:
                self._end(call.call, status.CANCELLED, "the call was cancelled")
        except Exception as error:
            log.exception("a handler failed")
            self._end(call.call, status.INTERNAL, f"internal error: {type(error).__name__}: {error}")

    def _end(self, call: int, code: grpc.StatusCode, message: str, details: bytes = b"") -> None:
        if call:
            self._answers.answers.add(call=call, code=code.value[0], message=message, details=details)
            self._answered()

    def _answered(self) -> None:
        if len(self._running) <= 1:  # nothing else is about to be answered
            self._outlet.flush()
        else:
            self._outlet.filled()


class _Running:
    """A call that runs, and the context that its servicer is given."""

    __slots__ = ("_deadline", "_timer", "expired", "task")

    def __init__(self, timeout_s: float | None) -> None:
        self.task: asyncio.Task[None]
        self.expired = False
        self._deadline = self._timer = None
        if timeout_s is not None:
            self._deadline = time.monotonic() + timeout_s
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline, as gRPC's context does; ``None``: there is none."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def ended(self) -> None:
        """Do not cancel the task any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self.expired = True
        self.task.cancel()


class UnaryClient(FrameClient):
    """The client's end; see ``FrameClient``."""

    def __init__(self, name: str, greeting: bytes) -> None:
        super().__init__(name, greeting, silence_s=SILENCE_S)
        self._next = 0
        self._calls: dict[int, tuple[asyncio.Future[Any], Callable[[bytes], Any]]] = {}
        self._later: list[calls_pb2.UnaryCall] = []
        self._cancels: list[int] = []
        self._posted: list[calls_pb2.UnaryCall] = []
        self._timer: asyncio.TimerHandle | None = None

    def call(
        self, method: str, request: bytes, timeout_s: float, parse: Callable[[bytes], T], *, posts_first: bool = False
    ) -> asyncio.Future[T]:
        """Begin a call; whoever cancels the future cancels the call.

        Args:
            method: Its name.
            request: Its message.
            timeout_s: Seconds until both sides give up.
            parse: Reads the response's message.
            posts_first: Have the server begin what was posted before this call, not behind it.

        Returns:
            The response, or the BatonError that the server raised, that the deadline has passed, or that the connection
            broke.
        """
        answer: asyncio.Future[T] = self._loop.create_future()
        if self.broken:
            answer.set_exception(UnavailableError(f"the connection to {self.name} is gone"))
            return answer
        self._next += 1
        key = self._next
        self._calls[key] = answer, parse
        if posts_first:
            self._later += self._posted
            self._posted = []
        timeout_ms = min(_MAX_TIMEOUT_MS, max(1, math.ceil(1000 * timeout_s)))
        self._later.append(calls_pb2.UnaryCall(call=key, method=method, timeout_ms=timeout_ms, request=request))
        if len(self._calls) == 1:
            self.flush()
        else:
            self.wake()  # there may be more to send
        timer = self._loop.call_later(timeout_s, self._expire, answer, method)
        answer.add_done_callback(lambda _: self._ended(key, timer))
        return answer

    def post(self, method: str, request: bytes) -> None:
        """Make a call that wants no answer; it goes out with the next call, or soon."""
        if not self.broken:
            self._posted.append(calls_pb2.UnaryCall(method=method, request=request))
            if self._timer is None:
                self._timer = self._loop.call_later(POST_S, self.wake)

    def close(self) -> None:
        """Send what waits, and end the connection; calls that run fail."""
        if not self.broken:
            self.flush()
            self._transport.close()

    def receive(self, payloads: Sequence[bytes]) -> None:
        """Hand out answers."""
        for payload in payloads:
            for answer in calls_pb2.UnaryAnswers.FromString(payload).answers:
                call, parse = self._calls.get(answer.call, _NOBODY)
                if call is None or call.done():
                    continue
                if answer.code:
                    code = _CODES.get(answer.code, grpc.StatusCode.UNKNOWN)
                    call.set_exception(from_status(code, answer.message, answer.details))
                else:
                    call.set_result(parse(answer.response))
                del self._calls[answer.call]

    def gather(self) -> bytes:
        """Return calls and cancellations, as many as one message may have."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._later += self._posted
        self._posted = []
        count = size = 0
        while count < len(self._later) and size < _MAX_BATCH_BYTES:
            size += len(self._later[count].request)
            count += 1
        if not count and not self._cancels:
            return b""
        message = calls_pb2.UnaryCalls(calls=self._later[:count], cancels=self._cancels)
        del self._later[:count]
        self._cancels = []
        return message.SerializeToString()

    def lost(self) -> None:
        """Fail what still runs."""
        if self._timer is not None:
            self._timer.cancel()
        calls, self._calls = self._calls, {}
        for call, _ in calls.values():
            if not call.done():
                call.set_exception(UnavailableError(f"the connection to {self.name} broke"))

    def _ended(self, key: int, timer: asyncio.TimerHandle) -> None:
        """Take back a call whose answer has not come."""
        timer.cancel()
        if self._calls.pop(key, None) is None or self.broken:
            return
        waiting = [call for call in self._later if call.call != key]
        if len(waiting) == len(self._later):
            self._cancels.append(key)
            self.wake()
        self._later = waiting

    def _expire(self, call: asyncio.Future[Any], method: str) -> None:
        if not call.done():
            call.set_exception(DeadlineError(f"{self.name} did not answer {method} in time"))


def _parsed(call: calls_pb2.UnaryCall, method: Method) -> Any:
    try:
        return method.parse(call.request)
    except DecodeError as error:
        raise InvalidRequestError(f"the message of {call.method} cannot be read", field="request") from error
