"""Select and reserve: one synchronous step from a prompt to the instances that will serve it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.errors import ConfigError
from baton.hashing import HashChain, hash_chain, root_hash
from baton.native import address_of
from baton.rpc.convert import role_to_pb
from baton.types import InstanceId, PrefillPath, Role
from baton_router.indexer.events import LOWER_TIERS, STORE_TIERS, IndexState
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.indexer.stores import Stores
from baton_router.metrics import Counter, Histogram, LabelNames
from baton_router.registry.instance import Instance
from baton_router.registry.load import REQUEST_OVERHEAD_TOKENS, LoadReservation
from baton_router.scheduler.decision import Decision
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.scheduler.policy import Policy, Request, Side, choose, prefill_order
from baton_router.scheduler.roster import Candidates, Part, knows_grammars, only_compatible
from baton_router.scheduler.speeds import PromptWork, Speeds

_NAME = "baton_router_"
_RATES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_DECISION_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
_WIDE = (1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 1e5)
_TERMS = (*(-x for x in reversed(_WIDE)), -1.0, -0.5, -0.2, *_RATES, *_WIDE)
"""Buckets for rates from 0 to 1, relative loads around 1, and costs in milliseconds or tokens of any size."""
_MAX_TERMS = 32
_MAX_TERMS_PER_S = 200
"""Decisions per second whose terms are counted: each costs 10 us, and a sample is as informative as thousands."""
_PAIR = "pair"
_WORST_FIRST = (IndexState.OFF, IndexState.STALE, IndexState.EXACT)
_TIERS = (*LOWER_TIERS, *STORE_TIERS.values())


class SchedulerMetrics(Collector):
    """Counts placements.

    ``baton_router_decision_term`` has, for the roles ``prefill`` and ``decode``, the winner's terms ``match`` and
    ``load``, and for ``pair`` its score and every term of it by the policy's own names.
    ``baton_router_instance_score`` has the latest score of each instance that is ready.

    Args:
        registry: Registry to add the metrics to.
        ready: Returns the ready instances of a role; ``None``: no scores of instances are shown.
        now: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        ready: Callable[[Role], Sequence[Instance]] | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ready = ready
        self._now = now
        self.decision_time = Histogram(
            _NAME + "decision_seconds", "Hashing, look-up and choice", [], registry, buckets=_DECISION_S
        )
        self._decisions = Counter(_NAME + "decisions", "Placements, by policy", ["policy"], registry)
        rates = Histogram(
            _NAME + "match_rate", "KV match rate of the chosen instance", ["role"], registry, buckets=_RATES
        )
        self._prefill_rate = rates.labels(Role.PREFILL)
        self._decode_rate = rates.labels(Role.DECODE)
        self._index_use = Counter(
            _NAME + "index_use", "Placements by the state of the chosen instances' index", ["state"], registry
        )
        self._terms = Histogram(
            _NAME + "decision_term",
            "What spoke for the chosen instances",
            ["role", "term"],
            registry,
            buckets=_TERMS,
        )
        self._term_names = LabelNames(_MAX_TERMS)  # other packages' policies choose names
        self._second = self._left = 0
        self._latest: dict[Role, Decision] = {}
        registry.register(self)

    def observe(self, decision: Decision) -> None:
        self._decisions.labels(decision.policy).inc()
        self._index_use.labels(decision.index_state).inc()
        self._decode_rate.observe(float(decision.decode.match_rates[decision.choice.decode]))
        if decision.prefill_instance:
            self._prefill_rate.observe(float(decision.prefill.match_rates[decision.prefill_order[0]]))
        for side in (decision.prefill, decision.decode):
            if side.ids:
                self._latest[side.role] = decision

    def observe_terms(self, decision: Decision) -> None:
        """Count the terms of a placement, unless enough were counted in this second."""
        second = int(self._now())
        if second != self._second:
            self._second = second
            self._left = _MAX_TERMS_PER_S
        if self._left:
            self._left -= 1
            self._add_terms(decision)

    def _add_terms(self, decision: Decision) -> None:
        at = decision.choice.decode
        self._add_term(Role.DECODE, "match", float(decision.decode.match_rates[at]))
        self._add_term(Role.DECODE, "load", float(decision.loads(Role.DECODE)[at]))
        if decision.prefill_instance:
            at = decision.prefill_order[0]
            self._add_term(Role.PREFILL, "match", float(decision.prefill.match_rates[at]))
            self._add_term(Role.PREFILL, "load", float(decision.loads(Role.PREFILL)[at]))
        self._add_term(_PAIR, "score", decision.score)
        for name, value in decision.terms:
            self._add_term(_PAIR, self._term_names.label(name), value)

    def _add_term(self, role: str, term: str, value: float) -> None:
        if math.isfinite(value):
            self._terms.labels(role, term).observe(value)

    def collect(self) -> Iterator[Metric]:
        """Yield the terms of each ready instance's latest score."""
        family = GaugeMetricFamily(
            _NAME + "instance_score", "Terms of the latest score", labels=["instance", "role", "term"]
        )
        for role, decision in self._latest.items():
            ready = {x.instance_id for x in self._ready(role)} if self._ready is not None else set()
            for x in decision.candidates:
                if x.role == role_to_pb(role) and x.instance_id in ready:
                    terms = {**dict(x.terms), "match": x.match_rate, "load": x.load, "score": x.score}
                    for term, value in terms.items():
                        family.add_metric([x.instance_id, role.value, term], value)
        yield family


class Fleet(Protocol):
    """The instances that can be chosen (:class:`baton_router.registry.registry.Registry`).

    Attributes:
        index: Prefix index of the instances.
    """

    index: PrefixIndex

    def ready(self, role: Role) -> list[Instance]:
        """Return the instances of a role that accept new requests; the same list object until the set changes."""


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """Tiers from which KV is loaded before it is used.

    Attributes:
        weights: Weight of a block in each tier relative to one in the instance's own memory, 0 to 1.
        stores: KV stores that instances may load from; ``None``: none.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    stores: Stores | None = None


class Placer:
    """Chooses instances for requests, by the registry, the index and a policy.

    Args:
        fleet: Instances and index.
        policy: Policy that scores the instances.
        metrics: Metrics of placements.
        max_prefills: Maximum number of prefill instances named per request.
        threshold: Missing tokens below which the decode instance prefills by itself; ``None``: the policy decides, or
            else the decode instance by its own threshold.
        speeds: Learns from every served request; ``None``: unused.
        tiers: Tiers outside the instances' device memory.
        seed: Seed of ties and draws; ``None``: from the operating system.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        metrics: SchedulerMetrics,
        *,
        max_prefills: int,
        threshold: int | None,
        speeds: Speeds | None = None,
        tiers: LowerTiers | None = None,
        seed: int | None = None,
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._metrics = metrics
        self._speeds = speeds
        self._prompt_work = PromptWork() if speeds is None else speeds.work
        self._max_prefills = max_prefills
        self._threshold = threshold
        tiers = tiers or LowerTiers()
        self._tier_weights = tiers.weights
        self._stores = tiers.stores
        self._rng = random.Random(seed)
        self._candidates: Candidates | None = None

    def place(self, request: PlacementRequest, *, reserve: bool = True) -> Placement | None:
        """Choose instances and, with ``reserve``, reserve a share of them; ``None``: no decode instance is free."""
        began = time.perf_counter()
        prefills = self._fleet.ready(Role.PREFILL)
        decodes = self._fleet.ready(Role.DECODE)
        candidates = self._candidates
        if candidates is None or not candidates.is_of(prefills, decodes):
            candidates = self._candidates = Candidates(prefills, decodes)
        parts = self._parts(request, candidates, reserve=reserve)
        if not parts[1].instances:
            return None
        chains = self._chains(request, candidates, parts)
        matched = candidates.matched_tokens(self._fleet.index, chains)
        total = len(request.token_ids)
        address = address_of(matched)
        prefill = candidates.prefill.side(parts[0], address, total, total + REQUEST_OVERHEAD_TOKENS)
        decode_cost = total + REQUEST_OVERHEAD_TOKENS * request.num_sequences
        decode = candidates.decode.side(parts[1], address + matched.itemsize * len(prefills), total, decode_cost)
        if candidates.tiered or self._stores:
            for side, part in zip((prefill, decode), parts, strict=True):
                self._count_tiers(side, part, chains, total)
        policy_request = Request(
            tokens=total,
            sequences=request.num_sequences,
            session=request.session,
            max_tokens=request.max_tokens,
            expected_tokens=request.expected_tokens,
            kv_bytes_per_token=candidates.kv_bytes_per_token(*parts),
            # With prefill first the prompt is computed there, however the policy scores decode.
            threshold=0 if request.prefill_only and self._threshold is None else self._threshold,
        )
        if request.prefilled is not None and prefill.ids:
            prefill.match_rates[0] = request.prefilled[1]
        placement = self._choose(policy_request, prefill, decode, candidates, parts)
        if request.prefilled is not None:
            placement.decision.path = PrefillPath.REMOTE
        if reserve:
            used = [] if request.prefill_only else [self._reserve_decode(request, placement, parts[1], chains)]
            if request.prefilled is None and placement.decision.path in (None, PrefillPath.REMOTE):
                used += self._reserve_prefill(placement, parts[0], chains)
            self._policy.chosen(policy_request, used)
            self._metrics.decision_time.observe(time.perf_counter() - began)
            if not request.prefill_only:
                self._metrics.observe(placement.decision)
        return placement

    def _parts(self, request: PlacementRequest, candidates: Candidates, *, reserve: bool) -> tuple[Part, Part]:
        """Return the prefill and the decode instances that a request may use; no prefill instance if none fits any."""
        prefill = candidates.prefill.whole
        decode = candidates.decode.whole
        if request.local_only:
            prefill = candidates.prefill.part([])
        elif request.prefilled is not None:
            address = request.prefilled[0]
            prefill = candidates.prefill.part([at for at, x in enumerate(prefill.instances) if x.address == address])
        guided = request.guided and not candidates.all_guided
        if guided:  # a prefill instance samples the first token
            able = {id(x) for x in prefill.instances if knows_grammars(x)}
            every = candidates.prefill.whole.instances
            prefill = candidates.prefill.part([at for at, x in enumerate(every) if id(x) in able])
        if reserve:
            decode = candidates.decode.with_room(request.num_sequences)
        if request.exclude or guided:
            usable = [
                at
                for at, x in zip(decode.positions, decode.instances, strict=True)
                if x.identity not in request.exclude and not (guided and not knows_grammars(x))
            ]
            decode = candidates.decode.part(usable)
        compat = candidates.compat_of(prefill, decode)
        if compat is not None and not compat.any():
            prefill = candidates.prefill.part([])
        return prefill, decode

    def _chains(
        self, request: PlacementRequest, candidates: Candidates, parts: tuple[Part, Part]
    ) -> dict[int, HashChain]:
        """Return the prompt in the blocks of every format in use."""
        chains = {}
        for at in parts[0].format_set | parts[1].format_set:
            block_format = candidates.formats[at]
            root = root_hash(block_format.content_key, request.cache_salt)
            chains[at] = hash_chain(request.token_ids, block_format.block_size, root)
        return chains

    def _lower_tiers(self, instance: Instance) -> list[tuple[str, int]]:
        """Return the slower tiers that an instance can load from, nearest first: its own, then the KV stores'.

        Each tier comes with a bit mask of its slots and those of all nearer tiers.
        """
        stores = self._stores.tiers(instance.info.kvstore) if self._stores and instance.info else ()
        if not stores:
            return list(instance.events.tiers[1:])
        own = instance.events.tiers if instance.events.usable else ()
        slots = own[-1][1] if own else 0
        return [*own[1:], *((tier, slots | more) for tier, more in stores)]

    def _count_tiers(self, side: Side, part: Part, chains: dict[int, HashChain], total: int) -> None:
        """Add what instances can load from slower tiers to ``loadable`` and, by weight, to their match rates."""
        tiers = [self._lower_tiers(x) for x in part.instances]
        if not any(tiers):
            return
        side.loadable = side.matched.copy()
        side.tiers = [{} for _ in part.ids]
        depths = self._tier_depths(part.formats, chains, tiers)
        for at, (lower, size) in enumerate(zip(tiers, part.block_sizes, strict=True)):
            nearer = int(side.matched[at]) // size
            more = 0.0
            for (tier, _), depth in zip(lower, depths[at], strict=True):
                if depth > nearer:
                    side.tiers[at][tier] = (depth - nearer) * size
                    more += self._tier_weights.get(tier, 0.0) * (depth - nearer)
                    nearer = depth
            side.loadable[at] = nearer * size
            side.match_rates[at] += more * size / max(1, total)

    def _tier_depths(
        self, formats: list[int], chains: dict[int, HashChain], tiers: list[list[tuple[str, int]]]
    ) -> list[list[int]]:
        """Return how many leading blocks each instance has in each of its tiers or nearer; one look-up per chain."""
        depths: list[list[int]] = [[] for _ in tiers]
        for number, chain in chains.items():
            members = [at for at, own in enumerate(formats) if own == number and tiers[at]]
            groups = [slots for at in members for _, slots in tiers[at]]
            answers = iter(self._fleet.index.match_any(chain, groups) if groups else ())
            for at in members:
                depths[at] = [next(answers) for _ in tiers[at]]
        return depths

    def _choose(
        self, request: Request, prefill: Side, decode: Side, candidates: Candidates, parts: tuple[Part, Part]
    ) -> Placement:
        ratings = self._policy.score(request, prefill, decode)
        compat = candidates.compat_of(*parts)
        if compat is None:
            choice = choose(ratings, self._rng)
            order = prefill_order(ratings, choice, self._max_prefills, self._rng)
        else:
            ratings = only_compatible(ratings, compat)
            choice = choose(ratings, self._rng)
            order = prefill_order(ratings, choice, len(prefill), self._rng)
            order = [p for p in order if compat[choice.decode, p]][: self._max_prefills]
        path = choice.path
        if self._threshold is not None and order and path is not PrefillPath.STORE:
            missing = request.tokens - int(decode.matched[choice.decode])
            path = PrefillPath.LOCAL if missing < self._threshold else PrefillPath.REMOTE
        target = parts[1].instances[choice.decode]
        chosen = [parts[0].instances[at] for at in order]
        state = target.events.state
        if chosen and (other := chosen[0].events.state) is not state:
            state = next(x for x in _WORST_FIRST if x in (state, other))
        decision = Decision(
            prompt_tokens=request.tokens,
            policy=self._policy.name,
            prefill=prefill,
            decode=decode,
            ratings=ratings,
            choice=choice,
            path=path,
            prefill_order=order,
            prefill_addresses=[x.address for x in chosen],
            index_state=state,
        )
        return Placement(target, chosen, decision, self._threshold)

    def _work(self, matched: float, total: int) -> int:
        """Return the work of computing a prompt's tokens after ``matched``."""
        return round(self._prompt_work.of(float(matched), max(matched, total)))

    def _reserve_decode(
        self, request: PlacementRequest, placement: Placement, part: Part, chains: dict[int, HashChain]
    ) -> InstanceId:
        """Reserve a share of the decode instance; return its name."""
        decision = placement.decision
        load = placement.decode.load
        at = decision.choice.decode
        total = decision.prompt_tokens
        # A request whose prompt was computed beforehand shows nothing about the times of the usual order.
        placement.speeds = self._speeds if request.prefilled is None else None
        placement.running = load.requests + request.num_sequences
        own = self._work(decision.decode.matched[at], total) if decision.path is PrefillPath.LOCAL else 0
        expected = request.num_sequences * (request.expected_tokens or 0)
        placement.decode_reservation = LoadReservation(load, total, request.num_sequences, own, expected)
        chain = chains[part.formats[at]]
        if decision.path in (None, PrefillPath.REMOTE) and placement.prefill:
            # The KV is there when it was computed elsewhere and has arrived. A request that followed it there before
            # would find nothing to begin with; it should go where the prompt is being computed.
            placement.decode_chain = chain
        else:
            placement.decode_pending = placement.decode.events.add_pending(chain)
        return decision.decode.ids[at]

    def _reserve_prefill(self, placement: Placement, part: Part, chains: dict[int, HashChain]) -> list[InstanceId]:
        """Reserve a share of the first prefill instance, if there is one; return its name."""
        if not placement.prefill:
            return []
        decision = placement.decision
        first = placement.prefill[0]
        at = decision.prefill_order[0]
        placement.ahead = first.load.work
        held = max(decision.prefill.matched[at], decision.decode.matched[decision.choice.decode])
        placement.prefill_reservation = LoadReservation(first.load, self._work(held, decision.prompt_tokens))
        placement.prefill_pending = first.events.add_pending(chains[part.formats[at]])
        return [decision.prefill.ids[at]]


def parse_tier_weights(weights: Sequence[str]) -> dict[str, float]:
    """Parse ``tier=weight`` pairs.

    Raises:
        ConfigError: No such tier, or the weight is not from 0 to 1; names ``tier_weights``.
    """
    parsed = {}
    for pair in weights:
        tier, _, text = pair.partition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if tier not in _TIERS or not 0.0 <= weight <= 1.0:
            message = f"{pair!r} is not tier=weight, with a weight from 0 to 1 and one of {', '.join(_TIERS)}"
            raise ConfigError(message, field="tier_weights")
        parsed[tier] = weight
    return parsed
