"""One request from placement to its last token, over as many decode instances as it takes.

A *group* is the set of sequences that one ``Generate`` call carries. A request begins as one group. When its call
breaks before any token arrived the group is simply placed again. When tokens have arrived every unfinished sequence
becomes a group of its own and goes on with prompt + tokens so far: a sequence depends on its seed, its parameters and
its own tokens alone (``baton.seeds``), so the next token is the one that would have come.

What was yielded is what was recorded, in the same step: nothing can be repeated or left out by a break in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field

from baton.api.v1 import worker_pb2
from baton.errors import BatonError, DeadlineError, QueueFullError, UnavailableError
from baton.rpc.convert import sampling_to_pb
from baton.seeds import sequence_seed
from baton.types import FinishReason, Role, SamplingParams
from baton_router.attempt import Attempt, AttemptFailed, Message, last_message
from baton_router.backoff import Backoff
from baton_router.config import RouterConfig
from baton_router.core import RoutedChunk, RoutedDelta, RoutedRequest
from baton_router.decision import Decision
from baton_router.decisions import DecisionLog
from baton_router.instance import Instance
from baton_router.merge import merge
from baton_router.metrics import RouterMetrics
from baton_router.placement import Ask, Placement, Placer
from baton_router.recovery import Breakers, RetryBudget
from baton_router.registry import Registry
from baton_router.session import Sessions
from baton_router.trace import TraceMerge

log = logging.getLogger(__name__)

_MAX_ID_CHARS = 240
"""Of a request's id that instances see: they take 256, with room for the number of the call."""
_SAME_AGAIN_S = 0.5
"""After a connection broke: how long an instance that is still ready then, and nobody else, is not tried again."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What every run uses."""

    registry: Registry
    placer: Placer
    metrics: RouterMetrics
    config: RouterConfig
    breakers: Breakers
    budget: RetryBudget
    decisions: DecisionLog = field(default_factory=DecisionLog)
    sessions: Sessions = field(default_factory=Sessions)
    slow: Callable[[RoutedRequest], Iterable[Instance]] = lambda request: ()
    """Returns the decode instances that are too slow for a request's ``itl_ms``."""


@dataclass(slots=True)
class _Sequence:
    """One of the request's sequences: what was yielded of it."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    finished: bool = False


@dataclass(slots=True)
class _Group:
    """Sequences that travel together, and what went wrong with them so far.

    Attributes:
        excluded: Identities of instances that failed them.
        full: The latest refusal for lack of room, until somebody took the group.
        last: The latest other failure.
        failures: How many others there were.
    """

    sequences: list[_Sequence]
    excluded: set[tuple[str, int]] = field(default_factory=set)
    full: QueueFullError | None = None
    last: AttemptFailed | None = None
    failures: int = 0

    @property
    def open(self) -> list[_Sequence]:
        return [s for s in self.sequences if not s.finished]

    def has_open(self) -> bool:
        for s in self.sequences:  # noqa: SIM110  once per token, and a generator costs more than the look
            if not s.finished:
                return True
        return False

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)

    @property
    def started(self) -> bool:
        return any(s.token_ids or s.finished for s in self.sequences)


class RequestRun:
    """Runs one request once.

    Args:
        context: Shared parts.
        request: The request; ``seed`` and ``max_tokens`` of its sampling are set.
        waited_s: How long it waited in the router's queue.
    """

    def __init__(self, context: RunContext, request: RoutedRequest, waited_s: float = 0.0) -> None:
        self._context = context
        self._request = request
        self._deadline = time.monotonic() + context.config.request_timeout_s
        self._traces = TraceMerge(int(1e6 * waited_s))
        self._sequences = [_Sequence(i, list(request.output_token_ids)) for i in range(request.sampling.n)]
        self._calls = 0
        context.budget.count_request()
        self._begun = False

    async def chunks(self) -> AsyncGenerator[RoutedChunk, None]:
        """Yield the request's chunks; closing the generator cancels everything it runs.

        Raises:
            BatonError: See ``Dispatcher.stream``.
        """
        try:
            async with contextlib.aclosing(self._run_group(_Group(self._sequences))) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            for trace in self._traces.attempts():
                self._context.metrics.observe_trace(trace)

    async def place(self) -> tuple[Placement, worker_pb2.GenerateRequest]:
        """Select and reserve for somebody else who runs the request; returns what he is to send."""
        group = _Group(self._sequences)
        placement = await self._place(group)
        return placement, self._message(group, placement)

    async def _run_group(self, group: _Group) -> AsyncGenerator[RoutedChunk, None]:
        while group.has_open():
            if exhausted := self._exhausted(group):
                yield exhausted
                continue
            placement = await self._place(group)
            self._context.decisions.placed(self._request.request_id, placement.decision)
            before = group.num_tokens
            try:
                async with contextlib.aclosing(self._attempt(group, placement)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except AttemptFailed as failure:
                if not group.has_open():
                    return
                self._note_failure(group, placement, failure, in_mid_stream=group.num_tokens > before)
            finally:
                self._context.breakers.ended(placement.decode, well=not group.has_open())
                placement.release()
            if group.started and len(group.sequences) > 1:
                parts = [_Group([s], set(group.excluded), group.full, group.last, group.failures) for s in group.open]
                async with contextlib.aclosing(merge([self._run_group(part) for part in parts])) as chunks:
                    async for chunk in chunks:
                        yield chunk

    def _exhausted(self, group: _Group) -> RoutedChunk | None:
        """End sequences that have all their tokens but broke off before they were told to have ended."""
        limit = self._request.sampling.max_tokens
        done = [s for s in group.open if limit is not None and len(s.token_ids) >= limit]
        for s in done:
            s.finished = True
        if not done:
            return None
        return self._chunk([RoutedDelta(s.index, [], finish_reason=FinishReason.LENGTH) for s in done], None, None)

    # --- placing ---

    async def _place(self, group: _Group) -> Placement:
        """Select and reserve, waiting a little for an instance if none is ready.

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
            self._remaining_s()
            placement = self._choose(group)
            if placement is not None:
                return placement
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

    def _choose(self, group: _Group) -> Placement | None:
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

    def _ask(self, group: _Group, exclude: set[tuple[str, int]]) -> Ask:
        tokens = self._request.prompt_token_ids
        if len(group.sequences) == 1 and group.sequences[0].token_ids:
            tokens = tokens + group.sequences[0].token_ids
        return Ask(
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

    async def _attempt(self, group: _Group, placement: Placement) -> AsyncGenerator[RoutedChunk, None]:
        indices = [s.index for s in group.sequences]
        number = self._traces.attempt()
        attempt = Attempt(
            self._context.sessions,
            placement.decode,
            self._message(group, placement),
            indices,
            timeout_s=self._remaining_s(),
        )
        try:
            while (message := await (attempt.next() if group.has_open() else last_message(attempt))) is not None:
                group.full = None
                if message.trace is not None:
                    self._traces.update(number, message.trace)
                    placement.trace = message.trace
                if message.trace is not None:  # the first message, and the last
                    self._context.breakers.answered(placement.decode)
                deltas = self._record(message, placement)
                if deltas or not self._begun or not self._open:
                    yield self._chunk(deltas, placement.decision, message)
        finally:
            attempt.close()
        if group.has_open():
            raise AttemptFailed(UnavailableError("the stream ended before the request had"), "short")

    def _message(self, group: _Group, placement: Placement) -> worker_pb2.GenerateRequest:
        request, first = self._request, group.sequences[0]
        self._calls += 1
        # Unique among live requests, also beside a call of ours that its instance has not yet seen cancelled.
        request_id = request.request_id[-_MAX_ID_CHARS:]
        message = worker_pb2.GenerateRequest(
            request_id=request_id if self._calls == 1 else f"{request_id}~{self._calls}",
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=first.token_ids if len(group.sequences) == 1 else (),
            sampling=sampling_to_pb(self._sampling(group)),
            prefill_candidates=[x.address for x in placement.prefill],
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        if (threshold := placement.remote_threshold) is not None:
            message.remote_prefill_threshold = threshold
        return message

    def _sampling(self, group: _Group) -> SamplingParams:
        sampling = self._request.sampling
        if len(group.sequences) < sampling.n:
            seed = sequence_seed(sampling.seed or 0, group.sequences[0].index)
            sampling = sampling.replace(n=1, seed=seed)
        if sampling.prompt_logprobs is not None and not self._wants_prompt_logprobs():
            sampling = sampling.replace(prompt_logprobs=None)
        return sampling

    def _record(self, message: Message, placement: Placement) -> list[RoutedDelta]:
        """Note what is about to be yielded; drops what came after a sequence's end."""
        deltas = []
        for delta in message.deltas:
            sequence = self._sequences[delta.index]
            if sequence.finished:
                continue
            sequence.token_ids.extend(delta.token_ids)
            sequence.finished = delta.finish_reason is not None
            placement.grow(len(delta.token_ids))
            deltas.append(delta)
        if deltas:
            placement.prefilled()
        return deltas

    @property
    def _open(self) -> bool:
        for s in self._sequences:  # noqa: SIM110  once per token, and a generator costs more than the look
            if not s.finished:
                return True
        return False

    def _chunk(self, deltas: list[RoutedDelta], decision: Decision | None, message: Message | None) -> RoutedChunk:
        first, self._begun = not self._begun, True
        return RoutedChunk(
            deltas=deltas,
            trace=self._traces.merged() if first or not self._open else None,
            decision=decision if first else None,
            prompt_logprobs=message.prompt_logprobs if message is not None and first else None,
        )

    # --- failures ---

    def _note_failure(
        self, group: _Group, placement: Placement, failure: AttemptFailed, *, in_mid_stream: bool
    ) -> None:
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
            self._context.metrics.migrations.labels(reason=failure.reason).inc()
        else:
            self._context.metrics.retries.labels(reason=failure.reason).inc()

    def _may_go_on(self, group: _Group, failure: AttemptFailed) -> bool:
        """Whether a group that failed may be tried again; counts it against the budget where that applies."""
        context = self._context
        if group.failures > context.config.max_retries:
            return False
        if isinstance(failure.error, QueueFullError) and group.started:
            return True  # a stream that has begun waits for room, with pauses
        if failure.broken and group.failures == 1:
            return True  # its load went away with the instance
        return context.budget.take(failure.reason)
