"""Tokens that a grammar forces are not sampled: the next forward pass computes them together, and no answer differs."""

from __future__ import annotations

import random

import pytest
from tests.support.models.drafters import RecordedDrafter
from tests.support.models.toy_runner import ToyRunner
from tests.support.preemption import expect_short_outputs
from tests.support.tiny_grammar import EOS, TEXTS, VOCAB, make_compiler, text_of

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.grammar import constraint
from baton.engine.grammar.constraint import LONG_RUN, GrammarCompiler
from baton.engine.request import EngineRequest, SequenceOutput
from baton.engine.scheduler import MOST_QUERIES
from baton.grammar import regex_grammar
from baton.kv_cache.events import BlocksStored, KVEvent
from baton.types import FinishReason, RequestId, SamplingParams, TokenLogprob

PROMPT = [5, 9, 14, 33, 21, 7, 50]
PARTS = ["abcab", "xyz", "[abc]", "(ab|c)", "ababc", "[0-9]{2}", "zzzz", "(k|km)", "(xabca|yabcb)", "qrstuv"]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return make_compiler(tmp_path_factory.mktemp("tokenizer"))


def pattern(seed: int) -> str:
    """An expression with forced parts and choices."""
    rng = random.Random(seed)
    return "".join(rng.choice(PARTS) for _ in range(rng.randint(2, 7)))


class Engine:
    """An engine over a toy model, with or without jumps."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        jump: bool,
        num_blocks: int = 512,
        drafter: RecordedDrafter | None = None,
        **options: object,
    ) -> None:
        self.runner = ToyRunner(block_size=4, vocab_size=VOCAB, eos=EOS, max_model_len=512)
        self.events: list[KVEvent] = []
        self.compiler = compiler
        values = {"block_size": 4, "max_num_batched_tokens": 256, "max_num_seqs": 64, **options}
        self.core = EngineCore(
            EngineConfig(**values),
            self.runner,
            self.runner.make_arena(num_blocks),
            on_events=self.events.extend,
            grammars=compiler,
            drafter=drafter,
        )
        assert self.core.masks is not None
        self.masks = self.core.masks
        self.masks.jump_forward = jump
        self.steps = 0

    def add(self, name: str, sampling: SamplingParams, output: list[int] | None = None, **fields: object) -> None:
        one = None if sampling.grammar is None else self.compiler.constraint(sampling.grammar, output or ())
        request = EngineRequest(RequestId(name), PROMPT, sampling, output or [], constraint=one, **fields)
        self.core.add_request(request)

    def run(self) -> dict[str, list[SequenceOutput]]:
        found: dict[str, list[SequenceOutput]] = {}
        while self.core.has_work():
            self.steps += 1
            for output in self.core.step():
                found.setdefault(f"{output.request_id}.{output.index}", []).append(output)
        self.core.check_integrity()
        assert self.core.stats().blocks_active == 0
        return found

    def stored(self) -> set[bytes]:
        return {bytes(one) for event in self.events if isinstance(event, BlocksStored) for one in event.hashes}


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def ends_of(found: dict[str, list[SequenceOutput]]) -> dict[str, object]:
    return {name: (tokens_of(all_), all_[-1].finish_reason, all_[-1].stop_token_id) for name, all_ in found.items()}


def key_of(one: TokenLogprob) -> object:
    return one.token_id, one.rank, [token for token, _ in one.top]


def jobs() -> dict[str, SamplingParams]:
    """Answers that end by themselves, by length within a forced run, by a stop token within one."""
    found = {}
    for seed in range(36):
        changes: dict[str, object] = [{}, {"max_tokens": 3 + seed % 5}, {"stop_token_ids": (TEXTS.index("z"),)}][
            seed % 3
        ]
        params = SamplingParams(
            temperature=(0.0, 1.0, 2.0)[seed // 3 % 3],
            seed=seed,
            max_tokens=40,
            n=1 + seed % 2,
            logprobs=3,
            grammar=regex_grammar(pattern(seed)),
        )
        found[f"r{seed}"] = params.replace(**changes)
    return found


def test_answers_logprobs_and_cached_blocks_are_those_of_sampling_one_by_one(
    compiler: GrammarCompiler,
) -> None:
    one_by_one, jumping = Engine(compiler, jump=False), Engine(compiler, jump=True)
    answers = []
    for engine in (one_by_one, jumping):
        for name, params in jobs().items():
            engine.add(name, params)
        answers.append(engine.run())
    assert ends_of(answers[0]) == ends_of(answers[1])
    for name, outputs in answers[0].items():
        plain, forced = (
            [one for each in every for one in each.logprobs or ()] for every in (outputs, answers[1][name])
        )
        assert [key_of(one) for one in plain] == [key_of(one) for one in forced]
        assert [one.logprob for one in plain] == pytest.approx([one.logprob for one in forced], abs=1e-5)
    # The tokens that end an answer are computed by nobody: there are a few more of them.
    assert jumping.stored() <= one_by_one.stored()
    assert len(jumping.stored()) > len(one_by_one.stored()) // 2
    assert (one_by_one.masks.forced_tokens, jumping.masks.forced_tokens > 100) == (0, True)
    assert jumping.runner.num_logit_rows < one_by_one.runner.num_logit_rows - 100


def test_a_run_takes_one_forward_pass(compiler: GrammarCompiler) -> None:
    engine = Engine(compiler, jump=True)
    engine.add("a", SamplingParams(temperature=0.0, max_tokens=40, grammar=regex_grammar("[xy]qrstuvk[01]")))
    tokens = tokens_of(engine.run()["a.0"])
    assert text_of(tokens)[1:-1] == "qrstuvk"
    assert (len(tokens), engine.steps) == (9, 2)  # the prompt, then seven tokens with the one before them


@pytest.mark.parametrize("at", range(9))
def test_an_answer_goes_on_from_the_middle_of_a_run(compiler: GrammarCompiler, at: int) -> None:
    params = SamplingParams(
        temperature=1.0, seed=4, max_tokens=30, grammar=regex_grammar("(ab|c)abcabxyz[0-9]k(x|y)abc")
    )
    engine = Engine(compiler, jump=True)
    engine.add("a", params)
    tokens = tokens_of(engine.run()["a.0"])
    engine.add("b", params, output=tokens[:at])
    assert tokens[:at] + tokens_of(engine.run()["b.0"]) == tokens


def test_preempted_sequences_and_small_budgets_change_nothing(compiler: GrammarCompiler) -> None:
    roomy = Engine(compiler, jump=False)
    tight = Engine(compiler, jump=True, num_blocks=16, max_num_seqs=12, max_num_batched_tokens=16, prefill_chunk=8)
    expect_short_outputs(tight.core)
    found = []
    for engine in (roomy, tight):
        for name, params in jobs().items():
            engine.add(name, params.replace(logprobs=None, n=1))
        found.append(ends_of(engine.run()))
    assert found[0] == found[1]
    assert tight.core.stats().num_preemptions > 0


@pytest.mark.parametrize("probability", [0.5, 1.0])
def test_drafts_go_on_where_nothing_is_forced(compiler: GrammarCompiler, probability: float) -> None:
    plain = Engine(compiler, jump=False)
    for name, params in jobs().items():
        plain.add(name, params.replace(n=1))
    expected = plain.run()
    outputs = {(name.partition(".")[0], 0): tokens_of(each) for name, each in expected.items()}
    drafter = RecordedDrafter(outputs, probability=probability, vocab_size=VOCAB)
    engine = Engine(compiler, jump=True, drafter=drafter, speculative_tokens=4)
    for name, params in jobs().items():
        engine.add(name, params.replace(n=1))
    assert ends_of(engine.run()) == ends_of(expected)
    assert engine.masks.forced_tokens > 50
    assert engine.core.speculator is not None
    assert sum(engine.core.speculator.stats.accepted.values()) > 0


def test_a_prefill_instance_reports_its_one_token(compiler: GrammarCompiler) -> None:
    engine = Engine(compiler, jump=True)
    params = SamplingParams(temperature=0.0, max_tokens=9, grammar=regex_grammar("qrstuv[01]"))
    engine.add("a", params, prefill_only=True)
    outputs: list[SequenceOutput] = []
    while not outputs:
        outputs += engine.core.step()
    assert tokens_of(outputs) == [TEXTS.index("q")]
    engine.core.release(RequestId("a"))


def test_long_runs_are_computed_like_prompts_and_others_get_a_token_in_every_step(compiler: GrammarCompiler) -> None:
    count = 3 * LONG_RUN
    assert count > MOST_QUERIES
    params = SamplingParams(temperature=0.0, max_tokens=400, grammar=regex_grammar(f"[ab](xy){{{count}}}[01]"))
    results = []
    for jump in (False, True):
        engine = Engine(compiler, jump=jump, prefill_chunk=32, max_num_batched_tokens=64)
        engine.add("long", params)
        engine.add("free", SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True))
        results.append(engine.run())
        assert all(len(output.token_ids) == 1 for output in results[-1]["free.0"])
        if jump:
            assert engine.steps < 2 * count // 32 + 16
    assert ends_of(results[0]) == ends_of(results[1])
    assert len(tokens_of(results[1]["long.0"])) == 2 * count + 2


def test_a_search_for_forced_tokens_that_takes_long_fails_its_request_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(compiler, jump=True)
    engine.add("slow", SamplingParams(temperature=0.0, max_tokens=40, grammar=regex_grammar("[xy]qrstuv[01]{9}")))
    engine.add("free", SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True))
    monkeypatch.setattr(constraint, "USUAL_S", -1.0)
    found = engine.run()
    assert found["slow.0"][-1].finish_reason is FinishReason.ERROR
    assert "too long" in (found["slow.0"][-1].error or "")
    assert found["free.0"][-1].finish_reason is FinishReason.LENGTH


def test_roll_back_into_a_run_goes_on_with_the_same(compiler: GrammarCompiler) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, grammar=regex_grammar("[xy]qrstuv[01]qrst[xy]"))
    engine = Engine(compiler, jump=True)
    engine.add("a", params)
    straight = tokens_of(engine.run()["a.0"])
    engine.add("b", params)
    seen: list[int] = []
    while len(seen) < 8:
        seen += tokens_of(engine.core.step())
    engine.core.roll_back(RequestId("b"), len(seen) - 4)
    assert seen[:4] + tokens_of(engine.run()["b.0"]) == straight


def test_a_grammar_that_begins_later_forces_nothing_before(compiler: GrammarCompiler) -> None:
    start = TEXTS.index("z")
    grammar = regex_grammar("abc[01]")
    grammar = type(grammar)(grammar.kind, grammar.text, (start,))
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=60, logit_bias={start: 20.0}, grammar=grammar)
    found = []
    for jump in (False, True):
        engine = Engine(compiler, jump=jump)
        engine.add("a", params)
        found.append(engine.run()["a.0"])
    assert tokens_of(found[0]) == tokens_of(found[1])
    assert found[1][-1].finish_reason is FinishReason.STOP
