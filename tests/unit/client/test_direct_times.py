"""What a client in direct mode takes from the router, and tells it of when its tokens came."""

from __future__ import annotations

import pytest
from tests.support.scripted import MODEL

from baton.api.v1 import router_pb2, worker_pb2
from baton.client.direct import DirectAnswer
from baton.errors import InternalError
from baton.rpc.convert import sampling_to_pb
from baton.types import SamplingParams


def test_tokens_that_come_together_are_as_many_gaps() -> None:
    now = 10.0
    route = router_pb2.RouteResponse()
    route.direct.request.sampling.CopyFrom(sampling_to_pb(SamplingParams(n=2, max_tokens=9)))
    request = router_pb2.RouterGenerateRequest()
    request.sampling.n = 2
    answer = DirectAnswer(request, route, MODEL, now=lambda: now)
    for at, *counts in ((11.0, (0, 1)), (11.5, (0, 2), (1, 1)), (11.9, (0, 1), (0, 1), (1, 1))):
        now = at
        deltas = [worker_pb2.SequenceDelta(index=index, token_ids=[70] * count) for index, count in counts]
        answer.convert(worker_pb2.GenerateResponse(deltas=deltas))
    notice = answer.last_note(failed=False)
    assert notice.first_token_us == 1_000_000
    assert list(notice.itl_us) == pytest.approx([250_000, 250_000, 200_000, 200_000, 400_000], abs=1)


def test_more_sequences_than_were_asked_for_take_no_memory() -> None:
    route = router_pb2.RouteResponse()
    route.direct.request.sampling.n = 2**32 - 1
    with pytest.raises(InternalError, match="placed 4294967295 sequences for 1"):
        DirectAnswer(router_pb2.RouterGenerateRequest(), route, MODEL)
