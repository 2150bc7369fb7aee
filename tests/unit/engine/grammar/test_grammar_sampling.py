"""Answers under a grammar: the model's own choice among what is allowed, and an end in every case."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.models.toy_runner import ToyRunner
from tests.support.preemption import expect_short_outputs
from tests.support.tiny_grammar import EOS, LANGUAGES, TEXTS, VOCAB, Language, make_compiler, text_of

from baton.config import EngineConfig
from baton.engine import core as core_module
from baton.engine import sampler
from baton.engine.core import EngineCore
from baton.engine.grammar.constraint import GrammarCompiler
from baton.engine.request import EngineRequest, SequenceOutput
from baton.errors import InvalidRequestError
from baton.grammar import choice_grammar, lark_grammar, regex_grammar
from baton.types import FinishReason, Grammar, RequestId, SamplingParams
from baton_kernels.cpu.library import ThreadTeam

PROMPT = [5, 9, 14, 33, 21, 7, 50]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return make_compiler(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(params=["operators", "torch", "late"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(core_module, "crowded_team", lambda _: ThreadTeam(2) if request.param == "late" else None)
    if request.param == "torch":
        monkeypatch.setattr(sampler, "token_sampler", lambda *_, **__: None)
        monkeypatch.setattr(sampler, "cpu_token_mask", lambda: None)
    elif sampler.token_sampler(torch.device("cpu")) is None:
        pytest.skip("no C++ operators for this machine")
    return str(request.param)


class Engine:
    """An engine over a toy model, with grammars."""

    def __init__(self, compiler: GrammarCompiler, num_blocks: int = 512, seed: int = 0, **options: object) -> None:
        self.runner = ToyRunner(block_size=4, vocab_size=VOCAB, eos=EOS, seed=seed)
        values = {"block_size": 4, "max_num_batched_tokens": 256, "max_num_seqs": 64, **options}
        shards = self.runner.make_arena(num_blocks)
        self.compiler = compiler
        self.core = EngineCore(EngineConfig(**values), self.runner, shards, grammars=compiler)

    def add(
        self, name: str, sampling: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None
    ) -> None:
        constraint = None if sampling.grammar is None else self.compiler.constraint(sampling.grammar, output or ())
        request = EngineRequest(RequestId(name), prompt or PROMPT, sampling, output or [], constraint=constraint)
        self.core.add_request(request)

    def run(self) -> dict[tuple[str, int], tuple[list[int], SequenceOutput]]:
        """Return the tokens of each sequence and its last output."""
        tokens: dict[tuple[str, int], list[int]] = {}
        ends: dict[tuple[str, int], SequenceOutput] = {}
        while self.core.has_work():
            for output in self.core.step():
                key = output.request_id, output.index
                tokens.setdefault(key, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    ends[key] = output
        self.core.check_integrity()
        assert self.core.stats().blocks_active == 0
        return {key: (tokens[key], ends[key]) for key in ends}

    def answer(self, sampling: SamplingParams, output: list[int] | None = None) -> tuple[list[int], SequenceOutput]:
        self.add("one", sampling, output=output)
        return self.run()["one", 0]


def next_logits(runner: ToyRunner, tokens: list[int]) -> np.ndarray:
    return runner.reference_logits(tokens)[-1].double().numpy()


def brute_force(runner: ToyRunner, language: Language, most: int) -> list[int]:
    """The most probable allowed token, again and again; what is allowed is looked up among all texts."""
    output: list[int] = []
    while len(output) < most and not language.complete(text_of(output)):
        allowed = language.allowed(text_of(output))
        logits = next_logits(runner, PROMPT + output)
        output.append(max(allowed, key=lambda token: (logits[token], -token)))
        if output[-1] == EOS:
            break
    return output


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda one: one.pattern)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_is_a_masked_generate(compiler: GrammarCompiler, language: Language, seed: int, path: str) -> None:
    engine = Engine(compiler, seed=seed)
    tokens, end = engine.answer(GREEDY.replace(grammar=regex_grammar(language.pattern)))
    assert tokens == brute_force(engine.runner, language, 20)
    assert end.finish_reason is FinishReason.STOP
    assert text_of(tokens) in language.texts


def exact(runner: ToyRunner, language: Language, temperature: float) -> dict[tuple[int, ...], float]:
    """The probability of each way to write each text, by the free distribution cut to what is allowed and rescaled."""
    found: dict[tuple[int, ...], float] = {}
    open_: list[tuple[list[int], float]] = [([], 1.0)]
    while open_:
        output, so_far = open_.pop()
        if output[-1:] == [EOS] or language.complete(text_of(output)):
            found[tuple(output)] = so_far
            continue
        allowed = language.allowed(text_of(output))
        logits = next_logits(runner, PROMPT + output)[allowed] / temperature
        weights = np.exp(logits - logits.max())
        open_ += [([*output, t], so_far * p) for t, p in zip(allowed, weights / weights.sum(), strict=True)]
    return found


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda one: one.pattern)
def test_sampling_is_free_sampling_rescaled_to_what_is_allowed(
    compiler: GrammarCompiler, language: Language, path: str
) -> None:
    """Chi-square over whole answers; expectations below 5 are joined."""
    temperature, draws = 2.5, 1024
    engine = Engine(compiler, seed=1)
    params = SamplingParams(temperature=temperature, max_tokens=20, n=128, grammar=regex_grammar(language.pattern))
    for i in range(draws // 128):
        engine.add(f"r{i}", params.replace(seed=1000 + i))
    counts = Counter(tuple(tokens) for tokens, _ in engine.run().values())
    probabilities = exact(engine.runner, language, temperature)
    assert counts.keys() <= probabilities.keys()
    assert math.isclose(sum(probabilities.values()), 1.0)
    rare_seen = rare_expected = statistic = 0.0
    cells = -1
    for answer, probability in probabilities.items():
        if (expected := probability * draws) < 5:
            rare_seen, rare_expected = rare_seen + counts[answer], rare_expected + expected
            continue
        statistic, cells = statistic + (counts[answer] - expected) ** 2 / expected, cells + 1
    if rare_expected >= 5:
        statistic, cells = statistic + (rare_seen - rare_expected) ** 2 / rare_expected, cells + 1
    assert cells >= 2
    # The 0.999 quantile of chi-square, by Wilson and Hilferty; seeds are fixed, so this passes always or never.
    assert statistic < cells * (1 - 2 / (9 * cells) + 3.09 * math.sqrt(2 / (9 * cells))) ** 3


def test_the_same_seeds_give_the_same_answers_beside_others_and_after_preemptions(compiler: GrammarCompiler) -> None:
    sampling = SamplingParams(temperature=1.5, max_tokens=30, grammar=regex_grammar("(ab|c|[0-9])+x"))
    alone = []
    for i in range(12):
        engine = Engine(compiler)
        alone.append(engine.answer(sampling.replace(seed=i))[0])
    crowded = Engine(compiler, num_blocks=24, max_num_seqs=12)
    expect_short_outputs(crowded.core)
    for i in range(12):
        crowded.add(f"r{i}", sampling.replace(seed=i))
        crowded.add(f"free{i}", SamplingParams(temperature=1.0, seed=i, max_tokens=20, ignore_eos=True))
    found = crowded.run()
    assert [found[f"r{i}", 0][0] for i in range(12)] == alone
    assert crowded.core.stats().num_preemptions > 0


@pytest.mark.parametrize("after", range(6))
def test_a_sequence_that_comes_from_elsewhere_goes_on_as_it_would_have(compiler: GrammarCompiler, after: int) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=12, grammar=regex_grammar("([0-9]|ab){12}"))
    tokens, _ = Engine(compiler).answer(sampling)
    assert Engine(compiler).answer(sampling, output=tokens[:after])[0] == tokens[after:]


def test_roll_back_takes_the_grammar_back_too(compiler: GrammarCompiler) -> None:
    grammar = regex_grammar("([0-9]|ab){9}")
    straight = Engine(compiler).answer(GREEDY.replace(grammar=grammar))[0]
    engine = Engine(compiler)
    engine.add("a", GREEDY.replace(grammar=grammar))
    seen: list[int] = []
    while len(seen) < 6:
        seen += [token for output in engine.core.step() for token in output.token_ids]
    engine.core.roll_back(RequestId("a"), 4)
    assert seen[:2] + engine.run()["a", 0][0] == straight


def test_tokens_are_taken_back_where_a_part_has_a_bound_in_tokens(compiler: GrammarCompiler) -> None:
    a, b, x = (TEXTS.index(text) for text in "abx")
    matcher = compiler.constraint(Grammar("reasoning", 'start: body "x"\nbody[max_tokens=3]: /[ab]*/')).matcher
    for _ in range(2):
        assert matcher.consume([a, b, a])
        assert not matcher.allows(b)
        fork = matcher.fork()
        for count in (2, 1):
            assert matcher.allows(x)
            matcher.roll_back(count)
            assert matcher.allows(b)
        fork.roll_back(1)
        assert fork.consume([b])
        assert not fork.allows(a)
        assert fork.consume([x])
        assert fork.complete
    assert matcher.error == fork.error == ""


def test_matchers_fork_and_take_tokens_back(compiler: GrammarCompiler) -> None:
    matcher = compiler.constraint(regex_grammar("ab[xy]")).matcher
    assert matcher.forced_tokens() == [TEXTS.index("ab")]
    matcher.consume([TEXTS.index("ab")])
    fork = matcher.fork()
    matcher.consume([TEXTS.index("y")])
    assert (matcher.complete, fork.complete) == (True, False)
    matcher.roll_back(1)
    assert not matcher.complete
    assert fork.allows(TEXTS.index("x"))
    assert not fork.consume([TEXTS.index("a")])
    assert fork.error
    assert not matcher.error


def test_what_is_forced_is_written_as_the_tokenizer_writes_it(compiler: GrammarCompiler, path: str) -> None:
    """Where one text alone can follow, sampling would choose only how it is cut into tokens."""
    sampling = SamplingParams(temperature=2.0, max_tokens=20, grammar=regex_grammar("xabc(0|1)"))
    for seed in range(20):
        tokens, _ = Engine(compiler).answer(sampling.replace(seed=seed))
        assert tokens[:-1] == [TEXTS.index("x"), TEXTS.index("abc")]


# What contradicts a grammar


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_and_ignore_eos_give_way_where_nothing_else_is_allowed(
    compiler: GrammarCompiler, temperature: float, path: str
) -> None:
    for changes in ({"min_tokens": 15}, {"ignore_eos": True}, {"ignore_eos": True, "min_tokens": 15}):
        params = SamplingParams(
            temperature=temperature, seed=1, max_tokens=20, grammar=regex_grammar("a[xy]"), **changes
        )
        tokens, end = Engine(compiler).answer(params.replace(**changes))
        assert len(tokens) == 2
        assert end.finish_reason is FinishReason.STOP


def test_min_tokens_and_ignore_eos_hold_where_the_answer_may_go_on(compiler: GrammarCompiler, path: str) -> None:
    bias = {EOS: 100.0}  # it would end at once
    wanted = SamplingParams(temperature=0.0, max_tokens=12, logit_bias=bias, grammar=regex_grammar("[a-z]*"))
    assert Engine(compiler).answer(wanted)[0] == [EOS]
    tokens, end = Engine(compiler).answer(wanted.replace(min_tokens=5))
    assert len(tokens) == 6
    assert tokens.index(EOS) == 5
    assert end.stop_token_id == EOS
    tokens, end = Engine(compiler).answer(wanted.replace(ignore_eos=True))
    assert len(tokens) == 12
    assert EOS not in tokens
    assert end.finish_reason is FinishReason.LENGTH


def test_the_mask_wins_over_bias_and_penalties(compiler: GrammarCompiler, path: str) -> None:
    bias = dict.fromkeys(range(VOCAB), -100.0)
    sampling = SamplingParams(
        temperature=0.7, seed=5, max_tokens=9, logit_bias=bias, grammar=regex_grammar("(ab|c)+"), top_p=0.5, top_k=3,
        repetition_penalty=1.4, presence_penalty=1.0, frequency_penalty=1.0,
    )  # fmt: skip
    tokens, _ = Engine(compiler).answer(sampling)
    assert set(text_of(tokens)) <= set("abc")


def test_logprobs_are_those_of_what_is_allowed(compiler: GrammarCompiler, path: str) -> None:
    engine = Engine(compiler)
    tokens, _ = engine.answer(GREEDY.replace(grammar=choice_grammar(["x", "y", "z"])))
    engine.add("one", GREEDY.replace(grammar=choice_grammar(["x", "y", "z"]), logprobs=5))
    found = [one for output in engine.core.step() for one in output.logprobs or ()]
    allowed = [TEXTS.index(letter) for letter in "xyz"]
    logits = torch.from_numpy(next_logits(engine.runner, PROMPT)[allowed])
    expected = dict(zip(allowed, torch.log_softmax(logits, 0).tolist(), strict=True))
    assert found[0].token_id == tokens[0]
    assert found[0].logprob == pytest.approx(expected[tokens[0]], abs=1e-4)
    assert {token: value for token, value in found[0].top if value > -1e30} == pytest.approx(expected, abs=1e-4)


def test_what_is_cut_ends_by_length_and_what_is_complete_by_stop(compiler: GrammarCompiler) -> None:
    grammar = regex_grammar("[xyz]{6}")
    tokens, end = Engine(compiler).answer(GREEDY.replace(max_tokens=5, grammar=grammar))
    assert (len(tokens), end.finish_reason) == (5, FinishReason.LENGTH)
    tokens, end = Engine(compiler).answer(GREEDY.replace(max_tokens=6, grammar=grammar))
    assert (len(tokens), end.finish_reason, end.stop_token_id) == (6, FinishReason.STOP, None)


def test_a_grammar_can_begin_after_tokens(compiler: GrammarCompiler, path: str) -> None:
    start = (TEXTS.index("z"),)
    grammar = dataclasses.replace(regex_grammar("[0-9]{3}"), start_token_ids=start)
    bias = {start[0]: 20.0, EOS: 100.0}
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=40, logit_bias=bias, grammar=grammar)
    for output in ([], [TEXTS.index("q")]):
        tokens, end = Engine(compiler).answer(params, output=output)
        assert end.finish_reason is FinishReason.STOP
        at = tokens.index(start[0])
        assert EOS not in tokens
        assert text_of(tokens[at + 1 :]).isdigit()
        assert len(text_of(tokens[at + 1 :])) == 3


def test_a_row_that_nothing_may_follow_ends_with_an_error_and_the_others_go_on(compiler: GrammarCompiler) -> None:
    stuck = lark_grammar("start: LETTER DIGIT\nLETTER: /[a-z]/\nDIGIT: /[0-9]/")
    engine = Engine(compiler)
    constraint = compiler.constraint(stuck)
    constraint.matcher.consume([TEXTS.index("a")])
    constraint.matcher.consume([TEXTS.index("b")])  # as if it had been made to follow a forbidden token
    engine.core.add_request(
        EngineRequest(RequestId("bad"), PROMPT, GREEDY.replace(grammar=stuck), constraint=constraint)
    )
    engine.add("good", GREEDY.replace(grammar=stuck))
    engine.add("free", GREEDY.replace(max_tokens=4))
    found = {key[0]: end for key, (_, end) in engine.run().items()}
    assert found["bad"].finish_reason is FinishReason.ERROR
    assert "grammar sha256:" in (found["bad"].error or "")
    assert found["bad"].unfit, "no other instance is asked, and no circuit breaker counts it"
    assert found["good"].finish_reason is FinishReason.STOP
    assert found["free"].error is None


def test_a_failed_step_leaves_no_masks_behind(compiler: GrammarCompiler) -> None:
    engine = Engine(compiler)
    engine.add("bad", GREEDY.replace(grammar=regex_grammar("[0-9]+")))
    engine.runner.fail_next = RuntimeError("out of luck")
    assert engine.run()["bad", 0][1].finish_reason is FinishReason.ERROR
    engine.add("good", GREEDY.replace(grammar=regex_grammar("[0-9]{4}")))
    assert text_of(engine.run()["good", 0][0]).isdigit()


# Refusals


def test_an_engine_without_grammars_takes_none(compiler: GrammarCompiler) -> None:
    engine = Engine(compiler)
    with pytest.raises(InvalidRequestError) as raised:
        engine.core.add_request(EngineRequest(RequestId("a"), PROMPT, GREEDY.replace(grammar=regex_grammar("a"))))
    assert raised.value.field == "grammar"


def test_output_that_does_not_follow_the_grammar_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        compiler.constraint(regex_grammar("[0-9]+"), [TEXTS.index("a")])
    assert raised.value.field == "output_token_ids"


def test_what_is_compiled_is_kept_and_bounded(tmp_path: Path) -> None:
    backend = make_compiler(tmp_path).backend
    compiler = GrammarCompiler(backend, frozenset({EOS}), max_grammars=2)
    first, *others = (Grammar("regex", f"start: /{letter}/") for letter in "abc")
    for grammar in (first, first, *others):
        compiler.constraint(grammar)
    assert (len(compiler), compiler.cache_hits, compiler.compiled) == (2, 1, 3)
    assert compiler.find(first) is None
    with pytest.raises(InvalidRequestError, match="unknown"):
        compiler.constraint(Grammar("grammar", "start: unknown"))
    assert compiler.refused == 1
