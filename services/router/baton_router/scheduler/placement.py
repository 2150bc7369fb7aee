"""Select and reserve: one synchronous step from a prompt to the instances that will serve it."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.hashing import HashChain, hash_chain, root_hash
from baton.types import PrefillPath, Role
from baton_router.indexer.event_applier import IndexState
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.indexer.stores import Stores
from baton_router.registry.instance import Instance
from baton_router.registry.load import REQUEST_OVERHEAD_TOKENS, LoadReservation, in_flight
from baton_router.scheduler.candidates import Candidates, RoleCandidates
from baton_router.scheduler.decision import Decision
from baton_router.scheduler.kv_compat import only_taken
from baton_router.scheduler.metrics import SchedulerMetrics
from baton_router.scheduler.placed import Placement, PlacementRequest
from baton_router.scheduler.policies import Policy, Request, Side
from baton_router.scheduler.policies.choice import choose, prefill_order
from baton_router.scheduler.speeds import Speeds

__all__ = ["Fleet", "LowerTiers", "Placement", "PlacementRequest", "Placer"]

_WORST_FIRST = (IndexState.OFF, IndexState.STALE, IndexState.EXACT)


class Fleet(Protocol):
    """The instances that can be chosen; the registry is one."""

    index: PrefixIndex

    def ready(self, role: Role) -> list[Instance]:
        """Return the instances of a role that take new requests: another list whenever they are others."""


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """What is to be loaded before it is used.

    Attributes:
        weights: What a block there counts beside one in the instance's own memory, by tier.
        stores: KV stores that instances may load from; ``None``: none is known.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    stores: Stores | None = None


class _Chain:
    """The prompt in one kind's blocks, and how many leading ones each slot in question holds."""

    __slots__ = ("block_size", "depths", "hashes", "slots")

    def __init__(self, hashes: HashChain, block_size: int) -> None:
        self.hashes = hashes
        self.block_size = block_size
        self.slots = 0
        self.depths: dict[int, int] = {}


class Placer:
    """Puts registry, index and policy together.

    Args:
        fleet: Instances and index.
        policy: Scores them.
        metrics: Where decisions are counted.
        max_prefills: Prefill instances named per request.
        threshold: Missing tokens below which the decode instance prefills by itself; ``None``: the policy decides, or
            else the decode instance by its own threshold.
        speeds: Learns from every request that was served; ``None``: nobody wants to know.
        tiers: What lies outside the instances' own memory.
        seed: Of ties and draws; ``None``: from the operating system.
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
        self._max_prefills = max_prefills
        self._threshold = threshold
        self._speeds = speeds
        tiers = tiers or LowerTiers()
        self._tier_weights, self._stores = tiers.weights, tiers.stores
        self._rng = random.Random(seed)
        self._candidates: Candidates | None = None

    def place(self, ask: PlacementRequest, *, reserve: bool = True) -> Placement | None:
        """Choose instances and, unless told not to, reserve a share of them; ``None``: no decode instance is free."""
        began = time.perf_counter()
        decodes = self._fleet.ready(Role.DECODE)
        prefills = () if ask.local_only else self._fleet.ready(Role.PREFILL)
        if ask.exclude:
            decodes = [x for x in decodes if x.identity not in ask.exclude]
        if reserve:
            free = [x for x in decodes if x.load.requests + ask.num_sequences <= x.load.limit]
            if len(free) < len(decodes):
                decodes = free
        if not decodes:
            return None
        candidates = self._candidates
        if candidates is None or not candidates.is_of(prefills, decodes):
            candidates = self._candidates = Candidates(prefills, decodes)
        chains = self._chains(ask, candidates)
        prefill, decode, request = self._sides(ask, candidates, chains)
        placement = self._choose(request, prefill, decode, candidates)
        if reserve:
            self._reserve(request, placement, candidates, chains)
            self._metrics.decision_time.observe(time.perf_counter() - began)
            self._metrics.observe(placement.decision)
        return placement

    def _chains(self, ask: PlacementRequest, candidates: Candidates) -> list[_Chain]:
        """Return the prompt in every kind's blocks, looked up among the slots of the kind's instances."""
        chains = []
        for kind in candidates.kinds:
            hashes = hash_chain(ask.token_ids, kind.block_size, root_hash(kind.content_key, ask.cache_salt))
            chains.append(_Chain(hashes, kind.block_size))
        for members in (candidates.prefill, candidates.decode):
            for events, at in members.places:
                if events.usable:
                    chains[at].slots |= 1 << events.slot
        for chain in chains:
            chain.depths = self._fleet.index.match(chain.hashes, chain.slots)
        return chains

    def _sides(self, ask: PlacementRequest, candidates: Candidates, chains: list[_Chain]) -> tuple[Side, Side, Request]:
        """Gather what a policy is to know."""
        total = len(ask.token_ids)
        prefill = _side(candidates.prefill, chains, total, total + REQUEST_OVERHEAD_TOKENS)
        decode = _side(candidates.decode, chains, total, total + REQUEST_OVERHEAD_TOKENS * ask.num_sequences)
        for side, members in ((prefill, candidates.prefill), (decode, candidates.decode)):
            if self._stores or any(events.is_tiered for events, _ in members.places):
                tiers = [self._tiers(x) for x in members.instances]
                if any(tiers):
                    self._count_tiers(side, [chains[at] for at in members.kinds], tiers, max(1, total))
        kind = candidates.kinds[0]  # what travels is the source's KV
        request = Request(
            total,
            ask.num_sequences,
            ask.session,
            ask.max_tokens,
            kind.block_bytes / kind.block_size,
            self._threshold,
        )
        return prefill, decode, request

    def _tiers(self, instance: Instance) -> list[tuple[str, int]]:
        """Return the slower tiers that an instance can load from, nearest first: its own, then the KV stores'.

        Each comes with the slots of it and of all nearer ones.
        """
        behind = self._stores.tiers(instance.info.kvstore) if self._stores and instance.info else ()
        if not behind:
            return list(instance.events.tiers[1:]) if instance.events.is_tiered else []
        own = instance.events.tiers if instance.events.usable else ()
        slots = own[-1][1] if own else 0
        return [*own[1:], *((tier, slots | more) for tier, more in behind)]

    def _count_tiers(self, side: Side, chains: list[_Chain], tiers: list[list[tuple[str, int]]], total: int) -> None:
        """Add what instances can load from slower tiers: by weight to their match rates, whole to ``loadable``."""
        side.loadable, side.tiers = list(side.matched), [{} for _ in side.matched]
        depths = self._tier_depths(chains, tiers)
        for at, (lower, chain) in enumerate(zip(tiers, chains, strict=True)):
            nearer, more = side.matched[at] // chain.block_size, 0.0
            for (tier, _), depth in zip(lower, depths[at], strict=True):
                if depth > nearer:
                    side.tiers[at][tier] = (depth - nearer) * chain.block_size
                    more += self._tier_weights.get(tier, 0.0) * (depth - nearer)
                    nearer = depth
            side.loadable[at] = nearer * chain.block_size
            side.match_rates[at] += more * chain.block_size / total

    def _tier_depths(self, chains: list[_Chain], tiers: list[list[tuple[str, int]]]) -> list[list[int]]:
        """Return how many leading blocks each instance has in each of its tiers or nearer: one look-up per chain."""
        depths: list[list[int]] = [[] for _ in tiers]
        for chain in dict.fromkeys(chains):
            members = [at for at, own in enumerate(chains) if own is chain and tiers[at]]
            groups = [slots for at in members for _, slots in tiers[at]]
            answers = iter(self._fleet.index.match_any(chain.hashes, groups) if groups else ())
            for at in members:
                depths[at] = [next(answers) for _ in tiers[at]]
        return depths

    def _choose(self, request: Request, prefill: Side, decode: Side, candidates: Candidates) -> Placement:
        ratings, takes = self._policy.score(request, prefill, decode), candidates.takes
        if takes is None:
            choice = choose(ratings, self._rng)
            order = prefill_order(ratings, choice, self._max_prefills, self._rng)
        else:
            ratings = only_taken(ratings, takes)
            choice = choose(ratings, self._rng)
            order = prefill_order(ratings, choice, len(prefill), self._rng)
            order = [p for p in order if takes[choice.decode][p]][: self._max_prefills]
        path = choice.path
        if self._threshold is not None and order and path is not PrefillPath.STORE:
            missing = request.tokens - decode.matched[choice.decode]
            path = PrefillPath.LOCAL if missing < self._threshold else PrefillPath.REMOTE
        target = candidates.decode.instances[choice.decode]
        chosen = [candidates.prefill.instances[at] for at in order] if order else []
        state = target.events.state
        if chosen and (other := chosen[0].events.state) is not state:
            state = next(x for x in _WORST_FIRST if x in (state, other))
        # By position, as all that is made per request: named arguments of a class go through a dict.
        addresses = [x.address for x in chosen] if chosen else []
        decision = Decision(
            request.tokens, self._policy.name, prefill, decode, ratings, choice, path, order, addresses, state
        )
        return Placement(target, chosen, decision, self._threshold)

    def _reserve(self, request: Request, placement: Placement, candidates: Candidates, chains: list[_Chain]) -> None:
        decision = placement.decision
        prefill, decode = decision.prefill, decision.decode
        at, total = decision.choice.decode, request.tokens
        book = placement.decode.load
        placement.speeds, placement.running = self._speeds, book.requests + request.sequences
        own = total - decode.matched[at] if decision.path is PrefillPath.LOCAL else 0
        placement.decode_reservation = LoadReservation(book, total, request.sequences, own)
        placement.decode_pending = placement.decode.events.add_pending(chains[candidates.decode.kinds[at]].hashes)
        used = [decode.ids[at]]
        if placement.prefill and decision.path in (None, PrefillPath.REMOTE):
            first, at = placement.prefill[0], decision.prefill_order[0]
            placement.ahead = first.load.work
            placement.prefill_reservation = LoadReservation(first.load, max(0, total - prefill.matched[at]))
            placement.prefill_pending = first.events.add_pending(chains[candidates.prefill.kinds[at]].hashes)
            used.append(prefill.ids[at])
        self._policy.chosen(request, used)


def _side(members: RoleCandidates, chains: list[_Chain], total: int, cost: float) -> Side:
    """Return one role's instances as a policy sees them."""
    if not members.places:
        return Side(members.role, [], [], [], [], [], cost)
    work, loads = in_flight(members.books)
    matched = []
    for events, at in members.places:
        chain = chains[at]
        matched.append(chain.depths.get(events.slot, 0) * chain.block_size)
    whole = max(1, total)
    rates = [tokens / whole for tokens in matched]
    return Side(members.role, members.ids, matched, rates, work, loads, cost, members.books)
