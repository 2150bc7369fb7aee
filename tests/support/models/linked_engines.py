"""Two engines in one process, each with its side of a connector, KV copied from pool to pool as a transport would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.models.toy_runner import ToyRunner

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest, SequenceOutput
from baton.kv_cache.connector import KVConnector, LoadPlan, LoadRequest, LoadUpdate, TransferStats
from baton.types import BlockHash, BlockId, PrefillPath, RequestId, SamplingParams, TokenLogprob

BLOCK = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
PROMPT = [5, 9, 14, 33, 21, 7, 50, 3, 18, 42, 11, 60, 27, 8]


class PrefillSide(KVConnector):
    """Keeps the blocks of finished prompts until they are let go."""

    def __init__(self) -> None:
        self.progress: dict[RequestId, list[tuple[tuple[BlockId, ...], tuple[BlockHash, ...], int]]] = {}
        self.holding: set[RequestId] = set()
        self.let_go: list[RequestId] = []

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        return None

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        raise AssertionError("nothing was planned")

    def cancel_load(self, request_id: RequestId) -> None:
        raise AssertionError("nothing was planned")

    def poll_loads(self) -> list[LoadUpdate]:
        return []

    def blocks_computed(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_tokens: int
    ) -> None:
        assert len(hashes) == num_tokens // BLOCK
        self.progress.setdefault(request_id, []).append((tuple(block_ids), tuple(hashes), num_tokens))

    def request_finished(self, request_id: RequestId) -> bool:
        self.holding.add(request_id)
        return True

    def poll_releases(self) -> list[RequestId]:
        released, self.let_go = self.let_go, []
        self.holding -= set(released)
        return released

    def has_pending(self) -> bool:
        return bool(self.holding)

    def close(self) -> None:
        self.let_go = list(self.holding)


class DecodeSide(KVConnector):
    """Asks an engine to prefill, copies its blocks, reports when told to."""

    def __init__(self, source: Engine, target: Engine, *, threshold: int = 4) -> None:
        self.source, self.target, self.threshold = source, target, threshold
        self.plans: list[tuple[LoadRequest, int]] = []
        self.loads: dict[RequestId, tuple[LoadRequest, int, tuple[BlockId, ...]]] = {}
        self.cancelled: list[RequestId] = []
        self.updates: list[LoadUpdate] = []
        self.plan_error: Exception | None = None
        self.start_error: Exception | None = None

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        if self.plan_error is not None:
            raise self.plan_error
        self.plans.append((request, num_local_tokens))
        if len(request.token_ids) - num_local_tokens < self.threshold:
            return None
        return LoadPlan(len(request.token_ids), with_first_token=True)

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        if self.start_error is not None:
            raise self.start_error
        self.loads[request.request_id] = (request, num_local_tokens, tuple(block_ids))
        at = len(request.token_ids) - request.num_output_tokens
        self.source.core.add_request(
            EngineRequest(
                request.request_id,
                list(request.token_ids[:at]),
                request.sampling,
                output_token_ids=list(request.token_ids[at:]),
                prefill_only=True,
            )
        )

    def finish(self, name: str, *, num_valid: int | None = None, first: bool = True, error: str | None = None) -> None:
        """Run the prefill to its end, copy the blocks that the target lacks, and report."""
        request, num_local, targets = self.loads.pop(RequestId(name))
        self.source.run_until_held()
        sources, _, done = self.source.prefill_side.progress[request.request_id][-1]
        assert done == len(request.token_ids)
        for i in range(num_local // BLOCK, len(targets)):
            self.target.arena.blocks[targets[i]] = self.source.arena.blocks[sources[i]]
        output = self.source.ends[name]
        token = TokenLogprob(output.token_ids[0], 0.0, 1)
        if output.logprobs:
            token = output.logprobs[0]
        self.updates.append(
            LoadUpdate(
                request.request_id,
                len(request.token_ids) if num_valid is None else num_valid,
                first_token=token if first else None,
                stats=TransferStats(path=PrefillPath.REMOTE, source="p0", pipe="memory"),
                error=error,
            )
        )
        self.source.prefill_side.let_go.append(request.request_id)

    def cancel_load(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)

    def poll_loads(self) -> list[LoadUpdate]:
        updates, self.updates = self.updates, []
        return updates

    def blocks_computed(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_tokens: int
    ) -> None:
        raise AssertionError("nothing is fetched from here")

    def request_finished(self, request_id: RequestId) -> bool:
        raise AssertionError("nothing is fetched from here")

    def poll_releases(self) -> list[RequestId]:
        return []

    def has_pending(self) -> bool:
        return bool(self.loads)

    def close(self) -> None:
        self.loads.clear()


class Engine:
    """An engine of either side."""

    def __init__(
        self,
        num_blocks: int = 40,
        source: Engine | None = None,
        side: KVConnector | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.runner = ToyRunner(block_size=BLOCK)
        self.shards = self.runner.make_arena(num_blocks)
        self.arena = self.shards.primary
        self.prefill_side: Any = side or PrefillSide()
        self.decode_side = DecodeSide(source, self) if source is not None else None
        limits: dict[str, Any] = {"prefill_chunk": 8, "max_num_batched_tokens": 24, "max_num_seqs": 8}
        self.core = EngineCore(
            EngineConfig(block_size=BLOCK, **(limits | (options or {}))),
            self.runner,
            self.shards,
            connector=self.decode_side or self.prefill_side,
        )
        self.outputs: list[SequenceOutput] = []

    @property
    def link(self) -> DecodeSide:
        assert self.decode_side is not None
        return self.decode_side

    @property
    def ends(self) -> dict[str, SequenceOutput]:
        return {output.request_id: output for output in self.outputs if output.finish_reason}

    def add(self, name: str, prompt: list[int] = PROMPT, sampling: SamplingParams = GREEDY, **fields: object) -> None:
        self.core.add_request(EngineRequest(RequestId(name), prompt, sampling, **fields))  # type: ignore[arg-type]

    def step(self) -> None:
        self.outputs += self.core.step()

    def run(self) -> None:
        """Run until nothing moves."""
        self.step()
        for _ in range(1000):
            if not self.core.made_progress:
                self.core.check_integrity()
                return
            self.step()
        raise AssertionError("no end in sight")

    def run_until_held(self) -> None:
        self.run()
        assert self.core.stats().num_running == self.core.stats().num_waiting == 0

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == name for token in output.token_ids]

    def assert_empty(self) -> None:
        self.run()
        assert not self.core.has_work()
        assert self.core.stats().blocks_active == 0


def expected(engine: Engine, prompt: list[int] = PROMPT) -> list[int]:
    return engine.runner.greedy(prompt, 10)
