"""What the SDK answers with: plain frozen dataclasses, none of the wire's messages; and how an answer is gathered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message

from baton.api.v1 import common_pb2, router_pb2
from baton.errors import InternalError, InvalidRequestError
from baton.rpc.convert import finish_from_pb, logprob_from_pb, path_from_pb, prompt_logprobs_from_pb, role_from_pb
from baton.types import FinishReason, PrefillPath, Role, TokenLogprob

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trace:
    """How a request came to its KV. Times in microseconds, counts in prompt tokens unless a name says otherwise."""

    path: PrefillPath | None = None
    prefill_instance: str = ""
    decode_instance: str = ""
    pipe: str = ""
    pipe_fallback: str = ""
    kv_bytes: int = 0
    transfer_us: int = 0
    exposed_us: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    recomputed_tokens: int = 0
    prefill_cached_tokens: int = 0
    queue_us: int = 0
    ttft_us: int = 0
    failed_prefills: tuple[str, ...] = ()
    num_preemptions: int = 0
    reloaded_tokens: int = 0
    repeated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    local_reason: str = ""
    num_migrations: int = 0
    router_queue_us: int = 0
    order: str = ""


@dataclass(frozen=True, slots=True)
class RouteCandidate:
    """An instance that could have taken the request; the highest score wins."""

    instance_id: str
    role: Role | None
    match_rate: float
    load: float
    score: float
    terms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """A placement, and what spoke for it. ``prefill_instance`` is empty if decode prefills by itself.

    ``path`` is ``None`` where the decode instance decides about that by its threshold. ``terms`` add up to ``score``.
    """

    prefill_instance: str
    decode_instance: str
    prompt_tokens: int
    candidates: tuple[RouteCandidate, ...]
    policy: str
    prefill_addresses: tuple[str, ...]
    index_state: str
    path: PrefillPath | None
    score: float
    terms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Load:
    """How busy an instance is."""

    num_running: int
    num_waiting: int
    num_loading: int
    blocks_total: int
    blocks_active: int
    blocks_cached: int
    waiting_prompt_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    num_preemptions: int
    draining: bool


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance that the router knows.

    Attributes:
        refused: Why the router does not take it although it answers; empty: it is not refused.
        max_num_seqs: Sequences in one batch; 0: not known yet.
    """

    instance_id: str
    address: str
    role: Role | None
    healthy: bool
    index_state: str
    load: Load
    in_flight: int
    indexed_blocks: int
    refused: str = ""
    max_num_seqs: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """A model that requests can name. ``max_model_len`` counts prompt and output tokens."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of times, in milliseconds."""

    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Stats:
    """How a router's requests fared in the last seconds.

    Attributes:
        window_s: How many seconds: as far back as the router has samples.
        hit_rate: Cached prompt tokens / prompt tokens; ``None``: no prompt came.
        num_waiting: Requests in the router's queue, now.
        waiting_prompt_tokens: Their prompt tokens.
        ttft_ms: Times to first token; ``None``: there was none.
        itl_ms: Times between two tokens of a sequence.
    """

    window_s: float
    requests_per_s: float
    tokens_per_s: float
    hit_rate: float | None
    num_failed: int
    num_waiting: int
    waiting_prompt_tokens: int
    ttft_ms: Quantiles | None
    itl_ms: Quantiles | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """New output of one of a request's sequences; the last one of a sequence has a ``finish_reason``.

    Attributes:
        index: Which of the ``n`` sequences.
        text: New text, never a broken character; may be empty while a character is incomplete.
        logprobs: Parallel to ``token_ids``, if asked for.
        stop_reason: The stop string that ended the sequence, if one did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole sequence."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    parse: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def parsed(self) -> Any:
        """The text as an object: of the class of ``response_format``, or decoded JSON.

        ``None`` where no JSON was asked for, and where the answer was cut (``finish_reason`` is not ``stop``).

        Raises:
            ValueError: The class refuses the text: it checks what its schema does not say.
        """
        if self.parse is None or self.finish_reason is not FinishReason.STOP:
            return None
        return self.parse(self.text)


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to a request; ``text``, ``parsed``, ``token_ids`` and so on are those of the first choice."""

    request_id: str
    choices: list[Choice]
    trace: Trace | None = None
    decision: RouteDecision | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def parsed(self) -> Any:
        """The first choice's text as an object; see :attr:`Choice.parsed`."""
        return self.choices[0].parsed

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def message(self) -> dict[str, str]:
        """The first choice as a message, to go on with the conversation."""
        return {"role": "assistant", "content": self.text}

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Log probabilities of the first choice, if asked for."""
        return self.choices[0].logprobs


def _read(cls: type[T], message: Message, **special: Any) -> T:
    """Build a dataclass from the message whose fields have the same names, except for those given."""
    names = [item.name for item in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: special[name] if name in special else getattr(message, name) for name in names})


def _role(value: int) -> Role | None:
    try:
        return role_from_pb(value)
    except InvalidRequestError:  # a role that a newer router knows and this SDK does not
        return None


def read_trace(message: common_pb2.RequestTrace) -> Trace:
    """Trace from the wire."""
    return _read(Trace, message, path=path_from_pb(message.path), failed_prefills=tuple(message.failed_prefills))


def read_decision(message: router_pb2.RouteDecision) -> RouteDecision:
    """Placement from the wire."""
    candidates = tuple(
        _read(RouteCandidate, item, role=_role(item.role), terms=_terms(item.terms)) for item in message.candidates
    )
    return _read(
        RouteDecision,
        message,
        candidates=candidates,
        prefill_addresses=tuple(message.prefill_addresses),
        path=path_from_pb(message.path),
        terms=_terms(message.terms),
    )


def _terms(terms: Iterable[router_pb2.ScoreTerm]) -> Mapping[str, float]:
    return {term.name: term.value for term in terms}


def read_instance(message: router_pb2.InstanceStatus) -> Instance:
    """Instance from the wire."""
    return _read(Instance, message, role=_role(message.role), load=_read(Load, message.load))


def read_stats(message: router_pb2.GetStatsResponse) -> Stats:
    """Stats from the wire."""

    def quantiles(name: str) -> Quantiles | None:
        return _read(Quantiles, getattr(message, name)) if message.HasField(name) else None  # type: ignore[arg-type]

    hit_rate = message.hit_rate if message.HasField("hit_rate") else None
    return _read(Stats, message, hit_rate=hit_rate, ttft_ms=quantiles("ttft_ms"), itl_ms=quantiles("itl_ms"))


def read_model(message: router_pb2.ModelDescription) -> Model:
    """Model from the wire."""
    return _read(Model, message, eos_token_ids=tuple(message.eos_token_ids))


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

    Args:
        n: Sequences.
        parse: Makes an object of a sequence's text.
    """

    def __init__(self, n: int, parse: Callable[[str], Any] | None = None) -> None:
        self._parse = parse
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

    def feed_continuation(self, message: router_pb2.RouterGenerateResponse, index: int, repeated: int) -> list[Chunk]:
        """Take a message of a call by which one sequence goes on elsewhere.

        Args:
            message: Which calls the sequence 0.
            index: Which one it is.
            repeated: Tokens at the beginning of its first delta that have come before.
        """
        for delta in message.deltas:
            delta.index = index
            del delta.token_ids[:repeated]
            del delta.logprobs[:repeated]
            repeated = 0
        if message.HasField("trace"):
            message.trace.num_migrations += 1
        if self.has_prompt_logprobs:
            del message.prompt_logprobs[:]
        return self.feed(message)

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether they have come."""
        return bool(self._prompt_logprobs)

    def open_sequences(self) -> list[int]:
        """Return the indices of those that have not ended."""
        return [i for i, part in enumerate(self._parts) if part.finish_reason is None]

    def progress(self, index: int) -> tuple[list[int], int]:
        """Return a sequence's tokens, and how many characters of text have come."""
        part = self._parts[index]
        return part.token_ids, sum(map(len, part.text))

    def result(self) -> Generation:
        """Return all that has arrived so far."""
        choices = [
            Choice(i, "".join(p.text), p.token_ids, p.finish_reason, p.stop_reason, p.logprobs or None, self._parse)
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


class Answered:
    """What both clients' streams tell of an answer while it comes.

    Attributes:
        answer: Gathers it.
    """

    answer: Answer

    @property
    def request_id(self) -> str:
        """The request's id, once the first message has come."""
        return self.answer.request_id

    @property
    def trace(self) -> Trace | None:
        """How the request came to its KV; complete at the end of the stream."""
        return self.answer.trace

    @property
    def decision(self) -> RouteDecision | None:
        """Where the request runs."""
        return self.answer.decision
