"""The engine loads what another one computed: tokens, blocks, and who computes what did not come."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.linked_engines import BLOCK, GREEDY, PROMPT, Engine, expected
from tests.support.preemption import expect_short_outputs

from baton.errors import InvalidRequestError
from baton.kv_cache.connector import LoadUpdate
from baton.types import FinishReason, PrefillPath, RequestId, SamplingParams, TokenLogprob


def test_tokens_after_a_hand_over_are_those_of_one_engine(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    decode.add("a")
    decode.run()
    assert decode.core.stats().num_loading == 1
    assert decode.core._bridge.pending
    assert not decode.core.made_progress
    decode.link.finish("a")
    decode.run()
    assert decode.tokens("a") == expected(decode)
    assert decode.runner.num_tokens == len(decode.tokens("a")) - 1
    metrics = decode.ends["a"].metrics
    assert metrics is not None
    assert (metrics.transferred_tokens, metrics.computed_tokens, metrics.cached_tokens) == (len(PROMPT), 0, 0)
    assert (metrics.transfer.path, metrics.transfer.pipe) == (PrefillPath.REMOTE, "memory")
    decode.assert_empty()
    prefill.assert_empty()


def test_loaded_blocks_are_found_by_the_next_request(pair: tuple[Engine, Engine]) -> None:
    _, decode = pair
    decode.add("a")
    decode.run()
    decode.link.finish("a")
    decode.run()
    decode.add("b", [*PROMPT, 13, 17, 19, 23])
    decode.run()
    request, num_local = decode.link.plans[-1]
    assert num_local == 12
    assert request.hashes[:3] == decode.link.plans[0][0].hashes
    decode.link.finish("b")
    decode.run()
    assert decode.tokens("b") == expected(decode, [*PROMPT, 13, 17, 19, 23])
    metrics = decode.ends["b"].metrics
    assert metrics is not None
    assert (metrics.cached_tokens, metrics.transferred_tokens, metrics.computed_tokens) == (12, 6, 0)


def test_short_prompts_are_computed_locally(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    decode.add("a", PROMPT[:3])
    decode.run()
    assert decode.tokens("a") == expected(decode, PROMPT[:3])
    assert prefill.runner.num_tokens == 0


@settings(max_examples=40, deadline=None)
@given(num_valid=st.integers(0, len(PROMPT)), first=st.booleans(), warm=st.booleans())
def test_what_did_not_arrive_is_computed(num_valid: int, first: bool, warm: bool) -> None:
    prefill = Engine()
    decode = Engine(source=prefill)
    if warm:
        decode.link.threshold = 1000
        decode.add("warm", PROMPT[:9])
        decode.run()
        decode.link.threshold = 4
    decode.add("a")
    decode.run()
    decode.link.finish("a", num_valid=num_valid, first=first, error="the line is bad")
    blocks = decode.arena.blocks
    start = max(num_valid, 8 if warm else 0)
    # What was not reported as valid may hold anything.
    for block_id in range(len(blocks)):
        held = decode.core._bridge.loading[RequestId("a")].block_ids
        if block_id in held and held.index(block_id) * BLOCK >= start:
            blocks[block_id] = 255
    decode.run()
    assert decode.tokens("a") == expected(decode)
    decode.assert_empty()
    prefill.assert_empty()


def test_first_token_that_ends_the_request(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (token,) = expected(decode)[:1]
    decode.add("a", sampling=GREEDY.replace(stop_token_ids=(token,), logprobs=1))
    decode.add("b", sampling=GREEDY.replace(max_tokens=1))
    decode.run()
    decode.link.finish("a")
    decode.link.finish("b")
    decode.run()
    assert (decode.ends["a"].finish_reason, decode.ends["a"].stop_token_id) == (FinishReason.STOP, token)
    assert decode.ends["a"].logprobs is not None
    assert decode.ends["a"].logprobs[0].token_id == token
    assert decode.ends["b"].finish_reason is FinishReason.LENGTH
    assert decode.ends["b"].logprobs is None
    assert decode.runner.num_tokens == 0
    decode.assert_empty()
    prefill.assert_empty()


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"n": 2}, {"max_tokens": 1}])
def test_first_token_of_a_load_is_given_out_before_the_next_is_computed(
    pair: tuple[Engine, Engine], fields: dict[str, int], *, busy: bool
) -> None:
    _, decode = pair
    if busy:
        decode.link.threshold = 1000
        decode.add("busy", sampling=GREEDY.replace(max_tokens=40, ignore_eos=True))
        decode.step()
        decode.link.threshold = 4
    decode.add("a", [8, *PROMPT], GREEDY.replace(**fields))
    decode.step()
    decode.link.finish("a")
    computed, at = decode.runner.num_tokens, len(decode.outputs)
    decode.step()
    (output,) = decode.outputs[at:]
    first = expected(decode, [8, *PROMPT])[0]
    assert (output.request_id, output.token_ids, decode.runner.num_tokens) == ("a", [first], computed)
    assert output.metrics is not None
    assert output.metrics.ttft_us > 0
    assert [x.token_id for x in output.logprobs or []] == ([first] if "logprobs" in fields else [])
    assert output.finish_reason == (FinishReason.LENGTH if "max_tokens" in fields else None)
    if busy or "max_tokens" not in fields:
        assert decode.core.made_progress  # the next step comes at once
        decode.step()
        assert decode.runner.num_tokens > computed
    decode.run()
    for index in range(fields.get("n", 1)):
        found = [t for o in decode.outputs if (o.request_id, o.index) == ("a", index) for t in o.token_ids]
        assert found == expected(decode, [8, *PROMPT])[: fields.get("max_tokens", 10)]


def test_nobody_is_told_of_kv_that_led_to_bad_logits(pair: tuple[Engine, Engine]) -> None:
    prefill, _ = pair
    prefill.runner.poisoned = frozenset({PROMPT[7]})
    prefill.add("a", PROMPT[:8], prefill_only=True)
    prefill.run()
    assert prefill.ends["a"].finish_reason is FinishReason.ERROR
    assert [done for _, _, done in prefill.prefill_side.progress[RequestId("a")]] == [0]
    assert prefill.core.snapshot() == []


def test_first_token_outside_the_vocabulary_is_sampled_anew(pair: tuple[Engine, Engine]) -> None:
    _, decode = pair
    decode.add("a")
    decode.run()
    decode.link.finish("a")
    update = decode.link.updates.pop()
    decode.link.updates.append(LoadUpdate(update.request_id, update.num_valid_tokens, TokenLogprob(10_000, 0.0, 1)))
    decode.run()
    assert decode.tokens("a") == expected(decode)


def test_sampling_is_the_same_through_a_hand_over_and_a_resumed_request(pair: tuple[Engine, Engine]) -> None:
    _, decode = pair
    sampling = SamplingParams(max_tokens=12, temperature=1.2, repetition_penalty=1.2)
    alone = Engine()
    alone.add("a", sampling=sampling)
    alone.run()
    decode.add("a", sampling=sampling)
    decode.run()
    decode.link.finish("a")
    decode.run()
    assert decode.tokens("a") == alone.tokens("a")
    again = Engine(source=Engine())
    again.add("a", sampling=sampling, output_token_ids=alone.tokens("a")[:5])
    again.run()
    assert again.link.plans[0][0].num_output_tokens == 5
    again.link.finish("a")
    again.run()
    assert again.tokens("a") == alone.tokens("a")[5:]


def test_n_sequences_share_a_loaded_prompt(pair: tuple[Engine, Engine]) -> None:
    _, decode = pair
    decode.add("a", sampling=SamplingParams(max_tokens=4, seed=1, n=3))
    decode.run()
    assert decode.core.stats().num_waiting == 0
    decode.link.finish("a")
    decode.run()
    assert {output.index for output in decode.outputs if output.finish_reason} == {0, 1, 2}
    assert len(decode.link.plans) == 1
    decode.assert_empty()


def test_abort_while_loading_keeps_the_blocks_until_its_last_write(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    decode.add("a")
    decode.run()
    held = decode.core.stats().blocks_active
    assert held == 4
    assert decode.core.abort(RequestId("a"))
    decode.run()
    assert decode.ends["a"].finish_reason is FinishReason.ABORT
    assert decode.link.cancelled == ["a"]
    assert decode.core.stats().blocks_active == held
    with pytest.raises(InvalidRequestError):
        decode.add("a")
    decode.link.finish("a")
    decode.run()
    assert decode.tokens("a") == []
    decode.assert_empty()
    prefill.assert_empty()


def test_prompt_logprobs_are_computed_locally(pair: tuple[Engine, Engine]) -> None:
    _, decode = pair
    decode.add("a", sampling=GREEDY.replace(prompt_logprobs=0))
    decode.run()
    assert decode.link.plans == []
    assert decode.tokens("a") == expected(decode)


def test_what_loads_is_not_preempted() -> None:
    decode = Engine(12, source=Engine())
    expect_short_outputs(decode.core)
    decode.add("a", PROMPT * 2)
    decode.run()
    decode.link.threshold = 1000
    decode.add("b", PROMPT[:8], GREEDY.replace(max_tokens=20))
    decode.run()
    stats = decode.core.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_loading, stats.num_waiting) == (1, 1)
    decode.link.finish("a")
    decode.run()
    assert decode.tokens("a") == expected(decode, PROMPT * 2)
    assert decode.tokens("b") == decode.runner.greedy(PROMPT[:8], 20)
    decode.assert_empty()
