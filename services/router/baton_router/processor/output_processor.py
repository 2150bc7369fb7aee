"""One running request in text: its tokens become text, and what users feel of it is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry

from baton.api.v1 import common_pb2
from baton.errors import BatonError, InternalError, UnavailableError
from baton.tokenizer import SequenceText, TokenDelta
from baton.types import FinishReason
from baton_router.dispatch.interface import Dispatcher, LeftPath, RoutedChunk, Running
from baton_router.metrics.fast_metrics import Counter, Distribution, Histogram
from baton_router.processor.text_request import PreparedRequest, TextChunk, TextDelta
from baton_router.scheduler.decision import DecisionLog

_ABORT, _ERROR = FinishReason.ABORT, FinishReason.ERROR  # once: a look at an enumeration takes long
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class GenerationMetrics:
    """Metrics of all generations, whichever interface they came by, in the registry that was passed in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "baton_request_"
        # Of those without labels their only series, which is quicker to count in than its family.
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
    """Times one generation.

    Args:
        metrics: Where to count.
        arrived: When the request came, by ``time.perf_counter()``.

    Attributes:
        first_token_s: Seconds from its arrival to its first token; ``None``: there is none yet.
        generated: Tokens so far.
    """

    __slots__ = ("_arrived", "_last", "_metrics", "first_token_s", "generated")

    def __init__(self, metrics: GenerationMetrics, arrived: float) -> None:
        self._metrics, self._arrived = metrics, arrived
        self._last: dict[int, float] = {}  # of each sequence: when its latest tokens came
        self.first_token_s: float | None = None
        self.generated = 0

    def tokens(self, deltas: list[TextDelta]) -> None:
        """Count new tokens that arrived together: ``k`` of a sequence are ``k`` gaps of a ``k``-th of the time."""
        counts: dict[int, int] = {}
        for delta in deltas:
            if count := len(delta.token_ids):
                counts[delta.index] = counts.get(delta.index, 0) + count
        for index, count in counts.items():
            self.count(index, count)

    def count(self, index: int, count: int) -> None:
        """Count new tokens of one sequence."""
        now, metrics, last = time.perf_counter(), self._metrics, self._last
        if (before := last.get(index)) is not None:
            metrics.itl.observe((now - before) / count, count)
        elif self.first_token_s is None:
            self.first_token_s = now - self._arrived
            metrics.ttft.observe(self.first_token_s)
        last[index] = now
        self.generated += count
        metrics.generated_tokens.value += count

    @property
    def itl(self) -> Distribution:
        """Where gaps between two tokens are counted."""
        return self._metrics.itl

    def last(self, index: int) -> float:
        """When a sequence's latest token came, by ``time.perf_counter()``; only behind its first."""
        return self._last[index]

    def timed(self, index: int, count: int, last: float) -> None:
        """Count tokens of a sequence behind its first, whose gaps are counted; the ``last`` came then."""
        self._last[index] = last
        self.generated += count
        self._metrics.generated_tokens.value += count

    def told(self, first_token_s: float | None, gaps_s: Iterable[float], generated: int) -> None:
        """Take what a client that has the tokens from an instance itself has measured.

        Args:
            first_token_s: Seconds from the request's arrival to its first token, if there is one; the first is taken.
            gaps_s: Seconds between two tokens of a sequence, those that have not been told yet.
            generated: Tokens so far; fewer than before are passed over.
        """
        if first_token_s is not None and self.first_token_s is None:
            self.first_token_s = first_token_s
            self._metrics.ttft.observe(first_token_s)
        for gap in gaps_s:
            self._metrics.itl.observe(gap)
        if generated > self.generated:
            self._metrics.generated_tokens.inc(generated - self.generated)
            self.generated = generated

    def prompt(self, prompt_tokens: int, cached: int) -> None:
        """Count the prompt, once it is known how its KV came about."""
        self._metrics.prompt_tokens.inc(prompt_tokens)
        self._metrics.cached_tokens.inc(cached)

    def end(self, outcome: str) -> None:
        """Count the end: ``done``, ``cancelled`` or an error's code."""
        self._metrics.e2e.observe(time.perf_counter() - self._arrived)
        self._metrics.finished.labels(outcome).inc()


def cached_tokens(trace: common_pb2.RequestTrace | None) -> int:
    """Return how many prompt tokens did not have to be computed for this request.

    From the decode instance's own cache, from the prefill instance's cache where it did the prefill, or from the store.
    """
    if trace is None:
        return 0
    cached, path = trace.cached_tokens, trace.path
    if path == common_pb2.PREFILL_PATH_STORE:
        cached += trace.transferred_tokens
    elif path == common_pb2.PREFILL_PATH_REMOTE:
        cached = max(cached, trace.prefill_cached_tokens)
    return min(cached, trace.prompt_tokens)


def _one_by_one(delta: TokenDelta) -> Iterator[TokenDelta]:
    """Yield a delta's tokens each by itself; how the sequence ended comes with the last one."""
    last = len(delta.token_ids) - 1
    for at, token_id in enumerate(delta.token_ids):
        part = TokenDelta(delta.index, [token_id], delta.logprobs[at : at + 1])
        if at == last:
            part.finish_reason, part.stop_token_id = delta.finish_reason, delta.stop_token_id
        yield part


class TextSink(Protocol):
    """Takes what a request brings, in order. It may cancel the request from inside of these calls."""

    def on_chunk(self, chunk: TextChunk) -> None:
        """Take a chunk."""

    def on_text(self, prompt_index: int, index: int, text: str, token_ids: list[int]) -> None:
        """Take what tokens that came with nothing else say, behind the first chunk: nearly all that ever comes."""

    def on_end(self, error: Exception | None) -> None:
        """Take the end, the last thing there is; ``None``: every sequence has ended."""

    def fast_path(
        self, token_ids: list[int], clock: GenerationClock, counted: Callable[[int], None]
    ) -> LeftPath | None:
        """Return what writes tokens, each with its whole text and nothing else, as dispatch's sink does."""


class ResumedText:
    """The text of an answer that began elsewhere, behind what its reader has.

    Args:
        text: Of the tokens that were generated there, as far as it is certain.
        chars: Characters that the reader has, of this and of what follows.
    """

    __slots__ = ("_held", "_skip")

    def __init__(self, text: str, chars: int) -> None:
        self._held, self._skip = text[chars:], max(0, chars - len(text))

    @classmethod
    def of(cls, prepared: PreparedRequest, sequence: SequenceText) -> ResumedText | None:
        """Let a sequence take the tokens generated elsewhere; ``None``: its reader wants the text of new ones alone."""
        request = prepared.request
        if request.output_chars is None:
            return None
        return cls(sequence.push(TokenDelta(0, list(request.output_token_ids))).text, request.output_chars)

    def take(self, text: str) -> str:
        """Return what new text brings the reader."""
        text, self._held = self._held + text, ""
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        return text[skipped:]


class OutputProcessor:
    """One running request: what its tokens say, and what is counted of it.

    Args:
        prepared: The request.
        sink: Takes what comes.
        clock: Times it.
        log: Remembers it.
    """

    __slots__ = (
        *("_clock", "_decisions", "_ended", "_generating", "_open", "_per_token", "_plain", "_prepared"),
        *("_prompt_index", "_record", "_resumed", "_running", "_sequences", "_sink"),
    )

    def __init__(self, prepared: PreparedRequest, sink: TextSink, clock: GenerationClock, log: DecisionLog) -> None:
        self._prepared, self._sink, self._clock, self._decisions = prepared, sink, clock, log
        routed = prepared.routed
        self._record = log.begin(routed.request_id, prepared.prompt_tokens, clock, tenant=routed.tenant)
        self._record.grammar = routed.sampling.grammar
        asked = prepared.request
        if asked.tool_use.mode != "none":
            self._record.tools = str(asked.tool_use)
        self._record.thinking_budget = asked.thinking_budget
        self._sequences = [prepared.sequence() for _ in range(routed.sampling.n)]
        self._open = self._generating = len(self._sequences)
        """Sequences whose text has not ended; and those that the instance still runs, also behind a stop string."""
        self._per_token = prepared.request.per_token
        self._prompt_index = prepared.request.prompt_index
        self._plain = prepared.stops is None and routed.sampling.logprobs is None
        """Whether a token is its text and nothing else, and no text ends a sequence."""
        self._resumed = ResumedText.of(prepared, self._sequences[0])
        self._plain = self._plain and self._resumed is None
        self._running: Running | None = None
        self._ended = False

    def start(self, dispatcher: Dispatcher) -> None:
        """Begin."""
        running = dispatcher.start(self._prepared.routed, self)
        if self._ended:  # before there was anything to cancel
            running.cancel()
        else:
            self._running = running

    def on_chunk(self, chunk: RoutedChunk) -> None:
        """Take a chunk."""
        if self._ended:
            return
        prepared, trace = self._prepared, chunk.trace
        try:
            deltas = self._text(chunk.deltas)
        except Exception as error:
            self._end(error)
            return
        text = TextChunk(deltas, trace, chunk.decision, chunk.prompt_logprobs, 0, self._prompt_index)
        if trace is not None:
            text.cached_tokens = cached_tokens(trace)
            self._decisions.answered(self._record, trace)
        if chunk.decision is not None:
            self._clock.prompt(prepared.prompt_tokens, text.cached_tokens)
        self._clock.tokens(deltas)
        if self._generating and not self._open:  # stop strings ended what is left
            self._leave("done")  # before it is handed on: the instances are free at once
            self._sink.on_chunk(text)
            self._sink.on_end(None)
        else:
            self._sink.on_chunk(text)

    def on_tokens(self, index: int, token_ids: list[int]) -> None:
        """Take tokens that came with nothing else."""
        if self._ended:
            return
        if not self._plain or (self._per_token and len(token_ids) > 1):
            self.on_chunk(RoutedChunk([TokenDelta(index, token_ids)]))
            return
        text = self._sequences[index].push_plain(token_ids)
        self._clock.count(index, len(token_ids))
        self._sink.on_text(self._prompt_index, index, text, token_ids)

    def fast_path(self, token_ids: list[int], counted: Callable[[int], None]) -> LeftPath | None:
        """Return what takes the next tokens of a request of one sequence."""
        if self._ended or not self._plain or len(self._sequences) > 1 or self._clock.first_token_s is None:
            return None
        if not self._sequences[0].between_texts:
            return None
        return self._sink.fast_path(token_ids, self._clock, counted)

    def _text(self, deltas: list[TokenDelta]) -> list[TextDelta]:
        """Return what tokens say; those after a sequence's stop string are left out.

        Raises:
            UnavailableError: An instance gave the request up.
            InternalError: An instance failed it.
        """
        texts = []
        for delta in deltas:
            if not 0 <= delta.index < len(self._sequences):
                raise InternalError(f"an instance answered with sequence {delta.index} of {len(self._sequences)}")
            sequence = self._sequences[delta.index]
            finish = delta.finish_reason
            if finish is not None:
                self._generating -= 1
            if sequence.ended:
                continue
            if finish is _ABORT:
                raise UnavailableError("the request was aborted by the instance that ran it", retry_after_s=1.0)
            if finish is _ERROR:
                raise InternalError("the instance that ran the request failed it")
            for part in _one_by_one(delta) if self._per_token and len(delta.token_ids) > 1 else (delta,):
                text = sequence.push(part)
                if self._resumed is not None:
                    text.text = self._resumed.take(text.text)
                texts.append(text)
                if text.finish_reason is not None:
                    self._open -= 1
                    break
        return texts

    def on_end(self, error: Exception | None) -> None:
        """Take the end."""
        if self._ended:
            return
        if error is None and self._open:
            error = InternalError(f"the stream ended before {self._open} of {len(self._sequences)} sequences had")
        self._end(error)

    def cancel(self) -> None:
        """End it everywhere; the sink gets nothing more."""
        if not self._ended:
            self._leave("cancelled")

    def hold(self, held: bool) -> None:
        """Keep what comes from now on, or go on handing it on; what was kept is handed on together."""
        if self._running is None or self._ended:
            return
        if held:
            self._running.hold(held)
            return
        self._per_token = False
        try:
            self._running.hold(held)
        finally:
            self._per_token = self._prepared.request.per_token

    def _end(self, error: Exception | None) -> None:
        outcome = "done" if error is None else error.code if isinstance(error, BatonError) else InternalError.code
        self._leave(outcome)
        self._sink.on_end(error)

    def _leave(self, outcome: str) -> None:
        self._ended = True
        running, self._running = self._running, None  # no reference cycle: all of it is freed at once
        if running is not None:
            running.cancel()
        self._clock.end(outcome)
        self._decisions.end(self._record, outcome)
