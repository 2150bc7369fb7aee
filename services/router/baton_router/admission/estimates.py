"""What a request would meet if it started now: time to its first token, and between tokens, by learnt speeds.

Nothing is refused by a guess: where nothing was measured within the last minute, nothing is predicted. So a cluster
that was too slow for all requests is tried again a minute later. How long the queue takes is told by its drain rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.types import PrefillPath, Role
from baton_router.admission.room import Ready
from baton_router.registry.instance import Instance
from baton_router.scheduler.placement import Placement, PlacementRequest, Places
from baton_router.scheduler.speeds import Speeds
from baton_router.types import RoutedRequest

_FADE_S = 20.0
"""What left so long ago counts 1/e."""
_PRIOR_S = 1.0
"""Seconds of draining from which more is believed of what was seen than of what requests in flight suggest."""
_KEEP = 0.95


class DrainRate:
    """Tokens per second that leave the queue while there is one.

    Before that was seen for a while, Little's law stands in: what is in flight, over the time that requests take.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._since: float | None = None
        self._served_cost = self._served_time = 0.0

    def began(self, now: float) -> None:
        """The queue has something in it."""
        if self._since is None:
            self._since = now

    def ended(self, now: float) -> None:
        """The queue is empty."""
        self._advance(now)
        self._since = None

    def left(self, cost: float, now: float) -> None:
        """Count a request that left the queue to be served."""
        self._advance(now)
        self._tokens += cost

    def served(self, cost: float, seconds: float) -> None:
        """Count a request that was served, however it came in."""
        self._served_cost = _KEEP * self._served_cost + cost
        self._served_time = _KEEP * self._served_time + cost * seconds

    def rate(self, in_flight: float, now: float) -> float:
        """Return tokens per second; 0: nothing was served yet, or nothing is in flight, so nothing can be said.

        Args:
            in_flight: Cost of what is being served.
            now: The time.
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
    """What a request would meet.

    Attributes:
        missing: Prompt tokens that no instance holds.
        ttft_ms: To the first token if it started now; ``None``: nothing was measured.
        alone_ms: The same if nothing else ran.
    """

    missing: int
    ttft_ms: float | None = None
    alone_ms: float = 0.0


class Estimates:
    """Predicts, and reserves nothing.

    Args:
        placer: Says where a request would go.
        speeds: What was learnt.
        fleet: The instances.
    """

    def __init__(self, placer: Places, speeds: Speeds, fleet: Ready) -> None:
        self._placer, self._speeds, self._fleet = placer, speeds, fleet

    def output_tokens(self, request: RoutedRequest) -> float:
        """Return the tokens that a request is expected to generate, all its sequences together."""
        sampling, expected = request.sampling, self._speeds.output_tokens
        most = sampling.max_tokens
        return sampling.n * (expected if most is None or most > expected else most)

    def look(self, request: RoutedRequest) -> Outlook:
        """Predict a request's start, as the policy would place it now."""
        ask = PlacementRequest(
            request.prompt_token_ids,
            request.cache_salt,
            request.sampling.n,
            local_only=request.sampling.prompt_logprobs is not None,
            session=request.session,
            max_tokens=request.sampling.max_tokens,
        )
        placement = self._placer.place(ask, reserve=False)
        total = len(request.prompt_token_ids)
        if placement is None:
            return Outlook(total)
        decision = placement.decision
        missing = total - max([*decision.prefill.matched, *decision.decode.matched])
        times = [x for x in (self._remote(placement), self._local(placement)) if x is not None]
        if not times:
            return Outlook(missing)
        return Outlook(missing, *min(times))

    def slow(self, request: RoutedRequest) -> dict[Instance, float]:
        """Return the decode instances whose time between tokens, with this request, is more than it asks for."""
        limit = request.itl_ms
        if limit is None:
            return {}
        instances = self._fleet.ready(Role.DECODE)
        known = self._speeds.decode.known([x.instance_id for x in instances])
        found = {}
        for x, fit in zip(instances, known, strict=True):
            if fit is not None and (ms := fit.at(x.load.requests + request.sampling.n)) > limit:
                found[x] = ms
        return found

    def all_slow(self, request: RoutedRequest) -> tuple[str, float] | None:
        """Return the fastest decode instance and its milliseconds, if none is fast enough; ``None``: one is."""
        slow = self.slow(request)
        if not slow or len(slow) < len(self._fleet.ready(Role.DECODE)):
            return None
        best = min(slow, key=slow.__getitem__)
        return best.instance_id, slow[best]

    def _remote(self, placement: Placement) -> tuple[float, float] | None:
        """Predict a prefill on the chosen prefill instance: now, and if nothing else ran."""
        decision = placement.decision
        if not placement.prefill or decision.path in (PrefillPath.LOCAL, PrefillPath.STORE):
            return None
        prefill, decode = placement.prefill[0], placement.decode
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
        decision, decode = placement.decision, placement.decode
        if decision.path in (PrefillPath.REMOTE, PrefillPath.STORE):
            return None
        (fit,) = self._speeds.local.known([decode.instance_id])
        if fit is None:
            return None
        alone = fit.at(decision.prompt_tokens - decision.decode.matched[decision.choice.decode])
        return alone + fit.slope * decode.load.prompts_waiting, alone
