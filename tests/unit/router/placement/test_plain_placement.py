"""Whole decisions against a plain definition, step by step, while everything that they depend on changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tests.support.servers.fake_worker import FINGERPRINT

from baton.api.v1 import common_pb2, events_pb2
from baton.hashing import block_hashes, root_hash
from baton.rpc.http2.message_stream import Dialer
from baton.types import BlockHash, Epoch, InstanceId, Role
from baton_router.indexer.events import EventApplier
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.registry.instance import Instance, InstanceInfo, Status
from baton_router.registry.load import REQUEST_OVERHEAD_TOKENS
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.scheduler.placer import Placer, SchedulerMetrics
from baton_router.scheduler.policies import PolicyContext, Ratings, Request, Side
from baton_router.scheduler.policies.cost_ms import CostMs
from baton_router.scheduler.policies.match_minus_load import MatchMinusLoad
from baton_router.scheduler.policy import Choice, choose_plainly, option_at, option_scores
from baton_router.scheduler.roster import only_compatible
from baton_router.scheduler.speeds import Speeds

STALE_S = 30.0
KINDS = (
    FINGERPRINT,
    replace(FINGERPRINT, block_size=8, block_bytes=2 * FINGERPRINT.block_bytes),
    replace(FINGERPRINT, kv_dtype="bfloat16", block_bytes=FINGERPRINT.block_bytes // 2),
)
PROMPTS = [[*range(24), *range(1000 * at, 1000 * at + 24)] for at in range(3)]


@dataclass(eq=False)
class Known:
    """What is true of an instance, as a test keeps it."""

    instance: Instance
    blocks: set[BlockHash] = field(default_factory=set)
    expected: dict[int, list[int]] = field(default_factory=dict)
    epoch: int = 0
    sequence: int = 0

    def chain(self, tokens: Sequence[int]) -> list[BlockHash]:
        info = self.instance.info
        assert info is not None
        return block_hashes(list(tokens), info.fingerprint.block_size, root_hash(info.content_key))

    def leading(self, prompt: Sequence[int]) -> int:
        """Leading tokens that it holds, what it will hold included."""
        info = self.instance.info
        assert info is not None
        if not self.instance.events.usable:
            return 0
        hashes = self.chain(prompt)
        sets = [self.blocks, *(set(self.chain(x)) for x in self.expected.values())]
        depth = max(next((i for i, x in enumerate(hashes) if x not in one), len(hashes)) for one in sets)
        return depth * info.fingerprint.block_size


class World:
    """A fleet, its placer, and all that a decision depends on, changed at random."""

    def __init__(self, rng: random.Random, kind: type[MatchMinusLoad] | type[CostMs]) -> None:
        self.rng, self.now, self.index = rng, 0.0, PrefixIndex()
        alike = rng.random() < 0.6
        counts = {Role.PREFILL: rng.randint(0, 5), Role.DECODE: rng.randint(1, 5)}
        self.all = [
            self._make(role, at, KINDS[0] if alike else rng.choice(KINDS), alike)
            for role, count in counts.items()
            for at in range(count)
        ]
        self.lists: dict[Role, list[Instance]] = {}
        self.speeds, self.beta = Speeds(lambda: self.now), rng.choice((0.5, 1.0))
        self.threshold = rng.choice((None, None, 20))
        self.policy = kind.make(PolicyContext(beta=self.beta, speeds=self.speeds))
        self.placer = Placer(
            self,
            self.policy,
            SchedulerMetrics(CollectorRegistry()),
            max_prefills=rng.choice((1, 3)),
            threshold=self.threshold,
            seed=1,
        )
        self.flying: list[Placement] = []

    def _make(self, role: Role, at: int, kind: Any, alike: bool) -> Known:
        calls = dict.fromkeys(("unary_unary", "unary_stream", "stream_stream"), lambda *_, **__: None)
        channel: Any = SimpleNamespace(**calls)
        name = f"{role.value}:{at}"
        events = EventApplier(self.index, now=lambda: self.now, stale_limit_s=STALE_S, decision_ttl_s=0.0)
        made = Instance(name, role, channel, Dialer(name), events)
        made.load.now = lambda: self.now
        grammars = not alike and self.rng.random() < 0.7
        made.info = InstanceInfo(
            *(InstanceId(name), role, Epoch(b"e" * 16), kind, 100, 1000, "m", "", 1000, frozenset()),
            grammars=grammars,
        )
        made.status = Status.READY
        return Known(made)

    def ready(self, role: Role) -> list[Instance]:
        """As the registry has it: the same list until an instance comes or goes."""
        if role not in self.lists:
            self.lists[role] = [x.instance for x in self.all if x.instance.role is role and x.instance.ready]
        return self.lists[role]

    # --- what happens ---

    def change(self) -> None:
        """Have something happen to some instance."""
        x = self.rng.choice(self.all)
        self.rng.choice(
            (self.tell, self.tell, self.report, self.limit, self.restart, self.cut, self.drain, self.wait, self.teach)
        )(x)

    def tell(self, x: Known) -> None:
        """It says what it holds, anew or beside what it held."""
        epoch = bytes([x.epoch]) * 16
        snapshot = x.instance.events.resume_from(Epoch(epoch)) == 0 or self.rng.random() < 0.3
        x.blocks = set() if snapshot else x.blocks
        x.sequence += 1
        prompt = self.rng.choice(PROMPTS)
        hashes = x.chain(prompt[: self.rng.randint(0, len(prompt))])
        x.blocks |= set(hashes)
        event = events_pb2.KvEvent(stored=events_pb2.KvBlocksStored(block_hashes=hashes))
        x.instance.events.apply(
            events_pb2.KvEventBatch(epoch=epoch, sequence=x.sequence, events=[event], snapshot=snapshot)
        )
        if self.rng.random() < 0.5:
            x.instance.events.heartbeat(events_pb2.KvEventBatch(epoch=epoch, sequence=x.sequence), 2.0)

    def report(self, x: Known) -> None:
        x.instance.load.observe(
            common_pb2.LoadReport(
                num_running=self.rng.randrange(5), waiting_prompt_tokens=self.rng.choice((0, 500)), blocks_active=20
            ),
            4,
        )

    def limit(self, x: Known) -> None:
        if x.instance.role is Role.DECODE:
            x.instance.load.limit = self.rng.choice((0, 1, 2, 2**62))

    def restart(self, x: Known) -> None:
        x.epoch = (x.epoch + 1) % 256
        if x.instance.events.restarted(Epoch(bytes([x.epoch]) * 16)):
            x.blocks, x.expected = set(), {}
        x.instance.load.forget_reports()

    def cut(self, x: Known) -> None:
        x.instance.events.broken()

    def drain(self, x: Known) -> None:
        x.instance.load.draining = not x.instance.load.draining
        self.lists.clear()

    def wait(self, _: Known) -> None:
        self.now += self.rng.choice((1.0, 20.0, 31.0, 200.0))
        for x in self.all if self.rng.random() < 0.5 else ():
            x.instance.events.tick()
            if x.instance.events.num_blocks == 0:
                x.blocks = set()  # too old to be used

    def teach(self, x: Known) -> None:
        for amount in (100.0, 1000.0):
            ms = amount * self.rng.choice((0.1, 0.3))
            if x.instance.role is Role.PREFILL:
                self.speeds.prefill.add(x.instance.instance_id, amount, ms)
                for other in self.ready(Role.DECODE):
                    self.speeds.transfer.add((x.instance.instance_id, other.instance_id), amount, ms / 10)
            else:
                self.speeds.local.add(x.instance.instance_id, amount, 2 * ms)
                self.speeds.decode.add(x.instance.instance_id, amount / 100, 15.0 + ms)

    # --- what is placed ---

    def ask(self) -> PlacementRequest:
        prompt = self.rng.choice(PROMPTS)
        excluded = [x.instance.identity for x in self.all if self.rng.random() < 0.3] if self.rng.random() < 0.3 else ()
        return PlacementRequest(
            prompt[: self.rng.randint(1, len(prompt))],
            num_sequences=self.rng.choice((1, 1, 3)),
            local_only=self.rng.random() < 0.1,
            exclude=excluded,
            max_tokens=self.rng.choice((None, 50)),
            guided=self.rng.random() < 0.2,
        )

    def end(self, placement: Placement) -> None:
        """A request ends: what was expected of its instances for it is not any more, unless they restarted."""
        self.flying.remove(placement)
        for x in self.all:
            x.expected.pop(id(placement), None)
        placement.release()

    def known(self, instance: Instance) -> Known:
        return next(x for x in self.all if x.instance is instance)

    def side(self, role: Role, instances: list[Instance], ask: PlacementRequest, sequences: int) -> Side:
        total = len(ask.token_ids)
        held = [self.known(x).leading(list(ask.token_ids)) for x in instances]
        return Side(
            role,
            [x.instance_id for x in instances],
            held,  # type: ignore[arg-type]
            [x / total for x in held],  # type: ignore[arg-type]
            [x.load.work for x in instances],  # type: ignore[arg-type]
            [x.load.load for x in instances],  # type: ignore[arg-type]
            total + REQUEST_OVERHEAD_TOKENS * sequences,
            [x.load for x in instances],
        )

    def may_use(self, ask: PlacementRequest, *, reserve: bool) -> tuple[list[Instance], list[Instance]]:
        """The instances that a request may be placed on."""
        prefills, decodes = list(self.ready(Role.PREFILL)), list(self.ready(Role.DECODE))

        def able(x: Instance) -> bool:
            return not ask.guided or (x.info is not None and x.info.grammars)

        decodes = [x for x in decodes if able(x) and x.identity not in ask.exclude]
        decodes = [x for x in decodes if not reserve or x.load.has_room(ask.num_sequences)]
        prefills = [x for x in prefills if able(x) and not ask.local_only]
        return (prefills if any(takes(d, p) for d in decodes for p in prefills) else []), decodes

    def check(self) -> None:
        """Place a request and compare with what it had to be."""
        ask, reserve = self.ask(), self.rng.random() < 0.7
        prefills, decodes = self.may_use(ask, reserve=reserve)
        prefill = self.side(Role.PREFILL, prefills, ask, 1)
        decode = self.side(Role.DECODE, decodes, ask, ask.num_sequences)
        waiting = [(x.sequences().tolist(), x.prompts_waiting().tolist()) for x in (prefill, decode)]
        rated = self.rate(ask, prefill, decode, prefills, decodes) if decodes else None
        draws = random.Random()
        draws.setstate(self.placer._rng.getstate())
        placement = self.placer.place(ask, reserve=reserve)
        if rated is None or placement is None:
            assert (rated, placement) == (None, None)
            return
        decision, plain = placement.decision, choose_plainly(rated, draws)
        for seen, side, waits in zip((decision.prefill, decision.decode), (prefill, decode), waiting, strict=True):
            assert seen.ids == side.ids
            assert seen.matched.tolist() == side.matched.tolist()
            for name in ("match_rates", "work", "loads"):
                assert getattr(seen, name).tolist() == pytest.approx(getattr(side, name).tolist(), rel=1e-9)
            assert (seen.sequences().tolist(), seen.prompts_waiting().tolist()) == waits
        choice = decision.choice
        assert choice.score == pytest.approx(plain.score, rel=1e-9, abs=1e-9)
        everything = {
            (d, *option_at(rated, at)): s
            for d in range(len(decodes))
            for at, s in enumerate(option_scores(rated, d).tolist())
        }
        as_good = [at for at, s in everything.items() if s >= plain.score - 1e-6 * max(1.0, abs(plain.score))]
        assert (choice.decode, choice.prefill, choice.path) in as_good
        assert placement.decode is decodes[choice.decode]
        usable = [p for p, x in enumerate(prefills) if takes(placement.decode, x)]
        self.check_order(decision.prefill_order, rated, choice, usable)
        assert [x.address for x in placement.prefill] == [prefills[p].address for p in decision.prefill_order]
        if reserve:
            self.flying.append(placement)
            for instance, pending in (
                (placement.decode, placement.decode_pending),
                *((x, placement.prefill_pending) for x in placement.prefill[:1]),
            ):
                if pending is not None:
                    self.known(instance).expected[id(placement)] = list(ask.token_ids)

    def rate(
        self,
        ask: PlacementRequest,
        prefill: Side,
        decode: Side,
        prefills: list[Instance],
        decodes: list[Instance],
    ) -> Ratings:
        source = (prefills or decodes)[0].info
        assert source is not None
        request = Request(
            len(ask.token_ids),
            ask.num_sequences,
            max_tokens=ask.max_tokens,
            kv_bytes_per_token=source.fingerprint.block_bytes / source.fingerprint.block_size,
            threshold=self.threshold,
        )
        rated = self.policy.plain_score(request, prefill, decode)
        if prefills and not all(takes(d, p) for d in decodes for p in prefills):
            rated = only_compatible(rated, np.array([[takes(d, p) for p in prefills] for d in decodes]))
        return rated

    def check_order(self, order: list[int], rated: Ratings, choice: Choice, usable: list[int]) -> None:
        """The chosen one first, then from the best on."""
        chosen = choice.prefill
        values = option_scores(rated, choice.decode)
        assert len(set(order)) == len(order)
        rest = order
        if chosen is not None:
            assert order[0] == chosen
            rest = order[1:]
        others = sorted((float(values[p]) for p in usable if p != chosen), reverse=True)
        assert [float(values[p]) for p in rest] == pytest.approx(others[: len(rest)], rel=1e-9, abs=1e-9)


def takes(decode: Instance, prefill: Instance) -> bool:
    assert decode.info is not None
    assert prefill.info is not None
    return decode.info.fingerprint.takes(prefill.info.fingerprint)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([MatchMinusLoad, CostMs]))
def test_every_decision_is_the_plain_one(seed: int, kind: type[MatchMinusLoad] | type[CostMs]) -> None:
    """Instances come, go, get full, restart, fall silent; requests exclude some, want grammars, many sequences."""
    rng = random.Random(seed)
    world = World(rng, kind)
    for _ in range(25):
        for _ in range(rng.randrange(4)):
            world.change()
        world.check()
        if world.flying and rng.random() < 0.4:
            world.end(rng.choice(world.flying))
    for placement in list(world.flying):
        world.end(placement)
    assert not any(x.instance.load.requests for x in world.all)
    assert world.index._pending._root.children == {}
