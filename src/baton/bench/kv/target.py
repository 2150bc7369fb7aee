"""The side that reads: an arena, and every method that fills it, one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from baton.bench.kv.messages import MAX_MESSAGE_BYTES, MAX_STEPS, Schedule, ask_schedule, next_step, round_trips, timed
from baton.bench.kv.methods import Flow, MemcpyMethod, Method, PipeMethod, SocketMethod
from baton.bench.kv.pattern import WIPED, shard_patterns, source_tokens
from baton.bench.kv.source import require_memory
from baton.bench.kv.specs import OverlapSpec, RunSpec, TargetSpec, chosen
from baton.errors import InvalidRequestError
from baton.kv_transfer.pipes.messages import MessagePipe, TcpMessagePipe

CONNECT_S = 20.0
_OWNER = 1 << 20
"""Targets draw their blocks with numbers from here on, sources with their own below."""


class Target:
    """An open target.

    Args:
        spec: What to open.
        token: Shared token.

    Raises:
        ConfigError: Not enough memory.
    """

    def __init__(self, spec: TargetSpec, token: str | None) -> None:
        self._spec, self._token = spec, token
        total = spec.num_blocks * len(spec.sources)
        require_memory(spec.shape.memory(total))
        self._shards = spec.shape.new_shards(total)
        self._shards.touch()
        self._patterns = shard_patterns(spec.seed, spec.shape, spec.sources[0].shape.dtype)
        self._methods: dict[tuple[str, int], Method] = {}
        self._progress = 0

    def run(self, spec: RunSpec) -> Mapping[str, object]:
        """Run a method once.

        Returns:
            ``start`` and ``end`` (``time.monotonic`` seconds), ``bytes``, ``cpu`` (seconds of this process), and
            ``wrong`` if it was to be verified: how many blocks were not what they should be.

        Raises:
            BatonError: The method does not work here, or failed.
        """
        flows = self._flows(spec)
        method = self._method(spec)
        if spec.wipe:
            self._wipe()
        cpu, start = time.process_time(), time.monotonic()
        num_bytes = method.run(flows)
        end, cpu = time.monotonic(), time.process_time() - cpu
        answer: dict[str, object] = {"start": start, "end": end, "bytes": num_bytes, "cpu": cpu}
        if spec.verify:
            answer["wrong"] = self._wrong(flows)
        return answer

    def reads(self, kind: str, count: int, limit_s: float) -> list[float]:
        """Read single blocks of the first source over a pipe, one after the other; returns the seconds of each.

        Raises:
            InvalidRequestError: ``kind`` is no pipe.
        """
        method = self._method(RunSpec(kind, 1, 1, False))
        if not isinstance(method, PipeMethod):
            raise InvalidRequestError(f"{kind} is no pipe", field="method")
        order = np.random.default_rng(self._spec.seed).integers(0, self._spec.num_blocks, count).tolist()
        with contextlib.closing(method.open_pipe(0)) as pipe:
            calls = itertools.cycle([method.read_one(pipe, block) for block in order])
            next(calls)()
            return timed(lambda: next(calls)(), count, limit_s)

    def fetches(self, kind: str, count: int, limit_s: float) -> list[float]:
        """Get single blocks of the first source as a connector does, one after the other; the seconds of each."""
        spec = RunSpec(kind, 1, 1, False)
        method = self._method(spec)
        num = self._spec.num_blocks
        order = iter(np.random.default_rng(self._spec.seed).integers(0, num, count + 1).tolist())

        def once() -> None:
            block = np.array([next(order)], dtype=np.int64)
            method.run([Flow(0, block, block)])

        once()
        return timed(once, count, limit_s)

    def round_trips(self, size: int, count: int, limit_s: float) -> list[float]:
        """Send messages of ``size`` bytes to the first source and back; returns the seconds of each round trip."""
        with self._messages() as pipe:
            round_trips(pipe, size, max(1, count // 10), limit_s / 4)
            return round_trips(pipe, size, count, limit_s)

    def overlap(self, spec: OverlapSpec) -> Mapping[str, object]:
        """Move a sequence from the first source while that simulates computing it.

        Returns:
            ``exposed``: seconds from the end of the computation to the end of the transfer; ``compute`` (seconds),
            ``steps``, and ``wrong`` if it was to be verified.

        Raises:
            BatonError: The pipe does not work here, or failed.
        """
        method = self._method(spec.run)
        if not isinstance(method, PipeMethod):
            raise InvalidRequestError(f"{spec.run.method} is no pipe", field="method")
        flow = self._flows(spec.run)[0]
        if spec.run.wipe:
            self._wipe()
        with self._messages() as pipe:
            study = Study(spec, len(self._spec.shape.layers), len(flow.remote), self._progress)
            self._progress = study.last_progress
            exposed = study.run(pipe, lambda part, ready: method.fetch_part(flow, part, ready))
        answer: dict[str, object] = {"exposed": exposed, "compute": spec.compute_s, "steps": study.steps}
        if spec.run.verify:
            answer["wrong"] = self._wrong([flow])
        return answer

    def close(self) -> None:
        """Close everything."""
        for method in self._methods.values():
            method.close()
        self._shards.close()

    def _messages(self) -> TcpMessagePipe:
        """Connect to the first source's message service."""
        return TcpMessagePipe.connect(
            self._spec.sources[0].messages,
            deadline=time.monotonic() + CONNECT_S,
            token=self._token,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )

    def _wipe(self) -> None:
        for arena in self._shards.arenas:
            arena.blocks[:] = WIPED

    def _wrong(self, flows: list[Flow]) -> int:
        """Count the blocks that are not what their source holds."""
        count = 0
        for flow in flows:
            source = self._spec.sources[flow.source]
            tokens = source_tokens(source.shape, flow.remote)
            for pattern, arena in zip(self._patterns, self._shards.arenas, strict=True):
                count += len(pattern.wrong(arena.blocks, flow.local, source.index, tokens))
        return count

    def _flows(self, spec: RunSpec) -> list[Flow]:
        num, seed, shape = self._spec.num_blocks, self._spec.seed, self._spec.shape
        flows: list[Flow] = []
        for place, source in enumerate(self._spec.sources):
            remote = chosen(spec, source.num_blocks, seed, source.index)
            here = dataclasses.replace(spec, blocks=shape.num_blocks(len(remote) * source.shape.block_size))
            flows.append(Flow(place, remote, chosen(here, num, seed, _OWNER + self._spec.index) + place * num))
        return flows

    def _method(self, spec: RunSpec) -> Method:
        key = (spec.method, spec.streams)
        if key not in self._methods:
            self._methods[key] = self._make(spec)
        return self._methods[key]

    def _make(self, spec: RunSpec) -> Method:
        if spec.method in ("memcpy", "memcpy-blocks"):
            require_memory(sum(arena.blocks.nbytes for arena in self._shards.arenas))
            return MemcpyMethod(self._shards, self._spec.shape, each_block=spec.method == "memcpy-blocks")
        if spec.method == "socket":
            return SocketMethod(self._shards.primary, self._spec.sources, spec.streams, self._token)
        return PipeMethod(self._shards, self._spec, spec.method, spec.streams, self._token)


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
        num_layers: Of the model.
        num_blocks: Source blocks of the sequence.
        progress: The source's progress now.

    Attributes:
        steps: Layers computed, over all chunks.
        last_progress: The source's progress afterwards.

    Raises:
        InvalidRequestError: Too many steps.
    """

    def __init__(self, spec: OverlapSpec, num_layers: int, num_blocks: int, progress: int) -> None:
        self._spec, self._layers, self._progress = spec, num_layers, progress
        edges = range(0, num_blocks, spec.chunk_blocks)
        self._chunks = [range(at, min(at + spec.chunk_blocks, num_blocks)) for at in edges]
        self.steps = len(self._chunks) * num_layers
        self.last_progress = progress + self.steps
        if self.steps >= MAX_STEPS:
            raise InvalidRequestError(f"{self.steps} steps are too many: take a bigger --chunk", field="chunk")
        self._per_block = spec.compute_s / num_blocks

    def schedule(self) -> Schedule:
        """Return what the source does: first the begin of the first chunk, then the end of every layer."""
        rows, start = [(0, self._progress, 1)], 0.0
        for number, chunk in enumerate(self._chunks):
            each = len(chunk) * self._per_block / self._layers
            for layer in range(1, self._layers + 1):
                after = round((start + layer * each) * 1e9)
                rows.append((after, self._progress + number * self._layers + layer, int(layer == self._layers)))
            start += each * self._layers
        return np.array(rows, dtype=np.int64)

    def run(self, pipe: MessagePipe, fetch: Fetch) -> float:
        """Run it; returns the exposed seconds."""
        deadline = time.monotonic() + self._spec.compute_s + _PATIENCE_S
        begin = time.monotonic()
        ask_schedule(pipe, self.schedule())
        next_step(pipe, deadline=deadline)  # the first chunk begins
        # As a decode instance does: a chunk's fetch begins when it is offered, whether or not those before have ended.
        with ThreadPoolExecutor(_FETCHES, "baton-bench-fetch") as pool:
            fetches: list[Future[int]] = []
            for number, chunk in enumerate(self._chunks):
                if self._spec.mode == "layer-wise":
                    fetches.append(pool.submit(fetch, chunk, self._progress + number * self._layers))
                next_step(pipe, deadline=deadline)  # the chunk is there
                if self._spec.mode == "chunked":
                    fetches.append(pool.submit(fetch, chunk, None))
            if self._spec.mode == "serial":
                fetch(range(self._chunks[0].start, self._chunks[-1].stop), None)
            for each in fetches:
                each.result()
        return time.monotonic() - begin - self._spec.compute_s
