"""Results of the SDK: frozen dataclasses in place of wire messages, and :class:`Answer`, which gathers a generation."""

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
    """How a request was served: where its KV came from, and what it cost.

    Attributes:
        path: Where the KV of the prompt came from; ``None`` if unknown.
        prefill_instance: Instance that computed the prompt for the decode instance; empty if none did.
        decode_instance: Instance that generated the tokens; the last one, if the request migrated.
        pipe: Pipe that the KV was transferred over; empty if none was.
        pipe_fallback: Reason for a slower pipe than the preferred one; empty if there was none.
        kv_bytes: Bytes of KV that were transferred.
        transfer_us: Time in transfers, in microseconds.
        exposed_us: What the transfer added to the time to first token, from the end of the remote prefill, in
            microseconds.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Prompt tokens whose KV was cached on the decode instance.
        transferred_tokens: Prompt tokens whose KV came from a prefill instance or the store.
        recomputed_tokens: Prompt tokens whose KV the decode instance computed.
        prefill_cached_tokens: Prompt tokens whose KV was cached on the prefill instance.
        queue_us: Time in the decode instance's queue, in microseconds.
        ttft_us: Time from the arrival at the decode instance to the first token, in microseconds.
        failed_prefills: Prefill instances that failed, each as ``"instance: reason"``.
        num_preemptions: Times that the request was preempted.
        reloaded_tokens: Tokens of prompt and output whose KV was fetched again after preemptions.
        repeated_tokens: Tokens of prompt and output whose KV was computed again after preemptions.
        drafted_tokens: Draft tokens of speculative decoding that were verified.
        accepted_tokens: Draft tokens that were accepted.
        local_reason: Reason why the decode instance computed the prompt itself; empty if it did not.
        num_migrations: Times that the request continued on another decode instance.
        router_queue_us: Time in the router's queue, in microseconds.
        order: Order in which the request was served: ``decode_first`` or ``prefill_first``.
    """

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
    """An instance that could have taken the request; the highest score wins.

    Attributes:
        instance_id: Identifier of the instance.
        role: Role of the instance; ``None`` if this SDK does not know it.
        match_rate: Share of the prompt whose KV the instance has, from 0 to 1.
        load: Relative load of the instance.
        score: Score of the policy.
        terms: Terms of the score, by name; they add up to ``score``.
    """

    instance_id: str
    role: Role | None
    match_rate: float
    load: float
    score: float
    terms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """A placement and its reasons.

    Attributes:
        prefill_instance: Instance that computes the prompt; empty if the decode instance does.
        decode_instance: Instance that generates the tokens.
        prompt_tokens: Tokens of the prompt.
        candidates: Instances that could have taken the request, with their scores.
        policy: Name of the policy.
        prefill_addresses: Addresses of the prefill instances, in order of preference.
        index_state: Worst state of the prefix index for the chosen instances: ``exact``, ``stale`` or ``off``.
        path: Where the KV will come from; ``None`` if the decode instance decides by its threshold.
        score: Score of the chosen pair of instances.
        terms: Terms of the score, by name; they add up to ``score``.
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
    """Load of an instance.

    Attributes:
        num_running: Requests in the running batch.
        num_waiting: Requests in the queue.
        num_loading: Requests that wait for KV from outside.
        blocks_total: KV blocks of the instance.
        blocks_active: KV blocks held by requests or leases.
        blocks_cached: KV blocks in the prefix cache, including blocks in use.
        waiting_prompt_tokens: Prompt tokens that are not computed yet.
        prefill_tokens_per_s: Measured prefill speed; 0 if unknown.
        decode_tokens_per_s: Measured decode speed; 0 if unknown.
        num_preemptions: Preemptions since the start.
        draining: Whether the instance accepts no new requests.
        unreadable_prefills: Addresses of prefill instances over whose pipes nothing came lately.
    """

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
    unreadable_prefills: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance that the router knows.

    Attributes:
        instance_id: Identifier of the instance.
        address: ``host:port`` of its gRPC server.
        role: Role of the instance; ``None`` if this SDK does not know it.
        healthy: Whether the router sends it requests.
        index_state: State of the router's prefix index for it: ``exact``, ``stale`` or ``off``.
        load: Latest load report.
        in_flight: Requests that the router has placed on it.
        indexed_blocks: Blocks of the instance in the router's prefix index.
        refused: Reason why the router refuses the instance although it answers; empty if it does not.
        max_num_seqs: Most sequences in a batch; 0 if not known yet.
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
    """A model that requests can name.

    Attributes:
        name: Name of the model.
        max_model_len: Most tokens of prompt and output together.
        vocab_size: Size of the vocabulary.
        eos_token_ids: Tokens that end an answer.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Percentiles of a latency, in milliseconds."""

    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Stats:
    """Rates and latencies of a router's recent requests.

    Attributes:
        window_s: Length of the period in seconds; shorter than asked for if the router has no older samples.
        requests_per_s: Completed requests per second.
        tokens_per_s: Generated tokens per second.
        hit_rate: Cached prompt tokens / prompt tokens; ``None`` without prompts.
        num_failed: Requests that failed.
        num_waiting: Requests in the router's queue now.
        waiting_prompt_tokens: Prompt tokens of the queue.
        ttft_ms: Times to first token; ``None`` without tokens.
        itl_ms: Times between two tokens of a sequence; ``None`` without any.
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
    """New output of one sequence of a streamed answer.

    Attributes:
        index: Index of the sequence, below ``n``.
        text: New text, without incomplete characters; empty while a character is incomplete.
        token_ids: New tokens.
        logprobs: Log probabilities of ``token_ids``, if asked for.
        finish_reason: Reason why the sequence ended, in its last chunk.
        stop_reason: Stop string that ended the sequence, if one did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence of an answer.

    Attributes:
        index: Index of the sequence, below ``n``.
        text: The generated text.
        token_ids: The generated tokens.
        finish_reason: Reason why the sequence ended; ``None`` if it has not.
        stop_reason: Stop string that ended the sequence, if one did.
        logprobs: Log probabilities of ``token_ids``, if asked for.
        parse: Makes :attr:`parsed` of the text; ``None`` without a JSON format.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    parse: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def parsed(self) -> Any:
        """The text as an instance of the class in ``response_format``, or as decoded JSON.

        ``None`` if no JSON was asked for, or if the answer was cut (``finish_reason`` is not ``stop``).

        Raises:
            ValueError: The class rejects the text.
        """
        if self.parse is None or self.finish_reason is not FinishReason.STOP:
            return None
        return self.parse(self.text)


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to a request. ``text``, ``parsed``, ``token_ids`` and so on are those of the first choice.

    Attributes:
        request_id: Identifier of the request.
        choices: The sequences; ``n`` of them.
        trace: How the request was served.
        decision: Placement of the request.
        prompt_logprobs: Log probabilities of the prompt, if asked for; entry 0 is ``None``.
    """

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
        """Reason why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def message(self) -> dict[str, str]:
        """The first choice as a message, to append to a conversation."""
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
    except InvalidRequestError:  # a role of a newer router
        return None


def read_trace(message: common_pb2.RequestTrace) -> Trace:
    return _read(Trace, message, path=path_from_pb(message.path), failed_prefills=tuple(message.failed_prefills))


def read_decision(message: router_pb2.RouteDecision) -> RouteDecision:
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
    """Convert the status of an instance."""
    load = _read(Load, message.load, unreadable_prefills=tuple(message.load.unreadable_prefills))
    return _read(Instance, message, role=_role(message.role), load=load)


def read_stats(message: router_pb2.GetStatsResponse) -> Stats:
    """Convert the statistics of a router."""

    def quantiles(name: str) -> Quantiles | None:
        return _read(Quantiles, getattr(message, name)) if message.HasField(name) else None  # type: ignore[arg-type]

    hit_rate = message.hit_rate if message.HasField("hit_rate") else None
    return _read(Stats, message, hit_rate=hit_rate, ttft_ms=quantiles("ttft_ms"), itl_ms=quantiles("itl_ms"))


def read_model(message: router_pb2.ModelDescription) -> Model:
    """Convert the description of a model."""
    return _read(Model, message, eos_token_ids=tuple(message.eos_token_ids))


@dataclass
class _Partial:
    text: list[str] = field(default_factory=list)
    num_chars: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None


_MAX_TOKENS = 2**20
_SPARE_TOKENS = 1024
_CHARS_PER_TOKEN = 256
_SPARE_CHARS = 2**20


class Answer:
    """Gathers the messages of one generation, and refuses what no router sends: text without end fills the memory.

    Args:
        n: Number of sequences.
        parse: Makes an object of a sequence's text.
        max_tokens: Tokens of a sequence that were asked for; ``None``: as many as the context has room for.

    Attributes:
        started: Whether a token has arrived; a failed call must not be repeated then.
        request_id: Identifier of the request; empty before the first message.
        trace: Latest trace.
        decision: Placement of the request.
    """

    def __init__(self, n: int, parse: Callable[[str], Any] | None = None, *, max_tokens: int | None = None) -> None:
        self._parse = parse
        self._max_tokens = _SPARE_TOKENS + (_MAX_TOKENS if max_tokens is None else max_tokens)
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
        """Add a message and return its chunks.

        Raises:
            InternalError: The message has a sequence that was not asked for, or more of one than can be.
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
        """Add a message of a call that continues one sequence, and return its chunks.

        Args:
            message: Message, in which the sequence has index 0.
            index: Index of the sequence in the answer.
            repeated: Tokens at the beginning of the message that have arrived before.
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
        """Whether log probabilities of the prompt have arrived."""
        return bool(self._prompt_logprobs)

    def open_sequences(self) -> list[int]:
        """Return the indices of the sequences that have not ended."""
        return [i for i, part in enumerate(self._parts) if part.finish_reason is None]

    def progress(self, index: int) -> tuple[list[int], int]:
        """Return the tokens of a sequence, and the number of characters of its text."""
        part = self._parts[index]
        return part.token_ids, part.num_chars

    def result(self) -> Generation:
        """Return the answer so far."""
        choices = [
            Choice(i, "".join(p.text), p.token_ids, p.finish_reason, p.stop_reason, p.logprobs or None, self._parse)
            for i, p in enumerate(self._parts)
        ]
        return Generation(self.request_id, choices, self.trace, self.decision, self._prompt_logprobs)

    def require_complete(self) -> None:
        """Raise ``InternalError`` unless every sequence has ended."""
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
        if part.finish_reason is not None and (chunk.text or chunk.token_ids):
            raise InternalError(f"the server went on with sequence {chunk.index} after its end")
        if chunk.text:
            part.text.append(chunk.text)
            part.num_chars += len(chunk.text)
        part.token_ids.extend(chunk.token_ids)
        part.logprobs.extend(logprobs)
        num_tokens = len(part.token_ids)
        excess = num_tokens > self._max_tokens or len(part.logprobs) > num_tokens
        if excess or part.num_chars > _SPARE_CHARS + _CHARS_PER_TOKEN * num_tokens:
            raise InternalError(f"the server sends more of sequence {chunk.index} than its {num_tokens} tokens can be")
        part.finish_reason = chunk.finish_reason or part.finish_reason
        part.stop_reason = chunk.stop_reason or part.stop_reason
        return chunk


class Answered:
    """Attributes that streams of both clients have while an answer arrives.

    Attributes:
        answer: The answer so far.
    """

    answer: Answer

    @property
    def request_id(self) -> str:
        """Identifier of the request; empty before the first message."""
        return self.answer.request_id

    @property
    def trace(self) -> Trace | None:
        """How the request was served; complete at the end of the stream."""
        return self.answer.trace

    @property
    def decision(self) -> RouteDecision | None:
        """Placement of the request; ``None`` before the first message."""
        return self.answer.decision
