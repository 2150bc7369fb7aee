"""Select and reserve: one synchronous step from a prompt to the instances that will serve it."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.hashing import HashChain, hash_chain, root_hash
from baton.types import PrefillPath, Role
from baton_router.decision import Decision
from baton_router.feed import IndexState
from baton_router.index import PrefixIndex
from baton_router.instance import Instance
from baton_router.load import REQUEST_OVERHEAD_TOKENS, Hold
from baton_router.metrics import RouterMetrics
from baton_router.pairing import Takes, only_taken, who_takes
from baton_router.placed import Ask, Placement
from baton_router.placement_metrics import PlacementMetrics
from baton_router.policy import Policy, Request, Side
from baton_router.policy.choice import choose, prefill_order
from baton_router.speeds import Speeds
from baton_router.stores import Stores

__all__ = ["Ask", "Fleet", "LowerTiers", "Placement", "Placer"]

_WORST_FIRST = (IndexState.OFF, IndexState.STALE, IndexState.EXACT)


class Fleet(Protocol):
    """The instances that can be chosen; the registry is one."""

    index: PrefixIndex

    def ready(self, role: Role) -> list[Instance]:
        """Return the instances of a role that take new requests."""


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
    """The prompt in one group's blocks, and how many leading ones each of its instances holds (by slot)."""

    __slots__ = ("block_bytes", "block_size", "depths", "hashes", "slots")

    def __init__(self, hashes: HashChain, block_size: int, block_bytes: int) -> None:
        self.hashes = hashes
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.slots = 0
        self.depths: dict[int, int] = {}


class _Found:
    """One role's instances with what the index says of them."""

    __slots__ = ("chains", "instances", "side")

    def __init__(self, instances: list[Instance], chains: list[_Chain], side: Side) -> None:
        self.instances = instances
        self.chains = chains
        self.side = side


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
        metrics: RouterMetrics,
        *,
        max_prefills: int,
        threshold: int | None,
        speeds: Speeds | None = None,
        tiers: LowerTiers | None = None,
        seed: int | None = None,
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._metrics = PlacementMetrics(metrics, policy.name)
        self._max_prefills = max_prefills
        self._threshold = threshold
        self._speeds = speeds
        tiers = tiers or LowerTiers()
        self._tier_weights, self._stores = tiers.weights, tiers.stores
        self._rng = random.Random(seed)

    def place(self, ask: Ask, *, reserve: bool = True) -> Placement | None:
        """Choose instances and, unless told not to, reserve a share of them; ``None``: no decode instance is free."""
        began = time.perf_counter()
        decodes = self._fleet.ready(Role.DECODE)
        if ask.exclude:
            decodes = [x for x in decodes if x.identity not in ask.exclude]
        if reserve:
            decodes = [x for x in decodes if x.load.requests + ask.num_sequences <= x.load.limit]
        if not decodes:
            return None
        prefills = [] if ask.local_only else self._fleet.ready(Role.PREFILL)
        takes = who_takes(prefills, decodes)
        if takes is not None and not any(map(any, takes)):
            prefills, takes = [], None
        prefill, decode, request = self._look_up(ask, prefills, decodes)
        placement = self._choose(request, prefill, decode, takes)
        if reserve:
            self._reserve(request, placement, prefill, decode)
            self._metrics.decision_time.observe(time.perf_counter() - began)
        return placement

    def _look_up(self, ask: Ask, prefills: list[Instance], decodes: list[Instance]) -> tuple[_Found, _Found, Request]:
        chains = self._chains(ask, [*prefills, *decodes])
        total, split = len(ask.token_ids), len(prefills)
        cost = total + REQUEST_OVERHEAD_TOKENS
        prefill = _found(Role.PREFILL, prefills, chains[:split], (total, cost))
        cost = total + REQUEST_OVERHEAD_TOKENS * ask.num_sequences
        decode = _found(Role.DECODE, decodes, chains[split:], (total, cost))
        for found in (prefill, decode):
            if self._stores or any(x.feed.is_tiered for x in found.instances):
                tiers = [self._tiers(x) for x in found.instances]
                if any(tiers):
                    self._count_tiers(found, tiers, max(1, total))
        chain = (prefill.chains or decode.chains)[0]  # what travels is the source's KV
        request = Request(
            total,
            ask.num_sequences,
            ask.session,
            ask.max_tokens,
            chain.block_bytes / chain.block_size,
            self._threshold,
        )
        return prefill, decode, request

    def _chains(self, ask: Ask, instances: list[Instance]) -> list[_Chain]:
        """Return each instance's chain: the prompt is hashed and looked up once per group, among the group's slots."""
        groups: dict[bytes, _Chain] = {}
        chains = []
        for x in instances:
            info = x.info
            assert info is not None  # a ready instance has said what it is
            key = info.content_key
            chain = groups.get(key)
            if chain is None:
                kind = info.fingerprint
                hashes = hash_chain(ask.token_ids, kind.block_size, root_hash(key, ask.cache_salt))
                chain = groups[key] = _Chain(hashes, kind.block_size, kind.block_bytes)
            feed = x.feed
            if feed.usable:
                chain.slots |= 1 << feed.slot
            chains.append(chain)
        for chain in groups.values():
            chain.depths = self._fleet.index.match(chain.hashes, chain.slots)
        return chains

    def _tiers(self, instance: Instance) -> list[tuple[str, int]]:
        """Return the slower tiers that an instance can load from, nearest first: its own, then the KV stores'.

        Each comes with the slots of it and of all nearer ones.
        """
        behind = self._stores.tiers(instance) if self._stores else ()
        if not behind:
            return list(instance.feed.tiers[1:]) if instance.feed.is_tiered else []
        own = instance.feed.tiers if instance.feed.usable else ()
        slots = own[-1][1] if own else 0
        return [*own[1:], *((tier, slots | more) for tier, more in behind)]

    def _count_tiers(self, found: _Found, tiers: list[list[tuple[str, int]]], total: int) -> None:
        """Add what instances can load from slower tiers: by weight to their match rates, whole to ``loadable``."""
        side = found.side
        side.loadable, side.tiers = list(side.matched), [{} for _ in side.matched]
        depths = self._tier_depths(found, tiers)
        for at, (lower, chain) in enumerate(zip(tiers, found.chains, strict=True)):
            nearer, more = side.matched[at] // chain.block_size, 0.0
            for (tier, _), depth in zip(lower, depths[at], strict=True):
                if depth > nearer:
                    side.tiers[at][tier] = (depth - nearer) * chain.block_size
                    more += self._tier_weights.get(tier, 0.0) * (depth - nearer)
                    nearer = depth
            side.loadable[at] = nearer * chain.block_size
            side.match_rates[at] += more * chain.block_size / total

    def _tier_depths(self, found: _Found, tiers: list[list[tuple[str, int]]]) -> list[list[int]]:
        """Return how many leading blocks each instance has in each of its tiers or nearer: one look-up per chain."""
        depths: list[list[int]] = [[] for _ in tiers]
        for chain in dict.fromkeys(found.chains):
            members = [at for at, own in enumerate(found.chains) if own is chain and tiers[at]]
            groups = [slots for at in members for _, slots in tiers[at]]
            answers = iter(self._fleet.index.match_any(chain.hashes, groups) if groups else ())
            for at in members:
                depths[at] = [next(answers) for _ in tiers[at]]
        return depths

    def _choose(self, request: Request, prefill: _Found, decode: _Found, takes: Takes | None) -> Placement:
        ratings = self._policy.score(request, prefill.side, decode.side)
        if takes is None:
            choice = choose(ratings, self._rng)
            order = prefill_order(ratings, choice, self._max_prefills, self._rng)
        else:
            ratings = only_taken(ratings, takes)
            choice = choose(ratings, self._rng)
            order = prefill_order(ratings, choice, len(prefill.instances), self._rng)
            order = [p for p in order if takes[choice.decode][p]][: self._max_prefills]
        path = choice.path
        if self._threshold is not None and order and path is not PrefillPath.STORE:
            missing = request.tokens - decode.side.matched[choice.decode]
            path = PrefillPath.LOCAL if missing < self._threshold else PrefillPath.REMOTE
        target = decode.instances[choice.decode]
        chosen = [prefill.instances[at] for at in order]
        state = target.feed.state
        if chosen and (other := chosen[0].feed.state) is not state:
            state = next(x for x in _WORST_FIRST if x in (state, other))
        decision = Decision(
            prompt_tokens=request.tokens,
            policy=self._policy.name,
            prefill=prefill.side,
            decode=decode.side,
            ratings=ratings,
            choice=choice,
            path=path,
            prefill_order=order,
            prefill_addresses=[x.address for x in chosen],
            index_state=state.value,
        )
        return Placement(target, chosen, decision, threshold=self._threshold)

    def _reserve(self, request: Request, placement: Placement, prefill: _Found, decode: _Found) -> None:
        decision = placement.decision
        at, total = decision.choice.decode, request.tokens
        book = placement.decode.load
        placement.speeds, placement.running = self._speeds, book.requests + request.sequences
        own = total - decode.side.matched[at] if decision.path is PrefillPath.LOCAL else 0
        placement.decode_hold = Hold(book, total, request.sequences, own)
        placement.decode_expectation = placement.decode.feed.expect(decode.chains[at].hashes)
        used = [decode.side.ids[at]]
        rate = None
        if placement.prefill and decision.path in (None, PrefillPath.REMOTE):
            first, at = placement.prefill[0], decision.prefill_order[0]
            placement.ahead = first.load.work
            placement.prefill_hold = Hold(first.load, max(0, total - prefill.side.matched[at]))
            placement.prefill_expectation = first.feed.expect(prefill.chains[at].hashes)
            used.append(prefill.side.ids[at])
            rate = prefill.side.match_rates[at]
        self._policy.chosen(request, used)
        self._metrics.observe(decision, rate)
        for found in (prefill, decode):
            for at, instance in enumerate(found.instances):
                instance.last_score = decision, at


def _found(role: Role, instances: list[Instance], chains: list[_Chain], size: tuple[int, int]) -> _Found:
    """Gather what a policy is to know; ``size``: the prompt's tokens, and its whole cost."""
    total, cost = size
    if not instances:
        return _Found(instances, chains, Side(role, [], [], [], [], [], cost))
    whole = max(1, total)
    ids, matched, rates, work, loads, books = [], [], [], [], [], []
    for x, chain in zip(instances, chains, strict=True):  # one loop: six of them take twice the time
        depth = chain.depths.get(x.feed.slot)
        tokens = depth * chain.block_size if depth else 0
        book = x.load
        ids.append(x.instance_id)
        matched.append(tokens)
        rates.append(tokens / whole)
        own, load = book.work_and_load()
        work.append(own)
        loads.append(load)
        books.append(book)
    side = Side(role, ids, matched, rates, work, loads, cost, books)
    return _Found(instances, chains, side)
