"""A stream goes on where its tokens would have been drawn alike, and nowhere else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from baton.api.v1 import worker_pb2
from baton.engine.sampler import SAMPLER_VERSION
from baton.kv_transfer.connector.p2p.prefill_stream import Finished
from baton.worker.decode import _events
from baton_router.dispatch.attempt import Group, Sequence


def instance(number: int, sampler: str | None) -> Any:
    info = None if sampler is None else SimpleNamespace(sampler=sampler)
    return SimpleNamespace(identity=(f"decode-{number}", number), info=info)


INSTANCES = [instance(0, "race-1"), instance(1, "race-2"), instance(2, ""), instance(3, None), instance(4, "race-1")]


def test_a_stream_that_has_begun_goes_on_with_the_same_sampler_alone() -> None:
    sequence = Sequence(0)
    group = Group([sequence])
    failed = {INSTANCES[4].identity}
    group.record_sampler(INSTANCES[1])
    assert group.with_other_samplers(failed, INSTANCES) == failed  # it has no token yet: anybody may begin
    group.record_sampler(INSTANCES[0])
    sequence.token_ids.append(7)
    assert group.with_other_samplers(failed, INSTANCES) == {INSTANCES[1].identity, *failed}
    group.record_sampler(INSTANCES[2])  # does not say what it has; what the tokens are of stays
    assert group.with_other_samplers(set(), INSTANCES) == {INSTANCES[1].identity}


@pytest.mark.parametrize(("version", "kept"), [(SAMPLER_VERSION, True), ("", True), ("race-0", False)])
async def test_a_first_token_of_another_sampler_is_drawn_again(version: str, kept: bool) -> None:
    class Call:
        async def initial_metadata(self) -> None:
            return None

        async def __aiter__(self) -> AsyncIterator[worker_pb2.PrefillResponse]:
            result = worker_pb2.PrefillResult(first_token_id=5, prefix_hit_tokens=3, sampler=version)
            yield worker_pb2.PrefillResponse(result=result)

    events = [event async for event in _events(Call())]  # type: ignore[arg-type]
    (finished,) = [event for event in events if isinstance(event, Finished)]
    assert (finished.first_token is not None) == kept
    assert finished.prefix_hit_tokens == 3
