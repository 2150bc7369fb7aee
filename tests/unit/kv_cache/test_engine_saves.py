"""The engine tells its connector of what it computed, and keeps the blocks until they are let go."""

from __future__ import annotations

import pytest
from tests.support.models.linked_engines import BLOCK, PROMPT, Engine, PrefillSide, expected

from baton.errors import InvalidRequestError
from baton.hashing import block_hashes, root_hash
from baton.types import FinishReason, RequestId, SamplingParams


def test_progress_is_told_at_admission_and_after_each_chunk_and_blocks_are_held() -> None:
    engine = Engine()
    engine.add("warm", PROMPT[:9], prefill_only=True)
    engine.run()
    assert [done for _, _, done in engine.prefill_side.progress[RequestId("warm")]] == [0, 8, 9]
    engine.add("a", PROMPT * 2, prefill_only=True)
    engine.run()
    progress = engine.prefill_side.progress[RequestId("a")]
    assert [done for _, _, done in progress] == [8, 16, 24, 28]
    assert len({blocks for blocks, _, _ in progress}) == 1
    assert engine.tokens("a") == expected(engine, PROMPT * 2)[:1]
    assert engine.ends["a"].metrics is not None
    stats = engine.core.stats()
    assert (stats.num_running, stats.blocks_active) == (0, 8)
    assert engine.core._bridge.pending
    with pytest.raises(InvalidRequestError):
        engine.add("a", prefill_only=True)
    engine.prefill_side.let_go.append(RequestId("a"))
    engine.run()
    assert engine.core.stats().blocks_active == 3
    assert engine.core.release(RequestId("warm"))
    assert not engine.core.release(RequestId("warm"))
    assert engine.core.stats().blocks_active == 0


def test_abort_of_a_held_request_gives_its_blocks_back() -> None:
    engine = Engine()
    engine.add("a", prefill_only=True)
    engine.run()
    assert engine.core.abort(RequestId("a"))
    assert engine.core.stats().blocks_active == 0


def test_abort_in_the_middle_of_a_prefill_asks_whether_blocks_are_still_wanted() -> None:
    engine = Engine()
    engine.add("a", PROMPT * 3, prefill_only=True)
    engine.step()
    assert engine.core.abort(RequestId("a"))
    assert engine.prefill_side.holding == {"a"}
    assert engine.core.stats().blocks_active == 11
    engine.prefill_side.let_go.append(RequestId("a"))
    engine.run()
    assert engine.ends["a"].finish_reason is FinishReason.ABORT
    engine.assert_empty()


def test_a_queue_that_waits_for_held_blocks_goes_on_when_they_are_let_go() -> None:
    engine = Engine(6)
    engine.add("a", PROMPT, prefill_only=True)
    engine.run()
    engine.add("b", PROMPT[::-1], prefill_only=True)
    engine.run()
    assert engine.core.stats().num_waiting == 1
    assert not engine.core.made_progress
    engine.prefill_side.let_go.append(RequestId("a"))
    engine.run()
    assert engine.tokens("b") == expected(engine, PROMPT[::-1])[:1]


class Follower(PrefillSide):
    """Wants to know of every request."""

    follows_all = True


def test_a_connector_that_follows_all_is_told_of_what_was_generated() -> None:
    engine = Engine(side=Follower())
    engine.add("a")
    engine.run()
    tokens = [*PROMPT, *engine.tokens("a")]
    told = engine.prefill_side.progress[RequestId("a")]
    assert [done for _, _, done in told] == [8, 14, len(tokens) - 1]
    assert list(told[-1][1]) == block_hashes(tokens, BLOCK, root_hash(engine.runner.fingerprint.content_key()))[:5]
    # Its blocks are kept until the connector has them, also if its client hangs up meanwhile.
    assert engine.core.stats().blocks_active == 6
    assert not engine.core.abort(RequestId("a"))
    assert engine.core.stats().blocks_active == 6
    engine.prefill_side.let_go.append(RequestId("a"))
    engine.assert_empty()


def test_each_of_several_sequences_is_told_of_by_its_own_name() -> None:
    engine = Engine(side=Follower())
    engine.add("a", sampling=SamplingParams(temperature=1.5, max_tokens=9, n=3, ignore_eos=True))
    engine.run()
    assert set(engine.prefill_side.progress) == {"a", "a#1", "a#2"}
    assert len({told[-1][1] for told in engine.prefill_side.progress.values()}) == 3
    engine.prefill_side.let_go = list(engine.prefill_side.holding)
    engine.assert_empty()


def test_a_request_id_may_come_again_while_its_blocks_are_saved() -> None:
    engine = Engine(side=Follower())
    engine.add("a")
    engine.run()
    engine.add("a")
    assert engine.core.stats().blocks_active == 0  # given back: what is saved of them now is fenced
    engine.run()
    engine.prefill_side.let_go.append(RequestId("a"))
    engine.assert_empty()


def test_aborted_requests_are_not_told_of_again() -> None:
    engine = Engine(side=Follower())
    engine.add("a")
    engine.step()
    engine.step()
    engine.core.abort(RequestId("a"))
    engine.run()
    assert [done for _, _, done in engine.prefill_side.progress[RequestId("a")]] == [8, 14]
    engine.prefill_side.let_go.append(RequestId("a"))
    engine.assert_empty()


def test_a_sequence_that_ends_while_one_of_its_name_is_saved_leaks_no_blocks() -> None:
    engine = Engine(side=Follower())
    two = SamplingParams(temperature=1.0, max_tokens=10, n=2, seed=1)
    for _ in range(2):  # the second time all blocks of the first are still being saved
        engine.add("a", sampling=two)
        engine.run()
    engine.prefill_side.let_go = [RequestId("a"), RequestId("a#1")]
    engine.assert_empty()
