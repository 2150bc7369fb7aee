"""The capacity of the cluster: room for requests that start now, and predictions for a request by learnt speeds.

*Room.* A decode instance has room up to its slots, unless it reports that requests wait there already (it is out of KV
blocks, or others send it work). Prompts have room up to a second of work per prefill instance, or per decode instance
where there is no prefill instance; as long as speeds are unknown, without bound. So the workers' own queues are short,
but never empty while requests wait here.

*Predictions.* Nothing is refused by a guess: without a measurement within the last minute there is no prediction. So a
cluster that was too slow for all requests is tried again a minute later. The time in the queue follows from its drain
rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from baton.types import PrefillPath, Role
from baton_router.registry.instance import Instance
from baton_router.registry.load import NO_LIMIT
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.scheduler.placer import Fleet, Placer
from baton_router.scheduler.speeds import Speeds
from baton_router.types import RoutedRequest

_FRESH_S = 0.01
_AGAIN_S = 0.001
"""Seconds that a count over all instances is valid, with room (``_FRESH_S``) and without (``_AGAIN_S``). It costs as
much as a placement; requests that start and end in between are counted here."""
_QUEUE_MS = 1000.0
_LEAST_TOKENS = 4096.0
"""Two default steps of an engine: with less it could idle between two of them."""
_SLACK = 8
"""A decode instance gets an eighth more than it can batch, so that a sequence that ends is replaced at once."""
_IDLE_SHARE = 0.5
"""Share of the slots, and of the room for prompts, that background requests leave free."""
_UNKNOWN_SLOTS = 16
"""Slots of an instance that has no limit, for background requests."""
_FADE_S = 20.0
"""Age in seconds at which a departure counts 1/e."""
_PRIOR_S = 1.0
"""Seconds of draining from which the measured rate weighs more than the one estimated from requests in flight."""
_KEEP = 0.95


class Room:
    """Counts the sequences and prompt tokens that may start now.

    Args:
        registry: The instances.
        speeds: Learnt speeds of computing prompts.
        slots: Maximum sequences per decode instance; 0: unlimited; ``None``: its batch size and an eighth more.
        prompt_tokens: Maximum prompt tokens per prefill instance; 0: unlimited; ``None``: a second of work.
        now: Monotonic clock, in seconds.

    Attributes:
        num_decodes: Decode instances that were ready at the latest look.
    """

    def __init__(
        self, registry: Fleet, speeds: Speeds, slots: int | None, prompt_tokens: int | None, now: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._speeds = speeds
        self._now = now
        self._slots = slots
        self._prompt_tokens = prompt_tokens
        self._sequences = self._tokens = 0.0
        self._due_sequences = self._due_tokens = 0
        self._at = -math.inf
        self.num_decodes = 0

    def is_free(self) -> bool:
        """Whether a request could start; counts the instances' room again if the last count is too old."""
        now = self._now()
        age = now - self._at
        if age > _FRESH_S or (age > _AGAIN_S and (self._sequences <= 0 or self._tokens <= 0)):
            self._look(now)
        return self._sequences > 0 and self._tokens > 0

    def free_sequences(self) -> float:
        """Return how many sequences could start now; infinite: no instance has a limit."""
        return self._sequences if self.is_free() else 0.0

    def acquire(self, sequences: int, tokens: int) -> bool:
        """Take room for a request that is placed at once; ``False``: there is none.

        A request that needs more room than there is gets it if there is any: else it might never start.
        """
        if not self.is_free():
            return False
        self._sequences -= sequences
        self._tokens -= tokens
        return True

    def release(self, sequences: int, tokens: int) -> None:
        """Return the room of sequences that have ended, or of a prompt that was computed."""
        self._sequences += sequences
        self._tokens += tokens

    def reserve(self, sequences: int, tokens: int) -> None:
        """Reserve room for a request that may start but is not placed yet, so that no instance counts it."""
        self._due_sequences += sequences
        self._due_tokens += tokens
        self._sequences -= sequences
        self._tokens -= tokens

    def unreserve(self, sequences: int, tokens: int) -> None:
        """End the reservation of a request that is placed now, or was cancelled."""
        self._due_sequences -= sequences
        self._due_tokens -= tokens

    def idle_sequences(self, background: int) -> int:
        """Return how many sequences may start in idle capacity, without those that others may need soon.

        Half of the slots stay free, and half of the room for prompts. An instance on which anything waits has none.

        Args:
            background: Sequences that run in idle capacity already, whether they are placed by now or not.
        """
        decodes = self._registry.ready(Role.DECODE)
        slots = busy = 0
        for each in decodes:
            most = self._slots_of(each) or _UNKNOWN_SLOTS
            report = each.load.report
            slots += most
            reported = report.num_running + report.num_waiting + report.num_loading - each.load.ended
            placed = max(reported, each.load.requests + each.load.shared_requests)
            busy += most if report.num_waiting > each.load.ended else min(most, placed)
        free, limit = self._token_room(decodes)
        if free < _IDLE_SHARE * limit:
            return 0
        return max(0, int((1 - _IDLE_SHARE) * slots) - max(busy, background))

    def _look(self, now: float) -> None:
        decodes = self._registry.ready(Role.DECODE)
        self.num_decodes = len(decodes)
        self._at = now
        self._sequences = sum(self._free_slots(x) for x in decodes) - self._due_sequences
        self._tokens = self._token_room(decodes)[0] - self._due_tokens

    def _slots_of(self, instance: Instance) -> int:
        """Return the sequences that an instance may have; 0: unlimited, or unknown."""
        if self._slots is not None:
            return self._slots
        batch = instance.info.max_num_seqs if instance.info is not None else 0
        return batch + max(1, batch // _SLACK) if batch else 0

    def _free_slots(self, instance: Instance) -> float:
        book = instance.load
        slots = self._slots_of(instance)
        if not slots:
            return max(0, book.limit - book.requests) if book.limit < NO_LIMIT else math.inf
        if book.report.num_waiting - book.ended > max(1, slots // _SLACK):
            return 0
        return max(0, min(slots - book.shared_requests, book.limit) - book.requests)

    def _token_room(self, decodes: list[Instance]) -> tuple[float, float]:
        """Return the prompt tokens that may still start, and the most that could with nothing running."""
        if self._prompt_tokens == 0:
            return math.inf, math.inf
        prefills = self._registry.ready(Role.PREFILL)
        if prefills:
            work = [x.load.work for x in prefills]
            fits = self._speeds.prefill.known([x.instance_id for x in prefills])
        else:
            work = [float(x.load.prompts_waiting) for x in decodes]
            fits = self._speeds.local.known([x.instance_id for x in decodes])
        if self._prompt_tokens is not None:
            limits = [float(self._prompt_tokens)] * len(work)
        else:
            slopes = [fit.slope if fit is not None else 0.0 for fit in fits]
            limits = [max(_LEAST_TOKENS, _QUEUE_MS / slope) if slope > 0 else math.inf for slope in slopes]
        return sum(max(0.0, limit - busy) for limit, busy in zip(limits, work, strict=True)), sum(limits)


class DrainRate:
    """Tokens per second that leave the queue while there is one.

    Until that was measured for a while, it is estimated by Little's law: work in flight over the time of requests.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._since: float | None = None
        self._served_cost = self._served_time = 0.0

    def start(self, now: float) -> None:
        """Begin to measure: the queue is not empty any more."""
        if self._since is None:
            self._since = now

    def stop(self, now: float) -> None:
        self._advance(now)
        self._since = None

    def add_left(self, cost: float, now: float) -> None:
        """Count a request that left the queue to be served."""
        self._advance(now)
        self._tokens += cost

    def add_served(self, cost: float, seconds: float) -> None:
        """Count a request that was served, whether it waited or not."""
        self._served_cost = _KEEP * self._served_cost + cost
        self._served_time = _KEEP * self._served_time + cost * seconds

    def rate(self, in_flight: float, now: float) -> float:
        """Return tokens per second; 0: unknown, as nothing was served yet or nothing is in flight.

        Args:
            in_flight: Cost of the requests being served, in tokens.
            now: Current time, in seconds.
        """
        self._advance(now)
        guess = 0.0
        if self._served_cost:
            guess = in_flight / max(self._served_time / self._served_cost, 1e-3)
        elif not self._tokens:
            return 0.0
        return (self._tokens + _PRIOR_S * guess) / (self._seconds + _PRIOR_S)

    def _advance(self, now: float) -> None:
        if self._since is None:
            return
        passed = max(0.0, now - self._since)
        self._since = now
        fade = math.exp(-passed / _FADE_S)
        self._tokens *= fade
        self._seconds = self._seconds * fade + passed


@dataclass(frozen=True, slots=True)
class Outlook:
    """Prediction for a request.

    Attributes:
        missing: Prompt tokens that no instance holds.
        ttft_ms: Milliseconds to the first token if it started now; ``None``: unknown.
        alone_ms: Milliseconds to the first token if nothing else ran.
    """

    missing: int
    ttft_ms: float | None = None
    alone_ms: float = 0.0


class Estimates:
    """Predictions by the policy and learnt speeds; nothing is reserved.

    Args:
        placer: Placer that chooses instances.
        speeds: Learnt speeds.
        registry: The instances.
    """

    def __init__(self, placer: Placer, speeds: Speeds, registry: Fleet) -> None:
        self._placer = placer
        self._speeds = speeds
        self._registry = registry

    def output_tokens(self, request: RoutedRequest) -> float:
        """Return the tokens that a request is expected to generate, all its sequences together.

        What a client expects counts if it is more than the mean: less would buy it turns in the queue.
        """
        sampling = request.sampling
        expected = max(self._speeds.output_tokens, request.expected_tokens or 0)
        most = sampling.max_tokens
        return sampling.n * (expected if most is None or most > expected else most)

    def look(self, request: RoutedRequest) -> Outlook:
        """Predict a request's start, as the policy would place it now."""
        placement = self._placer.place(PlacementRequest.of(request), reserve=False)
        total = request.num_given
        if placement is None:
            return Outlook(total)
        decision = placement.decision
        missing = total - max([*decision.prefill.matched, *decision.decode.matched])
        times = [x for x in (self._remote(placement), self._local(placement)) if x is not None]
        if not times:
            return Outlook(missing)
        return Outlook(missing, *min(times))

    def slow(self, request: RoutedRequest) -> dict[Instance, float]:
        """Return the decode instances whose milliseconds between tokens, with this request, exceed its target."""
        limit = request.itl_ms
        if limit is None:
            return {}
        instances = self._registry.ready(Role.DECODE)
        known = self._speeds.decode.known([x.instance_id for x in instances])
        slow = {}
        for x, fit in zip(instances, known, strict=True):
            if fit is not None and (ms := fit.at(x.load.requests + request.sampling.n)) > limit:
                slow[x] = ms
        return slow

    def all_slow(self, request: RoutedRequest) -> tuple[str, float] | None:
        """Return the fastest decode instance and its milliseconds, if none is fast enough; ``None``: one is."""
        slow = self.slow(request)
        if not slow or len(slow) < len(self._registry.ready(Role.DECODE)):
            return None
        best = min(slow, key=slow.__getitem__)
        return best.instance_id, slow[best]

    def _remote(self, placement: Placement) -> tuple[float, float] | None:
        """Predict a prefill on the chosen prefill instance: now, and if nothing else ran."""
        decision = placement.decision
        if not placement.prefill or decision.path in (PrefillPath.LOCAL, PrefillPath.STORE):
            return None
        prefill = placement.prefill[0]
        decode = placement.decode
        (fit,) = self._speeds.prefill.known([prefill.instance_id])
        if fit is None or decode.info is None:
            return None
        own = decision.decode.matched[decision.choice.decode]
        missing = decision.prompt_tokens - max(own, decision.prefill.matched[decision.prefill_order[0]])
        kind = decode.info.fingerprint
        moved = (decision.prompt_tokens - own) * kind.block_bytes / kind.block_size
        (transfer,) = self._speeds.transfer.get([(prefill.instance_id, decode.instance_id)])
        alone = fit.at(missing) + transfer.at(moved)
        return alone + fit.slope * prefill.load.work, alone

    def _local(self, placement: Placement) -> tuple[float, float] | None:
        """Predict a prefill on the decode instance itself."""
        decision = placement.decision
        decode = placement.decode
        if decision.path in (PrefillPath.REMOTE, PrefillPath.STORE):
            return None
        (fit,) = self._speeds.local.known([decode.instance_id])
        if fit is None:
            return None
        alone = fit.at(decision.prompt_tokens - decision.decode.matched[decision.choice.decode])
        return alone + fit.slope * decode.load.prompts_waiting, alone
