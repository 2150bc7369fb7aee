"""Select and reserve: one synchronous step from a prompt to the instances that will serve it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from baton.api.v1 import router_pb2
from baton.hashing import block_hashes, root_hash
from baton.rpc.convert import role_to_pb
from baton.types import BlockHash, Role
from baton_router.feed import IndexState
from baton_router.index import Expectation, PrefixIndex
from baton_router.instance import Instance
from baton_router.load import REQUEST_OVERHEAD_TOKENS, Hold
from baton_router.metrics import RouterMetrics
from baton_router.policy import Candidate, Policy, Scored
from baton_router.registry import Registry

_WORST_FIRST = (IndexState.OFF, IndexState.STALE, IndexState.EXACT)


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be placed.

    Attributes:
        token_ids: Prompt, and output generated so far.
        cache_salt: Separates tenants' caches.
        num_sequences: Sequences from this prompt.
        local_only: No prefill instance may be used.
        exclude: Identities of decode instances that are not to be used.
    """

    token_ids: Sequence[int]
    cache_salt: str = ""
    num_sequences: int = 1
    local_only: bool = False
    exclude: Collection[tuple[str, int]] = ()


@dataclass(slots=True)
class Placement:
    """Where a request goes, and what it holds there until :meth:`release`."""

    decode: Instance
    prefill: list[Instance]
    decision: router_pb2.RouteDecision
    decode_hold: Hold | None = None
    prefill_hold: Hold | None = None
    decode_expectation: Expectation | None = None
    prefill_expectation: Expectation | None = None

    def prefilled(self) -> None:
        """The first token is there: the prefill instance is free of this request."""
        if self.prefill_hold is not None:
            self.prefill_hold.release()
        if self.prefill_expectation is not None:
            PrefixIndex.forget(self.prefill_expectation)
            self.prefill_expectation = None

    def grow(self, num_tokens: int) -> None:
        """Count generated tokens."""
        if self.decode_hold is not None:
            self.decode_hold.grow(num_tokens)

    def release(self) -> None:
        """Give everything back; may be called any number of times."""
        self.prefilled()
        if self.decode_hold is not None:
            self.decode_hold.release()
        if self.decode_expectation is not None:
            PrefixIndex.forget(self.decode_expectation)
            self.decode_expectation = None


@dataclass(slots=True)
class _Chain:
    """The prompt in one group's blocks, and how many leading ones each of its instances holds (by slot)."""

    block_size: int
    hashes: list[BlockHash]
    slots: int = 0
    depths: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Match:
    """What one instance holds of the prompt."""

    depth: int
    chain: _Chain

    @property
    def tokens(self) -> int:
        """Leading prompt tokens."""
        return self.depth * self.chain.block_size

    @property
    def missing(self) -> list[BlockHash]:
        """The blocks it will hold once it has served the prompt."""
        return self.chain.hashes[self.depth :]


@dataclass(slots=True)
class _Side:
    """One role's instances with what the index says of them; ``order`` is the policy's answer."""

    instances: list[Instance]
    matches: list[_Match]
    candidates: list[Candidate]
    order: list[Scored] = field(default_factory=list)


class Placer:
    """Puts registry, index and policy together.

    Args:
        registry: Instances and index.
        policy: Orders them.
        metrics: Where decisions are counted.
        max_prefills: Prefill instances named per request.
        threshold: Missing tokens below which the decode instance prefills by itself; ``None``: unknown here.
    """

    def __init__(
        self, registry: Registry, policy: Policy, metrics: RouterMetrics, *, max_prefills: int, threshold: int | None
    ) -> None:
        self._registry = registry
        self._policy = policy
        self._metrics = metrics
        self._max_prefills = max_prefills
        self._threshold = threshold

    def place(self, ask: Ask, *, reserve: bool = True) -> Placement | None:
        """Choose instances and, unless told not to, reserve a share of them; ``None``: no decode instance is free."""
        began = time.perf_counter()
        decodes = [x for x in self._registry.ready(Role.DECODE) if x.identity not in ask.exclude]
        if not decodes:
            return None
        prefills = [] if ask.local_only else self._registry.ready(Role.PREFILL)
        prefill, decode = self._look_up(ask, prefills, decodes)
        ranking = self._policy.rank(prefill.candidates, decode.candidates)
        prefill.order, decode.order = ranking.prefill, ranking.decode
        placement = self._placement(ask, prefill, decode)
        if reserve:
            self._reserve(ask, placement, prefill, decode)
            self._metrics.decision_time.observe(time.perf_counter() - began)
        return placement

    def _look_up(self, ask: Ask, prefills: list[Instance], decodes: list[Instance]) -> tuple[_Side, _Side]:
        chains = self._chains(ask, [*prefills, *decodes])
        total = len(ask.token_ids)

        def side(instances: list[Instance], chains: list[_Chain], cost: int) -> _Side:
            matches = [
                _Match(chain.depths.get(x.feed.slot, 0), chain) for x, chain in zip(instances, chains, strict=True)
            ]
            candidates = [
                Candidate(x.instance_id, match.tokens / max(1, total), x.load.work, cost)
                for x, match in zip(instances, matches, strict=True)
            ]
            return _Side(instances, matches, candidates)

        prefill = side(prefills, chains[: len(prefills)], total + REQUEST_OVERHEAD_TOKENS)
        decode = side(decodes, chains[len(prefills) :], total + REQUEST_OVERHEAD_TOKENS * ask.num_sequences)
        return prefill, decode

    def _chains(self, ask: Ask, instances: list[Instance]) -> list[_Chain]:
        """Return each instance's chain: the prompt is hashed and looked up once per group, among the group's slots."""
        groups: dict[bytes, _Chain] = {}
        chains = []
        for x in instances:
            info = x.info
            assert info is not None  # a ready instance has said what it is
            chain = groups.get(info.content_key)
            if chain is None:
                block_size, root = info.fingerprint.block_size, root_hash(info.content_key, ask.cache_salt)
                chain = groups[info.content_key] = _Chain(block_size, block_hashes(ask.token_ids, block_size, root))
            if x.feed.usable:
                chain.slots |= 1 << x.feed.slot
            chains.append(chain)
        for chain in groups.values():
            chain.depths = self._registry.index.match(chain.hashes, chain.slots)
        return chains

    def _placement(self, ask: Ask, prefill: _Side, decode: _Side) -> Placement:
        chosen = [prefill.instances[s.position] for s in prefill.order[: self._max_prefills]]
        target = decode.instances[decode.order[0].position]
        states = {x.feed.state for x in (*chosen[:1], target)}
        decision = router_pb2.RouteDecision(
            prefill_instance=chosen[0].instance_id if chosen else "",
            decode_instance=target.instance_id,
            prompt_tokens=len(ask.token_ids),
            policy=self._policy.name,
            prefill_addresses=[x.address for x in chosen],
            index_state=next(state for state in _WORST_FIRST if state in states),
        )
        for side in (prefill, decode):
            for s in side.order:
                instance = side.instances[s.position]
                decision.candidates.add(
                    instance_id=instance.instance_id,
                    role=role_to_pb(instance.role),
                    match_rate=s.match_rate,
                    load=s.load,
                    score=s.score,
                )
        return Placement(target, chosen, decision)

    def _reserve(self, ask: Ask, placement: Placement, prefill: _Side, decode: _Side) -> None:
        total = len(ask.token_ids)
        best = decode.order[0]
        match = decode.matches[best.position]
        placement.decode_hold = Hold(placement.decode.load, total, ask.num_sequences)
        placement.decode_expectation = placement.decode.feed.expect(match.missing)
        used = [placement.decode]
        local = self._threshold is not None and total - match.tokens < self._threshold
        if placement.prefill and not local:
            first = placement.prefill[0]
            match = prefill.matches[prefill.order[0].position]
            placement.prefill_hold = Hold(first.load, max(0, total - match.tokens))
            placement.prefill_expectation = first.feed.expect(match.missing)
            self._metrics.match_rate.labels(role=Role.PREFILL).observe(prefill.order[0].match_rate)
            used.append(first)
        self._policy.chosen([x.instance_id for x in used])
        self._metrics.decisions.labels(policy=self._policy.name).inc()
        self._metrics.match_rate.labels(role=Role.DECODE).observe(best.match_rate)
        self._metrics.index_use.labels(state=placement.decision.index_state).inc()
        for side in (prefill, decode):
            for s in side.order:
                side.instances[s.position].last_scores = {"match": s.match_rate, "load": s.load, "score": s.score}
