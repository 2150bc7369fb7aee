"""Placement formulae of other routers, as rows to compare with, after their publications, not their code.

Each scores prefill and decode instances by itself, with what Baton's router knows of them: its exact prefix index and
its own count of what is in flight, where the original goes by its own tracking or by scraped metrics. So rows compare
formulae, not systems. Constants are the published defaults.
"""

from __future__ import annotations

import hashlib
import random
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from baton.types import InstanceId, Role
from baton_router.scheduler.policy import FloatArray, Policy, Ratings, Request, Scores, Side

_BLOCK = 512
_RING_POINTS = 8
_BOUND = 1.25
_HISTORY_REQUESTS = 4096
_REFUSED = -1e9


class _Rival(Policy):
    """A formula that scores each role by itself."""

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        none = Scores.of(none=[])
        return Ratings(
            self._side(request, prefill) if len(prefill) else none, self._side(request, decode) if len(decode) else none
        )

    @abstractmethod
    def _side(self, request: Request, side: Side) -> Scores:
        """Score the instances of one role; more is better."""


class DynamoCost(_Rival):
    """NVIDIA Dynamo's KV router: least ``overlap_weight * prefill blocks + decode blocks``, overlap_weight = 1.

    Source: Dynamo's documentation, "KV Router", section on the cost function
    (https://docs.nvidia.com/dynamo/latest/components/router/README.html). Prefill blocks: prompt tokens that wait on
    the worker and those of this request that are not cached there, in blocks; decode blocks: blocks of the sequences
    that run there. Temperature 0.

    Simplified: served apart, a prefill worker is rated by prefill blocks alone, a decode worker by both, as the
    documentation says of disaggregated serving with one router each.
    """

    name = "dynamo_cost"

    def _side(self, request: Request, side: Side) -> Scores:
        missing = (request.tokens - side.matched) / _BLOCK
        return Scores.of(prefill_blocks=-missing, active_blocks=-side.work / _BLOCK)


class SglangCacheAware(_Rival):
    """SGLang's cache-aware router: longest prefix while balanced, shortest queue while not.

    Source: SGLang's documentation, "SGLang Model Gateway", load balancing policies
    (https://docs.sglang.ai/advanced_features/router.html). Unbalanced: most requests in flight exceed the fewest by 64
    and 1.5 times them; then the fewest. Else the longest prefix match if it is above 0.3 of the prompt, else the worker
    whose cache holds least.

    Simplified: the exact index instead of the approximate tree, and what was sent to a worker lately stands for what
    its tree holds.
    """

    name = "sglang_cache_aware"

    def __init__(self) -> None:
        self._sent: dict[InstanceId, float] = {}

    def _side(self, request: Request, side: Side) -> Scores:
        running = side.sequences()
        if running.max() - running.min() > 64 and running.max() > 1.5 * running.min():
            return Scores.of(shortest_queue=-running)
        if side.match_rates.max() > 0.3:
            return Scores.of(longest_match=side.match_rates)
        return Scores.of(smallest_tree=[-self._sent.get(name, 0.0) for name in side.ids])

    def chosen(self, request: Request, instances: Sequence[InstanceId]) -> None:
        """The prompt is in their trees now."""
        for name in instances:
            self._sent[name] = self._sent.get(name, 0.0) + request.tokens


class LlmdScorer(_Rival):
    """llm-d's scheduler: highest weighted sum of scorers between 0 and 1.

    Source: llm-d's documentation, "Request Scheduler" (https://llm-d.ai/docs/architecture), and Red Hat's of its
    default profile: prefix cache 3, queue depth 2. A queue's score is (longest - own) / (longest - shortest); that of
    the prefix cache is the share of the prompt's blocks that match. For decode the KV cache utilization stands beside
    it, 2.

    Simplified: utilization is the KV of what is in flight over the most that any instance has, because caches without
    a bound have none.
    """

    name = "llmd_scorer"

    def _side(self, request: Request, side: Side) -> Scores:
        queue = side.sequences()
        spread = queue.max() - queue.min()
        depth = (queue.max() - queue) / spread if spread else np.ones(len(side))
        scores: dict[str, FloatArray] = {"prefix": 3 * side.match_rates, "queue": 2 * depth}
        if side.role is Role.DECODE:
            most = side.work.max()
            scores["kv_cache"] = 2 * (1 - side.work / most) if most else np.full(len(side), 2.0)
        return Scores.of(**scores)


class PrebleE2(_Rival):
    """Preble's E2: exploit a prefix where it saves more than it leaves to compute, else explore the cheapest instance.

    Source: Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving", ICLR 2025
    (https://arxiv.org/abs/2407.00023), section 3. Exploit: if the longest match is more than half of the prompt, the
    instances that have it, the cheapest of them. Explore: the least cost L + M + P, with L the computing time of what
    was sent to the instance in the last window (three minutes there), P that of what this prompt misses there, M that
    of what would be evicted for it. An instance with more than twice the load of the least loaded gives up its share.

    Simplified: time is counted in tokens; M is 0, because the router does not see what an instance will evict; the
    window is the latest 4096 requests; no autoscaling of prefixes over instances.
    """

    name = "preble_e2"

    def __init__(self) -> None:
        self._history: deque[tuple[InstanceId, float]] = deque()
        self._load: dict[InstanceId, float] = {}
        self._missing: dict[InstanceId, float] = {}

    def _side(self, request: Request, side: Side) -> Scores:
        load = np.array([self._load.get(name, 0.0) for name in side.ids])
        missing = request.tokens - side.matched
        self._missing.update(zip(side.ids, missing.tolist(), strict=True))
        best = side.match_rates.max()
        scores = {"load": -load, "missing": -missing}
        if best > 0.5:
            crowded = load > 2 * (load.min() + request.tokens)
            scores["exploit"] = np.where((side.match_rates == best) & ~crowded, 0.0, _REFUSED)
        return Scores.of(**scores)

    def chosen(self, request: Request, instances: Sequence[InstanceId]) -> None:
        """Add the prompt's missing tokens to the instances' load."""
        for name in instances:
            cost = self._missing.get(name, 0.0)
            self._history.append((name, cost))
            self._load[name] = self._load.get(name, 0.0) + cost
        while len(self._history) > 2 * _HISTORY_REQUESTS:
            name, cost = self._history.popleft()
            self._load[name] -= cost


class BoundedHashing(_Rival):
    """Consistent hashing with bounded loads: clockwise from the key, the first instance below 1.25 times the mean.

    Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018
    (https://arxiv.org/abs/1608.01350). The bound counts requests in flight, this one included.

    Simplified: the key is the session, where one is known, else each request is a key of its own.
    """

    name = "bounded_hashing"

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def _side(self, request: Request, side: Side) -> Scores:
        running = side.sequences()
        bound = np.ceil(_BOUND * (running.sum() + request.sequences) / len(side))
        start = _point(request.session or str(self._rng.random()))
        ring = sorted(
            (_point(f"{name}/{number}"), at) for at, name in enumerate(side.ids) for number in range(_RING_POINTS)
        )
        order = [at for point, at in ring if point >= start] + [at for point, at in ring if point < start]
        place = {at: float(-rank) for rank, at in reversed(list(enumerate(order)))}
        full = np.where(running + request.sequences > bound, _REFUSED, 0.0)
        return Scores.of(clockwise=[place[at] for at in range(len(side))], full=full)


def _point(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


RIVALS: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {x.name: x for x in (DynamoCost, SglangCacheAware, LlmdScorer, PrebleE2, BoundedHashing)}
)
"""By the name of their row."""


def make_rival(name: str) -> Policy:
    """Return a rival by the name of its row, which is one of :data:`RIVALS`."""
    return RIVALS[name]()
