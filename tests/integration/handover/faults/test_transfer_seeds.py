"""Two hundred ways in which a network can spoil a hand-over: right tokens or a clear error, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tests.support.equality import hf_greedy
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.cluster import LocalCluster, Result
from tests.support.transport.shared_memory import left_behind, segments
from tests.support.transport.transport_faults import STALL_S, Fault, Proxy, counting_proxy
from tests.support.transport.transport_rig import lets_go, open_fds

from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.kv_transfer.blocks import Endpoint
from baton.types import SamplingParams

SEEDS = 200
DEADLINE_S = 240.0
RIGS = 3
"""Side by side: two fifths of the faults cost a stall's time, and nothing else."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


class Rig:
    """A prefill and a decode instance, and a proxy between their pools."""

    def __init__(self, model: Path, policy: str) -> None:
        engine = EngineConfig(
            model=str(model), dtype="float32", kv_blocks=64, prefix_caching=False, prefill_chunk=64,
            kv_load_failure=policy,
        )  # fmt: skip
        config = WorkerConfig(prefill_stall_s=DEADLINE_S, kv_streams=1)
        self.cluster = LocalCluster(engine, config, decode_pipes=[("tcp",)])

    def lose_patience(self) -> None:
        """Give a hand-over up from now on that stalls."""
        role: Any = self.cluster.decode[0]._role
        role.connector._stall_s = role.connector.watch._stall_s = STALL_S

    def through(self, proxy: Proxy) -> None:
        endpoints = self.cluster.prefill[0].context.block_server.endpoints
        endpoints[:] = [Endpoint("tcp", proxy.address)]

    @property
    def served(self) -> str:
        return self.cluster.prefill[0].context.block_server.endpoints[0].address

    async def generate(self, prompt: list[int]) -> Result:
        async with asyncio.timeout(DEADLINE_S):
            return await self.cluster.generate(self.cluster.decode[0], prompt, GREEDY)

    async def outcome(self, prompt: list[int]) -> tuple[Result | None, str]:
        """The answer, or the error that the client sees."""
        try:
            return await self.generate(prompt), ""
        except grpc.aio.AioRpcError as error:
            return None, error.details() or ""


async def sizes(rig: Rig, target: str, prompt: list[int]) -> tuple[int, int]:
    """Bytes of an undisturbed hand-over: from the prefill instance, and to it."""
    proxy, seen = counting_proxy(target)
    rig.through(proxy)
    await rig.generate(prompt)
    await asyncio.to_thread(proxy.close)
    return seen[0], seen[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@dataclass
class Workload:
    prompts: list[list[int]]
    expected: list[list[int]]
    size: tuple[int, int] = (0, 0)
    outcomes: dict[str, int] = field(default_factory=lambda: {"untouched": 0, "recomputed": 0, "failed": 0})

    async def run(self, rig: Rig, target: str, policy: str, seed: int) -> None:
        fault = Fault(seed, self.size)
        proxy = fault.proxy(target)
        rig.through(proxy)
        start = time.monotonic()
        result, error = await rig.outcome(self.prompts[seed % len(self.prompts)])
        assert time.monotonic() - start < DEADLINE_S
        if result is None:
            assert policy == "fail", f"seed {seed} ({fault}): {error}"
            assert "its KV could not be loaded" in error, f"seed {seed} ({fault})"
            self.outcomes["failed"] += 1
        else:
            assert result.token_ids == self.expected[seed % len(self.prompts)], f"seed {seed} ({fault})"
            self.outcomes["recomputed" if result.trace.local_reason else "untouched"] += 1
        fault.release.set()
        await asyncio.to_thread(proxy.close)


# Seed 72 cut the stream between two events: a copy that nobody waited for wrote into blocks that were computed again.
@pytest.mark.parametrize(
    ("policy", "seeds"), [("recompute", range(150)), ("fail", range(150, SEEDS)), ("recompute", [72] * 150)]
)
async def test_right_tokens_or_a_clear_error(model: Path, policy: str, seeds: Sequence[int]) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(8, 512) for _ in range(rng.randrange(130, 260))] for _ in range(8)]
    work = Workload(prompts, hf_greedy(model, prompts, 6))
    rigs = [Rig(model, policy) for _ in range(RIGS)]
    memory = segments()
    async with contextlib.AsyncExitStack() as stack:
        for rig in rigs:
            await stack.enter_async_context(rig.cluster)
        targets = [rig.served for rig in rigs]
        for rig, target in zip(rigs, targets, strict=True):
            work.size = await sizes(rig, target, max(prompts, key=len))
            rig.lose_patience()
        fds = open_fds()

        async def some(at: int) -> None:
            for seed in seeds[at::RIGS]:
                await work.run(rigs[at], targets[at], policy, seed)

        async with asyncio.TaskGroup() as group:
            for at in range(RIGS):
                group.create_task(some(at))
        for rig in rigs:
            await rig.cluster.check_integrity()
        assert lets_go(fds + 8 * RIGS), "descriptors leak"
    assert left_behind(memory) == set()
    assert sum(work.outcomes.values()) == len(seeds)
    if len(set(seeds)) > 1:  # the one that is repeated may cut every stream
        assert work.outcomes["untouched"] > 0
    assert work.outcomes["failed" if policy == "fail" else "recomputed"] > len(seeds) // 4, work.outcomes
