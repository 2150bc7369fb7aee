"""The agent of ``baton bench kv``: a process that holds a source or a target. ``python -m baton_bench.kv.agent``."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated

import msgspec
import numpy as np

from baton.errors import BatonError, InvalidRequestError
from baton.kv_cache.arena import Arena, HostArena
from baton.kv_transfer.blocks import BlockServer
from baton.rpc.service_token import Token
from baton.types import InstanceId
from baton_bench.agents import Fields, Order, serve_agent
from baton_bench.kv.memory import WIPED, blocks_of, fill, new_shards, shard_patterns, source_tokens, wipe
from baton_bench.kv.methods import (
    MAX_STEPS,
    BareServer,
    DeviceCopyMethod,
    Flow,
    MemcpyMethod,
    MessageServer,
    MessageStream,
    Method,
    PipeMethod,
    Schedule,
    SocketMethod,
    recv_step,
    round_trips,
    send_schedule,
    timed,
)
from baton_bench.kv.plan import (
    HOST,
    OverlapResult,
    OverlapSpec,
    RunResult,
    RunSpec,
    SourceFacts,
    SourceSpec,
    TargetSpec,
    chosen,
    sequence_numbers,
)
from baton_bench.report import machine_facts, require_memory

_OWNER = 1 << 20
"""Targets draw their blocks with numbers from here on, sources with their own below."""
Count = Annotated[int, msgspec.Meta(ge=1, le=20_000)]
Limit = Annotated[float, msgspec.Meta(gt=0, lt=60)]
"""Longest time (seconds) of a series of samples."""
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class Agent:
    """Carries out the orders of a ``baton bench kv`` driver.

    Args:
        host: Address that sources bind to.
        token: Shared token.
    """

    def __init__(self, host: str, token: Token | None) -> None:
        self._host = host
        self._token = token
        self._source: Source | None = None
        self._target: Target | None = None

    def orders(self) -> Mapping[str, Order]:
        return {
            "hello": machine_facts,
            "open_source": self.open_source,
            "open_target": self._open_target,
            "run": self._of_target(Target.run),
            "overlap": self._of_target(Target.overlap),
            "reads": self._of_target(Target.reads),
            "fetches": self._of_target(Target.fetches),
            "round_trips": self._of_target(Target.round_trips),
            "cpu": lambda: {"cpu": time.process_time()},
            "close": self.close,
        }

    def close(self) -> None:
        target = self._target
        self._target = None
        source = self._source
        self._source = None
        for part in (target, source):
            if part is not None:
                part.close()
        # Memory of a device goes with the last tensor over it: now, since the next stage will want as much.
        del target, source, part
        gc.collect()

    def open_source(self, source: SourceSpec) -> Fields:
        """Open a source; returns what targets need to know."""
        self.close()
        self._source = Source(source, self._host, self._token)
        return {"facts": self._source.facts()}

    def _open_target(self, target: TargetSpec) -> None:
        self.close()
        self._target = Target(target, self._token)

    def _of_target(self, method: Order) -> Order:
        @functools.wraps(method)  # an order's fields are those of the method
        def order(**fields: object) -> object:
            if self._target is None:
                raise InvalidRequestError("no target is open", field="do")
            return method(self._target, **fields)

        return order


class Source:
    """An open source: arenas full of the pattern behind one block server per kind of pipe.

    Args:
        spec: Blocks and pipes to open.
        host: Address that its sockets bind to.
        token: Shared token.

    Raises:
        ConfigError: Not enough memory.
    """

    def __init__(self, spec: SourceSpec, host: str, token: Token | None) -> None:
        self._spec = spec
        require_memory(spec.shape.memory(spec.num_blocks))
        self.shards = new_shards(spec.shape, spec.memory, spec.num_blocks)
        self._servers: list[BlockServer] = []
        self._refused: list[tuple[str, str]] = []
        self.shards.primary.generations[:] = sequence_numbers(spec.num_blocks)
        for arena, pattern in zip(self.shards.arenas, shard_patterns(spec.seed, spec.shape), strict=True):
            fill(arena, lambda rows, first, pattern=pattern: pattern.fill(rows, spec.index, first))  # type: ignore[misc]
        self._bare = BareServer(_on_host(self.shards.primary).blocks.reshape(-1), host, token)
        for kind in spec.kinds:
            name = InstanceId(f"source-{spec.index}-{kind}")
            about = (self.shards, spec.shape.fingerprint(), name)
            try:
                self._servers.append(BlockServer(*about, kinds=(kind,), host=host, token=token))
            except BatonError as error:
                self._refused.append((kind, error.message))
        self._messages = MessageServer(host, token, self.shards.primary.progress.advance)

    def facts(self) -> SourceFacts:
        """Return what targets need to know."""
        return SourceFacts(
            index=self._spec.index,
            epoch=self.shards.primary.epoch.hex(),
            num_blocks=self._spec.num_blocks,
            shape=self._spec.shape,
            endpoints=tuple((end.kind, end.address) for server in self._servers for end in server.endpoints),
            messages=self._messages.address,
            bare=self._bare.address,
            refused=tuple(self._refused),
        )

    def close(self) -> None:
        self._messages.close()
        for server in self._servers:
            server.close()
        self._bare.close()
        self.shards.close()


class Target:
    """An open target: an arena, and every method that fills it, one after the other. Its public methods are orders.

    Args:
        spec: Blocks to open, and the sources to read.
        token: Shared token.

    Raises:
        ConfigError: Not enough memory.
    """

    def __init__(self, spec: TargetSpec, token: Token | None) -> None:
        self._spec = spec
        self._token = token
        total = spec.num_blocks * len(spec.sources)
        require_memory(spec.shape.memory(total))
        self._shards = new_shards(spec.shape, spec.memory, total)
        self._shards.touch()
        self._patterns = shard_patterns(spec.seed, spec.shape, spec.sources[0].shape.dtype)
        self._methods: dict[tuple[str, int], Method] = {}
        self._progress = 0

    def run(self, run: RunSpec) -> RunResult:
        """Run a method once.

        Raises:
            BatonError: The method does not work here, or failed.
        """
        flows = self._flows(run)
        method = self._method(run.method, run.streams)
        if run.wipe:
            self._wipe()
        cpu = time.process_time()
        start = time.monotonic()
        num_bytes = method.run(flows)
        end = time.monotonic()
        cpu = time.process_time() - cpu
        return RunResult(start, end, num_bytes, cpu, self._wrong(flows) if run.verify else None)

    def reads(self, kind: str, count: Count, limit_s: Limit) -> Fields:
        """Read single blocks of the first source over a pipe, one after the other; returns the seconds of each.

        Raises:
            InvalidRequestError: ``kind`` is no pipe, or the target is in device memory.
        """
        method = self._pipe_method(kind, 1)
        if self._spec.memory != HOST:
            raise InvalidRequestError("single reads go to host memory", field="kind")
        with contextlib.closing(method.open_pipe(0)) as pipe:
            calls = itertools.cycle([method.read_one(pipe, block) for block in self._single_blocks(count)])
            next(calls)()
            return {"seconds": timed(lambda: next(calls)(), count, limit_s)}

    def fetches(self, kind: str, count: Count, limit_s: Limit) -> Fields:
        """Get single blocks of the first source as a connector does, one after the other; the seconds of each."""
        method = self._method(kind, 1)
        order = iter(self._single_blocks(count + 1))

        def once() -> None:
            block = np.array([next(order)], dtype=np.int64)
            method.run([Flow(0, block, block)])

        once()
        return {"seconds": timed(once, count, limit_s)}

    def round_trips(self, size: Size, count: Count, limit_s: Limit) -> Fields:
        """Send messages of ``size`` bytes to the first source and back; returns the seconds of each round trip."""
        with self._connect_messages() as messages:
            round_trips(messages, size, max(1, count // 10), limit_s / 4)
            return {"seconds": round_trips(messages, size, count, limit_s)}

    def overlap(self, overlap: OverlapSpec) -> OverlapResult:
        """Move a sequence from the first source while that simulates computing it.

        Raises:
            BatonError: The pipe does not work here, or failed.
        """
        method = self._pipe_method(overlap.run.method, overlap.run.streams)
        flow = self._flows(overlap.run)[0]
        if overlap.run.wipe:
            self._wipe()
        with self._connect_messages() as messages:
            study = Study(overlap, len(self._spec.shape.layers), len(flow.remote), self._progress)
            self._progress = study.last_progress
            exposed = study.run(messages, lambda part, ready: method.fetch_part(flow, part, ready))
        return OverlapResult(exposed, study.steps, self._wrong([flow]) if overlap.run.verify else None)

    def close(self) -> None:
        for method in self._methods.values():
            method.close()
        self._shards.close()

    def _single_blocks(self, count: int) -> list[int]:
        blocks: list[int] = np.random.default_rng(self._spec.seed).integers(0, self._spec.num_blocks, count).tolist()
        return blocks

    def _connect_messages(self) -> MessageStream:
        return MessageStream.connect(self._spec.sources[0].messages, self._token)

    def _wipe(self) -> None:
        for arena in self._shards.arenas:
            wipe(arena, WIPED)

    def _wrong(self, flows: list[Flow]) -> int:
        """Count the blocks that are not what their source holds."""
        count = 0
        for flow in flows:
            source = self._spec.sources[flow.source]
            tokens = source_tokens(source.shape, flow.remote)
            size = self._spec.shape.block_size
            for pattern, arena in zip(self._patterns, self._shards.arenas, strict=True):
                for at, rows, ids in blocks_of(arena, flow.local):
                    some = tokens[at * size : (at + len(ids)) * size]
                    count += len(pattern.wrong(rows, ids, source.index, some))
        return count

    def _flows(self, spec: RunSpec) -> list[Flow]:
        num = self._spec.num_blocks
        seed = self._spec.seed
        shape = self._spec.shape
        flows: list[Flow] = []
        for place, source in enumerate(self._spec.sources):
            remote = chosen(spec, source.num_blocks, seed, source.index)
            here = msgspec.structs.replace(spec, blocks=shape.num_blocks(len(remote) * source.shape.block_size))
            flows.append(Flow(place, remote, chosen(here, num, seed, _OWNER + self._spec.index) + place * num))
        return flows

    def _pipe_method(self, name: str, streams: int) -> PipeMethod:
        method = self._method(name, streams)
        if not isinstance(method, PipeMethod):
            raise InvalidRequestError(f"{name} is no pipe", field="method")
        return method

    def _method(self, name: str, streams: int) -> Method:
        key = (name, streams)
        if key not in self._methods:
            self._methods[key] = self._make(name, streams)
        return self._methods[key]

    def _make(self, name: str, streams: int) -> Method:
        if name in ("memcpy", "memcpy-blocks"):
            require_memory(sum(arena.num_blocks * arena.block_bytes for arena in self._shards.arenas))
            if (self._spec.memory, self._spec.source_memory) != (HOST, HOST):
                return DeviceCopyMethod(self._spec, each_block=name == "memcpy-blocks")
            return MemcpyMethod(self._shards, self._spec.shape, each_block=name == "memcpy-blocks")
        if name == "socket":
            return SocketMethod(_on_host(self._shards.primary), self._spec.sources, streams, self._token)
        return PipeMethod(self._shards, self._spec, name, streams, self._token)


def _on_host(arena: Arena) -> Arena:
    """Return an arena, or one of its size where the host cannot address it: bare sockets read and write that."""
    if arena.mapped:
        return arena
    made = HostArena(arena.num_blocks, arena.block_bytes)
    made.touch()
    return made


Fetch = Callable[[range, int | None], int]
"""Fetches blocks of the sequence, by their places; the number: progress before their first layer, if not there yet.

Called in several threads at once.
"""
_PATIENCE_S = 60.0
_FETCHES = 4
"""Fetches at once, as in an instance."""


class Study:
    """One run.

    Args:
        spec: Mode, chunk and speed.
        num_layers: Number of decoder layers.
        num_blocks: Source blocks of the sequence.
        progress: The source's progress now.

    Attributes:
        steps: Layers computed, over all chunks.
        last_progress: The source's progress afterwards.

    Raises:
        InvalidRequestError: Too many steps.
    """

    def __init__(self, spec: OverlapSpec, num_layers: int, num_blocks: int, progress: int) -> None:
        self._spec = spec
        self._layers = num_layers
        self._progress = progress
        edges = range(0, num_blocks, spec.chunk_blocks)
        self._chunks = [range(at, min(at + spec.chunk_blocks, num_blocks)) for at in edges]
        self.steps = len(self._chunks) * num_layers
        self.last_progress = progress + self.steps
        if self.steps >= MAX_STEPS:
            raise InvalidRequestError(f"{self.steps} steps are too many: take a bigger --chunk", field="chunk")
        self._per_block = spec.compute_s / num_blocks

    def schedule(self) -> Schedule:
        """Return what the source does: first the begin of the first chunk, then the end of every layer."""
        rows = [(0, self._progress, 1)]
        start = 0.0
        for number, chunk in enumerate(self._chunks):
            each = len(chunk) * self._per_block / self._layers
            for layer in range(1, self._layers + 1):
                after = round((start + layer * each) * 1e9)
                rows.append((after, self._progress + number * self._layers + layer, int(layer == self._layers)))
            start += each * self._layers
        return np.array(rows, dtype=np.int64)

    def run(self, messages: MessageStream, fetch: Fetch) -> float:
        """Run it; returns the exposed seconds."""
        deadline = time.monotonic() + self._spec.compute_s + _PATIENCE_S
        begin = time.monotonic()
        send_schedule(messages, self.schedule())
        recv_step(messages, deadline=deadline)  # the first chunk begins
        # As a decode instance does: a chunk's fetch begins when it is offered, whether or not those before have ended.
        with ThreadPoolExecutor(_FETCHES, "baton-bench-fetch") as pool:
            fetches: list[Future[int]] = []
            for number, chunk in enumerate(self._chunks):
                if self._spec.mode == "layer-wise":
                    fetches.append(pool.submit(fetch, chunk, self._progress + number * self._layers))
                recv_step(messages, deadline=deadline)  # the chunk is there
                if self._spec.mode == "chunked":
                    fetches.append(pool.submit(fetch, chunk, None))
            if self._spec.mode == "serial":
                fetch(range(self._chunks[0].start, self._chunks[-1].stop), None)
            for each in fetches:
                each.result()
        return time.monotonic() - begin - self._spec.compute_s


if __name__ == "__main__":
    sys.exit(serve_agent(lambda host, token, _: Agent(host, token)))
