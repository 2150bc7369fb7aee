"""Grammars whose masks cost much: what one client chose, and the others whose sequences are in the same step."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
from tests.support.scripted import TINY

from baton.engine.grammar import constraint as limits
from baton.engine.grammar.constraint import Constraint, GrammarCompiler, MaskRow, StepMasks
from baton.engine.grammar.guidance import GuidanceBackend
from baton.grammar import lark_grammar, regex_grammar
from baton_kernels.cpu.library import ThreadTeam

AMBIGUOUS = 'start: e\ne: e e | e e e | "a" | "b"'
MANY_STATES = r"(\w*a\w{400}){5}"


@pytest.fixture(scope="module")
def backend() -> GuidanceBackend:
    return GuidanceBackend(TINY, vocab_size=4096, eos_token_ids=frozenset({0}))


def step(masks: StepMasks, rows: list[Constraint], choice: int) -> None:
    """Take a token per row, the same of those that are allowed."""
    found = masks.end(masks.begin([MaskRow(one) for one in rows]))
    for one, mask in zip(rows, found, strict=True):
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != 0]
        if not one.error:
            one.append(int(allowed[choice % len(allowed)]))


def test_a_request_whose_masks_take_long_fails_and_others_go_on(
    backend: GuidanceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_EXTRA_S", 0.05)
    compiler = GrammarCompiler(backend, frozenset({0}))
    masks = StepMasks(backend, 4096)
    costly = compiler.constraint(lark_grammar(AMBIGUOUS))
    other = compiler.constraint(regex_grammar("[a-z ]{2000}"))
    for choice in range(300):
        step(masks, [costly, other], choice)
        if costly.error:
            break
    assert "take too long" in costly.error
    assert not other.error


@pytest.mark.parametrize(("seconds", "fails"), [(0.0015, False), (0.006, True)])
def test_a_list_of_strings_that_are_nearly_full_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch, seconds: float, fails: bool
) -> None:
    """With 128,000 tokens the mask of each takes 1 to 2 ms, as most tokens are followed until they are too long."""
    vocab = 128_000
    backend = GuidanceBackend(TINY, vocab_size=vocab, eos_token_ids=frozenset({0}))
    masks = StepMasks(backend, vocab, ThreadTeam(1))
    row = GrammarCompiler(backend, frozenset({0})).constraint(regex_grammar('("[a-z]{4}",)+'))
    clock = itertools.count()
    times = SimpleNamespace(perf_counter=time.perf_counter, thread_time=lambda: seconds * next(clock))
    monkeypatch.setattr(limits, "time", times)
    monkeypatch.setattr(limits, "SLOW_S", -1.0)  # whose masks they are is measured in each step
    for choice in range(600):
        step(masks, [row], choice)
        if row.error:
            break
    assert ("take too long" in row.error) == fails


def test_a_full_lexer_is_not_what_the_next_request_gets(backend: GuidanceBackend) -> None:
    compiler = GrammarCompiler(backend, frozenset({0}))
    grammar = regex_grammar(MANY_STATES)
    first = compiler.constraint(grammar)
    first.matcher.family.spent = True  # as its error says it: 50,000 states take seconds
    assert compiler.find(grammar) is None
    assert compiler.constraint(grammar).matcher.family is not first.matcher.family
    assert (compiler.compiled, len(compiler)) == (2, 1)


def test_forks_tell_each_other_of_a_full_lexer(backend: GuidanceBackend) -> None:
    compiler = GrammarCompiler(backend, frozenset({0}))
    kept = compiler.constraint(regex_grammar("a{3}"))
    assert kept.fork().matcher.family is kept.matcher.family


def test_a_grammar_that_cost_much_is_not_kept(backend: GuidanceBackend) -> None:
    compiler = GrammarCompiler(backend, frozenset({0}))
    grammar = regex_grammar("a+")
    compiler.constraint(grammar).matcher.family.seconds = 1.0
    compiler.constraint(regex_grammar("b+"))
    assert len(compiler) == 1


def test_what_one_owner_had_compiled_is_unknown_to_another(backend: GuidanceBackend) -> None:
    compiler = GrammarCompiler(backend, frozenset({0}))
    grammar = regex_grammar("a+")
    compiler.constraint(grammar, owner="salt of acme")
    assert compiler.find(grammar, "salt of zeta") is None
    assert compiler.find(grammar, "salt of acme") is not None
