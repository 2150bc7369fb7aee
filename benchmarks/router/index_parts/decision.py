"""The whole decision of the router: a prompt of token ids comes in, a placement with its reservations comes out."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import grpc.aio
import numpy as np
from prometheus_client import CollectorRegistry
from tests.support.servers.fake_worker import FINGERPRINT
from workload import CHAIN, SYSTEM

from baton.api.v1 import events_pb2
from baton.hashing import HashChain, hash_chain, root_hash
from baton.rpc.http2.message_stream import Dialer
from baton.types import Epoch, InstanceId, Role
from baton_router.indexer.events import EventApplier
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.registry.instance import Instance, InstanceInfo, Status
from baton_router.registry.load import NO_LIMIT
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.scheduler.placer import Placer, SchedulerMetrics
from baton_router.scheduler.policies import PolicyContext, make_policy
from baton_router.scheduler.speeds import Speeds

BLOCK = 16
SIDE = 16
IN_FLIGHT = 64
FLEET_BLOCKS = 64
EPOCH = Epoch(b"e" * 16)
KIND = replace(FINGERPRINT, block_size=BLOCK, block_bytes=512)
ROOT = root_hash(KIND.content_key())


def prompt_tokens(at: int) -> list[int]:
    """Return the tokens of a chain: a system prompt that all share, and what is its own."""
    tokens = np.random.default_rng(at + 1).integers(0, 128_000, CHAIN * BLOCK, dtype=np.uint32)
    tokens[: SYSTEM * BLOCK] = np.random.default_rng(0).integers(0, 128_000, SYSTEM * BLOCK, dtype=np.uint32)
    return list(map(int, tokens))


def prompts(chains: int, blocks: int, count: int) -> list[list[int]]:
    """Return the beginnings of random chains."""
    rng = np.random.default_rng(blocks)
    return [prompt_tokens(int(rng.integers(chains)))[: blocks * BLOCK] for _ in range(count)]


class Fleet:
    """As many prefill as decode instances, sixteen by default, that are known without having been asked."""

    def __init__(self, side: int = SIDE) -> None:
        self.index = PrefixIndex()
        self.by_role = {role: [self._instance(role, at) for at in range(side)] for role in (Role.PREFILL, Role.DECODE)}

    def ready(self, role: Role) -> list[Instance]:
        return self.by_role[role]

    def _instance(self, role: Role, at: int) -> Instance:
        address = f"127.0.0.1:{at + (1000 if role is Role.PREFILL else 2000)}"
        feed = EventApplier(self.index, now=time.monotonic)
        feed.apply(events_pb2.KvEventBatch(epoch=EPOCH, sequence=0, snapshot=True))
        instance = Instance(address, role, grpc.aio.insecure_channel(address), Dialer(address), feed)
        name = InstanceId(address)
        instance.info = InstanceInfo(name, role, EPOCH, KIND, 100_000, 40_000, "m", "", 128_000, frozenset())
        instance.status = Status.READY
        instance.generation = 1
        instance.admitted = True
        return instance


class Clocked:
    """Times calls of a function."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.times: list[float] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = self.function(*args, **options)
        self.times.append(time.perf_counter() - began)
        return result


def measure_decisions(chains: int, count: int, lengths: Iterable[int]) -> dict[str, Any]:
    """Place ``count`` prompts per length; 64 earlier ones are in flight all the time."""
    return asyncio.run(_measure(chains, count, lengths))


async def _measure(chains: int, count: int, lengths: Iterable[int]) -> dict[str, Any]:
    fleet = Fleet()
    out = {}
    for at in range(chains):
        hashes = hash_chain(prompt_tokens(at), BLOCK, ROOT)
        for role in (Role.PREFILL, Role.DECODE):
            _store(fleet.by_role[role][at % SIDE], hashes)
    for blocks in lengths:
        out[str(blocks)] = _place_all(fleet, chains, blocks, count)
    for instance in (*fleet.by_role[Role.PREFILL], *fleet.by_role[Role.DECODE]):
        await instance.channel.close(None)
    return out


def measure_fleets(sizes: Iterable[int], policies: Iterable[str], count: int) -> dict[str, Any]:
    """Time decisions among many instances on the processor: as many prefill as decode ones, and one of them full."""
    return asyncio.run(_measure_fleets(sizes, policies, count))


async def _measure_fleets(sizes: Iterable[int], policies: Iterable[str], count: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for side in sizes:
        fleet = Fleet(side)
        instances = [*fleet.by_role[Role.PREFILL], *fleet.by_role[Role.DECODE]]
        asks = [prompt_tokens(at)[: FLEET_BLOCKS * BLOCK] for at in range(side)]
        for at, instance in enumerate(instances):
            _store(instance, hash_chain(asks[at % side], BLOCK, ROOT))
        for policy in policies:
            speeds = _learnt(fleet)
            for full in (0, 1):
                fleet.by_role[Role.DECODE][0].load.limit = 0 if full else NO_LIMIT
                times = _time_decisions(fleet, policy, speeds, asks, count)
                out[f"{policy}, {side} + {side}" + (", one full" if full else "")] = {
                    "p50_us": 1e6 * statistics.median(times),
                    "p99_us": 1e6 * sorted(times)[len(times) * 99 // 100],
                }
        for instance in instances:
            await instance.channel.close(None)
    return out


def _learnt(fleet: Fleet) -> Speeds:
    """Return speeds that were measured on every instance and every pair, all a little different."""
    speeds = Speeds()
    rng = np.random.default_rng(0)
    for p in fleet.by_role[Role.PREFILL]:
        for amount in (1000.0, 4000.0):
            speeds.prefill.add(p.instance_id, amount, amount * rng.uniform(0.1, 0.15))
    for d in fleet.by_role[Role.DECODE]:
        for amount in (1000.0, 4000.0):
            speeds.local.add(d.instance_id, amount, amount * rng.uniform(0.15, 0.2))
            speeds.decode.add(d.instance_id, amount / 1000, rng.uniform(15.0, 18.0))
            for p in fleet.by_role[Role.PREFILL]:
                speeds.transfer.add((p.instance_id, d.instance_id), amount, rng.uniform(1.0, 3.0))
    return speeds


def _time_decisions(fleet: Fleet, policy: str, speeds: Speeds, asks: list[list[int]], count: int) -> list[float]:
    placer = Placer(
        fleet,
        make_policy(policy, PolicyContext(speeds=speeds)),
        SchedulerMetrics(CollectorRegistry()),
        max_prefills=3,
        threshold=None,
        speeds=speeds,
        seed=0,
    )
    flying: deque[Placement] = deque()
    times = []
    for at in range(IN_FLIGHT + count):
        ask = PlacementRequest(asks[at % len(asks)])
        began = time.thread_time()
        placement = placer.place(ask)
        times.append(time.thread_time() - began)
        assert placement is not None
        flying.append(placement)
        if at >= IN_FLIGHT:
            flying.popleft().release()
    while flying:
        flying.popleft().release()
    return times[IN_FLIGHT:]


def _store(instance: Instance, hashes: HashChain) -> None:
    stored = events_pb2.KvBlocksStored(block_hashes=list(hashes), tier="device")
    sequence = instance.events.resume_from(EPOCH) + 1
    event = events_pb2.KvEvent(stored=stored)
    instance.events.apply(events_pb2.KvEventBatch(epoch=EPOCH, sequence=sequence, events=[event]))


def _place_all(fleet: Fleet, chains: int, blocks: int, count: int) -> dict[str, float]:
    policy = make_policy("match_minus_load", PolicyContext())
    placer = Placer(fleet, policy, SchedulerMetrics(CollectorRegistry()), max_prefills=3, threshold=None, seed=0)
    flying: deque[Placement] = deque()
    whole: list[float] = []
    release: list[float] = []
    for at, prompt in enumerate(prompts(chains, blocks, IN_FLIGHT + count)):
        ask = PlacementRequest(prompt[:])  # copied just now: in the processor's cache, as a tokenizer leaves it
        began = time.perf_counter()
        placement = placer.place(ask)
        whole.append(time.perf_counter() - began)
        assert placement is not None
        flying.append(placement)
        if at >= IN_FLIGHT:
            began = time.perf_counter()
            flying.popleft().release()
            release.append(time.perf_counter() - began)
    while flying:
        flying.popleft().release()
    whole = sorted(whole[IN_FLIGHT:])
    parts = _parts(fleet, chains, blocks, count)
    return {
        "p50_us": 1e6 * statistics.median(whole),
        "p99_us": 1e6 * whole[len(whole) * 99 // 100],
        "release_us": 1e6 * statistics.median(release),
        **parts,
        "rest_us": 1e6 * statistics.median(whole) - parts["hash_us"] - parts["find_us"],
    }


def _parts(fleet: Fleet, chains: int, blocks: int, count: int) -> dict[str, float]:
    """Time hashing and look-up by themselves."""
    hashing = Clocked(hash_chain)
    finding = Clocked(fleet.index.match)
    slots = sum(1 << x.events.slot for side in fleet.by_role.values() for x in side)
    for prompt in prompts(chains, blocks, count):
        finding(hashing(prompt[:], BLOCK, ROOT), slots)
    return {f"{name}_us": 1e6 * statistics.median(x.times) for name, x in (("hash", hashing), ("find", finding))}
