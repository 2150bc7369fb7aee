"""One running request in text: its tokens become text, and what is counted of it is counted."""

from __future__ import annotations

from typing import Protocol

from baton.errors import BatonError, InternalError, UnavailableError
from baton.types import FinishReason
from baton_router.dispatch.interface import Dispatcher, RoutedChunk, RoutedDelta, Running
from baton_router.processor.generation_metrics import GenerationClock, cached_tokens
from baton_router.processor.text_request import PreparedRequest, TextChunk, TextDelta
from baton_router.scheduler.decision import DecisionLog

_ABORT, _ERROR = FinishReason.ABORT, FinishReason.ERROR  # once: a look at an enumeration takes long


class TextSink(Protocol):
    """Takes what a request brings, in order. It may cancel the request from inside of these calls."""

    def on_chunk(self, chunk: TextChunk) -> None:
        """Take a chunk."""

    def on_end(self, error: Exception | None) -> None:
        """Take the end, the last thing there is; ``None``: every sequence has ended."""


class OutputProcessor:
    """One running request: what its tokens say, and what is counted of it.

    Args:
        prepared: The request.
        sink: Takes what comes.
        clock: Times it.
        log: Remembers it.
    """

    __slots__ = (
        "_answer",
        "_clock",
        "_decisions",
        "_ended",
        "_prompt_tokens",
        "_record",
        "_routed",
        "_running",
        "_sink",
    )

    def __init__(self, prepared: PreparedRequest, sink: TextSink, clock: GenerationClock, log: DecisionLog) -> None:
        self._sink, self._clock, self._decisions = sink, clock, log
        self._routed = prepared.routed
        self._prompt_tokens = prepared.prompt_tokens
        self._record = log.begin(prepared.routed.request_id, self._prompt_tokens, clock, tenant=prepared.routed.tenant)
        self._answer = _Answer(prepared)
        self._running: Running | None = None
        self._ended = False

    def start(self, dispatcher: Dispatcher) -> None:
        """Begin."""
        running = dispatcher.start(self._routed, self)
        if self._ended:  # before there was anything to cancel
            running.cancel()
        else:
            self._running = running

    def on_chunk(self, chunk: RoutedChunk) -> None:
        """Take a chunk."""
        if self._ended:
            return
        answer, trace = self._answer, chunk.trace
        try:
            text = answer.follow(chunk)
        except Exception as error:
            self._end(error)
            return
        if trace is not None:
            text.cached_tokens = cached_tokens(trace)
        if chunk.decision is not None:
            self._clock.prompt(self._prompt_tokens, text.cached_tokens)
        if trace is not None:
            self._decisions.answered(self._record, trace)
        self._clock.tokens(text.deltas)
        if answer.ended_by_strings:
            self._leave("done")  # before it is handed on: the instances are free at once
            self._sink.on_chunk(text)
            self._sink.on_end(None)
        else:
            self._sink.on_chunk(text)

    def on_end(self, error: Exception | None) -> None:
        """Take the end."""
        if self._ended:
            return
        if error is None:
            try:
                self._answer.check_ended()
            except InternalError as missing:
                error = missing
        self._end(error)

    def cancel(self) -> None:
        """End it everywhere; the sink gets nothing more."""
        if not self._ended:
            self._leave("cancelled")

    def hold(self, held: bool) -> None:
        """Keep what comes from now on, or go on handing it on."""
        if self._running is not None and not self._ended:
            self._running.hold(held)

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


class _Answer:
    """The sequences of one request."""

    __slots__ = ("_open", "_running", "_sequences")

    def __init__(self, prepared: PreparedRequest) -> None:
        count = prepared.routed.sampling.n
        self._sequences = [prepared.sequence()] if count == 1 else [prepared.sequence() for _ in range(count)]
        self._open = len(self._sequences)
        self._running = len(self._sequences)

    @property
    def ended_by_strings(self) -> bool:
        """Whether all sequences have ended, but the instance still runs some, which stop strings ended."""
        return self._open == 0 and self._running > 0

    def follow(self, chunk: RoutedChunk) -> TextChunk:
        """Return what a message brings in text; tokens after a sequence's stop string are left out.

        Raises:
            UnavailableError: An instance gave the request up.
            InternalError: An instance failed it.
        """
        deltas = []
        for delta in chunk.deltas:
            text = self._follow(delta)
            if text is not None:
                deltas.append(text)
        return TextChunk(deltas, chunk.trace, chunk.decision, chunk.prompt_logprobs)

    def _follow(self, delta: RoutedDelta) -> TextDelta | None:
        if not 0 <= delta.index < len(self._sequences):
            raise InternalError(f"an instance answered with sequence {delta.index} of {len(self._sequences)}")
        sequence = self._sequences[delta.index]
        finish = delta.finish_reason
        self._running -= finish is not None
        if sequence.ended:
            return None
        if finish is _ABORT:
            raise UnavailableError("the request was aborted by the instance that ran it", retry_after_s=1.0)
        if finish is _ERROR:
            raise InternalError("the instance that ran the request failed it")
        text = sequence.push(delta)
        if text.finish_reason is not None:
            self._open -= 1
        return text

    def check_ended(self) -> None:
        """Check that every sequence has ended.

        Raises:
            InternalError: The stream ended before them.
        """
        if self._open:
            raise InternalError(f"the stream ended before {self._open} of {len(self._sequences)} sequences had")
