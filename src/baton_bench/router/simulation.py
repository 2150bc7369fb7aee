"""Replays a workload against the router's own placement, index and policies, on virtual time.

Per request: the real :class:`~baton_router.scheduler.placer.Placer` chooses among simulated instances, whose load
and KV events it gets as from real ones. The prompt waits in its instance's queue, is computed as far as nothing was
cached, its KV travels, and decode generates. What a worker would report is reported, so policies that learn do learn.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from baton.api.v1 import common_pb2
from baton.errors import ConfigError
from baton.hashing import block_hashes, root_hash
from baton.types import BlockHash, PrefillPath, Role
from baton_bench.router.rivals import RIVALS, make_rival
from baton_bench.simulator.router import VirtualInstance
from baton_bench.traces import BLOCK_TOKENS, TraceRequest
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.registry.instance import Instance
from baton_router.scheduler.metrics import SchedulerMetrics
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.scheduler.placer import Placer
from baton_router.scheduler.policies import PolicyContext, make_policy
from baton_router.scheduler.speeds import Speeds

_LAYERS = 32
"""The last layer's share of a transfer is what layer-wise overlap cannot hide."""


@dataclass(frozen=True)
class Hardware:
    """How fast simulated instances are.

    Attributes:
        prefill_tokens_per_s: Prompt tokens that a prefill instance computes.
        local_prefill_tokens_per_s: Prompt tokens that a decode instance computes beside its other work.
        gb_per_s: What a pair's pipe carries.
        kv_bytes_per_token: What it has to.
        itl_ms: Between two tokens of a sequence that runs alone.
        itl_per_sequence_ms: What each other sequence on the instance adds.
        cache_blocks: Blocks of 512 tokens that an instance keeps; 0: all.

    Raises:
        ConfigError: A number is out of range; names the field.
    """

    prefill_tokens_per_s: float = 8000.0
    local_prefill_tokens_per_s: float = 6000.0
    gb_per_s: float = 12.5
    kv_bytes_per_token: int = 131_072
    itl_ms: float = 15.0
    itl_per_sequence_ms: float = 0.3
    cache_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "local_prefill_tokens_per_s", "gb_per_s", "kv_bytes_per_token", "itl_ms"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}", field=name)
        for name in ("itl_per_sequence_ms", "cache_blocks"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}", field=name)

    def prefill_s(self, role: Role, tokens: int) -> float:
        """Return how long an instance computes."""
        speed = self.prefill_tokens_per_s if role is Role.PREFILL else self.local_prefill_tokens_per_s
        return 0.004 + tokens / speed

    def slower(self, factor: float) -> Hardware:
        """Return the hardware of an instance that takes so many times longer for everything that it computes."""
        return replace(
            self,
            prefill_tokens_per_s=self.prefill_tokens_per_s / factor,
            local_prefill_tokens_per_s=self.local_prefill_tokens_per_s / factor,
            itl_ms=self.itl_ms * factor,
            itl_per_sequence_ms=self.itl_per_sequence_ms * factor,
        )

    def transfer_s(self, tokens: int) -> float:
        """Return how long the KV of so many tokens travels."""
        return 0.001 + tokens * self.kv_bytes_per_token / (1e9 * self.gb_per_s)


class SimulatedInstance(VirtualInstance):
    """One instance: a queue of prompts, served one after the other, and a cache that forgets the least recently used.

    Args:
        name: Its name and address.
        role: Prefill or decode.
        index: Where its events go.
        now: Virtual time, in seconds.
        hardware: How fast it is.
    """

    def __init__(self, name: str, role: Role, index: PrefixIndex, now: Callable[[], float], hardware: Hardware) -> None:
        super().__init__(name, role, index, now, hardware.kv_bytes_per_token)
        self.hardware = hardware
        self.queue: deque[Any] = deque()
        self.decoding = 0
        self.link_free_at = 0.0
        self.num_requests = 0
        self.computed_tokens = 0
        self._cache: OrderedDict[BlockHash, None] = OrderedDict()

    def held(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks it has."""
        cache = self._cache
        return next((at for at, item in enumerate(hashes) if item not in cache), len(hashes))

    def store(self, hashes: Sequence[BlockHash]) -> None:
        """Keep blocks, forget others if there are too many, and tell the router."""
        cache, new = self._cache, []
        for item in hashes:
            if item in cache:
                cache.move_to_end(item)
            else:
                cache[item] = None
                new.append(item)
        gone = []
        while self.hardware.cache_blocks and len(cache) > self.hardware.cache_blocks:
            gone.append(cache.popitem(last=False)[0])
        self.send(new, gone)


@dataclass(frozen=True)
class Setup:
    """What to replay on.

    Attributes:
        prefills: Prefill instances.
        decodes: Decode instances.
        policy: Name of the policy.
        beta: Weight of load against match.
        temperature: Of the choice.
        threshold: Missing tokens below which decode prefills; ``None``: decode never does, unless the policy says so.
        seed: Of the policy's random choices.
        hardware: Of all instances.
        slow: How many instances of each role are slower.
        slow_factor: How many times.
        max_inflight: Requests that a decode instance may have; more wait in the router. 0: any number.
        patience_s: After so long a request that no instance has begun with is given up, in the router or in a queue.

    Raises:
        ConfigError: A number is out of range; names the field.
    """

    prefills: int = 8
    decodes: int = 8
    policy: str = "match_minus_load"
    beta: float = 0.5
    temperature: float = 0.0
    threshold: int | None = None
    seed: int = 0
    hardware: Hardware = field(default_factory=Hardware)
    slow: int = 0
    slow_factor: float = 3.0
    max_inflight: int = 64
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("prefills", "decodes"):
            if not 1 <= getattr(self, name) <= 1024:
                raise ConfigError(f"{name} must be between 1 and 1024, got {getattr(self, name)}", field=name)
        for name, least in (("slow", 0), ("max_inflight", 0), ("slow_factor", 1.0)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}", field=name)
        if not self.patience_s > 0:
            raise ConfigError(f"patience_s must be above 0, got {self.patience_s}", field="patience_s")


@dataclass(slots=True)
class Run:
    """What a replay counted; one entry per request, in order of their first tokens.

    A request that was given up counts with the time that it waited, so that nobody is quick by serving less.
    """

    ttft_ms: list[float] = field(default_factory=list)
    decision_us: list[float] = field(default_factory=list)
    hit_blocks: int = 0
    reused_blocks: int = 0
    local: int = 0
    given_up: int = 0
    prefills: list[SimulatedInstance] = field(default_factory=list)
    decodes: list[SimulatedInstance] = field(default_factory=list)


@dataclass(slots=True)
class _Job:
    """A request on its way."""

    request: TraceRequest
    hashes: list[BlockHash]
    placement: Placement
    machine: SimulatedInstance
    decode: SimulatedInstance
    computed: int = 0
    cached: int = 0
    moved: int = 0
    exposed_s: float = 0.0


class Replay:
    """One run of a trace; call :meth:`run` once.

    Args:
        setup: What to replay on.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._clock = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._waiting: deque[TraceRequest] = deque()
        self.index = PrefixIndex()
        self._speeds = Speeds(self.now)
        context = PolicyContext(
            beta=setup.beta, temperature=setup.temperature, rng=random.Random(setup.seed), speeds=self._speeds
        )
        self._placer = Placer(
            self,
            make_rival(setup.policy) if setup.policy in RIVALS else make_policy(setup.policy, context),
            SchedulerMetrics(CollectorRegistry()),
            max_prefills=1,
            threshold=setup.threshold,
            speeds=self._speeds,
            seed=setup.seed,
        )
        self._run = Run(
            prefills=[self._machine(i, Role.PREFILL) for i in range(setup.prefills)],
            decodes=[self._machine(i, Role.DECODE) for i in range(setup.decodes)],
        )
        info = self._run.decodes[0].instance.info
        assert info is not None
        self._root = root_hash(info.content_key)
        machines = [*self._run.prefills, *self._run.decodes]
        self._machines = {x.instance.address: x for x in machines}
        self._instances = {role: [x.instance for x in machines if x.role is role] for role in Role}

    def now(self) -> float:
        """Return the virtual time, in seconds."""
        return self._clock

    def ready(self, role: Role) -> list[Instance]:
        """Return the instances of a role, all of them."""
        return self._instances[role]

    def run(self, requests: Sequence[TraceRequest]) -> Run:
        """Replay requests, which are in order of arrival."""
        for request in requests:
            self._advance(request.at_ms / 1000)
            self._arrive(request)
        self._advance(float("inf"))
        return self._run

    def _machine(self, number: int, role: Role) -> SimulatedInstance:
        setup = self._setup
        hardware = setup.hardware.slower(setup.slow_factor) if number < setup.slow else setup.hardware
        machine = SimulatedInstance(f"{role.value[0]}{number}", role, self.index, self.now, hardware)
        if role is Role.DECODE and setup.max_inflight:
            machine.instance.load.limit = setup.max_inflight
        return machine

    def _advance(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._clock, _, action = heapq.heappop(self._events)
            action()
        if until != float("inf"):
            self._clock = until

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._clock + seconds, next(self._order), action))

    def _arrive(self, request: TraceRequest) -> None:
        self._waiting.append(request)
        self._place_waiting()

    def _place_waiting(self) -> None:
        """Place who has waited longest, and the next, while a decode instance has room."""
        while self._waiting:
            request = self._waiting[0]
            if self._late(request):
                self._give_up(request)
            elif not self._place(request):
                return
            self._waiting.popleft()

    def _late(self, request: TraceRequest) -> bool:
        return self._clock - request.at_ms / 1000 > self._setup.patience_s

    def _give_up(self, request: TraceRequest) -> None:
        self._run.given_up += 1
        self._run.ttft_ms.append(1000 * self._clock - request.at_ms)

    def _place(self, request: TraceRequest) -> bool:
        # A block's name stands for all of its tokens, and the last block for a whole one, as the trace counts.
        tokens = np.repeat(np.array(request.blocks, dtype="<u4"), BLOCK_TOKENS)
        ask = PlacementRequest(tokens, session=request.session, max_tokens=request.output_tokens)
        began = time.thread_time()
        placement = self._placer.place(ask)
        if placement is None:
            return False
        self._run.decision_us.append(1e6 * (time.thread_time() - began))
        decision = placement.decision
        decode = self._machines[placement.decode.address]
        local = decision.path in (PrefillPath.LOCAL, PrefillPath.STORE)
        machine = decode if local else self._machines[decision.prefill_addresses[0]]
        self._run.local += local
        machine.num_requests += 1
        job = _Job(request, block_hashes(tokens, BLOCK_TOKENS, self._root), placement, machine, decode)
        machine.queue.append(job)
        if len(machine.queue) == 1:
            self._start(job)
        return True

    def _next(self, machine: SimulatedInstance) -> None:
        """Begin with the next prompt in a queue, if there is one that is still waited for."""
        machine.queue.popleft()
        while machine.queue and self._late(machine.queue[0].request):
            job = machine.queue.popleft()
            self._give_up(job.request)
            job.placement.release()
        if machine.queue:
            self._start(machine.queue[0])

    def _start(self, job: _Job) -> None:
        machine, hardware, total = job.machine, job.machine.hardware, job.request.input_tokens
        own, there = machine.held(job.hashes), job.decode.held(job.hashes)
        self._run.hit_blocks += own
        if machine is not job.decode:
            self._run.reused_blocks += max(0, there - own)
        job.computed = max(1, total - BLOCK_TOKENS * max(own, there))
        job.cached = total - job.computed
        machine.computed_tokens += job.computed
        seconds = hardware.prefill_s(machine.role, job.computed)
        if machine is not job.decode:
            job.moved = max(0, total - BLOCK_TOKENS * there)
            transfer = hardware.transfer_s(job.moved)
            job.exposed_s = max(transfer - seconds, transfer / _LAYERS)
            if there > own:
                # What decode alone holds comes over its link before the rest is computed; the link does one at a time.
                fetched = min(total, BLOCK_TOKENS * there) - BLOCK_TOKENS * own
                begin = max(self._clock, job.decode.link_free_at)
                job.decode.link_free_at = begin + hardware.transfer_s(fetched)
                seconds += job.decode.link_free_at - self._clock
        self._after(seconds, lambda: self._computed(job))

    def _computed(self, job: _Job) -> None:
        machine = job.machine
        machine.store(job.hashes)
        self._next(machine)
        self._after(job.exposed_s, lambda: self._first_token(job))

    def _first_token(self, job: _Job) -> None:
        request, decode, hardware = job.request, job.decode, job.decode.hardware
        ttft_s = self._clock - request.at_ms / 1000
        self._run.ttft_ms.append(1000 * ttft_s)
        if job.machine is not decode:
            decode.store(job.hashes)
        job.placement.trace = self._trace(job, ttft_s)
        job.placement.grow(1)
        job.placement.prefilled()
        decode.decoding += 1
        itl_s = (hardware.itl_ms + hardware.itl_per_sequence_ms * (decode.decoding - 1)) / 1000
        self._after(itl_s * (request.output_tokens - 1), lambda: self._finished(job))

    def _finished(self, job: _Job) -> None:
        job.decode.decoding -= 1
        if job.request.output_tokens > 1:
            job.placement.grow(job.request.output_tokens - 1)
        job.placement.release()
        self._place_waiting()

    def _trace(self, job: _Job, ttft_s: float) -> common_pb2.RequestTrace:
        request, local = job.request, job.machine is job.decode
        kinds = common_pb2.PREFILL_PATH_LOCAL, common_pb2.PREFILL_PATH_REMOTE
        return common_pb2.RequestTrace(
            path=kinds[0] if local else kinds[1],
            prefill_instance="" if local else job.machine.instance.instance_id,
            decode_instance=job.decode.instance.instance_id,
            prompt_tokens=request.input_tokens,
            cached_tokens=job.cached if local else 0,
            prefill_cached_tokens=0 if local else job.cached,
            recomputed_tokens=job.computed if local else 0,
            transferred_tokens=job.moved,
            kv_bytes=job.moved * self._setup.hardware.kv_bytes_per_token,
            exposed_us=round(1e6 * job.exposed_s),
            ttft_us=round(1e6 * ttft_s),
        )
