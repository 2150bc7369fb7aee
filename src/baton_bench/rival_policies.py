"""Placement formulae of other routers, as rows to compare with, after their publications, not their code.

Each names its source and version, and scores prefill and decode instances by itself, with what Baton's router knows of
them: its exact prefix index and its own count of what is in flight, where the original goes by its own tracking or by
scraped metrics. So rows compare formulae, not systems. Constants are the published defaults.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from baton.types import InstanceId, Role
from baton_router.scheduler.policy import FloatArray, Policy, Ratings, Request, Scores, Side
from baton_router.scheduler.speeds import Speeds

_BLOCK = 512
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
    """NVIDIA Dynamo's KV router, as of 1.7.0 (November 2026): least ``prefill blocks + decode blocks``.

    Source: ai-dynamo/dynamo, docs/components/router/router-concepts.md and router-configuration.md. Prefill blocks:
    prompt tokens that wait on the worker and those of this request, less a credit for those cached there; decode
    blocks: blocks of the sequences that run there. The credit is ``credit / (1 + decay * excess)``, with the worker's
    excess of waiting prompt tokens over the least loaded in prompts like this one. Defaults: credit 1, decay 0, scale
    1, weight of an active request 0, temperature 0.

    Simplified: served apart, a prefill worker is rated by prefill blocks alone, a decode worker by decode blocks and
    without credit, as the documentation says of disaggregated serving with one router each.
    """

    name = "dynamo_cost"
    credit = 1.0
    decay = 0.0
    scale = 1.0
    request_blocks = 0.0

    def _blocks(self, request: Request, side: Side) -> tuple[FloatArray, FloatArray]:
        """Return the adjusted prefill blocks and the decode blocks of each worker."""
        running = self.request_blocks * side.sequences()
        if side.role is Role.DECODE:
            return np.zeros(len(side)), (side.work + request.tokens) / _BLOCK + running
        excess = (side.work - side.work.min()) / max(1, request.tokens)
        credit = self.credit * side.matched / (1 + self.decay * excess)
        return np.maximum(0.0, side.work + request.tokens - credit) / _BLOCK, running

    def _side(self, request: Request, side: Side) -> Scores:
        prefill, decode = self._blocks(request, side)
        return Scores.of(prefill_blocks=-self.scale * prefill, decode_blocks=-decode)


class DynamoAgentic(DynamoCost):
    """The same with ``--agentic``: credit 2, scale 4, and 64 blocks of 16 tokens per active request.

    Source: ai-dynamo/dynamo, documentation of the agentic preset, 1.7.0 (November 2026). ``decay`` is on here, at the 1
    that its documentation explains, so that the rows show it.
    """

    name = "dynamo_agentic"
    credit = 2.0
    decay = 1.0
    scale = 4.0
    request_blocks = 64 * 16 / _BLOCK


class DynamoLmetric(DynamoCost):
    """The same with ``router_selection_policy=lmetric``: least ``prefill blocks * (decode blocks + 1)``.

    Source: ai-dynamo/dynamo, docs/components/router/router-concepts.md, 1.7.0 (November 2026).

    Simplified: for a prefill worker, decode blocks are the requests in flight there; for a decode worker, which has no
    prefill blocks, they alone count.
    """

    name = "dynamo_lmetric"

    def _side(self, request: Request, side: Side) -> Scores:
        prefill, decode = self._blocks(request, side)
        if side.role is Role.DECODE:
            return Scores.of(decode_blocks=-decode)
        return Scores.of(lmetric=-prefill * (side.sequences() + 1))


class ProductionStack(_Rival):
    """vLLM production-stack's ``loadaware``: highest ``matched / prompt - beta * relative load``, beta 1.

    Source: vllm-project/production-stack, PR 1035 (merged August 2026). Relative load: requests in flight over the mean
    of all, less 1, with a mean of at least 1.
    """

    name = "production_stack"

    def _side(self, request: Request, side: Side) -> Scores:
        running = side.sequences()
        mean = float(running.mean())
        return Scores.of(match=side.match_rates, load=-(running - mean) / max(1.0, mean))


class AIBrixPrefixCache(_Rival):
    """AIBrix' ``prefix-cache``: the longest match among instances that are not crowded, else the fewest requests.

    Source: vllm-project/aibrix, pkg/plugins/gateway/algorithms/README.md (0.8.0, October 2026). Unbalanced: most
    requests in flight exceed the fewest by more than 8; then the fewest. Else the longest match, among equal ones the
    fewest requests, on an instance with at most the mean and one standard deviation of requests.
    """

    name = "aibrix_prefix_cache"

    def _side(self, request: Request, side: Side) -> Scores:
        running = side.sequences()
        if running.max() - running.min() > 8:
            return Scores.of(fewest=-running)
        crowded = running > running.mean() + running.std()
        refused = np.where(crowded | (side.matched <= 0), _REFUSED, 0.0)
        return Scores.of(longest_match=1e4 * side.match_rates, fewest=-running, crowded=refused)


class SglangCacheAware(_Rival):
    """SGLang's cache-aware router: longest prefix while balanced, shortest queue while not.

    Source: SGLang 0.5.23 (November 2026), "SGLang Model Gateway", load balancing policies
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

    Source: llm-d/llm-d-router 0.10.0 (August 2026), pkg/epp/framework/plugins, and llm-d's guide of its optimized
    baseline: prefix cache 3, queue depth 2, KV cache utilization 2, and no-hit-LRU 2: a request that matches nothing
    goes to the instance whose last such request is the longest ago. A queue's score is (longest - own) / (longest -
    shortest); that of the prefix cache is the share of the prompt's blocks that match.

    Simplified: utilization is the KV of what is in flight over the most that any instance has.
    """

    name = "llmd_scorer"

    def __init__(self) -> None:
        self._cold: dict[InstanceId, int] = {}
        self._hit: dict[Role, bool] = {}
        self._number = 0

    def _side(self, request: Request, side: Side) -> Scores:
        queue = side.sequences()
        spread = queue.max() - queue.min()
        depth = (queue.max() - queue) / spread if spread else np.ones(len(side))
        scores: dict[str, FloatArray] = {"prefix": 3 * side.match_rates, "queue": 2 * depth}
        most = side.work.max()
        scores["kv_cache"] = 2 * (1 - side.work / most) if most else np.full(len(side), 2.0)
        self._hit[side.role] = hit = bool(side.matched.any())
        if not hit and len(side) > 1:
            ranks = np.argsort(np.argsort([self._cold.get(name, -1) for name in side.ids], kind="stable"))
            scores["no_hit_lru"] = 2 * (1 - ranks / (len(side) - 1))
        return Scores.of(**scores)

    def chosen(self, request: Request, instances: Sequence[InstanceId]) -> None:
        """Note who got a request that matched nothing."""
        self._number += 1
        for role, name in zip((Role.DECODE, Role.PREFILL), instances, strict=False):
            if not self._hit.get(role, True):
                self._cold[name] = self._number


class LlmdPredicted(_Rival):
    """llm-d's predicted latency: the least predicted time to first token, and per token on decode.

    Source: llm-d/llm-d-router 0.10.0 (August 2026), predicted-latency scorer;
    https://llm-d.ai/blog/predicted-latency-based-scheduling-for-llms (March 2026). A model that is trained online
    predicts both times from the prompt, its match, what waits and runs.

    Simplified: the router's own learnt lines stand for the trained model (gradient-boosted trees).

    Args:
        speeds: Speeds learnt from served requests.
    """

    name = "llmd_predicted"

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds

    def _side(self, request: Request, side: Side) -> Scores:
        if side.role is Role.DECODE:
            return Scores.of(tpot=-self._speeds.decode.times(side.ids, side.sequences() + 1))
        missing = request.tokens - side.matched
        return Scores.of(ttft=-self._speeds.prefill.times(side.ids, side.work + missing))


RIVALS: Mapping[str, Callable[[Speeds], Policy]] = MappingProxyType(
    {
        DynamoCost.name: lambda speeds: DynamoCost(),
        DynamoAgentic.name: lambda speeds: DynamoAgentic(),
        DynamoLmetric.name: lambda speeds: DynamoLmetric(),
        LlmdScorer.name: lambda speeds: LlmdScorer(),
        LlmdPredicted.name: LlmdPredicted,
        ProductionStack.name: lambda speeds: ProductionStack(),
        SglangCacheAware.name: lambda speeds: SglangCacheAware(),
        AIBrixPrefixCache.name: lambda speeds: AIBrixPrefixCache(),
    }
)
"""Makes a rival from the router's learnt speeds, by the name of its row."""
