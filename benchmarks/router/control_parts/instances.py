"""Simulated instances for ``benchmarks/control_plane.py``: gRPC servers whose engine computes nothing.

What they tell routers goes through the code of real instances: :class:`WorkerServicer` answers ``GetInfo`` and streams
load and KV events out of :class:`KvEventLog`. Only the engine is made up. A decode instance runs ``RUNNING`` requests
at a time and gives each a token per step; a request brings the blocks of its prompt, names a block per 16 tokens, and
another one begins when it ends. A prefill instance computes as many prompts. The pool is full, so what comes evicts as
much of what was used longest ago.

    python instances.py --role decode --count 96

It prints the addresses, as JSON. On the line ``steps`` it prints how many steps all have taken since the last such
line, over how many they should have: less than 1 where the machine is too slow. On the line ``pause`` it takes no more
steps and prints how many blocks each holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import uvloop

from baton.api.v1 import worker_pb2_grpc
from baton.config.worker import WorkerConfig
from baton.engine.request import EngineStats
from baton.kv_cache.events import BlocksRemoved, BlocksStored, KVEvent, merge_events
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import LayerShape
from baton.rpc.server import GrpcServer
from baton.types import BlockHash, Epoch, Role
from baton.worker.context import Admission
from baton.worker.events import KvEventLog
from baton.worker.servicer import WorkerServicer

BLOCK = 16
STEPS_PER_S = 30
RUNNING = 8
OUTPUT_TOKENS = (100, 200)
PROMPT_TOKENS = (500, 1500)
NUM_BLOCKS = 4000
PREFILL_STEPS_PER_S = 10
PREFILL_PROMPTS_PER_S = 5.0
FINGERPRINT = Fingerprint("simulated", "0" * 64, "bfloat16", BLOCK, (LayerShape(1, 4, 4),), 2048)

_POOL_SIZE = "num_blocks" if "num_blocks" in EngineStats.__dataclass_fields__ else "blocks_total"
"""What an older checkout (``--beside``) calls it."""


class Pool:
    """The blocks that an instance holds, oldest first."""

    def __init__(self) -> None:
        self.runs: deque[tuple[BlockHash, ...]] = deque()
        self.held = 0

    def store(self, parent: BlockHash | None, number: int) -> list[KVEvent]:
        """Name so many new blocks, and evict as many once the pool is full; returns the events."""
        run = tuple(BlockHash(secrets.token_bytes(32)) for _ in range(number))
        events: list[KVEvent] = [BlocksStored(parent, run)]
        self.runs.append(run)
        self.held += number
        while self.held > NUM_BLOCKS:
            gone = self.runs.popleft()
            self.held -= len(gone)
            events.insert(0, BlocksRemoved(gone))
        return events


class SimulatedEngine:
    """What :class:`WorkerServicer` asks of an ``EngineThread``, with steps that take no time.

    Args:
        role: A prefill instance computes prompts, a decode instance generates.
        log: Takes the events of each step, as the engine's thread hands them over.
    """

    def __init__(self, role: Role, log: KvEventLog) -> None:
        self.core = self
        self.max_model_len = 32768
        self.grammars = None
        self.role = role
        self.log = log
        self.pool = Pool()
        self._rng = random.Random()
        self._running: list[list[Any]] = []
        self._prompts: deque[int] = deque()
        self._prefill_tokens = self._decode_tokens = 0
        self.stats = self._look()

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function between two steps."""
        return function()

    def snapshot(self) -> list[KVEvent]:
        """Return what rebuilds the cache."""
        return [BlocksStored(None, run) for run in self.pool.runs]

    def fill(self) -> None:
        """Begin with a full pool, in the midst of requests."""
        while self.pool.held < NUM_BLOCKS - 100:
            self.log.append(self.pool.store(None, 50))
        if self.role is Role.DECODE:
            self._running = [[*self._new(), self._rng.randrange(OUTPUT_TOKENS[1])] for _ in range(RUNNING)]

    def step(self) -> None:
        """Do what a step does."""
        loop = asyncio.get_running_loop()
        events = list[KVEvent]()
        ended = (self._decode if self.role is Role.DECODE else self._prefill)(events)
        if events:
            loop.call_soon_threadsafe(self.log.append, merge_events(events))
        if ended and self.role is Role.DECODE:
            loop.call_soon_threadsafe(self.log.flush_request)
        self.stats = self._look()

    def _new(self) -> tuple[int, int]:
        return self._rng.randint(*PROMPT_TOKENS), self._rng.randint(*OUTPUT_TOKENS)

    def _decode(self, events: list[KVEvent]) -> bool:
        ended = False
        for at, (prompt, output, done) in enumerate(self._running):
            if done >= output:
                self._running[at] = [*self._new(), 0]
                events += self.pool.store(None, self._running[at][0] // BLOCK)
                ended = True
                continue
            self._running[at][2] += 1
            self._decode_tokens += 1
            if (prompt + done + 1) % BLOCK == 0:
                events += self.pool.store(self.pool.runs[-1][-1], 1)
        return ended

    def _prefill(self, events: list[KVEvent]) -> bool:
        ended = bool(self._prompts)
        while self._prompts:
            tokens = self._prompts.popleft()
            self._prefill_tokens += tokens
            events += self.pool.store(None, tokens // BLOCK)
        if self._rng.random() < PREFILL_PROMPTS_PER_S / PREFILL_STEPS_PER_S:
            self._prompts.append(self._new()[0])
        return ended

    def _look(self) -> EngineStats:
        active = sum((prompt + done) // BLOCK + 1 for prompt, _, done in self._running)
        return EngineStats(
            num_running=len(self._running) or len(self._prompts),
            num_waiting=0,
            num_loading=0,
            **{_POOL_SIZE: NUM_BLOCKS},
            blocks_active=active + sum(self._prompts) // BLOCK,
            blocks_cached=self.pool.held,
            waiting_prompt_tokens=sum(self._prompts),
            num_preemptions=0,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            prefix_hit_tokens=0,
            prefix_query_tokens=0,
        )


async def serve(role: Role) -> tuple[GrpcServer, str, SimulatedEngine]:
    """Start an instance; returns its server, its address and its engine."""
    epoch = Epoch(secrets.token_bytes(16))
    log = KvEventLog(epoch)
    engine = SimulatedEngine(role, log)
    server = GrpcServer(host="127.0.0.1", port=0, services=["baton.api.v1.WorkerService"])
    model = SimpleNamespace(
        arena=SimpleNamespace(epoch=epoch, num_blocks=NUM_BLOCKS),
        num_blocks=NUM_BLOCKS,
        executor=SimpleNamespace(
            layout=SimpleNamespace(num_groups=1),
            description="simulated",
            fingerprint=FINGERPRINT,
            attention_backend="none",
            eos_token_ids=frozenset({0}),
            vocab_size=32000,
        ),
    )
    base = SimpleNamespace(
        instance_id=f"{role}-{epoch.hex()[:8]}",
        model=model,
        events=log,
        tiers=[],
        engine_config=SimpleNamespace(
            max_num_seqs=64, model_name="simulated", model_names=("simulated",), model="", device="cpu"
        ),
        config=WorkerConfig(),
    )
    context: Any = SimpleNamespace(
        base=base,
        engine=engine,
        block_server=SimpleNamespace(endpoints=()),
        admission=Admission(),
        tokenizer_digest="",
    )
    servicer = WorkerServicer(
        context, cast(Any, SimpleNamespace(role=role, unreadable_prefills=list)), None, cast(Any, None)
    )
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    port = await server.start()
    await server.set_serving(True)
    engine.fill()
    return server, f"127.0.0.1:{port}", engine


async def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=("prefill", "decode"), required=True)
    parser.add_argument("--count", type=int, required=True)
    args = parser.parse_args()
    role = Role(args.role)
    instances = [await serve(role) for _ in range(args.count)]
    print(json.dumps([address for _, address, _ in instances]), flush=True)
    loop = asyncio.get_running_loop()
    interval_s = 1 / (STEPS_PER_S if role is Role.DECODE else PREFILL_STEPS_PER_S)
    taken = 0
    began = loop.time()

    async def run(engine: SimulatedEngine) -> None:
        nonlocal taken
        due = loop.time() + random.random() * interval_s
        while True:
            await asyncio.sleep(due - loop.time())
            engine.step()
            taken += 1
            due = max(due + interval_s, loop.time())

    tasks = [asyncio.create_task(run(engine)) for _, _, engine in instances]
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line.strip() == "steps":
            print(json.dumps(taken * interval_s / (loop.time() - began) / len(instances)), flush=True)
            taken = 0
            began = loop.time()
        elif line.strip() == "pause":
            for task in tasks:
                task.cancel()
            print(json.dumps([engine.pool.held for _, _, engine in instances]), flush=True)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    uvloop.run(main())
