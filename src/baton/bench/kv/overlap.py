"""Transfer under simulated compute: how much of it is seen when it begins after, chunk by chunk, or layer by layer.

The source follows a schedule: chunk after chunk, and in each layer after layer, it raises its arena's progress, and it
tells when a chunk begins (which is when the one before it has ended), as a prefill instance's offers do. The target
fetches when and what its mode allows. What is exposed is the time from the last layer's end to the last block's
arrival.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from baton.bench.kv.messages import MAX_STEPS, Schedule, ask_schedule, next_step
from baton.bench.kv.specs import OverlapSpec
from baton.errors import InvalidRequestError
from baton.kv_transfer.pipes.messages import MessagePipe

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
