"""Speculative decoding over a toy model: the same tokens as without, whoever drafts, and books that add up."""

from __future__ import annotations

import threading
from collections.abc import Sequence as SequenceOf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.drafters import BrokenDrafter, RecordedDrafter
from tests.support.models.toy_runner import ToyRunner
from tests.support.preemption import expect_short_outputs
from tests.support.tiny_grammar import EOS, VOCAB, make_compiler

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.device import ComputeDevice
from baton.engine.grammar.constraint import GrammarCompiler
from baton.engine.request import EngineRequest, SequenceOutput
from baton.engine.sequence import Sequence
from baton.engine.speculation.chain import ModelDrafter
from baton.engine.speculation.drafter import Drafter, DrafterHangsError
from baton.engine.speculation.lookup import NgramDrafter
from baton.engine.speculation.methods import MAX_ENDED, BoundedDrafter, load_drafter
from baton.errors import ConfigError, InvalidRequestError
from baton.grammar import regex_grammar
from baton.kv_cache.events import BlocksStored, KVEvent
from baton.types import FinishReason, RequestId, SamplingParams

CPU = ComputeDevice(torch.device("cpu"), on_gpu=False)
BLOCK = 4
PROMPT = [5, 9, 14, 3, 21, 7, 10, 3, 18, 2, 11]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
SAMPLINGS = {
    "greedy": GREEDY,
    "logprobs": GREEDY.replace(logprobs=3),
    "sampled": SamplingParams(seed=3, temperature=1.3, top_p=0.9, max_tokens=30, ignore_eos=True, logprobs=0),
    "four": SamplingParams(seed=7, temperature=0.7, max_tokens=17, n=4),
    "penalties": SamplingParams(
        seed=4, temperature=0.7, frequency_penalty=0.7, presence_penalty=0.2, repetition_penalty=1.4, max_tokens=25
    ),
    "bias": SamplingParams(seed=5, max_tokens=25, logit_bias={3: 4.0, 7: -100.0}, min_p=0.02, top_k=9),
    "stops": SamplingParams(seed=6, max_tokens=40, min_tokens=9, stop_token_ids=(2, 4, 6, 8, 10)),
    "grammar": SamplingParams(seed=8, max_tokens=20, grammar=regex_grammar("a(bc|cb)*(a|b)?c*")),
    "grammar_min": SamplingParams(seed=9, max_tokens=20, min_tokens=6, grammar=regex_grammar("[abc]*")),
    "prefill_only": SamplingParams(temperature=0.0, max_tokens=5),
}

Answers = dict[tuple[str, int], tuple[list[int], list[tuple[int, float]], FinishReason | None, int | None]]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return make_compiler(tmp_path_factory.mktemp("tokenizer"))


class Engine:
    """An engine over a toy model, maybe with somebody who drafts."""

    def __init__(
        self, compiler: GrammarCompiler, drafter: Drafter | None = None, num_blocks: int = 256, **options: object
    ) -> None:
        values = {"block_size": BLOCK, "prefill_chunk": 8, "max_num_batched_tokens": 48, "max_num_seqs": 16, **options}
        self.runner = ToyRunner(block_size=BLOCK, vocab_size=VOCAB, eos=EOS)
        self.events: list[KVEvent] = []
        self.compiler = compiler
        self.core = EngineCore(
            EngineConfig(**values),
            self.runner,
            self.runner.make_arena(num_blocks),
            on_events=self.events.extend,
            grammars=compiler,
            drafter=drafter,
        )
        self.outputs: list[SequenceOutput] = []
        self.steps = 0

    def add(self, name: str, sampling: SamplingParams, prompt: list[int] | None = None, **fields: object) -> None:
        constraint = None if sampling.grammar is None else self.compiler.constraint(sampling.grammar)
        request = EngineRequest(RequestId(name), prompt or PROMPT, sampling, constraint=constraint, **fields)  # type: ignore[arg-type]
        self.core.add_request(request)

    def run(self) -> Answers:
        while self.core.has_work():
            self.outputs += self.core.step()
            self.steps += 1
            for request_id in self.core._bridge.held.copy():
                self.core.release(request_id)
        self.core.check_integrity()
        assert self.core.stats().blocks_active == 0
        return answers(self.outputs)

    def add_all(self) -> None:
        for i, (name, sampling) in enumerate(SAMPLINGS.items()):
            self.add(name, sampling, PROMPT[: 3 + i], prefill_only=name == "prefill_only")


def answers(outputs: list[SequenceOutput]) -> Answers:
    """Return tokens, log probabilities, reason and stop token by sequence."""
    found: Answers = {}
    for output in outputs:
        tokens, logprobs, _, _ = found.get((output.request_id, output.index), ([], [], None, None))
        tokens = tokens + output.token_ids
        logprobs = logprobs + [(entry.token_id, round(entry.logprob, 5)) for entry in output.logprobs or ()]
        assert not output.error
        found[output.request_id, output.index] = tokens, logprobs, output.finish_reason, output.stop_token_id
    return found


@pytest.fixture(scope="module")
def plain(compiler: GrammarCompiler) -> Answers:
    engine = Engine(compiler)
    engine.add_all()
    return engine.run()


def recorded(plain: Answers, probability: float, seed: int = 0) -> RecordedDrafter:
    tokens = {key: answer[0] for key, answer in plain.items()}
    return RecordedDrafter(tokens, probability=probability, vocab_size=VOCAB, seed=seed)


# The same tokens


@settings(max_examples=25, deadline=None)
@given(
    probability=st.sampled_from([0.0, 0.5, 0.8, 0.95, 1.0]),
    seed=st.integers(0, 99),
    tokens=st.none() | st.integers(1, 16),
    num_blocks=st.sampled_from([30, 40, 256]),
    budget=st.sampled_from([17, 24, 48]),
    caching=st.booleans(),
)
def test_answers_are_those_without_speculation(
    compiler: GrammarCompiler,
    plain: Answers,
    probability: float,
    seed: int,
    tokens: int | None,
    num_blocks: int,
    budget: int,
    caching: bool,
) -> None:
    """Sequences of all kinds side by side, in pools so small that they are preempted."""
    drafter = recorded(plain, probability, seed)
    engine = Engine(
        compiler,
        drafter,
        num_blocks,
        speculative_tokens=tokens,
        max_num_batched_tokens=budget,
        prefix_caching=caching,
    )
    expect_short_outputs(engine.core)
    engine.add_all()
    assert engine.run() == plain
    assert not drafter.live
    assert drafter.num_proposed > 0
    assert engine.core.speculator is not None
    assert not engine.core.speculator._records


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_answers_are_those_without_speculation_by_look_up(
    compiler: GrammarCompiler, plain: Answers, method: str
) -> None:
    config = EngineConfig(speculative=method)
    engine = Engine(compiler, load_drafter(config, ToyRunner()), speculative_tokens=5)
    engine.add_all()
    assert engine.run() == plain
    assert engine.core.speculator is not None
    assert sum(engine.core.speculator.stats.drafted.values()) > 20


@pytest.mark.parametrize("num_blocks", [6, 24, 256])
@pytest.mark.parametrize("seed", [0, 1])
def test_answers_are_those_without_speculation_by_a_draft_model(
    compiler: GrammarCompiler, plain: Answers, seed: int, num_blocks: int
) -> None:
    """The same model (seed 0) draws the same tokens wherever it has room; another one is wrong and changes nothing."""
    draft = ModelDrafter(ToyRunner(block_size=BLOCK, vocab_size=VOCAB, eos=EOS, seed=seed), num_blocks, [CPU])
    engine = Engine(compiler, draft, speculative_tokens=5)
    engine.add_all()
    assert engine.run() == plain
    assert engine.core.speculator is not None
    stats = engine.core.speculator.stats
    assert not stats.faults
    assert sorted(draft._free) == list(range(num_blocks))
    if num_blocks == 256:  # what a grammar forbids, the draft model says
        share = stats.accepted.total() / stats.drafted.total()
        assert stats.drafted.total() > 100
        assert share > 0.8 if seed == 0 else share < 0.3
    draft.close()


def test_a_draft_model_computes_again_what_was_refused_rolled_back_or_evicted(
    compiler: GrammarCompiler, plain: Answers
) -> None:
    draft = ModelDrafter(ToyRunner(block_size=BLOCK, vocab_size=VOCAB, eos=EOS), 64, [CPU])
    engine = Engine(compiler, draft, speculative_tokens=3)
    engine.add("sampled", SAMPLINGS["sampled"], PROMPT[:5])
    for at in range(6):
        engine.core.step()
        if at % 2:
            engine.core.roll_back(RequestId("sampled"), 2)
    engine.run()
    stats = engine.core.speculator.stats  # type: ignore[union-attr]
    assert stats.accepted == stats.drafted
    draft.close()


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_right_drafts_save_steps(compiler: GrammarCompiler, plain: Answers, tokens: int) -> None:
    engine = Engine(compiler, recorded(plain, 1.0), speculative_tokens=tokens)
    engine.add("sampled", SAMPLINGS["sampled"], PROMPT[:5])
    found = engine.run()["sampled", 0]
    assert found == plain["sampled", 0]
    # The first token comes with the prompt, 29 more with drafts.
    assert engine.steps == 1 + -(-29 // (1 + tokens))
    (end,) = [output.metrics for output in engine.outputs if output.finish_reason is not None]
    assert end is not None
    assert end.drafted_tokens == end.accepted_tokens == 29 - (engine.steps - 1)
    assert engine.core.stats().decode_tokens == 30
    assert engine.core.speculator is not None
    stats = engine.core.speculator.stats
    assert stats.accepted == stats.drafted
    assert stats.drafted[0] == 29 // (1 + tokens) + (29 % (1 + tokens) > 1)  # none where one token is left


@pytest.mark.parametrize("place", range(7))
def test_a_stop_token_at_any_place_of_a_draft_ends_the_sequence_there(
    compiler: GrammarCompiler, plain: Answers, place: int
) -> None:
    free = plain["sampled", 0][0]
    stop = free[1 + place]
    at = free.index(stop)
    sampling = SAMPLINGS["sampled"].replace(stop_token_ids=(stop,))
    engine = Engine(compiler, recorded(plain, 1.0), speculative_tokens=6)
    engine.add("sampled", sampling, PROMPT[:5])
    tokens, _, reason, found = engine.run()["sampled", 0]
    assert (tokens, reason, found) == (free[: at + 1], FinishReason.STOP, stop)


def test_the_context_ends_where_it_ends_without(compiler: GrammarCompiler) -> None:
    for length in range(240, 256):
        engine = Engine(compiler, NgramDrafter(EngineConfig(), ToyRunner()), speculative_tokens=16)
        engine.add("a", SamplingParams(temperature=0.0, ignore_eos=True), (PROMPT * 24)[:length])
        tokens, _, reason, _ = engine.run()["a", 0]
        assert (len(tokens), reason) == (256 - length, FinishReason.LENGTH)


def test_the_cache_and_its_events_hold_accepted_tokens_alone(compiler: GrammarCompiler, plain: Answers) -> None:
    stored = []
    for probability in (None, 0.7):
        engine = Engine(compiler, None if probability is None else recorded(plain, probability), speculative_tokens=9)
        engine.add_all()
        engine.run()
        stored.append({h for event in engine.events if isinstance(event, BlocksStored) for h in event.hashes})
        # The same prompts again: what is found in the cache leads to the same answers.
        engine.core._on_events = None
        again, engine.outputs = engine.outputs, []
        engine.add_all()
        assert engine.run() == answers(again) == plain
    assert stored[0] == stored[1]


# Limits


def test_drafts_preempt_nobody_and_wait_for_room(compiler: GrammarCompiler, plain: Answers) -> None:
    """In a pool that just holds all sequences at their longest there is room for drafts only where blocks have it."""
    longest = 11 + 30
    blocks = 3 * -(-longest // BLOCK)
    tokens = {(f"r{i}", 0): plain["greedy", 0][0] for i in range(3)}
    engine = Engine(compiler, RecordedDrafter(tokens, probability=0.5, vocab_size=VOCAB), blocks, speculative_tokens=16)
    expect_short_outputs(engine.core)
    for i in range(3):
        engine.add(f"r{i}", GREEDY, PROMPT[:11])
    found = engine.run()
    assert engine.core.stats().num_preemptions == 0
    assert len({tuple(found[f"r{i}", 0][0]) for i in range(3)}) == 1


@pytest.mark.parametrize(("own", "most"), [(0, 0), (2, 2), (None, 5), (9, 5)])
def test_a_request_has_fewer_drafts_or_none(
    compiler: GrammarCompiler, plain: Answers, own: int | None, most: int
) -> None:
    engine = Engine(compiler, recorded(plain, 1.0), speculative_tokens=5)
    engine.add("greedy", GREEDY.replace(speculative_tokens=own), PROMPT[:3])
    assert engine.run()["greedy", 0] == plain["greedy", 0]
    assert engine.core.speculator is not None
    assert max(engine.core.speculator.stats.drafted, default=-1) == most - 1


@pytest.mark.parametrize("wrong", [-1, 17])
def test_a_request_for_a_senseless_number_of_drafts_is_refused(compiler: GrammarCompiler, wrong: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Engine(compiler).add("a", GREEDY.replace(speculative_tokens=wrong))
    assert caught.value.field == "speculative_tokens"


@pytest.mark.parametrize("wrong", [0, 17, 100])
def test_a_senseless_number_of_drafts_is_refused_at_start(wrong: int) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(speculative="ngram", speculative_tokens=wrong)
    assert caught.value.field == "speculative_tokens"


@pytest.mark.parametrize("method", ["mtp", "eagle", "nonsense", "auto"])
def test_an_unknown_method_is_refused_at_start(method: str) -> None:
    with pytest.raises(ConfigError, match=method) as caught:
        load_drafter(EngineConfig(speculative=method), ToyRunner())
    assert caught.value.field == "speculative"


# Faults


def broken(kind: str) -> BrokenDrafter:
    def answer(sequence: Sequence, limit: int) -> list[int]:
        if kind == "raises":
            raise RuntimeError("no idea")
        return {"beyond": [VOCAB], "negative": [-1], "many": [3] * 1000}[kind]

    return BrokenDrafter(answer)


@pytest.mark.parametrize("kind", ["raises", "beyond", "negative", "many"])
def test_a_broken_drafter_fails_no_request(compiler: GrammarCompiler, plain: Answers, kind: str) -> None:
    drafter = broken(kind)
    engine = Engine(compiler, drafter, speculative_tokens=4)
    engine.add_all()
    assert engine.run() == plain
    assert engine.core.speculator is not None
    faults = engine.core.speculator.stats.faults
    assert set(faults) == {"raises": {"raised"}, "many": set()}.get(kind, {"bad_ids"})
    if kind == "raises":
        assert drafter.calls == faults["raised"] <= 7  # it rests longer after each failure


def test_a_drafter_that_hangs_is_waited_for_once_and_asked_again_when_it_is_back(
    compiler: GrammarCompiler, plain: Answers
) -> None:
    come_back, asked = threading.Event(), threading.Semaphore(0)
    right = recorded(plain, 1.0)

    def answer(sequence: Sequence, limit: int) -> SequenceOf[int]:
        asked.release()
        assert come_back.wait(240)
        return right.propose([(sequence, limit)])[0].token_ids

    drafter = BoundedDrafter(BrokenDrafter(answer), wait_s=0.05)
    try:
        engine = Engine(compiler, drafter, speculative_tokens=4)
        engine.add_all()
        assert engine.run() == plain  # nobody failed, and nothing was drafted
        speculator = engine.core.speculator
        assert speculator is not None
        assert set(speculator.stats.faults) == {"hangs"}
        assert asked.acquire(timeout=240)
        assert not asked.acquire(blocking=False)  # the others did not wait for it
        assert not speculator.stats.steps
        come_back.set()
        while not speculator.stats.steps:  # it rests for a while, then it is asked again
            engine.outputs.clear()
            engine.add_all()
            assert engine.run() == plain
    finally:
        come_back.set()
        drafter.close()


def test_a_drafter_that_never_comes_back_does_not_keep_the_engine_from_ending() -> None:
    never = threading.Event()
    hanging = BoundedDrafter(BrokenDrafter(lambda sequence, limit: [int(never.wait())]), wait_s=0.01)
    with pytest.raises(DrafterHangsError, match="took more than"):
        hanging.propose([(None, 1)])  # type: ignore[list-item]
    with pytest.raises(DrafterHangsError, match="has not come back"):
        hanging.propose([(None, 1)])  # type: ignore[list-item]
    for _ in range(2 * MAX_ENDED):  # of whom it cannot be told: they are forgotten
        hanging.sequence_finished(None)  # type: ignore[arg-type]
    hanging.close()  # which waits no longer than a step would
    assert next(one for one in threading.enumerate() if one.name == "drafter broken").daemon
    never.set()


@pytest.mark.parametrize("place", range(5))
def test_logits_that_are_no_numbers_fail_a_request_only_where_its_sequence_gets(
    compiler: GrammarCompiler, plain: Answers, place: int
) -> None:
    right = plain["greedy", 0][0]
    poison = next(token for token in range(VOCAB - 1, 0, -1) if token not in [*right, *PROMPT])
    # A draft token that is refused has logits behind it that are no numbers.
    draft = [*right[1 : 1 + place], poison, 3]
    answer = BrokenDrafter(lambda s, limit: draft if s.num_output == 1 else [])
    engine = Engine(compiler, answer, speculative_tokens=16)
    engine.runner.poisoned = frozenset({poison})
    engine.add("greedy", GREEDY, PROMPT[:3])
    assert engine.run()["greedy", 0] == plain["greedy", 0]
    # One that is right: the tokens before it are reported, then the request fails as without speculation.
    failed = []
    for drafter in (None, recorded(plain, 1.0)):
        engine = Engine(compiler, drafter, speculative_tokens=8)
        engine.runner.poisoned = frozenset({right[2 + place]})
        engine.add("greedy", GREEDY, PROMPT[:3])
        while engine.core.has_work():
            engine.outputs += engine.core.step()
        engine.core.check_integrity()
        (error,) = [output.error for output in engine.outputs if output.error]
        failed.append((error, [token for output in engine.outputs for token in output.token_ids]))
        assert len(engine.core._pool.snapshot()) == 0
    assert failed[0] == failed[1]


def test_abort_between_steps_gives_all_blocks_back(compiler: GrammarCompiler, plain: Answers) -> None:
    engine = Engine(compiler, recorded(plain, 0.8), speculative_tokens=7)
    engine.add_all()
    for _ in range(6):
        engine.core.step()
    for name in SAMPLINGS:
        engine.core.abort(RequestId(name))
    while engine.core.has_work():
        engine.core.step()
    engine.core.check_integrity()
    assert engine.core.stats().blocks_active == 0
