"""An engine of a toy model that notes each launch and read, and watches the blocks that a step on its way writes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tests.support.models.toy_runner import ToyRunner

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.device import ComputeDevice, HostStaging
from baton.engine.request import EngineRequest, SequenceOutput
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput
from baton.engine.scheduler import StepPlan
from baton.kv_cache.events import BlocksRemoved, BlocksStored, KVEvent
from baton.types import BlockHash, BlockId, FinishReason, RequestId, SamplingParams

BLOCK, VOCAB = 4, 64
PROMPT = [5, 9, 14, 33, 21, 7, 50, 3, 18, 42, 11]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
INTERPRETED = ComputeDevice(torch.device("cpu"), on_gpu=True)


class NotedStaging(HostStaging):
    """Notes when a step's tokens are read; the n-th read may fail."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(INTERPRETED)
        self._log, self._count = log, 0
        self.failures: dict[int, Exception] = {}

    def download(self, *tensors: torch.Tensor) -> Callable[[], list[Any]]:
        """Queue copies."""
        read, self._count = super().download(*tensors), self._count + 1
        number = self._count

        def noted() -> list[Any]:
            self._log.append(f"read {number}")
            if number in self.failures:
                raise self.failures[number]
            return read()

        return noted


class NotedRunner(ToyRunner):
    """Notes each step, and into which blocks it writes.

    Attributes:
        failures: What the n-th step fails with.
    """

    def __init__(self, *, on_device: bool = False) -> None:
        super().__init__(block_size=BLOCK, vocab_size=VOCAB)
        self.log: list[str] = []
        self.launches = 0
        self.writing: set[int] = set()
        self.failures: dict[int, Exception] = {}
        self.staging = NotedStaging(self.log) if on_device else None

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run a step."""
        self.launches += 1
        self.log.append(f"launch {self.launches}")
        rows = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
        self.writing = set(batch.block_tables[rows, batch.positions // BLOCK].tolist())
        if self.launches in self.failures:
            raise self.failures[self.launches]
        return replace(super().forward(batch), staging=self.staging)


@dataclass
class Answer:
    """What one sequence was given."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float, int]] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: int | None = None
    error: str | None = None


class Engine:
    """An engine, and all it has said; watches that no block is given away that a step on its way writes to."""

    def __init__(self, way: str, num_blocks: int = 64, *, on_device: bool = False, **options: Any) -> None:
        values = {"block_size": BLOCK, "prefill_chunk": 8, "max_num_batched_tokens": 24, "max_num_seqs": 4, **options}
        connector = values.pop("connector", None)
        self.runner = NotedRunner(on_device=on_device)
        self.events: list[KVEvent] = []
        self.answers: dict[tuple[str, int], Answer] = {}
        arena = self.runner.make_arena(num_blocks)
        config = EngineConfig(async_scheduling=way, **values)
        self.core = EngineCore(config, self.runner, arena, connector, on_events=self.events.extend)
        self._plan_ahead, self._allocate = self.core._scheduler.schedule_ahead, self.core._pool.allocate
        self._ahead = False
        self.core._scheduler.schedule_ahead = self._noted_plan  # type: ignore[method-assign]
        self.core._pool.allocate = self._checked_blocks  # type: ignore[method-assign]

    def _noted_plan(self) -> StepPlan:
        self._ahead = True
        try:
            return self._plan_ahead()
        finally:
            self._ahead = False

    def _checked_blocks(self, count: int) -> list[BlockId] | None:
        blocks = self._allocate(count)
        assert not self._ahead or self.runner.writing.isdisjoint(blocks or ())
        return blocks

    def add(self, name: str, prompt: list[int] = PROMPT, sampling: SamplingParams = GREEDY, **fields: Any) -> None:
        self.core.add_request(EngineRequest(RequestId(name), prompt, sampling, **fields))

    def step(self) -> list[SequenceOutput]:
        outputs = self.core.step()
        for output in outputs:
            answer = self.answers.setdefault((output.request_id, output.index), Answer())
            assert answer.finish is None
            answer.tokens += output.token_ids
            answer.logprobs += [(each.token_id, each.logprob, each.rank) for each in output.logprobs or ()]
            answer.finish, answer.stop, answer.error = output.finish_reason, output.stop_token_id, output.error
        self.core.check_integrity()
        return outputs

    def run(self) -> None:
        for _ in range(3000):
            if not self.core.has_work():
                assert self.core.stats().blocks_active == 0
                assert not self.core._bridge.deferred_blocks
                return
            self.step()
        raise AssertionError("no end in sight")

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return self.answers[name, index].tokens

    def told(self) -> set[BlockHash]:
        """What the events say is in the prefix cache."""
        told: set[BlockHash] = set()
        for event in self.events:
            if isinstance(event, BlocksStored):
                told |= set(event.hashes)
            elif isinstance(event, BlocksRemoved):
                told -= set(event.hashes)
        return told


def both(*, on_device: bool = False, **options: Any) -> list[Engine]:
    return [Engine(way, on_device=on_device and way == "on", **options) for way in ("off", "on")]
