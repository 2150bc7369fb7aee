"""Trees of drafts over a toy model: the same tokens as without, KV as if nothing were refused, books that add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.drafters import BrokenDrafter, RecordedTreeDrafter
from tests.support.models.toy_runner import ToyRunner
from tests.support.preemption import expect_short_outputs
from tests.support.tiny_grammar import EOS, VOCAB, make_compiler
from tests.unit.engine.speculation.test_speculation import BLOCK, GREEDY, PROMPT, SAMPLINGS, Answers, Engine, answers

from baton.config import EngineConfig
from baton.engine.grammar.constraint import GrammarCompiler
from baton.engine.request import EngineRequest
from baton.engine.sampler import sample
from baton.engine.sampler_row import SamplerRow
from baton.engine.speculation.drafter import Proposal
from baton.engine.speculation.methods import load_drafter
from baton.engine.speculation.tree import (
    MAX_NODES,
    chances_of,
    depths,
    first_path,
    is_chain,
    likeliest,
    pick,
    right_path,
)
from baton.errors import ConfigError
from baton.grammar import regex_grammar
from baton.kv_cache.events import BlocksStored
from baton.types import FinishReason, RequestId, SamplingParams
from baton_kernels.paged_attention import ancestor_masks


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return make_compiler(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def plain(compiler: GrammarCompiler) -> Answers:
    engine = Engine(compiler)
    engine.add_all()
    return engine.run()


def recorded(plain: Answers, probability: float, width: int, seed: int = 0) -> RecordedTreeDrafter:
    tokens = {key: answer[0] for key, answer in plain.items()}
    return RecordedTreeDrafter(tokens, width=width, probability=probability, vocab_size=VOCAB, seed=seed)


def tree_engine(compiler: GrammarCompiler, drafter: object, num_blocks: int = 256, **options: object) -> Engine:
    values = {"speculative": "suffix", "speculative_width": 4, **options}
    return Engine(compiler, drafter, num_blocks, **values)  # type: ignore[arg-type]


# Trees by themselves


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    return [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, MAX_NODES)))]


@given(parents=trees(), seed=st.integers(0, 9))
def test_what_is_picked_of_a_tree_is_a_tree_with_its_likeliest_path_first(parents: list[int], seed: int) -> None:
    given_chances = np.random.default_rng(seed).random(len(parents)).tolist()
    chances = chances_of(parents, given_chances, 0.5, 1.0)
    kept = sorted(np.argsort(-chances, kind="stable")[: 1 + len(parents) // 2].tolist())
    order, new = pick(parents, chances, kept)
    assert sorted(order) == kept
    for i, (node, parent) in enumerate(zip(order, new, strict=True)):
        assert parent < i
        assert (order[parent] if parent >= 0 else -1) == parents[node]
    path = first_path(new)
    assert path == list(range(len(path)))
    for i, parent in enumerate(new):  # a first child follows its parent at once, and none is likelier
        siblings = [j for j, other in enumerate(new) if other == parent]
        assert siblings[0] == parent + 1
        assert all(chances[order[siblings[0]]] >= chances[order[j]] for j in siblings)
        assert depths(new)[i] + 2 == ancestor_masks(new)[i + 1].bit_count()


@given(parents=trees(), rate=st.floats(0.0, 1.0))
def test_chances_of_alternatives_are_no_more_than_one_together(parents: list[int], rate: float) -> None:
    chances = chances_of(parents, None, rate, 1.0)
    for parent in {-1, *range(len(parents))}:
        own = 1.0 if parent < 0 else chances[parent]
        assert sum(chances[i] for i, other in enumerate(parents) if other == parent) <= own * rate + 1e-9


@given(parents=trees(), seed=st.integers(0, 99))
def test_the_right_path_is_found_wherever_it_lies(parents: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, sampled = (rng.integers(0, 3, len(parents) + more).tolist() for more in (0, 1))
    path, node = [], -1
    while True:
        children = [i for i, p in enumerate(parents) if p == node and tokens[i] == sampled[node + 1]]
        if not children:
            break
        node = children[0]
        path.append(node)
    found = right_path(tokens, tuple(parents), sampled)
    # Of two equal children any does: the speculator lets no such pair pass.
    assert len(set(zip(parents, tokens, strict=True))) < len(tokens) or found == path
    chain = right_path(tokens, (), sampled)
    assert chain == right_path(tokens, tuple(range(-1, len(tokens) - 1)), sampled)
    assert is_chain(range(-1, len(tokens) - 1))


# How they grow


@settings(max_examples=40, deadline=None)
@given(
    vocab=st.sampled_from([3, 64, 128, 300, 1000]),
    width=st.integers(1, 8),
    seed=st.integers(0, 2**31),
    ways=st.lists(st.sampled_from(["greedy", "sampled", "penalties", "bias"]), min_size=1, max_size=6),
)
def test_the_likeliest_token_is_the_one_that_the_sampler_chooses(
    vocab: int, width: int, seed: int, ways: list[str]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(ways), vocab, generator=generator) * 3
    rows = [
        SamplerRow(
            SAMPLINGS[way].replace(logit_bias={2: -1.5} if way == "bias" else {}),
            seed + i,
            stop_ids=[1],
            prompt=[2],
            output=[0, 1, 1],
        )
        for i, way in enumerate(ways)
    ]
    found = likeliest(logits.clone(), rows, width)
    for first, candidates in zip(sample(logits.clone(), rows).token_ids, found, strict=True):
        assert candidates[0][0] == first
        assert 1 <= len(candidates) <= width
        assert len({token for token, _ in candidates}) == len(candidates)
        assert sum(chance for _, chance in candidates) <= 1.0 + 1e-6
    bad = torch.full((1, vocab), float("nan"))
    assert likeliest(bad, rows[:1], width) == [[]]


# The same tokens


@settings(max_examples=25, deadline=None)
@given(
    probability=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    width=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 99),
    tokens=st.none() | st.integers(1, 16),
    num_blocks=st.sampled_from([30, 40, 256]),
    budget=st.sampled_from([17, 48, 200]),
    caching=st.booleans(),
)
def test_answers_are_those_without_speculation(
    compiler: GrammarCompiler,
    plain: Answers,
    probability: float,
    width: int,
    seed: int,
    tokens: int | None,
    num_blocks: int,
    budget: int,
    caching: bool,
) -> None:
    """Sequences of all kinds side by side, in pools so small that they are preempted."""
    drafter = recorded(plain, probability, width, seed)
    engine = tree_engine(
        compiler,
        drafter,
        num_blocks,
        speculative_width=width,
        speculative_tokens=tokens,
        max_num_batched_tokens=budget,
        prefix_caching=caching,
    )
    expect_short_outputs(engine.core)
    engine.add_all()
    assert engine.run() == plain
    assert not drafter.live
    assert engine.core.speculator is not None
    assert not engine.core.speculator._records


def test_trees_save_steps_and_accepted_kv_is_moved_together(compiler: GrammarCompiler, plain: Answers) -> None:
    engine = tree_engine(compiler, recorded(plain, 1.0, 4), speculative_tokens=4, max_num_batched_tokens=256)
    engine.add("sampled", SAMPLINGS["sampled"], PROMPT[:5])
    assert engine.run()["sampled", 0] == plain["sampled", 0]
    # A right token in each level: five tokens per step, but where the tree's random tokens got in the way.
    assert 1 + -(-29 // 5) <= engine.steps < 12
    assert engine.runner.num_moved > 0
    stats = engine.core.speculator.stats  # type: ignore[union-attr]
    assert stats.drafted[0] == 4 * stats.steps or stats.drafted[0] > 3 * stats.steps
    assert stats.accepted[0] == stats.steps
    (end,) = [output.metrics for output in engine.outputs if output.finish_reason is not None]
    assert end is not None
    assert end.drafted_tokens == stats.drafted.total()
    assert end.accepted_tokens == stats.accepted.total() > 15


def test_kv_in_the_cache_is_that_of_accepted_tokens_in_their_order(compiler: GrammarCompiler, plain: Answers) -> None:
    """Block for block what an engine without drafts computes, and the same events."""
    kept: list[dict[str, np.ndarray]] = []
    for drafter in (None, recorded(plain, 0.8, 4)):
        engine = Engine(compiler) if drafter is None else tree_engine(compiler, drafter, speculative_tokens=5)
        engine.add_all()
        assert engine.run() == plain
        names = {h for event in engine.events if isinstance(event, BlocksStored) for h in event.hashes}
        pool = engine.core.shards.primary.blocks.view(np.float32)
        kept.append({name: pool[engine.core._pool.match([name])[0]].copy() for name in names})
    assert engine.runner.num_moved > 10
    assert kept[0].keys() == kept[1].keys()
    for name, block in kept[0].items():
        np.testing.assert_allclose(kept[1][name], block, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [2, 4])
def test_answers_are_those_without_speculation_by_look_up(
    compiler: GrammarCompiler, plain: Answers, width: int
) -> None:
    config = EngineConfig(speculative="suffix", speculative_width=width)
    engine = tree_engine(compiler, load_drafter(config, ToyRunner()), speculative_tokens=5, speculative_width=width)
    for _ in range(2):
        engine.outputs.clear()
        engine.add_all()
        assert engine.run() == plain
    stats = engine.core.speculator.stats  # type: ignore[union-attr]
    assert stats.drafted.total() > 20
    assert stats.accepted.total() > 10


def test_a_sequence_goes_on_elsewhere_in_the_middle_of_trees(compiler: GrammarCompiler, plain: Answers) -> None:
    """Its tokens so far are handed to another engine, which speculates otherwise or not at all."""
    whole = plain["sampled", 0][0]
    for stop in (3, 4, 9, 17):
        engine = tree_engine(compiler, recorded(plain, 0.9, 4), speculative_tokens=6, max_num_batched_tokens=256)
        engine.add("sampled", SAMPLINGS["sampled"], PROMPT[:5])
        while sum(len(output.token_ids) for output in engine.outputs) < stop:
            engine.outputs += engine.core.step()
        so_far = [token for output in engine.outputs for token in output.token_ids]
        assert so_far == whole[: len(so_far)]
        for other in (Engine(compiler), tree_engine(compiler, recorded(plain, 0.9, 2, seed=5), speculative_width=2)):
            sampling = SAMPLINGS["sampled"]
            request = EngineRequest(RequestId("sampled"), PROMPT[:5], sampling, output_token_ids=so_far)
            other.core.add_request(request)
            assert so_far + other.run()["sampled", 0][0] == whole


@pytest.mark.parametrize("place", range(5))
def test_a_stop_token_at_any_depth_ends_the_sequence_there(
    compiler: GrammarCompiler, plain: Answers, place: int
) -> None:
    free = plain["sampled", 0][0]
    stop = free[1 + place]
    at = free.index(stop)
    engine = tree_engine(compiler, recorded(plain, 1.0, 3), speculative_tokens=6, max_num_batched_tokens=256)
    engine.add("sampled", SAMPLINGS["sampled"].replace(stop_token_ids=(stop,)), PROMPT[:5])
    tokens, _, reason, found = engine.run()["sampled", 0]
    assert (tokens, reason, found) == (free[: at + 1], FinishReason.STOP, stop)


def test_each_branch_has_a_grammar_state_of_its_own(compiler: GrammarCompiler) -> None:
    """Branches that the grammar allows are verified side by side; what it forbids is not computed."""
    grammar = regex_grammar("(a(b|c)|b(a|c)|c(a|b))*")
    sampling = SamplingParams(seed=3, max_tokens=12, grammar=grammar)
    engine = Engine(compiler)
    engine.add("a", sampling)
    expected = engine.run()["a", 0]
    a, b, c = (compiler_token(compiler, grammar, text) for text in "abc")
    # Of these a a, b b and c c are forbidden wherever a pair begins.
    tokens, parents = [a, b, c], [-1, -1, -1]
    for parent in range(12):
        tokens += [a, b, c]
        parents += [parent] * 3

    drafter = BrokenDrafter(lambda sequence, limit: [])
    drafter.propose = lambda wanted: [Proposal(tokens, parents=parents) for _ in wanted]  # type: ignore[method-assign]
    engine = tree_engine(compiler, drafter, speculative_tokens=4, max_num_batched_tokens=256)
    engine.add("a", sampling)
    assert engine.run()["a", 0] == expected
    stats = engine.core.speculator.stats  # type: ignore[union-attr]
    assert stats.drafted[1] > 0
    assert stats.accepted.total() > 0
    assert not stats.faults


def compiler_token(compiler: GrammarCompiler, grammar: object, text: str) -> int:
    """Return the token that spells a letter: the one that a grammar of that letter allows."""
    constraint = compiler.constraint(regex_grammar(text))
    return next(token for token in range(VOCAB) if token != EOS and constraint.allows(token))


@pytest.mark.parametrize("place", range(4))
def test_logits_that_are_no_numbers_fail_a_request_only_where_its_sequence_gets(
    compiler: GrammarCompiler, plain: Answers, place: int
) -> None:
    right = plain["greedy", 0][0]
    poison = next(token for token in range(VOCAB - 1, 0, -1) if token not in [*right, *PROMPT])
    path = right[1:5]
    parents = [-1, 0, 1, 2, place - 1]
    drafter = BrokenDrafter(lambda sequence, limit: [])
    drafter.propose = lambda wanted: [  # type: ignore[method-assign]
        Proposal([*path, poison], parents=parents) if s.num_output == 1 else Proposal(()) for s, _ in wanted
    ]
    engine = tree_engine(compiler, drafter, speculative_tokens=8)
    engine.runner.poisoned = frozenset({poison})
    engine.add("greedy", GREEDY, PROMPT[:3])
    assert engine.run()["greedy", 0] == plain["greedy", 0]
    failed = []
    for each in (None, recorded(plain, 1.0, 3)):
        engine = Engine(compiler) if each is None else tree_engine(compiler, each, speculative_tokens=8)
        engine.runner.poisoned = frozenset({right[2 + place]})
        engine.add("greedy", GREEDY, PROMPT[:3])
        while engine.core.has_work():
            engine.outputs += engine.core.step()
        engine.core.check_integrity()
        (error,) = [output.error for output in engine.outputs if output.error]
        failed.append((error, [token for output in engine.outputs for token in output.token_ids]))
    assert failed[0] == failed[1]


# Limits


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([3, VOCAB, 4, 5], [-1, 0, 0, 1]),
        ([3, 3, 3], [-1, -1, -1]),
        ([3] * 200, [-1, *range(199)]),
        (list(range(2, 60)) * 3, [-1] * 58 + [0] * 58 + [1] * 58),
        ([3, 4], [5, -1]),
    ],
)
def test_a_tree_that_makes_no_sense_fails_no_request(
    compiler: GrammarCompiler, plain: Answers, tokens: list[int], parents: list[int]
) -> None:
    drafter = BrokenDrafter(lambda sequence, limit: [])
    drafter.propose = lambda wanted: [Proposal(tokens, parents=parents) for _ in wanted]  # type: ignore[method-assign]
    engine = tree_engine(compiler, drafter, speculative_tokens=16, max_num_batched_tokens=512)
    engine.add_all()
    assert engine.run() == plain
    assert set(engine.core.speculator.stats.faults) == ({"bad_ids"} if VOCAB in tokens else set())  # type: ignore[union-attr]


def test_where_chains_are_asked_for_a_trees_first_path_is_taken(compiler: GrammarCompiler, plain: Answers) -> None:
    engine = Engine(compiler, recorded(plain, 1.0, 3), speculative_tokens=5)
    engine.add_all()
    assert engine.run() == plain
    stats = engine.core.speculator.stats  # type: ignore[union-attr]
    assert stats.drafted[0] == stats.steps > 0
    assert engine.runner.num_moved == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speculative_width": 0}, "between 1 and 8"),
        ({"speculative_width": 9}, "between 1 and 8"),
        ({"speculative_width": 2}, "none has no trees"),
        ({"speculative_width": 2, "speculative": "ngram"}, "ngram has no trees"),
        ({"speculative_width": 4, "speculative": "draft", "speculative_model": "x"}, "draft has no trees"),
        ({"speculative_width": 2, "speculative": "suffix", "speculative_acceptance": "rejection"}, "by rejection"),
    ],
)
def test_a_width_that_cannot_be_is_refused_at_start(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        EngineConfig(**options)  # type: ignore[arg-type]
    assert caught.value.field == "speculative_width"


def test_an_attention_without_trees_is_refused_at_start() -> None:
    runner = ToyRunner()
    runner.why_no_trees = "attention backend toy takes no trees of tokens"
    with pytest.raises(ConfigError, match="toy takes no trees") as caught:
        load_drafter(EngineConfig(speculative="suffix", speculative_width=2), runner)
    assert caught.value.field == "speculative_width"


def test_block_tables_hold_what_trees_need(compiler: GrammarCompiler) -> None:
    """Trees at the context's end: slots beyond it, positions within."""
    engine = tree_engine(compiler, None, speculative_width=8)
    engine.add("a", SamplingParams(temperature=0.0, ignore_eos=True), (PROMPT * 24)[:230])
    free = engine.run()
    for width in (2, 8):
        engine = tree_engine(
            compiler, recorded(free, 0.9, width), speculative_width=width, speculative_tokens=8, block_size=BLOCK
        )
        engine.add("a", SamplingParams(temperature=0.0, ignore_eos=True), (PROMPT * 24)[:230])
        assert engine.run() == free == answers(engine.outputs)
        assert len(free["a", 0][0]) == 26
