"""A client in a process of its own: ``python -m baton_kvstore.bench.client --fd N``. The driver tells it what to do."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.bench.kv.agent import serve_agent
from baton.bench.kv.control import Fields, Handler, from_fields
from baton.errors import ConfigError, InvalidRequestError
from baton.kv_cache.arena import HostArena
from baton.types import BlockHash
from baton_kvstore.bench.methods import (
    BareGet,
    Contains,
    Dd,
    Get,
    Memcpy,
    Method,
    PlainRead,
    Put,
    RedisGet,
    RedisMget,
    RedisSet,
    StorePipe,
    connect,
)
from baton_kvstore.bench.plan import MAX_SAMPLES, OpenSpec, Pattern, TurnSpec, chain_names

_COPY_BYTES = 512 << 20
"""What the bare copy copies from: more than caches hold."""
_WIPED = 0xA5


class Client:
    """What a client can be ordered to do. It has an event loop that runs while an order does."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._opened: _Opened | None = None

    def handlers(self) -> Mapping[str, Handler]:
        """Return the orders by name."""
        return {
            "open": self._open,
            "fill": lambda order: self._run(self._the_opened().fill(str(order.get("what")), _count(order))),
            "turn": lambda order: self._run(self._the_opened().turn(from_fields(TurnSpec, order.get("turn")))),
            "verify": lambda order: self._run(self._the_opened().verify(from_fields(TurnSpec, order.get("turn")))),
            "close": self._close,
        }

    def close(self) -> None:
        """Close what is open."""
        self._close({})
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Fields]) -> Fields:
        return self._loop.run_until_complete(work)

    def _open(self, order: Fields) -> Fields:
        self._close({})
        self._opened = _Opened(from_fields(OpenSpec, order.get("spec")))
        return {}

    def _close(self, _: Fields) -> Fields:
        opened, self._opened = self._opened, None
        if opened is not None:
            self._loop.run_until_complete(opened.close())
        return {}

    def _the_opened(self) -> _Opened:
        if self._opened is None:
            raise InvalidRequestError("no client is open", field="do")
        return self._opened


class _Opened:
    """A client with its pool: the first half of its blocks is loaded into, the second half is put."""

    def __init__(self, spec: OpenSpec) -> None:
        self._spec = spec
        self._fingerprint = spec.shape.fingerprint()
        self._size = self._fingerprint.block_bytes
        self._pattern = Pattern(self._size)
        self._arena = HostArena(2 * spec.blocks, self._size)
        self._arena.touch()
        self._loaded, self._source = self._arena.blocks[: spec.blocks], self._arena.blocks[spec.blocks :]
        self._pattern.fill(chain_names(spec.seed, -1 - spec.index, spec.blocks), self._source)
        self._names = [chain_names(spec.seed, chain, spec.blocks) for chain in range(spec.chains)]
        self._nowhere = [chain_names(spec.seed, -1_000_000 - i, spec.blocks) for i in range(4)]
        self._methods: dict[tuple[str, str], Method] = {}
        self._pipes: dict[tuple[str, str], StorePipe] = {}
        self._turns: dict[tuple[str, str], int] = {}

    async def fill(self, what: str, clients: int) -> Fields:
        """Put this client's share of the chains where they will be read from."""
        spec = self._spec
        chains = range(spec.index, spec.redis_chains if what == "redis" else spec.chains, clients)
        redis = connect(spec.where.redis) if what == "redis" else None
        pipe = self._pipe(what, "shm") if redis is None else None
        for chain in chains:
            self._pattern.fill(self._names[chain], self._source)
            if pipe is not None and await pipe.save(self._names[chain]) != spec.blocks:
                raise ConfigError("the store did not take a chain: it is too small", field="bytes")
            if redis is not None:
                for name, block in zip(self._names[chain], self._source, strict=True):
                    redis.set(name, memoryview(block))
        if redis is not None:
            redis.close()
        self._pattern.fill(chain_names(spec.seed, -1 - spec.index, spec.blocks), self._source)
        return {}

    async def turn(self, spec: TurnSpec) -> Fields:
        """Make requests one after the other until the time is up."""
        method = self._method(spec)
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
            blocks += await method.once(names, done)
            samples.append(round(time.perf_counter() - began, 7))
            hits += hit
            done += 1
            now = time.monotonic()
        self._turns[spec.method, spec.op] = done
        cpu = time.process_time() - cpu
        await self._settle()
        return {"start": start, "end": now, "blocks": blocks, "hits": hits, "cpu": cpu, "seconds": samples}

    async def verify(self, spec: TurnSpec) -> Fields:
        """Compare every byte of this client's chains, loaded anew, or of a chain that it puts."""
        wrong = checked = 0
        method = self._method(spec)
        if isinstance(method, Put):
            self._loaded[:] = _WIPED
            await method.once(self._names[0], 0)
            came = await method.pipe.load(method.last)
            checked += came
            wrong += sum(bool((self._loaded[i] != self._source[i]).any()) for i in range(came))
        else:
            for names in self._names[self._spec.index : self._among(spec) : spec.clients]:
                self._loaded[:] = _WIPED
                came = await method.once(names, 0)
                checked += came
                wrong += self._pattern.wrong(names[:came], self._loaded[:came])
        await self._settle()
        return {"wrong": wrong, "checked": checked}

    async def close(self) -> None:
        """Close everything."""
        for method in self._methods.values():
            await method.close()
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
        return self._spec.redis_chains if spec.method.startswith("redis") else self._spec.chains

    def _pipe(self, store: str, kind: str) -> StorePipe:
        key = (store, kind)
        if key not in self._pipes:
            address = str(getattr(self._spec.where, store))
            name = f"client-{self._spec.index}-{store}-{kind}"
            self._pipes[key] = StorePipe(address, self._arena, self._fingerprint, kind, name)
        return self._pipes[key]

    def _method(self, spec: TurnSpec) -> Method:
        key = (spec.method, spec.op)
        if key not in self._methods:
            self._methods[key] = self._make(*key)
        return self._methods[key]

    def _make(self, method: str, op: str) -> Method:
        where = self._spec.where
        if method in ("shm", "tcp", "disk"):
            store, kind = ("disk", "shm") if method == "disk" else ("dram", method)
            if op == "contains":
                return Contains(self._pipe(store, kind))
            return Get(self._pipe(store, kind)) if op == "get" else Put(self._pipe(f"{store}_put", kind))
        if method == "memcpy":
            return Memcpy(self._arena, _COPY_BYTES)
        if method == "plain":
            return PlainRead(Path(where.disk_path), self._loaded, self._spec.readers)
        if method == "dd":
            return Dd(Path(where.disk_path), self._size)
        if method == "redis":
            return (
                RedisSet(where.redis, self._source) if op == "put" else RedisGet(where.redis, exists=op == "contains")
            )
        if method == "redis-mget":
            return RedisMget(where.redis)
        if method == "redis-bare":
            return BareGet(where.redis, self._loaded)
        raise InvalidRequestError("no such method", field="method")


def _count(order: Fields) -> int:
    count = order.get("clients")
    if type(count) is not int or count < 1:
        raise InvalidRequestError("clients must be a number above 0", field="clients")
    return count


def main(argv: Sequence[str] | None = None) -> int:
    """Be a client; returns the exit status."""
    return serve_agent(argv, lambda host, token, line: Client())


if __name__ == "__main__":
    sys.exit(main())
