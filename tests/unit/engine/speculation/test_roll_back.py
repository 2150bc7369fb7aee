"""A sequence that is rolled back goes on as if it had never gone further; blocks and hashes stay right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.toy_runner import ToyRunner
from tests.support.preemption import expect_short_outputs

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest
from baton.engine.sequence import Sequence
from baton.errors import InternalError
from baton.kv_cache.events import BlocksStored, KVEvent
from baton.types import RequestId, SamplingParams
from baton_kernels.token_mask import pack_mask

BLOCK = 4
VOCAB = 64
PROMPT = [5, 9, 14, 33, 21, 7, 50, 3, 18, 42, 11]


class Engine:
    """An engine over a toy model, and per request the tokens that stand."""

    def __init__(self, num_blocks: int = 64, **options: object) -> None:
        values = {"block_size": BLOCK, "prefill_chunk": 8, "max_num_batched_tokens": 24, "max_num_seqs": 8, **options}
        self.runner = ToyRunner(block_size=BLOCK, eos=VOCAB - 1)
        self.events: list[KVEvent] = []
        shards = self.runner.make_arena(num_blocks)
        self.core = EngineCore(EngineConfig(**values), self.runner, shards, on_events=self.events.extend)
        self.tokens: dict[str, list[int]] = {}

    def add(self, name: str, prompt: list[int], sampling: SamplingParams, **fields: object) -> None:
        self.core.add_request(EngineRequest(RequestId(name), prompt, sampling, **fields))  # type: ignore[arg-type]
        self.tokens[name] = []

    def sequence(self, name: str) -> Sequence:
        return self.core._groups[RequestId(name)].sequences[0]

    def step(self) -> None:
        for output in self.core.step():
            self.tokens[output.request_id] += output.token_ids

    def roll_back(self, name: str, count: int) -> None:
        self.core.roll_back(RequestId(name), count)
        del self.tokens[name][len(self.tokens[name]) - count :]
        self.core.check_integrity()

    def run(self) -> None:
        while self.core.has_work():
            self.step()
        self.core.check_integrity()
        assert self.core.stats().blocks_active == 0


SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=20, ignore_eos=True),
    SamplingParams(
        seed=4, temperature=1.5, frequency_penalty=0.7, repetition_penalty=1.4, max_tokens=20, ignore_eos=True
    ),
]


@settings(max_examples=40, deadline=None)
@given(
    sampling=st.sampled_from(SAMPLINGS),
    length=st.integers(1, 11),
    moves=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 20)), max_size=5),
    num_blocks=st.sampled_from([9, 14, 64]),
    caching=st.booleans(),
)
def test_a_rolled_back_sequence_ends_like_a_straight_one(
    sampling: SamplingParams, length: int, moves: list[tuple[int, int]], num_blocks: int, caching: bool
) -> None:
    """Beside another sequence, in pools so small that both are preempted."""
    straight = Engine(prefix_caching=caching)
    moved = Engine(num_blocks, prefix_caching=caching)
    expect_short_outputs(moved.core)
    for engine in (straight, moved):
        engine.add("a", PROMPT[:length], sampling)
        engine.add("b", PROMPT[3:9], SAMPLINGS[0])
    straight.run()
    for steps, count in moves:
        for _ in range(steps):
            moved.step()
        if RequestId("a") in moved.core._groups:
            moved.roll_back("a", min(count, len(moved.tokens["a"])))
    moved.run()
    assert moved.tokens == straight.tokens


@pytest.mark.parametrize("count", range(10))
def test_another_continuation_after_a_roll_back_leaves_no_wrong_block_in_the_prefix_cache(count: int) -> None:
    engine = Engine()
    greedy = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
    engine.add("a", PROMPT, greedy)
    while len(engine.tokens["a"]) < 10:
        engine.step()
    first = list(engine.tokens["a"])
    engine.roll_back("a", count)
    sequence = engine.sequence("a")
    assert sequence.num_computed <= sequence.num_tokens - 1
    assert len(sequence.block_ids) <= -(-sequence.num_tokens // BLOCK)
    forbidden = first[len(first) - count] if count else None
    if forbidden is not None:
        sequence.sampler.mask = pack_mask(np.arange(VOCAB) != forbidden)
    engine.events.clear()
    engine.step()
    while len(engine.tokens["a"]) <= 10 - count:  # a rolled back tail may take a step of its own
        engine.step()
    sequence.sampler.mask = None
    engine.run()
    second = engine.tokens["a"]
    assert second[: 10 - count] == first[: 10 - count]
    if forbidden is not None:
        assert second[10 - count] != forbidden
        logits = engine.runner.reference_logits(PROMPT + second[: 10 - count])[-1]
        logits[forbidden] = float("-inf")
        assert second[10 - count] == int(logits.argmax())
    # Both continuations, with hits in the cache: right blocks give the model's own tokens.
    for name, tokens in (("first", first), ("second", second)):
        prompt = PROMPT + tokens
        engine.add(name, prompt, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        engine.run()
        assert engine.tokens[name] == engine.runner.greedy(prompt, 3, ignore_eos=True)
    assert engine.core.stats().prefix_hit_tokens >= 2 * 8


def test_hashes_of_removed_tokens_are_not_published_later() -> None:
    """The blocks that the removed tokens would have filled are never registered."""
    engine = Engine()
    engine.add("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    while len(engine.tokens["a"]) < 4:
        engine.step()
    sequence = engine.sequence("a")  # 15 tokens, 14 of them computed: the fourth block is not full yet
    stale = list(sequence.hash_blocks(12, BLOCK))
    engine.roll_back("a", 3)
    sequence.sampler.mask = pack_mask(np.arange(VOCAB) != engine.runner.greedy(PROMPT, 2, ignore_eos=True)[1])
    engine.step()
    sequence.sampler.mask = None
    engine.run()
    published = [h for event in engine.events if isinstance(event, BlocksStored) for h in event.hashes]
    assert published[:3] == stale  # prompt and the one token that stood: 12 tokens
    assert len(published) == len(set(published)) == 4
    assert published[3] == sequence.hash_blocks(16, BLOCK)[3]


def test_what_cannot_be_rolled_back_is_refused() -> None:
    engine = Engine()
    engine.add("a", PROMPT, SAMPLINGS[0])
    engine.add("pinned", PROMPT, SAMPLINGS[0], prefill_only=True)
    engine.step()
    for name, count, words in (("a", 1, "there are 0"), ("pinned", 0, "pinned"), ("b", 0, "no sequence 0")):
        with pytest.raises(InternalError, match=words):
            engine.core.roll_back(RequestId(name), count)
    with pytest.raises(InternalError, match="no sequence 1"):
        engine.core.roll_back(RequestId("a"), 0, index=1)
    engine.step()
    engine.roll_back("a", 1)
    engine.run()
    engine.core.release(RequestId("pinned"))
    assert engine.tokens["a"] == engine.runner.greedy(PROMPT, 20, ignore_eos=True)
