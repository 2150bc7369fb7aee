"""Acceptance by rejection: tokens are distributed as without drafts, whatever is drafted; greedy ones are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest
import torch
from tests.support.models.drafters import BrokenDrafter
from tests.support.models.toy_runner import ToyRunner
from tests.support.tiny_grammar import EOS, VOCAB, make_compiler

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.device import ComputeDevice
from baton.engine.grammar.constraint import GrammarCompiler
from baton.engine.request import EngineRequest
from baton.engine.sequence import Sequence
from baton.engine.speculation.chain import ModelDrafter
from baton.engine.speculation.drafter import Drafter, Proposal
from baton.grammar import regex_grammar
from baton.types import FinishReason, RequestId, SamplingParams
from baton_kernels import rejection

CPU = ComputeDevice(torch.device("cpu"), on_gpu=False)
PROMPT = [5, 9, 14, 3, 21, 7, 10]
DRAWN = SamplingParams(temperature=1.0, top_k=4, max_tokens=4, ignore_eos=True)
COUNT, FEW = 1200, 500
CHI_SQUARE_LIMIT = 2.0
"""Per degree of freedom, of some tens: once in 10,000 tries at most."""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return make_compiler(tmp_path_factory.mktemp("tokenizer"))


class RandomDrafter:
    """Draws drafts from a distribution of its own over the first tokens, and says so."""

    name, sequential = "random", False

    def __init__(self, tokens: int = VOCAB) -> None:
        self.rng, self.tokens = np.random.default_rng(1), tokens

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        """Return draws."""
        return [self._draft(limit) for _, limit in wanted]

    def _draft(self, limit: int) -> Proposal:
        probs = np.zeros((limit, VOCAB))
        probs[:, : self.tokens] = self.rng.dirichlet(np.full(self.tokens, 0.3), limit)
        tokens = [int(self.rng.choice(VOCAB, p=each)) for each in probs]
        return Proposal(tokens, drawn_from=probs.astype(np.float32))

    def sequence_finished(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


def draft_model(seed: int = 1) -> ModelDrafter:
    """A model that is another one than the target, which has seed 0."""
    drafter = ModelDrafter(ToyRunner(block_size=4, vocab_size=VOCAB, eos=EOS, seed=seed), 400, [CPU])
    drafter.tells_draws = True
    return drafter


def look_up(answers: list[list[int]]) -> BrokenDrafter:
    """Somebody who drafts what another answer has at the same place: it was not drawn for this one."""

    def draft(sequence: Sequence, limit: int) -> list[int]:
        other = answers[int(sequence.group.request.request_id) % len(answers)]
        return other[sequence.num_output :][:limit]

    return BrokenDrafter(draft)


DRAFTERS: dict[str, Callable[[list[list[int]]], Drafter]] = {
    "random": lambda _: RandomDrafter(),
    "model": lambda _: draft_model(),
    "look-up": look_up,
}


def run(
    compiler: GrammarCompiler, drafter: Drafter | None, sampling: SamplingParams, seeds: range
) -> tuple[list[list[int]], EngineCore]:
    """Return the answers of requests that differ by their seeds."""
    runner = ToyRunner(block_size=4, vocab_size=VOCAB, eos=EOS)
    config = EngineConfig(
        block_size=4, max_num_batched_tokens=512, max_num_seqs=64, max_queue=10_000,
        speculative_tokens=3, speculative_acceptance="rejection",
    )  # fmt: skip
    core = EngineCore(config, runner, runner.make_arena(600), grammars=compiler, drafter=drafter)
    for seed in seeds:
        constraint = None if sampling.grammar is None else compiler.constraint(sampling.grammar)
        one = sampling.replace(seed=seed)
        core.add_request(EngineRequest(RequestId(str(seed)), PROMPT, one, constraint=constraint))
    found: dict[str, list[int]] = {str(seed): [] for seed in seeds}
    while core.has_work():
        for output in core.step():
            assert output.finish_reason is not FinishReason.ERROR, output.error
            found[output.request_id] += output.token_ids
            assert [one.token_id for one in output.logprobs or ()] in ([], output.token_ids)
    core.check_integrity()
    return list(found.values()), core


def chi_square(a: list[list[int]], b: list[list[int]]) -> float:
    """Return chi-square, per degree of freedom, of whether two samples of answers are of one distribution."""
    counts = [Counter(map(tuple, each)) for each in (a, b)]
    common = [key for key, total in (counts[0] + counts[1]).items() if total >= 10]
    table = np.array([[each[key] for key in common] for each in counts], np.float64)
    rest = np.array([len(each) for each in (a, b)]) - table.sum(1)
    table = np.concatenate([table, rest[:, None]], 1) if rest.sum() else table
    expected = table.sum(0)[None] * table.sum(1)[:, None] / table.sum()
    return float(((table - expected) ** 2 / expected).sum() / (table.shape[1] - 1))


@pytest.fixture(scope="module")
def plain(compiler: GrammarCompiler) -> list[list[int]]:
    return run(compiler, None, DRAWN, range(COUNT))[0]


@pytest.mark.parametrize("name", DRAFTERS)
def test_answers_are_distributed_as_without_drafts(
    compiler: GrammarCompiler, plain: list[list[int]], name: str
) -> None:
    answers, core = run(compiler, DRAFTERS[name](plain), DRAWN, range(COUNT, 2 * COUNT))
    assert core.speculator is not None
    assert sum(core.speculator.stats.accepted.values()) > 30  # else nothing was tried
    assert chi_square(plain, answers) < CHI_SQUARE_LIMIT


def test_a_wrong_rule_of_acceptance_is_noticed(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    free, first = DRAWN.replace(top_k=0), range(FEW)
    samples = []
    for drafter in (None, RandomDrafter(), None):
        if drafter is not None:
            monkeypatch.setattr(rejection, "uniforms", lambda keys, numbers: np.zeros((1, 1)))  # all drafts are kept
        answers, _ = run(compiler, drafter, free, first)
        samples.append([each[:2] for each in answers])
        first = range(first.stop, first.stop + FEW)
    right, wrong, again = samples
    assert chi_square(right, again) < CHI_SQUARE_LIMIT
    assert chi_square(right, wrong) > 2 * CHI_SQUARE_LIMIT


def test_a_model_that_drafts_for_itself_is_always_right(compiler: GrammarCompiler) -> None:
    _, core = run(compiler, draft_model(0), DRAWN, range(50))
    assert core.speculator is not None
    assert core.speculator.stats.accepted == core.speculator.stats.drafted


def test_greedy_answers_are_the_same(compiler: GrammarCompiler) -> None:
    greedy = DRAWN.replace(temperature=0.0, top_k=0, max_tokens=20, logprobs=2)
    assert run(compiler, draft_model(), greedy, range(3))[0] == run(compiler, None, greedy, range(3))[0]


def test_what_a_grammar_takes_of_a_draft_is_no_draw_from_the_whole(compiler: GrammarCompiler) -> None:
    guided = DRAWN.replace(top_k=0, max_tokens=3, grammar=regex_grammar("[a-e]{3}"), logprobs=0)
    plain, _ = run(compiler, None, guided, range(FEW))
    answers, core = run(compiler, RandomDrafter(8), guided, range(FEW, 2 * FEW))  # five of them are allowed
    assert core.speculator is not None
    assert sum(core.speculator.stats.accepted.values()) > 20
    assert chi_square([each[:2] for each in plain], [each[:2] for each in answers]) < CHI_SQUARE_LIMIT
