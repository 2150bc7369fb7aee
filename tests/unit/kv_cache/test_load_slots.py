"""What loads is not running: a source that hangs holds up those alone that load from it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.models.linked_engines import GREEDY, PROMPT, Engine, expected
from tests.support.preemption import expect_short_outputs

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.types import FinishReason, RequestId

SHORT = PROMPT[:3]


def engine(num_blocks: int, **options: Any) -> Engine:
    """An engine that loads what is not ``SHORT``, from a source that answers when a test says so."""
    return Engine(num_blocks, source=Engine(200), options=options)


def prompt_of(number: int) -> list[int]:
    return [2 + (number * 11 + i * 3) % 60 for i in range(12)]


def test_short_requests_run_beside_more_loads_than_the_batch_has_slots() -> None:
    decode = engine(200, max_num_seqs=2)
    for number in range(6):
        decode.add(f"hung{number}", prompt_of(number))
    decode.add("short", SHORT)
    decode.run()
    assert decode.tokens("short") == expected(decode, SHORT)
    assert decode.core.stats().num_loading == 6
    for number in range(6):
        decode.link.finish(f"hung{number}")
    decode.run()
    for number in range(6):
        assert decode.tokens(f"hung{number}") == expected(decode, prompt_of(number))
    decode.assert_empty()


@pytest.mark.parametrize(
    "options", [{"max_loads": 2, "load_share": 1.0}, {"max_loads": 9, "load_share": 0.16}], ids=["number", "blocks"]
)
def test_loads_have_a_limit_of_their_own_and_let_pass_what_loads_nothing(options: dict[str, Any]) -> None:
    decode = engine(40, **options)  # 3 blocks each
    for number in range(4):
        decode.add(f"hung{number}", prompt_of(number))
    decode.add("short", SHORT)
    decode.run()
    assert decode.tokens("short") == expected(decode, SHORT)
    assert list(decode.link.loads) == ["hung0", "hung1"]
    stats = decode.core.stats()
    assert (stats.num_loading, stats.num_waiting, stats.waiting_prompt_tokens) == (2, 2, 24)
    decode.link.finish("hung1")
    decode.run()
    assert list(decode.link.loads) == ["hung0", "hung2"], "those that wait to load keep their order"
    decode.core.abort(decode.link.plans[0][0].request_id)  # hung0, whose last write has yet to end
    decode.run()
    assert list(decode.link.loads) == ["hung0", "hung2"]
    for name in ("hung0", "hung2"):
        decode.link.finish(name)
    decode.run()
    decode.link.finish("hung3")
    decode.run()
    for number in (1, 2, 3):
        assert decode.tokens(f"hung{number}") == expected(decode, prompt_of(number))
    decode.assert_empty()


def test_one_load_may_always_begin() -> None:
    decode = engine(40, load_share=0.01)
    decode.add("big", PROMPT)
    decode.run()
    assert list(decode.link.loads) == ["big"]
    decode.link.finish("big")
    decode.run()
    assert decode.tokens("big") == expected(decode)
    decode.assert_empty()


def test_a_load_that_ends_beside_a_full_batch_keeps_its_blocks_and_gets_the_next_slot() -> None:
    decode = engine(40, max_num_seqs=1)
    decode.add("loads", PROMPT)
    decode.add("first", SHORT)
    decode.step()
    decode.add("second", SHORT[:2])
    decode.link.finish("loads")
    decode.step()
    assert len(decode.tokens("loads")) == 1, "the token that came with its KV is given out at once"
    stats = decode.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_loading) == (1, 2, 0)
    decode.run()
    assert list(decode.ends) == ["first", "loads", "second"]
    assert decode.tokens("loads") == expected(decode)
    decode.assert_empty()


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_what_waits_for_a_slot_with_its_blocks_can_be_ended_and_preempted(end: str) -> None:
    decode = engine(8, max_num_seqs=1, policy="priority")
    expect_short_outputs(decode.core)
    decode.link.threshold = 5
    decode.add("waits", prompt_of(2), priority=1)
    decode.step()
    decode.add("grows", PROMPT[:4], GREEDY.replace(max_tokens=28))
    decode.step()
    decode.link.finish("waits")
    decode.step()
    assert (decode.core.stats().num_waiting, decode.core.stats().num_loading) == (1, 0)
    if end == "abort":
        decode.core.abort(RequestId("waits"))
    else:
        decode.link.threshold = 1000
    decode.run()
    assert decode.ends["grows"].finish_reason is FinishReason.LENGTH
    assert decode.tokens("grows") == decode.runner.greedy(PROMPT[:4], 28)
    assert decode.core.stats().num_preemptions == (end == "preempt")
    tokens = expected(decode, prompt_of(2))
    assert decode.tokens("waits") == (tokens if end == "preempt" else tokens[:1])
    decode.assert_empty()


@pytest.mark.parametrize(("field", "value"), [("max_loads", 0), ("load_share", 0.0), ("load_share", 1.1)])
def test_limits_of_loads_are_checked(field: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_what_was_preempted_is_loaded_again_and_its_trace_tells() -> None:
    decode = engine(9, policy="priority", prefix_caching=False)
    decode.link.threshold = 5
    decode.add("loads", PROMPT, GREEDY.replace(max_tokens=12), priority=1)
    decode.step()
    decode.link.finish("loads")
    decode.link.source.run()  # lets go of it
    for _ in range(4):
        decode.step()
    before = len(decode.tokens("loads"))
    decode.add("grows", SHORT, GREEDY.replace(max_tokens=30))
    for _ in range(200):
        decode.step()
        for name in list(decode.link.loads):
            decode.link.finish(name)
            decode.link.source.run()
        if len(decode.ends) == 2:
            break
    assert decode.tokens("grows") == decode.runner.greedy(SHORT, 30)
    assert decode.tokens("loads") == decode.runner.greedy(PROMPT, 12)
    metrics = decode.ends["loads"].metrics
    assert metrics is not None
    assert metrics.num_preemptions > 0
    assert metrics.transferred_tokens == len(PROMPT)
    assert metrics.reloaded_tokens >= len(PROMPT) + before
    assert (metrics.computed_tokens, metrics.repeated_tokens) == (0, 0)
    decode.assert_empty()


def test_what_is_computed_again_after_a_preemption_is_told_too() -> None:
    decode = engine(9, policy="priority", prefix_caching=False)
    decode.link.threshold = 5
    decode.add("loads", PROMPT, GREEDY.replace(max_tokens=12), priority=1)
    decode.step()
    decode.link.finish("loads")
    decode.link.source.run()  # lets go of it
    for _ in range(4):
        decode.step()
    decode.link.threshold = 1000  # nothing is asked for any more
    decode.add("grows", SHORT, GREEDY.replace(max_tokens=30))
    decode.run()
    assert decode.tokens("loads") == decode.runner.greedy(PROMPT, 12)
    metrics = decode.ends["loads"].metrics
    assert metrics is not None
    assert (metrics.transferred_tokens, metrics.reloaded_tokens) == (len(PROMPT), 0)
    assert metrics.repeated_tokens >= len(PROMPT)
    decode.assert_empty()
