"""One request from placement to its last token, over as many decode instances as it takes.

A *group* is the set of sequences that one ``Generate`` call carries. A request begins as one group. When its call
breaks before any token arrived the group is simply placed again. When tokens have arrived every unfinished sequence
becomes a group of its own and goes on with prompt + tokens so far: a sequence depends on its seed, its parameters and
its own tokens alone (``baton.seeds``), so the next token is the one that would have come.

What was handed on is what was recorded, in the same step: nothing can be repeated or left out by a break in between.

Nothing here waits: what comes from an instance is handed on at once, from where it is read. There is a task only where
a request has to wait for an instance.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time

from baton.api.v1 import worker_pb2
from baton.errors import BatonError, DeadlineError, QueueFullError, UnavailableError
from baton.rpc.channel import Backoff
from baton.rpc.convert import sampling_to_pb
from baton.token_ids import token_ids
from baton.types import FinishReason, Role, SamplingParams
from baton_router.dispatch.attempt import AttemptFailed, Message
from baton_router.dispatch.group import Group, GroupAttempt, Sequence
from baton_router.dispatch.interface import ChunkSink, RoutedChunk, RoutedDelta
from baton_router.dispatch.run_context import RunContext
from baton_router.dispatch.run_message import encoded, message_of, sampling_of
from baton_router.dispatch.trace import TraceMerge
from baton_router.dispatch.turn_batching import SEND
from baton_router.scheduler.decision import Decision
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.types import RoutedRequest

log = logging.getLogger(__name__)

_SAME_AGAIN_S = 0.5
"""After a connection broke: how long an instance that is still ready then, and nobody else, is not tried again."""


class RequestRun:
    """Runs one request once.

    Args:
        context: Shared parts.
        request: The request; ``seed`` and ``max_tokens`` of its sampling are set.
        waited_s: How long it waited in the router's queue.
        sink: Takes what comes; ``None``: somebody else runs the request (see :meth:`place`).
    """

    __slots__ = (
        *("_attempts", "_begun", "_calls", "_context", "_deadline", "_ended", "_held"),
        *("_num_open", "_request", "_sequences", "_sink", "_traces", "_waits"),
    )

    def __init__(
        self, context: RunContext, request: RoutedRequest, waited_s: float = 0.0, sink: ChunkSink | None = None
    ) -> None:
        self._context = context
        self._request = request
        self._sink = sink
        self._deadline = time.monotonic() + context.config.request_timeout_s
        self._traces = TraceMerge(int(1e6 * waited_s))
        self._sequences: list[Sequence] = []
        for i in range(request.sampling.n):
            self._sequences.append(Sequence(i, list(request.output_token_ids)))
        self._num_open = len(self._sequences)
        self._calls = 0
        context.budget.count_request()
        self._begun = self._ended = self._held = False
        self._attempts: set[GroupAttempt] = set()
        self._waits: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Place the request and run it. The sink hears of everything, also of a failure to do that."""
        self._context.deadlines.add(self)
        self._go_on(Group(self._sequences))

    def expire(self) -> None:
        """The request's time is over."""
        for attempt in list(self._attempts):
            attempt.expire()

    def cancel(self) -> None:
        """End everything that runs; the sink gets nothing more."""
        if not self._ended:
            self._end()

    def hold(self, held: bool) -> None:
        """Let what comes wait with the streams, or go on: for a client who does not read."""
        self._held = held
        for attempt in list(self._attempts):
            attempt.hold(held)

    async def place(self) -> tuple[Placement, worker_pb2.GenerateRequest]:
        """Select and reserve for somebody else who runs the request; returns what he is to send."""
        group = Group(self._sequences)
        placement = self._choose(group) or await self._place(group)
        message = self._message(group, placement)
        message.sampling.CopyFrom(sampling_to_pb(self._sampling(group)))
        message.prompt_token_ids.extend(self._request.prompt_token_ids)
        return placement, message

    def _end(self) -> None:
        self._ended = True
        self._sink = None  # who refers to this: without a circle, all of it is freed at once and used again
        self._context.deadlines.discard(self)
        for attempt in list(self._attempts):
            attempt.close()
        for task in self._waits:
            task.cancel()
        for trace in self._traces.attempts():
            self._context.metrics.observe_trace(trace)

    def _finish(self, error: Exception | None) -> None:
        sink = self._sink
        if not self._ended and sink is not None:
            self._end()
            sink.on_end(error)

    def _emit(self, chunk: RoutedChunk) -> None:
        if self._sink is not None:
            self._sink.on_chunk(chunk)

    def _go_on(self, group: Group) -> None:
        """Bring a group on its way, at once or as soon as somebody takes it; end the run if nothing is left to do."""
        try:
            while not self._ended and group.has_open():
                if exhausted := self._exhausted(group):
                    self._emit(exhausted)
                    continue
                self._remaining_s()
                placement = self._choose(group)
                if placement is not None:
                    self._launch(group, placement)
                else:
                    self._waits.add(asyncio.get_running_loop().create_task(self._wait(group)))
                return
        except Exception as error:
            self._finish(error)
            return
        if not self._num_open and not self._attempts:
            self._finish(None)

    async def _wait(self, group: Group) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            placement = await self._place(group)
            self._waits.discard(task)
            self._launch(group, placement)
        except Exception as error:
            self._waits.discard(task)
            self._finish(error)

    def _launch(self, group: Group, placement: Placement) -> None:
        attempt = GroupAttempt(self, group, placement, self._traces.attempt())
        self._attempts.add(attempt)
        self._context.steps.later(SEND, self._send, attempt)

    def _send(self, attempt: GroupAttempt) -> None:
        if attempt.closed:
            return
        try:
            self._context.decisions.placed(self._request.request_id, attempt.placement.decision)
            message = self._message(attempt.group, attempt.placement)
            prompt = self._request.prompt_token_ids
            attempt.start(self._context.streams, encoded(message, self._sampling(attempt.group), prompt))
        except Exception as error:
            self._finish(error)
            return
        if self._held:
            attempt.hold(True)

    def _message(self, group: Group, placement: Placement) -> worker_pb2.GenerateRequest:
        self._calls += 1
        return message_of(self._request, group, placement, self._calls)

    def _sampling(self, group: Group) -> SamplingParams:
        return sampling_of(self._request.sampling, group, prompt_logprobs=self._wants_prompt_logprobs())

    # --- what an attempt tells ---

    def on_message(self, attempt: GroupAttempt, message: Message) -> None:
        """Take a message."""
        group, placement = attempt.group, attempt.placement
        group.full = None
        if message.trace is not None:  # the first message, and the last
            self._traces.update(attempt.number, message.trace)
            placement.trace = message.trace
            self._context.breakers.answered(placement.decode)
        deltas = self._record(message, placement)
        if deltas or not self._begun or not self._num_open:
            self._emit(self._chunk(deltas, placement.decision, message))

    def judge(self, attempt: GroupAttempt, failure: AttemptFailed | None) -> None:
        """An attempt's call has ended: see whether its group may go on, if it has to.

        Raises:
            BatonError: It may not.
        """
        group = attempt.group
        if group.has_open():
            if failure is None:
                failure = AttemptFailed(UnavailableError("the stream ended before the request had"), "short")
            in_mid_stream = group.num_tokens > attempt.tokens_before
            self._note_failure(group, attempt.placement, failure, in_mid_stream=in_mid_stream)

    def on_left(self, attempt: GroupAttempt) -> None:
        """A group leaves its instance."""
        self._attempts.discard(attempt)
        self._context.breakers.ended(attempt.placement.decode, well=not attempt.group.has_open())

    def on_failure(self, error: Exception) -> None:
        """The request cannot go on."""
        self._finish(error)

    def go_on(self, group: Group) -> None:
        """A group's shares are given back, and it may go on."""
        if len(group.sequences) > 1 and group.started and group.has_open():
            for s in group.open:
                self._go_on(Group([s], set(group.excluded), group.full, group.last, group.failures))
        else:
            self._go_on(group)

    def _exhausted(self, group: Group) -> RoutedChunk | None:
        """End sequences that have all their tokens but broke off before they were told to have ended."""
        limit = self._request.sampling.max_tokens
        deltas = []
        for s in group.sequences:
            if limit is not None and len(s.token_ids) >= limit and not s.finished:
                self._close(s)
                deltas.append(RoutedDelta(s.index, [], finish_reason=FinishReason.LENGTH))
        return self._chunk(deltas, None, None) if deltas else None

    # --- placing ---

    async def _place(self, group: Group) -> Placement:
        """Wait a little for an instance after :meth:`_choose` found none; select and reserve.

        Raises:
            QueueFullError: All that are ready are full.
            UnavailableError: None became ready in time.
            DeadlineError: The request's time is over.
        """
        config, registry = self._context.config, self._context.registry
        give_up_at = time.monotonic() + config.no_instance_wait_s
        same_again_at = time.monotonic() + _SAME_AGAIN_S
        backoff = None
        while True:
            if group.full is not None and not group.started:
                raise group.full
            if group.last is not None and not group.last.broken and registry.ready(Role.DECODE):
                raise group.last.error  # those who are there all failed it; nobody new is to be expected
            left = min(give_up_at, self._deadline) - time.monotonic()
            if left <= 0:
                last = group.last.error if group.last is not None else None
                raise group.full or last or registry.none_free()
            if group.full is not None:
                # A stream that has begun waits for room: somebody is reading it.
                backoff = backoff or Backoff(1.0, random.Random())
                await asyncio.sleep(min(backoff.next_s(), left))
                group.excluded.clear()
            else:
                await registry.wait_changed(min(left, max(0.0, same_again_at - time.monotonic()) or left))
                if group.last is not None and group.last.broken and time.monotonic() >= same_again_at:
                    group.excluded.clear()  # whoever is still ready has lost a connection, not its life
            self._remaining_s()
            placement = self._choose(group)
            if placement is not None:
                return placement

    def _choose(self, group: Group) -> Placement | None:
        """Select and reserve, past instances whose breakers are open unless there are no others."""
        context = self._context
        refused = context.breakers.refused(context.registry.ready(Role.DECODE))
        if self._request.itl_ms is not None:
            refused = refused | {x.identity for x in context.slow(self._request)}
        placement = context.placer.place(self._ask(group, group.excluded | refused if refused else group.excluded))
        if placement is None and refused:
            placement = context.placer.place(self._ask(group, group.excluded))
        if placement is not None:
            context.breakers.begin(placement.decode)
        return placement

    def _ask(self, group: Group, exclude: set[tuple[str, int]]) -> PlacementRequest:
        tokens = self._request.prompt_token_ids
        if len(group.sequences) == 1 and group.sequences[0].token_ids:
            tokens = token_ids([*tokens, *group.sequences[0].token_ids])
        return PlacementRequest(
            token_ids=tokens,
            cache_salt=self._request.cache_salt,
            num_sequences=len(group.sequences),
            session=self._request.session,
            max_tokens=self._request.sampling.max_tokens,
            local_only=self._wants_prompt_logprobs(),
            exclude=exclude,
        )

    def _wants_prompt_logprobs(self) -> bool:
        return self._request.sampling.prompt_logprobs is not None and not self._begun

    def _remaining_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"the request took longer than {self._context.config.request_timeout_s:g} s")
        return left

    # --- one attempt ---

    def _record(self, message: Message, placement: Placement) -> list[RoutedDelta]:
        """Note what is about to be handed on; drops what came after a sequence's end."""
        deltas = []
        for delta in message.deltas:
            sequence = self._sequences[delta.index]
            if sequence.finished:
                continue
            sequence.token_ids.extend(delta.token_ids)
            if delta.finish_reason is not None:
                self._close(sequence)
            placement.grow(len(delta.token_ids))
            deltas.append(delta)
        if deltas:
            placement.prefilled()
        return deltas

    def _close(self, sequence: Sequence) -> None:
        sequence.finished = True
        self._num_open -= 1

    def _chunk(self, deltas: list[RoutedDelta], decision: Decision | None, message: Message | None) -> RoutedChunk:
        first, self._begun = not self._begun, True
        return RoutedChunk(
            deltas=deltas,
            trace=self._traces.merged() if first or not self._num_open else None,
            decision=decision if first else None,
            prompt_logprobs=message.prompt_logprobs if message is not None and first else None,
        )

    # --- failures ---

    def _note_failure(self, group: Group, placement: Placement, failure: AttemptFailed, *, in_mid_stream: bool) -> None:
        """Decide whether the group may try again.

        Raises:
            BatonError: It may not.
        """
        error: BatonError = failure.error
        if failure.final:
            raise error
        instance = placement.decode
        group.excluded.add(instance.identity)
        if isinstance(error, QueueFullError):
            group.full = error
        else:
            group.failures += 1
            group.last = failure
            self._context.breakers.failed(instance)
        may_go_on = self._may_go_on(group, failure)
        log.warning(
            "request %s: %s failed (%s: %s), %s",
            self._request.request_id,
            instance.instance_id,
            failure.reason,
            error.message,
            "going on elsewhere" if may_go_on else "giving up",
        )
        if not may_go_on:
            raise error
        if in_mid_stream:
            self._traces.num_migrations += 1
            self._context.metrics.migrations.labels(failure.reason).inc()
        else:
            self._context.metrics.retries.labels(failure.reason).inc()

    def _may_go_on(self, group: Group, failure: AttemptFailed) -> bool:
        """Whether a group that failed may be tried again; counts it against the budget where that applies."""
        context = self._context
        if group.failures > context.config.max_retries:
            return False
        if isinstance(failure.error, QueueFullError) and group.started:
            return True  # a stream that has begun waits for room, with pauses
        if failure.broken and group.failures == 1:
            return True  # its load went away with the instance
        return context.budget.take(failure.reason)
