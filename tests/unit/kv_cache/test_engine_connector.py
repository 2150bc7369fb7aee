"""The engine's use of its connector: two engines in one process, KV copied from pool to pool as a transport would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.toy_runner import ToyRunner
from tests.support.preemption import expect_short_outputs

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest, SequenceOutput
from baton.errors import InvalidRequestError
from baton.hashing import block_hashes, root_hash
from baton.kv_cache.connector import KVConnector, LoadPlan, LoadRequest, LoadUpdate, TransferStats
from baton.kv_transfer.connector.multi import MultiConnector
from baton.types import BlockHash, BlockId, FinishReason, PrefillPath, RequestId, SamplingParams, Tenant, TokenLogprob

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


@pytest.fixture
def pair() -> tuple[Engine, Engine]:
    prefill = Engine()
    return prefill, Engine(source=prefill)


def expected(engine: Engine, prompt: list[int] = PROMPT) -> list[int]:
    return engine.runner.greedy(prompt, 10)


def test_tokens_after_a_hand_over_are_those_of_one_engine(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    decode.add("a")
    decode.run()
    assert decode.core.stats().num_loading == 1
    assert decode.core._bridge.pending
    assert not decode.core.made_progress
    decode.link.finish("a")
    decode.run()
    assert decode.tokens("a") == expected(decode)
    assert decode.runner.num_tokens == len(decode.tokens("a")) - 1
    metrics = decode.ends["a"].metrics
    assert metrics is not None
    assert (metrics.transferred_tokens, metrics.computed_tokens, metrics.cached_tokens) == (len(PROMPT), 0, 0)
    assert (metrics.transfer.path, metrics.transfer.pipe) == (PrefillPath.REMOTE, "memory")
    decode.assert_empty()
    prefill.assert_empty()


def test_loaded_blocks_are_found_by_the_next_request(pair: tuple[Engine, Engine]) -> None:
    _, decode = pair
    decode.add("a")
    decode.run()
    decode.link.finish("a")
    decode.run()
    decode.add("b", [*PROMPT, 13, 17, 19, 23])
    decode.run()
    request, num_local = decode.link.plans[-1]
    assert num_local == 12
    assert request.hashes[:3] == decode.link.plans[0][0].hashes
    decode.link.finish("b")
    decode.run()
    assert decode.tokens("b") == expected(decode, [*PROMPT, 13, 17, 19, 23])
    metrics = decode.ends["b"].metrics
    assert metrics is not None
    assert (metrics.cached_tokens, metrics.transferred_tokens, metrics.computed_tokens) == (12, 6, 0)


def test_short_prompts_are_computed_locally(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    decode.add("a", PROMPT[:3])
    decode.run()
    assert decode.tokens("a") == expected(decode, PROMPT[:3])
    assert prefill.runner.num_tokens == 0


@settings(max_examples=40, deadline=None)
@given(num_valid=st.integers(0, len(PROMPT)), first=st.booleans(), warm=st.booleans())
def test_what_did_not_arrive_is_computed(num_valid: int, first: bool, warm: bool) -> None:
    prefill = Engine()
    decode = Engine(source=prefill)
    if warm:
        decode.link.threshold = 1000
        decode.add("warm", PROMPT[:9])
        decode.run()
        decode.link.threshold = 4
    decode.add("a")
    decode.run()
    decode.link.finish("a", num_valid=num_valid, first=first, error="the line is bad")
    blocks = decode.arena.blocks
    start = max(num_valid, 8 if warm else 0)
    # What was not reported as valid may hold anything.
    for block_id in range(len(blocks)):
        held = decode.core._bridge.loading[RequestId("a")].block_ids
        if block_id in held and held.index(block_id) * BLOCK >= start:
            blocks[block_id] = 255
    decode.run()
    assert decode.tokens("a") == expected(decode)
    decode.assert_empty()
    prefill.assert_empty()


def test_first_token_that_ends_the_request(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (token,) = expected(decode)[:1]
    decode.add("a", sampling=GREEDY.replace(stop_token_ids=(token,), logprobs=1))
    decode.add("b", sampling=GREEDY.replace(max_tokens=1))
    decode.run()
    decode.link.finish("a")
    decode.link.finish("b")
    decode.run()
    assert (decode.ends["a"].finish_reason, decode.ends["a"].stop_token_id) == (FinishReason.STOP, token)
    assert decode.ends["a"].logprobs is not None
    assert decode.ends["a"].logprobs[0].token_id == token
    assert decode.ends["b"].finish_reason is FinishReason.LENGTH
    assert decode.ends["b"].logprobs is None
    assert decode.runner.num_tokens == 0
    decode.assert_empty()
    prefill.assert_empty()


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"n": 2}, {"max_tokens": 1}])
def test_first_token_of_a_load_is_given_out_before_the_next_is_computed(
    pair: tuple[Engine, Engine], fields: dict[str, int], *, busy: bool
) -> None:
    _, decode = pair
    if busy:
        decode.link.threshold = 1000
        decode.add("busy", sampling=GREEDY.replace(max_tokens=40, ignore_eos=True))
        decode.step()
        decode.link.threshold = 4
    decode.add("a", [8, *PROMPT], GREEDY.replace(**fields))
    decode.step()
    decode.link.finish("a")
    computed, at = decode.runner.num_tokens, len(decode.outputs)
    decode.step()
    (output,) = decode.outputs[at:]
    first = expected(decode, [8, *PROMPT])[0]
    assert (output.request_id, output.token_ids, decode.runner.num_tokens) == ("a", [first], computed)
    assert output.metrics is not None
    assert output.metrics.ttft_us > 0
    assert [x.token_id for x in output.logprobs or []] == ([first] if "logprobs" in fields else [])
    assert output.finish_reason == (FinishReason.LENGTH if "max_tokens" in fields else None)
    if busy or "max_tokens" not in fields:
        assert decode.core.made_progress  # the next step comes at once
        decode.step()
        assert decode.runner.num_tokens > computed
    decode.run()
    for index in range(fields.get("n", 1)):
        found = [t for o in decode.outputs if (o.request_id, o.index) == ("a", index) for t in o.token_ids]
        assert found == expected(decode, [8, *PROMPT])[: fields.get("max_tokens", 10)]


def test_nobody_is_told_of_kv_that_led_to_bad_logits(pair: tuple[Engine, Engine]) -> None:
    prefill, _ = pair
    prefill.runner.poisoned = frozenset({PROMPT[7]})
    prefill.add("a", PROMPT[:8], prefill_only=True)
    prefill.run()
    assert prefill.ends["a"].finish_reason is FinishReason.ERROR
    assert [done for _, _, done in prefill.prefill_side.progress[RequestId("a")]] == [0]
    assert prefill.core.snapshot() == []


def test_first_token_outside_the_vocabulary_is_sampled_anew(pair: tuple[Engine, Engine]) -> None:
    _, decode = pair
    decode.add("a")
    decode.run()
    decode.link.finish("a")
    update = decode.link.updates.pop()
    decode.link.updates.append(LoadUpdate(update.request_id, update.num_valid_tokens, TokenLogprob(10_000, 0.0, 1)))
    decode.run()
    assert decode.tokens("a") == expected(decode)


def test_sampling_is_the_same_through_a_hand_over_and_a_resumed_request(pair: tuple[Engine, Engine]) -> None:
    _, decode = pair
    sampling = SamplingParams(max_tokens=12, temperature=1.2, repetition_penalty=1.2)
    alone = Engine()
    alone.add("a", sampling=sampling)
    alone.run()
    decode.add("a", sampling=sampling)
    decode.run()
    decode.link.finish("a")
    decode.run()
    assert decode.tokens("a") == alone.tokens("a")
    again = Engine(source=Engine())
    again.add("a", sampling=sampling, output_token_ids=alone.tokens("a")[:5])
    again.run()
    assert again.link.plans[0][0].num_output_tokens == 5
    again.link.finish("a")
    again.run()
    assert again.tokens("a") == alone.tokens("a")[5:]


def test_n_sequences_share_a_loaded_prompt(pair: tuple[Engine, Engine]) -> None:
    _, decode = pair
    decode.add("a", sampling=SamplingParams(max_tokens=4, seed=1, n=3))
    decode.run()
    assert decode.core.stats().num_waiting == 0
    decode.link.finish("a")
    decode.run()
    assert {output.index for output in decode.outputs if output.finish_reason} == {0, 1, 2}
    assert len(decode.link.plans) == 1
    decode.assert_empty()


def test_abort_while_loading_keeps_the_blocks_until_its_last_write(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    decode.add("a")
    decode.run()
    held = decode.core.stats().blocks_active
    assert held == 4
    assert decode.core.abort(RequestId("a"))
    decode.run()
    assert decode.ends["a"].finish_reason is FinishReason.ABORT
    assert decode.link.cancelled == ["a"]
    assert decode.core.stats().blocks_active == held
    with pytest.raises(InvalidRequestError):
        decode.add("a")
    decode.link.finish("a")
    decode.run()
    assert decode.tokens("a") == []
    decode.assert_empty()
    prefill.assert_empty()


@pytest.mark.parametrize("where", ["plan_error", "start_error"])
def test_a_connector_that_fails_costs_a_local_prefill_and_says_so(pair: tuple[Engine, Engine], where: str) -> None:
    _, decode = pair
    setattr(decode.link, where, OSError("no route"))
    decode.add("a")
    decode.run()
    assert decode.tokens("a") == expected(decode)
    metrics = decode.ends["a"].metrics
    assert metrics is not None
    assert metrics.transfer.path is PrefillPath.LOCAL
    assert "no route" in metrics.transfer.local_reason


def test_prompt_logprobs_are_computed_locally(pair: tuple[Engine, Engine]) -> None:
    _, decode = pair
    decode.add("a", sampling=GREEDY.replace(prompt_logprobs=0))
    decode.run()
    assert decode.link.plans == []
    assert decode.tokens("a") == expected(decode)


def test_what_loads_is_not_preempted() -> None:
    decode = Engine(12, source=Engine())
    expect_short_outputs(decode.core)
    decode.add("a", PROMPT * 2)
    decode.run()
    decode.link.threshold = 1000
    decode.add("b", PROMPT[:8], GREEDY.replace(max_tokens=20))
    decode.run()
    stats = decode.core.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_loading, stats.num_waiting) == (1, 1)
    decode.link.finish("a")
    decode.run()
    assert decode.tokens("a") == expected(decode, PROMPT * 2)
    assert decode.tokens("b") == decode.runner.greedy(PROMPT[:8], 20)
    decode.assert_empty()


# The prefill side


def test_progress_is_told_at_admission_and_after_each_chunk_and_blocks_are_held() -> None:
    engine = Engine()
    engine.add("warm", PROMPT[:9], prefill_only=True)
    engine.run()
    assert [done for _, _, done in engine.prefill_side.progress[RequestId("warm")]] == [0, 8, 9]
    engine.add("a", PROMPT * 2, prefill_only=True)
    engine.run()
    progress = engine.prefill_side.progress[RequestId("a")]
    assert [done for _, _, done in progress] == [8, 16, 24, 28]
    assert len({blocks for blocks, _, _ in progress}) == 1
    assert engine.tokens("a") == expected(engine, PROMPT * 2)[:1]
    assert engine.ends["a"].metrics is not None
    stats = engine.core.stats()
    assert (stats.num_running, stats.blocks_active) == (0, 8)
    assert engine.core._bridge.pending
    with pytest.raises(InvalidRequestError):
        engine.add("a", prefill_only=True)
    engine.prefill_side.let_go.append(RequestId("a"))
    engine.run()
    assert engine.core.stats().blocks_active == 3
    assert engine.core.release(RequestId("warm"))
    assert not engine.core.release(RequestId("warm"))
    assert engine.core.stats().blocks_active == 0


def test_abort_of_a_held_request_gives_its_blocks_back() -> None:
    engine = Engine()
    engine.add("a", prefill_only=True)
    engine.run()
    assert engine.core.abort(RequestId("a"))
    assert engine.core.stats().blocks_active == 0


def test_abort_in_the_middle_of_a_prefill_asks_whether_blocks_are_still_wanted() -> None:
    engine = Engine()
    engine.add("a", PROMPT * 3, prefill_only=True)
    engine.step()
    assert engine.core.abort(RequestId("a"))
    assert engine.prefill_side.holding == {"a"}
    assert engine.core.stats().blocks_active == 11
    engine.prefill_side.let_go.append(RequestId("a"))
    engine.run()
    assert engine.ends["a"].finish_reason is FinishReason.ABORT
    engine.assert_empty()


def test_a_queue_that_waits_for_held_blocks_goes_on_when_they_are_let_go() -> None:
    engine = Engine(6)
    engine.add("a", PROMPT, prefill_only=True)
    engine.run()
    engine.add("b", PROMPT[::-1], prefill_only=True)
    engine.run()
    assert engine.core.stats().num_waiting == 1
    assert not engine.core.made_progress
    engine.prefill_side.let_go.append(RequestId("a"))
    engine.run()
    assert engine.tokens("b") == expected(engine, PROMPT[::-1])[:1]


class Follower(PrefillSide):
    """Wants to know of every request."""

    follows_all = True


def test_a_connector_that_follows_all_is_told_of_what_was_generated() -> None:
    engine = Engine(side=Follower())
    engine.add("a")
    engine.run()
    tokens = [*PROMPT, *engine.tokens("a")]
    told = engine.prefill_side.progress[RequestId("a")]
    assert [done for _, _, done in told] == [8, 14, len(tokens) - 1]
    assert list(told[-1][1]) == block_hashes(tokens, BLOCK, root_hash(engine.runner.fingerprint.content_key()))[:5]
    # Its blocks are kept until the connector has them, also if its client hangs up meanwhile.
    assert engine.core.stats().blocks_active == 6
    assert not engine.core.abort(RequestId("a"))
    assert engine.core.stats().blocks_active == 6
    engine.prefill_side.let_go.append(RequestId("a"))
    engine.assert_empty()


def test_each_of_several_sequences_is_told_of_by_its_own_name() -> None:
    engine = Engine(side=Follower())
    engine.add("a", sampling=SamplingParams(temperature=1.5, max_tokens=9, n=3, ignore_eos=True))
    engine.run()
    assert set(engine.prefill_side.progress) == {"a", "a#1", "a#2"}
    assert len({told[-1][1] for told in engine.prefill_side.progress.values()}) == 3
    engine.prefill_side.let_go = list(engine.prefill_side.holding)
    engine.assert_empty()


def test_a_request_id_may_come_again_while_its_blocks_are_saved() -> None:
    engine = Engine(side=Follower())
    engine.add("a")
    engine.run()
    engine.add("a")
    assert engine.core.stats().blocks_active == 0  # given back: what is saved of them now is fenced
    engine.run()
    engine.prefill_side.let_go.append(RequestId("a"))
    engine.assert_empty()


def test_aborted_requests_are_not_told_of_again() -> None:
    engine = Engine(side=Follower())
    engine.add("a")
    engine.step()
    engine.step()
    engine.core.abort(RequestId("a"))
    engine.run()
    assert [done for _, _, done in engine.prefill_side.progress[RequestId("a")]] == [8, 14]
    engine.prefill_side.let_go.append(RequestId("a"))
    engine.assert_empty()


def test_a_connector_that_fails_to_save_costs_no_request() -> None:
    class Broken(PrefillSide):
        follows_all = True

        def blocks_computed(self, *_: object) -> None:
            raise OSError("the disk is full")

        def request_finished(self, request_id: RequestId) -> bool:
            raise OSError("still full")

    engine = Engine(side=Broken())
    engine.add("a")
    engine.run()
    assert engine.tokens("a") == expected(engine)
    engine.assert_empty()


def test_a_sequence_that_ends_while_one_of_its_name_is_saved_leaks_no_blocks() -> None:
    engine = Engine(side=Follower())
    two = SamplingParams(temperature=1.0, max_tokens=10, n=2, seed=1)
    for _ in range(2):  # the second time all blocks of the first are still being saved
        engine.add("a", sampling=two)
        engine.run()
    engine.prefill_side.let_go = [RequestId("a"), RequestId("a#1")]
    engine.assert_empty()


HOOKS = (
    "cancel_load",
    "poll_loads",
    "poll_releases",
    "has_pending",
    "step_begins",
    "layer_computed",
    "blocks_belong",
    "blocks_computed",
    "request_finished",
)


class Failing(PrefillSide):
    """Follows all, plans a load of whatever is named so, and fails in one hook."""

    follows_all = True

    def __init__(self, hook: str, failure: Callable[[], object]) -> None:
        super().__init__()
        self.loads: list[RequestId] = []
        self.calls, self.failing = 0, True

        def fail(*_: object) -> object:
            self.calls += 1
            return failure() if self.failing else working()

        def working() -> object:
            return [] if hook.startswith("poll") else None

        setattr(self, hook, fail)

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        return LoadPlan(8) if request.request_id.startswith("load") else None

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        self.loads.append(request.request_id)

    def cancel_load(self, request_id: RequestId) -> None: ...

    def request_finished(self, request_id: RequestId) -> bool:
        return False


def _raise() -> object:
    raise OSError("this hook does not work")


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_costs_neither_a_request_nor_the_engine(hook: str, alone: bool) -> None:
    failing = Failing(hook, _raise)
    engine = Engine(side=failing if alone else MultiConnector([failing, KVConnector()]))
    for name in ("a", "b"):
        engine.add(name, tenant=Tenant("somebody"))
        engine.run()
        assert engine.tokens(name) == expected(engine), name
    engine.add("for others", [2, *PROMPT], prefill_only=True)
    engine.run()
    assert engine.tokens("for others") == expected(engine, [2, *PROMPT])[:1]
    engine.add("load", PROMPT[::-1])
    engine.step()
    assert engine.core.stats().num_loading == 1
    assert engine.core.abort(RequestId("load"))
    engine.step()
    assert engine.core.stats().num_loading == 1  # its end has not been reported yet
    assert failing.calls
    failing.failing = False
    failing.poll_loads = lambda: [LoadUpdate(RequestId("load"), 0, error="cancelled")]  # type: ignore[method-assign]
    engine.step()
    failing.poll_loads = list  # type: ignore[method-assign]
    engine.assert_empty()


@pytest.mark.parametrize("answer", [None, 7, [["no update"]]])
@pytest.mark.parametrize("hook", ["poll_loads", "poll_releases"])
def test_an_answer_that_is_none_costs_nothing(hook: str, answer: object) -> None:
    failing = Failing(hook, lambda: answer)
    engine = Engine(side=failing)
    engine.add("a")
    engine.run()
    assert engine.tokens("a") == expected(engine)
    assert failing.calls


def test_a_plan_that_is_none_is_computed_here(pair: tuple[Engine, Engine]) -> None:
    _, decode = pair
    decode.link.plan_load = lambda *_: 12  # type: ignore[assignment, method-assign, return-value]
    decode.add("a")
    decode.run()
    assert decode.tokens("a") == expected(decode)
    metrics = decode.ends["a"].metrics
    assert metrics is not None
    assert metrics.transfer.local_reason == "connector: DecodeSide planned a load with a int"


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_tenant_computed_is_not_saved_without_owner(alone: bool) -> None:
    failing = Failing("blocks_belong", _raise)
    engine = Engine(side=failing if alone else MultiConnector([failing, KVConnector()]))
    engine.add("a", tenant=Tenant("somebody"))
    engine.run()
    engine.add("b", [1, 2, *PROMPT])
    engine.run()
    assert set(failing.progress) == {"b"}
