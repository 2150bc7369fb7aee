"""A client in a process of its own: ``python -m baton_kvstore.bench.client --fd N``. The driver tells it what to do."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from baton.bench.core.agents import Order, serve_agent
from baton.errors import ConfigError, InvalidRequestError
from baton.kv_cache.arena import HostArena
from baton.types import BlockHash
from baton_kvstore.bench.methods import (
    Once,
    StorePipe,
    bare_get,
    dd,
    memcpy,
    plain_reads,
    redis_client,
    redis_mget,
    redis_pipeline,
    redis_set,
)
from baton_kvstore.bench.plan import (
    MAX_SAMPLES,
    OpenSpec,
    Pattern,
    TurnResult,
    TurnSpec,
    VerifyResult,
    chain_names,
)

_STORES = {"shm": ("dram", "shm"), "tcp": ("dram", "tcp"), "disk": ("disk", "shm")}
"""The store and the kind of pipe of each tier."""
_COPY_BYTES = 512 << 20
"""What the bare copy copies from: more than caches hold."""
_WIPED = 0xA5


class Client:
    """What a client can be ordered to do. It has an event loop that runs while an order does."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._opened: _Opened | None = None

    def orders(self) -> Mapping[str, Order]:
        """Return it by name."""
        return {
            "open": self._open,
            "fill": self._fill,
            "turn": self._turn,
            "verify": self._verify,
            "close": self._end,
        }

    def close(self) -> None:
        """Close what is open."""
        self._end()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _open(self, spec: OpenSpec) -> None:
        self._end()
        self._opened = _Opened(spec)

    def _fill(self, what: str, clients: Annotated[int, msgspec.Meta(ge=1)]) -> None:
        self._loop.run_until_complete(self._the_opened().fill(what, clients))

    def _turn(self, turn: TurnSpec) -> TurnResult:
        return self._loop.run_until_complete(self._the_opened().turn(turn))

    def _verify(self, turn: TurnSpec) -> VerifyResult:
        return self._loop.run_until_complete(self._the_opened().verify(turn))

    def _end(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            self._loop.run_until_complete(opened.close())

    def _the_opened(self) -> _Opened:
        if self._opened is None:
            raise InvalidRequestError("no client is open", field="do")
        return self._opened


class _Opened:
    """A client with its pool: the first half of its blocks is loaded into, the second half is put."""

    def __init__(self, spec: OpenSpec) -> None:
        self._spec = spec
        self._fingerprint = spec.plan.shape.fingerprint()
        self._size = self._fingerprint.block_bytes
        self._pattern = Pattern(self._size)
        self._arena = HostArena(2 * spec.plan.blocks, self._size)
        self._arena.touch()
        self._loaded, self._source = self._arena.blocks[: spec.plan.blocks], self._arena.blocks[spec.plan.blocks :]
        self._pattern.fill(chain_names(spec.seed, -1 - spec.index, spec.plan.blocks), self._source)
        self._names = [chain_names(spec.seed, chain, spec.plan.blocks) for chain in range(spec.plan.chains)]
        self._nowhere = [chain_names(spec.seed, -1_000_000 - i, spec.plan.blocks) for i in range(4)]
        self._methods: dict[tuple[str, str], Once] = {}
        self._stack = contextlib.ExitStack()
        self._pipes: dict[tuple[str, str], StorePipe] = {}
        self._turns: dict[tuple[str, str], int] = {}

    async def fill(self, what: str, clients: int) -> None:
        """Put this client's share of the chains where they will be read from."""
        spec = self._spec
        chains = range(spec.index, spec.plan.redis_chains if what == "redis" else spec.plan.chains, clients)
        redis = redis_client(spec.where.redis) if what == "redis" else None
        pipe = self._pipe(what, "shm") if redis is None else None
        for chain in chains:
            self._pattern.fill(self._names[chain], self._source)
            if pipe is not None and await pipe.put(self._names[chain]) != spec.plan.blocks:
                raise ConfigError("the store did not take a chain: it is too small", field="bytes")
            if redis is not None:
                for name, block in zip(self._names[chain], self._source, strict=True):
                    redis.set(name, memoryview(block))
        if redis is not None:
            redis.close()
        self._pattern.fill(chain_names(spec.seed, -1 - spec.index, spec.plan.blocks), self._source)

    async def turn(self, spec: TurnSpec) -> TurnResult:
        """Make requests one after the other until the time is up."""
        once = self._method(spec)
        done = self._turns.get((spec.method, spec.op), 0)
        samples: list[float] = []
        hits = blocks = 0
        cpu = time.process_time()
        await asyncio.sleep(max(0.0, spec.start - time.monotonic()))
        start = now = time.monotonic()
        while len(samples) < MAX_SAMPLES and (not samples or now < spec.start + spec.seconds):
            hit = (done + 1) * spec.hit_percent // 100 > done * spec.hit_percent // 100
            names = self._chain_at(spec, hits) if hit else self._nowhere[done % len(self._nowhere)]
            began = time.perf_counter()
            blocks += await once(names, done)
            samples.append(round(time.perf_counter() - began, 7))
            hits += hit
            done += 1
            now = time.monotonic()
        self._turns[spec.method, spec.op] = done
        cpu = time.process_time() - cpu
        await self._settle()
        return TurnResult(start, now, blocks, hits, cpu, samples)

    async def verify(self, spec: TurnSpec) -> VerifyResult:
        """Compare every byte of this client's chains, loaded anew, or of a chain that it puts."""
        wrong = checked = 0
        if spec.op == "put" and spec.method in _STORES:
            pipe = self._store_pipe(spec.method, spec.op)
            self._loaded[:] = _WIPED
            await pipe.put_new(self._names[0])
            checked = await pipe.get(pipe.last)
            wrong = sum(bool((self._loaded[i] != self._source[i]).any()) for i in range(checked))
        else:
            once = self._method(spec)
            for names in self._names[self._spec.index : self._among(spec) : spec.clients]:
                self._loaded[:] = _WIPED
                came = await once(names, 0)
                checked += came
                wrong += self._pattern.wrong(names[:came], self._loaded[:came])
        await self._settle()
        return VerifyResult(wrong, checked)

    async def close(self) -> None:
        """Close everything."""
        self._stack.close()
        for pipe in self._pipes.values():
            await pipe.close()
        self._arena.close()

    async def _settle(self) -> None:
        for pipe in self._pipes.values():
            await pipe.settle()

    def _chain_at(self, spec: TurnSpec, hits: int) -> list[BlockHash]:
        """Return the chain to ask for after so many: clients take turns."""
        return self._names[(spec.first + self._spec.index + hits * spec.clients) % self._among(spec)]

    def _among(self, spec: TurnSpec) -> int:
        return self._spec.plan.redis_chains if spec.method.startswith("redis") else self._spec.plan.chains

    def _pipe(self, store: str, kind: str) -> StorePipe:
        key = (store, kind)
        if key not in self._pipes:
            address = str(getattr(self._spec.where, store))
            name = f"client-{self._spec.index}-{store}-{kind}"
            self._pipes[key] = StorePipe(address, self._arena, self._fingerprint, kind, name)
        return self._pipes[key]

    def _store_pipe(self, method: str, op: str) -> StorePipe:
        store, kind = _STORES[method]
        return self._pipe(f"{store}_put" if op == "put" else store, kind)

    def _method(self, spec: TurnSpec) -> Once:
        key = (spec.method, spec.op)
        if key not in self._methods:
            self._methods[key] = self._make(*key)
        return self._methods[key]

    def _make(self, method: str, op: str) -> Once:
        where, stack = self._spec.where, self._stack
        if method in _STORES:
            pipe = self._store_pipe(method, op)
            return {"get": pipe.get, "put": pipe.put_new, "contains": pipe.contains}[op]
        if method == "redis":
            if op == "put":
                return redis_set(stack, where.redis, self._source)
            return redis_pipeline(stack, where.redis, "exists" if op == "contains" else "get")
        makers: dict[str, Callable[[], Once]] = {
            "memcpy": lambda: memcpy(stack, self._arena, _COPY_BYTES),
            "plain": lambda: plain_reads(stack, Path(where.disk_path), self._loaded, self._spec.readers),
            "dd": lambda: dd(Path(where.disk_path), self._size),
            "redis-mget": lambda: redis_mget(stack, where.redis),
            "redis-bare": lambda: bare_get(stack, where.redis, self._loaded),
        }
        if method not in makers:
            raise InvalidRequestError("no such method", field="method")
        return makers[method]()


if __name__ == "__main__":
    sys.exit(serve_agent(lambda host, token, line: Client()))
