"""Tokens under a grammar that are chosen before their masks, which come where a token is refused: the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.drafters import RecordedDrafter
from tests.support.models.toy_runner import ToyRunner
from tests.support.scripted import TINY
from tests.support.tiny_grammar import EOS, LANGUAGES, TEXTS, VOCAB, make_compiler

from baton.config import EngineConfig
from baton.engine import core as core_module
from baton.engine.core import EngineCore
from baton.engine.grammar.constraint import BannedTokens, Constraint, GrammarCompiler, MaskRow, StepMasks
from baton.engine.grammar.guidance import GuidanceBackend
from baton.engine.request import EngineRequest
from baton.engine.sampler import sample
from baton.engine.sampler_row import SamplerRow
from baton.grammar import StructuredOutputs, regex_grammar
from baton.types import RequestId, SamplingParams
from baton_kernels.cpu.library import ThreadTeam
from baton_kernels.token_mask import TokenMask, has_token, pack_mask

PROMPT = [5, 9, 14, 33, 21, 7, 50]
Answers = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return make_compiler(tmp_path_factory.mktemp("tokenizer"))


def answers(
    compiler: GrammarCompiler,
    requests: Sequence[SamplingParams],
    *,
    late: bool,
    drafts: Answers | None = None,
) -> tuple[Answers, StepMasks]:
    """Return the tokens of requests, with masks that come late or before, and who computed them."""
    runner = ToyRunner(block_size=4, vocab_size=VOCAB, eos=EOS)
    config = EngineConfig(block_size=4, max_num_batched_tokens=64, max_num_seqs=16)
    drafter = None if drafts is None else RecordedDrafter(drafts, probability=0.8, vocab_size=VOCAB, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_module, "crowded_team", lambda _: ThreadTeam(2) if late else None)
        engine = EngineCore(config, runner, runner.make_arena(256), grammars=compiler, drafter=drafter)
    assert engine.masks is not None
    assert engine.masks.come_late is late
    for i, each in enumerate(requests):
        constraint = None if each.grammar is None else compiler.constraint(each.grammar)
        engine.add_request(EngineRequest(RequestId(f"r{i}"), PROMPT[i % 5 :], each, constraint=constraint))
    found: Answers = {}
    while engine.has_work():
        for output in engine.step():
            assert not output.error
            found.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    engine.check_integrity()
    assert engine.stats().blocks_active == 0
    return found, engine.masks


GRAMMARS = [
    *(regex_grammar(each.pattern) for each in LANGUAGES),
    regex_grammar("([0-9]|ab){3,12}"),
    regex_grammar("[a-z]*"),
    dataclasses.replace(regex_grammar("[0-9]{3}"), start_token_ids=(TEXTS.index("z"),)),
]
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 5]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    seed=st.integers(0, 10**6),
    n=st.sampled_from([1, 3]),
    max_tokens=st.integers(4, 20),
    min_tokens=st.sampled_from([0, 4]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {EOS: 5.0}, dict.fromkeys(range(VOCAB), -100.0)]),
    stop_token_ids=st.sampled_from([(), (TEXTS.index("b"),)]),
    grammar=st.sampled_from([None, *GRAMMARS]),
)


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(PARAMS, min_size=1, max_size=6), drafted=st.booleans())
def test_answers_are_those_with_masks_that_are_there_before(
    compiler: GrammarCompiler, requests: list[SamplingParams], drafted: bool
) -> None:
    before, _ = answers(compiler, requests, late=False)
    found, masks = answers(compiler, requests, late=True, drafts=before if drafted else None)
    assert found == before
    assert masks.refused_tokens <= masks.tried_tokens


@settings(max_examples=60, deadline=None)
@given(
    grammar=st.sampled_from(GRAMMARS),
    banned=st.sampled_from([None, (EOS,), (EOS, TEXTS.index("a"), TEXTS.index("0"))]),
    seed=st.integers(0, 10**6),
)
def test_a_token_is_taken_where_its_mask_has_it(
    compiler: GrammarCompiler, grammar: object, banned: tuple[int, ...] | None, seed: int
) -> None:
    """All tokens, at each place of a walk; those that are banned only where there are others are left to the mask."""
    rng = np.random.default_rng(seed)
    masks = StepMasks(compiler.backend, VOCAB)
    row = MaskRow(compiler.constraint(grammar), None if banned is None else BannedTokens(banned))  # type: ignore[arg-type]
    for _ in range(12):
        (mask,) = masks.end(masks.begin([row]))
        has = [token for token in range(VOCAB) if has_token(mask, token)]
        taken = [token for token in range(VOCAB) if MaskRow(row.constraint.fork(), row.banned).try_consume([token])]
        assert taken == [token for token in has if not row.constraint.started or token not in (banned or ())]
        token = int(rng.choice(has))
        if token == EOS:
            break
        row.constraint.append(token)
        assert not row.constraint.error
        if row.constraint.complete:
            break


def test_a_token_is_taken_where_its_mask_has_it_in_a_vocabulary_of_4096() -> None:
    ends = frozenset({0, 4})
    backend = GuidanceBackend(TINY, vocab_size=4096, eos_token_ids=ends)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "number"}, "on": {"type": "boolean"}},
        "required": ["name", "n"],
    }
    compiler, masks, rng = GrammarCompiler(backend, ends), StepMasks(backend, 4096), np.random.default_rng(2)
    places = 0
    for output in (StructuredOutputs(json=schema), StructuredOutputs(regex="([a-z]{2,9} ?){3}"), {"json_object": True}):
        wanted = StructuredOutputs(**output) if isinstance(output, dict) else output
        for _ in range(3):
            one: Constraint = compiler.constraint(wanted.to_grammar())
            for _ in range(25):
                (mask,) = masks.end(masks.begin([MaskRow(one)]))
                has = [token for token in range(4096) if has_token(mask, token)]
                assert [token for token in range(4096) if one.allows(token)] == has
                some = rng.choice(4096, 40).tolist()
                assert [token in has for token in some] == [one.fork().try_consume(token) for token in some]
                places += 1
                inside = [token for token in has if token not in ends]
                if not inside:
                    break
                one.append(int(rng.choice(inside)))
    assert places > 80


def test_a_token_that_was_taken_need_not_be_the_one_that_is_appended(compiler: GrammarCompiler) -> None:
    a, b, x = (TEXTS.index(text) for text in "abx")
    one = compiler.constraint(regex_grammar("(ax|bba)+"))
    assert one.try_consume(a)
    one.append(b)
    assert not one.error
    assert [token for token in (a, b, x) if one.allows(token)] == [b]
    assert not one.try_consume(x)
    one.append(b)
    assert one.try_consume(a)
    one.append(a)
    assert not one.error
    assert not one.allows(x)


def test_masks_are_computed_for_refused_tokens_alone(compiler: GrammarCompiler) -> None:
    wanted = dict.fromkeys((TEXTS.index(each) for each in "abc"), 60.0)
    params = SamplingParams(seed=3, max_tokens=9, logit_bias=wanted, grammar=regex_grammar("[abc]{9}"))
    found, masks = answers(compiler, [params, params.replace(temperature=0.0)], late=True)
    assert (masks.masks, masks.tried_tokens, masks.refused_tokens) == (0, sum(map(len, found.values())), 0)
    refused = params.replace(logit_bias={TEXTS.index("z"): 60.0}, max_tokens=2)
    found, masks = answers(compiler, [refused, params], late=True)
    assert (masks.masks, masks.tried_tokens, masks.refused_tokens) == (2, 2 + len(found["r1", 0]), 2)


@pytest.mark.parametrize("changes", [{"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.8}])
def test_filters_that_leave_few_tokens_need_no_mask(compiler: GrammarCompiler, changes: dict[str, float]) -> None:
    wanted = {TEXTS.index(each): 60.0 for each in "abcd"} | {TEXTS.index("a"): 75.0}
    params = SamplingParams(seed=3, max_tokens=9, grammar=regex_grammar("[a-d]{9}"), logit_bias=wanted)
    found, masks = answers(compiler, [params.replace(**changes)], late=True)
    assert (masks.masks, masks.tried_tokens, masks.refused_tokens) == (0, len(found["r0", 0]), 0)


def test_masks_come_first_where_tokens_were_refused(compiler: GrammarCompiler) -> None:
    params = SamplingParams(
        seed=3, max_tokens=30, logit_bias={TEXTS.index("z"): 60.0}, grammar=regex_grammar("[0-9]{30}")
    )
    found, masks = answers(compiler, [params], late=True)
    assert masks.masks == len(found["r0", 0]) == 30
    assert masks.refused_tokens == masks.tried_tokens == 5  # two, and every eighth from then on


@pytest.mark.parametrize("changes", [{"top_k": 30}, {"logprobs": 1}])
def test_what_needs_its_mask_has_it_before(compiler: GrammarCompiler, changes: dict[str, float]) -> None:
    params = SamplingParams(seed=3, max_tokens=9, grammar=regex_grammar("[abc]{9}")).replace(**changes)
    found, masks = answers(compiler, [params], late=True)
    assert (masks.masks, masks.tried_tokens) == (len(found["r0", 0]), 0)


def test_logits_that_are_no_numbers_are_looked_at_again_under_the_mask() -> None:
    """What a mask forbids may be anything."""
    logits = torch.randn(3, 70)
    logits[:, 20] = float("nan")
    logits[2, 40] = float("inf")
    kinds = [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(seed=2)]
    rows = [SamplerRow(one, 1, stop_ids=(), prompt=(), output=()) for one in kinds]
    for row in rows:
        row.constraint = object()  # type: ignore[assignment]

    class Late(StepMasks):
        def __init__(self) -> None: ...

        def refused(self, rows: Sequence[MaskRow], token_ids: Sequence[Sequence[int]]) -> list[int]:
            assert list(token_ids) == [[]] * len(rows)
            return list(range(len(rows)))

        def late(self, rows: Sequence[MaskRow]) -> list[TokenMask]:
            return [pack_mask(np.arange(70) > 30)] * len(rows)

    found = sample(logits, rows, late=Late())
    assert found.bad_rows == (2,)
    assert found.token_ids[0] == 31 + int(logits[0, 31:].argmax())
    assert found.token_ids[1] > 30
