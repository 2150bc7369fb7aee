"""What a client was connected with, and one call's state: its deadline, its retries, and what has arrived."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from baton.api.v1 import router_pb2
from baton.client.types import Choice, Chunk, Generation, RouteDecision, Trace, read_decision, read_trace
from baton.errors import DeadlineError, InternalError, InvalidRequestError
from baton.rpc.auth import HEADER
from baton.rpc.convert import finish_from_pb, logprob_from_pb, prompt_logprobs_from_pb
from baton.rpc.errors import from_rpc_error
from baton.rpc.server import MAX_MESSAGE_BYTES
from baton.rpc.tls import Tls
from baton.types import FinishReason, TokenLogprob

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_RETRIES = 2
CLOSED = "this client is closed"
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the time an attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),  # retries are decided here, where it is known whether a token has come
]


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
    tls: Tls | None = None

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

    def channel(self, address: str) -> grpc.aio.Channel:
        """Open a channel of the running loop."""
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        options = [*CHANNEL_OPTIONS, *self.tls.channel_options()]
        return grpc.aio.secure_channel(address, self.tls.channel_credentials(), options=options)

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

    def __init__(self, timeout: float, retries: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._timeout = timeout
        self._ends_at = clock() + timeout
        self._retries = retries
        self._delay = _FIRST_DELAY_S

    def remaining(self) -> float:
        """Seconds left.

        Raises:
            DeadlineError: None.
        """
        left = self._ends_at - self._clock()
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
        if error.code() is not grpc.StatusCode.UNAVAILABLE or self._retries <= 0:
            raise known from error
        delay = max(known.retry_after_s or 0.0, self._delay * random.uniform(0.5, 1.0))
        if delay >= self._ends_at - self._clock():
            raise known from error
        self._retries -= 1
        self._delay = min(2 * self._delay, _LONGEST_DELAY_S)
        return delay


@dataclass
class _Partial:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None


class Answer:
    """Gathers the messages of one generation.

    Attributes:
        started: Whether a token has come: from then on a failed call must not be repeated.
    """

    def __init__(self, n: int) -> None:
        self.started = False
        self.request_id = ""
        self.trace: Trace | None = None
        self.decision: RouteDecision | None = None
        self._prompt_logprobs: list[TokenLogprob | None] = []
        self._parts = [_Partial() for _ in range(n)]

    @property
    def complete(self) -> bool:
        """Whether every sequence has ended."""
        return all(part.finish_reason is not None for part in self._parts)

    def feed(self, message: router_pb2.RouterGenerateResponse) -> list[Chunk]:
        """Take a message and return its news.

        Raises:
            InternalError: The server names a sequence that was not asked for.
        """
        self.request_id = message.request_id or self.request_id
        if message.HasField("trace"):
            self.trace = read_trace(message.trace)
        if message.HasField("decision"):
            self.decision = read_decision(message.decision)
        if message.prompt_logprobs:
            self._prompt_logprobs = prompt_logprobs_from_pb(list(message.prompt_logprobs))
        chunks = [self._chunk(delta) for delta in message.deltas]
        self.started = self.started or bool(chunks)
        return chunks

    def result(self) -> Generation:
        """Return all that has arrived so far."""
        choices = [
            Choice(i, "".join(p.text), p.token_ids, p.finish_reason, p.stop_reason, p.logprobs or None)
            for i, p in enumerate(self._parts)
        ]
        return Generation(self.request_id, choices, self.trace, self.decision, self._prompt_logprobs)

    def require_complete(self) -> None:
        """Raise ``InternalError`` if the server ended the stream before it ended every sequence."""
        if not self.complete:
            raise InternalError("the server ended the stream in the middle of an answer")

    def _chunk(self, delta: router_pb2.TextDelta) -> Chunk:
        if delta.index >= len(self._parts):
            raise InternalError(f"the server answered with sequence {delta.index} of {len(self._parts)}")
        logprobs = tuple(logprob_from_pb(item) for item in delta.logprobs)
        chunk = Chunk(
            delta.index,
            delta.text,
            tuple(delta.token_ids),
            logprobs,
            finish_from_pb(delta.finish_reason),
            delta.stop_reason or None,
        )
        part = self._parts[chunk.index]
        part.text.append(chunk.text)
        part.token_ids.extend(chunk.token_ids)
        part.logprobs.extend(logprobs)
        part.finish_reason = chunk.finish_reason or part.finish_reason
        part.stop_reason = chunk.stop_reason or part.stop_reason
        return chunk
