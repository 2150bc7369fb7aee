"""A running request in text: turns its tokens into text, and measures what its user experiences."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry

from baton.api.v1 import common_pb2
from baton.errors import BatonError, InternalError, UnavailableError
from baton.rpc.multiplex import TokenWriter
from baton.tokenizer import SequenceText, TokenDelta
from baton.types import FinishReason
from baton_router.dispatch.interface import Dispatcher, RoutedChunk, Running
from baton_router.metrics import Counter, Distribution, Histogram
from baton_router.processor.text_request import PreparedRequest, TextChunk, TextDelta
from baton_router.scheduler.decision import DecisionLog, DecisionRecord

_ABORT = FinishReason.ABORT  # looking up a member of an enumeration is slow
_ERROR = FinishReason.ERROR
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class GenerationMetrics:
    """Metrics of all generations, over HTTP and gRPC.

    Args:
        registry: Registry for the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "baton_request_"
        # Metrics without labels: their only series, which is faster to update than the family.
        self.ttft = Histogram(name + "ttft_seconds", "Arrival to first token", [], registry, buckets=_TTFT_S).labels()
        self.itl = Histogram(
            name + "itl_seconds", "Between two tokens of a sequence", [], registry, buckets=_ITL_S
        ).labels()
        self.e2e = Histogram(name + "e2e_seconds", "Arrival to last token", [], registry, buckets=_E2E_S).labels()
        self.prompt_tokens = Counter(name + "prompt_tokens", "Prompt tokens of placed requests", [], registry).labels()
        self.generated_tokens = Counter(name + "generated_tokens", "Tokens delivered", [], registry).labels()
        self.cached_tokens = Counter(
            name + "cached_tokens", "Prompt tokens whose KV was in a cache", [], registry
        ).labels()
        self.finished = Counter(name + "finished", "Generations, by how they ended", ["outcome"], registry)


class GenerationClock:
    """Measures one generation.

    Args:
        metrics: Metrics to update.
        arrived: Arrival of the request, by ``time.perf_counter()``.

    Attributes:
        first_token_s: Seconds from the arrival to the first token; ``None`` before it.
        generated: Tokens so far.
    """

    __slots__ = ("_arrived", "_last", "_metrics", "first_token_s", "generated")

    def __init__(self, metrics: GenerationMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._last: dict[int, float] = {}
        """Arrival of the latest tokens, by sequence."""
        self.first_token_s: float | None = None
        self.generated = 0

    def count_deltas(self, deltas: list[TextDelta]) -> None:
        """Count new tokens that arrived together: ``k`` tokens of a sequence are ``k`` equal gaps."""
        counts: dict[int, int] = {}
        for delta in deltas:
            if count := len(delta.token_ids):
                counts[delta.index] = counts.get(delta.index, 0) + count
        for index, count in counts.items():
            self.count_tokens(index, count)

    def count_tokens(self, index: int, count: int) -> None:
        """Count ``count`` new tokens of the sequence ``index``."""
        now = time.perf_counter()
        metrics = self._metrics
        if (before := self._last.get(index)) is not None:
            metrics.itl.observe((now - before) / count, count)
        elif self.first_token_s is None:
            self.first_token_s = now - self._arrived
            metrics.ttft.observe(self.first_token_s)
        self._last[index] = now
        self.generated += count
        metrics.generated_tokens.value += count

    @property
    def itl(self) -> Distribution:
        """Distribution of the gaps between two tokens, in seconds."""
        return self._metrics.itl

    def last_token_at(self, index: int) -> float:
        """Return when the latest token of a sequence arrived, by ``time.perf_counter()``; it must have one."""
        return self._last[index]

    def add_measured(self, index: int, count: int, last: float) -> None:
        """Count tokens of a sequence whose gaps are in :attr:`itl` already; the last one arrived at ``last``."""
        self._last[index] = last
        self.generated += count
        self._metrics.generated_tokens.value += count

    def record_report(self, first_token_s: float | None, gaps_s: Iterable[float], generated: int) -> None:
        """Record what a client measured that has its tokens from the instance itself.

        Args:
            first_token_s: Seconds from the arrival to the first token, if there is one; only the first value counts.
            gaps_s: Seconds between tokens of a sequence, since the last report.
            generated: Tokens so far; ignored if fewer than before.
        """
        if first_token_s is not None and self.first_token_s is None:
            self.first_token_s = first_token_s
            self._metrics.ttft.observe(first_token_s)
        for gap in gaps_s:
            self._metrics.itl.observe(gap)
        if generated > self.generated:
            self._metrics.generated_tokens.inc(generated - self.generated)
            self.generated = generated

    def count_prompt(self, prompt_tokens: int, cached: int) -> None:
        """Count the prompt, once it is known how many of its tokens were cached."""
        self._metrics.prompt_tokens.inc(prompt_tokens)
        self._metrics.cached_tokens.inc(cached)

    def end(self, outcome: str) -> None:
        """Count the end.

        Args:
            outcome: ``done``, ``cancelled`` or the code of an error.
        """
        self._metrics.e2e.observe(time.perf_counter() - self._arrived)
        self._metrics.finished.labels(outcome).inc()


def cached_tokens(trace: common_pb2.RequestTrace | None) -> int:
    """Return how many prompt tokens did not have to be computed for this request.

    They were cached by the decode instance, by the prefill instance that did the prefill, or in the store.
    """
    if trace is None:
        return 0
    cached = trace.cached_tokens
    path = trace.path
    if path == common_pb2.PREFILL_PATH_STORE:
        cached += trace.transferred_tokens
    elif path == common_pb2.PREFILL_PATH_REMOTE:
        cached = max(cached, trace.prefill_cached_tokens)
    return min(cached, trace.prompt_tokens)


def begin_record(prepared: PreparedRequest, clock: GenerationClock, log: DecisionLog) -> DecisionRecord:
    """Begin the record of a request in the log of requests; its ``clock`` shows the tokens so far."""
    request = prepared.request
    routed = prepared.routed
    record = log.begin(routed.request_id, prepared.prompt_tokens, clock, tenant=routed.tenant)
    record.answer_id = prepared.answer_id
    record.session = request.session
    grammar = routed.sampling.grammar
    record.grammar = str(grammar) if grammar is not None else ""  # not its text: a thousand records are remembered
    if request.tool_use.mode != "none":
        record.tools = str(request.tool_use)
    record.thinking_budget = request.thinking_budget
    return record


def _split_tokens(delta: TokenDelta) -> Iterator[TokenDelta]:
    """Yield a delta per token; the last one has the end of the sequence."""
    last = len(delta.token_ids) - 1
    for position, token_id in enumerate(delta.token_ids):
        part = TokenDelta(delta.index, [token_id], delta.logprobs[position : position + 1])
        if position == last:
            part.finish_reason = delta.finish_reason
            part.stop_token_id = delta.stop_token_id
        yield part


class TextSink(Protocol):
    """Receives what a request brings, in order. It may cancel the request from inside these calls."""

    def on_chunk(self, chunk: TextChunk) -> None:
        """Receive a chunk."""

    def on_end(self, error: Exception | None) -> None:
        """Receive the end; nothing follows. ``None`` means that every sequence has ended."""

    def token_writer(
        self, token_ids: list[int], clock: GenerationClock, count_tokens: Callable[[int], None]
    ) -> TokenWriter | None:
        """Return a writer for plain tokens, each with its whole text; see ``ChunkSink.token_writer``."""


class ResumedText:
    """Cuts the text of an answer that started elsewhere behind what its reader has.

    Args:
        text: Text of the tokens that were generated elsewhere, without incomplete characters.
        chars: Characters that the reader has, of ``text`` and what follows.
    """

    __slots__ = ("_num_skipped", "_unread")

    def __init__(self, text: str, chars: int) -> None:
        self._unread = text[chars:]
        self._num_skipped = max(0, chars - len(text))

    @classmethod
    def of(cls, prepared: PreparedRequest, sequence: SequenceText) -> ResumedText | None:
        """Push the tokens generated elsewhere into a sequence; ``None`` if only the text of new tokens is wanted."""
        request = prepared.request
        if request.output_chars is None:
            return None
        return cls(sequence.push(TokenDelta(0, list(request.output_token_ids))).text, request.output_chars)

    def cut(self, text: str) -> str:
        """Return the part of ``unread + text`` that the reader does not have."""
        text = self._unread + text
        self._unread = ""
        skipped = min(self._num_skipped, len(text))
        self._num_skipped -= skipped
        return text[skipped:]


class OutputProcessor:
    """One running request: turns tokens into text, and updates metrics.

    Args:
        prepared: The request.
        sink: Receives the text.
        clock: Measures the generation.
        log: Log of requests.
    """

    __slots__ = (
        "_anchors",
        "_clock",
        "_decisions",
        "_ended",
        "_is_plain",
        "_num_generating",
        "_num_open",
        "_per_token",
        "_prepared",
        "_prompt_index",
        "_record",
        "_resumed",
        "_running",
        "_sequences",
        "_sink",
    )

    def __init__(self, prepared: PreparedRequest, sink: TextSink, clock: GenerationClock, log: DecisionLog) -> None:
        self._prepared = prepared
        self._sink = sink
        self._clock = clock
        self._decisions = log
        routed = prepared.routed
        request = prepared.request
        self._record = begin_record(prepared, clock, log)
        self._sequences = [prepared.sequence() for _ in range(routed.sampling.n)]
        self._num_open = len(self._sequences)
        """Sequences whose text has not ended."""
        self._num_generating = self._num_open
        """Sequences that the instance still runs, possibly behind a stop string."""
        self._per_token = request.per_token
        self._anchors = prepared.anchor_ids
        self._prompt_index = request.prompt_index
        self._resumed = ResumedText.of(prepared, self._sequences[0])
        self._is_plain = prepared.stops is None and routed.sampling.logprobs is None and self._resumed is None
        """Whether the text of plain chunks is what their tokens say: no text ends a sequence or is left out."""
        self._running: Running | None = None
        self._ended = False

    def start(self, dispatcher: Dispatcher) -> None:
        running = dispatcher.start(self._prepared.routed, self)
        if self._ended:  # before there was anything to cancel
            running.cancel()
        else:
            self._running = running

    def on_chunk(self, chunk: RoutedChunk) -> None:
        """Turn a chunk into text and pass it to the sink."""
        if self._ended:
            return
        if chunk.plain and self._is_plain:
            (delta,) = chunk.deltas
            token_ids = delta.token_ids
            if (not self._per_token or len(token_ids) == 1) and self._anchors.isdisjoint(token_ids):
                index = delta.index
                text = self._sequences[index].push_plain(token_ids)
                self._clock.count_tokens(index, len(token_ids))
                self._sink.on_chunk(
                    TextChunk([TextDelta(index, text, token_ids)], prompt_index=self._prompt_index, plain=True)
                )
                return
        trace = chunk.trace
        try:
            deltas = self._read_text(chunk.deltas)
        except Exception as error:
            self._fail_or_end(error)
            return
        text_chunk = TextChunk(deltas, trace, chunk.decision, chunk.prompt_logprobs, 0, self._prompt_index)
        if trace is not None:
            text_chunk.cached_tokens = cached_tokens(trace)
            self._decisions.answered(self._record, trace)
        if chunk.decision is not None:
            self._clock.count_prompt(self._prepared.prompt_tokens, text_chunk.cached_tokens)
        self._clock.count_deltas(deltas)
        if self._num_generating and not self._num_open:  # stop strings ended the rest
            self._close("done")  # before the sink is called, so that the instances are free at once
            self._sink.on_chunk(text_chunk)
            self._sink.on_end(None)
        else:
            self._sink.on_chunk(text_chunk)

    def token_writer(self, token_ids: list[int], count_tokens: Callable[[int], None]) -> TokenWriter | None:
        """Return the sink's writer, while no character is incomplete."""
        if self._ended or not self._is_plain or len(self._sequences) > 1 or self._clock.first_token_s is None:
            return None
        if not self._sequences[0].between_texts:
            return None
        return self._sink.token_writer(token_ids, self._clock, count_tokens)

    def _read_text(self, deltas: list[TokenDelta]) -> list[TextDelta]:
        """Return the text of deltas, without what follows a sequence's stop string.

        Raises:
            UnavailableError: An instance aborted the request.
            InternalError: An instance failed the request.
        """
        texts = []
        for delta in deltas:
            if not 0 <= delta.index < len(self._sequences):
                raise InternalError(f"an instance answered with sequence {delta.index} of {len(self._sequences)}")
            sequence = self._sequences[delta.index]
            finish = delta.finish_reason
            if finish is not None:
                self._num_generating -= 1
            if sequence.ended:
                continue
            if finish is _ABORT:
                raise UnavailableError("the request was aborted by the instance that ran it", retry_after_s=1.0)
            if finish is _ERROR:
                raise InternalError("the instance that ran the request failed it")
            for part in _split_tokens(delta) if self._per_token and len(delta.token_ids) > 1 else (delta,):
                text = sequence.push(part)
                if self._resumed is not None:
                    text.text = self._resumed.cut(text.text)
                texts.append(text)
                if text.finish_reason is not None:
                    self._num_open -= 1
                    break
        return texts

    def on_end(self, error: Exception | None) -> None:
        if self._ended:
            return
        if error is None and self._num_open:
            error = InternalError(f"the stream ended before {self._num_open} of {len(self._sequences)} sequences had")
        self._fail_or_end(error)

    def cancel(self) -> None:
        """End the request on all instances; the sink receives nothing more."""
        if not self._ended:
            self._close("cancelled")

    def set_paused(self, paused: bool) -> None:
        """Keep back what arrives from now on, or deliver it again, all at once."""
        if self._running is None or self._ended:
            return
        if paused:
            self._running.set_paused(True)
            return
        self._per_token = False
        try:
            self._running.set_paused(False)
        finally:
            self._per_token = self._prepared.request.per_token

    def _fail_or_end(self, error: Exception | None) -> None:
        try:
            self._close(
                "done" if error is None else error.code if isinstance(error, BatonError) else InternalError.code
            )
        finally:
            self._sink.on_end(error)

    def _close(self, outcome: str) -> None:
        self._ended = True
        running = self._running
        self._running = None  # breaks the reference cycle, so that everything is freed at once
        try:
            if running is not None:
                running.cancel()
        finally:
            self._clock.end(outcome)
            self._decisions.end(self._record, outcome)
