"""Steps launched ahead that fail, when they are launched or read: who ends, and who does not."""

from __future__ import annotations

import pytest
from tests.support.models.noted_engine import GREEDY, PROMPT, Engine, both

from baton.engine.executor.base import ExecutorLostError


@pytest.mark.parametrize("number", range(1, 8))
def test_a_step_that_cannot_be_launched_ends_the_same_requests(number: int) -> None:
    engines = both()
    for engine in engines:
        engine.runner.failures[number] = RuntimeError("no")
        engine.add("a", PROMPT, GREEDY.replace(max_tokens=4))
        engine.add("b", PROMPT[:3], GREEDY)
        engine.run()
    off, on = engines
    assert on.answers == off.answers
    assert any(each.error for each in off.answers.values())
    assert any(each.tokens for each in off.answers.values()) == (number > 1)
    many = Engine("on")
    many.runner.failures[number] = RuntimeError("no")
    many.add("many", PROMPT[:5], GREEDY.replace(n=3, max_tokens=8, temperature=1.0))
    many.run()
    assert {each.error for each in many.answers.values()} == {"RuntimeError: no"}


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_step_that_fails_when_it_is_read_ends_its_sequences_and_no_others(number: int) -> None:
    engine = Engine("on", on_device=True, max_num_seqs=2)
    assert engine.runner.staging is not None
    engine.runner.staging.failures[number] = RuntimeError("no")
    for name in ("a", "b", "c"):
        engine.add(name, PROMPT[:5], GREEDY.replace(max_tokens=6))
    engine.run()
    plain = engine.runner.greedy(PROMPT[:5], 6, ignore_eos=True)
    for name in ("a", "b"):
        assert engine.answers[name, 0].error == "RuntimeError: no"
        assert engine.tokens(name) == plain[: number - 1]
    assert engine.tokens("c") == plain


@pytest.mark.parametrize("where", ["launch", "read"])
def test_a_device_that_fails_ends_the_engine(where: str) -> None:
    engine = Engine("on", on_device=True)
    assert engine.runner.staging is not None
    failures = engine.runner.failures if where == "launch" else engine.runner.staging.failures
    failures[3] = RuntimeError("CUDA error: an illegal memory access was encountered")
    engine.add("a", PROMPT[:5])
    engine.step()
    engine.step()
    assert len(engine.tokens("a")) == 2
    with pytest.raises(ExecutorLostError, match="illegal memory access"):
        engine.step()


def test_logits_that_are_not_finite_end_their_own_request_and_what_follows_them_is_dropped() -> None:
    engine = Engine("on", on_device=True)
    free = engine.runner.greedy(PROMPT, 10, ignore_eos=True)
    engine.runner.poisoned = frozenset({free[3]})
    engine.add("bad", PROMPT)
    engine.add("good", PROMPT[::-1], GREEDY.replace(logit_bias={free[3]: -100.0}))
    engine.run()
    assert engine.tokens("bad") == free[:4]
    assert "not finite" in (engine.answers["bad", 0].error or "")
    assert len(engine.tokens("good")) == 10
    assert engine.told() == {name for run in engine.core.snapshot() for name in run.hashes}
    engine.runner.poisoned = frozenset()
    engine.add("again", PROMPT)
    engine.run()
    assert engine.tokens("again") == free
